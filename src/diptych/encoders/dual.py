"""Pretrained dual encoders by name: what ``hf:ID``, ``open_clip:NAME``, ``lite0+minilm`` or a folder stands for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from diptych.data.images import ImageInput
from diptych.data.text import TextInput
from diptych.encoders.dual_side import DualImageSide, DualSide
from diptych.encoders.known_names import CLASS_WORDS, is_open_clip, is_pretrained_name
from diptych.entries import MODEL
from diptych.errors import SettingsError
from diptych.storage import parse_json


@dataclass(frozen=True)
class DualEncoder:
    """Both sides of a dual encoder and the inputs they read."""

    image: DualImageSide
    text: DualSide
    image_input: ImageInput
    text_input: TextInput


def is_dual_encoder(source: str | Path) -> bool:
    """Whether ``load_dual`` opens it: a name, or a folder in the format of transformers or open_clip."""
    if is_pretrained_name(source) or is_open_clip(source):
        return True
    try:
        config = parse_json(MODEL.read(Path(source) / "config.json"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "model_type" in config


def load_dual(source: str | Path, *, local: bool = False, lora: int = 0) -> DualEncoder:
    """A pretrained dual encoder with its own inputs.

    With ``local`` also the vectors of patches and words; with ``lora`` adapters of that rank, which alone are trained.
    """
    untrained = str(source) == CLASS_WORDS
    if untrained or is_open_clip(source):
        if local or lora:
            wanted = "local features" if local else "adapters for LoRA"
            other = "a CLIP model, as in hf:ID" if untrained else "the hf: form of the model"
            raise SettingsError(f"{source} has no {wanted}: use {other}.")
        if untrained:
            from diptych.encoders.class_words import load_class_words

            return DualEncoder(*load_class_words())
        from diptych.encoders.open_clip_models import load_open_clip

        return DualEncoder(*load_open_clip(source))
    from diptych.encoders import clip

    images, texts = clip.clip_inputs(source)  # first: small files, and most mistakes
    model = clip.load_clip(source)
    image = clip.ClipImage(model, local=local, lora=lora)
    return DualEncoder(image, clip.ClipText(model, local=local, lora=lora), images, texts)
