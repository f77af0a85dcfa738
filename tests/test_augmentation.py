"""Pictures and words are augmented as the supplement of COOKIE says: every number, every order."""

from __future__ import annotations

import colorsys
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image
from small import pictures, precomputed

from diptych.cli import main
from diptych.data.augmentation import PictureAugmentation, PictureDraw, WordAugmentation, apply, steps
from diptych.errors import SettingsError
from diptych.reports.sheets import CELL, COLUMNS, STEP_GAP, STEP_LINE, augmented_words

DRAWS = 20_000
PLAIN = PictureDraw(1.0, 1.0, 0.0, 0.0, False, None, None, False)


@pytest.fixture(scope="module")
def drawn() -> list[PictureDraw]:
    augmentation, rng = PictureAugmentation(), np.random.default_rng(7)
    return [augmentation.draw(rng) for _ in range(DRAWS)]


def photograph(height: int = 60, width: int = 80) -> Image.Image:
    """A smooth picture with all colours in it."""
    y, x = np.mgrid[0:height, 0:width]
    waves = [127 + 100 * np.sin(x / 9 + 1), 127 + 100 * np.cos(y / 7), 127 + 100 * np.sin((x + y) / 11)]
    return Image.fromarray(np.stack(waves, axis=-1).astype(np.uint8))


@pytest.mark.parametrize(
    ("name", "stated"), [("flipped", 0.5), ("blur", 0.5), ("jitter", 0.8), ("grey", 0.2)]
)
def test_steps_happen_as_often_as_stated(drawn: list[PictureDraw], name: str, stated: float) -> None:
    happened = np.mean([getattr(one, name) not in (None, False) for one in drawn])
    assert abs(happened - stated) < 4 * math.sqrt(stated * (1 - stated) / DRAWS)


def test_steps_are_independent_of_each_other(drawn: list[PictureDraw]) -> None:
    rows = np.array(
        [
            (d.height, d.width, d.top, d.left, d.flipped, d.blur is None, d.jitter is None, d.grey)
            for d in drawn
        ]
    )
    correlations = np.corrcoef(rows.T)
    assert np.abs(correlations - np.eye(len(correlations))).max() < 4 / math.sqrt(DRAWS)


def test_numbers_are_uniform_in_their_ranges(drawn: list[PictureDraw]) -> None:
    jitters = np.array([one.jitter for one in drawn if one.jitter is not None])
    columns = {
        "height": ([one.height for one in drawn], 0.6, 1.0),
        "width": ([one.width for one in drawn], 0.6, 1.0),
        "blur": ([one.blur for one in drawn if one.blur is not None], 0.1, 2.0),
        "brightness": (jitters[:, 0], 0.6, 1.4),
        "contrast": (jitters[:, 1], 0.6, 1.4),
        "saturation": (jitters[:, 2], 0.6, 1.4),
        "hue": (jitters[:, 3], -0.1, 0.1),
    }
    for name, (values, low, high) in columns.items():
        shares = np.sort((np.asarray(values) - low) / (high - low))
        assert 0 <= shares[0] <= shares[-1] <= 1, name
        furthest = np.abs(shares - (np.arange(len(shares)) + 0.5) / len(shares)).max()  # Kolmogorov–Smirnov
        assert furthest < 1.95 / math.sqrt(len(shares)), name  # 0.1 % level


def test_every_picture_takes_the_same_count_of_numbers() -> None:
    one, other = np.random.default_rng(3), np.random.default_rng(3)
    PictureAugmentation().draw(one)
    PictureAugmentation(flip=0, blur=0, jitter=0, grey=0).draw(other)
    assert one.random() == other.random()


def test_steps_come_in_the_order_of_the_supplement() -> None:
    everything = PictureDraw(0.8, 0.7, 0.3, 0.6, True, 1.2, (1.2, 0.8, 1.3, 0.05), True)
    found = steps(everything, photograph())
    assert list(found) == ["crop", "flip", "blur", "colour jitter", "grey"]
    assert list(found.values())[-1].tobytes() == apply(everything, photograph()).tobytes()


def test_one_generator_gives_one_picture() -> None:
    augmentation = PictureAugmentation()
    first = [augmentation(photograph(), np.random.default_rng(5)).tobytes() for _ in range(2)]
    assert first[0] == first[1]
    assert first[0] != augmentation(photograph(), np.random.default_rng(6)).tobytes()


@pytest.mark.parametrize(("top", "left"), [(0.0, 0.0), (0.5, 0.3), (0.999999, 0.999999)])
def test_the_window_has_the_drawn_sides_and_lies_inside(top: float, left: float) -> None:
    picture = photograph(50, 90)
    window = apply(replace(PLAIN, height=0.62, width=0.9, top=top, left=left), picture)
    assert window.size == (81, 31)
    pixels, whole = np.asarray(window), np.asarray(picture)
    y, x = int(top * (50 - 31 + 1)), int(left * (90 - 81 + 1))
    assert (pixels == whole[y : y + 31, x : x + 81]).all()


def test_a_single_pixel_survives() -> None:
    assert PictureAugmentation()(Image.new("RGB", (1, 1)), np.random.default_rng(0)).size == (1, 1)


def test_a_flip_is_horizontal() -> None:
    flipped = np.asarray(apply(replace(PLAIN, flipped=True), photograph()))
    assert (flipped == np.asarray(photograph())[:, ::-1]).all()


@pytest.mark.parametrize("sigma", [0.5, 1.0, 2.0])
def test_blur_is_a_gaussian(sigma: float) -> None:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 255, (40, 40, 3), dtype=np.uint8)
    blurred = np.asarray(apply(replace(PLAIN, blur=sigma), Image.fromarray(pixels)), dtype=np.float64)
    reach = 10
    kernel = [math.exp(-(k**2) / (2 * sigma**2)) for k in range(-reach, reach + 1)]
    kernel = [k / sum(kernel) for k in kernel]
    expected = np.zeros((20, 20, 3))
    for y in range(20):
        for x in range(20):
            for dy in range(-reach, reach + 1):
                for dx in range(-reach, reach + 1):
                    weight = kernel[dy + reach] * kernel[dx + reach]
                    expected[y, x] += weight * pixels[y + 10 + dy, x + 10 + dx]
    difference = np.abs(blurred[10:30, 10:30] - expected)
    assert difference.mean() < 2.0  # Pillow's three box blurs against the exact filter, of 255
    wider = np.asarray(apply(replace(PLAIN, blur=1.6 * sigma), Image.fromarray(pixels)), dtype=np.float64)
    assert np.abs(wider[10:30, 10:30] - expected).mean() > 2.0  # another σ is noticed


def jittered(
    rgb: tuple[int, int, int], b: float, c: float, s: float, h: float, mean: float
) -> tuple[float, ...]:
    """Colour jitter of one pixel, as the docstring says it, in float64 and unrounded."""
    x = [min(255.0, v * b) for v in rgb]
    x = [min(255.0, max(0.0, c * v + (1 - c) * mean)) for v in x]
    grey = 0.299 * x[0] + 0.587 * x[1] + 0.114 * x[2]
    x = [min(255.0, max(0.0, s * v + (1 - s) * grey)) for v in x]
    hue, saturation, value = colorsys.rgb_to_hsv(*(v / 255 for v in x))
    return tuple(255 * v for v in colorsys.hsv_to_rgb((hue + h) % 1.0, saturation, value))


def mean_grey(picture: Image.Image, b: float) -> float:
    values = [[min(255.0, v * b) for v in pixel] for pixel in np.asarray(picture).reshape(-1, 3).tolist()]
    return sum(0.299 * r + 0.587 * g + 0.114 * b for r, g, b in values) / len(values)


JITTERS = [(1.3, 1.0, 1.0, 0.0), (1.0, 0.6, 1.0, 0.0), (1.0, 1.0, 1.4, 0.0), (1.0, 1.0, 1.0, 0.1),
           (0.7, 1.3, 0.6, -0.08)]  # fmt: skip


@pytest.mark.parametrize("jitter", JITTERS)
def test_colour_jitter_follows_its_formula(jitter: tuple[float, float, float, float]) -> None:
    picture = photograph(12, 16)
    found = np.asarray(apply(replace(PLAIN, jitter=jitter), picture)).reshape(-1, 3)
    mean = mean_grey(picture, jitter[0])
    expected = [jittered(tuple(rgb), *jitter, mean) for rgb in np.asarray(picture).reshape(-1, 3).tolist()]
    assert np.abs(found - np.array(expected)).max() < 6  # four roundings, and 256 hues
    # the oracle notices another order: saturation before contrast, or hue turned the other way
    other = (jitter[0], jitter[2], jitter[1], -jitter[3])
    if other != jitter:
        assert (
            np.abs(np.asarray(apply(replace(PLAIN, jitter=other), picture)).reshape(-1, 3) - expected).max()
            > 6
        )


def test_grey_keeps_the_luma() -> None:
    grey = np.asarray(apply(replace(PLAIN, grey=True), photograph()), dtype=np.float64)
    luma = np.asarray(photograph(), dtype=np.float64) @ (0.299, 0.587, 0.114)
    assert (grey == grey[:, :, :1]).all()
    assert np.abs(grey[:, :, 0] - luma).max() <= 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"crop": (0.0, 1.0)},
        {"crop": (0.9, 0.6)},
        {"flip": 1.5},
        {"blur_sigma": (2.0, 0.1)},
        {"hue": 0.7},
        {"grey": -1},
    ],
)
def test_numbers_out_of_range_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(SettingsError, match=next(iter(wrong))):
        PictureAugmentation(**wrong)  # type: ignore[arg-type]


# words

MASK, VOCABULARY = 99, np.arange(1000, 1100)


def touched(texts: int, words: int, *, keep_a_word: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Many equal texts of words 1 … ``words`` between two tokens that are never touched, augmented."""
    one = np.concatenate([[101], np.arange(1, words + 1), [102]])
    ids, numbers = np.tile(one, texts), np.tile(np.concatenate([[-1], np.arange(words), [-1]]), texts)
    augmentation = WordAugmentation(0.2, MASK, VOCABULARY, keep_a_word=keep_a_word)
    return augmentation(ids, numbers, np.repeat(np.arange(texts), words + 2), np.random.default_rng(11))


def test_words_are_masked_replaced_and_deleted_as_often_as_stated() -> None:
    count = 2000 * 12
    ids, rows = touched(2000, 12)
    found = {
        "masked": (ids == MASK).sum(),
        "replaced": (ids >= 1000).sum(),
        "deleted": count + 2 * 2000 - len(ids),
    }
    for name, stated in {"masked": 0.1, "replaced": 0.02, "deleted": 0.08}.items():
        assert abs(found[name] / count - stated) < 4 * math.sqrt(stated * (1 - stated) / count), name
    assert (ids == 101).sum() == (ids == 102).sum() == 2000  # never touched
    assert (np.bincount(rows) >= 2).all()


def test_a_text_that_loses_every_word_keeps_one_at_random() -> None:
    plain_ids, plain_rows = touched(30_000, 2)
    sizes = np.bincount(plain_rows)
    emptied = np.flatnonzero(sizes == 2)
    assert len(emptied) > 100  # 0.08² of them
    ids, rows = touched(30_000, 2, keep_a_word=True)
    assert (np.bincount(rows)[emptied] == 3).all()
    spared = ids[np.isin(rows, emptied) & (ids < 100)]
    assert abs((spared == 1).mean() - 0.5) < 4 * 0.5 / math.sqrt(len(spared))
    others = np.flatnonzero(sizes > 2)
    assert (ids[np.isin(rows, others)] == plain_ids[np.isin(plain_rows, others)]).all()  # nothing else moved


# the picture of the docs


def test_the_contact_sheet_shows_every_step(tmp_path: Path) -> None:
    paths = pictures(tmp_path / "photos", 4)
    for number, path in enumerate(paths):
        path.with_suffix(".txt").write_text(f"a small picture number {number}\n", "utf-8")
    arguments = ["show", "augmentation", "--data", str(tmp_path / "photos"), "--count", "3", "--draws", "1"]
    outputs = [tmp_path / name for name in ("one.png", "same.png", "other.png")]
    for output, seed in zip(outputs, (1, 1, 2), strict=True):
        done = CliRunner().invoke(main, [*arguments, "--seed", str(seed), "--output", str(output)])
        assert done.exit_code == 0, done.output
        assert "3 pictures" in done.output
    contents = [output.read_bytes() for output in outputs]
    assert contents[0] == contents[1]
    assert contents[0] != contents[2]
    width = STEP_GAP + len(COLUMNS) * (CELL + STEP_GAP)
    with Image.open(outputs[0]) as sheet:
        assert sheet.size == (width, STEP_LINE + STEP_GAP + 3 * (CELL + STEP_GAP + STEP_LINE))


@pytest.mark.parametrize(
    ("data", "output", "sentence"),
    [("photos", "a.jpg", ".png"), ("precomp", "a.png", "not pictures")],
)
def test_a_sheet_that_cannot_be_drawn_is_refused(
    tmp_path: Path, data: str, output: str, sentence: str
) -> None:
    pictures(tmp_path / "photos", 2)
    precomputed(tmp_path / "precomp")
    done = CliRunner().invoke(
        main, ["show", "augmentation", "--data", str(tmp_path / data), "--output", str(tmp_path / output)]
    )
    assert done.exit_code == 2
    assert sentence in done.output


def test_words_of_the_sheet_come_from_the_texts() -> None:
    words = {"a", "dog", "runs", "cat", "sits", "[MASK]"}
    for seed in range(50):
        found = augmented_words("a dog runs", ["a cat sits"], np.random.default_rng(seed), rate=0.9).split()
        assert found
        assert set(found) <= words
