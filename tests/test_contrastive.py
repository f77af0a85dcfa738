"""InfoNCE against a float64 loop over its equation."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from pairs import batch_of, embeddings
from torch import Tensor, nn

from diptych.errors import SettingsError
from diptych.objectives.contrastive import InfoNCE
from diptych.types import Embeddings

IDS = {
    "distinct": [0, 1, 2, 3, 4, 5],
    "duplicates": [0, 1, 0, 2, 1, 0],
    "one image": [7, 7, 7, 7, 7, 7],
}
SWITCHES = [
    {"same_image": same, "reduction": reduction}
    for same, reduction in itertools.product(("positive", "ignored", "negative"), ("per_row", "per_entry"))
]


def oracle(
    e: Embeddings, ids: list[int], same_image: str, reduction: str, temperature: float = 0.07
) -> float:
    """CUSA's L_NCE: half the mean over rows of both directions' cross-entropies against H."""
    count, total = len(ids), 0.0
    scores = [[float(v @ w) for w in e.text] for v in e.image]
    transposed = [[scores[i][j] for i in range(count)] for j in range(count)]
    for table in (scores, transposed):
        for i in range(count):
            same = [j for j in range(count) if ids[j] == ids[i]]
            positives = same if same_image == "positive" else [i]
            left_out = [j for j in same if j != i] if same_image == "ignored" else []
            denominator = sum(math.exp(table[i][j] / temperature) for j in range(count) if j not in left_out)
            for j in positives:
                total -= math.log(math.exp(table[i][j] / temperature) / denominator) / len(positives)
    loss = total / 2 / count
    return loss / count if reduction == "per_entry" else loss


def value(objective: InfoNCE, e: Embeddings, ids: list[int]) -> Tensor:
    terms = objective(e, batch_of(ids))
    assert list(terms) == ["info_nce"]
    return terms["info_nce"]


@pytest.mark.parametrize("ids", IDS.values(), ids=IDS.keys())
@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_follows_the_equation(switches: dict[str, Any], ids: list[int]) -> None:
    e = embeddings(len(ids))
    expected = oracle(e, ids, **switches)
    assert value(InfoNCE(**switches), e, ids).item() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(
    "wrong",
    [
        {"same_image": "ignored"},
        {"same_image": "negative"},
        {"reduction": "per_entry"},
        {"temperature": 0.071},
    ],
    ids=str,
)
def test_the_oracle_notices_a_mutation(wrong: dict[str, Any]) -> None:
    e, ids = embeddings(6), IDS["duplicates"]
    right: dict[str, Any] = {"same_image": "positive", "reduction": "per_row"}
    got = value(InfoNCE(**{**right, **wrong}), e, ids).item()
    assert got != pytest.approx(oracle(e, ids, **right), rel=1e-3)


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_gradients(switches: dict[str, Any]) -> None:
    objective, e = InfoNCE(learned=True, temperature=0.3, **switches).double(), embeddings(6)
    ids = IDS["duplicates"]

    def loss(image: Tensor, text: Tensor, _: Tensor) -> Tensor:
        return value(objective, Embeddings(image, text), ids)

    inputs = (e.image.requires_grad_(), e.text.requires_grad_(), objective.temperature)
    assert torch.autograd.gradcheck(loss, inputs)


def test_a_batch_of_one_is_zero() -> None:
    assert value(InfoNCE(), embeddings(1), [3]).item() == 0


def test_the_order_of_pairs_does_not_matter() -> None:
    e, ids = embeddings(6), IDS["duplicates"]
    order = [4, 2, 0, 5, 1, 3]
    shuffled = Embeddings(e.image[order], e.text[order])
    torch.testing.assert_close(value(InfoNCE(), shuffled, [ids[i] for i in order]), value(InfoNCE(), e, ids))


def test_two_texts_of_one_image_can_be_swapped() -> None:
    e, ids = embeddings(6), IDS["duplicates"]
    image = e.image.clone()
    image[2] = image[0]  # rows 0 and 2 are the same image
    swapped = e.text[[2, 1, 0, 3, 4, 5]]
    a, b = value(InfoNCE(), Embeddings(image, e.text), ids), value(InfoNCE(), Embeddings(image, swapped), ids)
    torch.testing.assert_close(a, b)


def test_extreme_scores_stay_finite() -> None:
    e = embeddings(6)
    far = Embeddings((100 * e.image).requires_grad_(), 100 * e.text)
    for same_image in ("positive", "ignored", "negative"):
        loss = value(InfoNCE(same_image=same_image), far, IDS["duplicates"])  # type: ignore[arg-type]
        (gradient,) = torch.autograd.grad(loss, far.image)
        assert torch.isfinite(loss)
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("push", [-1e6, 1e6])
def test_a_learned_temperature_returns_to_its_interval(push: float) -> None:
    objective = InfoNCE(temperature=0.05, learned=True, clamp=(0.01, 0.10))
    e, ids = embeddings(6), IDS["duplicates"]
    temperature = objective.temperature
    assert isinstance(temperature, nn.Parameter)
    with torch.no_grad():
        temperature.add_(push)
    loss = value(objective, e, ids)
    bound = 0.01 if push < 0 else 0.10
    assert temperature.item() == pytest.approx(bound)
    assert loss.item() == pytest.approx(oracle(e, ids, "positive", "per_row", bound), rel=1e-5)
    loss.backward()
    assert temperature.grad is not None
    assert temperature.grad != 0  # a bound must not be a trap
    assert value(objective, e, ids).item() == loss.item()


def test_gradients_accumulate_over_two_forward_passes() -> None:
    objective = InfoNCE(learned=True)
    first, second = (value(objective, embeddings(6, seed), IDS["distinct"]) for seed in (0, 1))
    (first + second).backward()


def test_only_a_learned_temperature_is_a_parameter() -> None:
    assert [name for name, _ in InfoNCE(learned=True).named_parameters()] == ["temperature"]
    assert list(InfoNCE().parameters()) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.0}, r"temperature.*0\.0"),
        ({"clamp": (0.01, 0.1)}, "learned=True"),
        ({"temperature": 0.5, "learned": True, "clamp": (0.01, 0.1)}, r"0\.5"),
        ({"same_image": "maybe"}, "maybe"),
        ({"reduction": "sum"}, "'sum'"),
    ],
)
def test_bad_settings_say_so(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        InfoNCE(**settings)
