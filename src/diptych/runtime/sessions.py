"""One ONNX file that ONNX Runtime runs on the CPU; whatever is wrong with it is one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diptych.errors import RuntimeFault
from diptych.runtime.folder import advice

FATAL = 4  # what ONNX Runtime may print: errors are raised, and said once


class Session:
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
        if threads is not None:
            options.intra_op_num_threads = threads
        self.run_options = onnxruntime.RunOptions()
        self.run_options.log_severity_level = FATAL
        self.run_options.only_execute_path_to_fetches = True
        try:
            self.session = onnxruntime.InferenceSession(
                str(file), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # ONNX Runtime's own, of many kinds
            version = onnxruntime.__version__
            raise RuntimeFault(
                f"{file} cannot be run by ONNX Runtime {version} ({_reason(error)}): {advice(file.parent.parent)}."
            ) from error
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
        try:
            (found,) = self.session.run([output], fed, self.run_options)
        except Exception as error:  # ONNX Runtime's own, of many kinds
            shapes = ", ".join(f"{name} {value.shape}" for name, value in fed.items())
            raise RuntimeFault(
                f"{self.file} failed on {shapes} ({_reason(error)}): {advice(self.file.parent.parent)}."
            ) from error
        return np.asarray(found, dtype=np.float32)


def _reason(error: Exception) -> str:
    """The first 200 characters of what ONNX Runtime says, in one line."""
    return " ".join(str(error).split()).removeprefix("[ONNXRuntimeError] : ")[:200].rstrip(".")
