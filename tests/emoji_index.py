"""A small part of the demo on the spot: some dozen emoji, a real model briefly trained on them, their index."""

from __future__ import annotations

from pathlib import Path

import torch

from diptych.data.captions import Captions
from diptych.data.formats import open_captions
from diptych.index.ingest.build import index_collection
from diptych.index.models import open_model
from diptych.recipes import RECIPES
from diptych.runs.train import captions_fingerprint, seed_everything
from diptych.training.checkpoint import RunCard
from diptych.training.loop import train
from diptych.training.prepare import prepare
from diptych.training.session import Session

CATEGORIES = ("Animals & Nature", "Food & Drink", "Travel & Places", "Activities")
EACH = 16  # pictures of a category


def pictures() -> Captions:
    """The first pictures of some categories."""
    captions = open_captions("emoji")
    labels = captions.labels["category"]
    rows = [[n for n, label in enumerate(labels) if label == one][:EACH] for one in CATEGORIES]
    return captions.subset(sorted(row for some in rows for row in some))


def train_small(folder: Path, captions: Captions) -> Path:
    """A run of VSE∞ with the demo's encoders, trained until it knows these pictures."""
    recipe = RECIPES["vse-infinity"]
    settings = recipe.settings(
        text_encoder="minilm", train_text=False, dim=128, epochs=12, decay_epoch=10, image_size=96, batch_size=64,
        learning_rate=2e-3,
    )  # type: ignore[call-arg]  # fmt: skip
    seed_everything(0)
    method = recipe.build(settings, captions)
    prepared = prepare(method.retriever, captions, show_progress=False)
    card = RunCard(recipe.name, settings, "emoji", captions_fingerprint(captions, captions))
    run = folder / "run"
    run.mkdir(parents=True)
    train(Session(method, card, prepared, prepared, run, show_progress=False))
    return run


def make_emoji_index(folder: Path) -> Path:
    """The index of ``pictures``; it knows where its model lies."""
    captions = pictures()
    run = train_small(folder, captions)
    torch.manual_seed(0)
    model = open_model(run, make=True)  # as ``diptych index`` opens it
    index_collection(model, captions, folder / "emoji.index", model_name=str(run.resolve()))
    return folder / "emoji.index"
