"""Objectives as sums of terms: ``info_nce``, ``own + dcl(epsilon=0.2) + 10*csa + dcl(view=concepts)``. Any on any host.

A term has a weight, a name of ``OBJECTIVES`` and arguments, which are those of the class or function that the name
stands for; ``view`` lets a term see another view of both sides than the towers' own. ``own`` is the recipe's loss.
"""

from __future__ import annotations

import difflib
import inspect
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from diptych.errors import SettingsError
from diptych.names import call, fits
from diptych.objectives.combine import On, Sum
from diptych.objectives.objective import Objective
from diptych.registries import OBJECTIVES

OWN = "own"
VIEW = "view"
Value = bool | int | float | str
_TOKEN = re.compile(
    r"\s*(?:(?P<number>-?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)|(?P<name>[A-Za-z_](?:[\w.:-]*\w)?)|(?P<sign>[+*(),=]))"
)
_BRANCHES = {"concepts": "concept"}  # views whose branch has another name in model folders


@dataclass
class LossTerm:
    """One term of an expression; ``at`` is the number of its first character, from 1, and so are its arguments'."""

    name: str
    weight: float
    at: int
    arguments: dict[str, Value] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)


def parse_objective(text: str, own: Objective, settings: Any, **host: Any) -> Objective:
    """The objective an expression names; ``own`` stands for the recipe's, which is returned as it is where alone.

    ``host`` is what a term may ask of the model and the data, by the names of its arguments: ``dim``, ``pairs``.
    """
    members: dict[str, tuple[Objective, float]] = {}
    said = set()
    for term in read_terms(text):
        if (term.name, str(term.arguments)) in said:
            _refuse(text, term.at, f"'{term.name}' stands here a second time: add up its weights.")
        said.add((term.name, str(term.arguments)))
        if term.name == OWN and term.arguments:
            _refuse(
                text, term.at, "own is the recipe's loss and takes no argument: change the recipe's settings."
            )
        made = own if term.name == OWN else _make(text, term, settings, host)
        members[_label(term, members)] = made, term.weight
    if len(members) == 1:
        ((objective, weight),) = members.values()
        if weight == 1:
            return objective
    return Sum(members)


def view_name(written: str) -> str:
    """The view that a person names, as embeddings call it: ``concepts`` is the branch ``concept``."""
    outer, dot, inner = written.partition(".")
    return f"{_BRANCHES.get(outer, outer)}{dot}{inner}"


def read_terms(text: str) -> list[LossTerm]:
    """The terms of an expression, in order; nothing is imported."""
    tokens = list(_tokens(text))
    terms: list[LossTerm] = []
    while tokens:
        if terms:
            _, value, at = tokens.pop(0)
            if value == ")":
                _refuse(text, at, "this bracket closes none: leave it out.")
            if value != "+":
                _refuse(text, at, f"'{value}' cannot stand here: write + between terms.")
        terms.append(_term(text, tokens))
    if not terms:
        _refuse(text, 1, "there is no term: write own, or a sum such as own + 0.5*dcl.")
    return terms


Token = tuple[str, str, int]


def _tokens(text: str) -> Iterator[Token]:
    at = 0
    while text[at:].strip():
        found = _TOKEN.match(text, at)
        if found is None or found.lastgroup is None:
            start = at + len(text[at:]) - len(text[at:].lstrip())
            _refuse(
                text,
                start + 1,
                f"'{text[start]}' cannot be read: write a sum such as own + 0.5*dcl(epsilon=0.2).",
            )
        yield found.lastgroup, found[found.lastgroup], found.start(found.lastgroup) + 1
        at = found.end()


def _term(text: str, tokens: list[Token]) -> LossTerm:
    kind, value, at = _next(text, tokens, "a term is missing: write a name, such as dcl.")
    weight = 1.0
    if kind == "number":
        weight = float(value)
        if weight < 0:
            _refuse(text, at, f"the weight {value} is negative: give 0 or more.")
        _, sign, place = _next(text, tokens, f"nothing follows the weight {value}: write {value}*NAME.")
        if sign != "*":
            _refuse(text, place, f"'{sign}' follows the weight {value}: write {value}*NAME.")
        kind, value, at = _next(text, tokens, "a name is missing behind *: write one, such as dcl.")
    if kind != "name":
        _refuse(text, at, f"'{value}' cannot stand here: write a name, such as dcl.")
    term = LossTerm(value, weight, at)
    if tokens and tokens[0][1] == "(":
        opened = tokens.pop(0)[2]
        _arguments(text, term, tokens, opened)
    return term


def _arguments(text: str, term: LossTerm, tokens: list[Token], opened: int) -> None:
    """Read ``NAME=VALUE, …)`` into a term."""
    missing = f"the bracket at character {opened} is never closed: add ')'."
    kind, name, at = _next(text, tokens, missing)
    while name != ")":
        if kind != "name":
            _refuse(text, at, f"'{name}' cannot stand here: write NAME=VALUE, such as epsilon=0.2.")
        if name in term.arguments:
            _refuse(text, at, f"the argument '{name}' is given twice: leave one out.")
        _, sign, place = _next(text, tokens, missing)
        if sign != "=":
            _refuse(text, place, f"'{sign}' cannot stand here: write {name}=VALUE.")
        kind, value, place = _next(text, tokens, missing)
        if kind == "sign":
            _refuse(text, place, f"'{value}' is no value of {name}: write a number or a word.")
        term.arguments[name], term.places[name] = _value(kind, value), at
        kind, sign, place = _next(text, tokens, missing)
        if sign not in (",", ")"):
            _refuse(
                text,
                place,
                f"'{sign}' cannot stand here: write a comma between arguments, and ')' behind them.",
            )
        kind, name, at = _next(text, tokens, missing) if sign == "," else (kind, sign, place)


def _next(text: str, tokens: list[Token], missing: str) -> Token:
    if not tokens:
        _refuse(text, len(text) + 1, missing)
    return tokens.pop(0)


def _value(kind: str, written: str) -> Value:
    if kind == "number":
        return int(written) if re.fullmatch(r"-?\d+", written) else float(written)
    return {"true": True, "false": False}.get(written.lower(), written)


def _make(text: str, term: LossTerm, settings: Any, host: Mapping[str, Any]) -> Objective:
    """The objective of a term, with the arguments that its class or function has."""
    try:
        target = OBJECTIVES.find(term.name)
        takes = arguments_of(target, host)
        arguments = dict(term.arguments)
        view = arguments.pop(VIEW, None) if VIEW not in takes else None
        for name, value in arguments.items():
            if name not in takes:
                near = difflib.get_close_matches(name, [*takes, VIEW], n=1)
                use = f"did you mean {near[0]}?" if near else f"use {', '.join([*takes, VIEW])}."
                _refuse(text, term.places[name], f"{term.name} has no argument '{name}': {use}")
            if not fits(value, takes[name]):
                wanted = _words(takes[name])
                _refuse(text, term.places[name], f"{name} of {term.name} is {value!r}: give {wanted}.")
        if VIEW in arguments:
            arguments[VIEW] = view_name(str(arguments[VIEW]))
        made = call(target, f"the objective {term.name}", settings, **{**host, **arguments})
    except SettingsError as error:
        if str(error).startswith("--objective"):
            raise
        _refuse(text, term.at, str(error), error)
    if not isinstance(made, Objective):
        _refuse(text, term.at, f"{term.name} makes a {type(made).__name__}: let it make an Objective.")
    return made if view is None else On(made, view_name(str(view)))


def arguments_of(target: Any, host: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a person may give a term, with their types."""
    hints = typing.get_type_hints(
        vars(target).get("__init__", target) if isinstance(target, type) else target
    )
    return {
        name: hints.get(name, Any)
        for name, parameter in inspect.signature(target).parameters.items()
        if name not in ("settings", *host) and parameter.kind is not parameter.VAR_KEYWORD
    }


def _words(hint: Any) -> str:
    """What a type asks for, for people."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return " or ".join(_words(one) for one in typing.get_args(hint) if one is not type(None))
    if typing.get_origin(hint) is Literal:
        return ", ".join(map(str, typing.get_args(hint)))
    return {float: "a number", int: "a whole number", bool: "true or false", str: "a word"}.get(
        hint, "it in Python"
    )


def _label(term: LossTerm, members: Mapping[str, object]) -> str:
    """The name of a term in the log: with its view, and a number where two have the same."""
    view = term.arguments.get(VIEW)
    name = (f"{term.name}_{view}" if view else term.name).replace(".", "_")
    count = 2
    label = name
    while label in members:
        label, count = f"{name}_{count}", count + 1
    return label


def _refuse(text: str, at: int, sentence: str, cause: Exception | None = None) -> NoReturn:
    raise SettingsError(f"--objective '{text}', character {at}: {sentence}") from cause
