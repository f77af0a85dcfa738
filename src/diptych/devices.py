"""Which accelerator a model runs on: CUDA or the CPU, unless the user says otherwise.

Apple's MPS is used only where it is asked for by name: it is known for vectors of NaN or zeros, and for vectors that
depend on the batch, and no test here runs on it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal, get_args

import torch

from diptych.errors import SettingsError

DEVICES = ("auto", "cuda", "mps", "cpu")
Precision = Literal["no", "half", "bf16", "fp16"]
PRECISIONS: tuple[str, ...] = get_args(Precision)
_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def pick_device(device: str | torch.device | None = None) -> torch.device:
    """The device of this name (``cuda``, ``cuda:1``, ``mps``, ``cpu``); ``auto`` or None is CUDA, else the CPU."""
    name = "auto" if device is None else str(device)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, number = name.partition(":")
    if kind not in DEVICES[1:] or (number and not number.isdecimal()):
        raise SettingsError(f"there is no device '{name}': choose auto, cuda, cuda:1, mps or cpu.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise SettingsError("--device cuda: torch finds no CUDA GPU here; leave it out, or use --device cpu.")
    if kind == "cuda" and number and int(number) >= torch.cuda.device_count():
        raise SettingsError(
            f"--device {name}: this machine has {torch.cuda.device_count()} CUDA GPUs, numbered from 0."
        )
    if kind == "mps" and not torch.backends.mps.is_available():
        raise SettingsError("--device mps: this machine has no Apple GPU; leave it out, or use --device cpu.")
    return torch.device(name)


def describe_device(device: torch.device | str) -> str:
    """The device in words, for the line that says where a model runs: ``cuda (NVIDIA H200)``."""
    name = str(device)
    return f"{name} ({torch.cuda.get_device_name(name)})" if name.startswith("cuda") else name


def pick_precision(precision: str, device: torch.device) -> str:
    """``no``, ``bf16`` or ``fp16``; ``half`` is fp16, which moves recall least, and bf16 on a CPU, which has no fp16.

    A precision that does not exist, or that this device does not have, is refused.
    """
    if precision not in PRECISIONS:
        raise SettingsError(f"the precision '{precision}' is unknown: choose {', '.join(PRECISIONS)}.")
    if precision == "fp16" and device.type == "cpu":
        raise SettingsError("--precision fp16 needs a GPU: use 'no' or 'bf16' on a CPU.")
    if precision == "half":
        return "bf16" if device.type == "cpu" else "fp16"
    return precision


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """Products in half precision where asked for; weights and results stay float32."""
    return nullcontext() if precision == "no" else torch.autocast(device.type, _TYPES[precision])
