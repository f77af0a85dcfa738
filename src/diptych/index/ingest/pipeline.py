"""The one way in: images are read ahead in threads, encoded in another thread, and written in the caller's.

::

    Reader    threads       a photo opened once: hash, EXIF, picture
    Encoder   its thread    batches of pictures into vectors
    End       the caller    an index or a file of vectors; one transaction per chunk
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Generic, TypeVar

from PIL import Image

from diptych.data.arrays import read_ahead
from diptych.data.captions import Captions, StoredImage
from diptych.data.decode.opening import make_thumbnail
from diptych.errors import DataError
from diptych.index.ingest.collection_files import (
    CollectionFiles,
    collection_id,
    content_of,
    metadata_of,
    text_items,
)
from diptych.index.ingest.photos import EXIF, Decoder, PhotoColumns, PhotoFile
from diptych.index.ingest.works import BatchEncoder, End, SharedFeatures, Work
from diptych.index.protocol import Item, record
from diptych.progress import track

W = TypeVar("W")
R = TypeVar("R")
DECODERS = 4  # threads that read and decode pictures


def decoders(store: Any) -> int:
    """Threads that read a store; one where its items are quickest to read one after the other (frames of a video)."""
    return 1 if getattr(store, "sequential", False) else min(DECODERS, os.cpu_count() or 1)


class Overlap(Generic[W, R]):
    """Batches are encoded, and chunks of them finished, in one thread, in order; this thread commits what is ready.

    At most one batch is under way while the next is gathered, and one finished chunk waits. An error of the model is
    raised before anything of its chunk is committed.
    """

    def __init__(
        self,
        encode: Callable[[list[W]], None],
        finish: Callable[[list[W]], R],
        commit: Callable[[list[W], R], None],
    ) -> None:
        self._encode, self._finish, self._commit = encode, finish, commit
        self._executor = ThreadPoolExecutor(1, "encode")
        self._batches: list[Future[None]] = []  # of the chunk that is being gathered
        self._chunk: tuple[list[W], list[Future[None]], Future[R]] | None = None

    def __enter__(self) -> Overlap[W, R]:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown(cancel_futures=True)

    def encode(self, works: list[W]) -> None:
        """Begin to encode a batch, once the one before it is done."""
        if not works:
            return
        if self._batches:
            self._batches[-1].result()
        self._batches.append(self._executor.submit(self._encode, works))

    def close_chunk(self, works: list[W]) -> None:
        """Begin to finish a chunk whose batches were given before; meanwhile the previous one is committed."""
        chunk = works, self._batches, self._executor.submit(self._finish, works)
        self._batches = []
        self.commit()
        self._chunk = chunk

    def commit_if_ready(self) -> None:
        """Commit the chunk that waits, unless it is still being computed."""
        if self._chunk is not None and self._chunk[2].done():
            self.commit()

    def commit(self) -> None:
        """Commit the chunk that waits, if there is one."""
        if self._chunk is None:
            return
        works, batches, finished = self._chunk
        self._chunk = None
        for batch in batches:
            batch.result()
        self._commit(works, finished.result())


NOT_UNICODE = "its name, texts or metadata are not valid Unicode: rename the file, or mend them."


class PhotoReader:
    """Reads the images of a collection for an end; several threads may call it at once.

    ``further`` names columns that follow from the picture, ``shared`` has features of pictures that need no decoding.
    """

    def __init__(
        self,
        captions: Captions,
        files: CollectionFiles,
        end: End,
        side: int | None,
        *,
        texts: bool = True,
        thumbnails: bool = True,
        exif: bool = True,
        further: Sequence[str] = (),
        shared: SharedFeatures | None = None,
    ) -> None:
        self.captions, self.files, self.end, self.shared = captions, files, end, shared
        self.texts, self.thumbnails, self.photos = texts, thumbnails, PhotoColumns() if exif else None
        self.further = [*further, *[EXIF] * (exif and files.has_photos)]
        self.texts_of, self.decoder = captions.texts_of(), Decoder(side)

    def read(self, row: int) -> Work:
        """What is known of an image without the index; its picture where it must be encoded."""
        number = self.end.collection
        id = collection_id(str(self.captions.image_ids[row]), number)
        lines = [self.captions.texts[n] for n in self.texts_of[row]]
        metadata = metadata_of(self.captions, row)
        work = Work(row, Item(id, metadata=metadata, collection=number))
        try:
            record(replace(work.item, text="\n".join(lines)))  # what cannot be stored is not read
            with self.files.open(row) as photo:
                work.key = self.files.key(row, self.end.key_before(id), photo)
                work.item = replace(
                    work.item,
                    path=self.files.relative(row),
                    text="\n".join(lines),
                    content=content_of(work.key, lines, metadata, self.further),
                )
                if self.texts:
                    work.texts = text_items(id, lines, metadata, self.further, number)
                self.end.compare(work)
                if not work.done:
                    self._fill(work, photo)
        except (UnicodeError, DataError, OSError) as error:
            is_text = not isinstance(error.__cause__ or error, UnicodeError)
            work.picture, work.reason = None, str(error) if is_text else NOT_UNICODE
        return work

    def notes(self) -> list[str]:
        """Sentences about EXIF and about the feature cache, for the user."""
        of_photos = [] if self.photos is None else self.photos.notes()
        return of_photos + ([self.shared.note] if self.shared is not None and self.shared.note else [])

    def look(self, work: Work) -> None:
        """The picture of an image that cannot keep a vector after all."""
        with self.files.open(work.row) as photo:
            self._look(work, photo)

    def _fill(self, work: Work, photo: PhotoFile | None) -> None:
        """Columns that the file gives, and the picture."""
        if self.photos is not None and (facts := self.photos.of(work.item.id, photo)):
            metadata = {**facts, **work.item.metadata}  # the collection's own columns win
            work.item = replace(work.item, metadata=metadata)
            work.texts = [replace(text, metadata=metadata) for text in work.texts]
        if not work.keeps:
            self._look(work, photo)

    def _look(self, work: Work, photo: PhotoFile | None) -> None:
        own_file = self.files.own_file(work.row)
        if self.shared is not None and own_file:  # the image needs no thumbnail
            work.picture = self.shared.cells_of(self.files.content(work.key))
        if work.picture is None:
            work.picture, work.reduced = self._decode(work.row, photo)
        if self.thumbnails and not own_file and isinstance(work.picture, Image.Image):
            work.item = replace(work.item, thumbnail=make_thumbnail(work.picture))

    def _decode(self, row: int, photo: PhotoFile | None) -> tuple[StoredImage, bool]:
        if photo is not None:
            return self.decoder.decode(photo)
        whole = self.captions.images[row]
        found = self.decoder.reduce(whole) if isinstance(whole, Image.Image) else whole
        return found, found is not whole


CHUNK = 256  # images committed together: a killed run may have to encode two chunks again
PIXELS = 500_000  # decoded pixels per picture of a full batch; one batch is encoded while the next is read


def take_in(reader: PhotoReader, encoder: BatchEncoder, end: End, show_progress: bool = False) -> None:
    """Read every image of a collection, encode what the end wants, and let it write them chunk by chunk.

    A collection whose folder disappears meanwhile is an error, once what was read is written.
    """
    rows = range(len(reader.captions.images))
    waiting: list[Work] = []
    pending: list[Work] = []  # of those waiting, the ones whose picture is in memory
    pixels = 0
    with Overlap(encoder, end.finish, end.commit) as overlap:
        ahead = read_ahead(rows, reader.read, decoders(reader.files.store))
        for work in track(ahead, "index", len(rows), show_progress, unit="picture"):
            overlap.commit_if_ready()
            if not end.accept(work, reader.look):
                continue
            waiting.append(work)
            if work.picture is not None:
                pending.append(work)
                if isinstance(work.picture, Image.Image):
                    pixels += work.picture.width * work.picture.height
            full = len(waiting) >= CHUNK
            if full or len(pending) >= encoder.batch_size or pixels >= PIXELS * encoder.batch_size:
                overlap.encode(pending)
                pending, pixels = [], 0
            if full:
                overlap.close_chunk(waiting)
                waiting = []
        overlap.encode(pending)
        overlap.close_chunk(waiting)
        overlap.commit()
    reader.files.check_there()
