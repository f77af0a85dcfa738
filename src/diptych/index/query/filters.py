"""Metadata filters such as ``price < 50 and color in ("red", "blue")``, parsed, never run as text.

Grammar (words in any case)::

    filter  = both ("or" both)*
    both    = one ("and" one)*
    one     = "not" one | "(" filter ")" | test
    test    = column ("=" | "!=" | "<" | "<=" | ">" | ">=") value
            | column ["not"] "in" "(" value ("," value)* ")"
            | column ["not"] "contains" value          part of a text, or an element of a list
            | column ["not"] "like" text               % any characters, _ one character
            | column "is" ["not"] "null"
    value   = number | text in quotes | true | false | null
            | a date: 2024-06, 2024-06-01, 2024-06-01T12:30        the same as in quotes
    column  = a name, or `any name` in back quotes

Every test is true or false. A missing value equals nothing, is neither below nor above anything, and so
satisfies ``!=`` and ``not``. Numbers compare with numbers, texts with texts; ``contains`` and ``like`` ignore
case, ``=`` does not.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from operator import ge, gt, le, lt
from typing import Any, NoReturn

from diptych.errors import QueryError
from diptych.index.protocol import kind_of

MAX_LENGTH = 10_000  # characters of a filter
MAX_DIGITS = 300  # longest number: longer ones do not fit a float64
MAX_PATTERN = 256  # characters of a pattern: what a text costs grows with them
MAX_DEPTH = 50  # nested parentheses and nots: keeps the recursion far from Python's limit
NAMED, SHOWN = 100, 100  # columns an error names, and the characters it shows of each
ITEM_COLUMNS = ("id", "path", "text", "image_id")  # columns every item has, beside its metadata

ORDERS: dict[str, Callable[[Any, Any], Any]] = {"<": lt, "<=": le, ">": gt, ">=": ge}

Value = str | int | float | bool
Predicate = Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Condition:
    """One test of one column; ``operator`` is = < <= > >= in contains like or null."""

    column: str
    operator: str
    values: tuple[Value, ...] = ()
    position: int = field(default=0, compare=False, repr=False)

    def predicate(self) -> Predicate:
        """The test as a function of one value."""
        if self.operator == "null":
            return lambda value: value is None
        if self.operator == "like":
            fits = like_test(str(self.values[0]).lower())
            return lambda value: isinstance(value, str) and fits(value.lower())
        if self.operator == "contains":
            wanted = self.values[0]
            return lambda value: _contains(value, wanted)
        if self.operator in ("=", "in"):
            allowed = {(kind_of(v), v) for v in self.values}
            return lambda value: not isinstance(value, list | tuple) and (kind_of(value), value) in allowed
        compare, limit, kind = ORDERS[self.operator], self.values[0], kind_of(self.values[0])
        return lambda value: kind_of(value) == kind != "boolean" and bool(compare(value, limit))


@dataclass(frozen=True, slots=True)
class Not:
    """True where ``one`` is false."""

    one: Filter


@dataclass(frozen=True, slots=True)
class And:
    """True where all are."""

    all: tuple[Filter, ...]


@dataclass(frozen=True, slots=True)
class Or:
    """True where any is."""

    any: tuple[Filter, ...]


Filter = Condition | Not | And | Or


def parse_filter(text: str | Filter, columns: Mapping[str, Sequence[str]] | None = None) -> Filter:
    """Read a filter; with ``columns`` (name → kinds of value it holds) names and kinds are checked too.

    One that was read before is taken as it is.
    """
    if not isinstance(text, str):
        return text
    if len(text) > MAX_LENGTH:
        raise QueryError(f"the filter has {len(text)} characters, the limit is {MAX_LENGTH}: shorten it.")
    if not text.strip():
        raise QueryError(
            'the filter is empty: leave it out or write one such as price < 50 and color = "red".', 0
        )
    tree = _FilterParser(text).parse()
    if columns is not None:
        check_columns(tree, columns)
    return tree


def check_columns(tree: Filter, columns: Mapping[str, Sequence[str]]) -> None:
    """Raise where a filter names an unknown column or compares one with a value of a kind it never holds."""
    for test in conditions(tree):
        if test.column not in columns and test.column not in ITEM_COLUMNS:
            known = sorted({*columns, *ITEM_COLUMNS})
            close = difflib.get_close_matches(test.column[:SHOWN], known[:NAMED], n=1)
            hint = f"did you mean '{close[0]}'?" if close else "check its spelling:"
            named = [name[:SHOWN] for name in known if name in columns]
            listed = ", ".join(named[:NAMED]) + (", …" if len(named) > NAMED else "") or "none with metadata"
            raise QueryError(
                f"unknown column '{test.column[:SHOWN]}' at character {test.position + 1} of the filter: {hint} "
                f"the columns are {listed} (and {', '.join(ITEM_COLUMNS)}).",
                test.position,
            )
        held = set(columns.get(test.column, ["text"]))
        for value in test.values:
            kind = kind_of(value)
            fits = kind in held or (test.operator == "contains" and "list" in held)
            if not fits and held:
                if "list" in held:
                    advice = f"write {_element_test(test.column, value)}"
                elif kind == "text" and "number" in held:
                    advice = "take the value out of its quotes"
                elif kind == "number" and "text" in held:
                    advice = "put the value in quotes"
                else:
                    advice = "compare it with a value of that kind"
                raise QueryError(
                    f"column '{test.column}' at character {test.position + 1} of the filter holds "
                    f"{' and '.join(sorted(held))} values, not {kind}: {advice}.",
                    test.position,
                )


def _element_test(column: str, value: Value) -> str:
    """A test for an element of a list, as one writes it."""
    named = column if _COLUMN.fullmatch(column) and column.lower() not in _WORDS else f"`{column}`"
    quoted = re.sub(r'(["\\])', r"\\\1", str(value))
    return f"{named} contains " + (f'"{quoted}"' if isinstance(value, str) else str(value).lower())


def conditions(tree: Filter) -> Iterator[Condition]:
    """Every condition of a filter, in reading order."""
    if isinstance(tree, Condition):
        yield tree
    elif isinstance(tree, Not):
        yield from conditions(tree.one)
    else:
        for part in tree.all if isinstance(tree, And) else tree.any:
            yield from conditions(part)


def matches(tree: Filter, row: Mapping[str, Any]) -> bool:
    """Whether one row (column → value) passes: the meaning of a filter, which every engine must reproduce."""
    if isinstance(tree, Condition):
        return tree.predicate()(row.get(tree.column))
    if isinstance(tree, Not):
        return not matches(tree.one, row)
    if isinstance(tree, And):
        return all(matches(part, row) for part in tree.all)
    return any(matches(part, row) for part in tree.any)


def like_test(pattern: str) -> Callable[[str], bool]:
    """SQL's LIKE as a test of whole texts: ``%`` is any characters, ``_`` one. Case matters: fold both sides before.

    A piece between two ``%`` is looked for at the first place where it fits and never again (an atomic group): no
    pattern makes the search go back over what it has passed.
    """
    head, *rest = ("".join("." if c == "_" else re.escape(c) for c in piece) for piece in pattern.split("%"))
    middle = "".join(f"(?>.*?{piece})" for piece in rest[:-1])
    whole = re.compile(head + middle + "".join(f".*{tail}" for tail in rest[-1:]), re.DOTALL)
    return lambda text: whole.fullmatch(text) is not None


def _contains(value: Any, wanted: Value) -> bool:
    if isinstance(value, str):
        return isinstance(wanted, str) and wanted.lower() in value.lower()
    return isinstance(value, list | tuple) and any(
        kind_of(v) == kind_of(wanted) and v == wanted for v in value
    )


_TOKEN = re.compile(
    r"""(?P<space>\s+)
      | (?P<date>\d{4}-\d{2}(?:-\d{2}(?:T\d{2}:\d{2}(?::\d{2})?)?)?(?![\w.:\-]))
      | (?P<number>[+-]?(?:\d++\.?+\d*+|\.\d++)(?:[eE][+-]?\d++)?+(?![\w.]))
      | (?P<text>"(?:[^"\\]|\\.)*+"|'(?:[^'\\]|\\.)*+')
      | (?P<quoted>`[^`]+`)
      | (?P<name>[^\W\d][\w.\-]*)
      | (?P<operator><=|>=|!=|<>|==|=|<|>)
      | (?P<mark>[(),])""",
    re.VERBOSE | re.DOTALL,
)
_COLUMN = re.compile(r"[^\W\d][\w.\-]*")  # that needs no back quotes
_WORDS = {"and", "or", "not", "in", "like", "contains", "is", "null", "true", "false"}


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    position: int

    @property
    def word(self) -> str:
        return self.text.lower() if self.kind == "name" else ""


class _FilterParser:
    """Recursive descent over the grammar at the top of this file."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = list(_tokens(text))
        self.at = 0
        self.depth = 0

    def parse(self) -> Filter:
        tree = self.either()
        token = self.peek()
        if token.kind != "end":
            self.fail(token, "'and', 'or' or the end of the filter")
        return tree

    def either(self) -> Filter:
        parts = [self.both()]
        while self.take_word("or"):
            parts.append(self.both())
        return parts[0] if len(parts) == 1 else Or(tuple(parts))

    def both(self) -> Filter:
        parts = [self.one()]
        while self.take_word("and"):
            parts.append(self.one())
        return parts[0] if len(parts) == 1 else And(tuple(parts))

    def one(self) -> Filter:
        token = self.peek()
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise QueryError(f"the filter nests deeper than {MAX_DEPTH} levels: simplify it.", token.position)
        try:
            if self.take_word("not"):
                return Not(self.one())
            if self.take("mark", "("):
                tree = self.either()
                if not self.take("mark", ")"):
                    self.fail(self.peek(), f"')' for the '(' at character {token.position + 1}")
                return tree
            return self.test()
        finally:
            self.depth -= 1

    def test(self) -> Filter:
        name = self.next()
        if name.kind == "quoted":
            column = name.text[1:-1]
        elif name.kind == "name" and name.word not in _WORDS:
            column = name.text
        else:
            self.fail(name, "the name of a column")
        if self.take_word("is"):
            negative = self.take_word("not")
            if not self.take_word("null"):
                self.fail(self.peek(), "'null'")
            return _negated(Condition(column, "null", (), name.position), negative)
        negative = self.take_word("not")
        token = self.next()
        if token.word == "in":
            return _negated(Condition(column, "in", self.value_list(), name.position), negative)
        if token.word in ("like", "contains"):
            place = self.peek()
            value = self.value()
            if value is None or (token.word == "like" and not isinstance(value, str)):
                self.fail(place, "a text in quotes")
            if token.word == "like" and len(str(value)) > MAX_PATTERN:
                self.fail(place, f"a pattern of at most {MAX_PATTERN} characters")
            return _negated(Condition(column, token.word, (value,), name.position), negative)
        if negative or token.kind != "operator":
            comparison = "a comparison such as =, <, in or contains"
            if token.kind == "name":
                comparison += " (a column name with spaces needs back quotes)"
            self.fail(token, "'in', 'like' or 'contains'" if negative else comparison)
        return self.comparison(column, token, name.position)

    def comparison(self, column: str, token: _Token, position: int) -> Filter:
        operator = {"==": "=", "<>": "!="}.get(token.text, token.text)
        place = self.peek()
        value = self.value()
        negative = operator == "!="
        if value is None:
            if operator not in ("=", "!="):
                self.fail(place, "a value (only = and != go with null)")
            return _negated(Condition(column, "null", (), position), negative)
        if isinstance(value, bool) and operator not in ("=", "!="):
            self.fail(place, "a number or a text (true and false have no order)")
        return _negated(Condition(column, "=" if negative else operator, (value,), position), negative)

    def value_list(self) -> tuple[Value, ...]:
        if not self.take("mark", "("):
            self.fail(self.peek(), "'(' and a list of values")
        values: list[Value] = []
        while True:
            place = self.peek()
            value = self.value()
            if value is None:
                self.fail(place, "a value (write 'is null' for missing ones)")
            values.append(value)
            if self.take("mark", ")"):
                return tuple(values)
            if not self.take("mark", ","):
                self.fail(self.peek(), "',' or ')'")

    def value(self) -> Value | None:
        token = self.next()
        if token.kind == "number":
            if len(token.text) > MAX_DIGITS:
                self.fail(token, f"a number of at most {MAX_DIGITS} characters")
            return float(token.text) if re.search(r"[.eE]", token.text) else int(token.text)
        if token.kind == "date":
            try:
                datetime.fromisoformat(token.text if len(token.text) > 7 else f"{token.text}-01")
            except ValueError:
                self.fail(token, "a date such as 2024-06-01")
            return token.text
        if token.kind == "text":
            return re.sub(r"\\(.)", r"\1", token.text[1:-1], flags=re.DOTALL)
        if token.word in ("true", "false"):
            return token.word == "true"
        if token.word == "null":
            return None
        if token.kind in ("name", "quoted"):
            self.fail(token, f'a value (a text needs quotes: "{token.text}")')
        return self.fail(token, "a value: a number, a text in quotes, true, false or null")

    def peek(self) -> _Token:
        return self.tokens[self.at]

    def next(self) -> _Token:
        token = self.tokens[self.at]
        if token.kind != "end":
            self.at += 1
        return token

    def take(self, kind: str, text: str) -> bool:
        token = self.peek()
        if token.kind == kind and token.text == text:
            self.at += 1
            return True
        return False

    def take_word(self, word: str) -> bool:
        if self.peek().word == word:
            self.at += 1
            return True
        return False

    def fail(self, token: _Token, expected: str) -> NoReturn:
        found = "it ends there" if token.kind == "end" else f"found {token.text[:40]!r}"
        raise QueryError(
            f"the filter has a mistake at character {token.position + 1}: {found}, expected {expected}.",
            token.position,
        )


def _tokens(text: str) -> Iterator[_Token]:
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            if text[at] in "\"'`":
                raise QueryError(
                    f"the filter opens a quote at character {at + 1} that never closes: close it.", at
                )
            raise QueryError(
                f"the filter has a mistake at character {at + 1}: {text[at]!r} has no meaning there.", at
            )
        if match.lastgroup != "space":
            yield _Token(str(match.lastgroup), match.group(), at)
        at = match.end()
    yield _Token("end", "", len(text))


def _negated(condition: Condition, negative: bool) -> Filter:
    return Not(condition) if negative else condition
