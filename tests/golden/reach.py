"""Every name that the golden runs take from inside the package: where a module moves, this file alone follows."""

from __future__ import annotations

from diptych.cache.feature_pack import FeaturePack
from diptych.cache.rows import RowFile as FeatureFile
from diptych.evaluation import score_matrix
from diptych.index.base import Index
from diptych.index.engines.opening import empty_index as create_index
from diptych.index.protocol import Item
from diptych.recipes import RECIPES
from diptych.runs.train import seed_everything
from diptych.training.log import Log
from diptych.vectors.files import open_vectors

__all__ = [
    "RECIPES", "FeatureFile", "FeaturePack", "Index", "Item", "Log", "create_index", "open_vectors", "score_matrix",
    "seed_everything",
]  # fmt: skip
