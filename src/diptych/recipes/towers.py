"""The one assembler of two-tower recipes: two encoders, a transformer on top, poolings, and the method around them.

The concepts of the training texts, for the branches of CODER and CVSE.

Where a run starts from another: the parts of a trained model that fit are taken, the others start fresh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from torch import Tensor, nn

from diptych.aggregators import GPO
from diptych.aggregators.pooling import Aggregator
from diptych.branches.branch import Branch
from diptych.branches.concept import ConceptBranch
from diptych.data.captions import Captions
from diptych.data.concepts import (
    SHARES,
    Concepts,
    WordVectors,
    count_concepts,
    find_concepts,
    read_cvse,
    word_vectors,
)
from diptych.data.images import ImageInput
from diptych.data.text import TextInput
from diptych.encoders.encoder import Encoder
from diptych.encoders.shared import Contextual, TokenTransformer
from diptych.errors import CheckpointError, SettingsError
from diptych.interaction.similarity import PairScorer
from diptych.model import named
from diptych.model.retriever import Retriever, Tower
from diptych.objectives.objective import Objective
from diptych.registries import IMAGE_ENCODERS, POOLINGS
from diptych.settings import EncoderSettings, HostSettings, TrainingSettings, defaults, setting
from diptych.training.method import Method

FRAMES = tuple(name for name in HostSettings.INHERITED if name not in ("image_encoder", "image_size"))
"""What a run on frames of videos takes over from one on pictures, whose projection is another."""


@dataclass(frozen=True)
class TowerSettings(EncoderSettings, HostSettings):
    """Two encoders by name with all that a two-tower recipe takes."""


@dataclass(frozen=True)
class HingeSettings(TrainingSettings):
    """The hinge of VSE++ and what it leaves open."""

    margin: float = setting(0.2, "margin α of the hinge", low=0)
    all_negatives_epochs: int = setting(
        0, "first epochs that sum over all negatives (0: as most papers; small data may need some)", low=0
    )
    hinge_reduction: Literal["sum", "mean"] = setting("sum", "sum of the hinges of a batch, or their mean")
    mask_same_image: bool = setting(False, "texts of one image are no negatives of it (off: as published)")


@dataclass(frozen=True)
@defaults(learning_rate=2e-4)
class LocalSettings(TowerSettings, HingeSettings):
    """What SCAN, SGRAF and CVSE share: a linear layer on stored regions, and Adam."""

    image_encoder: str = setting(
        "auto", "image encoder (auto: grid for stored features, lite0 for pictures)", names=IMAGE_ENCODERS
    )
    weight_decay: float = setting(0.0, "AdamW weight decay (0: Adam, as published)", low=0)


@dataclass(frozen=True)
class ConceptSettings(TrainingSettings):
    """The words that are concepts, and their vectors."""

    concept_size: int = setting(400, "concepts g in the vocabulary", low=10)
    concept_files: str = setting("", "folder of CVSE's concept files (else chosen from the training texts)")
    concept_vectors: str = setting(
        "", "vectors of concepts: 'glove' (50-d), or a file of GloVe or word2vec (else CVSE's, or 'glove')"
    )


def towers(
    settings: TowerSettings, captions: Captions, *, image_drop: float = 0.0, text_drop: float = 0.0
) -> Retriever:
    """Both sides by their names; ``drop`` is the share of elements that training leaves out at random."""
    image, image_input = named.image_side(settings, captions, drop=image_drop)
    text, text_input = named.text_side(settings, captions, drop=text_drop)
    return join_towers(settings, image, text, image_input, text_input)


def local_sides(
    settings: LocalSettings, captions: Captions, word_dropout: float = 0.0
) -> tuple[Encoder, Encoder, ImageInput, TextInput]:
    """Both encoders and what they read, where the elements of both sides are compared with each other."""
    if settings.text_encoder == "gru":
        raise SettingsError("--text_encoder gru gives one vector, and a pair scorer reads words: use bigru.")
    # one linear layer on stored regions, as published, which is what 'grid' does
    image, image_input = named.image_side(settings, captions, drop=0.0, auto="grid")
    text, text_input = named.text_side(settings, captions, drop=0.0, word_dropout=word_dropout)
    return image, text, image_input, text_input


def join_towers(
    settings: HostSettings,
    image: Encoder,
    text: Encoder,
    image_input: ImageInput,
    text_input: TextInput,
    branches: Mapping[str, Branch] | None = None,
    scorer: PairScorer | None = None,
    head: Callable[[Encoder, Aggregator], Aggregator] = lambda _, pooling: pooling,
) -> Retriever:
    """A retriever of two encoders, with the transformer on top and the poolings that the settings name.

    ``head`` may put a layer behind the pooling of an encoder.
    """
    if settings.depth or settings.ON_TOP:
        first = _transformer(settings, image.dim)
        image = Contextual(image, first)
        text = Contextual(text, first if settings.share_weights else _transformer(settings, text.dim))
    towers = []
    for encoder, pool in ((image, settings.image_pool), (text, settings.text_pool)):
        made: Aggregator = POOLINGS.make(pool, settings, dim=encoder.dim)
        if scorer is not None and scorer.candidates is None:
            check_fixed(pool, made, "trains the scores of pairs, not pooled vectors")
        towers.append(Tower(encoder, head(encoder, made)))
    return Retriever(towers[0], towers[1], image_input, text_input, branches, scorer)


def check_fixed(name: str, pooling: Aggregator, why: str) -> None:
    """Refuse a pooling with weights where no loss reads what it pools."""
    if any(True for _ in pooling.parameters()):
        raise SettingsError(f"pooling '{name}' has weights, this recipe {why}: use mean, max, kmax or first.")


def _transformer(settings: HostSettings, dim: int) -> TokenTransformer:
    width = settings.feedforward or 4 * dim
    return TokenTransformer(dim, settings.depth, settings.heads, width, settings.dropout)


def method(retriever: Retriever, objective: Objective, settings: EncoderSettings, **more: Any) -> Method:
    """A method whose pretrained parts have the learning-rate factors of the settings; its image backbone waits."""
    return Method(
        retriever,
        objective,
        multipliers=named.multipliers(retriever, settings),
        train_from=named.train_from(retriever),
        **more,
    )


def concepts_of(
    settings: Any, captions: Captions, shares: Sequence[float] = SHARES
) -> tuple[Concepts, WordVectors | None]:
    """Concepts among the words of the training texts, or in CVSE's released files, and their word vectors."""
    wanted = settings if isinstance(settings, ConceptSettings) else ConceptSettings()
    if wanted.concept_files:
        concepts = read_cvse(wanted.concept_files)
        count_concepts(concepts.words, captions.texts)  # refuses words of which none occurs in these texts
    else:
        concepts = find_concepts(captions.texts, wanted.concept_size, shares)
    if wanted.concept_vectors or concepts.vectors is None:  # else CVSE's folder brought its own
        return concepts, word_vectors(concepts.words, wanted.concept_vectors or "glove")
    return concepts, None


def concept_branch(
    settings: Any,
    captions: Captions,
    dim: int,
    *,
    weight: float,
    shares: Sequence[float] = SHARES,
    pool_images: bool = False,
) -> ConceptBranch:
    """CODER's concept branch; ``weight`` is its share of the score.

    With ``pool_images`` it pools the image for itself, where the tower's vector has another width than its features.
    """
    concepts, vectors = concepts_of(settings, captions, shares)
    return ConceptBranch.from_concepts(
        concepts,
        dim,
        vectors=vectors,
        norm=getattr(settings, "adjacency", "sym"),
        weight=weight,
        attention=getattr(settings, "concept_attention", 10.0),
        image_aggregator=GPO() if pool_images else None,
        text_aggregator=None if getattr(settings, "share_text_pool", False) else GPO(),
    )


S = TypeVar("S", bound=TrainingSettings)


def with_words_of(settings: S, init: str) -> S:
    """Settings that read the vocabulary of the model to start from, unless they name one or need none."""
    folder = Path(init) / "best" if (Path(init) / "run.json").is_file() else Path(init)
    words = folder / "vocabulary.json"
    if getattr(settings, "vocabulary", None) != "" or not words.is_file():
        return settings
    return replace(settings, vocabulary=str(words))  # type: ignore[call-arg]


def start_from(retriever: Retriever, init: str) -> str:
    """Give a model every part of a trained one that fits; the sentence says which, and which start fresh.

    A part fits where both models have it on the same side, with the same class, shapes, heads and words. Whatever
    wraps it, a transformer on top or an attention, may differ.
    """
    source = Retriever.from_pretrained(init)
    there, taken, fresh = parts_of(source, repeat=True), [], []
    for (side, name), part in parts_of(retriever).items():
        other = there.get((side, name))
        words = side != "text" or _same_words(retriever, source, part)
        if other is not None and words and _form(part) == _form(other):
            for key, value in own_state(part).items():
                value.copy_(own_state(other)[key])
            taken.append(f"{side} {name}")
        else:
            fresh.append(f"{side} {name}")
    if not taken:
        raise CheckpointError(
            f"--init {init} shares no part with this model: its parts are {', '.join(map(' '.join, there))}, this "
            f"model's are {', '.join(fresh)}. Give a run whose parts fit, or the settings of its shape, such as --dim."
        )
    return f"started from {init}: {', '.join(taken)}; fresh: {', '.join(fresh) or 'nothing'}"


def parts_of(retriever: Retriever, *, repeat: bool = False) -> dict[tuple[str, str], nn.Module]:
    """The parts that hold weights of their own, by side and class: ``image Regions``, ``concept ConceptBranch``.

    One that both sides share is the image's; with ``repeat`` it is the text's too.
    """
    found: dict[tuple[str, str], nn.Module] = {}
    for path, part in retriever.named_modules(remove_duplicate=not repeat):
        side, _, _ = path.removeprefix("branches.").partition(".")
        if path and hasattr(part, "_arguments") and own_state(part):
            found.setdefault((side, type(part).__name__), part)
    return found


def own_state(part: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a part, without those of the parts inside it."""
    inner = tuple(f"{path}." for path, one in part.named_modules() if path and hasattr(one, "_arguments"))
    return {name: value for name, value in part.state_dict().items() if not name.startswith(inner)}


def _form(part: nn.Module) -> tuple[Any, ...]:
    """What two parts of one class must share for one to take the weights of the other: shapes, heads and words."""
    words = getattr(part, "words", None)
    shapes = {name: value.shape for name, value in own_state(part).items()}
    return shapes, getattr(part, "heads", None), words if isinstance(words, list) else None


def _same_words(retriever: Retriever, source: Retriever, part: nn.Module) -> bool:
    """Whether the rows of a table of words mean the same words in both models."""
    mine, theirs = (getattr(model.text_input, "words", None) for model in (retriever, source))
    if mine is None or not any(len(value) == len(mine) for value in own_state(part).values() if value.dim()):
        return True
    return theirs is not None and list(mine) == list(theirs)
