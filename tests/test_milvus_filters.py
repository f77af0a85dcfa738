"""Values as digits that Milvus compares, and its URLs: what needs no server."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.errors import SettingsError
from diptych.index.engines.milvus.address import read_address
from diptych.index.engines.milvus.pushdown import (
    EVERY,
    TEXT_BYTES,
    Parts,
    cells_of,
    digest_of,
    is_long,
    ordered_number,
    ordered_text,
    select,
)
from diptych.index.engines.opening import without_password
from diptych.index.protocol import Item
from diptych.index.query.filters import parse_filter

finite = st.floats(allow_nan=False, allow_infinity=False)
numbers = st.one_of(finite, st.integers(), st.integers(-(10**300), 10**300))


@given(numbers, numbers)
def test_numbers_keep_their_order_as_digits(a: float, b: float) -> None:
    assert (ordered_number(a) < ordered_number(b)) == (a < b)
    assert (ordered_number(a) == ordered_number(b)) == (a == b)
    assert (digest_of(a) == digest_of(b)) == (a == b)


def test_numbers_next_to_each_other_keep_their_order() -> None:
    values: list[float] = []
    for start in (5e-324, 2.0**-1022, 0.1, 1.0, 2.0**53, 1e23, 1.7e308):
        values += [start, math.nextafter(start, math.inf), int(start) if start > 1 else 0]
    values += [2**53 + 1, 2**60, 2**60 + 1, 10**40, 10**40 + 1, 0.0, -0.0]
    values += [-one for one in values]
    assert sorted(values, key=ordered_number) == sorted(values)
    assert all(re.fullmatch("[0-9a-g]+", ordered_number(one)) for one in values)


@given(st.text(), st.text(max_size=20))
def test_texts_keep_their_order_as_digits(a: str, b: str) -> None:
    if not is_long(b):  # an order that is asked for names a short text; what it is compared with may be long
        assert (ordered_text(a) < ordered_text(b)) == (a < b)
        assert (ordered_text(a) > ordered_text(b)) == (a > b)
    assert re.fullmatch("[0-9a-g]*", ordered_text(a))


def test_a_long_text_is_above_its_beginning() -> None:
    start = "é" * (TEXT_BYTES // 2)
    assert not is_long(start)
    assert ordered_text(start) < ordered_text(start + "a") < ordered_text("ê")


@given(st.text(), st.text(), st.text())
def test_nothing_but_digits_reaches_a_filter(column: str, value: str, id: str) -> None:
    cells = cells_of(Item(id, text=value, path=value), {column: value, "list": [value, 5, True]})
    assert re.fullmatch(r"[\w{}\[\]', :]*", str(cells))
    quoted = '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    tree = parse_filter(f"id = {quoted} or list contains {quoted} or path < {quoted} or text != {quoted}")
    found = select("image", tree, ())
    assert re.fullmatch(r'[\w()\[\]", =<>]*', found.expression)
    assert all(re.fullmatch("[0-9a-z]*", text) for text in found.expression.split('"')[1::2])


def test_what_the_server_cannot_decide_is_asked_loosely() -> None:
    def expression(text: str) -> str:
        return select(None, parse_filter(text), ()).expression

    assert expression("a contains 'x'") == f"({EVERY})"
    assert "serial < 0" in expression("not (a contains 'x')")  # not (nothing) is everything
    assert expression("a contains 'x' and b = 1").count('cells["e') == 1
    for text in (
        "a = 1",
        "a is null",
        "a in (1, 'x')",
        "a contains 5",
        "a < 'x'",
        "not (a >= 2.5)",
        "a < 1e999",
    ):
        assert select(None, parse_filter(text), ()).is_exact, text
    for text in ("a like 'x%'", "a contains 'x'", f"a < '{'x' * 200}'"):
        assert not select(None, parse_filter(text), ()).is_exact, text


def test_partitions_are_chosen_by_what_a_filter_names() -> None:
    parts = Parts(16, "shop")
    assert parts.of_filter(parse_filter("shop = 'a' and price < 5")) == (parts.of({"shop": "a"}),)
    assert set(parts.of_filter(parse_filter("shop in ('a', 'b', 5)"))) == {
        parts.of({"shop": v}) for v in ("a", "b", 5.0)
    }
    for text in ("shop != 'a'", "shop = 'a' or price < 5", "not (shop = 'a')", "price < 5"):
        assert parts.of_filter(parse_filter(text)) == ()
    assert parts.of({}) == parts.of({"shop": ["a"]}) == "part_0"
    assert Parts().of({"shop": "a"}) == ""


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        (
            "milvus://db",
            {"host": "db", "port": 19530, "index": "diptych", "consistency": "Strong", "graph": None},
        ),
        ("milvus://me:p%40ss@db:1/photos", {"user": "me", "password": "p@ss", "port": 1, "index": "photos"}),
        ("milvus://me:p#a?s@[::1]:7/x", {"host": "[::1]", "password": "p#a?s"}),
        (
            "milvus://db/x?consistency=bounded&index=hnsw&replicas=3",
            {"consistency": "Bounded", "replicas": 3},
        ),
        ("milvus://db/x?partitions=64&partition_by=the+shop", {"partitions": 64, "partition_by": "the shop"}),
    ],
)
def test_urls(url: str, expected: dict[str, Any]) -> None:
    address = read_address(url)
    assert {name: getattr(address, name) for name in expected} == expected
    assert "p@ss" not in address.label
    assert not address.password or address.password not in without_password(url)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("milvus://me:pa/ss@db/x", "milvus://user:password@host:port/name"),
        ("milvus://me:pa@ss@db/x", "user:password"),
        ("milvus://db:99999/x", "user:password"),
        ("milvus:///x", "user:password"),
        ("milvus://db/a;drop", "100"),
        ("milvus://db/1a", "100"),
        ("milvus://db/x?colour=red", "colour"),
        ("milvus://db/x?consistency=always", "always"),
        ("milvus://db/x?index=ivf", "'ivf'"),
        ("milvus://db/x?replicas=0", r"\b1\b"),
        ("milvus://db/x?replicas=two", r"\b1\b"),
        ("milvus://db/x?partitions=8", "partition_by"),
        ("milvus://db/x?partitions=9999&partition_by=a", r"\b1\b.*1024"),
        ("milvus://db/x?partitions=8&partition_by=path", "path"),
    ],
)
def test_urls_that_cannot_be_read(url: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        read_address(url)
    assert "@ss" not in str(caught.value)
    assert "/ss" not in str(caught.value)
