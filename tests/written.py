"""Small data sets written on the spot, shared by the tests of readers and of the data check."""

import io
import struct
import tarfile
import zlib
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


def one_bit_png(side: int) -> bytes:
    """A whole black PNG of one bit a pixel: a few bytes as a file, a byte a pixel once Pillow decodes it."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0))
    rows = chunk(b"IDAT", zlib.compress(bytes((1 + (side + 7) // 8) * side), 9))
    return b"\x89PNG\r\n\x1a\n" + head + rows + chunk(b"IEND", b"")


def icon(png: bytes) -> bytes:
    """An ICO that claims 256 × 256 pixels and holds a PNG of any size."""
    return struct.pack("<HHH", 0, 1, 1) + struct.pack("<BBBBHHII", 0, 0, 0, 0, 1, 32, len(png), 22) + png


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
