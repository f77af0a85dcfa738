"""The augmentation of X-VLM's fine-tuning: a window of random area and shape, and two operations (RandAugment)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

GREY = (128, 128, 128)  # what fills the corners that a movement leaves empty
LEVELS = 10  # the largest magnitude
SHEAR, SHIFT, TURN = 0.3, 10.0, 30.0  # slope, pixels and degrees at the largest magnitude
ASPECTS = (3 / 4, 4 / 3)
TRIES = 10  # windows that are drawn before the whole picture is taken

Operation = Callable[
    [Image.Image, float], Image.Image
]  # a picture, and the signed share of the largest magnitude


def _moved(picture: Image.Image, *change: float) -> Image.Image:
    return picture.transform(
        picture.size, Image.Transform.AFFINE, change, Image.Resampling.BILINEAR, fillcolor=GREY
    )


def _enhanced(kind: type[ImageEnhance.Brightness | ImageEnhance.Sharpness]) -> Operation:
    return lambda picture, share: kind(picture).enhance(abs(share) * 1.8 + 0.1)


OPERATIONS: dict[str, Operation] = {
    "identity": lambda picture, share: picture,
    "autocontrast": lambda picture, share: ImageOps.autocontrast(picture),
    "equalize": lambda picture, share: ImageOps.equalize(picture),
    "brightness": _enhanced(ImageEnhance.Brightness),
    "sharpness": _enhanced(ImageEnhance.Sharpness),
    "shear x": lambda picture, share: _moved(picture, 1, share * SHEAR, 0, 0, 1, 0),
    "shear y": lambda picture, share: _moved(picture, 1, 0, 0, share * SHEAR, 1, 0),
    "translate x": lambda picture, share: _moved(picture, 1, 0, share * SHIFT, 0, 1, 0),
    "translate y": lambda picture, share: _moved(picture, 1, 0, 0, 0, 1, share * SHIFT),
    "rotate": lambda picture, share: picture.rotate(share * TURN, Image.Resampling.BILINEAR, fillcolor=GREY),
}


@dataclass(frozen=True)
class RandAugment:
    """``count`` operations, drawn with replacement; each happens with ``probability``, at ``magnitude`` of 10.

    X-VLM draws 2 of ten operations at magnitude 7. Its operations are OpenCV's; these are Pillow's.
    """

    count: int = 2
    magnitude: int = 7
    probability: float = 0.5

    def __call__(self, picture: Image.Image, rng: np.random.Generator) -> Image.Image:
        """An RGB picture, augmented; every picture takes the same count of random numbers."""
        names = list(OPERATIONS)
        for which, happens, sign in rng.random((self.count, 3)).tolist():
            if happens < self.probability:
                share = self.magnitude / LEVELS * (1 if sign < 0.5 else -1)
                picture = OPERATIONS[names[int(which * len(names))]](picture, share)
        return picture


def random_window(
    size: tuple[int, int], areas: tuple[float, float], rng: np.random.Generator
) -> tuple[int, int, int, int]:
    """Left, top, right, bottom of a window: its share of the area uniform in ``areas``, its aspect ratio in 3/4 … 4/3.

    The ratio is uniform in its logarithm. Where ten draws do not fit, the window is the largest of an allowed ratio in
    the middle. Every picture takes the same count of random numbers.
    """
    width, height = size
    draws = rng.random((TRIES, 4)).tolist()
    for area, aspect, x, y in draws:
        pixels = width * height * (areas[0] + (areas[1] - areas[0]) * area)
        ratio = math.exp(math.log(ASPECTS[0]) + math.log(ASPECTS[1] / ASPECTS[0]) * aspect)
        w, h = round(math.sqrt(pixels * ratio)), round(math.sqrt(pixels / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(x * (width - w + 1)), int(y * (height - h + 1))
            return left, top, left + w, top + h
    ratio = min(max(width / height, ASPECTS[0]), ASPECTS[1])
    w, h = min(width, max(1, round(height * ratio))), min(height, max(1, round(width / ratio)))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h
