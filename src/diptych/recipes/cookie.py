"""COOKIE: contrastive pre-training in which images and texts share knowledge (Wen et al., ICCV 2021).

Two streams; one transformer on top of both, with the same weights; three contrastive objectives, between images and
texts, between two looks at an image, and between two looks at a text. The supplement gives the augmentations, the
corpora and the downstream tasks. It gives no sizes, temperature or schedule of pre-training: the readings stand in
docs/methods-cookie.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from diptych.data.captions import Captions
from diptych.data.images import PixelInput
from diptych.encoders.cnn import Grid
from diptych.errors import SettingsError
from diptych.evaluation.evaluate import Evaluator, Retrieval
from diptych.evaluation.sts import Sts
from diptych.model import named
from diptych.model.retriever import Retriever
from diptych.objectives.combine import Sum
from diptych.objectives.contrastive import InfoNCE, textual, visual
from diptych.objectives.objective import Objective
from diptych.recipes.provide import provided
from diptych.recipes.recipe import Recipe
from diptych.recipes.towers import TowerSettings, join_towers
from diptych.registries import TEXT_ENCODERS
from diptych.settings import defaults, setting
from diptych.training.method import Method

STS_HELP = "SentEval folder: also measure text matching (STS) after each epoch"


@dataclass(frozen=True)
@defaults(depth=1, image_pool="max", text_pool="max", image_size=256, text_multiplier=1.0)
class Towers(TowerSettings):
    """Two encoders, the transformer on top of both, and pooling: what every COOKIE recipe shares."""

    ON_TOP = True

    text_encoder: str = setting(
        "bigru", "text encoder (published, as we infer: BERT, a download)", names=TEXT_ENCODERS
    )
    train_backbone: bool = setting(
        False, "train the CNN or ViT too, as published, we infer (off: its features are cached)"
    )
    clip_norm: float = setting(2.0, "largest global gradient norm (0: none; not printed, 2 is VSE∞'s)", low=0)


@dataclass(frozen=True)
@defaults(epochs=20, batch_size=1024, learning_rate=5e-5, schedule="cosine", warmup_share=0.1)
class Settings(Towers):
    """Pre-training: AdamW 5e-5 with 10 % warm-up and cosine decay, batch 1,024, 20 epochs, τ 0.07, equal weights."""

    decay_after_warmup: bool = setting(
        True, "rise to the full rate in the warm-up, then fall (off: fall from step 0)", before=False
    )
    temperature: float = setting(0.07, "temperature τ of the three objectives", low=1e-3)
    cross_weight: float = setting(1.0, "weight of L_cross, images against texts (0: without)", low=0)
    visual_weight: float = setting(1.0, "weight of L_vis, images against augmented ones (0: without)", low=0)
    textual_weight: float = setting(1.0, "weight of L_txt, texts against augmented ones (0: without)", low=0)
    same_image: Literal["ignored", "positive", "negative"] = setting(
        "ignored", "what other pairs of an image are in the objectives (negative: as printed)"
    )
    word_rate: float = setting(0.2, "share of words masked, replaced or deleted", low=0.01, high=0.95)
    cell_drop: float = setting(0.2, "share of cells left out of the second look", low=0.01, high=0.95)
    sts: str = setting("", STS_HELP)
    augmented_copies: int = setting(
        4, "augmented copies of a picture that a frozen backbone reads once (0: leave out cells)", low=0
    )


def build(settings: Settings, captions: Captions) -> Method:
    """Compose the method for the given training data."""
    retriever = towers(settings, captions)
    host = Method(retriever, objective(settings), multipliers=named.multipliers(retriever, settings))
    return provided(host, settings, captions)


def evaluators(settings: Settings) -> tuple[Evaluator, ...]:
    """Image-text retrieval and, where a folder is given, text matching."""
    return (Retrieval(), Sts(settings.sts)) if settings.sts else (Retrieval(),)


def towers(settings: Towers, captions: Captions, word_rate: float = 0.0, augment: bool = False) -> Retriever:
    """Both encoders with the transformer on top; training sees the pictures and texts as they are, or augmented."""
    image, image_input = named.image_side(settings, captions, drop=0.0)
    text, text_input = named.text_side(settings, captions, drop=word_rate)
    if isinstance(image_input, PixelInput) and isinstance(image, Grid) and not augment:
        image_input = PixelInput(**image.backbone.pixel_format, crop_ratio=(1.0, 1.0), flip=0.0)
    return join_towers(settings, image, text, image_input, text_input)


def objective(settings: Settings) -> Objective:
    """L = L_cross + L_vis + L_txt, each InfoNCE in both directions; clean rows first, augmented ones second."""
    temperature, same_image = settings.temperature, settings.same_image
    terms: dict[str, tuple[Objective, float]] = {
        "cross": (InfoNCE(temperature, same_image=same_image), settings.cross_weight),
        "visual": (visual(temperature, same_image), settings.visual_weight),
        "textual": (textual(temperature, same_image), settings.textual_weight),
    }
    members = {name: term for name, term in terms.items() if term[1]}
    if not members:
        raise SettingsError("all three objectives have weight 0: give at least one of them a weight.")
    return Sum(members)


RECIPE = Recipe("cookie", "COOKIE: contrastive pre-training", Settings, build, evaluators=evaluators)
