"""Captions: pairing, selection and identity, for any number of texts per image."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.data.arrays import ArrayStore
from diptych.data.captions import Captions, StoreChain, StoreRows
from diptych.errors import DataError


def make(counts: list[int], order: list[int] | None = None, name: str = "made") -> Captions:
    """Image i has ``counts[i]`` texts, given in ``order``; features are its row number."""
    image_of = np.asarray([i for i, count in enumerate(counts) for _ in range(count)], dtype=np.int64)
    if order is not None:
        image_of = image_of[order]
    seen = dict.fromkeys(range(len(counts)), 0)
    texts = []
    for image in image_of.tolist():
        texts.append(f"text {seen[image]} of {image}")
        seen[image] += 1
    n = len(counts)
    return Captions(
        images=ArrayStore(np.arange(n, dtype=np.float32)[:, None]),
        texts=texts,
        image_of=image_of,
        image_ids=[f"id{i}" for i in range(n)],
        splits=["val" if i % 3 == 2 else "train" for i in range(n)],
        labels={"number": list(range(n))},
        text_ids=[f"t{m}" for m in range(len(texts))],
        name=name,
    )


@st.composite
def some_captions(draw: st.DrawFn) -> Captions:
    counts = draw(st.lists(st.integers(0, 4), min_size=3, max_size=12))
    order = draw(st.permutations(range(sum(counts))))
    return make(counts, order)


@given(some_captions())
def test_texts_of_lists_every_text_once_under_its_image(captions: Captions) -> None:
    rows = captions.texts_of()
    assert len(rows) == len(captions.images)
    assert sorted(np.concatenate(rows).tolist()) == list(range(len(captions.texts)))
    for image, texts in enumerate(rows):
        assert (captions.image_of[texts] == image).all()
        assert (np.diff(texts) > 0).all()


@given(some_captions(), st.data())
def test_subset_keeps_pairs_and_order(captions: Captions, data: st.DataObject) -> None:
    rows = data.draw(st.permutations(range(len(captions.images))))
    rows = rows[: data.draw(st.integers(0, len(rows)))]
    subset = captions.subset(rows)
    assert [subset.images[i][0] for i in range(len(rows))] == rows
    assert list(subset.image_ids) == [f"id{i}" for i in rows]
    assert subset.labels["number"] == rows
    for at, (old, texts) in enumerate(zip(rows, subset.texts_of(), strict=True)):
        own = captions.texts_of()[old]
        assert [subset.texts[m] for m in texts] == [captions.texts[m] for m in own]
        assert [subset.text_ids[m] for m in texts] == [captions.text_ids[m] for m in own]
        assert subset.images.content_key(at) == captions.images.content_key(old)
    assert (np.diff(subset.image_of) >= 0).all()  # texts follow their images


@given(some_captions())
def test_splits_partition_the_images(captions: Captions) -> None:
    parts = [captions.split(name) for name in ("train", "val")]
    assert sum(len(part.images) for part in parts) == len(captions.images)
    assert sum(len(part.texts) for part in parts) == len(captions.texts)
    assert {i for part in parts for i in part.image_ids} == set(captions.image_ids)


def test_fingerprint_names_the_content_and_nothing_else() -> None:
    captions = make([2, 1, 3])
    same = dataclasses.replace(captions, name="another place")
    assert captions.fingerprint() == same.fingerprint()
    changes = {
        "texts": [*captions.texts[:-1], "another"],
        "image_ids": ["a", "b", "c"],
        "splits": ["train"] * 3,
        "image_of": captions.image_of[::-1].copy(),
        "images": ArrayStore(np.ones((3, 1), dtype=np.float32)),
    }
    prints = {captions.fingerprint()}
    for field, value in changes.items():
        prints.add(dataclasses.replace(captions, **{field: value}).fingerprint())
    assert len(prints) == len(changes) + 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"texts": ["one"]}, r"\b1\b.*image_of.*\b6\b"),
        ({"image_ids": ["a", "b"]}, r"\b3\b.*\b2\b"),
        ({"image_of": np.asarray([0, 0, 1, 2, 2, 3])}, r"\b3\b"),
        ({"image_ids": ["a", "b", "a"]}, "'a'"),
        ({"labels": {"x": [1]}}, r"'x'.*\b1\b.*\b3\b"),
    ],
)
def test_parts_that_do_not_fit_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        dataclasses.replace(make([2, 1, 3]), **change)


def test_unknown_split_and_repeated_row_are_refused() -> None:
    with pytest.raises(DataError, match="'test'"):
        make([1, 1, 1]).split("test")
    with pytest.raises(DataError, match="made"):
        make([1, 1, 1]).subset([0, 0])


def test_iterating_gives_pairs() -> None:
    assert list(make([1, 2])) == [(0, "text 0 of 0"), (1, "text 0 of 1"), (1, "text 1 of 1")]


def test_rows_within_one_part_of_a_joined_store_refer_to_that_part() -> None:
    first, second = (ArrayStore(np.arange(n, dtype=np.float32)[:, None]) for n in (4, 3))
    joined = StoreChain([StoreRows(first, np.asarray([3, 1])), second])
    assert [float(joined[i][0]) for i in range(5)] == [3, 1, 0, 1, 2]
    assert joined.content_key(0) == first.content_key(3)
    inside = StoreRows(joined, np.asarray([1, 0]))
    assert inside.store is first
    assert inside.rows.tolist() == [1, 3]
    assert StoreRows(joined, np.asarray([2, 4])).store is second
    both = StoreRows(joined, np.asarray([4, 0]))
    assert both.store is joined
    assert [float(both[i][0]) for i in range(2)] == [2, 3]
    with pytest.raises(IndexError):
        joined[5]
