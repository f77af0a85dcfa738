"""Where the parts of a step run while it is recorded as a CUDA graph: beside each other, placed from outside.

Kernels of one stream run one after the other, and many kernels of a step are too small to fill a GPU. While a step is
recorded, ``beside`` replaces some methods on their objects. A *part* then runs on a stream of its own, which waits only
for the beginning of its *whole*, and its caller waits for the part. The recorded graph knows that the parts of a whole
are independent, forward and, since autograd runs a backward pass on the streams of the forward pass, backward. No part
knows of streams, and outside a recording there is one stream.

===================================  ==========================================  ===========================
whole                                parts                                       they read
===================================  ==========================================  ===========================
``Retriever.forward``, also a twin's  both towers, GPO's rows of every size       the batch, their own weights
``Sum.forward``                      its members                                 the embeddings, the batch
what follows ``seen_by_objective``   the teachers' cosines of soft labels        ``batch.targets``
===================================  ==========================================  ===========================
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from diptych.aggregators.gpo import GPO
from diptych.model.retriever import Retriever
from diptych.objectives import soft_labels
from diptych.objectives.combine import Sum
from diptych.objectives.objective import members_of
from diptych.training.method import Method
from diptych.types import Batch

Part = TypeVar("Part", bound=nn.Module)


@contextmanager
def beside(method: Method, step: object) -> Iterator[None]:
    """Around the recording of a step of this method: its independent parts run beside each other."""
    with ExitStack() as places:
        for holder in (method.retriever, method.twin):
            for retriever in _find_parts(holder, Retriever):
                whole = Whole()
                places.enter_context(replaced(retriever, "forward", whole.around))
                # autocast casts a shared weight once: it must not be used on two streams
                towers = [retriever.image, retriever.text] if _apart(retriever.image, retriever.text) else []
                for tower in towers:
                    places.enter_context(replaced(tower, "forward", whole.part))
                for pooling in _find_parts(retriever, GPO):
                    places.enter_context(replaced(pooling, "rows_of_every_size", whole.part))
        for total in _find_parts(method.objective, Sum):
            whole = Whole()
            places.enter_context(replaced(total, "forward", whole.around))
            for member in members_of(total):
                places.enter_context(replaced(member, "forward", whole.part))
        targets = Whole()
        places.enter_context(replaced(step, "seen_by_objective", targets.behind))
        places.enter_context(replaced(soft_labels, "teacher_cosines", cosines_of(targets)))
        yield


@contextmanager
def replaced(
    owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Replace a method of one object, or a function of one module, by what ``wrap`` makes of it."""
    own, before = name in vars(owner), getattr(owner, name)
    setattr(owner, name, wrap(before))
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


class Whole:
    """Work with parts that need nothing of each other, only what is there when it begins."""

    def __init__(self) -> None:
        self.begun: torch.cuda.Event | None = None
        self.placed: set[int] = set()

    def around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method is the whole."""

        @wraps(method)
        def run(*args: Any, **given: Any) -> Any:
            self._begin()
            try:
                return method(*args, **given)
            finally:
                self.begun = None

        return run

    def behind(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The whole is what follows the method."""

        @wraps(method)
        def run(*args: Any, **given: Any) -> Any:
            found = method(*args, **given)
            self._begin()
            return found

        return run

    def part(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method is a part: its first call in a whole runs on a stream of its own, later ones where they are.

        A tower that looks at a further view uses weights that autocast has cast in its first call.
        """

        @wraps(method)
        def run(*args: Any, **given: Any) -> Any:
            if self.begun is None or id(method) in self.placed:
                return method(*args, **given)
            self.placed.add(id(method))
            found, stream = self.apart(method, *args, **given)
            torch.cuda.current_stream().wait_stream(stream)
            return found

        return run

    def apart(self, method: Callable[..., Any], *args: Any, **given: Any) -> tuple[Any, torch.cuda.Stream]:
        """What the method gives, and the stream that computes it from the beginning of the whole on."""
        assert self.begun is not None
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_event(self.begun)
        with torch.cuda.stream(stream):
            return method(*args, **given), stream

    def _begin(self) -> None:
        self.begun = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.begun.record()
        self.placed.clear()


def cosines_of(targets: Whole) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Around ``teacher_cosines``: each column is computed once, beside the model, for all objectives that read it."""
    found: dict[str, tuple[Tensor, torch.cuda.Stream]] = {}

    def wrap(method: Callable[[Batch, str], Tensor]) -> Callable[[Batch, str], Tensor]:
        @wraps(method)
        def run(batch: Batch, column: str) -> Tensor:
            if column not in found:
                found[column] = targets.apart(method, batch, column)
            cosines, stream = found[column]
            torch.cuda.current_stream().wait_stream(stream)
            return cosines

        return run

    return wrap


def _find_parts(holder: nn.Module | None, kind: type[Part]) -> Sequence[Part]:
    return [] if holder is None else [part for part in holder.modules() if isinstance(part, kind)]


def _apart(*parts: nn.Module) -> bool:
    """Whether no two of these share a weight."""
    weights = [id(p) for part in parts for p in part.parameters()]
    return len(weights) == len(set(weights))
