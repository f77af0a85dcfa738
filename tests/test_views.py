"""The augmented view of a batch: pictures, stored features, copies of a frozen backbone, words."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from small import WORDS, pictures, texts

from diptych.data.arrays import ArrayStore
from diptych.data.augmentation import PictureAugmentation
from diptych.data.files import FileImages
from diptych.data.images import PixelInput, RegionInput
from diptych.data.text import CachedTexts, WordInput
from diptych.errors import DataError
from diptych.training.views import Augmented, AugmentedImages
from diptych.types import Features, as_inputs

INPUT = WordInput(["<pad>", "<start>", "<end>", "<unk>", *WORDS, "<mask>"], augment=0)
STORE = INPUT.prepare(texts(40))
WORD_NOISE = INPUT.augmentation(0.2)


def photographs(folder: Path, count: int = 4) -> list[Image.Image]:
    return [Image.open(path).convert("RGB") for path in pictures(folder, count)]


def test_pictures_are_augmented_before_they_are_resized(tmp_path: Path) -> None:
    items, pixels = photographs(tmp_path), PixelInput(16)
    view = Augmented(PictureAugmentation(), None)
    made = view(items, [0, 1, 2, 3], pixels, STORE, np.random.default_rng(3))
    stream = np.random.default_rng(3).spawn(2)[0]
    expected = as_inputs(pixels([PictureAugmentation()(item, stream) for item in items]))
    assert torch.equal(made.images, expected)  # type: ignore[arg-type]
    assert made.texts is None


def test_words_draw_from_a_stream_of_their_own(tmp_path: Path) -> None:
    rows = list(range(40))
    alone = Augmented(None, WORD_NOISE)([], rows, PixelInput(8), STORE, np.random.default_rng(5))
    items = photographs(tmp_path, 2)
    both = Augmented(PictureAugmentation(), WORD_NOISE)(
        items, rows, PixelInput(8), STORE, np.random.default_rng(5)
    )
    assert alone.images is None
    assert alone.texts is not None
    assert both.texts is not None
    assert torch.equal(alone.texts.values, both.texts.values)
    plain = as_inputs(STORE.collate(rows))
    assert alone.texts.mask.sum() < plain.mask.sum()
    assert (alone.texts.values == INPUT.words.index("<mask>")).any()
    assert torch.equal(
        as_inputs(STORE.collate(rows, np.random.default_rng(0))).values, plain.values
    )  # the clean view stays


def test_stored_features_lose_cells() -> None:
    block = np.random.default_rng(0).standard_normal((600, 10, 4)).astype(np.float32)
    made = Augmented(PictureAugmentation(), None, drop=0.2)(
        block, list(range(600)), RegionInput(4), STORE, np.random.default_rng(1)
    )
    assert isinstance(made.images, Features)
    assert np.array_equal(made.images.values.numpy(), block)
    gone = 1 - made.images.mask.float().mean()
    assert abs(float(gone) - 0.2) < 4 * math.sqrt(0.16 / 6000)
    whole = Augmented(PictureAugmentation(), None, drop=0.999)(
        block, list(range(600)), RegionInput(4), STORE, np.random.default_rng(1)
    )
    assert (whole.images.mask.sum(1) >= 1).all()  # type: ignore[union-attr]


def test_token_states_lose_words_but_never_the_first_and_the_last() -> None:
    sizes = np.full(500, 12)
    states = np.random.default_rng(0).standard_normal((6000, 3)).astype(np.float32)
    store = CachedTexts(states, np.concatenate([[0], np.cumsum(sizes)]))
    made = Augmented(None, WORD_NOISE)([], list(range(500)), PixelInput(8), store, np.random.default_rng(2))
    assert made.texts is not None
    assert made.texts.mask[:, 0].all()
    assert made.texts.mask[:, -1].all()
    gone = 1 - made.texts.mask[:, 1:-1].float().mean()
    assert abs(float(gone) - 0.08) < 4 * math.sqrt(0.08 * 0.92 / 5000)


def test_copies_are_always_the_same_and_differ_from_each_other(tmp_path: Path) -> None:
    names = [path.name for path in pictures(tmp_path, 3)]
    store = FileImages(tmp_path, names)
    first, second = Augmented(PictureAugmentation(), None, copies=2).copies_of(store)
    assert first[1].tobytes() == first[1].tobytes()  # type: ignore[union-attr]
    assert first[1].tobytes() != second[1].tobytes()  # type: ignore[union-attr]
    keys = {copy.content_key(row) for copy in (first, second) for row in range(3)}
    assert len(keys) == 6
    other = AugmentedImages(store, PictureAugmentation(flip=0), 0)
    assert other.content_key(0) != first.content_key(0)
    with pytest.raises(DataError):
        AugmentedImages(ArrayStore(np.zeros((2, 3, 4), np.float32)), PictureAugmentation(), 0)[0]  # type: ignore[arg-type]


def test_each_look_is_one_of_the_copies() -> None:
    copies = [
        ArrayStore(np.full((5, 3, 4), 10 * c, np.float32) + np.arange(5)[:, None, None]) for c in range(2)
    ]
    view = Augmented(PictureAugmentation(), None, copies=2).with_copies(copies, np.array([4, 0, 0, 2]))  # type: ignore[arg-type]
    block = np.zeros((4, 3, 4), np.float32)
    seen = set()
    for seed in range(20):
        made = view(block, [0, 1, 3, 2], RegionInput(4), STORE, np.random.default_rng(seed)).images
        assert isinstance(made, Features)
        values = made.values[:, 0, 0]
        assert [int(v) % 10 for v in values] == [4, 0, 2, 0]
        seen |= {int(v) // 10 for v in values}
    assert seen == {0, 1}


def test_one_side_may_be_left_out() -> None:
    made = Augmented(None, None)([], [0], PixelInput(8), STORE, np.random.default_rng(0))
    assert (made.images, made.texts) == (None, None)
