"""The rules by which scores or ranks become numbers, checked before any work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diptych.errors import SettingsError
from diptych.evaluation import protocols
from diptych.evaluation.judgements import Judgements, load_judgements
from diptych.evaluation.metrics import checked_ties


@dataclass(frozen=True, slots=True)
class Rules:
    """How scores become numbers: protocol, tie rule, judgements, bootstrap, what is right. Checked before any work."""

    protocol: protocols.EvaluationProtocol
    ties: str
    judgements: Sequence[Judgements]
    draws: int
    seed: int
    equal_texts: bool = False

    @staticmethod
    def of(
        protocol: str | protocols.EvaluationProtocol,
        ties: str,
        judgements: Sequence[str | Judgements],
        draws: int,
        seed: int,
        equal_texts: bool = False,
    ) -> Rules:
        """Rules from what a caller gave, names looked up."""
        if draws < 0:
            raise SettingsError(f"bootstrap={draws} is negative: give the number of resamples, 0 for none.")
        chosen = protocols.protocol_named(protocol)
        judged = [load_judgements(j) if isinstance(j, str) else j for j in judgements]
        if judged and chosen.folds > 1:
            raise SettingsError(
                f"{judged[0].name} is judged on the whole gallery, the protocol {chosen.name} has "
                f"{chosen.folds} folds: use coco-5k."
            )
        return Rules(chosen, checked_ties(ties), judged, draws, seed, equal_texts)


def rules_of_ranks(protocol: str | protocols.EvaluationProtocol, ties: str, draws: int, seed: int) -> Rules:
    """Rules under which ranks of the whole gallery can be reported."""
    rules = Rules.of(protocol, ties, (), draws, seed)
    if rules.protocol.folds > 1:
        raise SettingsError(
            f"the protocol {rules.protocol.name} ranks {rules.protocol.folds} folds by themselves, these ranks are "
            "of the whole gallery: use plain."
        )
    return rules
