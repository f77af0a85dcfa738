"""Objectives by name: sums with weights equal their parts, and mistakes are named."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from diptych.objectives.combine import On
from diptych.objectives.contrast import Contrast
from diptych.objectives.contrastive import InfoNCE
from diptych.objectives.diversity import DiversityContrast
from diptych.objectives.expressions import parse_objective
from diptych.objectives.objective import needs_of
from diptych.objectives.soft_labels import CrossModalSoftLabels
from diptych.objectives.triplet import Triplet
from diptych.registries import OBJECTIVES
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


ELSEWHERE = (
    "itc",
    "itm",
    "label",
    "consistency",
    "masked",
    "csq",
    "visual",
    "textual",
    "m_dcl",
    "prototypes",
)
"""Terms that read what only some models make, or that count after the first step; tests/test_compose.py trains them."""


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name not in ELSEWHERE])
def test_a_step_down_every_named_objective_lowers_it_from_both_sides(name: str) -> None:
    seen_, batch = seen()
    objective = parse_objective(name, Triplet(), SimpleNamespace())
    sides = [seen_.image.clone().requires_grad_(), seen_.text.clone().requires_grad_()]

    def loss() -> torch.Tensor:
        image, text = (torch.nn.functional.normalize(side, dim=-1) for side in sides)
        embeddings = Embeddings(image, text, views={"uni": Embeddings(text, image)})
        return sum(objective(embeddings, batch).values(), torch.zeros(()))

    before = loss()
    before.backward()
    with torch.no_grad():
        for side in sides:
            assert side.grad is not None
            assert side.grad.abs().max() > 1e-4
            side -= 0.01 * side.grad
        assert loss() < before


def test_arguments_reach_the_objective_and_views_its_rows() -> None:
    embeddings, batch = seen()
    text = "dcl(epsilon=0.4, diversity=std_reversed) + 0.5*dcl_i(view=uni) + csa(learned=false, mode=add)"
    terms = parse_objective(text, Triplet(), SETTINGS)(embeddings, batch)
    assert set(terms) == {"dcl", "dcl_i_uni", "csa"}
    contrast = Contrast(epsilon=0.4, diversity="std_reversed")
    assert torch.equal(terms["dcl"], DiversityContrast(contrast)(embeddings, batch)["diversity"])
    other = On(DiversityContrast(Contrast(diversity="none")), "uni")(embeddings, batch)
    assert torch.equal(terms["dcl_i_uni"], 0.5 * other["diversity"])
    soft = CrossModalSoftLabels(learned=False, mode="add")(embeddings, batch)
    assert torch.equal(terms["csa"], soft["csa"])


def test_a_term_may_stand_twice_with_other_arguments() -> None:
    found = parse_objective("dcl(epsilon=0.1) + dcl(epsilon=0.2)", Triplet(), SETTINGS)
    assert set(found(*seen())) == {"dcl", "dcl_2"}


def test_concepts_are_the_branch_of_that_name() -> None:
    assert needs_of(parse_objective("dcl(view=concepts)", Triplet(), SETTINGS)) == [
        "concept.image",
        "concept.text",
    ]
