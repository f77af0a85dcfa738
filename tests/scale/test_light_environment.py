"""A real environment without torch: the wheel with its own dependencies, and a model folder made elsewhere."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
from browsers import chromium, expect, opened
from small import WORDS, pictures
from test_wheel import wheel  # noqa: F401  a fixture

MOST = 450_000_000  # bytes of the whole environment, pip included
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """The wheel and what it depends on, in the versions that are installed here."""
    place = tmp_path_factory.mktemp("light")
    known = place / "known.txt"
    here = {one.name.lower(): one.version for one in importlib.metadata.distributions() if one.name}
    known.write_text("\n".join(f"{name}=={version}" for name, version in here.items() if name != "diptych"))
    subprocess.run([sys.executable, "-m", "venv", str(place / "venv")], check=True)
    pip = [str(place / "venv" / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "--constraint", str(known), str(wheel)], check=True)
    return place / "venv"


def test_it_is_small_and_has_no_torch(environment: Path) -> None:
    listed = subprocess.check_output([environment / "bin" / "python", "-m", "pip", "list"], text=True)
    names = {line.split()[0].lower() for line in listed.splitlines()[2:]}
    assert "onnxruntime" in names
    assert not names & {"torch", "transformers", "accelerate", "onnx"}
    assert size(environment) <= MOST


class Light:
    """A folder of photos beside a model folder that was made elsewhere, and the commands of the environment."""

    def __init__(self, environment: Path, folder: Path) -> None:
        self.programs, self.folder = environment / "bin", folder
        self.variables = {**ENVIRONMENT, "DIPTYCH_CACHE": str(folder / "cache")}

    def __call__(self, *words: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [str(self.programs / "diptych"), *words], cwd=self.folder, env=self.variables, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        assert done.returncode == status, done.stdout + done.stderr
        return done

    def found(self, *words: str) -> list[str]:
        answer = json.loads(self("search", *words, "--json").stdout)
        assert answer["backend"] == "onnx"
        return [hit["id"] for hit in answer["hits"]]

    def refused(self, *words: str) -> str:
        *_, said = self(*words, status=2).stderr.splitlines()
        assert said.startswith("error: ")
        return said

    @contextmanager
    def running(self, *words: str) -> Iterator[tuple[str, IO[str]]]:
        """A command that goes on: the first line it says, and where it says the next ones."""
        command = [str(self.programs / "diptych"), *words]
        with subprocess.Popen(
            command, cwd=self.folder, env=self.variables, stdout=subprocess.PIPE, text=True
        ) as process:
            try:
                assert process.stdout is not None
                yield process.stdout.readline(), process.stdout
            finally:
                process.terminate()


@pytest.fixture(scope="module")
def light(environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Light:
    folder = tmp_path_factory.mktemp("photos")
    drawn = pictures(folder / "photos", 4)
    table = [f"{file.name},{WORDS[9 + n]},{2010 + n}" for n, file in enumerate(sorted(drawn))]
    (folder / "photos" / "captions.csv").write_text("image,text,year\n" + "\n".join(table) + "\n", "utf-8")
    made = [sys.executable, "-m", "diptych", "export", "runtime", "lite0+minilm", str(folder / "lite0")]
    subprocess.run(made, check=True)
    shutil.move(folder / "lite0", folder / "copied")
    light = Light(environment, folder)
    light("index", "copied", "photos", "--index", "i")
    return light


def test_it_indexes_and_searches_with_a_folder_made_elsewhere(light: Light) -> None:
    names = {file.name for file in (light.folder / "photos").glob("*.png")}
    first = sorted(names)[0]
    assert set(light.found("i", "a red square")) == names
    assert len(light.found("i", "a red square", "--filter", "year > 2011")) == 2
    assert len(light.found("i", f'"2:red" + "square" - "dog" + ./photos/{first}')) == 4
    assert light.found("i", f"./photos/{first}")[0] == first
    assert light.found("i", WORDS[9], "--hybrid")[0] == first
    assert light.found("i", "--like", first, "a red square")[0] != first
    assert "4 unchanged" in light("index", "copied", "photos", "--index", "i").stdout


def test_what_is_missing_is_said_and_brought_by_the_command_that_is_named(light: Light) -> None:
    assert "diptych[train]" in light.refused("train", "photos", "--data", "photos", "--output_dir", "run")
    assert "--model FOLDER" in light.refused("search", "photos", "dog")
    for words in (("serve", "i"), ("embed", "copied", "photos", "vectors")):
        named = re.search(r"pip install 'diptych\[\w+\]'", light.refused(*words))
        assert named is not None
        command = [str(light.programs / "python"), "-m", *shlex.split(named[0])]
        subprocess.run([*command, "--quiet"], check=True, cwd=light.folder)
    assert "4 images, 4 texts" in light("embed", "copied", "photos", "vectors").stdout
    light("index", "load", "vectors", "--index", "loaded")
    assert len(light.found("loaded", "a red square", "--model", "copied")) == 4
    check_page(light)
    pictures(light.folder / "watched", 2)
    with light.running("watch", "w", "watched", "--model", "copied", "--interval", "0.2") as (first, lines):
        assert "2 images" in first
        shutil.copy(next((light.folder / "photos").glob("*.png")), light.folder / "watched" / "new.png")
        assert "3 images" in lines.readline()


def check_page(light: Light) -> None:
    """The service answers in a browser."""
    with light.running("serve", "i", "--port", "0") as (first, _):
        found = re.search(r"http://[\w.:]+", first)
        assert found is not None
        address = found[0]
        with urllib.request.urlopen(f"{address}/api/about", timeout=30) as answer:
            assert json.load(answer)["backend"] == "onnx"
        with chromium() as browser:
            for page in opened(browser, address):
                page.fill("#query", "a red square")
                page.keyboard.press("Enter")
                expect(page.locator("#grid .card")).to_have_count(4)
