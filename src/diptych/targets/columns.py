"""Columns of targets: a row for each image or text of training data, read as batches need them, or on the GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diptych.data.arrays import ArrayStore, ranges
from diptych.data.captions import Captions
from diptych.errors import DataError, SettingsError
from diptych.types import Batch

Of = Literal["image", "text"]


@dataclass(frozen=True)
class Column:
    """What an objective reads beside the pairs: class labels, the vectors of a teacher.

    ``values`` has a row for each image or each text, as ``of`` says: an array, or a file of any size.
    """

    values: NDArray[Any] | ArrayStore
    of: Of

    def rows(self, numbers: NDArray[np.int64], *, pin_memory: bool = False) -> NDArray[Any]:
        """Some rows, in this order; those of a file in pinned memory for a GPU, if asked."""
        if isinstance(self.values, ArrayStore):
            return self.values.rows(numbers, pin_memory=pin_memory)
        return np.ascontiguousarray(self.values[numbers])

    def check(self, name: str, data: str, images: int, texts: int) -> None:
        """Refuse a column that does not fit the data, or in which some items have no value."""
        expected = {"image": images, "text": texts}.get(self.of)
        if expected is None:
            raise SettingsError(f"target '{name}' belongs to '{self.of}': say image or text.")
        if len(self.values) != expected:
            raise DataError(
                f"target '{name}' has {len(self.values)} rows for {expected} {self.of}s of {data}: give one each."
            )
        if isinstance(self.values, np.ndarray) and np.issubdtype(self.values.dtype, np.floating):
            missing = np.flatnonzero(np.isnan(self.values.reshape(expected, -1)).any(axis=1))
            if len(missing):
                raise DataError(
                    f"target '{name}' is missing for {len(missing)} {self.of}s of {data}, the first is number "
                    f"{missing[0]}: give it for all of them, or leave these {self.of}s out."
                )


class TargetSource(Protocol):
    """Makes columns of targets for captions: from their labels, from a teacher, from a file."""

    def columns(
        self,
        captions: Captions,
        *,
        device: torch.device,
        show_progress: bool = True,
    ) -> Mapping[str, Column]:
        """Columns by name; objectives find their rows of a batch in ``batch.targets``."""


def fill_targets(
    sources: Sequence[TargetSource],
    captions: Captions,
    *,
    device: torch.device,
    show_progress: bool = True,
) -> dict[str, Column]:
    """The columns of every source, checked against the data."""
    found: dict[str, Column] = {}
    for source in sources:
        made = source.columns(captions, device=device, show_progress=show_progress)
        for name, column in made.items():
            if name in found:
                raise SettingsError(f"two sources give the target '{name}': give each a name of its own.")
            column.check(name, captions.name, len(captions.images), len(captions.texts))
            found[name] = column
    return found


BLOCK = 16_384  # rows that are read at once
SHARE = 1 / 20  # of the GPU's free memory that columns may take


class Resident:
    """Matrices on a device, by the name of their column, each with a row per image or per text of ``captions``."""

    def __init__(self, columns: Mapping[str, Column], captions: Captions, device: torch.device) -> None:
        for name, column in columns.items():
            column.check(name, captions.name, len(captions.images), len(captions.texts))
        self.matrices: dict[str, tuple[Tensor, Of]] = {
            name: (_load(column, device), column.of) for name, column in columns.items()
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
    files = {
        name: one for name, one in columns.items() if isinstance(one.values, ArrayStore) and one.values.mapped
    }
    if device.type != "cuda" or _bytes(files) > SHARE * torch.cuda.mem_get_info(device)[0]:
        files = {}
    rest = {name: column for name, column in columns.items() if name not in files}
    return Resident(files, captions, device), rest


def _load(column: Column, device: torch.device) -> Tensor:
    """All rows on the device, without a second copy of them in the host's memory."""
    count, found = len(column.values), None
    for some in ranges(0, count, BLOCK):
        rows = torch.from_numpy(column.rows(np.asarray(some)))
        if found is None:
            found = torch.empty(count, *rows.shape[1:], dtype=rows.dtype, device=device)
        found[some.start : some.stop] = rows
    return torch.zeros(0, device=device) if found is None else found


def _bytes(columns: Mapping[str, Column]) -> int:
    stores = [column.values for column in columns.values() if isinstance(column.values, ArrayStore)]
    return sum(int(np.prod(store.shape, dtype=np.int64)) * store.dtype.itemsize for store in stores)
