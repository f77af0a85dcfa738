"""What every objective is: a pure function of embeddings whose state lives in buffers."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from torch import Tensor, nn

from diptych.types import Batch, Embeddings, Terms


@dataclass(frozen=True, slots=True)
class PairVectors:
    """The towers' unit vectors of all training pairs, as the model is at the end of an epoch.

    Encoded in evaluation mode, without augmentation; float16, on the CPU. Row m of ``text`` belongs to row
    ``image_of[m]`` of ``image``, or to none (−1) where the image could not be read.
    """

    image: Tensor  # (N, D)
    text: Tensor  # (M, D)
    image_of: Tensor  # (M,)


class Objective(nn.Module):
    """Maps embeddings and their batch to named terms; the loss is the sum of the terms.

    ``forward`` is pure: calling it twice gives the same terms. State (queues, centroids) lives in persistent buffers,
    so that it is in the checkpoint, and moves only in ``after_step``. Trainable parameters of an objective (a
    learned temperature, a classification head) are optimised with the retriever's.
    """

    show_progress = True  # of work that takes long; the training loop sets it
    takes_turns = False  # whether a step may leave parameters without a gradient
    scores_only = False  # whether ``forward`` reads no view: it may then begin before the views are there

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "forward" in vars(cls) and "scores_only" not in vars(cls):
            cls.scores_only = False  # what a parent's ``forward`` reads says nothing of this one

    def forward(self, embeddings: Embeddings, batch: Batch) -> Terms:
        """The named, weighted terms of this batch."""
        raise NotImplementedError

    def prepare(self, batch: Batch) -> Batch:
        """The batch with what the objective computes from its targets alone, which a step does beside the model."""
        return batch

    def start_epoch(self, epoch: int) -> None:
        """Called before the first step of each epoch, also after a resume in its middle."""

    def after_step(self, embeddings: Embeddings, batch: Batch) -> None:
        """Called after the optimiser step, without gradient: the one place where buffers move."""

    def wants_pairs(self, epoch: int) -> bool:
        """Whether ``see_pairs`` is to be called at the end of this epoch; the pairs are encoded only then."""
        return False

    def see_pairs(self, epoch: int, pairs: PairVectors | None) -> None:
        """Called at the end of an epoch, before ``after_epoch``, where ``wants_pairs`` says so.

        Every process calls it, the first with the vectors, the others with None.
        """

    def after_epoch(self, epoch: int) -> None:
        """Called after the last step of each epoch, without gradient."""

    def phase(self) -> Hashable:
        """Changes when ``forward`` takes another path (an epoch's switch): recorded steps are then recorded again."""
        return None

    def collapsed_value(self, pairs: int) -> float | None:
        """The loss of ``pairs`` pairs when all similarities are equal, where that is a known trap; else None."""
        return None

    def __call__(self, embeddings: Embeddings, batch: Batch) -> Terms:
        terms: Terms = super().__call__(embeddings, batch)
        return terms
