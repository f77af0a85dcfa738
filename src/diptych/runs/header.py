"""The lines that a run begins with: what is trained, on what, and where."""

from __future__ import annotations

import torch
from torch import nn

from diptych.data.captions import Captions
from diptych.devices import describe_device
from diptych.encoders.encoder import Encoder
from diptych.recipes.recipe import Recipe
from diptych.settings import TrainingSettings
from diptych.training.method import Method
from diptych.training.optim import trainable


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
    learned = trainable(method)  # an objective may learn too: temperatures
    moving = sum(parameter.numel() for parameter in learned.values())
    fixed = {id(parameter): parameter for parameter in retriever.parameters()}
    for parameter in learned.values():
        fixed.pop(id(parameter), None)
    every = moving + sum(parameter.numel() for parameter in fixed.values())
    steps = len(training.texts) // settings.batch_size
    lines = [
        f"data: {training.name}: {_counted(training)} to train on, {_counted(validation)} to validate",
        f"model: {recipe.name}, images by {_named(retriever.image.encoder)}, texts by {_named(retriever.text.encoder)}",
        f"parameters: {moving:,} trained of {every:,}",
        f"device: {describe_device(torch.device(device))}",
    ]
    if settings.epochs:
        stops = (
            f", ended by {settings.patience} epochs without a better validation" if settings.patience else ""
        )
        lines.append(
            f"epochs: at most {settings.epochs} of {steps:,} steps of {settings.batch_size} pairs{stops}"
            if stops
            else f"epochs: {settings.epochs} of {steps:,} steps of {settings.batch_size} pairs"
        )
    return "\n".join(lines)


def _counted(captions: Captions) -> str:
    return f"{len(captions.images):,} images with {len(captions.texts):,} texts"


def _named(encoder: Encoder) -> str:
    """An encoder by its part, and what in it is frozen."""
    frozen: nn.Module | None = encoder.frozen_part()
    name = type(encoder).__name__
    if frozen is None:
        return name
    return f"{name} (frozen)" if frozen is encoder else f"{name} on {type(frozen).__name__} (frozen)"
