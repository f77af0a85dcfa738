"""Write the runtime of a model: both encoders as ONNX files, for searching without torch.

torch records each encoder once, with a free number of items, tokens and regions. Each file is then run by ONNX Runtime
and compared with torch on other sizes than the recorded ones, alone and in padded batches; a file that differs is
not kept. What the search half reads of it all is in ``runtime/folder.py``.
"""

from __future__ import annotations

import shutil
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from diptych.branches.labels import LabelView, label_view
from diptych.data.arrays import Sets
from diptych.data.images import RegionInput, as_item
from diptych.encoders.dual import is_dual_encoder
from diptych.errors import DiptychError, RuntimeFault, SettingsError, StorageError, import_extra
from diptych.model.export_texts import write_texts
from diptych.model.retriever import Retriever
from diptych.parts import describe
from diptych.runtime.folder import (
    BACKBONE,
    FOLDER,
    IMAGE,
    MODEL_FILES,
    PROBES,
    TEXT,
    TEXTS,
    Probes,
    RuntimeFacts,
    best_folder,
    cached_folder,
    drawn_pictures,
    drawn_sets,
    file_facts,
)  # fmt: skip
from diptych.runtime.model import READERS, RuntimeModel
from diptych.runtime.session import OnnxSession, short_reason
from diptych.storage import REFUSED, replace_folder
from diptych.types import Features, Inputs, as_inputs

OPSET = 18
CLOSE = 1e-5  # largest difference of a number of a vector from torch's
MANY = 130  # words of the longest text, and regions of the largest set, that are compared
MOST = 1024  # tokens and regions up to which a model's limit is looked for
WORDS = 12  # words of the vocabulary in each further probe
Side = Literal["image", "text"]


class SideEncoder(nn.Module):
    """One side of a model as a function of tensors: its vectors and, where it predicts labels, their scores."""

    def __init__(self, model: Retriever, side: Side) -> None:
        super().__init__()
        self.model, self.side, self.labels = model, side, _labels(model)

    def forward(self, inputs: Tensor, mask: Tensor | None = None) -> tuple[Tensor, ...]:
        """Pixels (B, 3, H, W), or sets (B, L, D) or ids (B, L) with their mask (B, L), → (B, dim), (B, C)."""
        given: Inputs = inputs if mask is None else Features(inputs, mask)
        vector, features = getattr(self.model, self.side)(given)
        vectors = self.model.mixed(self.side, vector, features)
        if self.labels is None:
            return (vectors,)
        return vectors, getattr(self.labels[1], self.side)(vector, features)


class OnnxPart(NamedTuple):
    """One file: what computes it, the names of its inputs and outputs, and batches; the first is recorded."""

    name: str
    module: nn.Module
    inputs: list[str]
    outputs: list[str]
    batches: list[tuple[Tensor, ...]]


def export_runtime(model: Retriever, home: Path, source: Path | None = None) -> list[str]:
    """Write ``runtime/`` and the probes into a model folder; a line for each file: its size and its difference.

    The runtime that was there stays until the new one is whole. The model is moved to the CPU. ``source`` is the folder
    of the model's own files, where that is another.
    """
    import_extra("onnx", "train", "writing ONNX encoders")
    model = model.cpu().float().eval()
    model.precision = "no"
    try:
        with torch.no_grad():  # not inference mode, in which poolings remember what they computed
            return _written(model, home, source or home)
    except (OSError, StorageError):
        raise
    except Exception as error:  # torch's, the exporter's and ONNX Runtime's own, of many kinds
        raise SettingsError(f"this model has no ONNX form ({_said(error)}): search with torch.") from error


def _written(model: Retriever, home: Path, source: Path) -> list[str]:
    reader = type(model.image_input)
    if READERS.get(reader.__name__) != reader.__module__:
        raise SettingsError(f"its pictures are read by {reader.__name__}, which needs torch")
    largest = {"image": _largest_set(model), "text": _largest_text(model)}
    probes = _probes(model, largest)
    probes.save(home / PROBES)
    with replace_folder(home / FOLDER) as new:
        described = write_texts(model.text_input, new)
        lines = [_write_part(part, new, home / FOLDER) for part in _parts(model, probes, largest)]
        facts = _facts(model, probes.fingerprint, described, largest)
        _compare_whole(model, RuntimeModel(new, facts), probes)
        found = {file.name: file_facts(file) for file in sorted(new.iterdir())}
        own = {name: file_facts(source / name) for name in MODEL_FILES if (source / name).is_file()}
        replace(facts, files=found, model=own).save(new)
    return lines


def _said(error: Exception) -> str:
    """Why a model has no ONNX form, for the inside of a sentence."""
    if isinstance(error, RuntimeFault):  # how to get a new file is none of it
        error = error.__cause__ if isinstance(error.__cause__, Exception) else error
    kind = "" if isinstance(error, DiptychError) else f"{type(error).__name__}: "
    return f"{kind}{short_reason(error)}"


def place_runtime(
    source: str | Path, folder: Path | None = None, *, again: bool = True
) -> tuple[Path, list[str]]:
    """Write the runtime of a model where it belongs; the folder that holds it, and ``export_runtime``'s lines.

    That is the model's own folder, or a new model folder ``folder``. A model without a folder of its own (``hf:ID``)
    and one whose folder cannot be written have it in the user's cache; unless ``again``, one that works stays there.
    """
    model = Retriever.from_pretrained(source)
    if folder is not None:
        if folder.exists():
            raise SettingsError(f"{folder} is already there: choose another folder.")
        model.save_pretrained(folder)
        try:
            return folder, export_runtime(model, folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    if not is_dual_encoder(source):
        try:
            return best_folder(source), export_runtime(model, best_folder(source))
        except StorageError as error:
            if not (isinstance(error.__cause__, OSError) and error.__cause__.errno in REFUSED):
                raise
    home = cached_folder(model.fingerprint())
    if not again:
        with suppress(RuntimeFault):
            found = RuntimeModel.open(home)
            found.check_files()
            found.check()
            return home, []
    home.mkdir(parents=True, exist_ok=True)
    return home, export_runtime(model, home, best_folder(source))


def add_runtime(folder: Path) -> str:
    """Write the runtime of a trained model; a sentence that says how it went, since no run is lost by it."""
    try:
        home, _ = place_runtime(folder)
    except DiptychError as error:
        return f"no runtime was written: {error}"
    except Exception as error:  # the run is finished and saved: nothing of it may be lost here
        return f"no runtime was written ({type(error).__name__}: {error}): search with torch."
    return f"runtime for searching without torch: {home / FOLDER}"


def _labels(model: Retriever) -> tuple[str, LabelView] | None:
    try:
        return label_view(model.branches.items())
    except SettingsError:
        return None


def _facts(
    model: Retriever, fingerprint: str, texts: dict[str, Any], largest: dict[str, int | None]
) -> RuntimeFacts:
    frozen, labels = model.image.encoder.frozen_backbone(), _labels(model)
    predicted = None
    if labels is not None:
        name, view = labels
        predicted = {"view": name, "names": view.labels.names, "thresholds": view.thresholds.tolist()}
    return RuntimeFacts(
        fingerprint, model.dim, describe(model.image_input), texts, largest,
        backbone=frozen.fingerprint() if frozen is not None else None, labels=predicted,
    )  # fmt: skip


def _probes(model: Retriever, largest: dict[str, int | None]) -> Probes:
    """The model's own vectors of texts and images; some texts are made of words that it knows."""
    texts = list(TEXTS)
    words = getattr(getattr(model.text_input, "inner", model.text_input), "words", [])
    known = [word for word in words if word.isalpha()]
    if known:  # most of the fixed texts may be unknown to a small vocabulary
        step = max(1, len(known) // (3 * WORDS))
        spread = known[::step][: 3 * WORDS]
        texts += [" ".join(spread[:WORDS]), " ".join(spread[WORDS:][: WORDS // 2]), " ".join(spread[-2:])]
    read, most = model.text_input.read(texts), largest["text"]
    texts = [text for row, text in enumerate(texts) if most is None or read.size(row) <= most]
    reader = model.image_input
    images: Sequence[Any] = (
        drawn_sets(reader.dim, largest["image"]) if isinstance(reader, RegionInput) else drawn_pictures()
    )
    vectors = [
        model.text_vectors(as_inputs(model.text_input(texts))),
        model.image_vectors(as_inputs(reader([as_item(one) for one in images]))),
    ]
    return Probes(model.fingerprint(), texts, images, *(v.float().numpy() for v in vectors))


def _largest_set(model: Retriever) -> int | None:
    """How many regions an image may have, found by asking the model; None: any number, or it reads pictures."""
    reader = model.image_input
    if not isinstance(reader, RegionInput):
        return None
    return _largest(lambda n: model.image(Features.whole(torch.zeros(1, n, reader.dim))))


def _largest_text(model: Retriever) -> int | None:
    """How many tokens a text may have, its input cuts longer ones; None: as many as that leaves."""

    ids = as_inputs(model.text_input([" ".join(["a"] * MOST)]))
    return _largest(
        lambda n: model.text(Features(ids.values[:, :n], ids.mask[:, :n])), min(MOST, ids.mask.shape[1])
    )


def _largest(run: Callable[[int], object], most: int = MOST) -> int | None:
    def accepts(count: int) -> bool:
        try:
            run(count)
        except (DiptychError, IndexError, RuntimeError, ValueError):
            return False
        return True

    if accepts(most):
        return None
    return 1 + bisect_left(range(2, most), True, key=lambda count: not accepts(count))


def _parts(model: Retriever, probes: Probes, largest: dict[str, int | None]) -> Iterator[OnnxPart]:
    outputs = ["vectors"] if _labels(model) is None else ["vectors", "labels"]
    prepared = model.image_input([as_item(one) for one in probes.images])
    frozen, batches = model.image.encoder.frozen_backbone(), list[tuple[Tensor, ...]]()
    if isinstance(prepared, Sets):
        assert isinstance(model.image_input, RegionInput)
        batches = _set_batches(model.image_input.dim, largest["image"])
    else:
        pixels = as_inputs(prepared)
        batches = [(pixels,), (pixels[:1],), (pixels[1:],)]
        if frozen is not None:
            yield OnnxPart(BACKBONE, frozen, ["images"], ["cells"], batches)
            cells = frozen(pixels)
            whole = torch.ones(cells.shape[:2], dtype=torch.bool)
            batches = [(cells, whole), (cells[:1], whole[:1]), (cells[1:], whole[1:])]
    names = ["images", "mask"][: len(batches[0])]
    yield OnnxPart(IMAGE, SideEncoder(model, "image"), names, outputs, batches)
    yield OnnxPart(
        TEXT,
        SideEncoder(model, "text"),
        ["ids", "mask"],
        outputs,
        _text_batches(model, probes, largest["text"]),
    )


def _set_batches(dim: int, largest: int | None) -> list[tuple[Tensor, ...]]:
    """Sets of features: the recorded batch, then single sets and padded batches of other sizes."""
    generator = torch.Generator().manual_seed(0)
    most = MANY if largest is None else largest  # the limit itself, where there is one
    found: list[tuple[Tensor, ...]] = []
    for sizes in ((6, 3, 5), (1,), (2,), (36,), (most,), (3, 4), (1, 17, 36, 2, 8), (most, 1)):
        kept = torch.tensor([min(size, most) for size in sizes])
        mask = torch.arange(int(kept.max())) < kept[:, None]
        found.append((torch.randn(*mask.shape, dim, generator=generator), mask))
    return found


def _text_batches(model: Retriever, probes: Probes, largest: int | None) -> list[tuple[Tensor, ...]]:
    """Texts: the recorded batch, then each alone, all as one padded batch, and a long one beside a short one."""
    long = " ".join(probes.texts)
    read = model.text_input.read([*probes.texts, " ".join([long] * (MANY // len(long.split()) + 1))])
    last = len(probes.texts)
    rows = [[0, 1, 2], *([row] for row in range(last + 1)), list(range(last)), [0, last]]
    batches = [as_inputs(read.collate(some)) for some in rows]
    return [(one.values[:, :largest], one.mask[:, :largest]) for one in batches]


def _write_part(part: OnnxPart, folder: Path, target: Path) -> str:
    """Write one file, and compare it with torch on every batch."""
    file, example = folder / part.name, part.batches[0]
    free = {name: {0: "batch"} if len(example) == 1 else {0: "batch", 1: "length"} for name in part.inputs}
    free |= {name: {0: "batch"} for name in part.outputs}
    with _recording():
        torch.onnx.export(
            part.module.eval(), example, str(file), dynamo=False, opset_version=OPSET, input_names=part.inputs,
            output_names=part.outputs, dynamic_axes=free,
        )  # fmt: skip
    worst = _difference(part, file)
    return f"{target / part.name}: {file.stat().st_size / 1e6:.1f} MB, within {worst:.1e} of torch"


@contextmanager
def _recording() -> Iterator[None]:
    """No fused layer of torch, which ONNX does not have; nothing printed for the exporter's own developers."""
    fused, log = torch.backends.mha.get_fastpath_enabled(), torch._C._jit_onnx_log
    torch.backends.mha.set_fastpath_enabled(False)
    torch._C._jit_onnx_log = lambda *_: None  # it prints the whole graph when an operator is unknown
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch._C._jit_onnx_log = log
        torch.backends.mha.set_fastpath_enabled(fused)


def _difference(part: OnnxPart, file: Path) -> float:
    """The largest difference from torch; of cells, which are not of unit length, as a share of the largest."""
    session, worst = OnnxSession(file, part.inputs, part.outputs), 0.0
    least = 0.0 if part.name == BACKBONE else 1.0
    for batch in part.batches:
        fed = {
            name: np.ascontiguousarray(value.numpy()) for name, value in zip(part.inputs, batch, strict=True)
        }
        wanted = part.module(*batch)
        for name, value in zip(
            part.outputs, (wanted,) if isinstance(wanted, Tensor) else wanted, strict=True
        ):
            scale = max(least, float(value.abs().max())) or 1.0
            found = session(name, **fed)
            different = np.abs(found - value.numpy()).max() / scale if found.shape == value.shape else np.inf
            worst = max(worst, float(different) if np.isfinite(different) else np.inf)
    if worst > CLOSE:
        raise SettingsError(f"{part.name} differs from torch by {worst:.1e}, more than {CLOSE}")
    return worst


def _compare_whole(model: Retriever, runtime: RuntimeModel, probes: Probes) -> None:
    """The vectors that a search would get, from pictures and words on, beside torch's."""
    runtime.check()
    for found, wanted in (
        (runtime.encode_text(probes.texts, batch_size=2), model.encode_text(probes.texts)),
        (runtime.encode_image(probes.images, batch_size=2), model.encode_image(probes.images)),
    ):
        worst = float(np.abs(found - wanted.numpy()).max())
        if not worst <= CLOSE:
            raise SettingsError(f"its vectors differ from torch by {worst:.1e}, more than {CLOSE}")
