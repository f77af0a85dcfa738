"""CVSE: consensus-aware embedding (Wang et al., ECCV 2020), a baseline of VSE∞ and CODER, as VSE∞ repairs it.

Self-attention makes one vector of each side; a graph of frequent words gives both sides a second vector, a mixture of
concepts; the score reads both. The concepts of a text come from that text alone, not from the five texts of its image
(VSE∞, supplement 1.1). Formulas and what differs from the released code: docs/methods-baselines.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from diptych.branches.consensus import CONCEPT, FUSED, WEIGHTS, ConceptWords, ConsensusBranch
from diptych.data.captions import Captions
from diptych.data.text import WordInput
from diptych.objectives.combine import On, Sum
from diptych.objectives.objective import Objective
from diptych.objectives.soft_labels import Agreement
from diptych.objectives.triplet import triplet
from diptych.recipes import sgraf
from diptych.recipes.recipe import Recipe
from diptych.recipes.towers import ConceptSettings, concepts_of, join_towers, method
from diptych.settings import defaults, setting
from diptych.training.method import Method

VIEW = "consensus"


@dataclass(frozen=True)
@defaults(concept_size=300)
class Settings(sgraf.AttendedSettings, ConceptSettings):
    """CVSE on Flickr30K: Adam 2e-4 (no decay), batch 128, clip 2, 1024-d, 300 concepts, weights 3, 5, 1 and 2."""

    epochs: int = setting(50, "passes over the training texts (COCO: 30)", low=1)
    decay_epoch: int = setting(25, "epoch from which decay_factor scales the learning rate (COCO: 15)", low=0)
    label_share: float = setting(0.35, "share of a text's own concepts (COCO: 0.4)", low=0, high=1)
    instance_share: float = setting(0.85, "α, share of the instance vector (COCO: 0.9)", low=0, high=1)
    fused_share: float = setting(0.95, "share of the fused vectors in the score", low=0, high=1)
    fused_weight: float = setting(3.0, "weight of the hinge on fused vectors", low=0)
    instance_weight: float = setting(5.0, "weight of the hinge on instance vectors", low=0)
    concept_weight: float = setting(1.0, "weight of the hinge on consensus vectors", low=0)
    agreement_weight: float = setting(2.0, "weight of the KL between both sides' concepts", low=0)

    text_encoder: ClassVar[str] = "bigru"  # type: ignore[misc]  # its words name the concepts of a text
    train_text: ClassVar[bool] = True  # type: ignore[misc]
    text_multiplier: ClassVar[float] = 1.0  # type: ignore[misc]


def build(settings: Settings, captions: Captions) -> Method:
    """Compose the method for the given training data."""
    image, text, image_input, text_input = sgraf.attended_sides(settings, captions)
    assert isinstance(text_input, WordInput)
    branch = consensus(settings, captions)
    numbers = {word: number for number, word in enumerate(branch.words)}
    concept_of = [numbers.get(word, -1) for word in text_input.words]
    text = ConceptWords(text, concept_of, len(numbers))
    retriever = join_towers(settings, image, text, image_input, text_input, {VIEW: branch})
    return method(retriever, objective(settings), settings)


def consensus(settings: Settings, captions: Captions) -> ConsensusBranch:
    """The consensus level over words of the training texts, or over CVSE's released files."""
    concepts, vectors = concepts_of(settings, captions)
    made = ConsensusBranch.from_concepts(
        concepts,
        settings.dim,
        vectors=vectors,
        norm="cvse",
        label_share=settings.label_share,
        instance_share=settings.instance_share,
        fused_share=settings.fused_share,
    )
    assert isinstance(made, ConsensusBranch)
    return made


def objective(settings: Settings) -> Objective:
    """Hinges on fused, instance and consensus vectors, and the agreement about concepts."""
    return Sum(
        {
            "fused": (On(triplet(settings), f"{VIEW}.{FUSED}"), settings.fused_weight),
            "instance": (triplet(settings), settings.instance_weight),
            "concept": (On(triplet(settings), f"{VIEW}.{CONCEPT}"), settings.concept_weight),
            "agreement": (Agreement(f"{VIEW}.{WEIGHTS}"), settings.agreement_weight),
        }
    )


RECIPE = Recipe("cvse", "CVSE, consensus-aware, as VSE∞ repairs it", Settings, build)
