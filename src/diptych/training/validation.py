"""The end of an epoch: measure the model, keep the best one with its card, and say how it went."""

from __future__ import annotations

import math
import time
from pathlib import Path

from diptych.evaluation.evaluate import measure
from diptych.evaluation.prepared import Prepared
from diptych.model.retriever import Retriever
from diptych.settings import TrainingSettings
from diptych.training import checkpoint
from diptych.training.checkpoint import Progress
from diptych.training.log import Log
from diptych.training.method import Method


def finish_epoch(
    method: Method,
    retriever: Retriever,
    validation: Prepared | None,
    folder: Path,
    epoch: int,
    progress: Progress,
    log: Log,
    show_progress: bool,
    *,
    loss: float | None = None,
    clock: Clock | None = None,
) -> None:
    """Validate, keep the best model, and say how the epoch went; epoch −1 is what a solver found before the first.

    ``retriever`` is the method's, in one piece.
    """
    line = {"epoch": float(epoch)}
    best, said = True, "no validation split"
    if validation is not None:
        report = measure(method.evaluators, retriever, validation, show_progress=show_progress)
        line.update({f"validation_{name}": value for name, value in report.metrics.items()})
        progress.metric, value = report.primary_metric, report.metrics[report.primary_metric]
        best = not math.isfinite(progress.best) or value > progress.best
        if best:
            progress.best, progress.best_epoch = value, epoch
        said = f"validation {shown(progress.metric)} {value:.1f}{' (best so far)' if best else ''}"
    if best:
        retriever.save_pretrained(folder / "best", card=model_card(folder, epoch, line))
    progress.history.append(line)
    log.write(
        progress.step, {"epoch": epoch, **{k: v for k, v in line.items() if k != "epoch"}, "best": best}
    )
    if show_progress:
        before = "" if loss is None else f"loss {loss:.4g}, "
        behind = "" if clock is None else clock.left(epoch)
        print(f"{named(epoch)}: {before}{said}{behind}", flush=True)


class Clock:
    """How much longer a run takes: what its epochs took so far, for each epoch that is left."""

    def __init__(self, first: int, epochs: int) -> None:
        self.first, self.epochs, self.began = first, epochs, time.monotonic()

    def left(self, epoch: int) -> str:
        """The time that is left after an epoch, validation included, as the end of its line."""
        remaining = self.epochs - epoch - 1
        if remaining <= 0:
            return ""
        seconds = (time.monotonic() - self.began) / (epoch + 1 - self.first) * remaining
        return f", at most {spoken(seconds)} left"


def spoken(seconds: float) -> str:
    """A length of time for people: 12 s, 4 min, 2 h 5 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def named(epoch: int) -> str:
    """How an epoch, counted from 0, is called."""
    return f"epoch {epoch + 1}" if epoch >= 0 else "closed form"


def shown(metric: str) -> str:
    """A metric's name in a sentence: abbreviations in capitals."""
    return metric.upper() if metric.isalpha() and len(metric) <= 4 else metric.replace("_", " ")


def model_card(folder: Path, epoch: int, line: dict[str, float]) -> str:
    """The README of a model folder: what it is, how it was trained, how to use it."""
    run = checkpoint.read_run(folder)
    settings = "\n".join(f"| {name} | {value} |" for name, value in run["settings"].items())
    scores = "\n".join(f"| {name} | {value:.2f} |" for name, value in line.items() if name != "epoch")
    return (
        f"# {run['recipe']}\n\nAn image-text retriever trained with Diptych {run['diptych']} on {run['data']} "
        f"(data {run['data_fingerprint']}), {named(epoch)}.\n\n"
        '```python\nfrom diptych import Retriever\nmodel = Retriever.from_pretrained("this folder")\n```\n\n'
        f"| validation | |\n|---|---|\n{scores}\n\n| setting | |\n|---|---|\n{settings}\n"
    )


def stop_early(progress: Progress, epoch: int, settings: TrainingSettings) -> bool:
    """Whether patience has ended."""
    return (
        settings.patience > 0
        and math.isfinite(progress.best)
        and epoch - progress.best_epoch > settings.patience
    )
