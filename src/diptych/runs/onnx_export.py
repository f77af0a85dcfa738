"""Both encoders of a model as ONNX files, for programs without torch.

``image.onnx`` reads pixels (B, 3, H, W), or region features (B, R, D) with their mask (B, R); ``text.onnx`` reads token
ids (B, W) with their mask (B, W), padded to W tokens. Both give unit vectors (B, D) whose dot product is the score. B
is free, all other sizes are fixed. ``inputs.json`` says how pictures and texts are prepared.
"""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from diptych.aggregators import GPO
from diptych.aggregators.generators import Generator
from diptych.aggregators.sorting import sort_sets
from diptych.data.images import RegionInput
from diptych.errors import DiptychError, MissingExtra, SettingsError
from diptych.model.retriever import Retriever
from diptych.parts import describe
from diptych.storage import storing
from diptych.types import Features, as_inputs

REGIONS = 36  # regions per image, as in published features
TOKENS = 64  # tokens per text, specials included; longer texts are cut
CLOSE = 1e-4  # largest difference of an output from torch's


class ImageSide(nn.Module):
    """The image encoder of a model as a function of tensors."""

    def __init__(self, model: Retriever) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        """Pixels (B, 3, H, W), or regions (B, R, D) and mask (B, R), → (B, dim)."""
        return self.model.image_vectors(images if mask is None else Features(images, mask))


class TextSide(nn.Module):
    """The text encoder of a model as a function of tensors."""

    def __init__(self, model: Retriever) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Ids and mask (B, W) → (B, dim)."""
        return self.model.text_vectors(Features(ids, mask))


class TabledGPO(nn.Module):
    """A trained GPO whose coefficients of sets of 1 … ``length`` elements are a table: no recurrent net is left."""

    table: Tensor

    def __init__(self, pool: GPO, length: int) -> None:
        super().__init__()
        with torch.no_grad():
            self.register_buffer("table", pool.coefficients(torch.arange(1, length + 1), length))  # (L, L, K)

    def forward(self, features: Features) -> Tensor:
        """(B, L, D) → (B, D)."""
        theta = self.table[features.sizes.clamp_min(1) - 1].flip(1)  # (B, L, K)
        return (sort_sets(features) * theta.transpose(1, 2)).sum(dim=2)

    def dim_of(self, encoder_dim: int) -> int:
        """The encoder's width."""
        return encoder_dim


def export_onnx(model: Retriever, folder: Path) -> list[str]:
    """Write image.onnx, text.onnx and inputs.json; both files are run and compared with torch before they are kept.

    A line for each file: its size, and the largest difference from torch.
    """
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise MissingExtra("onnx", "onnx", "writing ONNX encoders") from error
    if folder.exists():
        raise SettingsError(f"{folder} is already there: choose another folder.")
    model = model.cpu().float().eval()
    with storing(folder):
        folder.mkdir(parents=True)
    try:
        lines = [
            _export(model, "image", _image_example(model), folder / "image.onnx"),
            _export(model, "text", _text_example(model), folder / "text.onnx"),
        ]
        facts = {
            "image": describe(model.image_input), "text": describe(model.text_input), "dimension": model.dim,
            "tokens": TOKENS, "model": model.fingerprint(),
        }  # fmt: skip
        (folder / "inputs.json").write_text(json.dumps(facts, indent=1), "utf-8")
        return lines
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _image_example(model: Retriever) -> tuple[Tensor, ...]:
    """Two prepared images, of random content."""
    generator = torch.Generator().manual_seed(0)
    reader = model.image_input
    if isinstance(reader, RegionInput):
        regions = torch.randn(2, REGIONS, reader.dim, generator=generator)
        return regions, torch.arange(REGIONS) < torch.tensor([[REGIONS], [REGIONS - 5]])
    noise = np.random.default_rng(0).integers(0, 255, (2, 97, 131, 3), dtype=np.uint8)
    prepared = as_inputs(reader([Image.fromarray(one) for one in noise]))
    if isinstance(prepared, Tensor):
        return (prepared,)
    raise SettingsError(
        f"a {type(reader).__name__} cannot be written as one ONNX input: choose another model."
    )


def _text_example(model: Retriever) -> tuple[Tensor, Tensor]:
    """Two texts of different lengths, padded to ``TOKENS``."""
    texts = model.text_input.read(["a picture of two dogs that run over the green grass", "a bird"])
    found = as_inputs(texts.collate([0, 1]))
    width = TOKENS - found.values.shape[1]
    return nn.functional.pad(found.values, (0, width)), nn.functional.pad(found.mask, (0, width))


def _export(model: Retriever, side: str, example: tuple[Tensor, ...], file: Path) -> str:
    module = ImageSide(model) if side == "image" else TextSide(model)
    names = ["images" if side == "image" else "ids", "mask"][: len(example)]
    tower = model.image if side == "image" else model.text
    with _tabled(tower, module, example):
        batch = torch.export.Dim("batch", min=1, max=4096)
        with torch.no_grad():
            wanted = module(*example)
        try:
            with _quiet(), torch.no_grad():
                program = torch.onnx.export(
                    module.eval(), example, dynamo=True, input_names=names, output_names=["vectors"],
                    dynamic_shapes=tuple({0: batch} for _ in example), verbose=False,
                )  # fmt: skip
                assert program is not None
                program.save(str(file))
        except Exception as error:  # the exporter's own, of many kinds
            reason = " ".join(str(error).split())[:200]
            raise SettingsError(
                f"the {side} encoder cannot be written as ONNX ({type(error).__name__}: {reason}): take another."
            ) from error
    worst = _difference(file, names, example, wanted)
    return f"{file}: {file.stat().st_size / 1e6:.1f} MB, within {worst:.1e} of torch"


def _difference(file: Path, names: list[str], example: tuple[Tensor, ...], wanted: Tensor) -> float:
    """The largest difference of a file's output from torch's, for the example and for another batch size."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    worst = 0.0
    for rows in (slice(None), slice(1, 2), slice(0, 2)):
        fed = {name: value[rows].numpy() for name, value in zip(names, example, strict=True)}
        (found,) = session.run(None, fed)
        worst = max(worst, float(np.abs(found - wanted[rows].numpy()).max()))
    if not worst <= CLOSE:
        raise DiptychError(
            f"{file.name} differs from torch by {worst:.1e}, more than {CLOSE}: it was not kept."
        )
    return worst


@contextmanager
def _tabled(tower: Any, module: nn.Module, example: tuple[Tensor, ...]) -> Iterator[None]:
    """The tower with its GPO as a table meanwhile, where it has one."""
    pool = tower.aggregator
    if not (isinstance(pool, GPO) and isinstance(pool.generator, Generator)):
        yield
        return
    inputs: Any = example[0] if len(example) == 1 else Features(*example)
    with torch.no_grad():
        length = tower.encoder(inputs).values.shape[1]
    tower.aggregator = TabledGPO(pool, length).eval()
    try:
        yield
    finally:
        tower.aggregator = pool


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter's progress and advice for its own developers are left out."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir", "torch.export")]
    levels = [one.level for one in loggers]
    for one in loggers:
        one.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for one, level in zip(loggers, levels, strict=True):
            one.setLevel(level)
