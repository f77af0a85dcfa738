"""Systems compared, where their protocols agree: one report each, or several seeds."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, takewhile
from pathlib import PurePath
from statistics import mean

import numpy as np

from diptych import notebook
from diptych.errors import SettingsError
from diptych.evaluation.cards import Card, noise_words
from diptych.evaluation.report import Group, Outcomes, Report, aligned_rows, markdown_rows
from diptych.evaluation.significance import MOST_SEEDS, Doubt, Spread, contributions, holm, paired_difference
from diptych.progress import counted


@dataclass(frozen=True, slots=True)
class Difference:
    """One metric: the mean of each side, second − first, and how sure that is.

    ``queries`` speaks of other queries with these models, ``both`` of other queries and other seeds; None where it
    cannot be told (a metric that is no mean over queries, a report saved without its ranks, one seed of each side).
    """

    metric: str
    first: float
    second: float
    change: float
    queries: Doubt | None = None
    both: Doubt | None = None
    spread: Spread | None = None

    @property
    def doubt(self) -> Doubt | None:
        """How sure the change is, over queries and seeds where both are known."""
        return self.both or self.queries


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two sides of one protocol, metric by metric."""

    rows: Sequence[Difference]
    first: Sequence[Report]
    second: Sequence[Report]
    names: tuple[Sequence[str], Sequence[str]]
    detect: float | None = None  # a gain; the notes say what it takes to see it

    def render(self) -> str:
        return "\n".join([*aligned_rows(self._table()), "", *self._notes()])

    def to_markdown(self) -> str:
        return "\n".join([*markdown_rows(self._table()), "", *self._notes()])

    __str__ = render

    def __repr__(self) -> str:
        return f"Comparison({' with '.join(map(_head, self.names))}: {counted(len(self.rows), 'metric')})"

    def _repr_html_(self) -> str:
        return notebook.table(self._table()) + notebook.notes(self._notes())

    def _table(self) -> list[list[str]]:
        one = len(self.first) == len(self.second) == 1
        tested = any(row.doubt for row in self.rows)
        table = [["metric", *map(_head, self.names), "difference", *(["p"] if tested else [])]]
        for row in self.rows:
            values = zip((self.first, self.second), (row.first, row.second), strict=True)
            cells = [
                side[0].group_of(row.metric).cell(row.metric) if one else f"{value:.1f}"
                for side, value in values
            ]
            cells.append(f"{row.change:+.1f}" + _interval(row.doubt))
            table.append([row.metric, *cells, *([_probability(row.doubt)] if tested else [])])
        return table

    def _notes(self) -> list[str]:
        lines = []
        for names in self.names:
            if len(names) > 1:
                lines.append(f"{_head(names)}: {', '.join(names)}")
        noise = [noise_words(side[0].card.noise) for side in (self.first, self.second)]
        if noise != ["none", "none"]:
            lines += [
                f"training noise of {_head(n)}: {words}" for n, words in zip(self.names, noise, strict=True)
            ]
        if noise[0] != noise[1]:
            lines.append("the noise differs: the two sides learned from different training pairs.")
        if any(row.both for row in self.rows):
            lines.append(
                "difference: second − first, with its 95 % interval and p over other queries and other seeds"
            )
        elif any(row.queries for row in self.rows):
            lines.append(
                "difference: second − first, with the 95 % interval and the p of a paired test over the queries (other "
                "queries, the same models)"
            )
        else:
            lines.append(
                "no interval: these reports were saved without the ranks of their queries; evaluate again."
            )
        known = {row.metric: row.spread for row in self.rows if row.spread}
        return lines + (detection(known, self.detect) if self.detect else [])


def compare(
    first: Report | Sequence[Report],
    second: Report | Sequence[Report],
    allow: Collection[str] = (),
    *,
    names: tuple[Sequence[str], Sequence[str]] | None = None,
    draws: int = 10_000,
    seed: int = 0,
    detect: float | None = None,
) -> Comparison:
    """The metrics of the groups that all reports have, second − first; unlike protocols are refused.

    Each side is a report, or those of several seeds, of which the means are compared. ``allow`` names fields of a card
    that may differ all the same, such as ``score`` for a dual encoder beside its re-ranked self. ``names`` are those of
    the reports; by default the folders of the runs.
    """
    sides = [[side] if isinstance(side, Report) else list(side) for side in (first, second)]
    rows: list[Difference] = []
    for members in _shared_groups(sides, allow):
        rows += _differences(members[0], members[1], draws, seed)
    heads = names or (_names(sides[0], "first"), _names(sides[1], "second"))
    return Comparison(rows, sides[0], sides[1], heads, detect)


def _shared_groups(sides: Sequence[Sequence[Report]], allow: Collection[str]) -> list[list[list[Group]]]:
    """The groups that all reports have: for each, those of every side; unlike protocols are refused."""
    if not all(sides):
        raise SettingsError("a comparison has two sides: give at least one result for each.")
    groups = [[{group.name: group for group in report.groups} for report in side] for side in sides]
    every = [one for side in groups for one in side]
    shared = [name for name in every[0] if all(name in one for one in every)]
    if not shared:
        found = " and ".join(dict.fromkeys("/".join(one) for one in every))
        raise SettingsError(f"these results have no group in common ({found}): evaluate both alike.")
    _check_allowed(allow, [every[0][name] for name in shared])
    found_groups = [[[one[name] for one in side] for side in groups] for name in shared]
    for members in found_groups:
        for other in (group for side in members for group in side):
            _check_protocol(members[0][0], other, allow)
        _check_noise(members)
    return found_groups


def _differences(first: Sequence[Group], second: Sequence[Group], draws: int, seed: int) -> list[Difference]:
    outcomes, protocol = _outcomes([first, second]), _prefix(first[0])
    doubts = paired_difference(*outcomes, draws=draws, seed=seed) if outcomes and draws else {}
    spreads = _spreads(outcomes)
    rows = []
    for name in first[0].metrics:
        if not all(name in group.metrics for group in (*first, *second)):
            continue
        a, b = (mean(group.metrics[name] for group in side) for side in (first, second))
        spread = spreads.get((name.removeprefix(protocol), 0, 1))
        both = spread.doubt() if spread and spread.freedom and draws else None
        rows.append(Difference(name, a, b, b - a, doubts.get(name.removeprefix(protocol)), both, spread))
    return rows


def _prefix(group: Group) -> str:
    """What stands before the names of metrics where there are several protocols."""
    return f"{group.card.described().get('protocol', '')}_"


def _outcomes(sides: Sequence[Sequence[Group]]) -> list[list[Outcomes]]:
    """What became of every query, of every result; empty where a report was saved without."""
    found = [[group.outcomes for group in side if group.outcomes is not None] for side in sides]
    return found if all(len(side) == len(kept) for side, kept in zip(sides, found, strict=True)) else []


def _spreads(sides: Sequence[Sequence[Outcomes]]) -> dict[tuple[str, int, int], Spread]:
    """The spread of each metric between each two systems."""
    if not sides or len(sides[0][0].folds) < 2:
        return {}
    adds = [[contributions(one) for one in side] for side in sides]
    found = {}
    for name in adds[0][0]:
        table = [np.array([one[name] for one in side]) for side in adds]
        for one, other in combinations(range(len(sides)), 2):
            found[name, one, other] = Spread.among(table, one, other)
    return found


@dataclass(frozen=True, slots=True)
class Ranking:
    """Any number of systems, best first by one metric; systems with a letter in common cannot be told apart."""

    metric: str
    systems: Sequence[tuple[str, int, float, str]]  # name, seeds, value, letters
    pairs: Sequence[tuple[str, str, Difference]]  # better, worse, better − worse with p after Holm
    notes: Sequence[str] = ()

    def render(self) -> str:
        first = [["system", "seeds", self.metric, "group"]]
        first += [[name, str(seeds), f"{value:.1f}", letters] for name, seeds, value, letters in self.systems]
        second = [["better", "worse", "difference", "p (Holm)"]]
        second += [
            [better, worse, f"{row.change:+.1f}{_interval(row.doubt)}", _probability(row.doubt)]
            for better, worse, row in self.pairs
        ]
        return "\n".join([*aligned_rows(first), "", *aligned_rows(second), "", *self.notes])

    __str__ = render


def rank(
    sides: Sequence[Sequence[Report]],
    *,
    names: Sequence[Sequence[str]],
    metric: str | None = None,
    draws: int = 10_000,
    seed: int = 0,
    detect: float | None = None,
) -> Ranking:
    """Compare each two of several systems by one metric, by default the primary one; p-values are corrected by Holm.

    The variance of seeds is that of all systems together. Without two seeds beyond one each, queries alone count.
    """
    groups = _shared_groups(sides, ())
    metric = metric or sides[0][0].primary_metric
    members = next((found for found in groups if metric in found[0][0].metrics), None)
    if members is None:
        known = ", ".join(name for found in groups for name in found[0][0].metrics)
        raise SettingsError(f"these results have no metric '{metric}': use one of {known}.")
    bare, values = metric.removeprefix(_prefix(members[0][0])), []
    for side in members:
        values.append(mean(group.metrics[metric] for group in side))
    order = sorted(range(len(sides)), key=lambda one: values[one], reverse="rank" not in metric)
    outcomes = _outcomes([members[one] for one in order])
    spreads = _spreads(outcomes)
    if outcomes and not spreads:
        raise SettingsError("a split of one image tells no systems apart: compare them on more images.")
    if (bare, 0, 1) not in spreads:
        raise SettingsError(
            f"{metric} cannot be compared query by query in these reports: evaluate again, or use --metric rsum."
        )
    seeded, pairs = spreads[bare, 0, 1].freedom > 0, list(combinations(range(len(sides)), 2))
    doubts = [
        spreads[bare, one, other].doubt()
        if seeded
        else paired_difference(outcomes[one], outcomes[other], draws=draws, seed=seed)[bare]
        for one, other in pairs
    ]
    corrected = holm([doubt.p for doubt in doubts])
    letters = _letters(len(sides), [pair for pair, p in zip(pairs, corrected, strict=True) if p < 0.05])
    heads, rows = [_head(names[one]) for one in order], []
    for (one, other), doubt, p in zip(pairs, doubts, corrected, strict=True):
        a, b = values[order[one]], values[order[other]]
        turned = Doubt(-doubt.high, -doubt.low, p)
        rows.append((heads[one], heads[other], Difference(metric, b, a, a - b, turned)))
    systems = [(heads[n], len(sides[one]), values[one], letters[n]) for n, one in enumerate(order)]
    note = (
        f"systems with a letter in common cannot be told apart (p ≥ 0.05 after Holm, {len(pairs)} pairs); intervals "
        "are of single pairs, over other queries"
    )
    notes = [
        f"{note} and other seeds"
        if seeded
        else f"{note}; too few seeds to know how they vary, so seeds are not counted"
    ]
    if detect:
        widest = max((spreads[bare, *pair] for pair in pairs), key=lambda spread: spread.queries)
        notes += detection({metric: widest}, detect)
    return Ranking(metric, systems, rows, notes)


def _letters(count: int, apart: Sequence[tuple[int, int]]) -> list[str]:
    """Letters that systems share where they are not apart: groups are divided until none holds a pair that is."""
    groups = [frozenset(range(count))]
    for one, other in apart:
        parts = [part for group in groups for part in
                   ((group - {one}, group - {other}) if {one, other} <= group else (group,))]  # fmt: skip
        groups = [group for group in dict.fromkeys(parts) if not any(group < more for more in parts)]
    groups.sort(key=min)
    return ["".join(chr(97 + n) for n, group in enumerate(groups) if one in group) for one in range(count)]


def detection(spreads: Mapping[str, Spread], gain: float) -> list[str]:
    """What it takes to see a gain, for R@1 of both directions and RSUM, or for what there is."""
    wanted = ("image_to_text_recall@1", "text_to_image_recall@1", "rsum")
    known = {name: one for name, one in spreads.items() if name.endswith(wanted)} or spreads
    lines = [f"to see a gain of {gain:g} in 80 % of cases, with 5 % of false alarms:"]
    for name, spread in known.items():
        images, seeds = spread.images_for(gain), spread.seeds_for(gain)
        by_images = f"{images:,} images with their texts" if images else "no number of images is enough"
        line = f"  {name}: {by_images} (with the {spread.images:,} of now, {100 * spread.power(gain):.0f} % of cases)"
        if spread.freedom:
            by_seeds = f"{seeds} seeds of each side" if seeds else f"not even {MOST_SEEDS} seeds of each side"
            line += f"; or, on these images, {by_seeds}"
        lines.append(line)
    if not all(spread.freedom for spread in known.values()):
        lines.append("  how much seeds vary is not known from so few seeds, and not counted")
    return lines


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
            [sorted(part(noise) for noise in card.noise) for card in (one, other)]
            for part in (lambda noise: round(noise.ratio, 2), lambda noise: (noise.unit, noise.hash))
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


def _head(names: Sequence[str]) -> str:
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
