"""Row kernels on a GPU; without one in Triton's interpreter (``pip install triton`` beside the CPU build of torch)."""

from __future__ import annotations

from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from diptych import ops
from diptych.objectives.soft_labels import divergence

# numpy computes what a mask leaves out
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
interpreted = pytest.mark.skipif(
    find_spec("triton") is None or torch.cuda.is_available(),
    reason="needs Triton, and no GPU, where the kernels are tested as they are",
)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    return import_module("diptych.kernels.rows")


@interpreted
@pytest.mark.parametrize("shape", [(12, 100), (5, 7), (3, 4, 30), (1, 1), (0, 16), (2, 1024)])
def test_unit_rows(kernel: Any, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    start, gradient = torch.randn(shape), torch.randn(shape)
    start[1:2] = 0
    x, y = start.clone().requires_grad_(), start.double().requires_grad_()
    found, expected = kernel.UnitRows.apply(x, 1e-8), ops.unit(y)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-7)
    (one,), (other,) = torch.autograd.grad(found, x, gradient), torch.autograd.grad(expected, y, gradient)
    torch.testing.assert_close(one.double(), other.double(), rtol=1e-5, atol=1e-6)


@interpreted
@pytest.mark.parametrize("kind", ["kl", "ce"])
@pytest.mark.parametrize("count", [1, 5, 40, 130])
def test_divergence(kernel: Any, count: int, kind: Any) -> None:
    torch.manual_seed(0)
    cosines, start = torch.rand(count, count), torch.rand(count, count) * 2 - 1
    fused = kernel.Divergence.apply
    for flip in (False, True):
        found = []
        for dtype in (torch.float32, torch.float64):
            scores = start.to(dtype).requires_grad_()
            tau = torch.tensor(0.31, dtype=dtype, requires_grad=True)
            given = cosines.to(dtype), scores.T if flip else scores, tau, 0.7
            value = fused(*given, kind == "kl") if dtype == torch.float32 else divergence(*given, kind)
            found.append((value, *torch.autograd.grad(count * value, [scores, tau])))
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)


@interpreted
def test_cosines_of_other_pairs_are_refused(kernel: Any) -> None:
    with pytest.raises(ValueError, match=r"cosines \(2, 2\) for scores \(3, 3\)"):
        kernel.Divergence.apply(torch.ones(2, 2), torch.ones(3, 3), torch.tensor(1.0), 1.0, True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernel runs on a GPU")
@pytest.mark.parametrize("shape", [(128, 1024), (5, 7), (3, 4, 300), (1, 1), (0, 16), (6, 8192), (6, 9000)])
def test_unit_rows_on_a_gpu(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    start, gradient = torch.randn(shape).cuda(), torch.randn(shape).cuda()
    start[1:2] = 0
    found = []
    for dtype in (torch.float32, torch.float64):
        x = start.to(dtype).requires_grad_()
        y = ops.unit(x)
        found.append((y, *torch.autograd.grad(y, x, gradient.to(dtype))))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)
