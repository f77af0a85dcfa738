"""System calls that fail, and a death at any of them, while something is saved: what is there is the old or the new.

``strace`` attaches to a process that has forked and waits, so that only the calls of the work itself are counted. The
targets are there where ``strace`` may do that.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from register import Attack, target

from diptych.errors import DiptychError

PATHS = ("EIO", "ENOSPC", "EACCES", "EROFS")
ERRORS: dict[str, tuple[str, ...]] = {
    "openat": (*PATHS, "EMFILE", "ENFILE"),
    "read": ("EIO",),
    "pread64": ("EIO",),
    "write": ("EIO", "ENOSPC", "EDQUOT"),
    "pwrite64": ("EIO", "ENOSPC", "EDQUOT"),
    "fallocate": ("EIO", "ENOSPC"),
    "ftruncate": ("EIO", "EROFS"),
    "fsync": ("EIO", "ENOSPC"),
    "fdatasync": ("EIO", "ENOSPC"),
    "close": ("EIO",),
    "newfstatat": ("EIO", "EACCES"),
    "fstat": ("EIO",),
    "lseek": ("EIO",),
    "getdents64": ("EIO",),
    "fcntl": ("EIO",),
    "flock": ("EIO", "ENOLCK"),
} | dict.fromkeys(("unlink", "unlinkat", "rename", "link", "linkat", "mkdir", "rmdir", "chmod"), PATHS)
DONE, REFUSED, RAISED = 0, 2, 3  # how a process ends
LATEST = 60  # the call of a kind that fails at the latest; not every work makes as many
Work = Callable[[Path], object]


def strace_works() -> bool:
    """Whether there is ``strace``, and it may do its work."""
    found = shutil.which("strace")
    return found is not None and subprocess.run([found, "-o", os.devnull, "true"]).returncode == 0


def traced(work: Work, place: Path, options: list[str], log: Path) -> int:
    """Do some work in a process under ``strace``; its status, negative for a signal, and its traceback in ``log``."""
    waiting, go = os.pipe()
    pid = os.fork()
    if not pid:
        status = RAISED
        try:
            with suppress(OSError):  # strace may be there before these calls, which are not of the work
                os.close(go)
            with suppress(OSError):
                os.read(waiting, 1)
            work(place)
            status = DONE
        except DiptychError as error:
            status = REFUSED if str(error).strip() else RAISED
        except BaseException:
            log.write_text(traceback.format_exc())
        finally:
            os._exit(status)
    with subprocess.Popen(["strace", "-p", str(pid), *options], stderr=subprocess.PIPE) as tracer:
        assert tracer.stderr is not None
        said = tracer.stderr.readline()
        if b"attached" not in said:
            os.kill(pid, signal.SIGKILL)
        os.write(go, b"!")  # also where the process was killed before it reads
        os.close(go)
        os.close(waiting)
        _, status = os.waitpid(pid, 0)
        said += tracer.stderr.read()
    assert b"attached" in said, said
    return os.waitstatus_to_exitcode(status)


def attack(folder: Path, make: Work, works: dict[str, Work], state: Callable[[Path], Any]) -> Attack:
    """Attack some ways to change what ``make`` makes at a place; ``state`` reads it, and raises where it is damaged."""
    sound, place, log = folder / "sound", folder / "place", folder / "log"
    make(sound)
    before, after = state(sound), {}
    for name, work in works.items():
        shutil.copytree(sound, place)
        work(place)
        after[name] = state(place)
        shutil.rmtree(place)

    def once(draw: Random) -> None:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(sound, place)
        name = draw.choice(sorted(works))
        call, number = draw.choice(sorted(ERRORS)), draw.randrange(1, draw.choice((4, LATEST)))
        kind = draw.random()
        how = "signal=SIGKILL" if kind < 0.4 else f"error={draw.choice(ERRORS[call])}"
        fault = f"?{call}:{how}:when={number}{'+' if kind > 0.9 else ''}"
        log.unlink(missing_ok=True)
        status = traced(works[name], place, ["-f", "-o", os.devnull, "-e", f"inject={fault}"], log)
        said = log.read_text() if log.exists() else ""
        assert status in (DONE, REFUSED, -signal.SIGKILL), (name, fault, status, said[-1500:])
        found = state(place)
        assert found == after[name] or (status != DONE and found == before), (name, fault, status)

    return once


def index_calls(folder: Path) -> Attack:
    """Changes of an index, and a search."""
    from resealed import VECTORS, make

    from diptych.index.engines.embedded.index import EmbeddedIndex
    from diptych.index.protocol import Item

    ids = [f"{kind} {n}" for kind in ("image", "text") for n in range(40)]

    def change(work: Callable[[EmbeddedIndex], object]) -> Work:
        def run(place: Path) -> None:
            with EmbeddedIndex.open(place, writable=True) as index:
                work(index)

        return run

    def search(place: Path) -> None:
        with EmbeddedIndex.open(place) as index:
            found = index.search_many(VECTORS[:4], 3, kind="image")
            assert [hits.ids[0] for hits in found[:3]] == ["image 0", "image 1", "image 2"]

    def state(place: Path) -> Any:
        with EmbeddedIndex.open(place) as index:
            assert index.verify() == []
            items = [item for item in index.get(ids) if item is not None]
            assert len(items) == len(index)
            hits = index.search(VECTORS[0], 40, kind="image").ids
            assert sorted(hits) == sorted(item.id for item in items if item.kind == "image")
            return items, index.vectors([item.id for item in items]).tobytes()

    new = [Item(f"image {n}", text=f"new {n}", thumbnail=b"x" * 100) for n in range(32, 40)]
    works: dict[str, Work] = {
        "add": change(lambda index: index.add(new, VECTORS[32:])),
        "update": change(lambda index: index.update([Item("image 5", text="other")], VECTORS[7:8])),
        "delete": change(lambda index: index.delete(["image 1", "text 2"])),
        "compact": change(lambda index: index.compact()),
        "graph": change(lambda index: index.build_graph("image", codes=True)),
        "search": search,
    }
    return attack(folder, make, works, state)


def model_calls(folder: Path) -> Attack:
    """A model saved over another."""
    import torch

    from diptych.aggregators import Mean
    from diptych.data.images import RegionInput
    from diptych.data.text import WordInput
    from diptych.data.vocabulary import build_vocabulary
    from diptych.encoders.bigru import BiGRU
    from diptych.encoders.regions import Regions
    from diptych.model.retriever import Retriever, Tower

    torch.set_num_threads(1)
    vocabulary = build_vocabulary(["a red dog"], min_count=1)
    models = []
    for seed in range(2):
        torch.manual_seed(seed)
        towers = Tower(Regions(8, 6), Mean()), Tower(BiGRU(len(vocabulary), 6, 6), Mean())
        models.append(Retriever(*towers, RegionInput(8), WordInput(vocabulary)))
    row = np.ones((3, 8), np.float32)

    def state(place: Path) -> Any:
        return Retriever.from_pretrained(place).encode_image([row]).tolist()

    works: dict[str, Work] = {"save": lambda place: models[1].save_pretrained(place)}
    return attack(folder, lambda place: models[0].save_pretrained(place), works, state)


def checkpoint_calls(folder: Path) -> Attack:
    """The state of a training run, saved over an earlier one."""
    import torch
    from safetensors.numpy import load

    from diptych.storage import parse_json
    from diptych.training.checkpoint import Progress, has_state, save_state

    torch.set_num_threads(1)

    def save(step: int) -> Work:
        state = {"retriever": {"a": torch.full((300,), float(step))}}
        return lambda place: save_state(place, state, Progress(step=step), [])

    def state(place: Path) -> Any:
        assert has_state(place)  # which puts back what a death between two renamings left
        weights = load((place / "last" / "retriever.safetensors").read_bytes())["a"]
        return parse_json((place / "last" / "progress.json").read_bytes())["step"], set(weights.tolist())

    return attack(folder, save(1), {"save": save(2)}, state)


if sys.platform == "linux" and strace_works():
    target(index_calls)
    target(model_calls)
    target(checkpoint_calls)
