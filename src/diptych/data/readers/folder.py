"""Folders of images or videos and nothing else: every one of them below the folder, for indexing.

A file ``NAME.txt`` beside ``NAME.jpg`` or ``NAME.mp4`` holds its texts, one per line. Images below ``train/``, ``val/``
or ``test/`` belong to that split. Frames of a video are called ``VIDEO#t=SECONDS``; its texts belong to the first.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diptych.data.captions import SPLIT_NAMES, UNSPLIT, StoredImage
from diptych.data.decode.extra_formats import is_image, is_video, left_out_by_kind
from diptych.data.decode.opening import open_image
from diptych.data.decode.video_files import Video, can_read_videos, sample_times
from diptych.data.files import (
    FileImages,
    OnDisk,
    content_hash,
    find_files,
    find_images,
    find_videos,
    left_out_folders,
    read_lines,
)
from diptych.data.readers.draft import Draft, Reader
from diptych.data.readers.manifest import not_understood
from diptych.errors import ImageError, SettingsError, at_least

EXPECTED = "keys 'image' and 'text' (docs/data.md lists the formats)"
EVERY = 1.0  # seconds between frames
MOST = 600  # frames of a video


def is_folder(path: Path) -> bool:
    """Whether ``path`` is a folder with at least one image below it."""
    return path.is_dir() and any(map(is_image, find_files(path)))


def fill_images(draft: Draft, path: Path) -> FileImages:
    """Read every image below a folder, with the texts that lie beside them."""
    problems = draft.problems
    for file in sorted(path.glob("*.json")):
        problems.warn("not read", file, "the file looks like a list of texts but is none", EXPECTED)
    if table := not_understood(path):
        problems.not_understood(path, table)
        draft.notes.append(table)
    if (video := min(find_videos(path), default=None)) is not None:
        problems.warn("not read", path, f"it holds videos ({video})", "pip install 'diptych[video]'")
    left_out: list[str] = []
    files = list(find_files(path, left_out))
    draft.notes += left_out_folders(left_out)
    for note in left_out_by_kind(files):
        problems.warn("not read", path, note.rstrip("."))
        draft.notes.append(note)
    on_disk = OnDisk()
    for name in sorted(filter(is_image, files)):
        row = _add(draft, path, name, {})
        _add_texts(draft, row, (path / name).with_suffix(".txt"), on_disk)
    return FileImages(path, draft.keys)


def has_videos(path: Path) -> bool:
    """Whether ``path`` is a folder with a video below it, and either no image or the means to read videos."""
    if not path.is_dir() or next(find_videos(path), None) is None:
        return False
    pictures = any(map(is_image, find_files(path)))
    return not pictures or can_read_videos()


def fill_videos(draft: Draft, path: Path, every: float | str = EVERY, most: int = MOST) -> FrameImages:
    """Frames of every video below a folder, one each ``every`` seconds, ``most`` of a video at most."""
    seconds = _seconds(every)
    at_least(most, "most", 1)
    on_disk = OnDisk()
    draft.notes = left_out_by_kind(find_files(path))
    for note in draft.notes:
        draft.problems.warn("not read", path, note.rstrip("."))
    names: list[str] = []
    times: list[float | None] = []
    for name in sorted([*find_videos(path), *find_images(path)]):
        places: Sequence[float | None] = _times(path / name, seconds, most) if is_video(name) else [None]
        for number, time in enumerate(places):
            row = _add(draft, path, name, {"video": None if time is None else name, "time": time})
            names.append(name)
            times.append(time)
            if number == 0:
                _add_texts(draft, row, (path / name).with_suffix(".txt"), on_disk)
    return FrameImages(path, names, times)


class FrameImages:
    """Frames of video files, and images beside them (time None), opened on access.

    The video that was read last stays open: frames asked for in order are decoded once.
    """

    features = False

    sequential = True  # frames of a video are quickest one after the other

    def __init__(self, root: Path, names: Sequence[str], times: Sequence[float | None]) -> None:
        self.root, self.names, self.times = root, names, times
        self._keys: dict[str, str] = {}
        self._lock = threading.Lock()
        self._open: Video | None = None

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> StoredImage:
        time = self.times[index]
        if time is None:
            return open_image(self.path(index))
        with self._lock:  # a decoder has one place in its file
            path = self.path(index)
            if self._open is None or self._open.path != path:
                if self._open is not None:
                    self._open.close()
                self._open = None
                self._open = Video(path)
            return self._open.frame(time)

    def path(self, index: int) -> Path:
        return self.root / self.names[index]

    def content_key(self, index: int) -> str:
        name, time = self.names[index], self.times[index]
        if name not in self._keys:
            with (self.root / name).open("rb") as handle:
                size = os.fstat(handle.fileno()).st_size
                # compressed: four pages stand for all
                suffix = ".jpg" if is_video(name) else Path(name).suffix
                self._keys[name] = content_hash(handle, 0, size, suffix)
        return self._keys[name] if time is None else f"{self._keys[name]}@{time:g}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None, "_open": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())


def _add(draft: Draft, path: Path, name: str, labels: dict[str, Any]) -> int:
    """The row of an image, or of a frame of a video at a time."""
    parent, _, _ = name.rpartition("/")
    split = SPLIT_NAMES.get(name.split("/", 1)[0].lower(), UNSPLIT) if parent else UNSPLIT
    key = name if labels.get("time") is None else f"{name}#t={labels['time']:g}"
    return draft.image(key, split, path / name, labels={"folder": parent, **labels})


def _add_texts(draft: Draft, row: int, file: Path, on_disk: OnDisk) -> None:
    for number, line in enumerate(read_lines(file, draft.problems) if file in on_disk else (), 1):
        if line is not None and line.strip():
            draft.text(row, line, f"{file}:{number}")


def _times(path: Path, every: float, most: int) -> list[float]:
    """Times of the frames of a video; one of a video that cannot be read: asking for it says why."""
    try:
        with Video(path) as video:
            return sample_times(video.duration, every, most)
    except ImageError:
        return [0.0]


def _seconds(every: float | str) -> float:
    try:
        seconds = float(every)
    except ValueError:
        seconds = 0.0
    if not 0.01 <= seconds < float("inf"):
        raise SettingsError(f"every='{every}' is not a distance of frames: give seconds, from 0.01 on.")
    return seconds


IMAGES, VIDEOS = Reader(is_folder, fill_images, files=False), Reader(has_videos, fill_videos, files=False)
