"""Evaluate a folder of vectors: what ``diptych evaluate`` does with the output of ``diptych embed``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diptych.errors import SettingsError
from diptych.evaluation.report import Report
from diptych.evaluation.shards import evaluate_vectors
from diptych.vectors.on_ray import connected

NOT_OF_VECTORS = ("data", "judgements", "rerank", "reranker", "score_matrix", "equal_texts", "strict_images")
"""Options that need the data, a model, or all scores at once."""


def evaluate_folder(
    folders: Sequence[Path],
    *,
    split: str | None = None,
    protocol: str = "plain",
    ties: str = "index",
    bootstrap: int = 1000,
    output: Path | None = None,
    device: str = "auto",
    compute_precision: str = "no",
    ray: str | None = None,
    **others: Any,
) -> Report:
    """The report of one folder; options that mean nothing for vectors are refused."""
    if len(folders) > 1:
        raise SettingsError(
            "a folder of vectors is evaluated alone: give one folder, or runs for an ensemble."
        )
    for name in NOT_OF_VECTORS:
        if others.get(name):
            raise SettingsError(f"--{name} needs a model, {folders[0]} holds vectors: leave it out.")
    if compute_precision != "no":
        raise SettingsError("--compute_precision is for encoding, and these vectors exist: leave it out.")
    rules: dict[str, Any] = {
        "split": split, "protocol": protocol, "ties": ties, "bootstrap": bootstrap, "device": device
    }  # fmt: skip
    if ray is None:
        report = evaluate_vectors(folders[0], **rules, show_progress=True)
    else:
        with connected(ray) as cluster:
            report = evaluate_vectors(folders[0].expanduser().resolve(), **rules, run=cluster.run)
    if output is not None:
        report.save(output)
    return report
