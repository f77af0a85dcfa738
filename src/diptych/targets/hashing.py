"""Targets of hashing: the classes of each image as a row of zeros and ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from diptych.data.captions import Captions
from diptych.data.labels import class_rows, class_sets
from diptych.objectives.hashing import TARGET
from diptych.targets.columns import Column


@dataclass(frozen=True)
class HashTargets:
    """The column ``labels``, (N, C): the classes ``names`` of every image, all zeros where it has none."""

    column: str
    names: Sequence[str]

    def columns(
        self,
        captions: Captions,
        *,
        device: torch.device,
        cache_dir: Path | None = None,
        show_progress: bool = True,
    ) -> Mapping[str, Column]:
        """One row per image."""
        rows = class_rows(class_sets(captions, self.column), self.names)
        return {TARGET: Column(rows.astype(np.float32), "image")}
