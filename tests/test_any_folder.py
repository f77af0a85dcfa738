"""search and serve on any folder: where its index goes, what is left out, what is said."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import diptych, refused
from dual_folders import clip_folder
from PIL import Image
from small import pictures

import diptych as package
from diptych.cli import preview
from diptych.data.decode import extra_formats
from diptych.data.files import find_files
from diptych.errors import StorageError
from diptych.index.engines.opening import open_index
from diptych.index.ingest import build
from diptych.storage import storing


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clip_folder(tmp_path_factory.mktemp("models") / "clip")


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of photos in the current folder."""
    pictures(tmp_path / "photos")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path / "photos"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The places that serve was called with."""
    places: list[str] = []
    monkeypatch.setattr("diptych.web.serve.serve", lambda place, model, **_: places.append(str(place)))
    return places


def read_only(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    """These folders, and what is below them, say that they cannot be written, to root too."""
    allowed = os.access

    def access(path: Any, mode: int, **options: Any) -> bool:
        below = any(Path(path).absolute().is_relative_to(folder) for folder in folders)
        return not (below and mode & os.W_OK) and allowed(path, mode, **options)

    monkeypatch.setattr("os.access", access)


# --- folders without a picture


@pytest.mark.parametrize("verb", ["search", "serve", "index"])
def test_a_folder_without_pictures_gets_the_sentence_of_index(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["dog"] if verb == "search" else []
    (tmp_path / "empty").mkdir()
    assert "holds no picture" in refused(verb, tmp_path / "empty", *words)
    said = diptych(verb, tmp_path / "empty", *words, status=2).stderr
    assert "device: " not in said  # no model is opened for nothing
    (tmp_path / "phone").mkdir()
    (tmp_path / "phone" / "IMG_1.heic").touch()
    monkeypatch.setattr(extra_formats, "_is_installed", lambda module: False)
    said = refused(verb, tmp_path / "phone", *words)
    assert "1 HEIC file" in said
    assert "pillow-heif" in said


def test_a_damaged_index_is_not_taken_for_pictures(tmp_path: Path) -> None:
    (tmp_path / "photos.index").mkdir()
    assert "index.db" in refused("search", tmp_path / "photos.index", "dog")


# --- where the index is


def test_search_and_serve_take_the_place_of_the_index(photos: Path, clip: Path, served: list[str]) -> None:
    said = diptych("search", photos, "a dog", "--model", clip, "--index", "there").stderr
    assert "6 images into there" in said
    assert "into" not in diptych("search", photos, "a dog", "--index", "there").stderr
    assert not Path("photos.index").exists()
    with open_index("there") as index:
        assert index.count("image") == 6
    diptych("serve", photos, "--index", "there")
    assert served == ["there"]
    assert "there" in refused("search", "there", "a dog", "--index", "elsewhere")


def test_a_data_set_is_searched_like_a_folder(photos: Path, clip: Path) -> None:
    (photos / "photos.csv").write_text("image,text\npicture0.png,a red dog\n")
    said = diptych("search", photos / "photos.csv", "a dog", "--model", clip, "--json").stdout
    assert [hit["text"] for hit in json.loads(said)["hits"]] == ["a red dog"]


def test_pictures_that_cannot_be_written_beside_are_indexed_elsewhere(
    photos: Path, clip: Path, served: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    card = photos.parent / "card"
    card.mkdir()
    photos.rename(card / "photos")
    read_only(monkeypatch, card)
    done = diptych("search", "card/photos", "a dog", "--model", clip)
    (place,) = (photos.parent / "data" / "diptych").iterdir()
    assert place.name.startswith("photos-")
    assert str(place) in done.stderr
    assert not (card / "photos.index").exists()
    again = diptych("search", "card/photos", "a dog")  # found again, with its model
    assert str(place) in again.stderr
    assert again.stdout == done.stdout
    diptych("serve", "card/photos")
    assert served == [str(place)]
    assert str(place) in diptych("index", clip, "card/photos").stdout


def test_two_folders_of_a_name_have_two_indexes(
    photos: Path, clip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures(photos.parent / "other" / "photos", 2)
    read_only(monkeypatch, photos.parent)
    monkeypatch.setenv("XDG_DATA_HOME", str(photos.parent.parent / f"{photos.parent.name}-data"))
    for folder in ("photos", "other/photos"):
        diptych("index", clip, folder)
    assert len(list((photos.parent.parent / f"{photos.parent.name}-data" / "diptych").iterdir())) == 2


def test_where_nothing_can_be_written_the_ways_out_are_named(
    photos: Path, clip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_only(monkeypatch, photos.parent)
    said = refused("search", photos, "a dog", "--model", clip)
    assert "--index" in said
    assert "XDG_DATA_HOME" in said


def test_an_index_that_cannot_be_written_is_searched_as_it_is(
    photos: Path, clip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    diptych("index", clip, photos)
    pictures(photos / "more", 1)
    read_only(monkeypatch, photos.parent)
    done = diptych("search", photos, "a dog", "--json")
    assert len(json.loads(done.stdout)["hits"]) == 6
    assert "photos.index" in done.stderr


def test_a_cache_that_cannot_be_written_names_its_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path / "cache"))
    with (
        pytest.raises(StorageError, match=r"DIPTYCH_CACHE.*XDG_CACHE_HOME"),
        storing(tmp_path / "cache" / "x"),
    ):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))


# --- what is left out


def test_folders_of_programs_are_left_out_and_counted(photos: Path, clip: Path) -> None:
    for name in (".hidden", "node_modules", "__pycache__", ".cache", "env/lib", "kept"):
        pictures(photos / name, 1)
    (photos / "env" / "pyvenv.cfg").touch()
    assert {name.split("/")[0] for name in find_files(photos) if "/" in name} == {"kept"}
    done = diptych("index", clip, photos)
    assert "7 images" in done.stdout
    assert "left out 5 folders" in done.stderr


def test_many_pictures_are_counted_and_timed_before_they_are_indexed(
    photos: Path, clip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "MANY", 5)
    done = diptych("index", clip, photos)
    lines = done.stderr.splitlines()
    (said,) = [line for line in lines if "6 pictures to index, about " in line]
    assert "second" in said
    pictures(photos / "more", 3)
    assert "to index" not in diptych("index", photos).stderr  # three are new


@pytest.mark.parametrize(("seconds", "words"), [(0.1, "20 seconds"), (1, "3 minutes"), (100, "6 hours")])
def test_the_time_follows_from_a_sample(
    seconds: float, words: str, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "find_images", lambda folder: [f"{n}.png" for n in range(201)])
    monkeypatch.setattr(build, "MANY", 100)
    now = [0.0]

    class Slow:
        """Takes its seconds for each picture."""

        def encode_image(self, images: Any) -> Any:
            now[0] += seconds * len(images)
            return np.zeros((len(images), 2))

    said = build.forecast(Slow(), photos, "nowhere.index", clock=lambda: now[0])  # type: ignore[arg-type]
    assert f"201 pictures to index, about {words}" in said


# --- arguments


def test_words_before_the_folder_are_recognised(photos: Path, clip: Path) -> None:
    said = diptych("search", "./photos", "a red dog", "--model", clip).stdout
    swapped = diptych("search", "a red dog", "./photos")
    assert swapped.stdout == said
    assert "./photos" in swapped.stderr
    assert diptych("search", "a", "red", "dog", "photos.index").stdout == said
    for place in ("nowhere.index", "./nowhere"):  # a path that is wrong is no word to search for
        assert "./photos" in refused("search", place, "./photos")


def test_more_like_an_item_needs_no_model(tmp_path: Path) -> None:
    vectors = np.eye(4, 3, dtype=np.float32) + 0.5
    package.create_index(tmp_path / "own.index", vectors).close()
    said = diptych("search", tmp_path / "own.index", "--like", "1", "-k", "2", "--json").stdout
    ids = [hit["id"] for hit in json.loads(said)["hits"]]
    assert len(ids) == 2
    assert "1" not in ids
    assert "--model" in refused("search", tmp_path / "own.index", "dog", "--like", "1")


def test_more_like_an_item_by_the_path_that_answers_show(photos: Path, clip: Path) -> None:
    shown = diptych("search", photos, "dog", "--model", clip).stdout.splitlines()
    name = shown[0].split("\t")[1]
    found = [
        json.loads(diptych("search", f"{photos}.index", "--like", one, "--json").stdout)["hits"]
        for one in (name, Path(name).name)
    ]
    assert found[0] == found[1]
    assert Path(name).name not in [hit["id"] for hit in found[0]]
    outside = photos.parent / "other.png"
    outside.write_bytes(Path(name).read_bytes())
    assert f"'{outside}'" in refused("search", f"{photos}.index", "--like", outside)


def test_without_a_cutoff_nothing_is_said_to_match(photos: Path, clip: Path) -> None:
    found = json.loads(diptych("search", photos, "qwertz", "--model", clip, "--json").stdout)
    assert found["cutoff"] is None
    assert found["matched"] is None
    assert {hit["matches"] for hit in found["hits"]} == {None}
    judged = json.loads(diptych("search", photos, "qwertz", "--chance", "0.5", "--json").stdout)
    assert (judged["cutoff"] is None) == (judged["matched"] is None)


# --- pictures in a terminal


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv("KITTY_WINDOW_ID", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(preview, "check_terminal", lambda: None)
    return monkeypatch


def test_a_preview_in_a_pipe_is_a_sentence(photos: Path, clip: Path) -> None:
    said = refused("search", photos, "a dog", "--model", clip, "--preview")
    assert "--preview" in said
    assert "--html" in said
    assert not Path("photos.index").exists()
    assert "--json" in refused("search", photos, "a dog", "--preview", "--json")


def test_half_blocks_hold_the_colours(photos: Path, clip: Path, terminal: pytest.MonkeyPatch) -> None:
    for file in photos.iterdir():
        file.unlink()
    two = Image.new("RGB", (40, 40), (250, 0, 0))
    two.paste((0, 0, 250), (0, 20, 40, 40))
    two.save(photos / "two.png")
    said = diptych("search", photos, "a dog", "--model", clip, "--preview").stdout
    lines = [line for line in said.splitlines() if "▀" in line]
    assert len(lines) == preview.ROWS
    assert all(line.count("▀") == preview.COLUMNS for line in lines)
    assert "\x1b[38;2;250;0;0m\x1b[48;2;250;0;0m" in lines[0]
    assert "\x1b[38;2;0;0;250m\x1b[48;2;0;0;250m" in lines[-1]
    assert "two.png" in said


@pytest.mark.parametrize("variable", [("TERM", "xterm-kitty"), ("KITTY_WINDOW_ID", "1")])
def test_kitty_gets_pictures_in_its_protocol(
    variable: tuple[str, str], photos: Path, clip: Path, terminal: pytest.MonkeyPatch
) -> None:
    import base64
    import io
    import re

    terminal.setenv(*variable)
    said = diptych("search", photos, "a dog", "--model", clip, "--preview", "-k", "2").stdout
    assert "▀" not in said
    messages = re.findall(r"\x1b_G([^;]*);([^\x1b]*)\x1b\\", said)
    assert sum("a=T" in keys for keys, _ in messages) == 2
    assert all(len(data) <= preview.CHUNK for _, data in messages)
    whole, found = "", []
    for keys, data in messages:
        whole += data
        if "m=0" in keys:
            found.append(Image.open(io.BytesIO(base64.b64decode(whole))).size)
            whole = ""
    assert len(found) == 2
    assert max(max(size) for size in found) == preview.COLUMNS * preview.PIXELS


@pytest.mark.parametrize("size", [(60_000, 1), (1, 60_000)])
def test_a_line_of_pixels_is_shown(size: tuple[int, int], terminal: pytest.MonkeyPatch) -> None:
    """It had no height, which PNG does not know."""
    terminal.setenv("KITTY_WINDOW_ID", "1")
    assert "a=T" in preview._kitty([preview._fit(Image.new("RGB", size))])
