"""The processes of a run: their accelerator, what they save and agree on together, and stopping on the user's wish."""

from __future__ import annotations

import atexit
import os
import shlex
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs
from torch import nn

from diptych.errors import Interrupted, MissingExtra, SettingsError
from diptych.model.retriever import Retriever
from diptych.settings import TrainingSettings
from diptych.training.checkpoint import Progress, RunCard
from diptych.training.method import Method


@contextmanager
def in_one_piece(model: nn.Module, method: Method, accelerator: Accelerator) -> Iterator[Retriever | None]:
    """The model of a run as it is now, on the main process; None on the others. Every process must call it."""
    whole = getattr(model, "whole", None)
    if whole is not None:
        with whole() as now:
            yield now
    else:
        yield method.retriever if accelerator.is_main_process else None


def share(progress: Progress, accelerator: Accelerator) -> Progress:
    """The main process's progress, on every process."""
    if accelerator.num_processes == 1:
        return progress
    box = [progress]
    torch.distributed.broadcast_object_list(box)
    return box[0]


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


WAIT = timedelta(hours=12)  # how long processes wait for the one that clusters, evaluates or saves


def start(method: Method, settings: TrainingSettings, on_cpu: bool = False) -> Accelerator:
    """The accelerator of this run, with the settings that cannot be combined refused."""
    waits = bool(method.train_from)
    # one process may train several runs, each with its own precision, and on its own device where it is alone
    AcceleratorState._reset_state(reset_partial_state=int(os.environ.get("WORLD_SIZE", "1")) == 1)
    accelerator = Accelerator(
        # else processes on a machine without a GPU would not find each other
        cpu=on_cpu or not torch.cuda.is_available(),
        mixed_precision=settings.precision,
        kwargs_handlers=[
            DistributedDataParallelKwargs(find_unused_parameters=waits),
            InitProcessGroupKwargs(timeout=WAIT),
        ],
    )
    check_settings(settings, accelerator.device.type, accelerator.num_processes)
    if accelerator.num_processes > 1:
        # for programs of their own; the command line ends its processes itself (diptych/cli)
        atexit.register(accelerator.state.destroy_process_group)
        # dropout differs between processes; weights were made from the plain seed
        torch.manual_seed(settings.seed + accelerator.process_index)
    return accelerator


def check_settings(settings: TrainingSettings, device: str, processes: int) -> None:
    """Refuse settings that cannot be combined; needs nothing but them, so it can be asked before any work."""
    if settings.cuda_graphs and (device != "cuda" or processes > 1):
        raise SettingsError("--cuda_graphs needs exactly one CUDA GPU: leave it out here.")
    if settings.cuda_graphs and settings.micro_batch:
        raise SettingsError("--micro_batch cannot be combined with --cuda_graphs: leave one of them out.")
    if settings.cuda_graphs and settings.precision == "fp16":
        raise SettingsError("--cuda_graphs excludes fp16, whose loss scale the host decides: use bf16.")
    if settings.precision == "fp16" and device == "cpu":
        raise SettingsError("--precision fp16 needs a GPU: use 'no' on a CPU.")
    if settings.shard_model and processes == 1:
        raise SettingsError(
            "--shard_model divides the model over several processes: start it with torchrun, or leave it out."
        )
    if settings.shard_model and (settings.compile or settings.precision == "fp16"):
        wrong = "--compile" if settings.compile else "--precision fp16"
        raise SettingsError(f"--shard_model cannot be combined with {wrong}: leave that out (bf16 is fine).")
    if settings.batch_size % processes:
        raise SettingsError(f"--batch_size {settings.batch_size} must divide over {processes} processes.")
    if settings.tensorboard and find_spec("tensorboard") is None:
        raise MissingExtra("tensorboard", "tensorboard", "--tensorboard")
