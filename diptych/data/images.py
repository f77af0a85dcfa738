"""Images as the model reads them: opened safely, turned to RGB, made into the inputs of an encoder."""

from __future__ import annotations

import io
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from diptych.data.captions import StoredImage
from diptych.errors import DataError, ImageError, SettingsError
from diptych.parts import part
from diptych.types import Features, Inputs

MAX_PIXELS = 100_000_000  # a picture that claims more is refused before it is decoded
# Pillow has more: some of them decode before they tell the size (ICO, ICNS), one starts a program (EPS). Pillow opens
# MPO as JPEG. The suffixes of files in these formats are IMAGE_SUFFIXES in data/files.py.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
DETECTOR_MEAN = (102.9801, 115.9465, 122.7717)  # BGR, 0…255: the bottom-up-attention detector
FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}

ImageLike = str | Path | Image.Image | np.ndarray
"""What a user may give as one image: a path, a picture, or an array (uint8 = a picture, float = features)."""

Items = Sequence[StoredImage] | NDArray[Any]
"""The images of a batch: a list of items, or one block of equal-sized features (B, R, D) or (B, D)."""

Window = tuple[float, float, float, float]  # left, top, right, bottom, in pixels
_header_lock = threading.Lock()


def open_image(
    source: str | Path | bytes | BinaryIO,
    *,
    name: str | None = None,
    max_pixels: int = MAX_PIXELS,
    size_hint: int | None = None,
) -> Image.Image:
    """An RGB picture from a path, encoded bytes, or a file object; anything unreadable is an ``ImageError``.

    Only the ``FORMATS`` are tried, and the size in the header is checked before a pixel is decoded. ``name`` is
    what the error calls bytes and file objects (a tar member, say). ``size_hint`` is the side the picture will be
    resized to: a JPEG is then decoded at the smallest of its built-in scales that is not below it, several times
    faster for large photographs. The first frame of an animation is taken; colour profiles are ignored.
    """
    label = name or (str(source) if isinstance(source, str | Path) else "an image given as bytes")
    handle: BinaryIO | None = None
    stream: BinaryIO
    try:
        if isinstance(source, str | Path):
            stream = handle = open(source, "rb")  # noqa: SIM115  closed below, after decoding
        else:
            stream = io.BytesIO(source) if isinstance(source, bytes) else source
        image = _open_header(stream)
        pixels = image.width * image.height
        if pixels > max_pixels:
            raise ImageError(
                f"{label} claims {image.width}×{image.height} = {pixels:,} pixels, more than the limit of "
                f"{max_pixels:,}: shrink it."
            )
        if size_hint is not None:
            image.draft("RGB", (size_hint, size_hint))
        return to_rgb(image, label)
    except ImageError:
        raise
    except FileNotFoundError as error:
        raise ImageError(f"{label} does not exist: check the path.") from error
    except IsADirectoryError as error:
        raise ImageError(f"{label} is a folder: give the path of one image.") from error
    except UnidentifiedImageError as error:
        raise ImageError(
            f"{label} is no image that can be read: convert it to one of {', '.join(FORMATS)}, or remove it."
        ) from error
    except Exception as error:  # a damaged file can make its decoder raise anything at all
        raise _damaged(label, error) from error
    finally:
        if handle is not None:
            handle.close()


def to_rgb(image: Image.Image, label: str = "an image") -> Image.Image:
    """RGB and upright: EXIF orientation applied, transparency composited on white, 16 bits scaled to 8."""
    try:
        image.load()
        if _orientation(image) != 1:
            image = ImageOps.exif_transpose(image)
        if image.mode == "RGB" and "transparency" not in image.info:
            return image
        if image.mode in ("I", "F") or image.mode.startswith("I;16"):
            return Image.fromarray(_to_8_bits(np.asarray(image))).convert("RGB")
        if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
            image = image.convert("RGBA")
            white = Image.new("RGBA", image.size, (255, 255, 255, 255))
            return Image.alpha_composite(white, image).convert("RGB")
        return image.convert("RGB")
    except Exception as error:  # see open_image
        raise _damaged(label, error) from error


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
        f"an array of shape {image.shape} and type {image.dtype} is no image: give a picture as uint8 "
        "(H, W, 3), or features as floats (regions, dim)."
    )


class ImageInput(ABC):
    """Turns the items of an image store into what an image encoder reads."""

    @abstractmethod
    def __call__(self, items: Items, rng: np.random.Generator | None = None) -> Inputs:
        """The inputs of a batch, rows in order; ``rng`` given = training augmentation drawn from it."""


@part
class RegionInput(ImageInput):
    """Region features as they are stored, (R, dim) per image, or (dim,) for one global vector → ``Features``.

    Images may differ in R: rows are padded with zeros. float16 stays float16 (half the reading and half the
    copy to the GPU; encoders cast), everything else becomes float32. Nothing is normalised.
    """

    def __init__(self, dim: int = 2048) -> None:
        if dim < 1:
            raise SettingsError(f"dim={dim} is no feature length: give a positive number.")
        self.dim = dim

    def __call__(self, items: Items, rng: np.random.Generator | None = None) -> Features:
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
    """Pictures → pixels (B, 3, size, size) float32; cached backbone outputs (L, D) → ``Features``.

    Evaluation: the whole picture is resized to size × size, its aspect ratio not kept (``resize="stretch"``),
    or its short side to ``size`` and the centre cut out (``resize="crop"``, as CLIP does). Training, before
    that: a window keeping one ratio r ~ U(crop_ratio) of both sides at a random place; after it, a horizontal
    flip with probability ``flip``. Pillow averages when it shrinks, which the published OpenCV code does not.

    Colours are RGB in 0…1, or with ``bgr`` BGR in 0…255; then (x − mean) / std. The defaults are ImageNet's,
    or with ``bgr`` the bottom-up-attention detector's (its pixel means, no scaling).
    """

    def __init__(
        self,
        size: int = 224,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        crop_ratio: Sequence[float] = (0.6, 1.0),
        flip: float = 0.5,
        bgr: bool = False,
        resize: Literal["stretch", "crop"] = "stretch",
        interpolation: Literal["bilinear", "bicubic"] = "bilinear",
    ) -> None:
        mean = mean if mean is not None else (DETECTOR_MEAN if bgr else IMAGENET_MEAN)
        std = std if std is not None else ((1.0, 1.0, 1.0) if bgr else IMAGENET_STD)
        _check(size >= 1, f"size={size} is no picture side: give a positive number of pixels.")
        _check(len(mean) == 3 and len(std) == 3, "mean and std need three numbers each, one per colour.")
        _check(all(s > 0 for s in std), f"std={tuple(std)} must be positive.")
        _check(
            len(crop_ratio) == 2 and 0 < crop_ratio[0] <= crop_ratio[1] <= 1,
            f"crop_ratio={tuple(crop_ratio)} must be two numbers with 0 < low ≤ high ≤ 1.",
        )
        _check(0 <= flip <= 1, f"flip={flip} is no probability: give a number from 0 to 1.")
        _check(resize in ("stretch", "crop"), f"resize='{resize}' is unknown: choose stretch or crop.")
        _check(
            interpolation in FILTERS, f"interpolation='{interpolation}' is unknown: {' or '.join(FILTERS)}."
        )
        self.size, self.crop_ratio, self.flip, self.bgr = size, (crop_ratio[0], crop_ratio[1]), flip, bgr
        self.resize, self.filter = resize, FILTERS[interpolation]
        # (x·unit − mean) / std as one multiplication and one addition
        unit = 1.0 if bgr else 1.0 / 255.0
        scale = [unit / s for s in std]
        shift = [-m / s for m, s in zip(mean, std, strict=True)]
        self._scale = np.asarray(scale, dtype=np.float32)[:, None, None]
        self._shift = np.asarray(shift, dtype=np.float32)[:, None, None]

    def __call__(self, items: Items, rng: np.random.Generator | None = None) -> Inputs:
        """Pixels (B, 3, size, size), or ``Features`` when the items are cached outputs."""
        if isinstance(items, np.ndarray):
            return stack_features(items)
        pictures = [item for item in items if isinstance(item, Image.Image)]
        if not pictures and len(items):
            return stack_features(items)
        if len(pictures) != len(items):
            raise DataError("a batch mixes pictures and cached features: give all of one kind.")
        out = np.empty((len(pictures), 3, self.size, self.size), dtype=np.float32)
        for row, picture in enumerate(pictures):
            flip = rng is not None and bool(rng.random() < self.flip)
            window = self._window(picture.size, rng)
            resized = to_rgb(picture).resize((self.size, self.size), self.filter, box=window)
            small = np.asarray(resized)  # (H, W, 3)
            small = small[:, ::-1] if flip else small
            small = small[:, :, ::-1] if self.bgr else small
            np.multiply(small.transpose(2, 0, 1), self._scale, out=out[row])
        out += self._shift
        return torch.from_numpy(out)

    def _window(self, size: tuple[int, int], rng: np.random.Generator | None) -> Window:
        """The part of a (width, height) picture that is kept."""
        width, height = size
        left = top = 0
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


def stack_features(items: Items) -> Features:
    """Arrays (R, D) or (D,) of possibly different R → ``Features`` (B, R, D), padded with zeros.

    An array (B, R, D) or (B, D) is taken as it is. float16 and float32 are kept, other types become float32.
    """
    if isinstance(items, np.ndarray):
        block = _floats(items)
        block = block[:, None] if block.ndim == 2 else block
        if block.ndim != 3 or block.shape[1] == 0:
            raise DataError(f"a block of features must have shape (B, R, D) with R ≥ 1, not {items.shape}.")
        return Features.whole(torch.from_numpy(np.ascontiguousarray(block)))
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
    return Features(torch.from_numpy(values), torch.from_numpy(mask))


def _set_of_rows(item: StoredImage) -> NDArray[Any]:
    if isinstance(item, Image.Image):
        raise DataError("a batch mixes pictures and cached features: give all of one kind.")
    array = item[None] if item.ndim == 1 else item
    if array.ndim != 2 or 0 in array.shape:
        raise DataError(f"features of an image must have shape (regions, dim), ≥ 1 region, not {item.shape}.")
    return _floats(array)


def _floats(array: NDArray[Any]) -> NDArray[Any]:
    return array if array.dtype in (np.float16, np.float32) else array.astype(np.float32)


def _open_header(stream: BinaryIO) -> Image.Image:
    """Read the header only, silently.

    Pillow warns or raises at its own pixel limit while opening; ours is checked right after, so its is lifted
    for these microseconds. That limit and the warning filters belong to the whole process, hence the lock.
    """
    with _header_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Image.init()  # no work but the first time; a decoder that this Pillow lacks must not be asked for
        formats = [name for name in FORMATS if name in Image.OPEN]
        limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        try:
            return Image.open(stream, formats=formats)
        finally:
            Image.MAX_IMAGE_PIXELS = limit


def _orientation(image: Image.Image) -> int:
    if not any(key in image.info for key in ("exif", "Raw profile type exif")) and image.format != "TIFF":
        return 1  # asking costs more than many a decode
    with _header_lock, warnings.catch_warnings():  # damaged EXIF only warns: the picture itself is fine
        warnings.simplefilter("ignore")
        value = image.getexif().get(ExifTags.Base.Orientation, 1)
    return value if value in range(1, 9) else 1


def _to_8_bits(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Deep grey to 0…255: 16-bit integers by their full range, floats in 0…1 by 255, others clipped."""
    top = float(values.max(initial=0))
    if np.issubdtype(values.dtype, np.floating):
        scaled = values * 255.0 if top <= 1.0 else values
    else:
        scaled = values / 257.0 if top > 255 else values
    return np.clip(np.rint(scaled), 0, 255).astype(np.uint8)


def _damaged(label: str, error: Exception) -> ImageError:
    return ImageError(f"{label} is damaged and cannot be decoded ({error}): replace or remove it.")


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise SettingsError(message)
