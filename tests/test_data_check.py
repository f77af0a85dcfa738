"""The data check: it lists every fault of a data set, whatever the format, and never stops at the first."""

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from written import add_member, encoded, save_part, save_pictures

from diptych.data.check import CheckReport, check
from diptych.data.duplicates import Look, groups, near_groups, normal_text
from diptych.data.formats import open_captions


def run(path: Path | str, **options: object) -> CheckReport:
    return check(path, show_progress=False, **options)


def kinds(report: CheckReport) -> set[str]:
    return {problem.kind for problem in report.problems}


def photo(number: int, side: int = 96) -> Image.Image:
    """A smooth picture: noise would not survive scaling."""
    rng = np.random.default_rng(number)
    small = Image.fromarray(rng.integers(0, 255, (6, 6, 3), dtype=np.uint8))
    return small.resize((side, side), Image.Resampling.BICUBIC)


def test_a_sound_data_set_is_ok(tmp_path: Path) -> None:
    save_pictures(tmp_path, [f"{i}.png" for i in range(4)])
    rows = [
        f"{i}.png,text {k} of {i},{'val' if i == 3 else 'train'}" for i in range(4) for k in range(2 + i % 2)
    ]
    (tmp_path / "m.csv").write_text("\n".join(["image,text,split", *rows]))
    report = run(tmp_path)
    assert report.ok
    assert report.problems == []
    assert report.format == "manifest"
    assert (report.splits["train"].images, report.splits["train"].texts) == (3, 7)
    assert report.splits["train"].per_image == "2–3, 2.33 on average"
    assert report.splits["val"].per_image == "3"
    assert "ok: 0 errors, 0 warnings" in report.render()
    assert json.loads(json.dumps(report.as_dict()))["ok"] is True


def test_every_fault_of_a_manifest_is_listed(tmp_path: Path) -> None:
    save_pictures(tmp_path, ["a.png", "b.png", "c.png", "d.png"])
    (tmp_path / "c.png").write_bytes(encoded(2)[:90])  # corrupt
    (tmp_path / "copy.png").write_bytes((tmp_path / "a.png").read_bytes())  # a in another split
    lines = [
        b"image,text,split",
        b"a.png,A dog.,train",
        b"a.png,A dog.,train",  # repeated
        b"b.png,a dog,train",  # nearly the same text
        b"b.png,A dog.,train",  # the text of another image
        b"b.png,,train",  # empty
        b"c.png,a cat,train",
        b"gone1.png,x,train",  # missing
        b"gone2.png,y,train",  # missing
        b"copy.png,z,val",
        b"d.png,caf\xe9,val",  # not UTF-8
        b"d.png,x,y,val",  # fields
        b"b.png,again,val",  # in two splits by name
    ]
    (tmp_path / "m.csv").write_bytes(b"\n".join(lines) + b"\n")
    report = run(tmp_path)
    found = {(problem.kind, problem.severity) for problem in report.problems}
    assert found == {
        ("encoding", "error"),
        ("csv", "error"),
        ("empty text", "warning"),
        ("missing image", "error"),
        ("unreadable image", "error"),
        ("in two splits", "error"),
        ("repeated text", "warning"),
        ("duplicate text", "warning"),
        ("near-duplicate text", "warning"),
    }
    text = report.render()
    for said in (
        "m.csv:6",
        "m.csv:11",
        "m.csv:12",
        "m.csv:13",
        "gone1.png",
        "gone2.png",
        "'copy.png' (val)",
        "c.png",
    ):
        assert said in text
    assert not report.ok
    assert "not ok: " in text
    assert sum(problem.kind == "in two splits" for problem in report.problems) == 2  # by name, and by content


def test_every_fault_of_a_precomputed_folder_is_listed_with_the_expected_shape(tmp_path: Path) -> None:
    save_part(tmp_path, "train", 4)
    save_part(tmp_path, "dev", 3, first=3)  # id 3 is in train too
    save_part(tmp_path, "test", 2, first=10)
    save_part(tmp_path, "testall", 3, first=10)
    (tmp_path / "dev_ims.npy").unlink()
    np.save(tmp_path / "test_ims.npy", np.zeros((3, 3, 4), dtype=np.float32))
    whole = (tmp_path / "train_ims.npy").read_bytes()
    (tmp_path / "train_ims.npy").write_bytes(whole[:-8])
    report = run(tmp_path)
    files = {Path(problem.file).name: problem for problem in report.errors}
    assert set(files) == {tmp_path.name, "dev_ims.npy", "test_ims.npy", "train_ims.npy"}
    assert "36, 2048" in files["dev_ims.npy"].expected
    assert "3 images" in files["dev_ims.npy"].expected
    assert "3 rows but 10 texts" in files["test_ims.npy"].message
    assert "truncated" in files["train_ims.npy"].message
    assert "'3' is in two splits" in files[tmp_path.name].message
    assert list(report.splits) == ["testall"]


def test_features_are_checked_and_compared(tmp_path: Path) -> None:
    save_part(tmp_path, "train", 4)
    array = np.load(tmp_path / "train_ims.npy")
    array[1] = array[0]
    array[2, 0, 0] = np.nan
    np.save(tmp_path / "train_ims.npy", array)
    report = run(tmp_path)
    assert kinds(report) == {"features", "duplicate image"}
    assert "'2' (train)" in report.errors[0].message
    assert kinds(run(tmp_path, open_images=False)) == set()


def test_tars_are_checked_to_the_last_member(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "train-0.tar", "w") as tar:
        add_member(tar, "a.png", encoded(1))
        add_member(tar, "a.json", b"{broken")
        add_member(tar, "b.txt", b"no image")
        add_member(tar, "c.png", encoded(1)[:80])
        add_member(tar, "c.txt", b"")
    with tarfile.open(tmp_path / "val-0.tar", "w") as tar:
        add_member(tar, "d.png", encoded(1))
        add_member(tar, "d.txt", b"a copy of a")
    (tmp_path / "val-1.tar").write_bytes(b"junk" * 300)
    report = run(tmp_path)
    assert {problem.kind for problem in report.errors} == {
        "json",
        "missing image",
        "unreadable image",
        "in two splits",
        "tar",
    }


def test_near_duplicates_across_splits_are_a_leak(tmp_path: Path) -> None:
    for name, number in (("train/a", 1), ("train/b", 2), ("train/c", 3), ("test/d", 4)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        photo(number).save(tmp_path / f"{name}.png")
    photo(1).resize((80, 80)).save(tmp_path / "test" / "smaller.jpg", quality=80)
    photo(2).save(tmp_path / "train" / "again.jpg", quality=85)
    report = run(tmp_path)
    leak = [p for p in report.problems if p.kind == "near-duplicate in two splits"]
    near = [p for p in report.problems if p.kind == "near-duplicate image"]
    assert len(leak) == len(near) == 1
    assert "'train/a.png' (train)" in leak[0].message
    assert "'test/smaller.jpg' (test)" in leak[0].message
    assert "again.jpg" in near[0].message
    assert report.ok  # a person decides whether they are the same


def test_images_without_a_text_are_named_but_an_index_needs_none(tmp_path: Path) -> None:
    save_pictures(tmp_path, ["a.png", "b.png"])
    (tmp_path / "annotations.json").write_text('{"unknown": []}')
    report = run(tmp_path)
    assert {p.kind for p in report.warnings} == {"no text", "not read"}
    assert "no image has a text" in report.render()
    (tmp_path / "a.txt").write_text("a text\n")
    assert "'b.png' (train) has no text" in run(tmp_path).render()


def test_what_is_no_data_set_is_reported_not_raised(tmp_path: Path) -> None:
    report = run(tmp_path / "nowhere")
    assert not report.ok
    assert report.format is None
    assert "does not exist" in report.render()
    (tmp_path / "dataset_coco.json").write_text('{"images": [{"filename": "a.png", "sentences"')
    report = run(tmp_path)
    assert not report.ok
    assert "not JSON" in report.render()


def test_long_lists_of_warnings_are_cut_but_errors_never(tmp_path: Path) -> None:
    save_pictures(tmp_path, [f"{i}.png" for i in range(30)])
    rows = [f"{i}.png,same" for i in range(30)] + [f"{i}.png,{i % 15}" for i in range(30)]
    missing = [f"gone{i}.png,x" for i in range(30)]
    (tmp_path / "m.csv").write_text("\n".join(["image,text", *rows, *missing]))
    report = run(tmp_path)
    text = report.render()
    assert text.count("gone") == 30
    assert "... and 6 more" in text
    assert "... and" not in report.render(limit=None)


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [
        ("A dog .", "a  dog", True),
        ("A dog", "a cat", False),
        ("Café", "café!", True),
        ("dog a", "a dog", False),
    ],
)
def test_normal_texts(one: str, two: str, same: bool) -> None:
    assert (normal_text(one) == normal_text(two)) is same


def test_groups_and_looks_by_brute_force() -> None:
    assert groups("abcab") == [[0, 3], [1, 4]]
    looks = [Look.of(photo(number)) for number in range(300)]
    assert near_groups(looks, show_progress=False) == []
    again = [*looks, Look.of(photo(7, 90)), Look.of(photo(299, 120)), Look.of(photo(7, 64))]
    assert sorted(near_groups(again, show_progress=False)) == [[7, 300, 302], [299, 301]]
    plain = [Look.of(Image.new("RGB", (20, 20), colour)) for colour in ("white", "white")]
    assert (
        near_groups(plain, show_progress=False) == []
    )  # too plain to tell; equal files are found by content
    red, blue = Image.new("RGB", (64, 64), "white"), Image.new("RGB", (64, 64), "white")
    for image, colour in ((red, (200, 30, 30)), (blue, (30, 30, 230))):
        image.paste(colour, (8, 8, 40, 56))
    assert near_groups([Look.of(red), Look.of(blue)], show_progress=False) == []


def test_vowel_signs_tell_words_apart(tmp_path: Path) -> None:
    assert normal_text("एक भालू।") != normal_text("एक भाल।")
    assert normal_text("ഒരു കരടി") != normal_text("ഒര കരട")
    assert normal_text("Cafe\u0301, bar") == normal_text("café bar")
    assert normal_text("A dog.") == normal_text("a  DOG!")
    save_pictures(tmp_path, ["a.png", "b.png"])
    (tmp_path / "m.csv").write_text("image,text\na.png,एक भालू।\nb.png,एक भाल।\n", "utf-8")
    assert not [p for p in run(tmp_path).problems if p.kind == "near-duplicate text"]


def test_errors_come_last_where_they_are_seen(tmp_path: Path) -> None:
    save_pictures(tmp_path, ["a.png", "b.png"])
    (tmp_path / "m.csv").write_text("image,text\na.png,same\nb.png,same\ngone.png,x\n")
    lines = run(tmp_path).render().splitlines()
    severities = [line.split(":")[0] for line in lines if line.startswith(("warning:", "error:"))]
    assert severities == sorted(severities, reverse=True)
    assert "error" in severities
    assert lines[-1].startswith("not ok: 1 error")


def test_a_table_without_texts_is_not_simply_ok(tmp_path: Path) -> None:
    save_pictures(tmp_path, ["a.png", "b.png"])
    (tmp_path / "m.csv").write_text("image,tags\na.png,dog\nb.png,cat\n")
    report = run(tmp_path)
    assert report.ok
    text = report.render()
    assert "'tags'" in text
    assert "--text_column" in text
    assert text.splitlines()[-1].startswith("ok to index, without texts")


def test_captions_by_the_name_of_their_image_are_read(tmp_path: Path) -> None:
    save_pictures(tmp_path, ["a.png", "b.png"])
    (tmp_path / "captions.json").write_text('{"a.png": "a dog", "b.png": ["a cat", "a small cat"]}')
    report = run(tmp_path)
    assert (report.format, report.ok) == ("lists", True)
    assert open_captions(tmp_path).texts == ["a dog", "a cat", "a small cat"]
    (tmp_path / "captions.json").write_text('{"a.png": "a dog", "b.png": 5}')
    assert "b.png" in run(tmp_path).render() or not run(tmp_path).ok
    (tmp_path / "captions.json").write_text('{"title": "notes"}')
    assert run(tmp_path).format == "folder"
