"""A softmax temperature: fixed, or learned inside an interval."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from diptych.errors import SettingsError


class Temperature(nn.Module):
    """τ itself, not its logarithm or inverse; a learned one is put back into ``clamp`` before each forward pass."""

    def __init__(self, start: float, clamp: tuple[float, float], learned: bool = True) -> None:
        super().__init__()
        low, high = clamp
        if not 0 < low <= start <= high:
            raise SettingsError(
                f"the temperature {start} lies outside ({low}, {high}): start inside, with bounds above 0."
            )
        self.clamp, self.learned = clamp, learned
        self.value = nn.Parameter(torch.tensor(float(start)), requires_grad=learned)

    def forward(self) -> Tensor:
        """τ, a scalar inside its interval."""
        if self.learned:
            # in place and unseen by autograd: at a bound the gradient must still reach the parameter
            self.value.data.clamp_(*self.clamp)
        return self.value
