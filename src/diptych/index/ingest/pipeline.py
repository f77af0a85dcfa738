"""The one way in: images are read ahead in threads, encoded in another thread, and written in the caller's.

::

    Reader    threads       a photo opened once: hash, EXIF, picture
    Encoder   its thread    batches of pictures into vectors
    End       the caller    an index or a file of vectors; one transaction per chunk
"""

from __future__ import annotations

from PIL import Image

from diptych.data.arrays import read_ahead
from diptych.index.ingest.encoding import Encoder
from diptych.index.ingest.overlap import Overlap, decoders
from diptych.index.ingest.reading import Reader
from diptych.index.ingest.works import End, Work
from diptych.progress import track

CHUNK = 256  # images committed together: a killed run may have to encode two chunks again
PIXELS = 500_000  # decoded pixels per picture of a full batch; one batch is encoded while the next is read


def take_in(reader: Reader, encoder: Encoder, end: End, show_progress: bool = False) -> None:
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
