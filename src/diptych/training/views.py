"""Further looks at the pairs of a batch: pictures and texts as augmentation changes them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from diptych.data.augmentation import PictureAugmentation, WordAugmentation
from diptych.data.captions import ImageStore, StoredImage
from diptych.data.images import ImageInput, Items
from diptych.data.text import TextStore, TokenTexts
from diptych.encoders.encoder import DELETED, keep_drawn
from diptych.errors import DataError
from diptych.types import Features, Inputs, Sides, as_inputs


class AugmentedImages:
    """An image store seen through augmentation: copy ``number`` of every picture, always the same one.

    For a frozen backbone: its outputs of some copies are computed once and kept, since each epoch cannot run it again.
    """

    features = False

    def __init__(self, store: ImageStore, augmentation: PictureAugmentation, number: int) -> None:
        self.store, self.augmentation, self.number = store, augmentation, number

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, index: int) -> StoredImage:
        item = self.store[index]
        if not isinstance(item, Image.Image):
            raise DataError("only pictures can be augmented: these are features already.")
        drawn = hashlib.blake2b(self.store.content_key(index).encode(), digest_size=8)  # the same in any list
        seed = [self.number, int.from_bytes(drawn.digest(), "little")]
        return self.augmentation(item, np.random.default_rng(seed))

    def content_key(self, index: int) -> str:
        """The key of the picture, and what is done to it."""
        return f"{self.store.content_key(index)}|{self.augmentation}|{self.number}"


class Augmented:
    """A view maker: the pictures of a batch augmented, its texts perturbed; either may be left out.

    Pictures go through ``pictures`` before they are resized. Where a batch holds features instead there is no picture
    to augment. Of a frozen backbone, ``copies`` augmented copies of every picture are run through it once and kept
    (``with_copies``), and each look is one of them. Stored features, and a frozen backbone without copies, lose every
    cell with probability ``drop`` instead. ``words`` perturbs token ids; token states of a frozen text encoder lose as
    many words as it would delete.
    """

    def __init__(
        self,
        pictures: PictureAugmentation | None,
        words: WordAugmentation | None,
        *,
        drop: float = 0.2,
        copies: int = 0,
    ) -> None:
        self.pictures, self.words, self.drop, self.copies = pictures, words, drop, copies
        self.stored: Sequence[ImageStore] = ()
        self.image_of: NDArray[np.int64] = np.empty(0, np.int64)

    def __call__(
        self,
        items: Items,
        texts: Sequence[int],
        image_input: ImageInput,
        text_store: TextStore,
        rng: np.random.Generator,
    ) -> Sides:
        image_rng, text_rng = rng.spawn(2)  # what pictures draw must not move what words draw
        return Sides(
            self._images(items, np.asarray(texts, dtype=np.int64), image_input, image_rng),
            self._texts(texts, text_store, text_rng),
        )

    def copies_of(self, pictures: ImageStore) -> list[AugmentedImages]:
        """The stores of augmented pictures that a frozen backbone should read once."""
        if self.pictures is None:
            return []
        return [AugmentedImages(pictures, self.pictures, number) for number in range(self.copies)]

    def with_copies(self, stored: Sequence[ImageStore], image_of: NDArray[np.int64]) -> Augmented:
        """The same view maker that draws from features of augmented pictures; ``image_of`` is text → image."""
        made = Augmented(self.pictures, self.words, drop=self.drop, copies=self.copies)
        made.stored, made.image_of = stored, image_of
        return made

    def _images(
        self, items: Items, texts: NDArray[np.int64], image_input: ImageInput, rng: np.random.Generator
    ) -> Inputs | None:
        if self.pictures is None:
            return None
        if not isinstance(items, np.ndarray) and len(items) and isinstance(items[0], Image.Image):
            pictures = [self.pictures(item, rng) for item in items if isinstance(item, Image.Image)]
            return as_inputs(image_input(pictures))
        if self.stored:
            rows = self.image_of[texts]
            which = rng.integers(len(self.stored), size=len(rows)).tolist()
            copies = [self.stored[copy][row] for copy, row in zip(which, rows.tolist(), strict=True)]
            return as_inputs(image_input(copies))
        features = as_inputs(image_input(items))
        assert isinstance(features, Features)
        return replace(features, mask=_thinned(features.mask, self.drop, rng))

    def _texts(self, texts: Sequence[int], store: TextStore, rng: np.random.Generator) -> Features | None:
        if self.words is None:
            return None
        if isinstance(store, TokenTexts):
            return as_inputs(store.augmented(self.words).collate(texts, rng))
        states = as_inputs(store.collate(texts))
        inner = states.mask.clone()
        inner[:, 0] = False  # never the first and the last token, CLS and SEP
        inner[torch.arange(len(inner)), states.sizes - 1] = False
        kept = _thinned(inner, DELETED * self.words.rate, rng)
        return replace(states, mask=states.mask & (kept | ~inner))


def _thinned(mask: torch.Tensor, rate: float, rng: np.random.Generator) -> torch.Tensor:
    """The mask (B, L) with every element left out with probability ``rate``; the last one of a set stays."""
    return keep_drawn(mask, torch.from_numpy(rng.random(tuple(mask.shape))), rate)
