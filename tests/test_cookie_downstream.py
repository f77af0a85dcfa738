"""COOKIE's video matching and hashing, from a pre-trained run, through the command line."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from clips import colour_video
from commands import diptych, refused
from PIL import Image
from small import WORDS, precomputed

from diptych.branches.branch import HashHead
from diptych.data.formats import open_captions
from diptych.data.labels import class_names, class_rows, class_sets, hash_centres
from diptych.errors import DataError, SettingsError
from diptych.evaluation.hashing import HashRetrieval
from diptych.evaluation.prepared import Prepared
from diptych.evaluation.report import Report
from diptych.model.retriever import Retriever
from diptych.recipes import RECIPES, cookie_hash, cookie_match
from diptych.runs.measures import EvaluationRequest, measures_of
from diptych.runs.reading import database_of
from diptych.settings import from_saved
from diptych.targets.labels import HashTargets

SMALL = ["--dim=16", "--heads=2", "--batch_size=12", "--min_count=1", "--word_dim=8"]
COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (40, 50, 220)}


# hashing


def draw_lists(folder: Path) -> Path:
    """Pictures of one or two colours in the lists of the hashing literature."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    names = list(COLOURS)
    lines: dict[str, list[str]] = {"train": [], "test": [], "database": []}
    for n in range(54):
        own = {n % 3, *([int(rng.integers(3))] if n % 4 == 0 else [])}
        pixels = np.zeros((32, 32, 3), np.int64)
        for part, c in zip(np.array_split(np.arange(32), len(own)), sorted(own), strict=True):
            pixels[part] = COLOURS[names[c]]
        noisy = np.clip(pixels + rng.integers(-25, 25, pixels.shape), 0, 255).astype(np.uint8)
        Image.fromarray(noisy).save(folder / f"p{n}.png")
        line = f"p{n}.png " + " ".join("1" if c in own else "0" for c in range(3))
        if n < 12:
            lines["test"].append(line)
            continue
        lines["database"].append(line)
        if n < 48:
            lines["train"].append(line)
    lines["test"][0] = "p0.png 0 0 0"  # a query without a label
    for name, own_lines in lines.items():
        (folder / f"{name}.txt").write_text("\n".join(own_lines) + "\n")
    (folder / "classes.txt").write_text("\n".join(names))
    return folder


@pytest.fixture(scope="module")
def lists(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_lists(tmp_path_factory.mktemp("hashing") / "lists")


@pytest.fixture(scope="module")
def hashed(lists: Path) -> Path:
    """A pre-trained run, and a hash model made from it."""
    run = lists.parent / "cookie"
    diptych("train", "cookie", "--data", lists, "--output_dir", run, *SMALL, "--image_size=64", "--epochs=1")
    out = lists.parent / "hash"
    diptych(
        "train", "cookie-hash", "--data", lists, "--init", run, "--output_dir", out, "--bits=16", "--epochs=25",
        "--batch_size=12", "--learning_rate=3e-3", "--tower_multiplier=1",
    )  # fmt: skip
    return out


def test_hashing_learns_the_classes_and_the_codes_travel(lists: Path, hashed: Path, tmp_path: Path) -> None:
    said = diptych(
        "evaluate", hashed, "--protocol", "hashing", "--split", "test", "--output", tmp_path / "r.json"
    )
    report = Report.load(tmp_path / "r.json")
    assert "MAP@5000" in said.stdout
    assert "queries without a label 1" in said.stdout
    assert report.metrics["map"] > 75
    low, high = report.intervals["map"]
    assert low <= report.metrics["map"] <= high
    card = report.card.protocol_fields()
    assert (card["queries"], card["database"], card["bits"], card["classes"]) == (12, 42, 16, 3)
    model = Retriever.from_pretrained(hashed)
    head = model.branches["hash"]
    assert isinstance(head, HashHead)
    assert np.array_equal(head.centres.numpy(), hash_centres(3, 16))
    captions = open_captions(lists).split("test")
    codes = model.encode_image(captions.images, view="hash")
    assert codes.shape == (12, 16)
    assert codes.abs().max() < 1
    assert '"validation_map"' in (hashed / "log.jsonl").read_text()
    assert model.encode_text("red", view="hash").shape == (1, 16)


def test_unreadable_queries_and_database_are_on_the_card(hashed: Path, lists: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "lists"
    shutil.copytree(lists, damaged)
    for name in ("p1.png", "p30.png", "p31.png"):  # a query, and two of the database
        (damaged / name).write_text("this is not a picture")
    asked = ("evaluate", hashed, "--split=test", "--data", damaged)
    done = diptych(*asked, "--protocol=hashing")
    assert "queries 11" in done.stdout
    assert "pictures that could not be read 3" in done.stdout
    done = diptych(*asked)  # beside retrieval, it is measured as while the run trains
    assert "database the other queries" in done.stdout
    assert "pictures that could not be read 1" in done.stdout


def test_the_value_is_that_of_the_codes(lists: Path, hashed: Path) -> None:
    from diptych.evaluation.hashing import hashing_map

    model, whole = Retriever.from_pretrained(hashed), open_captions(lists)
    queries = whole.split("test")
    database = database_of(whole, queries)
    assert len(database.images) == 42
    ready = Prepared(queries, model.text_input.prepare(queries.texts), others=database)
    group = HashRetrieval()(model, ready)
    sets = [class_sets(part) for part in (queries, database)]
    names = class_names([*sets[0], *sets[1]])
    found = hashing_map(
        model.encode_image(queries.images, view="hash").numpy(),
        model.encode_image(database.images, view="hash").numpy(),
        *(class_rows(one, names) for one in sets),
    )
    assert group.metrics["map"] == found.map
    said = diptych("evaluate", hashed, "--protocol", "hashing", "--split", "test", "--depth", "7")
    assert "MAP@7" in said.stdout
    assert "--depth" in refused("evaluate", hashed, "--depth", "7")
    assert group.metrics["map_tie_averaged"] == found.map_tie_averaged


def settings_of(**changes: Any) -> Any:
    return cookie_hash.Settings(dim=16, heads=2, min_count=1, word_dim=8, image_size=64, **changes)


def test_only_what_the_loss_sees_is_trained(lists: Path) -> None:
    training = open_captions(lists).split("train")
    method = cookie_hash.build(settings_of(bits=16), training)
    frozen = {name.split(".")[0] for name, p in method.retriever.named_parameters() if not p.requires_grad}
    trained = {name.split(".")[0] for name, p in method.retriever.named_parameters() if p.requires_grad}
    assert trained == {"image", "branches"}
    assert "text" in frozen
    both = cookie_hash.build(settings_of(bits=16, text_codes=True), training)
    assert all(p.requires_grad for p in both.retriever.text.parameters())
    (source,) = method.targets
    column = source.columns(training, device=torch.device("cpu"))["labels"]
    assert column.of == "image"
    assert np.array_equal(
        np.asarray(column.values), class_rows(class_sets(training), ["blue", "green", "red"])
    )


def test_a_cell_of_several_labels_is_several_classes(lists: Path, hashed: Path, tmp_path: Path) -> None:
    whole = open_captions(lists)
    joined = [";".join(one) for one in class_sets(whole)]
    cells = replace(whole, labels={**whole.labels, "labels": joined})
    assert class_sets(cells) == class_sets(whole)
    assert class_sets(replace(cells, labels={"labels": ["cat; dog|cat"] * len(joined)}))[0] == ("cat", "dog")
    saved = json.loads((hashed / "run.json").read_text())["settings"]
    assert saved.pop("split_labels") is True
    before = from_saved(cookie_hash.Settings, saved)  # of a run that was saved before the setting existed
    training = cells.split("train")
    names = class_names(class_sets(training, split=False))
    assert any(";" in name for name in names)
    for settings, wanted in ((before, names), (settings_of(bits=16), ["blue", "green", "red"])):
        (source,) = cookie_hash.build(settings, training).targets
        column = source.columns(training, device=torch.device("cpu"))["labels"]
        assert np.asarray(column.values).shape[1] == len(wanted)
    (evaluator,) = cookie_hash.evaluators(before)
    assert not evaluator.split_labels
    old = shutil.copytree(hashed, tmp_path / "old")
    card = json.loads((old / "run.json").read_text())
    del card["settings"]["split_labels"]
    (old / "run.json").write_text(json.dumps(card))
    for run, split in ((hashed, True), (old, False)):
        (measure,), _ = measures_of([run], EvaluationRequest(protocol="hashing"))
        assert isinstance(measure.evaluator, HashRetrieval)
        assert measure.evaluator.split_labels is split


def test_what_hashing_cannot_do_is_said(lists: Path, hashed: Path, tmp_path: Path) -> None:
    plain = precomputed(tmp_path / "toy_precomp")
    out = ["--output_dir", tmp_path / "run", *SMALL]
    said = refused("train", "cookie-hash", "--data", plain, *out)
    assert "labels" in said
    assert "--label_column" in said
    said = refused("train", "cookie-hash", "--data", lists, *out, "--bits=48", "--image_size=64")
    assert "48" in said
    wrong = tmp_path / "centres.npy"
    np.save(wrong, hash_centres(3, 32))
    said = refused("train", "cookie-hash", "--data", lists, *out, "--centres", wrong, "--image_size=64")
    assert "32 bits" in said
    assert not (tmp_path / "run" / "run.json").exists()
    said = refused("evaluate", hashed, "--protocol", "hashing", "--data", plain)
    assert "labels" in said
    said = refused("evaluate", hashed, hashed, "--protocol", "hashing")
    assert "hashing" in said
    said = refused("evaluate", lists.parent / "cookie", "--protocol", "hashing", "--data", lists)
    assert "cookie-hash" in said
    said = refused("evaluate", hashed, "--protocol", "hashing", "--judgements", "eccv")
    assert "--judgements" in said


def test_classes_are_read_from_one_value_or_several() -> None:
    assert class_names([("class 10",), ("class 2", "b")]) == ["b", "class 2", "class 10"]
    rows = class_rows([("b", "x"), ()], ["a", "b"])
    assert rows.tolist() == [[False, True], [False, False]]


def test_given_centres_are_used(lists: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "c.npy", -hash_centres(5, 16))  # a file may hold more classes
    training = open_captions(lists).split("train")
    method = cookie_hash.build(settings_of(bits=16, centres=str(tmp_path / "c.npy")), training)
    head = method.retriever.branches["hash"]
    assert isinstance(head, HashHead)
    assert np.array_equal(
        head.centres.numpy(), -hash_centres(5, 16)[[2, 1, 0]]
    )  # names are sorted, columns are not
    assert any(torch.equal(head.centres.float(), value) for value in method.objective.state_dict().values())
    assert isinstance(method.targets[0], HashTargets)


def test_rows_of_given_centres_go_to_the_columns_of_the_lists(lists: Path, tmp_path: Path) -> None:
    """The columns are red, green, blue; a class that training lacks shifts no other."""
    centres = hash_centres(3, 16)
    np.save(tmp_path / "c.npy", centres)
    training = open_captions(lists).split("train")
    settings = settings_of(bits=16, centres=str(tmp_path / "c.npy"))
    rows = [row for row, own in enumerate(training.labels["labels"]) if "green" not in own]
    head = cookie_hash.build(settings, training.subset(rows)).retriever.branches["hash"]
    assert isinstance(head, HashHead)
    assert np.array_equal(head.centres.numpy(), centres[[2, 0]])  # blue, red
    np.save(tmp_path / "c.npy", centres[:2])
    with pytest.raises(DataError, match=r"\b2\b.*\b3\b"):
        cookie_hash.build(settings, training)


# videos


def write_videos(root: Path, width: int = 10) -> Path:
    """Videos in HGR's layout whose frames carry the words of their texts; some texts repeat between videos."""
    rng = np.random.default_rng(1)
    codes = rng.standard_normal((len(WORDS), width)).astype(np.float32)
    (root / "annotation" / "RET").mkdir(parents=True)
    (root / "public_split").mkdir()
    (root / "ordered_feature" / "SA" / "ft").mkdir(parents=True)
    texts: dict[str, list[str]] = {}
    for short, count in (("trn", 24), ("val", 10), ("tst", 10)):
        names = [f"{short}{n}" for n in range(count)]
        np.save(root / "public_split" / f"{short}_names.npy", np.array(names))
        with h5py.File(root / "ordered_feature" / "SA" / "ft" / f"{short}_ft.hdf5", "w") as file:
            for name in names:
                words = rng.choice(len(WORDS), size=int(rng.integers(3, 8)))
                file[name] = codes[words] + 0.1 * rng.standard_normal((len(words), width))
                texts[name] = [" ".join(WORDS[w] for w in rng.permutation(words)) for _ in range(3)]
                texts[name].append("a video")
    (root / "annotation" / "RET" / "ref_captions.json").write_text(json.dumps(texts))
    return root


def test_video_matching_starts_from_a_run_with_a_new_projection(tmp_path: Path) -> None:
    videos, run = write_videos(tmp_path / "msrvtt"), tmp_path / "cookie"
    toy = precomputed(tmp_path / "toy_precomp")  # 16 numbers a region, where a frame has 10
    diptych("train", "cookie", "--data", toy, "--output_dir", run, *SMALL, "--epochs=2")
    out = tmp_path / "video"
    diptych(
        "train", "cookie-video", "--data", videos, "--init", run, "--output_dir", out, "--batch_size=12",
        "--epochs=12", "--learning_rate=5e-3",
    )  # fmt: skip
    settings = json.loads((out / "run.json").read_text())["settings"]
    assert (settings["dim"], settings["heads"], settings["image_encoder"]) == (16, 2, "grid")
    said = diptych(
        "evaluate",
        out,
        "--protocol",
        "video",
        "--split",
        "test",
        "--bootstrap",
        20,
        "--output",
        tmp_path / "r.json",
    )
    assert "different texts" in said.stdout
    assert "all texts" in said.stdout
    found = Report.load(tmp_path / "r.json")
    assert found.card.protocol_fields()["texts in the gallery"] == 31  # ten times three, and "a video" once
    assert found.metrics["video_rsum"] > 200
    started, source = (Retriever.from_pretrained(place) for place in (out, run))
    widths = [
        next(
            v.shape[1]
            for k, v in m.state_dict().items()
            if k.startswith("image.encoder.inner.") and v.dim() == 2
        )
        for m in (started, source)
    ]
    assert widths == [10, 16]


def test_a_run_with_other_words_or_shape_is_refused(tmp_path: Path) -> None:
    videos = write_videos(tmp_path / "msrvtt")
    toy = precomputed(tmp_path / "toy_precomp")
    diptych("train", "cookie", "--data", toy, "--output_dir", tmp_path / "cookie", *SMALL, "--epochs=1")
    said = refused(
        "train", "cookie-video", "--data", videos, "--init", tmp_path / "cookie", "--output_dir", tmp_path / "out",
        "--dim=24", "--batch_size=12",
    )  # fmt: skip
    assert "--init" in said


def test_own_videos_become_frame_features_that_train(tmp_path: Path) -> None:
    films = tmp_path / "films"
    names = {"red": "red", "lime": "green", "blue": "blue", "white": "white"}
    for n, colour in enumerate([*names, *names, *names]):
        split = "val" if n >= 8 else "train"
        colour_video(films / split / f"c{n}.mp4", [colour, "black"])
        (films / split / f"c{n}.txt").write_text(f"a {names[colour]} film\nit is {names[colour]}\n")
    (films / "train" / "broken.mp4").write_bytes(b"no")
    out = tmp_path / "features"
    said = diptych("extract", films, "--frames", "--image_size", 32, "--output_dir", out).stdout
    assert "12 videos, 24 frames (0 were there already)" in said
    assert "skipped train/broken.mp4: " in said
    captions = open_captions(out)
    assert len(captions.images) == 12
    assert captions.texts[0] == "a red film"
    assert sorted(set(captions.splits)) == ["train", "val"]
    assert np.asarray(captions.images[0]).shape == (2, 1280)
    before = (out / "features" / "train__c0.mp4.npy").read_bytes()
    colour_video(films / "train" / "c1.mp4", ["blue"] * 3)
    (out / "features" / "train__c2.mp4.key").unlink()  # as after an interruption
    said = diptych("extract", films, "--frames", "--image_size", 32, "--output_dir", out).stdout
    assert "12 videos, 25 frames (10 were there already)" in said
    assert (out / "features" / "train__c0.mp4.npy").read_bytes() == before
    run = tmp_path / "run"
    diptych(
        "train", "cookie-video", "--data", out, "--output_dir", run, *SMALL, "--batch_size=8", "--epochs=2"
    )
    assert "different texts" in diptych("evaluate", run, "--protocol", "video", "--bootstrap", 0).stdout
    (tmp_path / "stills").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "stills" / "a.png")
    said = refused("extract", tmp_path / "stills", "--frames", "--output_dir", tmp_path / "no")
    assert "--frames" in said


@pytest.mark.parametrize("name", ["vse-infinity-video", "vse-plus-plus-video"])
def test_video_presets_train_on_frames(name: str, tmp_path: Path) -> None:
    videos = write_videos(tmp_path / "msrvtt")
    settings = RECIPES[name].settings()
    assert (settings.epochs, settings.learning_rate, settings.decay_epoch, settings.batch_size) == (
        35,
        1e-4,
        25,
        128,
    )
    out = tmp_path / "run"
    flags = [
        "--dim=16",
        "--batch_size=12",
        "--min_count=1",
        "--word_dim=8",
        "--epochs=3",
        "--learning_rate=5e-3",
    ]
    diptych("train", name, "--data", videos, "--output_dir", out, *flags)
    said = diptych("evaluate", out, "--bootstrap", 0).stdout  # the recipe's own measure, then retrieval
    assert "different texts" in said
    assert "image → text" in said


def test_paper_settings() -> None:
    hashing, video = cookie_hash.Settings(), cookie_match.VideoSettings()
    assert (hashing.learning_rate, hashing.epochs, hashing.batch_size) == (1e-4, 100, 320)
    assert (hashing.schedule, hashing.decay_every, hashing.decay_factor) == ("every", 10, 0.7)
    assert (hashing.image_pool, hashing.quantisation, hashing.hash_dropout) == ("mean", 0.05, 0.5)
    assert (video.learning_rate, video.epochs, video.batch_size, video.decay_epoch) == (2e-5, 10, 320, 5)
    assert (video.margin, video.image_pool) == (0.2, "mean")


def test_hash_errors_are_of_their_kind(lists: Path) -> None:
    whole = open_captions(lists)
    with pytest.raises(DataError, match=r"\b54\b"):
        database_of(whole, whole)
    with pytest.raises(SettingsError, match=r"\b24\b"):
        cookie_hash.build(settings_of(bits=24), open_captions(lists).split("train"))
