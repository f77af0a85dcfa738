"""Training: it learns, it resumes bit for bit, it says what is wrong."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import torchrun, wait_for_steps
from safetensors.torch import load_file
from small import precomputed
from torch import Tensor

from diptych.aggregators import GPO
from diptych.data.formats import open_captions
from diptych.data.images import PixelInput
from diptych.data.text import WordInput
from diptych.data.vocabulary import build_vocabulary
from diptych.encoders.bigru import BiGRU
from diptych.encoders.cnn import Grid
from diptych.encoders.encoder import Backbone
from diptych.errors import CheckpointError, SettingsError, TrainingError
from diptych.model.retriever import Retriever, Tower
from diptych.model.twin import Twin
from diptych.objectives.objective import start_epoch
from diptych.recipes import RECIPES
from diptych.runs.train import resumed_settings, run_recipe
from diptych.settings import TrainingSettings, from_json
from diptych.training import log, session
from diptych.training.log import read_log
from diptych.training.optim import can_fold_clip, fold_clip, schedule_of
from diptych.training.step import Step
from diptych.types import Batch, Features

SMALL = {
    "dim": 16,
    "batch_size": 12,
    "epochs": 3,
    "decay_epoch": 2,
    "min_count": 1,
    "word_dim": 8,
    "log_steps": 1,
}
RECIPE = RECIPES["vse-infinity"]


def run(data: Path, folder: Path, *, resume: bool = False, recipe: str = RECIPE.name, **changes: Any) -> Any:
    chosen = RECIPES[recipe]
    settings = chosen.settings(**{**SMALL, **changes})
    return run_recipe(chosen, settings, str(data), folder, resume=resume, show_progress=False)


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_log(folder / "log.jsonl") if "loss" in line]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return precomputed(tmp_path_factory.mktemp("data") / "toy_precomp")


@pytest.mark.parametrize("limit", [0.5, 100.0])
def test_clipping_inside_the_optimiser_is_clipping(limit: float) -> None:
    torch.manual_seed(0)
    start, results = [torch.randn(5, 3), torch.randn(7)], []
    gradients = [[torch.randn(5, 3), torch.randn(7)] for _ in range(4)]
    for folded in (False, True):
        parameters = [torch.nn.Parameter(p.clone()) for p in start]
        optimizer = torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1, fused=True)
        assert can_fold_clip(optimizer)
        for step in gradients:
            for p, gradient in zip(parameters, step, strict=True):
                p.grad = gradient.clone()
            if folded:
                fold_clip(optimizer, parameters, limit)
            else:
                torch.nn.utils.clip_grad_norm_(parameters, limit)
            optimizer.step()
        moments = [optimizer.state[p]["exp_avg_sq"] for p in parameters]
        results.append([*(p.detach() for p in parameters), *moments])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    assert not can_fold_clip(torch.optim.AdamW(start, lr=0.1))


def test_it_learns(data: Path, tmp_path: Path) -> None:
    progress = run(data, tmp_path / "run", epochs=12, decay_epoch=10, learning_rate=5e-3)
    chance = 100 * (1 + 5 + 10) / 10 + 100 * (1 + 5 + 10) / 10  # ten images: R@k by luck is about k/10
    assert progress.best > chance + 50
    assert Retriever.from_pretrained(tmp_path / "run").encode_text("a dog").shape == (1, 16)


def test_same_seed_same_run(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path / "a")
    run(data, tmp_path / "b")
    run(data, tmp_path / "c", seed=1)
    assert losses(tmp_path / "a") == losses(tmp_path / "b") != losses(tmp_path / "c")


@pytest.mark.parametrize("crash_at", [3, 10, 14])
def test_resume_is_bit_exact(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash_at: int
) -> None:
    run(data, tmp_path / "whole", save_steps=2)
    real = session.Meter.add

    def crash(self: Any, terms: Any) -> None:
        crash.steps += 1  # type: ignore[attr-defined]
        if crash.steps == crash_at:  # type: ignore[attr-defined]
            raise RuntimeError("power cut")
        real(self, terms)

    crash.steps = 0  # type: ignore[attr-defined]
    monkeypatch.setattr(session.Meter, "add", crash)
    with pytest.raises(RuntimeError, match="power cut"):
        run(data, tmp_path / "broken", save_steps=2)
    monkeypatch.undo()
    run(data, tmp_path / "broken", save_steps=2, resume=True)
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")
    for name in ("retriever", "optimizer", "random-0"):
        whole, broken = (
            load_file(tmp_path / r / "last" / f"{name}.safetensors") for r in ("whole", "broken")
        )
        assert whole.keys() == broken.keys()
        assert all(torch.equal(whole[k], broken[k]) for k in whole), name


CODER = {
    "recipe": "coder",
    "concept_size": 10,
    "queue_size": 24,
    "clusters": 6,
    "prototype_epoch": 1,
    "concept_vectors": "glove",
}


@pytest.mark.parametrize("changes", [{}, CODER], ids=["vse-infinity", "coder"])
def test_a_cut_at_the_end_of_an_epoch_skips_nothing(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    whole = run(data, tmp_path / "whole", save_steps=1, **changes)

    def cut(*arguments: Any, **named: Any) -> None:
        raise RuntimeError("power cut")

    monkeypatch.setattr(session.Session, "_measure", cut)  # after the last step, before the epoch is over
    with pytest.raises(RuntimeError, match="power cut"):
        run(data, tmp_path / "broken", save_steps=1, **changes)
    monkeypatch.undo()
    broken = run(data, tmp_path / "broken", save_steps=1, resume=True, **changes)
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")
    assert broken.history == whole.history
    assert (tmp_path / "broken" / "best").is_dir()


def test_nan_does_not_overwrite_a_sound_state(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Step.__call__

    def poisoned(self: Step, batch: Any) -> Any:
        embeddings, whole, terms = real(self, batch)
        poisoned.steps += 1  # type: ignore[attr-defined]
        bad = poisoned.steps == 5  # type: ignore[attr-defined]
        return embeddings, whole, {name: value * torch.nan if bad else value for name, value in terms.items()}

    poisoned.steps = 0  # type: ignore[attr-defined]
    monkeypatch.setattr(Step, "__call__", poisoned)
    with pytest.raises(TrainingError, match=r"\b5\b"):
        run(data, tmp_path / "run", save_steps=1, log_steps=100)
    assert json.loads((tmp_path / "run" / "last" / "progress.json").read_text())["step"] == 4


class Cells(Backbone):
    """Every pixel is a cell."""

    channels = 3

    def __init__(self) -> None:
        super().__init__(4, [0.0] * 3, [1.0] * 3)

    def forward(self, pixels: Tensor) -> Tensor:
        return pixels.flatten(2).transpose(1, 2)


@pytest.mark.parametrize("pixels", [True, False], ids=["pixels", "stored cells"])
def test_the_twin_pools_what_the_model_kept(pixels: bool) -> None:
    torch.manual_seed(0)
    words = WordInput(build_vocabulary(["a b c d e"], min_count=1))
    text = Tower(BiGRU(words.vocabulary_size, 4, 4), GPO())
    model = Retriever(Tower(Grid(Cells(), 4, drop=0.5), GPO()), text, PixelInput(4), words).train()
    images = torch.randn(8, 3, 4, 4) if pixels else Features.whole(torch.randn(8, 16, 3))
    ids = Features.whole(torch.randint(1, words.vocabulary_size, (8, 5)))
    batch = Batch(images, ids, torch.arange(8), torch.arange(8))
    twin = Twin(model, 0.0, precision="same")
    seen = model(batch)
    assert seen.image_features is not None
    assert not seen.image_features.mask.all()
    keys = twin(batch, seen)  # equal weights and the same cells: the model's own vectors
    torch.testing.assert_close(keys.image, seen.image)
    assert not torch.allclose(twin(batch).image, seen.image, atol=1e-3)


def command(data: Path, folder: Path, *flags: str) -> list[str]:
    settings = [f"--{k}={v}" for k, v in SMALL.items() if k != "epochs"]
    return [
        sys.executable, "-m", "diptych", "train", "vse-infinity", f"--data={data}", "--epochs=6", "--save_steps=3",
        *settings, *flags,
    ]  # fmt: skip


def test_kill_and_interrupt_then_resume(data: Path, tmp_path: Path) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    subprocess.run(command(data, whole, f"--output_dir={whole}"), check=True, capture_output=True)

    process = subprocess.Popen(command(data, folder, f"--output_dir={folder}"), **quiet)
    wait_for_steps(folder, 12)
    process.kill()
    process.communicate()

    resume = command(data, folder, f"--resume_from_checkpoint={folder}")
    done = len(losses(folder))
    process = subprocess.Popen(resume, **quiet)
    wait_for_steps(folder, done + 8)
    process.send_signal(signal.SIGTERM)  # as a cluster does that wants its machine back
    _, said = process.communicate()
    assert process.returncode == 130, said
    assert "saved at step" in said
    assert f"diptych train vse-infinity --data {data} --resume_from_checkpoint {folder}" in said

    subprocess.run(resume, check=True, capture_output=True)
    assert losses(folder) == losses(whole)


def test_two_processes_match_one(data: Path, tmp_path: Path) -> None:
    flags = [
        "--epochs=2",
        "--size_augmentation=none",
        "--warmup_epoch=-1",
        "--image_encoder=grid",
    ]  # no BatchNorm
    one, two = tmp_path / "one", tmp_path / "two"
    subprocess.run(command(data, one, f"--output_dir={one}", *flags), check=True, capture_output=True)
    said = torchrun(*command(data, two, f"--output_dir={two}", *flags)[3:])
    assert losses(two) == pytest.approx(losses(one), rel=1e-4)
    assert said.count("best validation RSUM") == 1  # one process speaks


def test_two_processes_cluster_as_one(data: Path, tmp_path: Path) -> None:
    """The first process encodes all pairs and clusters them; every process then classifies by the same prototypes."""
    free = {"recipe", "epochs", "image_encoder", "size_augmentation"}
    given = [f"--{name}={value}" for name, value in {**SMALL, **CODER}.items() if name not in free]
    given += [
        "--image_encoder=grid",
        "--size_augmentation=none",
        "--epochs=3",
    ]  # no BatchNorm, nothing random
    one, two = tmp_path / "one", tmp_path / "two"
    start = ["train", "coder", f"--data={data}", *given]
    subprocess.run(
        [sys.executable, "-m", "diptych", *start, f"--output_dir={one}"], check=True, capture_output=True
    )
    torchrun(*start, f"--output_dir={two}")
    terms = [
        [line["prototypes"] for line in read_log(run / "log.jsonl") if "prototypes" in line]
        for run in (one, two)
    ]
    assert any(terms[0])
    assert terms[1] == pytest.approx(terms[0], rel=1e-4)


def test_two_processes_resume_coder_bit_for_bit(data: Path, tmp_path: Path) -> None:
    """With regions: their BatchNorm has running statistics of its own in each process, and the twin reads them."""
    given = [
        f"--{name}={value}" for name, value in {**SMALL, **CODER}.items() if name not in ("recipe", "epochs")
    ]
    start = ["train", "coder", f"--data={data}", *given]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    torchrun(*start, f"--output_dir={whole}", "--epochs=3")
    torchrun(*start, f"--output_dir={broken}", "--epochs=2")
    torchrun("train", "coder", f"--resume_from_checkpoint={broken}", "--epochs=3")
    assert losses(broken) == losses(whole)
    assert any(line["m_dcl"] for line in read_log(whole / "log.jsonl") if "m_dcl" in line)


def test_a_run_is_not_overwritten(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path / "run", epochs=1)
    with pytest.raises(CheckpointError, match="--resume_from_checkpoint"):
        run(data, tmp_path / "run", epochs=1)


def test_resuming_refuses_what_does_not_fit(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path / "run", epochs=1)
    with pytest.raises(CheckpointError, match=r"--margin.*0\.2.*0\.3"):
        run(data, tmp_path / "run", resume=True, margin=0.3)
    with pytest.raises(CheckpointError, match="vse-infinity"):
        resumed_settings(RECIPES["vse-plus-plus"], tmp_path / "run", {})
    other = precomputed(tmp_path / "other_precomp", train=20)
    with pytest.raises(CheckpointError, match="toy_precomp"):
        run(other, tmp_path / "run", resume=True, epochs=1)
    (tmp_path / "run" / "last" / "optimizer.safetensors").write_bytes(b"half")
    with pytest.raises(CheckpointError, match="run/last"):
        run(data, tmp_path / "run", resume=True, epochs=2)


def test_batch_larger_than_the_data(data: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="batch_size"):
        run(data, tmp_path / "run", batch_size=1000)


def test_early_stopping(data: Path, tmp_path: Path) -> None:
    progress = run(data, tmp_path / "run", epochs=30, patience=1, learning_rate=0.0)
    assert len(progress.history) == progress.best_epoch + 2 < 30  # the best, one more, then patience ends


def test_settings_say_what_is_wrong() -> None:
    with pytest.raises(SettingsError, match=r"--batch_size.*\b1\b.*\b2\b"):
        TrainingSettings(batch_size=1)
    with pytest.raises(SettingsError, match=r"--precision.*half.*bf16"):
        TrainingSettings(precision="half")  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match=r"learning_rat.*learning_rate"):
        from_json(TrainingSettings, {"learning_rat": 1})
    bare: Any = type("Bare", (), {"train_from": {}, "twin": None})()
    with pytest.raises(SettingsError, match="cuda_graphs"):
        session.start(bare, TrainingSettings(cuda_graphs=True), on_cpu=True)


def test_schedule() -> None:
    schedule = schedule_of(TrainingSettings(decay_epoch=3, decay_factor=0.1, warmup_epoch=1), 10)
    assert schedule.factor(5) == 1.0
    assert schedule.factor(10) == pytest.approx(0.1)
    assert schedule.factor(19) == 1.0
    assert schedule.factor(29) == 1.0
    assert schedule.factor(30) == pytest.approx(0.1)


def test_health_names_nan_with_its_step() -> None:
    watch = log.StepHealth(torch.device("cpu"))
    for step in range(1, 6):
        watch.watch(step, {"triplet": torch.tensor(float("nan") if step >= 3 else 1.0)}, None)
    with pytest.raises(TrainingError, match=r"\b3\b"):
        watch.report({"triplet": torch.tensor(float("nan"))}, None)


def test_health_names_collapse_once() -> None:
    watch = log.StepHealth(torch.device("cpu"))
    for step in range(log.COLLAPSE_STEPS - 1):
        watch.watch(step, {"triplet": torch.tensor(51.3)}, 51.2)
    assert watch.report({}, 51.2) == []
    watch.watch(999, {"triplet": torch.tensor(51.3)}, 51.2)
    assert "collapse" in watch.report({}, 51.2)[0]
    assert watch.report({}, 51.2) == []


def test_health_names_batch_norm_in_the_wrong_mode() -> None:
    frozen = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).requires_grad_(False).train()
    with pytest.raises(TrainingError, match=r"'0\.1'"):
        log.check_modes(torch.nn.Sequential(frozen, torch.nn.Linear(2, 2)))


def test_collapsed_value_follows_the_switch() -> None:
    from diptych.objectives.combine import SwitchAt
    from diptych.objectives.triplet import Triplet

    objective = SwitchAt(Triplet(0.2, negatives="all"), Triplet(0.2), epoch=1)
    start_epoch(objective, 0)
    assert objective.collapsed_value(128) is None
    start_epoch(objective, 1)
    assert objective.collapsed_value(128) == pytest.approx(51.2)


def test_full_disk_leaves_the_old_state(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from diptych.errors import StorageError
    from diptych.training import checkpoint

    run(data, tmp_path / "run", epochs=1)
    before = json.loads((tmp_path / "run" / "last" / "progress.json").read_text())

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(StorageError, match="run/last"):
        run(data, tmp_path / "run", epochs=2, resume=True)
    monkeypatch.undo()
    assert json.loads((tmp_path / "run" / "last" / "progress.json").read_text()) == before
    run(data, tmp_path / "run", epochs=2, resume=True)


def test_log_drops_lines_past_the_resumed_step(tmp_path: Path) -> None:
    from diptych.training.log import Log

    log = Log(tmp_path)
    for step in range(1, 6):
        log.write(step, {"loss": step})
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # a crash in the middle of a line
    Log(tmp_path, resumed_at=3)
    assert [line["step"] for line in read_log(tmp_path / "log.jsonl")] == [1, 2, 3]


def test_a_run_that_starts_again_starts_its_log_again(tmp_path: Path) -> None:
    from diptych.training.log import Log

    Log(tmp_path).write(0, {"epoch": -1})  # a closed form, killed before it was saved
    Log(tmp_path, resumed_at=0)
    assert len(read_log(tmp_path / "log.jsonl")) == 1
    Log(tmp_path)
    assert read_log(tmp_path / "log.jsonl") == []


def test_the_loss_scale_of_fp16_is_in_the_checkpoint(data: Path, tmp_path: Path) -> None:
    from diptych.data.held_out import training_splits
    from diptych.training.checkpoint import (
        Progress,
        gather_random,
        load_modules,
        load_rest,
        save_state,
        tensors_of,
    )
    from diptych.training.optim import build_optimizer

    settings = RECIPE.settings(**SMALL)
    method = RECIPE.build(settings, training_splits(open_captions(data))[0])
    optimizer = build_optimizer(method, settings)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    weight = torch.nn.Parameter(torch.ones(2))
    plain = torch.optim.SGD([weight], 0.1)
    for loss in (weight.sum(), weight.sum(), weight.sum() * float("inf")):  # grows once, then backs off
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(plain)
        scaler.update()
        plain.zero_grad()
    assert scaler.get_scale() == 1024.0 * 2 / 2
    scaler.update(2.0**7)
    save_state(tmp_path, tensors_of(method, optimizer), Progress(step=3), gather_random(1), scaler)
    other = torch.amp.GradScaler("cpu")
    load_modules(tmp_path, method)
    assert load_rest(tmp_path, method, optimizer, scaler=other).step == 3
    assert other.state_dict() == scaler.state_dict()
    assert other.get_scale() == 2.0**7
