"""PairLoader: order, resuming, processes, workers, memory."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from diptych.data.arrays import ArrayStore
from diptych.data.captions import Captions, StoredImage, StoreRows
from diptych.data.images import PixelInput, RegionInput
from diptych.data.text import WordInput
from diptych.errors import DataError, SettingsError
from diptych.targets.columns import Column
from diptych.training.loading import PairLoader
from diptych.types import Batch, Features, as_inputs

WORDS = ["<pad>", "<start>", "<end>", "<unk>", *(f"w{i}" for i in range(9)), "<mask>"]
DIM = 6


def captions(images: int = 12, per_image: int = 3) -> Captions:
    """Features whose numbers say which image they are, texts of one to nine words."""
    rng = np.random.default_rng(0)
    block = np.arange(images, dtype=np.float32)[:, None, None] + np.zeros((images, 4, DIM), dtype=np.float32)
    image_of = rng.permutation(np.repeat(np.arange(images), per_image))
    texts = [" ".join(f"w{j}" for j in rng.integers(0, 9, rng.integers(1, 9))) for _ in image_of]
    names = [str(i) for i in range(images)]
    return Captions(ArrayStore(block), texts, image_of, names, ["train"] * images)


def loader(data: Captions, batch_size: int = 8, seed: int = 3, **options: object) -> PairLoader:
    store = WordInput(WORDS, augment=0.2).prepare(data.texts)
    return PairLoader(data, RegionInput(DIM), store, batch_size, seed, **options)  # type: ignore[arg-type]


def same(a: Batch, b: Batch) -> bool:
    def tensors(batch: Batch) -> list[torch.Tensor]:
        images = (
            [batch.images.values, batch.images.mask] if isinstance(batch.images, Features) else [batch.images]
        )
        return [
            *images,
            batch.texts.values,
            batch.texts.mask,
            batch.image_ids,
            batch.text_ids,
            *batch.targets.values(),
        ]

    return all(x.shape == y.shape and torch.equal(x, y) for x, y in zip(tensors(a), tensors(b), strict=True))


def test_every_text_once_with_its_own_image() -> None:
    data = captions()
    made = loader(data, 9)
    batches = list(made.epoch(0))
    assert len(batches) == len(made) == 4
    seen = torch.cat([batch.text_ids for batch in batches])
    assert sorted(seen.tolist()) == list(range(36))
    for batch in batches:
        assert isinstance(batch.images, Features)
        assert batch.image_ids.tolist() == data.image_of[batch.text_ids.numpy()].tolist()
        assert torch.equal(batch.images.values[:, 0, 0].long(), batch.image_ids)
        assert len(batch) == len(batch.texts.values) == 9


def test_text_rows_are_those_of_the_ids() -> None:
    data = captions()
    store = WordInput(WORDS, augment=0.0).prepare(data.texts)
    for batch in PairLoader(data, RegionInput(DIM), store, 8, 0).epoch(2):
        assert torch.equal(batch.texts.values, as_inputs(store.collate(batch.text_ids.tolist())).values)


def test_orders_differ_by_epoch_and_seed() -> None:
    data = captions()
    a, b = loader(data, seed=1), loader(data, seed=2)
    assert a.order(0).tolist() == loader(data, seed=1).order(0).tolist()
    assert a.order(0).tolist() != a.order(1).tolist()
    assert a.order(0).tolist() != b.order(0).tolist()


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_an_epoch_may_be_entered_anywhere(workers: int) -> None:
    data = captions()
    whole = list(loader(data).epoch(5))
    for start in range(5):
        rest = list(loader(data, workers=workers).epoch(5, start=start))
        assert len(rest) == len(whole) - start
        assert all(same(a, b) for a, b in zip(rest, whole[start:], strict=True))


def test_augmentation_moves_with_epoch_and_batch() -> None:
    data = captions(4, 1)
    data = Captions(data.images, ["w1 w2 w3 w4 w5 w6 w7 w8"] * 4, data.image_of, data.image_ids, data.splits)
    texts = [batch.texts.values.tolist() for epoch in range(6) for batch in loader(data, 2).epoch(epoch)]
    assert len({str(t) for t in texts}) == len(texts)


def test_what_pictures_draw_does_not_move_what_words_draw() -> None:
    data = captions()
    pictures = [Image.new("RGB", (20, 20), (i, i, i)) for i in range(12)]

    class Pictures:
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> StoredImage:
            return pictures[index]

        def content_key(self, index: int) -> str:
            return str(index)

    raw = Captions(Pictures(), data.texts, data.image_of, data.image_ids, data.splits)
    store = WordInput(WORDS).prepare(data.texts)
    pixels = list(PairLoader(raw, PixelInput(8), store, 8, 3).epoch(0))
    for a, b in zip(pixels, loader(data).epoch(0), strict=True):
        assert isinstance(a.images, torch.Tensor)
        assert a.images.shape == (8, 3, 8, 8)
        assert torch.equal(a.texts.values, b.texts.values)


def test_processes_share_each_batch() -> None:
    data = captions()
    alone = list(loader(data).epoch(1))
    shares = [list(loader(data, rank=rank, world_size=4).epoch(1)) for rank in range(4)]
    for step, batch in enumerate(alone):
        joined = torch.cat([share[step].text_ids for share in shares])
        assert torch.equal(joined, batch.text_ids)
        assert all(len(share[step]) == 2 for share in shares)


def test_the_last_texts_wait_for_another_epoch() -> None:
    made = loader(captions(5, 2), 4)
    assert len(made) == 2
    assert [len(batch) for batch in made.epoch(0)] == [4, 4]


def test_targets_of_images_and_texts() -> None:
    data = captions()
    labels, teacher = np.arange(12) * 10, np.random.default_rng(0).random((36, 5)).astype(np.float32)
    made = loader(data, targets={"labels": Column(labels, "image"), "teacher": Column(teacher, "text")})
    for batch in made.epoch(0):
        assert torch.equal(batch.targets["labels"], batch.image_ids * 10)
        assert np.array_equal(batch.targets["teacher"].numpy(), teacher[batch.text_ids.numpy()])


def test_an_error_in_a_worker_arrives() -> None:
    data = captions()
    store = WordInput(WORDS).prepare(data.texts)
    with pytest.raises(DataError, match=r"\b99\b"):
        list(PairLoader(data, RegionInput(99), store, 8, 0, workers=2).epoch(0))


def test_stopping_in_the_middle_ends_the_workers() -> None:
    made = loader(captions(), 2, workers=4)
    before = threading.active_count()
    batches = made.epoch(0)
    first = next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before
    assert same(first, next(iter(made.epoch(0))))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 37}, r"\b36\b"),
        ({"batch_size": 9, "world_size": 2}, r"\b2\b"),
        ({"seed": -1}, "seed=-1"),
        ({"workers": -1}, "workers=-1"),
        ({"targets": {"labels": Column(np.zeros(3), "word")}}, "labels"),
    ],
)
def test_wrong_settings(options: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        loader(captions(), **options)  # type: ignore[arg-type]


def test_columns_that_do_not_fit() -> None:
    data = captions()
    with pytest.raises(DataError, match=r"\b3\b.*\b12\b"):
        loader(data, targets={"labels": Column(np.zeros(3), "image")})
    with pytest.raises(DataError, match=r"\b36\b.*\b1\b"):
        PairLoader(data, RegionInput(DIM), WordInput(WORDS).prepare(["a"]), 8, 0)


def resident() -> int:
    """Bytes of this process in memory, file pages included."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = {
        line.split(":")[0]: line.split()[1] for line in lines if line.startswith(("RssAnon", "RssFile"))
    }
    return sum(int(value) for value in fields.values()) * 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads resident memory from /proc")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_over_a_large_file_stays_small(tmp_path: Path, workers: int) -> None:
    """300 MB of rows (a sparse file, really read) grow the process by a few batches, not by all of them."""
    images, regions, dim = 1024, 36, 2048
    path = tmp_path / "train_ims.npy"
    with open(path, "wb") as file:
        header = {"shape": (images * 2, regions, dim), "fortran_order": False, "descr": "<f4"}
        np.lib.format.write_array_header_1_0(file, header)
        file.truncate(file.tell() + images * 2 * regions * dim * 4)
    store = StoreRows(ArrayStore(path), np.arange(0, images * 2, 2))
    names = [str(i) for i in range(images)]
    data = Captions(store, ["w1 w2"] * images, np.arange(images), names, ["train"] * images)
    made = PairLoader(data, RegionInput(dim), WordInput(WORDS).prepare(data.texts), 32, 0, workers=workers)
    batches = iter(made.epoch(0))
    assert next(batches).images.to("cpu") is not None
    before, most, pairs = resident(), 0, 32
    for batch in batches:
        assert isinstance(batch.images, Features)
        assert float(batch.images.values.sum()) == 0.0
        pairs += len(batch)
        most = max(most, resident() - before)
    assert pairs == images
    assert most < 100e6
