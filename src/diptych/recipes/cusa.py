"""CUSA: soft labels of two uni-modal teachers on top of a host (Huang et al., AAAI 2024).

The hosts are VSE∞, SGR, SAF, CLIP and a fusion re-ranker. CSA follows the teachers across the modalities, on the scores
of all pairs of a batch; USA within each modality, on heads beside the score. With both weights 0 a method is its host,
bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from diptych.aggregators import First
from diptych.branches.branch import Branch, UniModalHeads
from diptych.data.captions import Captions
from diptych.encoders.dual import DualEncoder
from diptych.errors import SettingsError
from diptych.evaluation.evaluate import Retrieval
from diptych.evaluation.uni_modal import UniModal
from diptych.objectives.combine import Sum
from diptych.objectives.contrastive import ITC, ITM
from diptych.objectives.objective import Objective
from diptych.objectives.soft_labels import UNI, CrossModalSoftLabels, UniModalSoftLabels
from diptych.objectives.triplet import triplet
from diptych.recipes import clip, fusion, sgraf, vse_infinity
from diptych.recipes.provide import provided
from diptych.recipes.recipe import Recipe
from diptych.recipes.towers import HingeSettings, method
from diptych.settings import TeacherSettings, defaults, setting
from diptych.training.method import Method
from diptych.training.teachers import teachers_of


@dataclass(frozen=True)
class SoftLabelSettings(TeacherSettings):
    """α, β, temperatures and teachers, in the words of the paper where it has them."""

    csa: float = setting(0.6, "weight α of the cross-modal soft labels (0: off)", low=0)
    usa: float = setting(0.75, "weight β of the uni-modal soft labels (0: off, without their heads)", low=0)
    soft_temperature: float = setting(0.45, "temperature τ that CSA and USA start from", low=0.1, high=0.99)
    teacher_temperature: float = setting(1.0, "temperature of the teachers' softmax, fixed", low=1e-3)
    soft_mode: Literal["each", "add", "dot"] = setting(
        "each", "what CSA follows: the teacher of the query, the mean of both, or the root of their product"
    )
    soft_divergence: Literal["kl", "ce"] = setting(
        "kl", "KL divergence, or cross-entropy (the same gradient; the public code's CE in its mode 'sum')"
    )


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
    return Sum(members) if len(members) > 1 else hard


def beside_hinge(hinge: Objective, settings: HingeSettings) -> Objective:
    """The soft labels beside a hinge: α and β are quoted beside a mean of hinges, and their sum is B times as large."""
    assert isinstance(settings, SoftLabelSettings)
    scale = settings.batch_size if settings.hinge_reduction == "sum" else 1.0
    return with_soft_labels(hinge, settings, scale)


def uni_modal(settings: SoftLabelSettings) -> UniModalSoftLabels:
    """L_USA with the settings' temperatures."""
    return UniModalSoftLabels(
        settings.soft_temperature,
        teacher_temperature=settings.teacher_temperature,
        divergence=settings.soft_divergence,
    )


def evaluators(settings: SoftLabelSettings) -> tuple[Retrieval, UniModal]:
    """RSUM chooses the epoch; uni-modal figures stand beside it."""
    return Retrieval(), UniModal(settings.text_teacher)


@dataclass(frozen=True)
class Settings(vse_infinity.Settings, SoftLabelSettings):
    """VSE∞'s numbers, with α = 0.6 and β = 0.75 of CUSA's other hinge host, SGR; a uni-modal head per side."""


def build(settings: Settings, captions: Captions) -> Method:
    """VSE∞'s method with soft labels."""
    host = vse_infinity.build(settings, captions)
    return provided(replace(host, objective=beside_hinge(host.objective, settings)), settings, captions)


@dataclass(frozen=True)
@defaults(epochs=40, weight_decay=1e-4, schedule="cosine", final_factor=0.05, hinge_reduction="mean")
class ReasoningSettings(sgraf.Settings, SoftLabelSettings):
    """CUSA on SGR: α 0.6, β 0.75; the hinge as a mean over queries, AdamW, 2e-4 to 1e-5 on a cosine, 40 epochs."""

    clip_norm: float = setting(
        2.0, "largest global gradient norm (0: none; not printed, 2 is SGRAF's)", low=0
    )


@dataclass(frozen=True)
@defaults(csa=1.0)
class FiltrationSettings(ReasoningSettings):
    """CUSA on SAF: α 1, β 0.75."""


def build_sgraf(kind: Literal["sgr", "saf"], settings: ReasoningSettings, captions: Captions) -> Method:
    """SGR's or SAF's method: CSA follows the sigmoid scores of all pairs of the batch, USA the global vectors."""
    retriever = sgraf.host(kind, settings, captions, uni_modal_heads(settings, settings.dim))
    host = method(retriever, beside_hinge(triplet(settings), settings), settings)
    return provided(host, settings, captions)


@dataclass(frozen=True)
@defaults(cross_head=True, csa=0.10, usa=0.50)
class ClipSettings(clip.Settings, SoftLabelSettings):
    """CUSA on CLIP B/32: α = 0.10, β = 0.50 beside an InfoNCE that is a mean over all entries."""


def build_clip(settings: ClipSettings, captions: Captions) -> Method:
    """CLIP's method: LayerNorm and a linear layer on each side make the score, another such pair of heads serves USA.

    Captions are cleaned for the model and for the text teacher.
    """
    dual = clip.tuned(settings, captions)
    # α and β are quoted beside L_NCE / B
    part = settings.batch_size / settings.loss_parts
    scale = 1.0 if settings.hard_reduction == "per_entry" else part
    host = Method(
        clip.retriever(settings, dual, clip_views(settings, dual)),
        clip.in_parts(with_soft_labels(clip.info_nce(settings, dual), settings, scale), settings),
    )
    return provided(host, settings, captions)


def clip_views(settings: ClipSettings, dual: DualEncoder) -> dict[str, Branch]:
    """The view ``uni``: heads where USA trains them, else the encoders' own vectors."""
    return uni_modal_heads(
        settings, dual.image.dim, image_dim=dual.image.dim, text_dim=dual.text.dim, layer_norm=True,
        image_aggregator=First(), text_aggregator=First(),
    ) or clip.own_vectors(settings, dual)  # fmt: skip


@dataclass(frozen=True)
@defaults(epochs=20, learning_rate=7.5e-6)
class FusionSettings(fusion.Settings, SoftLabelSettings):
    """CUSA on X2-VLM: α = 0.30, β = 0.75, a quarter of the host's learning rate and batch, 20 epochs."""

    csa: float = setting(
        0.30, "weight α of soft targets, α · max(0, teacher's cosine): our reading (0: off)", low=0, high=1
    )
    uni_dim: int = setting(256, "width of the uni-modal heads", low=1)
    batch_size: int = setting(
        8, "pairs per step of all processes (CUSA: a quarter of its host's on each of 8 GPUs)", low=2
    )


def build_fusion(settings: FusionSettings, captions: Captions) -> Method:
    """The fusion re-ranker's method, whose contrastive part is untouched.

    CSA softens the match targets of the drawn negatives to α times the teacher's cosine: the supplement says only that
    soft labels enter for hard negatives, the formula is our reading. USA trains one linear layer per encoder on its
    first token, beside the contrastive projection.
    """
    if settings.soft_mode != "each":
        raise SettingsError(
            f"--soft_mode {settings.soft_mode} is for soft labels over a batch, and a fusion encoder's are those of "
            "single pairs: leave it out."
        )
    image, text = fusion.encoders(settings, captions)
    heads = uni_modal_heads(
        settings, settings.uni_dim, image_dim=image.dim, text_dim=text.dim,
        image_aggregator=First(), text_aggregator=First(),
    ) or fusion.own_vectors(image, text)  # fmt: skip
    members: dict[str, tuple[Objective, float]] = {"itc": (ITC(), 1.0), "itm": (ITM(settings.csa), 1.0)}
    if settings.usa:
        members["usa"] = (uni_modal(settings), settings.usa)
    soft = settings.csa > 0 or settings.usa > 0
    return Method(
        fusion.retriever(settings, image, text, heads),
        Sum(members),
        multipliers=fusion.multipliers(settings, heads=settings.usa > 0),
        targets=(teachers_of(settings, clean=settings.clean_captions),) if soft else (),
        betas=(0.9, settings.adam_beta2),
    )


RECIPE = Recipe("cusa-vse-infinity", "VSE∞ with CUSA's soft labels", Settings, build, evaluators)
SGR = Recipe(
    "cusa-sgr", "SGR with CUSA's soft labels", ReasoningSettings, partial(build_sgraf, "sgr"), evaluators
)
SAF = Recipe(
    "cusa-saf", "SAF with CUSA's soft labels", FiltrationSettings, partial(build_sgraf, "saf"), evaluators
)
CLIP = Recipe("cusa-clip", "CLIP with CUSA's soft labels", ClipSettings, build_clip, evaluators)
FUSION = Recipe(
    "cusa-fusion", "Fusion re-ranker with CUSA's soft labels", FusionSettings, build_fusion, evaluators
)
