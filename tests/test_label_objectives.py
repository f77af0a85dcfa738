"""The objectives of label-wise retrieval against float64 loops over the equations, with mutations."""

from __future__ import annotations

import math

import pytest
import torch

from diptych.errors import DataError, SettingsError
from diptych.objectives.combine import Sum
from diptych.objectives.labels import (
    DSCMR,
    Alternate,
    Consistency,
    LabelLoss,
    MaskedPrediction,
)
from diptych.objectives.objective import after_step, start_epoch
from diptych.training.step import path_of
from diptych.types import Batch, Embeddings, Features

B, C, D = 7, 5, 6


def batch(pairs: int = B, labels: int = C, seed: int = 0, targets: bool = True) -> Batch:
    made = torch.Generator().manual_seed(seed)
    y = (torch.rand(pairs, labels, generator=made) < 0.4).float()
    ids = torch.arange(pairs)
    inputs = Features.whole(torch.zeros(pairs, 2, 3))
    words = Features.whole(torch.ones(pairs, 2, dtype=torch.int64))
    return Batch(inputs, words, ids, ids, {"labels": y} if targets else {})


def rows(width: int, seed: int, pairs: int = B) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(pairs, width, generator=made, dtype=torch.float64).requires_grad_()


def seen(**views: tuple[torch.Tensor, torch.Tensor]) -> Embeddings:
    first = next(iter(views.values()))
    return Embeddings(*first, views={name: Embeddings(*both) for name, both in views.items()})


def dot(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def slow_logistic(p_image, p_text, y) -> float:
    """(1/|B_I ∪ B_T|) Σ_n log(1 + exp(−yᵀp))."""
    terms = [
        math.log(1 + math.exp(-dot(target, p)))
        for side in (p_image, p_text)
        for p, target in zip(side, y, strict=True)
    ]
    return sum(terms) / len(terms)


def slow_bce(p_image, p_text, y) -> float:
    cells = [
        -(t * math.log(p) + (1 - t) * math.log(1 - p))
        for side in (p_image, p_text)
        for row, target in zip(side, y, strict=True)
        for p, t in zip(row, target, strict=True)
    ]
    return sum(cells) / len(cells)


def slow_nll(f, g, s) -> float:
    total = 0.0
    for i, a in enumerate(f):
        for j, b in enumerate(g):
            theta = dot(a, b) / math.sqrt(dot(a, a)) / math.sqrt(dot(b, b)) / 2
            total += math.log(1 + math.exp(theta)) - s[i][j] * theta
    return total / len(f) / len(g)


def slow_relation(y, counts: bool) -> list[list[float]]:
    shared = [[dot(a, b) for b in y] for a in y]
    return shared if counts else [[float(n >= 1) for n in row] for row in shared]


def slow_consistency(f, g, y, counts: bool) -> float:
    s = slow_relation(y, counts)
    return slow_nll(f, f, s) + slow_nll(f, g, s) + slow_nll(g, g, s)


def slow_dscmr(p_image, p_text, u, v, y, alpha: float = 1e-3, beta: float = 1e-1) -> float:
    def length(a, b) -> float:
        return math.sqrt(sum((x - z) ** 2 for x, z in zip(a, b, strict=True)))

    n = len(y)
    labels = sum(length(p, t) for p, t in zip(p_image, y, strict=True)) / n
    labels += sum(length(p, t) for p, t in zip(p_text, y, strict=True)) / n
    same = sum(length(a, b) for a, b in zip(u, v, strict=True)) / n
    return labels + alpha * slow_consistency(u, v, y, counts=True) + beta * same


def total(terms) -> torch.Tensor:
    return torch.stack(list(terms.values())).sum()


@pytest.mark.parametrize("pairs", [1, 2, B])
@pytest.mark.parametrize("seed", range(3))
def test_the_label_loss_is_the_equation(pairs, seed):
    data = batch(pairs, seed=seed)
    y = data.targets["labels"].double().tolist()
    image, text = rows(C, seed + 10, pairs), rows(C, seed + 20, pairs)
    loss = total(LabelLoss()(seen(labels=(image, text)), data))
    expected = slow_logistic(image.tolist(), text.tolist(), y)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert loss.item() != pytest.approx(slow_logistic((-image).tolist(), text.tolist(), y))  # another sign
    (gradient,) = torch.autograd.grad(loss, image)
    step = 1e-6
    moved = image.detach().clone()
    moved[0, 1] += step
    assert gradient[0, 1].item() == pytest.approx(
        (slow_logistic(moved.tolist(), text.tolist(), y) - expected) / step, abs=1e-5
    )
    image, text = image.sigmoid(), text.sigmoid()
    loss = total(LabelLoss("bce")(seen(labels=(image, text)), data))
    assert loss.item() == pytest.approx(slow_bce(image.tolist(), text.tolist(), y), rel=1e-12)


def test_the_label_loss_of_sure_predictions_is_finite():
    data = batch()
    p = data.targets["labels"].clone()
    wrong = 1 - p
    for rows_ in (p, wrong):
        loss = total(LabelLoss("bce")(seen(labels=(rows_, rows_)), data))
        assert torch.isfinite(loss)


@pytest.mark.parametrize("relation", ["shared", "counts"])
@pytest.mark.parametrize("pairs", [1, 3, B])
def test_consistency_is_three_nll_terms(relation, pairs):
    data = batch(pairs)
    y = data.targets["labels"].double().tolist()
    f, g = rows(D, 1, pairs), rows(D, 2, pairs)
    loss = total(Consistency(relation=relation)(seen(front=(f, g)), data))
    counts = relation == "counts"
    assert loss.item() == pytest.approx(slow_consistency(f.tolist(), g.tolist(), y, counts), rel=1e-6)
    s = slow_relation(y, counts)
    two = slow_nll(f.tolist(), f.tolist(), s) + slow_nll(f.tolist(), g.tolist(), s)
    assert loss.item() != pytest.approx(two)
    if pairs == B:
        assert loss.item() != pytest.approx(slow_consistency(f.tolist(), g.tolist(), y, not counts))


def test_dscmr_is_the_equation_with_norms_that_are_not_squared():
    data = batch()
    y = data.targets["labels"].double().tolist()
    p, q, u, v = rows(C, 1), rows(C, 2), rows(D, 3), rows(D, 4)
    terms = DSCMR()(seen(labels=(p, q), common=(u, v)), data)
    expected = slow_dscmr(*(side.tolist() for side in (p, q, u, v)), y)
    assert total(terms).item() == pytest.approx(expected, rel=1e-6)
    squared = sum(
        ((a - b) ** 2).sum(1).mean() for a, b in ((p, data.targets["labels"]), (q, data.targets["labels"]))
    )
    assert terms["image"].item() + terms["text"].item() != pytest.approx(squared.item())
    # a prediction that is exactly right has no direction to move in, and no NaN
    exact = data.targets["labels"].double().requires_grad_()
    total(DSCMR()(seen(labels=(exact, q), common=(u, u)), data)).backward()
    assert torch.isfinite(exact.grad).all()
    assert torch.isfinite(u.grad).all()


def test_masked_prediction_is_the_mean_over_all_masked_tokens():
    image = torch.tensor([[3.0, 2.0], [0.0, 0.0], [4.0, 1.0]])
    text = torch.tensor([[1.0, 1.0], [0.0, 0.0], [5.0, 3.0]])
    data = batch(3)
    terms = MaskedPrediction(0.1)(seen(context=(image, text)), data)
    assert terms["object"].item() == pytest.approx(0.1 * 7 / 3)
    assert terms["word"].item() == pytest.approx(0.1 * 6 / 4)
    nothing = torch.zeros(3, 2)
    assert total(MaskedPrediction(0.1)(seen(context=(nothing, nothing)), data)).item() == 0
    assert list(MaskedPrediction(1.0, sides=["text"])(seen(context=(image, text)), data)) == ["word"]


def test_rows_in_another_order_give_the_same_losses():
    data, order = batch(), torch.randperm(B)
    mixed = data.map(lambda t: t[order])
    views = {
        "labels": (rows(C, 1), rows(C, 2)),
        "front": (rows(D, 3), rows(D, 4)),
        "common": (rows(D, 5), rows(D, 6)),
    }
    other = {name: (a[order], b[order]) for name, (a, b) in views.items()}
    for objective in (LabelLoss(), Consistency(), DSCMR()):
        assert total(objective(seen(**views), data)).item() == pytest.approx(
            total(objective(seen(**other), mixed)).item(), rel=1e-9
        )


def alternating() -> Alternate:
    def side(name):
        return Sum(
            {"label": (LabelLoss(sides=[name]), 1.0), "context": (MaskedPrediction(0.1, sides=[name]), 1.0)}
        )

    return Alternate(side("image"), side("text"))


def test_alternating_steps_take_turns_and_remember_them():
    data = batch()
    views = seen(labels=(rows(C, 1), rows(C, 2)), context=(torch.ones(B, 2), torch.ones(B, 2)))
    objective = alternating()
    start_epoch(objective, 0)
    found = []
    for _ in range(3):
        before = path_of(objective)
        found.append(set(objective(views, data)))
        assert set(objective(views, data)) == found[-1]  # pure: the turn moves in after_step alone
        after_step(objective, views, data)
        assert path_of(objective) != before
    assert found == [{"label", "context"}] * 3  # one term each: they carry the name of the member
    joint = Sum({"label": (LabelLoss(), 1.0), "context": (MaskedPrediction(0.1), 1.0)})
    image, text = (total(alternating().even(views, data)), total(alternating().odd(views, data)))
    assert (image + text).item() == pytest.approx(total(joint(views, data)).item(), rel=1e-9)
    resumed = alternating()
    resumed.load_state_dict(objective.state_dict())
    start_epoch(resumed, 0)
    assert resumed.current is resumed.odd  # three steps are done
    assert objective.current is objective.odd


def test_an_image_step_leaves_the_text_rows_without_a_gradient():
    image, text = rows(C, 1), rows(C, 2)
    objective = alternating()
    total(
        objective(seen(labels=(image, text), context=(torch.ones(B, 2), torch.ones(B, 2))), batch())
    ).backward()
    assert image.grad is not None
    assert text.grad is None


def test_bad_settings_and_missing_labels_get_one_sentence():
    for weight in (-0.1, float("nan")):
        with pytest.raises(SettingsError, match=r"\b0\b"):
            MaskedPrediction(weight)
    with pytest.raises(SettingsError, match=r"DSCMR.*-1"):
        DSCMR(invariance=-1)
    with pytest.raises(SettingsError, match="'mse'"):
        LabelLoss("mse")  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="some"):
        Consistency(relation="some")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="labels"):
        LabelLoss()(seen(labels=(rows(C, 1), rows(C, 2))), batch(targets=False))
    with pytest.raises(DataError, match="labels"):
        Consistency()(seen(front=(rows(D, 1), rows(D, 2))), batch(targets=False))
    with pytest.raises(DataError, match=r"\(7, 5\).*\(7, 6\)"):
        LabelLoss()(seen(labels=(rows(C + 1, 1), rows(C + 1, 2))), batch())
    with pytest.raises(SettingsError, match="labels"):
        LabelLoss()(seen(front=(rows(C, 1), rows(C, 2))), batch())
