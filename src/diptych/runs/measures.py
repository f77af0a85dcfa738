"""What ``diptych evaluate`` measures: the evaluators of the protocols that a user names, with their options.

A protocol is an evaluator, or an ``EvaluationProtocol``, under which ``Retrieval`` measures. What an evaluator's class
says of itself decides what it is given:

=========================  ================================================================================
arguments                  ``ties``, ``bootstrap``, ``strict_images``, ``column``: what the user or the run says
``reads(path)``            whether a ``--data`` is a folder that it opens itself (``folder`` or ``folders``), which
                           ``wants`` describes
``check_folder``           called with a model and such a folder, raises where it lacks what the model reads
``reads_captions = False`` it needs no image-text data
``reads_others = True``    it ranks the images of the data that are not in the split, ``Prepared.others``
``members``                it is made of these evaluators
=========================  ================================================================================
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from diptych.data.captions import canonical_split
from diptych.data.labels import COLUMN
from diptych.errors import SettingsError
from diptych.evaluation.evaluate import Evaluator, Retrieval
from diptych.evaluation.hubness import BETA
from diptych.evaluation.protocols import EvaluationProtocol, rules_of
from diptych.names import call
from diptych.progress import echo
from diptych.recipes import RECIPES
from diptych.recipes.recipe import Recipe
from diptych.registries import PROTOCOLS
from diptych.settings import from_saved
from diptych.training.checkpoint import deciding_metric, read_run


@dataclass(frozen=True)
class EvaluationRequest:
    """What the user asks ``evaluate_runs`` for.

    ``protocol`` is one name or several. ``depth`` is the K of hashing's MAP@K. With ``rerank`` and ``reranker``, the
    pair scorers of other runs judge the best of each query. ``score_matrix`` is a file that the scores are computed
    into first (see ``scored_by``). ``hubness`` names the split whose images and texts are the bank of
    ``inverted_softmax``. Pictures that cannot be read are left out, told and counted on the card, or with
    ``strict_images`` an error. ``equal_texts``: see ``evaluate``. ``ray`` is the address of a cluster that counts the
    ranks of vectors. ``say`` is told the device.
    """

    data: Sequence[str] = ()
    split: str | None = None
    protocol: str | Sequence[str] = "plain"
    judgements: Sequence[str] = ()
    ties: str = "index"
    bootstrap: int = 1000
    depth: int | None = None
    rerank: int = 0
    reranker: Sequence[Path] = ()
    score_matrix: Path | None = None
    hubness: str | None = None
    hubness_beta: float = BETA
    output: Path | None = None
    device: str = "auto"
    compute_precision: str = "no"
    strict_images: bool = False
    equal_texts: bool = False
    ray: str | None = None
    say: Callable[[torch.device], None] | None = None
    show_progress: bool = True

    @property
    def protocols(self) -> Sequence[str]:
        return [self.protocol] if isinstance(self.protocol, str) else self.protocol


@dataclass(frozen=True)
class Measure:
    """An evaluator under a protocol; whether it reads image-text data, and ranks the images outside the split."""

    protocol: str
    evaluator: Evaluator
    captions: bool = True
    others: bool = False


def measures_of(runs: Sequence[Path], request: EvaluationRequest) -> tuple[list[Measure], list[str]]:
    """What to measure, in order, once the options fit together, and which of ``--data`` is image-text data."""
    if bool(request.rerank) != bool(request.reranker):
        raise SettingsError("--rerank N and --reranker RUN go together: give both, or neither.")
    if request.rerank and request.score_matrix is not None:
        raise SettingsError("--score_matrix holds all pairs, and --rerank judges a few: give one of them.")
    if request.hubness and (request.rerank or request.score_matrix is not None):
        raise SettingsError("--hubness needs the vectors: leave out --rerank and --score_matrix.")
    if request.hubness_beta != BETA and not request.hubness:
        raise SettingsError("--hubness_beta is the β of --hubness SPLIT: give both, or neither.")
    if request.hubness and canonical_split(request.hubness) == canonical_split(request.split or "val"):
        raise SettingsError(
            f"--hubness {request.hubness} is the split that is evaluated: give another one, such as train."
        )
    if request.depth is not None and "hashing" not in request.protocols:
        raise SettingsError(
            f"--depth is for the protocol hashing, not {' and '.join(request.protocols)}: leave it out."
        )
    if request.ray is not None:
        raise SettingsError("--ray evaluates a folder of vectors: give that of diptych embed.")
    named = {name: PROTOCOLS.find(name) for name in request.protocols}
    plain = [name for name in request.protocols if isinstance(named[name], EvaluationProtocol)]
    found = _retrieval(runs, plain, request) if plain else []
    for name in (name for name in named if name not in plain):
        found += _evaluators(name, runs, request)
    readers = [one.reads for one in named.values() if hasattr(one, "reads")]
    pairs = [path for path in request.data if not any(reads(path) for reads in readers)]
    if pairs and not any(one.captions for one in found):
        raise SettingsError(f"the protocol {found[0].protocol} does not read {pairs[0]}: leave it out.")
    return found, pairs


def _retrieval(runs: Sequence[Path], protocols: Sequence[str], request: EvaluationRequest) -> list[Measure]:
    """Retrieval, and what the recipe of a single run measures beside it, in the recipe's order."""
    rules = rules_of(
        protocol=protocols, ties=request.ties, judgements=request.judgements, bootstrap=request.bootstrap,
        equal_texts=request.equal_texts,
    )  # fmt: skip
    retrieval = [Measure(name, Retrieval(one)) for name, one in zip(protocols, rules, strict=True)]
    own = own_evaluators(runs[0]) if len(runs) == 1 and not request.reranker else ()
    found: list[Measure] = []
    for evaluator in own:
        if isinstance(evaluator, Retrieval):
            found += retrieval
            continue
        fields = getattr(evaluator, "__dataclass_fields__", {})
        for name in protocols if "protocol" in fields else protocols[:1]:
            given: dict[str, Any] = {"protocol": name, "bootstrap": request.bootstrap}
            known = {field: value for field, value in given.items() if field in fields}
            made = replace(evaluator, **known) if known else evaluator  # type: ignore[type-var]
            found.append(Measure(name, made, getattr(made, "reads_captions", True)))
    return found if any(isinstance(one, Retrieval) for one in own) else found + retrieval


def own_evaluators(run: Path) -> Sequence[Evaluator]:
    """What the recipe of a run measures while it trains; nothing where that is retrieval alone."""
    if not (run / "run.json").is_file():
        return ()
    found = read_run(run)
    recipe: Recipe | None = RECIPES.get(found["recipe"])
    if recipe is None and (metric := deciding_metric(run)) != "rsum":
        chose = f": {metric} chose the best epoch" if metric else ""
        echo(f"the recipe '{found['recipe']}' is in no installed package, so what it measures beside retrieval is left "
            f"out{chose}; install its package, or name its module in DIPTYCH_PLUGINS.", err=True)  # fmt: skip
    if recipe is None or recipe.evaluators is None:
        return ()
    return recipe.evaluators(from_saved(recipe.settings, found["settings"]))


def _evaluators(protocol: str, runs: Sequence[Path], request: EvaluationRequest) -> list[Measure]:
    """The evaluators of a protocol with a measure of its own; a class gets the options that it has arguments for."""
    given = (request.rerank, request.score_matrix, request.judgements, request.equal_texts, request.hubness)
    if any(given):
        raise SettingsError(
            f"the protocol {protocol} has a measure of its own: leave out --rerank, --score_matrix, --judgements, "
            "--equal_texts and --hubness."
        )
    if len(runs) != 1:
        raise SettingsError(f"the protocol {protocol} takes one model, not {len(runs)}: give one at a time.")
    found: Any = PROTOCOLS.find(protocol)
    takes = inspect.signature(found).parameters if isinstance(found, type) else {}
    if request.ties != "index" and "ties" not in takes:
        raise SettingsError(f"the protocol {protocol} has no rule for ties: leave out --ties.")
    made = found
    if isinstance(found, type):
        folders = [path for path in request.data if found.reads(path)] if hasattr(found, "reads") else []
        if hasattr(found, "wants") and not folders:
            lacks = f"does not read {request.data[0]}" if request.data else "needs --data"
            raise SettingsError(f"the protocol {protocol} {lacks}: give {found.wants}.")
        if "folder" in takes and len(folders) != 1:
            raise SettingsError(f"the protocol {protocol} takes one --data, not {len(folders)}: give one.")
        settings = read_run(runs[0])["settings"] if (runs[0] / "run.json").is_file() else {}
        made = call(
            found, f"the protocol {protocol}", folders=folders, folder=folders[0] if folders else "",
            strict_images=request.strict_images, ties=request.ties, bootstrap=request.bootstrap,
            column=str(settings.get("label_column", COLUMN)), split_labels=settings.get("split_labels", not settings),
            **({} if request.depth is None else {"top": request.depth}),
        )  # fmt: skip
    members = getattr(made, "members", [made])
    if not all(callable(one) for one in members):
        raise SettingsError(
            f"the protocol '{protocol}' is a {type(made).__name__}: give an EvaluationProtocol or an evaluator."
        )
    return [
        Measure(protocol, one, getattr(one, "reads_captions", True), getattr(one, "reads_others", False))
        for one in members
    ]
