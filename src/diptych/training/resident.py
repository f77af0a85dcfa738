"""Columns of targets that lie whole on the GPU: a batch brings the numbers of its rows, nothing is read or copied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from diptych.data.arrays import ArrayStore
from diptych.data.captions import Captions
from diptych.targets.columns import Column, Of
from diptych.types import Batch

BLOCK = 16_384  # rows that are read at once
SHARE = 1 / 20  # of the GPU's free memory that columns may take


class Resident:
    """Matrices on a device, by the name of their column, each with a row per image or per text of ``captions``."""

    def __init__(self, columns: Mapping[str, Column], captions: Captions, device: torch.device) -> None:
        for name, column in columns.items():
            column.check(name, captions.name, len(captions.images), len(captions.texts))
        self.matrices: dict[str, tuple[Tensor, Of]] = {
            name: (_loaded(column, device), column.of) for name, column in columns.items()
        }
        if columns:
            self.image_of = torch.from_numpy(np.asarray(captions.image_of, np.int64)).to(device)

    def fill(self, batch: Batch) -> Batch:
        """The batch, on the device, with its rows of every column among its targets."""
        if not self.matrices:
            return batch
        numbers: dict[Of, Tensor] = {"text": batch.text_ids, "image": self.image_of[batch.text_ids]}
        found = {name: matrix[numbers[of]] for name, (matrix, of) in self.matrices.items()}
        return replace(batch, targets={**batch.targets, **found})


def divide(
    columns: Mapping[str, Column], captions: Captions, device: torch.device
) -> tuple[Resident, dict[str, Column]]:
    """The columns of teachers' vectors that go onto a GPU, where they fit, and those that a loader reads."""
    files = {name: column for name, column in columns.items() if _is_matrix(column)}
    if device.type != "cuda" or _bytes(files) > SHARE * torch.cuda.mem_get_info(device)[0]:
        files = {}
    rest = {name: column for name, column in columns.items() if name not in files}
    return Resident(files, captions, device), rest


def _loaded(column: Column, device: torch.device) -> Tensor:
    """All rows on the device, without a second copy of them in the host's memory."""
    count, found = len(column.values), None
    for start in range(0, count, BLOCK):
        rows = torch.from_numpy(column.rows(np.arange(start, min(start + BLOCK, count))))
        if found is None:
            found = torch.empty(count, *rows.shape[1:], dtype=rows.dtype, device=device)
        found[start : start + len(rows)] = rows
    return torch.zeros(0, device=device) if found is None else found


def _is_matrix(column: Column) -> bool:
    return isinstance(column.values, ArrayStore) and column.values.mapped


def _bytes(columns: Mapping[str, Column]) -> int:
    stores = [column.values for column in columns.values() if isinstance(column.values, ArrayStore)]
    return sum(int(np.prod(store.shape, dtype=np.int64)) * store.dtype.itemsize for store in stores)
