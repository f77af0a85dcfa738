"""Show what augmentation does to pictures and texts: what ``diptych show augmentation`` does."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

from diptych.data.formats import open_captions
from diptych.data.readable import LeftOut, ToBeLeftOut
from diptych.errors import DataError, SettingsError
from diptych.reports.sheets import contact_sheet
from diptych.storage import write_bytes


def show_augmentation(
    data: str, output: Path, *, split: str = "train", count: int = 3, draws: int = 2, seed: int = 0
) -> str:
    """Draw ``count`` pictures of a split after every step of augmentation, ``draws`` times each, as a PNG."""
    if output.suffix.lower() != ".png":
        raise SettingsError(
            f"{output} cannot be written: the picture is a PNG, give a name that ends in .png."
        )
    captions = open_captions(data, split=split, problems=ToBeLeftOut())
    with_text = np.unique(captions.image_of)
    left_out = LeftOut()
    rows = left_out.draw(captions, np.random.default_rng(seed).permutation(with_text).tolist(), count)
    left_out.tell(len(captions.images), advice=False)
    pictures, texts, texts_of = [], [], captions.texts_of()
    for row in rows:
        item = captions.images[row]
        if not isinstance(item, Image.Image):
            raise DataError(f"{captions.name} holds features, not pictures: give data with pictures.")
        pictures.append(item)
        texts.append(max((captions.texts[text] for text in texts_of[row].tolist()), key=len))
    if not pictures:
        raise DataError(f"{captions.name}, split {split}, has no image with a text: give other data.")
    buffer = io.BytesIO()
    contact_sheet(pictures, texts, draws=draws, seed=seed).save(buffer, "PNG", optimize=True)
    write_bytes(output, buffer.getvalue())
    return f"{output}: {len(pictures)} pictures of {captions.name}, {split}, {draws} draws each, seed {seed}"
