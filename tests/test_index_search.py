"""The query layer: texts, images, mixtures, fusion, re-ranking, the cut-off; the model sees colours."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import NormalDist
from threading import Thread
from typing import Any

import numpy as np
import pytest
from colour_model import WORDS, ColourModel
from PIL import Image

from diptych import addresses
from diptych.errors import AddressError, ImageError, IndexFault, QueryError, SettingsError
from diptych.index.engines.embedded.index import EmbeddedIndex
from diptych.index.protocol import Hit, Hits, Item, Query, Term
from diptych.index.query.cutoff import (
    Background,
    Calibration,
    background,
    calibrate,
)
from diptych.index.query.parse import parse_query
from diptych.index.query.search import Searcher
from diptych.index.query.words import fuse

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
from cutoff import measure_cutoff

NAMES = list(WORDS)


@pytest.fixture
def searcher(tmp_path: Path) -> Iterator[Searcher]:
    model = ColourModel()
    index = EmbeddedIndex.create(tmp_path / "i", model.dim, fingerprint=model.fingerprint())
    pictures = [Image.new("RGB", (4, 4), WORDS[name]) for name in NAMES]
    items = [Item(name, text=f"a {name} thing", metadata={"n": n}) for n, name in enumerate(NAMES)]
    index.add(items, model.encode_image(pictures))
    texts = [Item(f"{n}#text0", "text", text=f"{n} words", image_id=n) for n in NAMES]
    index.add(texts, model.encode_text([t.text for t in texts]))
    with index:
        yield Searcher(index, model)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


def picture(tmp_path: Path, name: str) -> Path:
    path = tmp_path / f"{name}.png"
    Image.new("RGB", (4, 4), WORDS[name]).save(path)
    return path


def test_all_four_directions(searcher: Searcher, tmp_path: Path) -> None:
    red = picture(tmp_path, "red")
    assert searcher.search("red", 1).ids == ["red"]
    assert searcher.search("red", 1, kind="text").ids == ["red#text0"]
    assert searcher.search(red, 1).ids == ["red"]
    assert searcher.search(str(red), 1, kind="text").ids == ["red#text0"]
    assert searcher.search(Image.open(red), 1).ids == ["red"]
    assert len(searcher.search("red", 20, kind=None)) == 8


def test_terms_add_and_subtract(searcher: Searcher, tmp_path: Path) -> None:
    white, red = picture(tmp_path, "white"), picture(tmp_path, "red")
    assert searcher.search(f"{white} - {red}", 4).ids[-1] == "red"
    assert searcher.search('"3:green" + "blue"', 2).ids == ["green", "blue"]
    assert searcher.search('"green" + "3:blue"', 2).ids == ["blue", "green"]
    vector = searcher.encode(Query((Term("red", weight=2.0), Term("blue", weight=-0.5))))
    a, b = searcher.model.encode_text(["red", "blue"]).astype(np.float64)
    expected = 2 * a / np.linalg.norm(a) - 0.5 * b / np.linalg.norm(b)
    np.testing.assert_allclose(vector, expected / np.linalg.norm(expected), atol=1e-6)


def test_terms_that_cancel_are_refused(searcher: Searcher) -> None:
    with pytest.raises(QueryError):
        searcher.search('"red" - "red"')


def test_a_query_of_nothing_but_minus_is_refused_whole(searcher: Searcher, tmp_path: Path) -> None:
    beside = Query((*parse_query('- "red"').terms, Term(picture(tmp_path, "white"), "image")))
    assert searcher.search(beside, 4).ids[-1] == "red"
    like = Query((*parse_query('- "red"').terms, Term("white", "item")))
    assert searcher.search(like, 3).ids[-1] == "red"
    for nothing in ('- "red"', Query((Term("red", "item", -1.0),))):
        with pytest.raises(QueryError) as caught:
            searcher.search(nothing)
        assert caught.value.position == 0


def test_more_like_this(searcher: Searcher) -> None:
    hits = searcher.more_like("red", 2)
    assert "red" not in hits.ids
    assert len(hits) == 2
    assert searcher.more_like("red", 1, kind="text").ids == ["red#text0"]
    both = Query((Term("red", "item"), Term("green", "item", -1.0)))
    assert set(searcher.search(both, 4).ids) == {"blue", "white"}  # what a query names is no answer to it
    assert searcher.search(both, 1, kind="text").ids == ["red#text0"]
    with pytest.raises(QueryError, match="nobody"):
        searcher.more_like("nobody")


def test_filters_pass_through(searcher: Searcher) -> None:
    assert "red" not in searcher.search("red", 4, filter="n > 0").ids


def test_fusion_is_reciprocal_rank() -> None:
    scores = fuse([["a", "b", "c"], ["c", "d"]])
    assert scores["a"] == 1 / 61
    assert scores["c"] == 1 / 63 + 1 / 61
    assert max(scores, key=lambda id: scores[id]) == "c"


def test_hybrid_fuses_meaning_and_words(searcher: Searcher) -> None:
    searcher.index.add(
        [Item("odd", text="xylophone in blue")],
        searcher.model.encode_image([Image.new("RGB", (2, 2), (9, 0, 0))]),
    )
    plain = searcher.search("red xylophone", 5)
    hits = searcher.search("red xylophone", 5, hybrid=True)
    assert plain.ids.index("odd") > 0
    assert set(hits.ids[:2]) == {"red", "odd"}
    by_id = {hit.item.id: hit for hit in hits}
    assert by_id["odd"].details["bm25"] > 0
    vector = searcher.encode(Query((Term("red xylophone"),)))
    assert by_id["odd"].details["similarity"] == pytest.approx(
        float(searcher.index.vectors(["odd"])[0] @ vector)
    )
    assert searcher.search("red", 3, hybrid=True, filter="n > 0").ids[0] != "red"


class Leaving(EmbeddedIndex):
    """An index from which another process deletes items right after their words were found."""

    leaving: tuple[str, ...] = ()

    def search_words(self, *args: Any, **options: Any) -> Hits:
        hits = super().search_words(*args, **options)
        self.delete(self.leaving)
        return hits


@pytest.mark.parametrize("leaving", [("i150",), ("i150", "i151")])
def test_hybrid_leaves_out_what_was_deleted_meanwhile(
    tmp_path: Path, leaving: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ColourModel()
    with Leaving.create(tmp_path / "i", model.dim, fingerprint=model.fingerprint()) as index:
        texts = ["red xylophone" if n >= 150 else "" for n in range(152)]
        rows = np.repeat(model.encode_text(["blue"]), 150, axis=0)
        rows = np.concatenate([rows, -rows[:2]])
        index.add([Item(f"i{n}", text=text) for n, text in enumerate(texts)], rows)
        searcher = Searcher(index, model)
        monkeypatch.setattr(Leaving, "leaving", leaving)
        hits = searcher.search('"blue" + "0.01:xylophone"', 10, hybrid=True, chance=None)
        assert not set(hits.ids) & set(leaving)
        assert "i0" in hits.ids


def test_every_word_of_a_hybrid_query_is_a_match(searcher: Searcher) -> None:
    rows = np.random.default_rng(0).normal(size=(30, searcher.model.dim))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    searcher.index.add([Item(f"n{n}", text=f"thing number {n}") for n in range(30)], rows)
    assert not searcher.search("number 7", 30, chance=0.2).matched
    hits = searcher.search("number 7", 30, hybrid=True, chance=0.2)
    assert [hit.item.id for hit in hits.matches] == ["n7"]
    assert hits.matches[0].details["words"] == 1
    assert {hit.details.get("words") for hit in hits if hit.item.id != "n7"} == {0.5}
    assert not searcher.search("zebra", 30, hybrid=True, chance=0.2).matched


QUERIES = ["shoes", "RED shoe", "cafe shoe", "running cafés", "red_shoes", "cafe\N{COMBINING ACUTE ACCENT}"]


@pytest.mark.parametrize("query", QUERIES)
def test_words_of_a_hybrid_query_are_compared_as_they_are_ranked(searcher: Searcher, query: str) -> None:
    rows = np.random.default_rng(0).normal(size=(30, searcher.model.dim))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    texts = ["the red shoe of a runner who runs to the café", *["thing"] * 29]
    searcher.index.add([Item(f"n{n}", text=text) for n, text in enumerate(texts)], rows)
    hits = searcher.search(query, 30, hybrid=True)
    assert [hit.item.id for hit in hits if hit.details.get("words") == 1] == ["n0"]
    assert "n0" in [hit.item.id for hit in hits.matches]


def test_hybrid_finds_what_vectors_rank_below_the_depth(
    searcher: Searcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diptych.index.query.search.DEPTH", 1)
    hits = searcher.search("red white", 4, hybrid=True)
    assert all("similarity" in hit.details for hit in hits)


def test_a_pair_scorer_ranks_anew(searcher: Searcher) -> None:
    def scorer(query: Query, items: Sequence[Item], files: Sequence[Path | None]) -> list[float]:
        assert query.text == "red"
        assert len(files) == len(items)
        return [float(item.id == "blue") for item in items]

    with pytest.raises(QueryError):
        searcher.search("red", 2, rerank=4)
    searcher.pair_scorer = scorer
    hits = searcher.search("red", 2, rerank=4)
    assert hits.ids[0] == "blue"
    assert hits[0].details["pair"] == 1.0
    assert hits[0].details["similarity"] < 1


def test_another_model_and_an_empty_index_are_refused(searcher: Searcher, tmp_path: Path) -> None:
    with pytest.raises(IndexFault, match="other"):
        Searcher(searcher.index, ColourModel("other"), model_name="other")
    searcher.index.delete([*NAMES, *(f"{n}#text0" for n in NAMES)])
    with pytest.raises(IndexFault):
        searcher.search("red")


def test_the_folder_of_the_model_need_not_be_readable(tmp_path: Path) -> None:
    """It may be that of somebody else; here the system refuses to look for another reason."""
    model = ColourModel()
    name = "m" * 5000
    with EmbeddedIndex.create(
        tmp_path / "i", model.dim, model=name, fingerprint=model.fingerprint()
    ) as index:
        index.add([Item("a")], model.encode_text(["red"]))
        assert Searcher(index, model).search("red", 1).ids == ["a"]


def test_what_cannot_be_searched_says_so(searcher: Searcher, tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_bytes(b"nothing")
    with pytest.raises(ImageError):
        searcher.search(tmp_path / "bad.png")
    with pytest.raises(QueryError, match=r"a\.jpg"):
        searcher.search("https://example.org/a.jpg")
    with pytest.raises(QueryError):
        searcher.search(" ")
    with pytest.raises(SettingsError, match=r"\b1\b.*\b0\b"):
        searcher.search("red", 0)
    with pytest.raises(SettingsError, match=r"\b1\b.*-3"):
        searcher.search("red", -3, hybrid=True)
    with pytest.raises(SettingsError, match=r"\b1\b.*\b0\b"):
        searcher.more_like("red", 0)


def test_an_allowed_address_is_fetched(
    searcher: Searcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture(tmp_path, "red")
    monkeypatch.setattr(addresses, "find_public", lambda host, port: "127.0.0.1")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=tmp_path)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        searcher.allow_urls = True
        assert searcher.search(f"{address}/red.png", 1).ids == ["red"]
        assert searcher.search(f'"blue" - {address}/red.png', 4).ids[-1] == "red"
        with pytest.raises(AddressError, match="404"):
            searcher.search(f"{address}/none.png")
        server.shutdown()


def test_an_allowed_address_that_does_not_answer(searcher: Searcher, monkeypatch: pytest.MonkeyPatch) -> None:
    searcher.allow_urls = True
    with pytest.raises(AddressError, match=r"127\.0\.0\.1 is not"):
        searcher.search("http://127.0.0.1:9/a.jpg")
    monkeypatch.setattr(addresses, "find_public", lambda host, port: "127.0.0.1")
    with pytest.raises(AddressError, match=r"a\.jpg"):
        searcher.search("http://127.0.0.1:9/a.jpg")


# ---------------------------------------------------------------------- the cut-off


def test_the_background_is_the_median_and_the_lower_spread() -> None:
    rng = np.random.default_rng(0)
    scores = 0.2 + 0.05 * rng.normal(size=20_000)
    found = background(scores, 20_000)
    assert found is not None
    assert found.location == pytest.approx(0.2, abs=0.002)
    assert found.spread == pytest.approx(0.05, rel=0.03)
    assert found.strength(0.3) == pytest.approx(2, rel=0.05)
    assert background(scores[:5], 5) is None
    with pytest.raises(SettingsError, match=r"\b0\b.*\b1\b"):
        found.cutoff(0)


@pytest.mark.parametrize("count", [1000, 5000])
@pytest.mark.parametrize("chance", [0.5, 0.1])
def test_chance_is_what_it_says_on_a_normal_background(count: int, chance: float) -> None:
    rng = np.random.default_rng(1)
    passed = 0
    for _ in range(400):
        scores = rng.normal(size=count)
        found = background(scores, count)
        assert found is not None
        passed += scores.max() >= found.cutoff(chance)
    # P(best of N passes) = 1 − (1 − p/N)^N ≈ 1 − exp(−p)
    assert passed / 400 == pytest.approx(1 - np.exp(-chance), abs=0.08)


def test_shifting_and_scaling_scores_moves_the_cutoff_with_them() -> None:
    scores = np.random.default_rng(2).gamma(2.0, size=500)
    one, two = background(scores, 500), background(3 * scores - 1, 500)
    assert one is not None
    assert two is not None
    assert two.cutoff() == pytest.approx(3 * one.cutoff() - 1)
    assert two.strength(3 * scores.max() - 1) == pytest.approx(one.strength(scores.max()))


def test_error_rates_are_measured_both_ways() -> None:
    rng = np.random.default_rng(3)
    scores = rng.normal(size=(100, 300))
    clear = scores.copy()
    clear[np.arange(100), np.arange(100)] = 9.0
    (rates,) = measure_cutoff(clear, [[n] for n in range(100)], chances=[0.05])
    assert rates.false_none == 0
    assert rates.false_match < 0.12
    (hidden,) = measure_cutoff(scores, [[n] for n in range(100)], chances=[0.05])
    assert hidden.false_none > 0.8
    clear[np.arange(100), np.arange(100) + 100] = 9.0  # a second answer that is not in the list
    (second,) = measure_cutoff(clear, [[n] for n in range(100)], chances=[0.05])
    assert second.false_match == 1
    (both,) = measure_cutoff(clear, [[n] for n in range(100)], [[n, n + 100] for n in range(100)], [0.05])
    assert both.false_match < 0.12
    with pytest.raises(SettingsError, match=r"\b5\b"):
        measure_cutoff(scores[:, :5], [[0]] * 100)


def test_hits_know_whether_anything_matched(tmp_path: Path) -> None:
    model = ColourModel()
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(300, model.dim)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    rows[:, 0] = -np.abs(rows[:, 0])  # nothing red
    with EmbeddedIndex.create(tmp_path / "i", model.dim, fingerprint=model.fingerprint()) as index:
        index.add([Item(f"i{n}") for n in range(300)], rows)
        searcher = Searcher(index, model)
        none = searcher.search("red", 5, chance=0.2)
        assert none.cutoff is not None
        assert not none.matched
        assert searcher.search("red", 5, chance=None).matched
        index.add([Item("match")], model.encode_text(["red"]))
        some = searcher.search("red", 5, chance=0.2)
        assert some.strength is not None
        assert [hit.item.id for hit in some.matches] == ["match"]
    fused = Hits((Hit(Item("a"), 0.03, {"similarity": 0.5}),), cutoff=0.4)
    assert fused.matched


def captioned(tmp_path: Path, noise: float, texts: int = 80, split: bool = False, run: str = "") -> Searcher:
    """An index whose captions are their images' vectors with noise; with ``split``, those of train without any."""
    model, rng = ColourModel(), np.random.default_rng(0)
    rows = rng.normal(size=(300, model.dim))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    spread = np.where(np.arange(texts) % 4 == 0, 0.0, noise) if split else np.full(texts, noise)
    asked = rows[:texts] + spread[:, None] * rng.normal(size=(texts, model.dim))
    asked /= np.linalg.norm(asked, axis=1, keepdims=True)
    index = EmbeddedIndex.create(tmp_path / "i", model.dim, model=run, fingerprint=model.fingerprint())
    index.add([Item(f"i{n}") for n in range(300)], rows)
    parts = [{"split": "train" if n % 4 == 0 else "test"} if split else {} for n in range(texts)]
    index.add(
        [Item(f"t{n}", "text", text="a", image_id=f"i{n}", metadata=parts[n]) for n in range(texts)], asked
    )
    return Searcher(index, model)


def test_a_calibration_is_the_best_line_between_there_and_not_there() -> None:
    """Against a loop over every line that could be drawn."""
    rng = np.random.default_rng(3)
    items = rng.normal(size=(120, 6))
    queries = items[:60] + 0.7 * rng.normal(size=(60, 6))
    found = calibrate(queries, [[n] for n in range(60)], items)
    assert found is not None
    there, gone = [], []
    for n in range(60):
        scores = [float(np.dot(queries[n].astype(np.float32), row.astype(np.float32))) for row in items]
        median = float(np.median(scores))
        spread = (median - float(np.quantile(scores, 0.1))) / 1.2815515655446004
        expected = -NormalDist().inv_cdf(0.5 / 120)
        there.append((max(scores) - median) / spread - expected)
        gone.append((max(s for m, s in enumerate(scores) if m != n) - median) / spread - expected)
    errors = [
        max(np.mean([s < line for s in there]), np.mean([s >= line for s in gone]))
        for line in (*there, *gone)
    ]
    assert max(found.missed, found.claimed) == pytest.approx(min(errors))
    assert found.missed == pytest.approx(np.mean([s < found.excess - 1e-6 for s in there]), abs=0.02)
    assert found.queries == 60
    # a mutation: with the answers left in, nothing tells there from not there
    mixed = calibrate(queries, [[] for _ in range(60)], items)
    assert mixed is not None
    assert max(mixed.missed, mixed.claimed) > max(found.missed, found.claimed)


def test_the_line_moves_with_the_size_of_the_collection() -> None:
    line = Calibration(1.0, 0.1, 0.1, 60)
    small, large = Background(0.0, 1.0, 100), Background(0.0, 1.0, 10_000)
    assert large.calibrated(line) - small.calibrated(line) == pytest.approx(
        large.cutoff(0.5) - small.cutoff(0.5)
    )


def test_captions_of_the_collection_draw_the_cutoff(tmp_path: Path) -> None:
    searcher = captioned(tmp_path, noise=0.02)
    hits = searcher.search("red", 5)
    assert hits.cutoff is not None
    assert "on 80 captions of this collection" in hits.note
    assert searcher.calibration() is searcher.calibration()  # once for one state of the index
    searcher.index.delete(["t0"])
    assert "on 79 captions" in searcher.search("red", 5).note


def test_a_cutoff_that_would_often_be_wrong_is_off(tmp_path: Path) -> None:
    hits = captioned(tmp_path, noise=5.0).search("red", 5)
    assert hits.cutoff is None
    assert hits.matches == hits.hits
    assert hits.note.startswith("no cut-off: it would be wrong too often (")


def test_too_few_captions_draw_no_cutoff(tmp_path: Path) -> None:
    searcher = captioned(tmp_path, noise=0.02, texts=30)
    assert searcher.search("red", 5).note == "no cut-off: fewer than 50 captions to measure it with"
    assert (
        searcher.search("red", 5, kind="text").note
        == "no cut-off: it is measured for images that answer a text"
    )
    assert searcher.search("red", 5, chance=0.2).cutoff is not None


def test_captions_that_a_run_may_have_seen_draw_no_cutoff(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    hits = captioned(tmp_path, noise=0.02, run=str(tmp_path / "run")).search("red", 5)
    assert hits.cutoff is None
    assert hits.note == "no cut-off: fewer than 50 captions of the splits val and test to measure it with"
    held = captioned(tmp_path / "b", noise=0.02, texts=100, split=True, run=str(tmp_path / "run"))
    assert held.search("red", 5).cutoff is not None


def test_held_out_captions_are_preferred(tmp_path: Path) -> None:
    found = captioned(tmp_path, noise=0.5, texts=100, split=True).calibration()
    assert found is not None
    assert found.queries == 75
