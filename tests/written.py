"""Small data sets written on the spot, shared by the tests of readers and of the data check."""

import io
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image


def picture(number: int, side: int = 24) -> Image.Image:
    rng = np.random.default_rng(number)
    return Image.fromarray(rng.integers(0, 255, (side, side, 3), dtype=np.uint8))


def encoded(number: int, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    picture(number).save(buffer, kind)
    return buffer.getvalue()


def save_pictures(folder: Path, names: list[str]) -> None:
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(encoded(number))


def save_part(
    folder: Path,
    name: str,
    images: int,
    fold: int = 1,
    shape: tuple[int, ...] = (3, 4),
    ids: bool = True,
    first: int = 0,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    array = np.random.default_rng(first).standard_normal((images, *shape)).astype(np.float32)
    np.save(folder / f"{name}_ims.npy", np.repeat(array, fold, axis=0))
    texts = [f"{name} text {k} of {i}" for i in range(images) for k in range(5)]
    (folder / f"{name}_caps.txt").write_text("\n".join(texts) + "\n", "utf-8")
    if ids:
        lines = [str(first + i) for i in range(images) for _ in range(fold)]
        (folder / f"{name}_ids.txt").write_text("\n".join(lines) + "\n")


def add_member(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))
