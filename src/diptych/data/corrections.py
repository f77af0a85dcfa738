"""Corrections of a data set: what people say about its pairs, in a file of their own; the data stay as they are.

``corrections.csv`` has the columns ``image_id,text_id,verdict,by,data``. The verdicts ``keep``, ``wrong`` and
``unsure`` are about a pair of the data, ``matches`` says that a text is also right for another image. ``data`` is the
hash of the data set that was looked at (``data_hash``). A text without an id of its own is called IMAGE#N, the N-th
text of its image from 0.
"""

from __future__ import annotations

import csv
import hashlib
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from diptych.data.captions import Captions
from diptych.data.problems import LeftOut, unopenable
from diptych.errors import DataError
from diptych.progress import counted

COLUMNS = ("image_id", "text_id", "verdict", "by", "data")
_OPTION = re.compile(r"[?&]corrections=([^&?]+)")
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
    place = Path(path).expanduser()
    try:
        with place.open(encoding="utf-8-sig", newline="") as file:
            table = csv.DictReader(file)
            if tuple(table.fieldnames or ()) != COLUMNS:
                raise DataError(
                    f"{path} has the columns {','.join(table.fieldnames or ()) or 'none'}: corrections have "
                    f"{','.join(COLUMNS)}."
                )
            rows = [Correction(*(row[name] or "" for name in COLUMNS)) for row in table]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as corrections ({error}): check the file.") from error
    found: dict[tuple[str, str], Correction] = {}
    for row in rows:
        if row.verdict not in VERDICTS:
            raise DataError(f"{path} has the verdict '{row.verdict}': use {', '.join(VERDICTS)}.")
        before = found.setdefault((row.image_id, row.text_id), row)
        if before.verdict != row.verdict:
            raise DataError(
                f"{path} says both '{before.verdict}' and '{row.verdict}' of image '{row.image_id}' and text "
                f"'{row.text_id}': keep one of them."
            )
    return list(found.values())


def text_names(captions: Captions) -> list[str]:
    """What each text is called: its own id where all have one of their own, else IMAGE#N."""
    own = captions.text_ids
    if own is not None and len(set(own)) == len(own):
        return list(own)
    seen: Counter[int] = Counter()
    names = []
    for image in captions.image_of.tolist():
        names.append(f"{captions.image_ids[image]}#{seen[image]}")
        seen[image] += 1
    return names


def data_hash(captions: Captions) -> str:
    """The hash of a data set; images whose file cannot be read play no part."""
    return LeftOut().add(captions, unopenable(captions.images)).fingerprint()


def named_corrections(data: str) -> dict[str, str]:
    """The file of corrections that a data set was opened with (``PATH?corrections=FILE``) and its hash, if any."""
    found = _OPTION.search(data)
    if found is None:
        return {}
    content = Path(found[1]).expanduser().read_bytes()
    return {"file": found[1], "hash": hashlib.sha256(content).hexdigest()[:16]}


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
        if own == (one.verdict == "matches"):
            said = "a pair" if own else "no pair"
            raise DataError(
                f"{path} says '{one.verdict}' of image '{one.image_id}' and text '{one.text_id}', which are {said} "
                f"of {captions.name}: 'matches' is for other images, the rest for pairs."
            )
    return row_of


def corrected(captions: Captions, path: str | Path) -> Captions:
    """The data without the pairs that a file calls wrong; an image that loses all its texts goes with them."""
    corrections = read_corrections(path)
    hashes = {one.data for one in corrections}
    if other := sorted(hashes - {data_hash(captions)} if hashes else hashes):
        raise DataError(
            f"{path} corrects other data ({other[0]}) than {captions.name}: give the corrections of this data."
        )
    row_of = check_ids(corrections, captions, path)
    left = np.ones(len(captions.texts), bool)
    left[[row_of[one.text_id] for one in corrections if one.verdict == "wrong"]] = False
    kept = np.flatnonzero(left)
    new_text = np.full(len(left), -1, np.int64)
    new_text[kept] = np.arange(len(kept))
    gone = set(captions.image_of[~left].tolist()) - set(captions.image_of[kept].tolist())
    note = f"{path}: {counted(len(left) - len(kept), 'wrong pair')} left out."
    smaller = replace(
        captions,
        texts=[captions.texts[row] for row in kept.tolist()],
        image_of=captions.image_of[kept],
        text_ids=None if captions.text_ids is None else [captions.text_ids[row] for row in kept.tolist()],
        order=None if captions.order is None else captions.order.renumbered(new_text),
        notes=(*captions.notes, note),
    )
    return (
        smaller.subset([row for row in range(len(captions.images)) if row not in gone]) if gone else smaller
    )
