"""Encoding many items: order, errors, bounds, and the same numbers as a plain loop."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from small import bert_folder, pictures

from diptych.data.arrays import Arrays, ArrayStore, Sets, read_ahead
from diptych.data.captions import StoreChain, StoreRows, holds_features
from diptych.data.images import ImageInput, PixelInput, RegionInput, as_item
from diptych.data.text import CachedTexts, WordPieceInput
from diptych.encoders.transformer import LONGEST, PackedIds
from diptych.errors import DataError, ImageError
from diptych.model import encoding
from diptych.types import Features, Inputs, as_inputs

CPU = torch.device("cpu")

# ------------------------------------------------------------------------------------------------------- ahead


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_results_come_in_order(workers: int) -> None:
    def read(job: int) -> int:
        time.sleep(0.002 * (job % 3))  # later jobs are ready before earlier ones
        return job * job

    assert list(read_ahead(range(20), read, workers)) == [n * n for n in range(20)]


@pytest.mark.parametrize("workers", [1, 3])
def test_no_more_is_read_ahead_than_promised(workers: int) -> None:
    begun: list[int] = []
    found = read_ahead(range(50), lambda job: begun.append(job) or job, workers)
    for taken in range(20):
        next(found)
        time.sleep(0.002)
        assert len(begun) <= taken + 1 + workers
    found.close()
    assert len(begun) <= 20 + workers


def test_an_error_comes_in_its_place_and_ends_everything() -> None:
    begun: list[int] = []

    def read(job: int) -> int:
        begun.append(job)
        if job == 3:
            raise DataError("the fourth is bad.")
        return job

    found = read_ahead(range(100), read, 2)
    assert [next(found) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(DataError, match="fourth"):
        next(found)
    assert len(begun) < 10


# ------------------------------------------------------------------------------------------------------- images


def features(count: int = 23) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((count, 4, 6)).astype(np.float16)


def everything(batches: object) -> list[tuple[slice, Inputs]]:
    return list(batches)  # type: ignore[call-overload, no-any-return]


def test_stored_features_come_in_blocks_as_they_are(tmp_path: Path) -> None:
    block = features()
    np.save(tmp_path / "x.npy", block)
    stores = [
        ArrayStore(block),
        ArrayStore(tmp_path / "x.npy"),
        StoreRows(ArrayStore(tmp_path / "x.npy"), np.arange(23)),
        StoreChain([ArrayStore(block[:9]), ArrayStore(block[9:])]),
        list(block),
    ]
    for store in stores:
        found = everything(encoding.image_batches(store, RegionInput(6), 5, CPU, False))
        assert [(rows.start, rows.stop) for rows, _ in found] == [
            (0, 5),
            (5, 10),
            (10, 15),
            (15, 20),
            (20, 23),
        ]
        values = torch.cat([inputs.values for _, inputs in found if isinstance(inputs, Features)])
        assert torch.equal(values, torch.from_numpy(block))
    assert [holds_features(store) for store in stores] == [True] * 5
    assert not holds_features(ArrayStore(np.zeros((4, 8, 8, 3), dtype=np.uint8)))


def test_pictures_are_made_as_a_plain_loop_makes_them(tmp_path: Path) -> None:
    paths = pictures(tmp_path, 11)
    made = PixelInput(size=16)
    found = everything(encoding.image_batches(paths, made, 6, CPU, False))
    expected = torch.from_numpy(made([as_item(p) for p in paths]))
    assert torch.equal(torch.cat([x for _, x in found if isinstance(x, torch.Tensor)]), expected)


def test_few_pictures_are_decoded_at_a_time(tmp_path: Path) -> None:
    paths = pictures(tmp_path, 30)
    held, most, lock = [0], [0], threading.Lock()

    class Store:
        def __len__(self) -> int:
            return 30

        def __getitem__(self, index: int) -> Image.Image:
            with lock:
                held[0] += 1
                most[0] = max(most[0], held[0])
            return Image.open(paths[index])

    class Counting(PixelInput):
        def __call__(self, items: object, rng: object = None) -> Arrays:
            with lock:
                held[0] -= len(items)  # type: ignore[arg-type]
            return super().__call__(items)  # type: ignore[arg-type]

    everything(encoding.image_batches(Store(), Counting(size=8), 15, CPU, False))
    assert most[0] <= encoding.PICTURES


def test_inputs_that_pad_by_batch_see_the_whole_batch(tmp_path: Path) -> None:
    class Patches(ImageInput):
        def __call__(self, items: object, rng: object = None) -> Sets:
            return Sets(np.zeros((len(items), 2, 3)), np.ones((len(items), 2), dtype=bool))  # type: ignore[arg-type]

    found = everything(encoding.image_batches(pictures(tmp_path, 9), Patches(), 9, CPU, False))
    assert isinstance(found[0][1], Features)
    assert found[0][1].values.shape == (9, 2, 3)


def test_a_bad_picture_is_named(tmp_path: Path) -> None:
    paths = pictures(tmp_path, 9)
    paths[7].write_bytes(b"no picture")
    with pytest.raises(ImageError, match=paths[7].name):
        everything(encoding.image_batches(paths, PixelInput(size=8), 3, CPU, False))


def test_one_batch_starts_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    everything(encoding.image_batches(list(features(5)), RegionInput(6), 5, CPU, False))
    with pytest.raises(AssertionError, match="a thread"):
        everything(encoding.image_batches(list(features(6)), RegionInput(6), 5, CPU, False))


# ------------------------------------------------------------------------------------------------------- texts


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> WordPieceInput:
    return WordPieceInput(bert_folder(tmp_path_factory.mktemp("bert"), positions=2 * LONGEST), augment=0.2)


def sentences(count: int = 41) -> list[str]:
    rng = np.random.default_rng(1)
    words = np.array(["a", "red", "dog", "on", "the", "grass", "runs", "xylophone"])
    return [" ".join(rng.choice(words, rng.integers(1, 12))) for _ in range(count)]


def test_reading_makes_the_ids_of_preparing(pieces: WordPieceInput) -> None:
    texts = [*sentences(), "", "é " * 600]
    read, prepared = pieces.read(texts), pieces.prepare(texts)
    assert np.array_equal(read.ids, prepared.ids)
    assert np.array_equal(read.offsets, prepared.offsets)
    assert read.pad_id == prepared.pad_id
    assert len(pieces.read([])) == 0


def test_texts_of_like_length_go_together(pieces: WordPieceInput) -> None:
    texts = sentences()
    found = list(encoding.text_batches(texts, pieces, 8, CPU, False, False))
    assert sorted(row for rows, _ in found for row in rows) == list(range(len(texts)))
    sizes = [int(size) for _, batch in found for size in batch.sizes]
    assert sizes == sorted(sizes)
    store = pieces.prepare(texts)
    for (rows, batch), (again, other) in zip(
        found, encoding.text_batches(store, pieces, 8, CPU, False, False), strict=True
    ):
        assert list(rows) == list(again)
        assert torch.equal(batch.values, other.values)
        assert torch.equal(batch.values, as_inputs(store.collate(rows)).values)


def test_packed_texts_come_in_order_and_long_ones_apart(pieces: WordPieceInput) -> None:
    texts = sentences(30)
    texts[4] = texts[17] = "dog " * (LONGEST + 5)
    for given in (texts, pieces.prepare(texts)):
        found = list(encoding.text_batches(given, pieces, 12, CPU, True, False))
        assert sorted(row for rows, _ in found for row in rows) == list(range(30))
        for rows, batch in found:
            assert isinstance(batch, PackedIds) == (4 not in rows and 17 not in rows)
            assert torch.equal(batch.values, as_inputs(pieces([texts[row] for row in rows])).values)


def test_cached_states_are_never_packed(pieces: WordPieceInput) -> None:
    states = CachedTexts(np.zeros((9, 5), dtype=np.float32), np.array([0, 4, 9]))
    found = list(encoding.text_batches(states, pieces, 8, CPU, True, False))
    assert [list(rows) for rows, _ in found] == [[0, 1]]
    assert not isinstance(found[0][1], PackedIds)


# ------------------------------------------------------------------------------------------------------- results


def test_results_are_put_in_their_rows() -> None:
    rows = [slice(0, 2), [4, 2], [3]]
    found = [
        (
            where,
            torch.tensor(
                [[float(n)] for n in range(len(range(5)[where]) if isinstance(where, slice) else len(where))]
            ),
        )
        for where in rows
    ]
    out = encoding.collect(found, torch.full((5, 1), -1.0))
    assert out.flatten().tolist() == [0, 1, 1, 0, 0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gets_and_gives_back_the_same(tmp_path: Path) -> None:
    block = np.random.default_rng(0).standard_normal((3000, 36, 64)).astype(np.float16)
    np.save(tmp_path / "x.npy", block)
    device = torch.device("cuda")
    batches = encoding.image_batches(ArrayStore(tmp_path / "x.npy"), RegionInput(64), 32, device, False)
    found = ((rows, inputs.values.float().sum(1)) for rows, inputs in batches if isinstance(inputs, Features))
    out = encoding.collect(found, torch.zeros(3000, 64))
    torch.testing.assert_close(out, torch.from_numpy(block).float().sum(1), rtol=1e-4, atol=1e-3)
