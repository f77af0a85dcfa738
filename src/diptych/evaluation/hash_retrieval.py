"""The evaluator of hashing: MAP@5000 of a model's codes, by the classes of the images."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import ClassVar

import numpy as np

from diptych import __version__
from diptych.data.captions import Captions
from diptych.data.labels.hash_labels import COLUMN, class_names, class_rows, class_sets
from diptych.errors import SettingsError
from diptych.evaluation.bootstrap import Queries, bootstrap, interval
from diptych.evaluation.cards import Facts
from diptych.evaluation.hashing import TOP, HashingScores, Missing, hashing_map
from diptych.evaluation.prepared import Prepared
from diptych.evaluation.report import Group, Layout
from diptych.model.retriever import Retriever

VIEW = "hash"  # the name of the hash head among a model's branches


@dataclass(frozen=True)
class HashRetrieval:
    """MAP@top of codes; the primary metric is ``map``, ties decided by the index in the database.

    The images of the split ask for the other images of the data, or where there are none (while a run trains) each
    for the others of the split. ``bootstrap`` is the number of resamples of the intervals, by query; 0 for none.
    """

    column: str = COLUMN
    view: str = VIEW
    top: int = TOP
    missing: Missing = "zero"
    bootstrap: int = 0
    seed: int = 0
    reads_others: ClassVar[bool] = True

    def __call__(self, model: Retriever, data: Prepared, *, show_progress: bool = False) -> Group:
        """The group ``hashing``."""
        began = time.perf_counter()
        if self.view not in model.branches:
            raise SettingsError(
                f"this model has no hash head '{self.view}': train one with the recipe 'cookie-hash', or use another "
                "protocol."
            )
        queries, database = data.captions, data.others
        ranked = [queries] if database is None else [queries, database]
        sets = [class_sets(part, self.column) for part in ranked]
        names = class_names([one for part in sets for one in part])
        rows = [class_rows(one, names) for one in sets]
        codes = [
            model.encode_image(part.images, view=self.view, show_progress=show_progress).numpy()
            for part in ranked
        ]
        found = hashing_map(
            codes[0],
            codes[-1],
            rows[0],
            rows[-1],
            top=self.top,
            missing=self.missing,
            leave_one_out=database is None,
        )
        bits = int(codes[0].shape[1])
        table = Layout(
            ["", f"MAP@{self.top}", "ties averaged"], [(f"{bits} bits", ["map", "map_tie_averaged"])]
        )
        return Group(
            "hashing",
            {"map": found.map, "map_tie_averaged": found.map_tie_averaged},
            "map",
            self._card(model, ranked, found, bits, len(names)),
            self._intervals(found),
            {"seconds": time.perf_counter() - began},
            (table,),
        )

    def check(self, model: Retriever, captions: Captions) -> None:
        """Refuse data without classes."""
        class_sets(captions, self.column)

    def _card(
        self, model: Retriever, ranked: Sequence[Captions], found: HashingScores, bits: int, classes: int
    ) -> Facts:
        queries = ranked[0]
        return Facts(
            {
                "data": queries.name,
                "queries": len(queries.images),
                "query split": "+".join(sorted(set(queries.splits))),
                "database": "the other queries" if len(ranked) == 1 else len(ranked[1].images),
                "bits": bits,
                "classes": classes,
                "label column": self.column,
                "top": found.top,
                "without relevant": self.missing,
                "ties": "database index",
                "data hash": "-".join(part.fingerprint() for part in ranked),
            },
            {
                "queries averaged": found.queries,
                "queries without a label": found.unlabelled,
                "queries without a relevant item": found.without_relevant,
                "bootstrap": self.bootstrap,
                "model": model.fingerprint(),
                "diptych": __version__,
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
            },
        )

    def _intervals(self, found: HashingScores) -> dict[str, tuple[float, float]]:
        if not self.bootstrap:
            return {}
        every = np.arange(len(found.precisions))
        queries = {
            name: Queries(found.precisions[:, column], every)
            for column, name in enumerate(("map", "map_tie_averaged"))
        }
        sample = bootstrap(queries, len(every), self.bootstrap, np.random.default_rng(self.seed))
        return {name: interval(values) for name, values in sample.items()}
