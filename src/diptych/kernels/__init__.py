"""Triton kernels for NVIDIA GPUs, each beside a plain torch form of the same function that runs everywhere.

Triton comes with the CUDA builds of torch and needs a C compiler; without one, plain torch runs. A module of this
folder imports it at its top, so it is imported only after ``on_gpu`` said yes.
"""

from __future__ import annotations

import os
import shutil
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

LONGEST_ROW = 8192  # numbers that a block keeps in its registers
OLDEST = (8, 0)  # compute capability from which matrix units compute in bf16 (Ampere)


def on_gpu(device: torch.device) -> bool:
    """Whether the kernels of this folder run on a device."""
    return device.type == "cuda" and _runs(device.index or 0)


def takes_rows(x: Tensor) -> bool:
    """Whether a kernel that holds whole rows (…, D) reads this; a compiler makes its own."""
    fits = x.dtype == torch.float32 and x.dim() > 0 and 0 < x.shape[-1] <= LONGEST_ROW
    return fits and on_gpu(x.device) and not torch.compiler.is_compiling()


def row_sizes(width: int) -> dict[str, int]:
    """How a kernel that holds whole rows is launched: the next power of two, eight numbers to a thread."""
    block = max(1 << (width - 1).bit_length(), 16)
    return {"block": block, "num_warps": min(max(block // 256, 1), 8)}


@cache
def _runs(index: int) -> bool:
    # a ROCm build calls its devices cuda too; the kernels were never tried there
    return (
        torch.version.cuda is not None
        and find_spec("triton") is not None
        and any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang")))  # Triton compiles a launcher
        and torch.cuda.get_device_capability(index) >= OLDEST
    )
