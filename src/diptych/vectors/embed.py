"""Embedding: one shard of a data set into one file of vectors, and a folder of them by as many processes as there are.

``embed_shard`` is all of it. What surrounds it only decides who calls it for which shard: one process for all, or
``--shard i/n`` under Slurm or in a shell loop, or the workers of a Ray cluster (``on_ray.py``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from diptych.data.ahead import read_ahead
from diptych.data.captions import StoredImage
from diptych.data.thumbnails import make_thumbnail
from diptych.errors import DataError, SettingsError
from diptych.index.ingest.collection_files import (
    CollectionFiles,
    check_writable,
    content_of,
    metadata_of,
    text_items,
)
from diptych.index.ingest.overlap import Overlap, decoders
from diptych.index.ingest.photos import EXIF, PhotoColumns
from diptych.index.ingest.works import NOT_FINITE, reason_of
from diptych.index.protocol import Item, Vectors
from diptych.model.protocol import Model
from diptych.progress import track
from diptych.vectors.files import ShardWriter, shard_writer
from diptych.vectors.manifest import (
    Manifest,
    Receipt,
    complete_manifest,
    join_manifest,
    read_receipt,
    shard_file,
    write_receipt,
)
from diptych.vectors.sources import Opened, Sources

CHUNK = 256  # images written together
PIXELS = 64_000_000  # decoded pixels of a batch; one batch is encoded while the next is read
TEXTS = 4096  # encoded together
ABSENT = "it is named by the data but not on disk."


@dataclass(slots=True)
class _Picture:
    """An image on its way into a file; ``reason`` says why it cannot be."""

    item: Item
    texts: list[Item] = field(default_factory=list)
    picture: StoredImage | None = None
    vector: Vectors | None = None
    reason: str = ""


def embed_shard(
    model: Model,
    name: str,
    opened: Opened,
    out: Path,
    *,
    texts: bool = True,
    thumbnails: bool = True,
    batch_size: int = 64,
) -> Receipt:
    """Embed one shard: its file appears under its name when it is whole, then its receipt.

    The batches depend on the shard alone, so that whoever embeds it writes the same bytes (with another number of
    threads, sums are rounded differently). Pictures that cannot be read are listed in the receipt; a shard of which
    none can be read is refused.
    """
    with shard_writer(shard_file(out, name), model.dim) as writer:
        shard = _Shard(model, opened, writer, thumbnails, batch_size)
        shard.write_images()
        if not shard.kept:
            id, reason = shard.unreadable[0] if shard.unreadable else (name, "it is empty.")
            raise DataError(
                f"none of the {len(opened.captions.images)} images could be read; the first, {id}: {reason}"
            )
        if texts:
            shard.write_texts()
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


class _Shard:
    """One shard on its way into one file."""

    def __init__(
        self, model: Model, opened: Opened, writer: ShardWriter, thumbnails: bool, batch_size: int
    ) -> None:
        self.model, self.captions, self.writer = model, opened.captions, writer
        self.thumbnails, self.batch_size = thumbnails, batch_size
        self.files, self.texts_of = CollectionFiles(self.captions), self.captions.texts_of()
        self.photos, self.further = PhotoColumns(), [EXIF] * self.files.has_photos
        self.kept: list[list[Item]] = []  # the texts of each image that has a vector
        self.unreadable: list[tuple[str, str]] = []
        self.texts = 0

    def write_images(self) -> None:
        """Pictures are read ahead in threads, encoded in another, and written in this one."""
        waiting: list[_Picture] = []
        pending: list[_Picture] = []  # of those waiting, the ones that are not being encoded
        pixels = 0
        with Overlap(self.encode, lambda _: None, self.commit) as overlap:
            for read in read_ahead(range(len(self.captions.images)), self.read, decoders(self.files.store)):
                overlap.commit_if_ready()
                waiting.append(read)
                if not read.reason:
                    pending.append(read)
                    picture = read.picture
                    pixels += picture.width * picture.height if isinstance(picture, Image.Image) else 0
                full = len(waiting) >= CHUNK
                if full or len(pending) >= self.batch_size or pixels >= PIXELS:
                    overlap.encode(pending)
                    pending, pixels = [], 0
                if full:
                    overlap.close_chunk(waiting)
                    waiting = []
            overlap.encode(pending)
            overlap.close_chunk(waiting)
            overlap.commit()

    def read(self, row: int) -> _Picture:
        """What a thread finds of one image."""
        id = str(self.captions.image_ids[row])
        lines = [self.captions.texts[n] for n in self.texts_of[row]]
        metadata = metadata_of(self.captions, row)
        found = _Picture(Item(id=id, metadata=metadata))
        try:
            check_writable(id, lines, metadata)
            content = content_of(self.files.key(row, ""), lines, metadata, self.further)
            texts = text_items(id, lines, metadata, self.further)
            metadata = {**self.photos.of(id, self.files.photo(row)), **metadata}  # its own columns win
            found.texts = [replace(text, metadata=metadata) for text in texts]
            found.picture = self.captions.images[row]
            found.item = Item(
                id=id,
                path=self.files.relative(row),
                text="\n".join(lines),
                metadata=metadata,
                content=content,
                thumbnail=self.thumbnail(row, found.picture),
            )
        except (UnicodeError, DataError, OSError) as error:
            found.reason, found.picture = reason_of(error), None
        return found

    def thumbnail(self, row: int, picture: StoredImage) -> bytes | None:
        """A small picture of an image that has no file of its own to make one from later."""
        if not self.thumbnails or self.files.own_file(row) or not isinstance(picture, Image.Image):
            return None
        return make_thumbnail(picture)

    def encode(self, pending: list[_Picture]) -> None:
        """Turn pictures into vectors, and let go of them."""
        if not pending:
            return
        rows = self.model.encode_image([one.picture for one in pending], batch_size=self.batch_size)
        for one, vector in zip(pending, rows, strict=True):
            one.vector, one.picture = vector, None

    def commit(self, pictures: list[_Picture], _: None) -> None:
        """Write a chunk of images in the order of the data."""
        good = []
        for one in pictures:
            if not one.reason and (one.vector is None or not np.isfinite(one.vector).all()):
                one.reason = NOT_FINITE
            if one.reason:
                self.unreadable.append((one.item.id.encode("utf-8", "replace").decode(), one.reason))
            else:
                good.append(one)
        if good:
            self.writer.write(
                [one.item for one in good], np.stack([one.vector for one in good if one.vector is not None])
            )
        self.kept += [one.texts for one in good]

    def write_texts(self) -> None:
        """Encode and write the texts of the images that were kept, in their order."""
        for items in _chunks(chain.from_iterable(self.kept), TEXTS):
            rows = self.model.encode_text([item.text for item in items])
            finite = np.asarray(np.isfinite(rows).all(axis=1))
            self.unreadable += [
                (item.id, NOT_FINITE) for item, good in zip(items, finite, strict=True) if not good
            ]
            self.writer.write([item for item, good in zip(items, finite, strict=True) if good], rows[finite])
            self.texts += int(finite.sum())


@dataclass
class Embedded:
    """What ``embed`` did: receipts of the shards of this run, how many of these were there before, and failures."""

    receipts: list[Receipt] = field(default_factory=list)
    before: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)  # (shard, reason)
    complete: bool = False

    @property
    def images(self) -> int:
        """Images that have a vector."""
        return sum(receipt.images for receipt in self.receipts)

    @property
    def texts(self) -> int:
        """Texts that have a vector."""
        return sum(receipt.texts for receipt in self.receipts)

    @property
    def unreadable(self) -> list[tuple[str, str]]:
        """Every picture that could not be read, with the reason."""
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
    batch_size: int = 64,
    retry: bool = False,
    run: Callable[[Sequence[str]], Iterable[Outcome]] | None = None,
    show_progress: bool = False,
) -> Embedded:
    """Embed what is not there yet of part i of n of the shards, and write the manifest.

    A shard that fails leaves the others alone. ``retry`` embeds again what has unreadable pictures. ``run`` embeds
    shards elsewhere, by their names; without it this process does it.
    """
    manifest = join_manifest(
        out,
        Manifest(
            model_name, model.fingerprint(), model.dim, sources.name, sources.root, sources.names, texts,
            thumbnails, sources.digest,
        ),
    )  # fmt: skip
    options: dict[str, Any] = {"texts": texts, "thumbnails": thumbnails, "batch_size": batch_size}
    done, missing = Embedded(), []
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


def _chunks(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    chunk: list[Item] = []
    for item in items:
        chunk.append(item)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
