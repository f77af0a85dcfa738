"""Arrays read by row: values, limits, damaged files."""

from __future__ import annotations

import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from diptych.data.arrays import ArrayStore, flat_index, read_items
from diptych.data.captions import StoreChain, StoredImage, StoreRows
from diptych.errors import DataError


@pytest.fixture
def block() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(20, 3, 4)).astype(np.float32)


@pytest.fixture
def path(block: np.ndarray, tmp_path: Path) -> Path:
    np.save(tmp_path / "train_ims.npy", block)
    return tmp_path / "train_ims.npy"


@pytest.mark.parametrize("on_disk", [True, False])
def test_rows_and_spans(block: np.ndarray, path: Path, on_disk: bool) -> None:
    store = ArrayStore(path if on_disk else block)
    assert len(store) == 20
    assert store.shape == (20, 3, 4)
    assert store.dtype == np.float32
    assert np.array_equal(store[7], block[7])
    assert np.array_equal(store[-1], block[-1])
    rows = [5, 0, 19, 5]
    assert np.array_equal(store.rows(rows), block[rows])
    assert store.rows([]).shape == (0, 3, 4)
    spans = store.spans(np.array([17, 2]), np.array([3, 1]))
    assert np.array_equal(spans, block[[17, 18, 19, 2]])
    for wrong in (20, -21):
        with pytest.raises(IndexError, match=f"row {wrong} of 20"):
            store[wrong]
    with pytest.raises(IndexError, match="outside"):
        store.spans(np.array([19]), np.array([2]))


@pytest.mark.parametrize("dtype", ["<f2", "<f4", "<f8", ">f4"])
def test_types_and_single_vectors(dtype: str, tmp_path: Path) -> None:
    block = np.arange(24).reshape(6, 4).astype(dtype)
    np.save(tmp_path / "a.npy", block)
    store = ArrayStore(str(tmp_path / "a.npy"))
    assert store.dtype == np.dtype(dtype)
    assert np.array_equal(store.rows([3, 1]), block[[3, 1]])


def test_rows_are_copies(block: np.ndarray) -> None:
    store = ArrayStore(block)
    store.rows([0])[:] = 7
    store[0][:] = 7
    assert not (block[0] == 7).any()


def test_content_keys_follow_the_content(block: np.ndarray, path: Path, tmp_path: Path) -> None:
    store = ArrayStore(path)
    keys = [store.content_key(i) for i in range(20)]
    assert len(set(keys)) == 20
    assert keys == [ArrayStore(block).content_key(i) for i in range(20)]  # wherever the rows lie
    changed = block.copy()
    changed[4] += 1
    np.save(tmp_path / "b.npy", changed)
    other = [ArrayStore(tmp_path / "b.npy").content_key(i) for i in range(20)]
    assert [i for i in range(20) if other[i] != keys[i]] == [4]


def test_a_store_travels_to_another_process(block: np.ndarray, path: Path) -> None:
    store = ArrayStore(path)
    store.rows([1])
    again = pickle.loads(pickle.dumps(store))
    assert np.array_equal(again.rows([2]), block[[2]])


def test_files_are_closed(path: Path) -> None:
    before = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    for _ in range(20):
        ArrayStore(path).rows([0])
    after = len(os.listdir("/proc/self/fd")) if before else 0
    assert after <= before + 1


def test_threads_read_the_same_file(block: np.ndarray, path: Path) -> None:
    store = ArrayStore(path)
    with ThreadPoolExecutor(8) as pool:
        for i, row in enumerate(pool.map(lambda i: store[i % 20], range(400))):
            assert np.array_equal(row, block[i % 20])


# ---- damaged files


def test_truncated_file_says_both_sizes(path: Path) -> None:
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.truncate(size - 100)
    with pytest.raises(DataError, match=rf"train_ims\.npy.* {size:,} .* {size - 100:,}"):
        ArrayStore(path)


def test_file_cut_while_it_is_read(path: Path) -> None:
    store = ArrayStore(path)
    with open(path, "r+b") as file:
        file.truncate(300)
    with pytest.raises(DataError, match=r"train_ims\.npy"):
        store.rows([19])


def test_a_mapped_file_gives_the_same_rows(path: Path) -> None:
    plain, mapped = ArrayStore(path), ArrayStore(path, mapped=True)
    wanted = [19, 0, 7, 7]
    assert np.array_equal(mapped.rows(wanted), plain.rows(wanted))
    assert np.array_equal(pickle.loads(pickle.dumps(mapped)).rows(wanted), plain.rows(wanted))
    assert mapped.content_key(3) == plain.content_key(3)
    with pytest.raises(IndexError):
        mapped.rows([20])


def test_a_mapped_file_cut_while_it_is_read(path: Path) -> None:
    store = ArrayStore(path, mapped=True)
    store.rows([0])
    with open(path, "r+b") as file:
        file.truncate(300)
    with pytest.raises(DataError, match=r"train_ims\.npy"):
        store.rows([19])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"junk\.npy"),
        (b"x" * 200, r"junk\.npy"),
        (b"\x93NUMPY\x01\x00", r"junk\.npy"),
    ],
)
def test_junk(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "junk.npy"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        ArrayStore(path)


def test_wrong_kinds_of_arrays(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.npy"):
        ArrayStore(tmp_path / "none.npy")
    with pytest.raises(DataError, match=r"\b21\b"):
        ArrayStore(tmp_path)
    np.save(tmp_path / "o.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match=r"o\.npy"):
        ArrayStore(tmp_path / "o.npy")
    np.save(tmp_path / "f.npy", np.asfortranarray(np.ones((3, 4))))
    with pytest.raises(DataError, match=r"f\.npy"):
        ArrayStore(tmp_path / "f.npy")
    np.save(tmp_path / "s.npy", np.float32(1))
    with pytest.raises(DataError, match=r"s\.npy"):
        ArrayStore(tmp_path / "s.npy")


# ---- items of a batch


class Pictures:
    """Counts how often each picture is read."""

    def __init__(self) -> None:
        self.reads: list[int] = []

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> StoredImage:
        self.reads.append(index)
        return Image.new("RGB", (index + 1, 1))

    def content_key(self, index: int) -> str:
        return str(index)


def test_pictures_are_read_once_each() -> None:
    store = Pictures()
    items = read_items(StoreRows(store, np.array([9, 4, 2])), np.array([2, 0, 2, 1]))
    assert [item.size[0] for item in items if isinstance(item, Image.Image)] == [3, 10, 3, 5]
    assert sorted(store.reads) == [2, 4, 9]


def test_blocks_through_selections(block: np.ndarray, path: Path) -> None:
    """The five-fold layout of one split inside several: Rows over Joined over Rows over the file."""
    once = StoreRows(ArrayStore(path), np.arange(0, 20, 5))  # every image five times on disk
    store = StoreRows(StoreChain([ArrayStore(block[:3]), once]), np.array([3, 4, 5, 6]))
    got = read_items(store, np.array([2, 0, 2]))
    assert isinstance(got, np.ndarray)
    assert np.array_equal(got, block[[10, 0, 10]])
    mixed = read_items(StoreChain([ArrayStore(block[:3]), once]), np.array([0, 3, 4]))
    assert isinstance(mixed, list)
    assert np.array_equal(np.stack(mixed), block[[0, 0, 5]])


def test_flat_index_is_the_slow_loop() -> None:
    rng = np.random.default_rng(0)
    for count in (0, 1, 7):
        starts, sizes = rng.integers(0, 50, count), rng.integers(0, 4, count)
        expected = [s + j for s, n in zip(starts, sizes, strict=True) for j in range(n)]
        assert flat_index(starts, sizes).tolist() == expected
