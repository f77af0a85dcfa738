"""Which data a run is evaluated on: as asked for, or as the run itself says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from diptych.data.captions import Captions
from diptych.data.held_out import open_split
from diptych.data.problems import LeftOut, Problems, unopenable
from diptych.data.readers.hashing_lists import RANKED
from diptych.encoders.dual import is_dual_encoder
from diptych.encoders.known_names import hub_hint
from diptych.errors import CheckpointError, DataError, SettingsError
from diptych.model.retriever import Retriever
from diptych.training.checkpoint import read_run
from diptych.training.prepare import prepare, unreadable_images


def places_of(runs: Sequence[Path], data: Sequence[str]) -> Sequence[str]:
    """Where the data lie: as given, or what the first run was trained on."""
    if data:
        return data
    if is_dual_encoder(runs[0]):
        raise SettingsError(f"{runs[0]} was not trained here: give --data, the data set to evaluate it on.")
    if not runs[0].exists():
        raise CheckpointError(f"{runs[0]} does not exist: give the folder of a run{hub_hint(runs[0])}.")
    if not (runs[0] / "run.json").exists():
        raise SettingsError(f"{runs[0]} does not say what it was trained on: give --data.")
    return [str(read_run(runs[0])["data"])]


def views_of(
    runs: Sequence[Path], data: Sequence[str], split: str, problems: Problems | None = None
) -> list[Captions]:
    """What each run reads of one split: the same texts in the same order.

    ``data`` is one data set for all, one per run (region and grid features of the same images), or none: what the
    first run was trained on.
    """
    data = places_of(runs, data)
    if len(data) not in (1, len(runs)):
        raise SettingsError(f"{len(data)} data sets for {len(runs)} models: give one for all, or one each.")
    views = [open_split(path, split, problems) for path in data]
    for other in views[1:]:
        if list(other.texts) != list(views[0].texts) or list(other.image_of) != list(views[0].image_of):
            raise DataError(f"{other.name} and {views[0].name} must hold the same texts in the same order.")
    return views if len(views) == len(runs) else views * len(runs)


def database_of(whole: Captions, queries: Captions) -> Captions:
    """The images that queries are ranked against: those that the data marks, in other data all but the queries."""
    asked = set(queries.image_ids)
    marked = whole.labels.get(RANKED, [True] * len(whole.images))
    rows = [
        n
        for n, (id, ranked) in enumerate(zip(whole.image_ids, marked, strict=True))
        if ranked and id not in asked
    ]
    if not rows:
        raise DataError(
            f"{whole.name} has no images beside the {len(asked)} queries: hashing needs a database to rank."
        )
    return whole.subset(rows)


def readable_views(
    models: Sequence[Retriever],
    views: Sequence[Captions],
    left_out: LeftOut,
    *,
    advice: bool = True,
    show_progress: bool = True,
) -> list[Captions]:
    """What each model reads, without the images that one of them cannot read; all keep the same images.

    Says which; ``advice`` names the flag that stops at the first, where the command has it.
    """
    failed: dict[int, str] = {}
    for model, view in zip(models, views, strict=True):
        failed |= unopenable(view.images)
        failed |= unreadable_images(model, view, device=str(model.device), show_progress=show_progress)
    kept = [left_out.add(views[0], failed), *(LeftOut().add(view, failed) for view in views[1:])]
    left_out.tell(len(views[0].images), advice=advice)
    return kept


def encode_split(model: Retriever, view: Captions) -> tuple[Tensor, Tensor]:
    """The vectors of every image (N, D) and text (M, D) of captions, as evaluation makes them."""
    ready = prepare(model, view, device=str(model.device))
    images = model.encode_image(ready.captions.images, show_progress=True)
    return images, model.encode_text(ready.texts, show_progress=True)
