"""Several corpora at once: their order, their index, what is skipped and what is refused."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bombs import UNCLOSED
from PIL import Image

from diptych.data.check import check
from diptych.data.formats import open_captions, recognise
from diptych.data.images import PixelInput
from diptych.data.readers import webdataset
from diptych.data.readers.corpora import CorpusMixture, Stream
from diptych.data.text import WordInput
from diptych.errors import DataError, ImageError
from diptych.training.loading import PairLoader

WORDS = ["<pad>", "<start>", "<end>", "<unk>", "a", "dog", "<mask>"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def picture(number: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (number % 256, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def tar(path: Path, samples: dict[str, tuple[bytes | None, Any]]) -> Path:
    """A shard: key → (image bytes, what the .json holds; bytes as they are)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for key, (image, values) in samples.items():
            content = values if isinstance(values, bytes) else json.dumps(values).encode()
            for name, data in ((f"{key}.png", image), (f"{key}.json", content)):
                if data is not None:
                    info = tarfile.TarInfo(name)
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))
    return path


def manifest(folder: Path, corpora: list[dict[str, Any]], **further: Any) -> Path:
    path = folder / "corpora.json"
    path.write_text(json.dumps({**further, "corpora": corpora}), "utf-8")
    return path


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """Captions in three shards of four images with two texts, questions in one shard of six images."""
    for shard in range(3):
        tar(
            tmp_path / f"cc/train-{shard:04d}.tar",
            {
                f"{i}": (picture(10 * shard + i), {"captions": [f"cc {shard} {i} a", f"cc {shard} {i} b"]})
                for i in range(4)
            },
        )
    tar(
        tmp_path / "vqa/000.tar",
        {f"q{i}": (picture(100 + i), {"question": f"is it {i} ?", "answer": "yes"}) for i in range(6)},
    )
    return manifest(
        tmp_path,
        [
            {"name": "cc", "path": "cc/train-{0000..0002}.tar"},
            {"name": "vqa", "path": "vqa", "weight": 0.5, "texts": "question"},
        ],
        window=5,
    )


def test_corpora_of_the_same_pictures_share_them(tmp_path: Path) -> None:
    """Captions and questions of one picture are never each other's negatives; other corpora stay as they are."""
    shared = {f"p{i}": (picture(i), {"captions": [f"dog {i} a", f"dog {i} b"]}) for i in range(4)}
    tar(tmp_path / "captions/0.tar", shared)
    tar(tmp_path / "questions/0.tar", {f"p{i}": (picture(i), {"question": f"dog {i} ?"}) for i in (3, 1, 7)})
    tar(tmp_path / "other/0.tar", {f"p{i}": (picture(50 + i), {"captions": ["a dog"]}) for i in range(3)})
    listed: list[dict[str, Any]] = [{"path": name} for name in ("captions", "questions", "other")]
    alone = open_captions(manifest(tmp_path, listed))
    assert alone.picture_of is None
    for entry in listed[:2]:
        entry["images"] = "coco"
    captions = open_captions(manifest(tmp_path, listed))
    assert captions.picture_of is not None
    assert captions.picture_of.tolist() == [0, 1, 2, 3, 3, 1, 6, 7, 8, 9]
    assert captions.fingerprint() != alone.fingerprint()
    part = captions.subset([9, 5, 4, 3, 1])
    assert part.picture_of is not None
    assert part.picture_of.tolist() == [0, 1, 2, 2, 1]
    text = WordInput(WORDS, augment=0)
    loader = PairLoader(captions, PixelInput(8), text.prepare(captions.texts), len(captions.texts), 0)
    batch = next(loader.epoch(0))
    for text_row, image in zip(batch.text_ids.tolist(), batch.image_ids.tolist(), strict=True):
        assert image == captions.picture_of[captions.image_of[text_row]]
    with pytest.raises(DataError, match=r"images.*\b3\b"):
        open_captions(manifest(tmp_path, [{"path": "other", "images": 3}]))


# order


def mixture(window: int = 4) -> CorpusMixture:
    return CorpusMixture(
        (
            Stream("one", np.arange(10), [3, 4, 3], 1.0),
            Stream("half", np.arange(10, 17), [7], 0.5),
            Stream("twice", np.arange(17, 20), [1, 2], 2.0),
        ),
        window,
    )


def test_an_epoch_passes_over_each_corpus_by_its_weight() -> None:
    order = mixture()
    assert len(order) == 10 + 4 + 6  # round(3.5) = 4
    seen = Counter(order.epoch(3, 0).tolist())
    assert all(seen[text] == 1 for text in range(10))
    assert sum(seen[text] for text in range(10, 17)) == 4
    assert all(seen[text] == 2 for text in range(17, 20))


def test_over_time_every_text_of_a_light_corpus_is_seen_equally_often() -> None:
    seen = Counter(
        text for epoch in range(7) for text in mixture().epoch(0, epoch).tolist() if 10 <= text < 17
    )
    assert set(seen.values()) == {4}  # 7 epochs × 4 texts of 7


def test_order_depends_on_seed_and_epoch_alone() -> None:
    assert (mixture().epoch(5, 2) == mixture().epoch(5, 2)).all()
    assert (mixture().epoch(5, 2) != mixture().epoch(5, 3)).any()
    assert (mixture().epoch(5, 2) != mixture().epoch(6, 2)).any()


def test_shards_are_shuffled_then_windows() -> None:
    sizes = [5] * 40
    stream = Stream("large", np.arange(200), sizes)
    order = stream.one_pass(np.random.default_rng(0), 20)
    assert sorted(order.tolist()) == list(range(200))
    for start in range(0, 200, 20):  # a window holds whole shards here: four of them, shuffled
        shards_met = {text // 5 for text in order[start : start + 20].tolist()}
        assert len(shards_met) == 4
    firsts = [order[start] // 5 for start in range(0, 200, 20)]
    assert firsts != sorted(firsts)
    within = order[:20].tolist()
    assert within != sorted(within)


def test_a_subset_keeps_the_corpora() -> None:
    left = np.full(20, -1)
    kept = [0, 2, 5, 12, 18, 19]
    left[kept] = np.arange(len(kept))
    smaller = mixture().renumbered(left)
    assert [stream.texts.tolist() for stream in smaller.streams] == [[0, 1, 2], [3], [4, 5]]
    assert [list(stream.shards) for stream in smaller.streams] == [[2, 1], [1], [2]]
    assert sorted(set(smaller.epoch(0, 0).tolist())) in ([0, 1, 2, 3, 4, 5], [0, 1, 2, 4, 5])


# reading


def test_a_manifest_is_one_data_set(two: Path) -> None:
    assert recognise(two) == "corpora"
    captions = open_captions(two)
    assert len(captions.images) == 18
    assert len(captions.texts) == 24 + 6
    assert captions.texts[24] == "is it 0 ?"
    assert captions.image_ids[0] == "cc/train-0000/0"
    assert captions.image_ids[12] == "vqa/000/q0"
    assert captions.images[13].getpixel((0, 0)) == (101, 0, 0)
    assert captions.order is not None
    assert len(captions.order) == 27
    assert captions.unreadable == "skip"


def test_to_start_no_image_is_read(two: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("an image was opened")

    monkeypatch.setattr(webdataset, "open_image", refuse)
    first = open_captions(two).split("train").fingerprint()
    assert len(list(own_cache.glob("shard-*.npz"))) == 4
    monkeypatch.setattr(webdataset, "scan", refuse)  # the second start reads the index
    assert open_captions(two).split("train").fingerprint() == first


def test_the_fingerprint_follows_texts_and_places(two: Path) -> None:
    before = open_captions(two).fingerprint()
    tar(two.parent / "vqa/000.tar", {"q0": (picture(100), {"question": "is it another ?"})})
    assert open_captions(two).fingerprint() != before


@pytest.mark.parametrize("how", ["cut", "header"])
def test_a_damaged_index_is_made_again(how: str, two: Path, own_cache: Path) -> None:
    before = list(open_captions(two).texts)
    for file in own_cache.glob("shard-*.npz"):
        if how == "cut":
            file.write_bytes(file.read_bytes()[:100])
        else:
            with zipfile.ZipFile(file, "w") as archive:
                archive.writestr("keys_blob.npy", UNCLOSED)
    assert list(open_captions(two).texts) == before


def test_splits_come_from_names_or_from_the_manifest(tmp_path: Path) -> None:
    for name in ("train-0", "val-0", "more"):
        tar(tmp_path / f"{name}.tar", {"k": (picture(1), {"caption": name})})
    path = manifest(
        tmp_path,
        [{"name": "named", "path": "{train,val}-0.tar"}, {"path": "more.tar", "split": "validation"}],
    )
    captions = open_captions(path)
    assert captions.splits == ["train", "val", "val"]
    training = captions.split("train")
    assert list(training.texts) == ["train-0"]
    assert training.order is not None
    assert training.order.epoch(0, 0).tolist() == [0]


@pytest.mark.parametrize(
    ("corpora", "sentence"),
    [
        ([], "corpora"),
        ([{"name": "x"}], "path"),
        ([{"path": "a.tar", "wieght": 2}], "wieght"),
        ([{"path": "a.tar", "weight": 0}], r"weight.*\b0\b"),
        ([{"path": "nowhere"}], r"corpora\.json"),
        ([{"path": "a.tar"}, {"path": "a.tar"}], r"a\.tar"),
        ([{"path": "{a,b}.tar"}], r"b\.tar"),
        ([{"path": "cut.tar"}], r"cut\.tar"),
        ([{"path": "a.tar", "texts": "title"}], r"corpora\.json"),
    ],
)
def test_a_wrong_manifest_is_refused(tmp_path: Path, corpora: list[Any], sentence: str) -> None:
    whole = tar(tmp_path / "a.tar", {f"{i}": (picture(i), {"caption": "a dog"}) for i in range(9)})
    (tmp_path / "cut.tar").write_bytes(whole.read_bytes()[:7000])
    with pytest.raises(DataError, match=sentence):
        open_captions(manifest(tmp_path, corpora))


def test_samples_that_cannot_be_used_are_skipped_counted_and_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tar(
        tmp_path / "a.tar",
        {
            "good": (picture(0), {"caption": "a dog"}),
            "broken": (picture(1), b"{not json"),
            "alone": (None, {"caption": "a cat"}),
            "mute": (picture(2), {"caption": "  "}),
        },
    )
    path = manifest(tmp_path, [{"path": "a.tar"}])
    assert list(open_captions(path).texts) == ["a dog"]
    said = capsys.readouterr().err
    assert (
        "4 samples were skipped (1 json, 2 no text, 1 missing image)" in said
        or "samples were skipped" in said
    )
    assert "diptych data check" in said
    report = check(path, show_progress=False)
    assert {problem.kind for problem in report.warnings} >= {"json", "missing image", "no text"}
    assert report.ok


# loading


def loader(captions: Any, **further: Any) -> PairLoader:
    return PairLoader(captions, PixelInput(8), WordInput(WORDS, augment=0).prepare(captions.texts), **further)


def test_batches_follow_the_order_and_enter_anywhere(two: Path) -> None:
    captions = open_captions(two)
    assert captions.order is not None
    batches = loader(captions, batch_size=6, seed=4)
    assert len(batches) == 4  # 27 texts
    whole = [batch.text_ids.tolist() for batch in batches.epoch(1)]
    assert [row for ids in whole for row in ids] == captions.order.epoch(4, 1)[:24].tolist()
    assert [batch.text_ids.tolist() for batch in batches.epoch(1, start=2)] == whole[2:]


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """Twelve pairs of which the fourth and the tenth have an image that is none."""
    samples = {
        f"{i:02d}": (b"no image" if i in (3, 9) else picture(i), {"caption": f"text {i}"}) for i in range(12)
    }
    tar(tmp_path / "a.tar", samples)
    return manifest(tmp_path, [{"path": "a.tar"}])


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_image_is_skipped_and_counted(damaged: Path, workers: int) -> None:
    captions = open_captions(damaged)
    batches = loader(captions, batch_size=4, seed=0, workers=workers)
    found = [batch.text_ids.tolist() for batch in batches.epoch(0)]
    assert [len(ids) for ids in found] == [4, 4, 4]
    order = captions.order.epoch(0, 0).tolist()  # type: ignore[union-attr]
    assert set(order) - {row for ids in found for row in ids} == {3, 9}
    for batch, ids in enumerate(found):
        expected = order[4 * batch : 4 * batch + 4]
        good = [row for row in expected if row not in (3, 9)]
        assert [row for row in expected if row in good] == [
            r for r, e in zip(ids, expected, strict=True) if e in good
        ]
        assert set(ids) == set(good)
    assert set(batches.skipped) == {3, 9}
    assert "a.tar/03" in batches.skipped[3]


def test_data_that_does_not_allow_it_still_stops(damaged: Path) -> None:
    from dataclasses import replace

    batches = loader(replace(open_captions(damaged), unreadable="stop"), batch_size=12, seed=0)
    with pytest.raises(ImageError, match=r"a\.tar/03"):
        list(batches.epoch(0))


def test_a_batch_without_a_readable_image_is_refused(tmp_path: Path) -> None:
    tar(tmp_path / "a.tar", {f"{i}": (b"no image", {"caption": "a dog"}) for i in range(4)})
    captions = open_captions(manifest(tmp_path, [{"path": "a.tar"}]))
    with pytest.raises(DataError, match=r"\b2\b"):
        list(loader(captions, batch_size=2, seed=0).epoch(0))


def test_two_processes_share_the_batches_of_one(two: Path) -> None:
    captions = open_captions(two)
    alone = [batch.text_ids.tolist() for batch in loader(captions, batch_size=6, seed=1).epoch(0)]
    both = [
        [
            batch.text_ids.tolist()
            for batch in loader(captions, batch_size=6, seed=1, rank=rank, world_size=2).epoch(0)
        ]
        for rank in range(2)
    ]
    assert [a + b for a, b in zip(*both, strict=True)] == alone


@pytest.mark.parametrize("frozen", [False, True])
def test_a_run_says_how_many_images_it_skipped(
    damaged: Path, capsys: pytest.CaptureFixture[str], frozen: bool
) -> None:
    """Also where a frozen backbone reads every picture once: a second run knows from the cache."""
    from diptych.recipes import RECIPES
    from diptych.runs.train import run_recipe

    tar(damaged.parent / "val-0.tar", {f"{i}": (picture(i), {"caption": f"text {i}"}) for i in range(4)})
    path = manifest(damaged.parent, [{"path": "a.tar"}, {"path": "val-0.tar"}])
    recipe = RECIPES["cookie"]
    settings = recipe.settings(
        epochs=1, batch_size=4, dim=16, heads=2, word_dim=8, min_count=1, image_size=32, augmented_copies=1,
        train_backbone=not frozen,
    )  # type: ignore[call-arg]  # fmt: skip
    for name in ("one", "two"):
        run_recipe(recipe, settings, str(path), damaged.parent / name)
        assert "warning: 2 images could not be read and were skipped: " in capsys.readouterr().out
        log = [
            json.loads(line) for line in (damaged.parent / name / "log.jsonl").read_text("utf-8").splitlines()
        ]
        assert [line["skipped_images"] for line in log if "skipped_images" in line] == [2]


SPY = """
import json, os, signal, sys
from pathlib import Path
from diptych.cli import main
from diptych.training.loading import PairLoader

plain, seen, deadly = PairLoader.epoch, Path(sys.argv[1]), int(sys.argv[2])

def epoch(self, number, start=0):
    for step, batch in enumerate(plain(self, number, start), start):
        if step == deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        with seen.open("a") as file:
            file.write(json.dumps([number, step, batch.text_ids.tolist()]) + "\\n")
        yield batch

PairLoader.epoch = epoch
main(sys.argv[3:])
"""


def test_a_killed_pre_training_goes_on_at_the_exact_sample(tmp_path: Path) -> None:
    for shard in range(4):
        samples = {
            f"{i}": (picture(shard + i), {"captions": [f"text {i} a", f"text {i} b"]}) for i in range(5)
        }
        tar(tmp_path / f"{'val' if shard == 3 else 'train'}-{shard}.tar", samples)
    data = manifest(tmp_path, [{"name": "all", "path": "{train,val}-*.tar"}], window=8)
    flags = ["--batch_size=4", "--save_steps=3", "--epochs=1", "--dim=8", "--word_dim=4", "--min_count=1",
             "--workers=2", "--image_size=32", "--train_backbone", "--heads=2"]  # fmt: skip
    start = [sys.executable, "-c", SPY]
    first = [*start, str(tmp_path / "first"), "5", "train", "cookie", f"--data={data}"]
    killed = subprocess.run([*first, f"--output_dir={tmp_path / 'run'}", *flags], capture_output=True)
    assert killed.returncode == -signal.SIGKILL
    resumed = [*start, str(tmp_path / "second"), "-1", "train", "cookie"]
    subprocess.run(
        [*resumed, f"--resume_from_checkpoint={tmp_path / 'run'}"], check=True, capture_output=True
    )
    before, after = (
        [json.loads(line) for line in (tmp_path / name).read_text("utf-8").splitlines()]
        for name in ("first", "second")
    )
    assert [step for _, step, _ in before] == [0, 1, 2, 3, 4]
    assert [step for _, step, _ in after] == [3, 4, 5, 6]  # the state of step 3 was saved
    kept = [text for _, step, texts in before if step < 3 for text in texts]
    remaining = [text for _, _, texts in after for text in texts]
    order = open_captions(data).split("train").order
    assert order is not None
    assert kept + remaining == order.epoch(0, 0)[:28].tolist()  # each once, none lost
    assert len(set(kept + remaining)) == 28
