"""The list of targets, and how one input is given to one of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

from diptych.errors import DiptychError

Attack = Callable[[Random], None]
Target = Callable[[Path], Attack]
TARGETS: dict[str, Target] = {}
CLOSING = ExitStack()  # what targets leave open


def target(make: Target) -> Target:
    """Register a target under its name."""
    TARGETS[make.__name__] = make
    return make


def void(_: Any) -> None:
    """Nothing of an answer is wanted but that it came."""


def attacked(attack: Attack, draw: Random) -> bool:
    """Give a target one input; whether it was refused in the package's own words."""
    try:
        attack(draw)
    except DiptychError as error:
        assert str(error).strip(), "an error without a sentence"  # noqa: PT017
        return True
    return False
