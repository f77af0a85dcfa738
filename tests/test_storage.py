"""Writing: replaced whole or not at all, and every failure is one sentence."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from diptych import storage
from diptych.entries import Entries
from diptych.errors import DataError, StorageError
from diptych.storage import recover_folder, replace_folder, storing, write_text


def fill(folder: Path, text: str) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "file").write_text(text)


def content(folder: Path) -> str:
    return (folder / "sub" / "file").read_text()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    with replace_folder(tmp_path / "deep" / "target") as new:
        fill(new, "first")
    return tmp_path / "deep" / "target"


def test_a_folder_is_replaced_whole(target: Path) -> None:
    (target / "left behind").touch()
    with replace_folder(target) as new:
        fill(new, "second")
        assert content(target) == "first"
    assert content(target) == "second"
    assert [p.name for p in target.parent.iterdir()] == ["target"]
    assert [p.name for p in target.iterdir()] == ["sub"]


@pytest.mark.parametrize("error", [ValueError("a mistake"), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_folder(target: Path, error: BaseException) -> None:
    with pytest.raises(type(error)), replace_folder(target) as new:  # noqa: PT012  the failure is in the block
        (new / "half").touch()
        raise error
    assert content(target) == "first"
    assert [p.name for p in target.parent.iterdir()] == ["target"]


def test_a_renaming_that_fails_puts_the_old_folder_back(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def fails(self: Path, to: Path) -> Path:
        if self.name.startswith(".new-"):
            raise OSError(errno.EIO, "broken disk")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(StorageError, match="Input/output"), replace_folder(target) as new:
        fill(new, "second")
    assert content(target) == "first"


def test_a_crash_between_the_two_renamings(target: Path, tmp_path: Path) -> None:
    # dies as under kill -9, right before the new folder takes its place
    script = f"""
import os
from pathlib import Path
from diptych.storage import replace_folder
Path.rename = lambda self, to: os._exit(9) if self.name[0] == "." else os.rename(self, to)
with replace_folder(Path({str(target)!r})) as new:
    (new / "file").touch()
"""
    assert subprocess.run([sys.executable, "-c", script]).returncode == 9
    assert not target.exists()
    recover_folder(target)
    assert content(target) == "first"
    recover_folder(target)  # a second time changes nothing
    recover_folder(tmp_path / "never there")
    with replace_folder(target) as new:  # what the crash left behind is no obstacle
        fill(new, "third")
    assert content(target) == "third"
    assert [p.name for p in target.parent.iterdir()] == ["target"]


def test_the_only_copy_outlives_a_second_failure(target: Path) -> None:
    target.rename(target.with_name(".old-target"))
    with pytest.raises(ValueError, match="mistake"), replace_folder(target) as new:  # noqa: PT012
        fill(new, "half")
        raise ValueError("a mistake")
    assert content(target) == "first"


def test_text_is_written_in_one_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "deep" / "file.json"
    write_text(file, "naïve")
    assert file.read_text("utf-8") == "naïve"

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"file\.json"):
        write_text(file, "other")
    assert file.read_text("utf-8") == "naïve"
    assert [p.name for p in file.parent.iterdir()] == ["file.json"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "full"), "the disk is full"),
        (OSError(errno.EDQUOT, "quota"), "the disk is full"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), "the disk is full"),
        (OSError(errno.EROFS, "read only"), "Read-only file system"),
        (SafetensorError("I/O error: Permission denied (os error 13)"), "Permission denied"),
        (FileExistsError(errno.EEXIST, "there"), "in the way"),
        (OSError("obtaining file position failed"), "check the disk"),  # numpy's, of EIO
    ],
)
def test_failures_are_one_sentence(error: Exception, said: str) -> None:
    with (
        pytest.raises(StorageError, match=f"^(?=.*somewhere)[^\n]*{said}[^\n]*$"),
        storing(Path("somewhere")),
    ):
        raise error


@pytest.mark.parametrize(
    "error", [OSError(errno.EXDEV, "broken"), SafetensorError("header too large"), KeyError("x")]
)
def test_other_errors_pass_as_they_are(error: Exception) -> None:
    with pytest.raises(type(error)), storing(Path("somewhere")):
        raise error


def test_a_file_where_a_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StorageError), replace_folder(tmp_path / "file") as new:
        fill(new, "x")
    with pytest.raises(StorageError, match="file/sub"), replace_folder(tmp_path / "file" / "sub") as new:
        fill(new, "x")
    with pytest.raises(StorageError):
        write_text(tmp_path, "x")
    assert (tmp_path / "file").read_text() == "mine"


# ---------------------------------------------------------------------- entries of a folder from a stranger

ENTRIES = Entries(re.compile(r"rows-[0-9]+"), DataError, "copy it again.")


@pytest.mark.parametrize(
    "name", ["", "..", "../rows-1", "/rows-1", "rows-1/", "rows-1\n", "Rows-1", b"rows-1", None]
)
def test_a_name_of_no_entry_is_refused(name: object, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=str(tmp_path)):
        ENTRIES.path(tmp_path, name)
    assert ENTRIES.path(tmp_path, "rows-1") == tmp_path / "rows-1"


@pytest.mark.parametrize(
    "flags", [os.O_RDONLY, os.O_RDWR | os.O_CREAT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC]
)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe", "folder"])
def test_only_plain_files_are_opened(
    kind: str, late: bool, flags: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``late``: it came after the check."""
    path, outside = tmp_path / "rows-1", tmp_path / "outside"
    if kind != "dangling link":
        outside.write_text("mine")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(outside)
    if late:
        monkeypatch.setattr(Entries, "check", lambda self, path: path)
    with pytest.raises(DataError, match="rows-1"):
        ENTRIES.open(path, flags)
    assert outside.exists() == (kind != "dangling link")
    assert not outside.exists() or outside.read_text() == "mine"


@pytest.mark.parametrize("able", [True, False])
def test_plain_files_are_opened_with_or_without_the_calls(
    able: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    if not able:
        monkeypatch.setattr(os, "supports_dir_fd", set())
    path = ENTRIES.path(tmp_path / "link", "rows-1")
    with pytest.raises(FileNotFoundError):
        ENTRIES.open(path)
    with os.fdopen(ENTRIES.open(path, os.O_WRONLY | os.O_CREAT), "wb") as file:
        file.write(b"rows")
    with os.fdopen(ENTRIES.open(path), "rb") as file:
        assert file.read() == b"rows"
    (tmp_path / "real" / "rows-2").symlink_to(path)
    with pytest.raises(DataError, match="rows-2"):
        ENTRIES.open(tmp_path / "link" / "rows-2")


def test_a_small_file_is_durable_under_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(storage, "sync", synced.append)
    storage.write_bytes(tmp_path / "run.json", b"{}")
    assert synced[-1] == tmp_path


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_failing_disk_is_one_sentence(number: int, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="/file "), storage.storing(tmp_path / "file"):
        raise OSError(number, "failing")
