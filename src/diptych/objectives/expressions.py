"""Objectives by name, alone or as a weighted sum: ``info_nce``, ``own + 0.5*dcl``. Any of them on any host.

``OBJECTIVES`` maps a name to a class or function that makes the objective from the settings of a run. ``own`` is the
loss of the recipe itself.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from diptych.errors import SettingsError
from diptych.objectives.combine import Sum, SwitchAt
from diptych.objectives.contrast import Contrast
from diptych.objectives.contrastive import InfoNCE
from diptych.objectives.diversity import DiversityContrast
from diptych.objectives.objective import Objective
from diptych.objectives.soft_labels import CrossModalSoftLabels, UniModalSoftLabels
from diptych.objectives.triplet import Triplet
from diptych.registries import OBJECTIVES

OWN = "own"
_TERM = re.compile(r"\s*(?:(?P<weight>\d+(?:\.\d*)?|\.\d+)\s*\*\s*)?(?P<name>[A-Za-z_][\w.:-]*)\s*")


def triplet(settings: Any) -> Objective:
    """VSE∞'s hinge: all negatives in the first epochs, then the hardest."""
    margin, mask = _of(settings, "margin", 0.2), _of(settings, "mask_same_image", True)
    every = Triplet(margin, negatives="all", mask_same_image=mask)
    hardest = Triplet(margin, negatives="hardest", mask_same_image=mask)
    return SwitchAt(every, hardest, epoch=_of(settings, "all_negatives_epochs", 1))


def info_nce(settings: Any) -> Objective:
    """InfoNCE with a learned temperature; texts of one image are positives together."""
    same: Literal["positive", "negative"] = (
        "positive" if _of(settings, "mask_same_image", True) else "negative"
    )
    temperature = _of(settings, "info_nce_temperature", 0.07)
    return InfoNCE(temperature, learned=True, clamp=(0.01, 1.0), same_image=same)


def dcl(settings: Any) -> Objective:
    """CODER's diversity-sensitive contrast in the batch."""
    return DiversityContrast(Contrast(mask_same_image=_of(settings, "mask_same_image", True)))


def dcl_i(settings: Any) -> Objective:
    """The same without the diversity (HAL)."""
    mask = _of(settings, "mask_same_image", True)
    return DiversityContrast(Contrast(diversity="none", mask_same_image=mask))


def csa(settings: Any) -> Objective:
    """CUSA's cross-modal soft labels; a run that names them gets teachers (``training.teachers.with_teachers``)."""
    return CrossModalSoftLabels()


def usa(settings: Any) -> Objective:
    """CUSA's uni-modal soft labels; a run that names them gets teachers and uni-modal heads."""
    return UniModalSoftLabels()


def parse_objective(text: str, own: Objective, settings: Any) -> Objective:
    """The objective an expression names; ``own`` stands for the recipe's, which is returned as it is where alone."""
    members: dict[str, tuple[Objective, float]] = {}
    for piece in text.split("+"):
        term = _TERM.fullmatch(piece)
        if term is None:
            raise SettingsError(
                f"--objective '{text}' cannot be read at '{piece.strip()}': write names with weights, such as "
                "own + 0.5*info_nce."
            )
        name, weight = term["name"], float(term["weight"] or 1)
        if name in members:
            raise SettingsError(f"--objective '{text}' names '{name}' twice: add up its weights.")
        members[name] = own if name == OWN else OBJECTIVES.make(name, settings), weight
    if len(members) == 1:
        ((objective, weight),) = members.values()
        if weight == 1:
            return objective
    return Sum(members)


def _of(settings: Any, name: str, default: Any) -> Any:
    return getattr(settings, name, default)
