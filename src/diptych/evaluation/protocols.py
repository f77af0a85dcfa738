"""Protocols: which data a published number stands for, how it is averaged, and the rules of ranking.

=============  ======  =============  =====================================================================
name           images  texts / image  averaged over
=============  ======  =============  =====================================================================
``plain``      any     any            nothing: every image and text at once
``flickr30k``  1,000   5              nothing
``coco-5k``    5,000   5              nothing
``coco-1k``    5,000   5              five folds of 1,000 consecutive images with their texts
=============  ======  =============  =====================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict, Unpack

import numpy as np
import torch
from numpy.typing import NDArray

from diptych.errors import DataError, SettingsError
from diptych.evaluation.judgements import Judgements, load_judgements
from diptych.evaluation.metrics import checked_ties
from diptych.model.scores import Fold, Scores
from diptych.registries import PROTOCOLS


@dataclass(frozen=True, slots=True)
class EvaluationProtocol:
    """The size data must have (None: any) and the number of folds of consecutive images."""

    name: str
    images: int | None = None
    texts_per_image: int | None = None
    folds: int = 1
    expects: str = ""  # the data in words, for the error message

    def check(self, image_of: NDArray[np.int64], images: int) -> None:
        """Refuse data that are not the protocol's, with what to do about it."""
        if self.images is not None and images != self.images:
            raise DataError(
                f"the protocol {self.name} is defined on {self.expects}, but the data have {images:,} "
                "images: give that split, or use the protocol plain."
            )
        sizes = np.bincount(image_of, minlength=images)
        if self.texts_per_image is not None and (wrong := np.flatnonzero(sizes != self.texts_per_image)).size:
            raise DataError(
                f"the protocol {self.name} takes {self.texts_per_image} texts per image, but {wrong.size:,} "
                f"images differ (image row {wrong[0]} has {sizes[wrong[0]]}): keep the first "
                f"{self.texts_per_image} texts of each, or use the protocol plain."
            )
        if images % self.folds:
            raise DataError(f"{images} images do not divide into {self.folds} folds: use the protocol plain.")

    def split(
        self, image_of: NDArray[np.int64], images: int
    ) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Rows of the images and of the texts of each fold, in the order of the data."""
        rows = np.split(np.arange(images), self.folds)
        return [(fold, np.flatnonzero((image_of >= fold[0]) & (image_of <= fold[-1]))) for fold in rows]

    def part(self, scores: Scores, images: NDArray[np.int64], texts: NDArray[np.int64]) -> Scores:
        whole = self.folds == 1
        return scores if whole else Fold(scores, torch.from_numpy(images), torch.from_numpy(texts))


_COCO = "the 5,000 test images of COCO (Karpathy's split, 'testall' of the precomputed folders)"
PLAIN = EvaluationProtocol("plain")
FLICKR30K = EvaluationProtocol(
    "flickr30k", 1000, 5, expects="the 1,000 test images of Flickr30K (Karpathy's split)"
)
COCO_5K = EvaluationProtocol("coco-5k", 5000, 5, expects=_COCO)
COCO_1K = EvaluationProtocol("coco-1k", 5000, 5, folds=5, expects=f"{_COCO}, cut into five folds")


def protocol_named(protocol: str | EvaluationProtocol) -> EvaluationProtocol:
    """A protocol of retrieval by its name; an ``EvaluationProtocol`` of your own passes through."""
    found = PROTOCOLS.find(protocol) if isinstance(protocol, str) else protocol
    if not isinstance(found, EvaluationProtocol):
        raise SettingsError(
            f"the protocol {protocol} has a measure of its own: evaluate one run or model folder under it."
        )
    return found


Protocols = str | EvaluationProtocol | Sequence[str | EvaluationProtocol]
"""A protocol of retrieval or several, by name or as an ``EvaluationProtocol``."""


class Options(TypedDict, total=False):
    """What a caller may say about how scores become numbers; the defaults are those of ``rules_of``."""

    protocol: Protocols
    ties: str
    judgements: Sequence[str | Judgements]
    bootstrap: int
    seed: int
    equal_texts: bool


@dataclass(frozen=True, slots=True)
class Rules:
    """How scores become numbers under one protocol: tie rule, judgements, resamples, what is right."""

    protocol: EvaluationProtocol = PLAIN
    ties: str = "index"
    judgements: Sequence[Judgements] = ()
    bootstrap: int = 0
    seed: int = 0
    equal_texts: bool = False


PLAIN_RULES = Rules()


def rules_of(**options: Unpack[Options]) -> list[Rules]:
    """The rules of each protocol, names looked up. Judgements count under the protocols without folds."""
    protocol, draws = options.get("protocol", "plain"), options.get("bootstrap", 1000)
    if draws < 0:
        raise SettingsError(f"bootstrap={draws} is negative: give the number of resamples, 0 for none.")
    several = [protocol] if isinstance(protocol, str | EvaluationProtocol) else protocol
    protocols = [protocol_named(one) for one in several]
    names = [one.name for one in protocols]
    if not names:
        raise SettingsError("the list of protocols is empty: name one, such as plain.")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise SettingsError(f"the protocol {twice} is named twice: name it once.")
    judged = [load_judgements(one) if isinstance(one, str) else one for one in options.get("judgements", ())]
    if judged and all(one.folds > 1 for one in protocols):
        raise SettingsError(
            f"{judged[0].name} is judged on the whole gallery, the protocol {protocols[0].name} has "
            f"{protocols[0].folds} folds: use coco-5k."
        )
    ties, seed = checked_ties(options.get("ties", "index")), options.get("seed", 0)
    equal = options.get("equal_texts", False)
    return [Rules(one, ties, () if one.folds > 1 else judged, draws, seed, equal) for one in protocols]


def rules_of_ranks(**options: Unpack[Options]) -> Rules:
    """The rules under which ranks of the whole gallery can be reported."""
    rules, *more = rules_of(**options)
    if more:
        raise SettingsError("vectors are ranked under one protocol at a time: give one.")
    if rules.protocol.folds > 1:
        raise SettingsError(
            f"the protocol {rules.protocol.name} ranks {rules.protocol.folds} folds by themselves, these ranks are "
            "of the whole gallery: use plain."
        )
    return rules
