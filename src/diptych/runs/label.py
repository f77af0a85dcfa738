"""Predict labels of images and texts into a table: what ``diptych label`` does."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diptych.data.captions import HALVES
from diptych.data.formats import open_captions
from diptych.data.problems import LeftOut, ToBeLeftOut, undecodable
from diptych.storage import write_bytes

HEAD = ("kind", "id", "text", "labels", "scores")
Labelling = Any
"""A model with ``predict_labels``."""
SEPARATOR = ";"  # a manifest with such a column is read back as labels


def label_collection(
    model: Labelling,
    path: str | Path,
    output: Path,
    *,
    texts: bool = True,
    threshold: float | None = None,
    top: int | None = None,
) -> str:
    """Write one row per image, and per text where there are any, and return how many got a label.

    Images that cannot be read are left out, with their texts, and said.
    """
    whole, left_out = open_captions(path, problems=ToBeLeftOut()), LeftOut()
    captions = left_out.add(whole, undecodable(whole.images, show_progress=True))
    left_out.tell(len(whole.images), advice=False)
    how = {"threshold": threshold, "top": top, "show_progress": True}
    sides: list[tuple[str, Sequence[str], Sequence[str], dict[str, Any]]] = [
        ("image", captions.image_ids, [""] * len(captions.images), {"images": captions.images})
    ]
    if texts and len(captions.texts):
        owners = [captions.image_ids[image] for image in captions.image_of.tolist()]
        sides.append(("text", owners, captions.texts, {"texts": captions.texts}))
    rows, counts = [], []
    for kind, ids, words, items in sides:
        found = model.predict_labels(**items, **how)
        rows += [(kind, id, text, *_cells(one)) for id, text, one in zip(ids, words, found, strict=True)]
        counts.append(f"{sum(map(bool, found))} of {len(found)} {kind}s")
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(HEAD)
    writer.writerows(rows)
    write_bytes(output, table.getvalue().encode("utf-8", HALVES))
    return f"{output}: {' and '.join(counts)} have a label"


def _cells(labels: Mapping[str, float]) -> tuple[str, str]:
    return SEPARATOR.join(labels), SEPARATOR.join(f"{score:.3f}" for score in labels.values())
