"""Exact search against its definition: every live row scored alone in float64, whatever the blocks and the batch."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from diptych.index.engines.embedded import scan
from diptych.index.engines.embedded.segments import ROW_BITS, RowLayout, Rows
from diptych.index.engines.embedded.state import RowNumbers, Segment, Selection
from diptych.index.protocol import PRECISIONS, Precision, Vectors
from diptych.index.scoring import rescore

NONE = np.zeros(0, np.int64)


def drawn(rng: np.random.Generator, count: int, dimension: int, style: str) -> Vectors:
    """Vectors that are hard to tell apart, each style in its way."""
    rows = rng.normal(size=(count, dimension))
    if style == "equal":
        rows = rows[rng.integers(0, max(1, count // 5), count)] if count else rows
    elif style == "near":  # further apart than float64 rounds, nearer than float32 does
        rows = rows[:1] / max(1e-9, np.linalg.norm(rows[:1])) + rows * 1e-7
    elif style == "whole":
        rows = rows.round()
    elif style == "zero":
        rows = rows.round() * (rng.random((count, 1)) < 0.3)
    elif style == "lengths":
        rows = rows * 10.0 ** rng.integers(-3, 4, size=(count, 1))
    return rows.astype(np.float32)


@dataclass(frozen=True)
class Asked:
    """One search: segments with removed rows, queries, perhaps a filter's rows."""

    layout: RowLayout
    segments: list[Segment]
    queries: Vectors
    k: int
    selection: Selection | None

    @property
    def slots(self) -> RowNumbers:
        """Every row that may be an answer."""
        chosen = [
            s.live_rows if self.selection is None else self.selection.get(s.number, NONE)
            for s in self.segments
        ]
        numbered = zip(self.segments, chosen, strict=True)
        return np.concatenate([NONE, *(rows + (s.number << ROW_BITS) for s, rows in numbered)])

    def ranked(self, slots: RowNumbers, query: Vectors) -> list[tuple[float, int]]:
        """The k best of some rows, each scored alone; of equal scores, the earlier."""
        rows = scan.fetch(self.segments, self.layout, slots)
        scores = [float(rescore(row[None], query)[0]) for row in rows]
        for row, score in zip(rows, scores, strict=True):
            products = [float(a) * float(b) for a, b in zip(row, query, strict=True)]
            assert score == pytest.approx(math.fsum(products), rel=1e-9, abs=1e-12 * sum(map(abs, products)))
        order = sorted(range(len(slots)), key=lambda n: (-scores[n], slots[n]))
        return [(scores[n], int(slots[n])) for n in order[: self.k]]


def make(
    seed: int, precision: Precision, style: str, sizes: list[int], gone: float, share: float | None
) -> Asked:
    rng = np.random.default_rng(seed)
    layout = RowLayout(int(rng.choice([1, 3, 8, 33])), precision)
    segments = []
    for number, size in enumerate(sizes):
        removed = np.flatnonzero(rng.random(size) < gone)
        stored = layout.pack(drawn(rng, size, layout.dimension, style))
        rows = Rows(Path("segment"), stored)
        rows.extend([(0, size, zlib.crc32(stored))] if size else [])
        segments.append(Segment(2 * number + 1, "image", "", layout, rows, removed))
    queries = drawn(rng, int(rng.integers(1, 4)), layout.dimension, str(rng.choice(["", "whole", "zero"])))
    selection = None
    if share is not None:
        selection = {
            s.number: s.live_rows[rng.random(s.alive) < share] for s in segments if rng.random() < 0.9
        }
    return Asked(layout, segments, queries, int(rng.choice([1, 2, 5, 10, 10**12])), selection)


def check(asked: Asked) -> None:
    together = scan.scan(asked.segments, asked.queries, asked.k, asked.selection)
    for query, found in zip(asked.queries, together, strict=True):
        expected = asked.ranked(asked.slots, query)
        (alone,) = scan.scan(asked.segments, query[None], asked.k, asked.selection)
        for slots in (found, alone):
            assert len(set(slots.tolist())) == len(slots)
            assert asked.ranked(slots, query) == expected


def check_all(several: Iterable[Asked]) -> None:
    for asked in several:
        check(asked)


@hypothesis_settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    precision=st.sampled_from(PRECISIONS),
    style=st.sampled_from(["", "equal", "near", "whole", "zero", "lengths"]),
    sizes=st.lists(st.integers(0, 50), max_size=4),
    gone=st.sampled_from([0.0, 0.1, 0.6, 1.0]),
    share=st.sampled_from([None, 0.0, 0.05, 0.3, 1.0]),
    scores=st.sampled_from([1, 50, 1 << 24]),
    piece=st.sampled_from([1, 100, 1 << 20]),
    few=st.sampled_from([0, 1000]),
)
def test_any_blocks_any_batch_any_rows_give_the_same_answers(
    seed: int, precision: Precision, style: str, sizes: list[int], gone: float, share: float | None,
    scores: int, piece: int, few: int,
) -> None:  # fmt: skip
    with pytest.MonkeyPatch.context() as patched:
        sizes_of = {"SCORES": scores, "UNPACKED": piece, "GATHERED": piece, "FEW_GONE": few}
        for name, value in sizes_of.items():
            patched.setattr(scan, name, value)
        check(make(seed, precision, style, sizes, gone, share))


def test_the_check_would_notice_that_rounding_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "MARGIN", 0)
    monkeypatch.setattr(scan, "TIE", 0.0)
    with pytest.raises(AssertionError):
        check_all(make(seed, "float32", "near", [50, 50], 0.0, None) for seed in range(50))


def test_no_query_and_no_segment_have_no_answers() -> None:
    asked = make(0, "float32", "", [5], 0.0, None)
    assert scan.scan(asked.segments, asked.queries[:0], 3) == []
    (none,) = scan.scan([], asked.queries[:1], 3)
    assert none.tolist() == []
