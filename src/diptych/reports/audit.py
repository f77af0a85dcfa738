"""The page of an audit: pairs worst first, judged with the keyboard, saved as ``corrections.csv``. One plain file."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from diptych.data.corrections import COLUMNS
from diptych.errors import DataError

PAGE = Path(__file__).with_suffix(".html")
FILLED = {"TITLE": "[^<]*", "SUMMARY": "(?:<li>[^<]*</li>)*", "CONTENT": "[^<]*"}
SIDE = 320  # pixels of a picture's longer side


@dataclass(frozen=True)
class Question:
    """A pair for a person to judge: one of the data, or with ``matches`` a text with another image."""

    image_id: str
    text_id: str
    text: str
    others: Sequence[str]  # the image's own (other) texts
    why: str
    matches: bool = False
    picture: bytes | None = None  # a JPEG


def audit_page(title: str, summary: Sequence[str], questions: Sequence[Question], data_hash: str) -> str:
    """The whole file; verdicts stay in the browser until they are downloaded."""
    asked = [asdict(one) | {"picture": base64.b64encode(one.picture or b"").decode()} for one in questions]
    content = {"data": data_hash, "columns": COLUMNS, "questions": asked}
    inside = json.dumps(content).replace("<", "\\u003c")
    lines = "".join(f"<li>{html.escape(line)}</li>" for line in summary)
    parts = {"TITLE": html.escape(title), "SUMMARY": lines, "CONTENT": inside}
    return re.sub("@@([A-Z]+)@@", lambda found: parts[found[1]], PAGE.read_text("utf-8"))


def read_page(file: Path) -> tuple[bytes, str]:
    """A page that was written, and a content security policy that runs no script or style of it but ours."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {file} ({error.strerror}): give the page of diptych audit.") from error
    page = PAGE.read_text("utf-8")
    pieces = re.split("@@([A-Z]+)@@", page)  # what is ours and what is filled in, in turn
    filled = "".join(FILLED[one] if n % 2 else re.escape(one) for n, one in enumerate(pieces))
    if not re.fullmatch(filled, content.decode("utf-8", "replace")):
        raise DataError(
            f"{file} is no page of an audit, or that of another version: run diptych audit again."
        )
    policy = "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    for tag in ("script", "style"):
        (inline,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        policy += f"; {tag}-src 'sha256-{digest}'"
    return content, policy
