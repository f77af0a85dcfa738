"""VSE∞: a visual semantic embedding whose pooling is learned (Chen et al., CVPR 2021).

Two towers; each projects its local features to the joint space and pools them with a Generalized Pooling Operator;
hinge loss on the hardest negative, all negatives in the first epoch; Size Augmentation on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from diptych.data.captions import Captions
from diptych.encoders.regions import Regions
from diptych.encoders.transformer import TransformerText
from diptych.evaluation.video import VideoRetrieval
from diptych.model import named
from diptych.objectives.combine import Ramp
from diptych.objectives.triplet import triplet
from diptych.recipes.recipe import Recipe
from diptych.recipes.towers import FRAMES, HingeSettings, TowerSettings, method, towers
from diptych.settings import defaults, setting
from diptych.training.method import Method


@dataclass(frozen=True)
@defaults(all_negatives_epochs=1, mask_same_image=True, warmup_epoch=1)
class Settings(TowerSettings, HingeSettings):
    """VSE∞ in the paper's numbers: AdamW 5e-4, 25 epochs, ×0.1 for the last 10, batch 128, margin 0.2, 1024-d."""

    size_augmentation: Literal["both", "visual", "none"] = setting(
        "both", "sides whose elements are dropped at random while training (Table 2)"
    )
    drop: float = setting(0.2, "share of elements that Size Augmentation drops", low=0, high=0.95)
    info_nce_temperature: float = setting(0.07, "temperature that InfoNCE starts from", low=1e-3, high=1)


@dataclass(frozen=True)
@defaults(image_pool="mean", text_pool="mean")
class MeanSettings(Settings):
    """VSE++: hard negatives with fixed pooling (Faghri et al., BMVC 2018), as re-run in the VSE∞ tables.

    ``--text_pool first`` pools a transformer by its CLS token. The model of 2018, on stored global CNN vectors, is
    ``--image_encoder grid --unit_input --text_encoder gru --text_pool first --size_augmentation none --learning_rate
    2e-4 --weight_decay 0 --epochs 30 --all_negatives_epochs 0 --warmup_epoch -1``: one layer on the image, and a
    one-way GRU whose last state is the text.
    """


@dataclass(frozen=True)
@defaults(image_encoder="grid", epochs=35, learning_rate=1e-4, decay_epoch=25)
class VideoSettings(Settings):
    """VSE∞'s settings with HGR's schedule for videos: 35 epochs at 1e-4, a tenth of it for the last ten.

    A video is the set of its frame features (MSR-VTT: ResNet-152, 2048 numbers; VATEX: I3D, 1024), each projected by
    one layer and pooled like the words of a text (VSE∞, supplement 1.2).
    """

    INHERITED = FRAMES


@dataclass(frozen=True)
@defaults(image_pool="mean", text_pool="mean")
class MeanVideoSettings(VideoSettings):
    """The same with the pooling fixed."""


REGION_DECAY, DECAY = 1e-2, 1e-4


@dataclass(frozen=True)
@defaults(
    image_encoder="regions", warmup_epoch=-1, mask_same_image=False, backbone_multiplier=0.01, image_size=512
)
class PublishedSettings(Settings):
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

    weight_decay: float = setting(0.0, "AdamW weight decay (0: 0.01 with a GRU on regions, else 1e-4)", low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight_decay == 0:
            regions = self.image_encoder in ("auto", "regions") and self.text_encoder in named.GRUS
            object.__setattr__(self, "weight_decay", REGION_DECAY if regions else DECAY)


def build(settings: Settings, captions: Captions) -> Method:
    """Compose the method for the given training data."""
    visual = settings.drop if settings.size_augmentation in ("both", "visual") else 0.0
    textual = settings.drop if settings.size_augmentation == "both" else 0.0
    retriever = towers(settings, captions, image_drop=visual, text_drop=textual)
    return method(retriever, triplet(settings), settings)


def build_published(settings: PublishedSettings, captions: Captions) -> Method:
    """VSE∞, then what the public code does otherwise."""
    base = build(settings, captions)
    image, text = base.retriever.image.encoder, base.retriever.text.encoder
    if isinstance(image, Regions):
        image.count_padding = True
    if isinstance(text, TransformerText):
        text.linear.reset_parameters()  # type: ignore[operator]
    if not base.train_from:
        return base
    steps = len(captions.texts) // settings.batch_size + 1
    return replace(base, objective=Ramp(base.objective, epoch=1, steps=steps))


RECIPE = Recipe("vse-infinity", "VSE∞: learned pooling (GPO)", Settings, build)
PUBLISHED = Recipe(
    "vse-infinity-published", "VSE∞ as its public code trains it", PublishedSettings, build_published
)
PLUS_PLUS = Recipe("vse-plus-plus", "VSE++: hardest negatives, mean pooling", MeanSettings, build)


def video(settings: VideoSettings) -> tuple[VideoRetrieval, ...]:
    """Recall over the different texts of the videos."""
    return (VideoRetrieval(),)


VIDEO = Recipe("vse-infinity-video", "VSE∞ on frames of videos", VideoSettings, build, video)
MEAN_VIDEO = Recipe("vse-plus-plus-video", "VSE++ on frames of videos", MeanVideoSettings, build, video)
