"""A real Milvus (the package ``milvus``) in a network namespace of its own, reachable at one port of this machine."""

from __future__ import annotations

import importlib.util
import lzma
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SETTINGS: dict[str, Any] = {
    "proxy.timeTickInterval": 20,  # milliseconds a read that must see every write waits for
    "queryCoord.checkInterval": 100,  # milliseconds between two looks at what is to be loaded
    "queryCoord.distPullInterval": 100,
    "log.level": "error",
}
# seconds a killed server's name stays taken, and the next start waits; one that is starved as long loses its name
KILLABLE = {**SETTINGS, "common.session.ttl": 10}


ALONE = ("unshare", "-rn")  # before a command: in a network of its own


class MilvusServer:
    """A server that can be killed and started again; ``url`` is its address with an index's name."""

    def __init__(self, folder: Path, address: str, process: subprocess.Popen[str]) -> None:
        self.folder, self.address, self._process = folder, address, process
        self.pid: int | None = None

    def url(self, name: str, options: str = "", login: str = "") -> str:
        """The URL of an index; ``options`` as after a question mark."""
        return f"milvus://{login}{self.address}/{name}" + (f"?{options}" if options else "")

    def start(self) -> None:
        """Start it, and wait until it answers."""
        answer = self._say("start")
        if not answer.startswith("pid "):
            said = (self.folder / "server.log").read_text(errors="replace")[-4000:]
            raise RuntimeError(f"Milvus {answer}: {said}")
        self.pid = int(answer.removeprefix("pid "))

    def kill(self) -> None:
        """End it at once, as kill -9 does."""
        assert self._say("kill") == "killed"

    def configure(self, settings: Mapping[str, Any]) -> None:
        """Write its configuration; it is read at the next start."""
        (self.folder / "configs").mkdir(exist_ok=True)
        (self.folder / "configs" / "milvus.yaml").write_text(_configuration(self.folder, settings))

    def _say(self, order: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(order, file=self._process.stdin, flush=True)
        return self._process.stdout.readline().strip()


@contextmanager
def milvus(settings: Mapping[str, Any] = SETTINGS) -> Iterator[MilvusServer]:
    """A new, empty server; where none can be had, the test is skipped."""
    package = importlib.util.find_spec("milvus")
    if package is None or not package.submodule_search_locations:
        pytest.skip("no Milvus server: it needs the package milvus (make test-scale)")
    if subprocess.run([*ALONE, "true"], capture_output=True).returncode:
        pytest.skip(f"no Milvus server: {' '.join(ALONE)} is not allowed, and it listens on all interfaces")
    folder = Path(tempfile.mkdtemp(prefix="milvus-"))
    try:
        _unpack(Path(package.submodule_search_locations[0]) / "data", folder)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            address = f"127.0.0.1:{listening.getsockname()[1]}"
            command = [*ALONE, sys.executable, str(Path(__file__).with_name("namespace.py"))]
            process = subprocess.Popen(
                [*command, str(folder), str(listening.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=[listening.fileno()],
            )
            server = MilvusServer(folder, address, process)
            server.configure(settings)
            try:
                server.start()
                yield server
            finally:
                process.communicate(timeout=60)  # the end of its input ends it
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _unpack(data: Path, folder: Path) -> None:
    """The server's program and libraries, as its package carries them."""
    (folder / "bin").mkdir()
    (folder / "configs").mkdir()
    shutil.copy(data / "glog.conf", folder / "configs")
    for packed in sorted((data / "bin").glob("*.lzma")):
        unpacked = folder / "bin" / packed.stem
        with lzma.open(packed) as source, unpacked.open("wb") as target:
            shutil.copyfileobj(source, target)
        unpacked.chmod(0o755)


def _configuration(folder: Path, settings: Mapping[str, Any]) -> str:
    """The package's template with the folders of this server, and settings named by their path."""
    package = importlib.util.find_spec("milvus")
    assert package is not None
    assert package.submodule_search_locations
    text = (Path(package.submodule_search_locations[0]) / "data" / "config.yaml.template").read_text()
    own = {
        "etcd_log_path": folder / "etcd.log",
        "system_log_path": folder / "logs",
        "etcd_data_dir": folder / "data" / "etcd",
        "local_storage_dir": folder / "data",
        "rocksmq_data_dir": folder / "data" / "rocksmq",
    }

    def filled(match: re.Match[str]) -> str:
        name, _, usual = match.group(1).partition(":")
        return str(own.get(name.split("(")[0].strip(), usual.strip()))

    lines, path = [], []
    for line in re.sub(r"\{\{(.*?)\}\}", filled, text).splitlines():
        found = re.match(r"( *)(\w+):", line)
        if found:
            path = [*path[: len(found.group(1)) // 2], found.group(2)]
            if (name := ".".join(path)) in settings:
                value = settings[name]
                line = f"{found.group()} {str(value).lower() if isinstance(value, bool) else value}"
        lines.append(line)
    return "\n".join(lines)
