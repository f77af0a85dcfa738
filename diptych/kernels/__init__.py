"""Triton kernels for NVIDIA GPUs, each beside a plain torch form of the same function that runs everywhere.

Triton comes with the CUDA builds of torch. A module of this folder imports it at its top, so it is imported only after
``on_gpu`` said yes.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch

OLDEST = (8, 0)  # compute capability from which matrix units compute in bf16 (Ampere)


def on_gpu(device: torch.device) -> bool:
    """Whether the kernels of this folder run on a device."""
    return device.type == "cuda" and _runs(device.index or 0)


@cache
def _runs(index: int) -> bool:
    # a ROCm build calls its devices cuda too; the kernels were never tried there
    return (
        torch.version.cuda is not None
        and find_spec("triton") is not None
        and torch.cuda.get_device_capability(index) >= OLDEST
    )
