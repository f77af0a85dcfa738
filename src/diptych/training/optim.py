"""How parameters move: groups with multipliers and weight decay, freezing by epoch, schedules as values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from diptych.errors import SettingsError
from diptych.settings import TrainingSettings
from diptych.training.method import Method, longest_prefix
from diptych.weights import is_divided

NORM_EPSILON = 1e-6  # as in torch's clip_grad_norm_


def trainable(method: Method) -> dict[str, nn.Parameter]:
    """Every parameter that moves at some epoch, by name; objective parameters carry the prefix ``objective.``."""
    named = dict(method.retriever.named_parameters())
    named.update({f"objective.{name}": p for name, p in method.objective.named_parameters()})
    return {name: p for name, p in named.items() if p.requires_grad}


def build_optimizer(method: Method, settings: TrainingSettings, *, graphs: bool = False) -> torch.optim.AdamW:
    """AdamW with one group per learning-rate multiplier and weight decay.

    With ``graphs`` the rates are tensors and the step is capturable, so that a replayed CUDA graph reads new rates.
    """
    parameters = trainable(method)
    for prefix in [*method.multipliers, *method.train_from]:
        if not any(name.startswith(prefix) for name in dict(method.retriever.named_parameters())):
            raise SettingsError(f"no parameter starts with '{prefix}': correct the multiplier's prefix.")
    # parameters that are divided over processes and those that are not cannot be moved in one call
    groups: dict[tuple[float, float, bool], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        own = longest_prefix(name, method.multipliers)
        multiplier = 1.0 if own is None else method.multipliers[own]
        decay = settings.weight_decay if settings.decay_1d or parameter.dim() != 1 else 0.0
        groups.setdefault((multiplier, decay, is_divided(parameter)), []).append(parameter)
    described = [
        {
            "params": members,
            "multiplier": multiplier,
            "lr": settings.learning_rate * multiplier,
            "weight_decay": decay,
        }
        for (multiplier, decay, _), members in groups.items()
    ]
    on_cuda = next(iter(parameters.values())).is_cuda
    optimizer = torch.optim.AdamW(
        described,
        lr=settings.learning_rate,
        betas=method.betas,
        weight_decay=settings.weight_decay,
        fused=on_cuda or None,
        capturable=graphs,
    )
    if graphs:
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(group["lr"], device="cuda")
    return optimizer


def set_rates(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every group ``rate`` times its multiplier, in place where the rate is a tensor."""
    for group in optimizer.param_groups:
        value = rate * group["multiplier"]
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value


def can_fold_clip(optimizer: Any) -> bool:
    """Whether the optimiser's own pass can scale the gradients: torch's fused AdamW."""
    return bool(optimizer.defaults.get("fused"))


def fold_clip(optimizer: Any, parameters: Sequence[Tensor], limit: float) -> None:
    """Clip the gradients of the next step to ``limit`` in global norm, inside the optimiser's pass.

    ``clip_grad_norm_`` would read and write every gradient once more before it; here only their norm is computed. The
    fused kernel divides by ``grad_scale``, which is meant for a loss scale: max(1, ‖g‖ / limit) is the clip.
    """
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    plain = getattr(optimizer, "optimizer", optimizer)  # not Accelerate's wrapper
    plain.grad_scale = ((norm + NORM_EPSILON) / limit).clamp_min(1.0)


def freeze_for_epoch(method: Method, epoch: int, parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """Let each parameter require a gradient exactly from its epoch on; returns the names still waiting.

    One that is divided over processes always requires it, for FSDP looks once: its gradient is to be dropped.
    """
    waiting = []
    for name, parameter in parameters.items():
        prefix = longest_prefix(name, method.train_from)
        moves = prefix is None or epoch >= method.train_from[prefix]
        parameter.requires_grad_(moves or is_divided(parameter))
        if not moves:
            parameter.grad = None
            waiting.append(name)
    return waiting


CONTINUOUS = ("cosine", "linear")  # schedules that are spread over all epochs


Decay = Callable[[float], float]
"""How the rate falls: a factor for every point of training, given in epochs from 0 on."""


def decay_of(settings: TrainingSettings, length: float) -> Decay:
    """How the rate falls by the settings; a cosine and a line end after ``length`` epochs."""
    drop, final = settings.decay_factor, settings.final_factor
    decays: dict[str, Decay] = {
        "step": lambda epoch: drop if math.floor(epoch) >= settings.decay_epoch else 1.0,
        "every": lambda epoch: float(drop ** (math.floor(epoch) // settings.decay_every)),
        "cosine": lambda epoch: final + (1 - final) * (1 + math.cos(math.pi * min(epoch / length, 1.0))) / 2,
        "linear": lambda epoch: 1.0 - (1 - final) * min(epoch / length, 1.0),
    }
    return decays[settings.schedule]


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
        return self.decay(fallen / self.steps_per_epoch) * rise


def schedule_of(settings: TrainingSettings, steps_per_epoch: int) -> Schedule:
    """The schedule that the settings of a run describe."""
    steps = settings.epochs * steps_per_epoch
    after = settings.decay_after_warmup and settings.schedule in CONTINUOUS
    warmup = int(settings.warmup_share * steps) if after else round(settings.warmup_share * steps)
    length = max(1, steps - warmup) / steps_per_epoch if after else settings.epochs
    return Schedule(
        steps_per_epoch,
        decay_of(settings, length),
        settings.warmup_epoch,
        warmup,
        settings.schedule_per_epoch,
        after,
    )


def depends_on_epochs(settings: TrainingSettings) -> bool:
    """Whether steps already made would have been others with another number of epochs."""
    return settings.schedule in CONTINUOUS or settings.warmup_share > 0
