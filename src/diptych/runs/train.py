"""Run a recipe on data: what ``train``, ``ablate`` and ``demo`` share."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from diptych import notebook
from diptych.data.captions import Captions
from diptych.data.corrections import Noise, add_noise, file_hash
from diptych.data.formats import open_captions, split_options
from diptych.data.held_out import training_splits
from diptych.data.problems import FILE, LeftOut, ToBeLeftOut, unopenable
from diptych.devices import describe_device, pick_device
from diptych.encoders.class_words import with_names
from diptych.encoders.encoder import Encoder
from diptych.encoders.lite0 import Lite0
from diptych.errors import CheckpointError, Interrupted, SettingsError
from diptych.evaluation.evaluate import check_data
from diptych.model.retriever import Retriever
from diptych.objectives.objective import FunctionObjective, Objective
from diptych.progress import counted, echo
from diptych.recipes import RECIPES
from diptych.recipes.recipe import Recipe
from diptych.reports.page import COLOURS, chart
from diptych.settings import TrainingSettings, check_saved, from_json, from_saved
from diptych.storage import storing
from diptych.targets.columns import fill_targets
from diptych.training import checkpoint, loop
from diptych.training.baseline import Baseline, ridge_baseline
from diptych.training.checkpoint import Progress, RunCard, read_run
from diptych.training.loading import check_batch_size
from diptych.training.method import Method
from diptych.training.optim import trainable
from diptych.training.prepare import prepare, ready_views, unreadable_images
from diptych.training.processes import check_settings
from diptych.training.ridge import Names, names_of
from diptych.training.session import Session
from diptych.training.teachers import Teachers
from diptych.training.validation import epoch_name, metric_name
from diptych.types import Batch, Embeddings, Terms


def header(
    recipe: Recipe,
    settings: TrainingSettings,
    method: Method,
    training: Captions,
    validation: Captions,
    device: str,
) -> str:
    """Data with its splits, model with its parameters, device, and how long training goes on at most."""
    retriever = method.retriever
    learned = trainable(method).values()  # an objective may learn too: temperatures
    moving = sum(parameter.numel() for parameter in learned)
    every = sum(
        parameter.numel() for parameter in {id(p): p for p in [*learned, *retriever.parameters()]}.values()
    )
    steps = len(training.texts) // settings.batch_size
    lines = [
        f"data: {training.name}: {_count(training)} to train on, {_count(validation)} to validate",
        f"model: {recipe.name}, images by {_part(retriever.image.encoder)}, texts by {_part(retriever.text.encoder)}",
        f"parameters: {moving:,} trained of {every:,}",
        f"device: {describe_device(torch.device(device))}",
        *method.notes,
    ]
    if settings.epochs:
        most, stops = "", ""
        if settings.patience:
            most, stops = "at most ", f", ended by {settings.patience} epochs without a better validation"
        lines.append(
            f"epochs: {most}{settings.epochs} of {steps:,} steps of {settings.batch_size} pairs{stops}"
        )
    return "\n".join(lines)


def _count(captions: Captions) -> str:
    return f"{counted(len(captions.images), 'image')} with {counted(len(captions.texts), 'text')}"


def _part(encoder: Encoder) -> str:
    """An encoder by its part, and what in it is frozen."""
    frozen: nn.Module | None = encoder.frozen_part()
    name = type(encoder).__name__
    if frozen is None:
        return name
    return f"{name} (frozen)" if frozen is encoder else f"{name} on {type(frozen).__name__} (frozen)"


FEW_SHAPES = 8  # text lengths are rounded up to a multiple of it where each length is compiled or recorded
FEW_PACKED_SHAPES = 32  # the same where texts are packed: padding costs little, and packed lengths vary too
Splits = tuple[Captions, Captions]  # training, validation


def run_recipe(
    recipe: Recipe,
    settings: TrainingSettings,
    data: str | Captions,
    folder: Path,
    *,
    objective: Objective | None = None,
    device: str = "auto",
    resume: bool = False,
    baseline: bool = True,
    show_progress: bool = True,
) -> Progress:
    """Train ``recipe`` on ``data`` into ``folder``; see ``training.loop.train``.

    An ``objective`` made in Python replaces the loss; ``settings.objective`` is then what the run records of it.
    With ``baseline``, and unless the settings say otherwise, ridge regression is measured on the same features first.
    A run that fails before anything is written leaves no folder behind.
    """
    with _none_left_empty(folder):
        if not resume and checkpoint.has_state(folder):
            raise CheckpointError(
                f"{folder} already holds a run: resume it with --resume_from_checkpoint {folder}, "
                "or choose another --output_dir."
            )
        captions, parts, left_out, card = open_run(recipe, settings, data)
        if resume:
            checkpoint.check_resumable(folder, card)
        method, where = checked_method(recipe, settings, parts, objective, device)
        with storing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        how: dict[str, Any] = {"device": where, "show_progress": show_progress}
        if not settings.strict_images:
            parts = _readable(method, parts, left_out, how)
        speaks = os.environ.get("RANK", "0") == "0"  # only rank 0 prints
        if speaks:
            left_out.save(folder)
            left_out.tell(len(captions.images), folder / FILE)
            echo("".join(f"{note}\n" for note in parts[0].notes), err=True, nl=False)
        multiple = _multiple(settings, method.retriever, where)
        training, validation = (
            prepare(method.retriever, part, pad_to_multiple=multiple, **how) for part in parts
        )
        method.views = ready_views(method, parts[0], **how)
        targets = fill_targets(method.targets, parts[0], **{**how, "device": torch.device(where)})
        if speaks and show_progress:
            echo(header(recipe, settings, method, *parts, where))
        wanted = baseline and settings.ridge_baseline and method.solver is None
        if speaks and wanted and Baseline.load(folder) is None:
            names = _names(settings, method.retriever)
            ridge_baseline(method, training, validation, names, show_progress=show_progress).save(folder)
        session = Session(
            method, card, training, validation, folder,
            on_cpu=where == "cpu", targets=targets, resume=resume, show_progress=show_progress,
        )  # fmt: skip
        return loop.train(session)


@contextmanager
def _none_left_empty(folder: Path) -> Iterator[None]:
    """Remove a folder that was made meanwhile and holds nothing, where the work fails."""
    new = not folder.exists()
    try:
        yield
    except BaseException:
        if new and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
        raise


def start_or_resume(recipe: Recipe, settings: TrainingSettings, data: str, folder: Path, **how: Any) -> None:
    """Train, or go on where the folder holds a run, for a command that does the same when it is called again."""
    try:
        run_recipe(recipe, settings, data, folder, resume=checkpoint.has_state(folder), baseline=False, **how)
    except Interrupted as note:
        raise Interrupted(f"stopped and saved in {folder}: run the same command again to go on.") from note


def open_run(
    recipe: Recipe, settings: TrainingSettings, data: str | Captions
) -> tuple[Captions, Splits, LeftOut, RunCard]:
    """The data, their splits with noise and without what cannot be opened, what was left out, and the run's card."""
    left_out, strict = LeftOut(), settings.strict_images
    captions = data
    if not isinstance(captions, Captions):
        captions = open_captions(captions, problems=None if strict else ToBeLeftOut())
    parts, noise = noisy(training_splits(captions), settings.noise)
    if not strict:  # what has no content to name has no fingerprint either
        first, second = (left_out.add(part, unopenable(part.images)) for part in parts)
        parts = first, second
    written = captions.name if isinstance(data, Captions) else data
    file = None if isinstance(data, Captions) else split_options(data)[1].get("corrections")
    corrections = {"file": str(file), "hash": file_hash(str(file))} if file else {}
    card = RunCard(recipe.name, settings, written, captions_fingerprint(*parts), corrections, noise)
    return captions, parts, left_out, card


def noisy(parts: Splits, noise: str) -> tuple[Splits, Noise | None]:
    """The splits with noise in the pairs to train on, if any is asked for; those to validate on stay clean."""
    if not noise:
        return parts, None
    training, about = add_noise(parts[0], noise)
    return (training, parts[1]), about


def checked_method(
    recipe: Recipe,
    settings: TrainingSettings,
    parts: Splits,
    given: Objective | None = None,
    where: str = "auto",
) -> tuple[Method, str]:
    """The method and its device, with everything refused that can be before what takes time."""
    training, validation = parts
    seed_everything(settings.seed)
    method = recipe.build(settings, training, given)
    check_data(method.evaluators, method.retriever, validation)
    seed_everything(settings.seed)  # reseed after building
    device, processes = training_device(where), int(os.environ.get("WORLD_SIZE", "1"))
    check_settings(settings, device, processes)
    if method.solver is None:  # a method that solves can do without steps
        check_batch_size(training, settings.batch_size, processes)
    return method, device


def _readable(method: Method, parts: Splits, left_out: LeftOut, how: dict[str, Any]) -> Splits:
    """The splits without the pictures that cannot be read, which are noted."""
    training, validation = parts
    validation = left_out.add(validation, unreadable_images(method.retriever, validation, **how))
    frozen = method.retriever.image.encoder.frozen_backbone() is not None
    if frozen or any(isinstance(one, Teachers) and one.opens_every_picture for one in method.targets):
        return left_out.add(training, unreadable_images(method.retriever, training, **how)), validation
    # the loader skips what it cannot read: nothing is opened twice
    return replace(training, unreadable="skip"), validation


def _multiple(settings: TrainingSettings, retriever: Retriever, device: str) -> int:
    if not settings.compile and not settings.cuda_graphs:
        return 1
    return FEW_PACKED_SHAPES if retriever.text.encoder.packs(torch.device(device)) else FEW_SHAPES


def _names(settings: TrainingSettings, retriever: Retriever) -> Names | None:
    """The names that ``train ridge`` would add on the same features: those that Lite0 sees, in MiniLM's space."""
    frozen = retriever.image.encoder.frozen_part()
    if isinstance(frozen, Lite0) and getattr(settings, "text_encoder", "") == "minilm":
        return names_of(with_names(frozen))
    return None


def train(
    recipe: str | Recipe,
    data: str | Path | Captions,
    output_dir: str | Path | None = None,
    *,
    objective: str | Objective | Callable[[Embeddings, Batch], Terms | Tensor] | None = None,
    device: str = "auto",
    show_progress: bool = True,
    resume: bool = False,
    **settings: Any,
) -> Retriever:
    """Train a recipe as ``diptych train`` does; the best model on the validation split comes back.

    ``recipe`` is a name (``ridge``, ``photos``, ``vse-infinity``, …) or a ``Recipe`` of your own, ``data`` a path or
    captions. The run is kept in ``output_dir``; without one, a temporary folder is used and removed. ``objective``
    replaces the recipe's loss: an expression such as "own + 0.5*info_nce", an ``Objective``, or a function
    ``loss(embeddings, batch)`` that returns a tensor or named terms. ``device`` is auto, cuda or cpu. ``settings`` are
    those of the recipe, each also a flag of the command line (docs/recipes.md). With ``resume``, the run in
    ``output_dir`` goes on where it was interrupted. The model's ``run`` tells how training went.

    Example::

        model = diptych.train("ridge", "photos", "runs/photos", seed=1)
        vectors = model.encode_text(["two parrots"])
    """
    kind = recipe if isinstance(recipe, Recipe) else RECIPES[recipe]
    made: Objective | None = None
    if callable(objective):
        made = objective if isinstance(objective, Objective) else FunctionObjective(objective)
        name = getattr(objective, "__name__", type(objective).__name__)
        settings["objective"] = f"{name} (made in Python)"
    elif objective is not None:
        settings["objective"] = objective
    if resume and output_dir is None:
        raise SettingsError("resume=True needs the output_dir of the run that goes on.")
    source = data if isinstance(data, Captions) else str(data)
    with TemporaryDirectory() if output_dir is None else nullcontext(output_dir) as place:
        folder = Path(place) / "run" if output_dir is None else Path(place)
        ready = (
            resumed_settings(kind, folder, settings)
            if resume
            else from_json(kind.settings, inherited(kind.settings, settings))
        )
        try:
            progress = run_recipe(
                kind, ready, source, folder,
                objective=made, device=device, resume=resume, show_progress=show_progress,
            )  # fmt: skip
        except Interrupted as note:
            saved = f"saved in {folder}: the same call with resume=True goes on."
            lost = "interrupted, and nothing is kept: with an output_dir, the run could go on."
            raise Interrupted(lost if output_dir is None else saved) from note
        model = Retriever.from_pretrained(folder, training_device(device))
        model.run = Run(kind.name, read_run(folder)["data"], progress)
        return model


@dataclass(frozen=True)
class Run:
    """How a training went, as notebooks show it: the validation of every epoch, and its curve."""

    recipe: str
    data: str
    progress: Progress

    def __repr__(self) -> str:
        run = self.progress
        best = f"{run.metric} {run.best:.1f}, {epoch_name(run.best_epoch)}"
        return f"Run({self.recipe} on {self.data}: {counted(run.step, 'step')}, best validation {best})"

    def _repr_html_(self) -> str:
        title, metric = (
            f"validation {metric_name(self.progress.metric)}",
            f"validation_{self.progress.metric}",
        )
        epochs = [(line["epoch"], line[metric]) for line in self.progress.history if metric in line]
        table = [["", title], *([epoch_name(int(epoch)), f"{value:.1f}"] for epoch, value in epochs)]
        curve = chart(title, [(epoch + 1, value) for epoch, value in epochs if epoch >= 0], COLOURS[0])
        return notebook.table(table) + curve + notebook.notes([repr(self)])


def training_device(asked: str) -> str:
    """``cuda`` or ``cpu``, on which training runs; ``auto`` is a GPU where there is one."""
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if asked not in ("cuda", "cpu"):
        raise SettingsError(f"training cannot run on the device '{asked}': choose auto, cuda or cpu.")
    return str(pick_device(asked))


def captions_fingerprint(training: Captions, validation: Captions) -> str:
    """One fingerprint for what a run reads."""
    return f"{training.fingerprint()}-{validation.fingerprint()}"


def seed_everything(seed: int) -> None:
    """Seed python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def inherited(kind: type[TrainingSettings], values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of settings, where a run starts from another (``init``): with the other's shape unless they say it.

    A settings class names in ``INHERITED`` what a run takes over from the one it starts from.
    """
    init = values.get("init")
    if not init or not (Path(init) / "run.json").is_file():
        return dict(values)
    found = checkpoint.read_run(Path(init))["settings"]
    names = [entry.name for entry in fields(kind) if entry.name in getattr(kind, "INHERITED", ())]
    taken = {name: found[name] for name in names if name in found and name not in values}
    if not taken.get("depth"):  # nothing on top of the other: what this recipe puts there stays
        for name in ("depth", "share_weights", "heads", "feedforward"):
            taken.pop(name, None)
    check_saved(kind, taken)
    return {**taken, **values}


def resumed_settings(recipe: Recipe, folder: Path, changes: dict[str, Any]) -> TrainingSettings:
    """The settings a run was started with, and the few that may change on resuming."""
    found = checkpoint.read_run_of(folder, recipe.name)["settings"]
    check_saved(recipe.settings, {name: value for name, value in found.items() if name not in changes})
    return from_saved(recipe.settings, {**found, **changes})
