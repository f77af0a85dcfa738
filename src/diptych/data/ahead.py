"""Work done ahead in threads: what a model reads next is read, decoded or tokenised while it computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:  # pictures are read ahead without torch too
    import torch

J = TypeVar("J")
T = TypeVar("T")


def read_ahead(
    jobs: Iterable[J], read: Callable[[J], T], workers: int, device: torch.device | None = None
) -> Iterator[T]:
    """``read(job)`` for every job, in order, on ``workers`` threads (0: when its turn comes, in this one).

    At most ``workers + 1`` results are held or under way. An error comes out in the place of its result, and ends
    everything; so does a caller that stops in the middle. Threads rather than processes: reading and decoding release
    the interpreter, nothing is pickled or copied between processes, and a container's small /dev/shm is no limit.
    ``device`` is the GPU whose memory the threads pin.
    """
    if workers == 0:
        yield from map(read, jobs)
        return
    if device is None or device.type != "cuda":
        executor = ThreadPoolExecutor(workers, "ahead")
    else:
        import torch

        # a new thread would pin through GPU 0 and open a context on it, whichever GPU this process uses
        number = torch.cuda.current_device() if device.index is None else device.index
        executor = ThreadPoolExecutor(workers, "ahead", torch.cuda.set_device, (number,))
    ahead: deque[Future[T]] = deque()
    try:
        for job in jobs:
            ahead.append(executor.submit(read, job))
            if len(ahead) > workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        executor.shutdown(cancel_futures=True)
