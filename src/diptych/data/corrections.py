"""Corrections and noise: pairs that are taken out or mixed up behind the reader; the files of the data stay.

``corrections.csv`` has the columns ``image_id,text_id,verdict,by,data``. The verdicts ``keep`` and ``wrong`` are about
a pair of the data, ``matches`` says that a text is also right for another image, ``unsure`` is about either. ``data``
is the hash of the data set that was looked at (``data_hash``). A text without an id of its own is called IMAGE#N, the
N-th text of its image from 0.

Noise gives training texts the images of others: by a file that other programs use too (``.npy``, the image row of each
text, or of each image for all its texts), or drawn as published code draws it, by text or by image.
"""

from __future__ import annotations

import csv
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diptych.data.arrays import ArrayStore
from diptych.data.captions import Captions
from diptych.data.problems import LeftOut, unopenable
from diptych.errors import DataError, SettingsError
from diptych.progress import counted
from diptych.storage import expanded

COLUMNS = ("image_id", "text_id", "verdict", "by", "data")
_RATIO = re.compile(r"(\d*\.?\d+):(text|image)")
VERDICTS = ("keep", "wrong", "unsure", "matches")


@dataclass(frozen=True)
class Correction:
    """One verdict on one pair."""

    image_id: str
    text_id: str
    verdict: str
    by: str
    data: str


def read_corrections(path: str | Path) -> list[Correction]:
    """The corrections of a file, each pair once."""
    place = expanded(str(path))
    try:
        with place.open(encoding="utf-8-sig", errors="surrogatepass", newline="") as file:
            table = csv.DictReader(file)
            if tuple(table.fieldnames or ()) != COLUMNS:
                raise DataError(
                    f"{path} has the columns {','.join(table.fieldnames or ()) or 'none'}: corrections have "
                    f"{','.join(COLUMNS)}."
                )
            rows = [Correction(*(row[name] or "" for name in COLUMNS)) for row in table]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as corrections ({error}): check the file.") from error
    first_of: dict[tuple[str, str], Correction] = {}
    for row in rows:
        if row.verdict not in VERDICTS:
            raise DataError(f"{path} has the verdict '{row.verdict}': use {', '.join(VERDICTS)}.")
        before = first_of.setdefault((row.image_id, row.text_id), row)
        if before.verdict != row.verdict:
            raise DataError(
                f"{path} says both '{before.verdict}' and '{row.verdict}' of image '{row.image_id}' and text "
                f"'{row.text_id}': keep one of them."
            )
    return list(first_of.values())


def text_names(captions: Captions) -> list[str]:
    """What each text is called: its own id where all have one of their own, else IMAGE#N."""
    own = captions.text_ids
    if own is not None and len(set(own)) == len(own):
        return list(own)
    counts: Counter[int] = Counter()
    names = []
    for image in captions.image_of.tolist():
        names.append(f"{captions.image_ids[image]}#{counts[image]}")
        counts[image] += 1
    return names


def data_hash(captions: Captions) -> str:
    """The hash of a data set; images whose file cannot be read play no part."""
    return LeftOut().add(captions, unopenable(captions.images)).fingerprint()


def file_hash(path: str | Path) -> str:
    """The hash of a file of corrections, for a card."""
    return hashlib.sha256(expanded(path).read_bytes()).hexdigest()[:16]


def check_ids(corrections: Iterable[Correction], captions: Captions, path: str | Path) -> dict[str, int]:
    """The row of each text by its name; unknown ids, and verdicts that do not fit a pair, are refused."""
    row_of = {name: row for row, name in enumerate(text_names(captions))}
    image_rows = {name: row for row, name in enumerate(captions.image_ids)}
    for one in corrections:
        for what, name, known in (("image", one.image_id, image_rows), ("text", one.text_id, row_of)):
            if name not in known:
                raise DataError(
                    f"{path} names the {what} '{name}', which {captions.name} does not have: give the corrections of "
                    "this data."
                )
        own = int(captions.image_of[row_of[one.text_id]]) == image_rows[one.image_id]
        if one.verdict in (("matches",) if own else ("keep", "wrong")):
            kind = "a pair" if own else "no pair"
            raise DataError(
                f"{path} says '{one.verdict}' of image '{one.image_id}' and text '{one.text_id}', which are {kind} "
                f"of {captions.name}: 'keep' and 'wrong' are for pairs, 'matches' is for other images."
            )
    return row_of


def corrections_of(captions: Captions, path: str | Path) -> list[Correction]:
    """The corrections of a file, whose hash is that of these data: all of them, with every split."""
    corrections = read_corrections(path)
    hashes = {one.data for one in corrections}
    if other := sorted(hashes - {data_hash(captions)} if hashes else hashes):
        raise DataError(
            f"{path} corrects other data ({other[0]}) than {captions.name}: give the corrections of this data."
        )
    return corrections


def apply_corrections(captions: Captions, path: str | Path) -> Captions:
    """The data without the pairs that a file calls wrong; an image that loses all its texts goes with them."""
    corrections = corrections_of(captions, path)
    row_of = check_ids(corrections, captions, path)
    if wrong := [row_of[one.text_id] for one in corrections if one.verdict == "wrong"]:
        captions = replace(captions, text_ids=list(row_of))  # the third text of an image stays IMAGE#2
    texts = np.setdiff1d(np.arange(len(captions.texts)), wrong)
    empty = set(captions.image_of[wrong].tolist()) - set(captions.image_of[texts].tolist())
    note = f"{path}: {counted(len(wrong), 'wrong pair')} left out."
    smaller = with_pairs(captions, texts, captions.image_of[texts], note)
    return (
        smaller.subset([row for row in range(len(captions.images)) if row not in empty]) if empty else smaller
    )


def with_pairs(
    captions: Captions, texts: NDArray[np.int64], image_of: NDArray[np.int64], note: str
) -> Captions:
    """The same images with some of the texts, each with the image given for it."""
    notes = (*captions.notes, note)
    if len(texts) == len(captions.texts):
        return replace(captions, image_of=image_of, notes=notes)
    return captions.with_texts(texts, image_of, notes=notes)


@dataclass(frozen=True)
class Noise:
    """How the pairs of a training split were mixed up.

    ``ratio`` is the nominal one, ``wrong`` the share of texts that have another image now, ``lost`` the share of images
    that keep none of their texts. ``unit`` is image where the texts of an image stay together. ``hash`` is that of the
    file, or of what was drawn.
    """

    given: str
    ratio: float
    unit: str
    wrong: float
    lost: float
    hash: str

    @staticmethod
    def read(content: Mapping[str, Any]) -> Noise:
        """What ``asdict`` made of one, out of a file."""
        ratio, wrong, lost = (float(content[name]) for name in ("ratio", "wrong", "lost"))
        return Noise(str(content["given"]), ratio, str(content["unit"]), wrong, lost, str(content["hash"]))

    def __str__(self) -> str:
        return (
            f"{100 * self.ratio:g} % by {self.unit} ({100 * self.wrong:.1f} % of texts have another image, "
            f"{100 * self.lost:.1f} % of images keep no text; {self.given}, {self.hash})"
        )


def add_noise(captions: Captions, noise: str) -> tuple[Captions, Noise]:
    """A training split with noise, a file or RATIO:text or RATIO:image, and what that did to it.

    What is drawn depends on the data and the ratio alone: runs of other seeds train on the same pairs.
    """
    own = captions.image_of
    new_owner, digest, ratio_and_unit = _noisy(captions, noise)
    images, intact = np.unique(own), np.unique(own[new_owner == own])
    wrong = float(np.mean(new_owner != own)) if len(own) else 0.0
    owners = np.zeros(len(captions.images), np.int64)
    owners[own] = new_owner  # for each image, that of its last text
    together = len(images) < len(own) and bool((owners[own] == new_owner).all())
    ratio, unit = ratio_and_unit or (round(wrong, 2), "image" if together else "text")
    about = Noise(noise, ratio, unit, wrong, (len(images) - len(intact)) / max(1, len(images)), digest)
    every = np.arange(len(own))
    return with_pairs(captions, every, new_owner, f"noise in the training pairs: {about}."), about


def _noisy(captions: Captions, noise: str) -> tuple[NDArray[np.int64], str, tuple[float, str] | None]:
    """The image of each text, a hash of where it is from, and the ratio and unit where it was drawn."""
    match, path = _RATIO.fullmatch(noise), expanded(noise)
    if match is None and path.suffix != ".npy":
        raise SettingsError(
            f"--noise is '{noise}': give a ratio and its unit, such as 0.4:text or 0.4:image, or a file .npy."
        )
    if match is None:
        rows = _rows_of_file(captions, path)
        return rows, file_hash(path), None
    ratio, unit, own = float(match[1]), match[2], captions.image_of
    if ratio > 1:
        raise SettingsError(f"--noise is '{noise}': the ratio is a share of the {unit}s, from 0 to 1.")
    rng = np.random.default_rng(0)
    owners = np.arange(len(captions.images)) if unit == "image" else own.copy()
    units = np.unique(own) if unit == "image" else np.arange(len(own))
    places = rng.permutation(units)[: int(ratio * len(units))]
    owners[places] = rng.permutation(owners[places])
    rows = owners[own] if unit == "image" else owners
    return rows, hashlib.sha256(rows.tobytes()).hexdigest()[:16], (ratio, unit)


def _rows_of_file(captions: Captions, path: Path) -> NDArray[np.int64]:
    store, texts, images = ArrayStore(path), len(captions.texts), len(captions.images)
    if len(store.shape) != 1 or store.dtype.kind not in "iu":
        raise DataError(f"{path} holds {store.dtype} of shape {store.shape}: noise is a list of image rows.")
    if len(store) not in (texts, images):
        raise DataError(
            f"{path} has {len(store):,} rows for the {texts:,} texts and {images:,} images of the training split of "
            f"{captions.name}: give the noise file of this data."
        )
    rows = store.rows(np.arange(len(store))).astype(np.int64)
    outside = rows[(rows < 0) | (rows >= images)]
    if len(outside):
        raise DataError(
            f"{path} names image row {outside[0]}, and the training split of {captions.name} has rows 0 to "
            f"{images - 1}: give the noise file of this data."
        )
    return rows if len(rows) == texts else rows[captions.image_of]
