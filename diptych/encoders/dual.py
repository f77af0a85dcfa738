"""Pretrained dual encoders by name: what ``hf:ID``, ``open_clip:NAME`` or a folder of transformers stands for."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from diptych.data.images import ImageInput
from diptych.data.text import TextInput
from diptych.encoders import clip
from diptych.encoders.clip import ClipImage, ClipText
from diptych.encoders.pretrained import PREFIX

PREFIXES = (PREFIX,)


@dataclass(frozen=True)
class DualEncoder:
    """Both sides of a dual encoder and the inputs they read."""

    image: ClipImage
    text: ClipText
    image_input: ImageInput
    text_input: TextInput


def is_pretrained_name(source: str | Path) -> bool:
    """Whether a model is called by a name of a hub or library rather than by a path: ``hf:ID``."""
    return str(source).startswith(PREFIXES)


def is_dual_encoder(source: str | Path) -> bool:
    """Whether ``load_dual`` opens it: a name, or a folder in the format of transformers."""
    if is_pretrained_name(source):
        return True
    try:
        config = json.loads((Path(source) / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "model_type" in config


def recorded_name(source: str | Path) -> str:
    """The name under which an index finds a model again: names as they are, folders as absolute paths."""
    folder = Path(str(source).removeprefix(PREFIX)).expanduser()
    if is_pretrained_name(source) and not folder.is_dir():
        return str(source)
    return str(folder.resolve())


def load_dual(source: str | Path, *, trainable: bool = True, local: bool = False) -> DualEncoder:
    """A pretrained dual encoder with its own inputs; see ``ClipImage`` for ``local``."""
    images, texts = clip.clip_inputs(source)  # first: small files, and most mistakes
    model = clip.load_clip(source)
    image = ClipImage(model, trainable=trainable, local=local)
    return DualEncoder(image, ClipText(model, trainable=trainable, local=local), images, texts)
