"""The evaluator of hashing: MAP@5000 of a model's codes, by the classes of the images."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime

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

    As an evaluator of one split, every image of it asks for the others. ``ranked`` names queries and database apart.
    ``bootstrap`` is the number of resamples of the intervals, by query; 0 for none.
    """

    column: str = COLUMN
    view: str = VIEW
    top: int = TOP
    missing: Missing = "zero"
    bootstrap: int = 0
    seed: int = 0

    def __call__(self, model: Retriever, data: Prepared, *, show_progress: bool = False) -> Group:
        """The group ``hashing``: each image of the split against the others."""
        return self._group(model, data.captions, None, show_progress)

    def check(self, model: Retriever, captions: Captions) -> None:
        """Refuse data without classes."""
        class_sets(captions, self.column)

    def ranked(
        self, model: Retriever, queries: Captions, database: Captions, *, show_progress: bool = False
    ) -> Group:
        """The group ``hashing``: queries against a database."""
        return self._group(model, queries, database, show_progress)

    def _group(
        self, model: Retriever, queries: Captions, database: Captions | None, show_progress: bool
    ) -> Group:
        began = time.perf_counter()
        if self.view not in model.branches:
            raise SettingsError(
                f"this model has no hash head '{self.view}': train one with the recipe 'cookie-hash', or use another "
                "protocol."
            )
        sets = [class_sets(part, self.column) for part in (queries, database or queries)]
        names = class_names([*sets[0], *sets[1]])
        rows = [class_rows(one, names) for one in sets]
        codes = [
            model.encode_image(part.images, view=self.view, show_progress=show_progress).numpy()
            for part in ((queries, database) if database is not None else (queries,))
        ]
        found = hashing_map(
            codes[0],
            codes[-1],
            *rows,
            top=self.top,
            missing=self.missing,
            leave_one_out=database is None,
        )
        facts = Facts(
            {
                "data": queries.name,
                "queries": len(queries.images),
                "query split": "+".join(sorted(set(queries.splits))),
                "database": "the other queries" if database is None else len(database.images),
                "bits": int(codes[0].shape[1]),
                "classes": len(names),
                "label column": self.column,
                "top": found.top,
                "without relevant": self.missing,
                "ties": "database index",
                "data hash": queries.fingerprint()
                + ("" if database is None else f"-{database.fingerprint()}"),
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
        metrics = {"map": found.map, "map_tie_averaged": found.map_tie_averaged}
        table = Layout(
            ["", f"MAP@{self.top}", "ties averaged"],
            [(f"{codes[0].shape[1]} bits", ["map", "map_tie_averaged"])],
        )
        speed = {"seconds": time.perf_counter() - began}
        return Group("hashing", metrics, "map", facts, self._intervals(found), speed, (table,))

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
