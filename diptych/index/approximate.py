"""Approximate search for large collections: a usearch graph proposes, the stored vectors decide.

A graph is derived data: it can be deleted and built again. It covers the rows that were there when it was
built. Rows added since are scanned exactly and merged in; removed rows are dropped from its proposals; and
where it proposes fewer than k live rows the whole collection is scanned. Proposals are scored from the stored
vectors, so the scores that come out are those of an exact search.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from pathlib import Path
from typing import Any

import numpy as np

from diptych.data.storage import storing
from diptych.errors import MissingExtra
from diptych.index.protocol import Kind, Vectors
from diptych.index.scan import MARGIN, fetch, scan
from diptych.index.segments import ROW_BITS, Layout, checksum, sync_folder
from diptych.index.state import Graph, Rows, Segment, Selection, State
from diptych.progress import track

STALE = 0.2  # share of rows outside or removed from a graph at which it is brought up to date
NEIGHBOURS = 16  # edges of a node
WIDTH_ADD, WIDTH_SEARCH = 128, 256  # nodes kept in sight while adding and searching
PROPOSALS = 64  # at least, and four times k
PIECE = 20_000  # rows added at once


class Graphs:
    """The graphs of one index, opened on the first query that wants them."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        self.folder, self.layout = folder, layout
        self._open: dict[str, Any] = {}
        self._lock = threading.Lock()

    def find(self, state: State, kind: Kind | None) -> Graph | None:
        """The graph of a kind, if there is one and its file is whole; there is none of all kinds at once."""
        for graph in state.graphs:
            path = self.folder / graph.file
            if graph.kind == kind and path.is_file() and path.stat().st_size == graph.size:
                return graph
        return None

    def search(self, graph: Graph, state: State, queries: Vectors, k: int) -> list[Rows]:
        """For each query, slots of at least k candidates where there are k items."""
        segments = state.of_kind(graph.kind)
        covered = sum(min(len(s), graph.covers.get(s.number, 0)) for s in segments)
        gone = sum(len(s.gone) for s in segments) + graph.rows - covered
        wanted = max(PROPOSALS, 4 * (k + MARGIN))
        wanted = min(graph.rows, wanted + wanted * gone // max(1, covered))
        proposed = self._proposals(graph, queries, wanted)
        tail = scan(segments, self.layout, queries, k, _outside(segments, graph))
        out = []
        for query, keys, rest in zip(queries, proposed, tail, strict=True):
            found = np.concatenate([_present(segments, keys), rest])
            if len(found) < min(k, state.count(graph.kind)):
                (found,) = scan(segments, self.layout, query[None], k)
            out.append(found)
        return out

    def build(self, state: State, kind: Kind, show_progress: bool = False) -> Graph:
        """A graph of what a state holds, grown from the one it has if that is whole; synced, not recorded."""
        old = self.find(state, kind)
        segments = state.of_kind(kind)
        graph = _new_graph(self.layout.dimension)
        if old is not None:
            graph.load(str(self.folder / old.file))
            keys = np.asarray(graph.keys).astype(np.int64)
            dead = np.setdiff1d(keys, _present(segments, keys))
            if len(dead):
                graph.remove(dead.astype(np.uint64))
        for rows in track(_pieces(segments, old), "approximate index", None, show_progress):
            graph.add(rows.astype(np.uint64), fetch(segments, self.layout, rows))
        # no graph was recorded at this generation yet, for recording one ends it
        path = self.folder / f"graph-{state.generation:06d}-{kind}.usearch"
        with storing(path):
            graph.save(str(path))
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)
            sync_folder(self.folder)
        return Graph(kind, path.name, len(graph), path.stat().st_size, {s.number: len(s) for s in segments})

    def record(self, db: sqlite3.Connection, graph: Graph) -> None:
        """Put a graph in the place of the one of its kind."""
        crc = checksum(self.folder / graph.file, 0, graph.size)
        record = (graph.kind, graph.file, graph.rows, graph.size, crc, json.dumps(graph.covers))
        db.execute("INSERT OR REPLACE INTO graphs VALUES (?, ?, ?, ?, ?, ?)", record)

    def _proposals(self, graph: Graph, queries: Vectors, wanted: int) -> list[Rows]:
        with self._lock:  # usearch keeps a fixed number of search contexts
            if graph.file not in self._open:
                view = _new_graph(self.layout.dimension)
                view.view(str(self.folder / graph.file))
                view.expansion_search = WIDTH_SEARCH
                self._open = {
                    graph.file: view,
                    **{f: v for f, v in self._open.items() if graph.kind not in f},
                }
            found = self._open[graph.file].search(queries, wanted)
        if len(queries) == 1 and np.asarray(found.keys).ndim == 1:
            return [np.asarray(found.keys).astype(np.int64)]
        return [np.asarray(m.keys).astype(np.int64) for m in found]


def is_stale(graph: Graph, state: State) -> bool:
    """Whether so much was added or removed since a graph was built that it should be brought up to date."""
    segments = state.of_kind(graph.kind)
    outside = sum(len(s) - graph.covers.get(s.number, 0) for s in segments)
    gone = sum(len(s.gone) for s in segments)
    return outside + gone > STALE * graph.rows


def _new_graph(dimension: int) -> Any:
    try:
        from usearch.index import Index
    except ImportError:
        raise MissingExtra("usearch", "search", "an approximate index") from None
    return Index(
        ndim=dimension,
        metric="ip",
        dtype="i8",
        connectivity=NEIGHBOURS,
        expansion_add=WIDTH_ADD,
        expansion_search=WIDTH_SEARCH,
    )


def _outside(segments: tuple[Segment, ...], graph: Graph) -> Selection:
    """The live rows that a graph does not cover."""
    out: Selection = {}
    for segment in segments:
        start = min(len(segment), graph.covers.get(segment.number, 0))
        rows = np.arange(start, len(segment), dtype=np.int64)
        out[segment.number] = np.setdiff1d(rows, segment.gone, assume_unique=True)
    return out


def _present(segments: tuple[Segment, ...], slots: Rows) -> Rows:
    """Those of the slots that hold an item now."""
    keep = np.zeros(len(slots), bool)
    numbers, rows = slots >> ROW_BITS, slots & ((1 << ROW_BITS) - 1)
    for segment in segments:
        here = (numbers == segment.number) & (rows < len(segment))
        keep |= here & ~np.isin(rows, segment.gone)
    return slots[keep]


def _pieces(segments: tuple[Segment, ...], old: Graph | None) -> list[Rows]:
    """Slots of the live rows beyond those a graph covers already, a piece at a time."""
    out = []
    for segment in segments:
        start = 0 if old is None else old.covers.get(segment.number, 0)
        live = segment.live_rows
        live = live[live >= start] + (segment.number << ROW_BITS)
        out += [live[at : at + PIECE] for at in range(0, len(live), PIECE)]
    return out
