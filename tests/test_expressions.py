"""Objectives by name: sums with weights equal their parts, and mistakes are named."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from diptych.errors import SettingsError
from diptych.objectives.contrastive import InfoNCE
from diptych.objectives.expressions import OBJECTIVES, parse_objective
from diptych.objectives.objective import Objective
from diptych.objectives.triplet import Triplet
from diptych.types import Batch, Embeddings, Features

SETTINGS = SimpleNamespace(margin=0.3, mask_same_image=True, all_negatives_epochs=0)


def seen() -> tuple[Embeddings, Batch]:
    g = torch.Generator().manual_seed(0)
    rows = torch.nn.functional.normalize(torch.randn(2, 5, 8, generator=g), dim=-1)
    nothing = Features.whole(torch.zeros(5, 1))
    ids = torch.tensor([0, 1, 1, 2, 3])
    teachers = {
        "teacher_image": torch.randn(5, 4, generator=g),
        "teacher_text": torch.randn(5, 3, generator=g),
    }
    views = {"uni": Embeddings(rows[1], rows[0])}
    return Embeddings(rows[0], rows[1], views=views), Batch(nothing, nothing, ids, torch.arange(5), teachers)


def test_a_sum_is_the_sum_of_its_weighted_parts() -> None:
    embeddings, batch = seen()
    own = Triplet(0.1)
    terms = parse_objective("own + 0.5*info_nce+2 * triplet", own, SETTINGS)(embeddings, batch)
    assert set(terms) == {"own", "info_nce", "triplet"}
    assert torch.equal(terms["own"], own(embeddings, batch)["triplet"])
    expected = InfoNCE(0.07, learned=True)(embeddings, batch)["info_nce"]
    torch.testing.assert_close(terms["info_nce"], 0.5 * expected)
    torch.testing.assert_close(terms["triplet"], 2 * Triplet(0.3)(embeddings, batch)["triplet"])


def test_own_alone_is_the_recipes_object() -> None:
    own = Triplet()
    assert parse_objective("own", own, SETTINGS) is own
    assert isinstance(parse_objective("info_nce", own, SETTINGS), InfoNCE)


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_every_named_objective_gives_a_finite_loss(name: str) -> None:
    embeddings, batch = seen()
    objective = parse_objective(name, Triplet(), SimpleNamespace())
    assert isinstance(objective, Objective)
    assert all(value.isfinite() for value in objective(embeddings, batch).values())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("info_nec", "did you mean info_nce"),
        ("quux", "choose own, triplet"),
        ("own + ", "cannot be read at ''"),
        ("own - dcl", "cannot be read"),
        ("dcl + 2*dcl", "'dcl' twice"),
    ],
)
def test_mistakes_are_named(text: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        parse_objective(text, Triplet(), SETTINGS)
