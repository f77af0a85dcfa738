"""The address of an index in Milvus, read without Milvus's client.

The URL of an index is ``milvus://user:password@host:port/name?option=value&…``.

================  ==================================================================================================
``consistency``   what a reader sees: ``strong`` (default: every change that has returned), ``session`` (its own),
                  ``bounded`` (all but those of the last seconds), ``eventually``
``index``         of the vectors: ``flat`` (default: exact), ``hnsw`` or ``diskann`` (approximate)
``replicas``      copies of the index in the memory of as many query nodes (default 1)
``partitions``    parts the rows are divided into by the values of ``partition_by``, a metadata column: a search whose
                  filter asks for some of its values reads their parts alone
================  ==================================================================================================
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import parse_qsl, unquote

from diptych.errors import SettingsError
from diptych.index.query.filters import ITEM_COLUMNS

DEFAULT_PORT, DEFAULT_INDEX = 19530, "diptych"
CONSISTENCY = ("strong", "session", "bounded", "eventually")
Graph = Literal["flat", "hnsw", "diskann"]
GRAPHS: tuple[Graph, ...] = ("flat", "hnsw", "diskann")
MOST_PARTITIONS, MOST_REPLICAS = 1_024, 1_000  # the first is Milvus's limit since 2.4
_URL = re.compile(
    r"milvus://(?:(?P<user>[^:@/]*)(?::(?P<password>[^@/]*))?@)?"
    r"(?P<host>\[[0-9a-fA-F:.]+\]|[^:@/?#\[\]\s]+)(?::(?P<port>\d{1,5}))?(?:/(?P<name>[^/?#]*))?(?:\?(?P<options>.*))?"
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")


@dataclass(frozen=True, slots=True)
class Address:
    """Where an index lies and how it is made and read; ``label`` names it without user and password."""

    host: str
    port: int
    index: str
    user: str
    password: str
    consistency: str
    graph: Graph | None
    replicas: int
    partitions: int
    partition_by: str

    @property
    def label(self) -> str:
        return f"milvus://{self.host}:{self.port}/{self.index}"


def read_address(url: str) -> Address:
    """The parts of a URL; raises for one that cannot be read, without repeating a password."""
    found = _URL.fullmatch(url)
    if found is None or int(found["port"] or DEFAULT_PORT) > 65_535:
        raise SettingsError(
            "the Milvus URL cannot be read: write milvus://user:password@host:port/name, and what is special in a "
            "password as its code (/ as %2F, @ as %40, % as %25)."
        )
    index = unquote(found["name"] or DEFAULT_INDEX)
    if not _NAME.fullmatch(index):
        raise SettingsError(
            f"{index!r} in the Milvus URL is not a name for an index: use letters, digits and _, at most 100, and no "
            "digit at its beginning."
        )
    options = _options(found["options"] or "")
    partitions = _number(options, "partitions", 0, MOST_PARTITIONS)
    partition_by = options.get("partition_by", "")
    if bool(partitions) != bool(partition_by):
        raise SettingsError(
            "partitions= and partition_by= go together in a Milvus URL: write, for instance, "
            "partitions=64&partition_by=shop."
        )
    if partition_by in ITEM_COLUMNS:
        raise SettingsError(
            f"partition_by={partition_by!r} in the Milvus URL is not a metadata column: name one that filters read."
        )
    return Address(
        host=found["host"],
        port=int(found["port"] or DEFAULT_PORT),
        index=index,
        user=unquote(found["user"] or ""),
        password=unquote(found["password"] or ""),
        consistency=_choice(options, "consistency", CONSISTENCY, "strong").capitalize(),
        graph=_choice(options, "index", GRAPHS, "") or None,  # type: ignore[arg-type]
        replicas=_number(options, "replicas", 1, MOST_REPLICAS),
        partitions=partitions,
        partition_by=partition_by,
    )


def _options(text: str) -> dict[str, str]:
    known = ("consistency", "index", "replicas", "partitions", "partition_by")
    options = dict(parse_qsl(text, keep_blank_values=True))
    unknown = next((name for name in options if name not in known), None)
    if unknown is not None:
        raise SettingsError(
            f"a Milvus URL has no option {unknown[:40]!r}: the options are {', '.join(known)}."
        )
    return options


def _choice(options: dict[str, str], name: str, known: tuple[str, ...], usual: str) -> str:
    value = options.get(name, usual)
    if value != usual and value not in known:
        raise SettingsError(f"{name}={value[:40]!r} in the Milvus URL is unknown: choose {', '.join(known)}.")
    return value


def _number(options: dict[str, str], name: str, least: int, most: int) -> int:
    value = options.get(name, str(least))
    if not re.fullmatch(r"\d{1,9}", value) or not least <= int(value) <= most:
        raise SettingsError(
            f"{name}={value[:40]!r} in the Milvus URL is out of range: give a number from {max(1, least)} to {most}."
        )
    return int(value)
