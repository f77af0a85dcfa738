"""Stopping a run on the user's wish: the signal, several processes agreeing, and what the user is told."""

from __future__ import annotations

import shlex
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from diptych.errors import Interrupted
from diptych.training.checkpoint import Progress, RunCard


class Interrupt:
    """Whether the user pressed Ctrl-C, or the cluster wants the machine back (SIGTERM); a second one ends at once."""

    SAME = 1.0  # seconds within which a second signal is the first one, passed on by torchrun
    EVERY = 10  # steps after which several processes ask each other

    def __init__(self) -> None:
        self.asked = False
        self.since = 0.0

    def handle(self, number: int, frame: Any) -> None:
        """Remember the wish; the loop ends after the step in progress."""
        if not self.asked:
            self.asked, self.since = True, time.monotonic()
        elif time.monotonic() - self.since > self.SAME:
            raise KeyboardInterrupt

    def agreed(self, accelerator: Accelerator, step: int = 0) -> bool:
        """Whether to stop now; several processes stop at the same step, for they save together."""
        if accelerator.num_processes == 1:
            return self.asked
        if step % self.EVERY:
            return False
        anyone = torch.tensor(int(self.asked), device=accelerator.device)
        torch.distributed.all_reduce(anyone, torch.distributed.ReduceOp.MAX)
        return bool(anyone)


def interrupted(card: RunCard, folder: Path, progress: Progress) -> Interrupted:
    """What the user is told after a run was saved on their wish."""
    place, data = shlex.quote(str(folder)), shlex.quote(card.data)
    return Interrupted(
        f"saved at step {progress.step}; resume with: "
        f"diptych train {card.recipe} --data {data} --resume_from_checkpoint {place}"
    )


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Catch SIGINT and SIGTERM while training, and put the old handlers back."""
    interrupt = Interrupt()
    try:
        before = {
            number: signal.signal(number, interrupt.handle) for number in (signal.SIGINT, signal.SIGTERM)
        }
    except ValueError:  # not in the main thread: no handler can be set
        yield interrupt
        return
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
