"""Run a backbone over many images: pictures are opened ahead, cells come in chunks worth writing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diptych.data.ahead import read_ahead
from diptych.data.captions import ImageStore, StoredImage
from diptych.data.images import ImageInput, as_item
from diptych.encoders.encoder import Backbone
from diptych.errors import DataError, ImageError
from diptych.progress import track
from diptych.types import as_inputs

CHUNK_BYTES = 32 << 20  # bytes of cells between two writes to disk
CHUNK_IMAGES = 256
CPU_BATCH, CUDA_BATCH = 8, 128  # on a CPU small batches stay in its caches: up to twice the speed


@dataclass
class Chunk:
    """Cells (n, R, C) of the next ``images`` images, in order; those that failed by row, with the reason."""

    images: int = 0
    cells: list[NDArray[Any]] = field(default_factory=list)
    failures: dict[int, str] = field(default_factory=dict)

    @property
    def full(self) -> bool:
        """Whether it is time to write."""
        return self.images >= CHUNK_IMAGES or sum(block.nbytes for block in self.cells) >= CHUNK_BYTES

    def values(self) -> NDArray[Any]:
        """The cells in one array."""
        return np.concatenate(self.cells) if self.cells else np.zeros(0, dtype=np.float32)


def compute_cells(
    backbone: Backbone,
    image_input: ImageInput,
    store: ImageStore,
    start: int = 0,
    *,
    batch_size: int | None = None,
    skip: bool = False,
    label: str = "image features",
    show_progress: bool = True,
) -> Iterator[Chunk]:
    """The cells of images ``start``… of a store, on the device of the backbone, which is put in evaluation
    mode.

    A picture that cannot be read is an error, or with ``skip`` a failure that is reported and left out.
    """
    backbone.eval()
    device = next(backbone.parameters()).device
    size = batch_size or (CUDA_BATCH if device.type == "cuda" else CPU_BATCH)
    batches = [range(first, min(first + size, len(store))) for first in range(start, len(store), size)]
    chunk = Chunk()
    ahead = read_ahead(batches, lambda batch: _open(store, batch, skip), workers=1)
    for opened in track(ahead, label, len(batches), show_progress):
        items = [item for item in opened.values() if not isinstance(item, str)]
        if items:
            pixels = as_inputs(image_input(items))
            if not isinstance(pixels, Tensor):
                raise DataError("these images are features already: extract from pictures.")
            with torch.inference_mode():
                chunk.cells.append(backbone(pixels.to(device)).float().cpu().numpy())
        chunk.images += len(opened)
        chunk.failures.update({row: item for row, item in opened.items() if isinstance(item, str)})
        if chunk.full:
            yield chunk
            chunk = Chunk()
    if chunk.images:
        yield chunk


def _open(store: ImageStore, rows: range, skip: bool) -> dict[int, StoredImage | str]:
    opened: dict[int, StoredImage | str] = {}
    for row in rows:
        try:
            opened[row] = as_item(store[row])
        except (ImageError, OSError) as error:
            if not skip:
                raise
            opened[row] = " ".join(str(error).split())
    return opened
