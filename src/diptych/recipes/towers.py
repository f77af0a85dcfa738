"""The one assembler of two-tower recipes: two encoders, a transformer on top, poolings, and the method around them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diptych.aggregators.pooling import Head
from diptych.branches.branch import Branch
from diptych.data.captions import Captions
from diptych.data.images import ImageInput
from diptych.data.text import TextInput
from diptych.encoders.encoder import Encoder
from diptych.encoders.shared import Contextual, TokenTransformer
from diptych.model import named
from diptych.model.retriever import Retriever, Tower
from diptych.objectives.objective import Objective
from diptych.settings import EncoderSettings, HostSettings
from diptych.training.method import Method

FRAMES = tuple(name for name in HostSettings.INHERITED if name not in ("image_encoder", "image_size"))
"""What a run on frames of videos takes over from one on pictures, whose projection is another."""


@dataclass(frozen=True)
class TowerSettings(EncoderSettings, HostSettings):
    """Two encoders by name with all that a two-tower recipe takes."""


def towers(
    settings: TowerSettings, captions: Captions, *, image_drop: float = 0.0, text_drop: float = 0.0
) -> Retriever:
    """Both sides by their names; ``drop`` is the share of elements that training leaves out at random."""
    image, image_input = named.image_side(settings, captions, drop=image_drop)
    text, text_input = named.text_side(settings, captions, drop=text_drop)
    return joined(settings, image, text, image_input, text_input)


def joined(
    settings: HostSettings,
    image: Encoder,
    text: Encoder,
    image_input: ImageInput,
    text_input: TextInput,
    branches: Mapping[str, Branch] | None = None,
    heads: bool = False,
) -> Retriever:
    """A retriever of two encoders, with the transformer on top and the poolings that the settings name.

    With ``heads`` a linear layer behind each encoder's first element takes the place of the pooling 'first'.
    """
    if settings.depth or settings.ON_TOP:
        first = _transformer(settings, image.dim)
        image = Contextual(image, first)
        text = Contextual(text, first if settings.share_weights else _transformer(settings, text.dim))
    towers = [
        Tower(encoder, Head(encoder.dim, encoder.dim))
        if heads and pool == "first"
        else named.pooled(encoder, pool, settings)
        for encoder, pool in ((image, settings.image_pool), (text, settings.text_pool))
    ]
    return Retriever(towers[0], towers[1], image_input, text_input, branches)


def _transformer(settings: HostSettings, dim: int) -> TokenTransformer:
    width = settings.feedforward or 4 * dim
    return TokenTransformer(dim, settings.depth, settings.heads, width, settings.dropout)


def method(retriever: Retriever, objective: Objective, settings: EncoderSettings, **more: Any) -> Method:
    """A method whose pretrained parts have the learning-rate factors of the settings; its image backbone waits."""
    return Method(
        retriever,
        objective,
        multipliers=named.multipliers(retriever, settings),
        train_from=named.train_from(retriever),
        **more,
    )
