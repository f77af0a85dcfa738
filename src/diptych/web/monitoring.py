"""Counters and histograms in the text format Prometheus reads."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diptych.index.protocol import Recall

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SIZES = (1, 2, 4, 8, 16, 32, 64)


class Histogram:
    """How many observations fell up to each bound."""

    def __init__(self, name: str, help: str, bounds: tuple[float, ...]) -> None:
        self.name, self.help, self.bounds = name, help, bounds
        self._lock = threading.Lock()
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        with self._lock:
            self._counts[bisect_left(self.bounds, value)] += 1
            self._sum += value

    def lines(self) -> list[str]:
        with self._lock:
            counts, total = list(self._counts), self._sum
        out, seen = [f"# HELP {self.name} {self.help}", f"# TYPE {self.name} histogram"], 0
        for bound, count in zip((*self.bounds, float("inf")), counts, strict=True):
            seen += count
            label = "+Inf" if bound == float("inf") else f"{bound:g}"
            out.append(f'{self.name}_bucket{{le="{label}"}} {seen}')
        return [*out, f"{self.name}_sum {total:.9g}", f"{self.name}_count {seen}"]


class Metrics:
    """What the service has done since it started."""

    def __init__(self) -> None:
        self.search_seconds = Histogram("diptych_search_seconds", "Seconds to answer a search.", SECONDS)
        self.encode_batch = Histogram("diptych_encode_batch_size", "Requests encoded together.", SIZES)
        self.search_batch = Histogram("diptych_search_batch_size", "Requests searched together.", SIZES)
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, int]] = Counter()
        self._started = time.time()

    def count(self, path: str, status: int) -> None:
        with self._lock:
            self._requests[path, status] += 1

    def render(self, counts: Mapping[str, int], active: int, recall: Mapping[str, Recall]) -> str:
        """Everything as text; ``counts`` are the items of the index by kind, ``recall`` that of approximate indexes."""
        with self._lock:
            requests = sorted(self._requests.items())
        families: tuple[tuple[str, str, str, dict[str, object]], ...] = (
            ("requests_total", "counter", "Requests answered.",
             {f'{{path="{p}",status="{s}"}}': n for (p, s), n in requests}),
            ("items", "gauge", "Items in the index.", {f'{{kind="{kind}"}}': n for kind, n in counts.items()}),
            ("recall", "gauge", "Recall@10 of an approximate index.",
             {f'{{kind="{kind}"}}': f"{one.value:.6g}" for kind, one in recall.items()}),
            ("active_searches", "gauge", "Searches being answered.", {"": active}),
            ("start_time_seconds", "gauge", "When the service started.", {"": f"{self._started:.3f}"}),
        )  # fmt: skip
        out = [line for family in families for line in _family(*family)]
        for histogram in (self.search_seconds, self.encode_batch, self.search_batch):
            out += histogram.lines()
        return "\n".join(out) + "\n"


def _family(name: str, kind: str, help: str, values: Mapping[str, object]) -> list[str]:
    """The lines of one metric; ``values`` by their labels."""
    head = [f"# HELP diptych_{name} {help}", f"# TYPE diptych_{name} {kind}"]
    return head + [f"diptych_{name}{labels} {value}" for labels, value in values.items()]


class CountRequests:
    """Counts answers by path and status; paths the service does not know are counted as one."""

    def __init__(self, app: ASGIApp, metrics: Metrics, known: frozenset[str]) -> None:
        self.app, self.metrics, self.known = app, metrics, known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self.known else "other"

        answered = False

        async def counted(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start":
                answered = True
                self.metrics.count(path, message["status"])
            await send(message)

        try:
            await self.app(scope, receive, counted)
        except Exception:  # answered with 500 further out
            if not answered:
                self.metrics.count(path, 500)
            raise
