"""Arrays: features on disk read row by row, batches for an encoder, vectors from anywhere; reading ahead in threads.

A batch costs its own rows, never the file. The search half reads batches as they are, torch at its edge.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import struct
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from diptych.errors import DataError

if TYPE_CHECKING:
    import torch

    from diptych.data.captions import ImageStore, StoredImage

# what numpy's reader of headers, which evaluates a literal, raises for a damaged one
NO_ARRAY = (
    ValueError, TypeError, SyntaxError, TokenError, EOFError, OSError, RecursionError, MemoryError, KeyError,
    AttributeError, OverflowError, IndexError, struct.error,
)  # fmt: skip
MOST_SIDES = 32  # of an array
KEY_BYTES = 16_384  # bytes of a row that enter its content key


class ArrayStore:
    """An image store over the rows of one array (N, ...): in memory, or an ``.npy`` file of any size.

    ``raw``, a shape and a type, is for a file of bare numbers. A file is read with ``pread``: pages of a map count as
    resident memory, and a file cut short under a map kills the process. Short rows, of which a batch needs many, may be
    ``mapped`` all the same; the size of the file is then looked at before each batch. Reading is safe from several
    threads, and a copy sent to another process opens the file again.
    """

    def __init__(
        self,
        source: str | Path | NDArray[Any],
        raw: tuple[tuple[int, ...], str] | None = None,
        mapped: bool = False,
    ) -> None:
        self.path = None if isinstance(source, np.ndarray) else Path(source)
        self._array = source if isinstance(source, np.ndarray) else None
        self._file: int | None = None
        self.mapped = mapped
        self._map: NDArray[Any] | None = None
        if self.path is not None and raw is not None:
            self.shape, self.dtype, self._start = raw[0], np.dtype(raw[1]), 0
            _check_size(self.path, self.shape, self.dtype, 0)
        elif self.path is not None:
            self.shape, self.dtype, self._start = _read_header(self.path)
        elif self._array is not None:
            self.shape, self.dtype, self._start = self._array.shape, self._array.dtype, 0
        if not self.shape:
            raise DataError(f"{self.path or 'an array'} holds a single number: give a row per image.")
        self._row_bytes = int(np.prod(self.shape[1:], dtype=np.int64)) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def features(self) -> bool:
        """Whether the rows are vectors, (N, R, D) or (N, D); bytes are pictures."""
        return self.dtype != np.uint8

    def __getitem__(self, index: int) -> NDArray[Any]:
        """One row, copied."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        row: NDArray[Any] = self.rows([index % len(self)])[0]
        return row

    def rows(self, indices: ArrayLike, *, pin_memory: bool = False) -> NDArray[Any]:
        """(len(indices), ...): a copy of these rows, in this order; in pinned memory for a GPU, if asked."""
        starts = np.asarray(indices, dtype=np.int64)
        return self.spans(starts, np.ones_like(starts), pin_memory=pin_memory)

    def spans(
        self, starts: NDArray[np.int64], sizes: NDArray[np.int64], *, pin_memory: bool = False
    ) -> NDArray[Any]:
        """Runs of ``sizes[i]`` consecutive rows from ``starts[i]`` on, end to end: (sum(sizes), ...)."""
        if len(starts) and (starts.min() < 0 or (starts + sizes).max() > len(self)):
            raise IndexError(f"rows outside 0…{len(self) - 1}")
        shape = (int(sizes.sum()), *self.shape[1:])
        out = pinned_array(shape, self.dtype) if pin_memory else np.empty(shape, dtype=self.dtype)
        self._fill(out, starts, sizes)
        return out

    def _fill(self, out: NDArray[Any], starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
        whole = self._map_file() if self.mapped and self.path is not None else self._array
        if whole is not None:
            np.take(whole, flat_index(starts, sizes), axis=0, out=out, mode="clip")  # they were checked
            return
        view = out.reshape(-1).view(np.uint8).data
        at = 0
        for start, size in _join(starts, sizes):  # what lies side by side is read at once
            length = size * self._row_bytes
            self.read_at(self._start + start * self._row_bytes, view[at : at + length])
            at += length

    def content_key(self, index: int) -> str:
        """A hash of the type, the shape and the first ``KEY_BYTES`` bytes of the row.

        Features come out of a network, where any change of the picture changes every number: the head of a
        row stands for all of it, and a 30 GB file is not read to name it.
        """
        digest = hashlib.blake2b(f"{self.dtype.str}{self.shape[1:]}".encode(), digest_size=16)
        if self._array is not None:
            digest.update(np.ascontiguousarray(self._array[index]).tobytes()[:KEY_BYTES])
        else:
            head = bytearray(min(self._row_bytes, KEY_BYTES))
            self.read_at(self._start + index * self._row_bytes, memoryview(head))
            digest.update(head)
        return digest.hexdigest()

    def read_at(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes of the file from ``offset`` on."""
        file = self._open()
        done = 0
        while done < len(into):
            count = os.preadv(file, [into[done:]], offset + done)
            if count == 0:
                raise self._shorter()
            done += count

    def _map_file(self) -> NDArray[Any]:
        assert self.path is not None
        if os.fstat(self._open()).st_size < self._start + len(self) * self._row_bytes:
            raise self._shorter()  # reading on would kill the process
        if self._map is None:
            pages = mmap.mmap(self._open(), 0, access=mmap.ACCESS_READ)
            self._map = np.ndarray(self.shape, self.dtype, pages, self._start)
        return self._map

    def _open(self) -> int:
        if self._file is None:
            assert self.path is not None
            self._file = os.open(self.path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._file)
        return self._file

    def _shorter(self) -> DataError:
        return DataError(f"{self.path} ends early: it was changed while being read, restore it.")

    def __getstate__(self) -> dict[str, Any]:
        # a file number and a map mean nothing in another process
        return {**self.__dict__, "_file": None, "_map": None}


@dataclass(frozen=True)
class Span:
    """Bytes of a file that were not read yet."""

    path: Path
    start: int
    size: int

    def __len__(self) -> int:
        return self.size

    def read(self) -> bytes:
        """The bytes; an error where the file has been cut since."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            data = file.read(self.size)
        if len(data) < self.size:
            raise DataError(f"{self.path} ends early: it was changed while being read, restore it.")
        return data


class LazyArray:
    """An array whose bytes may still lie in the file: ``shape``, ``dtype``, and ``load``."""

    def __init__(self, source: bytes | Span, dtype: Any, shape: tuple[int, ...], order: Any) -> None:
        self.source, self.dtype, self.shape, self.order = source, dtype, shape, order

    def load(self) -> NDArray[Any]:
        """The array in this machine's byte order, a copy of its own."""
        data = self.source if isinstance(self.source, bytes) else self.source.read()
        array = np.frombuffer(data, self.dtype).reshape(self.shape, order=self.order)
        return np.array(array, dtype=self.dtype.newbyteorder("="), order="C")


def read_items(
    store: ImageStore, indices: NDArray[np.int64], *, pin_memory: bool = False
) -> Sequence[StoredImage] | NDArray[Any]:
    """Items of a store in order, each picture read once; one block (B, ...) out of an ``ArrayStore``.

    With ``pin_memory`` such a block lies in pinned memory, from which a GPU copies while the host goes on.
    """
    from diptych.data.captions import StoreChain, StoreRows

    if isinstance(store, StoreRows):
        return read_items(store.store, store.rows[indices], pin_memory=pin_memory)
    if isinstance(store, ArrayStore):
        # a row met twice costs less than reordering the block
        return store.rows(indices, pin_memory=pin_memory)
    if isinstance(store, StoreChain) and (part := store.part_of(indices)) is not None:
        return read_items(*part, pin_memory=pin_memory)
    distinct, back = np.unique(indices, return_inverse=True)
    items = [store[int(i)] for i in distinct]
    return [items[i] for i in back]


def are_features(store: Any) -> bool:
    """Whether a list, or a store that says so, holds features; no item is read to know it."""
    from diptych.data.captions import holds_features

    return holds_features(store) if isinstance(store, list | tuple) else getattr(store, "features", False)


def ranges(start: int, stop: int, step: int) -> list[range]:
    """The numbers from ``start`` to ``stop``, at most ``step`` at a time."""
    return [range(first, min(first + step, stop)) for first in range(start, stop, step)]


def flat_index(starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """The row numbers of consecutive runs, end to end: starts[0], starts[0]+1, …, starts[1], …"""
    ends = np.cumsum(sizes)
    steps = np.arange(int(ends[-1]) if len(ends) else 0, dtype=np.int64)
    return np.asarray(steps + np.repeat(starts - (ends - sizes), sizes))


def _join(starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Start and size of the runs, those that follow one another made one."""
    if not len(starts):
        return []
    first = np.concatenate([[True], starts[1:] != starts[:-1] + sizes[:-1]])
    totals = np.add.reduceat(sizes, np.flatnonzero(first))
    return list(zip(starts[first].tolist(), totals.tolist(), strict=True))


def pinned_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """An empty array in memory that torch pinned, and takes back when the array is gone and copied."""
    import torch

    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    buffer: NDArray[Any] = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
    return buffer.view(dtype).reshape(shape)


def read_array(file: Path, mode: Literal["r", "c"] = "r") -> NDArray[Any]:
    """The numbers of a ``.npy`` file, mapped; what is written to them with ``c`` stays in memory."""
    try:
        found: NDArray[Any] = np.lib.format.open_memmap(file, mode)
    except FileNotFoundError as error:
        raise DataError(f"{file} does not exist: check the path.") from error
    except Exception as error:  # numpy reads the header as Python, with errors of many kinds
        raise DataError(f"{file} is not an array of numbers ({error}): save it with numpy.save.") from error
    if found.dtype.kind not in "fiu" or not found.ndim:
        raise DataError(
            f"{file} holds {found.dtype} of shape {found.shape}, not rows of numbers: save them as float32."
        )
    return found


def _read_header(path: Path) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Shape, type and first byte of the data of an ``.npy`` file, after checking that all of it is there."""
    try:
        with open(path, "rb") as file:
            version = np.lib.format.read_magic(file)
            read_shape = (
                np.lib.format.read_array_header_1_0
                if version == (1, 0)
                else np.lib.format.read_array_header_2_0
            )
            with warnings.catch_warnings():
                # published arrays were written by Python 2, whose headers numpy reads with a warning
                warnings.simplefilter("ignore", UserWarning)
                shape, by_columns, dtype = read_shape(file)
            start = file.tell()
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist: check the path.") from error
    except NO_ARRAY as error:
        raise DataError(f"{path} is not a numpy array file ({error}): write it with numpy.save.") from error
    if any(type(side) is not int or side < 0 for side in shape):
        raise DataError(f"{path} claims the shape {shape}: write it again with numpy.save.")
    if dtype.hasobject:
        raise DataError(f"{path} holds pickled objects, not numbers: save it as a plain float array.")
    if dtype.kind not in "fiub" or len(shape) > MOST_SIDES:  # an empty text takes no byte of the file
        raise DataError(
            f"{path} holds {dtype} in {len(shape)} dimensions, not rows of numbers: save it as float32."
        )
    if by_columns and len(shape) > 1:
        raise DataError(f"{path} is in Fortran order: save it again after numpy.ascontiguousarray.")
    _check_size(path, shape, dtype, start)
    return shape, dtype, start


def _check_size(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any], start: int) -> None:
    expected = start + math.prod(shape) * dtype.itemsize  # of Python's integers, which do not overflow
    size = path.stat().st_size
    if size < expected:
        raise DataError(
            f"{path} is truncated: shape {shape} of {dtype} needs {expected:,} bytes, it has {size:,}: "
            "copy or extract it again."
        )


J = TypeVar("J")
T = TypeVar("T")


def read_ahead(
    jobs: Iterable[J], read: Callable[[J], T], workers: int, device: torch.device | None = None
) -> Iterator[T]:
    """``read(job)`` for every job, in order, on ``workers`` threads (0: when its turn comes, in this one).

    At most ``workers + 1`` results are held or under way. An error comes out in the place of its result, and ends
    everything; so does a caller that stops in the middle. ``device`` is the GPU whose memory the threads pin.
    """
    if workers == 0:
        yield from map(read, jobs)
        return
    if device is None or device.type != "cuda":
        executor = ThreadPoolExecutor(workers, "ahead")
    else:
        import torch

        # a new thread would pin through GPU 0 and open a context on it, whichever GPU this process uses
        number = torch.cuda.current_device() if device.index is None else device.index
        executor = ThreadPoolExecutor(workers, "ahead", torch.cuda.set_device, (number,))
    ahead: deque[Future[T]] = deque()
    try:
        for job in jobs:
            ahead.append(executor.submit(read, job))
            if len(ahead) > workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        executor.shutdown(cancel_futures=True)


@dataclass(frozen=True, slots=True)
class Sets:
    """A padded batch of sets: regions, grid cells, video frames, or words.

    ``values`` is (B, L, D) for vectors and (B, L) for token ids; ``mask`` is (B, L), True where valid.
    """

    values: NDArray[Any]
    mask: NDArray[np.bool_]

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Valid elements of each set, (B,)."""
        return np.asarray(self.mask.sum(axis=1), np.int64)

    @property
    def is_ids(self) -> bool:
        """Whether the elements are token ids rather than vectors."""
        return self.values.ndim == 2


Arrays = Sets | NDArray[np.float32]
"""What an image encoder reads: sets (regions, frames, patches) or pixels (B, 3, H, W)."""

ROWS = 10_000  # checked together
UNIT = 1e-3  # how far the length of a unit vector may be from 1: that of float16 rows is


def as_rows(vectors: Any, what: str) -> NDArray[Any]:
    """Vectors (N, D) as a numpy array: from an array, a tensor on any device, or lists of numbers."""
    if hasattr(vectors, "detach"):  # a tensor, which this module does not import
        vectors = vectors.detach().cpu().float().numpy()
    try:
        rows = np.asarray(vectors)
    except ValueError as error:
        raise DataError(f"{what} are rows of unequal length ({error}): give an array.") from error
    if rows.ndim != 2 or not rows.shape[1]:
        shape = "×".join(map(str, rows.shape)) or "a single number"
        raise DataError(f"the shape of {what} is {shape}: give an array (rows, numbers).")
    if rows.dtype.kind not in "fiu":
        raise DataError(f"{what} hold {rows.dtype}, not numbers: give float32.")
    return rows


def check_rows(rows: NDArray[Any], what: str, *, unit: bool = False, outcome: str = "") -> None:
    """Raise unless every row is finite and not zero; with ``unit``, of length 1 as well. ``outcome`` says what then."""
    for start in range(0, len(rows), ROWS):
        norms = np.linalg.norm(np.asarray(rows[start : start + ROWS], np.float64), axis=1)
        bad = np.flatnonzero(~(np.isfinite(norms) & (norms > 0)))
        if len(bad):
            problem = "is all zeros" if norms[bad[0]] == 0 else "holds NaN or infinity"
            raise DataError(f"{what} row {start + int(bad[0])} {problem}{outcome}: leave such rows out.")
        far = np.flatnonzero(np.abs(norms - 1) > UNIT)
        if unit and len(far):
            raise DataError(
                f"{what} row {start + int(far[0])} has length {norms[far[0]]:.4g}, not 1: normalise the vectors, or "
                "give normalize=True."
            )


def unit_rows(rows: NDArray[Any]) -> NDArray[np.float32]:
    """Rows of length 1, in float32; divided in float64."""
    exact = np.asarray(rows, np.float64)
    return np.asarray(exact / np.linalg.norm(exact, axis=1, keepdims=True), np.float32)
