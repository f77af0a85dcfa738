"""Labels of images: the vocabulary, the column of a manifest, and the published files that hold labels."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import small
from PIL import Image
from scipy.io import savemat
from scipy.sparse import csr_matrix

from diptych.data.check import check
from diptych.data.formats import open_captions, recognise
from diptych.data.labels import Labels, item_labels
from diptych.errors import DataError, SettingsError
from diptych.parts import describe, rebuild


def picture(file: Path, number: int = 0) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (number * 9 % 255, 40, 90)).save(file)


def manifest(folder: Path, cells: list[str], column: str = "labels") -> Path:
    for number in range(len(cells)):
        picture(folder / f"{number}.png", number)
    with (folder / "data.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["image", "text", column])
        rows.writerows([f"{n}.png", f"text {n}", cell] for n, cell in enumerate(cells))
    return folder / "data.csv"


def test_a_cell_of_a_manifest_holds_several_labels(tmp_path):
    captions = open_captions(
        manifest(tmp_path, ["sky; sea", "sky|dog", '["a;b", "sky"]', "[odd", " sea ;sea"])
    )
    items = item_labels(captions)
    assert items == [("sky", "sea"), ("sky", "dog"), ("a", "b", "sky"), ("[odd",), ("sea",)]
    labels = Labels.of(captions)
    assert labels.names == ["[odd", "a", "b", "dog", "sea", "sky"]
    matrix = labels.rows_of(captions)
    assert np.array_equal(matrix, labels.matrix(items))
    assert matrix.sum(1).tolist() == [2, 2, 3, 1, 1]
    assert [labels.names[c] for c in np.flatnonzero(matrix[1])] == ["dog", "sky"]


def test_json_lines_and_several_rows_of_one_image_give_their_labels_together(tmp_path):
    picture(tmp_path / "a.png")
    picture(tmp_path / "b.png", 3)
    rows = [
        {"image": "a.png", "text": "one", "labels": ["x", "y"]},
        {"image": "a.png", "text": "two", "labels": ["z"]},
        {"image": "b.png", "text": "three", "labels": 7},
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert item_labels(open_captions(tmp_path / "data.jsonl")) == [("x", "y", "z"), ("7",)]


def test_several_columns_are_one_set_of_labels():
    captions = open_captions("emoji", split="val")
    items = item_labels(captions, ["category", "subcategory"])
    assert all(len(item) == 2 for item in items)
    assert items[0] == (captions.labels["category"][0], captions.labels["subcategory"][0])


def test_missing_columns_missing_labels_and_unseen_labels_get_one_sentence(tmp_path):
    captions = open_captions(manifest(tmp_path, ["sky", "", "sea"]))
    with pytest.raises(DataError, match=r"\b1\b.*\b3\b.*1\.png"):
        item_labels(captions)
    with pytest.raises(DataError, match="topic"):
        item_labels(captions, ["topic"])
    with pytest.raises(DataError, match=r"'fog'.*a\.png.*'sky'"):
        Labels(["sky"]).matrix([["fog"]], ["a.png"])
    with pytest.raises(DataError):
        Labels(["sky", "sky"])
    kept = open_captions(f"{tmp_path / 'data.csv'}?unlabelled=drop")
    assert [str(i) for i in kept.image_ids] == ["0.png", "2.png"]
    with pytest.raises(DataError, match=r"1\.png"):
        open_captions(f"{tmp_path / 'data.csv'}?unlabelled=error")
    with pytest.raises(SettingsError, match="keep"):
        open_captions(f"{tmp_path / 'data.csv'}?unlabelled=keep")


def test_the_vocabulary_travels_with_a_model(tmp_path):
    labels = Labels(["sky", "Straße", "sea"])
    config = describe(labels, tmp_path)
    assert (tmp_path / "labels.json").exists()
    again = rebuild(json.loads(json.dumps(config)), tmp_path)
    assert again.names == labels.names
    assert describe(labels) == describe(again)
    assert describe(labels) != describe(Labels(["sky", "sea", "Straße"]))


def mirflickr(folder: Path, count: int = 30, common: bool = True) -> Path:
    notes, tags = folder / "mirflickr25k_annotations_v080", folder / "mirflickr" / "meta" / "tags"
    notes.mkdir(parents=True)
    tags.mkdir(parents=True)
    for number in range(1, count + 1):
        picture(folder / "mirflickr" / f"im{number}.jpg", number)
        own = ["nikon", "rare", "sky", "sky"] if number % 2 else ["dog", "nikon"]
        (tags / f"tags{number}.txt").write_text("\n".join([] if number == 4 else own) + "\n")
    (notes / "sky.txt").write_text("\n".join(str(n) for n in range(1, count + 1, 2)))
    (notes / "sky_r1.txt").write_text("2\n")
    (notes / "animals.txt").write_text("\n".join(str(n) for n in range(2, count - 1, 2)))
    (notes / "README.txt").write_text("not a label")
    if common:
        (folder / "common_tags.txt").write_text("sky 700\nnikon 600\ndog 500\n")
    return folder


def test_mirflickr_reads_24_labels_and_common_tags(tmp_path):
    path = mirflickr(tmp_path)
    assert recognise(path) == "mirflickr"
    captions = open_captions(f"{path}?test=5&val=3")
    assert len(captions.images) == 28  # picture 4 has no tag, picture 30 no label
    assert sorted(captions.splits).count("test") == 5
    assert sorted(captions.splits).count("val") == 3
    row = list(captions.image_ids).index("im1.jpg")
    assert captions.labels["labels"][row] == ("sky",)
    assert captions.texts[row] == "sky nikon"  # the order of the tag list, each once, rare ones left out
    assert open_captions(f"{path}?test=5&val=3").splits == captions.splits
    assert check(f"{path}?test=5&val=3", show_progress=False).ok


def test_mirflickr_without_a_tag_list_keeps_the_frequent_tags(tmp_path):
    captions = open_captions(f"{mirflickr(tmp_path, common=False)}?test=2&val=2&least_uses=15")
    assert captions.texts[list(captions.image_ids).index("im1.jpg")] == "nikon rare sky"
    assert captions.texts[list(captions.image_ids).index("im2.jpg")] == "nikon"


def test_mirflickr_refuses_what_it_cannot_read(tmp_path):
    path = mirflickr(tmp_path)
    with pytest.raises(SettingsError, match=r"\b28\b"):
        open_captions(path)
    (path / "mirflickr25k_annotations_v080" / "sky.txt").write_text("1\nim2\n")
    with pytest.raises(DataError, match=r"sky\.txt:2.*'im2'"):
        open_captions(f"{path}?test=5&val=3")
    with pytest.raises(SettingsError, match="least_uses is 0"):
        open_captions(f"{path}?least_uses=0")


def nus_wide(folder: Path, count: int = 12) -> Path:
    for place in ("ImageList", "Groundtruth/AllLabels", "NUS_WID_Tags"):
        (folder / place).mkdir(parents=True)
    names = [f"sky\\{n:04}_{n}.jpg" for n in range(count)]
    for n, name in enumerate(names):
        picture(folder / "Flickr" / name.replace("\\", "/"), n)
    (folder / "ImageList" / "Imagelist.txt").write_text("\n".join(names) + "\n")
    labels = {"sky": [1] * 9 + [0] * 3, "water": [0, 1] * 6, "rare": [0] * 11 + [1]}
    for name, flags in labels.items():
        file = folder / "Groundtruth" / "AllLabels" / f"Labels_{name}.txt"
        file.write_text("\n".join(map(str, flags)) + "\n")
    (folder / "NUS_WID_Tags" / "TagList1k.txt").write_text("nature\nsky\nblue\n")
    rows = [f"{int(n % 2 == 0)}\t1\t{int(n == 3)}" if n != 5 else "0\t0\t0" for n in range(count)]
    (folder / "NUS_WID_Tags" / "AllTags1k.txt").write_text("\n".join(rows) + "\n")
    return folder


def test_nus_wide_keeps_the_most_frequent_concepts(tmp_path):
    path = nus_wide(tmp_path)
    assert recognise(path) == "nus-wide"
    captions = open_captions(f"{path}?concepts=2&test=2&val=1")
    assert len(captions.images) == 10  # 5 has no tag, 10 is left without a label
    row = list(captions.image_ids).index("sky/0003_3.jpg")
    assert captions.labels["labels"][row] == ("sky", "water")
    assert captions.texts[row] == "sky blue"
    assert set(item_labels(captions)) == {("sky",), ("sky", "water"), ("water",)}


def test_nus_wide_refuses_files_of_another_length(tmp_path):
    path = nus_wide(tmp_path)
    file = path / "Groundtruth" / "AllLabels" / "Labels_sky.txt"
    file.write_text("1\n0\n")
    with pytest.raises(DataError, match=r"\b2\b.*\b12\b"):
        open_captions(path)
    file.write_text("2\n" * 12)
    with pytest.raises(DataError, match="0 and 1"):
        open_captions(path)
    file.write_text("1\n" * 12)
    table = path / "NUS_WID_Tags" / "AllTags1k.txt"
    table.write_text(table.read_text() + "0 0 1\n")
    with pytest.raises(DataError, match=r"\b13\b.*\b12\b"):
        open_captions(f"{path}?test=2&val=1")
    table.write_text("0 1\n")
    with pytest.raises(DataError, match=r"\b2\b.*\b3\b"):
        open_captions(path)
    table.unlink()
    with pytest.raises(DataError, match=r"AllTags1k\.txt"):
        open_captions(path)
    with pytest.raises(SettingsError, match=r"\b0\b"):
        open_captions(f"{path}?concepts=0")


def label_arrays(folder: Path, sparse: bool = False) -> Path:
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    for split, count in (("train", 8), ("dev", 4), ("test", 5)):
        tags, labels = rng.integers(0, 2, (count, 6)), rng.integers(0, 2, (count, 3))
        tags[0], labels[:, 0] = 0, 1
        savemat(folder / f"{split}_tag.mat", {"feat": csr_matrix(tags.astype(float)) if sparse else tags})
        savemat(folder / f"{split}_label.mat", {"feat": labels.astype(float)})
        np.save(folder / f"{split}_preim.npy", rng.standard_normal((count, 4, 5)).astype(np.float32))
        np.save(folder / f"{split}_cls.npy", rng.random((count, 4, 7)).astype(np.float32))
    (folder / "common_tags.txt").write_text("".join(f"tag{n} {90 - n}\n" for n in range(6)))
    return folder


@pytest.mark.parametrize("sparse", [False, True])
def test_the_authors_arrays_are_read_as_they_are(tmp_path, sparse):
    from scipy.io import loadmat

    path = label_arrays(tmp_path, sparse)
    assert recognise(path) == "label-arrays"
    captions = open_captions(path)
    assert sorted(set(captions.splits)) == ["test", "train", "val"]
    train = captions.split("train")
    tags = loadmat(path / "train_tag.mat")["feat"]
    tags = tags.toarray() if sparse else tags
    assert train.texts[1] == " ".join(f"tag{n}" for n in np.flatnonzero(tags[1]))
    assert train.texts[0] == "untagged"
    labels = loadmat(path / "train_label.mat")["feat"]
    assert train.labels["labels"][2] == tuple(f"label {n}" for n in np.flatnonzero(labels[2]))
    assert np.array_equal(train.images[3], np.load(path / "train_preim.npy")[3])
    classes = np.load(path / "train_cls.npy").argmax(-1)
    assert list(train.labels["region_classes"][5]) == classes[5].tolist()
    assert train.labels["region_classes"][5][1:3] == classes[5].tolist()[1:3]
    alone = open_captions(path, split="test")
    assert len(alone.images) == 5
    (path / "labels.txt").write_text("sky\nsea\ndog\n")
    assert open_captions(path).labels["labels"][0][0] == "sky"


def test_the_best_regions_are_used(tmp_path):
    """Above 0.5, or the best whatever their scores where fewer are: section 2 of the supplement."""
    path, rng = label_arrays(tmp_path), np.random.default_rng(4)
    for most in (3, 36):
        for split, count in (("train", 8), ("dev", 4), ("test", 5)):
            np.save(path / f"{split}_preim.npy", rng.standard_normal((count, 50, 5)).astype(np.float32))
            np.save(path / f"{split}_cls.npy", rng.random((count, 50, 2)).astype(np.float32) ** 2)
        regions, scores = np.load(path / "train_preim.npy"), np.load(path / "train_cls.npy")
        train = open_captions(path, regions=most).split("train")
        for image in range(8):
            sure = scores[image].max(-1)
            able = np.flatnonzero(sure > 0.5)
            pool = able.tolist() if len(able) >= most else list(range(50))
            expected = sorted(sorted(pool, key=lambda r: -sure[r])[:most])
            assert np.array_equal(train.images[image], regions[image][expected])
            classes = train.labels["region_classes"][image]
            assert list(classes) == scores[image][expected].argmax(-1).tolist()
            assert len(classes) == most
        assert len({train.images.content_key(row) for row in range(8)}) == 8
    assert open_captions(path).images[0].shape == (36, 5)
    with pytest.raises(SettingsError, match=r"\b0\b"):
        open_captions(path, regions=0)
    np.save(path / "dev_cls.npy", rng.random((4, 49, 2)))
    with pytest.raises(DataError, match=r"dev_cls\.npy"):
        open_captions(path)


def test_the_authors_arrays_must_agree(tmp_path):
    path = label_arrays(tmp_path)
    np.save(path / "dev_preim.npy", np.zeros((3, 4, 5), np.float32))
    with pytest.raises(DataError, match=r"dev_tag\.mat.*\b4\b.*dev_preim\.npy"):
        open_captions(path)
    (path / "dev_preim.npy").unlink()
    with pytest.raises(DataError, match=r"dev_preim\.npy"):
        open_captions(path)
    path = label_arrays(tmp_path / "b")
    savemat(path / "test_label.mat", {"other": np.zeros((5, 3))})
    with pytest.raises(DataError, match="feat"):
        open_captions(path)
    (path / "test_label.mat").write_bytes(b"no")
    with pytest.raises(DataError, match=r"test_label\.mat"):
        open_captions(path)
    path = label_arrays(tmp_path / "c")
    np.save(path / "train_cls.npy", np.zeros((7, 4, 7), np.float32))
    with pytest.raises(DataError, match=r"\b7\b.*\b8\b"):
        open_captions(path)
    (path / "train_cls.npy").unlink()
    (path / "common_tags.txt").write_text("one 1\n")
    with pytest.raises(DataError, match=r"\b6\b.*\b1\b"):
        open_captions(path)
    (path / "common_tags.txt").unlink()
    with pytest.raises(DataError, match=r"common_tags\.txt"):
        open_captions(path)


def instances(folder: Path, images: list[int]) -> Path:
    folder.mkdir(exist_ok=True)
    notes = [{"image_id": n, "category_id": c} for n in images for c in (18, 1, 18)]
    names = [{"id": 1, "name": "person"}, {"id": 18, "name": "dog"}]
    (folder / "instances_val2014.json").write_text(json.dumps({"categories": names, "annotations": notes}))
    return folder


def test_coco_instances_label_any_data_with_coco_ids(tmp_path):
    path = small.precomputed(tmp_path / "coco", train=3, dev=2)
    (path / "train_ids.txt").write_text("1\nCOCO_val2014_000000000007.jpg\n12\n")
    (path / "dev_ids.txt").write_text("20\n21\n")
    notes = instances(tmp_path / "annotations", [1, 7, 20, 21])
    captions = open_captions(f"{path}?instances={notes}")
    assert captions.labels["labels"][:3] == [("person", "dog"), ("person", "dog"), ()]
    kept = open_captions(f"{path}?instances={notes}&unlabelled=drop")
    assert len(kept.images) == 4
    assert check(f"{path}?instances={notes}&unlabelled=drop", show_progress=False).ok
    with pytest.raises(DataError, match=r"instances_\*\.json"):
        open_captions(f"{path}?instances={tmp_path}")
    (notes / "instances_val2014.json").write_text("[]")
    with pytest.raises(DataError, match=r"instances_val2014\.json"):
        open_captions(f"{path}?instances={notes}")
    instances(notes, [99])
    with pytest.raises(DataError, match=r"\b5\b.*coco"):
        open_captions(f"{path}?instances={notes}")
    (path / "dev_ids.txt").write_text("x\ny\n")
    with pytest.raises(DataError, match="'x'"):
        open_captions(f"{path}?instances={notes}")
