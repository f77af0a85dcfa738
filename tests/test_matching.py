from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from diptych.errors import SettingsError
from diptych.interaction.fusion import Fusion
from diptych.objectives.contrastive import ITC, ITM
from diptych.ops import unit
from diptych.types import Batch, Embeddings, Features, Matches

SIZE = 5
IDS = torch.tensor([7, 7, 3, 4, 9])


def batch(**targets: Tensor) -> Batch:
    words = Features.whole(torch.zeros(SIZE, 1, dtype=torch.int64))
    return Batch(torch.zeros(SIZE, 1), words, IDS, torch.arange(SIZE), targets)


def seen(seed: int = 0) -> Embeddings:
    generator = torch.Generator().manual_seed(seed)
    rows = [unit(torch.randn(SIZE, 4, generator=generator, dtype=torch.float64)) for _ in range(2)]
    logits = torch.randn(3, SIZE, 2, generator=generator, dtype=torch.float64, requires_grad=True)
    drawn = torch.tensor([[2, 3, 4, 0, 1], [3, 4, 0, 1, 2]])
    possible = torch.ones(2, SIZE, dtype=torch.bool)
    tau = torch.tensor(0.2, dtype=torch.float64)
    return Embeddings(rows[0], rows[1], matches=Matches(logits, drawn, possible, tau))


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))


def itm_loop(embeddings: Embeddings, alpha: float, x: Tensor, y: Tensor) -> float:
    """−[(1 − y) log p₀ + y log p₁], pair by pair, averaged over what could be drawn."""
    matches, total, count = embeddings.matches, 0.0, 0
    assert matches is not None
    for kind in range(3):
        for i in range(SIZE):
            if kind and not bool(matches.possible[kind - 1, i]):
                continue
            target = 1.0
            if kind:
                j = int(matches.negatives[kind - 1, i])
                teacher = x if kind == 1 else y
                target = alpha * max(0.0, cosine(teacher[i], teacher[j]))
            no, yes = (math.exp(float(v)) for v in matches.logits[kind, i].detach())
            total -= (1 - target) * math.log(no / (no + yes)) + target * math.log(yes / (no + yes))
            count += 1
    return total / count


def test_itc_follows_the_equation() -> None:
    embeddings, tau = seen(), 0.2
    total = 0.0
    for i in range(SIZE):
        positives = [j for j in range(SIZE) if IDS[i] == IDS[j]]
        for rows, columns in ((embeddings.image, embeddings.text), (embeddings.text, embeddings.image)):
            weights = [math.exp(cosine(rows[i], column) / tau) for column in columns]
            for j in positives:
                total -= math.log(weights[j] / sum(weights)) / len(positives)
    assert embeddings.matches is not None
    warmer = replace(embeddings, matches=replace(embeddings.matches, temperature=torch.tensor(0.25)))
    assert abs(float(ITC()(warmer, batch())["itc"]) - total / (2 * SIZE)) > 1e-2  # another τ would be noticed
    found = ITC()(embeddings, batch())["itc"]
    assert float(found.detach()) == pytest.approx(total / (2 * SIZE), abs=1e-6)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_itm_and_its_soft_targets_follow_the_equation(alpha: float) -> None:
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(SIZE, 6, generator=generator) for _ in range(2))
    embeddings = seen()
    found = ITM(alpha)(embeddings, batch(teacher_image=x, teacher_text=y))["itm"]
    assert float(found.detach()) == pytest.approx(itm_loop(embeddings, alpha, x, y), abs=1e-6)
    if alpha:
        swapped = itm_loop(embeddings, alpha, y, x)  # the other modality's teacher would be noticed
        assert abs(float(found.detach()) - swapped) > 1e-3
        assert abs(float(found.detach()) - itm_loop(embeddings, 0.0, x, y)) > 1e-3


def test_rows_without_a_negative_are_left_out() -> None:
    embeddings = seen()
    assert embeddings.matches is not None
    possible = embeddings.matches.possible.clone()
    possible[0, 2] = False
    fewer = replace(embeddings, matches=replace(embeddings.matches, possible=possible))
    x = torch.randn(SIZE, 6)
    loss = ITM(0.0)(fewer, batch())["itm"]
    assert float(loss.detach()) == pytest.approx(itm_loop(fewer, 0.0, x, x), abs=1e-6)
    loss.backward()
    assert embeddings.matches.logits.grad is not None
    assert (embeddings.matches.logits.grad[1, 2] == 0).all()


def test_alpha_zero_reads_no_teacher_and_alpha_above_needs_one() -> None:
    ITM(0.0)(seen(), batch())
    with pytest.raises(SettingsError, match="teacher_image"):
        ITM(0.3)(seen(), batch())
    with pytest.raises(SettingsError, match=r"1\.5"):
        ITM(1.5)


def test_a_model_without_fusion_is_refused() -> None:
    with pytest.raises(SettingsError, match="Fusion"):
        ITC()(replace(seen(), matches=None), batch())


def test_the_fusion_encoder_compares_what_it_says() -> None:
    torch.manual_seed(0)
    model = Fusion(6, 8, layers=1, heads=2, dropout=0.0).double()
    images = Features.whole(torch.randn(SIZE, 3, 6, dtype=torch.float64))
    mask = torch.arange(4) < torch.tensor([4, 2, 3, 1, 4])[:, None]
    texts = Features(torch.randn(SIZE, 4, 8, dtype=torch.float64), mask)
    embeddings = replace(seen(), image_features=images, text_features=texts, matches=None)
    matches = model.compare(embeddings, batch())
    assert matches.logits.shape == (3, SIZE, 2)
    for i in range(SIZE):
        wrong_text, wrong_image = matches.negatives[:, i].tolist()
        assert IDS[i] != IDS[wrong_text]
        assert IDS[i] != IDS[wrong_image]
    with torch.no_grad():
        scores = model(images, texts).double()
    rows = torch.arange(SIZE)
    expected = [scores[rows, rows], scores[rows, matches.negatives[0]], scores[matches.negatives[1], rows]]
    assert torch.allclose(matches.logits[..., 1].double(), torch.stack(expected), atol=1e-6)


def test_the_temperature_returns_to_its_interval() -> None:
    model = Fusion(6, 8, layers=1, heads=2)
    model.temperature.data.fill_(3.0)
    images, texts = Features.whole(torch.randn(SIZE, 3, 6)), Features.whole(torch.randn(SIZE, 4, 8))
    rows = unit(torch.randn(SIZE, 4))
    matches = model.compare(Embeddings(rows, rows, images, texts), batch())
    assert float(matches.temperature.detach()) == pytest.approx(0.5)
