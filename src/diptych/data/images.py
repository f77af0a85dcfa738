"""Images as the model reads them: pictures and features made into the inputs of an encoder."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from diptych.data.arrays import Arrays, Sets
from diptych.data.captions import StoredImage
from diptych.data.decode.opening import open_image, to_rgb
from diptych.errors import DataError, SettingsError, one_of
from diptych.parts import describe, part

if TYPE_CHECKING:
    from diptych.data.augmentation import RandAugment

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
DETECTOR_MEAN = (102.9801, 115.9465, 122.7717)  # BGR, 0…255: the bottom-up-attention detector
MAX_SIDE = 4_096  # pixels of what a model reads; published encoders read at most a thousand
Resize = Literal["stretch", "crop"]
Interpolation = Literal["bilinear", "bicubic"]
Augmentation = Literal["window", "x-vlm"]
FILTERS: dict[Interpolation, Image.Resampling] = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}

ImageLike = str | Path | Image.Image | np.ndarray
"""What a user may give as one image: a path, a picture, or an array (uint8 = a picture, float = features)."""

Items = Sequence[StoredImage] | NDArray[Any]
"""The images of a batch: a list of items, or one block of equal-sized features (B, R, D) or (B, D)."""

Window = tuple[float, float, float, float]  # left, top, right, bottom, in pixels


def as_item(image: ImageLike) -> StoredImage:
    """One image as a store gives it: paths are opened, uint8 arrays made pictures, float arrays kept."""
    if isinstance(image, str | Path):
        return open_image(image)
    if isinstance(image, Image.Image):
        return to_rgb(image)
    if image.dtype == np.uint8 and (image.ndim == 2 or (image.ndim == 3 and image.shape[2] in (3, 4))):
        return to_rgb(Image.fromarray(image))
    if np.issubdtype(image.dtype, np.floating) and image.ndim in (1, 2):
        return image
    raise DataError(
        f"an array of shape {image.shape} and type {image.dtype} is not an image: give a picture as uint8 "
        "(H, W, 3), or features as floats (regions, dim)."
    )


class ImageInput(ABC):
    """Turns the items of an image store into what an image encoder reads.

    ``side`` is the length in pixels that the short side of a picture is resized to, at most; None: not known.
    ``pictures`` says whether it reads pictures; every input reads features.
    """

    side: int | None = None
    pictures = True

    @abstractmethod
    def __call__(self, items: Items, rng: np.random.Generator | None = None) -> Arrays:
        """The inputs of a batch, rows in order; ``rng`` given = training augmentation drawn from it."""

    def identity(self) -> str:
        """Names what is done to a picture that is not augmented: inputs of one identity give equal outputs."""
        return json.dumps(describe(self))


@part
class RegionInput(ImageInput):
    """Region features as they are stored, (R, dim) per image, or (dim,) for one global vector → ``Sets``.

    Images may differ in R: rows are padded with zeros. float16 stays float16 (half the reading and half the
    copy to the GPU; encoders cast), everything else becomes float32. Nothing is normalised.
    """

    pictures = False

    def __init__(self, dim: int = 2048) -> None:
        if dim < 1:
            raise SettingsError(f"dim={dim} is not a feature length: give a positive number.")
        self.dim = dim

    def __call__(self, items: Items, rng: np.random.Generator | None = None) -> Sets:
        """(B, R, dim); ``rng`` changes nothing, since the encoders drop regions through the mask."""
        if not isinstance(items, np.ndarray):
            for item in items:
                if isinstance(item, Image.Image):
                    raise DataError(
                        f"this model reads region features ({self.dim} numbers per region), not pictures: "
                        "give arrays of features, or use a model with a picture encoder."
                    )
        features = stack_features(items)
        if features.values.shape[-1] != self.dim:
            raise DataError(
                f"region features have {features.values.shape[-1]} dimensions, this model reads {self.dim}: "
                f"give features of that size, or build the model with dim={features.values.shape[-1]}."
            )
        return features


@part
class PixelInput(ImageInput):
    """Pictures → pixels (B, 3, size, size) float32; cached backbone outputs (L, D) → ``Sets``.

    Evaluation: the whole picture is resized to size × size, its aspect ratio not kept (``resize="stretch"``),
    or its short side to ``size`` and the centre cut out (``resize="crop"``, as CLIP does). Training, before
    that: a window keeping one ratio r ~ U(crop_ratio) of both sides at a random place; after it, a horizontal
    flip with probability ``flip``. Pillow averages when it shrinks, which the published OpenCV code does not.
    ``augmentation="x-vlm"`` draws a window by its area, uniform in ``crop_ratio``, and its aspect ratio, stretches it
    to the square, flips, and applies ``RandAugment``.

    Colours are RGB in 0…1, or with ``bgr`` BGR in 0…255; then (x − mean) / std. The defaults are ImageNet's,
    or with ``bgr`` the bottom-up-attention detector's (its pixel means, no scaling).
    """

    LATER = ("augmentation",)

    def __init__(
        self,
        size: int = 224,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        crop_ratio: Sequence[float] = (0.6, 1.0),
        flip: float = 0.5,
        bgr: bool = False,
        resize: Resize = "stretch",
        interpolation: Interpolation = "bilinear",
        augmentation: Augmentation = "window",
    ) -> None:
        mean = mean if mean is not None else (DETECTOR_MEAN if bgr else IMAGENET_MEAN)
        std = std if std is not None else ((1.0, 1.0, 1.0) if bgr else IMAGENET_STD)
        _check(1 <= size <= MAX_SIDE, f"size={size} is not a picture side: give 1 to {MAX_SIDE:,} pixels.")
        _check(len(mean) == 3 and len(std) == 3, "mean and std need three numbers each, one per colour.")
        _check(all(s > 0 for s in std), f"std={tuple(std)} must be positive.")
        _check(
            len(crop_ratio) == 2 and 0 < crop_ratio[0] <= crop_ratio[1] <= 1,
            f"crop_ratio={tuple(crop_ratio)} must be two numbers with 0 < low ≤ high ≤ 1.",
        )
        _check(0 <= flip <= 1, f"flip={flip} is not a probability: give a number from 0 to 1.")
        one_of(resize, "resize", Resize)
        one_of(interpolation, "interpolation", Interpolation)
        one_of(augmentation, "augmentation", Augmentation)
        self.size, self.crop_ratio, self.flip, self.bgr = size, (crop_ratio[0], crop_ratio[1]), flip, bgr
        self.resize, self.filter, self.side = resize, FILTERS[interpolation], size
        self.operations: RandAugment | None = None
        if augmentation == "x-vlm":
            from diptych.data.augmentation import RandAugment

            self.operations = RandAugment()
        # (x·unit − mean) / std as one multiplication and one addition
        unit = 1.0 if bgr else 1.0 / 255.0
        scale = [unit / s for s in std]
        shift = [-m / s for m, s in zip(mean, std, strict=True)]
        self._scale = np.asarray(scale, dtype=np.float32)[:, None, None]
        self._shift = np.asarray(shift, dtype=np.float32)[:, None, None]

    def __call__(self, items: Items, rng: np.random.Generator | None = None) -> Arrays:
        """Pixels (B, 3, size, size), or ``Sets`` when the items are cached outputs."""
        pictures = pictures_of(items)
        if pictures is None:
            return stack_features(items)
        out = np.empty((len(pictures), 3, self.size, self.size), dtype=np.float32)
        for row, picture in enumerate(pictures):
            flip = rng is not None and bool(rng.random() < self.flip)
            window = self._window(picture.size, rng)
            resized = to_rgb(picture).resize((self.size, self.size), self.filter, box=window)
            if self.operations is not None and rng is not None:
                resized = resized.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip else resized
                resized, flip = self.operations(resized, rng), False
            small = np.asarray(resized)  # (H, W, 3)
            small = small[:, ::-1] if flip else small
            small = small[:, :, ::-1] if self.bgr else small
            np.multiply(small.transpose(2, 0, 1), self._scale, out=out[row])
        out += self._shift
        return out

    def identity(self) -> str:
        """Size, colours and resizing; crops and flips are for training alone."""
        colours = [self._scale.ravel().tolist(), self._shift.ravel().tolist(), self.bgr]
        return json.dumps(["PixelInput", self.size, *colours, self.resize, int(self.filter)])

    def _window(self, size: tuple[int, int], rng: np.random.Generator | None) -> Window:
        """The part of a (width, height) picture that is kept."""
        width, height = size
        left = top = 0
        if rng is not None and self.operations is not None:
            from diptych.data.augmentation import random_window

            return random_window(size, self.crop_ratio, rng)
        if rng is not None:
            ratio = rng.uniform(*self.crop_ratio)
            width, height = max(1, int(size[0] * ratio)), max(1, int(size[1] * ratio))
            left = int(rng.integers(size[0] - width + 1))
            top = int(rng.integers(size[1] - height + 1))
        if self.resize == "stretch":
            return left, top, left + width, top + height
        side = min(width, height)
        x, y = left + (width - side) / 2, top + (height - side) / 2
        return x, y, x + side, y + side


def pictures_of(items: Items) -> list[Image.Image] | None:
    """The pictures of a batch, or None when it holds stored features."""
    if isinstance(items, np.ndarray):
        return None
    pictures = [item for item in items if isinstance(item, Image.Image)]
    if pictures and len(pictures) != len(items):
        raise DataError("a batch mixes pictures and cached features: give all of one kind.")
    return pictures if pictures or not len(items) else None


def stack_features(items: Items) -> Sets:
    """Arrays (R, D) or (D,) of possibly different R → ``Sets`` (B, R, D), padded with zeros.

    An array (B, R, D) or (B, D) is taken as it is. float16 and float32 are kept, other types become float32.
    """
    if isinstance(items, np.ndarray):
        block = _floats(items)
        block = block[:, None] if block.ndim == 2 else block
        if block.ndim != 3 or block.shape[1] == 0:
            raise DataError(f"a block of features must have shape (B, R, D) with R ≥ 1, not {items.shape}.")
        return Sets(np.ascontiguousarray(block), np.ones(block.shape[:2], dtype=bool))
    arrays = [_set_of_rows(item) for item in items]
    if not arrays:
        raise DataError("an empty batch has no features: give at least one image.")
    dims = {array.shape[1] for array in arrays}
    if len(dims) > 1:
        raise DataError(f"the images of a batch have {sorted(dims)} feature dimensions: they must agree.")
    sizes = np.array([len(array) for array in arrays])
    dtype = np.float16 if all(a.dtype == np.float16 for a in arrays) else np.float32
    values = np.zeros((len(arrays), int(sizes.max()), dims.pop()), dtype=dtype)
    for row, array in enumerate(arrays):
        values[row, : len(array)] = array
    mask = np.arange(values.shape[1]) < sizes[:, None]  # (B, R)
    return Sets(values, mask)


def _set_of_rows(item: StoredImage) -> NDArray[Any]:
    if isinstance(item, Image.Image):
        raise DataError("a batch mixes pictures and cached features: give all of one kind.")
    array = item[None] if item.ndim == 1 else item
    if array.ndim != 2 or 0 in array.shape:
        raise DataError(f"features of an image must have shape (regions, dim), ≥ 1 region, not {item.shape}.")
    return _floats(array)


def _floats(array: NDArray[Any]) -> NDArray[Any]:
    return array if array.dtype in (np.float16, np.float32) else array.astype(np.float32)


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise SettingsError(message)
