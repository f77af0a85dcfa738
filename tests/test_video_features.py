"""Frame features and texts of videos, in the layouts they are passed around in."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from bombs import UNCLOSED, npy

from diptych.data.captions import Captions
from diptych.data.check import check
from diptych.data.formats import open_captions, recognise
from diptych.data.readers.frame_features import HDF5Frames, evenly
from diptych.errors import DataError, MissingExtra, SettingsError

TEXTS = {
    "video0": ["a man sings", "someone sings"],
    "video1": ["a dog runs"],
    "video2": ["a cat sleeps", "a dog runs"],
    "video3": ["rain"],
}
SPLITS = {"video0": "train", "video1": "train", "video2": "val", "video3": "test"}
SIZES = {"video0": 3, "video1": 25, "video2": 1, "video3": 7}


def features(name: str, dim: int = 6) -> Any:
    rng = np.random.default_rng(int(name[-1]))
    return rng.normal(size=(SIZES[name], dim)).astype(np.float32)


def of_split(split: str) -> list[str]:
    return [name for name, own in SPLITS.items() if own == split]


def write_hgr(root: Path) -> Path:
    (root / "annotation" / "RET").mkdir(parents=True)
    (root / "annotation" / "RET" / "ref_captions.json").write_text(json.dumps(TEXTS))
    (root / "public_split").mkdir()
    for kind in ("SA", "MP"):
        (root / "ordered_feature" / kind / "resnet152.pth").mkdir(parents=True)
    for short, split in (("trn", "train"), ("val", "val"), ("tst", "test")):
        names = of_split(split)
        np.save(root / "public_split" / f"{short}_names.npy", np.array(names))
        with h5py.File(root / "ordered_feature" / "SA" / "resnet152.pth" / f"{short}_ft.hdf5", "w") as file:
            for name in names:
                file[name] = features(name)
        means = np.stack([features(name).mean(0) for name in names])
        np.save(root / "ordered_feature" / "MP" / "resnet152.pth" / f"{short}_ft.npy", means)
    return root


def write_dual_encoding(root: Path) -> Path:
    for split in ("train", "val", "test"):
        base = root / f"msrvtt10k{split}"
        (base / "TextData").mkdir(parents=True)
        lines = [f"{name}#{n} {text}" for name in of_split(split) for n, text in enumerate(TEXTS[name])]
        (base / "TextData" / f"msrvtt10k{split}.caption.txt").write_text("\n".join(lines) + "\n")
        folder = base / "FeatureData" / "resnet"
        folder.mkdir(parents=True)
        frames = {name: [f"{name}_{n}" for n in range(SIZES[name])] for name in of_split(split)}
        rows = np.concatenate([features(name) for name in frames])
        rows.astype("<f4").tofile(folder / "feature.bin")
        (folder / "shape.txt").write_text(f"{len(rows)} {rows.shape[1]}")
        (folder / "id.txt").write_text(" ".join(n for own in frames.values() for n in own))
        if split != "test":
            (folder / "video2frames.txt").write_text(str(frames))
    return root


def write_msrvtt(root: Path) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for file, splits in (("train_val_videodatainfo", ("train", "val")), ("test_videodatainfo", ("test",))):
        names = [name for name in SPLITS if SPLITS[name] in splits]
        spelled = {"train": "train", "val": "validate", "test": "test"}
        videos = [{"video_id": n, "split": spelled[SPLITS[n]], "category": 3, "url": ""} for n in names]
        sentences = [{"video_id": n, "caption": t, "sen_id": 0} for n in names for t in TEXTS[n]]
        whole = {"info": {"year": "2016"}, "videos": videos, "sentences": sentences}
        (root / f"{file}.json").write_text(json.dumps(whole))
    (root / "features").mkdir()
    for name in SPLITS:
        np.save(root / "features" / f"{name}.npy", features(name))
    return root


def write_vatex(root: Path) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for file, split in (
        ("vatex_training_v1.0", "train"),
        ("vatex_validation_v1.0", "val"),
        ("vatex_public_test", "test"),
    ):
        clips = [{"videoID": n, "enCap": TEXTS[n], "chCap": ["歌"] * len(TEXTS[n])} for n in of_split(split)]
        (root / f"{file}.json").write_text(json.dumps(clips))
    for name in SPLITS:
        np.save(root / f"{name}.npy", features(name)[None])  # (1, frames, D), as I3D features come
    return root


LAYOUTS = {
    "hgr": write_hgr,
    "dual-encoding": write_dual_encoding,
    "video-json": write_msrvtt,
    "vatex": write_vatex,
}


def same_data(captions: Captions, frames: int = 20) -> None:
    assert dict(zip(captions.image_ids, captions.splits, strict=True)) == SPLITS
    for row, name in enumerate(captions.image_ids):
        assert [captions.texts[n] for n in captions.texts_of()[row]] == TEXTS[name]
        kept = features(name)[evenly(SIZES[name], frames)]
        assert np.allclose(np.asarray(captions.images[row]), kept)
    assert len({captions.images.content_key(row) for row in range(4)}) == 4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_videos(layout: str, tmp_path: Path) -> None:
    root = LAYOUTS[layout](tmp_path / "data")
    assert recognise(root) == {"vatex": "video-json"}.get(layout, layout)
    captions = open_captions(root)
    same_data(captions)
    same_data(pickle.loads(pickle.dumps(captions)))  # as a worker gets it
    assert len(np.asarray(open_captions(root, frames=0).split("train").images[1])) == 25
    assert len(np.asarray(open_captions(f"{root}?frames=4").split("train").images[1])) == 4
    with pytest.raises(SettingsError, match="-1"):
        open_captions(root, frames=-1)


def test_frames_are_kept_from_the_first_to_the_last() -> None:
    assert evenly(5, 20).tolist() == [0, 1, 2, 3, 4]
    assert evenly(21, 20)[[0, -1]].tolist() == [0, 20]
    for count in (21, 60, 1000):
        kept = evenly(count, 20)
        assert len(set(kept.tolist())) == 20
        assert kept[0] == 0
        assert kept[-1] == count - 1


def test_hgr_means_are_one_vector_a_video(tmp_path: Path) -> None:
    captions = open_captions(write_hgr(tmp_path), mean=True)
    assert np.allclose(np.asarray(captions.images[1]), features("video1").mean(0))


@pytest.mark.parametrize("data", [b"", b"PK", UNCLOSED, npy("{[]: 1}")])
def test_names_that_are_no_array_are_one_sentence(data: bytes, tmp_path: Path) -> None:
    root = write_hgr(tmp_path)
    (root / "public_split" / "trn_names.npy").write_bytes(data)
    with pytest.raises(DataError, match=r"trn_names\.npy"):
        open_captions(root, mean=True)


def test_pickled_names_are_refused_with_the_way_to_write_them(tmp_path: Path) -> None:
    root = write_hgr(tmp_path)
    names = np.array(["video0", "video1"], dtype=object)
    np.save(root / "public_split" / "trn_names.npy", names, allow_pickle=True)
    with pytest.raises(DataError, match=r"trn_names\.npy"):
        open_captions(root)
    np.save(root / "public_split" / "trn_names.npy", np.array([b"video0", b"video1"]))
    same_data(open_captions(root))


def test_the_language_of_vatex_can_be_chosen(tmp_path: Path) -> None:
    root = write_vatex(tmp_path)
    assert open_captions(root, language="zh").texts[0] == "歌"
    with pytest.raises(SettingsError, match="'de'"):
        open_captions(root, language="de")


def test_one_folder_may_hold_all_of_dual_encoding(tmp_path: Path) -> None:
    write_dual_encoding(tmp_path / "parts")
    (tmp_path / "one" / "TextData").mkdir(parents=True)
    rows, names = [], []
    for split in ("train", "val", "test"):
        base = tmp_path / "parts" / f"msrvtt10k{split}"
        for file in (base / "TextData").iterdir():
            (tmp_path / "one" / "TextData" / file.name).write_bytes(file.read_bytes())
        rows += [features(name) for name in of_split(split)]
        names += [f"{name}_{n}" for name in of_split(split) for n in range(SIZES[name])]
    folder = tmp_path / "one" / "FeatureData" / "resnet"
    folder.mkdir(parents=True)
    np.concatenate(rows).tofile(folder / "feature.bin")
    (folder / "shape.txt").write_text(f"{len(names)} 6")
    (folder / "id.txt").write_text(" ".join(names))
    same_data(open_captions(tmp_path / "one"))
    (folder / "id.txt").write_text(" ".join([*names, f"{of_split('test')[0]}_99"]))  # a row that is not there
    assert "counts" in {problem.kind for problem in check(tmp_path / "one", show_progress=False).problems}


def test_features_may_lie_elsewhere_or_in_one_hdf5_file(tmp_path: Path) -> None:
    root = write_msrvtt(tmp_path / "data")
    (root / "features").rename(tmp_path / "away")
    with pytest.raises(DataError, match=r"video3.*video1.*VIDEO\.npy"):
        open_captions(root)
    same_data(open_captions(root, features=tmp_path / "away"))
    with h5py.File(tmp_path / "all.hdf5", "w") as file:
        for name in SPLITS:
            file[name] = features(name)[None] if name == "video1" else features(name)
    same_data(open_captions(f"{root}?features={tmp_path / 'all.hdf5'}"))
    with pytest.raises(DataError, match="gone"):
        open_captions(root, features=tmp_path / "gone")


def broken(root: Path, name: str) -> Path:
    return next(iter(root.rglob(name)))


FAULTS: list[tuple[str, Callable[[Path], Any], str]] = [
    ("hgr", lambda r: broken(r, "trn_ft.hdf5").write_bytes(b"no"), "HDF5"),
    ("hgr", lambda r: broken(r, "trn_ft.hdf5").unlink(), r"trn_ft\.hdf5"),
    ("hgr", lambda r: broken(r, "ref_captions.json").write_text('{"video0": ["x"]}'), "video1"),
    ("hgr", lambda r: broken(r, "trn_names.npy").write_bytes(b"no"), r"trn_names\.npy"),
    ("hgr", lambda r: (r / "ordered_feature" / "SA" / "other").mkdir(), r"resnet152\.pt"),
    ("dual-encoding", lambda r: broken(r, "feature.bin").write_bytes(b"1234"), r"feature\.bin"),
    ("dual-encoding", lambda r: broken(r, "shape.txt").write_text("3 x"), "ROWS DIMENSIONS"),
    ("dual-encoding", lambda r: broken(r, "id.txt").write_text("a b"), r"\b2\b"),
    ("dual-encoding", lambda r: broken(r, "video2frames.txt").write_text("os.getcwd()"), r"video2frames\.txt"),
    ("dual-encoding", lambda r: broken(r, "*train.caption.txt").write_text("video0 x\n"), "video0"),
    ("video-json", lambda r: broken(r, "video0.npy").unlink(), r"\b1\b.*\b4\b"),
    ("vatex", lambda r: broken(r, "vatex_train*").write_text('[{"videoID": "video0"}]'), "enCap"),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "fault", "message"), FAULTS)
def test_what_is_wrong_is_said(layout: str, fault: Any, message: str, tmp_path: Path) -> None:
    root = LAYOUTS[layout](tmp_path / "data")
    fault(root)
    with pytest.raises(DataError, match=message):
        open_captions(root)


def test_a_damaged_feature_file_names_itself(tmp_path: Path) -> None:
    root = write_msrvtt(tmp_path)
    np.save(root / "features" / "video0.npy", np.zeros((2, 3, 4), np.float32))
    (root / "features" / "video1.npy").write_bytes(b"noise")
    captions = open_captions(root)
    with pytest.raises(DataError, match=r"\b2\b.*\b3\b.*\b4\b"):
        captions.images[captions.image_ids.index("video0")]
    with pytest.raises(DataError, match=r"video1\.npy"):
        captions.images[captions.image_ids.index("video1")]
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        file.create_group("video0")
        file["video1"] = np.zeros((2, 2), np.int64)
    store = HDF5Frames(tmp_path / "a.hdf5", ["video0", "video1"])
    with pytest.raises(DataError, match="video0"):
        store[0]
    with pytest.raises(DataError, match="video1"):
        store[1]


def test_without_the_library_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_hgr(tmp_path)
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(MissingExtra, match=r"diptych\[hdf5\]"):
        open_captions(root)
    assert len(open_captions(root, mean=True).images) == 4  # the means need nothing


def write_1k_a(root: Path, *, delimiter: str = ",") -> Path:
    """All videos in one JSON, the first of which is the test list, with a text of its own."""
    root.mkdir(parents=True)
    names = list(SPLITS)
    content = {
        "info": {},
        "videos": [{"video_id": name, "split": "train", "category": 3} for name in names],
        "sentences": [{"video_id": name, "caption": text} for name in names for text in TEXTS[name]],
    }
    (root / "MSRVTT_data.json").write_text(json.dumps(content))
    header = delimiter.join(("key", "vid_key", "video_id", "sentence"))
    row = delimiter.join(("ret0", "msr0", names[0], '"a man, singing"'))
    (root / "MSRVTT_JSFUSION_test.csv").write_text(f"{header}\n{row}\n")
    for name in names:
        np.save(root / f"{name}.npy", features(name))
    return root


@pytest.mark.parametrize("delimiter", [",", ";"])
def test_the_split_1k_a_of_msrvtt(tmp_path: Path, delimiter: str) -> None:
    root, names = write_1k_a(tmp_path / "data", delimiter=delimiter), list(SPLITS)
    captions = open_captions(root)
    assert dict(zip(captions.image_ids, captions.splits, strict=True)) == {
        name: "test" if name == names[0] else "train" for name in names
    }
    assert list(captions.split("test").texts) == ["a man, singing"]
    assert len(captions.split("train").texts) == sum(len(TEXTS[name]) for name in names[1:])
    (root / "MSRVTT_train.7k.csv").write_text(f"video_id\n{names[1]}\n")
    assert list(open_captions(root, train="7k").split("train").image_ids) == [names[1]]
    (root / "MSRVTT_train.9k.csv").write_text("video_id\nvideo99\n")
    with pytest.raises(DataError, match="video99"):
        open_captions(root)
    with pytest.raises(SettingsError, match="5k"):
        open_captions(root, train="5k")
    (root / "MSRVTT_JSFUSION_test.csv").write_text("name,text\na,b\n")
    with pytest.raises(DataError, match="video_id and sentence"):
        open_captions(root)
