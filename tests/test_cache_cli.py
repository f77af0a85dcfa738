"""diptych cache: what is in the folder, and what is removed of it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from diptych.cache.contents import contents, select
from diptych.cache.feature_pack import FeaturePack
from diptych.cli import main
from diptych.errors import SettingsError

DAY = 86_400


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["cache", *arguments])


def fill(folder: Path, name: str, title: str, files: int, monkeypatch: pytest.MonkeyPatch) -> FeaturePack:
    """A pack with 10 pictures of 800 bytes in each file; the first was used first."""
    monkeypatch.setattr("diptych.cache.feature_pack.FILE_BYTES", 8000)
    pack = FeaturePack(folder / "images" / name, title)
    for n in range(files):
        pack.append([f"{n}/{k}" for k in range(10)], np.full((10, 4, 100), n))
        at = time.time() - DAY * 10 * (files - n)
        os.utime(pack.folder / f"rows-{n:06d}.used", (at, at))
    return pack


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


def test_info_of_an_empty_or_absent_folder(folder: Path) -> None:
    assert "total 0 bytes" in run("info").output
    folder.rmdir()
    assert "total 0 bytes" in run("info").output
    assert "removed 0 bytes" in run("clear").output


def test_info_has_a_line_for_each_backbone_and_kind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(folder, "aaaa", "Lite0 at 224 pixels", 3, monkeypatch)
    fill(folder, "bbbb", "resnet at 224 pixels", 1, monkeypatch)
    np.save(folder / "texts-1.npy", np.zeros(1000))
    np.save(folder / "teacher-images-1.npy", np.zeros(1000))
    np.save(folder / "images-1.npy", np.zeros(1000))
    np.save(folder / "mine.npy", np.zeros(1000))  # of somebody else
    (folder / "runtimes" / "cccc" / "runtime").mkdir(parents=True)
    (folder / "runtimes" / "cccc" / "runtime" / "text.onnx").write_bytes(bytes(7000))
    said = run("info").output
    assert str(folder) in said
    (line,) = [line for line in said.splitlines() if "aaaa" in line]
    assert "30 pictures" in line
    assert "24.0 kB" in line
    assert "Lite0 at 224 pixels, 4×100" in line
    assert "text states" in said
    assert "image teacher" in said
    assert "of an earlier version, nothing reads it" in said
    assert "float16" in said
    assert "mine" not in said
    assert any(all(word in line for word in ("runtime", "7.0 kB", "cccc")) for line in said.splitlines())
    assert "removed 7.0 kB" in run("clear", "--backbone", "cccc").output
    assert not any((folder / "runtimes").iterdir())


def test_clear_by_age_size_backbone_and_version(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(folder, "aaaa", "Lite0", 3, monkeypatch)  # used 30, 20 and 10 days ago
    fill(folder, "bbbb", "resnet", 2, monkeypatch)
    np.save(folder / "images-1.npy", np.zeros(1000))
    (folder / ".images-1.npy.log").write_text("{}")

    said = run("clear", "--older_than", "25d", "--dry_run")
    assert "would remove 8.0 kB" in said.output
    assert len(contents()) == 6
    assert "removed 8.0 kB" in run("clear", "--older_than", "25d").output
    pack = FeaturePack(folder / "images" / "aaaa")
    assert len(pack) == 20
    assert (pack.find(["0/3", "1/3", "2/3"]) >= 0).tolist() == [False, True, True]
    out = np.empty((1, 4, 100), np.float16)
    pack.read(pack.find(["2/3"]), out)
    assert (out == 2).all()

    assert "removed 8.1 kB" in run("clear", "--old").output
    assert not list(folder.glob("*images-1*"))

    assert "removed 16.0 kB" in run("clear", "--keep", "17kB").output
    left = {entry.name: entry.items for entry in contents()}
    assert left == {"aaaa": 10, "bbbb": 10}

    assert "removed 8.0 kB" in run("clear", "--backbone", "Lite").output
    assert not (folder / "images" / "aaaa").exists()
    wrong = run("clear", "--backbone", "vit")
    assert wrong.exit_code == 2
    assert "'vit'" in wrong.output
    assert "bbbb (resnet, 4×100)" in wrong.output
    assert "removed 8.0 kB" in run("clear").output
    assert not contents()


def test_what_another_process_reads_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = fill(folder, "aaaa", "Lite0", 1, monkeypatch)
    pack.hold()
    said = run("clear").output
    assert "removed 0 bytes" in said
    assert "left 8.0 kB that another process is reading" in said
    assert len(FeaturePack(pack.folder)) == 10


def test_a_damaged_pack_is_listed_and_cleared(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = fill(folder, "aaaa", "Lite0", 1, monkeypatch)
    (pack.folder / "pack.json").write_text("{")
    assert "unreadable" in run("info").output
    run("clear")
    assert not pack.folder.exists()


@pytest.mark.parametrize(("wish", "value"), [("older_than", "soon"), ("keep", "much"), ("older_than", "-3d")])
def test_an_age_or_size_that_is_none(wish: str, value: str) -> None:
    with pytest.raises(SettingsError):
        select([], **{wish: value})
