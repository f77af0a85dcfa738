"""A Ray cluster of several nodes on this machine, each on a loopback address of its own, ended by process id."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

STARTED = "block forever"  # what a node says when it is up
TRIES = 3  # a node may take too long to start on a loaded machine
ROOT = Path(__file__).parent.parent.parent


class RayCluster:
    """Nodes on 127.0.0.2, 127.0.0.3, ...; the first is the head, which has the address."""

    def __init__(self, nodes: int = 3, cpus: int = 2) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # sockets need a short path
        with socket.create_server(("127.0.0.2", 0)) as free:
            self.port = free.getsockname()[1]
        self.address, self.cpus = f"127.0.0.2:{self.port}", cpus
        self.nodes: dict[str, psutil.Process] = {}
        self.started: list[subprocess.Popen[bytes]] = []
        self.everything: list[psutil.Process] = []
        for number in range(nodes):
            self.start(f"127.0.0.{2 + number}")

    def start(self, ip: str) -> None:
        """Start a node, and wait until it is up."""
        head = ip == "127.0.0.2"
        place = (
            [f"--port={self.port}", "--head", "--include-dashboard=false", f"--temp-dir={self.folder}"]
            if head
            else [f"--address={self.address}"]
        )
        command = [
            str(Path(sys.executable).with_name("ray")), "start", "--block", f"--node-ip-address={ip}", *place,
            f"--num-cpus={self.cpus}", "--object-store-memory=100000000", "--disable-usage-stats",
        ]  # fmt: skip
        env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        for attempt in range(TRIES):
            log = self.folder / f"{ip}-{attempt}.log"
            with log.open("w") as output:
                started = subprocess.Popen(
                    command,
                    stdout=output,
                    stderr=output,
                    stdin=subprocess.DEVNULL,
                    env=env,
                    start_new_session=True,
                )
            self.nodes[ip] = psutil.Process(started.pid)
            self.started.append(started)
            end = time.monotonic() + 120
            while time.monotonic() < end and started.poll() is None:
                if STARTED in log.read_text():
                    self.everything += [self.nodes[ip], *self.nodes[ip].children(recursive=True)]
                    return
                time.sleep(0.2)
            self.kill_node(ip)
        raise AssertionError(log.read_text())

    def processes(self, ip: str) -> list[psutil.Process]:
        """Those of a node."""
        node = self.nodes[ip]
        return [node, *node.children(recursive=True)] if node.is_running() else []

    def busy_workers(self) -> list[psutil.Process]:
        """Workers that run a job of diptych this moment."""
        found = []
        for ip in self.nodes:
            for process in self.processes(ip):
                try:
                    if re.match(r"ray::_call", " ".join(process.cmdline())):
                        found.append(process)
                except psutil.Error:
                    continue
        return found

    def kill_node(self, ip: str) -> None:
        """End every process of a node at once, as a machine that loses its power."""
        for process in self.processes(ip):
            kill(process)

    def close(self) -> None:
        """End everything."""
        for ip in reversed(self.nodes):
            self.kill_node(ip)
        for process in self.everything:
            kill(process)
        for started in self.started:
            started.wait(60)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def kill(process: psutil.Process) -> None:
    """End a process by its id, unless it has ended."""
    with contextlib.suppress(psutil.Error):
        process.send_signal(signal.SIGKILL)
