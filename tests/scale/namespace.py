"""Run inside a network namespace of its own: a Milvus server that obeys lines on standard input, and a way to it.

``unshare -rn python namespace.py FOLDER LISTENING``: a process keeps the sockets it was given when it enters a
namespace, so connections that the outside makes to the socket LISTENING are accepted here and carried to the server,
whose nine ports nobody else can see. ``start`` starts the server and waits until it answers, ``kill`` ends it as a
loss of power does; each is answered with a line. The end of standard input ends everything.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

PORT, HEALTH = 19530, 9091
SET_FLAGS, UP, RUNNING = 0x8914, 0x1, 0x40  # of an interface, as Linux numbers them
SET_DEATH_SIGNAL = 1  # of prctl: what a process is sent when its parent ends
PATIENCE = 240  # seconds for a start on a busy machine


def main() -> None:
    """Obey until nobody is there any more."""
    folder, listening = Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
    with suppress(PermissionError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SET_FLAGS, struct.pack("16sh14x", b"lo", UP | RUNNING))
    threading.Thread(target=relay, args=(listening,), daemon=True).start()
    server: subprocess.Popen[bytes] | None = None
    try:
        for line in sys.stdin:
            if line == "start\n":
                server = server or start(folder)
                answer = f"pid {server.pid}" if wait(server) else "died"
            elif line == "kill\n" and server is not None:
                server.kill()
                server.wait()
                server, answer = None, "killed"
            else:
                answer = "unknown"
            print(answer, flush=True)
    finally:
        if server is not None:
            server.kill()  # it does not always leave when asked
            server.wait()


def start(folder: Path) -> subprocess.Popen[bytes]:
    """The server as a process of its own, with what it writes in a file."""
    program = folder / "bin" / "milvus"
    surroundings = {
        **os.environ,
        "DEPLOY_MODE": "STANDALONE",
        "METRICS_PORT": str(HEALTH),
        "MILVUS_RUN_DIR": str(folder / "run"),
        "LD_LIBRARY_PATH": str(program.parent),
    }
    with (folder / "server.log").open("ab") as log:
        return subprocess.Popen(
            [str(program), "run", "standalone"],
            cwd=folder,
            env=surroundings,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=_die_with_parent,
        )


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGKILL)


def wait(server: subprocess.Popen[bytes]) -> bool:
    """Whether the server came up; False when it ended or took too long."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and server.poll() is None:
        with (
            suppress(urllib.error.URLError, OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{HEALTH}/healthz", timeout=10) as reply,
        ):
            if reply.read() == b"OK":
                return True
        time.sleep(0.1)
    return False


def relay(listening: socket.socket) -> None:
    """Carry every connection to the server; one that the server refuses is closed."""
    while True:
        client, _ = listening.accept()
        try:
            server = socket.create_connection(("127.0.0.1", PORT))
        except OSError:
            client.close()
            continue
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for source, target in ((client, server), (server, client)):
            threading.Thread(target=copy, args=(source, target), daemon=True).start()


def copy(source: socket.socket, target: socket.socket) -> None:
    """Everything from one side to the other; the end of either ends both."""
    with suppress(OSError):
        while data := source.recv(1 << 18):
            target.sendall(data)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    main()
