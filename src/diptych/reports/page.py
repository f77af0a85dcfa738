"""One HTML file that shows a result: metrics with their protocol, curves, answers both ways, or those of two models."""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

THUMB, LARGE = 72, 100  # pixels of a thumbnail's longer side: in a report, and where two models are compared
COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626")

END = "</main></html>"

STYLE = Path(__file__).with_suffix(".css")


@dataclass(frozen=True)
class Answer:
    """One retrieved item: its text or picture, its score, and whether it is a right answer.

    ``link`` is the address of its file, ``note`` a line below it, such as where it lies.
    """

    text: str
    score: float
    right: bool
    picture: Image.Image | None = None
    link: str = ""
    note: str = ""


@dataclass(frozen=True)
class QueryCard:
    """A query and its answers, best first."""

    text: str
    answers: Sequence[Answer]
    picture: Image.Image | None = None


@dataclass(frozen=True)
class Result:
    """What one model answers, best first, and the rank of its first right answer, counted from 1."""

    name: str
    rank: int
    answers: Sequence[Answer]


@dataclass(frozen=True)
class QueryComparison:
    """A query and what each model answers to it."""

    text: str
    results: Sequence[Result]
    picture: Image.Image | None = None


@dataclass(frozen=True)
class Section:
    """A part of a report: a sentence or more, then a table (heads, rows) and queries, where it has them."""

    title: str
    text: str
    queries: Sequence[QueryCard] = ()
    table: tuple[Sequence[str], Sequence[Sequence[str]]] | None = None


def page(
    title: str,
    introduction: str,
    sections: Sequence[Section],
    commands: str,
    curves: Mapping[str, Sequence[tuple[float, float]]],
    reports: Mapping[str, tuple[Sequence[tuple[str, str, str]], Mapping[str, object]]],
) -> str:
    """The whole file: the sections, commands to go on with, then curves and the tables of each model.

    ``curves`` are one chart each; ``reports`` map a model to its metrics (name, value, interval) and its protocol.
    """
    parts = [f"{_head(title)}<p>{html.escape(introduction)}</p>"]
    for section in sections:
        parts.append(f"<h2>{html.escape(section.title)}</h2><p>{html.escape(section.text)}</p>")
        parts += [_table(*section.table)] if section.table is not None else []
        parts += map(_query, section.queries)
    parts += [
        f"<h2>Search it yourself</h2><pre tabindex='0'>{html.escape(commands)}</pre>",
        "<h2>Training</h2><div class='row'>",
        *(chart(name, points, COLOURS[i % len(COLOURS)]) for i, (name, points) in enumerate(curves.items())),
        "</div>",
    ]
    for name, (metrics, card) in reports.items():
        parts += [
            f"<h2>Metrics and protocol: {html.escape(name)}</h2>",
            _table(("metric", "value", "95 % interval"), metrics),
            _table(("field", "value"), [(field, str(value)) for field, value in card.items()]),
        ]
    return "\n".join([*parts, END])


def gallery_page(title: str, query: QueryCard) -> str:
    """One query's answers as a file of their own; its picture or text, where it has one, above them."""
    asked = _picture(query.picture, LARGE) + html.escape(query.text)
    asked = f"<p>{asked}</p>" if asked else ""
    answers = "".join(_answer(answer, LARGE) for answer in query.answers)
    return f"{_head(title)}{asked}<div class='row gallery'>{answers}</div>{END}"


def comparison_page(
    title: str,
    introduction: str,
    table: tuple[Sequence[str], Sequence[Sequence[str]]],
    groups: Mapping[str, tuple[str, Sequence[QueryCard | QueryComparison]]],
) -> str:
    """A ``table`` (heads, rows), then one section with its sentence for each of ``groups`` of queries."""
    parts = [f"{_head(title)}<p>{html.escape(introduction)}</p>", _table(*table)]
    for name, (sentence, queries) in groups.items():
        parts.append(
            f"<h2>{html.escape(name)}</h2>" + (f"<p>{html.escape(sentence)}</p>" if sentence else "")
        )
        parts += [_query(one) if isinstance(one, QueryCard) else _comparison(one) for one in queries]
    return "\n".join([*parts, END])


def chart(name: str, points: Sequence[tuple[float, float]], colour: str) -> str:
    """A line chart as inline SVG with its least and greatest values; logarithmic where they differ a hundredfold."""
    width, height, left, bottom = 420, 220, 52, 28
    if len(points) < 2:
        return f"<p>{html.escape(name)}: too few points for a curve.</p>"
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    low, high = min(ys), max(ys)
    logarithmic = low > 0 and high > 100 * low
    scale = math.log if logarithmic else float
    span_x, span_y = (max(xs) - min(xs)) or 1.0, (scale(high) - scale(low)) or 1.0

    def place(x: float, y: float) -> str:
        across = left + (x - min(xs)) / span_x * (width - left - 8)
        down = 8 + (scale(high) - scale(y)) / span_y * (height - bottom - 8)
        return f"{across:.1f},{down:.1f}"

    line = " ".join(place(x, y) for x, y in points)
    label = "font-size='12' fill='currentColor'"
    title = html.escape(name + (", logarithmic" if logarithmic else ""))
    return (
        f"<figure><svg viewBox='0 0 {width} {height}' width='{width}' role='img' aria-label='{title}'>"
        f"<path d='M{left} 4V{height - bottom}H{width - 4}' fill='none' stroke='currentColor' opacity='.4'/>"
        f"<polyline points='{line}' fill='none' stroke='{colour}' stroke-width='2'/>"
        f"<text x='{left - 6}' y='16' text-anchor='end' {label}>{high:.4g}</text>"
        f"<text x='{left - 6}' y='{height - bottom}' text-anchor='end' {label}>{low:.4g}</text>"
        f"<text x='{left}' y='{height - 8}' {label}>{min(xs):g}</text>"
        f"<text x='{width - 4}' y='{height - 8}' text-anchor='end' {label}>{max(xs):g}</text></svg>"
        f"<figcaption>{title}</figcaption></figure>"
    )


def _head(title: str) -> str:
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{html.escape(title)}</title>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<style>{STYLE.read_text('utf-8')}</style><main><h1>{html.escape(title)}</h1>"
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th scope='col'>{html.escape(h)}</th>" if h else "<td></td>" for h in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<div class='wide' tabindex='0'><table><tr>{head}</tr>{body}</table></div>"


def _query(query: QueryCard) -> str:
    answers = "".join(map(_answer, query.answers))
    asked = _picture(query.picture) + html.escape(query.text)
    return f"<div class='row'><div class='query'>{asked}</div>{answers}</div>"


def _comparison(comparison: QueryComparison) -> str:
    best = min(result.rank for result in comparison.results)
    rows = ""
    for result in comparison.results:
        rank = f"right at rank {result.rank}"
        label = html.escape(result.name) + "<br>" + (f"<b>{rank}</b>" if result.rank == best else rank)
        answers = "".join(_answer(answer, LARGE) for answer in result.answers)
        rows += f"<div class='row'><div class='label'>{label}</div>{answers}</div>"
    asked = _picture(comparison.picture, LARGE) + html.escape(comparison.text)
    return f"<div class='pair'><div class='query'>{asked}</div><div class='answers'>{rows}</div></div>"


def _answer(answer: Answer, side: int = THUMB) -> str:
    kind = " ".join((["right"] if answer.right else []) + (["text"] if answer.picture is None else []))
    text, link = html.escape(answer.text), html.escape(answer.link, quote=True)
    caption = f"<figcaption title='{text}'>{'✓ ' if answer.right else ''}{text}</figcaption>"
    inner = _picture(answer.picture, side) + caption
    inner = f"<a href='{link}'>{inner}</a>" if link else inner
    note = f"<span class='score note'>{html.escape(answer.note)}</span>" if answer.note else ""
    return f"<figure class='{kind}'>{inner}<span class='score'>{answer.score:.3f}</span>{note}</figure>"


def _picture(picture: Image.Image | None, side: int = THUMB) -> str:
    if picture is None:
        return ""
    small = picture.convert("RGB")
    small.thumbnail((side, side))
    buffer = io.BytesIO()
    small.save(buffer, "WEBP", quality=80)
    data = base64.b64encode(buffer.getvalue()).decode()
    return f"<img alt='' width='{small.width}' height='{small.height}' src='data:image/webp;base64,{data}'>"
