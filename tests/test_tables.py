"""Tables as people have them: any column names, empty cells, and a sentence where one is not understood."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import diptych, refused
from PIL import Image

from diptych.cli.flags import columns_of, with_columns
from diptych.data.check import check
from diptych.data.formats import open_captions
from diptych.errors import DataError, SettingsError


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for n, name in enumerate(("a.png", "b.png", "c d.png")):
        Image.new("RGB", (8, 8), (n * 80, 0, 0)).save(folder / name)
    return folder


def write(folder: Path, header: str, *rows: str, name: str = "table.csv") -> Path:
    (folder / name).write_text("\n".join([header, *rows]) + "\n", "utf-8")
    return folder / name


@pytest.mark.parametrize(
    "header",
    [
        "file,description", "filename;caption", "path\ttitle", "photo|text", "picture,alt_text", "File,Description",
        "image_file;sentence", "img,caption",
    ],
)  # fmt: skip
def test_common_names_are_recognised(photos: Path, header: str) -> None:
    delimiter = next(mark for mark in ",;\t|" if mark in header)
    write(photos, header, f"a.png{delimiter}a red one", f"c d.png{delimiter}another")
    captions = open_captions(photos)
    assert captions.image_ids == ["a.png", "c d.png"]
    assert captions.texts == ["a red one", "another"]
    assert not captions.labels


def test_a_column_called_path_means_nothing_without_texts(photos: Path) -> None:
    write(photos, "path,bytes", "a.png,12")
    assert open_captions(photos).image_ids == ["a.png", "b.png", "c d.png"]


@pytest.mark.parametrize("options", ["?image=photo&text=beschreibung", ""])
def test_columns_of_any_name(photos: Path, options: str) -> None:
    table = write(photos, "photo;beschreibung;jahr", "a.png;ein Bild;2020", "b.png;noch eins;2021")
    for place in (photos, table):
        if options:
            captions = open_captions(f"{place}{options}")
        else:
            captions = open_captions(place, image="photo", text="beschreibung")
        assert captions.texts == ["ein Bild", "noch eins"]
        assert captions.labels == {"jahr": [2020, 2021]}
        assert check(f"{place}?image=photo&text=beschreibung", show_progress=False).ok


def test_a_column_that_is_known_may_mean_something_else(photos: Path) -> None:
    write(photos, "image,caption,title", "a.png,caption of a,title of a")
    assert open_captions(photos).texts == ["caption of a"]
    other = open_captions(f"{photos}?text=title")
    assert other.texts == ["title of a"]
    assert other.labels == {"caption": ["caption of a"]}


def test_json_lines_with_columns_of_any_name(photos: Path) -> None:
    row = {"bild": "a.png", "worte": ["eins", "zwei"]}
    (photos / "table.jsonl").write_text(json.dumps(row) + "\n")
    assert open_captions(f"{photos}?image=bild&text=worte").texts == ["eins", "zwei"]


def test_a_table_that_is_not_understood_is_an_error_of_the_check(photos: Path) -> None:
    table = write(photos, "bild;beschreibung", "a.png;ein Bild")
    report = check(photos, show_progress=False)
    assert not report.ok
    assert (
        "table.csv is a table that is not understood: its columns are 'bild', 'beschreibung'"
        in report.render()
    )
    assert "--image_column and --text_column or behind the path, ?image=COLUMN&text=COLUMN" in report.render()
    done = diptych("data", "check", photos, status=1)
    assert "not ok: 1 error" in done.stdout
    done = diptych("data", "check", photos, "--image_column", "bild", "--text-column", "beschreibung")
    assert "ok: 0 errors" in done.stdout
    with pytest.raises(DataError, match="bild"):
        open_captions(table)
    captions = open_captions(photos)  # an index needs no texts
    assert len(captions.images) == 3
    assert "not understood" in captions.notes[0]


def test_training_says_which_columns_there_are(photos: Path, tmp_path: Path) -> None:
    write(photos, "bild;beschreibung", "a.png;ein Bild")
    said = refused("train", "vse-plus-plus", "--data", photos, "--output_dir", tmp_path / "run")
    assert "bild" in said
    assert "bild" in said
    write(photos, "image,tags", "a.png,red")
    said = refused("train", "vse-plus-plus", "--data", photos, "--output_dir", tmp_path / "run")
    assert "image" in said


def test_a_column_that_is_not_there(photos: Path) -> None:
    write(photos, "photo;beschreibung", "a.png;ein Bild")
    with pytest.raises(DataError, match=r"foto.*photo.*beschreibung"):
        open_captions(f"{photos}?image=foto&text=beschreibung")
    (photos / "table.csv").unlink()
    with pytest.raises(SettingsError, match=r"folder.*image"):
        open_captions(f"{photos}?image=foto")


def test_images_that_are_all_missing(photos: Path, tmp_path: Path) -> None:
    table = write(photos, "file,description", "x.png,one", "y.png,two", "z.png,three")
    run = ("--data", table, "--output_dir", tmp_path / "run")
    said = refused("train", "vse-plus-plus", *run)
    assert "3 of 3" in said
    assert "x.png" in said
    assert not (tmp_path / "run").exists()


def test_empty_texts_are_dropped_with_a_count(photos: Path) -> None:
    write(photos, "image,text,tag", "a.png,,x", "a.png,a red one,x", "b.png,   ,y", "c d.png,,z")
    captions = open_captions(photos)
    assert len(captions.images) == 3
    assert captions.texts == ["a red one"]
    assert captions.labels == {"tag": ["x", "y", "z"]}
    assert captions.notes == ["left out 3 texts without a word."]
    report = check(photos, show_progress=False)
    assert report.ok
    assert report.render().count("empty text") == 4  # the heading with the number, and a line each
    with pytest.raises(DataError, match=r"a\.png"):
        open_captions(f"{photos}?empty=error")


def test_columns_are_written_behind_the_path() -> None:
    def path(path: str, image: str | None, text: str | None) -> str:
        return with_columns(path, columns_of({"image_column": image, "text_column": text}))

    assert path("a.csv", None, None) == "a.csv"
    assert path("a.csv", "x", None) == "a.csv?image=x"
    assert path("a.csv?images=b", "x", "y") == "a.csv?images=b&image=x&text=y"
