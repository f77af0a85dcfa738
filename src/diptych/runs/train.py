"""Run a recipe on data: what ``train``, ``ablate`` and ``demo`` share."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from diptych.data.captions import Captions
from diptych.data.formats import open_captions
from diptych.data.readable import FILE, LeftOut, ToBeLeftOut, unopenable
from diptych.encoders.backbone import Backbone
from diptych.encoders.lite0 import Lite0
from diptych.encoders.named_grid import with_names
from diptych.errors import CheckpointError, DataError
from diptych.evaluation.evaluator import check_data
from diptych.model.retriever import Retriever
from diptych.recipes.recipe import Recipe
from diptych.runs.header import header
from diptych.settings import TrainingSettings, from_json
from diptych.storage import storing
from diptych.targets.filling import fill_targets
from diptych.training import checkpoint
from diptych.training.baseline import Baseline, ridge_baseline
from diptych.training.checkpoint import Progress, RunCard
from diptych.training.loading import check_batch_size
from diptych.training.loop import train
from diptych.training.prepare import prepare, ready_views, unreadable_images
from diptych.training.ridge import Names, names_of
from diptych.training.start import check_settings
from diptych.training.teachers import Teachers

HELD_OUT = 0.1  # share of the training images held out when the data has no validation split

FEW_SHAPES = 8  # text lengths are rounded up to a multiple of it where each length is compiled or recorded
FEW_PACKED_SHAPES = (
    32  # the same where texts are packed: padding costs little there, and packed lengths vary too
)


def run_recipe(
    recipe: Recipe,
    settings: TrainingSettings,
    data: str,
    folder: Path,
    *,
    resume: bool = False,
    cache_dir: Path | None = None,
    baseline: bool = True,
    show_progress: bool = True,
) -> Progress:
    """Train ``recipe`` on ``data`` into ``folder``; see ``training.loop.train``.

    With ``baseline``, and unless the settings say otherwise, ridge regression is measured on the same features first.
    A run that fails before anything is written leaves no folder behind.
    """
    new = not folder.exists()
    try:
        return _run(recipe, settings, data, folder, resume, cache_dir, baseline, show_progress)
    except BaseException:
        if new and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
        raise


def _run(
    recipe: Recipe,
    settings: TrainingSettings,
    data: str,
    folder: Path,
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
    captions = open_captions(data, problems=None if settings.strict_images else ToBeLeftOut())
    left_out, total = LeftOut(), len(captions.images)
    training, validation = training_splits(captions)
    if not settings.strict_images:  # what has no content to name has no fingerprint either
        training, validation = (
            left_out.add(part, unopenable(part.images)) for part in (training, validation)
        )
    card = RunCard(recipe.name, settings, data, captions_fingerprint(training, validation))
    if resume:
        checkpoint.check_resumable(folder, card)
    seed_everything(settings.seed)
    method = recipe.build(settings, training)
    check_data(method.evaluators, method.retriever, validation)
    seed_everything(
        settings.seed
    )  # what building drew (a vocabulary, random rows) does not move the first batch
    device = "cuda" if torch.cuda.is_available() else "cpu"
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
    return train(
        method,
        card,
        prepared[0],
        prepared[1],
        folder,
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
    return {**{name: found[name] for name in names if name in found}, **values}


def resumed_settings(recipe: Recipe, folder: Path, changes: dict[str, Any]) -> TrainingSettings:
    """The settings a run was started with, and the few that may change on resuming."""
    found = checkpoint.read_run_of(folder, recipe.name)
    return from_json(recipe.settings, {**found["settings"], **changes})
