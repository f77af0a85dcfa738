"""CODER: coupled diversity-sensitive momentum contrastive learning (Wang et al., ECCV 2022).

VSE∞'s towers; a contrastive loss whose temperature follows the diversity of each anchor's negatives (DCL); a momentum
twin with two coupled queues (M-DCL); a concept branch over a graph of frequent words; prototypes that classify the
concept view. ``coder-literal`` repeats the paper's printed formulas where the default follows a decided reading.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from diptych.branches.concept import Norm
from diptych.data.captions import Captions
from diptych.data.concepts import SHARES as CVSE_SHARES
from diptych.errors import SettingsError
from diptych.model import named
from diptych.model.twin import KeyPrecision
from diptych.objectives.combine import On, Sum
from diptych.objectives.contrast import Contrast, CoupledQueue, Diversity, Positive
from diptych.objectives.diversity import DiversityContrast, Enqueue, MomentumContrast
from diptych.objectives.expressions import OWN
from diptych.objectives.objective import Objective
from diptych.objectives.prototypes import prototypes
from diptych.recipes import vse_infinity
from diptych.recipes.provide import provided, with_branch
from diptych.recipes.recipe import Recipe
from diptych.recipes.towers import ConceptSettings, concept_branch
from diptych.registries import OBJECTIVES
from diptych.settings import defaults, setting
from diptych.training.method import Method

DCL = ("dcl", OWN)
SHARES = {"cvse": CVSE_SHARES, "printed": (0.7, 0.1, 0.2)}  # shares of nouns, adjectives, verbs


@dataclass(frozen=True)
@defaults(epochs=30, warmup_epoch=-1)
class Settings(vse_infinity.Settings, ConceptSettings):
    """CODER in the paper's numbers; rates as decided: 5e-4 with a GRU, else 2e-4 and the text transformer 2e-5."""

    learning_rate: float = setting(0.0, "base learning rate (0: 5e-4 with a GRU, else 2e-4)", low=0)
    weight_decay: float = setting(0.0, "weight decay (0: plain Adam, as in the paper)", low=0)
    loss: str = setting("dcl", "instance loss: own is dcl (Table 2, row 1: triplet)", names=OBJECTIVES)
    temperature: float = setting(0.1, "μ of Eq. 4 and 5", low=1e-4)
    contrast_margin: float = setting(0.3, "γ of Eq. 4 and 5")
    diversity: Diversity = setting("std", "diversity of an anchor's negatives (supplement, Table 3)")
    epsilon: float = setting(0.1, "ε of the diversity (Eq. 3)", low=0)
    diversity_gradient: bool = setting(False, "let the gradient flow through the diversity too, as printed")
    pos_scale: Literal["one", "mu"] = setting("one", "factor of the positive term: 1, or μ as printed")
    positive: Positive = setting("clamp", "log(1 + S) of the positive: clamped, of relu(S), raw as printed")
    bank: Literal["none", "diversity", "contrast"] = setting(
        "contrast", "what the queues serve: nothing, only the diversity, or M-DCL too (Table 3)"
    )
    bank_diversity: bool = setting(True, "average the diversity over batch and bank (Table 3)")
    queue_size: int = setting(4096, "pairs each queue holds", low=1)
    momentum: float = setting(0.995, "momentum of the twin", low=0, high=1)
    twin_precision: KeyPrecision = setting(
        "auto", "products of the twin: bf16, as the model's, or bf16 where the device has it (auto)"
    )
    concept: bool = setting(True, "the concept branch (Table 2, row 4)")
    concept_shares: Literal["cvse", "printed"] = setting(
        "cvse", "7:2:1 of nouns, adjectives, verbs as in CVSE, or of nouns, verbs, adjectives as printed"
    )
    concept_weight: float = setting(0.1, "1 − β: share of the concept view in the score", low=0, high=1)
    concept_attention: float = setting(10.0, "λ of Eq. 2, from CVSE", low=0)
    adjacency: Norm = setting("sym", "normalisation of the concept graph")
    share_text_pool: bool = setting(False, "the textual concept query is the text vector itself")
    concept_loss_weight: float = setting(1.0, "weight of the concept view's loss (2: as printed)", low=0)
    instance_weight: float = setting(3.0, "λ of Eq. 8", low=0)
    prototypes: bool = setting(True, "prototype-guided classification (Table 2, row 5), of the concept view")
    clusters: int = setting(10_000, "prototypes K (F30K 10,000, COCO 20,000; Table 4)", low=2)
    prototype_epoch: int = setting(
        3, "epochs without prototypes; after them, pairs are clustered again after every epoch", low=1
    )
    prototype_scale: float = setting(
        1.0, "s of the prototypes' (1/s) · CE(s · P v, z) (printed: 1)", low=1e-3
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.learning_rate == 0:
            object.__setattr__(self, "learning_rate", 5e-4 if self.text_encoder in named.GRUS else 2e-4)


@dataclass(frozen=True)
@defaults(
    learning_rate=2e-5, text_multiplier=1.0, pos_scale="mu", positive="raw", mask_same_image=False,
    diversity_gradient=True, concept_shares="printed", adjacency="coder", concept_loss_weight=2.0,
)  # fmt: skip
class LiteralSettings(Settings):
    """The formulas and the one learning rate as printed."""


def build(settings: Settings, captions: Captions) -> Method:
    """Compose the method for the given training data: VSE∞'s towers, then CODER's parts around them."""
    check(settings, captions)
    base = vse_infinity.build(settings, captions)
    sides = base.retriever
    if settings.concept:
        shares = SHARES[settings.concept_shares]
        branch = concept_branch(
            settings, captions, settings.dim, weight=settings.concept_weight, shares=shares
        )
        sides = with_branch(sides, "concept", branch)
    contrast = Contrast(
        settings.temperature,
        settings.contrast_margin,
        settings.epsilon,
        settings.diversity,
        pos_scale="mu" if settings.pos_scale == "mu" else 1.0,
        positive=settings.positive,
        stop_gradient=not settings.diversity_gradient,
        mask_same_image=settings.mask_same_image,
    )
    members: dict[str, tuple[Objective, float]] = {}
    queue = None
    if settings.bank != "none":
        queue = CoupledQueue(settings.queue_size, settings.dim)
        queue.check(settings.batch_size)
    if settings.loss in DCL:
        bank = queue if settings.bank_diversity else None
        members["dcl"] = DiversityContrast(contrast, bank=bank), settings.instance_weight
    elif settings.loss == "triplet":
        members["triplet"] = base.objective, settings.instance_weight
    else:
        term = OBJECTIVES.make(
            settings.loss,
            settings,
            dim=settings.dim,
            pairs=len(captions.texts),
            branches=sides.branches,
        )
        members["instance"] = term, settings.instance_weight
    if queue is not None and settings.bank == "contrast":
        members["m_dcl"] = MomentumContrast(queue, contrast, bank_diversity=settings.bank_diversity), 1.0
    elif queue is not None:
        members["queue"] = Enqueue(queue), 1.0
    if settings.concept:
        members["concept"] = On(DiversityContrast(contrast), "concept"), settings.concept_loss_weight
    if settings.prototypes:
        classify = prototypes(
            settings, settings.dim, len(captions.texts), view="concept", scale=settings.prototype_scale
        )
        members["prototypes"] = classify, 1.0
    return provided(replace(base, retriever=sides, objective=Sum(members)), settings, captions)


def check(settings: Settings, captions: Captions) -> None:
    """Refuse settings that contradict each other, or would be paid for and not used."""
    if settings.loss in DCL and settings.margin != Settings.margin:
        raise SettingsError("--margin is that of the triplet loss: give DCL's as --contrast_margin.")
    if settings.prototypes and not settings.concept:
        raise SettingsError(
            "the prototypes classify the concept branch's view: with --no_concept give --no_prototypes too."
        )
    for name in ("concept_size", "concept_shares"):
        if settings.concept_files and getattr(settings, name) != getattr(type(settings), name):
            raise SettingsError(f"the concepts are those of --concept_files: leave out --{name}.")
    if settings.bank == "diversity":
        unread = {
            f"--loss {settings.loss}": settings.loss not in DCL,
            "--diversity none": settings.diversity == "none",
            "--no_bank_diversity": not settings.bank_diversity,
        }
        for flag in (flag for flag, given in unread.items() if given):
            raise SettingsError(f"with {flag} nothing reads the bank's diversity: give --bank none.")


RECIPE = Recipe("coder", "CODER: diverse contrast, momentum, concepts", Settings, build)
LITERAL = Recipe("coder-literal", "CODER with the printed formulas", LiteralSettings, build)
