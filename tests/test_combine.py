"""Sums of objectives, and switches between them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from diptych.errors import SettingsError
from diptych.objectives.combine import On, Parted, Ramp, Sum, SwitchAt
from diptych.objectives.contrastive import InfoNCE
from diptych.objectives.objective import Objective, after_epoch, after_step, start_epoch
from diptych.objectives.soft_labels import (
    IMAGE_TEACHER,
    TEXT_TEACHER,
    UNI,
    CrossModalSoftLabels,
    UniModalSoftLabels,
)
from diptych.objectives.triplet import Triplet
from diptych.ops import unit
from diptych.training.step import path_of
from diptych.types import Batch, Embeddings, Features, Terms


class Fixed(Objective):
    """Returns constant terms and writes down what it was told."""

    def __init__(self, **terms: float) -> None:
        super().__init__()
        self.terms, self.heard = terms, list[object]()

    def forward(self, embeddings: Embeddings, batch: Batch) -> Terms:
        return {name: torch.tensor(value) for name, value in self.terms.items()}

    def start_epoch(self, epoch: int) -> None:
        self.heard.append(("start", epoch))

    def after_step(self, embeddings: Embeddings, batch: Batch) -> None:
        self.heard.append("step")

    def after_epoch(self, epoch: int) -> None:
        self.heard.append(("end", epoch))


NOTHING = Features.whole(torch.zeros(3, 1, 1))
BATCH = Batch(NOTHING, NOTHING, torch.arange(3), torch.arange(3))
EMBEDDINGS = Embeddings(torch.eye(3), torch.eye(3))


def values(objective: Objective) -> dict[str, float]:
    return {name: term.item() for name, term in objective(EMBEDDINGS, BATCH).items()}


def test_a_sum_weights_and_names_every_term() -> None:
    total = Sum({"one": (Fixed(loss=2.0), 0.5), "two": (Fixed(left=1.0, right=3.0), 10.0)})
    assert values(total) == {"one": 1.0, "two.left": 10.0, "two.right": 30.0}


def test_every_member_of_a_sum_hears_the_hooks() -> None:
    members = Fixed(a=1.0), Fixed(b=1.0)
    total = Sum({"first": (members[0], 1.0), "second": (members[1], 1.0)})
    start_epoch(total, 4)
    after_step(total, EMBEDDINGS, BATCH)
    after_epoch(total, 4)
    for member in members:
        assert member.heard == [("start", 4), "step", ("end", 4)]


def test_a_switch_depends_on_the_epoch_alone() -> None:
    switch = SwitchAt(Fixed(before=1.0), Fixed(after=2.0), epoch=2)
    assert values(switch) == {"before": 1.0}
    for epoch, expected in ((0, "before"), (1, "before"), (2, "after"), (7, "after"), (1, "before")):
        start_epoch(switch, epoch)
        assert list(values(switch)) == [expected]
    resumed = SwitchAt(Fixed(before=1.0), Fixed(after=2.0), epoch=2)
    start_epoch(resumed, 3)
    assert list(values(resumed)) == ["after"]
    assert list(values(SwitchAt(Fixed(before=1.0), Fixed(after=2.0), epoch=0))) == ["after"]


def test_only_the_objective_in_force_hears_of_a_step() -> None:
    first, then = Fixed(a=1.0), Fixed(b=1.0)
    switch = SwitchAt(first, then, epoch=1)
    for epoch in (0, 1):
        start_epoch(switch, epoch)
        after_step(switch, EMBEDDINGS, BATCH)
        after_epoch(switch, epoch)
    assert first.heard == [("start", 0), "step", ("end", 0), ("start", 1), ("end", 1)]
    assert then.heard == [("start", 0), ("end", 0), ("start", 1), "step", ("end", 1)]


def test_hooks_reach_objectives_inside_any_objective() -> None:
    class Plain(Objective):
        """Of a plugin: holds others in a list and passes nothing on."""

        def __init__(self, *members: Objective) -> None:
            super().__init__()
            self.inner = nn.ModuleList(members)

    one, two = Fixed(a=1.0), Fixed(b=1.0)
    outer = Ramp(Sum({"plain": (Plain(one, two), 1.0)}), epoch=0, steps=2)
    start_epoch(outer, 0)
    after_step(outer, EMBEDDINGS, BATCH)
    after_epoch(outer, 0)
    assert one.heard == two.heard == [("start", 0), "step", ("end", 0)]
    assert int(outer.position) == 1


def test_a_step_ends_with_the_rows_that_the_objective_saw() -> None:
    rows: list[Embeddings] = []

    class Seeing(Fixed):
        def after_step(self, embeddings: Embeddings, batch: Batch) -> None:
            rows.append(embeddings)

    concept = Embeddings(torch.ones(3, 3), torch.zeros(3, 3))
    after_step(On(Seeing(), "concept"), replace(EMBEDDINGS, views={"concept": concept}), BATCH)
    assert (rows[0].image is concept.image, rows[0].text is concept.text) == (True, True)


def test_the_path_changes_with_the_switch_also_inside_a_sum() -> None:
    switch = SwitchAt(Triplet(negatives="all"), Triplet(), epoch=1)
    total = Sum({"triplet": (switch, 1.0), "other": (Triplet(0.3), 1.0)})
    seen = []
    for epoch in range(3):
        start_epoch(total, epoch)
        seen.append((path_of(switch), path_of(total), switch.collapsed_value(128)))
    assert seen[0][0] != seen[1][0]
    assert seen[0][1] != seen[1][1]
    assert seen[1] == seen[2]
    assert seen[0][2] is None
    assert seen[1][2] == pytest.approx(51.2)


def test_objectives_inside_are_submodules() -> None:
    inner = Triplet()
    total = Sum({"triplet": (SwitchAt(inner, Triplet(), epoch=1), 1.0)})
    assert inner in total.modules()


def test_a_sum_knows_its_collapsed_value_when_all_members_do() -> None:
    known = Sum({"one": (Triplet(0.2), 3.0), "two": (Triplet(0.1), 1.0)})
    assert known.collapsed_value(8) == pytest.approx(3 * 2 * 8 * 0.2 + 2 * 8 * 0.1)
    assert Sum({"one": (Triplet(0.2), 3.0), "two": (Fixed(a=1.0), 1.0)}).collapsed_value(8) is None


def test_parts_of_a_batch_are_what_several_gpus_compute() -> None:
    """CUSA's losses on 12 pairs in 3 parts: the mean of three losses of 4 pairs each, values and gradients."""
    torch.manual_seed(0)
    rows = {name: torch.randn(12, 5, dtype=torch.float64) for name in ("a", "b", "c", "d", "x", "y")}
    ids = torch.tensor([0, 0, 1, 2, 3, 3, 4, 5, 0, 1, 6, 7])

    def seen(part: slice) -> tuple[Embeddings, Batch, list[torch.Tensor]]:
        own = {name: unit(value[part]).requires_grad_() for name, value in rows.items()}
        targets = {IMAGE_TEACHER: own["x"].detach(), TEXT_TEACHER: own["y"].detach()}
        nothing = Features.whole(torch.zeros(len(own["a"]), 1, 1))
        batch = Batch(nothing, nothing, ids[part], torch.arange(12)[part], targets)
        views = {UNI: Embeddings(own["c"], own["d"])}
        return Embeddings(own["a"], own["b"], views=views), batch, [own[name] for name in "abcd"]

    losses = Sum(
        {
            "hard": (InfoNCE(0.05, learned=True, clamp=(0.01, 0.1), reduction="per_entry"), 1.0),
            "csa": (CrossModalSoftLabels(), 0.1),
            "usa": (UniModalSoftLabels(), 0.5),
        }
    )
    embeddings, batch, leaves = seen(slice(None))
    parted = Parted(losses, 3)
    terms = parted(embeddings, batch)
    torch.stack(list(terms.values())).sum().backward()
    means = dict.fromkeys(terms, 0.0)
    for start in (0, 4, 8):
        alone, part, own = seen(slice(start, start + 4))
        found = losses(alone, part)
        means = {name: means[name] + value.item() / 3 for name, value in found.items()}
        torch.stack(list(found.values())).sum().backward()
        for whole, one in zip(leaves, own, strict=True):
            assert torch.allclose(whole.grad[start : start + 4], one.grad / 3, rtol=0, atol=1e-12)
    assert {name: value.item() for name, value in terms.items()} == pytest.approx(means, abs=1e-12)
    assert losses(embeddings, batch)["hard"].item() != pytest.approx(means["hard"], rel=1e-2)
    with pytest.raises(SettingsError, match="12 pairs"):
        Parted(losses, 5)(embeddings, batch)
