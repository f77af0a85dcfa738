"""The training loop, in sight: embed → terms → backward → clip → step → after_step → log."""

from __future__ import annotations

from contextlib import closing

import torch

from diptych.objectives.objective import after_step
from diptych.training.checkpoint import Progress
from diptych.training.processes import interrupted, interruptible
from diptych.training.session import Session


def train(session: Session) -> Progress:
    """Train until the last epoch or until patience ends; returns where the run stands."""
    accelerator, card, folder = session.accelerator, session.card, session.folder
    with closing(session), interruptible() as interrupt:
        for epoch in session.epochs():
            session.start_epoch(epoch)
            for batch in session.batches(epoch):
                rate = session.set_rate()
                embeddings, whole, terms = session.run_step(batch)
                with torch.no_grad():
                    after_step(session.method.objective, embeddings, whole)
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
