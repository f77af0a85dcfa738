"""Failure cases of label-wise retrieval (supplement, section 4): retrieved items that miss the query's labels.

A retrieved item is a failure when it lacks a label of the query and carries another one in its place. Every such pair
(missed label, label found instead) is counted, and is of one of two kinds:

* ``super-class``: the item shares another label with the query, so both lie in one wider class (banana and vegetable
  are both food);
* ``semantic``: query and item share no label at all (a spoon taken for a ball).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diptych.errors import SettingsError
from diptych.evaluation.judgements import top_lists
from diptych.evaluation.labels import Rows, checked_labels
from diptych.evaluation.metrics import DIRECTIONS
from diptych.model.scores import Scores, as_scores

DEPTHS = {"image_to_text": 5, "text_to_image": 3}  # retrieved items looked at, as in the supplement's figure
Kind = Literal["super-class", "semantic"]


@dataclass
class Confusion:
    """A pair of labels: ``missed`` is the query's, ``found`` the retrieved item's; how often, and where.

    ``examples`` are (direction, query row, item row) in the order they were met.
    """

    kind: Kind
    missed: str
    found: str
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(DIRECTIONS, 0))
    examples: list[tuple[str, int, int]] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Retrieved items with this confusion, both directions together."""
        return sum(self.counts.values())


@dataclass(frozen=True)
class Failures:
    """The confusions, most frequent first, and the numbers of retrieved and of failed items by direction."""

    confusions: Sequence[Confusion]
    retrieved: Mapping[str, int]
    failed: Mapping[str, int]


def find_confusions(
    scores: Scores | Tensor | NDArray[Any],
    image_labels: Rows,
    text_labels: Rows,
    names: Sequence[str],
    depths: Mapping[str, int] = DEPTHS,
    examples: int = 3,
) -> Failures:
    """Look at the first items of every query, both ways; ``examples`` of each pair are kept."""
    if min(depths.values()) < 1:
        raise SettingsError("failure cases need at least one retrieved item per query.")
    scores = as_scores(scores)
    images = checked_labels(image_labels, scores.shape[0], "image").numpy() > 0
    texts = checked_labels(text_labels, scores.shape[1], "text").numpy() > 0
    pairs: dict[tuple[Kind, int, int], Confusion] = {}
    retrieved, failed = dict.fromkeys(DIRECTIONS, 0), dict.fromkeys(DIRECTIONS, 0)
    for direction, asked, gallery, dim in (
        (DIRECTIONS[0], images, texts, 1),
        (DIRECTIONS[1], texts, images, 0),
    ):
        depth = min(depths[direction], len(gallery))
        lists = top_lists(scores, torch.arange(len(asked)), depth, dim)  # (Q, depth)
        retrieved[direction] = lists.size
        for query, items in enumerate(lists):
            for item in items.tolist():
                missed, instead = asked[query] & ~gallery[item], gallery[item] & ~asked[query]
                if not (missed.any() and instead.any()):
                    continue
                failed[direction] += 1
                kind: Kind = "super-class" if (asked[query] & gallery[item]).any() else "semantic"
                for a in np.flatnonzero(missed).tolist():
                    for b in np.flatnonzero(instead).tolist():
                        pair = pairs.setdefault((kind, a, b), Confusion(kind, names[a], names[b]))
                        pair.counts[direction] += 1
                        if len(pair.examples) < examples:
                            pair.examples.append((direction, query, item))
    ordered = sorted(pairs.values(), key=lambda one: (-one.count, one.missed, one.found))
    return Failures(ordered, retrieved, failed)
