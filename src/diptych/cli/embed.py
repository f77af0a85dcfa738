"""embed: vectors of a large collection into files, one per shard; plan: what a collection takes."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from diptych.cli.flags import (
    OUTPUT,
    Command,
    backend_flags,
    backend_options,
    model_of,
    option,
    shard_flag,
    switch,
)
from diptych.errors import DataError
from diptych.progress import counted, echo
from diptych.runs import plan as planning
from diptych.storage import expanded

if TYPE_CHECKING:
    from diptych.vectors.embed import EmbedResult

MOST_PICTURES = 20  # unreadable pictures that are named; the receipts list all


@click.command()
@click.argument("model")
@click.argument("data", metavar="SHARDS")
@click.argument("out", metavar="OUT", type=OUTPUT)
@shard_flag
@option("--rows", "images per shard, if SHARDS are not tars or Parquet files", 10_000, type=click.IntRange(1))
@switch("texts", "embed the texts too")
@switch("thumbnails", "keep a small JPEG of each image that has no file of its own")
@option(
    "--ray", "embed on a Ray cluster: host:6379, ray://host:10001 or auto", to="address", metavar="ADDRESS"
)
@option("--cpus", "CPUs of one Ray worker", 1, type=click.IntRange(1))
@option("--retry", "embed shards with unreadable pictures again", is_flag=True)
@option("--batch_size", "pictures at a time (default: by device)", type=click.IntRange(1))
@backend_flags
def embed(
    model: str,
    data: str,
    out: Path,
    part: str | None,
    rows: int,
    address: str | None,
    cpus: int,
    **options: Any,
) -> None:
    """Write the vectors of a large collection into files. Run again to continue.

    OUT is a folder with one Parquet file per shard, and a manifest.

    MODEL is the folder of a trained run, lite0+minilm or hf:ID. SHARDS are tars, Parquet files with paths of images, a
    folder of images, or any other data that diptych index reads. With --shard, several processes divide the work; with
    --ray, the workers of a Ray cluster do it, one model each.
    """
    from diptych.encoders.known_names import recorded_name
    from diptych.index.models import check_probes, say_device
    from diptych.vectors import embed as embedding
    from diptych.vectors.embed import Task, embed_on
    from diptych.vectors.load import absolute, open_sources
    from diptych.vectors.on_ray import connected

    share = embedding.parse_part(part) if part else (1, 1)
    out = expanded(out).resolve()
    sources = open_sources(data, rows)
    how = backend_options(options)
    retriever = model_of(model, {**how, **({"device": "cpu"} if address else {})})
    check_probes(retriever, model)
    retry, name = options.pop("retry"), recorded_name(model)
    run: dict[str, Any] = {"model_name": name, "part": share, "retry": retry, **options}
    if address is None:
        say_device(retriever.device)
        result = embedding.embed(retriever, sources, out, **run, show_progress=True)
    else:
        task = Task(name, retriever.fingerprint(), absolute(data), rows, out, *how.values(), **options)
        with connected(address, cpus) as cluster:
            echo(str(cluster), err=True)
            result = embedding.embed(
                retriever, sources, out, **run, run=lambda names: embed_on(cluster, task, names, True)
            )
    _report(result, out, f" (part {part} of {len(sources.names)})" if part else "")


def _report(result: EmbedResult, out: Path, share: str) -> None:
    """Say what was embedded, what was skipped, and what to do next."""
    for item, reason in result.unreadable[:MOST_PICTURES]:
        echo(f"skipped {item}: {reason}", err=True)
    if len(result.unreadable) > MOST_PICTURES:
        echo(
            f"skipped {len(result.unreadable) - MOST_PICTURES:,} more: see 'unreadable' in {out}/shards/*.json",
            err=True,
        )
    echo(
        f"{out}: {counted(len(result.receipts), 'shard')}{share}, {counted(result.images, 'image')}, "
        f"{counted(result.texts, 'text')} ({result.before} shards were there, "
        f"{counted(len(result.unreadable), 'picture')} skipped)"
    )
    if result.failed:
        name, reason = result.failed[0]
        raise DataError(
            f"{len(result.failed)} of {len(result.failed) + len(result.receipts)} shards could not be embedded, the "
            f"others are whole; {name}: {reason}"
        )
    if result.complete:
        place = shlex.quote(str(out))
        echo(f"next: diptych evaluate {place}   |   diptych index load {place} --index {place}.index")
    else:
        echo("not all parts are done yet: the last one to finish completes the manifest")


def whole(ctx: click.Context, param: click.Parameter, value: str) -> int:
    """A whole number that may be written with an exponent: 1e9."""
    try:
        number = float(value)
        if number != int(number):
            raise ValueError
    except (ValueError, OverflowError):
        raise click.BadParameter(
            f"'{value}' is not a whole number: write 1000000 or 1e6.", ctx, param
        ) from None
    return int(number)


def demand_flags(command: Command) -> Command:
    """A flag for each field of a demand; whole numbers may be written with an exponent."""
    for entry in reversed(dataclasses.fields(planning.Demand)):
        more: dict[str, Any] = {"type": float}
        if entry.type == "int":
            more = {"metavar": "NUMBER", "callback": whole}
        if entry.default is dataclasses.MISSING:
            more |= {"required": True}
        else:
            more |= {"default": str(entry.default)}
        command = click.option(f"--{entry.name}", help=entry.metadata["help"], **more)(command)
    return command


@click.command()
@demand_flags
@click.option("--json", "as_json", is_flag=True, help="print JSON")
def plan(as_json: bool, **demand: Any) -> None:
    """Estimate bytes, FLOP, hours and money of a large collection.

    Each number says whether it is arithmetic, given, or extrapolated from a measurement, and how far.
    """
    request = planning.Demand(**demand)
    echo(json.dumps(planning.as_json(request), indent=1) if as_json else planning.render(request))
