"""Images → grid features in the precomputed layout that published code and ``data.readers.precomputed`` read.

=========================  =================================================================================
``{split}_ims.npy``        float16 (images, cells, channels), one row per image
``{split}_caps.txt``       one text per line; the texts of an image follow one another
``{split}_ids.txt``        the data's own id of each image, one per line
``{split}_image_of.txt``   the row of each text's image, one per line; only where some image does not have the
                           five texts that the published layout takes for granted
``{split}_skipped.txt``    images that could not be read, with the reason; only where there are any
=========================  =================================================================================

The split ``val`` is called ``dev`` in file names, as everywhere in that layout.

Videos → one set of frame vectors each, in the layout that ``data.readers.video_json`` reads.

=========================  ===================================================================================
``features/VIDEO.npy``     float16 (frames, channels): the mean of the backbone's cells of each frame
``{split}.json``           a list of ``{"videoID", "enCap"}``: the videos of a split and their texts
``skipped.txt``            videos that could not be read, with the reason; only where there are any
=========================  ===================================================================================

Beside each array lies ``VIDEO.key``, which says what it was made from: a video that is there already and unchanged is
not read again.

Fill the cache of teacher vectors before training: what ``diptych teach`` does.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from diptych.cache.contents import content_name
from diptych.cache.features import Chunk, cache_image_features, compute_cells
from diptych.cache.rows import RowFile
from diptych.data.arrays import ranges
from diptych.data.captions import Captions, ImageStore, StoreRows, holds_pictures
from diptych.data.formats import open_captions
from diptych.data.held_out import training_splits
from diptych.data.images import ImageInput
from diptych.data.problems import LeftOut, ToBeLeftOut, undecodable, unopenable
from diptych.devices import pick_device
from diptych.encoders.encoder import Backbone
from diptych.errors import DataError, ImageError
from diptych.parts import describe
from diptych.progress import track
from diptych.storage import storing, write_text
from diptych.training.teachers import Teachers
from diptych.types import as_inputs

TEXTS_PER_IMAGE = 5  # texts per image in the published layout
COPIED = 256  # images whose features are copied from the cache at a time


@dataclass
class Extraction:
    """What was written: images and texts by split, and the images that were skipped, with the reason."""

    folder: Path
    shape: tuple[int, ...] = ()
    images: dict[str, int] = field(default_factory=dict)
    texts: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [
            f"{self.folder / file_name(split)}_ims.npy: {count} × {self.shape}, {self.texts[split]} texts"
            for split, count in self.images.items()
        ]
        if self.skipped:
            lines.append(f"skipped {len(self.skipped)} images that could not be read:")
            lines += [f"  {image_id}: {reason}" for image_id, reason in list(self.skipped.items())[:10]]
            if len(self.skipped) > 10:
                lines.append(f"  … all are in {self.folder}/*_skipped.txt")
        return "\n".join(lines)


def extract(
    captions: Captions,
    backbone: Backbone,
    image_input: ImageInput,
    output_dir: str | Path,
    *,
    batch_size: int | None = None,
    cache: bool = True,
    show_progress: bool = True,
) -> Extraction:
    """Write every split of ``captions``; run again after an interruption, it goes on where it stopped.

    With ``cache``, pictures whose features another command has computed are not computed again, and the other way
    round. Features of another backbone or of other images in ``output_dir`` are never overwritten: that is an error.
    """
    if not len(captions.images):
        raise DataError(f"{captions.name} holds no images: give a folder with some.")
    folder = Path(output_dir)
    result = Extraction(folder)
    for split in dict.fromkeys(captions.splits):
        part = captions.split(split)
        with RowFile(folder / f"{file_name(split)}_ims.npy", _key(part, backbone, image_input)) as file:
            if not file.finished:
                compute = _cached_chunks if cache else compute_cells
                how: dict[str, Any] = {"label": f"extract {split}", "show_progress": show_progress}
                how |= {"batch_size": batch_size, "skip": True}
                for chunk in compute(backbone, image_input, part.images, file.progress.done, **how):
                    failures = {str(row): reason for row, reason in chunk.failures.items()}
                    file.append(chunk.values(), chunk.images, failures)
                if file.progress.rows == 0:
                    reason = next(iter(file.progress.notes.values()))
                    file.discard()
                    raise DataError(f"no image of split '{split}' could be read; the first: {reason}")
                file.finish()
            failed = {int(row): reason for row, reason in file.progress.notes.items()}
            result.shape = file.progress.row_shape
        kept = part.subset([row for row in range(len(part.images)) if row not in failed])
        skipped = {part.image_ids[row]: reason for row, reason in sorted(failed.items())}
        _write_lists(folder, file_name(split), kept, skipped)
        result.images[split], result.texts[split] = len(kept.images), len(kept.texts)
        result.skipped.update(skipped)
    return result


def _cached_chunks(
    backbone: Backbone, image_input: ImageInput, store: ImageStore, start: int, **how: Any
) -> Iterator[Chunk]:
    """What ``compute_cells`` gives, through the cache."""
    left = StoreRows(store, np.arange(start, len(store)))
    cached = cache_image_features(backbone, image_input, left, **how)
    for rows in ranges(0, len(left), COPIED):
        good = [row for row in rows if row not in cached.unreadable]
        failures = {start + row: cached.unreadable[row] for row in rows if row in cached.unreadable}
        yield Chunk(len(rows), [cached.rows(good)] if good else [], failures)


def file_name(split: str) -> str:
    """What a split is called in the names of its files."""
    return "dev" if split == "val" else split


def _write_lists(folder: Path, name: str, part: Captions, skipped: dict[str, str]) -> None:
    write_text(folder / f"{name}_ids.txt", _lines(part.image_ids))
    write_text(folder / f"{name}_caps.txt", _lines(part.texts))
    counts = np.bincount(part.image_of, minlength=len(part.images))
    if not (counts == TEXTS_PER_IMAGE).all():
        write_text(folder / f"{name}_image_of.txt", _lines(part.image_of.tolist()))
    if skipped:
        write_text(
            folder / f"{name}_skipped.txt", _lines([f"{k}\t{reason}" for k, reason in skipped.items()])
        )


def _lines(values: Iterable[object]) -> str:
    # a text that spans lines would become several
    return "".join(" ".join(str(value).splitlines()) + "\n" for value in values)


def _key(part: Captions, backbone: Backbone, image_input: ImageInput) -> str:
    contents = hashlib.sha256()
    for row, image_id in enumerate(part.image_ids):
        try:
            key = part.images.content_key(row)
        except (ImageError, OSError):
            key = "unreadable"
        contents.update(f"{image_id}\0{key}\0".encode())
    return content_name(backbone.fingerprint(), json.dumps(describe(image_input)), contents.hexdigest())


BATCH = 16  # frames at a time


@dataclass
class FrameExtraction:
    """What was written: videos and frames, and the videos that were skipped, with the reason."""

    folder: Path
    videos: int = 0
    frames: int = 0
    kept: int = 0  # of the videos, those that were there already
    skipped: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        first = f"{self.folder}: {self.videos} videos, {self.frames} frames ({self.kept} were there already)"
        return "\n".join([first, *(f"skipped {name}: {reason}" for name, reason in self.skipped.items())])


def extract_frames(
    captions: Captions,
    backbone: Backbone,
    image_input: ImageInput,
    output_dir: str | Path,
    *,
    batch_size: int | None = None,
    show_progress: bool = True,
) -> FrameExtraction:
    """Write the frame vectors of every video of ``captions``; run again, it does what is missing."""
    folder = Path(output_dir)
    rows_of = _videos(captions)
    texts_of = captions.texts_of()
    made = f"{backbone.fingerprint()} {json.dumps(describe(image_input), sort_keys=True)}"
    result = FrameExtraction(folder)
    lists: dict[str, list[dict[str, object]]] = {split: [] for split in dict.fromkeys(captions.splits)}
    with storing(folder):
        (folder / "features").mkdir(parents=True, exist_ok=True)
    for video, rows in track(rows_of.items(), "extract frames", len(rows_of), show_progress):
        name = video.replace("/", "__")
        place = folder / "features" / f"{name}.npy"
        try:
            key = f"{made} {[captions.images.content_key(row) for row in rows]}"
            if _is_there(place, key):
                result.kept += 1
            else:
                _write(place, key, _vectors(captions, rows, backbone, image_input, batch_size or BATCH))
        except (ImageError, OSError) as error:
            result.skipped[video] = str(error)
            continue
        result.videos += 1
        result.frames += len(np.load(place, mmap_mode="r"))
        texts = [captions.texts[n] for row in rows for n in texts_of[row].tolist()]
        lists[captions.splits[rows[0]]].append({"videoID": name, "enCap": texts})
    if not result.videos:
        reason = next(iter(result.skipped.values()))
        raise DataError(f"no video of {captions.name} could be read; the first: {reason}")
    for split, entries in lists.items():
        if entries:
            write_text(folder / f"{split}.json", json.dumps(entries, ensure_ascii=False, indent=1))
    if result.skipped:
        write_text(folder / "skipped.txt", "".join(f"{k}\t{v}\n" for k, v in result.skipped.items()))
    return result


def _videos(captions: Captions) -> dict[str, list[int]]:
    """The rows of the frames of each video, in their order."""
    out: dict[str, list[int]] = {}
    for row, video in enumerate(captions.labels.get("video", ())):
        if video is not None:
            out.setdefault(str(video), []).append(row)
    if not out:
        raise DataError(f"{captions.name} holds no videos: leave --frames out, or give a folder of videos.")
    return out


def _vectors(
    captions: Captions, rows: Sequence[int], backbone: Backbone, image_input: ImageInput, batch_size: int
) -> NDArray[np.float16]:
    """(frames, channels) of one video; frames that cannot be decoded are left out, unless none can."""
    found: list[NDArray[np.float16]] = []
    fault: ImageError | None = None
    device = next(backbone.parameters()).device
    backbone.eval()
    for start in range(0, len(rows), batch_size):
        pictures: list[Image.Image] = []
        for row in rows[start : start + batch_size]:
            try:
                picture = captions.images[row]
            except ImageError as error:
                fault = error
                continue
            assert isinstance(picture, Image.Image)
            pictures.append(picture)
        if pictures:
            pixels = as_inputs(image_input(pictures))
            assert isinstance(pixels, torch.Tensor)
            with torch.inference_mode():
                cells = backbone(pixels.to(device))  # (B, R, channels)
            found.append(cells.float().mean(dim=1).cpu().numpy().astype(np.float16))
    if not found:
        assert fault is not None
        raise fault
    return np.concatenate(found)


def _is_there(place: Path, key: str) -> bool:
    beside = place.with_suffix(".key")
    return place.is_file() and beside.is_file() and beside.read_text("utf-8") == key


def _write(place: Path, key: str, values: NDArray[np.float16]) -> None:
    """The array first, then what it was made from: without the second it is made again."""
    with storing(place):
        place.with_suffix(".key").unlink(missing_ok=True)
        with place.open("wb") as file:
            np.save(file, values)
        write_text(place.with_suffix(".key"), key)


def teach(teachers: Teachers, data: str) -> Iterator[str]:
    """Vectors of the training images and texts, and of the validation texts, by which neighbours are judged.

    A sentence for each matrix. What is there already is not computed again; after an interruption the same command goes
    on. Pictures that cannot be read are left out, as in training.
    """
    training, validation = readable_splits(data)
    device = pick_device()
    wanted = ("train", "images", training), ("train", "texts", training), ("val", "texts", validation)
    for split, of, captions in wanted:
        start = time.perf_counter()
        make = teachers.image_vectors if of == "images" else teachers.text_vectors
        vectors = make(captions, device=device)
        (count, width), path = vectors.shape, vectors.path
        size = path.stat().st_size / 2**20 if path is not None else 0.0
        seconds = time.perf_counter() - start
        yield f"{split}: {count:,} {of} × {width:,}, {size:,.1f} MB, {seconds:.1f} s: {path}"


def readable_splits(data: str, *, show_progress: bool = True) -> tuple[Captions, Captions]:
    """The training and validation captions that a run would use, without pictures that cannot be read; says which."""
    captions, left_out = open_captions(data, problems=ToBeLeftOut()), LeftOut()
    parts = []
    for part in training_splits(captions):
        part = left_out.add(part, unopenable(part.images))
        if part.unreadable == "stop" and holds_pictures(part.images):
            part = left_out.add(part, undecodable(part.images, show_progress=show_progress))
        parts.append(part)
    left_out.tell(len(captions.images), advice=False)
    return parts[0], parts[1]
