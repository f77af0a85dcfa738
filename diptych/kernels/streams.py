"""Work that may run beside other work while a training step is recorded as a CUDA graph.

Kernels of one stream run one after the other, and many kernels of a step are too small to fill a GPU. What depends only
on weights and on the batch, not on what was computed before it, is put on a stream of its own; the recorded graph then
knows that the two are independent, forward and, since autograd runs a backward pass on the streams of the forward pass,
backward. Outside a recording nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import nn

_begun: ContextVar[torch.cuda.Event | None] = ContextVar("begun", default=None)


@contextmanager
def branching(parts: Sequence[nn.Module] = ()) -> Iterator[None]:
    """Around a forward pass: while it is recorded, ``Beside`` branches off from its beginning, which is here.

    Not where the ``parts`` share weights: autocast casts a weight once, and both streams would use that.
    """
    event = None
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing() and _apart(parts):
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
    token = _begun.set(event)
    try:
        yield
    finally:
        _begun.reset(token)


class Beside:
    """``with Beside() as other: work`` … ``other.join()``: results of the work may be used after the join."""

    def __enter__(self) -> Beside:
        self.begun = _begun.get()
        if self.begun is not None:
            self.main = torch.cuda.current_stream()
            self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self.stream.wait_event(self.begun)
            self.context = torch.cuda.stream(self.stream)
            self.context.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *_: object) -> None:
        if self.begun is not None:
            self.context.__exit__(*_)

    def join(self) -> None:
        """Let the stream that branched off wait for the work."""
        if self.begun is not None:
            self.main.wait_stream(self.stream)


def _apart(parts: Sequence[nn.Module]) -> bool:
    weights = [id(p) for part in parts for p in part.parameters()]
    return len(weights) == len(set(weights))
