"""Which device a model runs on, and the sentences for devices that are not there."""

from __future__ import annotations

import pytest
import torch

from diptych.devices import autocast, describe_device, pick_device, pick_precision
from diptych.errors import SettingsError


def test_auto_takes_cuda_or_the_cpu_and_never_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert pick_device() == pick_device("auto") == torch.device("cpu")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert pick_device() == pick_device("auto") == torch.device("cpu")
    assert pick_device("mps") == torch.device("mps")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick_device() == torch.device("cuda")
    assert pick_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "mps"])
def test_a_device_that_is_not_there_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(SettingsError, match="--device"):
        pick_device(name)


def test_a_number_beyond_the_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SettingsError, match=r"\b1\b"):
        pick_device("cuda:3")


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "tpu"])
def test_an_unknown_device_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match="cuda:1"):
        pick_device(name)


def test_precision() -> None:
    cpu = torch.device("cpu")
    assert pick_precision("bf16", cpu) == "bf16"
    assert [pick_precision("half", torch.device(kind)) for kind in ("cpu", "cuda", "mps")] == [
        "bf16",
        "fp16",
        "fp16",
    ]
    with pytest.raises(SettingsError, match="'no'"):
        pick_precision("fp16", cpu)
    with pytest.raises(SettingsError, match="'fp8'"):
        pick_precision("fp8", cpu)
    with autocast(cpu, "bf16"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    with autocast(cpu, "no"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    assert describe_device(cpu) == "cpu"
