"""The manifest of a folder of vectors, and the receipt of each of its shards.

::

    OUT/manifest.json         the model, the data, and every shard that is to be written
    OUT/shards/NAME.parquet   the vectors of one input shard, under this name only once they are whole
    OUT/shards/NAME.json      its receipt, written after it: counts, bytes, checksum, what could not be read

Nobody needs a lock: a shard is whole when its receipt is there, and no two processes that divide the work write one
file. The manifest is written before the first shard, and again, with the receipts in it, after the last one. No file
holds a time or the name of a machine, so that the same data and model give the same bytes wherever they are embedded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from diptych.entries import Entries
from diptych.errors import DataError
from diptych.storage import MISREAD, create_file, expanded, new_file, parse_json, sweep_files, write_text

FORMAT, VERSION = "diptych-embeddings", 1
MANIFEST = "manifest.json"
SHARDS = "shards"  # folder of the files
FILES = Entries(
    re.compile(r"[^/\x00]{1,250}\.(json|parquet)"),
    DataError,
    "copy the folder again from where it was made, or embed into another folder.",
)


@dataclass(frozen=True)
class Receipt:
    """What a whole shard holds. ``source_bytes`` is the size of the file it was made from (0: rows of a data set)."""

    name: str
    images: int
    texts: int
    bytes: int
    sha256: str
    source_bytes: int = 0
    unreadable: Sequence[tuple[str, str]] = ()  # (id, reason)

    @property
    def rows(self) -> int:
        return self.images + self.texts


@dataclass(frozen=True)
class Manifest:
    """Which model made the vectors of which data, and the names of all shards in order.

    ``name`` and ``root`` are those of the collection (paths of items are relative to ``root``), ``data`` a hash of
    what is divided into shards where these are not files.
    """

    model: str
    fingerprint: str
    dim: int
    name: str
    root: str
    shards: tuple[str, ...]
    texts: bool = True
    thumbnails: bool = True
    data: str = ""
    receipts: Mapping[str, Receipt] = field(default_factory=dict)  # all of them, once every shard is whole

    @property
    def complete(self) -> bool:
        """Whether every shard was whole when the manifest was written."""
        return len(self.receipts) == len(self.shards)

    def to_json(self) -> str:
        shards = []
        for name in self.shards:
            entry: dict[str, Any] = {"name": name, "file": f"{SHARDS}/{name}.parquet"}
            if self.complete:
                entry |= asdict(self.receipts[name]) | {"rows": self.receipts[name].rows}
            shards.append(entry)
        content = {
            "format": FORMAT,
            "version": VERSION,
            "complete": self.complete,
            "model": {"name": self.model, "fingerprint": self.fingerprint},
            "dim": self.dim,
            "dtype": "float32",
            "collection": {"name": self.name, "root": self.root},
            "texts": self.texts,
            "thumbnails": self.thumbnails,
            "data": self.data,
            "shards": shards,
        }
        return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def is_vectors(folder: str | Path) -> bool:
    """Whether a folder is one that ``diptych embed`` wrote."""
    try:
        content = parse_json(FILES.read(expanded(folder) / MANIFEST))
    except (OSError, ValueError, DataError):
        return False
    return isinstance(content, dict) and content.get("format") == FORMAT


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder."""
    file = folder / MANIFEST
    try:
        content = parse_json(FILES.read(file))
        found = content["format"], content["version"]
        if found[0] != FORMAT:
            raise ValueError(f"its format is {found[0]!r}")
        if found[1] != VERSION:
            raise DataError(f"{file} has version {found[1]}, this diptych reads {VERSION}: update diptych.")
        shards = tuple(_name(entry["name"]) for entry in content["shards"])
        if len(set(shards)) != len(shards):
            raise ValueError("it names a shard twice")
        receipts = {}
        if content["complete"]:
            receipts = {entry["name"]: _receipt(entry) for entry in content["shards"]}
        collection = content["collection"]
        return Manifest(
            str(content["model"]["name"]), str(content["model"]["fingerprint"]), int(content["dim"]),
            str(collection["name"]), str(collection["root"]), shards, bool(content["texts"]),
            bool(content["thumbnails"]), str(content["data"]), receipts,
        )  # fmt: skip
    except FileNotFoundError:
        raise DataError(
            f"{folder} holds no vectors (no {MANIFEST}): give the folder that diptych embed wrote."
        ) from None
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}): check that you may read it.") from error
    except MISREAD as error:
        raise DataError(
            f"{file} is not a manifest of vectors ({error}): copy it again, or embed into another folder."
        ) from error


def join_manifest(folder: Path, wanted: Manifest) -> Manifest:
    """Begin a folder with this manifest, or go on with the one that is there, if it is of the same work."""
    if create_file(folder / MANIFEST, wanted.to_json().encode()):
        return wanted
    found = read_manifest(folder)
    if found.fingerprint != wanted.fingerprint:
        raise DataError(
            f"{folder} holds vectors of another model, {found.model} ({found.fingerprint}), not of {wanted.model} "
            f"({wanted.fingerprint}): embed into another folder."
        )
    if found.shards != wanted.shards or found.data != wanted.data:
        differs = sorted({*found.shards} ^ {*wanted.shards})
        what = f"{differs[0]} is in one of the two only" if differs else "the pictures or texts have changed"
        raise DataError(
            f"{folder} was started with other data, {len(found.shards)} shards of {found.name} ({what}): "
            "embed into another folder, or give the data it was started with."
        )
    for flag in ("texts", "thumbnails"):
        if getattr(found, flag) != getattr(wanted, flag):
            raise DataError(
                f"{folder} was started {'with' if getattr(found, flag) else 'without'} {flag}: "
                "embed in the same way, or into another folder."
            )
    return found


def complete_manifest(folder: Path, manifest: Manifest) -> bool:
    """Put the receipts into the manifest if all are there, and remove what killed processes left; whether they were."""
    receipts = {name: receipt for name in manifest.shards if (receipt := read_receipt(folder, name))}
    if len(receipts) < len(manifest.shards):
        return False
    sweep_files(folder / SHARDS)
    written = replace(manifest, receipts=receipts).to_json()
    if FILES.read(folder / MANIFEST) != written.encode():
        write_text(folder / MANIFEST, written)
    return True


def shard_file(folder: Path, name: str) -> Path:
    """The file of a shard."""
    return FILES.path(_shards(folder), f"{name}.parquet")


def _shards(folder: Path) -> Path:
    """The folder of the files, which is a folder of its own and no link to another."""
    shards = folder / SHARDS
    if shards.is_symlink() or (shards.exists() and not shards.is_dir()):
        raise DataError(f"{shards} is a link or no folder: copy the folder again from where it was made.")
    return shards


def read_receipt(folder: Path, name: str) -> Receipt | None:
    """The receipt of a shard; None when it is not whole yet, or a damaged one, whose shard is written again."""
    try:
        return _receipt(parse_json(FILES.read(FILES.path(_shards(folder), f"{name}.json"))))
    except (OSError, *MISREAD):
        return None


def write_receipt(folder: Path, receipt: Receipt) -> None:
    """Say that a shard is whole."""
    content = asdict(receipt) | {"file": f"{SHARDS}/{receipt.name}.parquet", "rows": receipt.rows}
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    with new_file(FILES.path(_shards(folder), f"{receipt.name}.json")) as handle:
        handle.write(text.encode())


def _receipt(content: Mapping[str, Any]) -> Receipt:
    return Receipt(
        name=_name(content["name"]),
        images=int(content["images"]),
        texts=int(content["texts"]),
        bytes=int(content["bytes"]),
        sha256=str(content["sha256"]),
        source_bytes=int(content["source_bytes"]),
        unreadable=tuple((str(id), str(reason)) for id, reason in content["unreadable"]),
    )


def _name(name: object) -> str:
    """A name that is one file in the folder of shards: a manifest from elsewhere must not lead out of it."""
    if (
        not isinstance(name, str)
        or not name
        or Path(name).name != name
        or name in (".", "..")
        or "\x00" in name
    ):
        raise ValueError(f"{name!r} is not a name of a shard")
    return name
