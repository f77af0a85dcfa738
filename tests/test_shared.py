"""The weight-sharing transformer: its equations, padding, sharing, and what it delegates."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from diptych.encoders.cnn import PrecomputedGrid
from diptych.encoders.shared import Contextual, Layer, TokenTransformer
from diptych.errors import SettingsError
from diptych.types import Features


def features(*sizes: int, dim: int = 8, seed: int = 0) -> Features:
    generator = torch.Generator().manual_seed(seed)
    length = max(sizes)
    values = torch.randn(len(sizes), length, dim, generator=generator, dtype=torch.float64)
    return Features(values, torch.arange(length) < torch.tensor(sizes)[:, None])


def transformer(depth: int = 1, dim: int = 8, heads: int = 2, **further: float) -> TokenTransformer:
    torch.manual_seed(1)
    made = TokenTransformer(dim, depth, heads, feedforward=12, **further).double().eval()  # type: ignore[arg-type]
    for parameter in made.parameters():  # norms and biases too must matter
        torch.nn.init.normal_(parameter, std=0.5)
    return made


def norm(x: list[float], weight: Tensor, bias: Tensor) -> list[float]:
    mean = sum(x) / len(x)
    var = sum((v - mean) ** 2 for v in x) / len(x)
    scale, shift = weight.tolist(), bias.tolist()
    return [(v - mean) / math.sqrt(var + 1e-5) * w + b for v, w, b in zip(x, scale, shift, strict=True)]


def linear(x: list[float], layer: torch.nn.Linear) -> list[float]:
    rows, biases = layer.weight.tolist(), layer.bias.tolist()
    return [sum(w * v for w, v in zip(row, x, strict=True)) + b for row, b in zip(rows, biases, strict=True)]


def oracle(layer: Layer, tokens: list[list[float]], *, scaled: bool = True) -> list[list[float]]:
    """One layer on the valid tokens of one set, token by token, head by head."""
    dim, heads = len(tokens[0]), layer.heads
    width = dim // heads
    joint = [linear(x, layer.joint) for x in tokens]
    out = []
    for i, x in enumerate(tokens):
        mixed: list[float] = []
        for head in range(heads):
            at = slice(head * width, (head + 1) * width)
            query = joint[i][:dim][at]
            scores = [
                sum(q * k for q, k in zip(query, other[dim : 2 * dim][at], strict=True))
                / (math.sqrt(width) if scaled else 1.0)
                for other in joint
            ]
            shares = [math.exp(s - max(scores)) for s in scores]
            shares = [s / sum(shares) for s in shares]
            for d in range(width):
                mixed.append(sum(s * other[2 * dim :][at][d] for s, other in zip(shares, joint, strict=True)))
        added = [a + b for a, b in zip(x, linear(mixed, layer.out), strict=True)]
        h = norm(added, layer.attended.weight, layer.attended.bias)
        inner = [v * 0.5 * (1 + math.erf(v / math.sqrt(2))) for v in linear(h, layer.first)]
        fed = [a + b for a, b in zip(h, linear(inner, layer.second), strict=True)]
        out.append(norm(fed, layer.fed.weight, layer.fed.bias))
    return out


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("heads", [1, 4])
def test_layers_follow_the_equations(depth: int, heads: int) -> None:
    made, sets = transformer(depth, heads=heads), features(5, 1, 3)
    found = made(sets)
    for row, size in enumerate(sets.sizes.tolist()):
        tokens = sets.values[row, :size].tolist()
        for layer in made.layers:
            assert isinstance(layer, Layer)
            tokens = oracle(layer, tokens)
        torch.testing.assert_close(found.values[row, :size], torch.tensor(tokens, dtype=torch.float64))


def test_the_oracle_notices_a_mutation() -> None:
    made, sets = transformer(), features(4)
    layer = made.layers[0]
    assert isinstance(layer, Layer)
    wrong = torch.tensor(oracle(layer, sets.values[0].tolist(), scaled=False), dtype=torch.float64)
    assert (made(sets).values[0] - wrong).abs().max() > 1e-3


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("filling", [0.0, 7.0, float("nan")])
def test_padding_never_changes_an_output(depth: int, filling: float) -> None:
    made, sets = transformer(depth), features(3, 3)
    padded = torch.full((2, 9, 8), filling, dtype=torch.float64)
    padded[:, :3] = sets.values
    wide = made(Features(padded, torch.arange(9) < torch.tensor([3, 3])[:, None]))
    torch.testing.assert_close(wide.values[:, :3], made(sets).values)
    assert wide.mask.sum() == 6


def test_padding_gets_and_gives_no_gradient() -> None:
    made, sets = transformer(), features(4, 2)
    values = sets.values.clone().requires_grad_()
    out = made(Features(values, sets.mask))
    (out.values * sets.mask[..., None]).square().sum().backward()
    assert values.grad is not None
    assert (values.grad[~sets.mask] == 0).all()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in made.parameters())


def test_order_of_tokens_does_not_matter() -> None:
    made, sets = transformer(2), features(6)
    turned = torch.tensor([3, 1, 5, 0, 2, 4])
    torch.testing.assert_close(
        made(Features(sets.values[:, turned], sets.mask)).values, made(sets).values[:, turned]
    )


def test_attention_sums_to_one_over_the_valid_tokens() -> None:
    sets = features(5, 2)
    for depth in (0, 1, 2):
        shares = transformer(depth).attention(sets)
        torch.testing.assert_close(shares.sum(1), torch.ones(2, dtype=shares.dtype))
        assert (shares[~sets.mask] == 0).all()


def test_attention_is_what_the_layer_uses() -> None:
    made, sets = transformer(heads=1), features(3)
    layer = made.layers[0]
    assert isinstance(layer, Layer)
    tokens = sets.values[0].tolist()
    joint = [linear(x, layer.joint) for x in tokens]
    received = [0.0] * 3
    for q in joint:
        scores = [
            math.exp(sum(a * b for a, b in zip(q[:8], k[8:16], strict=True)) / math.sqrt(8)) for k in joint
        ]
        received = [r + s / sum(scores) / 3 for r, s in zip(received, scores, strict=True)]
    torch.testing.assert_close(made.attention(sets)[0].tolist(), received)


def test_dropout_acts_while_training_only() -> None:
    made, sets = transformer(dropout=0.5), features(4)
    assert torch.equal(made(sets).values, made(sets).values)
    made.train()
    assert not torch.equal(made(sets).values, made(sets).values)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [({"depth": -1}, "depth is -1"), ({"heads": 3}, "3 heads"), ({"dropout": 1.0}, "dropout")],
)
def test_impossible_sizes_are_refused(wrong: dict[str, float], word: str) -> None:
    with pytest.raises(SettingsError, match=word):
        TokenTransformer(8, **wrong)  # type: ignore[arg-type]


def test_widths_must_agree() -> None:
    with pytest.raises(SettingsError, match=r"\b6\b.*\b8\b"):
        Contextual(PrecomputedGrid(4, 6), TokenTransformer(8, heads=2))


def test_questions_are_passed_on_to_the_inner_encoder() -> None:
    class Asked(PrecomputedGrid):
        def frozen_part(self) -> torch.nn.Module:
            return self.linear

        def pretrained(self) -> tuple[str, ...]:
            return ("linear",)

        def packs(self, device: torch.device) -> bool:
            return device.type == "cuda"

    inner = Asked(4, 8)
    outer = Contextual(inner, TokenTransformer(8, heads=2))
    assert outer.frozen_part() is inner.linear
    assert outer.pretrained() == ("inner.linear",)
    assert outer.packs(torch.device("cuda"))
    assert not outer.packs(torch.device("cpu"))
