"""Dual encoders of open_clip, behind the extra ``open-clip`` (which needs torchvision; nothing else here does)."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn

from diptych.data.processors import ProcessedPixels
from diptych.data.text import CHUNK, TextInput, tokenizer_state
from diptych.data.text_inputs import FixedTexts
from diptych.encoders.dual_side import DualImageSide, DualSide
from diptych.encoders.encoder import check_stored, text_inputs
from diptych.encoders.known_names import OPEN_CLIP, OPEN_CLIP_CONFIG
from diptych.encoders.pretrained import free_name, import_package
from diptych.entries import MODEL
from diptych.errors import DataError, DiptychError, SettingsError, reason_of
from diptych.parts import content_digest, part
from diptych.progress import track
from diptych.storage import parse_json
from diptych.types import Features, Inputs

FORMS = "open_clip:ARCHITECTURE/WEIGHTS, open_clip:hf-hub:ID or open_clip:FOLDER"


class _OpenClipSide(DualSide):
    """One side of a model of open_clip; ``config`` is what its open_clip_config.json says."""

    config: dict[str, Any]

    def save_assets(self, folder: Path) -> dict[str, object]:
        return {"source": _save(self.config, folder), "pretrained": False}

    def content_arguments(self) -> dict[str, object]:
        return {"source": _digest(self.config["model_cfg"]), "pretrained": False}


@part
class OpenClipImage(_OpenClipSide, DualImageSide):
    """The image side: pixels (B, 3, H, W) → Features (B, 1, dim), the vector of ``encode_image``.

    ``source`` is a name in one of the three forms, a folder with open_clip_config.json, or the loaded model.
    """

    def __init__(
        self, source: str | Path | nn.Module, trainable: bool = True, pretrained: bool = True
    ) -> None:
        super().__init__()
        model, self.config = _open_model(source, pretrained)
        self.model: nn.Module = model.visual
        self.dim = int(self.config["model_cfg"]["embed_dim"])
        bias = getattr(model, "logit_bias", None)
        self.keep_scale(model.logit_scale.item(), 0.0 if bias is None else bias.item())
        self.let_train(trainable)

    def forward(self, inputs: Inputs) -> Features:
        if isinstance(inputs, Features):
            return check_stored(inputs, self.dim, "vectors")
        pooled: Tensor = self.model(inputs)
        return Features.whole(pooled[:, None])


@part
class OpenClipText(_OpenClipSide):
    """The text side: token ids (B, W), W the whole context, → Features (B, 1, dim), the vector of ``encode_text``."""

    def __init__(
        self, source: str | Path | nn.Module, trainable: bool = True, pretrained: bool = True
    ) -> None:
        super().__init__()
        model, self.config = _open_model(source, pretrained)
        if hasattr(model, "visual"):
            del model.visual
        self.model = model
        for name in ("logit_scale", "logit_bias"):  # the image side keeps them
            if isinstance(getattr(model, name, None), nn.Parameter):
                delattr(model, name)
        self.dim = int(self.config["model_cfg"]["embed_dim"])
        self.let_train(trainable)

    def forward(self, inputs: Inputs) -> Features:
        texts = text_inputs(inputs)
        if not texts.is_ids:
            return check_stored(texts, self.dim, "vectors")
        pooled: Tensor = self.model.encode_text(texts.values)
        return Features.whole(pooled[:, None])


@part
class OpenClipTokens(TextInput):
    """Token ids (M, context) of an open_clip model's own tokenizer."""

    def __init__(self, source: str | Path) -> None:
        self.config = _read_config(source)
        library = _open_clip()
        with _quiet(source):
            self.tokenizer = library.get_tokenizer(_names(source)[0])

    def prepare(self, texts: Sequence[str], *, show_progress: bool = False) -> FixedTexts:
        ids = np.zeros((len(texts), int(self.tokenizer.context_length)), dtype=np.int32)
        for start in track(range(0, len(texts), CHUNK), "reading texts", show=show_progress):
            ids[start : start + CHUNK] = self.tokenizer(list(texts[start : start + CHUNK])).numpy()
        return FixedTexts(ids, np.ones(ids.shape, dtype=bool))

    def save_assets(self, folder: Path) -> dict[str, Any]:
        name = _save(self.config, folder)
        if hasattr(self.tokenizer, "save_pretrained"):
            self.tokenizer.save_pretrained(folder / name)
        return {"source": name}

    def content_arguments(self) -> dict[str, Any]:
        inner = getattr(self.tokenizer, "tokenizer", None)
        pieces = "" if inner is None else tokenizer_state(inner)
        return {"source": _digest([self.config["model_cfg"]["text_cfg"], pieces])}


def _save(config: dict[str, Any], folder: Path) -> str:
    name = free_name(folder, "open_clip")
    (folder / name).mkdir()
    MODEL.write(folder / name / OPEN_CLIP_CONFIG, json.dumps(config, indent=2))
    return name


def load_open_clip(source: str | Path) -> tuple[OpenClipImage, OpenClipText, ProcessedPixels, OpenClipTokens]:
    """Both sides of a model with pretrained weights, and its inputs."""
    texts = OpenClipTokens(source)
    model, config = _open_model(source, pretrained=True)
    model.diptych_config = config
    pixels = _pixels(_open_clip(), model, str(source))
    image = OpenClipImage(model)  # before the text side, which lets go of the image side
    return image, OpenClipText(model), pixels, texts


def _pixels(library: ModuleType, model: nn.Module, source: str) -> ProcessedPixels:
    """Its evaluation transform, step by step."""
    numbers = library.get_model_preprocess_cfg(model)
    size = numbers["size"]
    sides = [size, size] if isinstance(size, int) else list(size)
    colours: dict[str, Any] = {name: list(numbers[name]) for name in ("mean", "std")}
    colours["resample"] = 2 if numbers["interpolation"] == "bilinear" else 3
    if numbers["resize_mode"] == "squash":
        return ProcessedPixels(sides, **colours)
    if numbers["resize_mode"] != "shortest" or sides[0] != sides[1]:
        raise SettingsError(f"{source} resizes pictures by the longest side: choose a model that crops them.")
    return ProcessedPixels(sides[0], sides, centre="round", **colours)


def _open_model(source: str | Path | nn.Module, pretrained: bool) -> tuple[Any, dict[str, Any]]:
    if isinstance(source, nn.Module):
        return source, source.diptych_config  # type: ignore[return-value]
    library, config = _open_clip(), _read_config(source)
    name, tag = _names(source)
    with _quiet(source):
        weights: dict[str, Any] = {"load_weights": pretrained, "require_pretrained": pretrained}
        model = library.create_model(name, pretrained=tag, pretrained_text=False, **weights)
    if not isinstance(model, library.CLIP | library.CustomTextCLIP):
        raise SettingsError(f"{source} is a {type(model).__name__}, not a dual encoder: choose another.")
    return model, config


def _read_config(source: str | Path) -> dict[str, Any]:
    """``{"model_cfg": …}`` of a name or folder."""
    library = _open_clip()
    name = _names(source)[0]
    with _quiet(source):
        if name.startswith("local-dir:"):
            path = Path(name.removeprefix("local-dir:")) / OPEN_CLIP_CONFIG
            MODEL.check_below(path.parent)  # open_clip opens the weights
            return {"model_cfg": parse_json(MODEL.read(path))["model_cfg"]}
        if name.startswith("hf-hub:"):
            from open_clip.factory import _get_hf_config

            return {"model_cfg": _get_hf_config(name.removeprefix("hf-hub:"))["model_cfg"]}
        found = library.get_model_config(name)
    if found is None:
        raise SettingsError(f"open_clip has no model '{name}': give {FORMS}.")
    return {"model_cfg": found}


def _names(source: str | Path) -> tuple[str, str | None]:
    """The name open_clip's factory knows, and the tag of the weights."""
    name = str(source).removeprefix(OPEN_CLIP)
    if name.startswith(("hf-hub:", "local-dir:")):
        return name, None
    if (Path(name) / OPEN_CLIP_CONFIG).is_file():
        return f"local-dir:{name}", None
    if "/" not in name:
        raise SettingsError(f"'{name}' names no weights: give {FORMS}.")
    architecture, tag = name.split("/", 1)
    return architecture, tag


def _digest(value: Any) -> str:
    return content_digest(json.dumps(value, sort_keys=True))


@contextmanager
def _quiet(source: str | Path) -> Iterator[None]:
    """No log lines of open_clip, and one sentence where it fails."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    except DiptychError:
        raise
    except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
        reason = reason_of(error, 160)
        raise DataError(f"open_clip cannot open '{source}' ({reason}): check name and network.") from error
    finally:
        logging.disable(before)


def _open_clip() -> ModuleType:
    return import_package("open_clip", "open_clip_torch", "open-clip", "an open_clip: model")
