"""What is kept beside this file: archives of folders, and the answers that they gave on which machine."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import platform
import tarfile
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
EXPECTED = HERE / "expected.json"
LIBRARIES = ("torch", "numpy", "transformers", "pillow")
ATOL = 1e-6  # of numbers that need not be equal


def pack(name: str, *folders: Path) -> None:
    """Keep folders in the archive ``name``, the same bytes for the same content."""

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        info.uid = info.gid = info.mtime = 0
        info.uname = info.gname = ""
        return None if info.name.endswith((".lock", "-shm")) else info

    with tarfile.open(HERE / f"{name}.tar.xz", "w:xz") as archive:
        for folder in folders:
            archive.add(folder, folder.name, filter=plain)


def unpack(name: str, folder: Path) -> None:
    """Put the folders of an archive into ``folder``."""
    with tarfile.open(HERE / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")


def machine() -> dict[str, str]:
    """What the last bit of a float depends on."""
    cpu = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").split("\n\n")[0].splitlines()
        told = dict(line.replace("\t", "").split(":", 1) for line in lines if ":" in line)
        cpu = " ".join(told.get(name, "?").strip() for name in ("vendor_id", "cpu family", "model"))
        cpu += f" {hashlib.sha256(told.get('flags', '').encode()).hexdigest()[:12]}"
    except OSError:
        pass
    versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
    return {**versions, "cpu": cpu, "kernels": torch.backends.cpu.get_cpu_capability()}


def read_expected() -> dict[str, Any]:
    """The answers that were recorded."""
    found: dict[str, Any] = json.loads(EXPECTED.read_text("utf-8"))
    return found


def write_expected(content: dict[str, Any]) -> None:
    """Record answers: a line for each, so that a change of one shows as one line."""
    parts = []
    for name, value in content.items():
        lines = ",\n".join(
            f"  {json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in value.items()
        )
        parts.append(f" {json.dumps(name)}: {{\n{lines}\n }}")
    EXPECTED.write_text("{\n" + ",\n".join(parts) + "\n}\n", "utf-8")


def differences(found: Any, expected: Any, *, rtol: float = 0.0, where: str = "") -> list[str]:
    """Where two answers differ; with ``rtol``, floats may differ by this share."""
    if isinstance(found, dict) and isinstance(expected, dict):
        names = [*expected, *(name for name in found if name not in expected)]
        pairs = [(f"{where}.{name}", found.get(name), expected.get(name)) for name in names]
    elif isinstance(found, list | tuple) and isinstance(expected, list) and len(found) == len(expected):
        pairs = [(f"{where}[{n}]", a, b) for n, (a, b) in enumerate(zip(found, expected, strict=True))]
    else:
        close = rtol > 0 and isinstance(found, float) and isinstance(expected, float)
        same = math.isclose(found, expected, rel_tol=rtol, abs_tol=ATOL) if close else found == expected
        return [] if same else [f"{where.lstrip('.')} is {found!r:.200}, was {expected!r:.200}"]
    return [line for place, a, b in pairs for line in differences(a, b, rtol=rtol, where=place)]
