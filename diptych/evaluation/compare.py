"""Two results side by side, where their protocols agree."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from diptych.errors import SettingsError
from diptych.evaluation.report import Report, aligned_rows, markdown_rows


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two reports of one protocol: (metric, first, second, second − first)."""

    rows: Sequence[tuple[str, float, float, float]]
    first: Report
    second: Report

    def render(self) -> str:
        """The comparison as aligned plain text."""
        return "\n".join(aligned_rows(self._table()))

    def to_markdown(self) -> str:
        """The comparison as a Markdown table."""
        return "\n".join(markdown_rows(self._table()))

    __str__ = render

    def _table(self) -> list[list[str]]:
        cells = [
            [
                name,
                self.first.group_of(name).cell(name),
                self.second.group_of(name).cell(name),
                f"{change:+.1f}",
            ]
            for name, _, _, change in self.rows
        ]
        models = [report.card.described().get("model", "unknown") for report in (self.first, self.second)]
        return [["metric", *models, "difference"], *cells]


def compare(first: Report, second: Report, allow: Collection[str] = ()) -> Comparison:
    """The metrics of the groups both reports have, side by side; unlike protocols are refused.

    ``allow`` names fields of a card that may differ all the same, such as ``score`` for a dual encoder beside its
    re-ranked self.
    """
    others = {group.name: group for group in second.groups}
    shared = [(group, others[group.name]) for group in first.groups if group.name in others]
    if not shared:
        names = " and ".join("/".join(g.name for g in report.groups) for report in (first, second))
        raise SettingsError(f"these results have no group in common ({names}): evaluate both alike.")
    known = list(dict.fromkeys(name for group, _ in shared for name in group.card.protocol_fields()))
    unknown = set(allow) - set(known)
    if unknown:
        raise SettingsError(
            f"allow names '{sorted(unknown)[0]}', which is no protocol field: these are {', '.join(known)}."
        )
    rows = []
    for one, other in shared:
        fields, theirs = one.card.protocol_fields(), other.card.protocol_fields()
        for name in dict.fromkeys([*fields, *theirs]):
            if fields.get(name) != theirs.get(name) and name not in allow:
                raise SettingsError(
                    f"these results are not comparable: their {name} differs ({fields.get(name)} and "
                    f"{theirs.get(name)}); evaluate both alike."
                )
        a, b = one.metrics, other.metrics
        rows += [(name, a[name], b[name], b[name] - a[name]) for name in a if name in b]
    return Comparison(rows, first, second)
