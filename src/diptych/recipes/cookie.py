"""COOKIE: contrastive pre-training in which images and texts share knowledge (Wen et al., ICCV 2021).

Two streams; one transformer on top of both, with the same weights; three contrastive objectives, between images and
texts, between two looks at an image, and between two looks at a text. The supplement gives the augmentations, the
corpora and the downstream tasks. It gives no sizes, temperature or schedule of pre-training: the readings stand in
docs/methods-cookie.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

from diptych.data.augmentation import PictureAugmentation, WordAugmentation
from diptych.data.captions import Captions
from diptych.data.images import ImageInput, PixelInput
from diptych.data.text import TextInput
from diptych.encoders.cnn import Grid
from diptych.encoders.encoder import Encoder
from diptych.encoders.shared import Contextual, TokenTransformer
from diptych.errors import CheckpointError, SettingsError
from diptych.evaluation.evaluate import Evaluator, Retrieval
from diptych.evaluation.sts import Sts
from diptych.model import named
from diptych.model.retriever import Retriever
from diptych.objectives.combine import On, Sum
from diptych.objectives.contrastive import InfoNCE
from diptych.objectives.objective import Objective
from diptych.recipes.recipe import Recipe
from diptych.registries import IMAGE_ENCODERS, POOLINGS, TEXT_ENCODERS
from diptych.settings import IMAGE_HELP, TrainingSettings, setting
from diptych.training.method import Method
from diptych.training.views import Augmented

SHAPE = (
    "image_encoder", "text_encoder", "dim", "depth", "share_weights", "heads", "feedforward", "image_size",
    "word_dim", "vocabulary", "min_count",
)  # fmt: skip
"""Settings that decide which weights a model has: a run that starts from another takes them over from it."""
STS_HELP = "SentEval folder: also measure text matching (STS) after each epoch"
LEAVE_OUT = f"Leave out the settings of its shape ({', '.join(SHAPE)}): the run gives them."
T = TypeVar("T", bound="Towers")


@dataclass(frozen=True)
class Towers(TrainingSettings):
    """Two encoders, the transformer on top of both, and pooling: what every COOKIE recipe shares."""

    image_encoder: str = setting("auto", IMAGE_HELP, names=IMAGE_ENCODERS)
    text_encoder: str = setting(
        "bigru",
        "text encoder (published, as we infer: BERT; the default needs no download)",
        names=TEXT_ENCODERS,
    )
    dim: int = setting(1024, "joint dimension and width of the transformer", low=1)
    depth: int = setting(1, "layers of the transformer on top of both sides (0: none)", low=0)
    share_weights: bool = setting(True, "one transformer for both sides (off: one each)")
    heads: int = setting(8, "attention heads of the transformer", low=1)
    feedforward: int = setting(
        0, "width of the transformer's feed-forward layer (0: four times --dim)", low=0
    )
    dropout: float = setting(0.1, "dropout of the transformer", low=0, high=0.95)
    image_pool: str = setting("max", "visual aggregator", names=POOLINGS)
    text_pool: str = setting("max", "textual aggregator", names=POOLINGS)
    train_backbone: bool = setting(
        False,
        "train the CNN or ViT too, as published, as we infer (off: its features are cached, which one GPU can afford)",
    )
    backbone_multiplier: float = setting(0.1, "learning-rate factor of the image backbone", low=0)
    image_size: int = setting(256, "pixels of the square image the backbone reads", low=32)
    train_text: bool = setting(True, "train the text transformer (else its token states are cached)")
    text_multiplier: float = setting(1.0, "learning-rate factor of the text transformer", low=0)
    word_dim: int = setting(300, "width of BiGRU word vectors", low=1)
    word_vectors: str = setting(
        "", "start word vectors from 'glove' (50-d, extra 'demo') or a file of GloVe or word2vec"
    )
    clip_norm: float = setting(
        2.0, "largest global gradient norm (0: none; the supplement does not say, 2 is VSE∞'s)", low=0
    )
    vocabulary: str = setting("", "published vocabulary JSON (else built from the training texts)")
    min_count: int = setting(4, "least occurrences of a word in the vocabulary", low=1)

    unit_input: ClassVar[bool] = False


@dataclass(frozen=True)
class Settings(Towers):
    """Pre-training: AdamW 5e-5 with 10 % warm-up and cosine decay, batch 1,024, 20 epochs, τ 0.07, equal weights."""

    epochs: int = setting(20, "passes over the training texts", low=1)
    batch_size: int = setting(1024, "pairs per step, over all processes together", low=2)
    learning_rate: float = setting(5e-5, "base learning rate", low=0)
    schedule: Literal["step", "every", "cosine", "linear"] = setting(
        "cosine", "how the learning rate falls: once, every few epochs, as a cosine, as a line"
    )
    warmup_share: float = setting(
        0.1, "share of all steps during which the learning rate rises linearly from 0", low=0, high=1
    )
    decay_after_warmup: bool = setting(
        True,
        "rise from 0 to the full rate during the warm-up and fall from there (off: fall from step 0, peak 0.976)",
        before=False,
    )
    temperature: float = setting(0.07, "temperature τ of the three objectives", low=1e-3)
    cross_weight: float = setting(1.0, "weight of L_cross, images against texts (0: without)", low=0)
    visual_weight: float = setting(
        1.0, "weight of L_vis, images against augmented images (0: without)", low=0
    )
    textual_weight: float = setting(1.0, "weight of L_txt, texts against augmented texts (0: without)", low=0)
    same_image: Literal["ignored", "positive", "negative"] = setting(
        "ignored", "what other pairs of an image are in the objectives (negative: as printed)"
    )
    word_rate: float = setting(
        0.2, "share of the words that are masked, replaced or deleted", low=0.01, high=0.95
    )
    cell_drop: float = setting(
        0.2, "share of the cells left out in the second look at stored features", low=0.01, high=0.95
    )
    sts: str = setting("", STS_HELP)
    augmented_copies: int = setting(
        4,
        "augmented copies of each picture that a frozen backbone reads once (0: leave out cells instead)",
        low=0,
    )


def build(settings: Settings, captions: Captions) -> Method:
    """Compose the method for the given training data."""
    retriever = towers(settings, captions)
    return Method(
        retriever,
        objective(settings),
        multipliers=named.multipliers(retriever, settings),
        views=views(settings, retriever),
    )


def evaluators(settings: Settings) -> tuple[Evaluator, ...]:
    """Image-text retrieval and, where a folder is given, text matching."""
    return (Retrieval(), Sts(settings.sts)) if settings.sts else (Retrieval(),)


def towers(settings: Towers, captions: Captions, word_rate: float = 0.0, augment: bool = False) -> Retriever:
    """Both encoders with the transformer on top; training sees the pictures and texts as they are, or augmented."""
    image, image_input = named.image_side(settings, captions, drop=0.0)
    text, text_input = named.text_side(settings, captions, drop=word_rate)
    if isinstance(image_input, PixelInput) and isinstance(image, Grid) and not augment:
        image_input = PixelInput(**image.backbone.pixel_format, crop_ratio=(1.0, 1.0), flip=0.0)
    return joined(settings, image, text, image_input, text_input)


def joined(
    settings: Towers, image: Encoder, text: Encoder, image_input: ImageInput, text_input: TextInput
) -> Retriever:
    """A retriever of two encoders with the weight-sharing transformer on top of both, or one each."""
    first = _transformer(settings)
    second = first if settings.share_weights else _transformer(settings)
    return Retriever(
        named.pooled(Contextual(image, first), settings.image_pool, settings),
        named.pooled(Contextual(text, second), settings.text_pool, settings),
        image_input,
        text_input,
    )


def objective(settings: Settings) -> Objective:
    """L = L_cross + L_vis + L_txt, each InfoNCE in both directions; clean rows first, augmented ones second."""
    rows = {
        "cross": ("image", "text", settings.cross_weight),
        "visual": ("image", "augmented.image", settings.visual_weight),
        "textual": ("text", "augmented.text", settings.textual_weight),
    }
    members: dict[str, tuple[Objective, float]] = {
        name: (On(InfoNCE(settings.temperature, same_image=settings.same_image), first, second), weight)
        for name, (first, second, weight) in rows.items()
        if weight
    }
    if not members:
        raise SettingsError("all three objectives have weight 0: give at least one of them a weight.")
    return Sum(members)


def views(settings: Settings, retriever: Retriever) -> dict[str, Augmented]:
    """The augmented look, of the sides whose objective is used."""
    pictures = PictureAugmentation() if settings.visual_weight else None
    words: WordAugmentation | None = None
    if settings.textual_weight:
        words = retriever.text_input.augmentation(settings.word_rate, keep_a_word=True)
    if pictures is None and words is None:
        return {}
    return {
        "augmented": Augmented(pictures, words, drop=settings.cell_drop, copies=settings.augmented_copies)
    }


def start_from(retriever: Retriever, init: str, new: tuple[str, ...] = ()) -> None:
    """Give a model the weights of a trained one; ``new`` are prefixes of parts that keep their own.

    Pooling belongs to the task and is never taken over. Anything else that does not fit is another architecture.
    """
    source = Retriever.from_pretrained(init)
    if _form(source) is None:
        raise CheckpointError(
            f"--init {init} is another architecture, without a transformer on top of each side: give a run of the "
            "recipe 'cookie'."
        )
    if _form(source) != _form(retriever):
        raise CheckpointError(
            f"--init {init} is another architecture: its transformer has {_form(source)}, this model's has "
            f"{_form(retriever)}. {LEAVE_OUT}"
        )
    skipped = (*new, "image.aggregator", "text.aggregator")
    here, there = (
        {name: value for name, value in model.state_dict().items() if not name.startswith(skipped)}
        for model in (retriever, source)
    )
    for name in [*here, *there]:
        if name not in there or name not in here or here[name].shape != there[name].shape:
            shapes = [tuple(state[name].shape) if name in state else "none" for state in (there, here)]
            raise CheckpointError(
                f"--init {init} is another architecture: its {name} is {shapes[0]}, this model's is {shapes[1]}. "
                f"{LEAVE_OUT}"
            )
    retriever.load_state_dict(there, strict=False)


def words_of(settings: T, init: str) -> T:
    """Settings that read the vocabulary of the model to start from, unless they name one."""
    folder = Path(init) / "best" if (Path(init) / "run.json").is_file() else Path(init)
    words = folder / "vocabulary.json"
    return (
        replace(settings, vocabulary=str(words))
        if init and not settings.vocabulary and words.is_file()
        else settings
    )


def _form(retriever: Retriever) -> str | None:
    """What the shapes of weights do not say of the transformer: its heads, and whether both sides share it."""
    first, second = retriever.image.encoder, retriever.text.encoder
    if not isinstance(first, Contextual) or not isinstance(second, Contextual):
        return None
    shared = first.transformer is second.transformer
    return f"{first.transformer.heads} heads, {'one for both sides' if shared else 'one for each side'}"


def _transformer(settings: Towers) -> TokenTransformer:
    width = settings.feedforward or 4 * settings.dim
    return TokenTransformer(settings.dim, settings.depth, settings.heads, width, settings.dropout)


RECIPE = Recipe("cookie", "COOKIE: contrastive pre-training", Settings, build, evaluators=evaluators)
