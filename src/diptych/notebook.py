"""Small pieces of HTML for notebooks: a table, a row of pictures. Everything that comes in is escaped."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape

SIDE = 128  # longest side of a picture, in pixels
_CARD = "display:inline-block;width:136px;margin:4px;vertical-align:top;font-size:12px;overflow-wrap:anywhere"


def table(rows: Sequence[Sequence[str]]) -> str:
    """A table whose first row is the head."""
    lines = []
    for number, row in enumerate(rows):
        cell = "td" if number else "th"
        lines.append("<tr>" + "".join(f"<{cell}>{escape(text)}</{cell}>" for text in row) + "</tr>")
    return f"<table>{''.join(lines)}</table>"


def notes(sentences: Iterable[str]) -> str:
    """Sentences, each in a line of its own."""
    return "".join(f"<div>{escape(sentence)}</div>" for sentence in sentences if sentence)


def gallery(cards: Iterable[tuple[bytes | None, str, str]], note: str = "") -> str:
    """Pictures side by side, each (JPEG or None, head, words)."""
    parts = []
    for jpeg, head, words in cards:
        picture = ""
        if jpeg is not None:
            content = base64.b64encode(jpeg).decode()
            source = f"data:image/jpeg;base64,{content}"
            picture = f'<img alt="{escape(words)}" src="{source}" style="max-width:{SIDE}px"><br>'
        parts.append(f'<div style="{_CARD}">{picture}<b>{escape(head)}</b><br>{escape(words)}</div>')
    return f"<div>{''.join(parts) or 'nothing found'}</div>" + notes([note])
