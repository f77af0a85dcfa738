"""What is written in pictures is found by words and by parts of them; the pass resumes and names what it skips."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from colours import ColourModel
from commands import refused
from PIL import Image, ImageDraw, ImageFont
from sklearn.datasets import load_sample_image

from diptych.index.engines.embedded.index import EmbeddedIndex
from diptych.index.ingest import ocr
from diptych.index.ingest.ocr import CHUNK, COLUMN, picture_reader, read_written
from diptych.index.protocol import Item
from diptych.index.query.search import Searcher

SIZES = (16, 24, 40)  # pixels of a letter
WRITTEN = (
    "Hotel Bristol", "no parking", "fresh bread", "Platform nine", "total amount", "Boarding pass",
    "Winter festival", "handle with care", "Emergency exit", "Library card", "Coffee house", "sold out",
)  # fmt: skip
FOUND = 0.8


def scene(number: int) -> Image.Image:
    """A part of one of the two photographs that come with scikit-learn: a temple in China, and a flower."""
    rng = np.random.default_rng(number)
    photo = load_sample_image(("china.jpg", "flower.jpg")[number % 2])
    top, left = rng.integers((photo.shape[0] - 360, photo.shape[1] - 520)).tolist()
    return Image.fromarray(photo[top : top + 360, left : left + 520])


def write(picture: Image.Image, text: str, size: int, number: int) -> None:
    rng = np.random.default_rng([number, size])
    font, draw = ImageFont.load_default(size), ImageDraw.Draw(picture)
    place = (int(rng.integers(10, 510 - draw.textlength(text, font))), int(rng.integers(10, 300)))
    draw.text(place, text, "white", font, stroke_width=max(1, size // 14), stroke_fill="black")


def make(folder: Path, names: list[str]) -> Path:
    """An index of files in a folder, each with the same vector."""
    model = ColourModel()
    with EmbeddedIndex.create(folder / "index", model.dim, fingerprint=model.fingerprint()) as index:
        where = index.collection("photos", str(folder)).number
        items = [Item(name, path=name, collection=where, metadata={"year": 2024}) for name in names]
        index.add(items, model.encode_text(["red"] * len(items)))
    return folder / "index"


@pytest.fixture(scope="module")
def signs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedIndex]:
    folder = tmp_path_factory.mktemp("signs")
    names = []
    for number, text in enumerate(WRITTEN):
        for size in SIZES:
            picture = scene(number)
            write(picture, text, size, number)
            names.append(f"{number}-{size}.jpg")
            picture.save(folder / names[-1], quality=90)
    Image.new("RGB", (520, 360), "grey").save(folder / "nothing.jpg")
    place = make(folder, [*names, "nothing.jpg"])
    assert read_written(place, picture_reader(), say=print, show_progress=False) == len(names) + 1
    with EmbeddedIndex(place) as index:
        yield index


@pytest.mark.parametrize("size", SIZES)
def test_most_strings_are_found(signs: EmbeddedIndex, size: int) -> None:
    # small letters lose the spaces between words: then a part of one still finds them
    words, parts = set[int](), set[int]()
    for number, text in enumerate(WRITTEN):
        id = f"{number}-{size}.jpg"
        words |= {number} if id in signs.search_words(text, 3).ids else set()
        inside = max(text.split(), key=len)[1:-1]
        found = signs.sample_items("image", f'{COLUMN} contains "{inside}"', 50)
        parts |= {number} if id in [item.id for item in found] else set()
    print(f"{size} pixels: by words {len(words)}, by a part {len(parts)}, either {len(words | parts)}")
    assert len(words | parts) >= FOUND * len(WRITTEN)
    assert len(words) >= (0.5 if size == min(SIZES) else FOUND) * len(WRITTEN)


def test_words_are_marked_and_everything_else_stays(signs: EmbeddedIndex) -> None:
    item, nothing = signs.get(["0-40.jpg", "nothing.jpg"])
    assert item is not None
    assert nothing is not None
    assert item.text == f"“{item.metadata[COLUMN]}”"
    assert item.metadata["year"] == 2024
    assert (nothing.text, nothing.metadata[COLUMN]) == ("", "")
    expected = ColourModel().encode_text(["red"])[0]
    assert np.array_equal(signs.vectors(["0-40.jpg"])[0], expected)
    hits = Searcher(signs, ColourModel()).search("Hotel Bristol", 3, hybrid=True)
    assert {hit.item.id for hit in hits} == {f"0-{size}.jpg" for size in SIZES}


def test_the_pass_resumes_and_names_what_it_cannot_read(tmp_path: Path) -> None:
    names = [f"{n}.png" for n in range(2 * CHUNK)]
    for name in names:
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    (tmp_path / "5.png").write_bytes(b"no picture")
    place, said = make(tmp_path, names), list[str]()
    reads = 0

    def stopping(picture: Image.Image) -> str:
        nonlocal reads
        reads += 1
        if reads > CHUNK + 3:
            raise KeyboardInterrupt
        return "words"

    with pytest.raises(KeyboardInterrupt):
        read_written(place, stopping, say=said.append, show_progress=False)
    assert len(said) == 1
    assert "5.png" in said[0]
    with EmbeddedIndex(place) as index:
        assert index.count("image", f"{COLUMN} is not null") == CHUNK - 1
    left = read_written(place, lambda picture: "", say=said.append, show_progress=False)
    assert left == CHUNK
    assert read_written(place, lambda picture: "", say=said.append, show_progress=False) == 0


def test_a_missing_extra_is_one_sentence_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    said = refused("index", tmp_path, "--ocr", "--index", tmp_path / "made")
    assert "rapidocr" in said
    assert "diptych[ocr]" in said
    assert not (tmp_path / "made").exists()


def test_the_command_reads_and_keeps_the_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from commands import diptych

    (tmp_path / "photos").mkdir()
    Image.new("RGB", (32, 32), "red").save(tmp_path / "photos" / "a.png")
    monkeypatch.setattr(ocr, "picture_reader", lambda: lambda picture: "Emergency exit")
    place = tmp_path / "made"
    shown = diptych("index", tmp_path / "photos", "--ocr", "--index", place)
    assert "read what is written in 1 picture" in shown.stdout
    again = diptych("index", tmp_path / "photos", "--index", place)  # what was read stays
    assert "written in" not in again.stdout
    assert "a.png" in diptych("search", place, "emergency", "--hybrid", "--paths").stdout
    assert (
        "Emergency" in diptych("search", place, "x", "--filter", f'{COLUMN} contains "merg"', "--json").stdout
    )


def test_a_line_of_pixels_is_named_and_left(tmp_path: Path) -> None:
    """RapidOCR raises an error of its own, which ended the pass."""
    Image.new("RGB", (60_000, 1)).save(tmp_path / "line.png")
    said: list[str] = []
    assert read_written(make(tmp_path, ["line.png"]), picture_reader(), say=said.append) == 0
    assert "line.png" in said[0]
