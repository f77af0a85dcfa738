"""Prototype-guided classification (PGC): clusters of instance embeddings as class labels of another view."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from diptych import ops
from diptych.errors import CheckpointError, SettingsError, at_least, positive
from diptych.objectives.clustering import ROWS, cluster, nearest
from diptych.objectives.objective import PairVectors, SeesPairs, given_or_set
from diptych.types import Batch, Embeddings, Terms


class PrototypeClassification(SeesPairs):
    """L = (1/s) · [CE(s · P^C v^C, z) + CE(s · P^C w^C, z)], z the cluster of unit(v^I + w^I)   (Eq. 7).

    =================  ======================================================================================
    K                  ``clusters``
    P^C (K, D)         ``head``, without bias, at first as torch's ``nn.Linear``; no part of the model, for its rows
                       belong to the clusters of this run
    v^C, w^C           ``view``, the rows that are classified (None: the towers' own). ``On`` would cluster other
                       rows too: v^I and w^I are always those that the objective is given
    s                  ``scale``, 1 as printed; a sharper softmax is divided by s, the convention of Eq. 4, so
                       that its gradient stays as large
    =================  ======================================================================================

    The paper only says "online k-means". Here: no loss in the first ``start`` epochs. At the end of the last of them
    and of every later epoch all training pairs are encoded again by the model as it then is (``see_pairs``), and
    k-means (cosine, in blocks, ``iterations``) clusters u = unit(v + w); it starts from the last centroids, so that a
    cluster keeps its number, to which a row of the head belongs. Vectors gathered during an epoch would cluster by
    the time when they were gathered, since the model moves meanwhile. A cluster that k-means finds empty is put into
    the largest one, and its row of the head is drawn again; the optimiser's moments of that row stay and fade.

    Within an epoch each step takes the nearest centroid as the label and moves it: c ← unit((n · c + Σ u) / (n + b)),
    the sum over its b pairs in the batch, n the pairs it stands for so far (``hits``), those of k-means included.

    Everything is in buffers, and identical on all processes: embeddings arrive gathered, and what k-means found is
    sent by the first process.

    Shapes: embeddings (B, D); centroids (K, D).
    """

    centroids: Tensor
    hits: Tensor
    pairs: Tensor

    def __init__(
        self,
        clusters: int,
        dim: int,
        pairs: int,
        *,
        view: str | None = "concept",
        view_dim: int | None = None,
        scale: float = 1.0,
        start: int = 3,
        iterations: int = 20,
        seed: int = 0,
    ) -> None:
        super().__init__()
        at_least(clusters, "the number of prototypes", 1)
        if clusters > pairs:
            raise SettingsError(
                f"{clusters} prototypes are more than the {pairs} training pairs: give --clusters {pairs} or fewer."
            )
        self.clusters, self.view, self.scale = clusters, view, positive(scale, "the scale of the prototypes")
        self.start = at_least(start, "the number of epochs before the prototypes", 1)
        self.iterations, self.seed = iterations, seed
        self.started = False  # whether there are clusters
        width = view_dim or dim
        self.head = nn.Parameter(torch.empty(clusters, width).uniform_(-(width**-0.5), width**-0.5))
        self.register_buffer("centroids", torch.zeros(clusters, dim))
        self.register_buffer("hits", torch.zeros(clusters, dtype=torch.int64))
        self.register_buffer("pairs", torch.tensor(pairs))
        self._labels: tuple[Tensor, Tensor] | None = None
        self.register_load_state_dict_pre_hook(_check_state)  # type: ignore[no-untyped-call]

    @property
    def needs(self) -> tuple[str, ...]:
        return () if self.view is None else (self.view,)

    def forward(self, embeddings: Embeddings, batch: Batch) -> Terms:
        """One term, ``prototypes``; 0 until there are clusters."""
        if not self.started:
            return {"prototypes": embeddings.image.new_zeros(())}
        seen = embeddings if self.view is None else embeddings.view(self.view)
        labels = self.labels(embeddings)
        logits = self.scale * (torch.cat([seen.image, seen.text]) @ self.head.T)  # (2B, K)
        # the mean of 2B is half of two means
        return {"prototypes": 2 / self.scale * cross_entropy(logits, labels.repeat(2))}

    @torch.no_grad()
    def labels(self, embeddings: Embeddings) -> Tensor:
        """The cluster of each pair, (B,) int64."""
        labels = nearest(self._sum(embeddings), self.centroids)[1]
        # kept with its tensor, so that the address stays taken: after_step gets a view of the same memory
        self._labels = embeddings.image.detach(), labels
        return labels

    def after_step(self, embeddings: Embeddings, batch: Batch) -> None:
        if not self.started:
            return
        u = self._sum(embeddings)
        held, self._labels = self._labels, None
        same_memory = held is not None and held[0].data_ptr() == embeddings.image.data_ptr()
        labels = held[1] if held is not None and same_memory else nearest(u, self.centroids)[1]
        together = (labels[:, None] == labels[None, :]).to(u.dtype)  # (B, B)
        first = together.argmax(dim=1)  # equal clusters write the same row, whatever their order
        stood = self.hits[labels].to(u.dtype)[:, None] * self.centroids[labels]
        self.centroids.index_copy_(0, labels, ops.unit(stood + (together @ u)[first]))
        self.hits.index_add_(0, labels, torch.ones_like(labels))

    def wants_pairs(self, epoch: int) -> bool:
        """After every epoch from the last one without a loss on."""
        return epoch + 1 >= self.start

    @torch.no_grad()
    def see_pairs(self, epoch: int, pairs: PairVectors | None) -> None:
        """Cluster all training pairs, from the last centroids on."""
        moved = torch.zeros(self.clusters, dtype=torch.uint8, device=self.centroids.device)
        if pairs is not None:
            self._check(pairs)
            found = cluster(
                _sums(pairs),
                self.clusters,
                subset=(pairs.image_of >= 0).nonzero()[:, 0].numpy(),
                start=self.centroids if self.started else None,
                iterations=self.iterations,
                seed=self.seed + epoch,
                device=self.centroids.device,
                show_progress=self.show_progress,
            )
            self.centroids.copy_(found.centroids)
            # one that was put elsewhere last stands for the pair there
            self.hits.copy_(found.sizes.clamp_min(1))
            moved.copy_(found.moved)
        if dist.is_available() and dist.is_initialized():
            for buffer in (self.centroids, self.hits, moved):
                dist.broadcast(buffer, 0)
        self._draw_head(moved.nonzero()[:, 0].tolist(), epoch)
        self.started = True

    def _draw_head(self, rows: list[int], epoch: int) -> None:
        draw, bound = torch.Generator().manual_seed(self.seed + epoch), self.head.shape[1] ** -0.5
        for row in rows:
            drawn = torch.empty(self.head.shape[1]).uniform_(-bound, bound, generator=draw)
            self.head[row] = drawn.to(self.head.device)

    def _sum(self, embeddings: Embeddings) -> Tensor:
        """u = unit(v + w), (B, D), without gradient."""
        return ops.unit((embeddings.image + embeddings.text).detach().to(self.centroids.dtype))

    def _check(self, pairs: PairVectors) -> None:
        usable = int((pairs.image_of >= 0).sum())
        if len(pairs.text) != int(self.pairs):
            raise SettingsError(
                f"the prototypes were made for {int(self.pairs)} pairs, and the data has {len(pairs.text)}: "
                "give the number of training texts."
            )
        if usable < self.clusters:
            raise SettingsError(
                f"the images of only {usable} training pairs can be read, fewer than the {self.clusters} prototypes: "
                f"give --clusters {usable} or fewer."
            )


def prototypes(
    settings: Any,
    dim: int,
    pairs: int,
    clusters: int | None = None,
    view: str | None = None,
    scale: float = 1.0,
    start: int | None = None,
) -> PrototypeClassification:
    """CODER's prototypes; unless the recipe or the term says, one for every ten pairs, at most 10,000.

    ``view`` is what is classified, by default the towers' own rows; it must be as wide as they are.
    """
    known = given_or_set(clusters, settings, "clusters", max(2, min(10_000, pairs // 10)))
    first = given_or_set(start, settings, "prototype_epoch", 3)
    seed = getattr(settings, "seed", 0)
    return PrototypeClassification(known, dim, pairs, view=view, scale=scale, start=first, seed=seed)


def _sums(pairs: PairVectors) -> Tensor:
    """u = unit(v + w) of every pair, (M, D) float16, block by block."""
    sums = torch.empty_like(pairs.text)
    for start in range(0, len(sums), ROWS):
        at = slice(start, start + ROWS)
        sums[at] = ops.unit(pairs.image[pairs.image_of[at]].float() + pairs.text[at].float()).to(sums.dtype)
    return sums


def _check_state(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Refuse a state over another number of pairs, or of an earlier method; note whether it holds clusters."""
    assert isinstance(module, PrototypeClassification)
    pairs, centroids = state.get(f"{prefix}pairs"), state.get(f"{prefix}centroids")
    if f"{prefix}memory" in state:
        raise CheckpointError(
            "the prototypes of this run are clusters of vectors that an earlier version collected while the model "
            "moved, and training goes on differently now: start a new run."
        )
    if pairs is not None and int(pairs) != int(module.pairs):
        raise CheckpointError(
            f"the prototypes of this run were made over {int(pairs)} pairs, and the data now has "
            f"{int(module.pairs)}: give the data as it was, or start a new run."
        )
    module.started = centroids is not None and bool(centroids.any())
