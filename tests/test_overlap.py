"""The index is written while the model computes: order, bounds, errors."""

from __future__ import annotations

import threading
import time

import pytest

from diptych.errors import DataError
from diptych.index.ingest.pipeline import Overlap, decoders


class Log:
    """What happened, and in which thread."""

    def __init__(self, fail: int | None = None, slow: float = 0.0) -> None:
        self.events: list[tuple[str, list[int]]] = []
        self.threads: dict[str, set[int]] = {}
        self.fail, self.slow = fail, slow

    def note(self, what: str, works: list[int]) -> None:
        self.events.append((what, list(works)))
        self.threads.setdefault(what, set()).add(threading.get_ident())

    def encode(self, works: list[int]) -> None:
        time.sleep(self.slow)
        if self.fail in works:
            raise DataError("the model cannot read it.")
        self.note("encode", works)

    def finish(self, works: list[int]) -> int:
        self.note("finish", works)
        return sum(works)

    def commit(self, works: list[int], total: int) -> None:
        assert total == sum(works)
        self.note("commit", works)


def run(log: Log, chunks: list[list[list[int]]]) -> None:
    with Overlap(log.encode, log.finish, log.commit) as overlap:
        for chunk in chunks:
            for batch in chunk:
                overlap.encode(batch)
            overlap.close_chunk([work for batch in chunk for work in batch])
        overlap.commit()


def test_chunks_are_committed_in_order_by_the_caller() -> None:
    log = Log()
    run(log, [[[1, 2], [3]], [[4]], [[], [5]], [[]]])
    commits = [works for what, works in log.events if what == "commit"]
    assert commits == [[1, 2, 3], [4], [5], []]
    assert log.threads["commit"] == {threading.get_ident()}
    assert log.threads["encode"] == log.threads["finish"]
    assert threading.get_ident() not in log.threads["encode"]
    for work in range(1, 6):  # encoded, then finished, then committed
        kinds = [what for what, works in log.events if work in works]
        assert kinds == ["encode", "finish", "commit"]


def test_a_chunk_is_committed_while_the_next_is_encoded() -> None:
    log = Log(slow=0.05)
    run(log, [[[1]], [[2]], [[3]]])
    order = [(what, works[0]) for what, works in log.events]
    assert order.index(("commit", 1)) < order.index(("encode", 3))


def test_one_batch_is_under_way_at_a_time() -> None:
    log = Log(slow=0.03)
    with Overlap(log.encode, log.finish, log.commit) as overlap:
        overlap.encode([1])
        began = time.perf_counter()
        overlap.encode([2])  # waits for the first
        assert time.perf_counter() - began > 0.01
        assert ("encode", [1]) in log.events
        overlap.close_chunk([1, 2])
        overlap.commit()


def test_an_error_is_raised_before_its_chunk_is_committed() -> None:
    log = Log(fail=3)
    with pytest.raises(DataError):
        run(log, [[[1]], [[2], [3]], [[4]]])
    assert [works for what, works in log.events if what == "commit"] in ([[1]], [])


def test_what_is_ready_is_committed_without_waiting() -> None:
    log = Log()
    with Overlap(log.encode, log.finish, log.commit) as overlap:
        overlap.commit_if_ready()
        overlap.encode([1])
        overlap.close_chunk([1])
        for _ in range(200):
            overlap.commit_if_ready()
            if log.threads.get("commit"):
                break
            time.sleep(0.005)
        assert log.events[-1] == ("commit", [1])


def test_frames_of_a_video_are_read_by_one_thread() -> None:
    class Frames:
        sequential = True

    assert decoders(Frames()) == 1
    assert decoders([]) >= 1
