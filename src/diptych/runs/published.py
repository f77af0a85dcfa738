"""Checkpoints of the public code of VSE∞, SGRAF and CUSA as models of Diptych: weights only, nothing in them is run.

VSE∞'s code saves ``{"model": [image encoder, text encoder], "opt": Namespace, …}``, each encoder a dict of tensors:

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

SGRAF's code saves the same with a third state, of the pair scorer; ``SGRAF`` lists its names. The bias of the last
layer of an attention and that of a graph's keys change no softmax, and have no place here.

CUSA's code saves ``{"model": state, "config": …}``: OpenAI's CLIP below ``clip_model`` (``CLIP`` lists the names of a
layer), and a LayerNorm and a linear layer for each head (``HEADS``).
"""

from __future__ import annotations

import argparse
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

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

M = TypeVar("M", bound=nn.Module)
State = Mapping[str, Tensor]
IMAGE = {"fc": "linear", "mlp.layers.0": "first", "mlp.bns.0": "norm", "mlp.layers.1": "second"}
SGRAF = {
    "0.fc": "image.encoder.encoder.linear",
    "1.embed": "text.encoder.encoder.words",
    "2.v_global_w.embedding_local.0": "image.encoder.attention.local",
    "2.v_global_w.embedding_local.1": "image.encoder.attention.local_norm",
    "2.v_global_w.embedding_global.0": "image.encoder.attention.overall",
    "2.v_global_w.embedding_global.1": "image.encoder.attention.overall_norm",
    "2.v_global_w.embedding_common.0": "image.encoder.attention.common",
    "2.t_global_w.embedding_local.0": "text.encoder.attention.local",
    "2.t_global_w.embedding_global.0": "text.encoder.attention.overall",
    "2.t_global_w.embedding_common.0": "text.encoder.attention.common",
    "2.sim_tranloc_w": "scorer.vectors.local",
    "2.sim_tranglo_w": "scorer.vectors.overall",
    "2.sim_eval_w": "scorer.score",
    "2.SAF_module.attn_sim_w": "scorer.filter",
    "2.SAF_module.bn": "scorer.norm",
}
STEP = {"graph_query_w": "query", "graph_key_w": "key", "sim_graph_w": "mix"}  # of SGR
CLIP = {
    "attn.out_proj": "self_attn.out_proj",
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
HEADS = {"cross": "{side}.aggregator.head", "uni": "branches.uni.{side}_head"}
NO_EFFECT = re.compile(r"(embedding_common\.0|graph_key_w)\.bias$")
TEMPERATURES = re.compile(r"((cross_|uni_)?(the_softlabel_)?tau(_image|_text)?|clip_model\.logit_scale)")
UNUSED = ("mlp.bns.1.", "bert.pooler.", "bert.embeddings.position_ids", "bert.embeddings.token_type_ids")
GRU = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")


@dataclass(frozen=True)
class Source:
    """A checkpoint, and whose code saved it."""

    file: Path
    code: str

    def error(self, reason: str) -> CheckpointError:
        """That it is something else."""
        return CheckpointError(f"{self.file} is not a published {self.code} checkpoint: it has {reason}.")

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
    images, texts = _encoders(source, 2)
    image, width = _image_tower(images, source)
    text, text_input = _text_tower(texts, source, vocabulary, text_model)
    return Retriever(image, text, RegionInput(width), text_input).eval()


def import_sgraf(checkpoint: str | Path, *, vocabulary: str | Path | None = None) -> Retriever:
    """The model of a published checkpoint of SGR or SAF, with the ``vocabulary`` it was trained with (JSON)."""
    source = Source(Path(checkpoint), "SGRAF")
    states = _encoders(source, 3)
    state = {f"{number}.{name}": value for number, one in enumerate(states) for name, value in one.items()}
    places = "2.v_global_w.embedding_local.1.weight"
    _need(state, "0.fc.weight", "1.embed.weight", "2.sim_eval_w.weight", places, source=source)
    (dim, width), nodes = state["0.fc.weight"].shape, state["2.sim_eval_w.weight"].shape[1]
    text, text_input = _bigru(states[1], "cap_rnn", source, vocabulary)
    steps = len({name.split(".")[2] for name in state if name.startswith("2.SGR_module.")})
    scorer = SGR(dim, nodes, steps) if steps else SAF(dim, nodes)
    seeing = SelfAttended(PrecomputedGrid(width, dim, drop=0.0), VisualSelfAttention(dim, len(state[places])))
    reading = SelfAttended(text, TextualSelfAttention(dim))
    model = Retriever(
        Tower(seeing, First()), Tower(reading, First()), RegionInput(width), text_input, None, scorer
    )
    prefixes = SGRAF | {
        f"2.SGR_module.{step}.{there}": f"scorer.steps.{step}.{here}"
        for step in range(steps)
        for there, here in STEP.items()
    }
    state = {name: value for name, value in state.items() if not NO_EFFECT.search(name)}
    own = _renamed(state, prefixes) | _gru(states[1], "cap_rnn", "text.encoder.encoder")
    return _filled(model, own, state, source).eval()


def import_cusa(checkpoint: str | Path, *, model: str | None = None) -> Retriever:
    """The model of a published checkpoint of CUSA on CLIP; ``model`` is the CLIP it started from, for its shape.

    Texts are cleaned as that code cleans them.
    """
    source = Source(Path(checkpoint), "CUSA")
    if model is None:
        raise SettingsError(
            f"{source} holds weights of CLIP: say which it started from, --model hf:openai/clip-vit-base-patch32."
        )
    state = _tensors(_load(source).get("model"), source)
    _need(state, "clip_model.visual.proj", "cross_image_projection.weight", source=source)
    place = source_name(model)
    images, texts = clip_inputs(place)
    sides = ClipImage(place, pretrained=False), ClipText(place, pretrained=False)
    dim = sides[0].dim
    uni = {
        UNI: UniModalHeads(
            dim,
            image_dim=dim,
            text_dim=dim,
            layer_norm=True,
            image_aggregator=First(),
            text_aggregator=First(),
        )
    }
    made = Retriever(
        Tower(sides[0], Head(dim, dim)),
        Tower(sides[1], Head(dim, dim)),
        images,
        CleanedInput(texts),
        uni if "uni_image_projection.weight" in state else {UNI: FirstVectors(dim, dim)},
    )
    used = {name: value for name, value in state.items() if not TEMPERATURES.fullmatch(name)}
    return _filled(made, _clip_state(state), used, source).eval()


def _clip_state(state: State) -> dict[str, Tensor]:
    """The weights of CUSA's model by their names here; those of one attention lie in one tensor there."""
    own: dict[str, Tensor] = {}
    for side, root in (("image", "clip_model.visual."), ("text", "clip_model.")):
        here, layers = f"{side}.encoder.model.", f"{root}transformer.resblocks."
        for name in (name for name in state if name.startswith(layers)):
            number, _, rest = name.removeprefix(layers).partition(".")
            part, _, end = rest.rpartition(".")
            layer = f"{here}encoder.layers.{number}."
            if part == "attn":  # in_proj_weight, in_proj_bias
                for letter, value in zip("qkv", state[name].chunk(3), strict=True):
                    own[f"{layer}self_attn.{letter}_proj.{end.removeprefix('in_proj_')}"] = value
            elif part in CLIP:
                own[f"{layer}{CLIP[part]}.{end}"] = state[name]
    vision, text = "image.encoder.model.", "text.encoder.model."
    own |= _renamed(
        state,
        {
            "clip_model.visual.conv1": f"{vision}embeddings.patch_embedding",
            "clip_model.visual.ln_pre": f"{vision}pre_layrnorm",
            "clip_model.visual.ln_post": f"{vision}post_layernorm",
            "clip_model.token_embedding": f"{text}embeddings.token_embedding",
            "clip_model.ln_final": f"{text}final_layer_norm",
            **{
                f"{start}{head}_{side}_projection": f"{place.format(side=side)}.{at}"
                for side in ("image", "text")
                for head, place in HEADS.items()
                for at, start in enumerate(("ln_", ""))
            },
        },
    )
    whole = {
        "clip_model.visual.class_embedding": f"{vision}embeddings.class_embedding",
        "clip_model.visual.positional_embedding": f"{vision}embeddings.position_embedding.weight",
        "clip_model.positional_embedding": f"{text}embeddings.position_embedding.weight",
    }
    own |= {here: state[there] for there, here in whole.items() if there in state}
    for there, here in (("visual.proj", "image"), ("text_projection", "text")):
        if f"clip_model.{there}" in state:
            own[f"{here}.encoder.projection.weight"] = state[f"clip_model.{there}"].T
    if "clip_model.logit_scale" in state:
        scale = state["clip_model.logit_scale"].float()
        own["image.encoder.logit_scale"] = torch.stack([scale, torch.zeros_like(scale)])
    return own


def _renamed(state: State, prefixes: Mapping[str, str]) -> dict[str, Tensor]:
    """The weights of layers by the names that these have here."""
    ends = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    return {
        f"{here}.{end}": state[f"{there}.{end}"]
        for there, here in prefixes.items()
        for end in ends
        if f"{there}.{end}" in state
    }


def _image_tower(state: State, source: Source) -> tuple[Tower, int]:
    if any(name.startswith("backbone.") for name in state):
        raise CheckpointError(
            f"{source} holds a CNN that was trained along: only models of stored region features are imported."
        )
    _need(state, "fc.weight", "mlp.layers.0.weight", source=source)
    dim, width = state["fc.weight"].shape
    encoder = Regions(width, dim, hidden=state["mlp.layers.0.weight"].shape[0])
    own = _renamed(state, {there: f"encoder.{here}" for there, here in IMAGE.items()})
    return _pooled(encoder, own, state, source), width


def _text_tower(
    state: State, source: Source, vocabulary: str | Path | None, text_model: str | None
) -> tuple[Tower, TextInput]:
    encoder: Encoder
    text_input: TextInput
    if "embed.weight" in state:
        encoder, text_input = _bigru(state, "rnn", source, vocabulary)
        own = {"encoder.words.weight": state["embed.weight"], **_gru(state, "rnn", "encoder")}
    else:
        _need(state, "bert.embeddings.word_embeddings.weight", "linear.weight", source=source)
        if text_model is None:
            raise SettingsError(
                f"{source} has a BERT: say which one it started from, --text_model hf:bert-base-uncased or its folder."
            )
        place = text_source(text_model)
        encoder = TransformerText(place, state["linear.weight"].shape[0], pretrained=False)
        own = _renamed(state, {"linear": "encoder.linear"}) | {
            f"encoder.model.{name.removeprefix('bert.')}": value
            for name, value in state.items()
            if name.startswith("bert.") and not name.startswith(UNUSED)
        }
        text_input = WordPieceInput(place)
    return _pooled(encoder, own, state, source), text_input


def _bigru(state: State, rnn: str, source: Source, vocabulary: str | Path | None) -> tuple[BiGRU, WordInput]:
    """A BiGRU of the shape of this state, and its input: the words that it was trained with."""
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
    _need(state, f"{rnn}.weight_ih_l0_reverse", source=source)
    encoder = BiGRU(size, word_dim, state[f"{rnn}.weight_hh_l0"].shape[1])
    return encoder, WordInput(words, augment=0.2 if MASK in words else 0.0)


def _gru(state: State, rnn: str, place: str) -> dict[str, Tensor]:
    """Both directions of a GRU by their names here."""
    return {
        f"{place}.{way}.{end}": state[f"{rnn}.{end}{mark}"]
        for way, mark in (("ahead", ""), ("back", "_reverse"))
        for end in GRU
        if f"{rnn}.{end}{mark}" in state
    }


def _pooled(encoder: Encoder, own: Mapping[str, Tensor], state: State, source: Source) -> Tower:
    """An encoder with these weights, and the checkpoint's GPO."""
    _need(state, "gpool.linear.weight", "gpool.gru.weight_ih_l0_reverse", source=source)
    if state["gpool.linear.weight"].shape != (1, 32) or state["gpool.gru.weight_ih_l0"].shape != (96, 32):
        raise CheckpointError(
            f"{source} has a GPO of another size than the published one: it cannot be imported."
        )
    generator = "aggregator.generator"
    pool = _renamed(state, {"gpool.linear": f"{generator}.head"}) | _gru(
        state, "gpool.gru", f"{generator}.gru"
    )
    return _filled(Tower(encoder, GPO()), {**own, **pool}, state, source)


def _filled(module: M, own: Mapping[str, Tensor], state: State, source: Source) -> M:
    """A module with these weights: each of its own is there, and each of the checkpoint is used."""
    used = {value.untyped_storage().data_ptr() for value in own.values()}
    left = [
        n
        for n, value in state.items()
        if value.untyped_storage().data_ptr() not in used and not n.startswith(UNUSED)
    ]
    wanted = module.state_dict()
    absent = [name for name in wanted if name not in own and not name.endswith("num_batches_tracked")]
    other = [n for n, value in own.items() if n not in wanted or wanted[n].shape != value.shape]
    if left or absent or other:
        first = [f"{len(left)} unknown weights ({left[0]})"] if left else []
        first += [f"{len(absent)} weights missing ({absent[0]})"] if absent else []
        first += [f"weights of other shapes ({other[0]})"] if other else []
        raise source.error(", ".join(first))
    full = {name: own[name].float() if name in own else value for name, value in wanted.items()}
    module.load_state_dict(full, strict=True)
    return module


def _need(state: State, *names: str, source: Source) -> None:
    absent = next((name for name in names if name not in state), None)
    if absent is not None:
        raise source.error(f"no weights called {absent}")


def _encoders(source: Source, count: int) -> list[State]:
    """The states of a checkpoint of several encoders that compare unit vectors."""
    found = _load(source)
    model, options = found.get("model"), found.get("opt")
    if not (isinstance(model, list | tuple) and len(model) == count):
        raise source.error(f"no 'model' of {'two' if count == 2 else 'three'} encoders")
    for name in ("no_imgnorm", "no_txtnorm"):
        if getattr(options, name, False):
            raise CheckpointError(
                f"{source} was trained with {name}: Diptych compares unit vectors, so this model cannot be used."
            )
    return [_tensors(one, source) for one in model]


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
