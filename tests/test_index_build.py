"""Building and refreshing an index of a collection."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from colour_model import ColourModel, colour_photos
from PIL import Image

from diptych.data.captions import Captions
from diptych.data.decode.opening import make_thumbnail
from diptych.errors import DataError, IndexFault, SettingsError
from diptych.index.engines.opening import open_index
from diptych.index.ingest import pipeline
from diptych.index.ingest.build import index_collection


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return colour_photos(tmp_path / "photos", "a {} square", "something {}")


@pytest.fixture
def model() -> ColourModel:
    return ColourModel()


def test_a_folder_becomes_an_index(photos: Path, model: ColourModel, tmp_path: Path) -> None:
    built = index_collection(model, photos, tmp_path / "i", model_name="colours")
    assert (built.images, built.texts, built.added, built.skipped) == (4, 8, 4, [])
    assert model.encoded_images == 4
    with open_index(tmp_path / "i") as index:
        assert (index.info.counts, index.info.model) == ({"image": 4, "text": 8}, "colours")
        assert index.verify() == []
        query = model.encode_text(["red"])[0]
        hit = index.search(query, 1, kind="image")[0]
        assert hit.item.id == hit.item.path == "r/red.png"
        assert hit.item.text == "a red square\nsomething red"
        assert hit.item.metadata == {"folder": "r", "split": "train"}
        assert index.file(hit.item) == photos / "r" / "red.png"
        assert index.thumbnail(hit.item.id) is None
        text = index.search(query, 2, kind="text", filter='folder = "r"')
        assert {hit.item.image_id for hit in text} == {"r/red.png"}


def test_an_unchanged_collection_is_not_encoded_again(
    photos: Path, model: ColourModel, tmp_path: Path
) -> None:
    index_collection(model, photos, tmp_path / "i")
    again = ColourModel()
    built = index_collection(again, photos, tmp_path / "i")
    assert (built.unchanged, built.added, built.updated, built.removed) == (4, 0, 0, 0)
    assert (again.encoded_images, again.encoded_texts) == (0, 0)


def test_changes_are_noticed(photos: Path, model: ColourModel, tmp_path: Path) -> None:
    index_collection(model, photos, tmp_path / "i")
    Image.new("RGB", (9, 9), (0, 0, 255)).save(photos / "r" / "red.png")  # other content
    os.utime(photos / "g" / "green.png", (1, 1))  # touched, same content
    (photos / "b" / "blue.png").unlink()
    (photos / "w" / "white.txt").write_text("a white square\n")  # one text less, the other as it was
    Image.new("RGB", (8, 8), (90, 90, 0)).save(photos / "new.png")
    again = ColourModel()
    built = index_collection(again, photos, tmp_path / "i")
    assert (built.images, built.added, built.updated, built.unchanged) == (4, 1, 3, 0)
    assert built.removed == 1  # blue; the counts are of images
    assert again.encoded_images == 2
    assert again.encoded_texts == 0
    with open_index(tmp_path / "i") as index:
        assert index.verify() == []
        assert index.search(model.encode_text(["blue"])[0], 1, kind="image").ids == ["r/red.png"]
        assert index.get(["b/blue.png", "b/blue.png#text0", "w/white.png#text1"]) == [None] * 3
        white = index.get(["w/white.png"])[0]
        assert white is not None
        assert white.text == "a white square"
    assert index_collection(again, photos, tmp_path / "i").unchanged == 4


def test_unreadable_files_are_skipped_counted_and_listed(
    photos: Path, model: ColourModel, tmp_path: Path
) -> None:
    index_collection(model, photos, tmp_path / "i")
    (photos / "r" / "red.png").write_bytes(b"not a picture")
    (photos / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 half a jpeg")
    built = index_collection(model, photos, tmp_path / "i")
    assert [name for name, _ in built.skipped] == ["broken.jpg", "r/red.png"]
    assert all(reason.endswith(".") for _, reason in built.skipped)
    assert (built.images, built.texts) == (3, 6)
    with open_index(tmp_path / "i") as index:  # what cannot be read any more is not found any more
        assert index.get(["r/red.png", "r/red.png#text0"]) == [None, None]
        assert index.count("image") == 3


def test_a_name_that_is_not_utf8_is_skipped(photos: Path, model: ColourModel, tmp_path: Path) -> None:
    name = os.fsencode(photos) + b"/\xff\xfe.png"
    with open(name, "wb") as file:
        Image.new("RGB", (4, 4)).save(file, "png")
    built = index_collection(model, photos, tmp_path / "i")
    assert built.images == 4
    assert len(built.skipped) == 1


def test_a_killed_run_continues_where_it_was(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "CHUNK", 1)

    class Dying(ColourModel):
        def encode_text(self, texts, *, batch_size: int = 256):  # type: ignore[no-untyped-def]
            if self.encoded_texts >= 4:
                raise KeyboardInterrupt
            return super().encode_text(texts, batch_size=batch_size)

    dying = Dying()
    with pytest.raises(KeyboardInterrupt):
        index_collection(dying, photos, tmp_path / "i")
    model = ColourModel()
    built = index_collection(model, photos, tmp_path / "i")
    assert (built.unchanged, built.added) == (2, 2)
    assert model.encoded_images == 2


def test_large_pictures_are_encoded_a_few_at_a_time(
    photos: Path, model: ColourModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    whole = model.encode_image

    def count(images: list[Image.Image], *, batch_size: int = 64) -> object:
        sizes.append(len(images))
        return whole(images, batch_size=batch_size)

    monkeypatch.setattr(model, "encode_image", count)
    monkeypatch.setattr(pipeline, "PIXELS", 16)
    index_collection(model, photos, tmp_path / "i")
    assert sizes == [2, 2]


class Drawn:
    """Pictures that have no file."""

    def __init__(self, make: Callable[[int], Image.Image], count: int) -> None:
        self.make, self.count = make, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Image.Image:
        return self.make(index)

    def content_key(self, index: int) -> str:
        return f"drawn:{index}"


def drawn(count: int = 3) -> Captions:
    store = Drawn(lambda n: Image.new("RGB", (400, 300), (n * 40, 0, 0)), count)
    return Captions(
        images=store,
        texts=["a", "b"],
        image_of=np.array([0, 0]),
        image_ids=[f"d{n}" for n in range(count)],
        splits=["test"] * count,
        labels={
            "size": np.arange(count),
            "weight": [1.5, float("nan"), 2.0][:count],
            "tags": [["x"], [], ["y"]],
        },
        name="drawn",
    )


def test_pictures_without_files_keep_a_thumbnail(model: ColourModel, tmp_path: Path) -> None:
    index_collection(model, drawn(), tmp_path / "i")
    with open_index(tmp_path / "i") as index:
        data = index.thumbnail("d0")
        assert data is not None
        assert data.startswith(b"\xff\xd8")
        assert len(index.search(model.encode_image([drawn().images[0]])[0], 5, filter="weight is null")) == 1
        assert index.search(model.encode_text(["x"])[0], 5, filter='tags contains "y" and size > 1').ids == [
            "d2"
        ]
    assert index_collection(model, drawn(), tmp_path / "i").unchanged == 3
    assert len(make_thumbnail(Image.new("RGBA", (900, 10)))) > 0


def test_two_collections_live_side_by_side(photos: Path, model: ColourModel, tmp_path: Path) -> None:
    index_collection(model, photos, tmp_path / "i")
    index_collection(model, drawn(), tmp_path / "i")
    with open_index(tmp_path / "i") as index:
        assert index.count("image") == 7
        assert index.get(["1/d0"]) != [None]
        assert [c.name for c in index.info.collections] == [str(photos), "drawn"]
    assert index_collection(model, photos, tmp_path / "i").removed == 0


def test_a_collection_is_the_same_however_its_path_is_written(
    photos: Path, model: ColourModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index_collection(model, photos, tmp_path / "i")
    monkeypatch.chdir(tmp_path)
    for written in ("photos", "./photos/", Path("photos/../photos")):
        built = index_collection(model, written, tmp_path / "i")
        assert (built.unchanged, built.added) == (4, 0)


def test_an_id_of_another_collection_is_not_taken_over(
    photos: Path, model: ColourModel, tmp_path: Path
) -> None:
    (photos / "1").mkdir()
    Image.new("RGB", (8, 8), (1, 2, 3)).save(photos / "1" / "d0.png")
    index_collection(model, photos, tmp_path / "i")
    other = drawn()
    other.image_ids[0] = "d0.png"  # which the second collection of an index calls 1/d0.png
    built = index_collection(model, other, tmp_path / "i")
    assert [name for name, _ in built.skipped] == ["1/d0.png"]
    assert "the index already has another item with the id '1/d0.png'" in built.skipped[0][1]
    with open_index(tmp_path / "i") as index:
        (item,) = index.get(["1/d0.png"])
        assert item is not None
        assert item.collection == 0
        assert index.count("image") == 7
    assert index_collection(model, photos, tmp_path / "i").unchanged == 5


def test_an_image_and_a_text_of_one_id_do_not_replace_each_other(
    model: ColourModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "CHUNK", 1)
    clashing = drawn()
    clashing.image_ids[2] = "d0#text1"
    built = index_collection(model, clashing, tmp_path / "i")
    assert [name for name, _ in built.skipped] == ["d0#text1"]
    with open_index(tmp_path / "i") as index:
        assert index.info.counts == {"image": 2, "text": 2}
        assert index.verify() == []


@pytest.mark.parametrize("number", [float("nan"), 0.0])
def test_a_picture_without_a_direction_is_skipped(number: float, photos: Path, tmp_path: Path) -> None:
    """NaN, or the zeros of a backbone that was never trained: no search would find it."""

    class Failing(ColourModel):
        def encode_image(self, images, *, batch_size: int = 64):  # type: ignore[no-untyped-def]
            rows = super().encode_image(images, batch_size=batch_size)
            rows[[image.getpixel((0, 0)) == (255, 0, 0) for image in images]] = number
            return rows

    built = index_collection(Failing(), photos, tmp_path / "i")
    assert built.skipped == [
        ("r/red.png", "the model makes zeros, NaN or infinity of it: check the model and the picture.")
    ]
    assert (built.images, built.texts, built.added) == (3, 6, 3)
    with open_index(tmp_path / "i") as index:
        assert index.info.counts == {"image": 3, "text": 6}


def test_metadata_that_is_no_text_is_skipped(model: ColourModel, tmp_path: Path) -> None:
    broken = drawn()
    broken.labels["title"] = ["a", "b\ud800", "c"]
    built = index_collection(model, broken, tmp_path / "i")
    assert built.skipped == [
        ("d1", "its name, texts or metadata are not valid Unicode: rename the file, or mend them.")
    ]


def test_unequal_labels_of_the_texts_of_a_picture_are_one_list(model: ColourModel, tmp_path: Path) -> None:
    photos = colour_photos(tmp_path / "photos")
    rows = [
        {"image": f"{name[0]}/{name}.png", "caption": text, "labels": labels}
        for name in ("red", "blue")
        for text, labels in ((f"a {name} square", [name, "dark"]), (f"something {name}", ["plain"]))
    ]
    (photos / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    index_collection(model, photos, tmp_path / "i")
    with open_index(tmp_path / "i") as index:
        assert index.count("image", 'labels contains "plain"') == 2
        assert index.count("image", 'labels contains "red"') == 1


def test_a_collection_that_cannot_be_read_at_all_keeps_its_items(
    photos: Path, model: ColourModel, tmp_path: Path
) -> None:
    index_collection(model, photos, tmp_path / "i")
    for file in photos.rglob("*.png"):
        file.write_bytes(b"")
    with pytest.raises(DataError, match=r"\b4\b"):
        index_collection(model, photos, tmp_path / "i")
    with open_index(tmp_path / "i") as index:
        assert index.count("image") == 4


def test_another_precision_is_refused(photos: Path, model: ColourModel, tmp_path: Path) -> None:
    index_collection(model, photos, tmp_path / "i", precision="float16")
    with pytest.raises(SettingsError, match=r"float16.*binary"):
        index_collection(model, photos, tmp_path / "i", precision="binary")
    assert index_collection(model, photos, tmp_path / "i").unchanged == 4


def test_texts_can_be_left_out(photos: Path, model: ColourModel, tmp_path: Path) -> None:
    index_collection(model, photos, tmp_path / "i", texts=False, precision="float16")
    with open_index(tmp_path / "i") as index:
        assert index.info.counts == {"image": 4, "text": 0}
        assert index.info.precision == "float16"
        assert index.search_words("red", 3).ids == ["r/red.png"]
    assert model.encoded_texts == 0


def test_nothing_to_index_says_so(model: ColourModel, photos: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="drawn"):
        index_collection(model, drawn(3).subset([]), tmp_path / "i")
    assert not (tmp_path / "i").exists()
    for file in photos.rglob("*.png"):
        file.write_bytes(b"")
    with pytest.raises(DataError, match=r"\b4\b.*b/blue"):
        index_collection(model, photos, tmp_path / "i")


def test_another_model_is_refused(photos: Path, model: ColourModel, tmp_path: Path) -> None:
    index_collection(model, photos, tmp_path / "i", model_name="first")
    with pytest.raises(IndexFault, match=r"first.*second"):
        index_collection(ColourModel("other"), photos, tmp_path / "i", model_name="second")
