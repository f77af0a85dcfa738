"""The SQL that ranks: nearest vectors, best words, and an even sample, each over what a filter selects.

Binary codes are packed ``bit`` columns, compared by pgvector's Hamming distance (XOR and popcount). A kind has a table
``codes_<kind>`` of (serial, code) and a row of ``code_bases`` with the mean and the rotation that made its codes. Codes
go with their vectors (a foreign key); whoever adds vectors adds their codes in the same transaction. The nearest codes
are the shortlist whose stored vectors decide.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from diptych.codes import Codes
from diptych.index.capabilities import spread
from diptych.index.engines.coding import Coder
from diptych.index.engines.postgres.database import Connection
from diptych.index.engines.postgres.records import COLUMNS, rows_of
from diptych.index.engines.postgres.tables import Tables
from diptych.index.protocol import KINDS, Item, Kind, Vectors
from diptych.index.query.words import COMMON, COMMON_SHARE, K1, LEAST_IDF, B


@dataclass(frozen=True, slots=True)
class SqlSelection:
    """The items a search looks at: of one kind or of all, and passing a condition over ``items``."""

    kind: Kind | None = None
    where: str = "true"
    values: Mapping[str, Any] = field(default_factory=dict)  # the parameters of the condition


def nearest(
    db: Connection, tables: Tables, query: Any, count: int, selection: SqlSelection, approximate: bool
) -> Any:
    """A cursor over (serial, vector, item …) of the ``count`` best by the server's arithmetic, unordered."""
    # a literal, one of KINDS: the planner must see it to take the approximate index of that kind
    kind = "true" if selection.kind is None else f"v.kind = '{selection.kind}'"
    if approximate:
        best = f"FROM {{s}}.vectors v WHERE {kind} ORDER BY v.vector <#> %(query)s"
    else:
        # + 0 keeps the planner from an approximate index; widened halves keep the query unrounded
        wide = "v.vector" if tables.precision == "float32" else "v.vector::vector"
        join = "" if selection.where == "true" else "JOIN {s}.items USING (serial)"
        best = (
            f"FROM {{s}}.vectors v {join} WHERE {kind} AND {selection.where} "
            f"ORDER BY ({wide} <#> %(query)s) + 0, v.kind, v.serial"
        )
    statement = (
        f"SELECT best.serial, best.vector, {COLUMNS} FROM "
        f"(SELECT v.serial, v.vector {best} LIMIT %(count)s) best JOIN {{s}}.items USING (serial)"
    )
    return tables.run(db, statement, {**selection.values, "query": query, "count": count}, binary=True)


def best_words(
    db: Connection, tables: Tables, words: dict[str, int], k: int, selection: SqlSelection
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
        usable AS (
          SELECT term, weight, place, CASE WHEN hits <= most THEN hits ELSE (
            SELECT count(*) FROM {{s}}.postings p WHERE p.kind = %(kind)s AND p.term = counted.term) END AS hits
          FROM counted, total
          WHERE hits > 0 AND (hits <= most OR NOT EXISTS (SELECT FROM counted other WHERE other.hits <= most))),
        rare AS (
          SELECT term, weight, place, greatest(ln((n - hits + 0.5) / (hits + 0.5)), {LEAST_IDF}) AS idf
          FROM usable, total),
        best AS (
          SELECT serial, sum(
            rare.weight * idf * (p.count * {K1 + 1}::float8) /
            (p.count + {K1}::float8 * ({1 - B}::float8 + {B}::float8 * items.words / total.average))
            ORDER BY place) AS score
          FROM rare JOIN {{s}}.postings p ON p.kind = %(kind)s AND p.term = rare.term
          JOIN {{s}}.items USING (serial), total
          WHERE {selection.where} GROUP BY serial ORDER BY score DESC, serial LIMIT %(k)s)
        SELECT best.score, best.serial, {COLUMNS} FROM best JOIN {{s}}.items USING (serial)"""
    given = {"kind": selection.kind, "terms": list(words), "weights": list(words.values()), "k": k}
    rows = tables.run(db, statement, {**selection.values, **given}).fetchall()
    return [(score, serial, Item(*rest)) for score, serial, *rest in rows]


def count_items(db: Connection, tables: Tables, selection: SqlSelection) -> int:
    """How many items are selected."""
    statement = f"SELECT count(*) FROM {{s}}.items WHERE {_condition(selection)}"
    return int(tables.run(db, statement, {**selection.values, "kind": selection.kind}).fetchone()[0])


def spread_serials(db: Connection, tables: Tables, selection: SqlSelection, size: int | None) -> list[int]:
    """Serials of up to ``size`` items at even distances, in the order they were added; all without a size."""
    places = None if size is None else spread(count_items(db, tables, selection), size).tolist()
    statement = f"""
        SELECT serial FROM (SELECT serial, row_number() OVER (ORDER BY serial) - 1 AS place
                            FROM {{s}}.items WHERE {_condition(selection)}) numbered
        WHERE %(places)s::bigint[] IS NULL OR place = ANY(%(places)s::bigint[]) ORDER BY serial"""
    given = {**selection.values, "kind": selection.kind, "places": places}
    return [serial for (serial,) in tables.run(db, statement, given).fetchall()]


def _condition(selection: SqlSelection) -> str:
    """What a row must satisfy to be selected."""
    return f"(%(kind)s::text IS NULL OR items.kind = %(kind)s) AND {selection.where}"


PIECE = 10_000  # vectors coded at once


class CodeTables:
    """The tables of codes of one index; each call runs inside the caller's transaction."""

    def __init__(self, tables: Tables, dimension: int) -> None:
        self.tables, self.dimension = tables, dimension
        self._coders: dict[tuple[str, int], Coder] = {}  # by kind and the number of its table

    def kinds(self, db: Connection) -> dict[str, int]:
        """Kinds that have codes, and the server's number of their table, which a new table changes."""
        schema = self.tables.schema
        names = [f"{schema}.code_bases", *(f"{schema}.codes_{kind}" for kind in KINDS)]
        query = (
            "SELECT to_regclass(name)::oid::bigint FROM unnest(%s::text[]) WITH ORDINALITY n(name, place) "
        )
        base, *found = [number for (number,) in db.execute(f"{query} ORDER BY place", (names,)).fetchall()]
        if base is None:
            return {}
        return {kind: number for kind, number in zip(KINDS, found, strict=True) if number is not None}

    def build(self, db: Connection, kind: Kind) -> None:
        """Code every vector of a kind, unless that is done."""
        if kind in self.kinds(db):
            return
        mean = "SELECT avg(vector) FROM {s}.vectors WHERE kind = %s"
        found = self.tables.run(db, mean, (kind,), binary=True).fetchone()[0]
        middle = np.zeros(self.dimension) if found is None else found.to_numpy()
        coder = Coder.around(np.asarray(middle, np.float32))
        for statement in (
            "CREATE TABLE IF NOT EXISTS {s}.code_bases(kind text PRIMARY KEY, mean bytea NOT NULL, "
            "rotation bytea NOT NULL)",
            f"CREATE TABLE {{s}}.codes_{kind}(serial bigint PRIMARY KEY REFERENCES {{s}}.vectors ON DELETE CASCADE, "
            f"code bit({coder.bits}) NOT NULL)",
        ):
            self.tables.run(db, statement)
        base = (kind, *(part.astype("<f4").tobytes() for part in (coder.mean, coder.rotation)))
        self.tables.run(db, "INSERT INTO {s}.code_bases VALUES (%s, %s, %s)", base)
        self._fill(db, kind, coder, 0)

    def follow(self, db: Connection, first: int) -> None:
        """Code the vectors that were added from a serial on."""
        for kind, number in self.kinds(db).items():
            self._fill(db, kind, self._coder(db, kind, number), first)

    def drop(self, db: Connection, kind: Kind) -> None:
        if kind in self.kinds(db):
            self.tables.run(db, f"DROP TABLE {{s}}.codes_{kind}")
            self.tables.run(db, "DELETE FROM {s}.code_bases WHERE kind = %s", (kind,))

    def nearest(self, db: Connection, kind: Kind, queries: Vectors, count: int) -> list[Any]:
        """A cursor over (serial, vector, item …) of the ``count`` nearest codes for each query, unordered."""
        coder = self._coder(db, kind, self.kinds(db)[kind])
        statement = self.tables.sql(
            f"SELECT serial, v.vector, {COLUMNS} FROM (SELECT serial FROM {{s}}.codes_{kind} "
            f"ORDER BY code <~> %(code)s::bit({coder.bits}), serial LIMIT %(count)s) best "
            "JOIN {s}.vectors v USING (serial) JOIN {s}.items USING (serial)"
        )
        with db.pipeline():
            return [
                db.execute(statement, {"code": code, "count": count}, binary=True)
                for code in bit_strings(coder.code_queries(queries), coder.bits)
            ]

    def verify(self, db: Connection, counts: dict[str, int]) -> list[str]:
        """One sentence per kind whose codes are not as many as its items."""
        faults = []
        for kind in self.kinds(db):
            coded = self.tables.run(db, f"SELECT count(*) FROM {{s}}.codes_{kind}").fetchone()[0]
            if coded != counts[kind]:
                faults.append(
                    f"{coded} of {counts[kind]} {kind} items have a binary code: build the codes again (--codes)."
                )
        return faults

    def _coder(self, db: Connection, kind: str, number: int) -> Coder:
        """What made the codes of a table; read once."""
        if (kind, number) not in self._coders:
            query = "SELECT mean, rotation FROM {s}.code_bases WHERE kind = %s"
            mean, rotation = self.tables.run(db, query, (kind,), binary=True).fetchone()
            rows = np.frombuffer(rotation, "<f4").reshape(self.dimension, -1)
            self._coders[kind, number] = Coder(np.frombuffer(mean, "<f4"), rows)
        return self._coders[kind, number]

    def _fill(self, db: Connection, kind: str, coder: Coder, first: int) -> None:
        with db.cursor(name="uncoded", binary=True) as rows:  # read piece by piece, not into memory
            vectors = "SELECT serial, vector FROM {s}.vectors WHERE kind = %s AND serial >= %s"
            rows.execute(self.tables.sql(vectors), (kind, first))
            pieces: Iterator[Sequence[Any]] = iter(lambda: rows.fetchmany(PIECE), [])
            for piece in pieces:
                codes = bit_strings(
                    coder.code(rows_of([row[1] for row in piece], self.dimension)), coder.bits
                )
                copy = self.tables.sql(f"COPY {{s}}.codes_{kind} FROM STDIN")
                with db.cursor().copy(copy) as lines:
                    for (serial, _), code in zip(piece, codes, strict=True):
                        lines.write_row((serial, code))


def bit_strings(codes: Codes, bits: int) -> list[str]:
    """Packed codes as PostgreSQL writes bits, the first on the left."""
    rows = np.ascontiguousarray(codes.astype("<u8", copy=False)).view(np.uint8)
    ones = np.unpackbits(rows, axis=1, count=bits, bitorder="little") + ord("0")
    return [row.tobytes().decode() for row in ones]
