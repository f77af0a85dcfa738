"""A model small enough for tests: colours and words share one space."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

WORDS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "white": (255, 255, 255)}


def colour_photos(folder: Path, *texts: str) -> Path:
    """A folder with a picture of every colour in a sub-folder, and texts beside it with the name of the colour."""
    for name, colour in WORDS.items():
        place = folder / name[0]
        place.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), colour).save(place / f"{name}.png")
        (place / f"{name}.txt").write_text("".join(f"{text.format(name)}\n" for text in texts))
    return folder


class ColourModel:
    """Encodes a picture by its mean colour, a text by the colours it names; words add a little noise."""

    dim = 8

    def __init__(self, name: str = "colours") -> None:
        self.name = name
        self.encoded_images = 0
        self.encoded_texts = 0

    def fingerprint(self) -> str:
        return hashlib.sha256(self.name.encode()).hexdigest()[:16]

    def encode_image(self, images: Sequence[Any], *, batch_size: int = 64) -> np.ndarray:
        self.encoded_images += len(images)
        rows = []
        for image in images:
            assert isinstance(image, Image.Image)
            rows.append(np.asarray(image.convert("RGB"), np.float64).reshape(-1, 3).mean(0) - 100)
        return self._rows(rows, [b""] * len(rows))

    def encode_text(self, texts: Sequence[str], *, batch_size: int = 256) -> np.ndarray:
        self.encoded_texts += len(texts)
        rows = []
        for text in texts:
            known = [WORDS[w] for w in text.lower().split() if w in WORDS]
            rows.append(np.mean(known, axis=0) - 100 if known else np.zeros(3))
        return self._rows(rows, [text.encode() for text in texts])

    def _rows(self, colours: list[Any], salts: list[bytes]) -> np.ndarray:
        out = np.zeros((len(colours), self.dim), np.float32)
        for n, (colour, salt) in enumerate(zip(colours, salts, strict=True)):
            out[n, :3] = np.asarray(colour) / 100
            seed = int.from_bytes(hashlib.sha256(salt).digest()[:4], "little")
            out[n, 3:] = 0.05 * np.random.default_rng(seed).normal(size=self.dim - 3)
        out /= np.linalg.norm(out, axis=1, keepdims=True)
        return out
