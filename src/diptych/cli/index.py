"""index: build, load, info, verify, compact, remove, duplicates."""

from __future__ import annotations

import difflib
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from diptych.cli import answers
from diptych.cli.collection import pictures_alone, summary
from diptych.cli.flags import (
    PATH,
    backend_flags,
    column_flags,
    columns_of,
    index_flag,
    option,
    precision_flag,
    shard_flag,
    switch,
    with_columns,
)
from diptych.progress import counted, echo

if TYPE_CHECKING:
    from diptych.index.base import Index
    from diptych.index.protocol import Recall


@click.command()
@click.argument("out", metavar="OUT", type=PATH)
@click.option("--index", "place", required=True, help="folder or database URL of the index")
@shard_flag
@precision_flag
@click.option(
    "--approximate/--exact",
    default=None,
    help="make an approximate index at the end, or none (default: from 200,000 items of a kind on, without --shard)",
)
def load(out: Path, place: str, part: str | None, precision: Any, approximate: bool | None) -> None:
    """Fill an index with what diptych embed wrote. Run again to continue.

    What the index holds already is left as it is, so a loader that was killed loses nothing, and several may run at
    once. Nothing is removed. What is not embedded yet is loaded by a later run.
    """
    from diptych.errors import DataError
    from diptych.index.engines.opening import without_password
    from diptych.index.ingest.target import APPROXIMATE_ABOVE
    from diptych.vectors.embed import parse_part
    from diptych.vectors.load import load as load_vectors

    share = parse_part(part) if part else (1, 1)
    above = 1 if approximate else None if approximate is False or part else APPROXIMATE_ABOVE
    result = load_vectors(
        out, place, part=share, precision=precision, approximate_above=above, show_progress=True
    )
    for note in result.notes:
        echo(note, err=True)
    rows = result.written + result.unchanged
    echo(
        f"{without_password(place)}: {counted(result.shards, 'shard')}, {counted(result.images, 'image')}, "
        f"{counted(result.texts, 'text')} ({result.written:,} written, {result.unchanged:,} unchanged) "
        f"in {result.seconds:.1f} s, {rows / max(result.seconds, 1e-3):,.0f} rows/s"
    )
    if result.missing:
        verb = "is" if result.missing == 1 else "are"
        echo(f"{counted(result.missing, 'shard')} {verb} not embedded yet: load again later.", err=True)
    if result.failed:
        name, reason = result.failed[0]
        raise DataError(
            f"{len(result.failed)} of {len(result.failed) + result.shards} shards could not be loaded, the others are; "
            f"{name}: {reason}"
        )
    _say_next(place)


def _say_next(place: str) -> None:
    from diptych.index.engines.opening import without_password

    name = shlex.quote(without_password(place))
    echo(f'next: diptych search {name} "your words"   |   in a browser: diptych serve {name}')


class BuildByDefault(click.Group):
    """``diptych index MODEL PATH`` builds; ``diptych index info INDEX`` and its sisters look after what was built."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The named command, or ``build`` with everything as its arguments."""
        if args and args[0] not in self.commands:
            near = difflib.get_close_matches(args[0], self.commands, n=1)
            if near and not Path(args[0]).exists():
                ctx.fail(f"there is no folder of a trained run '{args[0]}': did you mean {near[0]}?")
            args = ["build", *args]
        return super().resolve_command(ctx, args)


@click.group(cls=BuildByDefault, context_settings={"ignore_unknown_options": True})
def index() -> None:
    """Make a collection searchable. As in: diptych index MODEL PATH (its options: diptych index build --help)."""


@index.command()
@click.argument("given", metavar="[MODEL] PATH", nargs=-1, required=True)
@index_flag
@click.option("--name", default="", help="name of the collection in the index (default: the data's own)")
@switch("texts", "index the texts too, for image → text and text → text")
@precision_flag
@click.option(
    "--approximate/--exact",
    default=None,
    help="make an approximate index, or none (default: from 200,000 items of a kind on)",
)
@option(
    "--codes",
    "make the approximate index of binary codes, not a graph: no extra needed, built in seconds",
    is_flag=True,
    default=None,
)
@option(
    "--target_recall",
    "make an approximate index, searched as widely as it takes to reach this recall@10, as in 0.98",
    type=click.FloatRange(0, 1, min_open=True),
)
@option(
    "--labels",
    "store the labels that a label-wise model predicts, to filter by, with their scores",
    is_flag=True,
)
@option(
    "--local_features",
    "store what the model's pair scorer reads of each image beside the index: quick re-ranking, large files",
    is_flag=True,
)
@option(
    "--ocr",
    "then read what is written in the pictures, for --hybrid and filters (extra 'ocr'; about 0.4 s a picture)",
    is_flag=True,
)
@option("--batch_size", "pictures at a time (default: by device)", type=click.IntRange(1))
@switch("exif", "date, camera and place of photos as columns to filter by")
@switch("cache", "share features of a frozen backbone with other commands")
@column_flags
@backend_flags
def build(
    given: tuple[str, ...], index: str | None, approximate: bool | None, ocr: bool, **options: Any
) -> None:
    """Index a folder of pictures or a data set. Run again to bring it up to date.

    MODEL is the folder of a trained run, or a pretrained model that needs no training: hf:ID, or its folder. Without
    MODEL, an index keeps its model, and a new one takes lite0+minilm (from the packages of the extra 'demo').
    """
    from diptych.index.engines.opening import without_password
    from diptych.index.ingest.ocr import picture_reader, read_written
    from diptych.index.places import bring_up_to_date, default_place, is_model_folder, model_for

    above = _above(approximate, options["codes"], options["target_recall"])
    if len(given) > 2:
        raise click.UsageError(f"one collection is indexed at a time: leave out {given[2]}.")
    if len(given) == 2 and is_model_folder(given[1]):
        raise click.UsageError(f"the model comes first: diptych index {given[1]} {given[0]}.")
    path = given[1] if len(given) == 2 else pictures_alone(given[0])
    path = with_columns(path, columns_of(options))
    place = index or default_place(path)
    run = given[0] if len(given) == 2 else model_for(place)
    reader = picture_reader() if ocr else None  # a missing extra is told before an hour of indexing
    result, _ = bring_up_to_date(run, path, place, approximate_above=above, **options)
    echo(summary(without_password(place), result))
    if reader is not None:
        pictures = counted(read_written(place, reader), "picture")
        echo(f"{without_password(place)}: read what is written in {pictures}")
    if options["local_features"]:
        from diptych.cache.local_features import features_place

        file = features_place(place)
        echo(f"{file}: local features, {file.stat().st_size / 1e6:.1f} MB")
    _say_next(place)


def _above(approximate: bool | None, codes: bool | None, target_recall: float | None) -> int | None:
    """From how many items of a kind on there is an approximate index; None for never."""
    from diptych.index.ingest.target import APPROXIMATE_ABOVE

    if (codes or target_recall) and approximate is False:
        other = "--codes" if codes else "--target_recall"
        raise click.UsageError(f"--exact and {other} cannot be combined: choose one.")
    needed = approximate or codes or target_recall
    return 1 if needed else None if approximate is False else APPROXIMATE_ABOVE


index.add_command(load)


@index.command()
@click.argument("place", metavar="INDEX")
@option("--recall", "measure the recall of its approximate indexes again, now", is_flag=True)
def info(place: str, recall: bool) -> None:
    """Show what an index holds, and its model."""
    from diptych.index.engines.opening import open_index
    from diptych.index.models import backend_of

    with open_index(place) as opened:
        about = opened.info
        measured = _recalls(opened) if recall else dict(about.recall)
    for field in ("path", "engine", "model", "fingerprint", "dimension", "precision", "version", "created"):
        echo(f"{field:12} {getattr(about, field)}")
    if about.model:
        echo(f"{'backend':12} {backend_of(about.model, about.fingerprint)}")
    echo(f"{'items':12} " + ", ".join(counted(count, kind) for kind, count in about.counts.items()))
    graphs = ", ".join(
        f"{counted(count, kind)}{' (binary codes)' if kind in about.coded else ''}"
        for kind, count in about.approximate.items()
    )
    echo(f"{'approximate':12} {graphs or 'none: every search is exact'}")
    for kind, found in measured.items():
        echo(f"{'recall':12} {kind}: {found}")
    echo(f"{'size':12} {about.size / 1e6:.1f} MB")
    compaction = " (diptych index compact gives their space back)" if about.deleted else ""
    echo(f"{'removed':12} {about.deleted} rows{compaction}")
    columns = ", ".join(f"{name} ({'/'.join(kinds) or 'null'})" for name, kinds in about.columns.items())
    echo(f"{'columns':12} {columns or 'none'}")
    for collection in about.collections:
        echo(f"{'collection':12} {collection.name}" + (f" in {collection.root}" * bool(collection.root)))


@index.command()
@click.argument("place", metavar="INDEX")
def verify(place: str) -> None:
    """Read everything and compare it with its checksums. Status 1 when something is wrong.

    A few items are encoded again, where the model is there, and compared with their vectors. The recall of approximate
    indexes is measured and shown.
    """
    from diptych.errors import DiptychError, IndexFault, RuntimeFault
    from diptych.index.engines.opening import open_index
    from diptych.index.models import open_model
    from diptych.index.places import check_items, model_place
    from diptych.index.protocol import other_model

    with open_index(place) as opened:
        faults = opened.verify(show_progress=True)
        try:
            for kind, found in ({} if faults else _recalls(opened)).items():
                echo(f"{kind}: {found}")
        except IndexFault as unused:  # a graph that is not signed here is no fault
            echo(str(unused), err=True)
        try:
            name, made = model_place(opened, None), (opened.info.model, opened.info.fingerprint)
            model = open_model(name, fingerprint=made[1])
            if model.fingerprint() != made[1]:
                raise RuntimeFault(str(other_model(place, made, (name, model.fingerprint()))))
            check_items(opened, model)
        except RuntimeFault as other:
            faults = [*faults, str(other)]
        except DiptychError as error:
            echo(f"the model was not compared: {error}", err=True)
    for fault in faults:
        echo(fault)
    echo("sound" if not faults else counted(len(faults), "fault"))
    sys.exit(1 if faults else 0)


def _recalls(opened: Index) -> dict[str, Recall]:
    """The recall of each approximate index, measured now."""
    kinds = [kind for kind, count in opened.info.approximate.items() if count]
    return {kind: opened.recall(kind) for kind in kinds}  # type: ignore[arg-type]


@index.command()
@click.argument("place", metavar="INDEX")
def compact(place: str) -> None:
    """Free the space of removed items."""
    from diptych.index.engines.opening import open_index

    with open_index(place, writable=True) as opened:
        echo(f"freed {opened.compact(show_progress=True) / 1e6:.1f} MB")


@index.command()
@click.argument("place", metavar="INDEX")
@click.argument("ids", nargs=-1)
@option("--collection", "remove all items of this collection: its folder, name or number")
@click.option("--filter", "condition", help="remove what passes a metadata filter")
@option("--missing", "remove images whose files are gone", is_flag=True)
@option("--dry_run", "list what would be removed, and remove nothing", is_flag=True)
def remove(
    place: str,
    ids: tuple[str, ...],
    collection: str | None,
    condition: str | None,
    missing: bool,
    dry_run: bool,
) -> None:
    """Remove items by id, collection, filter, or missing file.

    Images go with their texts. A later 'diptych index' adds what is still in the collection.
    """
    from diptych.index.engines.opening import open_index
    from diptych.index.ingest import target

    if sum((bool(ids), collection is not None, condition is not None, missing)) != 1:
        raise click.UsageError("say what to remove in one way: by ids, --collection, --filter or --missing.")
    with open_index(place, writable=not dry_run) as opened:
        whole = None if collection is None else target.find_collection(opened, collection)
        if whole is not None:
            ids_to_remove = [id for id, _ in opened.contents(whole.number)]
        elif condition is not None:
            ids_to_remove = target.ids_that_pass(opened, condition)
        else:
            ids_to_remove = target.missing_ids(opened) if missing else target.known_ids(opened, ids)
        if dry_run:
            for id in ids_to_remove:
                echo(id)
            echo(f"{counted(len(ids_to_remove), 'item')} would be removed.", err=True)
            return
        counts = target.remove_items(opened, ids_to_remove)
        if whole is not None:
            opened.forget_collection(whole.number)
        rest = f"{counted(len(opened), 'item')} {'is' if len(opened) == 1 else 'are'} left"
        echo(f"removed {counted(counts['image'], 'image')}, {counted(counts['text'], 'text')}; {rest}")


@index.command()
@click.argument("place", metavar="INDEX")
@option("--threshold", "lowest score of a pair (default: the best pairs, whatever their scores)", type=float)
@option("--limit", "largest number of pairs", 100, type=click.IntRange(1))
@option("--kind", "what to compare", "image", type=click.Choice(["image", "text"]))
def duplicates(place: str, threshold: float | None, limit: int, kind: Any) -> None:
    """List pairs of images or texts with nearly equal vectors."""
    from diptych.index.engines.opening import open_index

    with open_index(place) as opened:
        pairs = opened.near_duplicates(kind=kind, threshold=threshold, limit=limit, show_progress=True)
        answers.print_pairs(opened, pairs)
        if not pairs:
            reach = "" if threshold is None else f" that reaches {threshold:g}"
            echo(f"no pair among {opened.count(kind)} {kind} items{reach}.", err=True)
