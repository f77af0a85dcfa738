"""One HTML file that shows a result: metrics with their protocol, curves, answers both ways, or those of two models."""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from PIL import Image

THUMB, LARGE = 72, 100  # pixels of a thumbnail's longer side: in a report, and where two models are compared
COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626")

END = "</main></html>"

STYLE = """
:root { color-scheme: light dark; --line: #8884; --good: light-dark(#047857, #34d399); }
html { background: Canvas; color: CanvasText; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
h1 { margin-bottom: 0; } h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); }
table { border-collapse: collapse; margin: 1rem 0; } td, th { padding: .25rem .75rem; text-align: left; }
td { border-top: 1px solid var(--line); font-variant-numeric: tabular-nums; }
.row { display: flex; flex-wrap: wrap; gap: .5rem; align-items: stretch; margin: .75rem 0; }
.query { width: 11rem; font-weight: 600; } .query img { display: block; }
figure { margin: 0; padding: .3rem; border: 2px solid var(--line); border-radius: .4rem; text-align: center; }
figure.right { border-color: var(--good); box-shadow: 0 0 0 2px var(--good); }
figcaption, .score { font-size: .75rem; opacity: .8; }
.query ~ figure { width: 8.2rem; box-sizing: border-box; } /* six beside the query */
.gallery figure { width: 8.2rem; box-sizing: border-box; }
img { background: #fff; border-radius: .2rem; } svg { max-width: 100%; height: auto; }
.pair { display: flex; flex-wrap: wrap; gap: 0 1rem; border-top: 1px solid var(--line); padding: .5rem 0; }
.pair > .query { width: 9rem; margin: .75rem 0; font-size: .9rem; overflow-wrap: anywhere; }
.pair > .answers { flex: 1 1 20rem; }
.pair figure { width: 7.4rem; box-sizing: border-box; } .pair .right { font-weight: 600; }
.label { width: 8.6rem; font-size: .85rem; overflow-wrap: anywhere; } .label b { color: var(--good); }
@media (max-width: 44rem) { .label { width: 100%; } }
.pair figcaption { display: -webkit-box; -webkit-box-orient: vertical; -webkit-line-clamp: 3; overflow: hidden; }
.pair figure.text figcaption { -webkit-line-clamp: 7; }
.wide { overflow-x: auto; } td, figcaption, .note { overflow-wrap: anywhere; }
figure a { color: inherit; text-decoration: none; } .note { display: block; }
figure a:hover figcaption { text-decoration: underline; }
@media (max-width: 44rem) { body { margin: 1rem auto; } td, th { padding: .25rem .4rem; font-size: .9rem; }
  .query { width: 100%; } .query ~ figure, .gallery figure { width: calc(33.3% - .4rem); max-width: none; }
  figure { max-width: 100%; box-sizing: border-box; } figure svg { width: 100%; }
  figure img { max-width: 100%; height: auto; } }
pre { background: #8881; padding: .75rem; border-radius: .4rem; overflow-x: auto; }
"""


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
        f"<style>{STYLE}</style><main><h1>{html.escape(title)}</h1>"
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
