"""A result that carries its protocol: metrics, intervals, the card of what they stand for, and speed."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import ClassVar

from diptych.errors import DataError, SettingsError
from diptych.evaluation.metrics import DIRECTIONS, KS
from diptych.storage import write_text

FORMAT = 1  # of the JSON file; raised when an old file can no longer be read
TIED_SHARE = 0.01  # of the queries; above it the scores hardly rank anything and the report says so


@dataclass(frozen=True, slots=True)
class Card:
    """What a number stands for. Results are comparable only where every protocol field is equal."""

    protocol: str
    data: str
    split: str
    images: int
    texts: int
    texts_per_image: tuple[int, float, int]  # least, mean, most
    folds: int
    ties: str
    tied_queries: Mapping[str, int]  # by direction: queries whose rank the tie rule decides
    score: str
    data_hash: str
    model: str
    bootstrap: int
    seed: int
    version: str
    date: str

    PROTOCOL_FIELDS: ClassVar[tuple[str, ...]] = (
        "protocol", "split", "folds", "images", "texts", "texts_per_image", "ties", "score", "data_hash",
    )  # fmt: skip

    def described(self) -> dict[str, str]:
        """The fields in words, for a table."""
        least, mean, most = self.texts_per_image
        per_image = f"{mean:g}" if least == most else f"{least} to {most} (mean {mean:.2f})"
        tied = ", ".join(f"{count:,} {_words(name)}" for name, count in self.tied_queries.items())
        draws = f"95 %, {self.bootstrap:,} bootstrap resamples by image (seed {self.seed})"
        return {
            "protocol": self.protocol,
            "data": self.data,
            "split": self.split,
            "images": f"{self.images:,}",
            "texts": f"{self.texts:,}",
            "texts per image": per_image,
            "folds": str(self.folds),
            "ties": self.ties,
            "tied queries": tied,
            "score": self.score,
            "data hash": self.data_hash,
            "model": self.model,
            "intervals": draws if self.bootstrap else "none",
            "diptych": self.version,
            "date": self.date,
        }


@dataclass(frozen=True, slots=True)
class Report:
    """Metrics by name with their 95 % intervals, the protocol card, and speed.

    ``speed`` has ``images_per_second``, ``texts_per_second`` (encoding), ``thousand_pairs_per_second``
    (scoring alone) and ``seconds`` (all of it), where they were measured.
    """

    metrics: Mapping[str, float]
    card: Card
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    speed: Mapping[str, float] = field(default_factory=dict)

    primary_metric: ClassVar[str] = "rsum"

    def render(self) -> str:
        """The report as aligned plain text."""
        tables = ["\n".join(aligned_rows(table)) for table in self._tables()]
        return "\n\n".join([*tables, "\n".join(self._lines())])

    def to_markdown(self) -> str:
        """The report as Markdown tables."""
        tables = ["\n".join(markdown_rows(table)) for table in self._tables()]
        return "\n\n".join([*tables, "\n".join(f"* {line}" for line in self._lines())])

    __str__ = render

    def interval_text(self, name: str) -> str:
        """``38.3–44.1``, or nothing where a metric has no interval."""
        if name not in self.intervals:
            return ""
        low, high = self.intervals[name]
        return f"{low:.1f}–{high:.1f}"

    def speed_text(self) -> str:
        """``812 images/s, 4,021 texts/s, ...``, what was measured of it."""
        units = {
            "images_per_second": "{:,.0f} images/s",
            "texts_per_second": "{:,.0f} texts/s",
            "thousand_pairs_per_second": "{:,.0f} thousand pairs/s",
            "seconds": "{:.2f} s in all",
        }
        return ", ".join(unit.format(self.speed[name]) for name, unit in units.items() if name in self.speed)

    def card_fields(self) -> dict[str, str]:
        """The card in words, with the speed and any warning."""
        return (
            self.card.described()
            | {"speed": self.speed_text()}
            | ({"warning": w} if (w := self.warning) else {})
        )

    @property
    def warning(self) -> str:
        """A sentence where many ranks are decided by the tie rule, else empty."""
        queries = self.card.texts + self.card.images
        tied = sum(self.card.tied_queries.values())
        if tied <= TIED_SHARE * queries:
            return ""
        return (
            f"{100 * tied / queries:.1f} % of the queries are tied, so the tie rule decides these numbers: "
            "the model may have collapsed, or the data repeat; compare ties='strict' and 'pessimistic'."
        )

    def save(self, path: str | Path) -> None:
        """Write the report as JSON, in one piece; ``Report.load`` gives an equal one."""
        content = {"format": FORMAT, **asdict(self)}
        write_text(Path(path), json.dumps(content, indent=2, ensure_ascii=False) + "\n")

    @staticmethod
    def load(path: str | Path) -> Report:
        """The report that ``save`` wrote."""
        try:
            content = json.loads(Path(path).read_text("utf-8"))
            found = content["format"]
            if found != FORMAT:
                raise DataError(
                    f"{path} has report format {found}, this version reads {FORMAT}: update diptych."
                )
            card = dict(content["card"])
            card["texts_per_image"] = tuple(card["texts_per_image"])
            intervals = {name: (low, high) for name, (low, high) in content["intervals"].items()}
            return Report(content["metrics"], Card(**card), intervals, content["speed"])
        except OSError as error:
            raise DataError(
                f"{path} cannot be read ({error.strerror}): give a report saved as JSON."
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path} is not a saved report ({error}): evaluate again.") from error

    def _tables(self) -> list[list[list[str]]]:
        """Tables as rows of cells, the head first: recall, then one for each set of judgements."""
        kinds = [f"recall@{k}" for k in KS] + ["median_rank", "mean_rank"]
        heads = [f"R@{k}" for k in KS] + ["median rank", "mean rank"]
        tables = [
            [["", *heads], *([_words(d), *(self._cell(f"{d}_{k}") for k in kinds)] for d in DIRECTIONS)]
        ]
        tables.append([["", "RSUM", "mean recall"], ["both", self._cell("rsum"), self._cell("mean_recall")]])
        suffix = f"_{DIRECTIONS[0]}_map@r"
        for judged in (name.removesuffix(suffix) for name in self.metrics if name.endswith(suffix)):
            kinds = ["map@r", "r_precision", *(f"recall@{k}" for k in KS)]
            rows = [[_words(d), *(self._cell(f"{judged}_{d}_{kind}") for kind in kinds)] for d in DIRECTIONS]
            tables.append([[judged, "mAP@R", "R-Precision", *(f"R@{k}" for k in KS)], *rows])
        return tables

    def _cell(self, name: str) -> str:
        interval = self.interval_text(name)
        return f"{self.metrics[name]:.1f}" + (f" ({interval})" if interval else "")

    def _lines(self) -> list[str]:
        card = self.card.described()
        return [
            f"{card['data']}, split {card['split']}, protocol {card['protocol']} ({card['folds']} fold"
            f"{'s' if self.card.folds > 1 else ''}): {card['images']} images, {card['texts']} texts, "
            f"{card['texts per image']} per image",
            f"ties {card['ties']} (tied: {card['tied queries']}), score {card['score']}, "
            f"data {card['data hash']}, model {card['model']}, diptych {card['diptych']}, {card['date']}",
            f"intervals: {card['intervals']}",
            *([f"speed: {self.speed_text()}"] if self.speed else []),
            *([f"warning: {self.warning}"] if self.warning else []),
        ]


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
            [name, self.first._cell(name), self.second._cell(name), f"{change:+.1f}"]
            for name, _, _, change in self.rows
        ]
        return [["metric", self.first.card.model, self.second.card.model, "difference"], *cells]


def compare(first: Report, second: Report, allow: Collection[str] = ()) -> Comparison:
    """The metrics both reports have, side by side; unlike protocols are refused.

    ``allow`` names card fields that may differ all the same, such as ``score`` for a dual encoder beside its
    re-ranked self.
    """
    unknown = set(allow) - set(Card.PROTOCOL_FIELDS)
    if unknown:
        known = ", ".join(Card.PROTOCOL_FIELDS)
        raise SettingsError(
            f"allow names '{sorted(unknown)[0]}', which is no protocol field: these are {known}."
        )
    for name in Card.PROTOCOL_FIELDS:
        one, other = getattr(first.card, name), getattr(second.card, name)
        if one != other and name not in allow:
            raise SettingsError(
                f"these results are not comparable: their {name} differs ({one} and {other}); "
                "evaluate both alike."
            )
    shared = [name for name in first.metrics if name in second.metrics]
    rows = [(n, first.metrics[n], second.metrics[n], second.metrics[n] - first.metrics[n]) for n in shared]
    return Comparison(rows, first, second)


def markdown_rows(table: Sequence[Sequence[str]]) -> Iterable[str]:
    """Lines of a Markdown table; numbers to the right, the first row is the head."""
    yield f"| {' | '.join(table[0])} |"
    yield f"|{'---|' + '---:|' * (len(table[0]) - 1)}"
    yield from (f"| {' | '.join(row)} |" for row in table[1:])


def aligned_rows(table: Sequence[Sequence[str]]) -> Iterable[str]:
    """Lines of a plain table; the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        cells = [
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _words(direction: str) -> str:
    return direction.replace("_to_", " → ")
