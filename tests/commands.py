"""The command line as a user runs it: in this process for speed, or in its own to be killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from diptych.cli import main

TINY: dict[str, Any] = {
    "dim": 16,
    "batch_size": 12,
    "epochs": 2,
    "min_count": 1,
    "word_dim": 8,
    "log_steps": 1,
}
CODER: dict[str, Any] = {"queue_size": 30, "clusters": 6, "concept_size": 10, "prototype_epoch": 1}


def diptych(*args: object, status: int = 0, runtime: bool = False) -> Result:
    """Run a command and check how it ends; nothing but an exit may leave it.

    A training run writes its ONNX encoders only with ``runtime``: that takes as long as a small run itself.
    """
    if args[:1] == ("train",) and len(args) > 3 and not runtime:
        args = (*args, "--no_runtime")
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == status, f"{result.exit_code}: {result.stdout}\n{result.stderr}"
    return result


def refused(*args: object) -> str:
    """The one sentence a command ends with when its input is bad."""
    said = diptych(*args, status=2).stderr
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, said
    assert said.splitlines()[-1] == lines[0], said
    assert "Traceback" not in said
    assert ": " in lines[0].removeprefix("error: "), f"no correction: {said}"
    return lines[0]


def flags(settings: dict[str, Any]) -> list[str]:
    """Settings as flags."""
    switches = {True: "--", False: "--no_"}
    return [
        f"{switches[value]}{name}" if isinstance(value, bool) else f"--{name}={value}"
        for name, value in settings.items()
    ]


def training(recipe: str, data: object, **changes: Any) -> list[object]:
    """The arguments of a small training run, without its folder."""
    own = {**TINY, **(CODER if recipe.startswith("coder") else {}), **changes}
    return ["train", recipe, "--data", data, *flags(own)]


def process(
    *args: object, preexec_fn: Callable[[], object] = lambda: None, **options: Any
) -> subprocess.Popen[str]:
    """A command in a process of its own, in a group of its own."""

    def prepare() -> None:
        # a suite that runs in the background of a shell hands down an ignored SIGINT
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        preexec_fn()

    return subprocess.Popen(
        [sys.executable, "-m", "diptych", *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=prepare,
        **options,
    )


def kill_when(child: subprocess.Popen[Any], ready: Callable[[], object], patience: float = 120) -> None:
    """Kill a process with SIGKILL as soon as ``ready()`` is true; it must not have ended by itself before."""
    try:
        deadline = time.monotonic() + patience
        while not ready():
            assert time.monotonic() < deadline
            assert child.poll() is None
            time.sleep(0.01)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()


def wait_for_steps(folder: Path, steps: int) -> None:
    """Wait until a run has logged so many lines."""
    for _ in range(6000):
        log = folder / "log.jsonl"
        if log.exists() and len(log.read_text().splitlines()) >= steps:
            return
        time.sleep(0.02)
    raise AssertionError("the run did not start")


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def need_a_gpu_each(processes: int) -> None:
    """Skip where processes would have to share a GPU, which NCCL refuses; without any GPU they talk by gloo."""
    import torch

    if 0 < torch.cuda.device_count() < processes:
        pytest.skip(
            f"{processes} processes cannot share {torch.cuda.device_count()} GPU: NCCL needs one each"
        )


def on_two_processes(*words: str) -> list[str]:
    """The command line that runs a diptych command with torchrun, on two processes."""
    need_a_gpu_each(2)
    several = ["-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}"]
    return [sys.executable, *several, "-m", "diptych", *words]


def torchrun(*words: str) -> str:
    """What two processes print that run a diptych command together."""
    own = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(on_two_processes(*words), capture_output=True, text=True, env=own, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
