"""Generators of hostile input: bytes, JSON and texts that are nearly right, each from a random number generator."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from random import Random
from typing import Any

NUMBERS = (
    0,
    -1,
    1,
    2**31 - 1,
    2**31,
    2**63,
    -(2**63),
    10**30,
    10**400,
    0.0,
    -0.5,
    1e308,
    float("inf"),
    float("nan"),
)
TEXTS = (
    "", " ", "x", "../x", "/etc/passwd", "a\x00b", "\ud800", "a" * 5_000, "%s", "${x}", "'; DROP TABLE items; --", "ß",
    "{0..9}", "\u202e", "🙂", "=1+1", "null", "NaN", "-0", "1e999",
)  # fmt: skip
MARKS = (
    b"\x00",
    b"\xff",
    b"[",
    b"{",
    b'"',
    b"\\",
    b"\n",
    b"\r\n",
    b",",
    b"9" * 5_000,
    b"[" * 3_000,
    b"\x80\x04",
    b"%",
)


def mutated(data: bytes, draw: Random) -> bytes:
    """The same bytes with a few of them changed, cut out, doubled or put in."""
    out = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 4, 16))):
        at = draw.randrange(len(out) + 1)
        kind = draw.random()
        if kind < 0.35 and out:
            at = min(at, len(out) - 1)
            out[at] ^= 1 << draw.randrange(8)
        elif kind < 0.55 and out:
            at = min(at, len(out) - 1)
            out[at] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))
        elif kind < 0.65:
            del out[at : at + draw.choice((1, 4, 16, 512))]
        elif kind < 0.75:
            out[at:at] = out[at : at + draw.choice((1, 4, 64, 512))]
        elif kind < 0.85:
            out[at:at] = draw.choice(MARKS)
        elif kind < 0.9:
            size = draw.choice((2, 4, 8))
            out[at : at + size] = draw.choice((b"\xff", b"\x00", b"\x7f", b"\x80")) * size
        else:
            del out[at:]
    return bytes(out)


def value(draw: Random, depth: int = 0) -> Any:
    """Some JSON value."""
    kind = draw.random()
    if kind < 0.3:
        return draw.choice(NUMBERS)
    if kind < 0.6:
        return draw.choice(TEXTS)
    if kind < 0.75 or depth > 3:
        return draw.choice((None, True, False))
    if kind < 0.87:
        return [value(draw, depth + 1) for _ in range(draw.randrange(4))]
    if kind < 0.98:
        return {draw.choice(TEXTS): value(draw, depth + 1) for _ in range(draw.randrange(4))}
    deep: Any = 1
    for _ in range(draw.choice((20, 300, 900))):
        deep = [deep]
    return deep


def mutated_json(content: Any, draw: Random, further: Sequence[Any] = ()) -> Any:
    """The same value with one thing in it changed, taken out or put in."""
    content = copy.deepcopy(content)
    places = list(_places(content))
    for _ in range(draw.choice((1, 1, 2, 5))):
        if not places:
            return value(draw)
        holder, key = draw.choice(places)
        other = draw.choice(further) if further and draw.random() < 0.3 else value(draw)
        try:
            if draw.random() < 0.2:
                del holder[key]
            elif draw.random() < 0.2 and isinstance(holder, dict):
                holder[draw.choice(TEXTS)] = other
            else:
                holder[key] = other
        except (KeyError, IndexError):  # taken out before
            continue
    return content


def as_json(content: Any, draw: Random) -> bytes:
    """A value as JSON that is nearly always right."""
    data = json.dumps(content, ensure_ascii=draw.random() < 0.8).encode("utf-8", "surrogatepass")
    return mutated(data, draw) if draw.random() < 0.3 else data


def words(draw: Random, pieces: Sequence[str], most: int = 12) -> str:
    """A sentence of a language, its rules left out."""
    chosen = [
        draw.choice(pieces) if draw.random() < 0.9 else draw.choice(TEXTS)
        for _ in range(draw.randrange(most))
    ]
    text = draw.choice(("", " ")).join(chosen)
    return text * draw.choice((1, 1, 1, 1, 50))


def _places(content: Any) -> Any:
    items = (
        content.items()
        if isinstance(content, dict)
        else enumerate(content)
        if isinstance(content, list)
        else ()
    )
    for key, inner in items:
        yield content, key
        yield from _places(inner)
