"""Bad input through the command line: one sentence with the correction, status 2, nothing saved is lost."""

from __future__ import annotations

import json
import pickle
import re
import resource
import signal
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import disks
import numpy as np
import pytest
from commands import diptych, process, refused, training
from small import WORDS, pictures, precomputed

from diptych import storage
from diptych.data.formats import open_captions
from diptych.errors import DataError, SettingsError
from diptych.model.retriever import Retriever
from diptych.recipes import RECIPES
from diptych.training.log import read_log


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return precomputed(tmp_path / "toy_precomp")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sound data, never changed."""
    return precomputed(tmp_path_factory.mktemp("data") / "sound_precomp")


@pytest.fixture(scope="module")
def run(sound: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run, never changed."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    diptych(*training("vse-infinity", sound, epochs=1), "--output_dir", folder)
    return folder


def refused_training(data: Path, recipe: str = "vse-infinity", **changes: object) -> str:
    """What training says; it leaves no run behind that would stand in the way of the corrected one."""
    folder = data.parent / "refused"
    sentence = refused(*training(recipe, data, **changes), "--output_dir", folder)
    assert not (folder / "last").exists()
    return sentence


# --- precomputed folders


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def without_lines(path: Path, count: int) -> None:
    path.write_text("".join(path.read_text("utf-8").splitlines(keepends=True)[:-count]), "utf-8")


def with_line(path: Path, number: int, line: bytes) -> None:
    lines = path.read_bytes().splitlines()
    lines[number - 1] = line
    path.write_bytes(b"\n".join(lines) + b"\n")


def same_ids(folder: Path) -> None:
    (folder / "train_ids.txt").write_text("\n".join(map(str, range(24))))
    (folder / "dev_ids.txt").write_text("\n".join(map(str, range(20, 30))))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing array": (lambda d: (d / "train_ims.npy").unlink(), "train_ims.npy"),
    "missing texts": (lambda d: (d / "train_caps.txt").unlink(), "train_caps.txt"),
    "truncated array": (
        lambda d: cut(d / "train_ims.npy", 4000),
        "9,344",
    ),
    "truncated header": (lambda d: cut(d / "train_ims.npy", 20), "train_ims.npy"),
    "pickled array": (
        lambda d: np.save(d / "train_ims.npy", np.array([{}], dtype=object)),
        "train_ims.npy",
    ),
    "other width": (
        lambda d: np.save(d / "dev_ims.npy", np.zeros((10, 6, 12), np.float32)),
        "(6, 12)",
    ),
    "counts": (lambda d: without_lines(d / "train_caps.txt", 3), "train_caps.txt"),
    "not UTF-8": (
        lambda d: with_line(d / "train_caps.txt", 7, b"caf\xe9 dog"),
        "train_caps.txt:7",
    ),
    "empty text": (
        lambda d: with_line(d / "train_caps.txt", 7, b"  "),
        "train/1",
    ),
    "id in two splits": (same_ids, "'20'"),
}  # fmt: skip


@pytest.mark.parametrize("what", list(DAMAGE))
def test_damaged_folders_are_refused_by_name(what: str, data: Path) -> None:
    damage, message = DAMAGE[what]
    damage(data)
    assert message in refused_training(data)
    assert message in diptych("data", "check", data, status=1).stdout.replace("\n  ", " ")


def test_features_that_are_no_numbers(data: Path) -> None:
    array = np.load(data / "train_ims.npy")
    array[:, 2, 1] = np.nan
    np.save(data / "train_ims.npy", array)
    sentence = refused_training(data)
    assert "step 1" in sentence
    assert "'diptych data check'" in sentence
    assert "features that are not finite" in diptych("data", "check", data, status=1).stdout


# --- pictures


def bomb(path: Path, side: int = 60_000) -> None:
    """A PNG of a hundred bytes that claims to be huge."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        )

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 99)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + body)


def table(folder: Path, *more: str, skip: int | None = None) -> Path:
    pictures(folder / "images", 12)
    lines = [f"picture{i}.png,a red dog {i},{'train' if i < 9 else 'val'}" for i in range(12) if i != skip]
    (folder / "data.csv").write_text("\n".join(["image,text,split", *lines, *more]) + "\n", "utf-8")
    return folder


PICTURES: dict[str, tuple[Callable[[Path], object], str]] = {
    "corrupt": (
        lambda p: (p / "images" / "picture3.png").write_bytes(b"\x89PNG\r\n\x1a\n123"),
        "picture3.png",
    ),
    "cut off": (lambda p: cut(p / "images" / "picture3.png", 3000), "picture3.png"),
    "bomb": (
        lambda p: bomb(p / "images" / "picture3.png"),
        "60000×60000",
    ),
    "missing": (
        lambda p: (p / "images" / "picture3.png").unlink(),
        "1 of 12",
    ),
    "two splits": (
        lambda p: table(p, "picture1.png,again,val"),
        "picture1.png",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", list(PICTURES))
def test_bad_pictures_and_tables_stop_strict_training(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path / "cache"))
    folder = table(tmp_path / "photos")
    damage, message = PICTURES[what]
    damage(folder)
    arguments = training("vse-infinity", folder, image_size=32, batch_size=4, epochs=1)
    sentence = refused(*arguments, "--strict_images", "--output_dir", tmp_path / "refused")
    assert message in sentence
    assert not (tmp_path / "refused" / "last").exists()


def test_options_behind_a_path(tmp_path: Path) -> None:
    folder = table(tmp_path / "photos", "picture3.png,,train", skip=3)
    assert "picture3.png' is empty" in diptych("data", "check", f"{folder}?empty=error", status=1).stdout
    assert "ok: 0 errors" in diptych("data", "check", folder).stdout
    assert "emty" in refused("data", "check", f"{folder}?emty=drop")


# --- flags, checkpoints, models


def test_flags_with_a_mistake(sound: Path) -> None:
    sentence = refused(*training("vse-infinity", sound), "--learning_rat", 1)
    assert "--learning_rat" in sentence
    assert re.search(r"did you mean .*\bvse-infinity\b", refused("train", "vse-infinty", "--data", sound))
    assert "serach" in refused("serach", "x", "y")
    assert "'x'" in refused(*training("vse-infinity", sound), "--epochs", "x")
    assert "--batch_size" in refused_training(sound, batch_size=1)
    assert "1000" in refused_training(sound, batch_size=1000)


def test_a_checkpoint_of_another_recipe(run: Path, sound: Path) -> None:
    sentence = refused("train", "vse-plus-plus", "--data", sound, "--resume_from_checkpoint", run)
    assert "vse-plus-plus" in sentence


def test_what_is_no_run(run: Path, sound: Path, tmp_path: Path) -> None:
    assert "nowhere" in refused("evaluate", tmp_path / "nowhere")
    assert "config.json" in refused("evaluate", sound, "--data", sound)
    assert "--output_dir" in refused("train", "coder", "--resume_from_checkpoint", sound)
    assert "--resume_from_checkpoint" in refused(*training("vse-infinity", sound), "--output_dir", run)
    assert "test" in refused("evaluate", run, "--split", "test")


def test_a_resumed_run_whose_data_changed(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    diptych(*training("coder", data, epochs=1), "--output_dir", folder)
    before = (folder / "last" / "progress.json").read_bytes()
    with_line(data / "train_caps.txt", 3, b"another dog")
    sentence = refused("train", "coder", "--resume_from_checkpoint", folder, "--epochs", 2)
    assert str(folder) in sentence
    assert "toy_precomp" in sentence
    assert (folder / "last" / "progress.json").read_bytes() == before
    Retriever.from_pretrained(folder)


def test_an_index_of_another_model(run: Path, sound: Path, tmp_path: Path) -> None:
    other, place = tmp_path / "other", tmp_path / "toy.index"
    diptych(*training("vse-infinity", sound, epochs=1, seed=1), "--output_dir", other)
    diptych("index", run, sound, "--index", place)
    for sentence in (
        refused("index", other, sound, "--index", place),
        refused("search", place, "a dog", "--model", other),
    ):
        assert f"'{run}'" in sentence
        assert f"'{other}'" in sentence
    diptych("search", place, "a dog", "--all")


# --- CODER


def cvse_files(folder: Path, words: list[str]) -> Path:
    folder.mkdir()
    (folder / "category_concepts.json").write_text(json.dumps({word: n for n, word in enumerate(words)}))
    g = len(words)
    counts = {"nums": np.ones(g, np.int32), "adj_all": np.ones((g, g), np.int32) - np.eye(g, dtype=np.int32)}
    (folder / "x_adj_concepts.pkl").write_bytes(pickle.dumps(counts))
    return folder


def glove(path: Path, width: int) -> Path:
    path.write_text("".join(f"{word} " + " ".join(["0.1"] * width) + "\n" for word in WORDS), "utf-8")
    return path


def test_coder_settings_that_do_not_fit(data: Path, tmp_path: Path) -> None:
    sentence = refused_training(data, "coder", queue_size=8)
    assert "8 pairs" in sentence
    sentence = refused_training(data, "coder", clusters=121)
    assert "121" in sentence
    foreign = cvse_files(tmp_path / "foreign", ["hund", "katze", "baum"])
    sentence = refused_training(data, "coder", concept_files=foreign, concept_size=400)
    assert "120" in sentence
    own = cvse_files(tmp_path / "own", ["dog", "cat", "tree"])
    diptych(
        *training("coder", data, epochs=1, concept_files=own, concept_size=400),
        "--output_dir",
        tmp_path / "good",
    )


def test_texts_without_a_concept(data: Path) -> None:
    for name, count in (("train", 120), ("dev", 50)):
        (data / f"{name}_caps.txt").write_text("the of and with\n" * count, "utf-8")
    sentence = refused_training(data, "coder")
    assert "120" in sentence
    assert "train without the concept branch" in sentence


@pytest.mark.parametrize(
    ("settings", "correction"),
    [
        ({"concept": False}, "--no_concept.*--no_prototypes"),
        (
            {"concept_files": "cvse", "concept_size": 300},
            "--concept_files.*--concept_size",
        ),
        ({"concept_files": "cvse", "concept_shares": "printed"}, "--concept_shares"),
        ({"bank": "diversity", "loss": "triplet"}, "--loss triplet"),
        ({"bank": "diversity", "diversity": "none"}, "--diversity none"),
        ({"bank": "diversity", "bank_diversity": False}, "--no_bank_diversity"),
    ],
)
def test_parts_of_coder_that_nothing_would_use(settings: dict[str, Any], correction: str, data: Path) -> None:
    made = RECIPES["coder"].settings(**settings, batch_size=12, clusters=6)
    with pytest.raises(SettingsError, match=correction):
        RECIPES["coder"].build(made, open_captions(str(data)))


def test_word_vectors_of_another_width(data: Path, tmp_path: Path) -> None:
    vectors = glove(tmp_path / "glove.20d.txt", 20)
    for recipe in ("vse-infinity", "coder"):
        sentence = refused_training(data, recipe, word_vectors=vectors)
        assert "20 numbers" in sentence
    vectors.write_text("a 0.1 0.2\nb 0.1\n", "utf-8")
    assert "glove.20d.txt:2" in refused_training(data, "coder", concept_vectors=vectors)


# --- disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with disks.small_disk(tmp_path / "disk") as place:
        yield place


@pytest.mark.parametrize("leave", [0, 40_000, 300_000])  # the log, the best model, the state do not fit
def test_a_full_disk_while_training(leave: int, data: Path, small_disk: Path, tmp_path: Path) -> None:
    arguments, run, whole = training("vse-infinity", data, epochs=1), small_disk / "run", tmp_path / "whole"
    diptych(*arguments, "--epochs", 3, "--output_dir", whole)
    diptych(*arguments, "--output_dir", run)
    fingerprint = Retriever.from_pretrained(run).fingerprint()
    before = (run / "last" / "progress.json").read_bytes()
    ballast = disks.fill(small_disk, leave)
    resume = ("train", "vse-infinity", "--resume_from_checkpoint", run, "--epochs", 3)
    sentence = refused(*resume)
    assert str(run) in sentence
    assert (run / "last" / "progress.json").read_bytes() == before
    best = Retriever.from_pretrained(run).fingerprint()
    assert best == fingerprint or leave > 200_000  # the best model was saved, the state after it was not
    ballast.unlink()
    diptych(*resume)
    assert [line.get("loss") for line in read_log(run / "log.jsonl")] == [
        line.get("loss") for line in read_log(whole / "log.jsonl")
    ]


def test_a_full_disk_elsewhere(
    run: Path, sound: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIPTYCH_CACHE", str(small_disk / "cache"))
    disks.fill(small_disk, 20_000)
    photos = table(small_disk.parent / "photos")
    for arguments in (
        (*training("vse-infinity", photos, image_size=64, batch_size=4), "--output_dir", photos / "run"),
        ("index", run, sound, "--index", small_disk / "toy.index"),
        ("extract", photos, "--output_dir", small_disk / "features", "--image_size", 64),
        (*training("vse-infinity", sound), "--output_dir", small_disk / "run"),
    ):
        sentence = refused(*arguments)
        assert "disk is full" in sentence  # told from a place that may not be written


def test_a_file_that_may_not_grow(data: Path, tmp_path: Path) -> None:
    """The same without root: the system refuses files above a size."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    folder = tmp_path / "run"
    started = process(*training("vse-infinity", data), "--output_dir", folder, preexec_fn=limit)
    _, said = started.communicate()
    assert started.returncode == 2, said
    assert f"{folder / 'best'}" in said
    assert "Traceback" not in said


def test_places_that_cannot_be_written(run: Path, sound: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    taken = tmp_path / "file" / "run"
    assert "file/run" in refused(*training("vse-infinity", sound), "--output_dir", taken)
    assert "report.json" in refused("evaluate", run, "--output", tmp_path / "file" / "report.json")


def test_a_model_that_cannot_read_the_pictures_leaves_no_index(run: Path, tmp_path: Path) -> None:
    pictures(tmp_path / "photos", 3)
    assert "16 numbers" in refused("index", run, tmp_path / "photos")
    assert not (tmp_path / "photos.index").exists()  # it would be in the way of a model that can


@pytest.mark.parametrize(
    "command",
    [
        ("search", "~nobody/photos", "dog"), ("index", "info", "~nobody/i.index"),
        ("model", "info", "~nobody/x"), ("audit", "~nobody/x"), ("evaluate", "~nobody/run", "--data", "~nobody/x"),
    ],
)  # fmt: skip
def test_the_home_folder_of_nobody(command: tuple[str, ...]) -> None:
    """It was a RuntimeError of Python."""
    assert "~nobody" in refused(*(part.replace("nobody", "nobodyhere") for part in command))


def test_a_corpus_in_the_home_folder_of_nobody(tmp_path: Path) -> None:
    corpus = {"name": "a", "path": "~nobodyhere/{0..1}.tar", "weight": 1}
    (tmp_path / "corpora.json").write_text(json.dumps({"corpora": [corpus]}))
    with pytest.raises(DataError, match="~nobodyhere"):
        open_captions(tmp_path / "corpora.json")


def test_home_folders_are_found_in_one_place() -> None:
    package = Path(storage.__file__).parent
    found = [path for path in package.rglob("*.py") if "expanduser" in path.read_text("utf-8")]
    assert found == [Path(storage.__file__)]
