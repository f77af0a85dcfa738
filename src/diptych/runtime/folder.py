"""The folder ``runtime/`` of a model: what lies in it, where it is found, and what ``runtime.json`` says.

::

    MODEL/
      config.json  model.safetensors  …     the model itself, for the workbench
      probes.safetensors                    a few pictures and texts with the model's own vectors
      runtime/
        runtime.json                        what this page describes as ``Facts``
        image.onnx                          pixels, or sets and their mask → vectors
        backbone.onnx                       pixels → the cells that image.onnx reads; only where a backbone is frozen
        text.onnx                           token ids and their mask → vectors
        tokenizer.json or vocabulary.json   how a text becomes token ids

A model folder that cannot be written has its runtime in the user's cache, in a folder named after the fingerprint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from diptych.errors import RuntimeFault
from diptych.storage import cache_folder, parse_json, recover_folder

FORMAT = 1  # version of runtime.json; raised when an old runtime can no longer be run
FOLDER, FACTS, PROBES = "runtime", "runtime.json", "probes.safetensors"
IMAGE, BACKBONE, TEXT = "image.onnx", "backbone.onnx", "text.onnx"
TOKENIZER, VOCABULARY = "tokenizer.json", "vocabulary.json"
CACHED = "runtimes"  # folder of the cache
MODEL_FILES = ("config.json", "model.safetensors")
PIECE = 2**20  # bytes hashed at a time


@dataclass(frozen=True)
class Facts:
    """What ``runtime.json`` says.

    ``fingerprint`` and ``dimension`` are the model's. ``images`` describes the ``ImageInput``; ``texts`` says how texts
    become ids (``runtime.texts``). ``largest`` is how many elements a set of a side may have (None: any number).
    ``backbone`` is the fingerprint of the frozen backbone whose cells ``image.onnx`` reads. ``labels`` are the names,
    the thresholds of images and texts, and the view of a model that predicts labels. ``files`` gives bytes and SHA-256
    of each file in ``runtime/``, ``model`` those of the model's own files.
    """

    fingerprint: str
    dimension: int
    images: dict[str, Any]
    texts: dict[str, Any]
    largest: dict[str, int | None] = field(default_factory=dict)
    backbone: str | None = None
    labels: dict[str, Any] | None = None
    files: dict[str, list[Any]] = field(default_factory=dict)
    model: dict[str, list[Any]] = field(default_factory=dict)
    precision: str = "float32"
    format: int = FORMAT

    def save(self, folder: Path) -> None:
        """Write ``runtime.json``."""
        (folder / FACTS).write_text(json.dumps(asdict(self), indent=1, ensure_ascii=False), "utf-8")


def best_folder(place: str | Path) -> Path:
    """A model folder, or that of the best model of a run."""
    folder = Path(place).expanduser()
    return folder / "best" if (folder / "run.json").is_file() else folder


def cached_folder(fingerprint: str) -> Path:
    """Where the runtime of a model lies whose own folder cannot hold it."""
    return cache_folder() / CACHED / fingerprint


def find_runtime(place: str | Path, fingerprint: str | None = None) -> Path | None:
    """The folder whose ``runtime/`` belongs to a model: its own, or one in the cache; None: there is none."""
    own = best_folder(place)
    recover_folder(own / FOLDER)
    if (own / FOLDER / FACTS).is_file():
        return own
    cached = None if fingerprint is None else cached_folder(fingerprint)
    if cached is None or not (cached / FOLDER / FACTS).is_file():
        return None
    try:
        wanted = read_facts(cached).model  # what the model's own files were then
        same = all(file_facts(own / name) == facts for name, facts in wanted.items())
    except (RuntimeFault, OSError):
        return None
    return cached if same else None


def has_pair_scorer(place: str | Path) -> bool:
    """Whether the model of a folder scores pairs, as its ``config.json`` says."""
    try:
        tree = parse_json((best_folder(place) / "config.json").read_bytes())["retriever"]
        return tree.get("scorer") is not None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def read_facts(home: Path) -> Facts:
    """``runtime.json`` of a model folder, once its files have been found to be whole."""
    folder, file = home / FOLDER, home / FOLDER / FACTS
    recover_folder(folder)
    try:
        found = parse_json(file.read_bytes())
        if found["format"] != FORMAT:
            raise RuntimeFault(
                f"{folder} has runtime format {found['format']!r:.20}, this version runs {FORMAT}: {advice(home)}."
            )
        facts = Facts(**found)
        _check_types(facts)
    except FileNotFoundError:
        raise RuntimeFault(
            f"{home} has no runtime: write it with diptych export runtime {home}, where torch is installed."
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RuntimeFault(f"{file} is damaged ({error}): {advice(home)}.") from error
    _check_sizes(home, folder, facts.files)
    _check_sizes(home, home, {name: value for name, value in facts.model.items() if (home / name).is_file()})
    return facts


def advice(home: Path) -> str:
    """How a runtime that cannot be used is replaced."""
    return f"write it again with diptych export runtime {home}, where torch is installed"


def file_facts(file: Path) -> list[Any]:
    """Bytes and SHA-256 of a file."""
    digest = hashlib.sha256()
    with file.open("rb") as handle:
        while piece := handle.read(PIECE):
            digest.update(piece)
    return [file.stat().st_size, digest.hexdigest()]


def _check_types(facts: Facts) -> None:
    labels = facts.labels
    fine = (
        isinstance(facts.fingerprint, str)
        and isinstance(facts.dimension, int)
        and all(
            isinstance(one, dict)
            for one in (facts.images, facts.texts, facts.largest, facts.files, facts.model)
        )
        and (facts.backbone is None or isinstance(facts.backbone, str))
        and (labels is None or {"view", "names", "thresholds"} <= set(labels))
        and {IMAGE, TEXT} <= set(facts.files)
        and all(
            isinstance(one, list) and len(one) == 2 for one in (*facts.files.values(), *facts.model.values())
        )
    )
    if not fine:
        raise ValueError("it does not describe two encoders")


def _check_sizes(home: Path, folder: Path, files: Mapping[str, list[Any]]) -> None:
    """Cheap signs of a copy that is not whole: the digests are for those who want to be sure."""
    for name, (size, _) in files.items():
        file = folder / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            held = "is missing" if found is None else f"has {found:,} bytes, not {size:,}"
            raise RuntimeFault(f"{file} {held}: {advice(home)}.")
