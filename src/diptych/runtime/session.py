"""The ONNX files of a runtime, which may come from a stranger: what they may hold, and what they may cost.

An encoder is a list of operators with their weights. One that says more is refused before ONNX Runtime reads it:
functions, which may stand for any number of operators, texts, which no limit of memory counts, and weights in other
files. Constants are not computed while a file is read, when nothing can stop it. A run has so many seconds for each
row, which ends loops, and all files together half of the machine's memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diptych.entries import MODEL
from diptych.errors import RuntimeFault, reason_of
from diptych.runtime.folder import advice

FATAL = 4  # what ONNX Runtime may print: errors are raised, and said once
SECONDS = 30.0  # for each row of a run; the largest encoders take a few
INSIDE = {
    ("model", 7): "graph", ("graph", 1): "node", ("graph", 5): "tensor", ("node", 5): "attribute",
    ("attribute", 5): "tensor", ("attribute", 10): "tensor", ("attribute", 6): "graph", ("attribute", 11): "graph",
}  # fmt: skip
"""Which field of which message of ONNX's format holds which message."""
REFUSED = {
    ("model", 20): "training", ("model", 25): "functions", ("graph", 15): "sparse weights",
    ("tensor", 6): "texts", ("tensor", 13): "weights in another file", ("tensor", 14): "weights in another file",
}  # fmt: skip
NOISE = re.compile(
    r"\[ONNXRuntimeError\] : \d+ : \w+ : (Load model from .* failed:|.*Status Message: )?(.*, Error )?"
    r"(/onnxruntime_src/\S+ .*?\) (\[with .*?\] )?)?"
)
TEXTS = (b"value_string", b"value_strings")  # attributes of a constant


def give_back_memory() -> None:
    """Return to the system what reading a file has freed; the C library would keep some 20 MB of it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc has it
        trim(0)


def beyond(data: mmap.mmap, start: int, end: int, message: str = "model") -> Iterator[str]:
    """What a message of an ONNX file holds, and the messages inside it, that an encoder does not need."""
    for number, at, after in _fields(data, start, end):
        if inner := INSIDE.get((message, number)):
            yield from beyond(data, at, after, inner)
        elif said := REFUSED.get((message, number)):
            yield said
        elif (message, number) == ("attribute", 1) and data[at:after] in TEXTS:
            yield "texts"


def _fields(data: mmap.mmap, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Number, start and end of each field of a message in the wire format of Protocol Buffers."""
    while at < end:
        key, start = _varint(data, at)
        if key & 7 == 2:
            size, start = _varint(data, start)
            at = start + size
        else:
            at = _varint(data, start)[1] if key & 7 == 0 else start + {1: 8, 5: 4}[key & 7]
        if at > end:
            raise ValueError("a field ends after its message")
        yield (key & 0xFFFFFFFF) >> 3, start, at  # 32 bits count


def _varint(data: mmap.mmap, at: int) -> tuple[int, int]:
    """A number of seven bits per byte, and where it ends."""
    number = shift = 0
    while True:
        number |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return number, at


def _check(file: Path) -> None:
    """Raise where a file holds more than an encoder."""
    with (
        open(MODEL.open(file), "rb") as handle,
        mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        try:
            said = next(beyond(data, 0, len(data)), None)
        except (ValueError, IndexError, KeyError, RecursionError):  # another kind of field, or none
            said = "what is no ONNX file"
    if said is not None:
        raise ValueError(f"it holds {said}")


@cache
def _limit_memory() -> None:
    """One pool for all files, of at most half of the machine's memory; a larger request is an error of its run."""
    import onnxruntime

    half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2 if hasattr(os, "sysconf") else 0
    kind, place = onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, onnxruntime.OrtMemType.DEFAULT
    pool = onnxruntime.OrtArenaCfg({"max_mem": half})  # 0: no limit
    onnxruntime.create_and_register_allocator(onnxruntime.OrtMemoryInfo("Cpu", kind, 0, place), pool)


class OnnxSession:
    """A file of a runtime, with the inputs and outputs that belong to it; ``threads`` None: one for each core."""

    def __init__(
        self, file: Path, inputs: Sequence[str], outputs: Sequence[str], threads: int | None = None
    ) -> None:
        import onnxruntime  # here, since other commands need none of it

        self.file = file
        options = onnxruntime.SessionOptions()
        options.log_severity_level = FATAL
        # threads that spin while they wait for work take twice the CPU time, from decoding among others
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.enable_mem_pattern = False  # a plan of memory for every shape: texts have many
        if threads is not None:
            options.intra_op_num_threads = threads
        options.add_session_config_entry("session.use_env_allocators", "1")
        _limit_memory()
        try:
            _check(file)
            self.session = onnxruntime.InferenceSession(
                str(MODEL.check(file)),
                options,
                providers=["CPUExecutionProvider"],
                disabled_optimizers=["ConstantFolding"],
            )
        except Exception as error:  # ONNX Runtime's own, of many kinds
            version = onnxruntime.__version__
            raise RuntimeFault(
                f"{file} cannot be run by ONNX Runtime {version} ({short_reason(error)}): {advice(file.parent.parent)}."
            ) from error
        give_back_memory()
        found = (
            [one.name for one in self.session.get_inputs()],
            [one.name for one in self.session.get_outputs()],
        )
        if found != (list(inputs), list(outputs)):
            raise RuntimeFault(
                f"{file} reads {', '.join(found[0])} and gives {', '.join(found[1])}, not {', '.join(inputs)} and "
                f"{', '.join(outputs)}: it is the file of another program, {advice(file.parent.parent)}."
            )

    def __call__(self, output: str, **fed: NDArray[Any]) -> NDArray[np.float32]:
        """One output of the file for these inputs."""
        import onnxruntime

        options = onnxruntime.RunOptions()
        options.log_severity_level = FATAL
        options.only_execute_path_to_fetches = True
        rows = max(len(one) for one in fed.values())
        late = threading.Timer(SECONDS * rows, setattr, (options, "terminate", True))
        late.daemon = True
        late.start()
        try:
            (found,) = self.session.run([output], fed, options)
        except Exception as error:  # ONNX Runtime's own, of many kinds
            shapes = ", ".join(f"{name} {value.shape}" for name, value in fed.items())
            raise RuntimeFault(
                f"{self.file} failed on {shapes} ({short_reason(error)}): {advice(self.file.parent.parent)}."
            ) from error
        finally:
            late.cancel()
        return np.asarray(found, dtype=np.float32)


def short_reason(error: Exception) -> str:
    """What ONNX Runtime says, without its codes and the places in its own source."""
    return NOISE.sub("", reason_of(error), count=1)[:200].rstrip(".")
