"""Checkpoints of the public code of VSE∞, SGRAF and CUSA as models of Diptych: weights only, nothing in them is run.

VSE∞'s code saves ``{"model": [image encoder, text encoder], "opt": Namespace, …}``, each encoder a dict of tensors;
SGRAF's saves the same with a third state, of the pair scorer; CUSA's saves ``{"model": state, "config": …}``, OpenAI's
CLIP without its scale below ``clip_model``, a LayerNorm and a linear layer for each head, and the temperatures.

``published.toml`` turns each name there into the name here.
"""

from __future__ import annotations

import argparse
import re
import tomllib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diptych.aggregators import GPO, First
from diptych.aggregators.pooling import Head
from diptych.branches.branch import FirstVectors, UniModalHeads
from diptych.data.images import RegionInput
from diptych.data.text import TextInput, WordInput, WordPieceInput
from diptych.data.text_inputs import CleanedInput
from diptych.data.vocabulary import MASK, read_vocabulary
from diptych.encoders.attended import SelfAttended, TextualSelfAttention, VisualSelfAttention
from diptych.encoders.bigru import BiGRU
from diptych.encoders.clip import ClipImage, ClipText, clip_inputs
from diptych.encoders.cnn import PrecomputedGrid
from diptych.encoders.encoder import Encoder
from diptych.encoders.pretrained import source_name
from diptych.encoders.regions import Regions
from diptych.encoders.transformer import TransformerText
from diptych.errors import CheckpointError, DataError, SettingsError
from diptych.interaction.sgraf import SAF, SGR
from diptych.model.named import text_source
from diptych.model.retriever import Retriever, Tower
from diptych.objectives.soft_labels import UNI

State = Mapping[str, Tensor]
SIDES = ("image", "text", "scorer")  # of the states of a checkpoint
NAMES: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
"""For each code, a pattern of its names of weights and what stands in its place here, in order."""


@dataclass(frozen=True)
class Source:
    """A checkpoint, and whose code saved it."""

    file: Path
    code: str

    def error(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.file} is not a published {self.code} checkpoint: it has {reason}.")

    def size(self, state: State, name: str) -> torch.Size:
        if name not in state:
            raise self.error(f"no weights called {name}")
        return state[name].shape

    def __str__(self) -> str:
        return str(self.file)


def import_vse_infinity(
    checkpoint: str | Path, *, vocabulary: str | Path | None = None, text_model: str | None = None
) -> Retriever:
    """The model of a published checkpoint of region features with a BiGRU or BERT.

    A BiGRU needs the ``vocabulary`` it was trained with (JSON), BERT the ``text_model`` it started from, for its shape
    and word pieces (``hf:bert-base-uncased`` or a folder).
    """
    source = Source(Path(checkpoint), "VSE∞")
    state = _encoders(source, 2)
    if any(name.startswith("image.backbone.") for name in state):
        raise CheckpointError(
            f"{source} holds a CNN that was trained along: only models of stored region features are imported."
        )
    dim, width = source.size(state, "image.fc.weight")
    image = Regions(width, dim, hidden=source.size(state, "image.mlp.layers.0.weight")[0])
    text: Encoder
    text_input: TextInput
    if "text.embed.weight" in state:
        text, text_input = _bigru(state, "text.rnn", source, vocabulary)
    elif text_model is None:
        raise SettingsError(
            f"{source} has a BERT: say which one it started from, --text_model hf:bert-base-uncased or its folder."
        )
    else:
        place = text_source(text_model)
        text = TransformerText(place, source.size(state, "text.linear.weight")[0], pretrained=False)
        text_input = WordPieceInput(place)
    made = Retriever(Tower(image, GPO()), Tower(text, GPO()), RegionInput(width), text_input)
    return _filled(made, state, source)


def import_sgraf(checkpoint: str | Path, *, vocabulary: str | Path | None = None) -> Retriever:
    """The model of a published checkpoint of SGR or SAF, with the ``vocabulary`` it was trained with (JSON)."""
    source = Source(Path(checkpoint), "SGRAF")
    state = _encoders(source, 3)
    dim, width = source.size(state, "image.fc.weight")
    nodes = source.size(state, "scorer.sim_eval_w.weight")[1]
    places = source.size(state, "scorer.v_global_w.embedding_local.1.weight")[0]
    text, text_input = _bigru(state, "text.cap_rnn", source, vocabulary)
    steps = len({name.split(".")[2] for name in state if name.startswith("scorer.SGR_module.")})
    scorer = SGR(dim, nodes, steps) if steps else SAF(dim, nodes)
    seeing = SelfAttended(PrecomputedGrid(width, dim, drop=0.0), VisualSelfAttention(dim, places))
    reading = SelfAttended(text, TextualSelfAttention(dim))
    made = Retriever(
        Tower(seeing, First()), Tower(reading, First()), RegionInput(width), text_input, None, scorer
    )
    return _filled(made, state, source)


def import_cusa(checkpoint: str | Path, *, model: str | None = None) -> Retriever:
    """The model of a published checkpoint of CUSA on CLIP; ``model`` is the CLIP it started from, for its shape.

    Texts are cleaned as that code cleans them.
    """
    source = Source(Path(checkpoint), "CUSA")
    if model is None:
        raise SettingsError(
            f"{source} holds weights of CLIP: say which it started from, --model hf:openai/clip-vit-base-patch32."
        )
    state = _as_here(_tensors(_load(source).get("model"), source))
    place = source_name(model)
    images, texts = clip_inputs(place)
    sides = ClipImage(place, pretrained=False), ClipText(place, pretrained=False)
    dim = sides[0].dim
    uni = UniModalHeads(
        dim, image_dim=dim, text_dim=dim, layer_norm=True, image_aggregator=First(), text_aggregator=First()
    )
    made = Retriever(
        Tower(sides[0], Head(dim, dim)),
        Tower(sides[1], Head(dim, dim)),
        images,
        CleanedInput(texts),
        {UNI: uni if "uni_image_projection.weight" in state else FirstVectors(dim, dim)},
    )
    return _filled(made, state, source)


def _as_here(state: State) -> dict[str, Tensor]:
    """OpenAI's weights of CLIP in the form that transformers gives them: an attention has three, projections turn."""
    made: dict[str, Tensor] = {}
    for name, value in state.items():
        if ".attn.in_proj_" in name:
            for letter, part in zip("qkv", value.chunk(3), strict=True):
                made[name.replace("in_proj_", f"{letter}_proj.")] = part
        elif name in ("clip_model.visual.proj", "clip_model.text_projection"):
            made[name] = value.T
        elif name == "tau":  # of the contrastive loss: that code takes CLIP's own scale out
            made["clip_model.logit_scale"] = torch.stack([-value.float().log(), torch.zeros(())])
        else:
            made[name] = value
    return made


def _bigru(state: State, rnn: str, source: Source, vocabulary: str | Path | None) -> tuple[BiGRU, WordInput]:
    """A BiGRU of the shape of this state, and its input: the words that it was trained with."""
    if vocabulary is None:
        raise SettingsError(f"{source} has a BiGRU: give the vocabulary of its training, --vocabulary FILE.")
    words = read_vocabulary(vocabulary)
    size, word_dim = source.size(state, "text.embed.weight")
    if words[-1] == MASK and len(words) == size + 1:  # appended by the reader
        words = words[:-1]
    if len(words) != size:
        raise DataError(
            f"{vocabulary} has {len(words)} words and the checkpoint {size}: give that of its own data set."
        )
    encoder = BiGRU(size, word_dim, source.size(state, f"{rnn}.weight_hh_l0")[1])
    return encoder, WordInput(words, augment=0.2 if MASK in words else 0.0)


def _filled(model: Retriever, state: State, source: Source) -> Retriever:
    """The model with these weights: each of its own is there, and each of the checkpoint has a place."""
    wanted, own = model.state_dict(), dict[str, Tensor]()
    left, other = list[str](), list[str]()
    for there, value in state.items():
        here = there
        for pattern, replacement in NAMES[source.code].items():
            here = re.sub(pattern, replacement, here)
        if here and here not in wanted:
            left.append(there)
        elif here and wanted[here].shape != value.shape:
            other.append(here)
        elif here:
            own[here] = value.float()
    absent = [name for name in wanted if name not in own and not name.endswith("num_batches_tracked")]
    found = [("unknown weights", left), ("weights of other shapes", other), ("weights missing", absent)]
    wrong = [f"{len(some)} {what} ({some[0]})" for what, some in found if some]
    if wrong:
        raise source.error(", ".join(wrong))
    model.load_state_dict({**wanted, **own}, strict=True)
    return model.eval()


def _encoders(source: Source, count: int) -> dict[str, Tensor]:
    """The weights of a checkpoint of several encoders that compare unit vectors, each behind its side."""
    found = _load(source)
    model, options = found.get("model"), found.get("opt")
    if not (isinstance(model, list | tuple) and len(model) == count):
        raise source.error(f"no 'model' of {'two' if count == 2 else 'three'} encoders")
    for name in ("no_imgnorm", "no_txtnorm"):
        if getattr(options, name, False):
            raise CheckpointError(
                f"{source} was trained with {name}: Diptych compares unit vectors, so this model cannot be used."
            )
    states = [_tensors(one, source) for one in model]
    return {
        f"{side}.{name}": value
        for side, one in zip(SIDES, states, strict=False)
        for name, value in one.items()
    }


def _load(source: Source) -> dict[str, Any]:
    """The content; only tensors, plain values and the options' Namespace are allowed in the file."""
    try:
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's advice on damaged files
            found = torch.load(source.file, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise DataError(f"{source} does not exist: check the path.") from error
    except Exception as error:  # whatever a damaged or hostile file makes of the reader
        named = re.search(r"GLOBAL ([\w.]+)", str(error))  # torch's own text advises to run the file
        reason = f" (it names {named[1]})" if named else ""
        raise CheckpointError(
            f"{source} holds something else than weights, or is damaged, and nothing in it was run{reason}: give a "
            f"checkpoint that the public {source.code} code saved."
        ) from error
    return found if isinstance(found, dict) else {}


def _tensors(state: Any, source: Source) -> State:
    """Named tensors, without the prefix of data-parallel training."""
    if not isinstance(state, dict):
        raise source.error("no dict of weights")
    named = {str(name).removeprefix("module."): value for name, value in state.items()}
    if not all(isinstance(value, Tensor) for value in named.values()):
        raise source.error("a weight that is not a tensor")
    if any(not bool(torch.isfinite(value).all()) for value in named.values() if value.is_floating_point()):
        raise CheckpointError(f"{source} holds NaN or infinity: train it again, or copy it again.")
    return named
