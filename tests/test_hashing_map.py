"""Codes and MAP@top: equal to loops over every pair, whatever ties there are."""

from __future__ import annotations

import hashing_oracles as oracle
import numpy as np
import pytest

from diptych.codes import Codes, hamming, kth, nearest, pack
from diptych.errors import DataError, SettingsError
from diptych.evaluation import hashing
from diptych.evaluation.hashing import hashing_map


def unpack(codes: Codes, bits: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int8]]:
    """(N, W) words → (N, bits) of −1 and +1."""
    rows = np.ascontiguousarray(codes.astype("<u8", copy=False)).view(np.uint8)
    return np.where(np.unpackbits(rows, axis=1, count=bits, bitorder="little") == 1, 1, -1).astype(np.int8)


@pytest.mark.parametrize("bits", [1, 7, 16, 32, 64, 65, 200, 512])
def test_distances_are_the_bits_that_differ(bits: int) -> None:
    rng = np.random.default_rng(bits)
    values = rng.normal(size=(40, bits))
    codes = pack(values)
    signs = np.where(values >= 0, 1, -1)
    assert np.array_equal(unpack(codes, bits), signs)
    expected = (bits - signs @ signs.T) // 2
    for order in (np.ascontiguousarray, np.asfortranarray):
        stored = order(codes)
        assert np.array_equal([hamming(code, stored) for code in codes], expected)


def test_zero_is_plus_one_and_nan_is_refused() -> None:
    assert np.array_equal(unpack(pack([[0.0, -0.0, -1e-9, 1e-9]]), 4), [[1, 1, -1, 1]])
    with pytest.raises(DataError):
        pack([[float("nan")]])
    with pytest.raises(DataError, match=r"\b1\b"):
        pack([1.0, 2.0])
    with pytest.raises(DataError, match=r"\b1\b"):
        hamming(pack(np.ones((1, 64)))[0], pack(np.ones((3, 65))))


def test_nearest_is_a_stable_sort() -> None:
    rng = np.random.default_rng(0)
    for size, high in [(1, 1), (50, 3), (200, 65), (300, 1000)]:
        distances = rng.integers(0, high, size).astype(np.uint16)
        for k in (1, 7, size, size + 5):
            assert np.array_equal(nearest(distances, k), np.argsort(distances, kind="stable")[:k])
        assert kth(distances, size) == distances.max()
    assert len(nearest(np.zeros(4, np.uint8), 0)) == 0


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("missing", ["zero", "skip"])
def test_map_is_the_loop_over_sorted_items(seed: int, missing: hashing.Missing) -> None:
    rng = np.random.default_rng(seed)
    bits, top = [(3, 7), (16, 20), (64, 25), (70, 100)][seed % 4]
    query, database = rng.normal(size=(6, bits)), rng.normal(size=(25, bits))
    labels = [rng.random((n, 5)) < 0.2 for n in (6, 25)]
    labels[0][2:, 3], labels[1][:, 3] = True, rng.random(25) < 0.5
    labels[0][0] = False  # a query without labels
    labels[0][1] = [True, False, False, False, False]
    labels[1][:, 0] = False  # so that this query has nothing relevant
    got = hashing_map(query, database, *labels, top=top, missing=missing)
    expected = oracle.mean_average_precision(query, database, *labels, top, missing)
    assert got.map == pytest.approx(expected, abs=1e-10)
    assert got.unlabelled >= 1
    assert got.without_relevant >= 1
    assert got.precisions.shape == (got.queries, 2)
    assert got.precisions[:, 0].mean() == pytest.approx(got.map)
    assert got.queries + got.unlabelled + (got.without_relevant if missing == "skip" else 0) == 6


@pytest.mark.parametrize("top", [1, 3, 5, 6, 100])
def test_tie_average_is_the_mean_over_every_order(top: int) -> None:
    rng = np.random.default_rng(top)
    query, database = rng.normal(size=(5, 3)), rng.normal(size=(7, 3))
    labels = [rng.random((n, 3)) < 0.5 for n in (5, 7)]
    labels[0][:, 0] = True
    got = hashing_map(query, database, *labels, top=top)
    assert got.map_tie_averaged == pytest.approx(
        oracle.tie_averaged(query, database, *labels, top), abs=1e-10
    )
    assert got.top == min(top, 7)


@pytest.mark.parametrize("bits", [5, 64, 250])
def test_leaving_one_out_ranks_all_others(bits: int) -> None:
    rng = np.random.default_rng(bits)
    codes, labels = rng.normal(size=(12, bits)), rng.random((12, 3)) < 0.5
    labels[:, 0] = True
    got = hashing_map(codes, codes, labels, labels, top=9, leave_one_out=True)
    values = []
    for n in range(12):
        others = [m for m in range(12) if m != n]
        values.append(
            oracle.mean_average_precision(codes[[n]], codes[others], labels[[n]], labels[others], 9)
        )
    assert got.map == pytest.approx(np.mean(values))
    assert hashing_map(codes, codes, labels, labels, leave_one_out=True).top == 11
    with pytest.raises(DataError, match="leaving one out"):
        hashing_map(codes[:5], codes, labels[:5], labels, leave_one_out=True)


def test_the_oracles_notice_a_mutation(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    query, database = rng.normal(size=(8, 3)), rng.normal(size=(30, 3))
    labels = [rng.random((n, 4)) < 0.4 for n in (8, 30)]
    expected = oracle.mean_average_precision(query, database, *labels, 10)
    assert hashing_map(query, database, *labels, top=10).map == pytest.approx(expected)
    monkeypatch.setattr(hashing, "kth", lambda distances, k: kth(distances, k + 1) - 1)
    with pytest.raises((AssertionError, ValueError, IndexError)):
        assert hashing_map(query, database, *labels, top=10).map == pytest.approx(expected)


def test_without_ties_both_values_agree_and_order_plays_no_part() -> None:
    rng = np.random.default_rng(2)
    bits = 20
    database = np.where(
        np.arange(bits)[None] < np.arange(1, bits)[:, None], 1.0, -1.0
    )  # 19 different distances
    query = -np.ones((1, bits))
    labels = rng.random((19, 3)) < 0.5
    own = np.array([[True, False, True]])
    got = hashing_map(query, database, own, labels, top=12)
    shuffled = rng.permutation(19)
    again = hashing_map(query, database[shuffled], own, labels[shuffled], top=12)
    assert got.map == pytest.approx(got.map_tie_averaged)
    assert (again.map, again.map_tie_averaged) == pytest.approx((got.map, got.map_tie_averaged))


def test_bad_input_is_refused_with_its_correction() -> None:
    codes, labels = np.ones((3, 8)), np.eye(3)
    with pytest.raises(DataError, match=r"\b3\b"):
        hashing_map(codes, np.ones((3, 9)), labels, labels)
    with pytest.raises(DataError, match=r"\b3\b"):
        hashing_map(codes, codes, labels[:2], labels)
    with pytest.raises(DataError, match=r"\b3\b"):
        hashing_map(codes, codes, labels, np.eye(3)[:, :2])
    with pytest.raises(DataError, match="0 and 1"):
        hashing_map(codes, codes, 2 * labels, labels)
    with pytest.raises(DataError, match=r"\b3\b"):
        hashing_map(codes, codes, np.zeros((3, 3)), labels)
    with pytest.raises(SettingsError, match="drop"):
        hashing_map(codes, codes, labels, labels, missing="drop")  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match=r"\b0\b"):
        hashing_map(codes, codes, labels, labels, top=0)
