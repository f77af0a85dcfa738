"""Collections live: moved folders are known again, items leave by collection, filter or missing file."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path

import pytest
from colour_model import WORDS, ColourModel, colour_photos
from commands import diptych, process, refused
from PIL import Image
from servers import Server
from small import pictures

from diptych.errors import IndexFault
from diptych.index.engines.opening import open_index
from diptych.index.ingest import collection_files
from diptych.index.ingest.build import index_collection
from diptych.index.ingest.works import IndexingResult
from diptych.runs.watch import look, watch_folder

names = itertools.count()


@pytest.fixture(params=["embedded", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "embedded":
        return str(tmp_path / "an.index")
    running: Server = request.getfixturevalue("server")
    return running.index_url(f"live{next(names)}")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return colour_photos(tmp_path / "photos", "a {} square")


def numbers(built: IndexingResult) -> tuple[int, ...]:
    return built.images, built.added, built.updated, built.moved, built.unchanged, built.removed, built.total


# --- moving


def test_a_renamed_folder_is_the_same_collection(photos: Path, place: str, tmp_path: Path) -> None:
    model = ColourModel()
    index_collection(model, photos, place)
    new = tmp_path / "elsewhere" / "pictures"
    new.parent.mkdir()
    photos.rename(new)
    again = ColourModel()
    built = index_collection(again, new, place)
    assert numbers(built) == (4, 0, 0, 0, 4, 0, 4)
    assert built.notes == [f"moved here from {photos}: known by its pictures."]
    assert (again.encoded_images, again.encoded_texts) == (0, 0)
    with open_index(place) as index:
        assert len(index) == 8
        (only,) = index.info.collections
        assert (only.number, only.root) == (0, str(new))
        (item,) = index.get(["r/red.png"])
        assert item is not None
        assert index.file(item) == new / "r" / "red.png"
        assert index.verify() == []


def test_a_folder_inside_that_is_renamed_keeps_its_vectors(photos: Path, place: str) -> None:
    index_collection(ColourModel(), photos, place, texts=False)
    (photos / "r").rename(photos / "crimson")
    again = ColourModel()
    built = index_collection(again, photos, place, texts=False)
    assert numbers(built) == (4, 0, 0, 1, 3, 0, 4)
    assert again.encoded_images == 0
    with open_index(place) as index:
        assert index.get(["r/red.png"]) == [None]
        (item,) = index.get(["crimson/red.png"])
        assert item is not None
        assert item.metadata["folder"] == "crimson"
        assert index.search(again.encode_text(["red"])[0], 1, kind="image").ids == ["crimson/red.png"]


def test_a_folder_moved_into_another_that_is_indexed_then(photos: Path, place: str, tmp_path: Path) -> None:
    index_collection(ColourModel(), photos, place, texts=False)
    parent = tmp_path / "all"
    parent.mkdir()
    photos.rename(parent / "mine")
    Image.new("RGB", (8, 8), (9, 9, 9)).save(parent / "further.png")
    again = ColourModel()
    built = index_collection(again, parent, place, texts=False)
    assert numbers(built) == (5, 1, 0, 4, 0, 0, 5)
    assert again.encoded_images == 1


def test_a_copy_is_a_collection_of_its_own_and_said(photos: Path, place: str, tmp_path: Path) -> None:
    index_collection(ColourModel(), photos, place)
    shutil.copytree(photos, tmp_path / "copy")
    built = index_collection(ColourModel(), tmp_path / "copy", place)
    assert (built.images, built.total) == (4, 8)
    assert f"holds these pictures from {photos} too: remove them with" in built.notes[0]
    with open_index(place) as index:
        assert len(index.info.collections) == 2


def test_other_pictures_are_another_collection(photos: Path, place: str, tmp_path: Path) -> None:
    index_collection(ColourModel(), photos, place)
    shutil.rmtree(photos)
    pictures(tmp_path / "others")
    built = index_collection(ColourModel(), tmp_path / "others", place)
    assert (built.images, built.added, built.total, built.notes) == (6, 6, 10, [])


def test_a_content_whose_owner_changed_in_the_same_run_is_encoded(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "diptych.index.ingest.pipeline.CHUNK", 1
    )  # each image is committed before the next is examined
    model = ColourModel()
    index_collection(model, photos, tmp_path / "i", texts=False)
    shutil.copy(photos / "b" / "blue.png", photos / "z.png")  # the old content under a new, later name
    Image.new("RGB", (8, 8), WORDS["green"]).save(photos / "b" / "blue.png")
    index_collection(model, photos, tmp_path / "i", texts=False)
    with open_index(tmp_path / "i") as index:
        assert index.search(model.encode_text(["blue"])[0], 1, kind="image").ids == ["z.png"]


def test_recognition_looks_at_contents_not_at_names(photos: Path, tmp_path: Path) -> None:
    """The mutation: names alone would take other pictures of the same names for the same."""
    index_collection(ColourModel(), photos, tmp_path / "i")
    new = tmp_path / "new"
    photos.rename(new)
    for file in new.rglob("*.png"):
        Image.new("RGB", (5, 5), (1, 2, 3)).save(file)
    built = index_collection(ColourModel(), new, tmp_path / "i")
    assert built.added == 4
    assert collection_files.SHARE > 0


# --- removing


def test_remove_in_each_way(photos: Path, place: str, tmp_path: Path) -> None:
    index_collection(ColourModel(), photos, place)
    pictures(tmp_path / "others", count=3)
    index_collection(ColourModel(), tmp_path / "others", place)
    listed = diptych("index", "remove", place, "--filter", 'folder = "r"', "--dry-run")
    assert set(listed.stdout.split()) == {"r/red.png", "r/red.png#text0"}
    said = diptych("index", "remove", place, "--filter", 'folder = "r"').stdout
    assert said == "removed 1 image, 1 text; 9 items are left\n"
    (photos / "g" / "green.png").unlink()
    assert diptych("index", "remove", place, "--missing").stdout.startswith("removed 1 image, 1 text; 7 ")
    assert diptych("index", "remove", place, "--missing").stdout.startswith("removed 0 images")
    assert diptych("index", "remove", place, "b/blue.png").stdout.startswith("removed 1 image, 1 text; 5 ")
    said = diptych("index", "remove", place, "--collection", tmp_path / "others").stdout
    assert said == "removed 3 images, 0 texts; 2 items are left\n"
    with open_index(place) as index:
        assert [one.root for one in index.info.collections] == [str(photos)]
        assert index.verify() == []


def test_mistakes_in_removing(photos: Path, place: str) -> None:
    index_collection(ColourModel(), photos, place)
    assert "--collection" in refused("index", "remove", place)
    assert "--collection" in refused("index", "remove", place, "a", "--missing")
    assert "nobody" in refused("index", "remove", place, "--collection", "nobody")
    assert "folder" in refused("index", "remove", place, "--filter", 'foldr = "r"')
    photos.rename(photos.with_name("away"))
    said = refused("index", "remove", place, "--missing")
    assert str(photos) in said
    assert "--collection" in said
    with open_index(place) as index:
        assert len(index) == 8


# --- watching


class Clock:
    """Stands for the wait between two looks: runs the next change, and ends the watch after the last."""

    def __init__(self, *changes: object) -> None:
        self.changes = list(changes)

    def __call__(self, seconds: float) -> None:
        if not self.changes:
            raise KeyboardInterrupt
        change = self.changes.pop(0)
        if callable(change):
            change()


def watched(folder: Path, place: Path, *changes: object) -> tuple[list[str], ColourModel]:
    model, said = ColourModel(), []
    with pytest.raises(KeyboardInterrupt):
        watch_folder(
            folder,
            lambda: index_collection(model, folder, place),
            interval=0.1,
            say=said.append,
            summary=lambda built: f"{built.images} images, {built.added} added, {built.removed} removed",
            sleep=Clock(*changes),
        )
    return said, model


def test_a_watched_folder_is_followed(photos: Path, tmp_path: Path) -> None:
    def add() -> None:
        Image.new("RGB", (8, 8), (90, 90, 0)).save(photos / "new.png")

    said, model = watched(
        photos, tmp_path / "i", None, add, None, None, (photos / "new.png").unlink, None, None
    )
    assert said == [
        "4 images, 4 added, 0 removed",
        "5 images, 1 added, 0 removed",
        "4 images, 0 added, 1 removed",
    ]
    assert model.encoded_images == 5
    with open_index(tmp_path / "i") as index:
        assert index.count("image") == 4


def test_a_file_that_still_grows_is_left_alone(photos: Path, tmp_path: Path) -> None:
    whole = (photos / "r" / "red.png").read_bytes()

    def write(bytes_: int) -> object:
        return lambda: (photos / "new.png").write_bytes(whole[:bytes_])

    said, _ = watched(photos, tmp_path / "i", write(20), write(40), write(len(whole)), None)
    assert said == ["4 images, 4 added, 0 removed", "5 images, 1 added, 0 removed"]


def test_a_watched_folder_that_disappears_leaves_the_index_alone(photos: Path, tmp_path: Path) -> None:
    away = tmp_path / "away"
    said, _ = watched(
        photos, tmp_path / "i", lambda: photos.rename(away), None, None, lambda: away.rename(photos), None
    )
    assert said == [
        "4 images, 4 added, 0 removed",
        f"{photos} is not there: the index stays as it is until it is back.",
        f"{photos} is back, and nothing changed.",
    ]
    with open_index(tmp_path / "i") as index:
        assert len(index) == 8


def test_a_watched_folder_that_is_emptied_leaves_the_index_alone(photos: Path, tmp_path: Path) -> None:
    def empty() -> None:
        for file in photos.rglob("*.*"):
            file.unlink()

    said, _ = watched(photos, tmp_path / "i", empty, None, None, None)
    assert len(said) == 2
    assert said[1].endswith("The index stays as it is.")
    with open_index(tmp_path / "i") as index:
        assert len(index) == 8


def test_an_index_that_another_process_writes_is_tried_again(photos: Path, tmp_path: Path) -> None:
    index_collection(ColourModel(), photos, tmp_path / "i")
    other = open_index(tmp_path / "i", writable=True)
    said, _ = watched(photos, tmp_path / "i", None, other.close, None, None)
    assert "The index stays as it is." in said[0]
    assert said[1:] == ["4 images, 0 added, 0 removed"]


def test_looking_skips_what_is_hidden_or_gone(photos: Path, tmp_path: Path) -> None:
    (photos / ".trash").mkdir()
    (photos / ".trash" / "x.png").write_bytes(b"x")
    (photos / "link.png").symlink_to(photos / "nowhere.png")
    seen = look(photos)
    assert seen is not None
    assert len(seen) == 8
    assert look(tmp_path / "nowhere") is None


def test_watch_as_a_user_runs_it(tmp_path: Path) -> None:
    pictures(tmp_path / "photos", count=2)
    place = tmp_path / "photos.index"
    running = process("watch", place, tmp_path / "photos", "--interval", 0.2)
    try:
        assert running.stdout is not None
        assert "2 images, 0 texts (2 added" in running.stdout.readline()
        pictures(tmp_path / "photos", count=3)
        assert "3 images, 0 texts (1 added" in running.stdout.readline()
        (tmp_path / "photos").rename(tmp_path / "away")
        assert "is not there: the index stays as it is" in running.stdout.readline()
    finally:
        os.kill(running.pid, 2)
        _, errors = running.communicate(timeout=60)
    assert running.returncode == 0
    assert errors.splitlines()[-1].startswith("stopped: ")
    with open_index(place) as index:
        assert index.count("image") == 3
    assert "nowhere" in refused("watch", tmp_path / "new.index", tmp_path / "nowhere")


def test_errors_of_the_engines_are_still_errors(photos: Path, place: str) -> None:
    index_collection(ColourModel(), photos, place)
    with pytest.raises(IndexFault):
        index_collection(ColourModel("another"), photos, place)
