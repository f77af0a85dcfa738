"""Encoding many items: they are read, decoded and tokenised ahead in threads, and no copy is waited for.

::

    threads   read, decode, tokenise, pin          batch 3   batch 4
    GPU       copy in, encode                 batch 2   batch 3
    host      take results                batch 1   batch 2

Batches come and go in order, a bounded number at a time. One batch alone (a search query) is read by no thread. On a
CPU the batches are those of a plain loop, so the numbers are too.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from diptych.data.arrays import are_features, ranges, read_ahead, read_items
from diptych.data.captions import StoredImage
from diptych.data.decode.extra_formats import is_image
from diptych.data.images import ImageInput, as_item
from diptych.data.text import CachedTexts, TextInput, TextStore
from diptych.devices import autocast
from diptych.encoders.transformer import LONGEST, pack
from diptych.errors import DataError
from diptych.model.scores import evaluating
from diptych.progress import track
from diptych.types import Features, Inputs, as_inputs

RowNumbers = Sequence[int]
K = TypeVar("K")
T = TypeVar("T")
I = TypeVar("I", Features, Inputs)  # noqa: E741

CPU_THREADS = 1  # beside a model that uses all cores
FEATURE_THREADS = 4  # that read stored features for a GPU
TEXT_THREADS = 2  # the tokenizer has more of its own
PICTURE_THREADS = 8  # that decode pictures for a GPU
IMAGES = 64  # images per batch
GPU_PICTURES = 128
GPU_FEATURES = 512  # launching the few kernels of such a batch takes as long as computing them
TEXTS = 256
PACKED_TEXTS = 2048  # texts per batch without padding: some 28,000 tokens
LONG_TEXTS = 64  # texts per batch if they are too long to pack
PICTURES = 4  # decoded at a time by one thread, before they are made small
UNREAD = 3  # batches whose results are still on their way back


def encoded_images(
    model: Any, store: Any, encode: Callable[[Inputs], T], batch_size: int | None, show_progress: bool
) -> Iterator[tuple[slice, T]]:
    """Which images, and ``encode`` of them, in order."""
    with encoding_mode(model):
        for rows, inputs in image_batches(store, model.image_input, batch_size, model.device, show_progress):
            yield rows, encode(inputs)


def encoded_texts(
    model: Any,
    texts: Sequence[str] | TextStore,
    encode: Callable[[Features], T],
    batch_size: int | None,
    show_progress: bool,
) -> Iterator[tuple[RowNumbers, T]]:
    """Which texts, and ``encode`` of them."""
    packs = model.text.encoder.packs(model.device)
    with encoding_mode(model):
        for rows, inputs in text_batches(
            texts, model.text_input, batch_size, model.device, packs, show_progress
        ):
            yield rows, encode(inputs)


@contextmanager
def encoding_mode(model: Any) -> Iterator[None]:
    """Evaluation mode, no gradients, the model's own precision, and no compiler: its shapes are those of training."""
    compiled = any(tower.encoder._compiled_call_impl is not None for tower in (model.image, model.text))
    # looked up only here: importing the compiler takes seconds
    eager = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
    with torch.inference_mode(), evaluating(model), autocast(model.device, model.precision), eager:
        yield


def image_batches(
    store: Any, image_input: ImageInput, batch_size: int | None, device: torch.device, show_progress: bool
) -> Iterator[tuple[slice, Inputs]]:
    """Which images, and their inputs on the device, batch by batch, in order."""
    pinned, features = device.type == "cuda", are_features(store)
    size = batch_size or ((GPU_FEATURES if features else GPU_PICTURES) if pinned else IMAGES)
    jobs = [slice(start, min(start + size, len(store))) for start in range(0, len(store), size)]

    def read(job: slice) -> tuple[slice, Inputs]:
        return job, _pin(_image_inputs(store, job, image_input, pinned), pinned)

    threads = _threads(len(jobs), device, FEATURE_THREADS if features else PICTURE_THREADS)
    if isinstance(store, list | tuple) and len({id(item) for item in store}) < len(store):
        threads = min(threads, 1)  # Pillow must not load one picture in two threads
    found = read_ahead(jobs, read, threads, device)
    yield from _to_device(track(found, "encode images", len(jobs), show_progress), device)


def text_batches(
    texts: Sequence[str] | TextStore,
    text_input: TextInput,
    batch_size: int | None,
    device: torch.device,
    packs: bool,
    show_progress: bool,
) -> Iterator[tuple[RowNumbers, Features]]:
    """Which texts, and their inputs on the device, batch by batch.

    Where the encoder ``packs``, texts are tokenised batch by batch and come in order; otherwise texts of like length go
    together, so that little is padding.
    """
    jobs: list[RowNumbers]
    packs = packs and not isinstance(texts, CachedTexts)
    if packs:
        size = batch_size or PACKED_TEXTS
        jobs = [*ranges(0, len(texts), size)]
    else:
        texts = texts if isinstance(texts, TextStore) else text_input.read(texts)
        order = sorted(range(len(texts)), key=texts.size)
        size = batch_size or TEXTS
        jobs = [order[start : start + size] for start in range(0, len(order), size)]
    pinned = device.type == "cuda"

    def read(job: RowNumbers) -> list[tuple[RowNumbers, Features]]:
        if not packs:
            assert isinstance(texts, TextStore)
            return [(job, _pin(as_inputs(texts.collate(job)), pinned))]
        return [(rows, _pin(batch, pinned)) for rows, batch in _packed(texts, job, text_input)]

    found = read_ahead(jobs, read, _threads(len(jobs), device, TEXT_THREADS), device)
    parts = (part for parts in track(found, "encode texts", len(jobs), show_progress) for part in parts)
    yield from _to_device(parts, device)


def collect(found: Iterable[tuple[slice | RowNumbers, Tensor]], out: Tensor) -> Tensor:
    """``out`` with its rows filled in; vectors on a GPU are copied and put there while it computes the next."""

    def put(rows: slice | RowNumbers, vectors: Tensor, copied: torch.cuda.Event | None) -> None:
        if copied is not None:
            copied.synchronize()
        with torch.inference_mode():  # which a thread does not inherit
            out[rows if isinstance(rows, slice) else torch.as_tensor(rows)] = vectors.to(out.dtype)

    waiting: deque[Future[None]] = deque()
    with ThreadPoolExecutor(1, "collect") as executor:
        for rows, vectors in found:
            if not vectors.is_cuda:
                put(rows, vectors, None)
                continue
            with torch.cuda.device(vectors.device):
                there = vectors.to("cpu", non_blocking=True)  # into pinned memory
                copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                copied.record()
            waiting.append(executor.submit(put, rows, there, copied))
            if len(waiting) > UNREAD:
                waiting.popleft().result()
        for last in waiting:
            last.result()
    return out


def _image_inputs(store: Any, job: slice, image_input: ImageInput, pinned: bool) -> Inputs:
    rows = np.arange(job.start, job.stop)
    listed = isinstance(store, list | tuple)  # by a user: checked one by one
    if are_features(store) and not listed:
        return as_inputs(image_input(read_items(store, rows, pin_memory=pinned)))
    items: list[StoredImage] = []
    parts: list[Tensor] = []
    for row in rows.tolist():
        items.append(as_item(store[row]))
        if len(items) == PICTURES and all(isinstance(item, Image.Image) for item in items):
            made = as_inputs(image_input(items))
            if not isinstance(made, Tensor):  # patches, which only a whole batch pads alike
                later = (as_item(store[later]) for later in range(row + 1, job.stop))
                return as_inputs(image_input([*items, *later]))
            parts.append(made)
            items = []
    if not parts:
        return as_inputs(image_input(items))
    if items:
        last = as_inputs(image_input(items))
        assert isinstance(last, Tensor)
        parts.append(last)
    return torch.cat(parts)


def _packed(
    texts: Sequence[str] | TextStore, job: RowNumbers, text_input: TextInput
) -> Iterator[tuple[RowNumbers, Features]]:
    """The texts of a job packed, those that are too long in padded batches of their own."""
    first = 0 if isinstance(texts, TextStore) else job[0]
    store = texts if isinstance(texts, TextStore) else text_input.read(texts[job[0] : job[-1] + 1])
    sizes = {row: store.size(row - first) for row in job}
    short = [row for row in job if sizes[row] <= LONGEST]
    long = sorted((row for row in job if sizes[row] > LONGEST), key=sizes.__getitem__)
    if short:
        yield short, pack(as_inputs(store.collate([row - first for row in short])))
    for start in range(0, len(long), LONG_TEXTS):
        rows = long[start : start + LONG_TEXTS]
        yield rows, as_inputs(store.collate([row - first for row in rows]))


def _pin(inputs: I, pinned: bool) -> I:
    if not pinned:
        return inputs
    return inputs.pin_memory() if isinstance(inputs, Tensor) else inputs.map(Tensor.pin_memory)


def _to_device(batches: Iterable[tuple[K, I]], device: torch.device) -> Iterator[tuple[K, I]]:
    """Batches on the device; to a GPU they are copied on a stream of their own, beside what it computes."""
    if device.type != "cuda":
        for key, inputs in batches:
            yield key, inputs.to(device)
        return
    with torch.cuda.device(device):
        copying, main = torch.cuda.Stream(), torch.cuda.current_stream()  # type: ignore[no-untyped-call]

    def move(tensor: Tensor) -> Tensor:
        there = tensor.to(device, non_blocking=True)
        there.record_stream(main)  # its memory is not given away while it is being read
        return there

    for key, inputs in batches:
        with torch.cuda.stream(copying):
            there = move(inputs) if isinstance(inputs, Tensor) else inputs.map(move)
        main.wait_stream(copying)
        yield key, there


def _threads(jobs: int, device: torch.device, most: int) -> int:
    if jobs < 2:
        return 0
    return min(jobs, os.cpu_count() or 1, most) if device.type == "cuda" else CPU_THREADS


def is_text(items: Any) -> bool:
    """Whether what is to be encoded are texts: a string or strings. Strings beside pictures are refused."""
    strings = [items] if isinstance(items, str) else []
    if isinstance(items, list | tuple):
        strings = [item for item in items if isinstance(item, str)]
        if strings and len(strings) < len(items):
            raise DataError("texts and images are encoded apart: call encode for each.")
    file = next((name for name in strings if is_image(name) and Path(name).is_file()), None)
    if file is not None:
        raise DataError(f"'{file}' also names a picture: give Path('{file}'), or call encode_text.")
    return bool(strings)
