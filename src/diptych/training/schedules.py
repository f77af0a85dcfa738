"""Learning-rate schedules as values: the factor on every rate is a pure function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from diptych.settings import TrainingSettings

CONTINUOUS = ("cosine", "linear")  # schedules that are spread over all epochs


class Decay(Protocol):
    """How the rate falls: a factor for every point of training, given in epochs from 0 on."""

    def factor(self, epoch: float) -> float:
        """The factor at a point of training."""
        ...


@dataclass(frozen=True)
class StepDecay:
    """1, then ``drop`` from epoch ``at`` on."""

    at: int
    drop: float

    def factor(self, epoch: float) -> float:
        """The factor at a point of training."""
        return self.drop if math.floor(epoch) >= self.at else 1.0


@dataclass(frozen=True)
class EveryDecay:
    """``drop`` once more every ``epochs`` epochs."""

    epochs: int
    drop: float

    def factor(self, epoch: float) -> float:
        """The factor at a point of training."""
        return float(self.drop ** (math.floor(epoch) // self.epochs))


@dataclass(frozen=True)
class CosineDecay:
    """Half a cosine from 1 at the start to ``final`` at the end of ``epochs``."""

    epochs: float
    final: float

    def factor(self, epoch: float) -> float:
        """The factor at a point of training."""
        share = min(epoch / self.epochs, 1.0)
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * share)) / 2


@dataclass(frozen=True)
class LinearDecay:
    """A straight line from 1 at the start to ``final`` at the end of ``epochs``."""

    epochs: float
    final: float

    def factor(self, epoch: float) -> float:
        """The factor at a point of training."""
        return 1.0 - (1 - self.final) * min(epoch / self.epochs, 1.0)


@dataclass(frozen=True)
class Schedule:
    """The factor on every learning rate: a resumed run needs no scheduler state.

    The steps of ``warmup_epoch`` rise linearly from 1/n to 1; so do the first ``warmup_steps`` steps of a run.
    ``per_epoch`` lets ``decay`` act at the beginning of epochs alone. ``decay_after_warmup`` is the form of X-VLM: the
    first ``warmup_steps`` steps rise from 0 towards 1, and ``decay`` is spread over the steps that are left.
    """

    steps_per_epoch: int
    decay: Decay
    warmup_epoch: int = -1
    warmup_steps: int = 0
    per_epoch: bool = False
    decay_after_warmup: bool = False

    def factor(self, step: int) -> float:
        """The factor at optimiser step ``step``, counted from 0."""
        epoch, position = divmod(step, self.steps_per_epoch)
        rise = (position + 1) / self.steps_per_epoch if epoch == self.warmup_epoch else 1.0
        fallen = epoch * self.steps_per_epoch if self.per_epoch else step  # steps since the decay began
        if self.decay_after_warmup:
            fallen = max(0, fallen - self.warmup_steps)
        if step < self.warmup_steps:
            rise *= (step if self.decay_after_warmup else step + 1) / self.warmup_steps
        return self.decay.factor(fallen / self.steps_per_epoch) * rise


def schedule_of(settings: TrainingSettings, steps_per_epoch: int) -> Schedule:
    """The schedule that the settings of a run describe."""
    steps = settings.epochs * steps_per_epoch
    after = settings.decay_after_warmup and settings.schedule in CONTINUOUS
    warmup = int(settings.warmup_share * steps) if after else round(settings.warmup_share * steps)
    length = max(1, steps - warmup) / steps_per_epoch if after else settings.epochs
    decays: dict[str, Decay] = {
        "step": StepDecay(settings.decay_epoch, settings.decay_factor),
        "every": EveryDecay(settings.decay_every, settings.decay_factor),
        "cosine": CosineDecay(length, settings.final_factor),
        "linear": LinearDecay(length, settings.final_factor),
    }
    return Schedule(
        steps_per_epoch,
        decays[settings.schedule],
        settings.warmup_epoch,
        warmup,
        settings.schedule_per_epoch,
        after,
    )


def depends_on_epochs(settings: TrainingSettings) -> bool:
    """Whether steps already made would have been others with another number of epochs."""
    return settings.schedule in CONTINUOUS or settings.warmup_share > 0
