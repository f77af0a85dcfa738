"""What is computed, not trained: a method's solver before the first step, or in the place of all steps."""

from __future__ import annotations

from pathlib import Path

from accelerate import Accelerator

from diptych.errors import SettingsError
from diptych.evaluation.prepared import Prepared
from diptych.training import checkpoint
from diptych.training.checkpoint import Progress, RunCard
from diptych.training.log import Log
from diptych.training.method import Method
from diptych.training.optim import build_optimizer
from diptych.training.processes import save_on_main, share
from diptych.training.validation import finish_epoch


def solve(
    method: Method,
    training: Prepared,
    validation: Prepared | None,
    folder: Path,
    progress: Progress,
    log: Log,
    *,
    show_progress: bool = True,
) -> None:
    """Run the solver, then measure and keep what it found: epoch −1 of the run."""
    assert method.solver is not None
    chosen = method.solver(method.retriever, training, validation, show_progress=show_progress)
    log.write(progress.step, {"epoch": -1, **chosen})
    finish_epoch(method, method.retriever, validation, folder, -1, progress, log, show_progress)


def solve_alone(
    method: Method,
    card: RunCard,
    training: Prepared,
    validation: Prepared | None,
    folder: Path,
    accelerator: Accelerator,
    *,
    resume: bool,
    show_progress: bool = True,
) -> Progress:
    """A run without epochs: what the solver finds is the model. Resumed, it is found there and nothing is done again.

    Its state is that of any run before its first step, so it may be resumed with more epochs.
    """
    if method.solver is None:
        raise SettingsError("--epochs 0 trains nothing: this recipe needs at least 1 epoch.")
    method.retriever.to(accelerator.device)
    method.objective.to(accelerator.device)
    optimizer = build_optimizer(method, card.settings, graphs=card.settings.cuda_graphs)
    progress = Progress()
    if resume:
        return checkpoint.load_state(folder, method, optimizer, accelerator.process_index, accelerator.scaler)
    if accelerator.is_main_process:
        card.save(folder)
        log = Log(folder, tensorboard=card.settings.tensorboard)
        solve(method, training, validation, folder, progress, log, show_progress=show_progress)
        log.close()
    progress = share(progress, accelerator)
    save_on_main(accelerator, folder, method, optimizer, progress)
    return progress
