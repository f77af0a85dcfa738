"""How the service could read HTTP: its own limits on h11, plain h11, httptools, and two processes of each.

    python benchmarks/parsers.py INDEX MODEL [--seconds 4] [--only httptools]

MODEL is a folder with a runtime. For each way: answers a second to 16 ordinary clients; the slowest hundredth of a
bystander's answers while 16 clients attack with chunks of one byte, and with pipelined requests; and the memory of all
processes together after the searches (their proportional share, so that what they share counts once). httptools, where
it is wanted, needs ``pip install httptools``.
"""

from __future__ import annotations

import argparse
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent / "tests" / "attack"))
from wire import CLIENTS, TOKEN, bystander, rush

WAYS = {
    "h11 with our limits": ("own", 1),
    "h11": ("h11", 1),
    "httptools": ("httptools", 1),
    "h11 with our limits, two processes": ("own", 2),
    "httptools, two processes": ("httptools", 2),
}
ATTACKS = ("tiny chunks with a token", "pipelined requests")


def serve(index: str, model: str, parser: str, listening: socket.socket) -> None:
    """One process of the service."""
    import uvicorn

    from diptych.index.engines.opening import open_index
    from diptych.runtime.model import RuntimeModel
    from diptych.web.app import create_app
    from diptych.web.connections import PatientProtocol

    kinds: dict[str, Any] = {"own": PatientProtocol}
    with open_index(index) as opened:
        app = create_app(opened, RuntimeModel.open(model), token=TOKEN, private=True)
        config = uvicorn.Config(
            app, http=kinds.get(parser, parser), log_level="error", access_log=False, ws="none"
        )
        uvicorn.Server(config).run(sockets=[listening])


def start(options: argparse.Namespace, parser: str, count: int) -> tuple[int, list[int]]:
    """The port and the processes of a service."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=512)
    port, children = int(listening.getsockname()[1]), []
    for _ in range(count):
        child = os.fork()
        if child == 0:
            serve(options.index, options.model, parser, listening)
            os._exit(0)
        children.append(child)
    listening.close()
    return port, children


def ask(port: int, until: float, counts: list[int]) -> None:
    """An ordinary client."""
    connection, done = http.client.HTTPConnection("127.0.0.1", port, timeout=60), 0
    while time.monotonic() < until:
        path = f"/api/search?text=a+dog+and+{done % 50}+children&k=10"
        connection.request("GET", path, headers={"Authorization": f"Bearer {TOKEN}"})
        answer = connection.getresponse()
        answer.read()
        done += answer.status == 200
    counts.append(done)


def throughput(port: int, seconds: float) -> float:
    """Answers a second to 16 clients."""
    counts: list[int] = []
    until = time.monotonic() + seconds
    clients = [threading.Thread(target=ask, args=(port, until, counts)) for _ in range(CLIENTS)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    return sum(counts) / seconds


def memory(children: list[int]) -> float:
    """Megabytes of all processes together."""
    shares = [Path(f"/proc/{child}/smaps_rollup").read_text() for child in children]
    return sum(int(re.search(r"^Pss:\s+(\d+)", one, re.MULTILINE).group(1)) for one in shares) / 1000  # type: ignore[union-attr]


def suffered(port: int, name: str, seconds: float) -> float:
    """The slowest hundredth of a bystander's answers during an attack."""
    command = [sys.executable, __file__, "-", "-", "--attack", name, "--port", str(port)]
    attackers = subprocess.Popen(command)
    try:
        time.sleep(1.0)
        return bystander(port, seconds).quantile(0.99)
    finally:
        attackers.kill()
        attackers.wait()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("index")
    parser.add_argument("model")
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--only", default="", help="ways whose name contains this")
    parser.add_argument("--attack", default="", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attack:
        rush(options.attack, options.port, CLIENTS, 600)
        return
    print(f"| way | answers a second | memory MB | {' | '.join(f'p99 s, {name}' for name in ATTACKS)} |")
    print("|---|---|---|---|---|")
    for name in [name for name in WAYS if options.only in name]:
        port, children = start(options, *WAYS[name])
        try:
            bystander(port, 3.0)  # until every process is ready
            rate, held = throughput(port, options.seconds), memory(children)
            late = [f"{suffered(port, attack, options.seconds):.2f}" for attack in ATTACKS]
            print(f"| {name} | {rate:.0f} | {held:.0f} | {' | '.join(late)} |", flush=True)
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


if __name__ == "__main__":
    main()
