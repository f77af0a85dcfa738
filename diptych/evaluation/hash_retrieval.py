"""The evaluator of hashing: MAP@5000 of a model's codes, by the classes of the images."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from diptych import __version__
from diptych.data.captions import Captions
from diptych.data.hash_labels import COLUMN, class_names, class_rows, class_sets
from diptych.data.prepared import Prepared
from diptych.errors import SettingsError
from diptych.evaluation.cards import Facts
from diptych.evaluation.hashing import TOP, Missing, hashing_map
from diptych.evaluation.report import Group, Layout
from diptych.retriever import Retriever

VIEW = "hash"  # the name of the hash head among a model's branches


@dataclass(frozen=True)
class HashRetrieval:
    """MAP@top of codes; the primary metric is ``map``, ties decided by the index in the database.

    As an evaluator of one split, every image of it asks for the others. ``ranked`` names queries and database apart.
    """

    column: str = COLUMN
    view: str = VIEW
    top: int = TOP
    missing: Missing = "zero"

    def __call__(self, model: Retriever, data: Prepared, *, show_progress: bool = False) -> Group:
        """The group ``hashing``: each image of the split against the others."""
        return self._group(model, data.captions, None, show_progress)

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
        values = asdict(found)
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
                "queries averaged": values["queries"],
                "queries without a label": values["unlabelled"],
                "queries without a relevant item": values["without_relevant"],
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
        return Group("hashing", metrics, "map", facts, {}, {"seconds": time.perf_counter() - began}, (table,))
