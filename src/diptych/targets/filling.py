"""Where the targets of a run come from: sources that a method names, filled for its training data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from diptych.data.captions import Captions
from diptych.errors import SettingsError
from diptych.targets.columns import Column


class TargetSource(Protocol):
    """Makes columns of targets for captions: from their labels, from a teacher, from a file."""

    def columns(
        self,
        captions: Captions,
        *,
        device: torch.device,
        cache_dir: Path | None = None,
        show_progress: bool = True,
    ) -> Mapping[str, Column]:
        """Columns by name; objectives find their rows of a batch in ``batch.targets``."""
        ...


def fill_targets(
    sources: Sequence[TargetSource],
    captions: Captions,
    *,
    device: torch.device,
    cache_dir: Path | None = None,
    show_progress: bool = True,
) -> dict[str, Column]:
    """The columns of every source, checked against the data."""
    found: dict[str, Column] = {}
    for source in sources:
        made = source.columns(captions, device=device, cache_dir=cache_dir, show_progress=show_progress)
        for name, column in made.items():
            if name in found:
                raise SettingsError(f"two sources give the target '{name}': give each a name of its own.")
            column.check(name, captions.name, len(captions.images), len(captions.texts))
            found[name] = column
    return found
