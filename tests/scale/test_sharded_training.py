"""A model divided over two processes (FSDP2) trains as one process does, resumes, and leaves ordinary files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import free_port, on_two_processes, torchrun, training, wait_for_steps
from safetensors.torch import load_file
from small import bert_folder, photos, precomputed

from diptych.model.retriever import Retriever
from diptych.training.log import read_log

PLAIN = {"size_augmentation": "none", "image_encoder": "grid"}  # nothing random, no BatchNorm


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return precomputed(tmp_path_factory.mktemp("data") / "toy_precomp", train=24)


def command(recipe: str, data: Path, run: Path, **changes: object) -> list[str]:
    words = training(recipe, data, **{**PLAIN, **changes})
    return [str(word) for word in (*words, f"--output_dir={run}")]


def alone(words: list[str]) -> None:
    subprocess.run([sys.executable, "-m", "diptych", *words], check=True, capture_output=True)


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in read_log(run / "log.jsonl") if "loss" in line]


def weights(run: Path, name: str = "retriever") -> dict[str, torch.Tensor]:
    return load_file(run / "last" / f"{name}.safetensors")


def assert_equal(one: Path, two: Path, within: float) -> None:
    assert losses(two) == pytest.approx(losses(one), rel=within)
    for name in ("retriever", "optimizer", "objective"):
        first, second = weights(one, name), weights(two, name)
        assert first.keys() == second.keys()
        for key, value in first.items():
            assert value.shape == second[key].shape, key
    for key, value in weights(one).items():
        torch.testing.assert_close(weights(two)[key], value, atol=within, rtol=within, msg=key)


@pytest.mark.parametrize("recipe", ["vse-infinity", "coder"])
def test_a_divided_model_trains_as_one_process_does(recipe: str, data: Path, tmp_path: Path) -> None:
    """Two epochs: with CODER, twin, queue, concepts and prototypes take part."""
    one, two = tmp_path / "one", tmp_path / "two"
    alone(command(recipe, data, one))
    torchrun(*command(recipe, data, two), "--shard_model")
    assert_equal(one, two, 1e-5)
    model = Retriever.from_pretrained(two)  # the ordinary folder
    assert type(model) is Retriever
    again = Retriever.from_pretrained(one)
    words = ["a red dog near the house", "two cats"]
    torch.testing.assert_close(model.encode_text(words), again.encode_text(words), atol=1e-5, rtol=0)


def test_gradient_caching_under_it_and_resuming_after_a_kill(data: Path, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    given = {"text_encoder": bert_folder(tmp_path / "bert"), "epochs": 4, "save_steps": 3}
    flags = ("--shard_model", "--micro_batch=4")
    torchrun(*command("vse-infinity", data, whole, **given), *flags)
    process = start_several(*command("vse-infinity", data, broken, **given), *flags)
    wait_for_steps(broken, 14)
    kill_all(process)
    at = json.loads((broken / "last" / "progress.json").read_text())["step"]
    assert 0 < at < len(losses(whole)) == 40
    torchrun("train", "vse-infinity", f"--resume_from_checkpoint={broken}")
    assert losses(broken) == losses(whole)
    for name in ("retriever", "optimizer"):
        a, b = weights(whole, name), weights(broken, name)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a), name


def test_caching_and_sharding_equal_the_plain_step_of_one_process(data: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    alone(command("coder", data, one, epochs=2))
    torchrun(*command("coder", data, two, epochs=1), "--shard_model", "--micro_batch=4")
    # a divided run goes on undivided, and the other way round
    torchrun(
        "train",
        "coder",
        f"--resume_from_checkpoint={two}",
        "--epochs=2",
        "--no_shard_model",
        "--micro_batch=0",
    )
    assert_equal(one, two, 1e-5)


def test_a_part_that_waits_stays_as_it_was(tmp_path: Path) -> None:
    """A backbone that is trained from epoch 1 on: FSDP keeps its gradients, and the step drops them."""
    folder = photos(tmp_path / "photos", count=14)
    given = {"image_encoder": "lite0", "train_backbone": True, "image_size": 32, "batch_size": 4, "dim": 8}
    one, two = tmp_path / "copies", tmp_path / "shares"
    for run, flag in ((one, "--no_shard_model"), (two, "--shard_model")):  # pictures are cropped by process
        words = command("vse-infinity", folder, run, **{**given, "epochs": 2})
        torchrun(*(word.replace("--train_backbone=True", "--train_backbone") for word in words), flag)
    assert losses(two) == pytest.approx(losses(one), rel=1e-4)
    first = torch.cat([value.flatten() for value in weights(one).values()])
    second = torch.cat([value.flatten() for value in weights(two).values()])
    torch.testing.assert_close(second, first, atol=2e-4, rtol=0)


def test_clipping_counts_shares_and_whole_gradients_together() -> None:
    said = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}",
         str(Path(__file__).parents[1] / "clip_two_processes.py")],
        capture_output=True, text=True, timeout=120, check=True,
    ).stdout  # fmt: skip
    assert said.count("equal") == 2


def start_several(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        on_two_processes(*words),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def kill_all(process: subprocess.Popen[str]) -> None:
    """End torchrun and its processes, which have sessions of their own, all without a word."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for pid in (process.pid, *map(int, children)):
        os.kill(pid, signal.SIGKILL)
    process.communicate()
