"""Labels of new images and texts: from a model, into a table, and as columns of an index."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest
import small
import torch
from colour_model import ColourModel
from commands import diptych
from label_model import NAMES, label_model

from diptych.data.formats import open_captions
from diptych.data.labels import item_labels
from diptych.errors import SettingsError
from diptych.index.engines.opening import open_index
from diptych.index.ingest.build import index_collection
from diptych.index.query.search import Searcher
from diptych.model.adapter import TorchModel
from diptych.model.retriever import Retriever


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("labels") / "model"
    made = label_model()
    made.branches["labels"].thresholds[:] = torch.tensor([0.57, 0.55])
    made.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    small.pictures(folder, 5)
    (folder / "picture0.txt").write_text("a red dog\nthe cat\n")
    return folder


def test_a_shared_model_comes_back_shared_with_its_labels_and_thresholds(model):
    again, made = Retriever.from_pretrained(model), label_model()
    assert again.image.encoder.blocks is again.text.encoder.blocks
    assert again.image.aggregator is again.text.aggregator
    assert again.branches["labels"].image_head is again.image.aggregator
    assert again.branches["labels"].labels.names == NAMES
    assert again.branches["labels"].thresholds.tolist() == pytest.approx([0.57, 0.55])
    texts = ["a red dog", "tree"]
    assert torch.equal(again.encode_text(texts), made.encode_text(texts))
    assert again.dim == len(NAMES)  # the retrieval embedding is the label prediction
    p = again.encode_text(texts, view="labels")
    assert torch.allclose(torch.nn.functional.normalize(p, dim=1), again.encode_text(texts), atol=1e-6)


def test_labels_are_told_from_the_threshold_on_best_first(model, pictures):
    made = Retriever.from_pretrained(model)
    paths = sorted(pictures.glob("*.png"))
    scores = made.encode_image(paths, view="labels")
    for row, found in zip(scores.tolist(), made.predict_labels(paths), strict=True):
        expected = sorted(((s, n) for s, n in zip(row, NAMES, strict=True) if s >= 0.57), reverse=True)
        assert list(found.items()) == [(n, pytest.approx(s)) for s, n in expected]
    assert all(len(one) == 2 for one in made.predict_labels(paths, top=2))
    assert all(len(one) == 3 for one in made.predict_labels(texts=["the cat"], threshold=0.0))
    assert made.predict_labels(texts=["the cat"], threshold=1.1) == [{}]
    assert made.predict_labels([]) == []
    one = made.predict_labels(texts="the cat", top=9)[0]
    assert list(one.values()) == sorted(one.values(), reverse=True)
    with pytest.raises(SettingsError):
        made.predict_labels()
    with pytest.raises(SettingsError):
        made.predict_labels(paths, texts=["a"])
    del made.branches["labels"]
    with pytest.raises(SettingsError, match="labels"):
        made.predict_labels(paths)


def test_the_command_writes_a_table(model, pictures, tmp_path):
    output = tmp_path / "found.csv"
    done = diptych("label", model, pictures, "--output", output, "--top", "2")
    assert "5 of 5 images and 2 of 2 texts have a label" in done.output
    rows = list(csv.DictReader(output.read_text().splitlines()))
    assert [row["kind"] for row in rows] == ["image"] * 5 + ["text"] * 2
    expected = Retriever.from_pretrained(model).predict_labels(sorted(pictures.glob("*.png")), top=2)
    assert rows[0]["labels"] == ";".join(expected[0])
    assert [float(s) for s in rows[0]["scores"].split(";")] == pytest.approx(
        list(expected[0].values()), abs=1e-3
    )
    assert rows[-1]["text"] == "the cat"
    # the table is a manifest whose labels are read back
    (pictures / "again.csv").write_text(
        "image,labels\n" + "\n".join(f"{r['id']},{r['labels']}" for r in rows[:5]) + "\n"
    )
    assert item_labels(open_captions(pictures / "again.csv"))[0] == tuple(expected[0])
    (pictures / "again.csv").unlink()
    again = diptych("label", model, pictures, "--output", output, "--no_texts", "--threshold", "1")
    assert "0 of 5 images have a label" in again.output
    assert len(output.read_text().splitlines()) == 6


def test_the_table_holds_names_that_are_not_utf8(model, tmp_path):
    (tmp_path / "photos").mkdir()
    small.pictures(tmp_path / "photos", 2)
    (tmp_path / "photos" / "picture0.png").rename(tmp_path / "photos" / os.fsdecode(b"caf\xe9.png"))
    diptych("label", model, tmp_path / "photos", "--output", tmp_path / "found.csv")
    assert "caf\udce9.png" in (tmp_path / "found.csv").read_text("utf-8", "surrogatepass")


def test_the_index_keeps_predicted_labels_as_columns(model, pictures, tmp_path):
    made = TorchModel(Retriever.from_pretrained(model))
    place = tmp_path / "index"
    built = index_collection(made, pictures, place, labels=True)
    assert (built.images, built.texts, built.added) == (5, 2, 5)
    expected = dict(zip([f"picture{n}.png" for n in range(5)], made.predict_labels(
        sorted(pictures.glob("*.png"))), strict=True))  # fmt: skip
    with open_index(place) as index:
        for name, labels in expected.items():
            (item,) = index.get([name])
            assert item is not None
            assert item.metadata["predicted_labels"] == list(labels)
            assert item.metadata["label_scores"] == pytest.approx(list(labels.values()), abs=1e-4)
        (text,) = index.get(["picture0.png#text0"])
        assert text is not None
        assert text.metadata["predicted_labels"] == list(expected["picture0.png"])
        wanted = next(iter(expected["picture0.png"]))
        hits = Searcher(index, made).search(
            "dog", 5, filter=f'predicted_labels contains "{wanted}"', chance=None
        )
        assert set(hits.ids) == {name for name, labels in expected.items() if wanted in labels}
    again = index_collection(made, pictures, place, labels=True)
    assert (again.unchanged, again.updated) == (5, 0)
    without = index_collection(made, pictures, place)  # the columns leave when they are not asked for
    assert without.updated == 5
    with open_index(place) as index:
        (item,) = index.get(["picture1.png"])
        assert item is not None
        assert "predicted_labels" not in item.metadata
    back = index_collection(made, pictures, place, labels=True)
    assert back.updated == 5


def test_a_model_without_labels_cannot_label_an_index(pictures, tmp_path):
    with pytest.raises(SettingsError, match="labels"):
        index_collection(ColourModel(), pictures, tmp_path / "index", labels=True)  # type: ignore[arg-type]


def test_the_index_command_takes_labels(model, pictures, tmp_path):
    diptych("index", model, pictures, "--index", tmp_path / "i", "--labels", "--exact")
    with open_index(tmp_path / "i") as index:
        (item,) = index.get(["picture1.png"])
        assert item is not None
        assert "predicted_labels" in item.metadata
