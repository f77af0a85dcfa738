"""Gradient caching: the plain step to the rounding of sums, in pieces."""

from __future__ import annotations

import copy
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import torchrun
from on_cpu import cpu_accelerator
from small import precomputed
from test_training import command, losses

from diptych.aggregators import Max, Mean
from diptych.data.images import RegionInput
from diptych.data.text import WordInput
from diptych.encoders.bigru import BiGRU
from diptych.encoders.cnn import PrecomputedGrid
from diptych.encoders.regions import Regions
from diptych.encoders.shared import Contextual, TokenTransformer
from diptych.errors import SettingsError
from diptych.model.retriever import Retriever, Tower
from diptych.model.twin import Twin
from diptych.objectives.contrastive import InfoNCE
from diptych.objectives.objective import Objective
from diptych.objectives.triplet import Triplet
from diptych.training.gradient_cache import CachedStep
from diptych.training.log import read_log
from diptych.training.method import Method
from diptych.training.step import Step
from diptych.types import Batch, Features

WORDS = ["<pad>", "<start>", "<end>", "<unk>", *"abcdefgh", "<mask>"]
PAIRS = 14


def batch(seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    cells = torch.randn(PAIRS, 5, 6, generator=generator, dtype=torch.float64)
    words = torch.randint(4, 12, (PAIRS, 7), generator=generator)
    sizes = torch.randint(2, 8, (PAIRS,), generator=generator)
    images = torch.arange(PAIRS) // 2 * 2  # two texts each
    return Batch(
        Features.whole(cells), Features(words, torch.arange(7) < sizes[:, None]), images, torch.arange(PAIRS)
    )


def stepper(objective: Objective, *, dropout: float = 0.0, twin: bool = False) -> Step:
    torch.manual_seed(0)
    shared = TokenTransformer(8, heads=2, feedforward=16, dropout=dropout)
    retriever = Retriever(
        Tower(Contextual(PrecomputedGrid(6, 8, drop=0.3 if dropout else 0.0), shared), Max()),
        Tower(Contextual(BiGRU(len(WORDS), 4, 8), shared), Mean()),
        RegionInput(6),
        WordInput(WORDS, augment=0),
    ).double()
    method = Method(
        retriever.train(), objective.double(), momentum=partial(Twin, precision="same") if twin else None
    )
    accelerator = cpu_accelerator()
    parameters = [*retriever.parameters(), *objective.parameters()]
    optimizer = accelerator.prepare_optimizer(torch.optim.SGD(parameters, lr=1.0))
    return Step(method, retriever, optimizer, accelerator, 2.0)


OBJECTIVES: dict[str, Any] = {
    "InfoNCE": lambda: InfoNCE(0.07),
    "learned temperature": lambda: InfoNCE(0.07, learned=True),
    "hardest": lambda: Triplet(0.2),
    "all": lambda: Triplet(0.2, negatives="all"),
}


@pytest.mark.parametrize("name", list(OBJECTIVES))
@pytest.mark.parametrize("micro", [1, 4, 5, 14, 100])
def test_a_cached_step_is_the_plain_step(name: str, micro: int) -> None:
    plain, cached = stepper(OBJECTIVES[name]()), stepper(OBJECTIVES[name]())
    work = CachedStep(cached, micro)
    for seed in range(2):
        expected, found = plain(batch(seed)), work(batch(seed))
        torch.testing.assert_close(found[0].image, expected[0].image, rtol=0, atol=1e-10)
        torch.testing.assert_close(found[0].text, expected[0].text, rtol=0, atol=1e-10)
        assert found[1].image_ids.tolist() == expected[1].image_ids.tolist()
        for term in expected[2]:
            torch.testing.assert_close(found[2][term], expected[2][term], rtol=1e-10, atol=0)
    for one, other in zip(plain.method.modules().values(), cached.method.modules().values(), strict=True):
        for (key, value), same in zip(one.named_parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(same, value, rtol=0, atol=1e-9, msg=key)


def test_plain_accumulation_would_be_another_step() -> None:
    """What the pieces alone would give: each its own small batch."""
    plain, wrong = stepper(InfoNCE(0.07)), stepper(InfoNCE(0.07))
    plain(batch())
    for start in range(0, PAIRS, 7):
        wrong(batch().map(lambda t, start=start: t[start : start + 7]))  # type: ignore[misc]
    pairs = zip(plain.method.retriever.parameters(), wrong.method.retriever.parameters(), strict=True)
    assert max((a - b).abs().max() for a, b in pairs) > 1e-3


def test_dropout_draws_the_same_twice() -> None:
    """With dropout, the gradient is that of the very vectors the objective saw."""
    cached = stepper(InfoNCE(0.5), dropout=0.3)
    before = copy.deepcopy(cached.method.retriever)
    torch.manual_seed(5)
    CachedStep(cached, 4)(batch())
    torch.manual_seed(5)
    before.zero_grad()
    pieces = [before(batch().map(lambda t, i=i: t[i : i + 4])) for i in range(0, PAIRS, 4)]  # type: ignore[misc]
    image, text = torch.cat([p.image for p in pieces]), torch.cat([p.text for p in pieces])
    whole = type(pieces[0])(image, text)
    sum(InfoNCE(0.5)(whole, batch()).values()).backward()  # type: ignore[union-attr]
    torch.nn.utils.clip_grad_norm_(before.parameters(), 2.0)
    for (key, start), now in zip(
        before.named_parameters(), cached.method.retriever.parameters(), strict=True
    ):
        assert start.grad is not None
        torch.testing.assert_close(now, start - start.grad, rtol=0, atol=1e-9, msg=key)


def test_the_twin_sees_every_piece() -> None:
    class AgainstTwin(Objective):
        def forward(self, embeddings: Any, batch: Batch) -> Any:
            return {"distance": (embeddings.image - embeddings.views["twin"].text).square().sum()}

    plain, cached = stepper(AgainstTwin(), twin=True), stepper(AgainstTwin(), twin=True)
    expected, found = plain(batch()), CachedStep(cached, 3)(batch())
    torch.testing.assert_close(found[2]["distance"], expected[2]["distance"])
    for one, other in zip(
        plain.method.retriever.parameters(), cached.method.retriever.parameters(), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


def test_batch_statistics_are_refused() -> None:
    step = stepper(InfoNCE())
    step.method.retriever.image.encoder = Regions(6, 8).double()
    with pytest.raises(SettingsError, match=r"image\.encoder\.norm"):
        CachedStep(step, 4)


def test_two_processes_in_pieces_match_one_whole(tmp_path: Path) -> None:
    data = precomputed(tmp_path / "toy_precomp")
    flags = [
        "--epochs=1", "--size_augmentation=none", "--image_encoder=grid", "--objective=info_nce", "--log_steps=1",
    ]  # fmt: skip
    one, two = tmp_path / "one", tmp_path / "two"
    subprocess.run(command(data, one, f"--output_dir={one}", *flags), check=True, capture_output=True)
    torchrun(*command(data, two, f"--output_dir={two}", *flags, "--micro_batch=2")[3:])
    assert losses(two) == pytest.approx(losses(one), rel=1e-4)


def test_pieces_and_processes_see_every_look(tmp_path: Path) -> None:
    """Clean and augmented looks of two processes, gathered: in pieces as in one go."""
    data = precomputed(tmp_path / "toy_precomp")
    flags = ["--epochs=1", "--batch_size=12", "--dim=16", "--heads=2", "--min_count=1", "--word_dim=8", "--log_steps=1",
             "--image_encoder=grid", "--dropout=0", "--learning_rate=0.01"]  # fmt: skip
    found = {}
    for name, further in (("whole", []), ("pieces", ["--micro_batch=4"])):
        torchrun("train", "cookie", f"--data={data}", f"--output_dir={tmp_path / name}", *flags, *further)
        lines = read_log(tmp_path / name / "log.jsonl")
        found[name] = [
            [line[term] for term in ("cross", "visual", "textual")] for line in lines if "cross" in line
        ]
    assert len(found["whole"]) == 10
    assert found["pieces"] == [pytest.approx(line, rel=1e-4) for line in found["whole"]]


def test_the_command_line_refuses_batch_statistics(tmp_path: Path) -> None:
    data = precomputed(tmp_path / "toy_precomp")
    done = subprocess.run(
        [sys.executable, "-m", "diptych", "train", "vse-infinity", f"--data={data}", f"--output_dir={tmp_path / 'run'}",
         "--batch_size=12", "--min_count=1", "--dim=8", "--micro_batch=2"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    assert "--micro_batch cannot be combined with BatchNorm" in done.stderr
