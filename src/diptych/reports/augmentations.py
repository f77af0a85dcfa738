"""A contact sheet of augmentations: each row a draw, a column for every step, the words of the text below."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from diptych.data.augmentation import PictureAugmentation, WordAugmentation, steps
from diptych.data.vocabulary import tokenize

COLUMNS = ("original", "crop", "flip", "blur", "colour jitter", "grey", "resized")
SIDE, GAP, LINE = 128, 8, 22  # pixels of a cell, between cells, of a line of text
INK, FAINT, PAPER = (30, 30, 30), (150, 150, 150), (255, 255, 255)


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
    pictures: Sequence[Image.Image],
    texts: Sequence[str],
    augmentation: PictureAugmentation | None = None,
    *,
    draws: int = 2,
    seed: int = 0,
) -> Image.Image:
    """``draws`` rows for each picture: the picture after every step, in order; a step that was not drawn stays empty.

    Cells keep the aspect ratio but the last, which is what the encoder reads. Below each row, the text and what word
    augmentation made of it.
    """
    augmentation = augmentation or PictureAugmentation()
    height = SIDE + GAP + LINE
    width = GAP + len(COLUMNS) * (SIDE + GAP)
    sheet = Image.new("RGB", (width, LINE + GAP + height * draws * len(pictures)), PAPER)
    ink, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for column, name in enumerate(COLUMNS):
        ink.text((GAP + column * (SIDE + GAP), GAP // 2), name, INK, font)
    top = LINE + GAP
    for number, (picture, text) in enumerate(zip(pictures, texts, strict=True)):
        for draw in range(draws):
            rng = np.random.default_rng([seed, number, draw])
            drawn = augmentation.draw(rng)
            done = {"original": picture, **steps(drawn, picture)}
            done["resized"] = list(done.values())[-1].resize((SIDE, SIDE), Image.Resampling.BILINEAR)
            for column, name in enumerate(COLUMNS):
                left = GAP + column * (SIDE + GAP)
                if name in done:
                    sheet.paste(_fitted(done[name]), (left, top))
                else:
                    ink.text((left + SIDE // 2 - 4, top + SIDE // 2 - 8), "-", FAINT, font)
            others = [other for other in texts if other != text]
            words = f"{text}   ->   {augmented_words(text, others, rng)}"
            ink.text((GAP, top + SIDE + 2), words, INK, font)
            top += height
    return sheet


def _fitted(picture: Image.Image) -> Image.Image:
    """The picture in a cell, its aspect ratio kept, centred on grey."""
    cell = Image.new("RGB", (SIDE, SIDE), (235, 235, 235))
    ratio = SIDE / max(picture.size)
    small = picture.resize((max(1, round(picture.width * ratio)), max(1, round(picture.height * ratio))))
    cell.paste(small, ((SIDE - small.width) // 2, (SIDE - small.height) // 2))
    return cell
