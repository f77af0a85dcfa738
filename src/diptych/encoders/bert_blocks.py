"""Pre-norm blocks that start from the layers of a BERT (label-wise retrieval: BERT-base)."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from diptych.encoders.pretrained import load_config, load_model, source_name
from diptych.encoders.sharing import Block, SharedBlocks
from diptych.errors import SettingsError


def start_from_bert(blocks: SharedBlocks, source: str | Path) -> None:
    """Copy the first layers of a BERT into ``blocks``; ``source`` is a folder or a hub id.

    ==============================  =========================================================================
    BERT's layer i                  block i
    ==============================  =========================================================================
    query, key, value, output       the same; the number of heads changes no shape
    intermediate, output            ``first``, ``second``
    LayerNorm after attention       ``between``: in BERT, too, the norm that the feed-forward layer reads through
    LayerNorm after feed-forward    ``before`` of block i + 1; of the last layer taken ``norm``
    LayerNorm of the embeddings     ``before`` of block 0
    ==============================  =========================================================================

    The blocks stay what they are: pre-norm, with ReLU where BERT has GELU.
    """
    name = source_name(source)
    config = load_config(source)
    if config.model_type != "bert":
        raise SettingsError(
            f"{name} is a '{config.model_type}', not a BERT: give the folder or the id of a BERT."
        )
    own = [block for block in blocks.blocks if isinstance(block, Block)]
    if config.num_hidden_layers < len(own):
        raise SettingsError(
            f"{name} has {config.num_hidden_layers} layers, fewer than the {len(own)} blocks: give fewer --blocks."
        )
    wanted = config.hidden_size, config.intermediate_size
    if (blocks.dim, own[0].first.out_features) != wanted:
        raise SettingsError(
            f"{name} is {wanted[0]} wide and {wanted[1]} inside a layer, the blocks {blocks.dim} and "
            f"{own[0].first.out_features}: give --dim {wanted[0]} --feedforward {wanted[1]}."
        )
    bert = load_model(source, config, pretrained=True).get_submodule
    norms = [bert("embeddings.LayerNorm")]
    for number, block in enumerate(own):
        layer = f"encoder.layer.{number}"
        for target, place in (
            (block.query, "attention.self.query"),
            (block.key, "attention.self.key"),
            (block.value, "attention.self.value"),
            (block.out, "attention.output.dense"),
            (block.between, "attention.output.LayerNorm"),
            (block.first, "intermediate.dense"),
            (block.second, "output.dense"),
        ):
            _copy(bert(f"{layer}.{place}"), target)
        norms.append(bert(f"{layer}.output.LayerNorm"))
    for norm, target in zip(norms, [*(block.before for block in own), blocks.norm], strict=True):
        _copy(norm, target)


@torch.no_grad()
def _copy(source: nn.Module, target: nn.Module) -> None:
    for name, parameter in target.named_parameters():
        parameter.copy_(source.get_parameter(name))
