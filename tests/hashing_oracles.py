"""Hashing from its equations, in float64 loops; nothing here uses the package."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np


def distance(a: Any, b: Any) -> int:
    """d_H = (K − a·b) / 2 of two rows of −1 and +1."""
    return (len(a) - int(sum(int(x) * int(y) for x, y in zip(a, b, strict=True)))) // 2


def signs(rows: Any) -> list[list[int]]:
    return [[1 if value >= 0 else -1 for value in row] for row in rows]


def shares_a_label(a: Any, b: Any) -> bool:
    return any(x and y for x, y in zip(a, b, strict=True))


def average_precision(relevant: list[bool]) -> tuple[float, int]:
    """Σ rel(r)·Prec@r and Σ rel(r) of a ranked list."""
    total, hits = 0.0, 0
    for rank, is_relevant in enumerate(relevant, 1):
        if is_relevant:
            hits += 1
            total += hits / rank
    return total, hits


def mean_average_precision(query, database, query_labels, database_labels, top, missing="zero") -> float:  # type: ignore[no-untyped-def]
    """Ties by database index."""
    values = []
    for code, labels in zip(signs(query), query_labels, strict=True):
        if not any(labels):
            continue
        order = sorted(
            range(len(database)), key=lambda n: (distance(code, signs(database)[n]), n)
        )  # (distance, index)
        total, hits = average_precision([shares_a_label(labels, database_labels[n]) for n in order[:top]])
        if hits:
            values.append(total / hits)
        elif missing == "zero":
            values.append(0.0)
    return 100 * math.fsum(values) / len(values)


def tie_averaged(query, database, query_labels, database_labels, top) -> float:  # type: ignore[no-untyped-def]
    """E[Σ rel·Prec] / E[Σ rel] over every order of every block of ties, by going through all of them."""
    values = []
    for code, labels in zip(signs(query), query_labels, strict=True):
        if not any(labels):
            continue
        blocks: dict[int, list[bool]] = {}
        for row, found in zip(signs(database), database_labels, strict=True):
            blocks.setdefault(distance(code, row), []).append(shares_a_label(labels, found))
        ordered = [blocks[d] for d in sorted(blocks)]
        totals, hits, count = 0.0, 0.0, 0
        for orders in itertools.product(*(list(itertools.permutations(block)) for block in ordered)):
            total, found_hits = average_precision(list(itertools.chain(*orders))[:top])
            totals, hits, count = totals + total, hits + found_hits, count + 1
        values.append(totals / hits if hits else 0.0)
    return 100 * math.fsum(values) / len(values)


def csq_terms(h: Any, labels: Any, centres: Any, ties: Any) -> tuple[float, float]:
    """L_centre and L_quant: mean BCE((h+1)/2, (c+1)/2), and mean (|h| − 1)²."""
    centre_loss, quantisation, count = [], [], 0
    for row, own in zip(np.asarray(h, np.float64), labels, strict=True):
        total = [sum(centres[c][b] for c in range(len(own)) if own[c]) for b in range(len(row))]
        target = [math.copysign(1, t) if t else ties[b] for b, t in enumerate(total)]
        for value, wanted in zip(row, target, strict=True):
            p, y = (value + 1) / 2, (wanted + 1) / 2
            centre_loss.append(-(y * math.log(p) + (1 - y) * math.log(1 - p)))
            quantisation.append((abs(value) - 1) ** 2)
            count += 1
    return math.fsum(centre_loss) / count, math.fsum(quantisation) / count
