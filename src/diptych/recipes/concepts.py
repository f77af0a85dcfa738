"""The concepts of the training texts, for the branches of CODER and CVSE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diptych.aggregators import GPO
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

SIZE = 400  # concepts of a recipe that has no setting for them


def concepts_of(
    settings: Any, captions: Captions, shares: Sequence[float] = SHARES
) -> tuple[Concepts, WordVectors | None]:
    """Concepts among the words of the training texts, or in CVSE's released files, and their word vectors."""
    if files := getattr(settings, "concept_files", ""):
        concepts = read_cvse(files)
        count_concepts(concepts.words, captions.texts)  # refuses words of which none occurs in these texts
    else:
        concepts = find_concepts(captions.texts, getattr(settings, "concept_size", SIZE), shares)
    source = getattr(settings, "concept_vectors", "")
    if source or concepts.vectors is None:  # else CVSE's folder brought its own
        return concepts, word_vectors(concepts.words, source or "glove")
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
