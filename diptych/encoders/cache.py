"""The outputs of frozen encoders, kept on disk by content: computed once, found again by any run.

A cache file is named by a hash of the encoder's weights, the way its inputs are prepared, and the content of
every input; change one of them and it is another file. The folder is ``~/.cache/diptych``, or
``DIPTYCH_CACHE``. Files are float16, grow chunk by chunk, and go on where a killed run stopped; a damaged one
is computed again. Two processes that need the same file share the work: one computes, the other waits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from diptych.data.arrays import ArrayStore
from diptych.data.captions import ImageStore, StoredImage
from diptych.data.images import ImageInput
from diptych.data.text import CachedTexts, TextStore
from diptych.encoders.backbone import Backbone
from diptych.encoders.cells import compute_cells
from diptych.encoders.feature_file import FeatureFile
from diptych.encoders.transformer import TransformerText
from diptych.errors import DataError, ImageError
from diptych.parts import describe
from diptych.progress import track
from diptych.storage import cache_folder, write_text

TEXT_CHUNK = 2048  # texts between two writes


class CachedImages(ArrayStore):
    """The cells of images, (R, C) float16 each, with the ``pictures`` they were computed from.

    Content keys are those of the pictures: it is the same data. ``unreadable`` are rows whose picture could not be
    read, with the reason; their cells are those of a white picture.
    """

    def __init__(self, path: Path, pictures: ImageStore, unreadable: Mapping[int, str] | None = None) -> None:
        super().__init__(path)
        self.pictures, self.unreadable = pictures, dict(unreadable or {})

    def content_key(self, index: int) -> str:
        """The key of the picture."""
        return self.pictures.content_key(index)


def cache_image_features(
    backbone: Backbone,
    image_input: ImageInput,
    store: ImageStore,
    folder: str | Path | None = None,
    *,
    batch_size: int | None = None,
    skip: bool = False,
    show_progress: bool = True,
) -> CachedImages:
    """The cells (N, R, C) of every image of ``store``, computed on the backbone's device, unaugmented.

    An image that cannot be read is an error, or with ``skip`` remembered in ``CachedImages.unreadable``.
    """
    path, key = _image_file(backbone, image_input, store, folder)
    note = path.with_suffix(".unreadable.json")
    with FeatureFile(path, key, overwrite=True) as file:
        if not file.finished:
            done = file.progress.done
            readable = Readable(store, _noted(note) if done else {})
            for chunk in compute_cells(
                backbone,
                image_input,
                readable if skip else store,
                done,
                batch_size=batch_size,
                show_progress=show_progress,
            ):
                if readable.unreadable:
                    write_text(note, json.dumps(readable.unreadable))
                file.append(chunk.values(), chunk.images)
            file.finish()
    return CachedImages(path, store, _noted(note) if skip else {})


class Readable:
    """A store whose unreadable images are white pictures, and remembered with the reason."""

    def __init__(self, store: ImageStore, unreadable: dict[int, str]) -> None:
        self.store, self.unreadable = store, unreadable

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, index: int) -> StoredImage:
        try:
            return self.store[index]
        except ImageError as error:
            self.unreadable[index] = str(error)
            return Image.new("RGB", (64, 64), (255, 255, 255))

    def content_key(self, index: int) -> str:
        """The key of the image."""
        return self.store.content_key(index)


def _noted(note: Path) -> dict[int, str]:
    """The images that an earlier run could not read."""
    return (
        {int(row): reason for row, reason in json.loads(note.read_text("utf-8")).items()}
        if note.exists()
        else {}
    )


def cached_image_features(
    backbone: Backbone, image_input: ImageInput, store: ImageStore, folder: str | Path | None = None
) -> CachedImages | None:
    """The cells of ``store`` where an earlier run has computed them all, else None."""
    path, key = _image_file(backbone, image_input, store, folder)
    whole = FeatureFile(path, key).is_whole()
    return CachedImages(path, store, _noted(path.with_suffix(".unreadable.json"))) if whole else None


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
    for rows in _chunks(0, len(texts)):
        ids = texts.collate(rows)
        if not ids.is_ids:
            raise DataError("these texts are cached states already: give the token ids to compute them from.")
        contents.update(ids.values[ids.mask].numpy().tobytes())
    key = content_name(encoder.fingerprint(), contents.hexdigest())
    path = cache_folder(folder) / f"texts-{key}.npy"
    with FeatureFile(path, key, overwrite=True) as file:
        if not file.finished:
            left = _chunks(file.progress.done, len(texts))
            for rows in track(left, "text states", len(left), show_progress):
                file.append(_states(encoder, texts, rows, batch_size), len(rows))
            file.finish()
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return CachedTexts(ArrayStore(path), offsets, getattr(texts, "pad_to_multiple", 1))


def contents_of(store: ImageStore) -> str:
    """A hash of the content of every image of a store, in order."""
    contents = hashlib.sha256()
    for row in range(len(store)):
        contents.update(store.content_key(row).encode() + b"\0")
    return contents.hexdigest()


def content_name(*parts: str) -> str:
    """24 hex digits that name the content the parts stand for."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _image_file(
    backbone: Backbone, image_input: ImageInput, store: ImageStore, folder: str | Path | None
) -> tuple[Path, str]:
    key = content_name(backbone.fingerprint(), json.dumps(describe(image_input)), contents_of(store))
    return cache_folder(folder) / f"images-{key}.npy", key


def _chunks(start: int, end: int) -> list[range]:
    return [range(first, min(first + TEXT_CHUNK, end)) for first in range(start, end, TEXT_CHUNK)]


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
        states = encoder.states(texts.collate(batch).to(device))
        for row, values, mask in zip(batch, states.values.float().cpu(), states.mask.cpu(), strict=True):
            found[row] = values[mask].numpy()
    return np.concatenate([found[row] for row in rows])
