"""Captions made ready for one model: texts tokenised once, the outputs of its frozen parts cached."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.data.captions import Captions
from diptych.data.text import TextStore


@dataclass(frozen=True)
class Prepared:
    """Captions whose texts are tokenised (or cached) once; ``captions.images`` may be cached features."""

    captions: Captions
    texts: TextStore
