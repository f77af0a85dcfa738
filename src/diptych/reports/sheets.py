"""Sheets for a paper: where each side looks, what two texts call up, and every step of an augmentation."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from diptych.data.augmentation import PictureAugmentation, WordAugmentation, steps
from diptych.data.vocabulary import tokenize
from diptych.errors import SettingsError
from diptych.storage import write_bytes

SIDE, GAP, LINE = 224, 10, 20  # pixels of a picture, between pictures, of a line of text
WORD_LINES = 4
COLUMNS = ("original", "crop", "flip", "blur", "colour jitter", "grey", "resized")  # steps of an augmentation
CELL, STEP_GAP, STEP_LINE = 128, 8, 22  # pixels of a step, between steps, of a line of text
INK, PAPER, HOT = (30, 30, 30), (255, 255, 255), (255, 140, 0)
FAINT = (150, 150, 150)


@dataclass(frozen=True)
class Attended:
    """Where one model looks in one pair: shares of the cells (rows, columns), and of the tokens in order.

    ``cosine`` is that of what both sides look at: the means of their tokens, weighted by these shares.
    """

    cells: NDArray[np.float64]
    words: Sequence[tuple[str, float]]
    cosine: float


def check_png(output: Path) -> None:
    """Refuse a name that is no PNG's, before any work is done."""
    if output.suffix.lower() != ".png":
        raise SettingsError(f"{output} cannot be written: the picture is a PNG, end its name in .png.")


def write_png(sheet: Image.Image, output: Path) -> None:
    """The sheet as a file."""
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG", optimize=True)
    write_bytes(output, buffer.getvalue())


def attention_sheet(
    names: Sequence[str], pictures: Sequence[Image.Image], seen: Sequence[Sequence[Attended]]
) -> Image.Image:
    """A row for each pair: the picture, then what each model looks at in it and in its text.

    Bright cells and orange words are looked at most; each panel is scaled by its own largest share.
    """
    height = SIDE + GAP + WORD_LINES * LINE
    sheet = Image.new(
        "RGB", (GAP + (1 + len(names)) * (SIDE + GAP), LINE + GAP + len(pictures) * (height + GAP)), PAPER
    )
    ink, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for column, name in enumerate(["picture", *names]):
        ink.text((GAP + column * (SIDE + GAP), GAP // 2), shortened(name, font, SIDE), INK, font)
    for row, (picture, panels) in enumerate(zip(pictures, seen, strict=True)):
        top = LINE + GAP + row * (height + GAP)
        square = picture.convert("RGB").resize((SIDE, SIDE))
        sheet.paste(square, (GAP, top))
        for column, panel in enumerate(panels, 1):
            left = GAP + column * (SIDE + GAP)
            sheet.paste(lit(square, panel.cells), (left, top))
            _draw_words(ink, font, panel.words, (left, top + SIDE + GAP // 2))
    return sheet


def recalled_sheet(
    texts: Sequence[str], answers: Sequence[Sequence[tuple[Image.Image, float]]], head: Sequence[str]
) -> Image.Image:
    """For each text the pictures a model finds for it, best first, with their scores; ``head`` are lines above."""
    count = max(len(row) for row in answers)
    width = GAP + max(count, 3) * (SIDE + GAP)
    height = LINE + SIDE + LINE + 2 * GAP
    sheet = Image.new("RGB", (width, GAP + len(head) * LINE + len(texts) * height), PAPER)
    ink, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    top = GAP
    for line in head:
        ink.text((GAP, top), shortened(line, font, width - 2 * GAP), INK, font)
        top += LINE
    for text, row in zip(texts, answers, strict=True):
        ink.text((GAP, top), shortened(text, font, width - 2 * GAP), INK, font)
        for column, (picture, score) in enumerate(row):
            left = GAP + column * (SIDE + GAP)
            sheet.paste(picture.convert("RGB").resize((SIDE, SIDE)), (left, top + LINE))
            ink.text((left, top + LINE + SIDE), f"{score:.3f}", INK, font)
        top += height
    return sheet


def lit(picture: Image.Image, shares: NDArray[np.float64]) -> Image.Image:
    """The picture with every cell as bright as its share of the largest, at least a fifth."""
    level = shares / max(float(shares.max()), 1e-12)
    mask = Image.fromarray(np.rint(255 * (0.2 + 0.8 * level)).astype(np.uint8))
    smooth = mask.resize(picture.size, Image.Resampling.BICUBIC)
    return Image.composite(picture, Image.new("RGB", picture.size), smooth)


def shortened(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> str:
    """The text, cut with dots where it is wider."""
    while font.getlength(text) > width and len(text) > 1:
        text = text.removesuffix("...")[:-1] + "..."
    return text


def _draw_words(
    ink: ImageDraw.ImageDraw,
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
    words: Sequence[tuple[str, float]],
    corner: tuple[int, int],
) -> None:
    x, y = corner
    most = max((share for _, share in words), default=1.0) or 1.0
    for word, share in words:
        width = int(font.getlength(word)) + 6
        if x > corner[0] and x + width > corner[0] + SIDE:
            x, y = corner[0], y + LINE
            if y >= corner[1] + WORD_LINES * LINE:
                return
        level = share / most
        colour = tuple(round(p + (h - p) * level) for p, h in zip(PAPER, HOT, strict=True))
        ink.rectangle((x, y, x + width - 2, y + LINE - 4), fill=colour)
        ink.text((x + 2, y), word, INK, font)
        x += width


def augmented_words(text: str, others: Sequence[str], rng: np.random.Generator, rate: float = 0.2) -> str:
    """A text with its words masked, replaced (by a word of ``others``) and deleted as in pre-training."""
    words = tokenize(text)
    vocabulary = [*dict.fromkeys(word for other in [text, *others] for word in tokenize(other)), "[MASK]"]
    ids = np.array([vocabulary.index(word) for word in words], dtype=np.int64)
    augmentation = WordAugmentation(
        rate, len(vocabulary) - 1, np.arange(len(vocabulary) - 1), keep_a_word=True
    )
    new, _ = augmentation(ids, np.arange(len(ids)), np.zeros(len(ids), dtype=np.int64), rng)
    return " ".join(vocabulary[number] for number in new.tolist())


def contact_sheet(
    pictures: Sequence[Image.Image], texts: Sequence[str], *, draws: int, seed: int
) -> Image.Image:
    """``draws`` rows for each picture: the picture after every step, in order; a step that was not drawn stays empty.

    Cells keep the aspect ratio but the last, which is what the encoder reads. Below each row, the text and what word
    augmentation made of it.
    """
    augmentation, height = PictureAugmentation(), CELL + STEP_GAP + STEP_LINE
    width = STEP_GAP + len(COLUMNS) * (CELL + STEP_GAP)
    sheet = Image.new("RGB", (width, STEP_LINE + STEP_GAP + height * draws * len(pictures)), PAPER)
    ink, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for column, name in enumerate(COLUMNS):
        ink.text((STEP_GAP + column * (CELL + STEP_GAP), STEP_GAP // 2), name, INK, font)
    top = STEP_LINE + STEP_GAP
    for number, (picture, text) in enumerate(zip(pictures, texts, strict=True)):
        for draw in range(draws):
            rng = np.random.default_rng([seed, number, draw])
            drawn = augmentation.draw(rng)
            done = {"original": picture, **steps(drawn, picture)}
            done["resized"] = list(done.values())[-1].resize((CELL, CELL), Image.Resampling.BILINEAR)
            for column, name in enumerate(COLUMNS):
                left = STEP_GAP + column * (CELL + STEP_GAP)
                if name in done:
                    sheet.paste(_fit(done[name]), (left, top))
                else:
                    ink.text((left + CELL // 2 - 4, top + CELL // 2 - 8), "-", FAINT, font)
            others = [other for other in texts if other != text]
            words = f"{text}   ->   {augmented_words(text, others, rng)}"
            ink.text((STEP_GAP, top + CELL + 2), words, INK, font)
            top += height
    return sheet


def _fit(picture: Image.Image) -> Image.Image:
    """The picture in a cell, its aspect ratio kept, centred on grey."""
    cell = Image.new("RGB", (CELL, CELL), (235, 235, 235))
    ratio = CELL / max(picture.size)
    small = picture.resize((max(1, round(picture.width * ratio)), max(1, round(picture.height * ratio))))
    cell.paste(small, ((CELL - small.width) // 2, (CELL - small.height) // 2))
    return cell
