"""The same functions on the workers of a Ray cluster: many jobs, any worker or node of which may die.

Ray only decides where a job runs. A job that was lost with its worker or node is given to another, a few times; this is
safe because a job either writes a file that appears when it is whole, always the same, or returns what it counted.
"""

from __future__ import annotations

import platform
import re
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from diptych import __version__
from diptych import errors as known
from diptych.errors import DiptychError, SettingsError, Unavailable, import_extra, reason_of
from diptych.progress import echo, track
from diptych.storage import parse_json

TRIES = 5  # attempts at a job whose worker dies
AHEAD = 2  # jobs given to Ray for each that can run
PATIENCE = 60.0  # seconds without a result before the user is told what the cluster has
ANSWER = 5.0  # seconds in which a cluster takes a connection


@dataclass(frozen=True)
class DeadWorker:
    """In the place of a result: the worker of a job died again and again."""

    reason: str


@contextmanager
def connected(address: str, cpus: int = 1) -> Iterator[Cluster]:
    """A Ray cluster by its address (``host:6379``, ``auto``, ``ray://host:10001``); ``cpus`` are those of one job."""
    ray = import_extra("ray", "ray", "--ray")
    _check_answer(address)
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False, namespace="diptych")
    except (RuntimeError, ConnectionError, ValueError, OSError, TimeoutError) as error:
        raise _refusal(ray, address, error) from error
    try:
        yield Cluster(ray, address, cpus)
    finally:
        ray.shutdown()


class Cluster:
    """A connection to a Ray cluster that runs jobs there."""

    def __init__(self, ray: Any, address: str, cpus: int) -> None:
        self.ray, self.address, self.cpus = ray, address, cpus
        self.has_gpus = self._has("GPU") > 0
        if not any(n["Alive"] and n["Resources"].get("CPU", 0) >= cpus for n in ray.nodes()):
            raise SettingsError(
                f"no node of the Ray cluster at {address} has {cpus} CPUs: give a smaller number with --cpus."
            )

    def __str__(self) -> str:
        nodes = sum(node["Alive"] for node in self.ray.nodes())
        return f"ray: {nodes} nodes, {self._has('CPU'):g} CPUs, {self._has('GPU'):g} GPUs"

    def run(
        self,
        function: Callable[..., Any],
        jobs: Sequence[tuple[Any, ...]],
        label: str,
        show_progress: bool = True,
    ) -> Iterator[tuple[int, Any]]:
        """``function(*job)`` of every job on some worker: (its number, its result or ``DeadWorker``), as they come.

        An error of diptych is raised here. A GPU is asked for where the cluster has any.
        """
        results = self._results(function, jobs)
        yield from track(results, label, len(jobs), show_progress)

    def _results(
        self, function: Callable[..., Any], jobs: Sequence[tuple[Any, ...]]
    ) -> Iterator[tuple[int, Any]]:
        lost = (
            self.ray.exceptions.WorkerCrashedError,
            self.ray.exceptions.NodeDiedError,
            self.ray.exceptions.ObjectLostError,
            self.ray.exceptions.OutOfMemoryError,
            self.ray.exceptions.LocalRayletDiedError,
        )
        # Ray's own retries are off: they would hide a job that kills every worker it is given to
        remote = self.ray.remote(_call).options(
            num_cpus=self.cpus, num_gpus=int(self.has_gpus), max_retries=0, scheduling_strategy="SPREAD"
        )
        waiting = deque(range(len(jobs)))
        tries = dict[int, int]()
        running: dict[Any, int] = {}
        while True:
            while waiting and len(running) < self._room():
                number = waiting.popleft()
                running[remote.remote(function, jobs[number], self.cpus, __version__)] = number
            if not running:
                return
            for done in self._next(list(running)):
                number = running.pop(done)
                try:
                    kind, value = self.ray.get(done)
                except lost as error:
                    tries[number] = tries.get(number, 0) + 1
                    if tries[number] < TRIES:
                        waiting.appendleft(number)
                        continue
                    kind, value = (
                        "lost",
                        f"its worker died {TRIES} times ({reason_of(error, 200)}): is it out of memory?",
                    )
                if kind == "error":
                    raise _rebuilt(*value)
                yield number, DeadWorker(value) if kind == "lost" else value

    def _next(self, running: list[Any]) -> list[Any]:
        """Jobs that ended; the user is told when none does for a while."""
        while True:
            began = time.monotonic()
            ready, _ = self.ray.wait(running, num_returns=1, timeout=PATIENCE)
            if ready:
                return list(ready)
            free = self.ray.available_resources().get("CPU", 0)
            echo(
                f"waiting: no job ended for {time.monotonic() - began:.0f} s; {self}, {free:g} CPUs free",
                err=True,
            )

    def _room(self) -> int:
        """How many jobs Ray may have at a time."""
        running = self._has("GPU") if self.has_gpus else self._has("CPU") // self.cpus
        return max(1, AHEAD * int(running))

    def _has(self, resource: str) -> float:
        return float(self.ray.cluster_resources().get(resource, 0.0))


def _call(function: Callable[..., Any], job: tuple[Any, ...], cpus: int, version: str) -> tuple[str, Any]:
    """What a worker does: the function, and an error of diptych as a sentence."""
    import torch

    try:
        if version != __version__:
            raise SettingsError(
                f"a worker has diptych {__version__}, this machine {version}: install the same on all of them."
            )
        torch.set_num_threads(cpus)
        return "done", function(*job)
    except DiptychError as error:
        return "error", (type(error).__name__, str(error))


def _rebuilt(kind: str, sentence: str) -> DiptychError:
    found = getattr(known, kind, DiptychError)
    error: DiptychError = found.__new__(found)  # some take other arguments than their sentence
    Exception.__init__(error, sentence)
    return error


def _check_answer(address: str) -> None:
    """Raise at once where nothing listens: Ray itself would try for a minute."""
    found = re.fullmatch(r"(?:ray://)?\[?([^\]/]+?)\]?:(\d+)", address)
    if found is None:
        if address in ("auto", "local"):
            return
        raise SettingsError(
            f"--ray {address} is not an address of a cluster: give host:6379, ray://host:10001 or auto."
        )
    try:
        socket.create_connection((found[1], int(found[2])), ANSWER).close()
    except (OSError, OverflowError) as error:
        raise _unreachable(address, error) from error


def _refusal(ray: Any, address: str, error: Exception) -> DiptychError:
    """Why a cluster that listens cannot be joined: Ray names another version only where it is close to its own."""
    here, there = (ray.__version__, platform.python_version()), _versions(ray, address)
    if there is not None and there != here:
        return SettingsError(
            f"the Ray cluster at {address} runs ray {there[0]} on Python {there[1]}, this machine has ray {here[0]} on "
            f"Python {here[1]}: install the same versions here."
        )
    if "ersion mismatch" in str(error):
        return SettingsError(
            f"the Ray cluster at {address} runs another version of Ray or Python: install the same here."
        )
    return _unreachable(address, error)


def _versions(ray: Any, address: str) -> tuple[str, str] | None:
    """The versions of Ray and Python that a cluster has written down; None where they cannot be read."""
    with suppress(Exception):  # no public part of Ray tells them without joining
        answer = ray._raylet.GcsClient(address=address).internal_kv_get(
            b"CLUSTER_METADATA", b"cluster", timeout=ANSWER
        )
        found = parse_json(answer)
        return str(found["ray_version"]), str(found["python_version"])
    return None


def _unreachable(address: str, error: Exception) -> DiptychError:
    return Unavailable(
        f"no Ray cluster answers at {address} ({reason_of(error, 200)}): check the address, or start one with "
        "ray start --head."
    )
