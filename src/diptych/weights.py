"""Weights of a module on disk and in a digest: a tensor that several names share is written once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from diptych.entries import MODEL

Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]
"""Turns a state into the one that is saved."""


def is_divided(tensor: Tensor) -> bool:
    """Whether a tensor is one process's share of a larger one (a ``DTensor``, whose module takes long to import)."""
    return hasattr(tensor, "full_tensor")


def whole_tensor(tensor: Tensor) -> Tensor:
    """A tensor put together from the shares of all processes, each of which must call it; others as they are."""
    return tensor.full_tensor() if is_divided(tensor) else tensor  # type: ignore[attr-defined]


def whole_state(module: nn.Module) -> dict[str, Tensor]:
    """The state of a module in one piece."""
    return {name: whole_tensor(value.detach()) for name, value in module.state_dict().items()}


def own_tensors(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU copies, each with memory of its own: safetensors refuses shared storage."""
    storages: set[int] = set()
    copies = {}
    for name, value in state.items():
        tensor = value.detach().cpu().contiguous()
        shared = tensor.untyped_storage().data_ptr() in storages
        storages.add(tensor.untyped_storage().data_ptr())
        copies[name] = tensor.clone() if shared else tensor
    return copies


def aliases(module: nn.Module) -> dict[str, str]:
    """Each further name of a parameter or buffer, and the first name of the same tensor."""
    first: dict[int, str] = {}
    further = {}
    groups: list[Iterable[tuple[str, Tensor]]] = [
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    ]
    for names in groups:
        for name, value in names:
            if first.setdefault(id(value), name) != name:
                further[name] = first[id(value)]
    return further


def save_weights(module: nn.Module, file: Path, change: Change | None = None) -> None:
    """Write the state of a module, as ``change`` gives it; a tensor with several names goes under its first."""
    further = aliases(module)
    state = {k: v for k, v in module.state_dict().items() if k not in further}
    save_file(own_tensors(change(state) if change else state), file)


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a plain file by name."""
    return load_file(MODEL.check(file))


def load_weights(module: nn.Module, file: Path) -> None:
    """Load what ``save_weights`` wrote; strict in names and shapes."""
    state = read_tensors(file)
    for name, first in aliases(module).items():
        if first in state:
            state.setdefault(name, state[first])
    module.load_state_dict(state, strict=True)


def update_digest(digest: hashlib._Hash, tensor: Tensor) -> None:
    """Take the bytes of a tensor into a digest, wherever the tensor is."""
    digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
