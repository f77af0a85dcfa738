"""Checkpoints of the public VSE∞ code as models of Diptych: weights only, nothing in the file is run.

The public code saves ``{"model": [image encoder, text encoder], "opt": Namespace, …}``, each encoder a dict of tensors:

=======================================  ==========================================================
there                                    here
=======================================  ==========================================================
``fc``                                   ``image.encoder.linear``, W₀ of the residual MLP
``mlp.layers.0``, ``mlp.bns.0``          ``image.encoder.first``, ``.norm``
``mlp.layers.1`` (``mlp.bns.1`` unused)  ``image.encoder.second``
``gpool.gru``, ``…_reverse``             ``aggregator.generator.gru.ahead``, ``.back``
``gpool.linear``                         ``aggregator.generator.head``
``embed``, ``rnn``, ``…_reverse``        ``text.encoder.words``, ``.ahead``, ``.back`` (BiGRU)
``bert``, ``linear``                     ``text.encoder.model``, ``.linear`` (BERT)
=======================================  ==========================================================
"""

from __future__ import annotations

import argparse
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diptych.aggregators import GPO
from diptych.data.images import RegionInput
from diptych.data.text import TextInput, WordInput, WordPieceInput
from diptych.data.vocabulary import MASK, read_vocabulary
from diptych.encoders.bigru import BiGRU
from diptych.encoders.encoder import Encoder
from diptych.encoders.regions import Regions
from diptych.encoders.transformer import TransformerText
from diptych.errors import CheckpointError, DataError, SettingsError
from diptych.model.named import text_source
from diptych.model.retriever import Retriever, Tower

State = Mapping[str, Tensor]
IMAGE = {"fc": "linear", "mlp.layers.0": "first", "mlp.bns.0": "norm", "mlp.layers.1": "second"}
UNUSED = ("mlp.bns.1.", "bert.pooler.", "bert.embeddings.position_ids", "bert.embeddings.token_type_ids")
GRU = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")


def import_vse_infinity(
    checkpoint: str | Path, *, vocabulary: str | Path | None = None, text_model: str | None = None
) -> Retriever:
    """The model of a published checkpoint of region features with a BiGRU or BERT.

    A BiGRU needs the ``vocabulary`` it was trained with (JSON), BERT the ``text_model`` it started from, for its shape
    and word pieces (``hf:bert-base-uncased`` or a folder).
    """
    images, texts, options = _read(Path(checkpoint))
    for name in ("no_imgnorm", "no_txtnorm"):
        if options.get(name):
            raise CheckpointError(
                f"{checkpoint} was trained with {name}: Diptych compares unit vectors, so this model cannot be used."
            )
    image, width = _image_tower(images, checkpoint)
    text, text_input = _text_tower(texts, checkpoint, vocabulary, text_model)
    return Retriever(image, text, RegionInput(width), text_input).eval()


def _image_tower(state: State, source: object) -> tuple[Tower, int]:
    if any(name.startswith("backbone.") for name in state):
        raise CheckpointError(
            f"{source} holds a CNN that was trained along: only models of stored region features are imported."
        )
    _need(state, "fc.weight", "mlp.layers.0.weight", source=source)
    dim, width = state["fc.weight"].shape
    encoder = Regions(width, dim, hidden=state["mlp.layers.0.weight"].shape[0])
    own = {
        f"encoder.{here}.{end}": state[f"{there}.{end}"]
        for there, here in IMAGE.items()
        for end in getattr(encoder, here).state_dict()
        if f"{there}.{end}" in state
    }
    return _filled(Tower(encoder, _gpo(state, source)), own | _gpo_state(state), state, source), width


def _text_tower(
    state: State, source: object, vocabulary: str | Path | None, text_model: str | None
) -> tuple[Tower, TextInput]:
    encoder: Encoder
    if "embed.weight" in state:
        if vocabulary is None:
            raise SettingsError(
                f"{source} has a BiGRU: give the vocabulary it was trained with, --vocabulary FILE."
            )
        words = read_vocabulary(vocabulary)
        size, word_dim = state["embed.weight"].shape
        if words[-1] == MASK and len(words) == size + 1:  # appended by the reader
            words = words[:-1]
        if len(words) != size:
            raise DataError(
                f"{vocabulary} has {len(words)} words and the checkpoint {size}: give that of its own data set."
            )
        _need(state, "rnn.weight_ih_l0_reverse", source=source)
        encoder = BiGRU(size, word_dim, state["rnn.weight_hh_l0"].shape[1])
        own = {"encoder.words.weight": state["embed.weight"]}
        for end in GRU:
            own[f"encoder.ahead.{end}"] = state[f"rnn.{end}"]
            own[f"encoder.back.{end}"] = state[f"rnn.{end}_reverse"]
        text_input: TextInput = WordInput(words, augment=0.2 if MASK in words else 0.0)
    else:
        _need(state, "bert.embeddings.word_embeddings.weight", "linear.weight", source=source)
        if text_model is None:
            raise SettingsError(
                f"{source} has a BERT: say which one it started from, --text_model hf:bert-base-uncased or its folder."
            )
        place = text_source(text_model)
        encoder = TransformerText(place, state["linear.weight"].shape[0], pretrained=False)
        own = {f"encoder.linear.{end}": state[f"linear.{end}"] for end in ("weight", "bias")}
        own |= {
            f"encoder.model.{name.removeprefix('bert.')}": value
            for name, value in state.items()
            if name.startswith("bert.") and not name.startswith(UNUSED)
        }
        text_input = WordPieceInput(place)
    return _filled(Tower(encoder, _gpo(state, source)), own | _gpo_state(state), state, source), text_input


def _gpo(state: State, source: object) -> GPO:
    _need(state, "gpool.linear.weight", "gpool.gru.weight_ih_l0_reverse", source=source)
    if state["gpool.linear.weight"].shape != (1, 32) or state["gpool.gru.weight_ih_l0"].shape != (96, 32):
        raise CheckpointError(
            f"{source} has a GPO of another size than the published one: it cannot be imported."
        )
    return GPO()


def _gpo_state(state: State) -> dict[str, Tensor]:
    own = {"aggregator.generator.head.weight": state["gpool.linear.weight"]}
    for end in GRU:
        own[f"aggregator.generator.gru.ahead.{end}"] = state[f"gpool.gru.{end}"]
        own[f"aggregator.generator.gru.back.{end}"] = state[f"gpool.gru.{end}_reverse"]
    return own


def _filled(tower: Tower, own: Mapping[str, Tensor], state: State, source: object) -> Tower:
    """A tower with these weights: each of its own is there, and each of the checkpoint is used."""
    used = {value.data_ptr() for value in own.values()}
    left = [n for n, value in state.items() if value.data_ptr() not in used and not n.startswith(UNUSED)]
    wanted = tower.state_dict()
    absent = [name for name in wanted if name not in own and not name.endswith("num_batches_tracked")]
    other = [n for n, value in own.items() if n not in wanted or wanted[n].shape != value.shape]
    if left or absent or other:
        first = [f"{len(left)} unknown weights ({left[0]})"] if left else []
        first += [f"{len(absent)} weights missing ({absent[0]})"] if absent else []
        first += [f"weights of other shapes ({other[0]})"] if other else []
        raise CheckpointError(f"{source} is not a published VSE∞ checkpoint: it has {', '.join(first)}.")
    _load(tower, own)
    return tower


def _load(module: nn.Module, own: Mapping[str, Tensor]) -> None:
    state = {name: own[name].float() if name in own else value for name, value in module.state_dict().items()}
    module.load_state_dict(state, strict=True)


def _need(state: State, *names: str, source: object) -> None:
    absent = next((name for name in names if name not in state), None)
    if absent is not None:
        raise CheckpointError(
            f"{source} is not a published VSE∞ checkpoint: it has no weights called {absent}."
        )


def _read(file: Path) -> tuple[State, State, dict[str, Any]]:
    """Both states and the options; only tensors, plain values and the options' Namespace are allowed in the file."""
    try:
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's advice on damaged files
            found = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise DataError(f"{file} does not exist: check the path.") from error
    except Exception as error:  # whatever a damaged or hostile file makes of the reader
        named = re.search(r"GLOBAL ([\w.]+)", str(error))  # torch's own text advises to run the file
        reason = f" (it names {named[1]})" if named else ""
        raise CheckpointError(
            f"{file} holds something else than weights, or is damaged, and nothing in it was run{reason}: give a "
            "checkpoint that the public VSE∞ code saved."
        ) from error
    model = found.get("model") if isinstance(found, dict) else None
    if not (
        isinstance(model, list | tuple) and len(model) == 2 and all(isinstance(one, dict) for one in model)
    ):
        raise CheckpointError(
            f"{file} is not a published VSE∞ checkpoint: it has no 'model' of two encoders."
        )
    options = found.get("opt")
    images, texts = (_tensors(one, file) for one in model)
    return images, texts, dict(vars(options)) if isinstance(options, argparse.Namespace) else {}


def _tensors(state: Mapping[Any, Any], file: Path) -> State:
    """Named tensors, without the prefix of data-parallel training."""
    named = {str(name).removeprefix("module."): value for name, value in state.items()}
    if not all(isinstance(value, Tensor) for value in named.values()):
        raise CheckpointError(f"{file} is not a published VSE∞ checkpoint: a weight is not a tensor.")
    if any(not bool(torch.isfinite(value).all()) for value in named.values() if value.is_floating_point()):
        raise CheckpointError(f"{file} holds NaN or infinity: train it again, or copy it again.")
    return named
