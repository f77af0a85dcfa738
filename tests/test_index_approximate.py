"""The approximate index: good proposals, exact scores, and nothing lost to changes since it was built."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from colour_model import ColourModel
from test_index_build import drawn

from diptych.errors import IndexFault, MissingExtra, SettingsError
from diptych.index.engines.embedded import approximate, segments
from diptych.index.engines.embedded.approximate import Graphs
from diptych.index.engines.embedded.index import EmbeddedIndex
from diptych.index.engines.opening import open_index
from diptych.index.ingest import build
from diptych.index.ingest.build import index_collection
from diptych.index.protocol import PRECISIONS, Item, Vectors

pytest.importorskip("usearch")
D, N = 32, 3000
BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "index.py"


def clustered(n: int, seed: int) -> Vectors:
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(99).normal(size=(40, D))
    rows = centres[rng.integers(0, 40, n)] + 0.5 * rng.normal(size=(n, D))
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), np.float32)


@pytest.fixture(params=["graph", "codes"])
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> EmbeddedIndex:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 1000 * D * 4)
    made = EmbeddedIndex.create(tmp_path / "i", D)
    made.add([Item(f"i{n}", metadata={"n": n}) for n in range(N)], clustered(N, 0))
    made.build_graph("image", codes=request.param == "codes")
    return made


def recall(index: EmbeddedIndex, queries: Vectors, k: int = 10) -> float:
    found, truth = (
        index.search_many(queries, k, kind="image"),
        index.search_many(queries, k, kind="image", exact=True),
    )
    assert not any(hits.exact for hits in found)
    assert all(hits.exact for hits in truth)
    return float(np.mean([len(set(a.ids) & set(b.ids)) / k for a, b in zip(found, truth, strict=True)]))


def test_it_finds_nearly_everything_with_exact_scores(index: EmbeddedIndex) -> None:
    queries = clustered(50, 1)
    assert recall(index, queries) > 0.97
    assert index.info.approximate == {"image": N}
    for query in queries[:10]:
        exact = {h.item.id: h.score for h in index.search(query, 50, kind="image", exact=True)}
        hits = index.search(query, 10, kind="image")
        assert all(exact.get(hit.item.id, hit.score) == hit.score for hit in hits)
        assert hits.scores == sorted(hits.scores, reverse=True)
    assert index.verify() == []


def test_new_items_are_found_and_removed_ones_are_not(index: EmbeddedIndex) -> None:
    queries = clustered(20, 2)
    index.add([Item(f"q{n}") for n in range(20)], queries)
    assert [hits.ids[0] for hits in index.search_many(queries, 5, kind="image")] == [
        f"q{n}" for n in range(20)
    ]
    gone = {id for hits in index.search_many(queries, 30, kind="image") for id in hits.ids}
    index.delete(sorted(gone))
    left = index.search_many(queries, 10, kind="image")
    assert not {id for hits in left for id in hits.ids} & gone
    assert all(len(hits) == 10 for hits in left)
    assert recall(index, queries) > 0.9


def test_k_items_come_back_when_k_exist(index: EmbeddedIndex) -> None:
    index.delete([f"i{n}" for n in range(N - 15)])
    assert len(index.search(clustered(1, 3)[0], 15, kind="image")) == 15
    assert len(index.search(clustered(1, 3)[0], 100, kind="image")) == 15


def test_a_filter_is_always_exact(index: EmbeddedIndex) -> None:
    hits = index.search(clustered(1, 3)[0], 10, kind="image", filter="n < 100")
    assert hits.exact
    assert len(hits) == 10


def test_it_is_brought_up_to_date_when_much_changed(index: EmbeddedIndex) -> None:
    (file,) = index.path.glob("graph-*")
    index.build_graph("image")
    assert list(index.path.glob("graph-*")) == [file]  # nothing changed
    index.delete([f"i{n}" for n in range(500)])
    index.add([Item(f"new{n}") for n in range(900)], clustered(900, 4))
    index.build_graph("image")
    (new,) = index.path.glob("graph-*")
    assert new != file
    assert index.info.approximate == {"image": N + 400}
    assert recall(index, clustered(30, 5)) > 0.95
    assert index.verify() == []


def proposals(index: EmbeddedIndex, query: Vectors, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """How many rows the graph proposes for a query, and how many are scanned beside it."""
    seen = [0, 0]
    ask, walk = approximate.Graphs._proposals, approximate.scan

    def counted(self, graph, queries, wanted, width):  # type: ignore[no-untyped-def]
        seen[0] += wanted
        return ask(self, graph, queries, wanted, width)

    def scanned(segments, queries, k, selection=None):  # type: ignore[no-untyped-def]
        seen[1] += sum(map(len, selection.values())) if selection is not None else sum(map(len, segments))
        return walk(segments, queries, k, selection)

    with monkeypatch.context() as watched:
        watched.setattr(approximate.Graphs, "_proposals", counted)
        watched.setattr(approximate, "scan", scanned)
        assert len(index.search(query, 10, kind="image")) == 10
    return seen[0], seen[1]


def test_compaction_keeps_it(index: EmbeddedIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that move are renamed in the graph: neither is it asked for more, nor are they scanned."""
    index.add([Item(f"new{n}") for n in range(30)], clustered(30, 8))  # behind what the graph covers
    index.delete(["i5", "new3", *(f"i{n}" for n in range(1100, 1150))])  # the third segment of 1,000 stays
    queries = clustered(30, 6)
    before = [hits.ids for hits in index.search_many(queries, 10, kind="image", exact=True)]
    (file,) = index.path.glob("graph-*")
    index.compact()
    (new,) = index.path.glob("graph-*")
    assert new != file
    assert index.info.approximate == {"image": N - 51}
    assert index.verify() == []
    assert [hits.ids for hits in index.search_many(queries, 10, kind="image", exact=True)] == before
    assert recall(index, queries) > 0.95
    for hits in index.search_many(queries, 10, kind="image"):
        assert len(set(hits.ids)) == 10
    asked = 400 if index.info.coded else 36
    assert proposals(index, queries[0], monkeypatch) == (asked, 29)
    found = {id for hits in index.search_many(clustered(30, 8), 1, kind="image") for id in hits.ids}
    assert found >= {f"new{n}" for n in range(30) if n != 3}  # those behind the graph are scanned
    index.delete([f"i{n}" for n in range(N)])
    index.compact()
    assert index.info.approximate == {}
    assert not list(index.path.glob("graph-*"))
    assert index.search(queries[0], 50, kind="image").exact


def test_compaction_drops_a_damaged_one(index: EmbeddedIndex) -> None:
    (file,) = index.path.glob("graph-*")
    file.write_bytes(b"")
    index.delete(["i5"])
    index.compact()
    assert index.info.approximate == {}
    assert not list(index.path.glob("graph-*"))
    assert index.verify() == []


def test_one_that_vanishes_is_done_without(index: EmbeddedIndex) -> None:
    with open_index(index.path) as reader:
        (file,) = index.path.glob("graph-*")
        data = file.read_bytes()
        file.write_bytes(b"no graph at all".ljust(len(data), b"."))
        assert reader.search(clustered(1, 7)[0], 5, kind="image").exact
        file.unlink()
        assert reader.search(clustered(1, 7)[0], 5, kind="image").exact
        with pytest.raises(IndexFault, match="image"):
            reader.search(clustered(1, 7)[0], 5, kind="image", exact=False)


def test_a_reader_uses_it(index: EmbeddedIndex) -> None:
    with open_index(index.path) as reader:
        query = clustered(1, 7)[0]
        assert not reader.search(query, 5, kind="image").exact
        index.add([Item(f"new{n}") for n in range(900)], clustered(900, 4))
        index.build_graph("image")  # the file the reader has open goes
        assert not reader.search(query, 5, kind="image").exact


def test_one_that_a_writer_replaces_meanwhile_is_used(
    index: EmbeddedIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, find = clustered(1, 7)[0], Graphs.find
    with open_index(index.path) as reader:

        def replace_first(self: Graphs, state: Any, kind: Any) -> Any:
            monkeypatch.setattr(Graphs, "find", find)
            index.delete(["i5"])
            index.compact()  # between the snapshot of the reader and its look at the file
            return self.find(state, kind)

        monkeypatch.setattr(Graphs, "find", replace_first)
        assert not reader.search(query, 5, kind="image", exact=False).exact


def test_without_it_the_search_is_exact(index: EmbeddedIndex) -> None:
    query = clustered(1, 7)[0]
    assert index.search(query, 5).exact  # images and texts together have no graph
    with pytest.raises(IndexFault, match="text"):
        index.search(query, 5, kind="text", exact=False)
    (file,) = index.path.glob("graph-*")
    file.write_bytes(file.read_bytes()[:-100])
    assert index.search(query, 5, kind="image").exact
    assert index.verify() == [f"the approximate index {file.name} is missing or cut short: build it again."]
    index.build_graph("image")
    assert not index.search(query, 5, kind="image").exact
    assert index.verify() == []


def test_a_flipped_bit_is_found(index: EmbeddedIndex) -> None:
    (file,) = index.path.glob("graph-*")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert index.verify() == [f"the approximate index {file.name} is damaged: build it again."]


def test_a_large_collection_is_given_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ColourModel()
    index_collection(model, drawn(), tmp_path / "i", approximate_above=3)
    with open_index(tmp_path / "i") as index:
        assert index.info.approximate == {"image": 3}

    def missing(*asked: str) -> None:
        raise MissingExtra("usearch", "search", "an approximate index")

    monkeypatch.setattr("diptych.index.engines.embedded.approximate.import_extra", missing)
    built = build.index_collection(model, drawn(), tmp_path / "j", approximate_above=3)
    assert built.notes == [
        "the 3 image items are searched one by one: an approximate index needs the package 'usearch': "
        "install it with pip install 'diptych[search]'."
    ]


def test_rows_that_are_not_of_length_one_are_refused(tmp_path: Path) -> None:
    lengths = np.random.default_rng(5).uniform(0.2, 5, (N, 1)).astype(np.float32)
    with EmbeddedIndex.create(tmp_path / "i", D) as index:
        index.add([Item(f"i{n}") for n in range(N)], lengths * clustered(N, 0))
        with pytest.raises(SettingsError, match=r"\b5\b.*\b1\b"):
            index.build_graph("image")
        assert index.info.approximate == {}
    for precision in PRECISIONS:  # what storing takes from a length is no reason
        with EmbeddedIndex.create(tmp_path / precision, D, precision=precision) as index:
            index.add([Item(f"i{n}") for n in range(100)], clustered(100, 0))
            index.build_graph("image")
            assert index.info.approximate == {"image": 100}


class Long(ColourModel):
    """A model whose vectors are not normalised."""

    def encode_image(self, *args: Any, **options: Any) -> Any:
        return 3 * super().encode_image(*args, **options)


def test_a_collection_of_such_rows_is_searched_one_by_one(tmp_path: Path) -> None:
    built = index_collection(Long(), drawn(), tmp_path / "i", approximate_above=3)
    (note,) = built.notes
    assert note.startswith("the 3 image items are searched one by one: ")
    assert "an approximate index needs vectors of length 1" in note


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("index_benchmark", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "index_benchmark", module)
    spec.loader.exec_module(module)
    return module


def test_the_benchmark_names_each_broken_limit(bench: ModuleType) -> None:
    fine = [
        bench.Row(10, "exact", "index", recall=1.0, over=0.99),
        bench.Row(10, "filtered to 1 %", "index", recall=1.0, over=9.0),
        bench.Row(10, "hybrid", "index", over=9.0),
        bench.Row(10, "approximate", "index", recall=0.98, over=-1.0),
        bench.Row(10, "approximate", "hnswlib", recall=0.5),
        bench.Row(10, "opening", "index", np.array([5.0, 999.0, 1.0]), resident=199.0),
    ]
    assert bench.broken(fine) == []
    bad = [
        bench.Row(10, "exact", "index", recall=0.999, over=1.01),
        bench.Row(10, "filtered to 1 %", "index", recall=0.9),
        bench.Row(10, "approximate", "index", recall=0.98, over=2.0),
        bench.Row(10, "opening", "index", np.array([1000.0]), resident=200.0),
    ]
    assert bench.broken(bad) == [
        "10 items, exact: 1.01 ms over the raw engine at p50, the limit is 1 ms.",
        "10 items, exact: recall@10 is 0.9990, and an exact search must find all.",
        "10 items, filtered to 1 %: recall@10 is 0.9000: not exact, or fewer than 10 hits.",
        "10 items, approximate: 2.00 ms over the raw engine at p50, the limit is 1 ms.",
        "10 items, opening: it took 1000 ms, the limit is 1000 ms.",
        "10 items, opening: 200 MB were resident, the limit is 200 MB.",
    ]


def test_the_benchmark_fails_when_a_limit_is_broken(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "RESIDENT", 1.0)
    small = "--sizes 1000 --dimension 32 --queries 25 --repeats 1 --graphs_up_to 0"
    monkeypatch.setattr(sys, "argv", ["index.py", *small.split(), "--threads", str(torch.get_num_threads())])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == 1
    said = capsys.readouterr()
    assert re.search(r"broken limit: 1,000 items, opening: \d+ MB were resident, the limit is 1 MB", said.err)
    assert "1,000 items: hybrid …" in said.err  # how far it is
    assert "| opening" in said.out  # the table is there all the same


def test_the_benchmark_prints_one_table() -> None:
    small = [
        "--no-limits",  # of a busy machine
        "--sizes",
        "1000",
        "2000",
        "--dimension",
        "32",
        "--queries",
        "25",
        "--repeats",
        "1",
        "--threads",
        "1",
    ]
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), *small], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines() if "|" in line
    ]
    assert rows[0][:6] == ["items", "search", "engine", "first ms", "p50 ms", "p99 ms"]
    ours = {row[1]: dict(zip(rows[0], row, strict=True)) for row in rows if row[2] == "index"}
    for search in ("exact", "filtered to 10 %", "filtered to 1 %", "approximate"):
        assert float(ours[search]["recall@10"]) > 0.9
        assert re.fullmatch(r"[+-]\d+\.\d\d", ours[search]["over raw ms"])
    assert ours["filtered to 1 %"]["recall@10"] == ours["exact"]["recall@10"] == "1.000"
    assert "MB resident before the first query" in ours["opening"]["note"]
    raw = {row[2] for row in rows[1:]}
    assert {"numpy", "faiss Flat", "usearch, the same graph", "hnswlib"} <= raw  # not installed is a row too
