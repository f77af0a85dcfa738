"""One image of a collection as a thread reads it: its item, its texts, and its picture if that is new."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from PIL import Image

from diptych.data.captions import Captions, StoredImage
from diptych.data.decode.opening import make_thumbnail
from diptych.errors import DataError
from diptych.index.ingest.collection_files import (
    CollectionFiles,
    check_writable,
    collection_id,
    content_of,
    metadata_of,
    text_items,
)
from diptych.index.ingest.encoding import SharedFeatures
from diptych.index.ingest.photos import EXIF, Decoder, PhotoColumns, PhotoFile
from diptych.index.ingest.works import End, Work
from diptych.index.protocol import Item

NOT_UNICODE = "its name, texts or metadata are not valid Unicode: rename the file, or mend them."


class Reader:
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
            check_writable(id, lines, metadata)
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
            work.picture, work.reason = None, NOT_UNICODE if isinstance(error, UnicodeError) else str(error)
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
            work.picture = self.shared.known(self.files.content(work.key))
        if work.picture is None:
            work.picture, work.reduced = self._decoded(work.row, photo)
        if self.thumbnails and not own_file and isinstance(work.picture, Image.Image):
            work.item = replace(work.item, thumbnail=make_thumbnail(work.picture))

    def _decoded(self, row: int, photo: PhotoFile | None) -> tuple[StoredImage, bool]:
        if photo is not None:
            return self.decoder.decode(photo)
        whole = self.captions.images[row]
        found = self.decoder.reduce(whole) if isinstance(whole, Image.Image) else whole
        return found, found is not whole
