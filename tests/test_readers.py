"""Readers: every format written on the spot, read back, and refused with one sentence when broken."""

import csv
import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from written import add_member, encoded, picture, save_part, save_pictures

from diptych.data.captions import Captions, StoreRows, canonical_split, split_by_hash, split_in_name
from diptych.data.files import content_hash, expand
from diptych.data.formats import formats, open_captions, recognise
from diptych.data.readers.manifest import sniff
from diptych.errors import DataError, ImageError, SettingsError
from diptych.registries import READERS


def as_table(captions: Captions) -> dict[str, tuple[str, list[str]]]:
    """Image id -> split and texts: what a round trip must keep."""
    return {
        image_id: (split, [captions.texts[m] for m in texts])
        for image_id, split, texts in zip(
            captions.image_ids, captions.splits, captions.texts_of(), strict=True
        )
    }


# --- round trips ---------------------------------------------------------------------------------

line = st.text(st.characters(blacklist_categories=("Cs", "Cc", "Zl", "Zp")), min_size=1, max_size=20)
text = line.map(str.strip).filter(bool)
tables = st.dictionaries(
    st.from_regex(r"[a-z]{1,6}", fullmatch=True),
    st.tuples(st.sampled_from(["train", "val", "test"]), st.lists(text, min_size=1, max_size=4)),
    min_size=1,
    max_size=6,
)
Table = dict[str, tuple[str, list[str]]]


def write_csv(folder: Path, table: Table) -> Callable[[str], str]:
    with (folder / "captions.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "text", "split"])
        for name, (split, texts) in table.items():
            writer.writerows([f"{name}.png", text, split] for text in texts)
    return lambda name: f"{name}.png"


def write_tsv(folder: Path, table: Table) -> Callable[[str], str]:
    with (folder / "all.tsv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter="\t")
        writer.writerow(["filepath", "title", "split", "image_id"])
        for name, (split, texts) in table.items():
            writer.writerows([f"{name}.png", text, split, name] for text in texts)
    return lambda name: name


def write_jsonl(folder: Path, table: Table) -> Callable[[str], str]:
    rows = [{"image": f"{n}.png", "caption": texts, "split": split} for n, (split, texts) in table.items()]
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (folder / "metadata.jsonl").write_text(lines + "\n", "utf-8")
    return lambda name: f"{name}.png"


def write_lists(folder: Path, table: Table) -> Callable[[str], str]:
    for split in {split for split, _ in table.values()}:
        rows: list[dict[str, object]] = []
        for name, (own, texts) in table.items():
            if own == split == "train":  # one object per text, as training files have it
                rows += [{"image": f"{name}.png", "caption": text, "image_id": name} for text in texts]
            elif own == split:
                rows.append({"image": f"{name}.png", "caption": texts})
        (folder / f"flickr30k_{split}.json").write_text(json.dumps(rows))
    every_train = all(split == "train" for split, _ in table.values())
    return lambda name: name if every_train else f"{name}.png"


def write_karpathy(folder: Path, table: Table) -> Callable[[str], str]:
    images = [
        {"filename": f"{name}.png", "split": split, "imgid": i, "sentences": [{"raw": t} for t in texts]}
        for i, (name, (split, texts)) in enumerate(table.items())
    ]
    (folder / "dataset.json").write_text(json.dumps({"images": images, "dataset": "flickr8k"}))
    return lambda name: f"{name}.png"


def write_tars(folder: Path, table: Table) -> Callable[[str], str]:
    for split in {split for split, _ in table.values()}:
        with tarfile.open(folder / f"{split}-000000.tar", "w") as tar:
            for number, (name, (own, texts)) in enumerate(table.items()):
                if own == split:
                    add_member(tar, f"{name}.png", encoded(number))
                    add_member(tar, f"{name}.json", json.dumps({"captions": texts}).encode())
    for file in folder.glob("*.png"):
        file.unlink()
    return lambda name: name


def write_parquet(folder: Path, table: Table) -> Callable[[str], str]:
    for split in {split for split, _ in table.values()}:
        rows = [
            {"image": f"{n}.png", "caption": texts, "split": own}
            for n, (own, texts) in table.items()
            if own == split
        ]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"part-{split}.parquet")
    return lambda name: f"{name}.png"


WRITERS = {
    "parquet": (write_parquet, "parquet"),
    "csv": (write_csv, "manifest"),
    "tsv": (write_tsv, "manifest"),
    "jsonl": (write_jsonl, "manifest"),
    "lists": (write_lists, "lists"),
    "karpathy": (write_karpathy, "karpathy"),
    "tars": (write_tars, "webdataset"),
}


@pytest.mark.parametrize("kind", WRITERS)
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(table=tables)
def test_what_is_written_is_read_back(
    kind: str, table: Table, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp(kind)
    save_pictures(folder, [f"{name}.png" for name in table])
    write, format_name = WRITERS[kind]
    id_of = write(folder, table)
    assert recognise(folder) == format_name
    captions = open_captions(folder)
    assert as_table(captions) == {id_of(name): entry for name, entry in table.items()}
    numbers = {id_of(name): number for number, name in enumerate(table)}
    for row, image_id in enumerate(captions.image_ids):
        assert np.array_equal(captions.images[row], picture(numbers[image_id]))


def test_every_format_has_a_name_a_description_and_is_recognised_alone() -> None:
    assert [entry.name for entry in formats()] == list(READERS)
    assert all(entry.description for entry in formats())
    assert recognise("emoji") == "emoji"


def test_parquet_faults_are_one_sentence(tmp_path: Path) -> None:
    save_pictures(tmp_path, ["a.png", "b.png"])
    table = pyarrow.table({"image": ["a.png", "b.png"], "text": ["one", "two"], "price": [1, None]})
    pyarrow.parquet.write_table(table, tmp_path / "x-0.parquet")
    captions = open_captions(tmp_path / "x-{0..0}.parquet")
    assert captions.labels["price"] == [1, None]
    with pytest.raises(DataError, match=r"x-1\.parquet"):
        open_captions(tmp_path / "x-{0..1}.parquet")
    data = (tmp_path / "x-0.parquet").read_bytes()
    for damaged in (data[:-9], data.replace(b"price", b"\xe9rice")):
        (tmp_path / "x-1.parquet").write_bytes(damaged)
        with pytest.raises(DataError, match=r"x-1\.parquet"):
            open_captions(tmp_path)
    pyarrow.parquet.write_table(pyarrow.table({"image": [b"a"]}), tmp_path / "x-1.parquet")
    with pytest.raises(DataError, match="image"):
        open_captions(tmp_path)
    (tmp_path / "x-0.parquet").unlink()
    pyarrow.parquet.write_table(pyarrow.table({"price": [1]}), tmp_path / "x-1.parquet")
    assert recognise(tmp_path) == "folder"  # a table that names no images is not the data
    with pytest.raises(DataError, match="image"):
        open_captions(tmp_path / "x-1.parquet")


# --- precomputed folders -------------------------------------------------------------------------


@pytest.mark.parametrize("fold", [1, 5])
@pytest.mark.parametrize("shape", [(3, 4), (8,)])
def test_both_layouts_give_each_image_once(tmp_path: Path, fold: int, shape: tuple[int, ...]) -> None:
    save_part(tmp_path, "train", 6, fold, shape)
    save_part(tmp_path, "dev", 4, fold, shape, first=100)
    captions = open_captions(tmp_path)
    assert captions.splits == ["train"] * 6 + ["val"] * 4
    assert list(captions.image_ids) == ["0", "1", "2", "3", "4", "5", "100", "101", "102", "103"]
    assert (np.bincount(captions.image_of) == 5).all()
    val = captions.split("val")
    assert val.texts[5] == "dev text 0 of 1"
    expected = np.load(tmp_path / "dev_ims.npy")[fold]
    assert np.array_equal(val.images[1], expected)
    assert isinstance(val.images, StoreRows)
    assert type(val.images.store).__name__ == "ArrayStore"  # blocks are read from the file, not row by row
    assert captions.fingerprint() == open_captions(tmp_path).fingerprint()


def test_vse_infinity_layout_and_one_split_alone(tmp_path: Path) -> None:
    save_part(tmp_path / "coco" / "precomp", "train", 3)
    save_part(tmp_path / "coco" / "precomp", "testall", 10, first=50)
    save_part(tmp_path / "coco" / "precomp", "test", 2, first=50)
    captions = open_captions(tmp_path / "coco")
    assert set(captions.splits) == {"train", "testall"}
    assert len(open_captions(tmp_path / "coco", split="test").images) == 2
    (tmp_path / "coco" / "precomp" / "train_ims.npy").unlink()
    assert len(open_captions(tmp_path / "coco", split="testall").texts) == 50
    with pytest.raises(DataError, match=r"train_ims\.npy"):
        open_captions(tmp_path / "coco")
    with pytest.raises(DataError, match="'val'"):
        open_captions(tmp_path / "coco", split="dev")


def test_val_is_cut_to_the_published_5000_texts(tmp_path: Path) -> None:
    save_part(tmp_path, "dev", 1014, shape=(2,))
    assert len(open_captions(tmp_path, split="dev").images) == 1000
    whole = open_captions(tmp_path, cut_val=False)
    assert (len(whole.images), len(whole.texts)) == (1014, 5070)


def test_counts_that_do_not_divide_are_refused_with_both(tmp_path: Path) -> None:
    save_part(tmp_path, "train", 6)
    np.save(tmp_path / "train_ims.npy", np.zeros((7, 3, 4), dtype=np.float32))
    with pytest.raises(DataError, match=r"train_ims\.npy.*\b7\b.*\b30\b"):
        open_captions(tmp_path)
    np.save(tmp_path / "train_ims.npy", np.random.default_rng(0).random((30, 3, 4), dtype=np.float32))
    with pytest.raises(DataError, match="texts_per_image=1"):
        open_captions(tmp_path)
    (tmp_path / "train_ids.txt").unlink()
    assert len(open_captions(tmp_path, texts_per_image=1).images) == 30


def test_broken_precomputed_files_are_named(tmp_path: Path) -> None:
    save_part(tmp_path, "train", 6)
    whole = (tmp_path / "train_ims.npy").read_bytes()
    (tmp_path / "train_ims.npy").write_bytes(whole[:-40])
    with pytest.raises(DataError, match=r"train_ims\.npy"):
        open_captions(tmp_path)
    np.save(tmp_path / "train_ims.npy", np.zeros((6, 3, 4), dtype=np.int64))
    with pytest.raises(DataError, match=r"\(6, 3, 4\).*int64"):
        open_captions(tmp_path)
    (tmp_path / "train_ims.npy").write_bytes(whole)
    caps = (tmp_path / "train_caps.txt").read_bytes()
    (tmp_path / "train_caps.txt").write_bytes(caps.replace(b"text 1 of 1", b"caf\xe9"))
    with pytest.raises(DataError, match=r"train_caps\.txt:7.*UTF-8"):
        open_captions(tmp_path)
    (tmp_path / "train_caps.txt").write_bytes(caps.replace(b"train text 1 of 1", b"  "))
    with pytest.raises(DataError, match=r"train_caps\.txt:7.*train/1"):
        open_captions(tmp_path)
    assert len(open_captions(tmp_path, empty="drop").texts) == 29
    (tmp_path / "train_caps.txt").write_bytes(caps)
    (tmp_path / "train_ids.txt").write_text("1\n2\n")
    with pytest.raises(DataError, match=r"\b2\b.*\b6\b"):
        open_captions(tmp_path)


def test_arrays_written_by_python_2_are_read(tmp_path: Path) -> None:
    save_part(tmp_path, "train", 6)
    array = tmp_path / "train_ims.npy"
    old = array.read_bytes().replace(b"(6, 3, 4), }   ", b"(6L, 3L, 4L), }")
    array.write_bytes(old)
    assert b"6L" in old
    assert open_captions(tmp_path).images[5].shape == (3, 4)


def test_an_id_in_two_splits_is_refused_even_when_one_is_read(tmp_path: Path) -> None:
    save_part(tmp_path, "train", 3)
    save_part(tmp_path, "dev", 2, first=2)
    for split in (None, "train"):
        with pytest.raises(DataError, match="'2'"):
            open_captions(tmp_path, split=split)


def test_any_number_of_texts_by_a_list_of_their_images(tmp_path: Path) -> None:
    np.save(tmp_path / "dev_ims.npy", np.arange(12, dtype=np.float16).reshape(3, 2, 2))
    (tmp_path / "dev_caps.txt").write_text("a\nb\nc\nd\n")
    (tmp_path / "dev_image_of.txt").write_text("0\n2\n2\n2\n")
    (tmp_path / "dev_ids.txt").write_text("x\ny\nz\n")
    assert as_table(open_captions(tmp_path)) == {
        "x": ("val", ["a"]),
        "y": ("val", []),
        "z": ("val", ["b", "c", "d"]),
    }
    for content, message in (
        ("0\n2\n2\n", r"\b3\b.*\b4\b"),
        ("0\n2\n2\n3\n", r"\b3\b.*\b0\b.*\b2\b"),
        ("0\n2\nx\n2\n", r"dev_image_of\.txt:3.*'x'"),
    ):
        (tmp_path / "dev_image_of.txt").write_text(content)
        with pytest.raises(DataError, match=message):
            open_captions(tmp_path)


def test_pictures_by_id_mapping(tmp_path: Path) -> None:
    save_part(tmp_path / "f30k" / "precomp", "train", 2)
    save_pictures(tmp_path / "f30k" / "flickr30k-images", ["a.png", "b.png"])
    (tmp_path / "f30k" / "id_mapping.json").write_text(json.dumps({"0": "a.png", "1": "b.png"}))
    captions = open_captions(tmp_path / "f30k", pictures=True)
    assert np.array_equal(captions.images[1], picture(1))
    assert list(captions.image_ids) == ["0", "1"]
    (tmp_path / "f30k" / "id_mapping.json").write_text(json.dumps({"0": "a.png"}))
    with pytest.raises(DataError, match=r"'1'.*id_mapping\.json"):
        open_captions(tmp_path / "f30k", pictures=True)


@pytest.mark.parametrize("layout", ["laps", "pcme++"])
def test_a_folder_without_arrays_gives_its_pictures(tmp_path: Path, layout: str) -> None:
    root = tmp_path / "coco"
    texts = root if layout == "laps" else root / "precomp"
    save_part(texts, "dev", 2)
    (texts / "dev_ims.npy").unlink()
    save_pictures(root / ("coco-images" if layout == "laps" else "images") / "val2014", ["a.png", "b.png"])
    (root / "id_mapping.json").write_text(json.dumps({"0": "val2014/a.png", "1": "val2014/b.png"}))
    captions = open_captions(root)
    assert np.array_equal(captions.images[1], picture(1))
    assert len(captions.texts) == 10
    with pytest.raises(DataError, match=r"dev_ims\.npy"):
        open_captions(root, pictures=False)


def test_cc152k_has_a_text_in_the_second_column_of_a_table(tmp_path: Path) -> None:
    for split, count in (("train", 6), ("dev", 3)):
        np.save(tmp_path / f"{split}_ims.npy", np.ones((count, 2, 4), np.float32))
        rows = [f'http://x/{n}.jpg\t"a ""cat"" number {n}"' for n in range(count)]
        (tmp_path / f"{split}_caps.tsv").write_text("\n".join(rows) + "\n")
    captions = open_captions(tmp_path)
    assert captions.image_of.tolist() == list(range(9))
    assert captions.texts[4] == 'a "cat" number 4'
    assert len(captions.split("val").images) == 3
    (tmp_path / "dev_caps.tsv").write_text("a\tx\nalone\nb\ty\n")
    with pytest.raises(DataError, match=r"dev_caps\.tsv:2"):
        open_captions(tmp_path, split="val")


# --- Karpathy ------------------------------------------------------------------------------------


def save_coco(folder: Path) -> Path:
    images = [
        {
            "filepath": "val2014",
            "filename": f"COCO_{i}.png",
            "cocoid": 900 + i,
            "split": split,
            "sentences": [{"raw": f"sentence {k} of {i}", "sentid": 10 * i + k} for k in range(5 + i)],
        }
        for i, split in enumerate(["train", "restval", "val", "test"])
    ]
    (folder / "dataset_coco.json").write_text(json.dumps({"images": images, "dataset": "coco"}))
    save_pictures(folder / "images" / "val2014", [f"COCO_{i}.png" for i in range(4)])
    return folder / "dataset_coco.json"


def test_karpathy_protocol_options(tmp_path: Path) -> None:
    path = save_coco(tmp_path)
    captions = open_captions(path)
    assert captions.splits == ["train", "train", "val", "test"]
    assert list(captions.image_ids) == ["900", "901", "902", "903"]
    assert len(captions.texts) == 20
    assert captions.text_ids is not None
    assert captions.text_ids[-1] == "34"
    assert len(open_captions(path, first_five=False).texts) == 26
    assert open_captions(path, restval="drop").splits == ["train", "val", "test"]
    with pytest.raises(SettingsError, match="'x'"):
        open_captions(path, restval="x")


def test_karpathy_images_missing_on_disk_are_counted_and_named(tmp_path: Path) -> None:
    path = save_coco(tmp_path)
    for number in (1, 2):
        (tmp_path / "images" / "val2014" / f"COCO_{number}.png").unlink()
    with pytest.raises(DataError, match=r"\b2\b.*\b4\b.*COCO_1\.png"):
        open_captions(path)
    with pytest.raises(DataError, match=r"\b4\b"):
        open_captions(path, images=tmp_path / "elsewhere")


def test_karpathy_faults_are_placed(tmp_path: Path) -> None:
    path = save_coco(tmp_path)
    data = json.loads(path.read_text())
    del data["images"][2]["sentences"]
    path.write_text(json.dumps(data))
    with pytest.raises(DataError, match=r"\b2\b"):
        open_captions(path)
    path.write_text(path.read_text()[:-30])
    with pytest.raises(DataError, match=r"dataset_coco\.json:1"):
        open_captions(path)


# --- lists ---------------------------------------------------------------------------------------


def test_lists_refuse_an_image_in_two_splits_and_ignore_ids_that_start_anew(tmp_path: Path) -> None:
    save_pictures(tmp_path / "pics", ["a.png", "b.png"])
    for split, name in (("train", "a"), ("test", "b")):
        rows = [{"image_path": f"{name}.png", "caption": "x", "image_id": 0}]
        (tmp_path / f"new_{split}.json").write_text(json.dumps(rows))
    captions = open_captions(tmp_path, images=tmp_path / "pics")
    assert sorted(captions.image_ids) == ["a.png", "b.png"]
    (tmp_path / "new_val.json").write_text(json.dumps([{"image_path": "a.png", "caption": "y"}]))
    with pytest.raises(DataError, match=r"a\.png"):
        open_captions(tmp_path, images=tmp_path / "pics")
    (tmp_path / "new_val.json").write_text(json.dumps([{"image_path": "a.png", "caption": 3}]))
    with pytest.raises(DataError, match=r"new_val\.json.*\b0\b"):
        open_captions(tmp_path / "new_val.json", images=tmp_path / "pics")


# --- manifests -----------------------------------------------------------------------------------


def test_further_columns_become_labels(tmp_path: Path) -> None:
    save_pictures(tmp_path, ["a.png", "b.png"])
    (tmp_path / "products.csv").write_text(
        "Image;Caption;price;code;brand;note\na.png;one;3;007;X;p\na.png;two;3;007;X;q\nb.png;three;4;010;;r\n"
    )
    captions = open_captions(tmp_path)
    assert captions.labels == {
        "price": [3, 4],
        "code": ["007", "010"],
        "brand": ["X", None],
        "note": [("p", "q"), ("r",)],
    }
    assert as_table(captions) == {"a.png": ("train", ["one", "two"]), "b.png": ("train", ["three"])}


def test_an_empty_cell_says_nothing_about_its_image(tmp_path: Path) -> None:
    save_pictures(tmp_path, ["a.png", "b.png", "c.png"])
    (tmp_path / "products.csv").write_text(
        "image,text,price,color,tag\na.png,one,3.5,red,x\na.png,two,,,y\nb.png,three,4,,\nc.png,four,,,z\n"
    )
    assert open_captions(tmp_path).labels == {
        "price": [3.5, 4.0, None],
        "color": ["red", None, None],
        "tag": [("x", "y"), (), ("z",)],
    }


@pytest.mark.parametrize(
    ("header", "delimiter"),
    [
        ("image,caption", ","),
        ("filepath\ttitle", "\t"),
        ("image_name| comment_number| comment", "|"),
        ("image", "\t"),
        ("a,b", None),
    ],
)
def test_delimiters_are_found(header: str, delimiter: str | None) -> None:
    assert sniff(header) == delimiter


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"image,text\na.png,x\nb.png,caf\xe9\n", r"m\.csv:3.*UTF-8"),
        (b"image,text\na.png,x,y\n", r"m\.csv:2.*\b3\b.*\b2\b"),
        (b"image,text\n,x\n", r"m\.csv:2.*image"),
        (b"image,text\nhttps://e.org/a.png,x\n", r"m\.csv:2"),
        (b"image,text,split\na.png,x,train\na.png,y,test\n", r"m\.csv:3.*a\.png"),
        (b"image,text,image_id\na.png,x,1\nb.png,y,1\n", r"'1'.*a\.png.*b\.png"),
        (b"image,text,image_id,split\na.png,x,1,val\nb.png,y,1,dev\n", "'1'"),
        (
            b"image,text,image_id,split\na.png,x,1,val\nb.png,y,1,test\n",
            "'1'",
        ),
        (b"image,text\nmissing.png,x\n", r"\b1\b"),
        (b"image,text\n", "no rows"),
    ],
)
def test_manifest_faults_are_one_sentence(tmp_path: Path, content: bytes, message: str) -> None:
    save_pictures(tmp_path, ["a.png", "b.png"])
    (tmp_path / "m.csv").write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        open_captions(tmp_path)
    assert "\n" not in str(caught.value)


def test_jsonl_faults_are_placed(tmp_path: Path) -> None:
    save_pictures(tmp_path, ["a.png"])
    (tmp_path / "m.jsonl").write_text('{"image": "a.png", "text": "x"}\n{"image": \n')
    with pytest.raises(DataError, match=r"m\.jsonl:2"):
        open_captions(tmp_path)


def test_lines_of_quoted_fields_are_counted_as_the_file_has_them(tmp_path: Path) -> None:
    save_pictures(tmp_path, ["a.png"])
    (tmp_path / "m.csv").write_text('image,text\na.png,"two\nlines"\na.png,\n')
    with pytest.raises(DataError, match=r"m\.csv:4.*a\.png"):
        open_captions(tmp_path, empty="error")
    assert open_captions(tmp_path, empty="drop").texts == ["two\nlines"]


def test_quotes_that_are_never_closed_swallow_nothing(tmp_path: Path) -> None:
    save_pictures(tmp_path, ["a.png"])
    (tmp_path / "m.csv").write_text('image,text\na.png,"he said\na.png,fine\n')
    with pytest.raises(DataError, match=r"m\.csv:2"):
        open_captions(tmp_path)


def test_several_manifests_need_names_of_splits(tmp_path: Path) -> None:
    save_pictures(tmp_path, ["a.png", "b.png"])
    (tmp_path / "train.csv").write_text("image,text\na.png,x\n")
    (tmp_path / "valid.csv").write_text("image,text\nb.png,y\n")
    assert open_captions(tmp_path).splits == ["train", "val"]
    (tmp_path / "other.csv").write_text("image,text\nb.png,y\n")
    with pytest.raises(DataError, match=r"other\.csv"):
        open_captions(tmp_path)


# --- folders -------------------------------------------------------------------------------------


def test_a_plain_folder_gives_every_image_below_it(tmp_path: Path) -> None:
    save_pictures(tmp_path, ["a.png", "cats/b.PNG", "test/c.png"])
    (tmp_path / "._a.png").write_bytes(b"")
    (tmp_path / "notes.md").write_text("no image")
    (tmp_path / "cats" / "b.txt").write_text("a cat\n\nanother text\n")
    captions = open_captions(tmp_path)
    assert as_table(captions) == {
        "a.png": ("train", []),
        "cats/b.PNG": ("train", ["a cat", "another text"]),
        "test/c.png": ("test", []),
    }
    assert captions.labels["folder"] == ["", "cats", "test"]


def test_a_corrupt_image_is_named_when_opened(tmp_path: Path) -> None:
    save_pictures(tmp_path, ["a.png"])
    (tmp_path / "a.png").write_bytes(encoded(0)[:100])
    with pytest.raises(ImageError, match=r"a.png"):
        open_captions(tmp_path).images[0]


# --- tars ----------------------------------------------------------------------------------------


def test_tar_texts_labels_and_patterns(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "train-0000.tar", "w") as tar:
        add_member(tar, "x/one.jpg", encoded(1, "JPEG"))
        add_member(tar, "x/one.txt", b"first\nsecond\n")
        add_member(tar, "x/two.webp", encoded(2, "WEBP"))
        add_member(tar, "x/two.txt", b"a caption")
        add_member(
            tar, "x/two.json", json.dumps({"caption": "a caption", "price": 3, "tags": ["no"]}).encode()
        )
    with tarfile.open(tmp_path / "train-0001.tar", "w") as tar:
        add_member(tar, "three.png", encoded(3))
    captions = open_captions(tmp_path)
    assert as_table(captions) == {
        "x/one": ("train", ["first", "second"]),
        "x/two": ("train", ["a caption"]),
        "three": ("train", []),
    }
    assert captions.labels["price"] == [None, 3, None]
    assert np.array_equal(captions.images[2], picture(3))
    assert len(open_captions(f"{tmp_path}/train-{{0000..0001}}.tar").images) == 3
    assert len(open_captions(f"{tmp_path}/*-0001.tar").images) == 1
    with pytest.raises(DataError, match=r"train-0002\.tar"):
        open_captions(f"{tmp_path}/train-{{0000..0002}}.tar")


def test_brace_patterns() -> None:
    assert list(expand("a-{08..11}.tar")) == ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]
    assert list(expand("{x,y}{0..1}")) == ["x0", "x1", "y0", "y1"]


def test_keys_that_start_anew_in_each_tar_are_told_apart(tmp_path: Path) -> None:
    for split in ("train", "val"):
        with tarfile.open(tmp_path / f"{split}-0.tar", "w") as tar:
            add_member(tar, "0000.png", encoded(len(split)))
    assert sorted(open_captions(tmp_path).image_ids) == ["train-0/0000", "val-0/0000"]
    for split in ("train", "val"):
        with tarfile.open(tmp_path / f"{split}-0.tar", "w") as tar:
            add_member(tar, "0000.png", encoded(7))
    with pytest.raises(DataError, match="0000"):
        open_captions(tmp_path)


def test_broken_tars_are_named(tmp_path: Path) -> None:
    path = tmp_path / "train-0.tar"
    with tarfile.open(path, "w") as tar:
        add_member(tar, "a.png", encoded(1))
        add_member(tar, "a.txt", b"caf\xe9")
    with pytest.raises(DataError, match=r"a\.txt:1.*UTF-8"):
        open_captions(tmp_path)
    with tarfile.open(path, "w") as tar:
        add_member(tar, "a.txt", b"text")
    with pytest.raises(DataError, match=r"train-0\.tar"):
        open_captions(tmp_path)
    with tarfile.open(path, "w") as tar:
        add_member(tar, "a.txt", b"text")
        add_member(tar, "a.png", encoded(1))
    whole = path.read_bytes()
    damaged = whole[:1024] + b"\x07" * 512 + whole[1536:]  # the second header
    for broken in (whole[:1800], whole[:1024], whole[:1300], damaged):
        path.write_bytes(broken)
        with pytest.raises(DataError, match=r"train-0\.tar"):
            open_captions(tmp_path)
    path.write_bytes(b"\x01" * 2000)
    with pytest.raises(DataError, match=r"train-0\.tar"):
        open_captions(tmp_path)
    path.unlink()
    with tarfile.open(tmp_path / "train-0.tar.gz", "w:gz") as tar:
        add_member(tar, "a.png", encoded(1))
    with pytest.raises(DataError, match=r"train-0\.tar\.gz"):
        open_captions(tmp_path)


# --- Hugging Face --------------------------------------------------------------------------------


def test_hugging_face_from_disk(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"image": datasets.Image(), "text": datasets.Value("string"), "image_id": datasets.Value("int64")}
    )

    def table(numbers: list[int]) -> object:
        rows = {"image": [{"bytes": encoded(n), "path": None} for n in numbers for _ in range(2)]}
        rows["text"] = [f"text {k} of {n}" for n in numbers for k in range(2)]
        rows["image_id"] = [n for n in numbers for _ in range(2)]
        return datasets.Dataset.from_dict(rows, features=features)

    datasets.disable_progress_bars()
    datasets.DatasetDict({"train": table([0, 1]), "validation": table([2])}).save_to_disk(tmp_path / "hf")
    assert recognise(tmp_path / "hf") == "huggingface"
    captions = open_captions(tmp_path / "hf")
    assert as_table(captions) == {
        "0": ("train", ["text 0 of 0", "text 1 of 0"]),
        "1": ("train", ["text 0 of 1", "text 1 of 1"]),
        "2": ("val", ["text 0 of 2", "text 1 of 2"]),
    }
    assert np.array_equal(captions.images[2], picture(2))
    assert captions.fingerprint() == open_captions(tmp_path / "hf").fingerprint()
    table([3]).rename_column("image", "bild").save_to_disk(tmp_path / "other")
    with pytest.raises(DataError, match=r"bild.*text.*image_id"):
        open_captions(tmp_path / "other")
    assert open_captions(f"{tmp_path / 'other'}?image=bild").texts == ["text 0 of 3", "text 1 of 3"]
    next((tmp_path / "hf" / "train").glob("*.arrow")).unlink()
    with pytest.raises(DataError, match=r"\b2\b"):
        open_captions(tmp_path / "hf")


def test_hugging_face_split_column_and_lists_of_captions(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    rows = {
        "image": [{"bytes": encoded(n), "path": None} for n in range(2)],
        "captions": [["a", "b"], ["c"]],
        "split": ["train", "test"],
        "price": [1.5, 2.5],
    }
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "captions": datasets.List(datasets.Value("string")),
            "split": datasets.Value("string"),
            "price": datasets.Value("float64"),
        }
    )
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "hf")
    captions = open_captions(tmp_path / "hf")
    assert captions.splits == ["train", "test"]
    assert captions.texts == ["a", "b", "c"]
    assert captions.labels == {"price": [1.5, 2.5]}


# --- what is not a data set ----------------------------------------------------------------------


def test_what_is_not_known_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="emoji"):
        open_captions(tmp_path / "nowhere")
    (tmp_path / "x.doc").write_text("nothing")
    with pytest.raises(DataError):
        open_captions(tmp_path)
    assert recognise(tmp_path) is None
    save_part(tmp_path / "coco_precomp", "train", 2)
    with pytest.raises(DataError, match="coco_precomp"):
        open_captions(tmp_path)
    with pytest.raises(DataError, match="karpathy"):
        open_captions(tmp_path / "coco_precomp", format="karpathy")
    with pytest.raises(SettingsError, match="coco"):
        open_captions(tmp_path / "coco_precomp", format="coco")
    with pytest.raises(SettingsError, match=r"precomputed.*colour"):
        open_captions(tmp_path / "coco_precomp", colour="red")
    with pytest.raises(SettingsError, match="keep"):
        open_captions(tmp_path / "coco_precomp", empty="keep")


# --- names of splits, keys of content ------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train-000000.tar", "train"),
        ("flickr30k_val", "val"),
        ("coco_karpathy_test", "test"),
        ("dev", "val"),
        ("x", None),
    ],
)
def test_splits_in_names(name: str, split: str | None) -> None:
    assert split_in_name(name) == split


def test_names_of_splits_and_shares() -> None:
    assert [canonical_split(s) for s in ("dev", " Validation", "testall", "mine")] == [
        "val",
        "val",
        "testall",
        "mine",
    ]
    splits = [split_by_hash(str(i), 0.1, 0.2) for i in range(5000)]
    assert abs(splits.count("val") / 5000 - 0.1) < 0.02
    assert abs(splits.count("test") / 5000 - 0.2) < 0.02


@pytest.mark.parametrize("size", [100, 200_000])
def test_content_keys_follow_the_bytes_not_the_place(tmp_path: Path, size: int) -> None:
    data = bytearray(os.urandom(size))

    def key(data: bytes, suffix: str) -> str:
        return content_hash(io.BytesIO(b"before" + data), 6, len(data), suffix)

    assert key(data, ".jpg") == key(bytes(data), ".JPG")
    for place in (0, size - 1):
        changed = bytearray(data)
        changed[place] ^= 1
        assert key(changed, ".jpg") != key(data, ".jpg")
    changed = bytearray(data)
    changed[size // 5] ^= 1  # between the pages of a large file, where only uncompressed ones are read
    assert key(changed, ".bmp") != key(data, ".bmp")
    assert key(data[:-1], ".jpg") != key(data, ".jpg")


def test_copies_of_a_data_set_share_a_fingerprint(tmp_path: Path) -> None:
    for name in ("here", "there"):
        save_pictures(tmp_path / name, ["a.png", "b.png"])
        (tmp_path / name / "m.csv").write_text("image,text\na.png,x\nb.png,y\n")
    os.utime(tmp_path / "there" / "a.png", (1, 1))
    here, there = (open_captions(tmp_path / name).fingerprint() for name in ("here", "there"))
    assert here == there
    (tmp_path / "there" / "a.png").write_bytes(encoded(5))
    assert open_captions(tmp_path / "there").fingerprint() != here


@pytest.mark.slow
def test_flickr8k_is_read_whole() -> None:
    folder = os.environ.get("DIPTYCH_FLICKR8K")
    if not folder:
        pytest.skip("set DIPTYCH_FLICKR8K to a folder of Flickr8k tars")
    captions = open_captions(folder)
    assert [(len(part.images), len(part.texts)) for part in map(captions.split, ("train", "val"))] == [
        (6000, 30000),
        (1000, 5000),
    ]
    assert np.asarray(captions.images[6999]).shape[2] == 3
