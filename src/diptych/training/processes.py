"""What the processes of a run do together: save the state, agree on the progress."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from diptych.model.retriever import Retriever
from diptych.training import checkpoint
from diptych.training.checkpoint import Progress
from diptych.training.method import Method
from diptych.weights import is_divided


def divided(method: Method, accelerator: Accelerator) -> nn.Module:
    """The model of a run, its parameters divided over the processes (``training.sharding``)."""
    from diptych.training.sharding import ShardedModel  # torch's own modules behind it take long to import

    return ShardedModel(method, accelerator)


@contextmanager
def in_one_piece(model: nn.Module, method: Method, accelerator: Accelerator) -> Iterator[Retriever | None]:
    """The model of a run as it is now, on the main process; None on the others. Every process must call it."""
    whole = getattr(model, "whole", None)
    if whole is not None:
        with whole() as now:
            yield now
    else:
        yield method.retriever if accelerator.is_main_process else None


def save_on_main(
    accelerator: Accelerator,
    folder: Path,
    method: Method,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
) -> None:
    """Write ``last/`` from the main process; the random states of all processes go in."""
    randoms = checkpoint.gather_random(accelerator.num_processes)
    if accelerator.is_main_process or any(map(is_divided, method.retriever.parameters())):
        tensors = checkpoint.tensors_of(method, optimizer)
    if accelerator.is_main_process:
        checkpoint.save_state(folder, tensors, progress, randoms, accelerator.scaler)
    accelerator.wait_for_everyone()


def share(progress: Progress, accelerator: Accelerator) -> Progress:
    """The main process's progress, on every process."""
    if accelerator.num_processes == 1:
        return progress
    box = [progress]
    torch.distributed.broadcast_object_list(box)
    return box[0]
