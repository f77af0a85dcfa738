"""index (build, info, verify, compact, remove), search, serve."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from diptych.index.protocol import Hits, Index
    from diptych.retriever import Retriever


class BuildByDefault(click.Group):
    """``diptych index RUN PATH`` builds; ``diptych index info PLACE`` and its sisters look after what was built."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The named command, or ``build`` with everything as its arguments."""
        if args and args[0] not in self.commands:
            args = ["build", *args]
        return super().resolve_command(ctx, args)


@click.group(cls=BuildByDefault)
def index() -> None:
    """Make a collection searchable: diptych index RUN PATH."""


@index.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("path")
@click.option(
    "--index", "place", help="folder or database URL of the index (default: PATH with .index behind it)"
)
@click.option("--name", default="", help="name of the collection in the index (default: the data's own)")
@click.option(
    "--texts/--no_texts", default=True, help="index the texts too, for image → text and text → text"
)
@click.option(
    "--precision", default="float32", type=click.Choice(["float32", "float16", "binary"]), show_default=True
)
@click.option("--batch_size", "--batch-size", default=64, show_default=True, type=click.IntRange(1))
def build(
    run: Path, path: str, place: str | None, name: str, texts: bool, precision: Any, batch_size: int
) -> None:
    """Index a folder of pictures or a data set with a trained model; run again to bring it up to date."""
    from diptych.index.build import index_collection
    from diptych.retriever import Retriever

    model = Retriever.from_pretrained(run)
    place = place or default_place(path)
    built = index_collection(
        model, path, place, model_name=str(run.resolve()), name=name, texts=texts, precision=precision,
        batch_size=batch_size, show_progress=True,
    )  # fmt: skip
    for item, reason in built.skipped:
        click.echo(f"skipped {item}: {reason}", err=True)
    click.echo(
        f"{place}: {built.images} images, {built.texts} texts ({built.added} added, {built.updated} updated, "
        f"{built.unchanged} unchanged, {built.removed} removed, {len(built.skipped)} skipped)"
    )
    click.echo(f'next: diptych search {place} "your words"')


def default_place(path: str) -> str:
    """Beside the data, with .index behind its name: ./photos → ./photos.index."""
    return path.rstrip("/") + ".index"


@index.command()
@click.argument("place")
def info(place: str) -> None:
    """What an index holds, and the model it was made with."""
    from diptych.index.opening import open_index

    with open_index(place) as opened:
        about = opened.info
    for field in (
        "path",
        "engine",
        "model",
        "fingerprint",
        "dimension",
        "precision",
        "version",
        "created",
        "deleted",
    ):
        click.echo(f"{field:12} {getattr(about, field)}")
    click.echo(f"{'items':12} " + ", ".join(f"{count} {kind}" for kind, count in about.counts.items()))
    click.echo(f"{'size':12} {about.size / 1e6:.1f} MB")
    click.echo(f"{'columns':12} " + (", ".join(about.columns) or "none"))


@index.command()
@click.argument("place")
def verify(place: str) -> None:
    """Read everything and compare it with its checksums."""
    from diptych.index.opening import open_index

    with open_index(place) as opened:
        faults = opened.verify()
    for fault in faults:
        click.echo(fault)
    click.echo("sound" if not faults else f"{len(faults)} faults")
    sys.exit(1 if faults else 0)


@index.command()
@click.argument("place")
def compact(place: str) -> None:
    """Give back the space of removed items."""
    from diptych.index.opening import open_index

    with open_index(place, writable=True) as opened:
        click.echo(f"freed {opened.compact() / 1e6:.1f} MB")


@index.command()
@click.argument("place")
@click.argument("ids", nargs=-1, required=True)
def remove(place: str, ids: tuple[str, ...]) -> None:
    """Remove items by id; the texts of a removed image go with it."""
    from diptych.index.opening import open_index

    with open_index(place, writable=True) as opened:
        click.echo(f"removed {opened.delete(list(ids))} items")


@index.command()
@click.argument("place")
@click.option(
    "--threshold", type=float, help="least score of a pair (default: the best pairs whatever they score)"
)
@click.option("--limit", default=100, show_default=True, type=click.IntRange(1), help="most pairs listed")
def duplicates(place: str, threshold: float | None, limit: int) -> None:
    """Pairs of images whose vectors nearly agree."""
    from diptych.index.opening import open_index

    with open_index(place) as opened:
        for pair in opened.near_duplicates(threshold=threshold, limit=limit, show_progress=True):
            click.echo(f"{pair.score:.4f}  {pair.first.id}  {pair.second.id}")


def model_of(opened: Index, given: Path | None) -> tuple[Retriever, str]:
    """The model an index was made with, from where the index says it lies, or from where the user says."""
    from diptych.errors import IndexFault
    from diptych.retriever import Retriever

    place = given or Path(opened.info.model)
    if given is None and not place.exists():
        raise IndexFault(
            f"the model of this index was at {opened.info.model or 'no recorded place'}, which is gone: "
            "say where it lies now with --model."
        )
    return Retriever.from_pretrained(place), str(place)


@click.command()
@click.argument("place", metavar="INDEX")
@click.argument("query", nargs=-1)
@click.option("-k", "k", default=10, show_default=True, help="answers")
@click.option(
    "--kind", default="image", show_default=True, type=click.Choice(["image", "text"]), help="what to find"
)
@click.option("--filter", "condition", help="metadata filter, as in 'price < 50 and color = \"red\"'")
@click.option("--hybrid", is_flag=True, help="fuse with full-text search (BM25)")
@click.option("--like", help="instead of a query: the id of an item to find more like")
@click.option("--all", "everything", is_flag=True, help="also answers below the cut-off")
@click.option("--model", type=click.Path(path_type=Path), help="where the model lies (default: as recorded)")
@click.option("--json", "as_json", is_flag=True, help="one JSON object")
@click.option("--paths", is_flag=True, help="paths only, for pipes")
@click.option(
    "--html", type=click.Path(path_type=Path), help="also write the answers with thumbnails to this file"
)
def search(
    place: str,
    query: tuple[str, ...],
    k: int,
    kind: Any,
    condition: str | None,
    hybrid: bool,
    like: str | None,
    everything: bool,
    model: Path | None,
    as_json: bool,
    paths: bool,
    html: Path | None,
) -> None:
    """Search by words, by an image's path, or by both. As in: '"2:red shoe" - "sneaker" + ./shoe.jpg'."""
    from diptych.index.opening import open_index
    from diptych.index.search import Searcher

    if bool(query) == bool(like):
        raise click.UsageError('give a query ("two parrots", ./picture.jpg) or --like ID.')
    with open_index(place) as opened:
        retriever, name = model_of(opened, model)
        searcher = Searcher(opened, retriever, model_name=name)
        if like:
            hits = searcher.more_like(like, k, kind=kind, filter=condition)
        else:
            hits = searcher.search(" ".join(query), k, kind=kind, filter=condition, hybrid=hybrid)
        if html is not None:
            from diptych.data.storage import write_text

            write_text(html, gallery(opened, " ".join(query) or f"like {like}", hits))
        _print(opened, hits, everything=everything, as_json=as_json, paths=paths)


def _print(opened: Index, hits: Hits, *, everything: bool, as_json: bool, paths: bool) -> None:
    shown = list(hits) if everything else list(hits.matches)
    if as_json:
        answers = [
            {
                "id": hit.item.id, "kind": hit.item.kind, "score": hit.score, "text": hit.item.text,
                "path": _path(opened, hit), "metadata": dict(hit.item.metadata), "details": dict(hit.details),
            }
            for hit in shown
        ]  # fmt: skip
        click.echo(
            json.dumps({"matched": hits.matched, "cutoff": hits.cutoff, "hits": answers}, ensure_ascii=False)
        )
        return
    if paths:
        for hit in shown:
            click.echo(_path(opened, hit) or hit.item.id)
        return
    if not hits.matched and not everything:
        best = f" (best: {hits[0].item.id}, {hits[0].score:.3f}; --all shows it)" if len(hits) else ""
        click.echo(f"nothing in the collection matches{best}")
        return
    for hit in shown:
        first = hit.item.text.splitlines()[0] if hit.item.text else ""
        click.echo(f"{hit.score:.3f}  {_path(opened, hit) or hit.item.id}  {first}")


def _path(opened: Index, hit: Any) -> str:
    file = opened.file(hit.item)
    return str(file) if file is not None else ""


def gallery(opened: Index, title: str, hits: Hits) -> str:
    """The answers as one HTML file with their thumbnails inside."""
    import io

    from PIL import Image

    from diptych.evaluation.page import Answer, Query, gallery_page

    answers = []
    for hit in hits:
        small = opened.thumbnail(hit.item.id)
        picture = Image.open(io.BytesIO(small)) if small else None
        label = hit.item.text.splitlines()[0] if hit.item.text else hit.item.id
        answers.append(Answer(label, hit.score, False, picture))
    return gallery_page(title, Query("", answers))
