"""VSE∞ as its public code trains it, where that differs from the paper or from what is decided here.

========================  =============================================  ==================================
                          the public code, and this recipe               ``vse-infinity``
========================  =============================================  ==================================
weight decay              1e-2 with a BiGRU on regions (AdamW's own:     1e-4
                          none is passed), else 1e-4
warm-up                   regions: none; a CNN that is trained: the      the learning rate rises in epoch 1
                          loss of epoch 1 times i/n at its i-th step
texts of the same image   are negatives                                  are masked
BatchNorm of the regions  counts the rows of padding too                 valid rows
projection of BERT        torch's own uniform start                      Xavier-uniform, bias 0
CNN                       512 pixels, rate × 0.01 (BUTD's weights)       224 pixels, rate × 0.1
========================  =============================================  ==================================

What it cannot repeat: ``DataParallel`` (BatchNorm per replica of 32 pairs in the BERT runs) and BUTD's CNN.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from diptych.data.captions import Captions
from diptych.encoders.regions import Regions
from diptych.encoders.transformer import TransformerText
from diptych.model import named
from diptych.objectives.combine import Ramp
from diptych.recipes import vse_infinity
from diptych.recipes.recipe import Recipe
from diptych.settings import defaults, setting
from diptych.training.method import Method

REGION_DECAY, DECAY = 1e-2, 1e-4


@dataclass(frozen=True)
@defaults(
    image_encoder="regions", warmup_epoch=-1, mask_same_image=False, backbone_multiplier=0.01, image_size=512
)
class Settings(vse_infinity.Settings):
    """VSE∞'s settings as the public scripts and the defaults of its code leave them."""

    weight_decay: float = setting(0.0, "AdamW weight decay (0: 0.01 with a GRU on regions, else 1e-4)", low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight_decay == 0:
            regions = self.image_encoder in ("auto", "regions") and self.text_encoder in named.GRUS
            object.__setattr__(self, "weight_decay", REGION_DECAY if regions else DECAY)


def build(settings: Settings, captions: Captions) -> Method:
    """VSE∞, then what the public code does otherwise."""
    method = vse_infinity.build(settings, captions)
    image, text = method.retriever.image.encoder, method.retriever.text.encoder
    if isinstance(image, Regions):
        image.count_padding = True
    if isinstance(text, TransformerText):
        text.linear.reset_parameters()  # type: ignore[operator]
    if not method.train_from:
        return method
    steps = len(captions.texts) // settings.batch_size + 1
    return replace(method, objective=Ramp(method.objective, epoch=1, steps=steps))


RECIPE = Recipe("vse-infinity-published", "VSE∞ as its public code trains it", Settings, build)
