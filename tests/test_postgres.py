"""PostgreSQL against a real server: the embedded engine's answers, two writers, a server that goes away."""

from __future__ import annotations

import itertools
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import psycopg.conninfo
import pytest
from engine_contract import (
    DIM,
    FILTERS,
    FILTERS_OF_LARGE_NUMBERS,
    LARGE_NUMBERS,
    WIDE,
    check_exact_search,
    check_filter,
    check_filters_by_definition,
    check_images_first,
    check_large_numbers,
    check_many_ties,
    check_models,
    check_order_of_addition,
    check_reading,
    check_updates,
    collection,
    fill,
    same,
)
from servers import Server

from diptych import progress
from diptych.errors import DataError, IndexFault, QueryError, SettingsError, StorageError, Unavailable
from diptych.index.engines.embedded.index import EmbeddedIndex
from diptych.index.engines.opening import without_password
from diptych.index.engines.postgres import database
from diptych.index.engines.postgres.index import LEAST_EF, PostgresIndex
from diptych.index.protocol import Item

names = itertools.count()


@pytest.fixture
def url(server: Server) -> str:
    return server.index_url(f"test{next(names)}")


@pytest.fixture
def both(url: str, tmp_path: Path) -> Iterator[tuple[PostgresIndex, EmbeddedIndex]]:
    with (
        PostgresIndex.create(url, DIM, fingerprint="f") as remote,
        EmbeddedIndex.create(tmp_path / "i", DIM) as local,
    ):
        fill(remote, local)
        yield remote, local


def execute(index: PostgresIndex, statement: str) -> None:
    index._database.change(lambda db: db.execute(statement), "SELECT 1")


# ---------------------------------------------------------------------- the same answers


def test_exact_search_answers_what_the_embedded_engine_answers(both: Any) -> None:
    check_exact_search(*both)


def test_equal_scores_of_both_kinds_put_images_first(url: str, tmp_path: Path) -> None:
    with PostgresIndex.create(url, DIM) as remote, EmbeddedIndex.create(tmp_path / "i", DIM) as local:
        check_images_first(remote, local)
        for k in (1, 7, 35, 100):
            assert remote.search_words("red", k).ids == local.search_words("red", k).ids
        assert local.search_words("red", 60).ids == local.search(np.eye(1, DIM)[0], 60).ids


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_more_ties_than_the_margin_are_decided_alike(url: str, tmp_path: Path, precision: Any) -> None:
    with (
        PostgresIndex.create(url, WIDE, precision=precision) as remote,
        EmbeddedIndex.create(tmp_path / "i", WIDE, precision=precision) as local,
    ):
        check_many_ties(remote, local)


def test_equal_scores_keep_the_order_of_addition(both: Any) -> None:
    check_order_of_addition(both[0])


@pytest.mark.parametrize("text", FILTERS)
def test_filters_are_pushed_down_and_mean_the_same(both: Any, text: str) -> None:
    check_filter(*both, text)


@pytest.mark.parametrize("text", FILTERS_OF_LARGE_NUMBERS)
def test_large_numbers_compare_by_their_value(url: str, tmp_path: Path, text: str) -> None:
    items = [Item(str(n), metadata={"n": value}) for n, value in enumerate(LARGE_NUMBERS)]
    with PostgresIndex.create(url, DIM) as remote, EmbeddedIndex.create(tmp_path / "i", DIM) as local:
        for index in (remote, local):
            index.add(items, np.ones((len(items), DIM), np.float32))
            check_large_numbers(index, items, text)


def test_a_filter_agrees_with_its_definition(both: Any) -> None:
    check_filters_by_definition(both[0])


def test_full_text_is_the_same_bm25(both: Any) -> None:
    remote, local = both
    for text in (
        "red shoes",
        "running",
        "dog dogs café",
        "CAFE",
        "日本語 straße",
        "cafe\N{COMBINING ACUTE ACCENT}",
        "foo_bar",
        "_ red_shoe __",
        "nothing like this",
        '"; DROP',
        "red",
    ):
        for kind in ("image", "text"):
            for filter in (None, "price < 50"):
                a = remote.search_words(text, 20, kind=kind, filter=filter)
                b = local.search_words(text, 20, kind=kind, filter=filter)
                assert a.ids == b.ids, text
                assert a.scores == pytest.approx(b.scores, rel=1e-9)


def test_common_words_are_left_out_alike(url: str, tmp_path: Path) -> None:
    texts = [f"the {'dog' if n % 7 else 'cat'} number{n % 50}" for n in range(1300)]
    items = [Item(str(n), text=text) for n, text in enumerate(texts)]
    with PostgresIndex.create(url, 1) as remote, EmbeddedIndex.create(tmp_path / "i", 1) as local:
        for index in (remote, local):
            index.add(items, np.ones((len(items), 1)))
        for text in ("the", "the dog", "the cat", "the number7", "the dog zebra", "the number7 cat"):
            a, b = remote.search_words(text, 30, kind="image"), local.search_words(text, 30, kind="image")
            assert a.scores == pytest.approx(b.scores, rel=1e-9), text
            assert a.ids == b.ids, text


def test_samples_duplicates_and_reading_agree(both: Any) -> None:
    check_reading(*both)


def test_compaction_forgets_columns_of_items_that_are_gone(
    both: tuple[PostgresIndex, EmbeddedIndex],
) -> None:
    vector = np.eye(1, DIM, dtype=np.float32)
    odd = Item("odd", metadata={"color": ["red"], "prise": 7, "empty": None, "sale": "yes", "ratio": 0.5})
    for index in both:
        index.add([odd], vector)
    known = [index.info.columns for index in both]
    assert known[0] == known[1]
    assert set(known[0]["color"]) == {"list", "text"}
    for index in both:
        index.compact()
    assert [index.info.columns for index in both] == known  # all are there: nothing to forget
    for index in both:
        index.delete(["odd"])
        index.compact()
        columns = index.info.columns
        assert columns["color"] == ("text",)
        assert not {"prise", "empty", "ratio"} & set(columns)
        with pytest.raises(QueryError, match="prise"):
            index.search(vector[0], filter="prise < 5")


def test_half_precision_answers_like_the_embedded_engine(url: str, tmp_path: Path) -> None:
    items, vectors = collection()
    with (
        PostgresIndex.create(url, DIM, precision="float16") as remote,
        EmbeddedIndex.create(tmp_path / "i", DIM, precision="float16") as local,
    ):
        remote.add(items, vectors)
        local.add(items, vectors)
        for query in collection(10, seed=3)[1]:
            same(remote.search(query, 20, kind="image"), local.search(query, 20, kind="image"))
        remote.build_graph("image")
        assert not remote.search(vectors[3], 5, kind="image").exact
        assert remote.info.recall["image"].value > 0.9
        remote.build_graph("image", target_recall=0.95)
        assert remote.info.recall["image"].value >= 0.95
        assert remote.recall("image") == remote.info.recall["image"]
        with pytest.raises(SettingsError, match="float16"):
            remote.update(items[:1], np.full((1, DIM), 1e6))


def test_an_approximate_index_answers_what_is_not_filtered(url: str) -> None:
    items, vectors = collection(2000)
    with PostgresIndex.create(url, DIM) as index:
        index.add(items, vectors)
        index.build_graph("image")
        assert index.info.approximate == {"image": 1500}
        queries, found = collection(20, seed=4)[1], 0
        for query in queries:
            exact, quick = (
                index.search(query, 10, kind="image", exact=True),
                index.search(query, 10, kind="image"),
            )
            assert exact.exact
            assert not quick.exact
            found += len(set(exact.ids) & set(quick.ids))
        assert found >= 0.95 * 200
        rare = index.search(queries[0], 10, kind="image", filter="price = 5")
        assert rare.exact
        assert len(rare) == 10
        index.delete([items[0].id])
        assert items[0].id not in index.search(vectors[0], 10, kind="image").ids
        assert index.search(queries[0], 1000, kind="image").exact  # beyond what HNSW can rank
        with pytest.raises(IndexFault, match="postgresql://"):
            index.search(queries[0], 5, kind="text", exact=False)


# ---------------------------------------------------------------------- changing


def test_removed_items_do_not_crowd_out_the_rest(url: str) -> None:
    rng, count = np.random.default_rng(3), 4 * LEAST_EF
    vectors = rng.normal(size=(count, DIM)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    with PostgresIndex.create(url, DIM) as index:
        execute(index, f"ALTER TABLE {index._database.index}.vectors SET (autovacuum_enabled = off)")
        index.add([Item(f"i{n}", "image") for n in range(count)], vectors)
        index.build_graph("image")
        nearest = index.search(vectors[0], LEAST_EF + 50, kind="image", exact=True).ids
        index.delete(nearest)
        alike, far = index.search_many(np.stack([vectors[0], -vectors[0]]), 10, kind="image")
        same(alike, index.search(vectors[0], 10, kind="image", exact=True))
        assert len(alike) == len(far) == 10
        assert alike.exact
        assert not far.exact  # only what came up short is asked again
        index.delete([f"i{n}" for n in range(count) if f"i{n}" not in alike.ids[:3]])
        assert set(index.search(vectors[0], 10, kind="image").ids) == set(alike.ids[:3])


def test_updates_are_idempotent_and_durable(url: str) -> None:
    check_updates(PostgresIndex, url)


def test_thumbnails_collections_and_files(url: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jpg").write_bytes(b"x")
    (tmp_path / "out.jpg").write_bytes(b"y")
    (tmp_path / "in" / "link.jpg").symlink_to(tmp_path / "out.jpg")
    with PostgresIndex.create(url, 2) as index:
        where = index.collection("photos", str(tmp_path / "in"))
        assert index.collection("photos", str(tmp_path / "in")) == where
        assert index.collection("other").number == where.number + 1
        items = [
            Item(p, path=p, collection=where.number, thumbnail=b"jpeg")
            for p in ("a.jpg", "../out.jpg", "link.jpg", "no.jpg")
        ]
        index.add(items, np.eye(4, 2))
        assert index.thumbnail("a.jpg") == b"jpeg"
        assert index.thumbnail("a\x00") is None
        files = [index.file(item) for item in items]
        assert files == [tmp_path / "in" / "a.jpg", None, None, None]
        index.delete(["a.jpg"])
        assert index.thumbnail("a.jpg") is None


def test_two_writers_at_once_lose_nothing(url: str) -> None:
    items, vectors = collection(240)
    PostgresIndex.create(url, DIM).close()
    failures: list[BaseException] = []

    def write(part: int) -> None:
        try:
            with PostgresIndex.open(url, writable=True) as index:
                for start in range(0, 240, 20):  # both write every item, in opposite orders
                    at = start if part == 0 else 220 - start
                    index.update(items[at : at + 20], vectors[at : at + 20])
                    index.delete([f"item{at + part}"])
                    index.update(items[at : at + 20][::-1], vectors[at : at + 20][::-1])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(part,)) for part in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    with PostgresIndex.open(url) as index:
        assert len(index) == 240
        assert index.verify() == []
        assert index.generation == 72
        assert sorted(index.search(vectors[0], 300).ids) == sorted(i.id for i in items)


def test_a_writer_behind_a_long_change_gives_up(
    server: Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "TURN", 300)
    items, vectors = collection(60)
    with PostgresIndex.create(url, DIM) as index, psycopg.connect(server.url) as other:
        index.add(items, vectors)
        other.execute(index._tables.take_turn)
        index._tables.build_graph(other, "image")  # a graph being built, as everybody else sees it
        for change in (
            lambda: index.update(items[:1], vectors[:1]),
            lambda: index.delete(["item1"]),
            lambda: index.build_graph("image"),
        ):
            with pytest.raises(Unavailable, match="postgresql://"):
                change()
        assert index.search(vectors[0], 1, kind="image").exact  # readers do not wait
        other.commit()
        assert index.delete(["item1"]) == 1
        assert not index.search(vectors[0], 1, kind="image").exact


@contextmanager
def holding(server: Server, *statements: str) -> Iterator[psycopg.Connection[Any]]:
    """Another connection in the middle of a transaction; let go after 20 s, so that a test fails and does not hang."""
    with psycopg.connect(server.url) as other:
        let_go = threading.Timer(20, other.rollback)
        let_go.start()
        try:
            for statement in statements:
                other.execute(statement)
            yield other
        finally:
            let_go.cancel()


def test_readers_of_a_table_that_is_being_rewritten_give_up(
    server: Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "READ_TURN", 200)
    items, vectors = collection(20)
    with PostgresIndex.create(url, DIM) as index:
        index.add(items, vectors)
        before = index.search(vectors[0], 5).ids
        for table in ("items", "vectors"):  # as VACUUM FULL locks one after the other
            lock = f"LOCK TABLE {index._tables.schema}.{table} IN ACCESS EXCLUSIVE MODE"
            with holding(server, lock) as other:
                for request in (lambda: index.search(vectors[0]), lambda: index.info, index.verify):
                    start = time.monotonic()
                    with pytest.raises(Unavailable, match="postgresql://"):
                        request()
                    assert time.monotonic() - start < 5
                other.rollback()
                assert index.search(vectors[0], 5).ids == before


def test_a_compaction_behind_a_long_reader_gives_up(
    server: Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert database.COMPACT_TURN < database.READ_TURN  # or readers that come meanwhile would give up first
    monkeypatch.setattr(database, "COMPACT_TURN", 500)
    items, vectors = collection(20)
    with PostgresIndex.create(url, DIM) as index:
        index.add(items, vectors)
        with holding(server, f"SELECT count(*) FROM {index._tables.schema}.vectors") as other:
            refusal: list[str] = []

            def compact() -> None:
                with pytest.raises(Unavailable) as caught:
                    index.compact()
                refusal.append(str(caught.value))

            thread = threading.Thread(target=compact)
            thread.start()
            while thread.is_alive():
                assert len(index.search(vectors[0], 5)) == 5  # sooner or later behind the compaction
            thread.join()
            assert "0.5 s" in refusal[0]
            other.rollback()
        assert index.compact() >= 0
        assert index.verify() == []


def test_a_request_that_nobody_acknowledges_is_given_up(server: Server, url: str) -> None:
    PostgresIndex.create(url, DIM).close()
    with server.on_tcp() as address, PostgresIndex.open(f"{address}?{url.rpartition('&')[2]}") as index:

        def patience(db: Any) -> int:
            with socket.socket(fileno=os.dup(db.fileno())) as connection:
                return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)

        assert index._database.ask(patience) == 10_000  # milliseconds; 0 would be the system's 15 minutes


def test_compaction_gives_space_back(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0)
    items, vectors = collection(2000)
    with PostgresIndex.create(url, DIM) as index:
        index.add(items, vectors)
        index.delete([item.id for item in items[100:]])
        before = index.search(vectors[0], 10).ids
        assert index.compact(show_progress=True) > 0
        assert "tables: 4/4" in capsys.readouterr().err
        assert index.search(vectors[0], 10).ids == before
        assert index.verify(show_progress=True) == []
        assert "thousands of items: 1/1" in capsys.readouterr().err


def test_verify_tells_what_is_wrong(url: str) -> None:
    items, vectors = collection(5)
    with PostgresIndex.create(url, DIM) as index:
        index.add(items, vectors)
        s = index._tables.schema
        execute(
            index, f"UPDATE {s}.vectors SET vector = (vector::real[] || '{{1}}')[2:]::vector WHERE serial = 2"
        )
        execute(index, f"DELETE FROM {s}.vectors WHERE serial = 3")
        execute(index, f"DELETE FROM {s}.items WHERE serial = 4")
        faults = "\n".join(index.verify())
        assert "the vector of 'item1' differs from its checksum" in faults
        assert "'item2' has no vector" in faults
        assert "of the table vectors belong to no item" in faults
        assert "not as many" in faults


# ---------------------------------------------------------------------- bad input


def test_another_model_is_refused_by_name(url: str) -> None:
    check_models(PostgresIndex, url)
    assert PostgresIndex.exists(url)


@pytest.mark.parametrize(
    ("loss", "table"),
    [
        ("DROP TABLE {s}.postings", "postings"),
        ("DROP TABLE {s}.totals", "totals"),
        ("TRUNCATE {s}.vectors", "vectors"),
        ("TRUNCATE {s}.items", "items"),
        ("TRUNCATE {s}.meta", "meta"),
    ],
)
def test_an_index_restored_in_part_is_refused(url: str, loss: str, table: str) -> None:
    items, vectors = collection(3)
    with PostgresIndex.create(url, DIM) as index:
        index.add(items, vectors)
        execute(index, loss.format(s=index._tables.schema))
    with pytest.raises(IndexFault, match=rf"\b{table}\b"):
        PostgresIndex.open(url)


def test_an_index_of_another_format_is_refused(url: str) -> None:
    with PostgresIndex.create(url, DIM) as index:
        execute(index, f"UPDATE {index._tables.schema}.meta SET value = '99' WHERE key = 'format'")
    with pytest.raises(IndexFault, match=r"\b99\b.*\b1\b"):
        PostgresIndex.open(url)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda i: i.search(np.ones(DIM), 0),
            SettingsError,
            r"\b1\b.*\b0\b",
        ),
        (
            lambda i: i.search_words("red", 0),
            SettingsError,
            r"\b1\b.*\b0\b",
        ),
        (lambda i: i.search(np.ones(3)), IndexFault, rf"\b{DIM}\b"),
        (lambda i: i.search(np.full(DIM, np.nan)), DataError, "NaN"),
        (lambda i: i.search(np.ones(DIM), filter="prize < 3"), QueryError, "price"),
        (lambda i: i.search(np.ones(DIM), filter="price < "), QueryError, r"\b9\b"),
        (lambda i: i.vectors(["nothing"]), QueryError, "nothing"),
        (lambda i: i.add([Item("a\x00b")], np.ones((1, DIM))), DataError, "NUL"),
        (lambda i: i.add([Item("a", text="\ud800")], np.ones((1, DIM))), DataError, "'a'"),
        (lambda i: i.add([Item("a", metadata={"x": "\x00"})], np.ones((1, DIM))), DataError, "NUL"),
        (lambda i: i.add([Item("a" * 3000)], np.ones((1, DIM))), DataError, "2000"),
        (lambda i: i.add([Item("")], np.ones((1, DIM))), DataError, "unique"),
        (lambda i: i.add([Item("a"), Item("a")], np.ones((2, DIM))), DataError, "unique"),
        (lambda i: i.add([Item("a")], np.ones((2, DIM))), DataError, r"\b1\b"),
    ],
)
def test_bad_input_is_one_sentence(both: Any, make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(both[0])
    assert len(both[0]) == len(both[1])


def test_an_index_may_be_called_by_a_word_of_sql(server: Server) -> None:
    items, vectors = collection(3)
    with PostgresIndex.create(server.index_url("user"), DIM) as index:
        index.add(items, vectors)
        assert index.search(vectors[0], 1).ids == [items[0].id]
        index.build_graph()
        index.compact()
        assert index.verify() == []
        assert index.info.approximate == {"image": index.count("image")}


def test_urls_that_lead_nowhere(server: Server, url: str) -> None:
    with pytest.raises(IndexFault, match="postgresql://"):
        PostgresIndex.open(url)
    assert not PostgresIndex.exists(url)
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1") as caught:
        PostgresIndex.open("postgresql://me:secret@127.0.0.1:1/none")
    assert "secret" not in str(caught.value)
    for name in ("a;drop", "pg_mine"):
        with pytest.raises(SettingsError, match="lower-case"):
            PostgresIndex.open(server.index_url(name))
    with pytest.raises(IndexFault, match="index=public"):
        PostgresIndex.create(server.index_url("public"), 8)
    with pytest.raises(SettingsError, match=r"\b1\b.*16000"):
        PostgresIndex.create(url, 0)
    with pytest.raises(SettingsError, match="binary"):
        PostgresIndex.create(url, 8, precision="binary")


@pytest.mark.parametrize(
    ("url", "label"),
    [
        ("postgresql://me:pa#ss@host/db", "postgresql://host/db?index=diptych"),
        ("postgres://me:pa?ss@host:1234/db?index=x&sslmode=prefer", "postgresql://host:1234/db?index=x"),
        ("postgresql://me:pa[ss@[::1]/db?password=pass", "postgresql://[::1]/db?index=diptych"),
        (
            "postgresql:///db?user=me%40there&host=/run/pg&index=x&password=pass",
            "postgresql:///run/pg/db?index=x",
        ),
    ],
)
def test_an_address_is_named_without_its_password(url: str, label: str) -> None:
    made = database.Database(url)
    assert made.label == label
    asked = psycopg.conninfo.conninfo_to_dict(made._url)
    assert str(asked["password"]).startswith("pa")
    assert str(asked["password"]).endswith("ss")
    assert re.search("pa.?ss(?!word)", without_password(url)) is None
    assert psycopg.conninfo.conninfo_to_dict(without_password(made._url))["user"] == asked["user"]


@pytest.mark.parametrize("password", ["pa/ss", "1/ss", "pa@ss", "p%ss", "pa/ss?index=ss"])
def test_a_password_that_must_be_escaped_is_not_taken_for_a_host(password: str) -> None:
    with pytest.raises(SettingsError, match=r"user:password.*host:port/database.*2F") as caught:
        database.Database(f"postgresql://me:{password}@host/db")
    assert "ss" not in str(caught.value).replace("password", "")


def test_sql_in_texts_ids_and_filters_stays_text(both: Any) -> None:
    remote, local = both
    evil = "'); DROP SCHEMA public CASCADE; --"
    for index in both:
        index.update([Item(evil, text=evil, metadata={evil: evil, "%s": "%(f0)s {s}"})], np.ones((1, DIM)))
    assert remote.get([evil]) == local.get([evil])
    for filter in (f'`{evil}` = "{evil}"', '`%s` like "%(f0)s%"', f'id = "{evil}"', '`%s` contains "{s}"'):
        assert remote.search(np.ones(DIM), filter=filter).ids == [evil]
    assert remote.search_words(evil, 3, kind="image").ids[0] == evil
    assert remote.delete([evil]) == 1


def test_a_role_that_may_not_write_is_told_so(server: Server, url: str) -> None:
    items, vectors = collection(3)
    with PostgresIndex.create(url, DIM) as index:
        index.add(items, vectors)
        s = index._tables.schema
        execute(index, f"CREATE ROLE reader LOGIN; GRANT USAGE ON SCHEMA {s} TO reader")
        execute(index, f"GRANT SELECT ON ALL TABLES IN SCHEMA {s} TO reader")
    with PostgresIndex.open(url.replace("postgres:@", "reader:@"), writable=True) as limited:
        assert len(limited.search(vectors[0])) == 3
        with pytest.raises(StorageError, match="postgresql://"):
            limited.delete(["item0"])


# last: it stops the server
def test_a_database_that_goes_away_comes_back(server: Server, url: str) -> None:
    items, vectors = collection(30)
    with PostgresIndex.create(url, DIM) as index:
        index.add(items, vectors)
        before = index.search(vectors[0], 5).ids
        server.stop()
        for request in (
            lambda: index.search(vectors[0]),
            lambda: index.delete(["item1"]),
            lambda: index.info,
        ):
            with pytest.raises(Unavailable, match="postgresql://"):
                request()
        server.start()
        assert index.search(vectors[0], 5).ids == before
        server.stop()
        server.start()  # every kept connection is dead now: each request notices and opens a new one
        index.update(items[:1], vectors[:1])
        assert len(index) == 30
        assert index.verify() == []
