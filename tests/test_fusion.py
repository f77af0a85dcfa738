from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from diptych.errors import DataError, SettingsError
from diptych.interaction import fusion
from diptych.interaction.fusion import Fusion, FusionLayer, hard_negatives, trimmed
from diptych.types import Features

IMAGE_DIM, DIM, HEADS = 6, 8, 2


def make(layers: int = 2, **options: object) -> Fusion:
    torch.manual_seed(0)
    made = Fusion(IMAGE_DIM, DIM, layers=layers, heads=HEADS, **options).double().eval()  # type: ignore[arg-type]
    for parameter in made.parameters():
        if parameter.dim():
            torch.nn.init.normal_(parameter, std=0.4)
    return made


def sets(count: int, dim: int, longest: int, seed: int) -> Features:
    """Sets of different sizes; what stands at padded places is not a number."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, longest + 1, (count,), generator=generator)
    sizes[0] = longest
    mask = torch.arange(longest) < sizes[:, None]
    values = torch.randn(count, longest, dim, generator=generator, dtype=torch.float64)
    return Features(values.masked_fill(~mask[..., None], torch.nan), mask)


# ------------------------------------------------------------------------------ one pair, written from the equations


def attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """softmax(q kᵀ / √d) v, head by head and query by query."""
    width = queries.shape[1] // HEADS
    out = torch.zeros_like(queries)
    for head in range(HEADS):
        own = slice(head * width, (head + 1) * width)
        for row in range(len(queries)):
            energies = [float(queries[row, own] @ key[own]) / math.sqrt(width) for key in keys]
            top = max(energies)
            weights = [math.exp(e - top) for e in energies]
            for weight, value in zip(weights, values, strict=True):
                out[row, own] += weight / sum(weights) * value[own]
    return out


def norm(x: Tensor, layer: torch.nn.LayerNorm) -> Tensor:
    rows = []
    for row in x:
        centred = row - row.mean()
        rows.append(centred / torch.sqrt((centred**2).mean() + layer.eps) * layer.weight + layer.bias)
    return torch.stack(rows)


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def pair_logits(model: Fusion, image: Tensor, words: Tensor) -> Tensor:
    """One image (R, image_dim) and one text (W, D), no padding, layer by layer."""
    x = words
    for layer in model.layers:
        assert isinstance(layer, FusionLayer)
        q, k, v = layer.joint(x).split(DIM, dim=1)
        x = norm(x + layer.own(attention(q, k, v)), layer.attended)
        keys, values = layer.key_value(image).split(DIM, dim=1)
        x = norm(x + layer.cross(attention(layer.query(x), keys, values)), layer.looked)
        x = norm(x + layer.second(gelu(layer.first(x))), layer.fed)
    first, normal, _, last = model.head
    return last(gelu(norm(first(x[:1]), normal)))[0]


def brute(model: Fusion, images: Features, texts: Features) -> Tensor:
    rows = [
        torch.stack(
            [
                pair_logits(model, image[seen], words[read])
                for words, read in zip(texts.values, texts.mask, strict=True)
            ]
        )
        for image, seen in zip(images.values, images.mask, strict=True)
    ]
    return torch.stack(rows)  # (N, M, 2)


@pytest.mark.parametrize("pairs", [3, 512])
def test_scores_follow_the_equations_pair_by_pair(pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion, "PAIRS", pairs)
    model, images, texts = make(), sets(4, IMAGE_DIM, 5, 1), sets(5, DIM, 6, 2)
    with torch.no_grad():
        expected = brute(model, images, texts)[..., 1]
        found = model(images, texts).double()
    assert torch.allclose(found, expected, atol=1e-6)  # scores are float32
    assert expected.std() > 0.05


def test_the_oracle_would_notice_a_wrong_layer() -> None:
    model, images, texts = make(), sets(2, IMAGE_DIM, 4, 1), sets(2, DIM, 4, 2)
    with torch.no_grad():
        found = model(images, texts).double()
        wrong = make()
        first = wrong.layers[0]
        assert isinstance(first, FusionLayer)
        first.cross.weight.mul_(1.01)
        assert not torch.allclose(found, brute(wrong, images, texts)[..., 1], atol=1e-4)


def test_texts_of_one_image_do_not_see_each_other() -> None:
    model, images = make(), sets(2, IMAGE_DIM, 5, 1)
    texts = sets(3, DIM, 6, 2)
    with torch.no_grad():
        seen = model.look(images)
        together = model.logits(seen, images.mask, texts.map(lambda t: t.expand(2, *t.shape)))
        for column in range(3):
            alone = texts.map(lambda t, c=column: t[c : c + 1].expand(2, 1, *t.shape[1:]))
            assert torch.allclose(model.logits(seen, images.mask, alone)[:, 0], together[:, column])


def test_padding_reaches_neither_scores_nor_gradients() -> None:
    model, images, texts = make(), sets(3, IMAGE_DIM, 5, 3), sets(3, DIM, 6, 2)
    assert images.values.isnan().any()
    assert texts.values.isnan().any()
    model.train()
    scores = model(images, texts)
    assert torch.isfinite(scores).all()
    scores.sum().backward()
    for name, parameter in model.named_parameters():
        if name != "temperature":
            assert parameter.grad is not None, name
            assert torch.isfinite(parameter.grad).all(), name


@pytest.mark.parametrize("pairs", [3, 512])
def test_keys_and_values_are_computed_once_per_image(pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion, "PAIRS", pairs)
    model, looked = make(layers=1), []
    layer = model.layers[0]
    assert isinstance(layer, FusionLayer)
    keep = layer.look
    monkeypatch.setattr(layer, "look", lambda image: (looked.append(len(image)), keep(image))[1])
    with torch.no_grad():
        model(sets(4, IMAGE_DIM, 5, 1), sets(7, DIM, 6, 2))
    assert sum(looked) == 4


def test_features_of_another_encoder_are_refused() -> None:
    with pytest.raises(DataError, match=r"\b2\b"):
        make()(sets(2, IMAGE_DIM + 1, 4, 1), sets(2, DIM, 4, 2))
    with pytest.raises(SettingsError, match=r"\b3\b"):
        Fusion(IMAGE_DIM, DIM, heads=3)
    with pytest.raises(SettingsError, match=r"\b0\b"):
        Fusion(IMAGE_DIM, DIM, heads=2, candidates=0)


def test_trimming_keeps_every_word() -> None:
    texts = sets(4, DIM, 6, 2)
    wide = Features(
        torch.nn.functional.pad(texts.values, (0, 0, 0, 3)), torch.nn.functional.pad(texts.mask, (0, 3))
    )
    assert torch.equal(trimmed(wide).mask, texts.mask)
    left = wide.map(lambda t: t.flip(1))
    assert trimmed(left).mask.shape == wide.mask.shape


# --------------------------------------------------------------------------------------------- hard negatives


def test_negatives_are_drawn_by_their_scores_and_never_of_the_own_image() -> None:
    torch.manual_seed(0)
    ids = torch.tensor([0, 1, 1, 2, 3])
    scores, tau = torch.rand(5, 5) * 0.4, 0.1
    draws = 5_000
    counts = torch.zeros(2, 5, 5)
    for _ in range(draws):
        drawn, possible = hard_negatives(scores, ids, tau)
        assert possible.all()
        counts[torch.arange(2)[:, None], torch.arange(5), drawn] += 1
    for side, matrix in enumerate((scores, scores.T)):
        for i in range(5):
            total = sum(math.exp(float(matrix[i, j]) / tau) for j in range(5))
            weights = [
                0.0 if ids[i] == ids[j] else math.exp(float(matrix[i, j]) / tau) / total + 1e-5
                for j in range(5)
            ]
            for j in range(5):
                expected = weights[j] / sum(weights)
                measured = float(counts[side, i, j]) / draws
                assert abs(measured - expected) < 0.035, (side, i, j)
                if ids[i] == ids[j]:
                    assert counts[side, i, j] == 0
    even = 1 / (len(ids) - 1)  # a draw that ignores the scores would be noticed
    assert (counts[0, 0, 1:] / draws - even).abs().max() > 0.1


def test_a_batch_of_one_image_has_no_negatives() -> None:
    drawn, possible = hard_negatives(torch.rand(3, 3), torch.tensor([4, 4, 4]), 0.1)
    assert not possible.any()
    assert drawn.shape == (2, 3)
    _, possible = hard_negatives(torch.rand(3, 3), torch.tensor([4, 4, 5]), 0.1)
    assert possible.all()
