"""The service under load: 32 clients at once on two cores; no error, and the answers a single client gets.

    python benchmarks/load.py                                          # 60 s over 100,000 random vectors
    python benchmarks/load.py --index demo/emoji.index --model demo/photos
    python benchmarks/load.py --seconds 5 --items 10000                # a quick look

The service runs in a process of its own on loopback; clients and service share the cores. Each client keeps one
connection and asks as fast as it is answered: a text, a text with a filter, and a hybrid search in turn. Latency is
what the client sees. An answer is the same when the ids are, in order, and no score differs by more than 1e-6.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np

SYLLABLES = ("ba", "co", "di", "fu", "ge", "ha", "ko", "li", "mo", "ne", "pa", "ri", "so", "tu")
WORDS = ["".join(parts) for parts in itertools.product(SYLLABLES, repeat=3)]  # 2,744
TOLERANCE = 1e-6


class WordModel:
    """A stand-in of realistic cost: word vectors, averaged, through two layers of a network."""

    dim = 512

    def __init__(self) -> None:
        import torch

        torch.manual_seed(0)
        self.number = {word: n for n, word in enumerate(WORDS)}
        self.words = torch.randn(len(WORDS), 512)
        self.first, self.second = torch.randn(512, 2048) / 23, torch.randn(2048, self.dim) / 45

    def fingerprint(self) -> str:
        return "load"

    def encode_text(self, texts: Any, *, batch_size: int = 256) -> Any:
        import torch

        rows = []
        for text in texts:
            known = [self.number[word] for word in text.split() if word in self.number]
            rows.append(self.words[known].mean(dim=0) if known else torch.zeros(512))
        hidden = torch.relu(torch.stack(rows) @ self.first) @ self.second
        return torch.nn.functional.normalize(hidden, dim=1).numpy()

    def encode_image(self, images: Any, *, batch_size: int = 64) -> Any:
        raise NotImplementedError


def sentence(rng: np.random.Generator, length: int) -> str:
    """Words of a language in which the n-th most frequent word is n times as rare as the first."""
    ranks = np.exp(rng.uniform(0, np.log(len(WORDS)), length)).astype(int) - 1
    return " ".join(WORDS[rank] for rank in ranks)


def make_index(folder: Path, count: int) -> None:
    """An index of random sentences."""
    from diptych.index.engines.embedded.index import EmbeddedIndex
    from diptych.index.protocol import Item

    rng = np.random.default_rng(0)
    model = WordModel()
    with EmbeddedIndex.create(folder, model.dim, fingerprint=model.fingerprint()) as index:
        for start in range(0, count, 10_000):
            texts = [sentence(rng, 6) for _ in range(start, min(count, start + 10_000))]
            vectors = model.encode_text(texts) + 0.02 * rng.normal(size=(len(texts), model.dim))
            vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
            items = [
                Item(f"item{start + n}", text=t, metadata={"price": n % 100}) for n, t in enumerate(texts)
            ]
            index.add(items, vectors)


def serve(index: str, model: str) -> None:
    """The service, until it is told to stop."""
    from diptych.web.serve import serve

    serve(index, model or WordModel(), port=0)


def questions(filters: bool) -> list[str]:
    """The addresses that are asked."""
    rng = np.random.default_rng(1)
    asked = []
    for n in range(300):
        fields: dict[str, Any] = {"text": sentence(rng, int(rng.integers(1, 6))), "k": 10}
        if n % 3 == 1 and filters:
            fields["filter"] = f"price < {int(rng.integers(5, 60))}"
        if n % 3 == 2:
            fields["hybrid"] = "true"
        asked.append(f"/api/search?{urlencode(fields)}")
    return asked


def ask(connection: http.client.HTTPConnection, path: str) -> list[tuple[str, float]]:
    """The ids and scores of an answer."""
    connection.request("GET", path)
    answer = connection.getresponse()
    body = answer.read()
    if answer.status != 200:
        raise RuntimeError(f"{answer.status}: {body[:200]!r}")
    return [(hit["id"], hit["score"]) for hit in json.loads(body)["hits"]]


def same(a: list[tuple[str, float]], b: list[tuple[str, float]]) -> bool:
    """Whether two answers agree."""
    return [id for id, _ in a] == [id for id, _ in b] and all(
        abs(x - y) <= TOLERANCE for (_, x), (_, y) in zip(a, b, strict=True)
    )


class Client(threading.Thread):
    """One client: asks until told to stop, and keeps what it saw."""

    def __init__(self, number: int, address: str, asked: list[str], expected: list[Any], stop: float) -> None:
        super().__init__(daemon=True)
        self.number, self.address, self.asked, self.expected, self.until = (
            number,
            address,
            asked,
            expected,
            stop,
        )
        self.seconds: list[float] = []
        self.errors: list[str] = []
        self.different = 0

    def run(self) -> None:
        connection = http.client.HTTPConnection(self.address, timeout=60)
        at = self.number * 37
        while time.monotonic() < self.until:
            n = at % len(self.asked)
            start = time.monotonic()
            try:
                found = ask(connection, self.asked[n])
            except Exception as error:
                self.errors.append(repr(error))
                connection.close()
                continue
            self.seconds.append(time.monotonic() - start)
            self.different += not same(found, self.expected[n])
            at += 1
        connection.close()


def main() -> None:
    """Make an index, start the service, load it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--index", default="", help="an index of your own, with --model")
    parser.add_argument("--model", default="")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.index, options.model)
        return
    with tempfile.TemporaryDirectory() as folder:
        if not options.index:
            make_index(Path(folder) / "index", options.items)
        index = options.index or str(Path(folder) / "index")
        command = [sys.executable, __file__, "--serve", "--index", index, "--model", options.model]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as service:
            assert service.stdout is not None
            first = service.stdout.readline()
            try:
                report(re.search(r"http://([\d.:]+)", first).group(1), options)  # type: ignore[union-attr]
            finally:
                service.terminate()
                start = time.monotonic()
                print(
                    f"the service left with status {service.wait(60)} after {time.monotonic() - start:.1f} s"
                )


def report(address: str, options: argparse.Namespace) -> None:
    """Ask alone, then together, and print the table."""
    asked = questions(filters=not options.index)
    connection = http.client.HTTPConnection(address, timeout=60)
    for path in asked[:20]:
        ask(connection, path)
    alone, start = [], time.monotonic()
    expected = []
    for path in asked:
        before = time.monotonic()
        expected.append(ask(connection, path))
        alone.append(time.monotonic() - before)
    single = len(asked) / (time.monotonic() - start)
    stop = time.monotonic() + options.seconds
    clients = [Client(n, address, asked, expected, stop) for n in range(options.clients)]
    for client in clients:
        client.start()
    for client in clients:
        client.join(options.seconds + 90)
    seconds = np.concatenate([client.seconds for client in clients])
    errors = [error for client in clients for error in client.errors]
    different = sum(client.different for client in clients)
    print("| clients | answers | per second | p50 ms | p99 ms | slowest ms | errors | different |")
    print("|---|---|---|---|---|---|---|---|")
    for count, taken, rate, wrong, other in (
        (1, np.array(alone), single, 0, 0),
        (options.clients, seconds, len(seconds) / options.seconds, len(errors), different),
    ):
        p50, p99 = np.quantile(taken, [0.5, 0.99]) * 1000
        print(
            f"| {count} | {len(taken)} | {rate:.0f} | {p50:.1f} | {p99:.1f} | {taken.max() * 1000:.1f} "
            f"| {wrong} | {other} |"
        )
    connection.close()  # kept open too long: the service has closed it
    connection.request("GET", "/metrics")
    metrics = connection.getresponse().read().decode()
    for name in ("encode", "search"):
        total = re.search(rf"diptych_{name}_batch_size_sum (\S+)", metrics).group(1)  # type: ignore[union-attr]
        batches = re.search(rf"diptych_{name}_batch_size_count (\S+)", metrics).group(1)  # type: ignore[union-attr]
        print(f"{name}: {float(total) / float(batches):.1f} requests in a batch on average")
    for error in errors[:3]:
        print(error)
    if errors or different:
        sys.exit(1)


if __name__ == "__main__":
    main()
