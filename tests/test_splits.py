"""One split of a data set, by any of its names, without the files of the others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from commands import diptych, refused, training
from small import coco_like, precomputed

from diptych.data.formats import open_captions, separate_splits
from diptych.data.held_out import open_split, training_splits
from diptych.errors import DataError
from diptych.evaluation.evaluate import evaluate
from diptych.evaluation.report import Report


@pytest.fixture(scope="module")
def coco(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return coco_like(tmp_path_factory.mktemp("data") / "coco_precomp")


@pytest.fixture(scope="module")
def run(coco: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "vse"
    diptych(*training("vse-infinity", coco, epochs=1), "--output_dir", folder)
    return folder


def test_test_is_read_beside_testall(coco: Path) -> None:
    test, every = open_split(str(coco), "test"), open_split(str(coco), "testall")
    assert (len(test.images), len(every.images)) == (4, 12)
    assert (set(test.splits), set(every.splits)) == ({"test"}, {"testall"})
    assert list(test.texts) == list(every.texts)[:20]
    assert list(test.image_ids) == list(every.image_ids)[:4]
    assert "test" not in open_captions(coco).splits  # both together would hold images twice


@pytest.mark.parametrize("name", ["dev", "val", "validation", "Dev"])
def test_val_has_several_names(name: str, coco: Path) -> None:
    found = open_split(str(coco), name)
    assert set(found.splits) == {"val"}
    assert found.fingerprint() == open_captions(coco).split("val").fingerprint()


def test_val_is_what_training_held_out_where_the_data_has_none(run: Path, tmp_path: Path) -> None:
    folder = precomputed(tmp_path / "small")
    for file in folder.glob("dev_*"):
        file.unlink()
    held = training_splits(open_captions(folder))[1]
    assert open_split(str(folder), "dev").fingerprint() == held.fingerprint()
    for data in (folder, open_captions(folder)):
        assert evaluate(run, data, split="dev").card.data_hash == held.fingerprint()


def test_options_stay_behind_the_path(coco: Path) -> None:
    path = f"{coco}?texts_per_image=1"
    assert separate_splits(path) == ["train", "val", "test", "testall"]
    with pytest.raises(DataError, match=r"\b20\b"):
        open_split(path, "test")


def test_evaluate_takes_every_split_of_a_coco_folder(run: Path, coco: Path, tmp_path: Path) -> None:
    for name, split, images in (("test", "test", 4), ("testall", "testall", 12), ("dev", "val", 10)):
        saved = tmp_path / f"{name}.json"
        diptych("evaluate", run, "--data", coco, "--split", name, "--output", saved)
        card = Report.load(saved).card
        assert (card.split, card.images, card.texts) == (split, images, 5 * images)


def test_evaluating_test_needs_no_file_of_another_split(run: Path, coco: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    for file in (*coco.glob("test*"), *coco.glob("*_ids.txt"), coco / "train_caps.txt"):
        (alone / file.name).write_bytes(file.read_bytes())
    whole, part = tmp_path / "whole.json", tmp_path / "part.json"
    diptych("evaluate", run, "--data", coco, "--split", "test", "--output", whole)
    diptych("evaluate", run, "--data", alone, "--split", "test", "--output", part)
    assert Report.load(part).metrics == Report.load(whole).metrics


def test_a_split_that_is_not_there_is_named_with_those_that_are(
    run: Path, coco: Path, tmp_path: Path
) -> None:
    said = refused("evaluate", run, "--data", coco, "--split", "minival")
    assert "minival" in said


def test_features_of_test_are_the_first_of_testall(coco: Path) -> None:
    test, every = open_split(str(coco), "test").images, open_split(str(coco), "testall").images
    for row in range(4):
        assert np.array_equal(np.asarray(test[row]), np.asarray(every[row]))
