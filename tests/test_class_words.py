"""The model that needs no training: class probabilities as word vectors."""

from __future__ import annotations

import json
import math
import shutil
from importlib import resources
from pathlib import Path

import pytest
import torch
from commands import diptych, refused
from small import pictures
from torch import Tensor

from diptych.data.readers import emoji
from diptych.encoders.class_words import ClassWords, stored_words
from diptych.encoders.dual import load_dual
from diptych.encoders.encoder import Backbone
from diptych.encoders.known_names import CLASS_WORDS, CLASS_WORDS_FINGERPRINT
from diptych.errors import SettingsError
from diptych.index.engines.opening import open_index
from diptych.model.retriever import Retriever
from diptych.types import as_inputs


class Cells(Backbone):
    """Pixels as two cells."""

    channels = 6

    def __init__(self) -> None:
        super().__init__(size=2, mean=(0.5,) * 3, std=(0.5,) * 3)

    def forward(self, pixels: Tensor) -> Tensor:
        return pixels.reshape(len(pixels), 2, 6)


@pytest.fixture(scope="module")
def untrained() -> Retriever:
    return Retriever.from_pretrained(CLASS_WORDS)


def conse(side: ClassWords, cells: Tensor, mutation: float = 1.0) -> list[list[float]]:
    """f(x) = Σ_c p_c s_c by loops, in float64."""
    rows = []
    for image in cells.double().tolist():
        mean = [sum(cell[i] for cell in image) / len(image) for i in range(len(image[0]))]
        logits = [
            sum(w * x for w, x in zip(weights, mean, strict=True)) + bias
            for weights, bias in zip(
                side.classifier.weight.double().tolist(), side.classifier.bias.double().tolist(), strict=True
            )
        ]
        powers = [math.exp(logit / (side.class_temperature * mutation)) for logit in logits]
        words = side.words.double().tolist()
        rows.append(
            [
                sum(power / sum(powers) * word[d] for power, word in zip(powers, words, strict=True))
                for d in range(side.dim)
            ]
        )
    return rows


def test_a_picture_is_the_mean_of_its_classes_words() -> None:
    torch.manual_seed(0)
    side = ClassWords(Cells(), classes=5, dim=4, class_temperature=0.5)
    torch.nn.init.normal_(side.words)
    pixels = torch.randn(3, 3, 2, 2)
    found = side(pixels)
    assert found.values.shape == (3, 1, 4)
    expected = torch.tensor(conse(side, pixels.reshape(3, 2, 6)), dtype=torch.float64)
    torch.testing.assert_close(found.values[:, 0].double(), expected, atol=1e-6, rtol=1e-5)
    wrong = torch.tensor(conse(side, pixels.reshape(3, 2, 6), mutation=2.0), dtype=torch.float64)
    assert not torch.allclose(found.values[:, 0].double(), wrong, atol=1e-3)
    torch.testing.assert_close(side(found).values, found.values)  # vectors computed before pass


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"class_temperature.*\b0\b"):
        ClassWords(Cells(), classes=5, dim=4, class_temperature=0)
    with pytest.raises(SettingsError, match=r"lite0\+minilm"):
        load_dual(CLASS_WORDS, lora=4)


def class_names() -> list[str]:
    """The names of ImageNet's 1,000 classes, in the classifier's order, as they lie beside the stored words."""
    text = resources.files("diptych.encoders").joinpath("imagenet_classes.txt").read_text("utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def test_the_names_are_those_of_imagenet() -> None:
    names = class_names()
    assert len(names) == 1000
    assert (names[0], names[88], names[281], names[999]) == ("tench", "macaw", "tabby cat", "toilet paper")


def test_the_stored_words_are_those_of_the_text_encoder(untrained: Retriever) -> None:
    words, _ = stored_words()
    seen = as_inputs(untrained.text_input([f"a photo of a {name}" for name in class_names()[:6]]))
    with torch.inference_mode():
        computed = untrained.text.encoder(seen).values[:, 0]
    torch.testing.assert_close(computed, words[:6], atol=2e-3, rtol=0)


def test_things_that_imagenet_knows_are_found(untrained: Retriever) -> None:
    data = emoji.read()
    wanted = ["strawberry", "ambulance", "umbrella", "violin", "banana"]
    rows = [next(i for i, text in data if text == word) for word in wanted]
    images = untrained.encode_image([data.images[row] for row in rows])
    scores = untrained.similarity(untrained.encode_text(wanted), images)
    assert scores.argmax(dim=1).tolist() == list(range(len(wanted)))


def test_the_model_is_saved_and_loaded(untrained: Retriever, tmp_path: Path) -> None:
    picture = pictures(tmp_path / "photos", count=1)[0]
    untrained.save_pretrained(tmp_path / "model")
    again = Retriever.from_pretrained(tmp_path / "model")
    assert again.fingerprint() == untrained.fingerprint()
    torch.testing.assert_close(again.encode_image(picture), untrained.encode_image(picture))
    torch.testing.assert_close(again.encode_text("a parrot"), untrained.encode_text("a parrot"))


def test_photos_are_indexed_and_searched_without_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures(tmp_path / "photos", count=3)
    monkeypatch.chdir(tmp_path)
    assert "3 images" in diptych("index", "./photos").stdout
    with open_index("photos.index") as index:
        assert (index.info.model, index.info.fingerprint) == (CLASS_WORDS, CLASS_WORDS_FINGERPRINT)
    with monkeypatch.context() as patch:  # a new index finds the runtime again: nothing is loaded with torch
        patch.setattr("diptych.model.retriever.Retriever.from_pretrained", pytest.fail)
        diptych("index", "./photos", "--index", "other")
    beside = json.loads(diptych("search", "photos.index", "two parrots", "--all", "--json").stdout)["hits"]
    assert len(beside) == 3
    pictures(tmp_path / "photos" / "more", count=1)  # a search of the folder sees what is new
    assert len(json.loads(diptych("search", "photos", "two parrots", "--all", "--json").stdout)["hits"]) == 4


def test_a_folder_without_an_index_is_indexed_by_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures(tmp_path / "photos", count=2)
    monkeypatch.chdir(tmp_path)
    assert len(json.loads(diptych("search", "./photos", "a dog", "--all", "--json").stdout)["hits"]) == 2
    assert (tmp_path / "photos.index").is_dir()


def test_an_index_keeps_the_model_it_was_made_with(
    untrained: Retriever, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures(tmp_path / "photos", count=2)
    monkeypatch.chdir(tmp_path)
    untrained.save_pretrained("model")
    diptych("index", "model", "photos")
    assert "2 unchanged" in diptych("index", "photos").stdout
    with open_index("photos.index") as index:
        assert index.info.model == str(tmp_path / "model")
    shutil.rmtree("model")
    assert "--model" in refused("search", "photos", "a dog")


def test_what_is_no_collection_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert "empty" in refused("search", "empty", "a dog")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    assert "run " in refused("index", "run")
    assert CLASS_WORDS in refused("index", CLASS_WORDS)
    assert "leave out c" in refused("index", "a", "b", "c")
