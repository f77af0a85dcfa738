"""Two sides of results compared, where their protocols agree: one report each, or several seeds."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import combinations, takewhile
from pathlib import PurePath
from statistics import mean

from diptych.errors import SettingsError
from diptych.evaluation.cards import Card, noise_words
from diptych.evaluation.report import Group, Report, aligned_rows, markdown_rows
from diptych.evaluation.significance import Doubt, paired, welch


@dataclass(frozen=True, slots=True)
class Difference:
    """One metric: the mean of each side, second − first, and how sure that is.

    ``queries`` speaks of other queries with these models, ``seeds`` of other seeds with these queries; None where it
    cannot be told (a metric that is no mean over queries, a report saved without its ranks, one seed).
    """

    metric: str
    first: float
    second: float
    change: float
    queries: Doubt | None = None
    seeds: Doubt | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two sides of one protocol, metric by metric."""

    rows: Sequence[Difference]
    first: Sequence[Report]
    second: Sequence[Report]
    names: tuple[Sequence[str], Sequence[str]]

    def render(self) -> str:
        """The comparison as aligned plain text."""
        return "\n".join([*aligned_rows(self._table()), "", *self._notes()])

    def to_markdown(self) -> str:
        """The comparison as a Markdown table."""
        return "\n".join([*markdown_rows(self._table()), "", *self._notes()])

    __str__ = render

    def _table(self) -> list[list[str]]:
        one = len(self.first) == len(self.second) == 1
        head = ["metric", *(_shown(names) for names in self.names), "difference"]
        queries, seeds = (any(getattr(row, kind) for row in self.rows) for kind in ("queries", "seeds"))
        head += ["p"] if queries else []
        head += ["over seeds", "p"] if seeds else []
        table = [head]
        for row in self.rows:
            cells = [
                (self.first[0].group_of(row.metric).cell(row.metric) if one else f"{row.first:.1f}"),
                (self.second[0].group_of(row.metric).cell(row.metric) if one else f"{row.second:.1f}"),
                f"{row.change:+.1f}" + _interval(row.queries),
            ]
            cells += [_probability(row.queries)] if queries else []
            cells += [_interval(row.seeds).strip(), _probability(row.seeds)] if seeds else []
            table.append([row.metric, *cells])
        return table

    def _notes(self) -> list[str]:
        lines = []
        for names in self.names:
            if len(names) > 1:
                lines.append(f"{_shown(names)}: {', '.join(names)}")
        noise = [noise_words(side[0].card.noise) for side in (self.first, self.second)]
        if noise != ["none", "none"]:
            lines += [
                f"training noise of {_shown(n)}: {said}" for n, said in zip(self.names, noise, strict=True)
            ]
        if noise[0] != noise[1]:
            lines.append("the noise differs: the two sides learned from different training pairs.")
        if any(row.queries for row in self.rows):
            lines.append(
                "difference: second − first, with the 95 % interval and the p of a paired test over the queries (other "
                "queries, the same models)"
            )
        else:
            lines.append(
                "no interval: these reports were saved without the ranks of their queries; evaluate again."
            )
        if any(row.seeds for row in self.rows):
            lines.append("over seeds: 95 % interval and p by Welch's t (other seeds, the same queries)")
        return lines


def compare(
    first: Report | Sequence[Report],
    second: Report | Sequence[Report],
    allow: Collection[str] = (),
    *,
    names: tuple[Sequence[str], Sequence[str]] | None = None,
    draws: int = 10_000,
    seed: int = 0,
) -> Comparison:
    """The metrics of the groups that all reports have, second − first; unlike protocols are refused.

    Each side is a report, or those of several seeds, of which the means are compared. ``allow`` names fields of a card
    that may differ all the same, such as ``score`` for a dual encoder beside its re-ranked self. ``names`` are those of
    the reports; by default the folders of the runs.
    """
    sides = [[side] if isinstance(side, Report) else list(side) for side in (first, second)]
    if not all(sides):
        raise SettingsError("a comparison has two sides: give at least one result for each.")
    groups = [[{group.name: group for group in report.groups} for report in side] for side in sides]
    every = [one for side in groups for one in side]
    shared = [name for name in groups[0][0] if all(name in one for one in every)]
    if not shared:
        found = " and ".join(dict.fromkeys("/".join(one) for one in every))
        raise SettingsError(f"these results have no group in common ({found}): evaluate both alike.")
    _check_allowed(allow, [groups[0][0][name] for name in shared])
    rows: list[Difference] = []
    for name in shared:
        members = [[one[name] for one in side] for side in groups]
        for other in (*members[0][1:], *members[1]):
            _check_protocol(members[0][0], other, allow)
        _check_noise(members)
        rows += _differences(members[0], members[1], draws, seed)
    chosen = names or (_names(sides[0], "first"), _names(sides[1], "second"))
    return Comparison(rows, sides[0], sides[1], chosen)


def _differences(first: Sequence[Group], second: Sequence[Group], draws: int, seed: int) -> list[Difference]:
    outcomes = [[group.outcomes for group in side if group.outcomes is not None] for side in (first, second)]
    told: dict[str, Doubt] = {}
    if len(outcomes[0]) == len(first) and len(outcomes[1]) == len(second) and draws:
        told = paired(outcomes[0], outcomes[1], draws=draws, seed=seed)
    several = len(first) > 1 and len(second) > 1
    protocol = (
        f"{first[0].card.described().get('protocol', '')}_"  # before each name, where there are several
    )
    rows = []
    for name in first[0].metrics:
        if not all(name in group.metrics for group in (*first, *second)):
            continue
        a, b = ([group.metrics[name] for group in side] for side in (first, second))
        seeds = welch(a, b) if several else None
        rows.append(
            Difference(
                name, mean(a), mean(b), mean(b) - mean(a), told.get(name.removeprefix(protocol)), seeds
            )
        )
    return rows


def _check_allowed(allow: Collection[str], groups: Sequence[Group]) -> None:
    known = list(dict.fromkeys(name for group in groups for name in group.card.protocol_fields()))
    unknown = set(allow) - set(known)
    if unknown:
        raise SettingsError(
            f"allow names '{sorted(unknown)[0]}', which is not a protocol field: these are {', '.join(known)}."
        )


def _check_protocol(one: Group, other: Group, allow: Collection[str]) -> None:
    fields, theirs = one.card.protocol_fields(), other.card.protocol_fields()
    for name in dict.fromkeys([*fields, *theirs]):
        if fields.get(name) != theirs.get(name) and name not in allow:
            raise SettingsError(
                f"these results are not comparable: their {name} differs ({fields.get(name)} and "
                f"{theirs.get(name)}); evaluate both alike."
            )


def _check_noise(sides: Sequence[Sequence[Group]]) -> None:
    """Refuse noise of one nominal ratio that is not the same noise; only the two sides may differ in their ratios."""
    cards = [(number, group.card) for number, side in enumerate(sides) for group in side]
    for (side, one), (other_side, other) in combinations(cards, 2):
        ratios, kinds = (
            [sorted(said(noise) for noise in card.noise) for card in (one, other)]
            for said in (lambda noise: round(noise.ratio, 2), lambda noise: (noise.unit, noise.hash))
        )
        if kinds[0] != kinds[1] and (ratios[0] == ratios[1] or side == other_side):
            first, second = (noise_words(card.noise) for card in (one, other))
            raise SettingsError(
                f"these results are not comparable: their training noise differs ({first} and {second}); train both "
                "with the same --noise."
            )


def _names(side: Sequence[Report], default: str) -> list[str]:
    """The folders of the runs, else the fingerprints of the models."""
    cards = [report.card for report in side]
    return [
        (card.run or card.model) if isinstance(card, Card) else card.described().get("model", default)
        for card in cards
    ]


def _shown(names: Sequence[str]) -> str:
    """The head of a column: the last part of the one name, or what several have in common."""
    short = [PurePath(name).name or name for name in names]
    if len(short) == 1:
        return short[0]
    alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*short, strict=False))
    common = "".join(letters[0] for letters in alike).rstrip("-_. ")
    return f"{common or short[0] + ' …'} ({len(short)} seeds)"


def _interval(doubt: Doubt | None) -> str:
    return "" if doubt is None else f" ({doubt.low:+.1f} to {doubt.high:+.1f})"


def _probability(doubt: Doubt | None) -> str:
    if doubt is None:
        return ""
    return "< 0.001" if doubt.p < 0.001 else f"{doubt.p:.3f}"
