"""Concurrent requests share the work: what waits at the same time is encoded and searched together.

A request alone is never delayed: a batch waits only while further requests are on their way to it, and a few
milliseconds at most. The score of a hit does not depend on the batch it came in (see ``index.protocol``).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, cast

import numpy as np

from diptych.errors import Unavailable
from diptych.index import deadline
from diptych.index.base import Index
from diptych.index.deadline import Deadline
from diptych.index.protocol import Hits
from diptych.model.protocol import Model

WINDOW = 0.003  # seconds a batch waits for requests that are on their way
LARGEST = 64  # requests in a batch


class Traffic:
    """How many requests are being answered."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.active = 0

    @contextmanager
    def request(self) -> Iterator[None]:
        with self._lock:
            self.active += 1
        try:
            yield
        finally:
            with self._lock:
                self.active -= 1


Job = tuple[Hashable, Any, "Future[Any]", Deadline | None]


class Batcher:
    """A thread that runs jobs of equal key together: ``run(key, values)`` gives one result per value.

    A batch that fails is run again one by one, so that a faulty request spoils no other; what is unavailable is
    so for all of them, and each would wait for it again.
    """

    def __init__(
        self,
        run: Callable[[Any, list[Any]], Sequence[Any]],
        traffic: Traffic,
        observe: Callable[[int], None] = lambda size: None,
        window: float = WINDOW,
    ) -> None:
        self._run, self._traffic, self._observe, self._window = run, traffic, observe, window
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="batcher", daemon=True)
        self._thread.start()

    def __call__(self, key: Hashable, value: Any) -> Any:
        """The result for one value, computed with whatever else waits under the same key."""
        future: Future[Any] = Future()
        limit = deadline.current()
        with self._lock:
            if self._closed:
                raise Unavailable("the service is shutting down: try again in a moment.")
            self._jobs.put((key, value, future, limit))
        try:
            return future.result(None if limit is None else limit.left)
        except TimeoutError:
            if limit is None or future.done():  # what ran here raised it
                raise
            future.cancel()
            raise limit.late() from None

    def close(self, patience: float | None = None) -> None:
        """Finish what waits, then stop, after ``patience`` seconds at the latest; idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._jobs.put(None)
        self._thread.join(patience)

    def _work(self) -> None:
        while self._work_once():
            pass

    def _work_once(self) -> bool:
        """Run one batch and release it before waiting for the next; False when there are no more jobs."""
        batch, going = self._collect()
        groups: dict[Hashable, list[Job]] = {}
        for job in batch:
            groups.setdefault(job[0], []).append(job)
        for key, jobs in groups.items():
            # one that nobody waits for any more is not run
            wanted = [job for job in jobs if job[2].set_running_or_notify_cancel()]
            if wanted:
                self._observe(len(wanted))
                with deadline.under(_latest(wanted)):
                    self._finish(key, wanted)
        return going

    def _collect(self) -> tuple[list[Job], bool]:
        first = self._jobs.get()
        if first is None:
            return [], False
        batch, deadline = [first], time.monotonic() + self._window
        while len(batch) < LARGEST:
            # nobody else is on the way: no reason to wait
            wait = 0.0 if len(batch) >= self._traffic.active else max(0.0, deadline - time.monotonic())
            try:
                job = self._jobs.get(timeout=wait) if wait else self._jobs.get_nowait()
            except queue.Empty:
                break
            if job is None:
                return batch, False
            batch.append(job)
        return batch, True

    def _finish(self, key: Hashable, jobs: list[Job]) -> None:
        try:
            results = self._run(key, [value for _, value, _, _ in jobs])
        except BaseException as error:
            for job in jobs:
                if len(jobs) == 1 or isinstance(error, Unavailable):
                    job[2].set_exception(error)
                else:
                    self._finish(key, [job])
            return
        for (_, _, future, _), result in zip(jobs, results, strict=True):
            future.set_result(result)


def _latest(jobs: list[Job]) -> Deadline | None:
    """The deadline of a batch: that of the request that may wait longest."""
    limits = [limit for _, _, _, limit in jobs if limit is not None]
    return max(limits, key=lambda limit: limit.until) if len(limits) == len(jobs) else None


class BatchedModel:
    """A model whose encoders take the inputs of concurrent requests together in one thread; the rest is its own."""

    def __init__(self, model: Model, traffic: Traffic, observe: Callable[[int], None]) -> None:
        self._model = model
        self._batcher = Batcher(self._encode, traffic, observe)

    def encode_text(self, texts: Any, *, batch_size: int | None = None) -> Any:
        return self._batcher("text", list(texts))

    def encode_image(self, images: Any, *, batch_size: int | None = None) -> Any:
        return self._batcher("image", list(images))

    def close(self, patience: float | None = None) -> None:
        self._batcher.close(patience)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def _encode(self, kind: str, lists: list[list[Any]]) -> list[Any]:
        flat = [one for values in lists for one in values]
        rows = self._model.encode_text(flat) if kind == "text" else self._model.encode_image(flat)
        ends = np.cumsum([len(values) for values in lists])[:-1]
        return np.split(rows, ends)


class BatchedIndex:
    """An index whose concurrent searches share one pass over the vectors; the rest is the index's own.

    Searches without a filter have a thread of their own: a filter that takes long delays none of them.
    """

    def __init__(self, index: Index, traffic: Traffic, observe: Callable[[int], None]) -> None:
        self._index = index
        self._plain = Batcher(self._search, traffic, observe)
        self._filtered = Batcher(self._search, traffic, observe)

    def search(self, vector: Any, k: int = 10, **how: Any) -> Hits:
        """``Index.search``, with what else is asked in the same way."""
        batcher = self._plain if how.get("filter") is None else self._filtered
        return cast(Hits, batcher((k, *sorted(how.items())), vector))

    def close(self, patience: float | None = None) -> None:
        self._plain.close(patience)
        self._filtered.close(patience)

    def __len__(self) -> int:
        return len(self._index)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._index, name)

    def _search(self, key: tuple[Any, ...], vectors: list[Any]) -> list[Hits]:
        k, *how = key
        return self._index.search_many(np.stack(vectors), k, **dict(how))
