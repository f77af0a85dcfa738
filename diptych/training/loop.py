"""The training loop, in sight: embed → terms → backward → clip → step → after_step → log."""

from __future__ import annotations

import atexit
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs
from torch import Tensor

from diptych.data.captions import Captions
from diptych.data.loading import PairLoader
from diptych.data.text import TextStore
from diptych.errors import Interrupted, SettingsError, TrainingError
from diptych.evaluation.retrieval import evaluate
from diptych.objectives.objective import Objective
from diptych.progress import track
from diptych.settings import TrainingSettings
from diptych.training import checkpoint, health
from diptych.training.checkpoint import Progress, RunCard
from diptych.training.gradient_cache import CachedStep
from diptych.training.log import Log
from diptych.training.method import Method
from diptych.training.optim import Schedule, build_optimizer, freeze_for_epoch, set_rates, trainable
from diptych.training.step import GraphedStep, Step
from diptych.types import Batch, Embeddings, Terms

WAIT = timedelta(hours=12)  # of the other processes for the one that clusters, evaluates or saves


@dataclass(frozen=True)
class Prepared:
    """Captions whose texts are tokenised (or cached) once; ``captions.images`` may be cached features."""

    captions: Captions
    texts: TextStore


def train(
    method: Method,
    card: RunCard,
    training: Prepared,
    validation: Prepared | None,
    folder: Path,
    *,
    resume: bool = False,
    show_progress: bool = True,
) -> Progress:
    """Train until the last epoch or until patience ends; returns where the run stands.

    ``folder/best`` is the model of the best validation RSUM (of the last epoch when there is no validation split).
    """
    settings = card.settings
    accelerator = start(method, settings)
    device, rank = accelerator.device, accelerator.process_index
    method.objective.to(device)
    for part in method.objective.modules():
        if isinstance(part, Objective):
            part.show_progress = show_progress and accelerator.is_main_process
    loader = PairLoader(
        training.captions,
        method.retriever.image_input,
        training.texts,
        settings.batch_size,
        settings.seed,
        rank=rank,
        world_size=accelerator.num_processes,
        workers=settings.workers,
        pack_texts=method.retriever.text.encoder.packs(device),
    )
    method.retriever.to(device)
    if method.twin is not None:
        method.twin.to(device)
    parameters = trainable(method)
    optimizer = build_optimizer(method, settings, graphs=settings.cuda_graphs)
    progress = Progress()
    if resume:
        progress = checkpoint.load_state(folder, method, optimizer, rank, accelerator.scaler)
    if not resume and accelerator.is_main_process:
        card.save(folder)
    log = None  # the main process alone writes
    if accelerator.is_main_process:
        log = Log(folder, resumed_at=progress.step if resume else None, tensorboard=settings.tensorboard)
    if settings.compile:
        method.retriever.compile_encoders()
    model = accelerator.prepare_model(method.retriever)
    step = Step(method, model, accelerator.prepare_optimizer(optimizer), accelerator, settings.clip_norm)
    run_step: Callable[[Batch], tuple[Embeddings, Batch, Terms]] = step
    if settings.cuda_graphs:
        run_step = GraphedStep(step)
    elif settings.micro_batch:
        run_step = CachedStep(step, settings.micro_batch)
    # pieces are moved one by one: the whole batch stays on the host
    there = torch.device("cpu") if settings.micro_batch else device
    schedule = Schedule(len(loader), settings.warmup_epoch, settings.decay_epoch, settings.decay_factor)
    watch = health.Health(device)

    with interruptible() as interrupt:
        first = progress.step // len(loader)
        for epoch in range(first, settings.epochs):
            if stop_early(progress, epoch, settings):
                break
            model.train()
            freeze_for_epoch(method, epoch, parameters)
            health.check_modes(method.retriever)
            method.objective.start_epoch(epoch)
            collapsed = method.objective.collapsed_value(settings.batch_size)
            meter = Meter(settings.batch_size)
            label = f"epoch {epoch + 1}/{settings.epochs}"
            start_at = progress.step - epoch * len(loader)
            batches = loader.epoch(epoch, start=start_at)
            for batch in track(batches, label, len(loader) - start_at, show_progress and log is not None):
                rate = settings.learning_rate * schedule.factor(progress.step)
                set_rates(optimizer, rate)
                embeddings, whole, terms = run_step(batch.to(there, non_blocking=True))
                with torch.no_grad():
                    method.objective.after_step(embeddings, whole)
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
            with torch.no_grad():
                method.objective.after_epoch(epoch)
            if log is not None:
                finish_epoch(method, validation, folder, epoch, progress, log, show_progress)
            progress = share(progress, accelerator)
            save_on_main(accelerator, folder, method, optimizer, progress)
            if interrupt.agreed(accelerator) and epoch + 1 < settings.epochs:
                raise interrupted(card, folder, progress)
    if log is not None:
        log.close()
    return progress


def start(method: Method, settings: TrainingSettings) -> Accelerator:
    """The accelerator of this run, with the settings that do not go together refused."""
    waits = bool(method.train_from)
    AcceleratorState._reset_state()  # one process may train several runs, each with its own precision
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),  # else processes on a machine without a GPU would not find each other
        mixed_precision=settings.precision,
        kwargs_handlers=[
            DistributedDataParallelKwargs(find_unused_parameters=waits),
            InitProcessGroupKwargs(timeout=WAIT),
        ],
    )
    if settings.cuda_graphs and (accelerator.device.type != "cuda" or accelerator.num_processes > 1):
        raise SettingsError("--cuda_graphs needs exactly one CUDA GPU: leave it out here.")
    if settings.cuda_graphs and settings.micro_batch:
        raise SettingsError("--micro_batch does not go with --cuda_graphs: leave one of them out.")
    if settings.cuda_graphs and settings.precision == "fp16":
        raise SettingsError(
            "--cuda_graphs does not go with fp16, whose loss scale the host decides: use bf16."
        )
    if settings.precision == "fp16" and accelerator.device.type == "cpu":
        raise SettingsError("--precision fp16 needs a GPU: use 'no' on a CPU.")
    if settings.batch_size % accelerator.num_processes:
        raise SettingsError(
            f"--batch_size {settings.batch_size} does not divide over {accelerator.num_processes} processes."
        )
    if accelerator.num_processes > 1:
        # for programs of their own; the command line ends its processes itself (diptych/cli)
        atexit.register(accelerator.state.destroy_process_group)
        # dropout differs between processes; weights were made from the plain seed
        torch.manual_seed(settings.seed + accelerator.process_index)
    return accelerator


def finish_epoch(
    method: Method,
    validation: Prepared | None,
    folder: Path,
    epoch: int,
    progress: Progress,
    log: Log,
    show_progress: bool,
) -> None:
    """Validate, keep the best model, and say how the epoch went."""
    retriever, line = method.retriever, {"epoch": float(epoch)}
    if validation is None:
        best = True
    else:
        report = evaluate(
            retriever,
            validation.captions,
            text_store=validation.texts,
            bootstrap=0,
            show_progress=show_progress,
        )
        line.update({f"validation_{name}": value for name, value in report.metrics.items()})
        best = report.metrics["rsum"] > progress.best_rsum
        if best:
            progress.best_rsum, progress.best_epoch = report.metrics["rsum"], epoch
    if best:
        retriever.save_pretrained(folder / "best", card=model_card(folder, epoch, line))
    progress.history.append(line)
    log.write(
        progress.step, {"epoch": epoch, **{k: v for k, v in line.items() if k != "epoch"}, "best": best}
    )
    if show_progress:
        score = f"validation RSUM {line['validation_rsum']:.1f}" if validation else "no validation split"
        print(f"epoch {epoch + 1}: {score}{' (best so far)' if best and validation else ''}", flush=True)


def report_skipped(loader: PairLoader, accelerator: Accelerator, step: int, log: Log | None) -> None:
    """Say how many images could not be read so far, over all processes, and name one; every process must call it."""
    count = torch.tensor(len(loader.skipped), device=accelerator.device)
    total = int(accelerator.reduce(count)) if accelerator.num_processes > 1 else int(count)
    if not total or log is None:
        return
    log.write(step, {"skipped_images": total})
    example = next((f": {reason}" for reason in loader.skipped.values()), "")
    print(f"warning: {total} images could not be read and were skipped{example}", flush=True)


def model_card(folder: Path, epoch: int, line: dict[str, float]) -> str:
    """The README of a model folder: what it is, how it was trained, how to use it."""
    run = checkpoint.read_run(folder)
    settings = "\n".join(f"| {name} | {value} |" for name, value in run["settings"].items())
    scores = "\n".join(f"| {name} | {value:.2f} |" for name, value in line.items() if name != "epoch")
    return (
        f"# {run['recipe']}\n\nAn image-text retriever trained with Diptych {run['diptych']} on {run['data']} "
        f"(data {run['data_fingerprint']}), epoch {epoch + 1}.\n\n"
        '```python\nfrom diptych import Retriever\nmodel = Retriever.from_pretrained("this folder")\n```\n\n'
        f"| validation | |\n|---|---|\n{scores}\n\n| setting | |\n|---|---|\n{settings}\n"
    )


def stop_early(progress: Progress, epoch: int, settings: TrainingSettings) -> bool:
    """Whether patience has ended."""
    return (
        settings.patience > 0 and progress.best_epoch >= 0 and epoch - progress.best_epoch > settings.patience
    )


def on_collapse(sentence: str, settings: TrainingSettings) -> None:
    """Warn or stop, as the user chose."""
    if settings.on_collapse == "stop":
        raise TrainingError(sentence)
    print(f"warning: {sentence}", flush=True)


def save_on_main(
    accelerator: Accelerator,
    folder: Path,
    method: Method,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
) -> None:
    """Write ``last/`` from the main process; the random states of all processes go in."""
    randoms = checkpoint.gather_random(accelerator.num_processes)
    if accelerator.is_main_process:
        checkpoint.save_state(folder, method, optimizer, progress, randoms, accelerator.scaler)
    accelerator.wait_for_everyone()


def share(progress: Progress, accelerator: Accelerator) -> Progress:
    """The main process's progress, on every process."""
    if accelerator.num_processes == 1:
        return progress
    box = [progress]
    torch.distributed.broadcast_object_list(box)
    return box[0]


class Meter:
    """Running means of the terms and the speed, kept on the device until they are read."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.sums: dict[str, Tensor] = {}
        self.count, self.began = 0, time.perf_counter()

    def add(self, terms: dict[str, Tensor]) -> None:
        """Take in one step."""
        for name, value in terms.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value.clone()
        self.count += 1

    def read(self) -> dict[str, float]:
        """Means since the last read: loss, terms, pairs per second."""
        terms = {name: float(value) / self.count for name, value in self.sums.items()}
        speed = self.count * self.batch_size / (time.perf_counter() - self.began)
        self.reset()
        return {"loss": sum(terms.values()), **terms, "pairs_per_second": round(speed, 1)}


class Interrupt:
    """Whether the user pressed Ctrl-C; a second one ends at once."""

    SAME = 1.0  # seconds within which a second signal is the first one, passed on by torchrun
    EVERY = 10  # steps after which several processes ask each other

    def __init__(self) -> None:
        self.asked = False
        self.since = 0.0

    def handle(self, number: int, frame: Any) -> None:
        """Remember the wish; the loop ends after the step in progress."""
        if not self.asked:
            self.asked, self.since = True, time.monotonic()
        elif time.monotonic() - self.since > self.SAME:
            raise KeyboardInterrupt

    def agreed(self, accelerator: Accelerator, step: int = 0) -> bool:
        """Whether to stop now; several processes stop at the same step, for they save together."""
        if accelerator.num_processes == 1:
            return self.asked
        if step % self.EVERY:
            return False
        anyone = torch.tensor(int(self.asked), device=accelerator.device)
        torch.distributed.all_reduce(anyone, torch.distributed.ReduceOp.MAX)
        return bool(anyone)


def interrupted(card: RunCard, folder: Path, progress: Progress) -> Interrupted:
    """What the user is told after a run was saved on their wish."""
    place, data = shlex.quote(str(folder)), shlex.quote(card.data)
    return Interrupted(
        f"saved at step {progress.step}; resume with: "
        f"diptych train {card.recipe} --data {data} --resume_from_checkpoint {place}"
    )


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Catch SIGINT while training, and put the old handler back."""
    interrupt = Interrupt()
    try:
        before = signal.signal(signal.SIGINT, interrupt.handle)
    except ValueError:  # not in the main thread: no handler can be set
        yield interrupt
        return
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
