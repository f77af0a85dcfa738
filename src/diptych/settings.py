"""Settings: flat, typed, frozen; each field is also a flag of the command line."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

from diptych.errors import SettingsError
from diptych.names import Registry, fits
from diptych.registries import (
    IMAGE_ENCODERS,
    IMAGE_TEACHERS,
    OBJECTIVES,
    POOLINGS,
    TEXT_ENCODERS,
    TEXT_TEACHERS,
)

T = TypeVar("T")

IMAGE_HELP = "image encoder (auto: regions for stored features, lite0 for pictures)"
IMAGE_TEACHER_HELP = "image teacher (auto: stored for stored features, lite0 for pictures)"
TEXT_TEACHER_HELP = "text teacher, the mean of its token states"
"""Settings that several recipes and commands have, in words: a help page imports no model."""


UNCHANGED: Any = object()  # the ``before`` of a setting that every saved run has, or that changed nothing


def setting(
    default: T,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    names: Registry | None = None,
    before: T = UNCHANGED,
) -> T:
    """A field with its sentence of help and its range, both ends allowed, or the registry that knows its names.

    ``before`` is the value of runs that were saved before the setting existed, where that is not the default.
    """
    metadata = {"help": help, "low": low, "high": high, "names": names, "before": before}
    entry: T = field(default=default, metadata=metadata)
    return entry


def defaults(**values: Any) -> Callable[[type[T]], type[T]]:
    """Settings that a recipe has from others, with defaults of its own; put it below ``@dataclass(frozen=True)``."""

    def change(kind: type[T]) -> type[T]:
        bases = [base for base in kind.__mro__[:0:-1] if dataclasses.is_dataclass(base)]
        known = {entry.name: entry for base in bases for entry in dataclasses.fields(base)}
        hints = {name: hint for base in bases for name, hint in typing.get_type_hints(base).items()}
        for name, value in values.items():
            setattr(kind, name, field(default=value, metadata=known[name].metadata))
            kind.__annotations__[name] = hints[name]
        return kind

    return change


@dataclass(frozen=True)
class TrainingSettings:
    """What every recipe's training has; the recipe's own settings extend it."""

    seed: int = setting(0, "seed of weights, order, augmentation and dropout")
    objective: str = setting(
        "own", "the loss, own (the recipe's) or a sum: 'own + 0.5*dcl(epsilon=0.2)'", names=OBJECTIVES
    )
    init: str = setting("", "run or model folder whose parts the model starts from, where they fit")
    epochs: int = setting(25, "passes over the training texts", low=1)
    batch_size: int = setting(128, "pairs per step, over all processes together", low=2)
    learning_rate: float = setting(5e-4, "base learning rate", low=0)
    weight_decay: float = setting(1e-4, "AdamW weight decay", low=0)
    decay_1d: bool = setting(True, "weight decay also on biases, norms and other 1-d parameters")
    schedule: Literal["step", "every", "cosine", "linear"] = setting(
        "step", "how the learning rate falls: once, every few epochs, as a cosine, as a line"
    )
    decay_epoch: int = setting(15, "epoch from which a step schedule applies decay_factor", low=0)
    decay_every: int = setting(10, "epochs between two decays of the schedule 'every'", low=1)
    decay_factor: float = setting(0.1, "factor on the learning rate at a decay (step and every)", low=0)
    final_factor: float = setting(0.0, "factor at the end of a cosine or linear schedule", low=0, high=1)
    decay_after_warmup: bool = setting(
        False, "cosine and linear: rise to the full rate in the warm-up, and fall from there, not from step 0"
    )
    schedule_per_epoch: bool = setting(False, "change the learning rate at the beginning of epochs only")
    warmup_share: float = setting(
        0.0, "share of all steps in which the rate rises linearly from 0", low=0, high=1
    )
    warmup_epoch: int = setting(
        -1, "epoch in which the learning rate rises linearly from 0 (-1: never)", low=-1
    )
    clip_norm: float = setting(2.0, "largest global gradient norm (0: no clipping)", low=0)
    patience: int = setting(0, "stop after N epochs without a better validation result (0: never)", low=0)
    save_steps: int = setting(0, "save the state every N steps too (0: only at the end of an epoch)", low=0)
    log_steps: int = setting(20, "steps between two lines of the log", low=1)
    precision: Literal["no", "bf16", "fp16"] = setting("no", "mixed precision of the forward pass")
    compile: bool = setting(False, "compile the encoders with torch.compile")
    micro_batch: int = setting(
        0, "encode a process's share of a batch in pieces of N, by gradient caching (0: whole)", low=0
    )
    shard_model: bool = setting(
        False, "divide parameters, gradients and optimiser state over the processes (FSDP2, with torchrun)"
    )
    cuda_graphs: bool = setting(False, "replay each training step as a CUDA graph (one GPU)")
    workers: int = setting(0, "threads that prepare batches (0: the training thread itself)", low=0)
    tensorboard: bool = setting(False, "also write TensorBoard event files (needs the extra 'tensorboard')")
    ridge_baseline: bool = setting(
        True, "measure ridge regression on the same features, and say which is better"
    )
    on_collapse: Literal["warn", "stop"] = setting("warn", "what to do when the loss has collapsed")
    noise: str = setting(
        "", "mix up training pairs: RATIO:text or RATIO:image, or a file .npy of the image row of each text"
    )
    strict_images: bool = setting(
        False, "stop at a picture that cannot be read (else it is left out and listed)"
    )

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for entry in dataclasses.fields(self):
            value, about = getattr(self, entry.name), entry.metadata
            low, high, names = about.get("low"), about.get("high"), about.get("names")
            if isinstance(value, float) and not math.isfinite(value):
                raise SettingsError(f"--{entry.name} is {value}: give a number.")
            if isinstance(value, int | float) and not isinstance(value, bool):
                if low is not None and value < low:
                    raise SettingsError(f"--{entry.name} is {value}: it must be at least {low:g}.")
                if high is not None and value > high:
                    raise SettingsError(f"--{entry.name} is {value}: it must be at most {high:g}.")
            choices = literal_choices(hints[entry.name])
            if choices and value not in choices:
                raise SettingsError(f"--{entry.name} is {value!r}: choose {', '.join(map(str, choices))}.")
            # a form may be a folder, which is looked for when it is used
            if names is not None and not names.forms:
                names.check(value)


@dataclass(frozen=True)
class EncoderSettings(TrainingSettings):
    """Two encoders by their names, what they read, and how their pretrained parts are trained."""

    image_encoder: str = setting("auto", IMAGE_HELP, names=IMAGE_ENCODERS)
    text_encoder: str = setting("bigru", "text encoder", names=TEXT_ENCODERS)
    dim: int = setting(1024, "joint dimension", low=1)
    unit_input: bool = setting(False, "give stored CNN vectors unit length first, as VSE++ did in 2018")
    train_backbone: bool = setting(False, "train the CNN or ViT from epoch 1 (else its features are cached)")
    backbone_multiplier: float = setting(0.1, "learning-rate factor of the backbone (BUTD, WSL: 0.01)", low=0)
    image_size: int = setting(224, "pixels of the square image the backbone reads (VSE∞: 512)", low=32)
    train_text: bool = setting(True, "train the text transformer (else its token states are cached)")
    text_multiplier: float = setting(0.1, "learning-rate factor of the text transformer", low=0)
    word_dim: int = setting(300, "width of BiGRU word vectors", low=1)
    word_vectors: str = setting(
        "", "start words from 'glove' (50-d, extra 'demo') or a file of GloVe or word2vec"
    )
    vocabulary: str = setting("", "published vocabulary JSON (else built from the training texts)")
    min_count: int = setting(4, "least occurrences of a word in the vocabulary", low=1)


@dataclass(frozen=True)
class TeacherSettings(TrainingSettings):
    """The frozen teachers that soft labels follow (CUSA); they are made where a loss reads them."""

    image_teacher: str = setting("auto", IMAGE_TEACHER_HELP, names=IMAGE_TEACHERS)
    text_teacher: str = setting("minilm", TEXT_TEACHER_HELP, names=TEXT_TEACHERS)
    image_teacher_space: Literal["pooled", "tokens"] = setting(
        "pooled", "the teacher's vector: the mean of its cells, or all cells end to end (the paper)"
    )
    teacher_projection: int = setting(0, "project teacher vectors to N dimensions (2048; 0: none)", low=0)
    teacher_image_size: int = setting(
        0, "pixels of the square picture that the image teacher reads (0: as the model)", low=0
    )
    teacher_mode: Literal["cached", "live", "live_image", "live_text"] = setting(
        "cached", "teacher vectors computed once and kept, or in every step: all, or those of one side"
    )


@dataclass(frozen=True)
class HostSettings(TeacherSettings):
    """What every recipe of two towers takes: poolings, a transformer on top, teachers."""

    INHERITED: ClassVar[tuple[str, ...]] = (
        "image_encoder", "text_encoder", "dim", "depth", "share_weights", "heads", "feedforward", "image_size",
        "word_dim", "vocabulary", "min_count",
    )  # fmt: skip
    """Settings that decide which weights a model has: a run that starts from another takes them over from it."""
    ON_TOP: ClassVar[bool] = False  # whether the place of the transformer is there even without a layer

    image_pool: str = setting("gpo", "visual aggregator", names=POOLINGS)
    text_pool: str = setting("gpo", "textual aggregator", names=POOLINGS)
    pool_k: int = setting(2, "k of the kmax aggregator", low=1)
    gpo_sequence: Literal["bigru", "transformer", "mlp"] = setting("bigru", "GPO's generator (VSE∞, Table 3)")
    gpo_per_dimension: bool = setting(False, "coefficients per dimension (VSE∞, Table 7)")
    gpo_data_dependent: bool = setting(False, "feed the features into the generator too (VSE∞, Table 8)")
    depth: int = setting(0, "layers of the transformer on top of both sides (COOKIE; 0: none)", low=0)
    share_weights: bool = setting(True, "one transformer for both sides (off: one each)")
    heads: int = setting(8, "attention heads of the transformer", low=1)
    feedforward: int = setting(0, "width of its feed-forward layers (0: four times its own width)", low=0)
    dropout: float = setting(0.1, "dropout of the transformer", low=0, high=0.95)


S = TypeVar("S", bound=TrainingSettings)


def literal_choices(annotation: Any) -> tuple[Any, ...]:
    """The values a ``Literal`` annotation allows; empty for any other annotation."""
    return typing.get_args(annotation) if typing.get_origin(annotation) is Literal else ()


def plain_type(annotation: Any) -> type:
    """int, float, bool or str for the annotation of a setting, optional or not."""
    if literal_choices(annotation):
        return type(literal_choices(annotation)[0])
    if isinstance(annotation, types.UnionType):
        annotation = next(a for a in typing.get_args(annotation) if a is not type(None))
    if annotation not in (int, float, bool, str):
        raise TypeError(f"a setting must be int, float, bool or str, not {annotation}")
    return typing.cast(type, annotation)


def setting_names(kind: type[TrainingSettings]) -> set[str]:
    """The names of the settings of a recipe."""
    return {entry.name for entry in dataclasses.fields(kind)}


def parse_value(kind: type[TrainingSettings], name: str, text: str) -> Any:
    """The value of a setting that a person wrote; booleans are true and false."""
    _check_names(kind, [name])
    plain = plain_type(typing.get_type_hints(kind)[name])
    words = {"true": True, "false": False}
    try:
        return words[text.lower()] if plain is bool else plain(text)
    except (KeyError, ValueError):
        raise SettingsError(f"{name} = {text}: it must be of type {plain.__name__}.") from None


def to_json(settings: TrainingSettings) -> dict[str, Any]:
    """Settings as a flat JSON object."""
    return dataclasses.asdict(settings)


def from_json(kind: type[S], values: dict[str, Any]) -> S:
    """Settings from a flat JSON object; an unknown name is an error that lists the nearest."""
    _check_names(kind, values)
    hints = typing.get_type_hints(kind)
    for name, value in values.items():
        plain = plain_type(hints[name])
        optional = type(None) in typing.get_args(hints[name])
        if not fits(value, plain) and not (value is None and optional):
            raise SettingsError(f"the setting {name} is {value!r:.60}: it must be of type {plain.__name__}.")
    return kind(**values)


def check_saved(kind: type[TrainingSettings], values: Mapping[str, Any]) -> None:
    """Refuse values read from a file that name a class of a module which nothing else declares."""
    for entry in dataclasses.fields(kind):
        names = entry.metadata.get("names")
        if names is not None and isinstance(values.get(entry.name), str):
            names.check_saved(values[entry.name])


def from_saved(kind: type[S], values: dict[str, Any]) -> S:
    """Settings of a saved run: one that is newer than the run has the value that the run was made with."""
    older = {
        entry.name: entry.metadata["before"]
        for entry in dataclasses.fields(kind)
        if entry.metadata.get("before", UNCHANGED) is not UNCHANGED
    }
    return from_json(kind, {**older, **values})


def differences(a: TrainingSettings, b: TrainingSettings) -> dict[str, tuple[Any, Any]]:
    """The fields in which two settings differ."""
    left, right = to_json(a), to_json(b)
    return {name: (left[name], right.get(name)) for name in left if left[name] != right.get(name)}


def _check_names(kind: type[TrainingSettings], names: Iterable[str]) -> None:
    import difflib

    known = setting_names(kind)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "docs/recipes.md lists those of each recipe."
            raise SettingsError(f"there is no setting called {name}: {hint}")
