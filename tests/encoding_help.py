"""What the tests of encoders share: padded ids, a rebuilt module, a tiny BERT on disk."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor, nn

from diptych.parts import describe, rebuild
from diptych.types import Features


def lengths(*sizes: int, longest: int | None = None) -> Tensor:
    return torch.arange(longest or max(sizes)) < torch.tensor(sizes)[:, None]


def ids(*sizes: int, longest: int | None = None, vocabulary: int = 50) -> Features:
    mask = lengths(*sizes, longest=longest)
    return Features(torch.randint(4, vocabulary, mask.shape) * mask, mask)


def rebuilt(module: nn.Module, folder: Path) -> nn.Module:
    """What a saved model does: the description through JSON, then the weights, strictly."""
    config = json.loads(json.dumps(describe(module, folder)))
    made: nn.Module = rebuild(config, folder)
    made.load_state_dict(module.state_dict(), strict=True)
    return made.train(module.training)


def tiny_bert(folder: Path) -> Path:
    """A BERT of two layers with random weights, saved in the real format."""
    from transformers import BertConfig, BertModel

    from diptych.encoders.pretrained import quiet

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8
    )
    with quiet():
        BertModel(config).save_pretrained(folder)
    return folder
