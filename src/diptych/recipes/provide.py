"""What the terms of a loss read and a recipe does not bring: twin, teachers, heads, concepts, augmented looks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from diptych.branches.branch import Branch
from diptych.data.captions import Captions
from diptych.data.text_inputs import CleanedInput
from diptych.errors import SettingsError
from diptych.model.retriever import Retriever
from diptych.objectives.combine import Sum
from diptych.objectives.expressions import OWN, read_terms
from diptych.objectives.objective import Objective, members_of, needs_of
from diptych.training.method import Method

Provider = Callable[[Method, Any, Captions], Method]


def provided(method: Method, settings: Any, captions: Captions) -> Method:
    """The method with everything that its objective reads; what nothing can make is refused."""
    for need in needs_of(method.objective):
        name = need.partition(".")[0]
        if not _brings(method, name):
            method = _provider(method, name, settings)(method, settings, captions)
    return method


def with_branch(retriever: Retriever, name: str, branch: Branch) -> Retriever:
    """The retriever with one more branch, or with another one of that name."""
    branches: Any = {**dict(retriever.branches.items()), name: branch}
    parts = (retriever.image, retriever.text, retriever.image_input, retriever.text_input)
    return Retriever(*parts, branches, retriever.scorer)


def _brings(method: Method, need: str) -> bool:
    """Whether a method has what one of its terms reads."""
    if need == "twin":
        return method.momentum is not None
    if need == "matches":
        scorer = method.retriever.scorer
        return scorer is not None and scorer.candidates is not None
    if need == "uni" and need in method.retriever.branches:  # a view without weights may have that name
        return any(True for _ in method.retriever.branches[need].parameters())
    if need == "teachers":
        from diptych.training.teachers import Teachers

        return any(isinstance(source, Teachers) for source in method.targets)
    if need == "augmented" and need in method.views:
        sides = {"image": "pictures", "text": "words"}
        return all(getattr(method.views[need], sides[side]) is not None for side in _augmented_sides(method))
    return need in method.retriever.branches or need in method.views


def _provider(method: Method, need: str, settings: Any) -> Provider:
    if need in PROVIDERS:
        return PROVIDERS[need]
    reader = _reader(method.objective, need, settings.objective)
    if need in ELSEWHERE:
        raise SettingsError(f"{reader} reads {ELSEWHERE[need]}.")
    known = ", ".join([*method.retriever.branches, *method.views]) or "none"
    raise SettingsError(
        f"{reader} reads the view '{need}', and this recipe's views are: {known}. Besides them there are concepts, "
        "uni, augmented and twin."
    )


def _reader(objective: Objective, need: str, text: str) -> str:
    """What reads something that is missing: a term, with its place in ``--objective``, or the loss."""
    members = list(members_of(objective)) if isinstance(objective, Sum) else [objective]
    for term, member in zip(read_terms(text), members, strict=False):
        if term.name != OWN and need in [one.partition(".")[0] for one in needs_of(member)]:
            return f"--objective '{text}', character {term.at}: {term.name}"
    return "the loss"


def _twin(method: Method, settings: Any, captions: Captions) -> Method:
    """A momentum twin (CODER)."""
    from diptych.model.twin import Twin

    names = {"momentum": "momentum", "precision": "twin_precision"}
    given = {argument: getattr(settings, name) for argument, name in names.items() if hasattr(settings, name)}
    return replace(method, momentum=partial(Twin, **given))


def _teachers(method: Method, settings: Any, captions: Captions) -> Method:
    """The teachers that the settings name; they read what the model reads (CUSA)."""
    from diptych.training.teachers import teachers_of

    clean = isinstance(method.retriever.text_input, CleanedInput)
    size = getattr(settings, "image_size", 224)
    return replace(method, targets=(*method.targets, teachers_of(settings, size, clean)))


def _heads(method: Method, settings: Any, captions: Captions) -> Method:
    """Uni-modal heads on the vectors of both towers (CUSA)."""
    from diptych.branches.branch import UniModalHeads

    model = method.retriever
    image, text = model.image.dim, model.text.dim
    heads = UniModalHeads(image) if image == text else UniModalHeads(image, image, text)
    return replace(method, retriever=with_branch(model, "uni", heads))


def _concepts(method: Method, settings: Any, captions: Captions) -> Method:
    """A view in frequent words of the training texts, beside the score (CODER)."""
    from diptych.recipes.towers import concept_branch

    tower = method.retriever.image
    dim = tower.encoder.dim
    branch = concept_branch(settings, captions, dim, weight=0.0, pool_images=tower.dim != dim)
    return replace(method, retriever=with_branch(method.retriever, "concept", branch))


def _augmented(method: Method, settings: Any, captions: Captions) -> Method:
    """A second look at each pair: augmented pictures, or fewer cells, and perturbed words (COOKIE)."""
    from diptych.data.augmentation import PictureAugmentation
    from diptych.training.views import Augmented

    sides = _augmented_sides(method)
    pictures = PictureAugmentation() if "image" in sides else None
    words = None
    if "text" in sides:
        rate = getattr(settings, "word_rate", 0.2)
        words = method.retriever.text_input.augmentation(rate, keep_a_word=True)
    drop, copies = getattr(settings, "cell_drop", 0.2), getattr(settings, "augmented_copies", 0)
    look = Augmented(pictures, words, drop=drop, copies=copies)
    return replace(method, views={**method.views, "augmented": look})


def _augmented_sides(method: Method) -> set[str]:
    return {side for side in ("image", "text") if f"augmented.{side}" in needs_of(method.objective)}


PROVIDERS: dict[str, Provider] = {
    "twin": _twin,
    "teachers": _teachers,
    "uni": _heads,
    "concept": _concepts,
    "augmented": _augmented,
}
ELSEWHERE = {
    "matches": "what a fusion encoder compared, and this model has none: use the recipe fusion or cusa-fusion",
    "labels": "the labels of images, which this recipe does not predict: use the recipe labelwise",
    "context": "masked words and regions, which this recipe does not predict: use the recipe labelwise",
    "front": "the labels of images, which this recipe does not predict: use the recipe labelwise",
    "hash": "the codes of a hash head, and this model has none: use the recipe cookie-hash",
}
"""What only some recipes bring, in words, with the recipe that does."""
