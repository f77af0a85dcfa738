"""open_clip's models, where open_clip can be imported; the sentences where it cannot."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from diptych.encoders.dual import is_dual_encoder, load_dual
from diptych.encoders.known_names import recorded_name
from diptych.errors import MissingExtra, SettingsError
from diptych.model.retriever import Retriever
from diptych.types import as_inputs

TEXTS = ["a red dog", "The BIG, dark cat sits under a tree!", "bird"]
MODEL = {
    "embed_dim": 12,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 64, "head_width": 32, "patch_size": 8},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}


def pictures() -> list[Image.Image]:
    rng = np.random.default_rng(0)
    sizes = [(48, 48), (61, 33), (20, 75), (33, 32)]
    return [Image.fromarray(rng.integers(0, 255, (h, w, 3)).astype(np.uint8)) for w, h in sizes]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small model in open_clip's own format, where open_clip can be imported."""
    try:
        import open_clip
    except (ImportError, RuntimeError):
        pytest.skip("open_clip needs a torchvision of this torch")
    from safetensors.torch import save_file

    torch.manual_seed(0)
    model = open_clip.CLIP(**MODEL)
    made = tmp_path / "open"
    made.mkdir()
    (made / "open_clip_config.json").write_text(
        json.dumps({"model_cfg": MODEL, "preprocess_cfg": {"size": 32}})
    )
    save_file(model.state_dict(), made / "open_clip_model.safetensors")
    return made


def test_outputs_equal_those_of_open_clip(folder: Path, tmp_path: Path) -> None:
    import open_clip

    model, _, transform = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    tokens = open_clip.get_tokenizer(f"local-dir:{folder}")(TEXTS)
    pixels = torch.stack([transform(picture) for picture in pictures()])
    with torch.no_grad():
        model.eval()
        image, text = model.encode_image(pixels), model.encode_text(tokens)
        logits = model.get_logits(pixels, tokens)[0]
    dual = load_dual(f"open_clip:{folder}")
    assert torch.allclose(as_inputs(dual.image_input(pictures())), pixels, atol=1e-5)
    assert torch.equal(as_inputs(dual.text_input(TEXTS)).values, tokens)
    retriever = Retriever.from_pretrained(folder)
    with torch.no_grad():
        assert torch.allclose(retriever.image.encoder(pixels).values[:, 0], image, atol=1e-5)
        assert torch.allclose(
            retriever.text.encoder(as_inputs(dual.text_input(TEXTS))).values[:, 0], text, atol=1e-5
        )
    found = retriever.similarity(retriever.encode_image(pictures()), retriever.encode_text(TEXTS))
    assert torch.allclose(retriever.image.encoder.logits(found), logits, atol=1e-4)

    retriever.save_pretrained(tmp_path / "saved")
    again = Retriever.from_pretrained(tmp_path / "saved")
    assert torch.equal(again.encode_text(TEXTS), retriever.encode_text(TEXTS))
    assert torch.equal(again.encode_image(pictures()), retriever.encode_image(pictures()))
    assert again.fingerprint() == retriever.fingerprint()


def test_names_of_open_clip(tmp_path: Path) -> None:
    assert is_dual_encoder("open_clip:ViT-B-32/laion2b_s34b_b79k")
    assert recorded_name("open_clip:ViT-B-32/laion2b_s34b_b79k") == "open_clip:ViT-B-32/laion2b_s34b_b79k"
    assert recorded_name(f"open_clip:{tmp_path}") == str(tmp_path)


def test_an_architecture_without_weights_is_refused(folder: Path) -> None:
    with pytest.raises(SettingsError, match="'ViT-B-32'"):
        load_dual("open_clip:ViT-B-32")
    with pytest.raises(SettingsError, match="'ViT-Z'"):
        load_dual("open_clip:ViT-Z/openai")


def test_open_clip_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "open_clip", raising=False)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(MissingExtra, match=r"diptych\[open-clip\]"):
        load_dual("open_clip:ViT-B-32/openai")
