"""What evaluators read: captions made ready for one model, and scores that exist already."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from diptych.data.captions import Captions
from diptych.data.text import TextStore
from diptych.model.retriever import Retriever
from diptych.model.scores import Scores, Where


@dataclass(frozen=True)
class Prepared:
    """Captions whose texts are tokenised (or cached) once; ``captions.images`` may be cached features.

    ``others`` are the images of the data that are not in ``captions``, for an evaluator that ranks them. ``scored``
    are the scores of these captions where they were computed already, by the model or by an ensemble.
    """

    captions: Captions
    texts: TextStore
    others: Captions | None = None
    scored: PreparedScores | None = None

    def scores_of(self, model: Retriever, show_progress: bool = False) -> Scores:
        """The scores of the captions, computed now where they do not exist."""
        if self.scored is not None:
            return self.scored.scores
        return model.scores(self.captions.images, self.texts, show_progress=show_progress)


@dataclass(frozen=True)
class PreparedScores:
    """Scores (images, texts), and what a card says of where they come from.

    ``encoding`` has ``images_per_second`` and ``texts_per_second``, ``seconds`` is what it took to get the scores, and
    ``computed`` timed their computation where ``scores`` are only read from a file. With ``directions``, image → text
    and text → image are ranked by scores of their own.
    """

    scores: Scores
    model: str = "unknown"
    encoding: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    computed: Timed | None = None
    directions: tuple[Scores, Scores] | None = None


class Timed:
    """Scores that remember how many pairs they computed in how much time."""

    def __init__(self, scores: Scores) -> None:
        self.scores, self.pairs, self.seconds = scores, 0, 0.0
        self.kind, self.shape, self.device = scores.kind, scores.shape, scores.device

    def tile(self, images: Where, texts: Where) -> Tensor:
        start = time.perf_counter()
        part = self.scores.tile(images, texts)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds += time.perf_counter() - start
        self.pairs += part.numel()
        return part
