"""The tables of an index in PostgreSQL: making them, changing them, and what they say of themselves.

``items`` holds what a hit shows and a filter reads, ``vectors`` only what a scan reads, ``postings`` which
words are in which item. ``serial`` numbers items as they were added, and decides between equal scores.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from diptych.errors import IndexFault, SettingsError
from diptych.index.engines.postgres.database import Connection, Jsonb, sql
from diptych.index.engines.postgres.records import COLUMNS, Record, checksum, folded
from diptych.index.protocol import (
    INCOMPLETE,
    KINDS,
    OTHER,
    TAKEN,
    Collection,
    Item,
    Kind,
    grown_columns,
    held_kinds,
    kind_of,
    next_collection,
    other_format,
)
from diptych.progress import track

FORMAT = 1  # version of the tables; raised when old ones can no longer be read
PIECE = 1000  # items verified at once
TYPES: dict[str, str] = {"float32": "vector", "float16": "halfvec"}
GRAPH_LIMITS = {"float32": 2_000, "float16": 4_000}  # pgvector's, of an indexed one
INLINE_BYTES = 7_000  # a vector up to this size stays in its row: a scan then reads one table end to end
_KINDS = {"string": "text", "array": "list"}  # kinds of metadata that PostgreSQL's JSON calls otherwise
_FILLED = ("items", "vectors", "thumbnails", "postings")
_SCHEMA = """
CREATE SCHEMA {s};
CREATE TABLE {s}.meta(key text PRIMARY KEY, value text NOT NULL);
CREATE TABLE {s}.collections(number int PRIMARY KEY, name text NOT NULL, root text NOT NULL);
CREATE TABLE {s}.columns(name text PRIMARY KEY, kinds text[] NOT NULL);
CREATE TABLE {s}.totals(kind text PRIMARY KEY, items bigint NOT NULL, words bigint NOT NULL);
CREATE TABLE {s}.items(
  serial bigint PRIMARY KEY, id text NOT NULL UNIQUE, kind text NOT NULL, path text NOT NULL,
  text text NOT NULL, image_id text NOT NULL, metadata jsonb NOT NULL, content text NOT NULL,
  collection int NOT NULL, folded jsonb NOT NULL, words int NOT NULL, checksum bigint NOT NULL);
CREATE INDEX texts_of_image ON {s}.items(image_id) WHERE image_id <> '';
CREATE TABLE {s}.vectors(serial bigint PRIMARY KEY, kind text NOT NULL, vector {type} NOT NULL);
CREATE TABLE {s}.thumbnails(serial bigint PRIMARY KEY, jpeg bytea NOT NULL);
CREATE TABLE {s}.postings(
  kind text NOT NULL, term text COLLATE "C" NOT NULL, serial bigint NOT NULL, count int NOT NULL,
  PRIMARY KEY(kind, term, serial));
CREATE INDEX words_of_item ON {s}.postings(serial);
"""


class Tables:
    """The tables of one index and the statements over them; each runs inside the caller's transaction."""

    def __init__(self, schema: str, precision: str = "float32") -> None:
        self.schema, self.precision = schema, precision
        # the lock every writer waits for, held until its transaction ends
        self.take_turn = f"SELECT value FROM \"{schema}\".meta WHERE key = 'generation' FOR UPDATE"

    def sql(self, text: str) -> sql.Composed:
        """A statement whose ``{s}`` is the schema."""
        return sql.SQL(text).format(s=sql.Identifier(self.schema))

    def run(self, db: Connection, text: str, values: Any = (), **options: Any) -> Any:
        """A cursor over the answer to such a statement."""
        return db.execute(self.sql(text), values, **options)

    def create(self, db: Connection, label: str, facts: dict[str, str]) -> None:
        db.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", (f"diptych {self.schema}",))
        if self.exists(db):
            raise IndexFault(TAKEN.format(label))
        if db.execute("SELECT to_regnamespace(%s)", (self.schema,)).fetchone()[0] is not None:
            raise IndexFault(OTHER.format(label, "a schema"))
        if db.execute("SHOW server_encoding").fetchone()[0] != "UTF8":
            raise SettingsError(f"{label} does not store UTF-8: create the database with ENCODING 'UTF8'.")
        _make_extension(db, label)
        dimension, precision = int(facts["dimension"]), facts["precision"]
        kind = sql.SQL(f"{TYPES[precision]}({dimension})")  # a known word and a number
        db.execute(sql.SQL(_SCHEMA).format(s=sql.Identifier(self.schema), type=kind))
        if dimension * (4 if precision == "float32" else 2) <= INLINE_BYTES:
            self.run(db, "ALTER TABLE {s}.vectors ALTER COLUMN vector SET STORAGE PLAIN")
        base = {"format": str(FORMAT), "generation": "0", "serial": "0"}
        for row in ({**base, **facts}).items():
            self.run(db, "INSERT INTO {s}.meta VALUES (%s, %s)", row)

    def exists(self, db: Connection) -> bool:
        return db.execute("SELECT to_regclass(%s)", (f"{self.schema}.meta",)).fetchone()[0] is not None

    def meta(self, db: Connection) -> dict[str, str]:
        return dict(self.run(db, "SELECT key, value FROM {s}.meta").fetchall())

    def check_whole(self, db: Connection, label: str) -> None:
        """Raise for an index that was restored in part: a table that is missing, or empty when it should not be."""
        facts = self.meta(db)
        if facts.get("format", str(FORMAT)) != str(FORMAT):
            raise other_format(label, facts["format"], FORMAT)
        names = (*_FILLED, "collections", "columns", "totals")
        query = "SELECT name FROM unnest(%s::text[]) name WHERE to_regclass(%s || '.' || name) IS NULL"
        lost = [name for (name,) in db.execute(query, (list(names), self.schema)).fetchall()]
        lost += [] if "format" in facts and "dimension" in facts else ["meta"]
        if not lost and any(self.counts(db).values()):
            lost = [
                table
                for table in ("items", "vectors")
                if self.run(db, f"SELECT NOT EXISTS (SELECT FROM {{s}}.{table})").fetchone()[0]
            ]
        if lost:
            raise IndexFault(INCOMPLETE.format(label, f"nothing in its table {lost[0]}"))

    def counts(self, db: Connection) -> dict[str, int]:
        """Items present, by kind."""
        found = dict(self.run(db, "SELECT kind, items FROM {s}.totals").fetchall())
        return {kind: found.get(kind, 0) for kind in KINDS}

    def size(self, db: Connection) -> int:
        query = (
            "SELECT coalesce(sum(pg_total_relation_size(oid)), 0) FROM pg_class "
            "WHERE relnamespace = %s::regnamespace AND relkind = 'r'"
        )
        return int(db.execute(query, (self.schema,)).fetchone()[0])

    def columns(self, db: Connection) -> dict[str, tuple[str, ...]]:
        found = self.run(db, 'SELECT name, kinds FROM {s}.columns ORDER BY name COLLATE "C"').fetchall()
        return {name: tuple(kinds) for name, kinds in found}

    def collections(self, db: Connection) -> tuple[Collection, ...]:
        rows = self.run(db, "SELECT number, name, root FROM {s}.collections ORDER BY number").fetchall()
        return tuple(Collection(*row) for row in rows)

    def graphs(self, db: Connection) -> dict[str, int]:
        """Kinds with a finished approximate index, and the items it covers."""
        query = (
            "SELECT relname FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid "
            "WHERE indisvalid AND indrelid = %s::regclass"
        )
        names = {name for (name,) in db.execute(query, (f"{self.schema}.vectors",)).fetchall()}
        return {kind: count for kind, count in self.counts(db).items() if f"graph_{kind}" in names}

    def remove(self, db: Connection, ids: Sequence[str], with_texts: bool) -> int:
        """Delete items, and the texts of deleted images if asked; how many of ``ids`` were there."""
        find = "SELECT id, serial FROM {s}.items WHERE id = ANY(%s)"
        found = dict(self.run(db, find, (list(ids),)).fetchall())
        serials = set(found.values())
        if with_texts and found:
            linked = "SELECT serial FROM {s}.items WHERE image_id <> '' AND image_id = ANY(%s)"
            serials |= {serial for (serial,) in self.run(db, linked, (list(found),)).fetchall()}
        if serials:
            gone = (list(serials),)
            lost = "SELECT kind, -count(*), -sum(words) FROM {s}.items WHERE serial = ANY(%s) GROUP BY kind"
            self._count(db, self.run(db, lost, gone).fetchall())
            for table in _FILLED:
                self.run(db, f"DELETE FROM {{s}}.{table} WHERE serial = ANY(%s)", gone)
        return len(found)

    def insert(self, db: Connection, records: Sequence[Record]) -> int:
        """Write new items with everything that belongs to them, numbered in their order; the first number."""
        take = "UPDATE {s}.meta SET value = (value::bigint + %s)::text WHERE key = 'serial' RETURNING value"
        last = int(self.run(db, take, (len(records),)).fetchone()[0])
        rows = list(enumerate(records, last - len(records) + 1))
        items = (
            (n, i.id, i.kind, i.path, i.text, i.image_id, Jsonb(r.metadata), i.content, i.collection,
             Jsonb(folded(i)), sum(r.words.values()), r.checksum)
            for n, r in rows for i in (r.item,)
        )  # fmt: skip
        types = ["int8", *["text"] * 5, "jsonb", "text", "int4", "jsonb", "int4", "int8"]
        self._copy(db, "items", types, items)
        vectors = ((n, r.item.kind, r.vector) for n, r in rows)
        self._copy(db, "vectors", ["int8", "text", TYPES[self.precision]], vectors)
        thumbnails = ((n, r.item.thumbnail) for n, r in rows if r.item.thumbnail)
        self._copy(db, "thumbnails", ["int8", "bytea"], thumbnails)
        postings = ((r.item.kind, word, n, count) for n, r in rows for word, count in r.words.items())
        self._copy(db, "postings", ["text", "text", "int8", "int4"], postings)
        self._count(db, [(r.item.kind, 1, sum(r.words.values())) for r in records])
        self._record_columns(db, records)
        return last - len(records) + 1

    def add_collection(self, db: Connection, name: str, root: str) -> Collection:
        known = self.collections(db)
        found = next_collection(known, name, root)
        if found not in known:
            self.run(db, "INSERT INTO {s}.collections VALUES (%s, %s, %s)", (found.number, name, root))
        return found

    def build_graph(self, db: Connection, kind: Kind) -> None:
        """Make the HNSW index of a kind, by inner product."""
        statement = (
            f"CREATE INDEX IF NOT EXISTS graph_{kind} ON {{s}}.vectors "
            f"USING hnsw (vector {TYPES[self.precision]}_ip_ops) WHERE kind = '{kind}'"
        )
        self.run(db, statement)

    def recount_columns(self, db: Connection) -> None:
        query = "SELECT DISTINCT key, jsonb_typeof(value) FROM {s}.items, jsonb_each(metadata)"
        kinds = held_kinds((name, _KINDS.get(kind, kind)) for name, kind in self.run(db, query).fetchall())
        self.run(db, "DELETE FROM {s}.columns")
        for name, held in kinds.items():
            self.run(db, "INSERT INTO {s}.columns VALUES (%s, %s)", (name, sorted(held)))

    def vacuum(self, further: Sequence[str]) -> list[Any]:
        """Statements that rewrite the tables, and ``further`` ones, without their removed rows."""
        return [self.sql(f"VACUUM (FULL, ANALYZE) {{s}}.{table}") for table in (*_FILLED, *further)]

    def items(self, db: Connection, ids: Sequence[str]) -> list[Item]:
        query = f"SELECT {COLUMNS} FROM {{s}}.items WHERE id = ANY(%s)"
        return [Item(*row) for row in self.run(db, query, (list(ids),)).fetchall()]

    def items_at(self, db: Connection, serials: Sequence[int]) -> dict[int, Item]:
        query = f"SELECT items.serial, {COLUMNS} FROM {{s}}.items WHERE serial = ANY(%s)"
        return {serial: Item(*row) for serial, *row in self.run(db, query, (list(serials),)).fetchall()}

    def verify(self, db: Connection, show_progress: bool = False) -> list[str]:
        """One sentence per fault."""
        faults = []
        for table in _FILLED[1:]:
            stray = (
                f"SELECT count(*) FROM {{s}}.{table} LEFT JOIN {{s}}.items USING (serial) WHERE id IS NULL"
            )
            if lost := self.run(db, stray).fetchone()[0]:
                faults.append(
                    f"{lost} rows of the table {table} belong to no item: index the collection again."
                )
        seen = self.run(db, "SELECT kind, count(*), sum(words) FROM {s}.items GROUP BY kind").fetchall()
        kept = self.run(db, "SELECT kind, items, words FROM {s}.totals WHERE items <> 0").fetchall()
        if set(seen) != set(kept):
            faults.append("the items are not as many as the index recorded: index the collection again.")
        with db.cursor(name="verify", binary=True) as rows:  # read piece by piece, not into memory
            rows.execute(
                self.sql("SELECT id, vector, checksum FROM {s}.items LEFT JOIN {s}.vectors USING (serial)")
            )
            pieces = -(-sum(count for _, count, _ in seen) // PIECE)
            read = track(iter(lambda: rows.fetchmany(PIECE), []), "thousands of items", pieces, show_progress)
            for id, vector, expected in (row for piece in read for row in piece):
                if vector is None:
                    faults.append(f"'{id}' has no vector: index it again.")
                elif checksum(vector) != expected:
                    faults.append(f"the vector of '{id}' differs from its checksum: index it again.")
        return faults

    def _copy(self, db: Connection, table: str, types: list[str], rows: Iterable[tuple[Any, ...]]) -> None:
        with db.cursor().copy(self.sql(f"COPY {{s}}.{table} FROM STDIN (FORMAT BINARY)")) as copy:
            copy.set_types(types)
            for row in rows:
                copy.write_row(row)

    def _count(self, db: Connection, changes: Sequence[tuple[str, int, int]]) -> None:
        statement = (
            "INSERT INTO {s}.totals AS t VALUES (%s, %s, %s) ON CONFLICT (kind) "
            "DO UPDATE SET items = t.items + excluded.items, words = t.words + excluded.words"
        )
        for kind in sorted({change[0] for change in changes}):
            items, words = (sum(int(c[n]) for c in changes if c[0] == kind) for n in (1, 2))
            self.run(db, statement, (kind, items, words))

    def _record_columns(self, db: Connection, records: Sequence[Record]) -> None:
        values = (pair for record in records for pair in record.metadata.items())
        held = held_kinds((name, kind_of(value)) for name, value in values)
        upsert = (
            "INSERT INTO {s}.columns VALUES (%s, %s) ON CONFLICT (name) DO UPDATE SET kinds = excluded.kinds"
        )
        for column in grown_columns(self.columns(db), held).items():
            self.run(db, upsert, column)


def check_indexable(dimension: int, precision: str) -> None:
    """Raise when pgvector builds no approximate index of such vectors."""
    limit = GRAPH_LIMITS[precision]
    if dimension > limit:
        raise SettingsError(
            f"pgvector builds no approximate index over {dimension} {precision} dimensions (the limit is {limit}): "
            "use binary codes (--codes), search exactly, or use fewer dimensions."
        )


def _make_extension(db: Connection, label: str) -> None:
    query = "SELECT installed_version FROM pg_available_extensions WHERE name = 'vector'"
    found = db.execute(query).fetchone()
    if found is None:
        raise SettingsError(
            f"the server of {label} has no pgvector: install the extension 'vector' there first."
        )
    if found[0] is None:
        db.execute("CREATE EXTENSION vector")
