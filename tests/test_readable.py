"""Pictures that cannot be read: left out, counted and listed by training and evaluation, or an error when asked."""

from __future__ import annotations

import csv
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bombs import transparent_png
from commands import diptych, refused
from dual_folders import vit_folder
from PIL import Image
from small import bert_folder, photos

from diptych.data import files
from diptych.data.arrays import ArrayStore
from diptych.data.captions import (
    StoreChain,
    StoredImage,
    StoreRows,
    first_readable,
    holds_features,
    holds_pictures,
)
from diptych.data.files import FileImages
from diptych.data.problems import undecodable, unopenable
from diptych.errors import DataError, ImageError
from diptych.evaluation.report import Report
from diptych.recipes import RECIPES
from diptych.runs.extract import readable_splits
from diptych.runs.train import run_recipe
from diptych.training.log import read_log

FLAGS = (
    "--dim=8", "--word_dim=8", "--min_count=1", "--image_size=32", "--batch_size=4", "--epochs=1", "--log_steps=1",
)  # fmt: skip
BAD = ("broken.jpg", "empty.png", "huge.png", "missing.png", "text.png")


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """24 good pictures in three splits, and in each split five that cannot be read, with two texts each."""
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    rows = []
    for split, count in (("train", 12), ("val", 6), ("test", 6)):
        folder = tmp_path / "photos" / split
        folder.mkdir(parents=True)
        for name in ["broken.jpg", *(f"{n}.png" for n in range(count)), *BAD[1:]]:  # the first one is broken
            if name[0].isdigit():
                Image.fromarray(rng.integers(0, 255, (16, 16, 3)).astype(np.uint8)).save(folder / name)
            rows += [(f"{split}/{name}", f"the {word} {split} {name}", split) for word in ("big", "small")]
        picture = Image.fromarray(rng.integers(0, 255, (64, 64, 3)).astype(np.uint8))
        picture.save(folder / "broken.jpg")
        os.truncate(folder / "broken.jpg", 600)
        (folder / "empty.png").touch()
        (folder / "huge.png").write_bytes(transparent_png(11_000))
        (folder / "text.png").write_text("this is not a picture")
    path = tmp_path / "photos" / "table.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("image", "text", "split"), *rows])
    return path


def test_a_closed_form_leaves_out_the_first_picture_too(table: Path, tmp_path: Path) -> None:
    said = diptych(
        "train", "ridge", "--data", table, "--output_dir", tmp_path / "run", "--image_size", 32,
        "--image_encoder", vit_folder(tmp_path / "vit"), "--text_encoder", bert_folder(tmp_path / "bert"),
    ).stderr  # fmt: skip
    assert "left out 10 of 39 pictures" in said


def test_training_and_evaluation_leave_them_out_and_say_so(table: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    said = diptych("train", "vse-plus-plus", "--data", table, "--output_dir", run, *FLAGS).stderr
    assert "left out 10 of 39 pictures, which cannot be read, with 20 texts:" in said
    assert "train/missing.png: " in said
    assert "is not on disk: check the path." in said
    assert f"all are listed in {run / 'unreadable.txt'}; use --strict_images to stop at the first" in said
    listed = (run / "unreadable.txt").read_text().splitlines()
    assert {line.split("\t")[0] for line in listed} == {f"{s}/{b}" for s in ("train", "val") for b in BAD}
    assert all(line.split("\t")[1].endswith(".") for line in listed)

    done = diptych("evaluate", run, "--split", "test", "--output", tmp_path / "report.json", "--bootstrap", 0)
    assert "left out 5 of 11 pictures, which cannot be read, with 10 texts:" in done.stderr
    assert "6 (5 more could not be read) images, 12 texts" in done.stdout
    assert Report.load(tmp_path / "report.json").card.left_out == 5
    for protocol in ("four-directions", "video"):
        done = diptych("evaluate", run, "--protocol", protocol, "--bootstrap", 0)
        assert "pictures that could not be read 5" in done.stdout, protocol
    assert "(5 more could not be read)" in diptych("evaluate", run, "--protocol", "four-directions").stdout

    sentence = refused("evaluate", run, "--split", "test", "--strict_images")
    assert "3 of 39" in sentence


def test_pictures_of_runs_leave_them_out_and_say_so(table: Path, tmp_path: Path) -> None:
    runs = tmp_path / "mean", tmp_path / "gpo"
    for run, recipe in zip(runs, ("vse-plus-plus", "vse-infinity"), strict=True):
        diptych("train", recipe, "--data", table, "--output_dir", run, *FLAGS)
    said = "left out 5 of 11 pictures, which cannot be read, with 10 texts:"
    for verb, given, made in (
        ("space", (runs[0], "--untrained"), "space.png"),
        ("grids", runs, "grids.html"),
        ("speed", (runs[0], "--most", 10), "speed.png"),
        ("knowledge", (runs[0], "--texts", "the big one", "the small one"), "knowledge.png"),
    ):
        done = diptych("show", verb, *given, "--output", tmp_path / made)
        assert said in done.stderr, verb
        assert "val/huge.png: " in done.stderr
        assert "--strict_images" not in done.stderr  # which these commands do not have
    assert (
        "all 6 images and 12 texts"
        in diptych("show", "space", runs[0], "--output", tmp_path / "s.png").stdout
    )


def test_augmentation_draws_others_in_their_place(table: Path, tmp_path: Path) -> None:
    done = diptych("show", "augmentation", "--data", table, "--count", 12, "--output", tmp_path / "a.png")
    assert "12 pictures of" in done.stdout
    assert "of 17 pictures, which cannot be read, with " in done.stderr


def test_confusions_and_labels_leave_them_out(table: Path, tmp_path: Path) -> None:
    rows = list(csv.reader(table.read_text().splitlines()))
    labelled = table.with_name("labels.csv")
    with labelled.open("w", newline="") as file:
        csv.writer(file).writerows(
            [*row, ("labels", "big", "small")[0 if not n else 1 + n // 2 % 2]] for n, row in enumerate(rows)
        )
    run = tmp_path / "run"
    small = ("--heads=2", "--blocks=1", "--feedforward=16")
    diptych("train", "labelwise", "--data", labelled, "--output_dir", run, *FLAGS, *small)
    done = diptych("show", "confusions", run, "--output", tmp_path / "c.html")
    assert "left out 5 of 11 pictures, which cannot be read, with 10 texts:" in done.stderr
    done = diptych("label", run, labelled, "--output", tmp_path / "told.csv")
    assert "left out 15 of 39 pictures, which cannot be read, with 30 texts:" in done.stderr
    told = list(csv.DictReader((tmp_path / "told.csv").read_text().splitlines()))
    assert [row["kind"] for row in told].count("image") == 24
    assert not any("broken" in row["id"] for row in told)


def test_class_lists_leave_them_out_or_stop(table: Path, tmp_path: Path) -> None:
    folder = table.parent
    names = [f"{split}/{name}" for split in ("train", "val") for name in ("0.png", "1.png", *BAD[:3])]
    lines = [f"{n} {1 + n // 5} 1 {name}" for n, name in enumerate(names)]
    (folder / "Ebay_test.txt").write_text("\n".join(["image_id class_id super_class_id path", *lines]) + "\n")
    run = tmp_path / "run"
    diptych("train", "vse-plus-plus", "--data", table, "--output_dir", run, *FLAGS)
    asked = ("evaluate", run, "--protocol", "image-classes", "--data", folder)
    done = diptych(*asked)
    assert "left out 6 of 10 pictures, which cannot be read:" in done.stderr
    assert "sop (4 images, each against the others)" in done.stdout
    assert "pictures that could not be read 6" in done.stdout
    assert "broken.jpg" in refused(*asked, "--strict_images")


def test_a_backbone_that_is_trained_skips_them_while_it_reads(table: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = diptych("train", "vse-plus-plus", "--data", table, "--output_dir", run, *FLAGS, "--train_backbone")
    assert "left out 6 of 39 pictures" in done.stderr  # of validation, and a training picture that is missing
    assert "4 images could not be read and were skipped" in done.stdout
    assert [line["skipped_images"] for line in read_log(run / "log.jsonl") if "skipped_images" in line] == [4]


def test_strict_images_stop_at_the_first(table: Path, tmp_path: Path) -> None:
    strict = ("--data", table, "--output_dir", tmp_path / "run", *FLAGS, "--strict_images")
    assert "3 of 39" in refused("train", "vse-plus-plus", *strict)
    for split in ("train", "val", "test"):
        Image.new("RGB", (9, 9)).save(table.parent / split / "missing.png")
    assert "broken.jpg" in refused("train", "vse-plus-plus", *strict)


def test_a_resumed_run_leaves_the_same_ones_out(table: Path, tmp_path: Path) -> None:
    run, again = tmp_path / "run", tmp_path / "again"
    diptych("train", "vse-plus-plus", "--data", table, "--output_dir", run, *FLAGS)
    resume = ("--resume_from_checkpoint", run, "--epochs=2")
    said = diptych("train", "vse-plus-plus", *resume).stderr
    assert "left out 10 of 39 pictures" in said
    diptych("train", "vse-plus-plus", "--data", table, "--output_dir", again, *FLAGS, "--epochs=2")
    losses = [[line.get("loss") for line in read_log(folder / "log.jsonl")] for folder in (run, again)]
    assert losses[0] == losses[1]


def test_a_repaired_picture_comes_in_without_computing_the_others(table: Path, tmp_path: Path) -> None:
    diptych("train", "vse-plus-plus", "--data", table, "--output_dir", tmp_path / "one", *FLAGS)
    (pack,) = (tmp_path / "cache" / "images").iterdir()
    assert (pack / "index").stat().st_size == 18 * 32
    Image.new("RGB", (20, 20), "red").save(table.parent / "train" / "broken.jpg")
    said = diptych("train", "vse-plus-plus", "--data", table, "--output_dir", tmp_path / "two", *FLAGS).stderr
    assert "left out 9 of 39 pictures" in said
    assert (pack / "index").stat().st_size == 19 * 32


def test_nothing_but_bad_pictures_is_one_sentence(table: Path, tmp_path: Path) -> None:
    rows = table.read_text().splitlines()
    run = ("--output_dir", tmp_path / "run", *FLAGS)
    only = table.with_name("only.csv")
    only.write_text("\n".join([rows[0], *(row for row in rows if "broken" in row or "empty" in row)]))
    said = refused("train", "vse-plus-plus", "--data", only, *run)
    assert "2 images" in said
    only.write_text("\n".join([rows[0], *(row for row in rows if "missing" in row)]))
    assert "3 of 3" in refused("train", "vse-plus-plus", "--data", only, *run)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--batch_size=5000", "batch_size"),
        ("--cuda_graphs", "--cuda_graphs"),
        ("--precision=fp16", "--precision"),
    ],
)
def test_settings_are_refused_before_anything_is_extracted(
    table: Path, tmp_path: Path, flag: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run = ("--data", table, "--output_dir", tmp_path / "run", *FLAGS, flag)
    assert message in refused("train", "vse-plus-plus", *run)
    assert not (tmp_path / "cache" / "images").exists()
    assert not (tmp_path / "run").exists()


def test_teachers_see_what_training_sees(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training, validation = readable_splits(str(table), show_progress=False)
    assert (len(training.images), len(validation.images)) == (12, 6)
    assert "left out 10 of 39 pictures" in capsys.readouterr().err


class Faulty:
    """A store of pictures of which some cannot be read."""

    def __init__(self, *good: bool) -> None:
        self.good = good

    def __len__(self) -> int:
        return len(self.good)

    def __getitem__(self, index: int) -> StoredImage:
        self.content_key(index)
        return Image.new("RGB", (2, 2))

    def content_key(self, index: int) -> str:
        if not self.good[index]:
            raise ImageError(f"picture {index}\nis damaged.")
        return str(index)


def test_the_first_that_can_be_read_speaks_for_a_store() -> None:
    store = Faulty(False, True, False)
    assert isinstance(first_readable(store), Image.Image)
    assert holds_pictures(store)
    assert unopenable(store) == undecodable(store) == {0: "picture 0 is damaged.", 2: "picture 2 is damaged."}
    assert not holds_pictures(Faulty())
    with pytest.raises(DataError):
        first_readable(Faulty())
    with pytest.raises(DataError, match=r"\b2\b.*\b0\b"):
        first_readable(Faulty(False, False))


def test_a_store_that_says_nothing_is_asked_once() -> None:
    opened = []

    class Own(Faulty):
        def __getitem__(self, index: int) -> StoredImage:
            opened.append(index)
            return super().__getitem__(index)

    store = Own(False, True, True)
    split = StoreRows(store, np.array([2, 1]))
    assert [holds_pictures(one) for one in (store, split, StoreChain([store, split]), store)] == [True] * 4
    assert opened == [0, 1]


def test_files_are_not_opened_to_know_that_they_are_pictures(tmp_path: Path) -> None:
    store = FileImages(tmp_path, ["absent.jpg"])
    assert not holds_features(store)
    assert not holds_features(StoreChain([store, ArrayStore(np.zeros((2, 4), np.float32))]))
    assert holds_features(ArrayStore(np.zeros((2, 4), np.float16)))
    assert holds_features([np.zeros((3, 4), np.float32)])
    assert not holds_features([np.zeros((3, 4, 3), np.uint8)])
    assert not holds_features([])


@pytest.mark.parametrize("name", ["vse-infinity", "cusa-vse-infinity"])
def test_a_frozen_backbone_decodes_every_photo_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Five and seven times the first one, when each question about the data decoded it."""
    opened: Counter[str] = Counter()
    real = files.open_image

    def noted(source: Any, *given: Any, **named: Any) -> Any:
        opened[str(source)] += 1
        return real(source, *given, **named)

    monkeypatch.setattr(files, "open_image", noted)
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path / "cache"))
    data, vit, bert = (
        photos(tmp_path / "photos"),
        vit_folder(tmp_path / "vit"),
        bert_folder(tmp_path / "bert"),
    )
    teachers = {"text_teacher": str(bert), "image_teacher": str(vit)} if name.startswith("cusa") else {}
    recipe = RECIPES[name]
    settings = recipe.settings(
        dim=8, batch_size=4, min_count=1, word_dim=4, epochs=1, image_encoder=str(vit), image_size=32, **teachers
    )  # type: ignore[call-arg]  # fmt: skip
    run_recipe(recipe, settings, str(data), tmp_path / "run", show_progress=False)
    assert len(opened) == 12
    assert set(opened.values()) == {1}
