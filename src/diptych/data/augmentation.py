"""Augmentation of inputs before an encoder reads them: words touched before padding, pictures before resizing.

``PictureAugmentation`` is COOKIE's, ``random_window`` and ``RandAugment`` are those of X-VLM's fine-tuning.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageFilter, ImageOps, ImageStat

from diptych.errors import SettingsError

Ints = NDArray[np.int64]
LUMA = (0.299, 0.587, 0.114)  # ITU-R 601, the weights of Pillow's own conversion to grey
HUES = 256  # steps of Pillow's hue circle


@dataclass(frozen=True)
class WordAugmentation:
    """Touch each word with probability ``rate`` (0.2 in VSE∞ and COOKIE): 50 % are masked, 10 % replaced, 40 % deleted.

    A word is all its pieces together: one draw decides for all of them. Hence 40 % · 0.2 = 8 % of words are dropped at
    the published rate. ``mask_id`` masks a piece, ``choices`` are the ids that may replace one; with ``keep_a_word`` a
    text that would lose all its words keeps one, drawn at random (COOKIE).
    """

    rate: float
    mask_id: int
    choices: Ints
    masked: float = 0.5  # of the touched words
    replaced: float = 0.1
    keep_a_word: bool = False

    def __call__(self, ids: Ints, words: Ints, rows: Ints, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """New (ids, rows) of flat tokens (T,).

        ``words`` numbers the words of each text, −1 for tokens that are never touched; ``rows`` is the text
        each token belongs to, ascending. No text is left empty: where every token was deleted the first one
        stays.
        """
        if not len(ids):
            return ids, rows
        starts = np.ones(len(ids), dtype=bool)  # whether a token opens a new word
        starts[1:] = (words[1:] != words[:-1]) | (rows[1:] != rows[:-1])
        word_of = np.cumsum(starts) - 1  # (T,)
        draw = rng.random(int(word_of[-1]) + 1)[word_of] / self.rate if self.rate else np.ones(len(ids))
        touched = (draw < 1.0) & (words >= 0)
        replace = touched & (draw >= self.masked) & (draw < self.masked + self.replaced)
        new = np.where(touched & (draw < self.masked), self.mask_id, ids)
        new[replace] = rng.choice(self.choices, int(replace.sum()))
        keep = ~(touched & (draw >= self.masked + self.replaced))
        if self.keep_a_word:
            _spare_a_word(keep, words >= 0, word_of, rows, rng)
        firsts = np.flatnonzero(np.diff(rows, prepend=-1))
        emptied = np.add.reduceat(keep, firsts) == 0
        keep[firsts[emptied]] = True
        return new[keep], rows[keep]


def _spare_a_word(
    keep: NDArray[np.bool_], is_word: NDArray[np.bool_], word_of: Ints, rows: Ints, rng: np.random.Generator
) -> None:
    """Put one word back, drawn at random, into each text all whose words are to be deleted."""
    texts = int(rows[-1]) + 1
    had = np.bincount(rows[is_word], minlength=texts) > 0
    has = np.bincount(rows[is_word & keep], minlength=texts) > 0
    for text in np.flatnonzero(had & ~has):
        words = np.unique(word_of[is_word & (rows == text)])
        keep[word_of == rng.choice(words)] = True


@dataclass(frozen=True)
class PictureDraw:
    """What was drawn for one picture: every number that an augmentation will use, None or False for a step left out.

    ``height`` and ``width`` are the shares of the sides that stay, ``top`` and ``left`` where the window lies in the
    rest.
    """

    height: float
    width: float
    top: float
    left: float
    flipped: bool
    blur: float | None
    jitter: tuple[float, ...] | None  # brightness, contrast, saturation, hue
    grey: bool


@dataclass(frozen=True)
class PictureAugmentation:
    """COOKIE's five steps on a picture, one after the other, before it is resized (supplement A.3).

    =====================  ==============================================================================
    supplement             argument
    =====================  ==============================================================================
    cropping σ₁·H, σ₂·W    ``crop``: σ₁ and σ₂ independent and uniform in it; the place is random
    flipping               ``flip``, the probability of a horizontal flip
    Gaussian blur          ``blur``, its probability; σ uniform in ``blur_sigma`` (pixels; not in the
                           supplement: SimCLR's range). Pillow's filter: three box blurs
    colour jitter          ``jitter``, its probability; ``brightness``, ``contrast``, ``saturation`` are
                           factors uniform in 1 ± the strength, ``hue`` a turn uniform in ± that share of
                           the colour circle (strengths not in the supplement: MoCo v2's), in this order
    colour dropping        ``grey``, the probability of a grey picture
    =====================  ==============================================================================

    Every picture takes the same count of random numbers, whichever steps are left out: the numbers of one picture
    never move those of the next.
    """

    crop: tuple[float, float] = (0.6, 1.0)
    flip: float = 0.5
    blur: float = 0.5
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    jitter: float = 0.8
    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.4
    hue: float = 0.1
    grey: float = 0.2

    def __post_init__(self) -> None:
        low, high = self.crop
        if not 0 < low <= high <= 1:
            raise SettingsError(f"crop={self.crop} must be two numbers with 0 < low ≤ high ≤ 1.")
        if not 0 <= self.blur_sigma[0] <= self.blur_sigma[1]:
            raise SettingsError(f"blur_sigma={self.blur_sigma} must be two numbers with 0 ≤ low ≤ high.")
        if not 0 <= self.hue <= 0.5:
            raise SettingsError(f"hue={self.hue} is no share of the colour circle: give 0 to 0.5.")
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, float | int) and not 0 <= value <= 1:
                raise SettingsError(f"{entry.name}={value} is out of range: give a number from 0 to 1.")

    def __call__(self, picture: Image.Image, rng: np.random.Generator) -> Image.Image:
        """An RGB picture, augmented; its size is what the crop left."""
        return apply(self.draw(rng), picture)

    def draw(self, rng: np.random.Generator) -> PictureDraw:
        u = rng.random(13).tolist()
        (low, high), (softest, strongest) = self.crop, self.blur_sigma
        strengths = (self.brightness, self.contrast, self.saturation)
        factors = [1 + strength * (2 * x - 1) for strength, x in zip(strengths, u[8:11], strict=True)]
        return PictureDraw(
            height=low + (high - low) * u[0],
            width=low + (high - low) * u[1],
            top=u[2],
            left=u[3],
            flipped=u[4] < self.flip,
            blur=softest + (strongest - softest) * u[6] if u[5] < self.blur else None,
            jitter=(*factors, self.hue * (2 * u[11] - 1)) if u[7] < self.jitter else None,
            grey=u[12] < self.grey,
        )


def apply(draw: PictureDraw, picture: Image.Image) -> Image.Image:
    """Do to an RGB picture what was drawn."""
    return list(steps(draw, picture).values())[-1]


def steps(draw: PictureDraw, picture: Image.Image) -> dict[str, Image.Image]:
    """The picture after each step that was drawn, by name, in order."""
    found = {"crop": _crop(picture, draw)}
    last = found["crop"]
    if draw.flipped:
        last = found["flip"] = last.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if draw.blur is not None:
        last = found["blur"] = last.filter(ImageFilter.GaussianBlur(draw.blur))
    if draw.jitter is not None:
        last = found["colour jitter"] = _jitter(last, *draw.jitter)
    if draw.grey:
        found["grey"] = last.convert("L").convert("RGB")
    return found


def _crop(picture: Image.Image, draw: PictureDraw) -> Image.Image:
    width, height = max(1, round(picture.width * draw.width)), max(1, round(picture.height * draw.height))
    left = min(int(draw.left * (picture.width - width + 1)), picture.width - width)
    top = min(int(draw.top * (picture.height - height + 1)), picture.height - height)
    return picture.crop((left, top, left + width, top + height))


def _jitter(
    picture: Image.Image, brightness: float, contrast: float, saturation: float, hue: float
) -> Image.Image:
    """x·b; then c·x + (1 − c)·mean grey; then s·x + (1 − s)·grey; then the hue turned. Each rounds to 8 bits."""
    levels = np.arange(256)
    picture = picture.point(_table(levels * brightness) * 3)
    grey = int(ImageStat.Stat(picture.convert("L")).mean[0] + 0.5)
    picture = picture.point(_table(contrast * levels + (1 - contrast) * grey) * 3)
    rest = [(1 - saturation) * weight for weight in LUMA]
    rows = [[rest[j] + (saturation if i == j else 0.0) for j in range(3)] + [0.0] for i in range(3)]
    picture = picture.convert("RGB", tuple(rows[0] + rows[1] + rows[2]))
    turned = round(hue * HUES)
    if not turned:
        return picture
    tone, depth, value = picture.convert("HSV").split()
    tone = tone.point(np.roll(levels, -turned).tolist())
    return Image.merge("HSV", (tone, depth, value)).convert("RGB")


def _table(values: NDArray[np.floating[Any]]) -> list[int]:
    """A look-up table of 256 entries, rounded and clipped to 8 bits."""
    table: list[int] = np.clip(np.rint(values), 0, 255).astype(np.int64).tolist()
    return table


GREY = (128, 128, 128)  # what fills the corners that a movement leaves empty
LEVELS = 10  # the largest magnitude
SHEAR, SHIFT, TURN = 0.3, 10.0, 30.0  # slope, pixels and degrees at the largest magnitude
ASPECTS = (3 / 4, 4 / 3)
TRIES = 10  # windows that are drawn before the whole picture is taken

# a picture, and the signed share of the largest magnitude
Operation = Callable[[Image.Image, float], Image.Image]


def _move(picture: Image.Image, *change: float) -> Image.Image:
    return picture.transform(
        picture.size, Image.Transform.AFFINE, change, Image.Resampling.BILINEAR, fillcolor=GREY
    )


def _enhance(kind: type[ImageEnhance.Brightness | ImageEnhance.Sharpness]) -> Operation:
    return lambda picture, share: kind(picture).enhance(abs(share) * 1.8 + 0.1)


OPERATIONS: dict[str, Operation] = {
    "identity": lambda picture, share: picture,
    "autocontrast": lambda picture, share: ImageOps.autocontrast(picture),
    "equalize": lambda picture, share: ImageOps.equalize(picture),
    "brightness": _enhance(ImageEnhance.Brightness),
    "sharpness": _enhance(ImageEnhance.Sharpness),
    "shear x": lambda picture, share: _move(picture, 1, share * SHEAR, 0, 0, 1, 0),
    "shear y": lambda picture, share: _move(picture, 1, 0, 0, share * SHEAR, 1, 0),
    "translate x": lambda picture, share: _move(picture, 1, 0, share * SHIFT, 0, 1, 0),
    "translate y": lambda picture, share: _move(picture, 1, 0, 0, 0, 1, share * SHIFT),
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
