"""Class-based image retrieval: R@1 against a loop and scikit-learn, and the lists of the four data sets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from commands import diptych, refused
from hypothesis import given, settings
from hypothesis import strategies as st
from small import precomputed

from diptych.errors import DataError
from diptych.evaluation import classes as module
from diptych.evaluation.classes import class_ranks, class_recall, open_class_list
from diptych.evaluation.report import Report
from diptych.model.retriever import Retriever


def loop(
    queries: np.ndarray, classes: np.ndarray, gallery: np.ndarray, labels: np.ndarray, own: bool
) -> list[float]:
    """Sort the gallery by Euclidean distance of unit rows, then by index, and look for the class, query by query."""
    unit = lambda x: x / np.linalg.norm(x, axis=1, keepdims=True)  # noqa: E731
    queries, gallery = unit(queries), unit(gallery)
    ranks = []
    for i, query in enumerate(queries):
        distances = [(round(float(((query - item) ** 2).sum()), 5), j) for j, item in enumerate(gallery)]
        order = [j for _, j in sorted(distances) if not (own and i == j)]
        places = [place for place, j in enumerate(order) if labels[j] == classes[i]]
        ranks.append(float(places[0]) if places else float("inf"))
    return ranks


@settings(max_examples=40)
@given(st.integers(2, 30), st.integers(1, 5), st.integers(0, 1000), st.booleans())
def test_leave_one_out_equals_the_loop(count: int, kinds: int, seed: int, copies: bool) -> None:
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(count, 4))
    if copies:  # duplicates: the nearest neighbour of an image may be its copy
        vectors[count // 2] = vectors[0]
    classes = rng.integers(0, kinds, count)
    found = class_ranks(torch.from_numpy(vectors), classes)
    assert found.tolist() == loop(vectors, classes, vectors, classes, own=True)


def test_leave_one_out_equals_scikit_learn() -> None:
    from sklearn.neighbors import KNeighborsClassifier

    rng = np.random.default_rng(1)
    vectors = rng.normal(size=(300, 8))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    classes = rng.integers(0, 10, 300)
    model = KNeighborsClassifier(1).fit(vectors, classes)
    others = model.kneighbors(None, return_distance=False)[:, 0]  # of the fitted rows, without themselves
    expected = 100 * float((classes[others] == classes).mean())
    assert class_recall(torch.from_numpy(vectors), classes)[1] == pytest.approx(expected)


def test_query_and_gallery_keep_every_item() -> None:
    rng = np.random.default_rng(2)
    queries, gallery = rng.normal(size=(20, 5)), rng.normal(size=(30, 5))
    gallery[:20] = queries  # the same picture on both sides is a fair hit here
    classes, labels = rng.integers(0, 4, 20), rng.integers(0, 4, 30)
    found = class_ranks(torch.from_numpy(queries), classes, torch.from_numpy(gallery), labels)
    assert found.tolist() == loop(queries, classes, gallery, labels, own=False)


def test_blocks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    vectors, classes = torch.from_numpy(rng.normal(size=(50, 4))), rng.integers(0, 5, 50)
    whole = class_ranks(vectors, classes)
    monkeypatch.setattr(module, "BLOCK", 7 * 50)
    assert (class_ranks(vectors, classes) == whole).all()


def test_dropping_the_first_hit_would_be_wrong_for_duplicates() -> None:
    # rows 0 and 1 are copies of different classes; each is the other's nearest, so both are wrong
    vectors = torch.tensor([[1.0, 0], [1.0, 0], [0, 1.0], [0.1, 1.0]])
    assert class_ranks(vectors, np.array([0, 1, 2, 2])).tolist() == [np.inf, np.inf, 0, 0]


def test_a_class_of_one_is_counted_as_wrong() -> None:
    vectors = torch.tensor([[1.0, 0], [0.9, 0.1], [0, 1.0]])
    assert class_recall(vectors, np.array([0, 0, 1]), ks=(1, 5)) == pytest.approx({1: 200 / 3, 5: 200 / 3})


def test_bad_input() -> None:
    with pytest.raises(DataError, match=r"\b1\b"):
        class_recall(torch.ones(1, 2), np.array([0]))
    with pytest.raises(DataError, match=r"\b3\b"):
        class_recall(torch.ones(3, 2), np.array([0, 1]))
    with pytest.raises(DataError):
        class_recall(torch.full((2, 2), torch.nan), np.array([0, 1]))


# --- lists


def touch(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")
    return path


def test_cub(tmp_path: Path) -> None:
    root = tmp_path / "CUB_200_2011"
    for number in range(1, 201):
        name = "001.Black_footed_Albatross" if number == 1 else f"{number:03}.Bird"
        for picture in ("b.jpg", "a.jpg", "._a.jpg"):
            touch(root / "images" / name / picture)
    for folder in (root, tmp_path):
        found = open_class_list(folder)
        assert (found.name, found.gallery is None, len(found.paths)) == ("cub", True, 200)
        assert found.paths[0] == root / "images/101.Bird/a.jpg"
        assert (found.classes.min(), found.classes.max()) == (101, 200)
    import shutil

    shutil.rmtree(root / "images/150.Bird")
    with pytest.raises(DataError, match=r"199.*200"):
        open_class_list(root)


def test_sop(tmp_path: Path) -> None:
    root = tmp_path / "Stanford_Online_Products"
    rows = [("1", "11319", "1", "bicycle_final/1_0.JPG"), ("2", "11320", "2", "chair_final/2_0.JPG")]
    for row in rows:
        touch(root / row[3])
    lines = ["image_id class_id super_class_id path", *(" ".join(row) for row in rows)]
    (root / "Ebay_test.txt").write_text("\n".join(lines) + "\n")
    found = open_class_list(tmp_path)
    assert (found.name, found.gallery is None, found.classes.tolist()) == ("sop", True, [11319, 11320])
    (root / rows[1][3]).unlink()
    with pytest.raises(DataError, match=r"Stanford_Online_Products.*chair_final.*2_0\.JPG"):
        open_class_list(tmp_path)
    (root / "Ebay_test.txt").write_text("head\n1 2\n")
    with pytest.raises(DataError, match=r"Ebay_test\.txt:2.*\b2\b.*\b4\b"):
        open_class_list(tmp_path)


def test_in_shop(tmp_path: Path) -> None:
    rows = [
        ("img/WOMEN/Dresses/id_00000002/02_1_front.jpg", "id_00000002", "train"),
        ("img/WOMEN/Dresses/id_00000007/01_1_front.jpg", "id_00000007", "query"),
        ("img/WOMEN/Dresses/id_00000007/01_2_side.jpg", "id_00000007", "gallery"),
        ("img/WOMEN/Dresses/id_00000008/01_2_side.jpg", "id_00000008", "gallery"),
    ]
    for name, *_ in rows[1:]:  # training images are not needed
        touch(tmp_path / "Img" / name)
    (tmp_path / "Eval").mkdir()
    lines = [str(len(rows)), "image_name item_id evaluation_status", *("   ".join(row) for row in rows)]
    (tmp_path / "Eval/list_eval_partition.txt").write_text("\n".join(lines))
    found = open_class_list(tmp_path)
    assert (found.name, found.gallery is None) == ("in-shop", False)
    assert found.classes.tolist() == [7]
    assert found.gallery is not None
    assert found.gallery.classes.tolist() == [7, 8]
    (tmp_path / "Eval/list_eval_partition.txt").write_text("1\nhead\na.jpg id_1 test\n")
    with pytest.raises(DataError, match="test"):
        open_class_list(tmp_path)


def test_inaturalist(tmp_path: Path) -> None:
    names = ["train2018/Aves/2761/a.jpg", "train2018/Plantae/8000/b.jpg"]
    for name in names:
        touch(tmp_path / name)
    (tmp_path / "Inat_dataset_splits").mkdir()
    (tmp_path / "Inat_dataset_splits/Inaturalist_test_set1.txt").write_text("\n".join(names) + "\n")
    found = open_class_list(tmp_path)
    assert (found.name, found.classes.tolist()) == ("inaturalist", [2761, 8000])
    (tmp_path / "Inat_dataset_splits/Inaturalist_test_set1.txt").write_text("train2018/x/a.jpg\n")
    with pytest.raises(DataError, match="'x'"):
        open_class_list(tmp_path)


@pytest.fixture(scope="module")
def sgr(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = precomputed(tmp_path_factory.mktemp("data") / "toy_precomp")
    run = tmp_path_factory.mktemp("run") / "sgr"
    flags = [
        "--epochs",
        1,
        "--dim",
        16,
        "--similarity_dim",
        8,
        "--batch_size",
        12,
        "--min_count",
        1,
        "--word_dim",
        8,
    ]
    diptych("train", "sgr", "--data", data, "--output_dir", run, *flags)
    return run


def shop(root: Path) -> tuple[list[str], np.ndarray]:
    """The list of In-Shop without pictures, and the features of its images in another order."""
    sides = ["query", "query", "gallery", "gallery", "gallery"]
    rows = [(f"img/id_0{n % 2}/{n}.jpg", f"id_0{n % 2}", side) for n, side in enumerate(sides)]
    (root / "Eval").mkdir(parents=True)
    lines = ["5", "image_name item_id evaluation_status", *(" ".join(row) for row in rows)]
    (root / "Eval/list_eval_partition.txt").write_text("\n".join(lines))
    names = [f"Img/{row[0]}" for row in reversed(rows)]
    return names, np.random.default_rng(0).standard_normal((5, 6, 16)).astype(np.float32)


def test_a_model_of_regions_reads_the_arrays_of_a_list(sgr: Path, tmp_path: Path) -> None:
    names, regions = shop(tmp_path / "shop")
    asked = ("evaluate", sgr, "--protocol", "image-classes", "--data", tmp_path / "shop")
    assert "no features" in refused(*asked)
    folder = tmp_path / "shop" / "features"
    folder.mkdir()
    for number, part in enumerate((slice(0, 2), slice(2, 5))):  # any number of files
        np.save(folder / f"{number}_ims.npy", regions[part])
        (folder / f"{number}_ids.txt").write_text("\n".join(names[part]) + "\n")
    diptych(*asked, "--output", tmp_path / "report.json")
    vectors = Retriever.from_pretrained(sgr).encode_image(list(regions[::-1]))
    classes = np.array([0, 1, 0, 1, 0])
    expected = class_recall(vectors[:2], classes[:2], vectors[2:], classes[2:])[1]
    assert Report.load(tmp_path / "report.json").metrics["in-shop_image_to_image_recall@1"] == expected
    (folder / "0_ids.txt").write_text("\n".join(names[1:2]) + "\n")
    assert "0_ids.txt" in refused(*asked)
    (folder / "0_ids.txt").write_text("x\ny\n")
    assert "3.jpg" in refused(*asked)


def test_other_folders(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"Ebay_test\.txt"):
        open_class_list(tmp_path)
    with pytest.raises(DataError, match="In-Shop"):
        open_class_list(tmp_path / "no")
