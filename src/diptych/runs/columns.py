"""What measures cells that need no trained run: steps, teachers, settings, counts, the pooling experiment."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from diptych.data.captions import Captions
from diptych.data.decode.processes import most_memory
from diptych.data.formats import open_captions
from diptych.data.held_out import training_splits
from diptych.data.labels import COLUMN, class_names, class_sets
from diptych.data.problems import Absent, LeftOut, undecodable
from diptych.data.readers.hashing_lists import RANKED
from diptych.errors import DataError
from diptych.evaluation.classes import is_class_list, open_class_list
from diptych.evaluation.senteval import is_senteval, pairs_to_train, read_senteval
from diptych.objectives.objective import after_step
from diptych.objectives.soft_labels import IMAGE_TEACHER, TEXT_TEACHER
from diptych.recipes.recipe import Recipe
from diptych.runs import synthetic_pooling
from diptych.runs.train import seed_everything, training_device
from diptych.settings import TrainingSettings
from diptych.tables import TableGroup, TableRow
from diptych.targets.columns import fill_targets
from diptych.training.checkpoint import RunCard
from diptych.training.prepare import prepare, ready_views, unreadable_images
from diptych.training.session import Session
from diptych.training.teachers import teachers_of

STEPS = 3  # steps made; the first is not timed where there are more
TIMES = 10  # that a teacher is timed
MEGA = 2**20


@dataclass(frozen=True)
class Cost:
    """What training costs: seconds of a step on the clock and of the CPU, steps of an epoch, memory."""

    seconds: float
    cpu: float
    steps: int
    parameters: int
    gpu: int
    memory: int

    def metrics(self) -> dict[str, float]:
        found = {
            "step_ms": 1000 * self.seconds,
            "epoch_minutes": self.seconds * self.steps / 60,
            "memory_gb": self.memory / 2**30,
        }
        return found | ({"gpu_mb": self.gpu / MEGA} if self.gpu else {})


def measure_steps(
    recipe: Recipe,
    settings: TrainingSettings,
    captions: Captions,
    *,
    steps: int = STEPS,
) -> Cost:
    """Build the method on the training split and make a few steps on its first pairs, or none; nothing is kept."""
    training, _ = training_splits(captions)
    _forget_memory()
    seed_everything(settings.seed)
    method = recipe.build(settings, training)
    parameters = sum(p.numel() for p in method.retriever.parameters())
    batch = settings.batch_size
    if method.solver is not None or not steps:
        return Cost(0.0, 0.0, 0, parameters, 0, _memory())
    where = training_device("auto")
    how: dict[str, Any] = {"device": where, "show_progress": False}
    some = _first(training, steps * batch)
    if not settings.strict_images:
        some = LeftOut().add(some, unreadable_images(method.retriever, some, **how))
    ready = prepare(method.retriever, some, **how)
    method.views = ready_views(method, some, **how)
    targets = fill_targets(method.targets, some, **{**how, "device": torch.device(where)})
    gpu = where.startswith("cuda")
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    with TemporaryDirectory() as folder:
        card = RunCard(recipe.name, settings, captions.name, "")
        session = Session(
            method, card, ready, None, Path(folder),
            targets=targets, on_cpu=where == "cpu", resume=False, show_progress=False,
        )  # fmt: skip
        with closing(session):
            taken = _timed_steps(session, steps)
    peak = torch.cuda.max_memory_allocated() if gpu else 0
    seconds, cpu = np.median(taken[1:] or taken, axis=0).tolist()
    return Cost(seconds, cpu, len(training.texts) // batch, parameters, peak, _memory())


def _timed_steps(session: Session, steps: int) -> list[tuple[float, float]]:
    """Seconds of each step, on the clock and of the CPU."""
    session.start_epoch(0)
    taken: list[tuple[float, float]] = []
    clock, cpu = time.perf_counter(), time.process_time()
    for _, batch in zip(range(steps), session.batches(0), strict=False):
        rate = session.set_rate()
        embeddings, whole, terms = session.run_step(batch)
        with torch.no_grad():
            after_step(session.method.objective, embeddings, whole)
        session.note(0, rate, terms)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter(), time.process_time()
        taken.append((now[0] - clock, now[1] - cpu))
        clock, cpu = now
    return taken


def _first(training: Captions, texts: int) -> Captions:
    """The first images, with at least this many texts where there are as many."""
    counts = np.bincount(training.image_of, minlength=len(training.images)).cumsum()
    return training.subset(range(min(int(np.searchsorted(counts, texts)) + 1, len(counts))))


def _forget_memory() -> None:
    """Count the most memory held from now on, where the system can: a row after a large one is measured alone."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _memory() -> int:
    """The most memory that this process has held since, in bytes; where that is not known, since it began."""
    return most_memory() or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def teacher_costs(settings: Any, captions: Captions) -> dict[str, dict[str, float]]:
    """Milliseconds of each module of CUSA for one batch, memory of the GPU, and bytes on disk."""
    training, _ = training_splits(captions)
    some = _first(training, settings.batch_size)
    if not settings.strict_images:
        some = LeftOut().add(some, undecodable(some.images, show_progress=False))
    where = torch.device(training_device("auto"))
    found: dict[str, dict[str, float]] = {}
    for live in (True, False):
        teachers = replace(teachers_of(settings), live=("image", "text") if live else ())
        columns = teachers.columns(some, device=where, show_progress=False)
        for side, name in (("image", IMAGE_TEACHER), ("text", TEXT_TEACHER)):
            read = columns[name].rows
            count = len(some.images) if side == "image" else len(some.texts)
            rows = np.arange(settings.batch_size) % count
            found[f"{side}_{'live' if live else 'disk'}"] = _module(partial(read, rows))
            if not live:
                vectors = torch.from_numpy(np.asarray(read(rows))).to(where).float()
                whole = len(training.images) if side == "image" else len(training.texts)
                found[f"{side}_disk"]["disk_mb"] = vectors.shape[1] * 2 * whole / MEGA  # kept as float16
                found[f"{side}_similarity"] = _module(partial(torch.matmul, vectors, vectors.T))
    return found


def _module(work: Callable[[], object]) -> dict[str, float]:
    """Median milliseconds, and the GPU's memory where there is one."""
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    work()
    taken = []
    for _ in range(TIMES):
        began = time.perf_counter()
        work()
        if gpu:
            torch.cuda.synchronize()
        taken.append(1000 * (time.perf_counter() - began))
    found = {"module_ms": statistics.median(taken)}
    return found | ({"gpu_mb": torch.cuda.max_memory_allocated() / MEGA} if gpu else {})


def row_counts(row: TableRow, group: TableGroup, path: str) -> dict[str, float]:
    """The counts of a row's data; data without what the paper counts are refused, but for missing files of SentEval."""
    found = counts_of(path)
    printed = row.published.get(group.name, {})
    lacks = [head for metric, head in group.columns.items() if metric in printed and metric not in found]
    if lacks and not (is_senteval(path) and found.keys() & printed.keys()):
        raise DataError(
            f"{path} has nothing to count as {', '.join(lacks)} in the row '{row.name}': give the data of that row."
        )
    return found


def counts_of(path: str) -> dict[str, float]:
    """Images, texts and classes of a data set by split; those of a list of classes; pairs of a SentEval folder."""
    if is_senteval(path):
        sets = read_senteval(path).sets
        found = {f"{one.name} {one.split}": float(len(one)) for one in sets}
        stsb = {"train_images": float(pairs_to_train(path)), "test_images": found.get("STS-B test", 0.0)}
        return found | {metric: count for metric, count in stsb.items() if count}
    if is_class_list(path):
        listed = open_class_list(path, pictures=False)
        classes = {name for side in listed.sides for name in side.classes}
        return {"images": float(len(listed.every)), "classes": float(len(classes))}
    captions = open_captions(path, problems=Absent())
    splits, of_texts = np.array(captions.splits), np.array(captions.splits)[captions.image_of]
    found = {}
    for split in sorted(set(captions.splits)):
        name = split.removesuffix("all")
        found |= {
            f"{name}_images": float((splits == split).sum()),
            f"{name}_texts": float((of_texts == split).sum()),
        }
    found["texts_per_image"] = len(captions.texts) / len(captions.images)
    if COLUMN in captions.labels:
        found["classes"] = float(len(class_names(class_sets(captions, COLUMN))))
    if RANKED in captions.labels:
        found["database_images"] = float(sum(map(bool, captions.labels[RANKED])))
    return found


def pooling_errors(design: str, seeds: int, *, show_progress: bool) -> list[dict[str, float]]:
    """The errors of a design of GPO on every pattern, one set per seed."""
    found: list[dict[str, float]] = [{} for _ in range(seeds)]
    for run in synthetic_pooling.run(designs=[design], seeds=seeds, show_progress=show_progress):
        found[run.seed] |= {f"{run.pattern} {sizes}": value for sizes, value in asdict(run.errors).items()}
    return found
