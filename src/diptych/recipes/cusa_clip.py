"""CLIP with CUSA's soft labels (Huang et al., AAAI 2024): cross- and uni-modal heads, two frozen teachers.

LayerNorm and a linear layer on each side's vector make the score (InfoNCE, CSA); another pair of heads beside the score
follows the teachers within each modality (USA). Captions are cleaned for the model and for the text teacher.
"""

from __future__ import annotations

from dataclasses import dataclass

from diptych.aggregators import First
from diptych.branches.branch import Branch
from diptych.data.captions import Captions
from diptych.encoders.dual import DualEncoder
from diptych.recipes import clip, cusa
from diptych.recipes.recipe import Recipe
from diptych.settings import defaults
from diptych.training.method import Method


@dataclass(frozen=True)
@defaults(cross_head=True, csa=0.10, usa=0.50)
class Settings(clip.Settings, cusa.SoftLabelSettings):
    """CUSA on CLIP B/32: α = 0.10, β = 0.50 beside an InfoNCE that is a mean over all entries."""


def build(settings: Settings, captions: Captions) -> Method:
    """Compose the method; with both weights 0 it is ``clip --cross_head``."""
    dual = clip.tuned(settings, captions)
    # α and β are quoted beside L_NCE / B
    part = settings.batch_size / settings.loss_parts
    scale = 1.0 if settings.hard_reduction == "per_entry" else part
    return Method(
        clip.retriever(settings, dual, branches(settings, dual)),
        clip.in_parts(cusa.with_soft_labels(clip.info_nce(settings, dual), settings, scale), settings),
        targets=cusa.teachers(settings, clean=settings.clean_captions),
    )


def branches(settings: Settings, dual: DualEncoder) -> dict[str, Branch]:
    """The view ``uni``: heads where USA trains them, else the encoders' own vectors."""
    if not settings.usa:
        return clip.own_vectors(settings, dual)
    return cusa.uni_modal_heads(
        settings, dual.image.dim, image_dim=dual.image.dim, text_dim=dual.text.dim, layer_norm=True,
        image_aggregator=First(), text_aggregator=First(),
    )  # fmt: skip


RECIPE = Recipe("cusa-clip", "CLIP with CUSA's soft labels", Settings, build, evaluators=cusa.evaluators)
