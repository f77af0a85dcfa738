"""A fusion re-ranker in the manner of X2-VLM (Zeng et al., 2022): two encoders retrieve, a fusion encoder judges.

ITC aligns the class tokens of a vision transformer and a text transformer; ITM judges pairs and hard negatives with
cross-attention layers on both encoders' tokens. Evaluation and search re-rank the best candidates with the match score.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from diptych.aggregators.pooling import Aggregator, First, Head, Projected
from diptych.branches.branch import Branch, FirstVectors
from diptych.data.captions import Captions
from diptych.data.images import PixelInput
from diptych.data.text import WordPieceInput
from diptych.data.text_inputs import CleanedInput
from diptych.encoders.backbones import HubBackbone
from diptych.encoders.cnn import Tokens
from diptych.encoders.encoder import Encoder
from diptych.encoders.transformer import TransformerText
from diptych.interaction.fusion import Fusion
from diptych.model import named
from diptych.model.retriever import Retriever
from diptych.objectives.combine import Sum
from diptych.objectives.contrastive import ITC, ITM
from diptych.objectives.soft_labels import UNI
from diptych.recipes.recipe import Recipe
from diptych.recipes.towers import join_towers
from diptych.settings import HostSettings, defaults, setting
from diptych.training.method import Method


@dataclass(frozen=True)
@defaults(
    image_pool="first", text_pool="first", epochs=10, learning_rate=3e-5, weight_decay=0.01, schedule="linear",
    warmup_share=0.1, decay_1d=False, clip_norm=0.0,
)  # fmt: skip
class Settings(HostSettings):
    """X-VLM's retrieval numbers: AdamW 3e-5, weight decay 0.01, linear decay, warm-up over a tenth, 10 epochs.

    Its batch is 20 pairs on each GPU. ITC there sees the pairs of all GPUs, hard negatives come from those of one.
    """

    image_encoder: str = setting(
        "hf:microsoft/beit-base-patch16-224", "vision transformer with a class token: hf:ID or a model folder"
    )
    text_encoder: str = setting("hf:google-bert/bert-base-uncased", "text encoder: minilm, hf:ID or a folder")
    image_size: int = setting(384, "pixels of the square image the encoder reads", low=16)
    text_length: int = setting(40, "most tokens of a text", low=3)
    dim: int = setting(256, "width of the contrastive projections", low=1)
    fusion_layers: int = setting(6, "layers with cross-attention", low=1)
    fusion_heads: int = setting(12, "attention heads of each of them", low=1)
    dropout: float = setting(0.1, "dropout of the fusion layers", low=0, high=0.9)
    candidates: int = setting(128, "k: candidates of each query that are re-ranked (COCO: 256)", low=1)
    temperature: float = setting(0.07, "temperature ITC starts from and learns", low=0.001, high=0.5)
    new_multiplier: float = setting(2.0, "learning-rate factor of layers that are not pretrained", low=0)
    train_backbone: bool = setting(True, "train the vision transformer (else its tokens are cached)")
    train_text: bool = setting(True, "train the text transformer (else its token states are cached)")
    clean_captions: bool = setting(
        True, "lower-case texts, drop their punctuation and keep 30 words, as X-VLM does", before=False
    )
    augmentation: Literal["window", "x-vlm"] = setting(
        "x-vlm",
        "of training pictures: X-VLM's window of 0.5–1 of the area, flip and RandAugment, or a window of 0.6–1 of "
        "both sides and a flip",
        before="window",
    )
    batch_size: int = setting(
        32, "pairs per step of all processes (X-VLM: 20 on each of 8 GPUs; 32 fits one GPU)", low=2
    )
    decay_after_warmup: bool = setting(
        True,
        "rise to the full rate in the warm-up, then fall, as X-VLM (off: fall from step 0)",
        before=False,
    )
    adam_beta2: float = setting(
        0.98, "second beta of AdamW, X-VLM's (PyTorch: 0.999)", low=0, high=0.99999, before=0.999
    )


def build(settings: Settings, captions: Captions) -> Method:
    """Compose the method."""
    objective = Sum({"itc": (ITC(), 1.0), "itm": (ITM(), 1.0)})
    image, text = encoders(settings, captions)
    model = retriever(settings, image, text, own_vectors(image, text))
    return Method(model, objective, multipliers=multipliers(settings), betas=(0.9, settings.adam_beta2))


def multipliers(settings: Settings, heads: bool = False) -> dict[str, float]:
    """The rates of layers that are not pretrained: fusion, contrastive projections, and uni-modal heads, if any."""
    new = ["scorer", "image.aggregator", "text.aggregator", *([f"branches.{UNI}"] if heads else [])]
    return dict.fromkeys(new, settings.new_multiplier)


def encoders(settings: Settings, captions: Captions) -> tuple[Tokens, TransformerText]:
    """The vision transformer with its class token, and the text transformer."""
    named.check_pictures(captions, settings.image_encoder)
    vision = HubBackbone(settings.image_encoder, class_token=True, size=settings.image_size)
    source = named.text_source(settings.text_encoder)
    return (
        Tokens(vision, trainable=settings.train_backbone),
        TransformerText(source, trainable=settings.train_text, projection=False),
    )


def own_vectors(image: Tokens, text: TransformerText) -> dict[str, Branch]:
    """The view ``uni`` of a model without uni-modal heads: the encoders' own vectors."""
    return {UNI: FirstVectors(image.dim, text.dim)}


def retriever(
    settings: Settings, image: Tokens, text: TransformerText, branches: dict[str, Branch] | None = None
) -> Retriever:
    """Contrastive projections of both encoders' first tokens, and the fusion encoder on all their tokens."""
    scorer = Fusion(
        image.dim,
        text.dim,
        settings.fusion_layers,
        settings.fusion_heads,
        settings.dropout,
        settings.candidates,
        settings.temperature,
    )
    words = WordPieceInput(
        named.text_source(settings.text_encoder), augment=0.0, max_length=settings.text_length
    )
    window = (0.5, 1.0) if settings.augmentation == "x-vlm" else (0.6, 1.0)

    def head(encoder: Encoder, pooling: Aggregator) -> Aggregator:
        if isinstance(pooling, First):
            return Head(encoder.dim, settings.dim, norm=False)
        return Projected(pooling, encoder.dim, settings.dim)

    pictures = PixelInput(
        **image.backbone.pixel_format, crop_ratio=window, augmentation=settings.augmentation
    )
    texts = CleanedInput(words, "x-vlm") if settings.clean_captions else words
    return join_towers(settings, image, text, pictures, texts, branches, scorer, head)


RECIPE = Recipe("fusion", "Fusion re-ranker as in X2-VLM (ITC and ITM)", Settings, build)
