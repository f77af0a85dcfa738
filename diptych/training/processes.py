"""What the processes of a run do together: save the state, agree on the progress."""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate import Accelerator

from diptych.training import checkpoint
from diptych.training.checkpoint import Progress
from diptych.training.method import Method


def save_on_main(
    accelerator: Accelerator,
    folder: Path,
    method: Method,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
) -> None:
    """Write ``last/`` from the main process; the random states of all processes go in."""
    randoms = checkpoint.gather_random(accelerator.num_processes)
    if accelerator.is_main_process:
        checkpoint.save_state(folder, method, optimizer, progress, randoms, accelerator.scaler)
    accelerator.wait_for_everyone()


def share(progress: Progress, accelerator: Accelerator) -> Progress:
    """The main process's progress, on every process."""
    if accelerator.num_processes == 1:
        return progress
    box = [progress]
    torch.distributed.broadcast_object_list(box)
    return box[0]
