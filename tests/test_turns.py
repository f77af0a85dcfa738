"""Alternating steps: the same losses in one process, in several, and in pieces; what has no turn does not move."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from commands import diptych, flags, torchrun
from test_labelwise import TINY, label_data
from test_training import losses
from torch import nn

from diptych.training.step import backward_of_turn, leaves

ALTERNATE = {
    **TINY, "interactive": "alternate", "dropout": 0, "context_weight": 0, "epochs": 2, "learning_rate": 1e-2,
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = label_data(tmp_path_factory.mktemp("turns") / "toy")
    return f"{folder}?instances={folder}"


@pytest.fixture(scope="module")
def alone(data: str, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    run = tmp_path_factory.mktemp("alone")
    diptych("train", "labelwise", "--data", data, "--output_dir", run, *flags(ALTERNATE))
    return losses(run)


@pytest.mark.parametrize("pieces", [0, 2])
def test_two_processes_alternate_as_one(pieces: int, data: str, alone: list[float], tmp_path: Path) -> None:
    changes = flags({**ALTERNATE, "micro_batch": pieces})
    torchrun("train", "labelwise", "--data", data, "--output_dir", str(tmp_path / "two"), *map(str, changes))
    assert len(alone) == 30
    assert losses(tmp_path / "two") == pytest.approx(alone, rel=1e-4)


def test_pieces_alternate_as_the_whole(data: str, alone: list[float], tmp_path: Path) -> None:
    changes = flags({**ALTERNATE, "micro_batch": 3})
    diptych("train", "labelwise", "--data", data, "--output_dir", tmp_path / "run", *changes)
    assert losses(tmp_path / "run") == pytest.approx(alone, rel=1e-4)


def test_two_processes_mask_and_alternate(data: str, tmp_path: Path) -> None:
    """Which words are masked differs between processes, so that the losses are other ones."""
    changes = map(str, flags({**ALTERNATE, "context_weight": 0.1, "epochs": 1}))
    said = torchrun("train", "labelwise", "--data", data, "--output_dir", str(tmp_path / "two"), *changes)
    assert "best validation NDCG" in said


def test_what_a_loss_does_not_reach_keeps_no_gradient() -> None:
    shared, image, text = (nn.Linear(2, 2) for _ in range(3))
    x = torch.randn(3, 2)
    seen, read = shared(image(x)), shared(text(x))
    loss = seen.square().sum()
    parameters = [*shared.parameters(), *image.parameters(), *text.parameters()]
    assert leaves([loss]) == {id(p) for p in [*shared.parameters(), *image.parameters()]}
    assert leaves([x]) == set()
    expected = torch.autograd.grad(loss, [*shared.parameters(), *image.parameters()], retain_graph=True)
    met: set[int] = set()
    for parameter in parameters:
        parameter.register_hook(lambda gradient, p=parameter: met.add(id(p)))
    backward_of_turn(torch.Tensor.backward, loss, [seen, read], parameters)
    assert met == {id(p) for p in parameters}  # several processes wait for every one
    for parameter, gradient in zip([*shared.parameters(), *image.parameters()], expected, strict=True):
        assert torch.equal(parameter.grad, gradient)
    assert all(parameter.grad is None for parameter in text.parameters())
