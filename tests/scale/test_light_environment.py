"""A real environment without torch: the wheel with its own dependencies, and a model folder made elsewhere."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from browsers import chromium, expect, opened
from small import pictures
from test_wheel import wheel  # noqa: F401  a fixture

MOST = 450_000_000  # bytes of the whole environment, pip included
ENVIRONMENT = {
    k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "DIPTYCH_BACKEND")
}


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


def test_it_indexes_and_searches_with_a_folder_made_elsewhere(
    environment: Path,
    wheel: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    pictures(tmp_path / "photos", 4)
    subprocess.run(
        [sys.executable, "-m", "diptych", "export", "runtime", "lite0+minilm", str(tmp_path / "lite0")], check=True
    )  # fmt: skip
    shutil.move(tmp_path / "lite0", tmp_path / "copied")
    cache = {**ENVIRONMENT, "DIPTYCH_CACHE": str(tmp_path / "cache")}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [str(environment / "bin" / "diptych"), *words]
        return subprocess.run(command, cwd=tmp_path, env=cache, capture_output=True, text=True, check=False)

    made = run("index", "copied", "photos", "--index", "i")
    assert made.returncode == 0, made.stderr
    found = run("search", "i", '"a red square" - "dog"', "--json")
    assert found.returncode == 0, found.stderr
    answer = json.loads(found.stdout)
    assert (answer["backend"], len(answer["hits"])) == ("onnx", 4)
    for words, wanted in (
        (("train", "photos", "--data", "photos", "--output_dir", "run"), "diptych[train]"),
        (("search", "photos", "dog"), "--model FOLDER"),
        (("serve", "i"), "diptych[serve]"),
    ):
        refused = run(*words)
        assert refused.returncode == 2
        assert wanted in refused.stderr
        assert len(refused.stderr.splitlines()) == 1
    check_page(environment, wheel, tmp_path, cache)


def check_page(environment: Path, wheel: Path, folder: Path, variables: dict[str, str]) -> None:  # noqa: F811
    """With the extra for it, the service answers in a browser."""
    pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, f"{wheel}[serve]"], check=True)
    command = [str(environment / "bin" / "diptych"), "serve", "i", "--port", "0"]
    with subprocess.Popen(command, cwd=folder, env=variables, stdout=subprocess.PIPE, text=True) as service:
        try:
            assert service.stdout is not None
            found = re.search(r"http://[\w.:]+", service.stdout.readline())
            assert found is not None
            address = found[0]
            with urllib.request.urlopen(f"{address}/api/about", timeout=30) as answer:
                assert json.load(answer)["backend"] == "onnx"
            with chromium() as browser:
                for page in opened(browser, address):
                    page.fill("#query", "a red square")
                    page.keyboard.press("Enter")
                    expect(page.locator("#grid .card")).to_have_count(4)
        finally:
            service.terminate()
