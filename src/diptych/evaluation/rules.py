"""The rules by which scores or ranks become numbers, checked before any work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict, Unpack

from diptych.errors import SettingsError
from diptych.evaluation.judgements import Judgements, load_judgements
from diptych.evaluation.metrics import checked_ties
from diptych.evaluation.protocols import EvaluationProtocol, protocol_named

Protocols = str | EvaluationProtocol | Sequence[str | EvaluationProtocol]
"""A protocol of retrieval or several, by name or as an ``EvaluationProtocol``."""


class Options(TypedDict, total=False):
    """What a caller may say about how scores become numbers; the defaults are those of ``rules_of``."""

    protocol: Protocols
    ties: str
    judgements: Sequence[str | Judgements]
    bootstrap: int
    seed: int
    equal_texts: bool


@dataclass(frozen=True, slots=True)
class Rules:
    """How scores become numbers under one protocol: tie rule, judgements, resamples, what is right."""

    protocol: EvaluationProtocol
    ties: str
    judgements: Sequence[Judgements]
    draws: int
    seed: int
    equal_texts: bool


def rules_of(**options: Unpack[Options]) -> list[Rules]:
    """The rules of each protocol, names looked up. Judgements count under the protocols without folds."""
    protocol, draws = options.get("protocol", "plain"), options.get("bootstrap", 1000)
    if draws < 0:
        raise SettingsError(f"bootstrap={draws} is negative: give the number of resamples, 0 for none.")
    several = [protocol] if isinstance(protocol, str | EvaluationProtocol) else protocol
    chosen = [protocol_named(one) for one in several]
    names = [one.name for one in chosen]
    if not names:
        raise SettingsError("the list of protocols is empty: name one, such as plain.")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise SettingsError(f"the protocol {twice} is named twice: name it once.")
    given = options.get("judgements", ())
    judged = [load_judgements(one) if isinstance(one, str) else one for one in given]
    if judged and all(one.folds > 1 for one in chosen):
        raise SettingsError(
            f"{judged[0].name} is judged on the whole gallery, the protocol {chosen[0].name} has "
            f"{chosen[0].folds} folds: use coco-5k."
        )
    ties, seed = checked_ties(options.get("ties", "index")), options.get("seed", 0)
    equal = options.get("equal_texts", False)
    return [Rules(one, ties, () if one.folds > 1 else judged, draws, seed, equal) for one in chosen]


def rules_of_ranks(**options: Unpack[Options]) -> Rules:
    """The rules under which ranks of the whole gallery can be reported."""
    rules, *more = rules_of(**options)
    if more:
        raise SettingsError("vectors are ranked under one protocol at a time: give one.")
    if rules.protocol.folds > 1:
        raise SettingsError(
            f"the protocol {rules.protocol.name} ranks {rules.protocol.folds} folds by themselves, these ranks are "
            "of the whole gallery: use plain."
        )
    return rules
