"""Targets that are classes: the labels of each image and the classes of its regions, and those that hashing reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diptych.branches.labels import REGION_TARGET, UNKNOWN_CLASS
from diptych.cache.features import cache_image_features
from diptych.data.arrays import ranges, read_items
from diptych.data.captions import Captions, ImageStore, holds_pictures
from diptych.data.images import ImageInput
from diptych.data.labels import Labels, class_rows, class_sets
from diptych.data.readers.label_arrays import REGION_CLASSES, LazyRow
from diptych.encoders.encoder import Backbone
from diptych.errors import DataError
from diptych.objectives.clustering import cluster, nearest
from diptych.objectives.labels import TARGET
from diptych.ops import unit
from diptych.progress import track
from diptych.targets.columns import Column

SAMPLE = 50_000  # regions that k-means looks at
CHUNK = 256  # images whose regions are assigned at a time
ITERATIONS = 10


@dataclass(frozen=True)
class LabelTargets:
    """The column ``labels``: the labels of every image, (N, C) of zeros and ones."""

    labels: Labels

    def columns(self, captions: Captions, **_: Any) -> Mapping[str, Column]:
        """One row per image; a label that is not in the vocabulary is an error."""
        return {TARGET: Column(self.labels.rows_of(captions), "image")}


@dataclass(frozen=True)
class RegionTargets:
    """The column ``region_classes``: the class of every region, (N, R), −1 behind the last one of an image.

    Classes are the detector's where the data have them (the label column ``region_classes``). Elsewhere they are the
    clusters of the region vectors, by spherical k-means over a sample of the centred vectors: what a masked region
    looked like, in place of what a detector called it. ``backbone`` makes the regions of pictures (its cached cells).
    """

    classes: int
    image_input: ImageInput
    backbone: Backbone | None = None
    seed: int = 0

    def columns(
        self,
        captions: Captions,
        *,
        device: torch.device,
        show_progress: bool = True,
    ) -> Mapping[str, Column]:
        if REGION_CLASSES in captions.labels:
            rows = [np.asarray(list(one), dtype=np.int64) for one in captions.labels[REGION_CLASSES]]
            return {REGION_TARGET: Column(_padded(rows), "image")}
        store: ImageStore = captions.images
        if holds_pictures(store):
            if self.backbone is None:
                raise DataError(
                    f"{captions.name} holds pictures and its backbone is trained, so that regions have no fixed class: "
                    "train with context_weight 0, or with a frozen backbone."
                )
            store = cache_image_features(
                self.backbone.to(device), self.image_input, store, show_progress=show_progress
            )
        centre, centroids = self._clusters(store, device)
        rows = []
        for some in track(ranges(0, len(store), CHUNK), "region classes", show=show_progress):
            for item in read_items(store, np.asarray(some)):
                vectors = unit(torch.as_tensor(np.asarray(item, np.float32), device=device) - centre)
                rows.append(nearest(vectors, centroids)[1].cpu().numpy())
        return {REGION_TARGET: Column(_padded(rows), "image")}

    def _clusters(self, store: ImageStore, device: torch.device) -> tuple[Tensor, Tensor]:
        """The mean of a sample of region vectors, and the unit centroids around it."""
        rng = np.random.default_rng(self.seed)
        each = max(1, len(np.asarray(store[0])))
        sample = np.sort(rng.permutation(len(store))[: max(1, SAMPLE // each)])
        items = [torch.as_tensor(np.asarray(item, np.float32)) for item in read_items(store, sample)]
        vectors = torch.cat(items).to(device)
        centre = vectors.mean(dim=0)
        clusters = min(self.classes, len(vectors))
        rows = unit(vectors - centre)
        found = cluster(rows, clusters, iterations=ITERATIONS, seed=self.seed, device=device)
        return centre, found.centroids


def detector_classes(captions: Captions) -> int | None:
    """How many classes the detector of the data tells regions apart by; None where the data have none."""
    column: Sequence[Any] | None = captions.labels.get(REGION_CLASSES)
    if column is None or not len(column):
        return None
    if isinstance(column[0], LazyRow):
        return int(column[0].classes.scores.shape[2])
    return 1 + max(int(max(one)) for one in column)


def _padded(rows: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    widest = max(len(one) for one in rows)
    matrix = np.full((len(rows), widest), UNKNOWN_CLASS, dtype=np.int64)
    for row, one in enumerate(rows):
        matrix[row, : len(one)] = one
    return matrix


@dataclass(frozen=True)
class HashTargets:
    """The column ``labels``, (N, C): the classes ``names`` of every image, all zeros where it has none."""

    column: str
    names: Sequence[str]
    split: bool = True

    def columns(self, captions: Captions, **_: Any) -> Mapping[str, Column]:
        rows = class_rows(class_sets(captions, self.column, self.split), self.names)
        return {TARGET: Column(rows.astype(np.float32), "image")}
