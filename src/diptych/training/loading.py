"""PairLoader: batches of matched pairs whose content depends on (seed, epoch, batch number) alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from diptych.data.arrays import read_ahead, read_items
from diptych.data.captions import Captions, StoredImage
from diptych.data.images import ImageInput, Items
from diptych.data.text import TextStore
from diptych.encoders.transformer import pack
from diptych.errors import DataError, ImageError, SettingsError
from diptych.targets.columns import Column
from diptych.training.views import Augmented
from diptych.types import Batch, as_inputs


class PairLoader:
    """Every text once per epoch, with its image, in an order drawn again each epoch.

    ``batch_size`` counts the pairs of a step over all processes: every process draws the same order and takes
    its slice of each batch, so the same pairs meet in a step however many processes share it. Randomness has
    no state: the order comes from (seed, epoch), the augmentation of a batch from (seed, epoch, batch, rank),
    so an epoch may be entered at any batch and ``workers`` change nothing but the speed.

    ``workers`` threads prepare batches ahead, each a whole batch (see ``data.arrays``); at most ``workers + 1``
    are held. With CUDA they lie in pinned memory, into which features are read directly. Features keep the type
    they are stored in (see ``RegionInput``). With ``pack_texts`` the token ids of a batch come packed too (see
    ``encoders.transformer``).
    """

    def __init__(
        self,
        captions: Captions,
        image_input: ImageInput,
        text_store: TextStore,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        workers: int = 0,
        targets: Mapping[str, Column] | None = None,
        views: Mapping[str, Augmented] | None = None,
        pin_memory: bool | None = None,
        pack_texts: bool = False,
    ) -> None:
        self.captions, self.image_input, self.text_store = captions, image_input, text_store
        self.batch_size, self.seed, self.rank, self.world_size = batch_size, seed, rank, world_size
        self.workers = workers
        self.targets, self.views = dict(targets or {}), dict(views or {})
        self.pack_texts = pack_texts
        self.pin_memory = torch.cuda.is_available() if pin_memory is None else pin_memory
        self.skipped: dict[int, str] = {}  # images that could not be read, with the reason
        self._check()

    def __len__(self) -> int:
        """Steps per epoch."""
        return texts_of_an_epoch(self.captions) // self.batch_size

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from batch ``start`` on."""
        order = self.order(number)
        steps = range(start, len(self))
        device = torch.device("cuda", torch.cuda.current_device()) if self.pin_memory else None
        yield from read_ahead(steps, lambda step: self._batch(order, number, step), self.workers, device)

    def order(self, epoch: int) -> NDArray[np.int64]:
        """The texts of an epoch in the order they are seen: (M,), or as many as the data's own order takes."""
        if self.captions.order is not None:
            return self.captions.order.epoch(self.seed, epoch)
        rng = np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=(epoch,)))
        return rng.permutation(len(self.captions.texts))

    def _batch(self, order: NDArray[np.int64], epoch: int, step: int) -> Batch:
        texts = order[step * self.batch_size : (step + 1) * self.batch_size]
        share = len(texts) // self.world_size
        texts, items = self._read(texts[self.rank * share : (self.rank + 1) * share])
        images = self.captions.image_of[texts]
        # a stream each: what the pictures draw must not move what the words or a view draw
        streams = np.random.SeedSequence(self.seed, spawn_key=(epoch, step, self.rank)).spawn(
            2 + len(self.views)
        )
        image_rng, text_rng, *view_rngs = (np.random.default_rng(stream) for stream in streams)
        read = as_inputs(self.text_store.collate(texts.tolist(), text_rng))
        batch = Batch(
            images=as_inputs(self.image_input(items, image_rng)),
            texts=pack(read) if self.pack_texts else read,
            image_ids=torch.from_numpy(self.captions.pictures(images)),
            text_ids=torch.from_numpy(texts.copy()),
            targets={
                name: torch.from_numpy(
                    column.rows(images if column.of == "image" else texts, pin_memory=self.pin_memory)
                )
                for name, column in self.targets.items()
            },
            views={
                name: make(items, texts.tolist(), self.image_input, self.text_store, rng)
                for (name, make), rng in zip(self.views.items(), view_rngs, strict=True)
            },
        )
        return batch.map(torch.Tensor.pin_memory) if self.pin_memory else batch

    def _read(self, texts: NDArray[np.int64]) -> tuple[NDArray[np.int64], Items]:
        """The texts of a batch and the items of their images.

        Where the data says so, a pair whose image cannot be read is skipped: the next pair of the batch takes its
        place, so that every process still has as many, and which it is depends on the data alone.
        """
        store, images = self.captions.images, self.captions.image_of[texts]
        # a cache of features knows which pictures could not be read when it was made
        known: Mapping[int, str] = getattr(store, "unreadable", {})
        try:
            if not known or not any(image in known for image in images.tolist()):
                return texts, read_items(store, images, pin_memory=self.pin_memory)
        except ImageError:
            if self.captions.unreadable == "stop":
                raise
        items: dict[int, StoredImage] = {}
        for image in np.unique(images).tolist():
            try:
                if image in known:
                    raise ImageError(known[image])
                items[image] = store[image]
            except ImageError as error:
                self.skipped[image] = str(error)
        good = np.array([image in items for image in images.tolist()])
        if not good.any():
            raise DataError(
                f"{self.captions.name}: none of the {len(texts)} images of a batch can be read "
                f"({self.skipped[int(images[0])]}): check the data with 'diptych data check'."
            )
        places = np.arange(len(texts))
        following = places[good][np.searchsorted(places[good], places) % good.sum()]
        texts = texts[following]
        return texts, [items[image] for image in self.captions.image_of[texts].tolist()]

    def _check(self) -> None:
        name, images, texts = self.captions.name, len(self.captions.images), len(self.captions.texts)
        if len(self.text_store) != texts:
            raise DataError(f"{name}: {texts} texts, {len(self.text_store)} prepared: prepare the same.")
        check_batch_size(self.captions, self.batch_size, self.world_size)
        if self.seed < 0 or self.workers < 0:
            raise SettingsError(f"seed={self.seed} and workers={self.workers} must not be negative.")
        for column, values in self.targets.items():
            values.check(column, name, images, texts)


def texts_of_an_epoch(captions: Captions) -> int:
    """How many texts an epoch shows."""
    return len(captions.texts if captions.order is None else captions.order)


def check_batch_size(captions: Captions, batch_size: int, world_size: int = 1) -> None:
    """Refuse a batch size that the data or the number of processes does not allow."""
    if batch_size < 1 or batch_size % world_size:
        raise SettingsError(
            f"batch_size={batch_size} does not divide over {world_size} processes: choose a positive multiple."
        )
    texts = texts_of_an_epoch(captions)
    if texts < batch_size:
        raise SettingsError(
            f"batch_size={batch_size} is more than the {texts} texts of an epoch of {captions.name}: lower it."
        )
