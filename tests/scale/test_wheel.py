"""The package as people get it: a wheel, installed outside the checkout, in an environment of its own."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import httpx2 as httpx
import pytest
from small import pictures

ROOT = Path(__file__).parent.parent.parent
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [
        sys.executable,
        "-m",
        "build",
        "--outdir",
        str(folder),
        str(source),
    ]  # archive of sources → wheel
    subprocess.run(build, check=True, capture_output=True)
    (made,) = folder.glob("diptych-*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that holds the wheel; the dependencies are those of this environment, its own package is not."""
    place = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    python = place / "bin" / "python"
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(subprocess.check_output([python, "-c", ask], text=True).strip())
    # files *.pth in a folder that a .pth file names are not read: the editable package stays outside
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)], check=True)
    return place


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("diptych/")}
    source = ROOT / "src"
    kept = {
        str(path.relative_to(source))
        for path in (source / "diptych").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert held == kept
    assert {Path(name).suffix for name in held} >= {".py", ".html", ".css", ".js", ".svg"}


def test_it_searches_and_serves_from_elsewhere(installed: Path, tmp_path: Path) -> None:
    pictures(tmp_path / "photos", 3)
    command = installed / "bin" / "diptych"
    where = subprocess.check_output(
        [installed / "bin" / "python", "-c", "import diptych; print(diptych.__file__)"],
        cwd=tmp_path, env=ENVIRONMENT, text=True,
    )  # fmt: skip
    assert str(installed) in where
    found = subprocess.run(
        [command, "search", "photos", "a red square", "--paths"], cwd=tmp_path, env=ENVIRONMENT,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert len(found.stdout.splitlines()) == 3
    with subprocess.Popen(
        [command, "serve", "photos.index", "--port", "0"], cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE,
        text=True,
    ) as service:  # fmt: skip
        assert service.stdout is not None
        try:
            address = re.search(r"http://[\d.:]+", service.stdout.readline())
            assert address is not None
            assert "<html" in httpx.get(address.group() + "/").text
        finally:
            service.send_signal(signal.SIGINT)
            service.wait(30)
