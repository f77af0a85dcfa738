"""Pictures as published image processors prepare them, with Pillow and numpy alone: what CLIP and SigLIP read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from diptych.data.arrays import Arrays, Sets
from diptych.data.decode.opening import to_rgb
from diptych.data.images import MAX_SIDE, ImageInput, Items, pictures_of, stack_features
from diptych.errors import SettingsError
from diptych.parts import part

HALF = (0.5, 0.5, 0.5)
BYTE = 1 / 255
LONGEST = 200  # how many times its short side of a picture is resized: no model reads more of it
SEARCH_STEP = 1e-5  # precision to which NaFlex finds the scale of a picture


@part
class ProcessedPixels(ImageInput):
    """Pictures → pixels (B, 3, H, W) float32: resize, cut out the centre, scale, normalise, step by step.

    ``size`` is the short side (the aspect ratio is kept), or (height, width). ``crop`` is (height, width) of the
    centre, black where the picture is smaller; ``centre`` says how half a pixel is rounded ("floor" as
    transformers, "round" as torchvision and open_clip). ``resample`` is Pillow's number of a filter (2 bilinear,
    3 bicubic). Training reads the same pixels: there is no augmentation. Stored features pass as they are.
    """

    def __init__(
        self,
        size: int | Sequence[int] = 224,
        crop: Sequence[int] | None = None,
        mean: Sequence[float] = HALF,
        std: Sequence[float] = HALF,
        resample: int = 3,
        scale: float = BYTE,
        centre: Literal["floor", "round"] = "floor",
    ) -> None:
        sides = [size] if isinstance(size, int) else list(size)
        if not all(1 <= side <= MAX_SIDE for side in [*sides, *(crop or ())]) or len(sides) > 2:
            raise SettingsError(
                f"size={size} and crop={crop} are no sizes of pictures: give the short side or (height, width), of at "
                f"most {MAX_SIDE:,} pixels."
            )
        if isinstance(size, int) and crop is None:
            raise SettingsError("a short side alone leaves pictures of many shapes: give crop as well.")
        self.size, self.crop, self.round = size, crop, centre == "round"
        self.filter, self.side = _filter(resample), max(sides)
        self._mean, self._std, self._scale = _colours(mean), _colours(std), np.float32(scale)

    def __call__(self, items: Items, rng: np.random.Generator | None = None) -> Arrays:
        """Pixels (B, 3, H, W), or ``Sets`` when the items are stored features; ``rng`` changes nothing."""
        pictures = pictures_of(items)
        if not pictures:
            return stack_features(items)
        return np.stack([self._prepare(picture) for picture in pictures])

    def _prepare(self, picture: Image.Image) -> NDArray[np.float32]:
        image = to_rgb(picture)
        width, height = (min(side, LONGEST * min(image.size)) for side in image.size)
        left, top = (image.width - width) // 2, (image.height - height) // 2
        box = (left, top, left + width, top + height)  # of a line of pixels, the middle
        image = image.resize(self._target((width, height)), self.filter, box)
        if self.crop is not None:
            height, width = self.crop
            left, top = self._offset(image.width - width), self._offset(image.height - height)
            image = image.crop((left, top, left + width, top + height))
        return _normalise(image, self._scale, self._mean, self._std)

    def _target(self, size: tuple[int, int]) -> tuple[int, int]:
        if not isinstance(self.size, int):
            return self.size[1], self.size[0]
        short, long = min(size), max(size)
        longer = int(self.size * long / short)
        return (self.size, longer) if size[0] <= size[1] else (longer, self.size)

    def _offset(self, spare: int) -> int:
        return round(spare / 2) if self.round else spare // 2


@part
class PatchedPixels(ImageInput):
    """Pictures → patches (B, L, patch² · 3 + 2) of SigLIP 2's NaFlex models, which keep the aspect ratio.

    A picture is resized to the largest grid of its shape with at most ``max_patches`` patches. The last two
    numbers of a patch are the height and width of its grid, which the position embeddings are resized to.
    """

    def __init__(
        self,
        patch_size: int = 16,
        max_patches: int = 256,
        mean: Sequence[float] = HALF,
        std: Sequence[float] = HALF,
        resample: int = 2,
        scale: float = BYTE,
    ) -> None:
        if patch_size < 1 or not 1 <= max_patches * patch_size**2 <= MAX_SIDE**2:
            raise SettingsError(
                f"{max_patches} patches of {patch_size} pixels: give positive numbers, of at most {MAX_SIDE}² pixels."
            )
        self.patch_size, self.max_patches, self.filter = patch_size, max_patches, _filter(resample)
        self.side = patch_size * math.ceil(math.sqrt(max_patches))
        self._mean, self._std, self._scale = _colours(mean), _colours(std), np.float32(scale)

    def __call__(self, items: Items, rng: np.random.Generator | None = None) -> Sets:
        """Patches with their mask, or stored features as they are; ``rng`` changes nothing."""
        pictures = pictures_of(items)
        return stack_features([self._patches(one) for one in pictures] if pictures else items)

    def _patches(self, picture: Image.Image) -> NDArray[np.float32]:
        side = self.patch_size
        rows, columns = _grid(picture.height, picture.width, side, self.max_patches)
        image = to_rgb(picture).resize((columns * side, rows * side), self.filter)
        pixels = _normalise(image, self._scale, self._mean, self._std)  # (3, H, W)
        cells = pixels.reshape(3, rows, side, columns, side).transpose(1, 3, 2, 4, 0)
        shape = np.broadcast_to(np.array([rows, columns], dtype=np.float32), (rows * columns, 2))
        return np.concatenate([cells.reshape(rows * columns, -1), shape], axis=1)


def processor_input(processor: Mapping[str, Any], image_size: int) -> ProcessedPixels | PatchedPixels:
    """The input that an image processor's numbers (preprocessor_config.json) describe.

    ``image_size`` is what the model was trained with, for a processor that names no size.
    """
    normalise = bool(processor.get("do_normalize", True))
    colours: dict[str, Any] = {
        "mean": list(processor.get("image_mean") or HALF) if normalise else [0.0, 0.0, 0.0],
        "std": list(processor.get("image_std") or HALF) if normalise else [1.0, 1.0, 1.0],
        "scale": float(processor.get("rescale_factor", BYTE)) if processor.get("do_rescale", True) else 1.0,
    }
    if "max_num_patches" in processor:
        return PatchedPixels(
            int(processor.get("patch_size", 16)),
            int(processor["max_num_patches"]),
            resample=int(processor.get("resample", 2)),
            **colours,
        )
    resized = bool(processor.get("do_resize", True))
    size = _size(processor.get("size"), image_size) if resized else image_size
    crop = None
    if processor.get("do_center_crop", False) or isinstance(size, int):
        side = _size(processor.get("crop_size"), image_size)
        crop = [side, side] if isinstance(side, int) else side
    return ProcessedPixels(size, crop, resample=int(processor.get("resample", 3)), **colours)


def _size(value: Any, otherwise: int) -> int | list[int]:
    """The short side, or [height, width]."""
    if isinstance(value, Mapping):
        if value.get("height") and value.get("width"):
            return [int(value["height"]), int(value["width"])]
        value = value.get("shortest_edge")
    return int(value) if value else otherwise


def _grid(height: int, width: int, side: int, most: int) -> tuple[int, int]:
    """Rows and columns of the largest grid of this shape with at most ``most`` cells, found by bisection."""

    def cells(length: int, scale: float) -> int:
        return max(1, math.ceil(length * scale / side))

    low, high = SEARCH_STEP / 10, 100.0
    while high - low >= SEARCH_STEP:
        scale = (low + high) / 2
        low, high = (scale, high) if cells(height, scale) * cells(width, scale) <= most else (low, scale)
    return cells(height, low), cells(width, low)


def _normalise(
    image: Image.Image, scale: np.float32, mean: NDArray[np.float32], std: NDArray[np.float32]
) -> NDArray[np.float32]:
    """(3, H, W)."""
    pixels = np.asarray(image, dtype=np.float32).transpose(2, 0, 1)
    return np.ascontiguousarray((pixels * scale - mean) / std)


def _colours(values: Sequence[float]) -> NDArray[np.float32]:
    if len(values) != 3:
        raise SettingsError("mean and std need three numbers each, one per colour.")
    return np.asarray(values, dtype=np.float32)[:, None, None]


def _filter(number: int) -> Image.Resampling:
    try:
        return Image.Resampling(number)
    except ValueError as error:
        raise SettingsError(f"resample={number} is no filter of Pillow: 2 is bilinear, 3 bicubic.") from error
