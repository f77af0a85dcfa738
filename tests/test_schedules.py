"""Schedules: pure functions of the step, each against its definition, and what may change on resuming."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from diptych.recipes import RECIPES
from diptych.runs.train import resumed_settings
from diptych.settings import UNCHANGED, TrainingSettings, from_saved, to_json
from diptych.training.checkpoint import RunCard, check_resumable
from diptych.training.optim import (
    depends_on_epochs,
    schedule_of,
)


def test_step_decay() -> None:
    schedule = schedule_of(TrainingSettings(schedule="step", decay_epoch=2, decay_factor=0.1), 4)
    factors = [schedule.factor(step) for step in range(12)]
    assert factors == [1.0] * 8 + [0.1] * 4


def test_decay_every_few_epochs() -> None:
    schedule = schedule_of(TrainingSettings(schedule="every", decay_every=3, decay_factor=0.7), 2)
    assert [schedule.factor(2 * epoch) for epoch in (0, 2, 3, 5, 6)] == pytest.approx([1, 1, 0.7, 0.7, 0.49])


@pytest.mark.parametrize("per_epoch", [False, True])
def test_cosine_is_torchs(per_epoch: bool) -> None:
    epochs, steps, final = 5, 3, 0.1
    settings = TrainingSettings(
        epochs=epochs, schedule="cosine", final_factor=final, schedule_per_epoch=per_epoch
    )
    schedule = schedule_of(settings, steps)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    length = epochs if per_epoch else epochs * steps
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, length, eta_min=final)
    for step in range(epochs * steps):
        assert schedule.factor(step) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if not per_epoch or step % steps == steps - 1:
            theirs.step()


def test_a_line_and_a_rise() -> None:
    base = TrainingSettings(epochs=2, schedule="linear", warmup_share=0.2)
    schedule = schedule_of(base, 10)
    assert [schedule.factor(step) for step in range(4)] == pytest.approx(
        [(step + 1) / 4 * (1 - step / 20) for step in range(4)]
    )
    assert schedule.factor(10) == pytest.approx(0.5)
    assert schedule_of(replace(base, final_factor=0.2), 10).factor(20) == pytest.approx(0.2)


def test_settings_choose_the_schedule() -> None:
    base = TrainingSettings(epochs=4, schedule="cosine", final_factor=0.1, warmup_share=0.25)
    schedule = schedule_of(base, 8)
    assert schedule.warmup_steps == 8
    assert schedule.factor(31) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * 31 / 32)) / 2)
    assert depends_on_epochs(base)
    assert not depends_on_epochs(replace(base, schedule="every", warmup_share=0.0))
    assert schedule_of(TrainingSettings(), 8).factor(0) == 1.0


def xvlm_factor(step: int, steps: int, warmup: float) -> float:
    """The schedule as X-VLM describes it: a line from 0 to 1 over int(share · steps) steps, then a line to 0."""
    rising = int(steps * warmup)
    if step < rising:
        return step / max(1, rising)
    return max(0.0, (steps - step) / max(1, steps - rising))


@pytest.mark.parametrize(("epochs", "steps_per_epoch"), [(10, 100), (3, 7), (1, 4), (20, 33)])
def test_fusion_follows_x_vlm(epochs: int, steps_per_epoch: int) -> None:
    """Falling from step 0 instead of the end of the warm-up gives 0.9 at its end, and fails here."""
    for recipe in ("fusion", "cusa-fusion"):
        settings = RECIPES[recipe].settings(epochs=epochs)
        schedule, steps = schedule_of(settings, steps_per_epoch), epochs * steps_per_epoch
        for step in range(steps):
            assert abs(schedule.factor(step) - xvlm_factor(step, steps, 0.1)) < 1e-12
    old = replace(RECIPES["fusion"].settings(epochs=10), decay_after_warmup=False)
    assert schedule_of(old, 100).factor(100) == pytest.approx(0.9)


def test_cookie_reaches_its_full_rate() -> None:
    schedule = schedule_of(RECIPES["cookie"].settings(epochs=4), 50)
    for step in range(200):
        expected = step / 20 if step < 20 else (1 + math.cos(math.pi * (step - 20) / 180)) / 2
        assert abs(schedule.factor(step) - expected) < 1e-12


FUSION = {
    "decay_after_warmup": False,
    "adam_beta2": 0.999,
    "clean_captions": False,
    "augmentation": "window",
}
NEWER: dict[str, dict[str, object]] = {
    "fusion": FUSION,
    "cusa-fusion": FUSION,
    "cookie": {"decay_after_warmup": False},
    "labelwise": {"authors_encoder": False},
    "cookie-hash": {"split_labels": False},
}
"""What a run means that was saved before these settings existed."""


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_saved_runs_keep_the_form_they_were_made_with(recipe: str, tmp_path: Path) -> None:
    kind, newer = RECIPES[recipe].settings, NEWER.get(recipe, {})
    older = {f.name for f in fields(kind) if f.metadata["before"] is not UNCHANGED}
    assert older == set(newer)
    saved = {name: value for name, value in to_json(kind()).items() if name not in newer}
    RunCard(recipe, kind(), "d", "0").save(tmp_path)
    run = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**run, "settings": saved}))
    before = resumed_settings(RECIPES[recipe], tmp_path, {})
    assert to_json(before) == {**saved, **newer}
    check_resumable(tmp_path, RunCard(recipe, before, "d", "0"))
    assert from_saved(kind, to_json(kind())) == kind()  # what a newer run says counts
