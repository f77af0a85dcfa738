"""Where a run starts from another: the parts of a trained model that fit are taken, the others start fresh."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from torch import Tensor, nn

from diptych.errors import CheckpointError
from diptych.model.retriever import Retriever
from diptych.settings import TrainingSettings

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
        if other is not None and words and _fit(part, other):
            for key, value in own_state(part).items():
                value.copy_(own_state(other)[key])
            taken.append(f"{side} {name}")
        else:
            fresh.append(f"{side} {name}")
    if not taken:
        raise CheckpointError(
            f"--init {init} shares no part with this model: its parts are {_listed(there)}, this model's are "
            f"{', '.join(fresh)}. Give a run whose parts fit, or the settings of its shape, such as --dim."
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


def _fit(part: nn.Module, other: nn.Module) -> bool:
    mine, theirs = own_state(part), own_state(other)
    shapes = {name: value.shape for name, value in mine.items()}
    meant = [
        (
            getattr(one, "heads", None),
            words if isinstance(words := getattr(one, "words", None), list) else None,
        )
        for one in (part, other)
    ]
    return meant[0] == meant[1] and shapes == {name: value.shape for name, value in theirs.items()}


def _same_words(retriever: Retriever, source: Retriever, part: nn.Module) -> bool:
    """Whether the rows of a table of words mean the same words in both models."""
    mine, theirs = (getattr(model.text_input, "words", None) for model in (retriever, source))
    if mine is None or not any(len(value) == len(mine) for value in own_state(part).values() if value.dim()):
        return True
    return theirs is not None and list(mine) == list(theirs)


def _listed(parts: dict[tuple[str, str], nn.Module]) -> str:
    return ", ".join(" ".join(key) for key in parts)
