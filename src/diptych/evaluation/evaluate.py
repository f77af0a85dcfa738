"""Evaluate a model on data, or vectors that exist already; evaluators, each a group of metrics of its own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diptych.data.arrays import as_rows, check_rows, unit_rows
from diptych.data.captions import Captions
from diptych.data.held_out import open_split, split_of
from diptych.data.text import TextStore
from diptych.errors import DataError, SettingsError
from diptych.evaluation.judgements import Judgements, check_corrections
from diptych.evaluation.prepared import Prepared, PreparedScores
from diptych.evaluation.protocols import PLAIN_RULES, Protocols, Rules, rules_of
from diptych.evaluation.report import Group, Report
from diptych.evaluation.retrieval import check_captions, evaluate_scores, report_scored, scored_by
from diptych.evaluation.score_matrix import read_scores
from diptych.model.protocol import Scorer
from diptych.model.retriever import Retriever
from diptych.model.scores import EmbeddingScores, MatrixScores, Scores

Model = Scorer | str | Path
"""A model: a retriever, or the folder or name of one."""


def evaluate(
    model: Model | Sequence[Model] | PreparedScores | Scores | Tensor | NDArray[Any],
    data: Captions | str | Path,
    *,
    split: str | None = None,
    protocol: Protocols = "plain",
    ties: str = "index",
    judgements: Sequence[str | Judgements] = (),
    text_store: TextStore | None = None,
    image_batch_size: int | None = None,
    text_batch_size: int | None = None,
    bootstrap: int = 1000,
    seed: int = 0,
    equal_texts: bool = False,
    device: torch.device | str | None = None,
    show_progress: bool = False,
) -> Report:
    """Encode every image and text of the data once, and report retrieval in both directions.

    ``model`` is a retriever, or the folder or name of one; several are an ensemble, the mean of their scores. In place
    of a model, give the scores (images, texts) of these captions: a matrix, its ``.npy`` file, or any ``Scores``, such
    as those of a TREC run (``evaluation.trec``). ``data`` is a path, of which the split "test" is measured unless
    ``split`` names another, or captions, which are measured whole unless ``split`` names a part of them; "val" is what
    training holds out where the data have no such split.

    ``protocol`` names the data that a published number stands for (``evaluation.protocols``). Of several, each is a
    group of the report, and the names of its metrics begin with the protocol: ``coco-1k_rsum``. ``ties`` is the rule
    for equal scores. ``text_store`` holds the texts already prepared for this model. ``bootstrap`` is the number of
    resamples of the intervals, 0 for none. Scores are computed on ``device``, by default where the model is. With
    ``equal_texts``, every image that has a text is right for it, and every equal text for the image.

    Example::

        report = diptych.evaluate("runs/photos", "photos", split="val")
        print(report, report.metrics["text_to_image_recall@1"])
    """
    if not isinstance(data, Captions):
        check_corrections(judgements, data)
        data = open_split(str(data), split or "test")
    elif split is not None:
        data = split_of(data, split)
    rules = rules_of(
        protocol=protocol, ties=ties, judgements=judgements, bootstrap=bootstrap, seed=seed, equal_texts=equal_texts
    )  # fmt: skip
    check_captions(data, rules)
    if (existing := _existing_scores(model)) is not None:
        return report_scored(existing, data, rules)
    several = [model] if isinstance(model, str | Path) or not isinstance(model, Sequence) else model
    if text_store is not None and len(several) > 1:
        raise SettingsError(f"a text store is for one model: leave it out for the {len(several)} models.")
    models: list[Any] = [
        Retriever.from_pretrained(one, device) if isinstance(one, str | Path) else one for one in several
    ]
    ready = [(data.images, data.texts if text_store is None else text_store)] * len(models)
    with scored_by(
        models, data, ready, image_batch_size=image_batch_size, text_batch_size=text_batch_size, device=device,
        show_progress=show_progress,
    ) as scored:  # fmt: skip
        return report_scored(scored, data, rules)


def _existing_scores(model: Any) -> PreparedScores | None:
    """Scores that exist already; None for a model."""
    if isinstance(model, str | Path) and Path(model).suffix == ".npy":
        return PreparedScores(read_scores(Path(model)), str(model))
    if isinstance(model, Tensor | np.ndarray):
        return PreparedScores(MatrixScores(model))
    if isinstance(model, PreparedScores):
        return model
    return PreparedScores(model) if hasattr(model, "tile") else None


def evaluate_embeddings(
    images: Any,
    texts: Any,
    image_of: Sequence[int] | NDArray[np.int64] | None = None,
    protocol: Protocols = "plain",
    *,
    ties: str = "index",
    bootstrap: int = 1000,
    seed: int = 0,
) -> Report:
    """Report retrieval with vectors that exist already: images (N, D) and texts (M, D), numpy arrays or tensors.

    Rows are brought to length 1 first, so that scores are cosines. ``image_of`` (M,) is the image of each text; without
    it, text m belongs to image m where there are as many, and to image m // (M / N) where M is a multiple of N.

    Example::

        report = diptych.evaluate_embeddings(images, texts, image_of=[0, 0, 1], bootstrap=0)
        print(report.metrics["rsum"])
    """
    sides = [as_rows(images, "the image vectors"), as_rows(texts, "the text vectors")]
    for rows, what in zip(sides, ("the image vectors", "the text vectors"), strict=True):
        check_rows(rows, what)
        if not len(rows):
            raise DataError(f"{what} are empty: give at least one row.")
    widths, (count, wanted) = [rows.shape[1] for rows in sides], [len(rows) for rows in sides]
    if widths[0] != widths[1]:
        raise DataError(
            f"image vectors have {widths[0]} numbers and text vectors {widths[1]}: encode both with one model."
        )
    if image_of is None:
        if wanted % count:
            raise DataError(
                f"{wanted} texts do not divide evenly over {count} images: say with image_of which image each text has."
            )
        image_of = np.arange(wanted) // (wanted // count)
    vectors = [torch.from_numpy(unit_rows(rows)) for rows in sides]
    return evaluate_scores(
        EmbeddingScores(vectors[0], vectors[1]),
        image_of,
        protocol=protocol,
        ties=ties,
        bootstrap=bootstrap,
        seed=seed,
        model="vectors",
    )


class Evaluator(Protocol):
    """Measures a model on data; an object without state that changes."""

    def __call__(self, model: Retriever, data: Prepared, *, show_progress: bool = False) -> Group:
        """The metrics of the model on these captions."""


@dataclass(frozen=True)
class Retrieval:
    """Recall in both directions, RSUM; see ``evaluate``. By default under the protocol plain, without intervals."""

    rules: Rules = PLAIN_RULES

    def __call__(self, model: Retriever, data: Prepared, *, show_progress: bool = False) -> Group:
        captions, ready = data.captions, [(data.captions.images, data.texts)]
        known = nullcontext(data.scored) if data.scored is not None else None
        with known or scored_by([model], captions, ready, show_progress=show_progress) as scored:
            return report_scored(scored, captions, [self.rules]).groups[0]


def check_data(evaluators: Sequence[Evaluator], model: Retriever, captions: Captions) -> None:
    """Refuse data that an evaluator cannot read, before an epoch is spent on them; some have a ``check`` for that."""
    for evaluator in evaluators:
        if hasattr(evaluator, "check"):
            evaluator.check(model, captions)


def measure(
    evaluators: Sequence[Evaluator], model: Retriever, data: Prepared, *, show_progress: bool = False
) -> Report:
    """Every evaluator's group, in order; the first one's primary metric chooses between models."""
    if not evaluators:
        raise SettingsError("a method needs at least one evaluator: give Retrieval().")
    return Report(tuple(evaluator(model, data, show_progress=show_progress) for evaluator in evaluators))
