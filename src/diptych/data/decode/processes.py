"""Pictures of strangers, decoded in processes of their own, which may be killed.

The process that decodes has limits of time and memory, and is replaced when it dies or has decoded a large picture.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from PIL import Image

from diptych.data.decode.opening import MAX_PIXELS, open_image
from diptych.errors import ImageError, Unavailable

DECODERS = 2  # processes
CPU_SECONDS = 5.0  # that one picture may keep a core busy
WALL_SECONDS = 20.0  # that one picture may take on a machine with other work
PIXEL_BYTES, SPARE_BYTES = 10, 300_000_000  # bytes per pixel of memory, plus a fixed allowance
TIDY_BYTES = 200_000_000  # a process that has taken more is replaced
_HEAD = struct.Struct(">IQ")  # sizes of what follows: a line of JSON, and data


class Decoders:
    """A few processes that decode pictures, started when they are needed; safe to share between threads."""

    def __init__(self, count: int = DECODERS) -> None:
        self._free = threading.BoundedSemaphore(count)
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        self._closed = False

    def open(
        self,
        source: bytes | Path,
        *,
        name: str,
        longest: int,
        max_pixels: int = MAX_PIXELS,
        patience: float = WALL_SECONDS,
    ) -> Image.Image:
        """The picture as ``open_image`` gives it, shrunk to at most ``longest`` pixels a side.

        ``patience`` is how many seconds there are for it, waiting included.
        """
        until = time.monotonic() + patience
        if not self._free.acquire(timeout=patience):
            raise Unavailable("too many other images are being decoded: try again in a moment.")
        try:
            process = self._borrow()
            try:
                left = max(0.0, min(WALL_SECONDS, until - time.monotonic()))
                picture = process.decode(source, name, longest, max_pixels, left)
            except BaseException:
                process.end()
                raise
            self._give_back(process)
        finally:
            self._free.release()
        if isinstance(picture, str):
            raise ImageError(picture)
        return picture

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for process in idle:
            process.end()

    def _borrow(self) -> _Process:
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.is_alive:
                    return process
                process.end()
        return _Process()

    def _give_back(self, process: _Process) -> None:
        with self._lock:
            if not self._closed and process.is_alive:
                self._idle.append(process)
                return
        process.end()


class _Process:
    def __init__(self) -> None:
        start = (
            f"import sys; sys.path[:] = {sys.path!r}; from diptych.data.decode.processes import work; work()"
        )
        # large blocks come from the system and go back to it; one arena
        environment = {**os.environ, "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "1000000"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", start], env={**environment, "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the one who asked
        )  # fmt: skip
        self._retires = False

    @property
    def is_alive(self) -> bool:
        return not self._retires and self._process.poll() is None

    def decode(
        self, source: bytes | Path, name: str, longest: int, max_pixels: int, seconds: float
    ) -> Image.Image | str:
        """A picture, or what is wrong with it; killed after a limit of seconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        data = b"" if isinstance(source, Path) else source
        path = str(source) if isinstance(source, Path) else None
        request = {"name": name, "longest": longest, "max_pixels": max_pixels, "path": path}
        killer = threading.Timer(seconds, self._process.kill)
        killer.daemon = True
        killer.start()
        try:
            _send(self._process.stdin, request, data)
            answer, pixels = _receive(self._process.stdout)
        except (OSError, ValueError, EOFError):
            return self._last_words(name)
        finally:
            killer.cancel()
        self._retires = bool(answer.get("retires"))
        if "error" in answer:
            return str(answer["error"])
        width, height = int(answer["width"]), int(answer["height"])
        if not (0 < width <= longest and 0 < height <= longest and width * height * 3 == len(pixels)):
            return self._last_words(name)
        return Image.frombytes("RGB", (width, height), pixels)

    def end(self) -> None:
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        self._process.wait()

    def _last_words(self, name: str) -> str:
        """What the way it died says of the picture."""
        self._process.kill()
        status = self._process.wait()
        if status in (-signal.SIGPROF, -signal.SIGKILL):
            return f"{name} takes more time or memory to decode than one picture may: save it again, or shrink it."
        return f"{name} is damaged and crashes its decoder: replace or remove it."


def work() -> None:
    """Decode what comes on standard input, until it ends; the main function of a process."""
    source, target = sys.stdin.buffer, sys.stdout.buffer
    with suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            request, data = _receive(source)
            limit_memory(SPARE_BYTES + PIXEL_BYTES * int(request["max_pixels"]))
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # whose signal ends the process
            answer, pixels = _decode(request, data)
            signal.setitimer(signal.ITIMER_PROF, 0)
            del data
            retires = most_memory() > TIDY_BYTES
            _send(target, {**answer, "retires": retires}, pixels)
            del pixels
            if retires:
                return


def _decode(request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
    name, longest = str(request["name"]), int(request["longest"])
    try:
        source = data if request["path"] is None else Path(request["path"])
        picture = open_image(source, name=name, max_pixels=int(request["max_pixels"]), size_hint=longest)
        if max(picture.size) > longest:
            picture.thumbnail((longest, longest))
        return {"width": picture.width, "height": picture.height}, picture.tobytes()
    except ImageError as error:
        return {"error": str(error)}, b""
    except MemoryError:
        return {"error": f"{name} needs more memory to decode than there is for one picture: shrink it."}, b""


def limit_memory(size: int) -> None:
    """Bound what this process may take."""
    with suppress(ImportError, ValueError, OSError):  # a system without such limits
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))


def most_memory() -> int:
    """Bytes of the largest size this process ever had (getrusage counts what its parent had); 0 if unknown."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def _send(target: IO[bytes], head: dict[str, Any], data: bytes) -> None:
    line = json.dumps(head).encode()
    target.write(_HEAD.pack(len(line), len(data)) + line)
    target.write(data)
    target.flush()


def _receive(source: IO[bytes]) -> tuple[dict[str, Any], bytes]:
    sizes = _HEAD.unpack(_exactly(source, _HEAD.size))
    head = json.loads(_exactly(source, sizes[0]))
    return head, _exactly(source, sizes[1])


def _exactly(source: IO[bytes], size: int) -> bytes:
    data = source.read(size)
    if len(data) < size:
        raise EOFError
    return data
