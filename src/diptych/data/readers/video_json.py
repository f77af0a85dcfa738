"""Videos as the data sets publish them: MSR-VTT's and VATEX's own JSON, with a file of frame features per video.

With ``MSRVTT_JSFUSION_test.csv`` beside ``MSRVTT_data.json`` the split is 1k-A: the videos of that list are ``test``,
with its one text each, those of ``MSRVTT_train.9k.csv`` (all others where it is not there) ``train``. The features are
``VIDEO.npy`` files, (frames, D) or (1, frames, D), below the folder or the one named by ``features``; or one HDF5 file.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from diptych.data.captions import UNSPLIT, ImageStore, canonical_split, split_in_name
from diptych.data.files import head, json_files, read_json
from diptych.data.problems import Problems
from diptych.data.readers.draft import Draft, Reader
from diptych.data.readers.frame_features import FRAMES, FrameFiles, HDF5Frames, held_in_hdf5
from diptych.errors import DataError, SettingsError, one_of
from diptych.storage import expanded

_MSRVTT = re.compile(r"\{.*?\"(?:videos|sentences|info)\"\s*:", re.DOTALL)
_VATEX = re.compile(r"\s*\[\s*\{[^{}]*?\"videoID\"\s*:")
_FILE_NAME = re.compile("video|MSRVTT_data.json")
Language = Literal["en", "zh"]
LANGUAGES: dict[Language, str] = {"en": "enCap", "zh": "chCap"}
TEST_1K_A = "MSRVTT_JSFUSION_test.csv"
TRAINING = {"validate": "val", "validation": "val"}


@dataclass
class _Clip:
    where: str
    split: str
    texts: list[Any] = field(default_factory=list)
    category: Any = None


def fill(
    draft: Draft,
    path: Path,
    features: str | Path | None = None,
    frames: int = FRAMES,
    language: Language = "en",
    train: str = "9k",
) -> ImageStore:
    """Videos with their texts; ``language`` (en, zh) is that of VATEX's texts, ``frames`` are kept at most.

    ``train`` is the training list of MSR-VTT 1k-A, where the folder has its test list.
    """
    one_of(language, "language", Language)
    problems = draft.problems
    clips: dict[str, _Clip] = {}
    for file in _files(path):
        _add(file, LANGUAGES[language], clips, problems)
    root = path if path.is_dir() else path.parent
    if (root / TEST_1K_A).is_file():
        clips = _split_1k_a(root, clips, train, problems)
    names, store = _features(root, None if features is None else expanded(features), list(clips), frames)
    hint = "a file VIDEO.npy each; say where they lie with PATH?features=FOLDER"
    problems.missing([name for name in clips if name not in names], len(clips), str(path), hint)
    for name in names:
        clip = clips[name]
        row = draft.image(name, clip.split, clip.where, labels={"category": clip.category})
        for text in clip.texts:
            draft.text(row, text, f"{clip.where}, '{name}'")
    return store


def _files(path: Path) -> list[Path]:
    def is_one(file: Path) -> bool:
        return bool(_VATEX.match(head(file)) or (_FILE_NAME.search(file.name) and _MSRVTT.match(head(file))))

    return json_files(path, is_one)


def _split_1k_a(root: Path, clips: dict[str, _Clip], train: str, problems: Problems) -> dict[str, _Clip]:
    """The videos of 1k-A: those of the test list with its one text each, and those to train on."""
    test = {row["video_id"]: row["sentence"] for row in _csv_rows(root / TEST_1K_A, "video_id", "sentence")}
    train_file = root / f"MSRVTT_train.{train}.csv"
    if train_file.is_file():
        training = [row["video_id"] for row in _csv_rows(train_file, "video_id")]
    elif train == "9k":
        training = [name for name in clips if name not in test]
    else:
        raise SettingsError(f"train='{train}' is unknown: {train_file} does not exist.")
    for name in (name for name in (*training, *test) if name not in clips):
        problems.error("list", root, f"'{name}' is listed but not in the JSON", "use files of one release")
    train_clips = {name: replace(clips[name], split="train") for name in training if name in clips}
    test_clips = {
        name: replace(clips[name], split="test", texts=[text], where=str(root / TEST_1K_A))
        for name, text in test.items()
        if name in clips
    }
    return {**train_clips, **test_clips}


def _csv_rows(path: Path, *columns: str) -> list[dict[str, str]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        header = file.readline()
        file.seek(0)
        rows = list(csv.DictReader(file, delimiter=";" if ";" in header else ","))
    if not rows or any(row.get(name) is None for row in rows for name in columns):
        raise DataError(f"{path} has no columns {' and '.join(columns)}: copy it again.")
    return rows


def _add(file: Path, field_of: str, clips: dict[str, _Clip], problems: Problems) -> None:
    entries = read_json(file, problems)
    if isinstance(entries, list):
        split = split_in_name(file.stem.replace("public_test", "test")) or UNSPLIT
        for number, entry in enumerate(entries):
            if not isinstance(entry, dict) or "videoID" not in entry:
                problems.error("json", f"{file}, entry {number}", "no videoID", "videoID and enCap")
                continue
            texts = entry.get(field_of)
            if not isinstance(texts, list):
                message = f"'{entry['videoID']}' has no texts '{field_of}'"
                problems.error("json", f"{file}, entry {number}", message, "a list of texts per video")
                continue
            clips[str(entry["videoID"])] = _Clip(str(file), split, list(texts))
        return
    entries = entries if isinstance(entries, dict) else {}
    for video in _objects(entries, "videos", file, problems):
        given = str(video.get("split") or split_in_name(file.stem) or UNSPLIT)
        split = TRAINING.get(given, canonical_split(given))
        clips[str(video.get("video_id", ""))] = _Clip(str(file), split, category=video.get("category"))
    for sentence in _objects(entries, "sentences", file, problems):
        name = str(sentence.get("video_id", ""))
        if name not in clips:
            message = f"a text of '{name}', which is not a video of the file"
            problems.error("json", file, message, "every video_id of 'sentences' among 'videos'")
            continue
        clips[name].texts.append(sentence.get("caption"))


def _objects(entries: dict[str, Any], name: str, file: Path, problems: Problems) -> Iterator[dict[str, Any]]:
    objects = entries.get(name)
    if not isinstance(objects, list) or not all(isinstance(one, dict) for one in objects):
        problems.error("json", file, f"'{name}' is not a list of objects", "the file as MSR-VTT publishes it")
        return
    yield from objects


def _features(root: Path, place: Path | None, names: list[str], frames: int) -> tuple[list[str], ImageStore]:
    if place is not None and place.is_file():
        there = held_in_hdf5(place, names)
        known = [name for name in names if name in there]
        return known, HDF5Frames(place, known, frames)
    folder = root if place is None else place
    if not folder.is_dir():
        raise DataError(f"{folder} does not exist: give the folder of the frame features.")
    files = {file.stem: file for file in sorted(folder.rglob("*.npy"))}
    known = [name for name in names if name in files]
    return known, FrameFiles([files[name] for name in known], frames)


READER = Reader(_files, fill, files=False)
