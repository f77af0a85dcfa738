"""Re-ranking of search hits by a pair scorer: stored and computed local features, the command line, bad input."""

from __future__ import annotations

import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from circles import lead_in_circles
from commands import diptych, refused
from disks import make_read_only, small_disk
from resealed import name_in_journal
from small import pictures, precomputed, texts

from diptych.cache.local_features import LocalFeatures, features_place
from diptych.data.formats import open_captions
from diptych.errors import DataError, IndexFault, QueryError, SettingsError
from diptych.index.engines.opening import open_index
from diptych.index.ingest.build import index_collection
from diptych.index.protocol import Query, Term
from diptych.index.query.reranking import Reranker, reranker_of
from diptych.index.query.search import Searcher
from diptych.model.adapter import TorchModel
from diptych.model.retriever import Retriever
from diptych.recipes import RECIPES

SMALL = {"dim": 16, "similarity_dim": 8, "min_count": 1, "word_dim": 8, "image_size": 64}


def model_for(data: str, kind: str = "sgr", seed: int = 0) -> Retriever:
    torch.manual_seed(seed)
    recipe = RECIPES[kind]
    model = recipe.build(recipe.settings(**SMALL), open_captions(data)).retriever.eval()  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in model.scorer.parameters():  # type: ignore[union-attr]
            parameter.mul_(3)
    return model


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    for path, line in zip(pictures(folder, 6), texts(6), strict=True):
        path.with_suffix(".txt").write_text(line + "\n")
    return folder


@pytest.fixture(scope="module")
def model(photos: Path) -> Retriever:
    return model_for(str(photos))


@pytest.fixture
def place(photos: Path, model: Retriever, tmp_path: Path) -> Path:
    index_collection(TorchModel(model), photos, tmp_path / "i.index", local_features=True)
    return tmp_path / "i.index"


def expected_order(model: Retriever, photos: Path, query: str) -> list[str]:
    captions = open_captions(str(photos))
    scores = model.scores(captions.images, [query]).tile(slice(None), slice(None))[:, 0]
    return [str(captions.image_ids[i]) for i in scores.argsort(descending=True)]


def test_hits_come_in_the_order_of_the_pair_scorer(place: Path, photos: Path, model: Retriever) -> None:
    with open_index(place) as index:
        plain = Searcher(index, TorchModel(model))  # computes local features from the files
        stored = Searcher(index, TorchModel(model), pair_scorer=reranker_of(place, TorchModel(model)))
        for query in ("a red dog", "the blue house"):
            expected = expected_order(model, photos, query)
            found = plain.search(query, 6, rerank=6, chance=None)
            assert found.ids == expected
            assert stored.search(query, 6, rerank=6, chance=None).ids == expected
            assert all({"pair", "similarity"} <= set(hit.details) for hit in found)
        two = stored.search("a red dog", 6, rerank=2, chance=None).ids
        nearest = stored.search("a red dog", 6, chance=None).ids
        assert sorted(two[:2]) == sorted(nearest[:2])
        assert two[2:] == nearest[2:]


def test_texts_are_judged_by_a_picture(place: Path, photos: Path, model: Retriever) -> None:
    picture = next(iter(sorted(photos.glob("*.png"))))
    with open_index(place) as index:
        searcher = Searcher(index, TorchModel(model))
        hits = searcher.search(picture, 6, kind="text", rerank=6, chance=None)
        lines = [hit.item.text for hit in hits]
        scores = model.scores([picture], lines).tile(slice(None), slice(None))[0]
        assert scores.tolist() == sorted(scores.tolist(), reverse=True)
        with pytest.raises(QueryError, match="re-ranking"):
            searcher.search(picture, 3, kind="image", rerank=3)


def test_several_models_and_weighted_terms(place: Path, photos: Path, model: Retriever) -> None:
    other = model_for(str(photos), "saf", seed=1)
    with open_index(place) as index:
        items = [item for item in index.get(sorted(p.name for p in photos.glob("*.png"))) if item is not None]
        assert len(items) == 6
        files = [index.file(item) for item in items]
    terms = Query((Term("red dog"), Term("house", weight=-0.5)))
    single = [Reranker([TorchModel(one)])(terms, items, files) for one in (model, other)]
    assert Reranker([TorchModel(model), TorchModel(other)])(terms, items, files) == pytest.approx(
        np.mean(single, axis=0).tolist()
    )
    apart = [
        Reranker([TorchModel(model)])(Query((Term(text),)), items, files) for text in ("red dog", "house")
    ]
    assert single[0] == pytest.approx(
        ((np.array(apart[0]) - 0.5 * np.array(apart[1])) / 1.5).tolist(), abs=1e-6
    )


def test_the_file_follows_the_collection(photos: Path, model: Retriever, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in photos.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    place = tmp_path / "c.index"
    index_collection(TorchModel(model), copy, place)
    assert not features_place(place).exists()
    index_collection(
        TorchModel(model), copy, place, local_features=True
    )  # an index made before gets its features
    store = LocalFeatures(features_place(place), model.fingerprint())
    first = store.contents()
    assert len(first) == 6
    (copy / sorted(first)[0]).unlink()
    changed = copy / sorted(first)[1]
    changed.write_bytes((copy / sorted(first)[2]).read_bytes())
    index_collection(TorchModel(model), copy, place, local_features=True)
    second = store.contents()
    assert set(second) == set(first) - {sorted(first)[0]}
    assert [id for id in second if second[id] != first[id]] == [changed.name]
    assert store.get([(changed.name, first[changed.name])]) == {}  # never the features of what a file was
    assert LocalFeatures(features_place(place), "another").contents() == {}


def test_features_without_files_need_the_store(tmp_path: Path) -> None:
    data = precomputed(tmp_path / "toy_precomp")
    model = model_for(str(data))
    index_collection(TorchModel(model), str(data), tmp_path / "a.index")
    index_collection(TorchModel(model), str(data), tmp_path / "b.index", local_features=True)
    with (
        open_index(tmp_path / "a.index") as index,
        pytest.raises(QueryError, match="--local_features"),
    ):
        Searcher(index, TorchModel(model)).search("red dog", 3, rerank=3)
    with open_index(tmp_path / "b.index") as index:
        searcher = Searcher(
            index, TorchModel(model), pair_scorer=reranker_of(tmp_path / "b.index", TorchModel(model))
        )
        assert len(searcher.search("red dog", 3, rerank=5, chance=None)) == 3


def test_bad_input_says_so(photos: Path, model: Retriever, tmp_path: Path) -> None:
    torch.manual_seed(0)
    recipe = RECIPES["vse-infinity"]
    settings = recipe.settings(dim=16, min_count=1, word_dim=8, image_size=64)  # type: ignore[call-arg]
    dual = recipe.build(settings, open_captions(str(photos))).retriever
    with pytest.raises(SettingsError, match="--local_features"):
        index_collection(TorchModel(dual), photos, tmp_path / "x.index", local_features=True)
    with pytest.raises(SettingsError, match="re-rank"):
        Reranker([TorchModel(dual)])
    assert reranker_of(tmp_path / "x.index", TorchModel(dual)) is None
    with pytest.raises(SettingsError, match="--local_features"):
        index_collection(TorchModel(model), photos, "postgresql://nowhere/x", local_features=True)
    wrong = tmp_path / "w.index.features"
    wrong.write_text("nothing")
    with pytest.raises(IndexFault, match="--local_features"):
        LocalFeatures(wrong, "abc")


def test_the_command_line_reranks(photos: Path, model: Retriever, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "sgr")
    other = model_for(str(photos), "saf", seed=1)
    other.save_pretrained(tmp_path / "saf")
    place = tmp_path / "p.index"
    said = diptych("index", tmp_path / "sgr", photos, "--index", place, "--local_features").stdout
    assert "p.index.features: local features," in said
    found = json.loads(diptych("search", place, "a red dog", "--rerank", 6, "--all", "--json").stdout)
    assert [hit["id"] for hit in found["hits"]] == expected_order(model, photos, "a red dog")
    both = ["--rerank", 6, "--reranker", tmp_path / "sgr", "--reranker", tmp_path / "saf"]
    found = json.loads(diptych("search", place, "a red dog", *both, "--all", "--json").stdout)
    assert len(found["hits"]) == 6
    diptych("search", place, "a red dog", "--reranker", tmp_path / "sgr", status=2)
    assert "config.json" in refused("search", place, "a", "--rerank", 2, "--reranker", photos)


def test_the_service_reranks(place: Path, photos: Path, model: Retriever) -> None:
    from diptych.web.limits import Limits
    from diptych.web.replies import SearchRequest
    from diptych.web.service import Service

    with open_index(place) as index:
        service = Service(
            index, TorchModel(model), limits=Limits(), pair_scorer=reranker_of(place, TorchModel(model))
        )
        try:
            assert service.rerank  # the page offers it
            hits = service.search(SearchRequest(text="a red dog", k=6, rerank=6))
            assert hits.ids == expected_order(model, photos, "a red dog")
        finally:
            service.close()


@pytest.fixture
def strange(tmp_path: Path) -> Path:
    """Local features of one image."""
    place = tmp_path / "i.index.features"
    store = LocalFeatures(place, "m", create=True)
    store.put([("a", "1", np.ones((2, 3), np.float16))])
    store.close()
    return place


def forged(place: Path, *statements: str) -> None:
    with closing(sqlite3.connect(place)) as db:
        for statement in statements:
            db.execute(statement)
        db.commit()


ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT 'm', 'a', '1', x, x FROM n"


@pytest.mark.parametrize(
    "statements",
    [
        ("DROP TABLE features", f"CREATE VIEW features(model, id, content, elements, data) AS {ENDLESS}"),
        ("CREATE TRIGGER t AFTER INSERT ON features BEGIN DELETE FROM features; END",),
        ("CREATE TABLE more (a)",),
    ],
)
def test_another_schema_is_refused(statements: tuple[str, ...], strange: Path) -> None:
    forged(strange, *statements)
    with pytest.raises(IndexFault, match=r"i\.index\.features"):
        LocalFeatures(strange, "m").contents()


@pytest.mark.parametrize(
    "change", ["elements = 0", "elements = 7", "elements = 'x'", "data = 5", "data = x'00'"]
)
def test_values_that_are_no_features(change: str, strange: Path) -> None:
    forged(strange, f"UPDATE features SET {change}")
    with pytest.raises(IndexFault, match=r"i\.index\.features"):
        LocalFeatures(strange, "m").get([("a", "1")])


@pytest.mark.parametrize("end", ["", "-wal"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_local_features_are_plain_files(kind: str, end: str, strange: Path, tmp_path: Path) -> None:
    place = strange.with_name(strange.name + end)
    place.unlink(missing_ok=True)
    (tmp_path / "thesis").write_bytes(b"years of work")
    place.symlink_to(tmp_path / "thesis") if kind == "link" else os.mkfifo(place)
    with pytest.raises(DataError, match="plain file"):
        LocalFeatures(strange, "m", create=True)
    assert (tmp_path / "thesis").read_bytes() == b"years of work"


def test_local_features_are_read_where_nothing_can_be_written(tmp_path: Path) -> None:
    """SQLite wants to write beside what it reads."""
    with small_disk(tmp_path / "disk") as disk:
        place = disk / "i.index.features"
        with closing(LocalFeatures(place, "m", create=True)) as store:
            store.put([("image", "1", np.ones((3, 50), np.float16))])
        make_read_only(disk)
        with closing(LocalFeatures(place, "m")) as store:
            assert store.get([("image", "1")]).keys() == {"image"}


def test_a_journal_that_names_another_file(strange: Path, tmp_path: Path) -> None:
    """SQLite removed that file, for a search."""
    (tmp_path / "thesis").write_bytes(b"years of work")
    name_in_journal(strange, tmp_path / "thesis")
    with pytest.raises(DataError, match=f"{strange.name}-journal names another file"):
        LocalFeatures(strange, "m")
    assert (tmp_path / "thesis").exists()


def test_damaged_pages_are_one_sentence(tmp_path: Path) -> None:
    """They were errors of SQLite."""
    place = tmp_path / "i.index.features"
    store = LocalFeatures(place, "m", create=True)
    store.put([(f"image {n}", "1", np.ones((3, 50), np.float16)) for n in range(60)])
    store.close()
    whole, wrong = place.read_bytes(), 0
    for start in range(100, len(whole), 997):
        place.write_bytes(whole[:start] + b"\xff" * 60 + whole[start + 60 :])
        try:
            with closing(LocalFeatures(place, "m")) as opened:
                assert len(opened.contents()) <= 60
                opened.get((f"image {n}", "1") for n in range(60))
                opened.put([("new", "1", np.ones((3, 50), np.float16))])
        except IndexFault as fault:
            assert place.name in str(fault)  # noqa: PT017
            wrong += 1
    assert wrong > 5


def test_pages_in_circles_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 13 pages leads to the next one some twenty times: their rows were read for ever."""
    monkeypatch.setattr("diptych.databases.STEPS_ALLOWED", 2_000_000)
    place = tmp_path / "i.index.features"
    with closing(sqlite3.connect(place)) as db:
        db.execute("PRAGMA page_size = 512")
        db.execute("VACUUM")
    LocalFeatures(place, "m", create=True).close()
    forged(place, *(f"INSERT INTO features VALUES ('m', '{n:06d}', '1', 1, x'0000')" for n in range(30_000)))
    lead_in_circles(place, "features")
    with closing(LocalFeatures(place, "m")) as store, pytest.raises(IndexFault, match=place.name):
        store.contents()


def test_features_of_another_width_are_refused(model: Retriever, place: Path) -> None:
    """They were an error of torch."""
    forged(features_place(place), "UPDATE features SET data = x'00003c00', elements = 1")
    with open_index(place) as index:
        reranker = reranker_of(place, TorchModel(model))
        searcher = Searcher(index, TorchModel(model), pair_scorer=reranker)
        with pytest.raises(DataError, match="--local_features"):
            searcher.search("a red dog", 6, rerank=6)
