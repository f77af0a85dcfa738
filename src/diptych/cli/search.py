"""search: answers to words, images, or both."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from diptych.cli import answers
from diptych.cli.collection import pictures_of, place_first
from diptych.cli.flags import (
    OUTPUT_FILE,
    backend_flags,
    backend_options,
    chance_flag,
    index_flag,
    option,
    root_flag,
)
from diptych.progress import echo

if TYPE_CHECKING:
    from diptych.index.base import Index
    from diptych.index.protocol import Hits, Query


@click.command()
@click.argument("place", metavar="INDEX")
@click.argument("query", nargs=-1)
@index_flag
@click.option("-k", "k", default=10, show_default=True, help="number of answers")
@option("--kind", "what to find", "image", type=click.Choice(["image", "text"]))
@option("--filter", "metadata filter, as in 'price < 50 and color = \"red\"'")
@option("--like", "id or file of an item: find more like it, alone or together with a query")
@option("--hybrid", "fuse with full-text search (BM25)", is_flag=True)
@click.option(
    "--rerank",
    default=0,
    type=click.IntRange(0),
    help="re-rank the top N hits with the model's pair scorer",
)
@option(
    "--reranker",
    "re-rank with the pair scorer of this run instead (may be repeated: the mean of their scores)",
    multiple=True,
)
@click.option(
    "--exact/--approximate",
    default=None,
    help="score every item, or use the approximate index (default: approximate, if the index has one)",
)
@chance_flag
@click.option(
    "--all/--matches",
    "everything",
    default=True,
    help="mark answers below the cut-off, or leave them out (default: mark)",
)
@option("--frames", "show every frame of a video (default: the best frame of each)", is_flag=True)
@option("--allow_urls", "fetch images from web addresses in a query", is_flag=True)
@option("--model", "folder or name of the model (default: the model that the index records)")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
@option("--paths", "print paths only, for pipes", is_flag=True)
@option("--preview", "show the pictures in the terminal", is_flag=True)
@option("--html", "also write the answers with thumbnails to this file", type=OUTPUT_FILE)
@root_flag
@backend_flags
def search(
    place: str,
    query: tuple[str, ...],
    index: str | None,
    like: str | None,
    reranker: tuple[str, ...],
    chance: float | None,
    everything: bool,
    allow_urls: bool,
    model: str | None,
    as_json: bool,
    paths: bool,
    preview: bool,
    html: Path | None,
    roots: tuple[Path, ...],
    **options: Any,
) -> None:
    """Search by words, by an image's path, or by both. As in: '"2:red shoe" - "sneaker" + ./shoe.jpg'.

    INDEX may also be a folder of pictures or a data set, which is indexed first: ./photos "two parrots"; or a model
    and a folder: hf:ID ./photos "two parrots".
    """
    click.get_current_context().with_resource(_without_garbage_collection())
    from diptych.encoders.known_names import is_pretrained_name
    from diptych.index.places import open_place, refuse_model
    from diptych.index.query.search import Searcher

    rerank, condition = options["rerank"], options["filter"]
    _check_flags(as_json + paths + preview, preview, bool(reranker and not rerank))
    place, query = place_first(place, query)
    pictures = is_pretrained_name(place) or None
    if pictures:
        model, place, query = place, pictures_of(place, query[:1]), query[1:]
    refuse_model(place)
    request = _query(" ".join(query), like)
    opened, retriever, name, place = open_place(
        place,
        model,
        **backend_options(options),
        index=index,
        pictures=pictures,
        encodes=bool(query or rerank),
    )
    with opened:
        if like:
            request = _query(" ".join(query), answers.id_of(opened, like))
        judge = None
        if rerank:
            from diptych.index.query.reranking import reranker_of

            judge = reranker_of(place, retriever, reranker)
        searcher = Searcher(opened, retriever, model_name=name, allow_urls=allow_urls, pair_scorer=judge)
        hits = searcher.search(request, chance=chance or ("calibrated" if query else None), **options)
        if html is not None:
            answers.write_gallery(html, opened, " ".join(query), request, hits, condition, everything, roots)
        _show(opened, hits, everything, retriever.backend, as_json, paths, roots if preview else None)
        if not (hits or as_json):
            echo(answers.nothing_left(opened, options["kind"], condition is not None), err=True)
        if html is not None and not as_json and not paths:
            echo(f"thumbnails: {html}", err=True)


def _check_flags(forms: int, preview: bool, idle: bool) -> None:
    if forms > 1:
        raise click.UsageError("--json, --paths and --preview cannot be combined: choose one.")
    if preview:
        from diptych.cli.preview import check_terminal

        check_terminal()
    if idle:
        raise click.UsageError("--reranker re-ranks the top N hits: give --rerank N too.")


def _show(
    index: Index,
    hits: Hits,
    everything: bool,
    backend: str,
    as_json: bool,
    paths: bool,
    roots: tuple[Path, ...] | None,
) -> None:
    """Print the answers in the form that the flags ask for; with ``roots``, their pictures first."""
    if roots is not None:
        from diptych.cli.preview import show_pictures

        answers.say_withheld(index, roots)
        show_pictures(index, answers.selection(hits, everything), roots)
    if as_json:
        answers.print_json(index, hits, everything=everything, backend=backend)
    else:
        (answers.print_paths if paths else answers.print_hits)(index, hits, everything=everything)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """No look for garbage meanwhile: a short life makes little of it, and importing torch takes a sixth less."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def _query(expression: str, like: str | None) -> Query:
    """What was asked: an expression, more like an item, or both."""
    from diptych.index.protocol import Query, Term
    from diptych.index.query.parse import parse_query

    if not expression and not like:
        raise click.UsageError(
            'there is nothing to search for: give "two parrots", ./picture.jpg or --like ID.'
        )
    terms = parse_query(expression).terms if expression else ()
    return Query((*terms, *([Term(like, "item")] if like else [])))
