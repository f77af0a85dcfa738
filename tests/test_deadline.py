"""Every request has so many seconds, and nothing is held while it takes them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from colours import ColourModel, make_index
from fastapi.testclient import TestClient

from diptych import databases
from diptych.errors import Unavailable
from diptych.index import deadline
from diptych.index.engines.embedded.index import EmbeddedIndex
from diptych.index.protocol import Item
from diptych.index.query import filters
from diptych.web.app import create_app
from diptych.web.batching import Batcher, Traffic
from diptych.web.limits import Limits


def test_work_without_a_limit_is_never_late() -> None:
    deadline.check()
    assert deadline.current() is None


def test_the_nearer_of_two_deadlines_counts() -> None:
    with deadline.within(0.01) as outer, deadline.within(5) as inner:
        assert inner is outer
        time.sleep(0.02)
        with pytest.raises(Unavailable, match=r"0\.01"):
            deadline.check()


def slow(seconds: float) -> Callable[[str], Callable[[str], bool]]:
    def fits(value: str) -> bool:
        time.sleep(seconds)
        return True

    return lambda pattern: fits


@pytest.fixture
def index(tmp_path: Path) -> EmbeddedIndex:
    return make_index(tmp_path, ColourModel())


def test_a_slow_filter_is_given_up_and_delays_nobody(
    index: EmbeddedIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filters, "like_test", slow(0.05))
    app = create_app(index, ColourModel(), limits=Limits(seconds=1))
    with index, TestClient(app) as client, ThreadPoolExecutor(4) as pool:
        ask = {"text": "red", "filter": 'id like "%red%" and text like "a%"'}
        start = time.monotonic()
        late = [pool.submit(client.get, "/api/search", params=ask) for _ in range(3)]
        time.sleep(0.2)
        began = time.monotonic()
        assert client.get("/api/search", params={"text": "red"}).status_code == 200
        assert client.get("/api/browse", params={"filter": "price < 9"}).status_code == 200  # no lock is held
        assert time.monotonic() - began < 1
        for one in late:
            assert one.result().status_code == 503
            assert "more than 1 seconds" in one.result().json()["error"]
        assert time.monotonic() - start < 4


def test_a_column_that_takes_long_to_read_is_read_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diptych.index.engines.embedded.columns.PIECE", 10)
    with EmbeddedIndex.create(tmp_path / "index", 2) as index:
        index.add([Item(f"i{n}", metadata={"n": n}) for n in range(100)], np.ones((100, 2)))
        tries, passing = 0, [False, True] * 50

        def check() -> None:
            if passing.pop():
                raise Unavailable("late")

        monkeypatch.setattr(deadline, "check", check)
        while True:
            tries += 1
            try:
                hits = index.search(np.ones(2), 5, filter="n >= 97")
                break
            except Unavailable:
                pass
        assert tries > 3
        assert {hit.item.id for hit in hits} == {"i97", "i98", "i99"}


def test_sqlite_is_interrupted(index: EmbeddedIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    # or the steps of a sound catalog are over before the time
    monkeypatch.setattr(databases, "STEPS_ALLOWED", 10**12)
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"
    with index, deadline.within(0.3), pytest.raises(Unavailable, match=r"0\.3"):
        index._read(lambda state, db: db.execute(endless).fetchone())
    with EmbeddedIndex(index.path) as again:
        assert again.count("image") == 60


def test_a_request_does_not_outlive_its_batch() -> None:
    over = threading.Event()
    batcher = Batcher(lambda key, values: [over.wait(20) for _ in values], Traffic())
    start = time.monotonic()
    with deadline.within(0.2), pytest.raises(Unavailable):
        batcher("a", 1)
    assert time.monotonic() - start < 2
    batcher.close(patience=0.1)  # returns although the thread is busy
    over.set()


def test_stopping_ends_what_runs() -> None:
    stopped = threading.Event()
    with deadline.within(60, stopped):
        deadline.check()
        stopped.set()
        with pytest.raises(Unavailable):
            deadline.check()
