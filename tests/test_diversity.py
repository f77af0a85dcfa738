"""DCL against float64 loops written from CODER's equations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from coder_oracles import diversity_loop, made, positive_loop
from pairs import batch_of
from torch import Tensor

from diptych.errors import SettingsError
from diptych.objectives.combine import On
from diptych.objectives.contrast import Contrast, CoupledQueue
from diptych.objectives.diversity import DiversityContrast, Enqueue
from diptych.types import Embeddings

KINDS = ["std", "std_reversed", "std_supplement", "entropy", "none"]


def one_direction(
    s: Tensor, ids: list[int], contrast: Contrast, bank_div: list[float] | None = None
) -> float:
    """l_DCL of Eq. 5 as printed, with the scale of the positive as a choice."""
    n, mu = len(ids), contrast.temperature
    rows = [
        [float(s[i, q]) for q in range(n) if (ids[i] != ids[q] if contrast.mask_same_image else i != q)]
        for i in range(n)
    ]
    div = diversity_loop(rows, contrast.diversity, contrast.epsilon)
    if bank_div is not None:
        div = [(a + b) / 2 for a, b in zip(div, bank_div, strict=True)]
    c = mu if contrast.pos_scale == "mu" else float(contrast.pos_scale)
    total = 0.0
    for i in range(n):
        inner = sum(math.exp((v - contrast.margin) / (mu * div[i])) for v in rows[i])
        total += mu * math.log(inner + 1.0) - c * positive_loop(float(s[i, i]), contrast.positive)
    return total / n


def dcl_loop(e: Embeddings, ids: list[int], contrast: Contrast) -> float:
    s = e.image @ e.text.T
    return one_direction(s, ids, contrast) + one_direction(s.T, ids, contrast)


def value(e: Embeddings, ids: list[int], contrast: Contrast, **kwargs: object) -> Tensor:
    return DiversityContrast(contrast, **kwargs)(e, batch_of(ids))["diversity"]  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "ids", [[0], [4, 4], [0, 1], [0, 1, 2, 3, 4], [3, 1, 3, 0, 1, 3, 7], [5, 5, 5], list(range(24))]
)
def test_equals_the_equation(ids: list[int], kind: str) -> None:
    e, contrast = made(len(ids), shift=0.3), Contrast(diversity=kind)  # type: ignore[arg-type]
    assert value(e, ids, contrast).item() == pytest.approx(dcl_loop(e, ids, contrast), rel=1e-9, abs=1e-12)


READINGS = [
    Contrast(pos_scale="mu"),
    Contrast(pos_scale="mu", positive="raw", mask_same_image=False),
    Contrast(positive="relu", pos_scale=0.5),
    Contrast(positive="raw", diversity="entropy"),
    Contrast(temperature=0.02, margin=-0.1, epsilon=0.7),
    Contrast(diversity="std_supplement", mask_same_image=False),
    Contrast(diversity="none", temperature=0.5),
]


@pytest.mark.parametrize("contrast", READINGS)
@pytest.mark.parametrize("seed", range(3))
def test_every_reading_equals_its_loop(contrast: Contrast, seed: int) -> None:
    ids = [0, 1, 1, 2, 0, 5]
    e = made(6, seed=seed, shift=-0.2)
    assert value(e, ids, contrast).item() == pytest.approx(dcl_loop(e, ids, contrast), rel=1e-9)


@pytest.mark.parametrize(
    "mutation",
    [
        lambda c: Contrast(margin=0.31),
        lambda c: Contrast(temperature=0.11),
        lambda c: Contrast(epsilon=0.12),
        lambda c: Contrast(diversity="std_reversed"),
        lambda c: Contrast(diversity="none"),
        lambda c: Contrast(pos_scale=0.9),
        lambda c: Contrast(mask_same_image=False),
    ],
)
def test_the_oracle_notices_a_mutation(mutation: Callable[[Contrast], Contrast]) -> None:
    ids, e = [0, 1, 1, 2, 0, 5], made(6, shift=0.4)
    assert abs(value(e, ids, mutation(Contrast())).item() - dcl_loop(e, ids, Contrast())) > 1e-5


@pytest.mark.parametrize("stop", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind: str, stop: bool) -> None:
    ids = [0, 1, 1, 2, 0]
    e = made(5, d=4, shift=0.5)
    contrast = Contrast(diversity=kind, stop_gradient=stop, temperature=0.3)  # type: ignore[arg-type]
    constant = [
        contrast.spread(s, contrast.negatives(*[torch.tensor(ids)] * 2)) for s in (e.image @ e.text.T,)
    ]

    def loss(image: Tensor, text: Tensor) -> Tensor:
        return value(Embeddings(image, text), ids, contrast)

    def loss_of_one_direction(image: Tensor, text: Tensor) -> Tensor:
        s = image @ text.T
        negatives = contrast.negatives(torch.tensor(ids), torch.tensor(ids))
        return contrast(s, negatives, s.diagonal(), constant[0])

    inputs = (e.image.clone().requires_grad_(), e.text.clone().requires_grad_())
    # a stopped gradient is that of the loss with div held constant, so finite differences must hold it too
    assert torch.autograd.gradcheck(loss_of_one_direction if stop and kind != "none" else loss, inputs)


@pytest.mark.parametrize("contrast", READINGS)
def test_gradcheck_of_every_reading(contrast: Contrast) -> None:
    # the gradient flows through the diversity, as printed; temperatures that finite differences can follow
    contrast = replace(contrast, stop_gradient=False, temperature=max(0.3, contrast.temperature))
    ids, e = [0, 1, 1, 2, 0], made(5, d=4, shift=0.5)
    inputs = (e.image.clone().requires_grad_(), e.text.clone().requires_grad_())
    assert torch.autograd.gradcheck(lambda v, w: value(Embeddings(v, w), ids, contrast), inputs)


def test_stopped_gradient_holds_the_diversity() -> None:
    ids = [0, 1, 2, 3]
    e = made(4, shift=0.5)
    image = e.image.clone().requires_grad_()
    contrast = Contrast()
    value(Embeddings(image, e.text), ids, contrast).backward()
    s = e.image @ e.text.T
    negatives = contrast.negatives(torch.tensor(ids), torch.tensor(ids))
    div = contrast.spread(s, negatives), contrast.spread(s.T, negatives)
    held = e.image.clone().requires_grad_()
    s = held @ e.text.T
    (contrast(s, negatives, s.diagonal(), div[0]) + contrast(s.T, negatives, s.diagonal(), div[1])).backward()
    torch.testing.assert_close(image.grad, held.grad)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", [True, False])
def test_extreme_scores_stay_finite(kind: str, stop: bool) -> None:
    one = torch.zeros(4, 3)
    one[:, 0] = 1.0
    for image, text in [(one, one), (one, -one), (-one, one)]:
        image, text = image.clone().requires_grad_(), text.clone().requires_grad_()
        contrast = Contrast(diversity=kind, stop_gradient=stop, temperature=1e-3)  # type: ignore[arg-type]
        for ids in ([0, 1, 2, 3], [7, 7, 7, 7], [0, 0, 0, 1]):
            loss = value(Embeddings(image, text), ids, contrast)
            grads = torch.autograd.grad(loss, (image, text))
            assert loss.isfinite()
            assert all(g.isfinite().all() for g in grads)


def test_permuting_pairs_changes_nothing() -> None:
    ids, e = [0, 1, 1, 2, 0, 5], made(6)
    order = torch.tensor([3, 5, 0, 1, 4, 2])
    moved = Embeddings(e.image[order], e.text[order])
    again = value(moved, [ids[i] for i in order.tolist()], Contrast())
    torch.testing.assert_close(again, value(e, ids, Contrast()))


def test_view_reads_the_branch() -> None:
    ids, main, branch = [0, 1, 2], made(3), made(3, seed=9)
    both = Embeddings(main.image, main.text, views={"concept": branch})
    pointed = On(DiversityContrast(Contrast()), "concept")(both, batch_of(ids))["diversity"]
    torch.testing.assert_close(pointed, value(branch, ids, Contrast()))
    across = On(DiversityContrast(Contrast()), "image", "concept.image")(both, batch_of(ids))["diversity"]
    torch.testing.assert_close(across, value(Embeddings(main.image, branch.image), ids, Contrast()))
    with pytest.raises(SettingsError, match="topic"):
        On(DiversityContrast(Contrast()), "topic")(both, batch_of(ids))
    with pytest.raises(SettingsError, match="concept"):
        On(DiversityContrast(Contrast()), "image", "concept")


@pytest.mark.parametrize(("start", "filled"), [("now", 0), ("now", 3), ("now", 8), ("full", 5), ("full", 8)])
def test_bank_averages_the_diversity(start: str, filled: int) -> None:
    ids, e, keys = [0, 1, 1, 2], made(4, shift=0.3), made(8, seed=5)
    key_ids = [9, 1, 8, 0, 0, 7, 2, 6]
    queue = CoupledQueue(8, 6, start=start).double()  # type: ignore[arg-type]
    feeder = Enqueue(queue)
    if filled:
        queue.push(keys.image[:filled], keys.text[:filled], torch.tensor(key_ids[:filled]))
    contrast = Contrast()
    divs: list[list[float] | None] = [None, None]
    if filled == 8 or (start == "now" and filled):
        for k, (anchors, bank) in enumerate([(e.image, keys.text), (e.text, keys.image)]):
            rows = [
                [float(anchors[i] @ bank[j]) for j in range(filled) if key_ids[j] != ids[i]] for i in range(4)
            ]
            divs[k] = diversity_loop(rows, "std", contrast.epsilon)
    s = e.image @ e.text.T
    expected = one_direction(s, ids, contrast, divs[0]) + one_direction(s.T, ids, contrast, divs[1])
    objective = DiversityContrast(contrast, bank=queue)
    assert objective(e, batch_of(ids))["diversity"].item() == pytest.approx(expected, rel=1e-9)
    assert not objective.state_dict()  # the feeder saves the bank, once
    assert set(feeder.state_dict()) == {f"queue.{n}" for n in ("image", "text", "ids", "pointer", "count")}


def test_forward_is_pure() -> None:
    ids, e = [0, 1, 2], made(3)
    objective = DiversityContrast()
    assert torch.equal(objective(e, batch_of(ids))["diversity"], objective(e, batch_of(ids))["diversity"])


def test_a_bank_nobody_feeds_is_refused() -> None:
    queue = CoupledQueue(8, 6)
    objective = DiversityContrast(bank=queue)
    with pytest.raises(SettingsError, match="bank"):
        objective.start_epoch(0)
    Enqueue(queue)
    objective.start_epoch(0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"temperature": 0.0}, r"temperature.*0\.0"),
        ({"epsilon": -1.0}, r"epsilon.*-1\.0"),
        ({"diversity": "variance"}, "variance"),
        ({"positive": "abs"}, "'abs'"),
        ({"pos_scale": "nu"}, "pos_scale.*'nu'"),
    ],
)
def test_bad_settings(settings: dict[str, object], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        Contrast(**settings)  # type: ignore[arg-type]
