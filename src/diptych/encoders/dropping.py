"""Size Augmentation by mask: regions, grid cells and cached words disappear while training; nothing is
copied.

Each function takes the mask (B, L) and returns a smaller one, drawn from torch's generator on the mask's
device, with no transfer to the host (so it can be captured in a CUDA graph). The element with the largest
draw always stays, so no set is ever emptied; where any other element stays it would have stayed anyway.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diptych.errors import SettingsError


def drop_each(mask: Tensor, rate: float) -> Tensor:
    """Drop every element with probability ``rate``: regions."""
    return _keep(mask, torch.rand(mask.shape, device=mask.device), rate)


DELETED = 0.4  # of the words that Size Augmentation touches: the others are masked or replaced, which states cannot be


def drop_words(mask: Tensor, rate: float) -> Tensor:
    """Drop word states with probability 0.4 · ``rate``, as many as word augmentation deletes; never the first and
    the last of a text, CLS and SEP."""
    place = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, place, -1).amax(dim=1, keepdim=True)
    first = torch.where(mask, place, mask.shape[1]).amin(dim=1, keepdim=True)
    special = mask & ((place == first) | (place == last))
    return special | _keep(mask, torch.rand(mask.shape, device=mask.device), DELETED * rate)


def drop_per_image(mask: Tensor, rate: float) -> Tensor:
    """Draw r ~ U(0, 1) for each image; r ≤ ``rate`` keeps every cell, otherwise each is dropped with ``rate``
    · r.

    This is the rule for grids: at rate 0.2, a fifth of the images stay whole and the others lose 4 to 20 %.
    """
    r = torch.rand(len(mask), 1, device=mask.device)
    return _keep(mask, torch.rand(mask.shape, device=mask.device), torch.where(r <= rate, 0.0, rate * r))


def check_rate(rate: float, name: str = "drop") -> float:
    """The rate itself, if it is one."""
    if not 0.0 <= rate < 1.0:
        raise SettingsError(f"{name}={rate} is not a dropping rate: give a number in [0, 1), such as 0.2.")
    return rate


def _keep(mask: Tensor, draw: Tensor, rate: Tensor | float) -> Tensor:
    draw = draw.masked_fill(~mask, -1.0)
    return mask & ((draw >= rate) | (draw >= draw.amax(dim=1, keepdim=True)))
