"""Encoding and writing at once: a model in a thread of its own, the index in the caller's."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

W = TypeVar("W")
R = TypeVar("R")
DECODERS = 4  # threads that read and decode pictures


def decoders(store: Any) -> int:
    """Threads that read a store; one where its items are quickest to read one after the other (frames of a video)."""
    return 1 if getattr(store, "sequential", False) else min(DECODERS, os.cpu_count() or 1)


class Overlap(Generic[W, R]):
    """Batches are encoded, and chunks of them finished, in one thread, in order; this thread commits what is ready.

    At most one batch is under way while the next is gathered, and one finished chunk waits. An error of the model is
    raised before anything of its chunk is committed.
    """

    def __init__(
        self,
        encode: Callable[[list[W]], None],
        finish: Callable[[list[W]], R],
        commit: Callable[[list[W], R], None],
    ) -> None:
        self._encode, self._finish, self._commit = encode, finish, commit
        self._executor = ThreadPoolExecutor(1, "encode")
        self._batches: list[Future[None]] = []  # of the chunk that is being gathered
        self._chunk: tuple[list[W], list[Future[None]], Future[R]] | None = None

    def __enter__(self) -> Overlap[W, R]:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown(cancel_futures=True)

    def encode(self, works: list[W]) -> None:
        """Begin to encode a batch, once the one before it is done."""
        if not works:
            return
        if self._batches:
            self._batches[-1].result()
        self._batches.append(self._executor.submit(self._encode, works))

    def close_chunk(self, works: list[W]) -> None:
        """Begin to finish a chunk whose batches were given before; meanwhile the previous one is committed."""
        chunk = works, self._batches, self._executor.submit(self._finish, works)
        self._batches = []
        self.commit()
        self._chunk = chunk

    def commit_if_ready(self) -> None:
        """Commit the chunk that waits, unless it is still being computed."""
        if self._chunk is not None and self._chunk[2].done():
            self.commit()

    def commit(self) -> None:
        """Commit the chunk that waits, if there is one."""
        if self._chunk is None:
            return
        works, batches, finished = self._chunk
        self._chunk = None
        for batch in batches:
            batch.result()
        self._commit(works, finished.result())
