"""The shared vocabulary of the package, and the letters its shape comments use.

Shape letters, defined once:

=====  ==========================================================
``B``  image-text pairs in a batch
``R``  regions or grid cells of an image
``W``  tokens of a text (specials included)
``L``  either of the two: the length of a padded set
``D``  the joint dimension
``N``  images in a collection
``M``  texts in a collection
``K``  entries of a queue, clusters, or the k of top-k
=====  ==========================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, overload

import torch
from numpy.typing import NDArray
from torch import Tensor

from diptych.data.arrays import Arrays, Sets
from diptych.errors import SettingsError

Change = Callable[[Tensor], Tensor]
"""What is done to every tensor of a batch: a move, a slice, a pin, a gathering."""


def _map_values(value: Any, change: Change) -> Any:
    """A value with ``change`` applied to every tensor in it."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, TensorGroup):
        return value.map(change)
    return (
        {name: _map_values(one, change) for name, one in value.items()}
        if isinstance(value, Mapping)
        else value
    )


class TensorGroup:
    """A dataclass whose tensors, in fields, mappings and further groups, are changed together."""

    __slots__ = ()

    def map(self, change: Change) -> Self:
        """Apply ``change`` to every tensor (a move to a device, a pin, a slice of rows)."""
        changes = {name: _map_values(getattr(self, name), change) for name in self.__dataclass_fields__}  # type: ignore[attr-defined]
        return replace(self, **changes)  # type: ignore[type-var]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        return self.map(lambda t: t.to(device, non_blocking=non_blocking))

    def tensors(self) -> list[Tensor]:
        """Every tensor, always in the same order."""
        found: list[Tensor] = []

        def keep(tensor: Tensor) -> Tensor:
            found.append(tensor)
            return tensor

        self.map(keep)
        return found


@dataclass(frozen=True, slots=True)
class Features(TensorGroup):
    """A padded batch of sets: regions, grid cells, video frames, or words.

    ``values`` is (B, L, D) for vectors and (B, L) for token ids; ``mask`` is (B, L), True where valid.
    Values at invalid positions are arbitrary and must never reach a result.
    """

    values: Tensor
    mask: Tensor

    @property
    def sizes(self) -> Tensor:
        """Valid elements of each set, (B,) int64."""
        return self.mask.sum(dim=1)

    @property
    def is_ids(self) -> bool:
        """Whether the elements are token ids rather than vectors."""
        return self.values.dim() == 2

    def map(self, change: Change) -> Features:
        """Apply ``change`` to both tensors; written out for torch.compile, which follows it."""
        return Features(change(self.values), change(self.mask))

    @staticmethod
    def whole(values: Tensor) -> Features:
        """Sets of equal size: every position is valid."""
        return Features(values, torch.ones(values.shape[:2], dtype=torch.bool, device=values.device))


@dataclass(frozen=True, slots=True)
class Ragged:
    """Sets of any size end to end, without padding: the local features of a whole collection.

    ``values`` is (T, D), set i lies from ``bounds[i]`` to ``bounds[i + 1]``.
    """

    values: Tensor
    bounds: Tensor  # (N + 1,) int64, on the CPU

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def take(self, rows: Tensor) -> Features:
        """Some of the sets as a padded batch, in float32, where the values are."""
        starts, sizes = self.bounds[:-1][rows], (self.bounds[1:] - self.bounds[:-1])[rows]
        places = torch.arange(int(sizes.max()) if len(sizes) else 0)
        mask = places[None] < sizes[:, None]  # (B, L)
        at = torch.where(mask, starts[:, None] + places[None], 0)
        device = self.values.device
        return Features(self.values[at.to(device)].float(), mask.to(device))

    def split(self) -> list[Tensor]:
        """Each set alone, (L, D)."""
        sizes: list[int] = (self.bounds[1:] - self.bounds[:-1]).tolist()
        return list(torch.split(self.values, sizes))

    def near(self, device: torch.device, share: float = 0.25) -> Ragged:
        """The same sets with their values on a GPU, where they take no more than a share of its free memory."""
        if device.type != "cuda":
            return self
        free, _ = torch.cuda.mem_get_info(device)
        fits = self.values.numel() * self.values.element_size() <= share * free
        return Ragged(self.values.to(device), self.bounds) if fits else self

    def permuted(self, order: Tensor) -> Ragged:
        """The same sets in another order: set i becomes the old set ``order[i]``."""
        starts, sizes = self.bounds[:-1][order], (self.bounds[1:] - self.bounds[:-1])[order]
        ends = sizes.cumsum(0)
        at = torch.arange(len(self.values)) + (starts - (ends - sizes)).repeat_interleave(sizes)
        return Ragged(self.values[at], torch.cat([torch.zeros(1, dtype=torch.int64), ends]))

    @staticmethod
    def join(parts: Sequence[Features]) -> Ragged:
        """The valid elements of several batches, end to end, in float16 on the CPU."""
        values = [part.values[part.mask].to("cpu", torch.float16) for part in parts]
        sizes = [part.sizes.cpu() for part in parts]
        ends = torch.cat(sizes).cumsum(0) if sizes else torch.zeros(0, dtype=torch.int64)
        width = values[0].shape[-1] if values else 0
        flat = torch.cat(values) if values else torch.zeros(0, width, dtype=torch.float16)
        return Ragged(flat, torch.cat([torch.zeros(1, dtype=torch.int64), ends]))


Inputs = Features | Tensor
"""What an encoder reads: sets (regions, frames, token ids) or pixels (B, 3, H, W)."""


@overload
def as_inputs(arrays: Sets) -> Features: ...
@overload
def as_inputs(arrays: NDArray[Any]) -> Tensor: ...
@overload
def as_inputs(arrays: Arrays) -> Inputs: ...
def as_inputs(arrays: Arrays) -> Inputs:
    """What ``data`` prepared in numpy as tensors, which share its memory: the edge between the two halves."""
    if isinstance(arrays, Sets):
        return Features(torch.from_numpy(arrays.values), torch.from_numpy(arrays.mask))
    return torch.from_numpy(arrays)


@dataclass(frozen=True, slots=True)
class Sides(TensorGroup):
    """Further inputs of the rows of a batch (an augmented picture, a perturbed text); None: the batch's own."""

    images: Inputs | None = None
    texts: Features | None = None


@dataclass(frozen=True, slots=True)
class Batch(TensorGroup):
    """Row i of both sides is one matched pair; equal ``image_ids`` are texts of one image.

    ``image_ids`` and ``text_ids`` are row numbers in the ``Captions`` the batch came from. ``targets`` holds what
    an objective may need beside the pair: class labels, the vectors of a uni-modal teacher. ``views`` are further
    inputs of the same rows, by name; the retriever's look at them has the same name in ``Embeddings.views``.

    Where several processes share a step, an objective sees the ids and targets of all of them. ``own`` says which
    of these rows are this process's: the rows of ``images``, ``texts``, ``views`` and of local features.
    """

    images: Inputs
    texts: Features
    image_ids: Tensor  # (B,) int64
    text_ids: Tensor  # (B,) int64
    targets: Mapping[str, Tensor] = field(default_factory=dict)
    views: Mapping[str, Sides] = field(default_factory=dict)
    own: slice = field(default_factory=lambda: slice(None))

    def __len__(self) -> int:
        return len(self.image_ids)

    def map_rows(self, change: Change) -> Batch:
        """Apply ``change`` to what an objective sees of every process: ids and targets."""
        targets = {name: change(value) for name, value in self.targets.items()}
        return replace(
            self, image_ids=change(self.image_ids), text_ids=change(self.text_ids), targets=targets
        )


@dataclass(frozen=True, slots=True)
class Matches(TensorGroup):
    """What a fusion encoder judged of this process's rows: the pairs, and a hard negative for each image and text.

    ``logits`` (3, B, 2), "no match" and "match": row i's pair, image i beside the text of row ``negatives[0, i]``,
    text i beside the image of row ``negatives[1, i]``. ``possible`` (2, B) is False where nothing could be drawn.
    ``temperature`` is the τ by which they were drawn.
    """

    logits: Tensor
    negatives: Tensor  # (2, B) int64
    possible: Tensor  # (2, B) bool
    temperature: Tensor


@dataclass(frozen=True, slots=True)
class Embeddings(TensorGroup):
    """Unit rows of both sides, (B, D) each, and what else was seen of the same rows on the way.

    ``views`` are further looks at the same rows, by name: through other heads (``concept``, ``uni``), at other
    inputs (``augmented``, ``masked``), or by the momentum ``twin``, without gradient. ``scores`` (B, B) are those of
    a model whose score is no cosine. ``image_features`` and ``text_features`` are the projected local features that
    a pair scorer reads; where several processes share a step they stay those of this one (``Batch.own``).
    """

    image: Tensor
    text: Tensor
    image_features: Features | None = None
    text_features: Features | None = None
    scores: Tensor | None = None
    views: Mapping[str, Embeddings] = field(default_factory=dict)
    matches: Matches | None = None

    def __len__(self) -> int:
        return len(self.image)

    def local_features(self) -> tuple[Features, Features]:
        """Those of both sides, of a model that gives them."""
        assert self.image_features is not None
        assert self.text_features is not None
        return self.image_features, self.text_features

    def all_scores(self) -> Tensor:
        """Scores (B, B) of every image against every text: the model's own, or the cosines of the rows."""
        return self.image @ self.text.T if self.scores is None else self.scores

    def view(self, name: str) -> Embeddings:
        """A further look at the same rows, by its name; ``outer.inner`` is a view of a view."""
        outer, dot, inner = name.partition(".")
        if dot and outer in self.views:
            return self.views[outer].view(inner)
        if name not in self.views:
            known = ", ".join(self.views) or "none"
            raise SettingsError(f"the objective reads the view '{name}', this method's views are: {known}.")
        return self.views[name]

    def map_rows(self, change: Change) -> Embeddings:
        """Apply ``change`` to the rows of both sides and of every view; features and scores stay as they are."""
        views = {name: view.map_rows(change) for name, view in self.views.items()}
        return replace(self, image=change(self.image), text=change(self.text), views=views)


Terms = dict[str, Tensor]
"""Named, weighted scalars; the loss is their sum."""
