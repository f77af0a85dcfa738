"""Predict labels of images and texts into a table: what ``diptych label`` does."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diptych.data.formats import open_captions
from diptych.data.problems import LeftOut, ToBeLeftOut, undecodable
from diptych.storage import write_text

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
    show_progress: bool = True,
) -> str:
    """Write one row per image, and per text where there are any, and return how many got a label.

    Images that cannot be read are left out, with their texts, and told.
    """
    whole, left_out = open_captions(path, problems=ToBeLeftOut()), LeftOut()
    captions = left_out.add(whole, undecodable(whole.images, show_progress=show_progress))
    left_out.tell(len(whole.images), advice=False)
    found = model.predict_labels(captions.images, threshold=threshold, top=top, show_progress=show_progress)
    rows = [
        ("image", image_id, "", *_cells(one)) for image_id, one in zip(captions.image_ids, found, strict=True)
    ]
    labelled = sum(map(bool, found))
    sentence = f"{output}: {labelled} of {len(found)} images"
    if texts and len(captions.texts):
        told = model.predict_labels(
            texts=captions.texts, threshold=threshold, top=top, show_progress=show_progress
        )
        whose = [captions.image_ids[image] for image in captions.image_of.tolist()]
        rows += [
            ("text", image_id, text, *_cells(one))
            for image_id, text, one in zip(whose, captions.texts, told, strict=True)
        ]
        sentence += f" and {sum(map(bool, told))} of {len(told)} texts"
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(HEAD)
    writer.writerows(rows)
    write_text(output, table.getvalue())
    return f"{sentence} have a label"


def _cells(labels: Mapping[str, float]) -> tuple[str, str]:
    """The names and the scores, best first."""
    return SEPARATOR.join(labels), SEPARATOR.join(f"{score:.3f}" for score in labels.values())
