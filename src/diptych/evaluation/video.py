"""Video–text retrieval: recall over a gallery of different texts, as HGR's code measures it, and over all texts.

Texts of MSR-VTT repeat between videos ("a man is talking"). HGR's code ranks each different string once, and counts it
as right for every video that lists it. Papers in its line print that number; the plain one ranks all texts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from diptych.data.captions import Captions, first_of_each
from diptych.evaluation.cards import Facts, made_by, split_names
from diptych.evaluation.metrics import (
    DIRECTIONS,
    KS,
    checked_ties,
    count_ranks,
    count_shared_ranks,
    summary,
)
from diptych.evaluation.prepared import Prepared
from diptych.evaluation.report import Group, Layout
from diptych.evaluation.significance import intervals_of, recall_queries
from diptych.model.retriever import Retriever
from diptych.model.scores import Fold

ALL = "all_texts_"  # before the names of the metrics over every text


@dataclass(frozen=True)
class Deduplicated:
    """The different texts of captions: the first row of each, and the pairs (video, different text)."""

    rows: NDArray[np.int64]  # (U,) of the texts that are kept
    image_of: NDArray[np.int64]  # (P,)
    text_of: NDArray[np.int64]  # (P,) into ``rows``


def dedupe_captions(captions: Captions) -> Deduplicated:
    """Each different string once, with every video that lists it."""
    rows, places = np.unique(first_of_each(captions.texts), return_inverse=True)
    pairs = dict.fromkeys(zip(captions.image_of.tolist(), places.tolist(), strict=True))
    image_of, text_of = np.array(list(pairs), np.int64).reshape(-1, 2).T
    return Deduplicated(rows, image_of, text_of)


@dataclass(frozen=True)
class VideoRetrieval:
    """Recall both ways over the different texts and over all; the primary metric is ``video_rsum``, of the former.

    ``dedupe_captions=False`` leaves the first out. ``bootstrap`` is the number of resamples of its intervals, by
    video; 0 for none.
    """

    dedupe_captions: bool = True
    ties: str = "index"
    bootstrap: int = 0
    seed: int = 0

    def __call__(self, model: Retriever, data: Prepared, *, show_progress: bool = False) -> Group:
        began = time.perf_counter()
        checked_ties(self.ties)
        captions = data.captions
        scores = data.scores_of(model, show_progress)
        ranks = count_ranks(scores, captions.image_of)
        metrics = {f"{ALL}{_renamed(name)}": value for name, value in summary(ranks, self.ties).items()}
        owner, texts = captions.image_of, len(captions.texts)  # of the texts in the gallery
        if self.dedupe_captions:
            kept = dedupe_captions(captions)
            every = torch.arange(len(captions.images), device=scores.device)
            part = Fold(scores, every, torch.from_numpy(kept.rows).to(scores.device))
            ranks = count_shared_ranks(part, kept.image_of, kept.text_of)
            owner, texts = captions.image_of[kept.rows], len(kept.rows)
        own = {_renamed(name): value for name, value in summary(ranks, self.ties).items()}
        facts = Facts(
            {
                "data": captions.name,
                "split": split_names(captions),
                "videos": len(captions.images),
                "texts": len(captions.texts),
                "texts in the gallery": texts,
                "gallery": "different texts" if self.dedupe_captions else "all texts",
                "ties": self.ties,
                "data hash": captions.fingerprint(),
            },
            {
                "tied queries": sum(placement.tied_queries for _, placement in ranks),
                "score": scores.kind,
                **made_by(model),
                "bootstrap": self.bootstrap,
            },
        )
        # a text that several videos list comes along with the first of them
        queries = recall_queries(ranks, owner, self.ties)
        return Group(
            "videos",
            {**own, **(metrics if self.dedupe_captions else {})},
            "video_rsum",
            facts,
            intervals_of(
                {_renamed(name): one for name, one in queries.items()},
                len(captions.images),
                self.bootstrap,
                np.random.default_rng(self.seed),
                total="video_rsum",
            ),
            {"seconds": time.perf_counter() - began},
            _tables(self.dedupe_captions),
        )


def _tables(deduplicated: bool) -> Sequence[Layout]:
    words = ("video → text", "text → video")
    head = ["different texts" if deduplicated else "all texts", *(f"R@{k}" for k in KS), "median rank"]
    first = Layout(
        head,
        [
            (word, [*(f"{name}_recall@{k}" for k in KS), f"{name}_median_rank"])
            for word, name in zip(words, map(_renamed, DIRECTIONS), strict=True)
        ]
        + [("RSUM", ["video_rsum", *[""] * len(KS)])],
    )
    if not deduplicated:
        return (first,)
    rows = [(label, [name and f"{ALL}{name}" for name in cells]) for label, cells in first.rows]
    return first, replace(first, head=["all texts", *head[1:]], rows=rows)


def _renamed(name: str) -> str:
    """A metric of images as one of videos: ``video_to_text_recall@1``, ``video_rsum``."""
    return name.replace("image", "video") if "image" in name else f"video_{name}"
