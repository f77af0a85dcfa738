"""serve, watch."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import click

from diptych.cli.collection import pictures_of, summary
from diptych.cli.flags import (
    PATH,
    Command,
    backend_flags,
    backend_options,
    chance_flag,
    index_flag,
    option,
    root_flag,
    switch,
    user_flags,
)
from diptych.progress import echo
from diptych.web.limits import Limits

TOKEN_VARIABLE = "DIPTYCH_TOKEN"


def limit_flags(command: Command) -> Command:
    """``--max_body``, ``--max_k``, …: one flag per limit; none given means its default."""
    for entry in reversed(dataclasses.fields(Limits)):
        names = (f"--max_{entry.name}", f"max_{entry.name}")
        help = f"most {entry.metadata['help']}  [{entry.default}]"
        command = click.option(*names, type=int, help=help)(command)
    return command


@click.command()
@click.argument("place", metavar="INDEX")
@click.argument("pictures", nargs=-1)
@index_flag
@option("--model", "folder or name of the model (default: the model that the index records)")
@option("--host", "address to listen on", "127.0.0.1")
@option("--port", "port to listen on (0: a free one)", 8000)
@option(
    "--token",
    "token for changes; on any address but loopback, for everything",
    envvar=TOKEN_VARIABLE,
    show_envvar=True,
)
@option("--private", "ask for the token everywhere, also on loopback", is_flag=True)
@option("--allow_urls", "let queries name images on the public web", is_flag=True)
@option(
    "--cors", "site whose pages may call the API; repeatable", to="origins", multiple=True, metavar="ORIGIN"
)
@option(
    "--host_name",
    "host name that the service answers to, for instance behind a proxy; repeatable",
    to="hosts",
    multiple=True,
    metavar="NAME",
)
@root_flag
@option(
    "--reranker",
    "re-rank with the pair scorer of this run (default: the model's own); repeatable, for their mean",
    to="rerankers",
    multiple=True,
)
@chance_flag
@option(
    "--audit",
    "show the page audit.html of diptych audit at /audit, to judge pairs",
    type=PATH,
    metavar="FILE",
)
@limit_flags
@backend_flags
def serve(
    place: str,
    pictures: tuple[str, ...],
    index: str | None,
    model: str | None,
    audit: Path | None,
    **options: Any,
) -> None:
    """Search an index in the browser and over HTTP. As in: diptych serve ./photos.index.

    INDEX may also be a folder of pictures, which is indexed first: diptych serve ./photos; or a model and a folder:
    diptych serve hf:ID ./photos.
    """
    from diptych.encoders.known_names import is_pretrained_name
    from diptych.index.places import check_items, open_place
    from diptych.reports.audit import read_page
    from diptych.web.serve import serve

    collection = is_pretrained_name(place) or None
    if collection:
        model, place = place, pictures_of(place, pictures)
    elif pictures:
        raise click.UsageError(f"one index is served at a time: leave out {pictures[0]}.")
    limits = {entry.name: options.pop(f"max_{entry.name}") for entry in dataclasses.fields(Limits)}
    opened, encoder, model, place = open_place(
        place, model, **backend_options(options), index=index, pictures=collection
    )
    with opened:
        if opened.info.fingerprint == encoder.fingerprint():
            check_items(opened, encoder)
    page = read_page(audit) if audit else None
    hosts, roots = (options.pop(name) or None for name in ("hosts", "roots"))
    serve(
        place, encoder, model_name=model, audit=page, hosts=hosts, roots=roots,
        limits=Limits(**user_flags(limits)), **options,
    )  # fmt: skip


@click.command()
@click.argument("place", metavar="INDEX")
@click.argument("folder", metavar="FOLDER", type=PATH)
@option(
    "--model",
    "folder or name of the model (default: the model that the index records; for a new index lite0+minilm)",
)
@option("--interval", "seconds between two looks at the folder", 5.0, type=click.FloatRange(0, min_open=True))
@switch("texts", "index the texts too")
@click.option("--name", default="", help="name of the collection in the index (default: the data's own)")
@option("--batch_size", "pictures at a time (default: by device)", type=click.IntRange(1))
@backend_flags
def watch(place: str, folder: Path, model: str | None, interval: float, **options: Any) -> None:
    """Keep an index current while a folder changes. Ctrl-C ends it.

    New, changed and removed pictures are indexed once their files have not changed for one interval. A folder that
    disappears leaves the index as it is, and is followed again when it is back.
    """
    from diptych.encoders.known_names import recorded_name
    from diptych.index.engines.opening import index_exists, without_password
    from diptych.index.ingest.build import index_collection
    from diptych.index.ingest.works import IndexingResult
    from diptych.index.places import model_for, open_encoder
    from diptych.runs.watch import watch_folder

    if not folder.is_dir() and not index_exists(place):
        raise click.UsageError(f"there is no folder {folder} to watch: check the path.")
    name_of_model = model or model_for(place)
    retriever = open_encoder(name_of_model, place, **backend_options(options))

    def update() -> IndexingResult:
        return index_collection(retriever, folder, place, model_name=recorded_name(name_of_model), **options)

    def report(result: IndexingResult) -> str:
        skipped = "".join(f"\nskipped {item}: {reason}" for item, reason in result.skipped)
        return summary(without_password(place), result) + skipped

    def tell(sentence: str) -> None:
        echo(f"{time.strftime('%H:%M:%S')} {sentence}")

    try:
        watch_folder(folder, update, interval=interval, say=tell, summary=report)
    except KeyboardInterrupt:
        echo(f"stopped: {without_password(place)} holds what was indexed last.", err=True)
