"""Is this curve healthy? Names collapse, NaN with its step, and BatchNorm in the wrong mode.

The checks read the device only when asked for a report, every few steps: no step waits for them.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from diptych.errors import TrainingError
from diptych.types import Terms

COLLAPSE_STEPS = 200  # steps in a row near the collapsed loss that count as a collapse
COLLAPSE_TOLERANCE = 0.01  # relative distance that counts as near


class Health:
    """Watches the terms of every step; ``report`` returns the sentences that concern the user."""

    def __init__(self, device: torch.device) -> None:
        self.first_bad = torch.full((), -1, dtype=torch.int64, device=device)
        self.streak = torch.zeros((), dtype=torch.int64, device=device)
        self.warned_collapse = False

    def watch(self, step: int, terms: Terms, collapsed: float | None) -> None:
        """Take in one step; ``collapsed`` is the loss when all similarities are equal, if the objective knows it."""
        loss = torch.stack([t.detach().float() for t in terms.values()]).sum()
        bad = ~torch.isfinite(loss) & (self.first_bad < 0)
        self.first_bad = torch.where(bad, torch.full_like(self.first_bad, step), self.first_bad)
        if collapsed is not None:
            near = (loss - collapsed).abs() <= COLLAPSE_TOLERANCE * collapsed
            self.streak = torch.where(near, self.streak + 1, torch.zeros_like(self.streak))

    def report(self, terms: Terms, collapsed: float | None) -> list[str]:
        """Raise on NaN; return a warning on a fresh collapse. Reads the device: call it every few steps."""
        self.refuse_nan(terms)
        if int(self.streak) >= COLLAPSE_STEPS and not self.warned_collapse and collapsed is not None:
            self.warned_collapse = True
            return [
                f"the loss has been at {collapsed:.1f} for {COLLAPSE_STEPS} steps, its value when all similarities are "
                "equal (collapse). Train the first epoch with all negatives, or lower --learning_rate."
            ]
        return []

    def refuse_nan(self, terms: Terms) -> None:
        """Raise with the step at which the loss stopped being a number; reads the device."""
        if int(self.first_bad) >= 0:
            names = [name for name, value in terms.items() if not bool(torch.isfinite(value))]
            which = f" (now in {', '.join(names)})" if names else ""
            raise TrainingError(
                f"the loss became NaN or infinite at step {int(self.first_bad)}{which}: "
                "lower --learning_rate, use --precision bf16 instead of fp16, or look for features that are not "
                "numbers with 'diptych data check'."
            )


def check_modes(model: nn.Module) -> None:
    """BatchNorm in the wrong mode: inside a frozen part it must use its stored statistics."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.training:
            parent = model.get_submodule(name.rpartition(".")[0]) if "." in name else model
            frozen = not any(p.requires_grad for p in parent.parameters())
            if frozen and module.affine:
                raise TrainingError(
                    f"BatchNorm '{name}' belongs to a frozen part but is in training mode, so its statistics would "
                    "drift: keep frozen parts in eval mode."
                )
