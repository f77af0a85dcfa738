"""The outputs of frozen encoders, kept on disk by content: computed once, found again by any run.

The features of a picture are a row in the pack of its backbone, named by a hash of the weights and of the way pictures
are prepared, and found by the content of the picture. The states of texts are one file for each list of texts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import Timeout
from numpy.typing import NDArray
from torch import Tensor

from diptych.cache.contents import OLD, Cells, cell_pack, content_name, in_words
from diptych.cache.feature_pack import MISSING, FeaturePack
from diptych.cache.rows import kept_rows
from diptych.data.arrays import ArrayStore, flat_index, ranges, read_ahead
from diptych.data.captions import ImageStore, StoredImage, StoreRows
from diptych.data.images import ImageInput, as_item
from diptych.data.problems import content_keys, read_rows
from diptych.data.text import CachedTexts, TextStore
from diptych.encoders.encoder import Backbone
from diptych.encoders.transformer import TransformerText
from diptych.errors import DataError
from diptych.progress import echo, track
from diptych.storage import cache_folder
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
        return self.images >= CHUNK_IMAGES or sum(block.nbytes for block in self.cells) >= CHUNK_BYTES

    def values(self) -> NDArray[Any]:
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
    batches = ranges(start, len(store), size)
    chunk = Chunk()
    ahead = read_ahead(batches, lambda batch: read_rows(batch, lambda row: as_item(store[row]), skip), 1)
    for items, failed in track(ahead, label, len(batches), show_progress):
        if items:
            chunk.cells.append(cells_now(backbone, image_input, [*items.values()]))
        chunk.images += len(items) + len(failed)
        chunk.failures.update(failed)
        if chunk.full:
            yield chunk
            chunk = Chunk()
    if chunk.images:
        yield chunk


@torch.inference_mode()
def cells_now(backbone: Backbone, image_input: ImageInput, pictures: Sequence[StoredImage]) -> Cells:
    """The cells (n, R, C) of some pictures, in float32, on the device of the backbone."""
    pixels = as_inputs(image_input(pictures))
    if not isinstance(pixels, Tensor):
        raise DataError("these images are features already: extract from pictures.")
    found: Cells = backbone(pixels.to(next(backbone.parameters()).device)).float().cpu().numpy()
    return found


TEXT_CHUNK = 2048  # texts between two writes


class CachedImages(ArrayStore):
    """The cells of images, (R, C) float16 each, with the ``pictures`` they were computed from.

    Content keys are those of the pictures: it is the same data. ``unreadable`` are rows whose picture could not be
    read, with the reason; their cells are zeros.
    """

    def __init__(
        self,
        pack: FeaturePack,
        places: NDArray[np.int64],  # (N,) record of each image in the pack
        pictures: ImageStore,
        unreadable: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(np.zeros((0, *pack.shape), dtype=np.float16))
        self.pack, self.places, self.pictures = pack, places, pictures
        self.unreadable = dict(unreadable or {})
        self.shape = (len(places), *pack.shape)

    def _fill(self, out: NDArray[Any], starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
        self.pack.read(self.places[flat_index(starts, sizes)], out)

    def content_key(self, index: int) -> str:
        return self.pictures.content_key(index)


def picture_pack(
    backbone: Backbone, image_input: ImageInput, folder: str | Path | None = None
) -> FeaturePack:
    """The pack of what a backbone makes of pictures; other weights, another preparation or precision is another."""
    device = next(backbone.parameters()).device.type
    half = str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else "float32"
    size = backbone.pixel_format.get("size", "?")
    title = f"{getattr(backbone, 'name', type(backbone).__name__)} at {size} pixels"
    return cell_pack(backbone.fingerprint(), image_input.identity(), half, title, folder)


def cache_image_features(
    backbone: Backbone,
    image_input: ImageInput,
    store: ImageStore,
    folder: str | Path | None = None,
    *,
    skip: bool = False,
    show_progress: bool = True,
    **how: Any,
) -> CachedImages:
    """The cells (N, R, C) of every image of ``store``; those that are new are computed, as ``compute_cells`` says.

    An image that cannot be read is an error, or with ``skip`` noted in ``CachedImages.unreadable``.
    """
    pack = picture_pack(backbone, image_input, folder)
    keys, unreadable = content_keys(store, skip)
    pack.hold()
    missing = _find_missing(pack, keys)
    if missing:
        if show_progress:
            say_old_caches(cache_folder(folder))
        lock = pack.work_lock(hash_of(keys.values()))
        with hold(lock.acquire, show_progress):
            pack.hold()
            missing = _find_missing(pack, keys)  # another process may have computed them meanwhile
            left = StoreRows(store, np.array(missing, dtype=np.int64))
            done = 0
            how |= {"skip": skip, "show_progress": show_progress}
            for chunk in compute_cells(backbone, image_input, left, **how):
                failed = {missing[row]: reason for row, reason in chunk.failures.items()}
                rows = [row for row in missing[done : done + chunk.images] if row not in failed]
                pack.append([keys[row] for row in rows], chunk.values())
                unreadable |= failed
                done += chunk.images
    places = pack.find(keys.get(row, "") for row in range(len(store)))
    reasons = {keys[row]: reason for row, reason in unreadable.items() if row in keys}
    absent = np.flatnonzero(places == MISSING).tolist()
    unreadable |= {row: reasons[keys[row]] for row in absent if keys.get(row) in reasons}
    pack.note_use(places)
    return CachedImages(pack, places, store, dict(sorted(unreadable.items())))


def cached_image_features(
    backbone: Backbone, image_input: ImageInput, store: ImageStore, folder: str | Path | None = None
) -> CachedImages | None:
    """The cells of ``store`` where earlier runs have computed them all, else None."""
    pack = picture_pack(backbone, image_input, folder)
    if not len(pack):
        return None
    pack.hold()
    keys, unreadable = content_keys(store)
    if unreadable or _find_missing(pack, keys):
        return None
    places = pack.find(keys[row] for row in range(len(store)))
    pack.note_use(places)
    return CachedImages(pack, places, store)


def _find_missing(pack: FeaturePack, keys: Mapping[int, str]) -> list[int]:
    """The images, one for each content, that a pack does not have."""
    first: dict[str, int] = {}
    for (row, key), place in zip(keys.items(), pack.find(keys.values()), strict=True):
        if place == MISSING:
            first.setdefault(key, row)
    return sorted(first.values())


def cache_text_states(
    encoder: TransformerText,
    texts: TextStore,
    folder: str | Path | None = None,
    *,
    batch_size: int = 64,
    show_progress: bool = True,
) -> CachedTexts:
    """The last hidden states of every token of ``texts``, computed on the encoder's device."""
    sizes = np.array([texts.size(i) for i in range(len(texts))], dtype=np.int64)
    contents = hashlib.sha256(sizes.tobytes())
    for rows in ranges(0, len(texts), TEXT_CHUNK):
        ids = texts.collate(rows)
        if not ids.is_ids:
            raise DataError("these texts are cached states already: give the token ids to compute them from.")
        contents.update(ids.values[ids.mask].tobytes())
    key = content_name(encoder.fingerprint(), contents.hexdigest())
    path = cache_folder(folder) / f"texts-{key}.npy"

    def states(start: int) -> Iterator[tuple[NDArray[np.float32], int]]:
        for rows in track(ranges(start, len(texts), TEXT_CHUNK), "text states", show=show_progress):
            yield _states(encoder, texts, rows, batch_size), len(rows)

    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return CachedTexts(
        ArrayStore(kept_rows(path, key, states)), offsets, getattr(texts, "pad_to_multiple", 1)
    )


def hash_of(keys: Iterable[str]) -> str:
    """A hash of several strings, in order."""
    contents = hashlib.sha256()
    for key in keys:
        contents.update(key.encode() + b"\0")
    return contents.hexdigest()


@cache
def say_old_caches(place: Path) -> None:
    """Tell the user, once, that files of earlier versions are of no use."""
    files = list(place.glob(f"{OLD}*.npy"))
    if files:
        size = in_words(sum(file.stat().st_size for file in files))
        echo(
            f"{place} holds {len(files)} feature file{'s' * (len(files) > 1)} of an earlier version ({size}), "
            "which nothing reads any more: 'diptych cache clear --old' removes them.",
            err=True,
        )


@contextmanager
def hold(acquire: Callable[..., Any], show_progress: bool) -> Iterator[None]:
    """Hold a lock; say so where another process has it."""
    try:
        held = acquire(timeout=0)
    except Timeout:
        if show_progress:
            echo("another process computes these features: waiting for it.", err=True)
        held = acquire()
    with held:
        yield


@torch.inference_mode()
def _states(
    encoder: TransformerText, texts: TextStore, rows: Sequence[int], size: int
) -> NDArray[np.float32]:
    """States (tokens, H) of some texts end to end, computed in batches of like length."""
    encoder.model.eval()
    device = next(encoder.parameters()).device
    found: dict[int, NDArray[np.float32]] = {}
    order = sorted(rows, key=texts.size)
    for start in range(0, len(order), size):
        batch = order[start : start + size]
        states = encoder.states(as_inputs(texts.collate(batch)).to(device))
        for row, values, mask in zip(batch, states.values.float().cpu(), states.mask.cpu(), strict=True):
            found[row] = values[mask].numpy()
    return np.concatenate([found[row] for row in rows])
