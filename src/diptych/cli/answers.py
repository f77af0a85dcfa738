"""What a search found, shown to people and to programs: a table, lines, paths, JSON, a page of thumbnails."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diptych.progress import echo, printable
from diptych.storage import expanded

if TYPE_CHECKING:
    from PIL import Image

    from diptych.index.base import Index
    from diptych.index.protocol import Hit, Hits, Item, Kind, Pair, Query

BELOW = "below the cut-off"  # marks such an answer in a pipe; on a terminal the answer is dimmed
SIDE = 256  # pixels that a thumbnail is decoded for, at least


def print_hits(index: Index, hits: Hits, *, everything: bool) -> None:
    """A table on a terminal; in a pipe a line each: score, path or id, text, with tabs between."""
    matches = {hit.item.id for hit in hits.matches}
    if not sys.stdout.isatty():
        for hit in selection(hits, everything):
            cells = [f"{hit.score:.4f}", name_of(index, hit.item), _text(hit.item)]
            echo("\t".join([*cells, *([] if hit.item.id in matches else [BELOW])]))
    else:
        rows = [
            (_row(index, hit), "" if hit.item.id in matches else "dim") for hit in selection(hits, everything)
        ]
        _table(["score", "item", "text", "made of"], rows)
    _print_rest(index, hits, everything)


def print_paths(index: Index, hits: Hits, *, everything: bool) -> None:
    """The path of each hit (a text's is that of its image), or its id where there is no file."""
    for hit in selection(hits, everything):
        echo(printable(path_of(index, hit.item) or hit.item.id))
    _print_rest(index, hits, everything)


def print_json(index: Index, hits: Hits, *, everything: bool, backend: str) -> None:
    """One JSON object; the time of a frame is in its metadata. Without a cut-off, nothing says what matches: null."""
    has_cutoff = hits.cutoff is not None
    matches = {hit.item.id for hit in hits.matches}
    answers = [
        {
            "id": hit.item.id, "kind": hit.item.kind, "score": hit.score,
            "matches": hit.item.id in matches if has_cutoff else None,
            "text": hit.item.text, "path": path_of(index, hit.item), "image_id": hit.item.image_id,
            "metadata": dict(hit.item.metadata), "details": dict(hit.details),
        }
        for hit in selection(hits, everything)
    ]  # fmt: skip
    facts = {
        "matched": hits.matched if has_cutoff else None, "cutoff": hits.cutoff, "strength": hits.strength,
        "exact": hits.exact, "note": hits.note, "warning": hits.warning, "backend": backend,
    }  # fmt: skip
    echo(json.dumps({**facts, "hits": answers}, ensure_ascii=False))


def print_pairs(index: Index, pairs: Sequence[Pair]) -> None:
    """Pairs of items as a table, or as lines with tabs in a pipe."""
    rows = [(f"{pair.score:.4f}", name_of(index, pair.first), name_of(index, pair.second)) for pair in pairs]
    if sys.stdout.isatty():
        _table(["score", "first", "second"], [(row, "") for row in rows])
    else:
        for row in rows:
            echo("\t".join(row))


def write_gallery(
    place: Path,
    index: Index,
    title: str,
    query: Query,
    hits: Hits,
    condition: str | None,
    everything: bool,
    roots: Sequence[Path],
) -> None:
    """Write the answers as one HTML file: thumbnails inside, and links to the files themselves."""
    from diptych.reports.page import Answer, QueryCard, gallery_page
    from diptych.storage import write_text

    title = title or f"more like {query.terms[0].value}"
    matches = {hit.item.id for hit in hits.matches}

    def answer_of(hit: Hit) -> Answer:
        file, name = path_of(index, hit.item), name_of(index, hit.item)
        weak = "" if not hits.matched or hit.item.id in matches else f" · {BELOW}"
        text, link = _text(hit.item), link_to(file, place) if file else ""
        note = (name if text else "") + weak
        return Answer(
            text or name, hit.score, False, picture_of(index, hit.item, roots), link, note.removeprefix(" · ")
        )

    answers = [answer_of(hit) for hit in selection(hits, everything)]
    values = [term.value for term in query.terms if term.kind in ("image", "item")]
    pictures = (_query_picture(index, value, roots) for value in values)
    nearest = "Nothing matches clearly. The nearest:" if answers else "Nothing in the collection matches."
    said = f"Filter: {condition}." if condition else "", "" if hits.matched else nearest
    note = " ".join(filter(None, said))
    write_text(place, gallery_page(title, QueryCard(note, answers, next(pictures, None))))
    say_withheld(index, roots)


def say_withheld(index: Index, roots: Sequence[Path]) -> None:
    """Name the folders whose pictures are not shown."""
    from diptych.machine import withheld

    for sentence in withheld([one.root for one in index.info.collections], roots or None):
        echo(printable(sentence), err=True)


def link_to(file: str, page: Path) -> str:
    """The address of a file for a page: relative where both lie below one folder, so that they can move together."""
    from urllib.parse import quote

    start = expanded(page).resolve().parent
    try:
        return quote(os.path.relpath(file, start).replace(os.sep, "/"))
    except ValueError:  # another drive
        return Path(file).as_uri()


def selection(hits: Hits, everything: bool) -> Sequence[Hit]:
    """The hits to show: all, or those that reach the cut-off."""
    return hits.hits if everything else hits.matches


def path_of(index: Index, item: Item) -> str:
    """The file of an item, of its image for a text; empty where there is none."""
    file = index.file(item)
    if file is None and item.image_id:
        (image,) = index.get([item.image_id])
        file = None if image is None else index.file(image)
    return "" if file is None else str(file)


def id_of(index: Index, named: str) -> str:
    """The id of an item, also where the path of its picture is given, as the answers show it."""
    file = expanded(named)
    if index.get([named])[0] is None and file.is_file():
        from diptych.index.ingest.collection_files import collection_id

        for one in index.collections():
            root = Path(one.root).resolve()
            if one.root and file.resolve().is_relative_to(root):
                id = collection_id(file.resolve().relative_to(root).as_posix(), one.number)
                if index.get([id])[0] is not None:
                    return id
    return named


def nothing_left(index: Index, kind: Kind, filtered: bool) -> str:
    """Why a search had nothing to choose from."""
    if not index.count(kind):
        other = "image" if kind == "text" else "text"
        remedy = " index a collection with texts, without --no_texts, or" if kind == "text" else ""
        return f"the index holds no {kind}s:{remedy} search its {other}s with --kind {other}."
    if filtered:
        return "nothing in the collection is left to search: loosen the filter."
    return f"the index holds no other {kind}: index more of them, or ask for something else."


def _print_rest(index: Index, hits: Hits, everything: bool) -> None:
    """Say on standard error what the cut-off says of the answers, so that a pipe gets answers only."""
    below = len(hits) - len(hits.matches)
    if not hits:
        return
    if hits.warning:
        echo(f"{hits.warning}.", err=True)
    if hits.cutoff is None and hits.note and not everything:
        echo(f"--matches leaves nothing out here: {hits.note}. --chance 0.2 sets one.", err=True)
    if not hits.matched and everything:
        echo("nothing matches clearly: these are the nearest.", err=True)
    elif not hits.matched:
        best = f"{name_of(index, hits[0].item)}, {hits[0].score:.3f}"
        echo(
            f"nothing in the collection matches (the best is {best}; leave --matches out to see it).",
            err=True,
        )
    elif below and sys.stdout.isatty():
        what = "dimmed" if everything else "left out"
        reliable = f" ({hits.note})" if hits.note else ""
        echo(
            f"{below} of {len(hits)} are below the cut-off of {hits.cutoff:.3f} and {what}{reliable}.",
            err=True,
        )


def _row(index: Index, hit: Hit) -> tuple[str, ...]:
    parts = ", ".join(f"{name} {value:.3g}" for name, value in hit.details.items())
    return f"{hit.score:.3f}", name_of(index, hit.item), _text(hit.item), parts


def _table(heads: Sequence[str], rows: Sequence[tuple[Sequence[str], str]]) -> None:
    """Print rows with their styles; a column without a word is left out."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    columns = [n for n in range(len(heads)) if any(cells[n] for cells, _ in rows)]
    for head in (heads[n] for n in columns):
        numeric = head == "score"
        table.add_column(
            head, justify="right" if numeric else "left", no_wrap=numeric, overflow="fold", min_width=5
        )
    for cells, style in rows:
        table.add_row(*(Text(cells[n]) for n in columns), style=style)  # Text: no brackets are read as markup
    Console().print(table)


def name_of(index: Index, item: Item) -> str:
    """A short name for people: the path from where they stand, with the time of a frame, or the id."""
    from diptych.index.query.frames import frame_of

    file, frame = index.file(item), frame_of(item)
    if file is None:
        return printable(item.id)
    short = os.path.relpath(file)
    name = str(file) if short.startswith("..") else short
    if frame is None:
        return printable(name)
    from diptych.data.decode.video_files import clock

    return printable(f"{name} at {clock(frame.time)}")


def _text(item: Item) -> str:
    """The first line of an item's text."""
    return printable(item.text.strip().split("\n", 1)[0])


def picture_of(index: Index, item: Item, roots: Sequence[Path] = ()) -> Image.Image | None:
    """A thumbnail: the stored one, or one from a file that may be shown and read; none for a text."""
    from diptych.data.decode.opening import open_image
    from diptych.errors import ImageError
    from diptych.machine import is_allowed

    thumbnail = index.thumbnail(item.id)
    try:
        if thumbnail is not None:
            return open_image(thumbnail, name=item.id)
        file = index.file(item)
        return (
            open_image(file, size_hint=SIDE) if file is not None and is_allowed(file, roots or None) else None
        )
    except ImageError:
        return None


def _query_picture(index: Index, value: Any, roots: Sequence[Path]) -> Image.Image | None:
    """The picture that a term of a query shows."""
    from diptych.data.decode.opening import open_image

    if isinstance(value, Path):
        return open_image(value, size_hint=SIDE)
    (item,) = index.get([str(value)])
    return None if item is None else picture_of(index, item, roots)
