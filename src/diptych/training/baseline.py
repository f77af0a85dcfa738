"""Ridge regression beside every run: what the same frozen features give without any training."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from diptych.data.captions import holds_features
from diptych.data.text import CachedTexts
from diptych.entries import MODEL
from diptych.evaluation.evaluate import Retrieval
from diptych.evaluation.prepared import Prepared
from diptych.storage import MISREAD, parse_json, write_text
from diptych.training.checkpoint import Progress
from diptych.training.method import Method
from diptych.training.ridge import Names, accumulate, choose

FILE = "baseline.json"
MOST_BYTES = 4 << 30  # largest features that are read for it: some seconds
WIDEST = 4096  # features per image: the solve takes a minute beyond


@dataclass(frozen=True)
class Baseline:
    """RSUM of ridge regression on the validation split, or the reason why there is none."""

    rsum: float | None
    reason: str = ""

    @staticmethod
    def load(folder: Path) -> Baseline | None:
        """What an earlier start of a run measured; None where it measured nothing, or the file is damaged."""
        try:
            content = parse_json(MODEL.read(folder / FILE))
            return Baseline(
                None if content["rsum"] is None else float(content["rsum"]), str(content["reason"])
            )
        except (OSError, *MISREAD):
            return None

    def save(self, folder: Path) -> None:
        write_text(folder / FILE, json.dumps(asdict(self)))


def ridge_baseline(
    method: Method,
    training: Prepared,
    validation: Prepared,
    names: Names | None = None,
    *,
    show_progress: bool = False,
) -> Baseline:
    """Ridge regression on the features that a run reads anyway, where both encoders are frozen; nothing is encoded."""
    reason = why_not(method, training)
    if reason:
        return Baseline(None, reason)
    image_input = method.retriever.image_input
    solutions = accumulate(training, image_input, names, show_progress=show_progress).solve()
    return Baseline(choose(solutions, validation, image_input, names).rsum)


def why_not(method: Method, training: Prepared) -> str:
    """Why ridge regression cannot be set beside a run in seconds; empty where it can."""
    images = training.captions.images
    if not method.evaluators or not isinstance(method.evaluators[0], Retrieval):
        return "this run is not judged by recall"
    if not isinstance(training.texts, CachedTexts):
        if any(parameter.requires_grad for parameter in method.retriever.text.encoder.parameters()):
            return "the text encoder is trained, so there are no fixed text vectors"
        return "the frozen text encoder reads the texts in every step, so no text vectors are kept"
    if not holds_features(images):
        return "the image encoder is trained, so there are no fixed features"
    first = np.asarray(images[0])
    size = len(images) * first.nbytes
    if first.shape[-1] > WIDEST or size > MOST_BYTES:
        return f"{size / 1e9:.1f} GB of {first.shape[-1]}-d features take longer than seconds"
    return ""


def verdict(progress: Progress, baseline: Baseline | None, data: str) -> str:
    """Which won on the validation split, training or a closed form, in a sentence; empty where nothing was compared."""
    solved = [line for line in progress.history if line["epoch"] == -1]
    if solved:
        start = solved[0][f"validation_{progress.metric}"]
        if len(progress.history) == 1:
            return ""
        if progress.best_epoch >= 0:
            return f"training gained {progress.best - start:.1f} on the closed form ({start:.1f})."
        return "no epoch beat the closed form, so it is the model."
    if baseline is None:
        return ""
    if baseline.rsum is None:
        return f"ridge regression on the same features was not computed: {baseline.reason}."
    gain, said = progress.best - baseline.rsum, f"ridge regression on the same features: {baseline.rsum:.1f}"
    if gain > 0:
        return f"{said}; this run is better by {gain:.1f}."
    return f"{said}; this run does not beat it ({gain:+.1f}). It takes seconds: diptych train ridge --data {data}"
