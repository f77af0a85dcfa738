"""Work that may run beside other work while a training step is recorded as a CUDA graph.

Kernels of one stream run one after the other, and many kernels of a step are too small to fill a GPU. Parts that do not
need each other's results are put on streams of their own; the recorded graph then knows that they are independent,
forward and, since autograd runs a backward pass on the streams of the forward pass, backward. Outside a recording
nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import nn

_begun: ContextVar[torch.cuda.Event | None] = ContextVar("begun", default=None)
_scored: ContextVar[torch.cuda.Event | None] = ContextVar("scored", default=None)
_ahead: ContextVar[tuple[Beside, ...]] = ContextVar("ahead", default=())


@contextmanager
def branching(parts: Sequence[nn.Module] = ()) -> Iterator[None]:
    """Around a forward pass: while it is recorded, ``Beside`` branches off from its beginning, which is here.

    Not where the ``parts`` share weights: autocast casts a weight once, and both streams would use that.
    """
    token = _begun.set(_event() if _apart(parts) else None)
    try:
        yield
    finally:
        _begun.reset(token)


def scored() -> None:
    """From here on the vectors and scores of a batch are there, though not yet all views of it."""
    for other in _ahead.get():
        other.join()
    _scored.set(_event())


@contextmanager
def views_there() -> Iterator[None]:
    """Around work that reads a view in the place of vectors and scores: what reads only those waits for it too."""
    token = _scored.set(None)
    try:
        yield
    finally:
        _scored.reset(token)


@contextmanager
def ahead_of_scores(other: Beside) -> Iterator[None]:
    """Around a forward pass: the results of the work may be used from where it is ``scored``, and after it."""
    token = _ahead.set((*_ahead.get(), other))
    try:
        yield
    finally:
        _ahead.reset(token)
        other.join()


class Beside:
    """``with Beside() as other: work`` … ``other.join()``: results of the work may be used after the join.

    ``scores_only`` says that the work reads only vectors and scores: it branches off where these are ``scored``.
    """

    def __init__(self, scores_only: bool = False) -> None:
        self.scores_only = scores_only

    def __enter__(self) -> Beside:
        self.begun = _begun.get()
        if self.begun is not None and self.scores_only:
            self.begun = _scored.get() or self.begun
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


def _event() -> torch.cuda.Event | None:
    if not torch.cuda.is_available() or not torch.cuda.is_current_stream_capturing():
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def _apart(parts: Sequence[nn.Module]) -> bool:
    weights = [id(p) for part in parts for p in part.parameters()]
    return len(weights) == len(set(weights))
