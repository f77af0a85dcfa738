"""The SQL that ranks: nearest vectors, best words, and an even sample, each over what a filter selects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from diptych.index.engines.postgres.database import Connection
from diptych.index.engines.postgres.records import COLUMNS, item
from diptych.index.engines.postgres.tables import Tables
from diptych.index.protocol import Item, Kind
from diptych.index.query.bm25 import K1, LEAST_IDF, B
from diptych.index.query.lexical import COMMON, COMMON_SHARE


@dataclass(frozen=True, slots=True)
class Chosen:
    """The items a search looks at: of one kind or of all, and passing a condition over ``items``."""

    kind: Kind | None = None
    where: str = "true"
    parameters: dict[str, Any] | None = None

    @property
    def values(self) -> dict[str, Any]:
        """The parameters of the condition."""
        return self.parameters or {}


def nearest(db: Connection, tables: Tables, query: Any, count: int, chosen: Chosen, approximate: bool) -> Any:
    """A cursor over (serial, vector, item …) of the ``count`` best by the server's arithmetic, unordered."""
    # a literal, one of KINDS: the planner must see it to take the approximate index of that kind
    kind = "true" if chosen.kind is None else f"v.kind = '{chosen.kind}'"
    if approximate:
        best = f"FROM {{s}}.vectors v WHERE {kind} ORDER BY v.vector <#> %(query)s"
    else:
        # + 0 keeps the planner from an approximate index; widened halves keep the query unrounded
        wide = "v.vector" if tables.precision == "float32" else "v.vector::vector"
        join = "" if chosen.where == "true" else "JOIN {s}.items USING (serial)"
        best = (
            f"FROM {{s}}.vectors v {join} WHERE {kind} AND {chosen.where} "
            f"ORDER BY ({wide} <#> %(query)s) + 0, v.kind, v.serial"
        )
    statement = (
        f"SELECT best.serial, best.vector, {COLUMNS} FROM "
        f"(SELECT v.serial, v.vector {best} LIMIT %(count)s) best JOIN {{s}}.items USING (serial)"
    )
    return db.execute(tables.sql(statement), {**chosen.values, "query": query, "count": count}, binary=True)


def best_words(
    db: Connection, tables: Tables, words: dict[str, int], k: int, chosen: Chosen
) -> list[tuple[float, int, Item]]:
    """(score, serial, item) of the k best of one kind by BM25; common words are left out while others remain."""
    statement = f"""
        WITH total AS (
          SELECT items::float8 AS n, words::float8 / items AS average,
                 greatest({COMMON}, items / {COMMON_SHARE}) AS most
          FROM {{s}}.totals WHERE kind = %(kind)s AND items > 0 AND words > 0),
        counted AS (
          SELECT w.term, w.weight, w.place, (
            SELECT count(*) FROM (SELECT FROM {{s}}.postings p WHERE p.kind = %(kind)s AND p.term = w.term
                                  LIMIT most + 1) found) AS hits
          FROM unnest(%(terms)s::text[], %(weights)s::int[]) WITH ORDINALITY AS w(term, weight, place), total),
        chosen AS (
          SELECT term, weight, place, CASE WHEN hits <= most THEN hits ELSE (
            SELECT count(*) FROM {{s}}.postings p WHERE p.kind = %(kind)s AND p.term = counted.term) END AS hits
          FROM counted, total
          WHERE hits > 0 AND (hits <= most OR NOT EXISTS (SELECT FROM counted other WHERE other.hits <= most))),
        rare AS (
          SELECT term, weight, place, greatest(ln((n - hits + 0.5) / (hits + 0.5)), {LEAST_IDF}) AS idf
          FROM chosen, total),
        best AS (
          SELECT serial, sum(
            rare.weight * idf * (p.count * {K1 + 1}::float8) /
            (p.count + {K1}::float8 * ({1 - B}::float8 + {B}::float8 * items.words / total.average))
            ORDER BY place) AS score
          FROM rare JOIN {{s}}.postings p ON p.kind = %(kind)s AND p.term = rare.term
          JOIN {{s}}.items USING (serial), total
          WHERE {chosen.where} GROUP BY serial ORDER BY score DESC, serial LIMIT %(k)s)
        SELECT best.score, best.serial, {COLUMNS} FROM best JOIN {{s}}.items USING (serial)"""
    given = {"kind": chosen.kind, "terms": list(words), "weights": list(words.values()), "k": k}
    rows = db.execute(tables.sql(statement), {**chosen.values, **given}).fetchall()
    return [(score, serial, item(rest)) for score, serial, *rest in rows]


def passing(db: Connection, tables: Tables, chosen: Chosen) -> int:
    """How many items are chosen."""
    statement = tables.sql(f"SELECT count(*) FROM {{s}}.items WHERE {_condition(chosen)}")
    return int(db.execute(statement, {**chosen.values, "kind": chosen.kind}).fetchone()[0])


def spread(db: Connection, tables: Tables, chosen: Chosen, size: int) -> list[int]:
    """Serials of up to ``size`` items at even distances, in the order they were added."""
    total = passing(db, tables, chosen)
    places = np.linspace(0, max(0, total - 1), min(size, total)).astype(np.int64).tolist()
    statement = f"""
        SELECT serial FROM (SELECT serial, row_number() OVER (ORDER BY serial) - 1 AS place
                            FROM {{s}}.items WHERE {_condition(chosen)}) numbered
        WHERE place = ANY(%(places)s) ORDER BY serial"""
    given = {**chosen.values, "kind": chosen.kind, "places": places}
    return [serial for (serial,) in db.execute(tables.sql(statement), given).fetchall()]


def _condition(chosen: Chosen) -> str:
    """What a row must satisfy to be chosen."""
    return f"(%(kind)s::text IS NULL OR items.kind = %(kind)s) AND {chosen.where}"


def sample(db: Connection, tables: Tables, chosen: Chosen, size: int) -> list[Any]:
    """The vectors of a ``spread``."""
    query = tables.sql("SELECT vector FROM {s}.vectors WHERE serial = ANY(%s) ORDER BY serial")
    rows = db.execute(query, (spread(db, tables, chosen, size),), binary=True).fetchall()
    return [vector for (vector,) in rows]
