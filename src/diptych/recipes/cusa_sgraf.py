"""SGR and SAF with CUSA's soft labels (Huang et al., AAAI 2024).

The host of ``sgraf`` with its hinge as a mean over queries; CSA follows the sigmoid scores of all pairs of the batch,
USA one fully connected layer per side on the global vectors. AdamW, 2e-4 to 1e-5 on a cosine, 40 epochs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from diptych.data.captions import Captions
from diptych.objectives.triplet import triplet
from diptych.recipes import cusa, sgraf
from diptych.recipes.recipe import Recipe
from diptych.recipes.towers import method
from diptych.settings import defaults, setting
from diptych.training.method import Method


@dataclass(frozen=True)
@defaults(epochs=40, weight_decay=1e-4, schedule="cosine", final_factor=0.05, hinge_reduction="mean")
class Settings(sgraf.Settings, cusa.SoftLabelSettings):
    """CUSA on SGR: α 0.6, β 0.75."""

    clip_norm: float = setting(
        2.0, "largest global gradient norm (0: none; CUSA does not say, 2 is its host SGRAF's)", low=0
    )


@dataclass(frozen=True)
@defaults(csa=1.0)
class FiltrationSettings(Settings):
    """CUSA on SAF: α 1, β 0.75."""


def build(kind: Literal["sgr", "saf"], settings: Settings, captions: Captions) -> Method:
    """The host's method with soft labels; with both weights 0, the host's own."""
    retriever = sgraf.host(kind, settings, captions, cusa.uni_modal_heads(settings, settings.dim))
    return method(
        retriever,
        cusa.with_soft_labels(triplet(settings), settings, cusa.hinge_scale(settings)),
        settings,
        targets=cusa.teachers(settings, settings.image_size),
    )


SGR_RECIPE = Recipe(
    "cusa-sgr", "SGR with CUSA's soft labels", Settings, partial(build, "sgr"), evaluators=cusa.evaluators
)
SAF_RECIPE = Recipe(
    "cusa-saf",
    "SAF with CUSA's soft labels",
    FiltrationSettings,
    partial(build, "saf"),
    evaluators=cusa.evaluators,
)
