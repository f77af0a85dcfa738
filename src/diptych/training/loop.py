"""The training loop, in sight: embed → terms → backward → clip → step → after_step → log."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from accelerate import Accelerator

from diptych.errors import TrainingError
from diptych.evaluation.prepared import Prepared
from diptych.objectives.objective import Objective, after_epoch, after_step, start_epoch
from diptych.progress import track
from diptych.settings import TrainingSettings
from diptych.targets.columns import Column
from diptych.training import checkpoint, health
from diptych.training.checkpoint import Progress, RunCard
from diptych.training.encoded_pairs import show_pairs
from diptych.training.gradient_cache import CachedStep
from diptych.training.loading import PairLoader
from diptych.training.log import Log
from diptych.training.meter import Meter
from diptych.training.method import Method
from diptych.training.optim import build_optimizer, freeze_for_epoch, set_rates, trainable
from diptych.training.processes import divided, in_one_piece, save_on_main, share
from diptych.training.resident import divide
from diptych.training.schedules import schedule_of
from diptych.training.signals import interrupted, interruptible
from diptych.training.solving import solve, solve_alone
from diptych.training.start import start
from diptych.training.step import GraphedStep, Step
from diptych.training.validation import Clock, finish_epoch, stop_early
from diptych.types import Batch, Embeddings, Terms


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
    settings = card.settings
    accelerator = start(method, settings, on_cpu)
    device, rank = accelerator.device, accelerator.process_index
    too_few = method.solver is not None and len(training.texts) < settings.batch_size
    if too_few and settings.epochs and accelerator.is_main_process:
        print(
            f"{len(training.texts)} texts are too few for --batch_size {settings.batch_size}: "
            "the closed form is the model."
        )
    if too_few or not settings.epochs:
        return solve_alone(
            method,
            card,
            training,
            validation,
            folder,
            accelerator,
            resume=resume,
            show_progress=show_progress,
        )
    method.objective.to(device)
    for part in method.objective.modules():
        if isinstance(part, Objective):
            part.show_progress = show_progress and accelerator.is_main_process
    resident, read = divide(targets or {}, training.captions, device)
    loader = PairLoader(
        training.captions,
        method.retriever.image_input,
        training.texts,
        settings.batch_size,
        settings.seed,
        rank=rank,
        world_size=accelerator.num_processes,
        workers=settings.workers,
        targets=read,
        views=method.views,
        pack_texts=method.retriever.text.encoder.packs(device),
    )
    method.retriever.to(device)
    if method.twin is not None:
        method.twin.to(device)
    if resume:
        checkpoint.load_modules(folder, method)
    model = divided(method, accelerator) if settings.shard_model else None
    parameters = trainable(method)
    optimizer = build_optimizer(method, settings, graphs=settings.cuda_graphs)
    progress = Progress()
    if resume:
        progress = checkpoint.load_rest(folder, method, optimizer, rank, accelerator.scaler)
    if not resume and accelerator.is_main_process:
        card.save(folder)
    log = None  # the main process alone writes
    if accelerator.is_main_process:
        log = Log(folder, resumed_at=progress.step if resume else None, tensorboard=settings.tensorboard)
    if method.solver is not None and not resume:
        if log is not None:
            solve(method, training, validation, folder, progress, log, show_progress=show_progress)
        progress = share(progress, accelerator)
        save_on_main(accelerator, folder, method, optimizer, progress)
    if settings.compile:
        method.retriever.compile_encoders()
    model = model or accelerator.prepare_model(method.retriever)
    prepared = accelerator.prepare_optimizer(optimizer)
    step = Step(method, model, prepared, accelerator, settings.clip_norm, resident)
    run_step: Callable[[Batch], tuple[Embeddings, Batch, Terms]] = step
    if settings.cuda_graphs:
        run_step = GraphedStep(step)
    elif settings.micro_batch:
        run_step = CachedStep(step, settings.micro_batch)
    schedule = schedule_of(settings, len(loader))
    watch = health.Health(device)

    with interruptible() as interrupt:
        first = progress.step // len(loader)
        clock = Clock(first, settings.epochs)
        for epoch in range(first, settings.epochs):
            if stop_early(progress, epoch, settings):
                break
            model.train()
            waiting = freeze_for_epoch(method, epoch, parameters)
            step.waiting = [parameters[name] for name in waiting if settings.shard_model]
            health.check_modes(method.retriever)
            start_epoch(method.objective, epoch)
            collapsed = method.objective.collapsed_value(settings.batch_size)
            meter = Meter(settings.batch_size)
            label = f"epoch {epoch + 1}/{settings.epochs}"
            start_at = progress.step - epoch * len(loader)
            batches = loader.epoch(epoch, start=start_at)
            for batch in track(batches, label, len(loader) - start_at, show_progress and log is not None):
                rate = settings.learning_rate * schedule.factor(progress.step)
                set_rates(optimizer, rate)
                embeddings, whole, terms = run_step(batch)
                with torch.no_grad():
                    after_step(method.objective, embeddings, whole)
                progress.step += 1
                watch.watch(progress.step, terms, collapsed)
                meter.add(terms)
                if progress.step % settings.log_steps == 0 and log is not None:
                    for sentence in watch.report(terms, collapsed):
                        on_collapse(sentence, settings)
                    log.write(progress.step, {"epoch": epoch, "learning_rate": rate, **meter.read()})
                stopping = interrupt.agreed(accelerator, progress.step)
                if progress.step % len(loader) == 0:
                    continue  # saved below, once the epoch has been finished: its end must not be skipped on resuming
                if stopping or (settings.save_steps and progress.step % settings.save_steps == 0):
                    watch.refuse_nan(terms)  # never over a state that is sound
                    save_on_main(accelerator, folder, method, optimizer, progress)
                if stopping:
                    raise interrupted(card, folder, progress)
            watch.refuse_nan({})
            report_skipped(loader, accelerator, progress.step, log)
            with in_one_piece(model, method, accelerator) as now:
                with torch.no_grad():
                    show_pairs(method.objective, epoch, now, training, show_progress=show_progress)
                    after_epoch(method.objective, epoch)
                if log is not None and now is not None:
                    finish_epoch(
                        method, now, validation, folder, epoch, progress, log, show_progress,
                        loss=meter.mean_loss(), clock=clock,
                    )  # fmt: skip
            progress = share(progress, accelerator)
            save_on_main(accelerator, folder, method, optimizer, progress)
            if interrupt.agreed(accelerator) and epoch + 1 < settings.epochs:
                raise interrupted(card, folder, progress)
    if log is not None:
        log.close()
    return progress


def report_skipped(loader: PairLoader, accelerator: Accelerator, step: int, log: Log | None) -> None:
    """Say how many images could not be read so far, over all processes, and name one; every process must call it."""
    count = torch.tensor(len(loader.skipped), device=accelerator.device)
    total = int(accelerator.reduce(count)) if accelerator.num_processes > 1 else int(count)
    if not total or log is None:
        return
    log.write(step, {"skipped_images": total})
    example = next((f": {reason}" for reason in loader.skipped.values()), "")
    print(f"warning: {total} images could not be read and were skipped{example}", flush=True)


def on_collapse(sentence: str, settings: TrainingSettings) -> None:
    """Warn or stop, as the user chose."""
    if settings.on_collapse == "stop":
        raise TrainingError(sentence)
    print(f"warning: {sentence}", flush=True)
