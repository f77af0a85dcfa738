"""A run that is set up: model, optimiser, loader, step and log, and where it stands."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from diptych.errors import SettingsError, TrainingError
from diptych.evaluation.evaluate import measure
from diptych.evaluation.prepared import Prepared
from diptych.model.retriever import Retriever
from diptych.objectives.objective import SeesPairs, after_epoch, start_epoch
from diptych.progress import echo, track
from diptych.targets.columns import Column, Resident, divide
from diptych.training import checkpoint
from diptych.training.checkpoint import Progress, RunCard
from diptych.training.gradient_cache import CachedStep
from diptych.training.loading import PairLoader
from diptych.training.log import Log, Meter, StepHealth, check_modes
from diptych.training.method import Method
from diptych.training.optim import build_optimizer, freeze_for_epoch, schedule_of, set_rates, trainable
from diptych.training.processes import in_one_piece, share, start
from diptych.training.step import GraphedStep, Step
from diptych.training.validation import Clock, epoch_name, metric_name, model_card, show_pairs, stop_early
from diptych.types import Batch, Embeddings, Terms
from diptych.weights import is_divided


class Session:
    """What the loop moves. A run without steps, whose model is a closed form, has no ``loader``.

    ``folder/best`` is the model of the epoch that the primary metric of the method's first evaluator prefers (the last
    epoch when there is no validation split). ``targets`` are the columns of the method's target sources.
    """

    def __init__(
        self,
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
    ) -> None:
        self.method, self.card, self.folder = method, card, folder
        self.training, self.validation, self.show_progress = training, validation, show_progress
        self.settings = card.settings
        self.accelerator = start(method, self.settings, on_cpu)
        for part in method.objective.modules():
            if isinstance(part, SeesPairs):
                part.show_progress = show_progress and self.accelerator.is_main_process
        self.loader: PairLoader | None = None
        self.resident: Resident | None = None
        if self._has_steps():
            self.resident, read = divide(targets or {}, training.captions, self.accelerator.device)
            self.loader = self._loader(read)
        self._place(resume)
        if method.solver is not None and not resume:
            self._solve()
        if self.loader is not None:
            self._prepare_steps(len(self.loader))

    def epochs(self) -> Iterator[int]:
        """The epochs that are left, until the last one or until patience ends."""
        if self.loader is not None:
            for epoch in range(self.progress.step // len(self.loader), self.settings.epochs):
                if stop_early(self.progress, epoch, self.settings):
                    return
                yield epoch

    def start_epoch(self, epoch: int) -> None:
        """Make the model, the objective and the meters ready for the first step of an epoch, or for its next one."""
        self.model.train()
        waiting = freeze_for_epoch(self.method, epoch, self.parameters)
        self.step.waiting = [self.parameters[name] for name in waiting if self.settings.shard_model]
        check_modes(self.method.retriever)
        start_epoch(self.method.objective, epoch)
        self.collapsed = self.method.objective.collapsed_value(self.settings.batch_size)
        self.meter = Meter(self.settings.batch_size)

    def batches(self, epoch: int) -> Iterable[Batch]:
        assert self.loader is not None
        label = f"epoch {epoch + 1}/{self.settings.epochs}"
        done = self.progress.step - epoch * len(self.loader)
        left = self.loader.epoch(epoch, start=done)
        return track(left, label, len(self.loader) - done, self.show_progress and self.log is not None)

    def set_rate(self) -> float:
        """Give the optimiser the learning rate of the next step, and return it."""
        rate = self.settings.learning_rate * self.schedule.factor(self.progress.step)
        set_rates(self.optimizer, rate)
        return rate

    def note(self, epoch: int, rate: float, terms: Terms) -> None:
        """Count a step, watch its terms, and log them every few steps."""
        self.progress.step += 1
        self.health.watch(self.progress.step, terms, self.collapsed)
        self.meter.add(terms)
        if self.progress.step % self.settings.log_steps == 0 and self.log is not None:
            for sentence in self.health.report(terms, self.collapsed):
                if self.settings.on_collapse == "stop":
                    raise TrainingError(sentence)
                echo(f"warning: {sentence}")
            self.log.write(self.progress.step, {"epoch": epoch, "learning_rate": rate, **self.meter.read()})

    @property
    def epoch_is_over(self) -> bool:
        """Whether the last step was the last one of its epoch."""
        assert self.loader is not None
        return self.progress.step % len(self.loader) == 0

    @property
    def saves_now(self) -> bool:
        """Whether the settings ask for the state after this step."""
        return self.settings.save_steps > 0 and self.progress.step % self.settings.save_steps == 0

    def save(self, terms: Terms) -> None:
        """Write ``last/``, but never a state that is not sound over one that is."""
        self.health.refuse_nan(terms)
        self._save()

    def finish_epoch(self, epoch: int) -> None:
        """Measure the model, keep the best one, and save where the run stands."""
        assert self.loader is not None
        self.health.refuse_nan({})
        report_skipped(self.loader, self.accelerator, self.progress.step, self.log)
        with in_one_piece(self.model, self.method, self.accelerator) as now:
            with torch.no_grad():
                show_pairs(self.method.objective, epoch, now, self.training, show_progress=self.show_progress)
                after_epoch(self.method.objective, epoch)
            if now is not None:
                self._measure(epoch, now)
        self._agree()

    def close(self) -> None:
        if self.log is not None:
            self.log.close()

    def _has_steps(self) -> bool:
        settings, texts = self.settings, len(self.training.texts)
        if self.method.solver is None:
            if not settings.epochs:
                raise SettingsError("--epochs 0 trains nothing: this recipe needs at least 1 epoch.")
            return True
        if texts < settings.batch_size and settings.epochs and self.accelerator.is_main_process:
            echo(
                f"{texts} texts are too few for --batch_size {settings.batch_size}: the closed form is the model."
            )
        return bool(settings.epochs) and texts >= settings.batch_size

    def _loader(self, targets: Mapping[str, Column]) -> PairLoader:
        retriever, settings = self.method.retriever, self.settings
        return PairLoader(
            self.training.captions,
            retriever.image_input,
            self.training.texts,
            settings.batch_size,
            settings.seed,
            rank=self.accelerator.process_index,
            world_size=self.accelerator.num_processes,
            workers=settings.workers,
            targets=targets,
            views=self.method.views,
            pack_texts=retriever.text.encoder.packs(self.accelerator.device),
        )

    def _place(self, resume: bool) -> None:
        """Modules on the device, the optimiser, and where the run stands; the main process alone writes."""
        method, settings, accelerator = self.method, self.settings, self.accelerator
        for module in method.modules().values():
            module.to(accelerator.device)
        if resume:
            checkpoint.load_modules(self.folder, method)
        self.model: nn.Module = method.retriever
        if settings.shard_model and self.loader is not None:
            from diptych.training.sharding import (
                ShardedModel,  # torch's modules behind it take long to import
            )

            self.model = ShardedModel(method, accelerator)
        self.parameters = trainable(method)
        self.optimizer = build_optimizer(method, settings, graphs=settings.cuda_graphs)
        self.progress, self.log = Progress(), None
        if resume:
            self.progress = checkpoint.load_rest(
                self.folder, method, self.optimizer, accelerator.process_index, accelerator.scaler
            )
        if accelerator.is_main_process:
            if not resume:
                self.card.save(self.folder)
            resumed_at = self.progress.step if resume else None
            self.log = Log(self.folder, resumed_at=resumed_at, tensorboard=settings.tensorboard)

    def _solve(self) -> None:
        """Run the solver, then measure and keep what it found: epoch −1 of the run."""
        method = self.method
        if self.log is not None and method.solver is not None:
            found = method.solver(
                method.retriever, self.training, self.validation, show_progress=self.show_progress
            )
            self.log.write(self.progress.step, {"epoch": -1, **found})
            self._measure(-1, method.retriever)
        self._agree()

    def _measure(self, epoch: int, retriever: Retriever) -> None:
        """Measure the model in one piece, keep the best, and say how an epoch went; −1 is a solver's."""
        assert self.log is not None
        progress, line, best, said = self.progress, {"epoch": float(epoch)}, True, "no validation split"
        if self.validation is not None:
            report = measure(
                self.method.evaluators, retriever, self.validation, show_progress=self.show_progress
            )
            line.update({f"validation_{name}": value for name, value in report.metrics.items()})
            progress.metric, value = report.primary_metric, report.metrics[report.primary_metric]
            best = not math.isfinite(progress.best) or value > progress.best
            if best:
                progress.best, progress.best_epoch = value, epoch
            said = f"validation {metric_name(progress.metric)} {value:.1f}{' (best so far)' if best else ''}"
        if best:
            retriever.save_pretrained(self.folder / "best", card=model_card(self.folder, epoch, line))
        progress.history.append(line)
        self.log.write(progress.step, {**line, "epoch": epoch, "best": best})
        if self.show_progress:
            if epoch >= 0:
                said = f"loss {self.meter.mean_loss():.4g}, {said}{self.clock.left(epoch)}"
            echo(f"{epoch_name(epoch)}: {said}")

    def _prepare_steps(self, steps: int) -> None:
        settings, accelerator = self.settings, self.accelerator
        if settings.compile:
            self.method.retriever.compile_encoders()
        if self.model is self.method.retriever:
            self.model = accelerator.prepare_model(self.model)
        optimizer = accelerator.prepare_optimizer(self.optimizer)
        self.step = Step(self.method, self.model, optimizer, accelerator, settings.clip_norm, self.resident)
        self.run_step: Callable[[Batch], tuple[Embeddings, Batch, Terms]] = self.step
        if settings.cuda_graphs:
            self.run_step = GraphedStep(self.step)
        elif settings.micro_batch:
            self.run_step = CachedStep(self.step, settings.micro_batch)
        self.schedule = schedule_of(settings, steps)
        self.health = StepHealth(accelerator.device)
        self.clock = Clock(self.progress.step // steps, settings.epochs)

    def _agree(self) -> None:
        """Tell every process where the run stands, and save it."""
        self.progress = share(self.progress, self.accelerator)
        self._save()

    def _save(self) -> None:
        """Write ``last/`` from the main process; the random states of all processes go in."""
        accelerator, method = self.accelerator, self.method
        randoms = checkpoint.gather_random(accelerator.num_processes)
        if accelerator.is_main_process or any(map(is_divided, method.retriever.parameters())):
            tensors = checkpoint.tensors_of(method, self.optimizer)
        if accelerator.is_main_process:
            checkpoint.save_state(self.folder, tensors, self.progress, randoms, accelerator.scaler)
        accelerator.wait_for_everyone()


def report_skipped(loader: PairLoader, accelerator: Accelerator, step: int, log: Log | None) -> None:
    """Say how many images could not be read so far, over all processes, and name one; every process must call it."""
    count = torch.tensor(len(loader.skipped), device=accelerator.device)
    total = int(accelerator.reduce(count)) if accelerator.num_processes > 1 else int(count)
    if not total or log is None:
        return
    log.write(step, {"skipped_images": total})
    example = next((f": {reason}" for reason in loader.skipped.values()), "")
    echo(f"warning: {total} images could not be read and were skipped{example}")
