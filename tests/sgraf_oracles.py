"""SGRAF one text at a time, one pair at a time, in float64: plain loops over the equations."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

State = dict[str, Tensor]


def l2(x: Tensor) -> Tensor:
    """x / (‖x‖ + 1e-8)."""
    return x / (x.pow(2).sum().sqrt() + 1e-8)


def leaky(x: Tensor) -> Tensor:
    """LeakyReLU with slope 0.1."""
    return torch.where(x > 0, x, 0.1 * x)


def similarity_vectors(w: State, regions: Tensor, words: Tensor, g_v: Tensor, g_t: Tensor) -> Tensor:
    """N (1 + L, K) of one image (R, D) and one text (L, D)."""
    r, n_words = len(regions), len(words)
    s = [[leaky((regions[i] * words[j]).sum()) for j in range(n_words)] for i in range(r)]
    rows = [l2(torch.stack(s[i])) for i in range(r)]  # each region over the words
    nodes = [l2(w["vectors.overall.weight"] @ (g_v - g_t).pow(2) + w["vectors.overall.bias"])]
    for j in range(n_words):
        attention = torch.softmax(torch.stack([9 * rows[i][j] for i in range(r)]), dim=0)
        context = l2(sum((attention[i] * regions[i] for i in range(r)), torch.zeros_like(words[j])))
        nodes.append(l2(w["vectors.local.weight"] @ (context - words[j]).pow(2) + w["vectors.local.bias"]))
    return torch.stack(nodes)


def sgr_score(w: State, nodes: Tensor, steps: int, key_bias: Tensor | None = None) -> Tensor:
    """Three steps with separate weights, all nodes, then node 0."""
    for step in range(steps):
        name = f"steps.{step}."
        q = nodes @ w[name + "query.weight"].T + w[name + "query.bias"]
        k = nodes @ w[name + "key.weight"].T
        k = k if key_bias is None else k + key_bias
        edges = torch.softmax(q @ k.T, dim=1)
        nodes = torch.relu((edges @ nodes) @ w[name + "mix.weight"].T + w[name + "mix.bias"])
    return torch.sigmoid(nodes[0] @ w["score.weight"][0] + w["score.bias"][0])


def score_matrix(
    kind: str, w: State, images: Any, texts: Any, training: bool, steps: int = 3
) -> tuple[Tensor, State]:
    """Scores (N, M), and the running statistics after scoring the texts one after another.

    ``images`` and ``texts`` are lists of (global vector, elements).
    """
    running = (
        {name: w[f"norm.{name}"].clone() for name in ("running_mean", "running_var")} if kind == "saf" else {}
    )
    columns = []
    for g_t, words in texts:
        nodes = [similarity_vectors(w, regions, words, g_v, g_t) for g_v, regions in images]
        if kind == "sgr":
            columns.append(torch.stack([sgr_score(w, one, steps) for one in nodes]))
            continue
        raw = torch.stack([one @ w["filter.weight"][0] + w["filter.bias"][0] for one in nodes])  # (N, 1 + L)
        mean, var = running["running_mean"], running["running_var"]
        if training:
            mean = raw.mean()
            var = (raw - mean).pow(2).mean()
            count = raw.numel()
            for name, seen in (("running_mean", mean), ("running_var", var * count / (count - 1))):
                running[name] = 0.9 * running[name] + 0.1 * seen.detach()
        gate = torch.sigmoid((raw - mean) / torch.sqrt(var + 1e-5) * w["norm.weight"] + w["norm.bias"])
        scores = []
        for one, g in zip(nodes, gate, strict=True):
            share = g / (g.sum() + 1e-8)
            kept = l2(sum((share[p] * one[p] for p in range(len(one))), torch.zeros_like(one[0])))
            scores.append(torch.sigmoid(w["score.weight"][0] @ kept + w["score.bias"][0]))
        columns.append(torch.stack(scores))
    return torch.stack(columns, dim=1), running


def visual_attention(w: State, images: Tensor, running: bool) -> Tensor:
    """Global vectors (B, D) of regions (B, R, D), without dropout; BatchNorm by batch or by running statistics."""
    mean = images.mean(1)
    local = images @ w["local.weight"].T + w["local.bias"]
    overall = mean @ w["overall.weight"].T + w["overall.bias"]
    for r in range(images.shape[1]):
        mu, var = local[:, r].mean(), local[:, r].var(unbiased=False)
        if running:
            mu, var = w["local_norm.running_mean"][r], w["local_norm.running_var"][r]
        scale = w["local_norm.weight"][r] / math.sqrt(float(var) + 1e-5)
        local[:, r] = (local[:, r] - mu) * scale + w["local_norm.bias"][r]
    for d in range(overall.shape[1]):
        mu, var = overall[:, d].mean(), overall[:, d].var(unbiased=False)
        if running:
            mu, var = w["overall_norm.running_mean"][d], w["overall_norm.running_var"][d]
        scale = w["overall_norm.weight"][d] / math.sqrt(float(var) + 1e-5)
        overall[:, d] = (overall[:, d] - mu) * scale + w["overall_norm.bias"][d]
    out = []
    for b in range(len(images)):
        gates = torch.stack(
            [
                w["common.weight"][0] @ (torch.tanh(local[b, r]) * torch.tanh(overall[b]))
                for r in range(images.shape[1])
            ]
        )
        out.append(l2(torch.softmax(gates, 0) @ images[b]))
    return torch.stack(out)


def textual_attention(w: State, words: Tensor) -> Tensor:
    """The global vector (D,) of the words (L, D) of one text, without dropout."""
    overall = torch.tanh(w["overall.weight"] @ words.mean(0) + w["overall.bias"])
    gates = torch.stack(
        [
            w["common.weight"][0] @ (torch.tanh(w["local.weight"] @ e + w["local.bias"]) * overall)
            for e in words
        ]
    )
    return l2(torch.softmax(gates, 0) @ words)
