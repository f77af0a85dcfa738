from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dual_folders import FOLDERS, clip_folder
from PIL import Image
from small import bert_folder
from small import pictures as small_pictures
from torch import Tensor

from diptych.data.formats import open_captions
from diptych.data.text_inputs import FixedLengthInput
from diptych.encoders.clip import ClipImage, ClipText, clip_inputs
from diptych.encoders.dual import is_dual_encoder, load_dual
from diptych.encoders.known_names import recorded_name
from diptych.encoders.pretrained import _not_found, quiet
from diptych.errors import DataError, MissingExtra
from diptych.model.retriever import Retriever
from diptych.parts import describe, rebuild
from diptych.types import Features, as_inputs

TEXTS = [
    "a red dog",
    "The BIG, dark cat sits under a tree!",
    "bird",
    "a dog and a cat near the house, 12 cars",
]
SIZES = [(48, 48), (61, 33), (20, 75), (33, 32)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory):
    """Folders of tiny dual encoders, saved on first use."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = FOLDERS[name](tmp_path_factory.mktemp("dual") / name)
        return made[name]

    return folder


def pictures() -> list[Image.Image]:
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 255, (h, w, 3)).astype(np.uint8)) for w, h in SIZES]


def published(folder: Path, name: str) -> dict[str, Tensor]:
    """What transformers makes of the same pictures and texts, its own processor and tokenizer included."""
    from transformers import (
        AutoModel,
        AutoTokenizer,
        CLIPImageProcessorPil,
        Siglip2ImageProcessorPil,
        SiglipImageProcessorPil,
    )

    kinds = {
        "clip": CLIPImageProcessorPil,
        "siglip": SiglipImageProcessorPil,
        "siglip2": Siglip2ImageProcessorPil,
    }
    with quiet():
        model = AutoModel.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    padding: dict[str, Any] = {"padding": True}
    if name != "clip":
        padding = {"padding": "max_length", "max_length": model.config.text_config.max_position_embeddings}
    words = tokenizer(TEXTS, truncation=True, return_tensors="pt", **padding)
    if name != "clip":
        assert set(words) == {"input_ids"}  # padding is attended to
    seen = kinds[name].from_pretrained(folder)(images=pictures(), return_tensors="pt")
    with torch.no_grad():
        out = model(**words, **seen)
        return {
            "image": model.get_image_features(**seen).pooler_output,
            "text": model.get_text_features(**words).pooler_output,
            "logits": out.logits_per_image,
            "pixels": seen["pixel_values"],
        }


@pytest.mark.parametrize("name", list(FOLDERS))
def test_outputs_equal_those_of_transformers(name: str, folders) -> None:
    expected = published(folders(name), name)
    dual = load_dual(folders(name))
    dual.image.eval(), dual.text.eval()
    with torch.no_grad():
        image = dual.image(as_inputs(dual.image_input(pictures())))
        text = dual.text(as_inputs(dual.text_input(TEXTS)))
    assert image.values.shape == (len(SIZES), 1, dual.image.dim)
    assert torch.allclose(image.values[:, 0], expected["image"], atol=1e-5)
    assert torch.allclose(text.values[:, 0], expected["text"], atol=1e-5)

    retriever = Retriever.from_pretrained(folders(name))
    scores = retriever.similarity(retriever.encode_image(pictures()), retriever.encode_text(TEXTS))
    assert torch.allclose(retriever.image.encoder.logits(scores), expected["logits"], atol=1e-4)
    assert expected["logits"].std() > 1e-2  # else agreeing would mean nothing


@pytest.mark.parametrize("model_type", ["siglip2", "siglip"])  # NaFlex, and models of one resolution
def test_siglip_2_reads_mixed_case_as_its_published_tokenizer(model_type: str, tmp_path: Path) -> None:
    """The hub's files name Gemma's tokenizer, which keeps the case; the model was trained on lower-cased texts."""
    from transformers import Siglip2Tokenizer

    folder = FOLDERS["siglip2"](tmp_path / "model")
    expected = Siglip2Tokenizer.from_pretrained(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    for file, changes in (
        ("tokenizer_config.json", {"tokenizer_class": "GemmaTokenizer"}),
        ("config.json", {"model_type": model_type}),
    ):
        content = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**content, **changes}))
    texts = ["A Red DOG", "a red dog", "ΟΔΟΣ 9", "İstanbul"]
    _, inputs = clip_inputs(folder)
    found = inputs(texts).values
    ids = expected(texts, padding="max_length", max_length=24, truncation=True)["input_ids"]
    assert found.tolist() == ids
    assert found[0].tolist() == found[1].tolist()
    rebuilt = rebuild(describe(inputs, tmp_path / "saved"), tmp_path / "saved")
    assert rebuilt(texts).values.tolist() == ids


def test_a_fixed_length_saved_before_keeps_the_case(folders) -> None:
    described = describe(FixedLengthInput(folders("siglip2"), 24))
    assert "lower" not in described


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_pixels_equal_those_of_the_published_processor(name: str, folders) -> None:
    images, _ = clip_inputs(folders(name))
    pixels = as_inputs(images(pictures()))
    assert isinstance(pixels, Tensor)
    assert torch.allclose(pixels, published(folders(name), name)["pixels"], atol=1e-6)


def test_patches_equal_those_of_the_published_processor(folders) -> None:
    images, _ = clip_inputs(folders("siglip2"))
    patches, expected = as_inputs(images(pictures())), published(folders("siglip2"), "siglip2")["pixels"]
    assert isinstance(patches, Features)
    for row, size in enumerate(patches.sizes.tolist()):
        assert torch.allclose(patches.values[row, :size, :-2], expected[row, :size], atol=1e-6)
        height, width = patches.values[row, 0, -2:].tolist()
        assert height * width == size


@pytest.mark.parametrize("name", list(FOLDERS))
def test_a_text_does_not_depend_on_its_neighbours(name: str, folders) -> None:
    retriever = Retriever.from_pretrained(folders(name))
    together = retriever.encode_text(TEXTS)
    alone = torch.cat([retriever.encode_text(text) for text in TEXTS])
    assert torch.allclose(together, alone, atol=1e-6)


@pytest.mark.parametrize("name", list(FOLDERS))
def test_local_features_follow_the_pooled_vector(name: str, folders) -> None:
    plain, local = load_dual(folders(name)), load_dual(folders(name), local=True)
    for side in (plain.image, plain.text, local.image, local.text):
        side.eval()
    with torch.no_grad():
        pixels, ids = as_inputs(plain.image_input(pictures())), as_inputs(plain.text_input(TEXTS))
        image, text = local.image(pixels), local.text(ids)
        assert torch.equal(image.values[:, :1], plain.image(pixels).values)
        assert torch.equal(text.values[:, :1], plain.text(ids).values)
    assert image.values.shape[1] > 2
    assert text.values.shape[1] == 1 + ids.values.shape[1]
    assert torch.equal(text.mask[:, 1:], ids.mask)


def test_local_words_are_projected_as_the_pooled_one_is(folders) -> None:
    local = load_dual(folders("clip"), local=True)
    ids = as_inputs(local.text_input(TEXTS))
    with torch.no_grad():
        words = local.text.eval()(ids)
    ends = ids.mask.sum(dim=1)  # the end token, one further on since the pooled vector comes first
    for row, end in enumerate(ends.tolist()):
        assert torch.allclose(words.values[row, end], words.values[row, 0], atol=1e-6)


@pytest.mark.parametrize("name", list(FOLDERS))
def test_a_saved_model_needs_its_source_no_longer(name: str, folders, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(folders(name), source)
    retriever = Retriever.from_pretrained(f"hf:{source}")
    before = retriever.encode_image(pictures()), retriever.encode_text(TEXTS)
    retriever.save_pretrained(tmp_path / "saved")
    shutil.rmtree(source)
    again = Retriever.from_pretrained(tmp_path / "saved")
    assert torch.equal(again.encode_image(pictures()), before[0])
    assert torch.equal(again.encode_text(TEXTS), before[1])
    assert again.fingerprint() == retriever.fingerprint()
    assert again.image.encoder.temperature == retriever.image.encoder.temperature


def test_the_logit_scale_is_the_temperature_training_goes_on_from(folders) -> None:
    from transformers import AutoModel

    with quiet():
        scale = AutoModel.from_pretrained(folders("clip")).logit_scale.exp().item()
    assert ClipImage(folders("clip")).temperature == pytest.approx(1 / scale)


def test_frozen_sides_stay_in_evaluation_mode_and_read_stored_vectors(folders) -> None:
    dual = load_dual(folders("clip"))
    for side in (dual.image, dual.text):
        side.let_train(False)
        side.train()
        assert not any(p.requires_grad for p in side.parameters())
        assert not side.model.training
        stored = Features.whole(torch.randn(2, 1, side.dim))
        assert side(stored) is stored
        with pytest.raises(DataError, match=r"\b13\b"):
            side(Features.whole(torch.randn(2, 1, side.dim + 1)))
        side.let_train(True)
        assert side.model.training
        assert all(p.requires_grad for p in side.parameters())


def test_vectors_of_a_frozen_side_are_computed_once(folders, tmp_path: Path) -> None:
    from diptych.training.prepare import prepare

    photos = tmp_path / "photos"
    lines = [f"{path.name}\ta red dog" for path in small_pictures(photos, 3)]
    (photos / "captions.tsv").write_text("\n".join(["image\ttext", *lines]))
    captions = open_captions(str(photos))
    retriever = Retriever.from_pretrained(folders("clip"))
    expected = retriever.encode_image(captions.images)
    retriever.image.encoder.let_train(False)
    ready = prepare(retriever, captions, show_progress=False)
    assert ready.captions.images[0].shape == (1, 12)
    assert torch.allclose(retriever.encode_image(ready.captions.images), expected, atol=2e-3)  # float16


def test_training_moves_every_weight_of_both_sides(folders) -> None:
    dual = load_dual(folders("clip"))
    image, text = (
        dual.image(as_inputs(dual.image_input(pictures()))),
        dual.text(as_inputs(dual.text_input(TEXTS))),
    )
    (image.values.square().sum() + text.values.square().sum()).backward()
    for name, parameter in [*dual.image.named_parameters(), *dual.text.named_parameters()]:
        assert parameter.grad is not None, name
        # a softmax over keys does not feel what all of them have in common
        assert parameter.grad.any() or name.endswith("k_proj.bias"), name


def test_transparent_and_grey_pictures_are_read(folders) -> None:
    retriever = Retriever.from_pretrained(folders("clip"))
    rows = [Image.new("RGBA", (40, 40), (255, 0, 0, 0)), Image.new("L", (40, 40), 255)]
    vectors = retriever.encode_image(rows)
    assert torch.allclose(vectors[0], vectors[1], atol=1e-6)  # both are white


# ---------------------------------------------------------------------------------------------- bad input


def test_a_folder_without_its_tokenizer_is_refused(folders, tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    shutil.copytree(folders("clip"), folder)
    for file in folder.glob("*token*"):
        file.unlink()
    for file in ("vocab.json", "merges.txt"):
        (folder / file).unlink(missing_ok=True)
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        Retriever.from_pretrained(folder)


def test_a_folder_without_its_image_processor_is_refused(folders, tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    shutil.copytree(folders("clip"), folder)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(DataError, match=r"preprocessor_config\.json"):
        Retriever.from_pretrained(folder)


def test_a_tokenizer_of_another_model_is_refused(folders, tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    shutil.copytree(folders("clip"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["vocab_size"] = 20
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=r"\b20\b"):
        Retriever.from_pretrained(folder)


def test_missing_weights_are_refused(folders, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "holes"
    shutil.copytree(folders("clip"), folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["visual_projection.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match=r"\b1\b"):
        Retriever.from_pretrained(folder)


def test_a_text_encoder_alone_is_no_dual_encoder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="bert"):
        Retriever.from_pretrained(bert_folder(tmp_path / "bert"))


def test_siglip_needs_sentencepiece(folders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych.encoders.clip.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"diptych\[siglip\]"):
        clip_inputs(folders("siglip"))


def test_a_hub_id_without_network_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="nobody/clip"):
        Retriever.from_pretrained("hf:nobody/clip")


def test_retries_of_the_hub_are_not_printed() -> None:
    hub = logging.getLogger("huggingface_hub")
    before = hub.level
    with quiet():
        assert not hub.isEnabledFor(logging.WARNING)
    assert hub.level == before


def test_the_reason_of_a_missing_model_is_a_whole_sentence() -> None:
    unreachable = OSError(
        "We couldn't connect to 'HUB' to load the files. Check your internet connection or " * 3
    )
    assert "cannot be reached: run 'hf download a/b' where it can" in _not_found("a/b", unreachable)
    assert "(no file config.json): give" in _not_found(
        "", OSError("no file config.json. See the docs at ...")
    )


def test_names_and_folders_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = clip_folder(tmp_path / "clip")
    monkeypatch.chdir(tmp_path)
    assert is_dual_encoder("hf:openai/clip-vit-base-patch32")
    assert is_dual_encoder("clip")
    assert not is_dual_encoder(tmp_path)
    assert recorded_name("hf:openai/clip-vit-base-patch32") == "hf:openai/clip-vit-base-patch32"
    assert recorded_name("clip") == recorded_name("hf:clip") == str(folder)


def test_text_sides_refuse_pictures(folders) -> None:
    with pytest.raises(DataError):
        ClipText(folders("clip"))(torch.zeros(1, 3, 8, 8))
