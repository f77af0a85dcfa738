"""COOKIE's image retrieval by hashing: a pre-trained model with a hash head, trained with CSQ's centres (A.1).

MEAN-pooling, then a head of three layers and tanh; each image's code is drawn to the centre of its classes. The number
of bits is 16, 32 or 64. What is ranked, and how ties are decided, stands in docs/evaluation.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diptych.branches.branch import HashHead
from diptych.data.captions import Captions
from diptych.data.labels import COLUMN, Signs, class_names, class_sets, read_centres
from diptych.errors import DataError
from diptych.evaluation.hashing import VIEW, HashRetrieval
from diptych.model.retriever import Retriever
from diptych.objectives.combine import On, Sum
from diptych.objectives.labels import CentralSimilarity
from diptych.objectives.objective import Objective
from diptych.recipes import cookie
from diptych.recipes.recipe import Recipe
from diptych.recipes.towers import start_from
from diptych.settings import defaults, setting
from diptych.targets.labels import HashTargets
from diptych.training.method import Method

HEAD = f"branches.{VIEW}."


@dataclass(frozen=True)
@defaults(
    epochs=100,
    batch_size=320,
    schedule="every",
    decay_every=10,
    decay_factor=0.7,
    image_pool="mean",
    text_pool="mean",
)
class Settings(cookie.Towers):
    """COCO's and NUS-WIDE's numbers: AdamW 1e-4, ×0.7 every 10 of 100 epochs, batch 320, MEAN-pooling, λ = 0.05."""

    learning_rate: float = setting(1e-4, "learning rate of the hash head", low=0)
    weight_decay: float = setting(
        1e-4, "AdamW weight decay (CSQ: --weight_decay 0; 1e-4 is COOKIE's of its other tasks)", low=0
    )
    clip_norm: float = setting(
        2.0, "largest global gradient norm (CSQ: --clip_norm 0; 2 is that of COOKIE's recipes here)", low=0
    )
    bits: int = setting(64, "length of the codes: 16, 32 or 64 in the paper, a power of two", low=4)
    label_column: str = setting(COLUMN, "column of the data that holds the classes of an image")
    split_labels: bool = setting(
        True, "take 'cat;dog' or 'cat|dog' as two classes (off: as one)", before=False
    )
    centres: str = setting(
        "", "file of hash centres, such as CSQ's, a row for each column of the lists (else from --seed)"
    )
    quantisation: float = setting(0.05, "weight λ of the quantisation term", low=0)
    hash_dropout: float = setting(0.5, "dropout of the hash head", low=0, high=0.95)
    text_codes: bool = setting(False, "draw the codes of texts to the centres of their images too")
    tower_multiplier: float = setting(
        0.05, "learning-rate factor of all but the hash head (from scratch: 1)", low=0
    )


def build(settings: Settings, captions: Captions) -> Method:
    """Compose the method for the given training data."""
    names = class_names(class_sets(captions, settings.label_column, settings.split_labels))
    if not names:
        raise DataError(
            f"no image of {captions.name} has a class in the column '{settings.label_column}': hashing needs classes."
        )
    towers = cookie.towers(settings, captions)
    if settings.init:
        start_from(towers, settings.init)  # before the weights of the head are drawn
    head = HashHead(settings.dim, settings.bits, len(names), settings.hash_dropout, settings.seed)
    if settings.centres:
        head.use_centres(_in_order(read_centres(settings.centres), names, captions))
    retriever = Retriever(
        towers.image, towers.text, towers.image_input, towers.text_input, branches={VIEW: head}
    )
    if not settings.text_codes:
        _freeze_texts(retriever)
    return Method(
        retriever,
        objective(settings, head),
        multipliers={"": settings.tower_multiplier, HEAD: 1.0},
        targets=(HashTargets(settings.label_column, names, settings.split_labels),),
    )


def _in_order(centres: Signs, names: Sequence[str], captions: Captions) -> Signs:
    """The row of each class: that of its column, where the data have a column for each class."""
    if not set(names) <= set(captions.classes):
        return centres
    columns = [list(captions.classes).index(name) for name in names]
    if len(centres) < len(captions.classes):
        raise DataError(
            f"the file of hash centres has {len(centres)} rows and the lists have {len(captions.classes)} columns: "
            "choose the file for these classes, or leave it out."
        )
    return centres[columns]


def evaluators(settings: Settings) -> tuple[HashRetrieval, ...]:
    """MAP@5000: each image of a split asks for the others."""
    return (HashRetrieval(settings.label_column, split_labels=settings.split_labels),)


def objective(settings: Settings, head: HashHead) -> Objective:
    """CSQ's loss of the images' codes, and of the texts' where they are asked for."""
    images, texts = (
        On(
            CentralSimilarity(head.centres, head.ties, settings.quantisation),
            f"{VIEW}.{one}",
            f"{VIEW}.{other}",
        )
        for one, other in (("image", "text"), ("text", "image"))
    )
    return Sum({"images": (images, 1.0), "texts": (texts, 1.0)}) if settings.text_codes else images


def _freeze_texts(retriever: Retriever) -> None:
    """Leave the text side as it is: no loss sees it. What it shares with the image side is trained there."""
    shared = {id(parameter) for parameter in retriever.image.parameters()}
    for parameter in retriever.text.parameters():
        if id(parameter) not in shared:
            parameter.requires_grad_(False)


RECIPE = Recipe("cookie-hash", "COOKIE: image retrieval by hashing", Settings, build, evaluators=evaluators)
