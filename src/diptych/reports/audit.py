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

from PIL import Image

from diptych.data.captions import ImageStore
from diptych.data.corrections import COLUMNS
from diptych.data.decode.opening import make_thumbnail
from diptych.errors import DataError

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
    picture: str = ""  # base64 of a JPEG


def picture_of(images: ImageStore, row: int) -> str:
    """A small JPEG in base64, empty for features and for what cannot be read."""
    try:
        found = images[row]
    except (DataError, OSError):
        return ""
    if not isinstance(found, Image.Image):
        return ""
    return base64.b64encode(make_thumbnail(found, SIDE)).decode()


def audit_page(title: str, summary: Sequence[str], questions: Sequence[Question], data_hash: str) -> str:
    """The whole file; verdicts stay in the browser until they are downloaded."""
    content = {"data": data_hash, "columns": COLUMNS, "questions": [asdict(one) for one in questions]}
    inside = json.dumps(content).replace("<", "\\u003c")
    lines = "".join(f"<li>{html.escape(line)}</li>" for line in summary)
    parts = {"TITLE": html.escape(title), "SUMMARY": lines, "CONTENT": inside}
    page = _PAGE
    for name, value in parts.items():
        page = page.replace(f"@@{name}@@", value, 1)
    return page


def read_page(file: Path) -> tuple[bytes, str]:
    """A page that was written, and a content security policy that runs no script or style of it but ours."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DataError(
            f"cannot read {file} ({error.strerror}): give the audit.html of diptych audit."
        ) from error
    if b'<script id="content"' not in content:
        raise DataError(f"{file} is no page of an audit: give the audit.html of diptych audit.")
    policy = "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    for tag in ("script", "style"):
        (inline,) = re.findall(f"<{tag}>(.*?)</{tag}>", _PAGE, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        policy += f"; {tag}-src 'sha256-{digest}'"
    return content, policy


_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>@@TITLE@@</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root { color-scheme: light dark; --line: #8886; --focus: #2563eb; }
html { background: Canvas; color: CanvasText; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 1.5rem auto; padding: 0 1rem; }
.bar { position: sticky; top: 0; background: Canvas; padding: .5rem 0; border-bottom: 1px solid var(--line); }
button, input { font: inherit; padding: .2rem .6rem; }
button[aria-pressed=true] { font-weight: 700; border-color: var(--focus); }
article { display: flex; flex-wrap: wrap; gap: 1rem; padding: 1rem .5rem; border-bottom: 1px solid var(--line); }
article:focus { outline: 3px solid var(--focus); } img { max-width: 320px; background: #fff; border-radius: .3rem; }
.said { flex: 1 1 18rem; overflow-wrap: anywhere; } .text { font-size: 1.2rem; font-weight: 600; margin: 0; }
.why, .others { opacity: .8; font-size: .9rem; } .others { padding-left: 1.2rem; }
kbd { border: 1px solid var(--line); padding: 0 .3rem; }
</style>
<main><h1>@@TITLE@@</h1><ul>@@SUMMARY@@</ul>
<div class="bar"><label>Your name <input id="by" size="12"></label> <span id="count" aria-live="polite"></span>
<button id="save">Download corrections.csv</button>
<div><kbd>k</kbd> keep <kbd>w</kbd> wrong <kbd>u</kbd> unsure <kbd>m</kbd> matches <kbd>j</kbd>/<kbd>↓</kbd> next
<kbd>↑</kbd> back <kbd>⌫</kbd> no verdict</div></div>
<div id="list"></div></main>
<script id="content" type="application/json">@@CONTENT@@</script>
<script>
"use strict";
const { data, columns, questions } = JSON.parse(document.getElementById("content").textContent);
const key = "diptych-audit-" + data, name = q => JSON.stringify([q.image_id, q.text_id]);
const store = { get() { try { return JSON.parse(localStorage.getItem(key)) || {}; } catch { return {}; } },
  set(value) { try { localStorage.setItem(key, JSON.stringify(value)); } catch { /* a private window */ } } };
const saved = store.get(), verdicts = saved.verdicts || {}, by = document.getElementById("by");
by.value = saved.by || "";
const make = (tag, text, parent, kind) => { const e = document.createElement(tag); e.textContent = text;
  if (kind) e.className = kind; parent.append(e); return e; };
const allowed = q => q.matches ? ["matches", "unsure"] : ["keep", "wrong", "unsure"];
function show() {
  document.getElementById("count").textContent = Object.keys(verdicts).length + " of " + questions.length + " judged";
  for (const button of document.querySelectorAll("article button"))
    button.setAttribute("aria-pressed", String(verdicts[button.dataset.pair] === button.textContent));
  store.set({ verdicts, by: by.value });
}
function judge(q, verdict) {
  if (verdict === null) delete verdicts[name(q)]; else if (allowed(q).includes(verdict)) verdicts[name(q)] = verdict;
  else return false;
  show(); return true;
}
questions.forEach((q, n) => {
  const card = make("article", "", document.getElementById("list"));
  card.tabIndex = 0; card.dataset.n = n;
  if (q.picture) { const i = make("img", "", card); i.alt = q.image_id; i.src = "data:image/jpeg;base64," + q.picture; }
  const said = make("div", "", card, "said");
  make("p", q.text, said, "text");
  make("p", (q.matches ? "Does this text, of another image, fit too? " : "") + q.why + " · " + q.image_id, said, "why");
  const list = make("ul", "", said, "others");
  q.others.forEach(text => make("li", text, list));
  for (const verdict of allowed(q)) { const b = make("button", verdict, said); b.dataset.pair = name(q);
    b.onclick = () => judge(q, verdict); }
});
const cards = [...document.querySelectorAll("article")];
const go = n => { const card = cards[Math.max(0, Math.min(cards.length - 1, n))]; if (card) { card.focus();
  card.scrollIntoView({ block: "center" }); } };
document.addEventListener("keydown", event => {
  if (event.target === by || event.ctrlKey || event.metaKey || event.altKey) return;
  const at = cards.indexOf(document.activeElement.closest("article")), q = questions[at];
  const verdict = { k: "keep", w: "wrong", u: "unsure", m: "matches" }[event.key];
  if (event.key === "ArrowDown" || event.key === "j") go(at + 1);
  else if (event.key === "ArrowUp") go(at - 1);
  else if (event.key === "Backspace" && q) judge(q, null);
  else if (verdict && q) { if (judge(q, verdict)) go(at + 1); }
  else return;
  event.preventDefault();
});
const cell = text => /[",\\n\\r]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text;
document.getElementById("save").onclick = () => {
  const rows = questions.filter(q => verdicts[name(q)])
    .map(q => [q.image_id, q.text_id, verdicts[name(q)], by.value, data]);
  const text = [columns, ...rows].map(row => row.map(cell).join(",")).join("\\r\\n") + "\\r\\n";
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  link.download = "corrections.csv"; link.click();
};
by.onchange = show; show(); go(0);
</script></html>
"""
