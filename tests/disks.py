"""A real file system of a few hundred kilobytes, to be filled and made read-only."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class Disk:
    """A mounted tmpfs."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self) -> None:
        """Leave not one free byte."""
        (self.path / "fill").write_bytes(b"x" * shutil.disk_usage(self.path).free)

    def clear(self) -> None:
        """Take away what ``fill`` wrote."""
        (self.path / "fill").unlink()

    def grow(self) -> None:
        """Make room without taking anything away."""
        subprocess.run(["mount", "-o", "remount,size=100m", str(self.path)], check=True, capture_output=True)

    def read_only(self) -> None:
        """Refuse every write from now on, also to root."""
        subprocess.run(["mount", "-o", "remount,ro", str(self.path)], check=True, capture_output=True)


@contextmanager
def small_disk(path: Path, kilobytes: int) -> Iterator[Disk]:
    """A disk of its own at a path; skips where one may not be mounted."""
    path.mkdir()
    options = f"size={kilobytes}k,mode=0777"
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        yield Disk(path)
    finally:
        subprocess.run(["umount", str(path)], check=True, capture_output=True)
