"""Binary codes in PostgreSQL: the shortlist of the definition, the same answers, changes, compaction, faults."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from servers import Server
from test_index_codes import vectors

from diptych.errors import SettingsError
from diptych.index.engines.embedded.index import EmbeddedIndex
from diptych.index.engines.postgres.index import PostgresIndex
from diptych.index.engines.postgres.ranking import bit_strings
from diptych.index.protocol import Item

D, N = 64, 1200
names = itertools.count()


@pytest.fixture
def url(server: Server) -> str:
    return server.index_url(f"codes{next(names)}")


def filled(url: str, precision: Any = "float32") -> PostgresIndex:
    index = PostgresIndex.create(url, D, precision=precision)
    rows = vectors(N, 0, shift=0.4)
    index.add([Item(f"i{n}") for n in range(N)], rows)
    index.add([Item(f"t{n}", "text") for n in range(30)], vectors(30, 9))
    return index


def ask(index: PostgresIndex, statement: str) -> Any:
    return index._database.ask(lambda db: db.execute(index._tables.sql(statement)).fetchall())


def test_the_shortlist_is_that_of_the_definition(url: str) -> None:
    with filled(url) as index:
        index.build_graph("image", codes=True)
        rows = np.stack([index.vectors([f"i{n}"])[0] for n in range(50)]).astype(np.float64)
        serials = [
            serial for (serial,) in ask(index, "SELECT serial FROM {s}.items ORDER BY serial LIMIT 50")
        ]
        coder = index._database.ask(
            lambda db: index._codes._coder(db, "image", index._codes.kinds(db)["image"])
        )
        everything = index.vectors([f"i{n}" for n in range(N)]).astype(np.float64)
        assert np.allclose(coder.mean, everything.mean(0), atol=1e-6)
        assert coder.bits == 256
        turned = (rows - everything.mean(0)) @ coder.rotation.astype(np.float64)
        stored = dict(ask(index, "SELECT serial, code::text FROM {s}.codes_image"))
        assert len(stored) == N
        for serial, row in zip(serials, turned, strict=True):
            clear = np.abs(row) > 1e-4  # a number at 0 may round to either sign
            bits = np.array([one == "1" for one in stored[serial]])
            assert np.array_equal(bits[clear], (row >= 0)[clear])
        query = vectors(1, 1)[0]
        code = np.array([one == "1" for one in bit_strings(coder.code_queries(query[None]), 256)[0]])
        distances = {
            s: int((np.array([one == "1" for one in text]) != code).sum()) for s, text in stored.items()
        }
        expected = sorted(stored, key=lambda s: (distances[s], s))[:400]
        (cursor,) = index._database.ask(
            lambda db: [c.fetchall() for c in index._codes.nearest(db, "image", query[None], 400)]
        )
        assert sorted(row[0] for row in cursor) == sorted(expected)


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_the_stored_vectors_decide(url: str, tmp_path: Path, precision: Any) -> None:
    queries = vectors(20, 1, shift=0.4)
    with (
        filled(url, precision) as index,
        EmbeddedIndex.create(tmp_path / "i", D, precision=precision) as local,
    ):
        local.add([Item(f"i{n}") for n in range(N)], vectors(N, 0, shift=0.4))
        local.build_graph("image", codes=True)
        index.build_graph("image", codes=True)
        assert index.info.coded == ("image",)
        assert index.info.approximate == {"image": N}
        exact = index.search_many(queries, 10, kind="image", exact=True)
        found = index.search_many(queries, 10, kind="image")
        assert all(hits.exact for hits in exact)
        assert not any(hits.exact for hits in found)
        recall = np.mean([len(set(a.ids) & set(b.ids)) / 10 for a, b in zip(exact, found, strict=True)])
        assert recall > 0.95  # a shortlist of 400 of 1,200
        for hits, whole in zip(found, exact, strict=True):
            scores = dict(zip(whole.ids, whole.scores, strict=True))
            assert all(
                score == scores.get(id, score) for id, score in zip(hits.ids, hits.scores, strict=True)
            )
        same = [
            a.ids == b.ids for a, b in zip(found, local.search_many(queries, 10, kind="image"), strict=True)
        ]
        assert np.mean(same) > 0.8  # the mean of the embedded table is that of its first vectors
        assert index.search(queries[0], 5, kind="text").exact
        assert index.search(queries[0], 5, kind="image", filter='id = "i3"').ids == ["i3"]


def test_codes_follow_every_change_and_last(url: str) -> None:
    queries = vectors(4, 2, shift=0.4)
    with filled(url) as index:
        index.build_graph("image", codes=True)
        index.add([Item("new")], queries[:1])
        assert index.search(queries[0], 1, kind="image").ids == ["new"]
        index.update([Item("i7")], queries[1:2])
        assert index.search(queries[1], 1, kind="image").ids == ["i7"]
        index.delete(["new", *(f"i{n}" for n in range(8, 400))])
        assert "new" not in index.search(queries[0], 20, kind="image").ids
        assert ask(index, "SELECT count(*) FROM {s}.codes_image") == [(N - 392,)]
        index.compact()
        assert index.verify() == []
        assert len(index.search(queries[2], 700, kind="image")) == 700  # more than HNSW would keep
    with PostgresIndex.open(url, writable=True) as again:
        assert again.info.coded == ("image",)
        assert again.search(queries[1], 1, kind="image").ids == ["i7"]
        again._database.change(
            lambda db: db.execute(again._tables.sql("DELETE FROM {s}.codes_image WHERE serial < 6")),
            "SELECT 1",
        )
        assert "binary code: build the codes again" in again.verify()[0]


def test_codes_and_graph_replace_each_other(url: str) -> None:
    with filled(url) as index:
        index.build_graph("image")
        assert index.info.coded == ()
        index.build_graph("image", codes=True)
        assert ask(index, "SELECT to_regclass('{s}.graph_image')".replace("{s}", index._tables.schema)) == [
            (None,)
        ]
        index.build_graph("image")  # None keeps what there is
        assert index.info.coded == ("image",)
        index.build_graph("image", codes=False)
        assert index.info.coded == ()
        assert index.info.approximate == {"image": N}
        index.build_graph("image", codes=True)
        index.build_graph("image", codes=True)
        assert index.info.coded == ("image",)


def test_vectors_too_wide_for_a_graph_have_codes(url: str) -> None:
    with PostgresIndex.create(url, 2100) as index:
        rows = np.random.default_rng(0).normal(size=(20, 2100)).astype(np.float32)
        index.add([Item(str(n)) for n in range(20)], rows)
        index.build_graph("image", codes=True)
        assert index.search(rows[3], 1, kind="image").ids == ["3"]
    with pytest.raises(SettingsError, match="2100"), PostgresIndex.open(url, writable=True) as index:
        index.build_graph("image", codes=False)
