"""The pickle reader: what numpy writes comes back, and nothing in a file is ever run."""

from __future__ import annotations

import pickle
import random
import struct
import tracemalloc
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from diptych.data.arrays import LazyArray
from diptych.data.decode import pickles
from diptych.data.decode.pickles import open_pickle, read_pickle
from diptych.errors import DataError

DTYPES = ["<f4", ">f4", "<f8", "<f2", "<i8", ">i4", "u1", "i1", "<u2", "?"]


def written(folder: Path, content: bytes) -> Path:
    path = folder / "a.pkl"
    path.write_bytes(content)
    return path


def same(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            same(found[key], value)
    elif isinstance(expected, np.ndarray):
        assert isinstance(found, np.ndarray)
        assert found.dtype == expected.dtype.newbyteorder("=")
        np.testing.assert_array_equal(found, expected)
        assert found.flags.writeable
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    else:
        assert found == expected


@settings(max_examples=40)
@given(
    st.sampled_from(DTYPES).flatmap(
        lambda d: hnp.arrays(np.dtype(d), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
    ),
    st.integers(0, 5),
    st.booleans(),
)
def test_arrays_come_back(
    tmp_path_factory: pytest.TempPathFactory, array: np.ndarray, protocol: int, by_columns: bool
) -> None:
    array = np.asfortranarray(array) if by_columns else array
    path = written(tmp_path_factory.getbasetemp(), pickle.dumps(array, protocol))
    found = read_pickle(path)
    assert found.dtype == array.dtype.newbyteorder("=")
    np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize("protocol", range(6))
def test_dicts_lists_numbers_and_texts_come_back(tmp_path: Path, protocol: int) -> None:
    vectors = np.random.default_rng(0).normal(size=(40, 100)).astype(np.float32)  # 16 kB: left in the file
    content = {
        "ids": [1, -7, 2**40, 255, 70_000],
        "words": ("man", "größe", ""),
        "more": {17: vectors[:1], 18: vectors, "empty": np.zeros((0, 3))},
        "flags": [True, False, None, 1.5, -0.0],
        "number": np.float64(2.5),
        "twice": [vectors, vectors],
    }
    same(read_pickle(written(tmp_path, pickle.dumps(content, protocol))), content)
    same(read_pickle(written(tmp_path, pickle.dumps(OrderedDict(content), protocol))), content)


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_large_arrays_stay_in_the_file_until_they_are_asked_for(tmp_path: Path, protocol: int) -> None:
    rng = np.random.default_rng(0)
    content = {f"{i}.jpg": rng.normal(size=(1, 5000)).astype(np.float32) for i in range(200)}  # 4 MB
    path = written(tmp_path, pickle.dumps(content, protocol))
    tracemalloc.start()
    opened = open_pickle(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_500_000
    assert all(isinstance(value, LazyArray) for value in opened.values())
    np.testing.assert_array_equal(opened["7.jpg"].load(), content["7.jpg"])
    path.write_bytes(path.read_bytes()[:-100_000])
    with pytest.raises(DataError, match=r"a\.pkl"):
        opened["199.jpg"].load()


def test_a_dict_that_numpy_saved(tmp_path: Path) -> None:
    content = {3: np.arange(6.0).reshape(1, 6), 5: np.ones((1, 6))}
    np.save(tmp_path / "train_unicom.npy", content, allow_pickle=True)  # type: ignore[arg-type]
    same(read_pickle(tmp_path / "train_unicom.npy"), content)
    np.save(tmp_path / "plain.npy", np.ones(3))
    with pytest.raises(DataError, match=r"plain\.npy"):
        read_pickle(tmp_path / "plain.npy")
    np.save(tmp_path / "objects.npy", np.array([1, "a"], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match=r"objects\.npy"):
        read_pickle(tmp_path / "objects.npy")


def test_names_of_older_numpy(tmp_path: Path) -> None:
    old = pickle.dumps(np.arange(3), 3).replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    assert read_pickle(written(tmp_path, old)).tolist() == [0, 1, 2]


def test_bytes_of_python_2(tmp_path: Path) -> None:
    # what cPickle of Python 2 wrote at protocol 2: byte strings where Python 3 writes bytes
    raw = np.arange(2000, dtype="<f8").tobytes()
    content = (
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01M\xd0\x07\x85"
        b"cnumpy\ndtype\nU\x02f8K\x00K\x01\x87R(K\x03U\x01<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T"
        + struct.pack("<i", len(raw))
        + raw
        + b"tb."
    )
    assert pickle.loads(content, encoding="latin1").tolist() == list(range(2000))
    assert read_pickle(written(tmp_path, content)).tolist() == list(range(2000))


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("code ran",)


def array_of(kind: bytes, data: bytes, shape: bytes = b"K\x01\x85") -> bytes:
    """A pickle that builds an array the usual way, of the given type code, shape and bytes."""
    return (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R(K\x01" + shape
        + b"cnumpy\ndtype\nX" + struct.pack("<I", len(kind)) + kind + b"\x89\x88\x87R(K\x03X\x01\x00\x00\x00<NNN"
        b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89B" + struct.pack("<I", len(data)) + data + b"tb."
    )  # fmt: skip


def test_the_array_of_the_attacks_is_readable(tmp_path: Path) -> None:
    assert read_pickle(written(tmp_path, array_of(b"u8", bytes(8)))).tolist() == [0]


MANY = (
    b"("
    + b"X\x00\x10\x00\x00"
    + b"a" * 4096
    + b"q\x00"
    + b"".join(b"c_codecs\nencode\nh\x00X\x06\x00\x00\x00latin1\x86R" for _ in range(99))
)
LAUGHS = b"]q\x00" + b"".join(b"](" + b"h%c" % i * 200 + b"eq%c" % (i + 1) for i in range(14)) + b"."
ATTACKS = {
    "a call": (pickle.dumps(Evil()), r"builtins\.print"),
    "a call in an array": (pickle.dumps({"n": np.array([Evil()], dtype=object)}), r"builtins\.print"),
    "a class": (pickle.dumps(Path("x")), "pathlib"),
    "objects by address": (array_of(b"O", b"\x41" * 8), r"a\.pkl"),
    "objects by address, named": (array_of(b"O8", b"\x41" * 8), r"a\.pkl"),
    "ndarray itself": (b"cnumpy\nndarray\n(K\x01\x85X\x01\x00\x00\x00OC\x08AAAAAAAAtR.", "ndarray"),
    "uninitialised memory": (b"cnumpy\nndarray\n(M\x00\x02\x85X\x02\x00\x00\x00u8tR.", "ndarray"),
    "fewer bytes than the shape": (array_of(b"u8", bytes(8), b"M\x00\x02\x85"), r"4,096.*\b8\b"),
    "a shape that overflows": (array_of(b"u8", b"", b"J\xff\xff\xff\x7f" * 3 + b"\x87"), r"\b0\b"),
    "a negative shape": (array_of(b"u8", bytes(8), b"J\xff\xff\xff\xff\x85"), r"a\.pkl"),
    "a type with fields": (array_of(b"V8", bytes(8)), "'V8'"),
    "a type in words": (array_of(b"O,O", bytes(8)), "'O,O'"),
    "an array started large": (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I99999999999\ntS'b'\ntR.", r"a\.pkl",
    ),
    "another encoding": (b"c_codecs\nencode\n(S'x'\nS'zip'\ntR.", r"a\.pkl"),
    "one string many times": (MANY + b"t.", r"a\.pkl"),
    "a list in itself": (b"]q\x00h\x00a.", r"a\.pkl"),
    "a bare name": (b"cnumpy\ndtype\n.", r"a\.pkl"),
    "attributes": (b"}}b.", r"a\.pkl"),
    "an instance": (b"(cos\nsystem\no.", r"os\.system"),
    "instance by line": (b"(ios\nsystem\n.", "b'i'"),
    "a persistent id": (b"Px\n.", "b'P'"),
    "an extension": (b"\x82\x01.", "x82"),
    "an object by class": (b"cnumpy\ndtype\n)\x81.", "x81"),
    "a huge announcement": (b"\x8e" + b"\xff" * 7 + b"\x7f.", r"a\.pkl"),
    "a huge text": (b"X\xff\xff\xff\xff.", r"4,294,967,295.*\b1\b"),
    "a huge number": (b"\x8a\xff" + b"\x7f" * 255 + b".", r"\b64\b"),
    "a list as a key": (b"}]Ns.", r"a\.pkl"),
    "pop of nothing": (b"0.", r"a\.pkl"),
    "a frame of nothing": (b"\x95.", r"\b8\b"),
    "no end": (b"]", r"a\.pkl"),
    "no line end": (b"I5", r"a\.pkl"),
    "text": (b"not a pickle", r"a\.pkl"),
    "nothing": (b"", r"a\.pkl"),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_what_is_no_array_is_refused(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    content, words = ATTACKS[name]
    with pytest.raises(DataError, match=words) as error:
        read_pickle(written(tmp_path, content))
    assert "\n" not in str(error.value)
    assert "code ran" not in capsys.readouterr().out


def test_shared_lists_are_not_multiplied(tmp_path: Path) -> None:
    # 200 references at each of 14 levels would be 10^32 items
    found = read_pickle(written(tmp_path, LAUGHS))
    assert found[0] is found[199]


def test_the_number_of_instructions_is_bounded(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"\b50\b"):
        read_pickle(written(tmp_path, b"N" * 60 + b"."), most_steps=50)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no\.pkl"):
        read_pickle(tmp_path / "no.pkl")


@pytest.mark.parametrize("protocol", [0, 2, 3, 4, 5])
def test_damaged_files_give_an_array_or_an_error(tmp_path: Path, protocol: int) -> None:
    content = pickle.dumps(
        {"nums": np.arange(5), "adj": np.ones((3, 3), np.float32), "w": ["a", 2]}, protocol
    )
    rng = random.Random(protocol)
    outcomes = set()
    for _ in range(1500):
        damaged = bytearray(content)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        if rng.random() < 0.2:
            del damaged[rng.randrange(len(damaged)) :]
        try:
            read_pickle(written(tmp_path, bytes(damaged)))
            outcomes.add("read")
        except DataError as error:
            outcomes.add("refused" if "\n" not in str(error) else "refused in several lines")
    assert outcomes == {"read", "refused"}


def test_only_listed_instructions_and_names_exist() -> None:
    source = Path(pickles.__file__).read_text("utf-8")
    for word in ("import pickle\n", "import_module", "__import__", "getattr(", "eval(", "exec("):
        assert word not in source
