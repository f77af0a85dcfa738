"""Cards: what a group of numbers stands for, and which of its facts must be equal for a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, ClassVar

from diptych import __version__
from diptych.data.captions import Captions
from diptych.data.corrections import Noise

EQUAL = "own pairs, and images of an equal text"
# equal texts, in tied queries, that explain the ties: each of them ties, and so may its image
REPEATED_SHARE = 0.5
TIED_SHARE = 0.01  # share of tied queries above which the scores hardly rank anything and the report warns


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
    left_out: int = 0  # images that could not be read
    equal_texts: bool = False  # whether images that have an equal text are right for it
    tied_at_top: int | None = None  # tied queries whose recall the tie rule may decide (None: not known)
    repeated_texts: int = 0  # texts that another text equals
    run: str = ""  # folder of the run, or of each member of an ensemble
    system: str = ""  # hash of what a run was made of but for the seed; equal for seeds of one system
    judged: tuple[str, ...] = ()  # files of corrections, with their hashes, whose matches count as right too
    noise: tuple[Noise, ...] = ()  # in the training pairs of the runs that had any

    PROTOCOL_FIELDS: ClassVar[tuple[str, ...]] = (
        "protocol", "split", "folds", "images", "texts", "texts_per_image", "ties", "score", "data_hash",
        "equal_texts",
    )  # fmt: skip

    def leaving_out(self, count: int) -> Card:
        """The card, which says how many pictures were left out."""
        return replace(self, left_out=count)

    def protocol_fields(self) -> dict[str, Any]:
        """What must be equal for two results to be comparable."""
        return {name: getattr(self, name) for name in self.PROTOCOL_FIELDS}

    def described(self) -> dict[str, str]:
        """The fields in words, for a table."""
        least, mean, most = self.texts_per_image
        per_image = f"{mean:g}" if least == most else f"{least} to {most} (mean {mean:.2f})"
        tied = ", ".join(f"{count:,} {direction_words(name)}" for name, count in self.tied_queries.items())
        draws = f"95 %, {self.bootstrap:,} bootstrap resamples by image (seed {self.seed})"
        return {
            "protocol": self.protocol,
            "data": self.data,
            "split": self.split,
            "images": f"{self.images:,}"
            + (f" ({self.left_out:,} more could not be read)" if self.left_out else ""),
            "texts": f"{self.texts:,}",
            "texts per image": per_image,
            "folds": str(self.folds),
            "right answers": EQUAL if self.equal_texts else "own pairs",
            "ties": self.ties,
            "tied queries": tied,
            "score": self.score,
            "data hash": self.data_hash,
            "model": f"{self.model} ({self.run})" if self.run else self.model,
            "intervals": draws if self.bootstrap else "none",
            "diptych": self.version,
            "date": self.date,
            **({"judgements": ", ".join(self.judged)} if self.judged else {}),
            **noise_fact(self.noise),
        }

    def lines(self) -> list[str]:
        """The card as sentences under the tables."""
        card = self.described()
        return [
            f"{card['data']}, split {card['split']}, protocol {card['protocol']} ({card['folds']} fold"
            f"{'s' if self.folds > 1 else ''}): {card['images']} images, {card['texts']} texts, "
            f"{card['texts per image']} per image" + (f"; right: {EQUAL}" if self.equal_texts else ""),
            f"ties {card['ties']} (tied: {card['tied queries']}), score {card['score']}, "
            f"data {card['data hash']}, model {card['model']}, diptych {card['diptych']}, {card['date']}",
            f"intervals: {card['intervals']}",
            *([f"judgements: {card['judgements']}; the first table is without them"] if self.judged else []),
            *(f"{name}: {value}" for name, value in noise_fact(self.noise).items()),
        ]

    def warning(self) -> str:
        """A sentence where the recall of many queries is decided by the tie rule, else empty."""
        queries = self.texts + self.images
        tied = sum(self.tied_queries.values()) if self.tied_at_top is None else self.tied_at_top
        if tied <= TIED_SHARE * queries:
            return ""
        cause = "the model may have collapsed"
        if self.repeated_texts >= REPEATED_SHARE * tied:
            cause = f"{self.repeated_texts:,} texts repeat (--equal_texts counts equal texts as right)"
        return (
            f"{100 * tied / queries:.1f} % of the queries are tied, so the tie rule decides these numbers: {cause}; "
            "compare ties='strict' and 'pessimistic'."
        )


@dataclass(frozen=True, slots=True)
class Facts:
    """The card of any other group, with the methods of ``Card``: facts by name, in the order they are printed.

    ``protocol`` holds those that must be equal for two results to be comparable (the data and its hash, the split,
    the aggregation, the depth), ``other`` the rest (the model, the date, what was skipped).
    """

    protocol: Mapping[str, Any]
    other: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""  # a warning, if there is one
    noise: tuple[Noise, ...] = ()  # in the training pairs of the runs that had any

    def leaving_out(self, count: int) -> Facts:
        if not count:
            return self
        return replace(self, other={**self.other, "pictures that could not be read": count})

    def protocol_fields(self) -> dict[str, Any]:
        return dict(self.protocol)

    def described(self) -> dict[str, str]:
        facts = {**self.protocol, **self.other, **noise_fact(self.noise)}
        return {name: _fact(value) for name, value in facts.items()}

    def lines(self) -> list[str]:
        return [", ".join(f"{name} {_fact(value)}" for name, value in facts.items())
                for facts in (self.protocol, self.other, noise_fact(self.noise)) if facts]  # fmt: skip

    def warning(self) -> str:
        return self.note


def made_by(model: Any) -> dict[str, str]:
    """The facts of every card: the model, this version, and now."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"model": model.fingerprint(), "diptych": __version__, "date": now}


def split_names(captions: Captions) -> str:
    """The splits that captions are of."""
    return "+".join(sorted(set(captions.splits)))


def noise_words(noise: Sequence[Noise]) -> str:
    """The noise that a model was trained with."""
    return " + ".join(map(str, noise)) or "none"


def noise_fact(noise: Sequence[Noise]) -> dict[str, str]:
    """The noise as a fact of a card; a model that was trained without any has none."""
    return {"training noise": noise_words(noise)} if noise else {}


def direction_words(direction: str) -> str:
    """``image → text``."""
    return direction.replace("_to_", " → ")


def _fact(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
