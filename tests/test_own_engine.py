"""An engine from outside: the example of the docs as a package of its own, found by its entry point."""

from __future__ import annotations

import itertools
import shutil
import sys
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

from diptych.errors import IndexFault, SettingsError
from diptych.index.base import Index
from diptych.index.engines.embedded.index import EmbeddedIndex
from diptych.index.engines.opening import empty_index, index_exists, open_index
from diptych.index.protocol import Item
from diptych.registries import ENGINES

EXAMPLE = Path(__file__).parent.parent / "docs" / "one_file_engine.py"
LINES = 400  # that an engine may take
files = itertools.count()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The class of the example, from a package as pip installs it."""
    folder = tmp_path_factory.mktemp("package")
    shutil.copy(EXAMPLE, folder)
    metadata = folder / "one_file_engine-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: one-file-engine\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[diptych.engines]\nonefile = one_file_engine:OneFileIndex\n")
    sys.path.insert(0, str(folder))
    try:
        yield ENGINES.find("onefile")
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("one_file_engine", None)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"onefile://{tmp_path}/index{next(files)}.db"


@pytest.fixture
def both(engine: Any, url: str, tmp_path: Path) -> Iterator[tuple[Index, Index]]:
    with empty_index(url, DIM) as own, EmbeddedIndex.create(tmp_path / "i", DIM) as local:
        fill(own, local)
        yield own, local


def test_an_engine_takes_few_lines() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= LINES


def test_it_answers_what_the_embedded_engine_answers(both: Any) -> None:
    own, _ = both
    assert own.info.engine == "onefile"
    check_exact_search(*both)
    check_order_of_addition(own)
    check_filters_by_definition(own)
    check_reading(*both)


@pytest.mark.parametrize("text", FILTERS)
def test_filters_mean_the_same(both: Any, text: str) -> None:
    check_filter(*both, text)


def test_ties_are_decided_alike(engine: Any, url: str, tmp_path: Path) -> None:
    with engine.create(url, DIM) as own, EmbeddedIndex.create(tmp_path / "i", DIM) as local:
        check_images_first(own, local)
    with engine.create(f"{url}2", WIDE) as own, EmbeddedIndex.create(tmp_path / "j", WIDE) as local:
        check_many_ties(own, local)


@pytest.mark.parametrize("text", FILTERS_OF_LARGE_NUMBERS)
def test_large_numbers(engine: Any, url: str, text: str) -> None:
    items = [Item(f"i{n}", metadata={"n": value}) for n, value in enumerate(LARGE_NUMBERS)]
    with engine.create(url, DIM) as own:
        own.add(items, np.ones((len(items), DIM)))
        check_large_numbers(own, items, text)


def test_changes_and_models(engine: Any, url: str) -> None:
    check_updates(engine, url)
    check_models(engine, f"{url}2")


@pytest.mark.parametrize("kind", ["image", "text", None])
def test_words_rank_as_in_the_embedded_engine(both: Any, kind: Any) -> None:
    for text in ("red shoes", "running", "dog dogs café", "日本語 straße", "nothing like this", "red"):
        for filter in (None, "price < 50"):
            a, b = (index.search_words(text, 20, kind=kind, filter=filter) for index in both)
            assert a.scores == pytest.approx(b.scores, rel=1e-9)
            assert a.ids == b.ids, text


def test_common_words_are_left_out_alike(engine: Any, url: str, tmp_path: Path) -> None:
    texts = [f"the {'dog' if n % 7 else 'cat'} number{n % 50}" for n in range(1300)]
    items = [Item(str(n), text=text) for n, text in enumerate(texts)]
    with engine.create(url, 1) as own, EmbeddedIndex.create(tmp_path / "i", 1) as local:
        for index in (own, local):
            index.add(items, np.ones((len(items), 1)))
        for text in ("the", "the dog", "the cat", "the number7", "the dog zebra"):
            a, b = (index.search_words(text, 30, kind="image") for index in (own, local))
            assert a.scores == pytest.approx(b.scores, rel=1e-9), text
            assert a.ids == b.ids, text


def test_what_it_cannot_do_is_said(both: Any) -> None:
    own, _ = both
    with pytest.raises(SettingsError, match="no approximate index"):
        own.build_graph()
    with pytest.raises(IndexFault, match="image"):
        own.search(np.ones(DIM), kind="image", exact=False)
    assert own.compact() == 0


def test_a_second_reader_sees_changes(engine: Any, url: str) -> None:
    items, vectors = collection(20)
    with empty_index(url, DIM) as own, open_index(url) as reader:
        assert index_exists(url)
        own.add(items, vectors)
        same(reader.search(vectors[3], 5), own.search(vectors[3], 5))
        with pytest.raises(IndexFault, match="writable"):
            reader.delete(["item1"])
        assert own.collection("a", "/r").number == 0
        own.move_collection(0, "b", "/s")
        own.delete([item.id for item in items])
        own.forget_collection(0)
        assert reader.info.collections == ()
        assert len(reader) == 0
    with pytest.raises(IndexFault, match="closed"):
        len(reader)
