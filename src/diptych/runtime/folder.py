"""The folder ``runtime/`` of a model: what lies in it, where it is found, what ``runtime.json`` says, its ONNX files.

::

    MODEL/
      config.json  model.safetensors  …     the model itself, for the workbench
      probes.safetensors                    a few pictures and texts with the model's own vectors
      runtime/
        runtime.json                        what this page describes as ``RuntimeFacts``
        image.onnx                          pixels, or sets and their mask → vectors
        backbone.onnx                       pixels → the cells that image.onnx reads; only where a backbone is frozen
        text.onnx                           token ids and their mask → vectors
        tokenizer.json or vocabulary.json   how a text becomes token ids

A model folder that cannot be written has its runtime in the user's cache, in a folder named after the fingerprint.

Whoever makes or takes vectors of a model compares with its probes. Their texts differ in length and are encoded as one
padded batch; the pictures have fine patterns and odd sizes, so that another resampling filter or order of colours
shows. A model that reads features has sets of features instead.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from diptych.entries import CACHE, MODEL
from diptych.errors import RuntimeFault, SettingsError
from diptych.storage import (
    MISREAD,
    RUNTIMES,
    cache_folder,
    create_folder,
    expanded,
    new_file,
    parse_json,
    recover_folder,
)

FORMAT = 1  # version of runtime.json; raised when an old runtime can no longer be run
FOLDER, FACTS, PROBES = "runtime", "runtime.json", "probes.safetensors"
IMAGE, BACKBONE, TEXT = "image.onnx", "backbone.onnx", "text.onnx"
TOKENIZER, VOCABULARY = "tokenizer.json", "vocabulary.json"
MODEL_FILES = ("config.json", "model.safetensors")


@dataclass(frozen=True)
class RuntimeFacts:
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
        MODEL.write(folder / FACTS, json.dumps(asdict(self), indent=1, ensure_ascii=False))


def best_folder(place: str | Path) -> Path:
    """A model folder, or that of the best model of a run; what is in it are plain files and folders."""
    folder = expanded(place)
    is_run = (folder / "run.json").is_file()
    folder = folder / "best" if is_run else folder
    recover_folder(folder)
    MODEL.check_below(folder, entry=is_run)
    return folder


def cached_folder(fingerprint: str) -> Path:
    """Where the runtime of a model lies whose own folder cannot hold it."""
    return CACHE.path(cache_folder(), RUNTIMES, folders=True) / fingerprint


def find_runtime(place: str | Path, fingerprint: str | None = None) -> Path | None:
    """The folder whose ``runtime/`` belongs to a model: its own, or one in the cache; None: there is none."""
    own = best_folder(place)
    recover_folder(own / FOLDER)
    if (own / FOLDER / FACTS).is_file():
        return own
    if fingerprint is None or not fingerprint.isalnum():  # an index may claim any text
        return None
    cached = cached_folder(fingerprint)
    if not (cached / FOLDER / FACTS).is_file():
        return None
    try:
        wanted = read_facts(cached).model  # what the files of the folder that it was made of were then
        same = not own.is_dir() or all(file_facts(own / name) == facts for name, facts in wanted.items())
    except RuntimeFault:
        return cached  # whoever opens it is told
    except OSError:
        return None
    return cached if same else None


def has_pair_scorer(place: str | Path) -> bool:
    """Whether the model of a folder scores pairs, as its ``config.json`` says."""
    try:
        tree = parse_json(MODEL.read(best_folder(place) / "config.json"))["retriever"]
        return tree.get("scorer") is not None
    except (OSError, *MISREAD):
        return False


def read_facts(home: Path) -> RuntimeFacts:
    """``runtime.json`` of a model folder, once its files have been found to be whole."""
    folder, file = home / FOLDER, home / FOLDER / FACTS
    recover_folder(folder)
    try:
        found = parse_json(MODEL.read(file))
        if found["format"] != FORMAT:
            raise RuntimeFault(
                f"{folder} has runtime format {found['format']!r:.20}, this version runs {FORMAT}: {advice(home)}."
            )
        facts = RuntimeFacts(**found)
        _check_types(facts)
    except FileNotFoundError:
        raise RuntimeFault(
            f"{home} has no runtime: write it with diptych export runtime {home}, where torch is installed."
        ) from None
    except (OSError, *MISREAD) as error:
        raise RuntimeFault(f"{file} is damaged ({error}): {advice(home)}.") from error
    _check_sizes(home, facts.files)
    for name, (size, _) in facts.model.items():
        file = MODEL.path(home, name)
        if file.is_file() and file.stat().st_size != size:
            raise written_from_another(home, name)
    return facts


def copy_runtime(home: Path, folder: Path) -> list[Path]:
    """Copy the files of ``runtime/`` into a new folder, for other programs."""
    try:
        with create_folder(folder) as new:
            for file in (home / FOLDER).iterdir():
                target = MODEL.open(MODEL.path(new, file.name), os.O_WRONLY | os.O_CREAT)
                with os.fdopen(MODEL.open(file), "rb") as source, os.fdopen(target, "wb") as copy:
                    shutil.copyfileobj(source, copy)
    except FileExistsError as error:
        raise SettingsError(f"{folder} is already there: choose another folder.") from error
    return sorted(folder.iterdir())


def advice(home: Path) -> str:
    """How a runtime that cannot be used is replaced."""
    if home.parent == cache_folder() / RUNTIMES:
        return f"remove {home}, and diptych index writes it again, where torch is installed"
    return f"write it again with diptych export runtime {home}, where torch is installed"


def written_from_another(home: Path, name: str) -> RuntimeFault:
    """The fault of a runtime beside which a file of the model is not the one that it was written from."""
    return RuntimeFault(f"{home / FOLDER} was not written from this {name}: {advice(home)}.")


def file_facts(file: Path) -> list[Any]:
    """Bytes and SHA-256 of a file."""
    with os.fdopen(MODEL.open(file), "rb") as handle:
        return [file.stat().st_size, hashlib.file_digest(handle, "sha256").hexdigest()]


def _check_types(facts: RuntimeFacts) -> None:
    labels = facts.labels
    fine = (
        isinstance(facts.fingerprint, str)
        and is_size(facts.dimension)
        and all(
            isinstance(one, dict)
            for one in (facts.images, facts.texts, facts.largest, facts.files, facts.model)
        )
        and all(one is None or is_size(one) for one in facts.largest.values())
        and (facts.backbone is None or isinstance(facts.backbone, str))
        and (labels is None or {"view", "names", "thresholds"} <= set(labels))
        and {IMAGE, TEXT} <= set(facts.files)
        and all(
            isinstance(one, list) and len(one) == 2 and type(one[0]) is int
            for one in (*facts.files.values(), *facts.model.values())
        )
    )
    if not fine:
        raise ValueError("it does not describe two encoders")


def is_size(value: object) -> bool:
    """Whether a claim is a number that may be allocated."""
    return type(value) is int and 0 < value <= LARGEST


def _check_sizes(home: Path, files: Mapping[str, list[Any]]) -> None:
    """Cheap signs of a copy that is not whole: the digests are for those who want to be sure."""
    for name, (size, _) in files.items():
        file = MODEL.path(home / FOLDER, name)
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            held = "is missing" if found is None else f"has {found:,} bytes, not {size:,}"
            raise RuntimeFault(f"{file} {held}: {advice(home)}.")


PROBES_FORMAT = "1"
LARGEST = 1_000_000  # numbers of a vector, elements of a set: what is claimed is allocated
REFUSED = 0.999  # worst cosine below which vectors are another model's
REFUSED_HALF = 0.99  # the same for vectors made in half precision
SAID = 0.9999  # worst cosine below which a person is told
SIZES = ((227, 301), (150, 67), (64, 64))  # height and width of the drawn pictures
SET_SIZES = (1, 5, 12, 36)  # elements of the drawn sets of features
TEXTS = (
    "A dog runs over the green grass.",
    "two people",
    "Three small birds, 2 of them red, sit on an old wooden fence near a lake!",
    "café",
    "the reflection of a man's umbrella in a puddle",
)


@dataclass(frozen=True)
class Probes:
    """Texts and images, pictures as uint8 (H, W, 3) or sets (R, D), and their vectors (n, dim)."""

    fingerprint: str
    texts: Sequence[str]
    images: Sequence[NDArray[Any]]
    text_vectors: NDArray[np.float32]
    image_vectors: NDArray[np.float32]

    def save(self, file: Path) -> None:
        """Write the probes, whole or not at all."""
        tensors = {f"image.{number}": np.ascontiguousarray(one) for number, one in enumerate(self.images)}
        tensors |= {"text_vectors": self.text_vectors, "image_vectors": self.image_vectors}
        about = {
            "format": PROBES_FORMAT,
            "fingerprint": self.fingerprint,
            "texts": json.dumps(list(self.texts)),
        }
        with new_file(file) as handle:
            handle.write(save(tensors, about))

    @staticmethod
    def read(file: Path) -> Probes:
        try:
            with safe_open(MODEL.check(file), "numpy") as opened:
                about = opened.metadata() or {}
                if about.get("format") != PROBES_FORMAT:
                    raise ValueError(
                        f"format {about.get('format')!r:.20}, this version reads {PROBES_FORMAT}"
                    )
                names = sorted((n for n in opened.keys() if n.startswith("image.")), key=lambda n: int(n[6:]))  # noqa: SIM118
                found = Probes(
                    about["fingerprint"], [str(text) for text in parse_json(about["texts"])],
                    [opened.get_tensor(name) for name in names],
                    opened.get_tensor("text_vectors"), opened.get_tensor("image_vectors"),
                )  # fmt: skip
            if len(found.texts) != len(found.text_vectors) or len(found.images) != len(found.image_vectors):
                raise ValueError("items and vectors differ in number")
        except FileNotFoundError:
            raise RuntimeFault(f"{file} is missing: copy the whole model folder.") from None
        except (OSError, SafetensorError, *MISREAD) as error:
            raise RuntimeFault(f"{file} is damaged ({error}): copy the model folder again.") from error
        return found


def drawn_pictures() -> list[NDArray[np.uint8]]:
    """Pictures (H, W, 3) of rings, stripes and cells a few pixels wide, a different one in each colour."""
    pictures = []
    for height, width in SIZES:
        y, x = np.mgrid[:height, :width]
        rings = (x * x + y * y) // 37 % 256
        stripes = np.where((x + 2 * y) // 3 % 2, 230, 20)
        cells = (x // 5 * 31 + y // 4 * 57) % 256
        pictures.append(np.stack([rings, stripes, cells], axis=-1).astype(np.uint8))
    return pictures


def drawn_sets(dim: int, largest: int | None = None) -> list[NDArray[np.float32]]:
    """Sets of unequal size of features (R, dim), of at most ``largest`` elements."""
    rng = np.random.default_rng(0)
    sizes = [size if largest is None else min(size, largest) for size in SET_SIZES]
    return [rng.standard_normal((size, dim)).astype(np.float32) for size in sizes]


def worst_cosine(found: NDArray[Any], wanted: NDArray[Any]) -> float:
    """The lowest cosine of two lists of vectors, lower still where they differ in length; 0 for NaN and zeros."""
    if found.shape != wanted.shape:
        return 0.0
    a, b = found.astype(np.float64), wanted.astype(np.float64)
    largest = np.maximum((a * a).sum(axis=1), (b * b).sum(axis=1))
    cosines = (a * b).sum(axis=1) / np.where(largest > 0, largest, 1.0)
    return float(cosines.min(initial=1.0)) if np.isfinite(cosines).all() else 0.0


def compare(
    found: NDArray[Any], wanted: NDArray[Any], what: str, correction: str, *, half: bool = False
) -> str | None:
    """Raise where vectors are another model's; a sentence where they are close but not the same, else None.

    ``what`` names whose vectors they are, as in "the vectors of text.onnx"; ``half``: made in half precision.
    """
    worst, least = worst_cosine(found, wanted), REFUSED_HALF if half else REFUSED
    if worst < least:
        raise RuntimeFault(
            f"{what} are not those of this model (worst cosine {worst:.4f} on its probes, at least {least} is needed): "
            f"{correction}."
        )
    if worst < SAID:
        return f"{what} differ a little from the model's own: worst cosine {worst:.6f} on its probes."
    return None
