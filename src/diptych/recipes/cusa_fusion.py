"""A fusion re-ranker with CUSA's soft labels (Huang et al., AAAI 2024): soft targets in ITM, uni-modal heads.

The contrastive part is untouched. CSA softens the match targets of the drawn negatives to α times the teacher's cosine:
the supplement says only that soft labels enter for hard negatives, the formula is our reading. USA trains one linear
layer per encoder on its first token, beside the contrastive projection.
"""

from __future__ import annotations

from dataclasses import dataclass

from diptych.aggregators import First
from diptych.data.captions import Captions
from diptych.errors import SettingsError
from diptych.objectives.combine import Sum
from diptych.objectives.contrastive import ITC, ITM
from diptych.objectives.objective import Objective
from diptych.recipes import cusa, fusion
from diptych.recipes.recipe import Recipe
from diptych.settings import defaults, setting
from diptych.training.method import Method


@dataclass(frozen=True)
@defaults(epochs=20, learning_rate=7.5e-6)
class Settings(fusion.Settings, cusa.SoftLabelSettings):
    """CUSA on X2-VLM: α = 0.30, β = 0.75, a quarter of the host's learning rate and batch, 20 epochs."""

    csa: float = setting(
        0.30,
        "weight α of the soft match targets, α · max(0, teacher's cosine): our reading (0: off)",
        low=0,
        high=1,
    )
    uni_dim: int = setting(256, "width of the uni-modal heads", low=1)
    batch_size: int = setting(
        8,
        "pairs per step, over all processes together (CUSA: a quarter of its host's, on each of 8 GPUs; 8 fits one)",
        low=2,
    )


def build(settings: Settings, captions: Captions) -> Method:
    """Compose the method."""
    if settings.soft_mode != "each":
        raise SettingsError(
            f"--soft_mode {settings.soft_mode} is for soft labels over a batch, and a fusion encoder's are those of "
            "single pairs: leave it out."
        )
    image, text = fusion.encoders(settings, captions)
    heads = cusa.uni_modal_heads(
        settings, settings.uni_dim, image_dim=image.dim, text_dim=text.dim,
        image_aggregator=First(), text_aggregator=First(),
    ) or fusion.own_vectors(image, text)  # fmt: skip
    members: dict[str, tuple[Objective, float]] = {"itc": (ITC(), 1.0), "itm": (ITM(settings.csa), 1.0)}
    if settings.usa:
        members["usa"] = (cusa.uni_modal(settings), settings.usa)
    return Method(
        fusion.retriever(settings, image, text, heads),
        Sum(members),
        multipliers=fusion.multipliers(settings, heads=settings.usa > 0),
        targets=cusa.teachers(settings, clean=settings.clean_captions),
        betas=fusion.betas(settings),
    )


RECIPE = Recipe("cusa-fusion", "Fusion re-ranker with CUSA's soft labels", Settings, build, cusa.evaluators)
