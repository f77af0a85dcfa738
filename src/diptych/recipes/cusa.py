"""CUSA: soft labels of two uni-modal teachers on top of a host (Huang et al., AAAI 2024).

What its hosts share, and VSE∞ as a host.

A host's recipe mixes ``SoftLabelSettings`` into its own settings, gives its retriever ``uni_modal_heads``, wraps its
objective ``with_soft_labels`` and hands ``teachers`` to the method. With both weights 0 it is the host, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from diptych.branches.branch import Branch, UniModalHeads
from diptych.data.captions import Captions
from diptych.evaluation.evaluate import Retrieval
from diptych.evaluation.uni_modal import UniModal
from diptych.objectives.combine import Sum
from diptych.objectives.objective import Objective
from diptych.objectives.soft_labels import UNI, CrossModalSoftLabels, UniModalSoftLabels
from diptych.recipes import vse_infinity
from diptych.recipes.provide import with_branch
from diptych.recipes.recipe import Recipe
from diptych.recipes.towers import HingeSettings
from diptych.settings import TeacherSettings, setting
from diptych.training.method import Method
from diptych.training.teachers import Teachers, teachers_of


@dataclass(frozen=True)
class SoftLabelSettings(TeacherSettings):
    """α, β, temperatures and teachers, in the words of the paper where it has them."""

    csa: float = setting(0.6, "weight α of the cross-modal soft labels (0: off)", low=0)
    usa: float = setting(
        0.75, "weight β of the uni-modal soft labels (0: off, without uni-modal heads)", low=0
    )
    soft_temperature: float = setting(
        0.45, "temperature τ that CSA and USA start from and learn", low=0.1, high=0.99
    )
    teacher_temperature: float = setting(1.0, "temperature of the teachers' softmax, fixed", low=1e-3)
    soft_mode: Literal["each", "add", "dot"] = setting(
        "each", "what CSA follows: the teacher of the query, the mean of both, or the root of their product"
    )
    soft_divergence: Literal["kl", "ce"] = setting(
        "kl", "KL divergence, or cross-entropy (the same gradient; the public code's CE in its mode 'sum')"
    )

    @property
    def soft(self) -> bool:
        """Whether a teacher is needed."""
        return self.csa > 0 or self.usa > 0


def uni_modal_heads(settings: SoftLabelSettings, dim: int, **options: object) -> dict[str, Branch]:
    """The branch that USA trains, where USA is on; ``options`` are those of ``UniModalHeads``."""
    return {UNI: UniModalHeads(dim, **options)} if settings.usa else {}  # type: ignore[arg-type]


def with_soft_labels(hard: Objective, settings: SoftLabelSettings, scale: float = 1.0) -> Objective:
    """L_hard + scale · (α L_CSA + β L_USA); the hard objective itself where both weights are 0.

    α and β are quoted beside a hard loss that is a mean over queries (a hinge) or over all entries (InfoNCE). Beside
    one that is B times as large, ``scale`` = B keeps their balance.
    """
    members: dict[str, tuple[Objective, float]] = {"hard": (hard, 1.0)}
    if settings.csa:
        members["csa"] = (
            CrossModalSoftLabels(
                settings.soft_temperature,
                teacher_temperature=settings.teacher_temperature,
                mode=settings.soft_mode,
                divergence=settings.soft_divergence,
            ),
            scale * settings.csa,
        )
    if settings.usa:
        members["usa"] = (uni_modal(settings), scale * settings.usa)
    return Sum(members) if settings.soft else hard


def hinge_scale(settings: HingeSettings) -> float:
    """α and β are quoted beside a mean of hinges; their sum is B times as large."""
    return settings.batch_size if settings.hinge_reduction == "sum" else 1.0


def uni_modal(settings: SoftLabelSettings) -> UniModalSoftLabels:
    """L_USA with the settings' temperatures."""
    return UniModalSoftLabels(
        settings.soft_temperature,
        teacher_temperature=settings.teacher_temperature,
        divergence=settings.soft_divergence,
    )


def teachers(settings: SoftLabelSettings, image_size: int = 224, clean: bool = False) -> tuple[Teachers, ...]:
    """The targets of the run; none where both weights are 0. With ``clean`` the text teacher reads cleaned texts."""
    return (teachers_of(settings, image_size, clean),) if settings.soft else ()


def evaluators(settings: SoftLabelSettings) -> tuple[Retrieval, UniModal]:
    """RSUM chooses the epoch; uni-modal figures stand beside it."""
    return Retrieval(), UniModal(settings.text_teacher)


@dataclass(frozen=True)
class Settings(vse_infinity.Settings, SoftLabelSettings):
    """VSE∞'s numbers, with α = 0.6 and β = 0.75 of CUSA's other hinge host, SGR; a uni-modal head per side."""


def build(settings: Settings, captions: Captions) -> Method:
    """VSE∞'s method with soft labels; with both weights 0, VSE∞'s own."""
    host = vse_infinity.build(settings, captions)
    if not settings.soft:
        return host
    retriever = host.retriever
    for name, heads in uni_modal_heads(settings, settings.dim).items():
        retriever = with_branch(retriever, name, heads)
    scale = hinge_scale(settings)
    return replace(
        host,
        retriever=retriever,
        objective=with_soft_labels(host.objective, settings, scale),
        targets=teachers(settings, settings.image_size),
    )


RECIPE = Recipe("cusa-vse-infinity", "VSE∞ with CUSA's soft labels", Settings, build, evaluators=evaluators)
