"""Probes: a few texts and pictures with the vectors that their model makes of them.

Whoever makes or takes vectors of a model compares with them. The texts differ in length and are encoded as one padded
batch; the pictures have fine patterns and odd sizes, so that another resampling filter or order of colours shows. A
model that reads features has sets of features instead.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from diptych.errors import RuntimeFault
from diptych.storage import new_file, parse_json

FORMAT = "1"
REFUSED = 0.999  # worst cosine below which vectors are another model's
REFUSED_HALF = 0.99  # the same for vectors made in half precision
SAID = 0.9999  # worst cosine below which a person is told
SIZES = ((227, 301), (150, 67), (64, 64))  # height and width of the drawn pictures
SET_SIZES = (1, 5, 12, 36)  # elements of the drawn sets of features
TEXTS = (
    "A dog runs over the green grass.",
    "two people",
    "Three small birds, 2 of them red, sit on an old wooden fence near a lake!",
    "café",
    "the reflection of a man's umbrella in a puddle",
)


@dataclass(frozen=True)
class Probes:
    """Texts and images, pictures as uint8 (H, W, 3) or sets (R, D), and their vectors (n, dim)."""

    fingerprint: str
    texts: Sequence[str]
    images: Sequence[NDArray[Any]]
    text_vectors: NDArray[np.float32]
    image_vectors: NDArray[np.float32]

    def save(self, file: Path) -> None:
        """Write the probes, whole or not at all."""
        tensors = {f"image.{number}": np.ascontiguousarray(one) for number, one in enumerate(self.images)}
        tensors |= {"text_vectors": self.text_vectors, "image_vectors": self.image_vectors}
        about = {"format": FORMAT, "fingerprint": self.fingerprint, "texts": json.dumps(list(self.texts))}
        with new_file(file) as handle:
            handle.write(save(tensors, about))

    @staticmethod
    def read(file: Path) -> Probes:
        """The probes of a model folder."""
        try:
            with safe_open(file, "numpy") as opened:
                about = opened.metadata() or {}
                if about.get("format") != FORMAT:
                    raise ValueError(f"format {about.get('format')!r:.20}, this version reads {FORMAT}")
                names = sorted((n for n in opened.keys() if n.startswith("image.")), key=lambda n: int(n[6:]))  # noqa: SIM118
                found = Probes(
                    about["fingerprint"], [str(text) for text in parse_json(about["texts"])],
                    [opened.get_tensor(name) for name in names],
                    opened.get_tensor("text_vectors"), opened.get_tensor("image_vectors"),
                )  # fmt: skip
            if len(found.texts) != len(found.text_vectors) or len(found.images) != len(found.image_vectors):
                raise ValueError("items and vectors differ in number")
        except FileNotFoundError:
            raise RuntimeFault(f"{file} is missing: copy the whole model folder.") from None
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise RuntimeFault(f"{file} is damaged ({error}): copy the model folder again.") from error
        return found


def drawn_pictures() -> list[NDArray[np.uint8]]:
    """Pictures (H, W, 3) of rings, stripes and cells a few pixels wide, a different one in each colour."""
    pictures = []
    for height, width in SIZES:
        y, x = np.mgrid[:height, :width]
        rings = (x * x + y * y) // 37 % 256
        stripes = np.where((x + 2 * y) // 3 % 2, 230, 20)
        cells = (x // 5 * 31 + y // 4 * 57) % 256
        pictures.append(np.stack([rings, stripes, cells], axis=-1).astype(np.uint8))
    return pictures


def drawn_sets(dim: int, largest: int | None = None) -> list[NDArray[np.float32]]:
    """Sets of unequal size of features (R, dim), of at most ``largest`` elements."""
    rng = np.random.default_rng(0)
    sizes = [size if largest is None else min(size, largest) for size in SET_SIZES]
    return [rng.standard_normal((size, dim)).astype(np.float32) for size in sizes]


def worst_cosine(found: NDArray[Any], wanted: NDArray[Any]) -> float:
    """The lowest cosine of two lists of vectors, lower still where they differ in length; 0 for NaN and zeros."""
    if found.shape != wanted.shape:
        return 0.0
    a, b = found.astype(np.float64), wanted.astype(np.float64)
    largest = np.maximum((a * a).sum(axis=1), (b * b).sum(axis=1))
    cosines = (a * b).sum(axis=1) / np.where(largest > 0, largest, 1.0)
    return float(cosines.min(initial=1.0)) if np.isfinite(cosines).all() else 0.0


def compare(
    found: NDArray[Any], wanted: NDArray[Any], what: str, correction: str, *, half: bool = False
) -> str | None:
    """Raise where vectors are another model's; a sentence where they are close but not the same, else None.

    ``what`` names whose vectors they are, as in "the vectors of text.onnx"; ``half``: made in half precision.
    """
    worst, least = worst_cosine(found, wanted), REFUSED_HALF if half else REFUSED
    if worst < least:
        raise RuntimeFault(
            f"{what} are not those of this model (worst cosine {worst:.4f} on its probes, at least {least} is needed): "
            f"{correction}."
        )
    if worst < SAID:
        return f"{what} differ a little from the model's own: worst cosine {worst:.6f} on its probes."
    return None
