"""Prototype-guided classification (PGC): clusters of instance embeddings as class labels of another view."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from diptych import ops
from diptych.errors import CheckpointError, SettingsError
from diptych.objectives.clustering import kmeans, largest_first, nearest
from diptych.objectives.objective import Objective
from diptych.types import Batch, Embeddings, Terms

SPLIT = 0.05  # how far the two halves of a split cluster are moved apart


class PrototypeClassification(Objective):
    """L = CE(s · P^C v^C, z) + CE(s · P^C w^C, z), z the cluster of unit(v^I + w^I)   (Eq. 7).

    =================  ======================================================================================
    K                  ``clusters``
    P^C (K, D)         ``head``, without bias
    v^C, w^C           the view of this name (None: the towers' own embeddings)
    s                  ``scale``: both are unit vectors, so that plain logits (1, as printed) stay near ln K
    =================  ======================================================================================

    The paper only says "online k-means". Here: in the first epoch there is no loss, and u = unit(v + w) of
    every pair is kept (float16, by ``batch.text_ids``; ``pairs`` of them). At its end k-means (cosine, in
    blocks, ``iterations``) gives the centroids and the memory is freed. From then on each step takes the
    nearest centroid as the label and moves it, c ← unit(m · c + (1 − m) · ū), where ū is the mean of its
    pairs in the batch and m = ``momentum``. At the end of an epoch a cluster that no pair fell into is put
    beside the largest one, which it splits, and its row of the head is drawn anew; the optimiser's moments of
    that row stay and fade with its averages. A cluster keeps its number for ever: the head has a row each.

    Everything is in buffers, and identical on all processes: embeddings arrive gathered, and the centroids
    of k-means are sent by the first process.

    Shapes: embeddings (B, D); centroids (K, D); memory (pairs, D).
    """

    centroids: Tensor
    hits: Tensor
    memory: Tensor
    pairs: Tensor

    def __init__(
        self,
        clusters: int,
        dim: int,
        pairs: int,
        *,
        view: str | None = "concept",
        view_dim: int | None = None,
        scale: float = 20.0,
        momentum: float = 0.99,
        iterations: int = 20,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if clusters < 1:
            raise SettingsError(f"{clusters} prototypes are asked for: ask for at least 1.")
        if clusters > pairs:
            raise SettingsError(
                f"{clusters} prototypes are more than the {pairs} training pairs: give --clusters {pairs} or fewer."
            )
        if not 0 <= momentum <= 1:
            raise SettingsError(f"the momentum of the prototypes is {momentum}: it must lie between 0 and 1.")
        self.clusters, self.view, self.scale, self.momentum = clusters, view, scale, momentum
        self.iterations, self.seed = iterations, seed
        width = view_dim or dim
        self.head = nn.Parameter(torch.randn(clusters, width) / width**0.5)
        self.register_buffer("centroids", torch.zeros(clusters, dim))
        self.register_buffer("hits", torch.zeros(clusters, dtype=torch.int64))
        self.register_buffer("memory", torch.zeros(pairs, dim, dtype=torch.float16))
        self.register_buffer("pairs", torch.tensor(pairs))
        self._labels: tuple[Tensor, Tensor] | None = None
        self.register_load_state_dict_pre_hook(_fit_memory)  # type: ignore[no-untyped-call]

    @property
    def started(self) -> bool:
        """Whether there are clusters; the memory of the first epoch is freed when they are made."""
        return len(self.memory) == 0

    def phase(self) -> Hashable:
        """Collecting, or classifying."""
        return self.started

    def forward(self, embeddings: Embeddings, batch: Batch) -> Terms:
        """One term, ``prototypes``; 0 in the first epoch."""
        if not self.started:
            return {"prototypes": embeddings.image.new_zeros(())}
        seen = embeddings if self.view is None else embeddings.view(self.view)
        labels = self.labels(embeddings)
        logits = self.scale * (torch.cat([seen.image, seen.text]) @ self.head.T)  # (2B, K)
        return {
            "prototypes": 2 * cross_entropy(logits, labels.repeat(2))
        }  # the mean of 2B is half of two means

    @torch.no_grad()
    def labels(self, embeddings: Embeddings) -> Tensor:
        """The cluster of each pair, (B,) int64."""
        labels = nearest(self._sum(embeddings), self.centroids)[1]
        # kept with its tensor, so that the address stays taken: after_step gets a view of the same memory
        self._labels = embeddings.image.detach(), labels
        return labels

    def after_step(self, embeddings: Embeddings, batch: Batch) -> None:
        """Remember the pairs (first epoch), or move the centroids towards theirs."""
        if not self.started:
            self._check(batch)
            self.memory.index_copy_(0, batch.text_ids, self._sum(embeddings).to(self.memory.dtype))
            return
        u = self._sum(embeddings)
        held, self._labels = self._labels, None
        same_memory = held is not None and held[0].data_ptr() == embeddings.image.data_ptr()
        labels = held[1] if held is not None and same_memory else nearest(u, self.centroids)[1]
        together = (labels[:, None] == labels[None, :]).to(u.dtype)  # (B, B)
        first = together.argmax(dim=1)  # equal clusters write the same row, whatever their order
        mean = (together @ u) / together.sum(dim=1, keepdim=True)
        moved = ops.unit(self.momentum * self.centroids[labels] + (1 - self.momentum) * mean[first])
        self.centroids.index_copy_(0, labels, moved)
        self.hits.index_add_(0, labels, torch.ones_like(labels))

    def after_epoch(self, epoch: int) -> None:
        """Cluster after the first epoch; afterwards give empty clusters a new place."""
        if self.started:
            self._reseed(epoch)
        else:
            self._cluster()
        self.hits.zero_()

    @torch.no_grad()
    def _cluster(self) -> None:
        seen = np.flatnonzero(self.memory.any(dim=1).cpu().numpy())
        if len(seen) < self.clusters:
            raise SettingsError(
                f"the first epoch saw {len(seen)} pairs, fewer than the {self.clusters} prototypes: "
                f"lower their number to at most {len(seen)}."
            )
        if _rank() == 0:
            found = kmeans(
                self.memory,
                self.clusters,
                chosen=seen,
                iterations=self.iterations,
                seed=self.seed,
                device=self.centroids.device,
                show_progress=self.show_progress,
            )
            self.centroids.copy_(found)
        if dist.is_available() and dist.is_initialized():
            dist.broadcast(self.centroids, 0)
        self.memory = self.memory.new_zeros(0, self.memory.shape[1])

    @torch.no_grad()
    def _reseed(self, epoch: int) -> None:
        draw = torch.Generator().manual_seed(self.seed + epoch)
        width = self.head.shape[1]
        for empty, large in largest_first(self.hits.cpu().numpy()):
            apart = SPLIT * ops.unit(torch.randn(self.centroids.shape[1], generator=draw)).to(
                self.centroids.device
            )
            centre = self.centroids[large].clone()
            self.centroids[empty], self.centroids[large] = ops.unit(centre + apart), ops.unit(centre - apart)
            self.head[empty] = (torch.randn(width, generator=draw) / width**0.5).to(self.head.device)

    def _sum(self, embeddings: Embeddings) -> Tensor:
        """u = unit(v + w), (B, D), without gradient."""
        return ops.unit((embeddings.image + embeddings.text).detach().to(self.centroids.dtype))

    def _check(self, batch: Batch) -> None:
        if int(batch.text_ids.max()) >= len(self.memory):
            raise SettingsError(
                f"the prototypes were made for {len(self.memory)} pairs, but a batch names text "
                f"{int(batch.text_ids.max())}: give the number of training texts."
            )


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _fit_memory(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """The memory of a checkpoint is full or freed; refuse one of another number of pairs."""
    assert isinstance(module, PrototypeClassification)
    saved, pairs = state.get(f"{prefix}memory"), state.get(f"{prefix}pairs")
    if pairs is not None and int(pairs) != int(module.pairs):
        raise CheckpointError(
            f"the prototypes of this run were made over {int(pairs)} pairs, and the data now has "
            f"{int(module.pairs)}: give the data as it was, or start a new run."
        )
    if saved is not None and saved.shape != module.memory.shape:
        module.memory = module.memory.new_zeros(saved.shape)
