"""Approximate search for large collections: a usearch graph or binary codes propose, the stored vectors decide.

Either is called a graph here. A graph is derived data: it can be deleted and built again. It covers the rows that were
there when it was built. Rows added since are scanned exactly and merged in; removed rows are dropped from its
proposals; and where it proposes fewer than k live rows the whole collection is scanned. Proposals are scored from the
stored vectors, so the scores that come out are those of an exact search. Compaction renames the rows in it.

usearch believes what its file says: a forged one ends the process, whatever its checksum. So a usearch graph is signed
with the key of the user who builds it, and one that this user did not sign is not loaded. Code tables are arrays, which
are checked; they need no library, no training and little memory.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import sqlite3
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diptych.codes import WORD, Codes, hamming, nearest
from diptych.data.arrays import NO_ARRAY
from diptych.errors import SettingsError, StorageError, import_extra
from diptych.index.engines import coding
from diptych.index.engines.coding import Coder, code_bits
from diptych.index.engines.embedded.scan import MARGIN, fetch, scan
from diptych.index.engines.embedded.segments import FILES, ROW_BITS, RowLayout, checksum
from diptych.index.engines.embedded.state import CODES, Graph, RowNumbers, Segment, Selection, State
from diptych.index.engines.embedded.store import Moves
from diptych.index.protocol import Kind, Vectors
from diptych.machine import own_key
from diptych.progress import LOG, track
from diptych.storage import storing, sync

_FORMAT = 1

Keys = NDArray[np.uint64]


class CodeTable:
    """Codes by key, with the operations of a usearch index that the approximate search asks for."""

    def __init__(self, dimension: int) -> None:
        self.dimension = dimension
        self.coder: Coder | None = None  # around the first vectors
        self.keys: Keys = np.zeros(0, np.uint64)
        self._codes: Codes = np.zeros((0, 0), np.uint64)

    def __len__(self) -> int:
        return len(self.keys)

    def add(self, keys: Keys, vectors: Vectors) -> None:
        if self.coder is None:
            self.coder = Coder.around(vectors.mean(axis=0))
            self._codes = np.zeros((0, self.coder.bits // WORD), np.uint64)
        self.keys = np.concatenate([self.keys, keys.astype(np.uint64)])
        self._codes = np.asfortranarray(np.concatenate([self._codes, self.coder.code(vectors)]))

    def remove(self, keys: Keys) -> None:
        keep = ~np.isin(self.keys, keys)
        self.keys, self._codes = self.keys[keep], np.asfortranarray(self._codes[keep])

    def rename(self, old: Keys, new: Keys) -> None:
        order = np.argsort(old)
        place = np.minimum(np.searchsorted(old, self.keys, sorter=order), max(0, len(old) - 1))
        if len(old):
            found = old[order[place]] == self.keys
            self.keys = np.where(found, new[order[place]], self.keys)

    def propose(self, queries: Vectors, wanted: int) -> list[NDArray[np.int64]]:
        """For each query, the keys of the ``wanted`` rows with the nearest codes."""
        if self.coder is None or not len(self):
            return [np.zeros(0, np.int64) for _ in queries]
        codes = self.coder.code_queries(queries)
        return [self.keys[nearest(hamming(code, self._codes), wanted)].astype(np.int64) for code in codes]

    def save(self, path: str) -> None:
        none = Coder(np.zeros(0, np.float32), np.zeros((self.dimension, 0), np.float32))
        facts, coder = np.array([_FORMAT, self.dimension], np.int64), self.coder or none
        handle = FILES.open(Path(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with os.fdopen(handle, "wb") as file:
            for array in (facts, coder.mean, coder.rotation, self.keys, np.ascontiguousarray(self._codes.T)):
                np.lib.format.write_array(file, array, allow_pickle=False)

    def load(self, path: str) -> None:
        """Read what ``save`` wrote; a file of anything else is a ``RuntimeError``."""
        try:
            with os.fdopen(FILES.open(Path(path)), "rb") as file:
                facts, mean, rotation, keys, codes = (
                    np.lib.format.read_array(file, allow_pickle=False) for _ in range(5)
                )
        except NO_ARRAY as error:
            raise RuntimeError(f"{path} holds no codes ({error})") from error
        shapes = [(array.shape, array.dtype) for array in (mean, rotation, keys, codes)]
        count, bits = keys.size, code_bits(self.dimension)
        floats, words = np.dtype(np.float32), np.dtype(np.uint64)
        full = [
            ((self.dimension,), floats), ((self.dimension, bits), floats), ((count,), words),
            ((bits // WORD, count), words),
        ]  # fmt: skip
        empty = [((0,), floats), ((self.dimension, 0), floats), ((0,), words), ((0, 0), words)]
        if facts.tolist() != [_FORMAT, self.dimension] or shapes not in (full, empty):
            raise RuntimeError(f"{path} holds codes of another kind")
        self.coder = Coder(mean, rotation) if len(mean) else None
        self.keys, self._codes = keys, codes.T


NEIGHBOURS = 16  # edges of a node
WIDTH_ADD, WIDTH_SEARCH = 128, 256  # nodes kept in sight while adding and searching
PROPOSALS = 32  # fewest candidates of a search
FACTOR = 2  # candidates per hit; more do not raise the recall on 100,000 vectors
PIECE = 20_000  # rows added at once
UNIT = 0.01  # how far the length of a vector may be from 1: about a step of 8 bits


class Graphs:
    """The graphs of one index, opened on the first query that wants them."""

    def __init__(self, folder: Path, layout: RowLayout) -> None:
        self.folder, self.layout = folder, layout
        self._open: dict[str, Any] = {}
        self._lock = threading.Lock()

    def find(self, state: State, kind: Kind | None) -> Graph | None:
        """The graph of a kind, if there is one and its file can be read; there is none of all kinds at once."""
        for graph in state.graphs:
            if graph.kind == kind and self._view(graph) is not None:
                return graph
        return None

    def search(
        self, graph: Graph, state: State, queries: Vectors, k: int, width: int | None = None
    ) -> list[RowNumbers]:
        """For each query, slots of at least k candidates where there are k items; ``width`` are kept in sight."""
        width = width or (graph.recall.width if graph.recall is not None else usual_width(graph))
        segments = state.of_kind(graph.kind)
        covered = sum(min(len(s), graph.covers.get(s.number, 0)) for s in segments)
        gone = sum(len(s.gone) for s in segments) + graph.rows - covered
        least, factor = (width, coding.FACTOR) if graph.is_codes else (PROPOSALS, FACTOR)
        wanted = max(least, factor * (k + MARGIN))
        wanted = min(graph.rows, wanted + wanted * gone // max(1, covered))
        proposed = self._proposals(graph, queries, wanted, width)
        outside = _outside(segments, graph)
        none = np.zeros(0, np.int64)
        tail = scan(segments, queries, k, outside) if outside else [none] * len(queries)
        out = []
        for query, keys, rest in zip(queries, proposed, tail, strict=True):
            found = np.concatenate([_present(segments, keys), rest])
            if len(found) < min(k, state.count(graph.kind)):
                (found,) = scan(segments, query[None], k)
            out.append(found)
        return out

    def build(self, state: State, kind: Kind, show_progress: bool = False, codes: bool = False) -> Graph:
        """A graph of what a state holds, grown from the one it has if that is whole; synced, not recorded."""
        old = self.find(state, kind)
        if old is not None and old.is_codes != codes:
            old = None
        segments = state.of_kind(kind)
        graph = None if old is None else self._load(old)
        if graph is None:
            old, graph = None, self._empty(codes)
        _keep(graph, _present(segments, _keys(graph)))
        for rows in track(_pieces(segments, old), "approximate index", None, show_progress):
            vectors = fetch(segments, self.layout, rows)
            _check_unit(self.folder, vectors)
            graph.add(rows.astype(np.uint64), vectors)
        return self._saved(graph, state, kind, {s.number: len(s) for s in segments})

    def follow(
        self, db: sqlite3.Connection, state: State, gone: Sequence[Segment], moves: Moves
    ) -> list[Graph]:
        """Rename the rows that compaction moved, in new files; the graphs that may go once this is committed."""
        out = []
        for kind, pairs in moves.items():
            known = [graph for graph in state.graphs if graph.kind == kind]
            db.execute("DELETE FROM graphs WHERE kind = ?", (kind,))
            out += known
            old = self.find(state, kind)
            graph = None if old is None else self._load(old)
            if old is None or graph is None:  # none, or damaged
                continue
            stay = tuple(s for s in state.of_kind(kind) if all(s is not one for one in gone))
            covered, covers = _covered(old, pairs)
            _keep(graph, np.concatenate([_present(stay, _keys(graph)), covered[:, 1]]))
            graph.rename(covered[:, 1].astype(np.uint64), covered[:, 0].astype(np.uint64))
            if len(graph):
                covers |= {s.number: old.covers[s.number] for s in stay if s.number in old.covers}
                self.record(db, self._saved(graph, state, kind, covers))
        return out

    def record(self, db: sqlite3.Connection, graph: Graph) -> None:
        """Put a graph in the place of the one of its kind."""
        beside = {"signature": graph.signature, "recall": graph.recall.to_json() if graph.recall else ""}
        for name, value in beside.items():
            db.execute("DELETE FROM meta WHERE key = ?", (f"{name}-{graph.kind}",))
            if value:
                db.execute("INSERT INTO meta VALUES (?, ?)", (f"{name}-{graph.kind}", value))
        record = (
            graph.kind, graph.file, graph.rows, graph.size, graph.checksum, json.dumps(graph.covers),
        )  # fmt: skip
        db.execute("INSERT OR REPLACE INTO graphs VALUES (?, ?, ?, ?, ?, ?)", record)

    def _proposals(self, graph: Graph, queries: Vectors, wanted: int, width: int) -> list[RowNumbers]:
        view = self._view(graph)
        if view is None:  # gone since it was found: then everything is scanned
            return [np.zeros(0, np.int64) for _ in queries]
        wanted = max(1, min(wanted, len(view)))
        if isinstance(view, CodeTable):
            return view.propose(queries, wanted)
        with self._lock:  # usearch keeps a fixed number of search contexts
            view.expansion_search = width
            found = view.search(queries, wanted)
        if len(queries) == 1 and np.asarray(found.keys).ndim == 1:
            return [np.asarray(found.keys).astype(np.int64)]
        return [np.asarray(m.keys).astype(np.int64) for m in found]

    def _view(self, graph: Graph) -> Any:
        """A graph, memory-mapped and kept open; None when its file is gone or damaged."""
        path = FILES.path(self.folder, graph.file)
        with self._lock:
            try:
                if path.stat().st_size != graph.size:
                    return None
                if graph.file not in self._open:
                    view, fault = None, _fault(graph, path)
                    if not fault:
                        view = self._empty(graph.is_codes)
                        (view.load if graph.is_codes else view.view)(str(path))
                    else:
                        LOG.warning(
                            "%s %s: every item is scanned until 'diptych index' builds it again", path, fault
                        )
                    others = {file: one for file, one in self._open.items() if graph.kind not in file}
                    self._open = {graph.file: view, **others}
            except (OSError, RuntimeError):
                return None
            return self._open[graph.file]

    def _empty(self, codes: bool) -> Any:
        if codes:
            return CodeTable(self.layout.dimension)
        with suppress(ImportError):
            import onnxruntime  # noqa: F401  loaded after usearch 2.26, ONNX Runtime 1.31 ends the process
        return import_extra("usearch.index", "search", "an approximate index").Index(
            ndim=self.layout.dimension,
            metric="ip",
            dtype="i8",
            connectivity=NEIGHBOURS,
            expansion_add=WIDTH_ADD,
            expansion_search=WIDTH_SEARCH,
        )

    def _load(self, graph: Graph) -> Any:
        """A graph in memory, to be changed; None when its file cannot be read."""
        loaded = self._empty(graph.is_codes)
        try:
            loaded.load(str(FILES.path(self.folder, graph.file)))
        except (OSError, RuntimeError):
            return None
        return loaded

    def _saved(self, graph: Any, state: State, kind: Kind, covers: dict[int, int]) -> Graph:
        """Write a graph to a new file and sync it."""
        # no graph was recorded at this generation yet, for recording one ends it
        suffix = CODES if isinstance(graph, CodeTable) else ".usearch"
        path = FILES.path(self.folder, f"graph-{state.generation:06d}-{kind}{suffix}")
        with storing(path):
            try:
                graph.save(str(path))
            except RuntimeError as error:  # all that usearch says of a disk that is full
                path.unlink(missing_ok=True)
                raise StorageError(
                    f"the disk is full or failing while saving {path} ({error}): free some space and run again; "
                    "what was saved is intact."
                ) from error
            sync(path)
            sync(self.folder)
        size = path.stat().st_size
        crc, signature = signed(path, size, own_key(make=True))
        return Graph(kind, path.name, len(graph), size, covers, crc or 0, signature)


def _fault(graph: Graph, path: Path) -> str:
    """Why the file of a graph is not loaded; empty for one that is."""
    crc, signature = signed(path, graph.size, None if graph.is_codes else own_key())
    if crc != graph.checksum:
        return "is damaged"
    if graph.is_codes or (signature and hmac.compare_digest(signature.encode(), graph.signature.encode())):
        return ""
    return "was not made by you on this machine"


def usual_width(graph: Graph | None) -> int:
    """How many candidates a search keeps in sight unless a target of recall set another number."""
    return coding.PROPOSALS if graph is not None and graph.is_codes else WIDTH_SEARCH


def signed(path: Path, size: int, key: bytes | None) -> tuple[int | None, str]:
    """The checksum of a file and its signature, empty without a key."""
    if key is None:
        return checksum(path, 0, size), ""
    signing = hashlib.blake2b(path.name.encode(), key=key, digest_size=32)
    return checksum(path, 0, size, signing), signing.hexdigest()


def _check_unit(folder: Path, vectors: Vectors) -> None:
    """Raise for vectors that are not of length 1: the graph keeps their directions in 8 bits, not their lengths."""
    lengths = np.linalg.norm(vectors, axis=1)
    worst = float(lengths[np.argmax(np.abs(lengths - 1))]) if len(lengths) else 1.0
    if abs(worst - 1) > UNIT:
        raise SettingsError(
            f"{folder} holds a vector of length {worst:.3g}, and an approximate index needs vectors of length 1: "
            "search exactly, or index with a model that normalises its vectors."
        )


def _outside(segments: tuple[Segment, ...], graph: Graph) -> Selection:
    """The live rows that a graph does not cover, of the segments that have any."""
    out: Selection = {}
    for segment in segments:
        start = graph.covers.get(segment.number, 0)
        if start < len(segment):
            rows = np.arange(start, len(segment), dtype=np.int64)
            out[segment.number] = np.setdiff1d(rows, segment.gone, assume_unique=True)
    return out


def _present(segments: tuple[Segment, ...], slots: RowNumbers) -> RowNumbers:
    """Those of the slots that hold an item now."""
    keep = np.zeros(len(slots), bool)
    numbers, rows = slots >> ROW_BITS, slots & ((1 << ROW_BITS) - 1)
    for segment in segments:
        here = (numbers == segment.number) & (rows < len(segment))
        keep |= here & ~np.isin(rows, segment.gone) if len(segment.gone) else here
    return slots[keep]


def _pieces(segments: tuple[Segment, ...], old: Graph | None) -> list[RowNumbers]:
    """Slots of the live rows beyond those a graph covers already, a piece at a time."""
    out = []
    for segment in segments:
        start = 0 if old is None else old.covers.get(segment.number, 0)
        live = segment.live_rows
        live = live[live >= start] + (segment.number << ROW_BITS)
        out += [live[at : at + PIECE] for at in range(0, len(live), PIECE)]
    return out


def _keys(graph: Any) -> RowNumbers:
    """The slots in a graph."""
    return np.asarray(graph.keys).astype(np.int64).reshape(-1)


def _keep(graph: Any, slots: RowNumbers) -> None:
    """Remove every slot but these."""
    dead = np.setdiff1d(_keys(graph), slots)
    if len(dead):
        graph.remove(dead.astype(np.uint64))


def _covered(graph: Graph, pairs: RowNumbers) -> tuple[RowNumbers, dict[int, int]]:
    """Of (new, old) slots, those in a graph, and how many first rows of each new segment that makes."""
    numbers, rows = pairs >> ROW_BITS, pairs & ((1 << ROW_BITS) - 1)
    limits = np.array([graph.covers.get(n, 0) for n in numbers[:, 1].tolist()], np.int64)
    inside = rows[:, 1] < limits
    covers = {}
    for number in np.unique(numbers[:, 0]).tolist():
        here = numbers[:, 0] == number
        covers[number] = int(here.sum() if inside[here].all() else np.argmin(inside[here]))
        inside &= ~here | (rows[:, 0] < covers[number])  # what lies behind the first gap is scanned
    return pairs[inside], covers
