"""Label-wise cross-modal retrieval by semantic sharing (Yang et al., IJCAI 2021), its baselines, and DSCMR.

One transformer reads region tokens and word tokens, one head predicts the labels of both, and the prediction is the
retrieval embedding. No loss ties an image to its text: what they share is the network (Ours). The baselines put that
to the test: a consistency loss on top (Ours+Con), two networks (Independent, Traditional), DSCMR's common space.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from diptych.aggregators.labels import ClassScores, CommonLayer, CommonSpace, LabelHead
from diptych.aggregators.pooling import Aggregator
from diptych.branches.branch import Branch
from diptych.branches.labels import ContextPrediction, FrontView, LabelView, PooledView
from diptych.data.captions import Captions, holds_features
from diptych.data.labels import COLUMN, Labels
from diptych.data.text import TextInput, WordInput, WordPieceInput
from diptych.data.vocabulary import END, MASK, PAD, START, UNKNOWN
from diptych.encoders.encoder import Encoder
from diptych.encoders.shared import SharedBlocks, SharingEncoder, start_from_bert
from diptych.errors import SettingsError
from diptych.evaluation.evaluate import Evaluator
from diptych.evaluation.label_retrieval import LabelRetrieval
from diptych.model import named
from diptych.model.retriever import Retriever, Tower
from diptych.objectives.combine import Sum
from diptych.objectives.labels import DSCMR, SIDES, Alternate, Consistency, LabelLoss, MaskedPrediction, Side
from diptych.objectives.objective import Objective
from diptych.recipes.recipe import Recipe
from diptych.recipes.towers import check_fixed, method
from diptych.registries import IMAGE_ENCODERS, POOLINGS
from diptych.settings import EncoderSettings, TeacherSettings, defaults, setting
from diptych.targets.columns import TargetSource
from diptych.targets.labels import LabelTargets, RegionTargets, detector_classes
from diptych.training.method import Method

Baseline = Literal["ours", "ours+con", "independent", "traditional", "traditional+con", "dscmr"]
SHARED: tuple[Baseline, ...] = ("ours", "ours+con")  # one network for both modalities
CONSISTENT: tuple[Baseline, ...] = ("ours+con", "traditional+con")
ADAM_BETAS, DSCMR_BETAS = (0.9, 0.999), (0.5, 0.999)


@dataclass(frozen=True)
@defaults(epochs=45, batch_size=64, learning_rate=1e-4, decay_epoch=45, min_count=1)
class Settings(EncoderSettings, TeacherSettings):
    """The supplement's numbers: Adam 1e-4, batch 64, 45 epochs, 6 blocks of 8 heads, dropout 0.1, λ = 0.1."""

    weight_decay: float = setting(0.0, "AdamW weight decay (0: Adam)", low=0)
    clip_norm: float = setting(
        0.0, "largest global gradient norm (0: none, as printed; the code clips the text encoder at 2)", low=0
    )
    baseline: Baseline = setting(
        "ours", "the paper's model, or one it is compared with: consistency loss added, two networks, DSCMR"
    )
    label_columns: str = setting(COLUMN, "columns of the data that hold the labels, with commas")
    space: Literal["label", "feature"] = setting(
        "label", "space of retrieval: label predictions p, or the mean of the encoder's tokens"
    )
    image_pool: str = setting("mean", "visual aggregator of --space feature", names=POOLINGS)
    text_pool: str = setting("mean", "textual aggregator of --space feature", names=POOLINGS)
    label_loss: Literal["logistic", "bce"] = setting(
        "logistic", "label loss: log(1 + exp(−yᵀp)), or binary cross-entropy (independent: always bce)"
    )
    context_weight: float = setting(0.1, "λ, weight of masked prediction (COCO: 0.01; 0: no mask)", low=0)
    mask_rate: float = setting(0.15, "probability that a word or region is masked", low=0, high=0.95)
    region_clusters: int = setting(
        100, "classes of masked regions, by k-means, where the data have no detector's classes", low=2
    )
    consistency_weight: float = setting(0.1, "η, the weight of the consistency loss (…+con)", low=0)
    relation: Literal["shared", "counts"] = setting(
        "shared", "S of the consistency loss: 1 where labels are shared, or how many (DSCMR: always counts)"
    )
    interactive: Literal["joint", "alternate"] = setting(
        "joint", "both modalities in every step, or an image step and a text step in turn"
    )
    dim: int = setting(1024, "width of the encoder (DSCMR: of the common space)", low=1)
    blocks: int = setting(6, "transformer blocks of the shared encoder", low=1)
    heads: int = setting(8, "attention heads of each block", low=1)
    feedforward: int = setting(2048, "width inside a block (DSCMR: of each side's own layer)", low=1)
    dropout: float = setting(0.1, "dropout of the blocks", low=0, high=0.95)
    authors_encoder: bool = setting(
        True,
        "the encoder of the authors' code: tokens halved, unbiased deviation in its norms, label head as nn.Linear "
        "starts (off: none of these, label head Xavier)",
        before=False,
    )
    blocks_from: str = setting(
        "", "start the blocks from a BERT's first layers (BERT-base: --dim 768 --feedforward 3072)"
    )
    max_tokens: int = setting(150, "words or pieces of a text that are read, with <start> and <end>", low=3)
    ndcg_depth: int = setting(500, "the k of NDCG@k", low=1)
    merge_texts: bool = setting(False, "rank and ask each text once (tag sets of MIRFlickr25K, NUS-WIDE)")
    image_encoder: str = setting(
        "auto", "image encoder (auto: grid, a linear layer, for stored features)", names=IMAGE_ENCODERS
    )

    @property
    def columns(self) -> list[str]:
        """The label columns by name."""
        return [name.strip() for name in self.label_columns.split(",") if name.strip()]

    @property
    def masks(self) -> bool:
        """Whether tokens are masked and predicted."""
        return self.baseline in SHARED and self.context_weight > 0 and self.mask_rate > 0


def build(settings: Settings, captions: Captions) -> Method:
    """Compose the method for the given training data."""
    settings = _check(settings, captions)
    labels = Labels.of(captions, settings.columns)
    image, image_input = named.image_side(settings, captions, drop=0.0)
    text, text_input = named.text_side(settings, captions, drop=0.0, max_length=settings.max_tokens)
    if settings.baseline == "dscmr":
        towers, branches = _dscmr(settings, image, text, labels)
    else:
        towers, branches = _networks(settings, image, text, text_input, labels)
    targets: list[TargetSource] = [LabelTargets(labels)]
    if settings.masks:
        classes = detector_classes(captions)
        frozen = image.frozen_backbone()
        targets.append(RegionTargets(settings.region_clusters, image_input, frozen, settings.seed))
        words = text_input.vocabulary_size  # type: ignore[attr-defined]  # both kinds of text input have it
        branches["context"] = ContextPrediction(settings.dim, words, classes or settings.region_clusters)
    retriever = Retriever(*towers, image_input, text_input, branches)
    return method(
        retriever,
        objective(settings),
        settings,
        targets=targets,
        betas=DSCMR_BETAS if settings.baseline == "dscmr" else ADAM_BETAS,
    )


def evaluators(settings: Settings) -> Sequence[Evaluator]:
    """NDCG both ways first; its thresholds are chosen on the validation split."""
    return (LabelRetrieval(settings.ndcg_depth),)


def objective(settings: Settings) -> Objective:
    """Eq. 6 (Ours), with η · ℓ_con (Ours+Con, Eq. 2 of Traditional), BCE alone (Independent), or DSCMR's loss."""
    if settings.baseline == "dscmr":
        return DSCMR()
    kind = "bce" if settings.baseline == "independent" else settings.label_loss

    def members(sides: tuple[Side, ...]) -> dict[str, tuple[Objective, float]]:
        found: dict[str, tuple[Objective, float]] = {"label": (LabelLoss(kind, sides=sides), 1.0)}
        if settings.masks:
            found["context"] = (MaskedPrediction(settings.context_weight, sides=sides), 1.0)
        return found

    if settings.interactive == "alternate":
        return Alternate(Sum(members(("image",))), Sum(members(("text",))))
    both = members(SIDES)
    if settings.baseline in CONSISTENT:
        both["consistency"] = (Consistency(relation=settings.relation), settings.consistency_weight)
    return Sum(both)


Parts = tuple[tuple[Tower, Tower], dict[str, Branch]]


def _networks(settings: Settings, image: Encoder, text: Encoder, words: TextInput, labels: Labels) -> Parts:
    """Front ends, blocks and label heads: one set of blocks and one head for both sides, or two of each."""

    def blocks() -> SharedBlocks:
        made = SharedBlocks(
            settings.dim,
            settings.blocks,
            settings.heads,
            settings.feedforward,
            settings.dropout,
            settings.authors_encoder,
        )
        if settings.blocks_from:
            start_from_bert(made, settings.blocks_from)
        return made

    def head() -> LabelHead:
        unit_tokens = settings.label_loss == "logistic" and settings.baseline != "independent"
        made = LabelHead(settings.dim, len(labels), unit_tokens)
        if settings.authors_encoder:
            made.linear.reset_parameters()
        return made

    shared = settings.baseline in SHARED
    image_blocks, image_head = blocks(), head()
    text_blocks, text_head = (image_blocks, image_head) if shared else (blocks(), head())
    rate = settings.mask_rate if settings.masks else 0.0
    mask_id, untouched = _special_words(words)
    encoders = (
        SharingEncoder(image, image_blocks, rate),
        SharingEncoder(text, text_blocks, rate, mask_id, untouched),
    )
    pools: tuple[Aggregator, Aggregator] = (image_head, text_head)
    if settings.space == "feature":
        pools = _pooling(settings, settings.image_pool), _pooling(settings, settings.text_pool)
    branches: dict[str, Branch] = {"labels": LabelView(labels, image_head, text_head, settings.merge_texts)}
    if settings.baseline in CONSISTENT:
        branches["front"] = FrontView(settings.dim)
    return (Tower(encoders[0], pools[0]), Tower(encoders[1], pools[1])), branches


def _pooling(settings: Settings, name: str) -> Aggregator:
    made: Aggregator = POOLINGS.make(name, settings, dim=settings.dim)
    check_fixed(name, made, "trains label predictions, not pooled vectors")
    return made


def _dscmr(settings: Settings, image: Encoder, text: Encoder, labels: Labels) -> Parts:
    """DSCMR: a layer of each side's own, one common layer, one linear classifier; retrieval in the common space."""
    common = CommonLayer(settings.feedforward, settings.dim)
    classifier = CommonLayer(settings.dim, len(labels))
    spaces = [CommonSpace(settings.dim, common, settings.feedforward) for _ in range(2)]
    scores = [ClassScores(space, classifier) for space in spaces]
    branches: dict[str, Branch] = {
        "labels": LabelView(labels, scores[0], scores[1], settings.merge_texts),
        "common": PooledView(settings.dim, spaces[0], spaces[1]),
    }
    return (Tower(image, spaces[0]), Tower(text, spaces[1])), branches


def _special_words(words: TextInput) -> tuple[int, list[int]]:
    """The id of the mask, and the ids that are neither masked nor predicted."""
    if isinstance(words, WordInput):
        numbers = {word: number for number, word in enumerate(words.words)}
        if MASK not in numbers:
            raise SettingsError(f"masked prediction needs {MASK} in the vocabulary: append it to the file.")
        return numbers[MASK], [numbers[word] for word in (PAD, START, END, UNKNOWN)]
    assert isinstance(words, WordPieceInput)
    mask = words.tokenizer.mask_token_id
    if mask is None:
        raise SettingsError("this tokenizer has no mask token: use bigru, or --context_weight 0.")
    return int(mask), [int(number) for number in words.tokenizer.all_special_ids]


def _check(settings: Settings, captions: Captions) -> Settings:
    """The settings with the image encoder named; combinations that cannot work are refused."""
    if not settings.columns:
        raise SettingsError("--label_columns is empty: name the columns that hold the labels.")
    if settings.image_encoder == "auto" and holds_features(captions.images):
        settings = replace(settings, image_encoder="grid")  # the paper's linear layer
    if settings.blocks_from and settings.baseline == "dscmr":
        raise SettingsError(
            "--blocks_from cannot be combined with --baseline dscmr, which has no blocks: leave it out."
        )
    if (settings.image_pool, settings.text_pool) != ("mean", "mean") and (
        settings.space == "label" or settings.baseline == "dscmr"
    ):
        raise SettingsError(
            "--image_pool and --text_pool are for --space feature: label predictions are means over the tokens."
        )
    if settings.text_encoder == "gru":
        raise SettingsError("--text_encoder gru gives one state per text: use bigru, with one per word.")
    if settings.masks and settings.image_encoder == "regions":
        raise SettingsError(
            "--image_encoder regions mixes the regions of a batch (BatchNorm), so masked ones would leak: use grid."
        )
    if settings.masks and settings.text_encoder != "bigru" and not settings.train_text:
        raise SettingsError(
            "cached states of a text transformer have read every word, so masked ones would leak: give --train_text, "
            "or --context_weight 0."
        )
    if settings.interactive == "alternate" and settings.baseline in (*CONSISTENT, "dscmr"):
        raise SettingsError(
            f"--interactive alternate cannot be combined with --baseline {settings.baseline}, whose loss ties both "
            "sides: use joint."
        )
    return settings


RECIPE = Recipe(
    "labelwise", "Label-wise retrieval by semantic sharing", Settings, build, evaluators=evaluators
)
