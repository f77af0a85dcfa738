"""The training loop, in sight: embed → terms → backward → clip → step → after_step → log."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import torch

from diptych.evaluation.prepared import Prepared
from diptych.objectives.objective import after_step
from diptych.targets.columns import Column
from diptych.training.checkpoint import Progress, RunCard
from diptych.training.method import Method
from diptych.training.processes import interrupted, interruptible
from diptych.training.session import Session


def train(
    method: Method,
    card: RunCard,
    training: Prepared,
    validation: Prepared | None,
    folder: Path,
    *,
    targets: Mapping[str, Column] | None = None,
    on_cpu: bool = False,
    resume: bool = False,
    show_progress: bool = True,
) -> Progress:
    """Train until the last epoch or until patience ends; returns where the run stands.

    ``folder/best`` is the model of the epoch that the primary metric of the method's first evaluator prefers (the last
    epoch when there is no validation split). ``targets`` are the columns of the method's target sources.
    """
    session = Session(
        method, card, training, validation, folder,
        targets=targets or {}, on_cpu=on_cpu, resume=resume, show_progress=show_progress,
    )  # fmt: skip
    accelerator = session.accelerator
    with closing(session), interruptible() as interrupt:
        for epoch in session.epochs():
            session.start_epoch(epoch)
            for batch in session.batches(epoch):
                rate = session.set_rate()
                embeddings, whole, terms = session.run_step(batch)
                with torch.no_grad():
                    after_step(method.objective, embeddings, whole)
                session.note(epoch, rate, terms)
                stopping = interrupt.agreed(accelerator, session.progress.step)
                if session.epoch_is_over:
                    continue  # saved below, once the epoch has been finished: its end must not be skipped on resuming
                if stopping or session.saves_now:
                    session.save(terms)
                if stopping:
                    raise interrupted(card, folder, session.progress)
            session.finish_epoch(epoch)
            if interrupt.agreed(accelerator) and epoch + 1 < card.settings.epochs:
                raise interrupted(card, folder, session.progress)
    return session.progress
