"""CVSE as VSE∞ repairs it: the consensus level against a loop written from docs/methods-baselines.md, in float64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import diptych
from small import precomputed
from torch import Tensor

from diptych.branches.consensus import ConceptWords, ConsensusBranch, WordStates
from diptych.data.formats import open_captions
from diptych.data.held_out import training_splits
from diptych.encoders.bigru import BiGRU
from diptych.errors import SettingsError
from diptych.model.retriever import Retriever
from diptych.objectives.soft_labels import Agreement
from diptych.recipes import RECIPES, cvse
from diptych.runs.train import seed_everything
from diptych.training.method import Method
from diptych.types import Batch, Embeddings, Features

DIM, CONCEPTS, WIDTH, PAIRS = 6, 5, 4, 3
SHARES: dict[str, float] = {"label_share": 0.35, "instance_share": 0.85, "fused_share": 0.95}


def branch_of(**changes: Any) -> ConsensusBranch:
    torch.manual_seed(0)
    made = ConsensusBranch(list("abcde"), DIM, WIDTH, **{**SHARES, **changes}).double()
    made.vectors.normal_()
    made.adjacency.uniform_()
    for norm in made.modules():
        if isinstance(norm, torch.nn.BatchNorm1d):
            norm.running_mean.normal_(std=0.1)
            norm.running_var.uniform_(0.5, 1.5)
            torch.nn.init.normal_(norm.weight)
            torch.nn.init.normal_(norm.bias)
    return made.eval()


def seen_by(seed: int = 1) -> Embeddings:
    made = torch.Generator().manual_seed(seed)
    rows = [torch.randn(PAIRS, DIM, generator=made, dtype=torch.float64) for _ in range(2)]
    rows = [row / row.norm(dim=1, keepdim=True) for row in rows]
    z = torch.tensor([[1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [0, 1, 0, 0, 0]])
    plain = Features.whole(torch.zeros(PAIRS, 1, DIM))
    return Embeddings(rows[0], rows[1], plain, WordStates(plain.values, plain.mask, z))


def unit(x: list[Tensor]) -> list[Tensor]:
    length = sum(a * a for a in x) ** 0.5 + 1e-8
    return [a / length for a in x]


def softmax(x: list[Tensor]) -> list[Tensor]:
    top = [torch.exp(a) for a in x]
    return [a / sum(top) for a in top]


def product(weight: Tensor, x: list[Tensor]) -> list[Tensor]:
    return [sum(w * a for w, a in zip(row, x, strict=True)) for row in weight]


def norm(layer: torch.nn.BatchNorm1d, x: list[Tensor]) -> list[Tensor]:
    assert layer.running_mean is not None
    assert layer.running_var is not None
    numbers = zip(x, layer.running_mean, layer.running_var, layer.weight, layer.bias, strict=True)
    return [(a - m) / (v + 1e-5) ** 0.5 * s + b for a, m, v, s, b in numbers]


def slow_concepts(branch: ConsensusBranch) -> list[list[Tensor]]:
    """Y = unit(Ã ρ(Ã X W₁) W₂)."""

    def mixed(rows: list[list[Tensor]]) -> list[list[Tensor]]:
        return [
            [sum(a * row[c] for a, row in zip(weights, rows, strict=True)) for c in range(len(rows[0]))]
            for weights in branch.adjacency
        ]

    first, second = branch.layers
    hidden = [product(first.weight, row) for row in mixed([list(row) for row in branch.vectors])]
    hidden = [[a if a > 0 else 0.2 * a for a in row] for row in hidden]
    return [unit(product(second.weight, row)) for row in mixed(hidden)]


def slow_side(
    branch: ConsensusBranch, side: str, x: Tensor, z: Tensor | None, mutation: str = ""
) -> dict[str, Tensor]:
    query, attention = getattr(branch, f"{side}_query"), getattr(branch, f"{side}_attention")
    y = slow_concepts(branch)
    asked = [torch.tanh(a) for a in norm(attention.query_norm, product(query.weight, list(x)))]
    a = []
    for row in y:
        answer = [torch.tanh(k) for k in norm(attention.key_norm, product(attention.key.weight, row))]
        gates = [k * q for k, q in zip(answer, asked, strict=True)]
        a.append(sum(w * g for w, g in zip(attention.common.weight[0], gates, strict=True)))
    p = softmax([10 * one for one in a])
    if z is not None and mutation != "no labels":
        share = branch.label_share
        named = softmax([(1 if mutation == "flat labels" else 10) * one.double() for one in z])
        p = [share * n + (1 - share) * one for n, one in zip(named, p, strict=True)]
    c = unit([sum(one * row[d] for one, row in zip(p, y, strict=True)) for d in range(DIM)])
    alpha = branch.instance_share
    raw = [alpha * v + (1 - alpha) * k for v, k in zip(x, c, strict=True)]
    fused = raw if mutation == "not unit" else unit(raw)
    return {name: torch.stack(one) for name, one in (("fused", fused), ("concept", c), ("weights", p))}


def slow(branch: ConsensusBranch, seen: Embeddings, mutation: str = "") -> dict[str, list[Tensor]]:
    z = seen.text_features.concepts  # type: ignore[union-attr]
    sides = [
        [slow_side(branch, "image", x, None, mutation) for x in seen.image],
        [slow_side(branch, "text", x, own, mutation) for x, own in zip(seen.text, z, strict=True)],
    ]
    names = ("fused", "concept", "weights")
    return {name: [torch.stack([one[name] for one in side]) for side in sides] for name in names}


def batch() -> Batch:
    nothing = Features.whole(torch.zeros(PAIRS, 1, 1))
    return Batch(nothing, nothing, torch.arange(PAIRS), torch.arange(PAIRS))


def test_scores_and_gradients_equal_the_page() -> None:
    branch, seen = branch_of(), seen_by()
    leaves = [seen.image.requires_grad_(), seen.text.requires_grad_(), *branch.parameters()]
    found, expected = branch(seen, batch()), slow(branch, seen)
    for name, (image, text) in expected.items():
        view = found.view(name)
        assert (view.image - image).abs().max() < 1e-12, name
        assert (view.text - text).abs().max() < 1e-12, name
    f, c = expected["fused"], expected["concept"]
    scores = found.image @ found.text.T, 0.95 * f[0] @ f[1].T + 0.05 * c[0] @ c[1].T
    assert (scores[0] - scores[1]).abs().max() < 1e-12
    weights = torch.randn(PAIRS, PAIRS, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    ours, theirs = (torch.autograd.grad((one * weights).sum(), leaves, allow_unused=True) for one in scores)
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine is None) == (other is None)
        assert mine is None or other is None or (mine - other).abs().max() < 1e-12
    assert torch.allclose(branch.image(seen.image, seen.image_features), found.image)
    assert torch.allclose(branch.text(seen.text, seen.text_features), found.text)
    assert torch.allclose(found.image.norm(dim=1), torch.ones(PAIRS, dtype=torch.float64), atol=1e-6)


@pytest.mark.parametrize("mutation", ["no labels", "flat labels", "not unit"])
def test_the_oracle_notices_a_mutation(mutation: str) -> None:
    branch, seen = branch_of(), seen_by()
    found, wrong = branch(seen, batch()), slow(branch, seen, mutation)
    assert (found.view("fused").text - wrong["fused"][1]).abs().max() > 1e-4


def test_a_text_has_the_concepts_of_its_own_words_alone() -> None:
    """Five texts of one image: none sees what the others name, nor what stands at its padding."""
    words = ConceptWords(BiGRU(8, 4, DIM), [-1, -1, -1, -1, 0, 1, 2, -1], 3)
    ids = torch.tensor([[1, 4, 7, 2], [1, 5, 4, 2], [1, 7, 2, 6]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 0]]).bool()
    found = words(Features(ids, mask))
    assert found.concepts.tolist() == [[1, 0, 0], [1, 1, 0], [0, 0, 0]]
    assert torch.equal(found.values, words.encoder(Features(ids, mask)).values)


def test_the_loss_is_that_of_the_page(data: Path) -> None:
    method = built(data)
    torch.manual_seed(3)
    rows = {
        name: [torch.rand(4, DIM, dtype=torch.float64) for _ in range(2)] for name in ("f", "c", "p", "x")
    }
    unit_rows = {name: [row / row.norm(dim=1, keepdim=True) for row in both] for name, both in rows.items()}
    p = [row / row.sum(dim=1, keepdim=True) for row in rows["p"]]
    inner = {
        "fused": Embeddings(*unit_rows["f"]),
        "concept": Embeddings(*unit_rows["c"]),
        "weights": Embeddings(*p),
    }
    view = Embeddings(rows["f"][0], rows["f"][1], views=inner)
    nothing = Features.whole(torch.zeros(4, 1, 1))
    four = Batch(nothing, nothing, torch.tensor([0, 1, 2, 2]), torch.arange(4))
    terms = method.objective(Embeddings(*unit_rows["x"], views={"consensus": view}), four)

    def hinge(image: Tensor, text: Tensor) -> float:
        s = (image @ text.T).tolist()
        total = 0.0
        for i in range(4):
            total += max(max(0.0, 0.2 + s[i][j] - s[i][i]) for j in range(4) if j != i)
            total += max(max(0.0, 0.2 + s[j][i] - s[i][i]) for j in range(4) if j != i)
        return total

    kl = sum(
        b * math.log(b / a)
        for one, two in zip(p[0].tolist(), p[1].tolist(), strict=True)
        for a, b in zip(one, two, strict=True)
    )
    expected = {
        "fused": 3 * hinge(*unit_rows["f"]), "instance": 5 * hinge(*unit_rows["x"]),
        "concept": hinge(*unit_rows["c"]), "agreement": 2 * kl,
    }  # fmt: skip
    assert {name: value.item() for name, value in terms.items()} == pytest.approx(expected, abs=1e-9)
    alike = Embeddings(p[0], p[0])
    assert Agreement("w")(Embeddings(p[0], p[0], views={"w": alike}), four)[
        "agreement"
    ].item() == pytest.approx(0)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return precomputed(tmp_path_factory.mktemp("data") / "toy_precomp")


def built(data: Path) -> Method:
    captions = training_splits(open_captions(str(data)))[0]
    seed_everything(0)
    small: dict[str, Any] = {"dim": 16, "min_count": 1, "word_dim": 8, "concept_size": 10}
    return cvse.build(cvse.Settings(**small), captions)


def test_a_trained_model_is_searched_by_one_vector(data: Path, tmp_path: Path) -> None:
    flags = ["--dim", 16, "--batch_size", 12, "--min_count", 1, "--word_dim", 8, "--concept_size", 10]
    diptych("train", "cvse", "--data", data, "--output_dir", tmp_path / "run", "--epochs", 2, *flags)
    model = Retriever.from_pretrained(tmp_path / "run")
    held_out = training_splits(open_captions(str(data)))[1]
    image, text = model.encode_image(held_out.images), model.encode_text(held_out.texts)
    assert image.shape[1] == text.shape[1] == model.dim == 32  # fused and concept, not the instance
    assert torch.allclose(text.norm(dim=1), torch.ones(len(text)), atol=1e-5)
    words = model.text.encoder
    assert isinstance(words, ConceptWords)
    assert int((words.concept_of < words.concepts).sum()) == words.concepts  # every concept is a word here
    swapped = model.encode_text([held_out.texts[0], held_out.texts[1]])
    assert torch.allclose(swapped[0], text[0], atol=1e-6)  # whatever else is asked


def test_shares_out_of_range_are_refused() -> None:
    assert RECIPES["cvse"].settings().label_share == 0.35
    with pytest.raises(SettingsError, match="label_share"):
        branch_of(label_share=1.5)
