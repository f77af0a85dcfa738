"""VSE∞ with CUSA's soft labels: the learned pooling as a host of soft-label alignment.

The towers, pooling and hinge of VSE∞; one uni-modal head per side; two frozen teachers. VSE∞ sums its hinges over the
batch, and α and β are quoted beside a mean: the soft terms are weighed with α · B and β · B.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from diptych.data.captions import Captions
from diptych.recipes import cusa, vse_infinity
from diptych.recipes.provide import with_branch
from diptych.recipes.recipe import Recipe
from diptych.training.method import Method


@dataclass(frozen=True)
class Settings(vse_infinity.Settings, cusa.SoftLabelSettings):
    """VSE∞'s numbers, with α = 0.6 and β = 0.75 of CUSA's other hinge host, SGR."""


def build(settings: Settings, captions: Captions) -> Method:
    """VSE∞'s method with soft labels; with both weights 0, VSE∞'s own."""
    host = vse_infinity.build(settings, captions)
    if not settings.soft:
        return host
    retriever = host.retriever
    for name, heads in cusa.uni_modal_heads(settings, settings.dim).items():
        retriever = with_branch(retriever, name, heads)
    scale = cusa.hinge_scale(settings)
    return replace(
        host,
        retriever=retriever,
        objective=cusa.with_soft_labels(host.objective, settings, scale),
        targets=cusa.teachers(settings, settings.image_size),
    )


RECIPE = Recipe(
    "cusa-vse-infinity", "VSE∞ with CUSA's soft labels", Settings, build, evaluators=cusa.evaluators
)
