"""Losses that leave some parameters out in a step (``Alternate``), where the gradients of all of them are waited for.

With one process a parameter that the loss does not reach has no gradient, and Adam leaves it alone. Several processes
wait for the gradient of every parameter, and a step in pieces passes one on to every vector. There the parameters that
are left out get zeros, and their gradients are removed again before the optimiser, whose momentum would move them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from diptych.objectives.objective import Combined, Objective


def takes_turns(objective: Objective) -> bool:
    """Whether a step of this objective may leave parameters out."""
    return any(isinstance(part, Combined) and part.takes_turns for part in objective.modules())


def backward_of_turn(
    backward: Callable[[Tensor], None],
    loss: Tensor,
    outputs: Iterable[Tensor],
    parameters: Iterable[nn.Parameter],
) -> None:
    """Backward through ``loss``, with zeros through all ``outputs`` of the model; what it missed keeps no gradient."""
    kept = leaves([loss])
    nothing = torch.stack([0 * one.sum().float() for one in outputs if one.requires_grad]).sum()
    backward(loss + nothing)
    drop_others(parameters, kept)


def drop_others(parameters: Iterable[nn.Parameter], kept: set[int]) -> None:
    """Remove the gradients of all parameters but those ``kept``, by ``id``."""
    for parameter in parameters:
        if id(parameter) not in kept:
            parameter.grad = None


def leaves(results: Iterable[Tensor]) -> set[int]:
    """The ``id`` of every tensor without a history that these results were computed from with gradients."""
    found: set[int] = set()
    seen: set[torch.autograd.graph.Node] = set()
    waiting = [one.grad_fn for one in results if one.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):  # where a gradient is added up
            found.add(id(node.variable))
        waiting.extend(following for following, _ in node.next_functions if following is not None)
    return found
