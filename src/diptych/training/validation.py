"""The end of an epoch: show all pairs to objectives that ask, measure the model, keep the best one, say how it went."""

from __future__ import annotations

import math
import time
from pathlib import Path

import torch
from PIL import Image

from diptych.data.captions import ImageStore, StoredImage, holds_features
from diptych.errors import ImageError
from diptych.evaluation.prepared import Prepared
from diptych.model.encoding import collect, encoded_images, encoded_texts
from diptych.model.retriever import Retriever
from diptych.objectives.objective import Objective, PairVectors, SeesPairs
from diptych.settings import TrainingSettings
from diptych.training import checkpoint
from diptych.training.checkpoint import Progress


class Clock:
    """How much longer a run takes: what its epochs took so far, for each epoch that is left."""

    def __init__(self, first: int, epochs: int) -> None:
        self.first, self.epochs, self.began = first, epochs, time.monotonic()

    def left(self, epoch: int) -> str:
        """The time that is left after an epoch, validation included, as the end of its line."""
        remaining = self.epochs - epoch - 1
        if remaining <= 0:
            return ""
        seconds = (time.monotonic() - self.began) / (epoch + 1 - self.first) * remaining
        return f", at most {spoken(seconds)} left"


def spoken(seconds: float) -> str:
    """A length of time for people: 12 s, 4 min, 2 h 5 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def epoch_name(epoch: int) -> str:
    """How an epoch, counted from 0, is called."""
    return f"epoch {epoch + 1}" if epoch >= 0 else "closed form"


def metric_name(metric: str) -> str:
    """A metric's name in a sentence: abbreviations in capitals."""
    return metric.upper() if metric.isalpha() and len(metric) <= 4 else metric.replace("_", " ")


def model_card(folder: Path, epoch: int, line: dict[str, float]) -> str:
    """The README of a model folder: what it is, how it was trained, how to use it."""
    run = checkpoint.read_run(folder)
    settings = "\n".join(f"| {name} | {value} |" for name, value in run["settings"].items())
    scores = "\n".join(f"| {name} | {value:.2f} |" for name, value in line.items() if name != "epoch")
    return (
        f"# {run['recipe']}\n\nAn image-text retriever trained with Diptych {run['diptych']} on {run['data']} "
        f"(data {run['data_fingerprint']}), {epoch_name(epoch)}.\n\n"
        '```python\nfrom diptych import Retriever\nmodel = Retriever.from_pretrained("this folder")\n```\n\n'
        f"| validation | |\n|---|---|\n{scores}\n\n| setting | |\n|---|---|\n{settings}\n"
    )


def stop_early(progress: Progress, epoch: int, settings: TrainingSettings) -> bool:
    """Whether patience has ended."""
    return (
        settings.patience > 0
        and math.isfinite(progress.best)
        and epoch - progress.best_epoch > settings.patience
    )


def show_pairs(
    objective: Objective, epoch: int, retriever: Retriever | None, training: Prepared, *, show_progress: bool
) -> None:
    """Encode the training pairs once and show them to every part of the objective that wants them.

    The main process encodes, with the ``retriever``; the others give None. Every process must call it.
    """
    wanting = [
        part for part in objective.modules() if isinstance(part, SeesPairs) and part.wants_pairs(epoch)
    ]
    if not wanting:
        return
    pairs = None if retriever is None else encode_pairs(retriever, training, show_progress=show_progress)
    for part in wanting:
        part.see_pairs(epoch, pairs)


def encode_pairs(retriever: Retriever, training: Prepared, *, show_progress: bool = False) -> PairVectors:
    """The vectors of the towers alone, without branches, each image once."""
    captions = training.captions
    store: ImageStore = captions.images
    unreadable: dict[int, str] = dict(getattr(store, "unreadable", {}))  # as a cache of features knows them
    if captions.unreadable == "skip" and not holds_features(store):
        store = _Noting(store, unreadable)
    image = torch.zeros(len(store), retriever.image.dim, dtype=torch.float16)
    text = torch.zeros(len(training.texts), retriever.text.dim, dtype=torch.float16)
    collect(encoded_images(retriever, store, lambda x: retriever.image(x)[0], None, show_progress), image)
    collect(
        encoded_texts(retriever, training.texts, lambda x: retriever.text(x)[0], None, show_progress), text
    )
    image_of = torch.from_numpy(captions.image_of.copy())
    for row in unreadable:
        image_of[image_of == row] = -1
    return PairVectors(image, text, image_of)


class _Noting:
    """A store that gives a white picture where it cannot read one, and notes the reason by its row."""

    features = False

    def __init__(self, store: ImageStore, unreadable: dict[int, str]) -> None:
        self.store, self.unreadable = store, unreadable

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, index: int) -> StoredImage:
        try:
            return self.store[index]
        except ImageError as error:
            self.unreadable[index] = str(error)
            return Image.new("RGB", (64, 64), "white")

    def content_key(self, index: int) -> str:
        return self.store.content_key(index)
