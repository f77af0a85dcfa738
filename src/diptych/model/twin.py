"""A momentum twin: a slow copy of any retriever, without gradient."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from diptych.encoders.encoder import computes_bf16
from diptych.errors import between, one_of
from diptych.types import Batch, Embeddings, Features
from diptych.weights import whole_tensor

KeyPrecision = Literal["auto", "same", "bf16"]


class Twin(nn.Module):
    """A slow copy of a retriever, without gradient and always in evaluation mode.

    Each step, in this order: ``twin.update(retriever)`` moves θ_twin ← m · θ_twin + (1 − m) · θ, then
    ``twin(batch, seen)`` gives the look that becomes the view ``twin`` of the embeddings; of the regions, cells and
    words it pools those that the model's own view ``seen`` kept. Buffers (running statistics) are copied each time.

    Parameters without gradient are shared with the retriever, not copied: a frozen backbone costs no memory,
    no time and no room in the checkpoint. One that is trained later gets its own copy at the next update; the
    state dict holds what is not shared. Inputs (vocabulary, tokenizer) are shared too. The branches of the
    retriever do not belong to its twin: CODER's bank holds instance embeddings alone.

    The keys carry no gradient, so their matrix products may be cheaper than the model's: ``precision`` is bf16, the
    same as the model's, or "auto", bf16 where the device has instructions for it. Its weights stay float32.
    """

    def __init__(
        self, retriever: nn.Module, momentum: float = 0.995, precision: KeyPrecision = "auto"
    ) -> None:
        super().__init__()
        self.momentum = between(momentum, "the momentum of the twin")
        self.precision = one_of(precision, "the twin's precision", KeyPrecision)
        online = bare(retriever)
        shared: list[Any] = [p for p in online.parameters() if not p.requires_grad]
        shared += [getattr(online, name) for name in ("image_input", "text_input") if hasattr(online, name)]
        memo: dict[int, Any] = {id(value): value for value in shared}
        if isinstance(branches := getattr(online, "branches", None), nn.ModuleDict):
            memo[id(branches)] = nn.ModuleDict()
        if isinstance(scorer := getattr(online, "scorer", None), nn.Module):
            memo[id(scorer)] = None  # keys are vectors: nothing of them is scored in pairs
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
                [targets[n] for n in names], [whole_tensor(sources[n]) for n in names], 1.0 - self.momentum
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
            # towers give float32 whatever they computed in
            keys: Embeddings = self.retriever(replace(batch, views={}), *kept)
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
