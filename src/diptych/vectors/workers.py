"""Embedding on the workers of a cluster: each has one model, and is told the names of shards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diptych.errors import DataError
from diptych.index.models import open_model
from diptych.model.protocol import Model
from diptych.vectors.embed import Outcome, embed_or_reason
from diptych.vectors.manifest import Receipt, is_vectors, read_manifest
from diptych.vectors.sources import Sources, open_sources

if TYPE_CHECKING:
    from diptych.vectors.on_ray import Cluster


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
    batch_size: int


def embed_on(cluster: Cluster, task: Task, names: Sequence[str], show_progress: bool) -> Iterable[Outcome]:
    """Embed shards on a cluster."""
    from diptych.vectors.on_ray import Lost

    jobs = [(task, name) for name in names]
    for number, result in cluster.run(embed_shard_of, jobs, "embed", show_progress):
        yield names[number], result.reason if isinstance(result, Lost) else result


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
