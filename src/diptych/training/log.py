"""The log of a run: JSON lines, and TensorBoard for whoever asks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from diptych.errors import MissingExtra
from diptych.storage import parse_json, storing, write_text


class Log:
    """Appends one JSON object per line to ``log.jsonl``; a resumed run first drops the lines past its step.

    A run that starts again starts its log again.
    """

    def __init__(self, folder: Path, *, resumed_at: int | None = None, tensorboard: bool = False) -> None:
        self.path = folder / "log.jsonl"
        self.writer: Any = None
        if self.path.exists():
            kept = [line for line in read_log(self.path) if line["step"] <= (resumed_at or 0)]
            write_text(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise MissingExtra("tensorboard", "tensorboard", "--tensorboard") from error
            self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=resumed_at)

    def write(self, step: int, values: dict[str, Any]) -> None:
        """One line: the step and what was measured there."""
        with storing(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        if self.writer is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush what is buffered."""
        if self.writer is not None:
            self.writer.close()


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a log; one that is damaged, or cut short by a crash, is left out, and no other."""
    lines: list[dict[str, Any]] = []
    for line in path.read_bytes().split(b"\n"):
        try:
            content = parse_json(line)
        except ValueError:
            continue
        if isinstance(content, dict) and isinstance(content.get("step"), int):
            lines.append(content)
    return lines
