"""Gradient caching: a step on a large batch in the memory of a small one (Gao et al., RepL4NLP 2021).

A contrastive loss couples all pairs of a batch, so plain gradient accumulation would change it. But it couples them
through their vectors alone: ∂L/∂θ = Σ_i (∂L/∂v_i) (∂v_i/∂θ). So

1. every piece of the batch is encoded without keeping activations, and the random state before it is remembered;
2. the objective sees the vectors of the whole batch (of all processes) and gives ∂L/∂v;
3. every piece is encoded once more from its random state, with activations, and ∂L/∂v is passed on into θ.

The step is the plain one up to the rounding of sums. It costs a second forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from diptych.encoders.regions import MaskedBatchNorm
from diptych.errors import SettingsError
from diptych.objectives.objective import takes_turns
from diptych.training.step import Step, drop_others, gather, leaves
from diptych.types import Batch, Embeddings, Terms


class CachedStep:
    """The step in pieces of ``micro_batch`` pairs of each process; what leaves the device is never kept on it.

    The batch may lie on the host: its pieces are moved one by one. Local features are not kept, so an objective or a
    pair scorer that reads them is refused.
    """

    def __init__(self, step: Step, micro_batch: int) -> None:
        refuse_batch_statistics(step.method.retriever)
        if step.method.retriever.scorer is not None:
            raise SettingsError(
                "--micro_batch cannot be combined with a pair scorer, which reads the local features of the whole "
                "batch: leave it out."
            )
        self.step, self.micro_batch = step, micro_batch
        self.device: torch.device = step.accelerator.device
        self.turns = takes_turns(step.method.objective)
        self.before: Batch | None = None  # the last batch: a GPU may still copy pieces of its pinned memory

    def __call__(self, batch: Batch) -> tuple[Embeddings, Batch, Terms]:
        step, twin = self.step, self.step.method.twin
        if twin is not None:
            twin.update(step.method.retriever)
        pieces = list(self._pieces(batch))
        states, seen, keys = [], [], []
        for piece in pieces:
            states.append(_random_state(self.device))
            moved = piece.to(self.device, non_blocking=True)
            with torch.no_grad(), step.accelerator.autocast():
                looked = step.method.retriever(moved)
                keys += [] if twin is None else [_vectors(twin(moved, looked))]
            seen.append(_vectors(looked))
        own = _join(seen).map(Tensor.requires_grad_)
        everything = own if twin is None else replace(own, views={**own.views, "twin": _join(keys)})
        whole = step.seen_by_objective(_without_inputs(batch).to(self.device))
        embeddings = gather(everything)
        terms = step.method.objective(embeddings, whole)
        step.accelerator.backward(torch.stack(list(terms.values())).sum())
        self._replay(pieces, states, [t.grad for t in own.tensors()])
        self.before = batch
        return step.move(embeddings, whole, terms)

    def _replay(
        self, pieces: Sequence[Batch], states: Sequence[list[Tensor]], gradients: Sequence[Tensor | None]
    ) -> None:
        """Encode every piece again as it was encoded before, and pass the gradients of its vectors on."""
        start, reached = 0, set[int]()
        for number, (piece, state) in enumerate(zip(pieces, states, strict=True)):
            _set_random_state(state, self.device)
            last = number == len(pieces) - 1  # several processes add their gradients up once, at the end
            with nullcontext() if last else self.step.accelerator.no_sync(self.step.model):
                again = _vectors(self.step.model(piece.to(self.device, non_blocking=True))).tensors()
                moving = [(v, g) for v, g in zip(again, gradients, strict=True) if v.requires_grad]
                if self.turns and last:
                    reached = leaves([vector for vector, gradient in moving if gradient is not None])
                # a vector that the loss does not read gets zeros, for several processes wait for every parameter
                torch.autograd.backward(
                    [vector for vector, _ in moving],
                    [
                        torch.zeros_like(vector) if gradient is None else gradient[start : start + len(piece)]
                        for vector, gradient in moving
                    ],
                )
            start += len(piece)
        if self.turns:
            drop_others(self.step.method.retriever.parameters(), reached)

    def _pieces(self, batch: Batch) -> Iterator[Batch]:
        for start in range(0, len(batch), self.micro_batch):
            at = slice(start, start + self.micro_batch)
            yield batch.map(lambda t, at=at: t[at])  # type: ignore[misc]


def refuse_batch_statistics(model: nn.Module) -> None:
    """Refuse a model whose vectors depend on the other rows of a batch: in pieces it would be another model."""
    for name, module in model.named_modules():
        if module.training and isinstance(module, _BatchNorm | MaskedBatchNorm):
            raise SettingsError(
                f"--micro_batch cannot be combined with BatchNorm that is trained ('{name}'): its statistics would be "
                "those of a piece. Use --image_encoder grid or a picture encoder, or leave --micro_batch out."
            )


def _vectors(embeddings: Embeddings) -> Embeddings:
    """Without local features: they would take the memory that the pieces save."""
    views = {name: _vectors(view) for name, view in embeddings.views.items()}
    return Embeddings(embeddings.image, embeddings.text, views=views)


def _join(pieces: Sequence[Embeddings]) -> Embeddings:
    """The rows of all pieces, one after the other."""
    columns = iter([torch.cat(rows) for rows in zip(*(piece.tensors() for piece in pieces), strict=True)])
    return pieces[0].map(lambda _: next(columns))


def _without_inputs(batch: Batch) -> Batch:
    """The ids and targets of a batch: what an objective may read besides vectors."""
    nothing = batch.texts.map(lambda t: t[:0])
    return replace(batch, images=nothing, texts=nothing, views={})


def _random_state(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def _set_random_state(states: Sequence[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
