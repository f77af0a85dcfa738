"""CLIP fine-tuned on one's own captions with InfoNCE (Radford et al., ICML 2021; the host of CUSA, AAAI 2024).

A pretrained dual encoder with its own tokenizer and image processor; texts of one image are positives together. The
numbers are those of CUSA's CLIP baseline on Flickr30K.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from diptych.aggregators.pooling import Aggregator, First, Head
from diptych.branches.branch import Branch, FirstVectors
from diptych.data.captions import Captions
from diptych.data.text_inputs import CleanedInput
from diptych.encoders.dual import DualEncoder, load_dual
from diptych.encoders.encoder import Encoder
from diptych.errors import SettingsError
from diptych.model import named
from diptych.model.retriever import Retriever
from diptych.objectives.combine import Parted
from diptych.objectives.contrastive import InfoNCE
from diptych.objectives.objective import Objective
from diptych.objectives.soft_labels import UNI
from diptych.recipes.recipe import Recipe
from diptych.recipes.towers import join_towers
from diptych.settings import HostSettings, defaults, setting
from diptych.training.method import Method

CLAMP = (0.01, 0.10)  # range of τ, restored before each forward pass


@dataclass(frozen=True)
@defaults(
    image_pool="first", text_pool="first", epochs=40, learning_rate=1e-5, schedule="cosine", final_factor=0.1,
    schedule_per_epoch=True, decay_1d=False, clip_norm=0.0,
)  # fmt: skip
class Settings(HostSettings):
    """CUSA's CLIP B/32: AdamW 1e-5 → 1e-6 by a cosine, 40 epochs (COCO: 30), batch 128, no clipping."""

    model: str = setting(
        "hf:openai/clip-vit-base-patch32", "dual encoder: hf:ID, open_clip:ARCHITECTURE/WEIGHTS, or a folder"
    )
    tune: Literal["full", "heads", "lora"] = setting(
        "full", "what is trained: everything, the heads on frozen encoders, or heads and low-rank adapters"
    )
    lora_rank: int = setting(8, "rank of the adapters of --tune lora", low=1)
    cross_head: bool = setting(
        False, "LayerNorm and a linear layer on each side, as in CUSA (in place of the pooling 'first')"
    )
    temperature: float = setting(
        0.05, "temperature τ InfoNCE starts from (0: the model's)", low=0, high=CLAMP[1]
    )
    hard_reduction: Literal["per_entry", "per_row"] = setting(
        "per_entry", "InfoNCE as the mean over all B × B entries (as published) or over rows"
    )
    batch_size: int = setting(
        128,
        "pairs per step, over all processes together (CUSA: 128 on each of 4 GPUs, a loss on each: --batch_size 512 "
        "--loss_parts 4; the default 128 makes four times the steps of an epoch; L/14@336: 16 on each)",
        low=2,
    )
    loss_parts: int = setting(
        1, "equal parts of a batch with a loss each, whose mean is taken (CUSA: 4, one per GPU)", low=1
    )
    clean_captions: bool = setting(True, "lower-case texts and drop their punctuation, as CUSA does")


def build(settings: Settings, captions: Captions) -> Method:
    """Compose the method."""
    dual = tuned(settings, captions)
    return Method(
        retriever(settings, dual, own_vectors(settings, dual)), in_parts(info_nce(settings, dual), settings)
    )


def in_parts(objective: Objective, settings: Settings) -> Objective:
    """The objective over the whole batch, or over each of its parts."""
    if settings.batch_size % settings.loss_parts or settings.batch_size < 2 * settings.loss_parts:
        raise SettingsError(
            f"--batch_size {settings.batch_size} does not divide into {settings.loss_parts} parts of 2 pairs or more: "
            "choose a multiple of --loss_parts."
        )
    return objective if settings.loss_parts == 1 else Parted(objective, settings.loss_parts)


def own_vectors(settings: Settings, dual: DualEncoder) -> dict[str, Branch]:
    """The view ``uni`` of a model with cross-modal heads and no uni-modal ones: the encoders' own vectors."""
    return {UNI: FirstVectors(dual.image.dim, dual.text.dim)} if settings.cross_head else {}


def tuned(settings: Settings, captions: Captions) -> DualEncoder:
    """The dual encoder, frozen or with adapters if the settings say so; with patches and words if they are pooled."""
    named.check_pictures(captions, settings.model)
    local = bool(settings.depth) or (settings.image_pool, settings.text_pool) != ("first", "first")
    dual = load_dual(settings.model, local=local, lora=settings.lora_rank if settings.tune == "lora" else 0)
    if settings.tune == "heads":
        dual.image.let_train(False)
        dual.text.let_train(False)
    return dual


def retriever(settings: Settings, dual: DualEncoder, branches: dict[str, Branch] | None = None) -> Retriever:
    """Both towers: the model's own vector, or a cross-modal head on it."""
    if settings.tune == "heads" and not (settings.cross_head or branches):
        raise SettingsError("--tune heads trains nothing without a head: give --cross_head as well.")
    texts = CleanedInput(dual.text_input) if settings.clean_captions else dual.text_input

    def head(encoder: Encoder, pooling: Aggregator) -> Aggregator:
        crossed = settings.cross_head and isinstance(pooling, First)
        return Head(encoder.dim, encoder.dim) if crossed else pooling

    return join_towers(settings, dual.image, dual.text, dual.image_input, texts, branches, head=head)


def info_nce(settings: Settings, dual: DualEncoder) -> InfoNCE:
    """L_NCE with several positives per row; τ is learned."""
    start = settings.temperature or dual.image.temperature
    return InfoNCE(
        min(max(start, CLAMP[0]), CLAMP[1]), learned=True, clamp=CLAMP, reduction=settings.hard_reduction
    )


RECIPE = Recipe("clip", "CLIP fine-tuned with InfoNCE", Settings, build)
