"""One training step: embed → terms → backward → clip → step; eager, or replayed as a CUDA graph.

Losses that leave some parameters out in a step (``Alternate``), where the gradients of all of them are waited for.

With one process a parameter that the loss does not reach has no gradient, and Adam leaves it alone. Several processes
wait for the gradient of every parameter, and a step in pieces passes one on to every vector. There the parameters that
are left out get zeros, and their gradients are removed again before the optimiser, whose momentum would move them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from diptych import ops
from diptych.objectives.objective import takes_turns
from diptych.targets.columns import Resident
from diptych.training.method import Method
from diptych.training.optim import can_fold_clip, fold_clip
from diptych.training.streams import beside
from diptych.types import Batch, Embeddings, Terms
from diptych.weights import is_divided

WARM_STEPS = 3  # eager steps of a new shape before its graph is captured: lazy initialisation must be over


class Step:
    """The step in plain sight. Returns the embeddings of all processes and the terms, without gradient."""

    def __init__(
        self,
        method: Method,
        model: nn.Module,
        optimizer: Any,
        accelerator: Accelerator,
        clip_norm: float,
        resident: Resident | None = None,
    ) -> None:
        self.method, self.model, self.optimizer = method, model, optimizer
        self.accelerator, self.clip_norm = accelerator, clip_norm
        self.resident = resident
        self.turns = takes_turns(method.objective) and ops.processes() > 1
        self.waiting: list[nn.Parameter] = []  # of a divided model: what does not move yet

    def __call__(self, batch: Batch) -> tuple[Embeddings, Batch, Terms]:
        batch = batch.to(self.accelerator.device, non_blocking=True)
        twin, objective = self.method.twin, self.method.objective
        whole = self.seen_by_objective(batch)
        embeddings: Embeddings = self.model(batch)
        outputs = embeddings.tensors() if self.turns else []
        if twin is not None:
            # after the model: several processes agree on its running statistics only from its forward pass on
            twin.update(self.method.retriever)
            with torch.no_grad(), self.accelerator.autocast():
                keys = twin(batch, embeddings)
            embeddings = replace(embeddings, views={**embeddings.views, "twin": keys})
        embeddings = gather(embeddings)
        terms = objective(embeddings, whole)
        loss = torch.stack(list(terms.values())).sum()
        if self.turns:
            backward_of_turn(self.accelerator.backward, loss, outputs, self.method.retriever.parameters())
        else:
            self.accelerator.backward(loss)
        return self.move(embeddings, whole, terms)

    def move(self, embeddings: Embeddings, whole: Batch, terms: Terms) -> tuple[Embeddings, Batch, Terms]:
        """Clip the gradients that are there and let the optimiser move; gives what it was given, without gradient."""
        self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return embeddings.map(Tensor.detach), whole, {name: value.detach() for name, value in terms.items()}

    def seen_by_objective(self, batch: Batch) -> Batch:
        """Ids and targets of every process, with the columns that lie on the device."""
        return gather_batch(batch if self.resident is None else self.resident.fill(batch))

    def clip(self) -> None:
        """Scale the gradients to at most ``clip_norm`` in global norm."""
        for parameter in self.waiting:
            parameter.grad = None
        if self.clip_norm > 0:
            parameters = [
                p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None
            ]
            if any(map(is_divided, parameters)):
                from diptych.training.sharding import clip_shares

                clip_shares(parameters, self.clip_norm)
            elif can_fold_clip(self.optimizer) and self.accelerator.scaler is None:
                fold_clip(self.optimizer, parameters, self.clip_norm)
            else:
                self.accelerator.clip_grad_norm_(parameters, self.clip_norm)


class GraphedStep:
    """Replays the step as a CUDA graph, one graph per shape of batch and path of the objective.

    The first ``WARM_STEPS`` batches of a shape run eagerly, as real steps; the next is captured and every later one
    replayed: no kernel of the step is launched from Python any more, and a batch goes from the host to where the graph
    reads it.
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self.seen: dict[Hashable, int] = {}
        self.graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Batch, tuple[Embeddings, Batch, Terms]]] = {}
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, batch: Batch) -> tuple[Embeddings, Batch, Terms]:
        method = self.step.method
        moving = hash(tuple(p.requires_grad for p in method.retriever.parameters()))
        shapes = tuple((tuple(t.shape), t.dtype) for t in batch.tensors())
        key = (shapes, path_of(method.objective), moving)
        if key in self.graphs:
            graph, static, result = self.graphs[key]
            for to, source in zip(static.tensors(), batch.tensors(), strict=True):
                to.copy_(source, non_blocking=True)
            graph.replay()
            return result
        self.seen[key] = self.seen.get(key, 0) + 1
        if self.seen[key] <= WARM_STEPS:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                result = self.step(batch)
            torch.cuda.current_stream().wait_stream(self.stream)
            return result
        static = batch.to(self.step.accelerator.device).map(torch.clone)
        graph = torch.cuda.CUDAGraph()
        # thread_local: the loader's threads pin memory meanwhile, which would break a global capture
        with (
            beside(method, self.step),
            torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"),
        ):
            result = self.step(static)
        self.graphs[key] = graph, static, result
        graph.replay()
        return result


def gather(embeddings: Embeddings) -> Embeddings:
    """The rows of every process, with gradients: objectives always see the whole batch.

    Local features stay those of this process; scores are whole already.
    """
    return embeddings if ops.processes() == 1 else embeddings.map_rows(ops.gather_rows)


def gather_batch(batch: Batch) -> Batch:
    """Ids and targets of every process; the inputs stay those of this one, ``batch.own``."""
    if ops.processes() == 1:
        return batch
    # in one order, for processes may hold different columns on their devices
    batch = replace(batch, targets=dict(sorted(batch.targets.items())))
    return replace(batch.map_rows(ops.gather_rows), own=ops.own_rows(len(batch)))


def path_of(objective: nn.Module) -> Hashable:
    """The plain values of an objective and of all inside it: where one changes, ``forward`` may take another path."""
    return tuple(
        repr(value)
        for part in objective.modules()
        for name, value in vars(part).items()
        if not name.startswith("_") and _is_plain(value)
    )


def _is_plain(value: object) -> bool:
    if isinstance(value, dict | list | tuple):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    return value is None or isinstance(value, bool | int | float | str)


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
