"""Milvus against a real server: the embedded engine's answers, hostile names, several writers."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
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
from milvus_server import MilvusServer

from diptych.errors import DataError, IndexFault, QueryError, SettingsError
from diptych.index.engines.embedded.index import EmbeddedIndex
from diptych.index.protocol import Item

pytest.importorskip("pymilvus")
from diptych.index.engines.milvus.index import MilvusIndex

names = itertools.count()
EVIL = [
    "'); DROP TABLE items; --", '"] or serial >= 0 or pk in ["', "a'b", 'a"b', "a\\", '\\" or 1 == 1', "[1, 2]",
    "line\nbreak", "tab\tand\r", "{}", "%", "_", "`x`", "é😀\u2028", "' or id != '", 'x"]', "\\n", "\\'", "0", " ",
]  # fmt: skip


@pytest.fixture
def url(server: MilvusServer) -> str:
    return server.url(f"test{next(names)}")


@pytest.fixture(scope="module")
def both(server: MilvusServer, tmp_path_factory: Any) -> Iterator[tuple[MilvusIndex, EmbeddedIndex]]:
    """The same items in both engines; tests leave them as they are."""
    with (
        MilvusIndex.create(server.url("both"), DIM, fingerprint="f") as remote,
        EmbeddedIndex.create(tmp_path_factory.mktemp("both") / "i", DIM) as local,
    ):
        fill(remote, local)
        yield remote, local


# ---------------------------------------------------------------------- the same answers


def test_flat_search_answers_what_the_embedded_engine_answers(both: Any) -> None:
    check_exact_search(*both)
    assert both[0].info.approximate == {}


def test_equal_scores_of_both_kinds_put_images_first(url: str, tmp_path: Path) -> None:
    with MilvusIndex.create(url, DIM) as remote, EmbeddedIndex.create(tmp_path / "i", DIM) as local:
        check_images_first(remote, local)


def test_more_ties_than_the_margin_are_decided_alike(url: str, tmp_path: Path) -> None:
    with MilvusIndex.create(url, WIDE) as remote, EmbeddedIndex.create(tmp_path / "i", WIDE) as local:
        check_many_ties(remote, local)


def test_equal_scores_keep_the_order_of_addition(both: Any) -> None:
    check_order_of_addition(both[0])


@pytest.mark.parametrize("text", FILTERS)
def test_filters_mean_the_same(both: Any, text: str) -> None:
    check_filter(*both, text)


@pytest.mark.parametrize("text", [*FILTERS_OF_LARGE_NUMBERS, "n < 0.2 and n >= -0.0", "n > -5 and n < 0.1"])
def test_large_numbers_compare_by_their_value(large: Any, text: str) -> None:
    check_large_numbers(*large, text)


@pytest.fixture(scope="module")
def large(server: MilvusServer) -> Iterator[tuple[MilvusIndex, list[Item]]]:
    values = [*LARGE_NUMBERS, -0.1, -3, -(10**30), 5e-324]
    items = [Item(str(n), metadata={"n": value}) for n, value in enumerate(values)]
    with MilvusIndex.create(server.url("large"), DIM) as index:
        index.add(items, np.ones((len(items), DIM), np.float32))
        yield index, items


def test_a_filter_agrees_with_its_definition(both: Any) -> None:
    check_filters_by_definition(both[0])


def test_samples_duplicates_and_reading_agree(both: Any) -> None:
    check_reading(*both)


def test_more_rows_than_an_answer_holds(server: MilvusServer, tmp_path: Path) -> None:
    count, dim = 20_000, 4
    rng = np.random.default_rng(7)
    vectors = rng.normal(size=(count, dim)).astype(np.float32)
    vectors[::100] = vectors[0]  # 200 ties
    color = ["red" if n % 4 else "blue" for n in range(count)]
    items = [
        Item(
            f"i{n}",
            text="rare" if n % 5000 == 4999 else "usual",
            content=str(n),
            metadata={"color": color[n]},
        )
        for n in range(count)
    ]
    with (
        MilvusIndex.create(server.url("many"), dim) as remote,
        EmbeddedIndex.create(tmp_path / "i", dim) as local,
    ):
        for index in (remote, local):
            for start in range(0, count, 5000):
                index.add(items[start : start + 5000], vectors[start : start + 5000])
        assert len(remote) == count
        assert dict(remote.contents(0)) == {item.id: item.content for item in items}
        for k in (10, 300, 12_000):  # the last is asked in two steps
            same(remote.search(vectors[0], k, kind="image"), local.search(vectors[0], k, kind="image"))
        query = -vectors[4999]  # what passes stands at the end
        for filter in ("text contains 'rare'", "not (text contains 'usual')", "text like 'r%'"):
            same(remote.search(query, 50, filter=filter), local.search(query, 50, filter=filter))
            assert len(remote.search(query, 50, filter=filter)) == 4
        sample = remote.sample("image", None, 4096)
        assert sample.shape == (4096, dim)
        np.testing.assert_array_equal(sample, remote.sample("image", None, 4096))
        assert abs(float(np.median(sample[:, 0])) - float(np.median(vectors[:, 0]))) < 0.1
        chosen = remote.sample_items("image", None, count)
        assert [item.id for item in chosen] == [item.id for item in items]
        (first, many), (second, few) = remote.values("color")
        assert (first, second) == ("red", "blue")
        assert many == pytest.approx(15_000, rel=0.05)
        assert few == pytest.approx(5_000, rel=0.1)
        assert remote.verify() == []
        assert remote.delete([f"i{n}" for n in range(0, count, 2)]) == count // 2
        assert len(remote) == count // 2
        assert len(dict(remote.contents(0))) == count // 2


# ---------------------------------------------------------------------- hostile names


def test_hostile_ids_and_filters_name_only_themselves(url: str, tmp_path: Path) -> None:
    items = [
        Item(id, text=id, path=id, metadata={id: id, "column": id, "list": [id], "n": n})
        for n, id in enumerate(EVIL)
    ]
    items += [Item(f"text of {id}", "text", image_id=id) for id in EVIL]
    vectors = np.random.default_rng(1).normal(size=(len(items), DIM)).astype(np.float32)
    with MilvusIndex.create(url, DIM) as remote, EmbeddedIndex.create(tmp_path / "i", DIM) as local:
        for index in (remote, local):
            index.add(items, vectors)
        for n, id in enumerate(EVIL):
            assert remote.get([id]) == [items[n]]
            np.testing.assert_array_equal(remote.vectors([id]), vectors[[n]])
            quoted = '"' + id.replace("\\", "\\\\").replace('"', '\\"') + '"'
            for test in (
                f"id = {quoted}", f"column = {quoted}", f"list contains {quoted}", f"path in ({quoted}, 'no')",
                f"not (column != {quoted})", f"column >= {quoted} and column <= {quoted}",
            ):  # fmt: skip
                found = remote.search(np.ones(DIM), 100, kind="image", filter=test)
                assert found.ids == [id], test
            for test in (f"column contains {quoted}", f"column > {quoted}", f"column != {quoted}"):
                same(
                    remote.search(np.ones(DIM), 100, filter=test),
                    local.search(np.ones(DIM), 100, filter=test),
                )
            if "`" not in id:
                assert remote.search(np.ones(DIM), 9, filter=f"`{id}` is not null").ids == [id]
        left = len(items)
        for id in EVIL:
            assert remote.delete([id]) == 1
            left -= 2  # with its text
            assert len(remote) == left
            assert remote.delete([id]) == 0
        assert len(remote) == 0
    assert MilvusIndex.exists(url)


# ---------------------------------------------------------------------- changing


def test_updates_are_idempotent_and_durable(url: str) -> None:
    check_updates(MilvusIndex, url)


def test_compaction_forgets_columns_of_items_that_are_gone(url: str) -> None:
    vector = np.eye(1, DIM, dtype=np.float32)
    items, vectors = collection(20)
    odd = Item("odd", metadata={"color": ["red"], "prise": 7, "empty": None, "sale": "yes"}, thumbnail=b"x")
    with MilvusIndex.create(url, DIM) as index:
        index.add(items, vectors)
        known = index.info.columns
        index.add([odd], vector)
        assert set(index.info.columns["color"]) == {"list", "text"}
        assert index.info.columns["empty"] == ()
        index.compact()
        assert index.info.columns["prise"] == ("number",)
        assert index.thumbnail("odd") == b"x"
        index.delete(["odd"])
        index.compact()
        assert index.info.columns == known
        with pytest.raises(QueryError, match="'price'"):
            index.search(vector[0], filter="prise < 5")
        assert index.verify() == []


def test_thumbnails_collections_and_files(url: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jpg").write_bytes(b"x")
    (tmp_path / "out.jpg").write_bytes(b"y")
    with MilvusIndex.create(url, 2) as index:
        where = index.collection("photos", str(tmp_path / "in"))
        assert where.number == 0
        assert index.collection("photos", str(tmp_path / "in")) == where
        assert index.collection("other").number == 1
        assert [one.name for one in index.info.collections] == ["photos", "other"]
        pictures = {
            "a.jpg": b"jpeg",
            "../out.jpg": bytes(range(256)) * 500,
            "no.jpg": None,
        }  # 128,000 bytes: 3 rows
        items = [Item(p, path=p, collection=where.number, thumbnail=data) for p, data in pictures.items()]
        index.add(items, np.eye(3, 2))
        assert {name: index.thumbnail(name) for name in pictures} == pictures
        assert index.thumbnail("absent") is None
        assert [index.file(item) for item in items] == [tmp_path / "in" / "a.jpg", None, None]
        index.update(items[1:2], np.ones((1, 2)))
        assert index.thumbnail("../out.jpg") == pictures["../out.jpg"]
        index.delete(["a.jpg", "../out.jpg"])
        assert index.thumbnail("a.jpg") is None
        assert index._meta.count('what == "picture"') == 0


def test_collections_that_move_and_end(url: str, tmp_path: Path) -> None:
    with MilvusIndex.create(url, 2) as remote, EmbeddedIndex.create(tmp_path / "i", 2) as local:
        for index in (remote, local):
            first, second = index.collection("a", "/one"), index.collection("b", "/two")
            index.add([Item("x", path="x.jpg", collection=first.number)], np.eye(1, 2))
            index.move_collection(first.number, 'a\'s "new"', "/three]")
            index.forget_collection(first.number)  # it has an item, and stays
            index.forget_collection(second.number)
            assert index.collection('a\'s "new"', "/three]").number == first.number
            assert index.collection("a", "/one").number != first.number
            roots = [(one.name, one.root) for one in index.info.collections]
            assert sorted(roots) == [("a", "/one"), ('a\'s "new"', "/three]")]
            assert dict(index.contents(first.number)) == {"x": ""}
            assert index.verify() == []


def test_several_writers_at_once_lose_nothing(url: str) -> None:
    items, vectors = collection(240)
    failures: list[BaseException] = []
    numbers: list[int] = []
    MilvusIndex.create(url, DIM).close()

    def write(part: int) -> None:
        try:
            with MilvusIndex.open(url, writable=True) as index:
                numbers.append(index.collection("the same").number)
                numbers.append(100 + index.collection(f"of {part}").number)
                for start in range(0, 240, 40):  # all write every item, in other orders
                    at = (start + 40 * part) % 240
                    index.update(items[at : at + 40], vectors[at : at + 40])
                    index.delete([f"item{at + part}"])
                    index.update(items[at : at + 40][::-1], vectors[at : at + 40][::-1])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(part,)) for part in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    with MilvusIndex.open(url) as index:
        assert sum(one.name == "the same" for one in index.info.collections) == 1
        assert sorted(one.number for one in index.info.collections) == [0, 1, 2, 3]
        assert len({number for number in numbers if number < 100}) == 1
        assert len({number for number in numbers if number >= 100}) == 3
        assert index.verify() == []
        found = index.search(vectors[0], 300).ids
        assert len(found) == len(set(found)) == len(index)
        missing = {i.id for i in items} - set(found)
        assert missing <= {i.id for i in items}  # a delete of one may come after the last write of another
        assert index.generation >= 3 * 18
    with MilvusIndex.open(url, writable=True) as index:
        index.update(items, vectors)
        assert sorted(index.search(vectors[0], 300).ids) == sorted(i.id for i in items)


# ---------------------------------------------------------------------- options


def test_an_approximate_index_answers_from_its_graph(server: MilvusServer) -> None:
    graph = "hnsw"
    items, vectors = collection(2000)
    name = f"graph{next(names)}"
    with MilvusIndex.create(server.url(name), DIM) as index:
        index.add(items, vectors)
        exact = index.search_many(vectors[:20], 10, kind="image")
        with pytest.raises(SettingsError, match="index=hnsw"):
            index.build_graph("image")
        with pytest.raises(IndexFault, match="image"):
            index.search(vectors[0], 5, kind="image", exact=False)
    with pytest.raises(SettingsError, match=f"index=flat.*{graph}"):
        MilvusIndex.open(server.url(name, f"index={graph}"))
    with MilvusIndex.open(server.url(name, f"index={graph}"), writable=True) as index:
        index.build_graph("image")
        assert index.info.approximate == {"image": 1500, "text": 500}
        index.build_graph("text")
    with MilvusIndex.open(server.url(name, f"index={graph}")) as index:
        quick = index.search_many(vectors[:20], 10, kind="image")
        assert not quick[0].exact
        assert index.info.recall.keys() == {"image", "text"}
        assert index.info.recall["image"].value > 0.95
        found = sum(len(set(a.ids) & set(b.ids)) for a, b in zip(exact, quick, strict=True))
        assert found >= 0.95 * 200
        assert len(index.search(vectors[0], 10, kind="image", filter="price = 5")) == 10
        for a, b in zip(exact, index.search_many(vectors[:20], 10, kind="image", exact=True), strict=True):
            same(a, b)
            assert b.exact
        some = index.search(vectors[0], 10, filter="note contains 'b'", exact=True)
        assert some.exact
        assert all("b" in hit.item.metadata["note"].lower() for hit in some)


def test_a_server_without_diskann_says_so(server: MilvusServer) -> None:
    url = server.url(f"disk{next(names)}")
    with pytest.raises(SettingsError, match=r"2\.3\.5-lite.*index=hnsw"):
        MilvusIndex.create(f"{url}?index=diskann", DIM)
    assert not MilvusIndex.exists(url)
    items, vectors = collection(20)
    with MilvusIndex.create(url, DIM) as index:
        index.add(items, vectors)
    with MilvusIndex.open(f"{url}?index=diskann", writable=True) as index:
        with pytest.raises(SettingsError, match="DiskANN"):
            index.build_graph("image")
        assert index.search(vectors[0], 20).exact  # as it was


def test_partitions_divide_by_a_column(server: MilvusServer, tmp_path: Path) -> None:
    items, vectors = collection(300)
    url = server.url(f"parts{next(names)}", "partitions=8&partition_by=color")
    with MilvusIndex.create(url, DIM) as remote, EmbeddedIndex.create(tmp_path / "i", DIM) as local:
        for index in (remote, local):
            index.add(items, vectors)
        for text in (
            "color = 'red'",
            "color in ('red', 'blue') and price < 50",
            "color != 'red'",
            "price < 50",
        ):
            same(remote.search(vectors[0], 400, filter=text), local.search(vectors[0], 400, filter=text))
        moved = [
            Item(f"item{n}", metadata={"color": "blue", "price": n}) for n in range(40)
        ]  # into another part
        for index in (remote, local):
            index.update(moved, vectors[:40])
        assert len(remote) == len(local)
        for text in ("color = 'red'", "color = 'blue'", "price >= 0"):
            same(remote.search(vectors[0], 400, filter=text), local.search(vectors[0], 400, filter=text))
        assert remote.delete(["item1"]) == 1
        assert remote.get(["item1"]) == [None]
        assert remote.verify() == []
    with pytest.raises(SettingsError, match=r"partitions=8.*partitions=4"):
        MilvusIndex.open(url.replace("partitions=8", "partitions=4"))
    with MilvusIndex.open(url.partition("?")[0]) as again:
        assert len(again) == len(items) - 1


@pytest.mark.parametrize("level", ["strong", "session", "bounded", "eventually"])
def test_consistency_is_an_option(server: MilvusServer, level: str) -> None:
    items, vectors = collection(10)
    name = f"level{next(names)}"
    with MilvusIndex.create(server.url(name, f"consistency={level}"), DIM) as index:
        index.add(items, vectors)
        assert index._items.level.lower() == level
        assert len(index.search(vectors[0], 10)) == 10 or level in ("bounded", "eventually")


def test_replicas_that_a_server_cannot_hold_are_refused(server: MilvusServer) -> None:
    name = f"copies{next(names)}"
    with pytest.raises(SettingsError, match="replicas=2"):
        MilvusIndex.create(server.url(name, "replicas=2"), DIM)
    assert not MilvusIndex.exists(server.url(name))
    MilvusIndex.create(server.url(name, "replicas=1"), DIM).close()
    with pytest.raises(SettingsError, match=r"\b1\b.*\b2\b"):
        MilvusIndex.open(server.url(name, "replicas=2"))


# ---------------------------------------------------------------------- bad input


def test_another_model_is_refused_by_name(url: str) -> None:
    check_models(MilvusIndex, url)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda i: i.search(np.ones(DIM), 0), SettingsError, r"\b0\b"),
        (
            lambda i: i.search(np.ones(DIM), 20_000),
            SettingsError,
            r"16,352.*20,000",
        ),
        (lambda i: i.search(np.ones(3)), IndexFault, rf"\b{DIM}\b"),
        (lambda i: i.search(np.full(DIM, np.nan)), DataError, "NaN"),
        (lambda i: i.search(np.ones(DIM), filter="prize < 3"), QueryError, "'price'"),
        (lambda i: i.vectors(["nothing"]), QueryError, "'nothing'"),
        (lambda i: i.add([Item("a\x00b")], np.ones((1, DIM))), DataError, "NUL"),
        (lambda i: i.add([Item("a", text="\ud800")], np.ones((1, DIM))), DataError, "'a'"),
        (
            lambda i: i.add([Item("a", text="x" * 70_000)], np.ones((1, DIM))),
            DataError,
            "65,535",
        ),
        (lambda i: i.add([Item("")], np.ones((1, DIM))), DataError, "unique"),
        (lambda i: i.search_words("red"), SettingsError, r"2\.3\.5.*2\.5"),
        (lambda i: i.build_graph(codes=True), SettingsError, "no binary codes"),
    ],
)
def test_bad_input_is_one_sentence(both: Any, make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(both[0])
    assert len(both[0]) == len(both[1])


def test_urls_that_lead_nowhere(server: MilvusServer, url: str) -> None:
    with pytest.raises(IndexFault):
        MilvusIndex.open(url)
    assert not MilvusIndex.exists(url)
    with pytest.raises(SettingsError, match="32768"):
        MilvusIndex.create(url, 0)
    with pytest.raises(SettingsError, match="'float16'"):
        MilvusIndex.create(url, 8, precision="float16")


def test_other_collections_of_the_server_are_left_alone(server: MilvusServer) -> None:
    from pymilvus import MilvusClient

    client = MilvusClient(f"http://{server.address}", timeout=30)
    client.create_collection("theirs", dimension=4)
    for attempt in (MilvusIndex.open, lambda url: MilvusIndex.create(url, 4)):
        with pytest.raises(IndexFault, match="theirs"):
            attempt(server.url("theirs"))
    client.drop_collection("theirs")
    with MilvusIndex.create(server.url("half"), 4) as index:
        client.drop_collection(index._meta.name)
    with pytest.raises(IndexFault, match="half_facts"):
        MilvusIndex.open(server.url("half"))
    client.close()
