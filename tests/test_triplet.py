"""The triplet objective against a float64 loop over its equation."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from pairs import batch_of, embeddings
from torch import Tensor

from diptych.errors import SettingsError
from diptych.objectives.triplet import Triplet
from diptych.types import Embeddings

IDS = {
    "distinct": [0, 1, 2, 3, 4, 5],
    "duplicates": [0, 1, 0, 2, 1, 0],
    "one image": [7, 7, 7, 7, 7, 7],
}
SWITCHES = [
    {"negatives": negatives, "mask_same_image": mask, "reduction": reduction}
    for negatives, mask, reduction in itertools.product(("hardest", "all"), (True, False), ("sum", "mean"))
]


def oracle(
    e: Embeddings, ids: list[int], negatives: str, mask_same_image: bool, reduction: str, margin: float = 0.2
) -> float:
    """VSE++: hinge costs of every pair, diagonal zero, the largest per anchor or all of them, summed."""
    scores = [[float(v @ w) for w in e.text] for v in e.image]
    count, total = len(scores), 0.0
    for anchor in range(count):
        for_image, for_text = [0.0], [0.0]
        for other in range(count):
            if anchor == other or (mask_same_image and ids[anchor] == ids[other]):
                continue
            for_image.append(max(0.0, margin + scores[anchor][other] - scores[anchor][anchor]))
            for_text.append(max(0.0, margin + scores[other][anchor] - scores[anchor][anchor]))
        pick = max if negatives == "hardest" else sum
        total += pick(for_image) + pick(for_text)
    return total / count if reduction == "mean" else total


def value(objective: Triplet, e: Embeddings, ids: list[int]) -> Tensor:
    terms = objective(e, batch_of(ids))
    assert list(terms) == ["triplet"]
    return terms["triplet"]


@pytest.mark.parametrize("ids", IDS.values(), ids=IDS.keys())
@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_follows_the_equation(switches: dict[str, Any], ids: list[int]) -> None:
    e = embeddings(len(ids))
    assert value(Triplet(**switches), e, ids).item() == pytest.approx(oracle(e, ids, **switches), rel=1e-12)


@pytest.mark.parametrize(
    "wrong",
    [{"negatives": "all"}, {"mask_same_image": False}, {"reduction": "mean"}, {"margin": 0.21}],
    ids=str,
)
def test_the_oracle_notices_a_mutation(wrong: dict[str, Any]) -> None:
    e, ids = embeddings(6), IDS["duplicates"]
    right: dict[str, Any] = {"negatives": "hardest", "mask_same_image": True, "reduction": "sum"}
    got = value(Triplet(**{**right, **wrong}), e, ids).item()
    assert got != pytest.approx(oracle(e, ids, **right), rel=1e-3)


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_gradients(switches: dict[str, Any]) -> None:
    objective, e = Triplet(**switches), embeddings(6)
    ids = IDS["duplicates"]

    def loss(image: Tensor, text: Tensor) -> Tensor:
        return value(objective, Embeddings(image, text), ids)

    assert torch.autograd.gradcheck(loss, (e.image.requires_grad_(), e.text.requires_grad_()))


def test_an_anchor_without_negatives_adds_nothing() -> None:
    e = embeddings(6)
    e.image.requires_grad_()
    loss = value(Triplet(), e, IDS["one image"])
    loss.backward()
    assert loss.item() == 0
    assert e.image.grad is not None
    assert (e.image.grad == 0).all()


def test_a_batch_of_one_is_zero() -> None:
    assert value(Triplet(mask_same_image=False), embeddings(1), [3]).item() == 0


def test_the_order_of_pairs_does_not_matter() -> None:
    e, ids = embeddings(6), IDS["duplicates"]
    order = [4, 2, 0, 5, 1, 3]
    shuffled = Embeddings(e.image[order], e.text[order])
    same = value(Triplet(), shuffled, [ids[i] for i in order])
    torch.testing.assert_close(same, value(Triplet(), e, ids))


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_equal_scores_have_the_collapsed_value(reduction: Any) -> None:
    objective = Triplet(reduction=reduction)
    same = torch.nn.functional.normalize(torch.ones(128, 4, dtype=torch.float64))
    collapsed = objective.collapsed_value(128)
    assert collapsed == pytest.approx(51.2 if reduction == "sum" else 0.4)
    assert value(objective, Embeddings(same, same), list(range(128))).item() == pytest.approx(collapsed)
    assert Triplet(negatives="all").collapsed_value(128) is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"margin": -0.1}, r"-0\.1"),
        ({"negatives": "semi-hard"}, "semi-hard.*hardest.*all"),
        ({"reduction": "none"}, "none.*sum.*mean"),
    ],
)
def test_bad_settings_say_so(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Triplet(**settings)
