"""What a run says of itself: JSON lines and TensorBoard, running means and speed, and whether the curve is healthy.

The checks read the device only when asked for a report, every few steps: no step waits for them.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from diptych.entries import MODEL
from diptych.errors import TrainingError, import_extra
from diptych.storage import parse_json, storing, write_text
from diptych.types import Terms

APPENDING = os.O_WRONLY | os.O_CREAT | os.O_APPEND


class Log:
    """Appends one JSON object per line to ``log.jsonl``; a resumed run first drops the lines past its step.

    A run that starts again starts its log again.
    """

    def __init__(self, folder: Path, *, resumed_at: int | None = None, tensorboard: bool = False) -> None:
        self.path = folder / "log.jsonl"
        self.writer: Any = None
        if self.path.exists():
            last = -1 if resumed_at is None else resumed_at
            kept = [line for line in read_log(self.path) if line["step"] <= last]
            write_text(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        if tensorboard:
            board = import_extra("torch.utils.tensorboard", "tensorboard", "--tensorboard", "tensorboard")
            self.writer = board.SummaryWriter(str(folder / "tensorboard"), purge_step=resumed_at)

    def write(self, step: int, values: dict[str, Any]) -> None:
        """One line: the step and what was measured there."""
        with storing(self.path), os.fdopen(MODEL.open(self.path, APPENDING), "ab") as file:
            file.write(json.dumps({"step": step, **values}).encode() + b"\n")
        if self.writer is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a log; one that is damaged, or cut short by a crash, is left out, and no other."""
    lines: list[dict[str, Any]] = []
    for line in MODEL.read(path).split(b"\n"):
        try:
            content = parse_json(line)
        except ValueError:
            continue
        if isinstance(content, dict) and isinstance(content.get("step"), int):
            lines.append(content)
    return lines


class Meter:
    """Running means of the terms and the speed, kept on the device until they are read."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.total, self.steps = 0.0, 0  # of what was read before
        self.reset()

    def reset(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.count, self.began = 0, time.perf_counter()

    def add(self, terms: dict[str, Tensor]) -> None:
        for name, value in terms.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value.clone()
        self.count += 1

    def read(self) -> dict[str, float]:
        """Means since the last read: loss, terms, pairs per second."""
        terms = {name: float(value) / self.count for name, value in self.sums.items()}
        self.total, self.steps = self.total + sum(terms.values()) * self.count, self.steps + self.count
        speed = self.count * self.batch_size / (time.perf_counter() - self.began)
        self.reset()
        return {"loss": sum(terms.values()), **terms, "pairs_per_second": round(speed, 1)}

    def mean_loss(self) -> float:
        """The mean loss of all steps so far; reads the device."""
        left = sum(float(value) for value in self.sums.values())
        return (self.total + left) / max(1, self.steps + self.count)


COLLAPSE_STEPS = 200  # steps in a row near the collapsed loss that count as a collapse
COLLAPSE_TOLERANCE = 0.01  # relative distance that counts as near


class StepHealth:
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
