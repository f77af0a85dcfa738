"""Corpora of pre-training as they are published: questions, tables of addresses, and all of them at once."""

from __future__ import annotations

import json
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from written import add_member, encoded

from diptych.data.formats import open_captions, recognise
from diptych.errors import DataError


def pictures(folder: Path, names: list[str]) -> None:
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with (folder / name).open("wb") as file:
            Image.new("RGB", (8, 8), (10 * number, 0, 0)).save(file, "PNG")


def vqa(folder: Path) -> Path:
    """Three questions about two images, one of them twice in words."""
    entries = [
        {"image_id": 9, "question": "What is the dog doing?", "question_id": 9000},
        {"image_id": 25, "question": "How many birds?", "question_id": 25000},
        {"image_id": 9, "question": "Is it red?", "question_id": 9001},
    ]
    content = {
        "info": {"year": 2017},
        "task_type": "Open-Ended",
        "data_type": "mscoco",
        "license": {},
        "data_subtype": "train2014",
        "questions": entries,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "v2_OpenEnded_mscoco_train2014_questions.json").write_text(json.dumps(content))
    pictures(folder, [f"train2014/COCO_train2014_{number:012d}.jpg" for number in (9, 25)])
    return folder


def test_the_questions_of_vqa_are_texts_that_are_marked(tmp_path: Path) -> None:
    captions = open_captions(vqa(tmp_path))
    assert recognise(tmp_path) == "questions"
    assert list(captions.image_ids) == ["COCO_train2014_000000000009", "COCO_train2014_000000000025"]
    assert captions.texts == ["What is the dog doing?", "How many birds?", "Is it red?"]
    assert captions.image_of.tolist() == [0, 1, 0]
    assert captions.labels["text_kind"] == ["question", "question"]
    assert set(captions.splits) == {"train"}
    assert "3 texts" in captions.notes[0]
    assert "questions" in captions.notes[0]
    assert np.asarray(captions.images[1])[0, 0].tolist() == [10, 0, 0]


def test_the_questions_of_gqa(tmp_path: Path) -> None:
    entry = {
        "semantic": [],
        "entailed": [],
        "isBalanced": True,
        "question": "Is it a cat?",
        "imageId": "n161313",
    }
    for split in ("train", "val"):
        content = {"02930152": {**entry, "imageId": f"{split}1"}, "0293": {**entry, "imageId": f"{split}2"}}
        (tmp_path / f"{split}_balanced_questions.json").write_text(json.dumps(content))
    pictures(tmp_path / "images", ["train1.jpg", "train2.jpg", "val1.jpg", "val2.jpg"])
    captions = open_captions(tmp_path)
    assert recognise(tmp_path / "val_balanced_questions.json") == "questions"
    assert list(captions.splits) == ["train", "train", "val", "val"]
    assert set(captions.labels["text_kind"]) == {"question"}
    (tmp_path / "images" / "val2.jpg").unlink()
    with pytest.raises(DataError, match=r"val2\.jpg"):
        open_captions(tmp_path)
    (tmp_path / "val_balanced_questions.json").write_text(json.dumps({"1": {**entry, "imageId": None}}))
    with pytest.raises(DataError, match="question 1"):
        open_captions(tmp_path)


def test_the_folders_of_vqa_and_gqa_as_they_are_published(tmp_path: Path) -> None:
    """VQA's README puts pictures in Images/mscoco; GQA's questions1.2.zip holds ten files beside a folder."""
    questions, images = tmp_path / "vqa" / "Questions", tmp_path / "vqa" / "Images" / "mscoco"
    questions.mkdir(parents=True)
    licence = {"url": "http://creativecommons.org/licenses/by/4.0/", "name": "CC"}
    for name, entries in (("train2014", [1]), ("test2015", [2, 3]), ("test-dev2015", [3])):
        content = {
            "questions": [{"image_id": n, "question": f"Why {n}?", "question_id": n * 1000} for n in entries],
            "license": licence,
            "data_subtype": name,
            "task_type": "Open-Ended",
        }
        (questions / f"v2_OpenEnded_mscoco_{name}_questions.json").write_text(json.dumps(content))
    pictures(images, ["train2014/COCO_train2014_000000000001.jpg"])
    pictures(images, [f"test2015/COCO_test2015_{n:012d}.jpg" for n in (2, 3)])
    captions = open_captions(questions)
    assert list(captions.splits) == ["test", "test", "train"]
    assert "test-dev2015" in captions.notes[0]
    part = open_captions(questions / "v2_OpenEnded_mscoco_test-dev2015_questions.json")
    assert list(part.image_ids) == ["COCO_test2015_000000000003"]

    questions = tmp_path / "gqa" / "questions"
    (questions / "train_all_questions").mkdir(parents=True)
    for name in (
        "train_balanced",
        "val_balanced",
        "val_all",
        "testdev_balanced",
        "test_balanced",
        "challenge_all",
    ):
        entry = {"imageId": f"n{len(name)}", "question": "Is it?", "isBalanced": True}
        (questions / f"{name}_questions.json").write_text(json.dumps({"201640614": entry}))
    pictures(tmp_path / "gqa" / "images", ["n14.jpg", "n12.jpg", "n13.jpg"])
    captions = open_captions(questions)
    assert list(zip(captions.image_ids, captions.splits, strict=True)) == [
        ("n13", "test"),
        ("n14", "train"),
        ("n12", "val"),
    ]
    assert all(name in captions.notes[0] for name in ("val_all", "testdev_balanced", "challenge_all"))


def crc(url: str) -> int:
    return zlib.crc32(url.encode())


@pytest.mark.parametrize("form", ["{row}_{crc}", "{crc}"])
def test_conceptual_captions_with_the_pictures_that_could_be_downloaded(tmp_path: Path, form: str) -> None:
    urls = [f"http://x.org/{n}.jpg?size=1" for n in range(4)]  # the same in both: folders tell them apart
    for name, folder in (
        ("Train_GCC-training", "training"),
        ("Validation_GCC-1.1.0-Validation", "validation"),
    ):
        lines = [f'a "dog" number {n} .\t{url}' for n, url in enumerate(urls)]
        (tmp_path / f"{name}.tsv").write_text("\n".join(lines) + "\n")
        named = [form.format(row=n, crc=crc(url)) for n, url in enumerate(urls) if n != 1]
        pictures(tmp_path / folder, named)
    captions = open_captions(tmp_path)
    assert recognise(tmp_path) == "web-table"
    assert list(captions.splits) == ["train"] * 3 + ["val"] * 3
    assert captions.texts[1] == 'a "dog" number 2 .'
    assert np.asarray(captions.images[1])[0, 0].tolist() == [10, 0, 0]
    assert "2 of 8 rows" in captions.notes[0]
    assert "text_kind" not in captions.labels
    assert captions.image_ids[0] == f"training/{form.format(row=0, crc=crc(urls[0]))}"


@pytest.mark.parametrize("layout", ["json", "txt"])
def test_sbu_by_the_last_part_of_the_address(tmp_path: Path, layout: str) -> None:
    urls = [f"http://static.flickr.com/1/{n}_ab.jpg" for n in range(3)]
    texts = [f"my garden {n}" for n in range(3)]
    folder = tmp_path if layout == "json" else tmp_path / "dataset"
    folder.mkdir(exist_ok=True)
    if layout == "json":
        content = {"image_urls": urls, "user_ids": ["a"] * 3, "captions": texts}
        (folder / "sbu-captions-all.json").write_text(json.dumps(content))
    else:
        (folder / "SBU_captioned_photo_dataset_urls.txt").write_text("\n".join(urls) + "\n")
        (folder / "SBU_captioned_photo_dataset_captions.txt").write_text("\n".join(texts) + "\n")
    with pytest.raises(DataError, match=r"\b3\b.*images=FOLDER"):
        open_captions(tmp_path, format="web-table")
    pictures(tmp_path / "images", ["0_ab.jpg", "2_ab.jpg"])
    captions = open_captions(tmp_path, format="web-table")
    assert captions.texts == ["my garden 0", "my garden 2"]
    if layout == "txt":
        (tmp_path / "images").rename(tmp_path / "pictures")  # and as SBU's own download.m saves them
        pictures(folder / "sbu_images", ["m_1_1_ab.jpg", "m_1_2_ab.jpg"])
        assert open_captions(tmp_path, format="web-table").texts == ["my garden 1", "my garden 2"]
        (folder / "SBU_captioned_photo_dataset_captions.txt").write_text("one\n")
        with pytest.raises(DataError, match="1 texts for 3 addresses"):
            open_captions(tmp_path, format="web-table")


def manifest(folder: Path, *corpora: dict[str, Any]) -> Path:
    path = folder / "corpora.json"
    path.write_text(json.dumps({"corpora": list(corpora)}))
    return path


def test_tars_and_other_data_are_one_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path / "cache"))
    with tarfile.open(tmp_path / "train-0.tar", "w") as tar:
        for number in (9, 77):
            key = f"COCO_train2014_{number:012d}"
            add_member(tar, f"{key}.png", encoded(number))
            add_member(tar, f"{key}.json", json.dumps({"captions": ["a dog", "a bird"]}).encode())
    vqa(tmp_path / "vqa")
    path = manifest(
        tmp_path,
        {"name": "captions", "path": "train-0.tar", "images": "coco"},
        {"name": "questions", "path": "vqa", "weight": 0.5, "images": "coco"},
    )
    captions = open_captions(path)
    assert captions.image_ids[0] == "captions/train-0/COCO_train2014_000000000009"
    assert list(captions.image_ids)[2:] == [f"questions/COCO_train2014_{n:012d}" for n in (9, 25)]
    assert captions.labels["text_kind"] == [None, None, "question", "question"]
    assert captions.picture_of is not None
    assert captions.picture_of.tolist() == [0, 1, 0, 3]  # the question and the captions of one picture
    assert captions.order is not None
    assert len(captions.order) == 4 + 2  # half of three, rounded
    assert np.asarray(captions.images[3])[0, 0].tolist() == [10, 0, 0]
    assert len(captions.fingerprint()) == 16
    assert any("questions" in note for note in captions.notes)
    with pytest.raises(DataError, match="nowhere"):
        open_captions(manifest(tmp_path, {"path": "nowhere"}))
