"""Frames of videos among the items: which video an item shows and when, and one hit for each video."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diptych.data.decode.extra_formats import is_video
from diptych.index.protocol import Hit, Item, kind_of

if TYPE_CHECKING:  # opening an index must not cost the memory of torch
    from diptych.data.captions import StoredImage

TIME = "time"  # the column of a frame's seconds


@dataclass(frozen=True, slots=True)
class Frame:
    """The place of a frame: the collection and path of its video, and the time in seconds."""

    collection: int
    video: str
    time: float


def frame_of(item: Item) -> Frame | None:
    """Which frame of which video an item is; None for anything else, whatever columns it has."""
    time: Any = item.metadata.get(TIME)
    if item.kind != "image" or not is_video(item.path) or kind_of(time) != "number":
        return None
    return Frame(item.collection, item.path, float(time))


def picture_of(item: Item, file: Path) -> StoredImage:
    """The picture of an item from its file: the file itself, or the frame of a video at its time."""
    frame = frame_of(item)
    if frame is None:
        from diptych.data.images import as_item

        return as_item(file)
    from diptych.data.decode.video_files import Video

    with Video(file) as video:
        return video.frame(frame.time)


def one_per_video(hits: Iterable[Hit]) -> list[Hit]:
    """Hits, best first, with the best frame of each video and none of its others."""
    seen: set[tuple[int, str]] = set()
    out = []
    for hit in hits:
        frame = frame_of(hit.item)
        if frame is not None:
            if (frame.collection, frame.video) in seen:
                continue
            seen.add((frame.collection, frame.video))
        out.append(hit)
    return out
