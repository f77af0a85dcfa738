"""What a ``tokenizer.json`` of a stranger may do to a text, and how the package tokenizers fails on one.

That package cannot be stopped, and ends the process where memory is short. A text therefore may not become longer than
``GROWTH`` times itself before it is cut into pieces, and few tokens may be put around it.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from diptych.errors import DataError, reason_of
from diptych.storage import parse_json

GROWTH = 10_000  # bytes that one byte of a text may become
STEPS = 64  # normalizers and pre-tokenizers
AROUND = 20_000  # characters that say which tokens are put around a text


def check_tokenizer(data: bytes) -> None:
    """Raise a ``ValueError`` where a ``tokenizer.json`` makes much of a short text."""
    state = parse_json(data)
    steps = [*_steps(state.get("normalizer")), *_steps(state.get("pre_tokenizer"))]
    if len(steps) > STEPS or math.prod(map(_growth, steps)) > GROWTH:
        raise ValueError(f"it may make a text {GROWTH:,} times as long")
    if len(str(state.get("post_processor"))) > AROUND:
        raise ValueError(f"it puts more around a text than {AROUND:,} characters can say")


def _steps(tree: Any) -> Iterator[dict[str, Any]]:
    left = [tree]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            yield one
            left += [*(one.get("normalizers") or ()), *(one.get("pretokenizers") or ())]


def _growth(step: dict[str, Any]) -> int:
    """How many bytes one byte of a text may become."""
    kind, pattern = step.get("type"), step.get("pattern")
    if kind == "Replace":  # a regular expression may find nothing between two letters
        return len(step["content"].encode()) + ("Regex" in pattern if pattern else 1) or 1
    if kind == "Prepend":
        return 1 + len(step["prepend"].encode())
    if kind == "Precompiled":
        content = base64.b64decode(step["precompiled_charsmap"], validate=True)
        after = 4 + int.from_bytes(content[:4], "little")
        if not 4 < after <= len(content):
            raise ValueError("its map of characters is cut off")
        return max(len(piece) for piece in content[after:].split(b"\0")) or 1
    return 2 if kind == "ByteLevel" else 1


@contextmanager
def tokenizing(place: object) -> Iterator[None]:
    """Turn what the package tokenizers raises, plain exceptions and panics of Rust, into one sentence."""
    try:
        yield
    except BaseException as error:
        if type(error) not in (Exception, OverflowError) and type(error).__name__ != "PanicException":
            raise  # an overflow: of ids that are no int32
        raise DataError(
            f"the tokenizer in {place} fails on a text ({reason_of(error, 200)}): copy the model again."
        ) from error
