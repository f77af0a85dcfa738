"""A label-wise model built from its parts, untrained: shared blocks, one label head, pictures and words."""

from __future__ import annotations

import torch

from diptych.aggregators.labels import LabelHead
from diptych.branches.labels import LabelView
from diptych.data.images import PixelInput
from diptych.data.labels import Labels
from diptych.data.text import WordInput
from diptych.data.vocabulary import build_vocabulary
from diptych.encoders.bigru import BiGRU
from diptych.encoders.cnn import Grid
from diptych.encoders.lite0 import Lite0
from diptych.encoders.shared import SharedBlocks, SharingEncoder
from diptych.model.retriever import Retriever, Tower

NAMES = ["cat", "dog", "tree"]


def label_model(seed: int = 0) -> Retriever:
    torch.manual_seed(seed)
    backbone = Lite0(size=64)  # untrained features are so small that a cache in float16 keeps nothing of them
    words = build_vocabulary(["a red dog", "a green tree", "the cat"], 1)
    blocks, head = SharedBlocks(8, depth=1, heads=2, feedforward=16), LabelHead(8, len(NAMES))
    image = SharingEncoder(Grid(backbone, 8, drop=0.0), blocks, 0.15)
    text = SharingEncoder(BiGRU(len(words), 6, 8), blocks, 0.15, words.index("<mask>"), [0, 1, 2, 3])
    return Retriever(
        Tower(image, head),
        Tower(text, head),
        PixelInput(**backbone.pixel_format),
        WordInput(words, augment=0.0),
        {"labels": LabelView(Labels(NAMES), head, head)},
    ).eval()
