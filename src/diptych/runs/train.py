"""Run a recipe on data: what ``train``, ``ablate`` and ``demo`` share."""

from __future__ import annotations

import difflib
import os
import random
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diptych.data.captions import Captions
from diptych.data.formats import open_captions
from diptych.data.readable import FILE, LeftOut, ToBeLeftOut, unopenable
from diptych.devices import pick_device
from diptych.encoders.backbone import Backbone
from diptych.encoders.lite0 import Lite0
from diptych.encoders.named_grid import with_names
from diptych.errors import CheckpointError, DataError, SettingsError
from diptych.evaluation.evaluator import check_data
from diptych.model.retriever import Retriever
from diptych.objectives.expressions import OWN
from diptych.objectives.function import FunctionObjective
from diptych.objectives.objective import Objective
from diptych.recipes import RECIPES
from diptych.recipes.recipe import Recipe
from diptych.runs.header import header
from diptych.settings import TrainingSettings, check_saved, from_json, from_saved
from diptych.storage import storing
from diptych.targets.filling import fill_targets
from diptych.training import checkpoint, loop
from diptych.training.baseline import Baseline, ridge_baseline
from diptych.training.checkpoint import Progress, RunCard
from diptych.training.loading import check_batch_size
from diptych.training.prepare import prepare, ready_views, unreadable_images
from diptych.training.ridge import Names, names_of
from diptych.training.start import check_settings
from diptych.training.teachers import Teachers, with_teachers
from diptych.types import Batch, Embeddings, Terms

HELD_OUT = 0.1  # share of the training images held out when the data has no validation split

FEW_SHAPES = 8  # text lengths are rounded up to a multiple of it where each length is compiled or recorded
FEW_PACKED_SHAPES = (
    32  # the same where texts are packed: padding costs little there, and packed lengths vary too
)


def run_recipe(
    recipe: Recipe,
    settings: TrainingSettings,
    data: str | Captions,
    folder: Path,
    *,
    objective: Objective | None = None,
    device: str = "auto",
    resume: bool = False,
    cache_dir: Path | None = None,
    baseline: bool = True,
    show_progress: bool = True,
) -> Progress:
    """Train ``recipe`` on ``data`` into ``folder``; see ``training.loop.train``.

    An ``objective`` made in Python replaces the loss; ``settings.objective`` is then what the run records of it.
    With ``baseline``, and unless the settings say otherwise, ridge regression is measured on the same features first.
    A run that fails before anything is written leaves no folder behind.
    """
    new = not folder.exists()
    try:
        return _run(
            recipe, settings, data, folder, objective, device, resume, cache_dir, baseline, show_progress
        )
    except BaseException:
        if new and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
        raise


def _run(
    recipe: Recipe,
    settings: TrainingSettings,
    data: str | Captions,
    folder: Path,
    given: Objective | None,
    where: str,
    resume: bool,
    cache_dir: Path | None,
    baseline: bool,
    show_progress: bool,
) -> Progress:
    if not resume and checkpoint.has_state(folder):
        raise CheckpointError(
            f"{folder} already holds a run: resume it with --resume_from_checkpoint {folder}, "
            "or choose another --output_dir."
        )
    if isinstance(data, Captions):
        captions = data
    else:
        captions = open_captions(data, problems=None if settings.strict_images else ToBeLeftOut())
    left_out, total = LeftOut(), len(captions.images)
    training, validation = training_splits(captions)
    if not settings.strict_images:  # what has no content to name has no fingerprint either
        training, validation = (
            left_out.add(part, unopenable(part.images)) for part in (training, validation)
        )
    written = captions.name if isinstance(data, Captions) else data
    card = RunCard(recipe.name, settings, written, captions_fingerprint(training, validation))
    if resume:
        checkpoint.check_resumable(folder, card)
    seed_everything(settings.seed)
    if given is None:
        method = recipe.build(settings, training)
    else:
        method = recipe.build(replace(settings, objective=OWN), training)
        method = with_teachers(replace(method, objective=given))
    check_data(method.evaluators, method.retriever, validation)
    seed_everything(
        settings.seed
    )  # what building drew (a vocabulary, random rows) does not move the first batch
    device = training_device(where)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    check_settings(settings, device, processes)  # before what takes time
    if method.solver is None:  # a method that solves can do without steps
        check_batch_size(training, settings.batch_size, processes)
    with storing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    if not settings.strict_images:
        find = partial(
            unreadable_images,
            method.retriever,
            device=device,
            cache_dir=cache_dir,
            show_progress=show_progress,
        )
        validation = left_out.add(validation, find(validation))
        frozen = isinstance(method.retriever.image.encoder.frozen_part(), Backbone)
        if frozen or any(isinstance(one, Teachers) and one.opens_every_picture for one in method.targets):
            training = left_out.add(training, find(training))
        else:  # the loader skips what it cannot read: nothing is opened twice
            training = replace(training, unreadable="skip")
    if os.environ.get("RANK", "0") == "0":  # of several processes, one speaks
        left_out.save(folder)
        left_out.tell(total, folder / FILE)
        print("".join(f"{note}\n" for note in captions.notes), end="", file=sys.stderr, flush=True)
    multiple = 1
    if settings.compile or settings.cuda_graphs:
        packed = method.retriever.text.encoder.packs(torch.device(device))
        multiple = FEW_PACKED_SHAPES if packed else FEW_SHAPES
    prepared = [
        prepare(
            method.retriever,
            part,
            device=device,
            cache_dir=cache_dir,
            pad_to_multiple=multiple,
            show_progress=show_progress,
        )
        for part in (training, validation)
    ]
    method.views = ready_views(
        method, training, device=device, cache_dir=cache_dir, show_progress=show_progress
    )
    targets = fill_targets(
        method.targets,
        training,
        device=torch.device(device),
        cache_dir=cache_dir,
        show_progress=show_progress,
    )
    if os.environ.get("RANK", "0") == "0":  # of several processes, one speaks
        if show_progress:
            print(header(recipe, settings, method, training, validation, device), flush=True)
        if baseline and settings.ridge_baseline and method.solver is None and Baseline.load(folder) is None:
            found = ridge_baseline(
                method,
                prepared[0],
                prepared[1],
                _names(settings, method.retriever),
                show_progress=show_progress,
            )
            found.save(folder)
    return loop.train(
        method,
        card,
        prepared[0],
        prepared[1],
        folder,
        on_cpu=device == "cpu",
        targets=targets,
        resume=resume,
        show_progress=show_progress,
    )


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
    **settings: Any,
) -> Retriever:
    """Train a recipe as ``diptych train`` does; the best model on the validation split comes back.

    ``recipe`` is a name (``ridge``, ``photos``, ``vse-infinity``, …) or a ``Recipe`` of your own, ``data`` a path or
    captions. The run is kept in ``output_dir``; without one, a temporary folder is used and removed. ``objective``
    replaces the recipe's loss: an expression such as "own + 0.5*info_nce", an ``Objective``, or a function
    ``loss(embeddings, batch)`` that returns a tensor or named terms. ``device`` is auto, cuda or cpu. ``settings`` are
    those of the recipe, each also a flag of the command line (docs/recipes.md).

    Example::

        model = diptych.train("ridge", "photos", "runs/photos", seed=1)
        vectors = model.encode_text(["two parrots"])
    """
    chosen = recipe if isinstance(recipe, Recipe) else _recipe(recipe)
    made = objective
    if callable(objective):
        made = objective if isinstance(objective, Objective) else FunctionObjective(objective)
        name = getattr(objective, "__name__", type(objective).__name__)
        settings["objective"] = f"{name} (made in Python)"
    elif objective is not None:
        settings["objective"] = objective
    ready = from_json(chosen.settings, inherited(chosen.settings, settings))
    source = data if isinstance(data, Captions) else str(data)
    with TemporaryDirectory() if output_dir is None else nullcontext(output_dir) as place:
        folder = Path(place) / "run" if output_dir is None else Path(place)
        own = made if isinstance(made, Objective) else None
        run_recipe(chosen, ready, source, folder, objective=own, device=device, show_progress=show_progress)
        return Retriever.from_pretrained(folder, training_device(device))


def training_device(asked: str) -> str:
    """``cuda`` or ``cpu``, on which training runs; ``auto`` is a GPU where there is one."""
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if asked not in ("cuda", "cpu"):
        raise SettingsError(f"training cannot run on the device '{asked}': choose auto, cuda or cpu.")
    return str(pick_device(asked))


def _recipe(name: str) -> Recipe:
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, n=1)
        known = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(RECIPES)}."
        raise SettingsError(f"there is no recipe '{name}': {known}")
    return RECIPES[name]


def training_splits(captions: Captions) -> tuple[Captions, Captions]:
    """The train and val splits; without a val split, a fixed tenth of the training images is held out."""
    names = set(captions.splits)
    if "train" not in names:
        raise DataError(
            f"{captions.name} has no split 'train': its splits are {', '.join(sorted(names)) or 'none'}."
        )
    training = captions.split("train")
    if not len(training.texts):
        why = "".join(f" {note}" for note in captions.notes)
        raise DataError(f"{captions.name} has no texts: training needs captions beside the images.{why}")
    if "val" in names:
        return training, captions.split("val")
    order = np.random.default_rng(0).permutation(len(training.images))
    held = max(1, int(len(order) * HELD_OUT))
    if held >= len(order):
        raise DataError(
            f"{captions.name} has {len(order)} training images: too few to hold some out for validation."
        )
    rest, out = sorted(order[held:].tolist()), sorted(order[:held].tolist())
    validation = training.subset(out)
    return training.subset(rest), replace(validation, splits=["val"] * len(out))


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
    names = getattr(kind, "INHERITED", ())
    taken = {name: found[name] for name in names if name in found and name not in values}
    check_saved(kind, taken)
    return {**taken, **values}


def resumed_settings(recipe: Recipe, folder: Path, changes: dict[str, Any]) -> TrainingSettings:
    """The settings a run was started with, and the few that may change on resuming."""
    found = checkpoint.read_run_of(folder, recipe.name)["settings"]
    check_saved(recipe.settings, {name: value for name, value in found.items() if name not in changes})
    return from_saved(recipe.settings, {**found, **changes})
