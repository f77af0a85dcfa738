"""Videos → one set of frame vectors each, in the layout that ``data.video_json`` reads.

=========================  ===================================================================================
``features/VIDEO.npy``     float16 (frames, channels): the mean of the backbone's cells of each frame
``{split}.json``           a list of ``{"videoID", "enCap"}``: the videos of a split and their texts
``skipped.txt``            videos that could not be read, with the reason; only where there are any
=========================  ===================================================================================

Beside each array lies ``VIDEO.key``, which says what it was made from: a video that is there already and unchanged is
not read again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from diptych.data.captions import Captions
from diptych.data.images import ImageInput
from diptych.encoders.backbone import Backbone
from diptych.errors import DataError, ImageError
from diptych.parts import describe
from diptych.progress import track
from diptych.storage import storing, write_text
from diptych.types import as_inputs

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
        lines = [
            f"{self.folder}: {self.videos} videos, {self.frames} frames ({self.kept} were there already)"
        ]
        lines += [f"skipped {name}: {reason}" for name, reason in self.skipped.items()]
        return "\n".join(lines)


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
    pictures: list[Image.Image] = []
    found: list[NDArray[np.float16]] = []
    fault: ImageError | None = None
    device = next(backbone.parameters()).device

    def encode() -> None:
        if pictures:
            pixels = as_inputs(image_input(pictures))
            assert isinstance(pixels, torch.Tensor)
            cells = backbone(pixels.to(device))  # (B, R, channels)
            found.append(cells.float().mean(dim=1).cpu().numpy().astype(np.float16))
            pictures.clear()

    backbone.eval()
    with torch.inference_mode():
        for row in rows:
            try:
                picture = captions.images[row]
            except ImageError as error:
                fault = error
                continue
            assert isinstance(picture, Image.Image)
            pictures.append(picture)
            if len(pictures) == batch_size:
                encode()
        encode()
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
