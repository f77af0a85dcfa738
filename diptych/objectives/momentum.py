"""A momentum twin of any retriever, coupled queues of what it saw, and the loss against them (M-DCL)."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from diptych import ops
from diptych.encoders.precision import computes_bf16
from diptych.errors import SettingsError
from diptych.objectives.diversity import Contrast
from diptych.objectives.objective import Objective
from diptych.types import Batch, Embeddings, Features, Terms

Start = Literal["full", "now"]
KeyPrecision = Literal["auto", "same", "bf16"]


class Twin(nn.Module):
    """A slow copy of a retriever, without gradient and always in evaluation mode.

    Each step, in this order: ``twin.update(retriever)`` moves θ_twin ← m · θ_twin + (1 − m) · θ, then
    ``twin(batch, seen)`` gives the view that becomes ``Embeddings.teacher``; of the regions, cells and words it
    pools those that the model's own view ``seen`` kept. Buffers (running statistics) are copied at each update.

    Parameters without gradient are shared with the retriever, not copied: a frozen backbone costs no memory,
    no time and no room in the checkpoint. One that is trained later gets its own copy at the next update; the
    state dict holds what is not shared. Inputs (vocabulary, tokenizer) are shared too. The branches of the
    retriever belong to its twin only with ``branches=True``: CODER's bank holds instance embeddings alone.

    The keys carry no gradient, so their matrix products may be cheaper than the model's: ``precision`` is bf16, the
    same as the model's, or "auto", bf16 where the device has instructions for it. Its weights stay float32.
    """

    def __init__(
        self,
        retriever: nn.Module,
        momentum: float = 0.995,
        *,
        branches: bool = False,
        precision: KeyPrecision = "auto",
    ) -> None:
        super().__init__()
        if not 0 <= momentum <= 1:
            raise SettingsError(f"the momentum of the twin is {momentum}: it must lie between 0 and 1.")
        if precision not in get_args(KeyPrecision):
            raise SettingsError(
                f"the precision of the twin is '{precision}': choose {', '.join(get_args(KeyPrecision))}."
            )
        self.momentum, self.precision = momentum, precision
        online = bare(retriever)
        shared: list[Any] = [p for p in online.parameters() if not p.requires_grad]
        shared += [getattr(online, name) for name in ("image_input", "text_input") if hasattr(online, name)]
        memo: dict[int, Any] = {id(value): value for value in shared}
        if not branches and isinstance(getattr(online, "branches", None), nn.ModuleDict):
            memo[id(online.branches)] = nn.ModuleDict()
        self.retriever: nn.Module = copy.deepcopy(online, memo)
        held = {id(p) for p in online.parameters()}
        self._shared = {name for name, p in self.retriever.named_parameters() if id(p) in held}
        for name, parameter in self.retriever.named_parameters():
            if name not in self._shared:
                parameter.requires_grad_(False)
        self.register_state_dict_post_hook(_drop_shared)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_add_shared)  # type: ignore[no-untyped-call]
        self.train(False)

    def train(self, mode: bool = True) -> Twin:
        """Always evaluation mode: a key must not depend on dropout."""
        super().train(False)
        return self

    @torch.no_grad()
    def update(self, retriever: nn.Module) -> None:
        """Move towards the retriever, wrapped or compiled; call before encoding the keys of a step."""
        online = bare(retriever)
        sources = dict(online.named_parameters())
        for name in [n for n in self._shared if sources[n].requires_grad]:
            self._own(name)
        names = [n for n, _ in self.retriever.named_parameters() if n not in self._shared]
        targets = dict(self.retriever.named_parameters())
        if names:
            torch._foreach_lerp_(
                [targets[n] for n in names], [sources[n] for n in names], 1.0 - self.momentum
            )
        buffers = dict(online.named_buffers())
        mine = list(self.retriever.named_buffers())
        if mine:
            torch._foreach_copy_([value for _, value in mine], [buffers[name] for name, _ in mine])

    @torch.no_grad()
    def forward(self, batch: Batch, seen: Embeddings | None = None) -> Embeddings:
        """The twin's view of the same batch, without the local features that the model's view ``seen`` dropped."""
        kept = () if seen is None else (_mask(seen.image_features), _mask(seen.text_features))
        device = batch.image_ids.device
        bf16 = computes_bf16(device) if self.precision == "auto" else self.precision == "bf16"
        own = [p for n, p in self.retriever.named_parameters() if n not in self._shared]
        with _requiring_grad(own), torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext():
            keys: Embeddings = self.retriever(batch, *kept)  # towers give float32 whatever they computed in
        return keys

    def _own(self, name: str) -> None:
        """Give a parameter that is no longer frozen its own copy."""
        path, _, leaf = name.rpartition(".")
        owner = self.retriever.get_submodule(path)
        setattr(owner, leaf, nn.Parameter(getattr(owner, leaf).detach().clone(), requires_grad=False))
        self._shared.discard(name)


@contextmanager
def _requiring_grad(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Where a weight asks for gradient, autocast turns it into bf16 once, not at each use (a GRU's: each word)."""
    for parameter in parameters:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(False)


def bare(module: nn.Module) -> nn.Module:
    """The module inside ``torch.compile`` and ``DistributedDataParallel``."""
    while True:
        if isinstance(module, DistributedDataParallel):
            module = module.module
        elif isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):
            module = inner
        else:
            return module


def _mask(features: Features | None) -> Tensor | None:
    return None if features is None else features.mask


def _drop_shared(module: nn.Module, state: dict[str, Any], prefix: str, _: Mapping[str, Any]) -> None:
    assert isinstance(module, Twin)
    for name in module._shared:
        state.pop(f"{prefix}retriever.{name}", None)


def _add_shared(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """A shared parameter is the retriever's; one the checkpoint holds was trained when it was written."""
    assert isinstance(module, Twin)
    for name in list(module._shared):
        key = f"{prefix}retriever.{name}"
        if key in state:
            module._own(name)
        else:
            state[key] = module.retriever.get_parameter(name)


class CoupledQueue(nn.Module):
    """The last ``size`` pairs the twin encoded: aligned image and text rows, and the image each came from.

    Row j of ``image`` and ``text`` is one pair; ``ids`` are image ids. Writing wraps around, for any batch up
    to ``size``. Slots not yet filled are never read: ``valid`` masks them. ``start`` says from when the queue
    counts: ``"full"`` or ``"now"`` (as soon as it holds anything). All of it, pointer and fill count too, is
    in buffers.

    In a run of several processes the embeddings, the twin's view and the ids reach objectives gathered in
    rank order, so the queues of all processes stay identical without talking to each other.

    Shapes: image, text (K, D); ids (K,) int64.
    """

    image: Tensor
    text: Tensor
    ids: Tensor
    pointer: Tensor
    count: Tensor

    def __init__(self, size: int = 4096, dim: int = 1024, *, start: Start = "full") -> None:
        super().__init__()
        if size < 1 or dim < 1:
            raise SettingsError(
                f"a queue of {size} rows of {dim} numbers cannot hold anything: both must be at least 1."
            )
        if start not in get_args(Start):
            raise SettingsError(f"the queue starts '{start}': choose {' or '.join(get_args(Start))}.")
        self.size, self.start, self.fed = size, start, False
        self.register_buffer("image", torch.zeros(size, dim))
        self.register_buffer("text", torch.zeros(size, dim))
        self.register_buffer("ids", torch.full((size,), -1, dtype=torch.int64))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.int64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    @property
    def valid(self) -> Tensor:
        """(K,) bool, True where a slot was filled."""
        return torch.arange(self.size, device=self.ids.device) < self.count

    @property
    def ready(self) -> Tensor:
        """Whether the queue counts yet; a tensor, since asking the device for a Python bool makes it wait."""
        return self.count >= (self.size if self.start == "full" else 1)

    def feed(self) -> CoupledQueue:
        """Claimed by the one objective that fills and saves the queue."""
        if self.fed:
            raise SettingsError(
                "two objectives feed the same queue: give the second one as a bank, or its own queue."
            )
        self.fed = True
        return self

    def check(self, batch_size: int) -> None:
        """Refuse a batch (of all processes together) that does not fit."""
        if batch_size > self.size:
            raise SettingsError(
                f"the queue holds {self.size} pairs, fewer than the batch of {batch_size}: "
                f"give --queue_size {batch_size} or more, or a smaller --batch_size."
            )

    @torch.no_grad()
    def push(self, image: Tensor, text: Tensor, ids: Tensor) -> None:
        """Overwrite the oldest rows with a batch of pairs."""
        self.check(len(ids))
        slots = (self.pointer + torch.arange(len(ids), device=self.ids.device)) % self.size
        self.image.index_copy_(0, slots, image.to(self.image.dtype))
        self.text.index_copy_(0, slots, text.to(self.text.dtype))
        self.ids.index_copy_(0, slots, ids)
        self.pointer.add_(len(ids)).remainder_(self.size)
        self.count.add_(len(ids)).clamp_(max=self.size)

    def negatives(self, contrast: Contrast, ids: Tensor) -> Tensor:
        """(B, K) bool, the filled slots that are negatives of anchors with these image ids."""
        if not contrast.mask_same_image:
            return self.valid.expand(len(ids), -1)
        return self.valid & ~ops.same_image(ids, self.ids)

    def average(
        self, contrast: Contrast, anchors: Embeddings, batch: Batch, div_image: Tensor, div_text: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Diversities (B,) of the batch averaged with those in the bank, once it is ready."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not contrast.stop_gradient):
            negatives = self.negatives(contrast, batch.image_ids)
            scores_image, scores_text = anchors.image @ self.text.T, anchors.text @ self.image.T
        return (
            self.mean(div_image, contrast.spread(scores_image, negatives)),
            self.mean(div_text, contrast.spread(scores_text, negatives)),
        )

    def mean(self, in_batch: Tensor, in_bank: Tensor) -> Tensor:
        """½ (batch + bank) once the bank is ready, the batch's alone before."""
        return torch.where(self.ready, 0.5 * (in_batch + in_bank), in_batch)


class Enqueue(Objective):
    """Keeps a queue filled and saved when no loss runs against it: the bank is for diversity alone."""

    def __init__(self, queue: CoupledQueue) -> None:
        super().__init__()
        self.queue = queue.feed()

    def forward(self, embeddings: Embeddings, batch: Batch) -> Terms:
        """No terms."""
        return {}

    def after_step(self, embeddings: Embeddings, batch: Batch) -> None:
        """Enqueue the twin's view of the batch."""
        teacher = teacher_of(embeddings)
        self.queue.push(teacher.image, teacher.text, batch.image_ids)


class MomentumContrast(Objective):
    """M-DCL: the batch against the coupled banks, l(V → B_w) + l(W → B_v)   (Eq. 6).

    l is ``Contrast`` (Eq. 5) with anchors v_n, negatives the rows of the opposite bank from before this batch
    was enqueued, and the positive v_n · k_n, where k_n is the twin's key of the same pair on the other side.
    The two-way reading of Eq. 6 is undefined: rows of the bank have no positive in the batch. The term is 0
    until the bank is ready.

    ==================  =====================================================================================
    B_v, B_w            ``queue.image``, ``queue.text``
    ``bank_diversity``  div of the batch averaged with that of the bank (the paper); else the batch's alone
    ``contrast``        μ, γ, ε and the readings of Eq. 5
    ==================  =====================================================================================

    Shapes: embeddings and teacher (B, D), queue (K, D).
    """

    def __init__(
        self, queue: CoupledQueue, contrast: Contrast | None = None, *, bank_diversity: bool = True
    ) -> None:
        super().__init__()
        self.queue = queue.feed()
        self.contrast, self.bank_diversity = contrast or Contrast(), bank_diversity

    def forward(self, embeddings: Embeddings, batch: Batch) -> Terms:
        """One term, ``momentum``."""
        teacher, contrast, queue = teacher_of(embeddings), self.contrast, self.queue
        in_batch = ops.cosine_scores(embeddings.image, embeddings.text)  # (B, B)
        others = contrast.negatives(batch.image_ids, batch.image_ids)
        negatives = queue.negatives(contrast, batch.image_ids)  # (B, K)
        loss = embeddings.image.new_zeros(())
        for anchors, bank, keys, near in (
            (embeddings.image, queue.text, teacher.text, in_batch),
            (embeddings.text, queue.image, teacher.image, in_batch.T),
        ):
            scores = anchors @ bank.T  # (B, K)
            div = contrast.spread(near, others)
            if self.bank_diversity:
                div = queue.mean(div, contrast.spread(scores, negatives))
            positives = (anchors * keys.detach()).sum(dim=1)
            loss = loss + contrast(scores, negatives, positives, div)
        return {"momentum": torch.where(queue.ready, loss, torch.zeros_like(loss))}

    def after_step(self, embeddings: Embeddings, batch: Batch) -> None:
        """Enqueue the twin's view of the batch."""
        teacher = teacher_of(embeddings)
        self.queue.push(teacher.image, teacher.text, batch.image_ids)


def teacher_of(embeddings: Embeddings) -> Embeddings:
    """The twin's view, or the sentence that says it is missing."""
    if embeddings.teacher is None:
        raise SettingsError(
            "a momentum queue needs a twin's view of the batch: give the run a Twin of its retriever."
        )
    return embeddings.teacher
