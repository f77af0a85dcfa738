"""A model whose parameters, gradients and optimiser state are divided over the processes of a run (FSDP2).

Each process keeps its share of every parameter. An encoder is put together for its forward and its backward pass and
taken apart again; gradients are averaged and divided; Adam moves each process's own share. What is saved is put
together first, so that a checkpoint or a model folder does not tell how it was trained.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils import _pytree as pytree

from diptych.errors import SettingsError
from diptych.model.retriever import Retriever
from diptych.objectives.objective import takes_turns
from diptych.training.method import Method
from diptych.training.optim import NORM_EPSILON
from diptych.types import Batch, Embeddings, Features
from diptych.weights import whole_state


class ShardedModel(nn.Module):
    """The retriever of a method, divided in place; called like the retriever.

    The parts are both encoders (one, where the towers share it) and the rest. Buffers (running statistics) are not
    divided: before each step those of the first process go to all, as with ``DistributedDataParallel``. The momentum
    twin stays whole on each process.
    """

    def __init__(self, method: Method, accelerator: Accelerator) -> None:
        super().__init__()
        refuse(method)
        _register()
        self.retriever, self.accelerator = method.retriever, accelerator
        # the parts of a model are found by the module they were made in: the copy is an ordinary retriever
        self._whole = [copy.deepcopy(method.retriever).cpu()] if accelerator.is_main_process else []
        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
        encoders = {id(tower.encoder): tower.encoder for tower in (self.retriever.image, self.retriever.text)}
        for encoder in encoders.values():
            fully_shard(encoder, mesh=mesh)
        fully_shard(self.retriever, mesh=mesh)

    def forward(self, batch: Batch) -> Embeddings:
        """Both sides of a batch; vectors and features in float32."""
        for buffer in self.retriever.buffers():
            dist.broadcast(buffer, 0)
        with self.accelerator.autocast():
            seen: Embeddings = self.retriever(batch)
        return seen.map(lambda t: t.float() if t.is_floating_point() else t)

    @contextmanager
    def whole(self) -> Iterator[Retriever | None]:
        """The model in one piece on the main process, None on the others; every process must call it."""
        state = whole_state(self.retriever)
        if not self._whole:
            yield None
            return
        (model,) = self._whole
        model.load_state_dict(state, strict=True)
        try:
            yield model.to(self.accelerator.device).train(self.retriever.training)
        finally:
            model.cpu()


def refuse(method: Method) -> None:
    """Refuse what a divided model cannot do."""
    if takes_turns(method.objective):
        raise SettingsError(
            "--shard_model cannot be combined with steps that move only some parameters in turn: leave it out."
        )
    if method.solver is not None:
        raise SettingsError("--shard_model cannot divide a model that is solved: leave it out.")


def share_like(value: Tensor, parameter: Tensor) -> Tensor:
    """This process's share of a whole tensor, divided as the parameter is; the tensor itself where that is whole."""
    if not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value
    return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)


@torch.no_grad()
def clip_shares(parameters: Sequence[Tensor], limit: float) -> None:
    """Scale the gradients to at most ``limit`` in global norm, those that are divided and those that are not."""
    shares, plain = [], []
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            shares.append(gradient.to_local())
        elif gradient is not None:
            plain.append(gradient)
    found = [*shares, *plain]
    if not found:
        return
    squares = [torch.zeros((), dtype=torch.float64, device=found[0].device) for _ in range(2)]
    for total, gradients in zip(squares, (shares, plain), strict=True):
        for gradient in gradients:
            total += gradient.double().square().sum()
    dist.all_reduce(squares[0])
    norm = math.sqrt(float(squares[0] + squares[1]))
    if norm + NORM_EPSILON > limit:
        for gradient in found:
            gradient.mul_(limit / (norm + NORM_EPSILON))


def _register() -> None:
    """Let FSDP find the tensors in what encoders and retrievers return: it puts their backward hooks there."""
    for kind in (Features, Embeddings):
        if kind not in pytree.SUPPORTED_NODES:
            names = [field.name for field in dataclasses.fields(kind)]
            pytree.register_pytree_node(kind, partial(_taken_apart, names), lambda found, kind: kind(*found))


def _taken_apart(names: Sequence[str], value: Any) -> tuple[list[Any], type]:
    return [getattr(value, name) for name in names], type(value)
