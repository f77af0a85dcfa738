"""A folder of images and nothing else: every image below it, for indexing.

Hidden folders, caches and virtual environments are left out, and counted.

A file ``NAME.txt`` beside ``NAME.jpg`` holds its texts, one per line. Images below ``train/``, ``val/`` or
``test/`` belong to that split, all others to ``train``. The sub-folder of each image is kept as the label
``folder``.
"""

from __future__ import annotations

from pathlib import Path

from diptych.data.captions import Captions
from diptych.data.decode.extra_formats import left_out_by_kind
from diptych.data.decode.video_files import find_videos
from diptych.data.files import FileImages, OnDisk, find_files, is_image, left_out_folders, read_lines
from diptych.data.problems import Problems
from diptych.data.readers.draft import Draft
from diptych.data.readers.manifest import not_understood
from diptych.data.splits import SPLIT_NAMES, UNSPLIT

EXPECTED = "keys 'image' and 'text' (docs/data.md lists the formats)"


def matches(path: Path) -> bool:
    """Whether ``path`` is a folder with at least one image below it."""
    return path.is_dir() and any(map(is_image, find_files(path)))


def read(path: Path, *, problems: Problems | None = None) -> Captions:
    """Read every image below a folder, with the texts that lie beside them."""
    problems = problems or Problems()
    draft = Draft(str(path), problems)
    for file in sorted(path.glob("*.json")):
        problems.warn("not read", file, "the file looks like a list of texts but is none", EXPECTED)
    if table := not_understood(path):
        problems.not_understood(path, table)
        draft.notes.append(table)
    if (video := min(find_videos(path), default=None)) is not None:
        problems.warn(
            "not read", path, f"it holds videos ({video})", "read them with pip install 'diptych[video]'"
        )
    on_disk = OnDisk()
    left_out: list[str] = []
    files = list(find_files(path, left_out))
    draft.notes += left_out_folders(left_out)
    for note in left_out_by_kind(files):
        problems.warn("not read", path, note.rstrip("."))
        draft.notes.append(note)
    for name in sorted(filter(is_image, files)):
        parent, _, _ = name.rpartition("/")
        split = SPLIT_NAMES.get(name.split("/", 1)[0].lower(), UNSPLIT) if parent else UNSPLIT
        row = draft.image(name, split, path / name, labels={"folder": parent})
        texts = (path / name).with_suffix(".txt")
        if texts in on_disk:
            for number, line in enumerate(read_lines(texts, problems), 1):
                if line is not None and line.strip():
                    draft.text(row, line, f"{texts}:{number}")
    return draft.captions(lambda names: FileImages(path, names))
