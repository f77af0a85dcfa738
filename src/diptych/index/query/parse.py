"""Query expressions: ``"2:red shoe" - "sneaker" + ./shoe.jpg``.

A query is one term, or terms joined by ``+`` and ``-`` that stand alone or before a quote. A term is a text
(in double quotes, or bare words) or an image file (a path that starts with ``./``, ``../``, ``/`` or ``~/``,
or any name of an existing image file; bare words that end as an image file does but name none are refused, in
quotes they are a text). Where terms are joined or quoted, ``2:`` before a term is its weight;
a text that itself starts so is written with a weight of its own, ``"1:3:10 to Yuma"``. Within quotes, ``\\"``
is a quote. A query that begins with “ or „, as phones and word processors write it, is read with straight quotes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from diptych.data.decode.extra_formats import is_image
from diptych.errors import QueryError
from diptych.index.protocol import Query, Term
from diptych.storage import expanded

MAX_LENGTH = 10_000  # characters of a query
MAX_TERMS = 32
_OPERATOR = re.compile(r'(?:(?<=\s)|(?<=")|^)([+-])(?=[\s"]|$)')
_MARK = re.compile(r'[+"-]')  # where a piece may begin
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*+)"', re.DOTALL)
_WEIGHT = re.compile(r"\s*+(\d++\.?+\d*+|\.\d++)\s*+:", re.ASCII)
_STRAIGHT = str.maketrans("“”„", '"""')
_URL = re.compile(r"https?://", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _QueryToken:
    kind: Literal["operator", "quoted", "bare"]
    text: str
    position: int


def parse_query(text: str, *, paths: bool = True) -> Query:
    """Read a query expression; without ``paths`` every term is a text (a service must not open files)."""
    if len(text) > MAX_LENGTH:
        raise QueryError(f"the query has {len(text)} characters, the limit is {MAX_LENGTH}: shorten it.")
    pieces = list(_pieces(text.translate(_STRAIGHT) if text.lstrip().startswith(("“", "„")) else text))
    if not pieces:
        raise QueryError("the query is empty: give a text or the path of an image.", 0)
    if len(pieces) == 1 and pieces[0].kind == "bare":
        return Query((_term(pieces[0], 1.0, paths, weighted=False),))
    terms: list[Term] = []
    sign, operator = 1.0, None
    for number, piece in enumerate(pieces):
        if piece.kind == "operator":
            if operator is not None:
                place = f"'{piece.text}' after '{operator.text}'"
                raise _mistake(piece, f"the query has {place} at {{}}: put a text or an image between them.")
            operator, sign = piece, -1.0 if piece.text == "-" else 1.0
            continue
        if number and operator is None:
            raise _mistake(
                piece, "the query has two terms without + or - between them at {}: join them with one."
            )
        terms.append(_term(piece, sign, paths, weighted=True))
        operator = None
    if operator is not None:
        sentence = f"the query ends after '{operator.text}' at {{}}: put a text or an image behind it."
        raise _mistake(operator, sentence)
    if len(terms) > MAX_TERMS:
        raise QueryError(f"the query has {len(terms)} terms, the limit is {MAX_TERMS}: shorten it.")
    return Query(tuple(terms))


def _mistake(piece: _QueryToken, sentence: str) -> QueryError:
    """An error at a piece of the query; the sentence says its place at ``{}``."""
    return QueryError(sentence.format(f"character {piece.position + 1}"), piece.position)


def _pieces(text: str) -> Iterator[_QueryToken]:
    """The pieces in order, each character looked at a fixed number of times, whatever they are."""
    bare, weight = 0, _weight_end(text, 0)
    at = 0
    for found in _MARK.finditer(text):
        if found.start() < at:  # inside a quote
            continue
        at = found.start()
        quote = text[at] == '"' and (at == 0 or text[at - 1] in ' \t\n+-"' or weight == at)
        if not quote and _OPERATOR.match(text, at) is None:
            continue
        if quote:
            quoted = _QUOTED.match(text, at)
            if quoted is None:
                raise QueryError(
                    f"the query opens a quote at character {at + 1} that never closes: close it.", at
                )
            inner = re.sub(r"\\(.)", r"\1", quoted.group(1), flags=re.DOTALL)
            if weight == at:  # 2:"red shoe" is "2:red shoe"
                yield _QueryToken("quoted", text[bare:at].strip() + inner, bare)
            else:
                yield from _bare(text[bare:at], bare)
                yield _QueryToken("quoted", inner, at)
            at = quoted.end()
        else:
            yield from _bare(text[bare:at], bare)
            yield _QueryToken("operator", text[at], at)
            at += 1
        bare, weight = at, _weight_end(text, at)
    yield from _bare(text[bare:], bare)


def _bare(text: str, position: int) -> Iterator[_QueryToken]:
    stripped = text.strip()
    if stripped:
        yield _QueryToken("bare", stripped, position + len(text) - len(text.lstrip()))


def _weight_end(text: str, start: int) -> int:
    """Where a weight that begins at a place ends, −1 where none does."""
    found = _WEIGHT.match(text, start)
    return -1 if found is None else found.end()


def _term(piece: _QueryToken, sign: float, paths: bool, weighted: bool) -> Term:
    text, weight = piece.text, 1.0
    found = _WEIGHT.match(text) if weighted else None
    if found is not None:
        weight, text = float(found.group(1)), text[found.end() :].strip()
        if weight == 0 or not math.isfinite(weight):
            sentence = f"the weight {found.group(1)} at {{}} of the query has no effect: "
            raise _mistake(piece, f"{sentence}use a number above 0, or leave the term out.")
    if not text.strip():
        raise _mistake(piece, "the query has an empty term at {}: put a text or an image there.")
    if _URL.match(text):
        return Term(text, "url", sign * weight)
    if paths and _is_path(text):
        path = expanded(text)
        if not _is_file(path):
            raise QueryError(
                f"there is no file {text} (character {piece.position + 1} of the query): check the path.",
                piece.position,
            )
        return Term(path, "image", sign * weight)
    if paths and piece.kind == "bare" and is_image(text):
        raise QueryError(
            f"there is no file {text} (character {piece.position + 1} of the query): check the path, or search for "
            f"these letters in double quotes, as in '\"{text}\"'.",
            piece.position,
        )
    if any("\ud800" <= c <= "\udfff" for c in text):  # bytes of a command line that are not UTF-8
        raise _mistake(piece, "the text at {} of the query is not valid Unicode: write it again.")
    return Term(text, "text", sign * weight)


def _is_path(text: str) -> bool:
    if text.startswith(("./", "../", "/", "~/", ".\\", "..\\")) and len(text) > 1:
        return True
    return is_image(text) and _is_file(Path(text))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a text too long, or of characters no file name has
        return False
