"""The lists of the hashing literature."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from diptych.data.check import check
from diptych.data.formats import open_captions, recognise
from diptych.errors import DataError


def write_lists(folder: Path, **lists: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in lists.items():
        (folder / f"{name}.txt").write_text(text)
        for line in filter(None, text.splitlines()):
            image = folder / line.split()[0]
            if image.suffix == ".png":
                Image.new("RGB", (4, 4), (len(line), 9, 9)).save(image)
    return folder


LISTS = {
    "train": "a.png 1 0 0\nb.png 0 1 1\n",
    "test": "c.png 0 0 1\nd.png 0 0 0\n",
    "database": "a.png 1 0 0\nb.png 0 1 1\ne.png 0 1 0\n\n",
}


def test_lists_are_read_with_each_image_once(tmp_path: Path) -> None:
    folder = write_lists(tmp_path / "coco", **LISTS)
    assert recognise(folder) == "hashing"
    captions = open_captions(folder)
    assert list(captions.image_ids) == ["a.png", "b.png", "c.png", "d.png", "e.png"]
    assert list(captions.splits) == ["train", "train", "test", "test", "database"]
    assert list(captions.labels["database"]) == [True, True, False, False, True]
    assert captions.labels["labels"][1] == ("class 1", "class 2")
    assert captions.labels["labels"][3] == ()
    assert list(captions.texts) == ["class 0", "class 1, class 2", "class 2", "no class", "class 1"]
    assert captions.images[0].size == (4, 4)  # type: ignore[union-attr]


def test_classes_may_have_names(tmp_path: Path) -> None:
    folder = write_lists(tmp_path, **LISTS, classes="dog\ncat\nbird\n")
    assert open_captions(folder).labels["labels"][1] == ("cat", "bird")
    (tmp_path / "classes.txt").write_text("dog\ncat\n")
    with pytest.raises(DataError, match=r"\b2\b.*\b3\b"):
        open_captions(folder)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"train": "a.png 1 0\n"}, r"train\.txt:1.*\b3\b"),
        ({"train": "a.png 1 0 2\n"}, r"train\.txt:1.*\b3\b"),
        ({"train": "c.png 0 0 1\n"}, r"c\.png"),
        ({"database": "c.png 0 0 1\n"}, r"c\.png"),
    ],
)
def test_mistakes_name_the_line(tmp_path: Path, changed: dict[str, str], message: str) -> None:
    folder = write_lists(tmp_path, **{**LISTS, **changed})
    with pytest.raises(DataError, match=message):
        open_captions(folder)


def test_missing_images_are_named(tmp_path: Path) -> None:
    folder = write_lists(tmp_path, **LISTS)
    (folder / "e.png").unlink()
    with pytest.raises(DataError, match=r"\b1\b.*\b5\b.*e\.png"):
        open_captions(folder)
    assert any("e.png" in problem.file for problem in check(folder).problems)
