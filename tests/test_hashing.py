"""Hash centres, the CSQ loss and the hash head."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import hashing_oracles as oracle
import numpy as np
import pytest
import torch
from torch import Tensor

from diptych.branches.branch import HashHead
from diptych.data.labels import (
    BITS,
    REDRAWS,
    TORCH_MAGIC,
    checked_centres,
    hadamard,
    hash_centres,
    read_centres,
    tie_vector,
)
from diptych.errors import DataError, SettingsError
from diptych.objectives.labels import CentralSimilarity
from diptych.types import Batch, Embeddings, Features


def distances(codes: Any) -> Any:
    rows = codes.astype(int)
    return (rows.shape[1] - rows @ rows.T) // 2


@pytest.mark.parametrize("bits", BITS)
def test_centres_are_hadamard_rows_then_their_negatives(bits: int) -> None:
    matrix = hadamard(bits).astype(int)
    assert np.array_equal(matrix @ matrix.T, bits * np.eye(bits))
    centres = hash_centres(2 * bits, bits)
    assert np.array_equal(centres, np.concatenate([matrix, -matrix]))
    off = distances(centres)[~np.eye(2 * bits, dtype=bool)]
    assert set(off.tolist()) == {bits // 2, bits}


@pytest.mark.parametrize(("bits", "classes"), [(16, 80), (32, 80), (64, 200)])
def test_further_centres_are_balanced_far_and_the_same_for_a_seed(bits: int, classes: int) -> None:
    centres = hash_centres(classes, bits, seed=3)
    assert centres.shape == (classes, bits)
    assert np.array_equal(centres[: 2 * bits], hash_centres(2 * bits, bits))
    drawn = centres[2 * bits :]
    assert (drawn.astype(int).sum(axis=1) == 0).all()
    assert np.array_equal(centres, hash_centres(classes, bits, seed=3))
    assert not np.array_equal(drawn, hash_centres(classes, bits, seed=4)[2 * bits :])
    apart = distances(centres) + bits * np.eye(classes, dtype=int)
    if bits > 16:  # 48 further codes of 16 bits cannot all keep the distance
        assert apart.min() > bits / 4
    assert len(np.unique(centres, axis=0)) == classes


def test_a_centre_is_redrawn_no_more_often_than_said(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []

    class Counted:
        def permutation(self, row: Any) -> Any:
            drawn.append(row)
            return row

    monkeypatch.setattr(np.random, "default_rng", lambda seed: Counted())
    hash_centres(33, 16)  # the same code each time, at distance 8 of some and 0 of one
    assert len(drawn) == REDRAWS


@pytest.mark.parametrize("bits", [0, 3, 12, 48, 65])
def test_bits_without_a_hadamard_matrix_are_refused(bits: int) -> None:
    with pytest.raises(SettingsError, match=r"\b16\b.*\b32\b.*\b64\b"):
        hash_centres(3, bits)
    with pytest.raises(SettingsError, match=r"\b16\b"):
        HashHead(8, bits, 3)


def batch_of(labels: Tensor | None) -> Batch:
    size = 1 if labels is None else len(labels)
    ids = torch.arange(size)
    empty = Features.whole(torch.zeros(size, 1, dtype=torch.long))
    return Batch(torch.zeros(size, 1), empty, ids, ids, {} if labels is None else {"labels": labels})


def terms_of(objective: CentralSimilarity, h: Tensor, labels: Tensor | None) -> dict[str, Tensor]:
    return objective(Embeddings(h, h), batch_of(labels))


@pytest.mark.parametrize("classes", [4, 40])
def test_the_loss_is_the_equation_in_value_and_gradient(classes: int) -> None:
    rng = np.random.default_rng(classes)
    centres, ties = hash_centres(classes, 16), tie_vector(16)
    labels = rng.random((7, classes)) < 0.3
    labels[:, 0] = True
    h = torch.tensor(np.tanh(rng.normal(size=(7, 16))), dtype=torch.float64, requires_grad=True)
    got = terms_of(CentralSimilarity(centres, ties), h, torch.from_numpy(labels))
    centre, quantisation = oracle.csq_terms(h.detach().numpy(), labels, centres.tolist(), ties.tolist())
    assert float(got["centre"].detach()) == pytest.approx(centre, abs=1e-12)
    assert float(got["quantisation"].detach()) == pytest.approx(0.05 * quantisation, abs=1e-12)
    sum(got.values()).backward()  # type: ignore[union-attr]
    step = 1e-6
    for row, bit in [(0, 0), (3, 7), (6, 15)]:
        shifted = []
        for sign in (1, -1):
            moved = h.detach().numpy().copy()
            moved[row, bit] += sign * step
            a, b = oracle.csq_terms(moved, labels, centres.tolist(), ties.tolist())
            shifted.append(a + 0.05 * b)
        assert h.grad is not None
        assert float(h.grad[row, bit]) == pytest.approx((shifted[0] - shifted[1]) / (2 * step), rel=1e-5)


def test_the_oracle_notices_a_mutation() -> None:
    centres, ties = hash_centres(6, 16), tie_vector(16)
    labels = np.eye(6, dtype=bool) | np.eye(6, k=1, dtype=bool)
    h = torch.tensor(np.tanh(np.random.default_rng(0).normal(size=(6, 16))))
    got = terms_of(CentralSimilarity(centres, ties), h, torch.from_numpy(labels))
    centre, _ = oracle.csq_terms(h, labels, centres.tolist(), ties.tolist())
    assert float(got["centre"]) == pytest.approx(centre)
    wrong = terms_of(CentralSimilarity(centres, -ties), h, torch.from_numpy(labels))
    assert float(wrong["centre"]) != pytest.approx(centre)


def test_images_without_labels_have_no_part() -> None:
    objective = CentralSimilarity(hash_centres(3, 16), tie_vector(16))
    h = torch.tanh(torch.randn(4, 16))
    labels = torch.tensor([[1, 0, 0], [0, 0, 0], [0, 1, 1], [0, 0, 0]])
    some = terms_of(objective, h, labels)
    kept = terms_of(objective, h[[0, 2]], labels[[0, 2]])
    assert float(some["centre"]) == pytest.approx(float(kept["centre"]))
    assert float(some["quantisation"]) == pytest.approx(float(kept["quantisation"]))
    assert all(float(v) == 0 for v in terms_of(objective, h, torch.zeros(4, 3)).values())


def test_saturated_bits_keep_the_loss_finite() -> None:
    objective = CentralSimilarity(hash_centres(2, 16), tie_vector(16))
    h = torch.ones(2, 16, requires_grad=True)
    total = sum(terms_of(objective, h, torch.eye(2)).values())
    total.backward()  # type: ignore[union-attr]
    assert torch.isfinite(total).all()  # type: ignore[arg-type]
    assert h.grad is not None
    assert torch.isfinite(h.grad).all()
    half = terms_of(objective, torch.tanh(torch.randn(2, 16)).half(), torch.eye(2))
    assert half["centre"].dtype == torch.float32


def test_missing_labels_say_what_to_give() -> None:
    objective = CentralSimilarity(hash_centres(2, 16), tie_vector(16))
    with pytest.raises(DataError, match="labels"):
        terms_of(objective, torch.zeros(1, 16), None)
    with pytest.raises(DataError, match=r"\b2\b.*\b16\b"):
        terms_of(objective, torch.zeros(1, 16), torch.ones(1, 3))
    with pytest.raises(SettingsError, match=r"\b32\b"):
        CentralSimilarity(hash_centres(2, 16), tie_vector(32))
    with pytest.raises(SettingsError, match="quantisation is -1"):
        CentralSimilarity(hash_centres(2, 16), tie_vector(16), quantisation=-1)


def test_centres_out_of_a_file_are_checked() -> None:
    assert checked_centres([[1.0, -1.0]], "a file").dtype == np.int8
    with pytest.raises(DataError, match=r"\b1\b"):
        checked_centres([[1, 0]], "a file")
    head = HashHead(8, 16, 4)
    with pytest.raises(SettingsError, match=r"\b16\b"):
        head.use_centres(hash_centres(3, 16))
    head.use_centres(-hash_centres(4, 16))
    assert np.array_equal(head.centres.numpy(), -hash_centres(4, 16))


def test_centres_are_read_from_the_files_of_csq(tmp_path: Path) -> None:
    made = hash_centres(80, 16)
    old, new, plain = tmp_path / "16_coco_80_class.pkl", tmp_path / "new.pkl", tmp_path / "plain.pkl"
    torch.save(torch.from_numpy(made).float(), old, _use_new_zipfile_serialization=False)  # as CSQ's are
    torch.save(torch.from_numpy(made).float(), new)
    plain.write_bytes(pickle.dumps(made.astype(np.float64)))
    np.save(tmp_path / "made.npy", made)
    assert old.read_bytes().startswith(TORCH_MAGIC)
    for path in (old, new, plain, tmp_path / "made.npy"):
        assert np.array_equal(read_centres(path), made)


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("run",))


def test_a_file_of_anything_else_is_refused_and_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = Evil()
    (tmp_path / "evil.pkl").write_bytes(pickle.dumps(evil))
    torch.save(evil, tmp_path / "evil.pt")
    torch.save(evil, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "noise.pkl").write_bytes(b"noise")
    (tmp_path / "cut.pkl").write_bytes(TORCH_MAGIC)
    torch.save(torch.zeros(3, 4), tmp_path / "zeros.pkl")
    for name in ("evil.pkl", "evil.pt", "old.pt", "noise.pkl", "cut.pkl", "zeros.pkl", "gone.pkl"):
        with pytest.raises(DataError):
            read_centres(tmp_path / name)
    assert capsys.readouterr().out == ""


def test_a_head_gives_codes_that_ignore_padding() -> None:
    torch.manual_seed(0)
    head = HashHead(8, 16, 4).eval()
    values, mask = torch.randn(3, 5, 8), torch.tensor([[1, 1, 1, 0, 0], [1] * 5, [1, 0, 0, 0, 0]]).bool()
    codes = head.image(torch.zeros(3, 8), Features(values, mask))
    assert codes.shape == (3, 16)
    assert codes.abs().max() < 1
    changed = torch.where(mask[..., None], values, torch.full_like(values, float("nan")))
    assert torch.equal(head.text(torch.zeros(3, 8), Features(changed, mask)), codes)
    shuffled = Features(values[:, [2, 0, 1, 3, 4]], mask)
    assert torch.allclose(head.image(torch.zeros(3, 8), shuffled)[0], codes[0], atol=1e-6)
    assert [type(layer).__name__ for layer in head.layers] == [
        "Linear", "ReLU", "Dropout", "Linear", "ReLU", "Linear", "Tanh",
    ]  # fmt: skip
