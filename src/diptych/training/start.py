"""The accelerator of a run, once settings that cannot be combined have been refused."""

from __future__ import annotations

import atexit
import os
from datetime import timedelta
from importlib.util import find_spec

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs

from diptych.errors import MissingExtra, SettingsError
from diptych.settings import TrainingSettings
from diptych.training.method import Method

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
        raise SettingsError(
            "--cuda_graphs cannot be combined with fp16, whose loss scale the host decides: use bf16."
        )
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
        raise SettingsError(f"--batch_size {settings.batch_size} does not divide over {processes} processes.")
    if settings.tensorboard and find_spec("tensorboard") is None:
        raise MissingExtra("tensorboard", "tensorboard", "--tensorboard")
