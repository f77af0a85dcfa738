"""Embedding: one shard of a data set into one file of vectors, and a folder of them by as many processes as there are.

``embed_shard`` is all of it. What surrounds it only decides who calls it for which shard: one process for all, or
``--shard i/n`` under Slurm or in a shell loop, or the workers of a Ray cluster (``on_ray.py``), each
with one model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from diptych.errors import DataError, SettingsError
from diptych.index.ingest.collection_files import CollectionFiles
from diptych.index.ingest.pipeline import PhotoReader, take_in
from diptych.index.ingest.works import ABSENT, NO_VECTOR, BatchEncoder, End, Work
from diptych.index.models import open_model
from diptych.index.protocol import Item
from diptych.machine import record_root
from diptych.model.protocol import Model, picture_side
from diptych.progress import track
from diptych.vectors.files import ShardWriter, shard_writer
from diptych.vectors.load import ShardData, Sources, open_sources
from diptych.vectors.manifest import (
    Manifest,
    Receipt,
    complete_manifest,
    is_vectors,
    join_manifest,
    read_manifest,
    read_receipt,
    shard_file,
    write_receipt,
)

if TYPE_CHECKING:
    from diptych.vectors.on_ray import Cluster

TEXTS = 4096  # encoded together


def embed_shard(
    model: Model,
    name: str,
    opened: ShardData,
    out: Path,
    *,
    texts: bool = True,
    thumbnails: bool = True,
    batch_size: int | None = None,
) -> Receipt:
    """Embed one shard: its file appears under its name when it is whole, then its receipt.

    The batches depend on the shard alone, so that whoever embeds it writes the same bytes (with another number of
    threads, sums are rounded differently). Pictures that cannot be read are listed in the receipt; a shard of which
    none can be read is refused.
    """
    with shard_writer(shard_file(out, name), model.dim) as writer:
        shard, files = ShardEnd(writer), CollectionFiles(opened.captions)
        reader = PhotoReader(opened.captions, files, shard, picture_side(model), thumbnails=thumbnails)
        take_in(reader, BatchEncoder(model, batch_size), shard)
        if not shard.kept:
            id, reason = shard.unreadable[0] if shard.unreadable else (name, "it is empty.")
            raise DataError(
                f"none of the {len(opened.captions.images)} images could be read; the first, {id}: {reason}"
            )
        if texts:
            shard.write_texts(model)
    receipt = Receipt(
        name=name,
        images=len(shard.kept),
        texts=shard.texts,
        bytes=writer.bytes,
        sha256=writer.sha256,
        source_bytes=opened.source_bytes,
        unreadable=tuple([(file, ABSENT) for file in opened.absent] + shard.unreadable),
    )
    write_receipt(out, receipt)
    return receipt


class ShardEnd(End):
    """A file of vectors, whose chunks depend on the data alone; texts wait until all images are written."""

    def __init__(self, writer: ShardWriter) -> None:
        self.writer = writer
        self.kept: list[list[Item]] = []  # the texts of each image that has a vector
        self.unreadable: list[tuple[str, str]] = []
        self.texts = 0

    def commit(self, works: list[Work], finished: Any) -> None:
        """Write a chunk of images in the order of the data."""
        for work in works:
            if not work.is_encoded:
                work.reason = work.reason or NO_VECTOR
                self.unreadable.append(work.skipped())
        good = [work for work in works if work.is_encoded]
        if good:
            rows = np.stack([work.vector for work in good if work.vector is not None])
            self.writer.write([work.item for work in good], rows)
        self.kept += [work.texts for work in good]

    def write_texts(self, model: Model) -> None:
        """Encode and write the texts of the images that were kept, in their order."""
        texts = list(chain.from_iterable(self.kept))
        for start in range(0, len(texts), TEXTS):
            items = texts[start : start + TEXTS]
            rows = model.encode_text([item.text for item in items])
            finite = np.asarray(np.isfinite(rows).all(axis=1))
            self.unreadable += [
                (item.id, NO_VECTOR) for item, good in zip(items, finite, strict=True) if not good
            ]
            self.writer.write([item for item, good in zip(items, finite, strict=True) if good], rows[finite])
            self.texts += int(finite.sum())


@dataclass
class EmbedResult:
    """What ``embed`` did: receipts of the shards of this run, how many of these were there before, and failures."""

    receipts: list[Receipt] = field(default_factory=list)
    before: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)  # (shard, reason)
    complete: bool = False

    @property
    def images(self) -> int:
        return sum(receipt.images for receipt in self.receipts)

    @property
    def texts(self) -> int:
        return sum(receipt.texts for receipt in self.receipts)

    @property
    def unreadable(self) -> list[tuple[str, str]]:
        return [pair for receipt in self.receipts for pair in receipt.unreadable]


Outcome = tuple[str, Receipt | str]
"""The name of a shard, and its receipt or the reason why there is none."""


def embed(
    model: Model,
    sources: Sources,
    out: Path,
    *,
    model_name: str = "",
    part: tuple[int, int] = (1, 1),
    texts: bool = True,
    thumbnails: bool = True,
    batch_size: int | None = None,
    retry: bool = False,
    run: Callable[[Sequence[str]], Iterable[Outcome]] | None = None,
    show_progress: bool = False,
) -> EmbedResult:
    """Embed what is not there yet of part i of n of the shards, and write the manifest.

    A shard that fails leaves the others alone. ``retry`` embeds again what has unreadable pictures. ``run`` embeds
    shards elsewhere, by their names; without it this process does it.
    """
    if sources.root:
        record_root(sources.root)
    manifest = join_manifest(
        out,
        Manifest(
            model_name, model.fingerprint(), model.dim, sources.name, sources.root, sources.names, texts,
            thumbnails, sources.digest,
        ),
    )  # fmt: skip
    options: dict[str, Any] = {"texts": texts, "thumbnails": thumbnails, "batch_size": batch_size}
    done, missing = EmbedResult(), []
    for name in sources.names[part[0] - 1 :: part[1]]:
        receipt = read_receipt(out, name)
        if receipt is None or not _is_there(out, receipt) or (retry and receipt.unreadable):
            missing.append(name)
            continue
        size = sources.size(name)
        if size is not None and size != receipt.source_bytes:
            done.failed.append((name, f"it had {receipt.source_bytes:,} bytes when it was embedded and has {size:,} "
                                "now: embed the changed data into another folder."))  # fmt: skip
            continue
        done.before += 1
        done.receipts.append(receipt)
    if run is None:
        outcomes: Iterable[Outcome] = (
            (name, embed_or_reason(model, sources, name, out, options)) for name in missing
        )
    else:
        outcomes = run(missing)
    for name, outcome in track(outcomes, "embed", len(missing), show_progress):
        if isinstance(outcome, Receipt):
            done.receipts.append(outcome)
        else:
            done.failed.append((name, outcome))
    done.complete = not done.failed and complete_manifest(out, manifest)
    return done


def embed_or_reason(
    model: Model, sources: Sources, name: str, out: Path, options: dict[str, Any]
) -> Receipt | str:
    """The receipt of a shard, or the sentence that says why it could not be embedded."""
    try:
        return embed_shard(model, name, sources.open(name), out, **options)
    except DataError as error:
        return str(error)


def parse_part(text: str) -> tuple[int, int]:
    """``2/4``: the second of four parts."""
    found = re.fullmatch(r"(\d+)/(\d+)", text.strip())
    part = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= part[0] <= part[1]:
        raise SettingsError(f"--shard {text} names no part: parts of 4 are called 1/4, 2/4, 3/4 and 4/4.")
    return part


def _is_there(out: Path, receipt: Receipt) -> bool:
    try:
        return shard_file(out, receipt.name).stat().st_size == receipt.bytes
    except OSError:
        return False


@dataclass(frozen=True)
class Task:
    """What every worker needs to know; paths must mean the same on every machine."""

    model: str
    fingerprint: str
    data: str
    rows: int
    out: Path
    device: str
    precision: str
    backend: str | None
    texts: bool
    thumbnails: bool
    batch_size: int | None


def embed_on(cluster: Cluster, task: Task, names: Sequence[str], show_progress: bool) -> Iterable[Outcome]:
    """Embed shards on a cluster."""
    from diptych.vectors.on_ray import DeadWorker

    jobs = [(task, name) for name in names]
    for number, result in cluster.run(embed_shard_of, jobs, "embed", show_progress):
        yield names[number], result.reason if isinstance(result, DeadWorker) else result


def embed_shard_of(task: Task, name: str) -> Receipt | str:
    """Embed one shard with the model of this process."""
    model, sources = _prepared(task)
    options: dict[str, Any] = {
        "texts": task.texts, "thumbnails": task.thumbnails, "batch_size": task.batch_size
    }  # fmt: skip
    return embed_or_reason(model, sources, name, task.out, options)


@lru_cache(maxsize=1)
def _prepared(task: Task) -> tuple[Model, Sources]:
    """The model and the data, opened once by each process."""
    if not is_vectors(task.out) or read_manifest(task.out).fingerprint != task.fingerprint:
        raise DataError(
            f"a worker does not see {task.out} as this machine does: write to a file system that all of them share."
        )
    sources = open_sources(task.data, task.rows)
    manifest = read_manifest(task.out)
    if (sources.names, sources.digest) != (manifest.shards, manifest.data):
        raise DataError(
            f"a worker finds other data at {task.data} than this machine: use a file system that all share."
        )
    model = open_model(task.model, task.device, task.precision, backend=task.backend)
    if model.fingerprint() != task.fingerprint:
        raise DataError(
            f"a worker finds another model at {task.model} than this machine: copy the same to all of them."
        )
    return model, sources
