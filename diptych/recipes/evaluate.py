"""Evaluate runs on a split under a protocol: what ``diptych evaluate`` does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from diptych.data.formats import open_captions
from diptych.errors import DataError
from diptych.recipes.run import training_splits
from diptych.retriever import Retriever
from diptych.training.checkpoint import read_run

