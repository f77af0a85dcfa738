"""Slow float64 loops over the equations of every aggregator."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from diptych.aggregators import (
    GPO,
    CosSinBiGRU,
    CosSinMLP,
    CosSinTransformer,
    First,
    GeM,
    IndexBiGRU,
    Interpolation,
    KMax,
    Last,
    Max,
    Mean,
    SortedRowBiGRU,
)
from diptych.types import Features


def gru_states(gru: nn.GRU, rows: list[list[float]]) -> list[list[float]]:
    """Cho et al.: reset and update gates, the reset applied to the projected state, one step at a time."""
    weights = {name: value.tolist() for name, value in gru.state_dict().items()}
    hidden = gru.hidden_size
    state, states = [0.0] * hidden, []

    def dot(row: list[float], x: list[float]) -> float:
        return sum(a * b for a, b in zip(row, x, strict=True))

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    for x in rows:
        new = []
        for h in range(hidden):
            gates = []
            for gate in range(3):
                row = gate * hidden + h
                read = dot(weights["weight_ih_l0"][row], x) + weights["bias_ih_l0"][row]
                kept = dot(weights["weight_hh_l0"][row], state) + weights["bias_hh_l0"][row]
                gates.append((read, kept))
            reset, update = (sigmoid(read + kept) for read, kept in gates[:2])
            candidate = math.tanh(gates[2][0] + reset * gates[2][1])
            new.append((1 - update) * candidate + update * state[h])
        state = new
        states.append(state)
    return states


def position_code(p: int, width: int) -> list[float]:
    """sin and cos alternate, frequencies 10000^(−2j/width)."""
    code = []
    for j in range(width // 2):
        code += [math.sin(p * 10000 ** (-2 * j / width)), math.cos(p * 10000 ** (-2 * j / width))]
    return code


def bigru_scores(gru: nn.Module, head: nn.Module, rows: list[list[float]]) -> list[list[float]]:
    """Scores (N, K): mean of both directions, then the bias-free head."""
    ahead = gru_states(gru.ahead, rows)
    back = gru_states(gru.back, rows[::-1])[::-1]
    out = []
    for a, b in zip(ahead, back, strict=True):
        state = [(x + y) / 2 for x, y in zip(a, b, strict=True)]
        out.append([sum(w * s for w, s in zip(row, state, strict=True)) for row in head.weight.tolist()])
    return out


def interpolation_scores(knots: list[list[float]], size: int) -> list[list[float]]:
    """The curve through equally spaced knots, read at k/(N − 1)."""
    pieces, out = len(knots) - 1, []
    for k in range(size):
        r = 0.0 if size == 1 else k / (size - 1)
        left = min(int(r * pieces + 1e-12), pieces - 1)
        t = r * pieces - left
        out.append([(1 - t) * a + t * b for a, b in zip(knots[left], knots[left + 1], strict=True)])
    return out


def transformer_scores(generator: CosSinTransformer, rows: list[list[float]]) -> list[list[float]]:
    """Vaswani et al.: post-norm layers, x + attention, x + relu network; one query and head at a time."""
    x = torch.tensor(rows, dtype=torch.float64)
    for layer in generator.encoder.layers:
        attention = layer.self_attn
        width = attention.head_dim
        q, k, v = (x @ attention.in_proj_weight.T + attention.in_proj_bias).chunk(3, dim=1)
        mixed = torch.zeros_like(x)
        for head in range(attention.num_heads):
            part = slice(head * width, (head + 1) * width)
            for i in range(len(x)):
                weights = torch.exp(k[:, part] @ q[i, part] / math.sqrt(width))
                mixed[i, part] = (weights[:, None] * v[:, part]).sum(0) / weights.sum()
        x = layer.norm1(x + mixed @ attention.out_proj.weight.T + attention.out_proj.bias)
        inner = (x @ layer.linear1.weight.T + layer.linear1.bias).clamp_min(0)
        x = layer.norm2(x + inner @ layer.linear2.weight.T + layer.linear2.bias)
    scores: list[list[float]] = (x @ generator.head.weight.T).tolist()
    return scores


def oracle_scores(generator: nn.Module, columns: list[list[float]]) -> list[list[float]]:
    """Scores (N, K) for one set whose sorted channels are ``columns`` (D lists of N values)."""
    size = len(columns[0])
    if isinstance(generator, CosSinBiGRU):
        return bigru_scores(generator.gru, generator.head, [position_code(p, 32) for p in range(size)])
    if isinstance(generator, IndexBiGRU):
        return bigru_scores(generator.gru, generator.head, generator.embedding.weight.tolist()[:size])
    if isinstance(generator, SortedRowBiGRU):
        weight, bias = generator.projection.weight.tolist(), generator.projection.bias.tolist()
        rows = []
        for k in range(size):
            projected = [sum(w * c[k] for w, c in zip(row, columns, strict=True)) for row in weight]
            rows.append(position_code(k, 32) + [a + b for a, b in zip(projected, bias, strict=True)])
        return bigru_scores(generator.gru, generator.head, rows)
    if isinstance(generator, CosSinMLP):
        weight, bias = generator.hidden.weight.tolist(), generator.hidden.bias.tolist()
        out = []
        for p in range(size):
            code = position_code(p, 32)
            inner = [
                max(0.0, b + sum(w * c for w, c in zip(row, code, strict=True)))
                for row, b in zip(weight, bias, strict=True)
            ]
            out.append(
                [
                    sum(w * x for w, x in zip(row, inner, strict=True))
                    for row in generator.head.weight.tolist()
                ]
            )
        return out
    if isinstance(generator, CosSinTransformer):
        return transformer_scores(generator, [position_code(p, 32) for p in range(size)])
    assert isinstance(generator, Interpolation)
    return interpolation_scores(generator.knots.tolist(), size)


def oracle(module: nn.Module, features: Features, temperature: float = 0.1) -> Tensor:
    """Every aggregator, one sample and one channel at a time."""
    out = torch.zeros(len(features.values), features.values.shape[2], dtype=torch.float64)
    for b, (values, mask) in enumerate(zip(features.values.tolist(), features.mask.tolist(), strict=True)):
        valid = [row for row, keep in zip(values, mask, strict=True) if keep]
        columns = [sorted((row[d] for row in valid), reverse=True) for d in range(out.shape[1])]
        size = len(valid)
        for d, column in enumerate(columns):
            if isinstance(module, Mean):
                out[b, d] = sum(column) / size
            elif isinstance(module, Max):
                out[b, d] = column[0]
            elif isinstance(module, KMax):
                out[b, d] = sum(column[: module.k]) / min(module.k, size)
            elif isinstance(module, First):
                out[b, d] = valid[0][d]
            elif isinstance(module, Last):
                out[b, d] = valid[-1][d]
            elif isinstance(module, GeM):
                p = float(module.p)
                out[b, d] = (sum(max(x, module.eps) ** p for x in column) / size) ** (1 / p)
        if isinstance(module, GPO):
            scores = oracle_scores(module.generator, columns)
            for d, column in enumerate(columns):
                mine = [row[d if len(row) > 1 else 0] for row in scores]
                top = max(mine)
                weights = [math.exp((s - top) / temperature) for s in mine]
                out[b, d] = sum(w * x for w, x in zip(weights, column, strict=True)) / sum(weights)
    return out
