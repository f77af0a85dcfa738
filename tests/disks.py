"""Small disks for tests, full or read-only."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(place: Path, megabytes: int = 2) -> Iterator[Path]:
    """A disk of that size in a folder, where this machine lets us make one."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting a small disk needs root")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(disk: Path, leave: int = 0) -> Path:
    """A file that leaves so many bytes."""
    status = os.statvfs(disk)
    ballast = disk / "ballast"
    ballast.write_bytes(b"x" * (status.f_bavail * status.f_bsize - leave))
    return ballast


def make_read_only(disk: Path) -> None:
    """From now on nothing on the disk can be written."""
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)


def grow(disk: Path, megabytes: int = 100) -> None:
    """Make room without taking anything away."""
    subprocess.run(["mount", "-o", f"remount,size={megabytes}m", str(disk)], check=True)
