"""An accelerator on the CPU, whatever an earlier test of this process asked for."""

from __future__ import annotations

from accelerate import Accelerator
from accelerate.state import AcceleratorState


def cpu_accelerator() -> Accelerator:
    """Of one process; accelerate keeps the device of the first one."""
    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(cpu=True)
