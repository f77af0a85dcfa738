"""Attacks on a running service, over a loopback socket: what each costs another client.

    python tests/attack/wire.py --seconds 6            # the table of docs/reliability.md

The service runs in a process of its own. Sixteen clients attack it as fast as it takes their bytes; meanwhile one
bystander asks for ``/api/health`` and for a search in turn. Its slowest answers are the measure: above ``LATE`` seconds
is a finding, and so is an answer that is not 200, or a service that has grown by more than ``GROWTH`` bytes. Seconds in
which the event loop was ready and got no core, for what else the machine does, are counted apart.
"""

from __future__ import annotations

import argparse
import http.client
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent.parent / "src")]

from page import add_docs, put  # noqa: E402

TOKEN = "correct-horse"
LATE = 1.0  # seconds of the bystander's slowest answer
GROWTH = 300_000_000
CLIENTS = 16
HEAD = "POST /api/search HTTP/1.1\r\nHost: x\r\n"
ALLOWED = f"Authorization: Bearer {TOKEN}\r\n"
CHUNKED = "Content-Type: multipart/form-data; boundary=b\r\nTransfer-Encoding: chunked\r\n"
FIELD = b'--b\r\nContent-Disposition: form-data; name="text"\r\n\r\n'


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def _body(content: bytes, kind: str = "multipart/form-data; boundary=b") -> bytes:
    head = f"{HEAD}{ALLOWED}Content-Type: {kind}\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


def _asked(headers: str) -> bytes:
    return f"GET /api/health HTTP/1.1\r\nHost: x\r\n{ALLOWED}{headers}\r\n".encode()


ATTACKS: dict[str, tuple[bytes, bytes]] = {
    "tiny chunks without a token": (f"{HEAD}{CHUNKED}\r\n".encode(), chunk(b"x") * 20_000),
    "tiny chunks with a token": (
        f"{HEAD}{ALLOWED}{CHUNKED}\r\n".encode() + chunk(FIELD), chunk(b"x") * 20_000
    ),
    "a head of 15,000 headers": (b"", b"GET / HTTP/1.1\r\n" + b"a:b\r\n" * 15_000 + b"\r\n"),
    "heads of 90 headers": (b"", _asked("a: b\r\n" * 90)),
    "10,000 trailers": (
        b"", f"{HEAD}{ALLOWED}{CHUNKED}\r\n".encode() + chunk(FIELD) + b"0\r\n" + b"a:b\r\n" * 10_000 + b"\r\n"
    ),
    "pipelined requests": (b"", _asked("") * 2_000),
    "pipelined requests without a token": (b"", b"GET /api/health HTTP/1.1\r\nHost: x\r\n\r\n" * 4_000),
    "a large body without a token": (
        f"{HEAD}Content-Type: multipart/form-data; boundary=b\r\nContent-Length: 19000000\r\n\r\n".encode(),
        b"x" * 262_144,
    ),
    "100,000 parts": (b"", _body((FIELD + b"x\r\n") * 100_000)),
    "a part of 1,000,000 headers": (b"", _body(b"--b\r\n" + b"a:b\r\n" * 1_000_000)),
    "false boundaries": (b"", _body(FIELD + b"\r\n--" * 2_000_000)),
    "a form in a slow charset": (
        b"", _body(FIELD + b"xn--" + b"a" * 400_000 + b"\r\n--b--", "multipart/form-data; boundary=b; charset=idna")
    ),
    "a form of 400,000 fields": (b"", _body(b"a&" * 400_000, "application/x-www-form-urlencoded")),
    "an address of 20,000 arguments": (
        b"", f"GET /api/search?{'a&' * 20_000}text=red HTTP/1.1\r\nHost: x\r\n{ALLOWED}\r\n".encode()
    ),
    "nested items": (
        b"", _body(b'--b\r\nContent-Disposition: form-data; name="items"\r\n\r\n' + b"[" * 900_000 + b"\r\n--b--")
    ),
    "5,000 ranges": (
        b"", f"GET /api/image?id=red/circle.png HTTP/1.1\r\nHost: x\r\n{ALLOWED}"
        f"Range: bytes={','.join(['0-0'] * 5_000)}\r\n\r\n".encode(),
    ),
}  # fmt: skip
"""What is sent once on a connection, and what is sent again and again, until the service closes it."""


def attack(port: int, name: str, over: threading.Event) -> None:
    """One client of an attack: it sends as fast as it may, and reads what comes in between."""
    first, again = ATTACKS[name]
    while not over.is_set():
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as sock:
            sock.sendall(first)
            while not over.is_set():
                sock.sendall(again)
                sock.setblocking(False)
                with suppress(BlockingIOError):
                    while sock.recv(1 << 18):
                        pass
                    break
                sock.settimeout(1)


@dataclass
class Seen:
    """The bystander's seconds for each answer, those without a core among them, and what else it noticed."""

    seconds: list[float]
    starved: list[float]
    failed: int = 0  # answers that were not 200
    growth: int = 0

    def quantile(self, share: float) -> float:
        """The seconds that this share of the answers took at most."""
        return sorted(self.seconds)[min(len(self.seconds) - 1, int(share * len(self.seconds)))]

    @property
    def finding(self) -> bool:
        """Whether another client suffered."""
        own = max(all - without for all, without in zip(self.seconds, self.starved, strict=True))
        return bool(self.failed) or own > LATE or self.growth > GROWTH


def bystander(port: int, pid: int, seconds: float) -> Seen:
    """Ask in turn for the state and for a search."""
    seen, until = Seen([], []), time.monotonic() + seconds
    paths = ("/api/health", "/api/search?text=red")
    while time.monotonic() < until:
        for path in paths:
            before, start = threads(pid), time.monotonic()
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            try:
                connection.request("GET", path, headers={"Authorization": f"Bearer {TOKEN}"})
                answer = connection.getresponse()
                answer.read()
                seen.failed += answer.status != 200
            except OSError:
                seen.failed += 1
            finally:
                connection.close()
            seen.seconds.append(time.monotonic() - start)
            seen.starved.append(without_core(pid, before))
        time.sleep(0.02)
    return seen


@contextmanager
def service() -> Iterator[tuple[int, int]]:
    """The port and the process of a private service over a small index."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--serve", folder]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline()), process.pid
        finally:
            process.terminate()
            process.wait(30)


def serve(folder: Path) -> None:
    """The process that is attacked."""
    from colours import ColourModel, make_index, running

    from diptych.web.app import create_app

    with make_index(folder, ColourModel()) as index:
        app = create_app(index, ColourModel(), token=TOKEN, private=True)
        with running(app) as url:
            print(url.rpartition(":")[2], flush=True)
            threading.Event().wait()


def attacked(name: str, port: int, pid: int, seconds: float, clients: int = CLIENTS) -> Seen:
    """What the bystander sees during an attack."""
    over = threading.Event()
    before = memory(pid)
    command = [sys.executable, __file__, "--attack", name, "--port", str(port), "--clients", str(clients)]
    attackers = subprocess.Popen([*command, "--seconds", str(seconds + 60)])
    try:
        time.sleep(1.0)  # all are at it
        seen = bystander(port, pid, seconds)
        seen.growth = memory(pid) - before
    finally:
        over.set()
        attackers.kill()
        attackers.wait()
    return seen


def memory(pid: int) -> int:
    """Resident bytes of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def threads(pid: int | str) -> dict[str, tuple[int, int]]:
    """Nanoseconds that each thread has run, and those in which it was ready to run and had no core."""
    found = {}
    for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(OSError):  # it has ended
            ran, waited, _ = map(int, file.read_text().split())
            found[file.parent.name] = ran, waited
    return found


def without_core(pid: int, before: dict[str, tuple[int, int]]) -> float:
    """Seconds since then in which the thread that ran most was ready and had no core: under attack, the event loop."""
    since = [
        (ran - before.get(thread, (0, 0))[0], waited - before.get(thread, (0, 0))[1])
        for thread, (ran, waited) in threads(pid).items()
    ]
    return max(since)[1] / 1e9


def rush(name: str, port: int, clients: int, seconds: float) -> None:
    """The process that attacks."""
    over = threading.Event()
    work: Callable[[], None] = lambda: attack(port, name, over)  # noqa: E731
    for _ in range(clients):
        threading.Thread(target=work, daemon=True).start()
    time.sleep(seconds)


def main() -> None:
    """Every attack in turn; status 1 when there is a finding."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--only", default="", help="attacks whose name contains this")
    add_docs(parser)
    parser.add_argument("--serve", default="", help=argparse.SUPPRESS)
    parser.add_argument("--attack", default="", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(Path(options.serve))
    if options.attack:
        rush(options.attack, options.port, options.clients, options.seconds)
        return
    head = "| attack of 16 clients | bystander p50 s | p99 s | slowest s | of it without a core | answers | growth MB |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    print("\n".join(lines), flush=True)
    findings = []
    for name in [name for name in ATTACKS if options.only in name]:
        with service() as (port, pid):
            bystander(port, pid, 0.5)
            seen = attacked(name, port, pid, options.seconds, options.clients)
        if seen.finding:
            findings.append(name)
        failed = f" ({seen.failed} failed)" if seen.failed else ""
        lines.append(
            f"| {name} | {seen.quantile(0.5):.2f} | {seen.quantile(0.99):.2f} | {max(seen.seconds):.2f} "
            f"| {seen.starved[seen.seconds.index(max(seen.seconds))]:.2f} "
            f"| {len(seen.seconds)}{failed} | {seen.growth / 1e6:.0f} |"
        )
        print(lines[-1], flush=True)
    for name in findings:
        print(f"FINDING {name}: another client suffered")
    if options.docs:
        put("wire", lines)
    sys.exit(1 if findings else 0)


if __name__ == "__main__":
    main()
