"""Concepts from texts and from CVSE's files, their graph, and the branch over them."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from diptych.aggregators import GPO, Mean
from diptych.branches.branch import Branch
from diptych.branches.concept import ConceptBranch, concept_graph
from diptych.data.concepts import (
    Concepts,
    WordVectors,
    count_concepts,
    find_concepts,
    read_cvse,
)
from diptych.errors import DataError, MissingExtra, SettingsError
from diptych.ops import masked_mean, unit
from diptych.parts import describe, rebuild
from diptych.types import Batch, Embeddings, Features

TEXTS = [
    "A brown dog runs in the green grass .",
    "Two dogs run after a red ball",
    "The dog catches the ball , the red ball !",
    "a man in a red shirt is walking his dog",
    "A man is walking",
    "grass",
]
TAGS = {
    "dog": "NN",
    "dogs": "NNS",
    "ball": "NN",
    "grass": "NN",
    "man": "NN",
    "shirt": "NN",
    "red": "JJ",
    "brown": "JJ",
}
TAGS |= {"green": "JJ", "is": "VBZ", "walking": "VBG", "run": "VB", "runs": "VBZ", "catches": "VBZ"}


def tag(word: str) -> str:
    return TAGS.get(word, "DT")


# --- vocabulary and counts


def test_words_are_chosen_by_class_and_frequency() -> None:
    found = find_concepts(TEXTS, 10, (0.5, 0.3, 0.2), tagger=tag)
    # frequencies: dog 3, ball 3, grass 2, man 2, then dogs and shirt once; ties by the alphabet
    assert list(found.words) == [
        "ball",
        "dog",
        "grass",
        "man",
        "dogs",
        "red",
        "brown",
        "green",
        "is",
        "walking",
    ]


def test_the_default_shares_are_cvse_s() -> None:
    texts = [
        f"noun{'abcdefghij'[i // 100]}{'abcdefghij'[i // 10 % 10]}{'abcdefghij'[i % 10]}" for i in range(900)
    ]
    cut = {t: ("NN", "JJ", "VB")[i % 3] for i, t in enumerate(texts)}
    words = find_concepts(texts, 400, tagger=cut.__getitem__).words
    assert [cut[w] for w in words] == ["NN"] * 280 + ["JJ"] * 80 + ["VB"] * 40


def test_the_choice_does_not_depend_on_the_order_of_texts() -> None:
    assert find_concepts(TEXTS[::-1], 8, tagger=tag).words == find_concepts(TEXTS, 8, tagger=tag).words


def test_textblob_s_lexicon_tags_captions() -> None:
    pytest.importorskip("textblob")
    found = find_concepts(TEXTS, 10, (0.6, 0.2, 0.2))
    assert {"dog", "ball", "man", "grass"} < set(found.words[:6])
    assert list(found.words[6:8]) == ["red", "brown"]
    assert set(found.words[8:]) == {"is", "walking"}


def test_a_missing_tagger_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "textblob.taggers", None)
    with pytest.raises(MissingExtra, match=r"diptych\[concepts\]"):
        find_concepts(TEXTS)


def test_counts_equal_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych.data.concepts.CHUNK", 4)  # several chunks, the last one short
    words = ["dog", "ball", "red", "man", "unicorn"]
    sets = [set(t.lower().replace(",", " ").replace("!", " ").split()) for t in TEXTS]
    found = count_concepts(words, TEXTS)
    for i, a in enumerate(words):
        assert found.occurrences[i] == sum(a in s for s in sets)
        for j, b in enumerate(words):
            assert found.pairs[i, j] == (0 if i == j else sum(a in s and b in s for s in sets))


def test_bad_vocabularies() -> None:
    with pytest.raises(DataError, match="hund, katze"):
        count_concepts(["hund", "katze"], TEXTS)
    with pytest.raises(DataError):
        count_concepts(["dog", "dog"], TEXTS)
    with pytest.raises(DataError, match=r"\b2\b"):
        find_concepts(["the of", "a"], tagger=tag)
    with pytest.raises(SettingsError, match=r"\b0\b"):
        find_concepts(TEXTS, 0, tagger=tag)
    with pytest.raises(SettingsError, match=r"0\.7"):
        find_concepts(TEXTS, 10, (0.7, 0.2, 0.2), tagger=tag)


# --- CVSE's files


def cvse_folder(folder: Path, protocol: int = 3, **changes: Any) -> Path:
    pairs = np.array([[0, 3, 1], [3, 0, 0], [1, 0, 0]], dtype=np.int32)
    files: dict[str, Any] = {
        "category_concepts.json": {"dog": 1, "man": 0, "red": 2},
        "x_adj_concepts.pkl": {
            "nums": np.array([5, 4, 2], dtype=np.int32),
            "adj_all": pairs,
            "adj_O_P": pairs,
        },
        "x_concepts_glove_word2vec.pkl": np.arange(12, dtype=np.float64).reshape(3, 4),
    } | changes
    folder.mkdir(exist_ok=True)
    for name, value in files.items():
        if name.endswith(".json"):
            (folder / name).write_text(json.dumps(value))
        elif value is not None:
            (folder / name).write_bytes(value if isinstance(value, bytes) else pickle.dumps(value, protocol))
    return folder


@pytest.mark.parametrize("protocol", [0, 2, 3, 4])
def test_cvse_files(tmp_path: Path, protocol: int) -> None:
    found = read_cvse(cvse_folder(tmp_path / "c", protocol))
    assert list(found.words) == ["man", "dog", "red"]
    assert found.occurrences.tolist() == [5, 4, 2]
    assert found.pairs.tolist() == [[0, 3, 1], [3, 0, 0], [1, 0, 0]]
    assert found.vectors is not None
    assert found.vectors.shape == (3, 4)
    without = read_cvse(cvse_folder(tmp_path / "d", protocol, **{"x_concepts_glove_word2vec.pkl": None}))
    assert without.vectors is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"category_concepts.json": {"dog": 1, "man": 1, "red": 2}}, r"category_concepts\.json"),
        ({"category_concepts.json": ["dog"]}, r"category_concepts\.json"),
        ({"x_adj_concepts.pkl": {"nums": np.zeros(3)}}, "nums.*adj_all"),
        ({"x_adj_concepts.pkl": None}, r"\b0\b"),
        ({"y_adj_concepts.pkl": {}}, r"\b2\b"),
        (
            {"x_adj_concepts.pkl": {"nums": np.zeros(3), "adj_all": np.zeros((2, 2))}},
            r"\b3\b",
        ),
        ({"x_concepts_glove_word2vec.pkl": {}}, r"_glove_word2vec\.pkl"),
        ({"x_concepts_glove_word2vec.pkl": np.zeros((2, 4))}, r"\b3\b"),
    ],
)
def test_broken_cvse_folders(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        read_cvse(cvse_folder(tmp_path / "c", **changes))


# --- graph


def small_concepts(g: int = 5, vectors: bool = True) -> Concepts:
    rng = np.random.default_rng(0)
    pairs = np.triu(rng.integers(0, 9, (g, g)), 1)
    pairs[:, -1] = 0  # the last concept meets nobody
    pairs = pairs + pairs.T
    table = rng.normal(size=(g, 3)).astype(np.float32) if vectors else None
    return Concepts([f"w{i}" for i in range(g)], rng.integers(9, 30, g), pairs, table)


@pytest.mark.parametrize("norm", ["sym", "cvse", "coder"])
def test_graph_equals_a_loop(norm: str) -> None:
    c = small_concepts()
    g = len(c.words)
    h = [[0.0] * g for _ in range(g)]
    for i in range(g):
        for j in range(g):
            p = c.pairs[i, j] / c.occurrences[i]
            h[i][j] = 1.0 if i != j and 5 ** (p - 0.02) - 5 ** (-0.02) >= 0.3 else 0.0
    assert sum(map(sum, h)) > 3
    assert h != [
        list(row) for row in zip(*h, strict=True)
    ]  # not symmetric, or the variants could not be told apart
    expected = [[0.0] * g for _ in range(g)]
    columns = [sum(h[i][j] for i in range(g)) for j in range(g)]
    for i in range(g):
        for j in range(g):
            one = float(i == j)
            if norm == "sym":
                a = [[max(h[x][y], h[y][x]) + float(x == y) for y in range(g)] for x in range(g)]
                expected[i][j] = a[i][j] / (sum(a[i]) * sum(a[j])) ** 0.5
            elif norm == "cvse":
                a = [
                    [0.25 * h[x][y] / (columns[y] + 1e-6) + float(x == y) for y in range(g)] for x in range(g)
                ]
                expected[i][j] = a[j][i] / (sum(a[i]) * sum(a[j])) ** 0.5
            else:
                degree = sum(h[i]) * sum(h[j])
                expected[i][j] = (h[i][j] / degree**0.5 if degree else 0.0) + one
    found = concept_graph(c, norm=norm)  # type: ignore[arg-type]
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert (found == found.T).all() == (norm == "sym")


def test_graph_threshold_and_bad_norm() -> None:
    c = small_concepts()
    assert (concept_graph(c, threshold=0.05) > 0).sum() > (concept_graph(c, threshold=0.9) > 0).sum()
    with pytest.raises(SettingsError, match="'row'"):
        concept_graph(c, norm="row")  # type: ignore[arg-type]


# --- branch


def branch_inputs(b: int = 3, d: int = 6) -> tuple[Tensor, Features, Tensor, Features]:
    g = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    mask = torch.tensor([[True, True, False], [True, False, False], [True, True, True]])[:b]
    return unit(draw(b, d)), Features.whole(draw(b, 4, d)), unit(draw(b, d)), Features(draw(b, 3, d), mask)


def both_sides(branch: ConceptBranch, inputs: tuple[Tensor, Features, Tensor, Features]) -> Embeddings:
    v, vf, w, wf = inputs
    ids = torch.arange(len(v))
    seen: Embeddings = branch(Embeddings(v, w, vf, wf), Batch(vf, wf, ids, ids))
    return seen


def concept_loop(branch: ConceptBranch, queries: Tensor, w: Tensor) -> Tensor:
    """Supp. Eq. 5 and Eq. 2 in float64, concept by concept."""
    x, a = branch.vectors.double(), branch.adjacency.double()
    g, y = len(x), []
    hidden = [sum(a[i, j] * (branch.layers[0].weight.double() @ x[j]) for j in range(g)) for i in range(g)]
    hidden = [torch.where(h > 0, h, 0.2 * h) for h in hidden]
    if len(branch.layers) == 2:
        hidden = [
            sum(a[i, j] * (branch.layers[1].weight.double() @ hidden[j]) for j in range(g)) for i in range(g)
        ]
    y = [h / h.norm() for h in hidden]
    rows = []
    for q in queries.double():
        energy = [torch.exp(10.0 * (w.double() @ q) @ y[i]) for i in range(g)]
        mixed = sum(e / sum(energy) * y[i] for i, e in enumerate(energy))
        rows.append(mixed / mixed.norm())
    return torch.stack(rows)


@pytest.mark.parametrize("hidden", [None, 7])
def test_branch_equals_the_equation(hidden: int | None) -> None:
    torch.manual_seed(0)
    branch = ConceptBranch.from_concepts(small_concepts(), 6, hidden=hidden, text_aggregator=Mean())
    v, vf, w, wf = branch_inputs()
    seen = both_sides(branch, (v, vf, w, wf))
    text_query = unit(masked_mean(wf.values, wf.mask))
    torch.testing.assert_close(
        seen.image.double(), concept_loop(branch, v, branch.image_query.weight), atol=1e-5, rtol=1e-5
    )
    torch.testing.assert_close(
        seen.text.double(), concept_loop(branch, text_query, branch.text_query.weight), atol=1e-5, rtol=1e-5
    )
    mutated = concept_loop(branch, v, branch.text_query.weight)
    assert (seen.image - mutated).abs().max() > 1e-3
    torch.testing.assert_close(branch.image(v, vf), seen.image)
    torch.testing.assert_close(branch.text(w, wf), seen.text)


def test_shared_aggregators_query_with_the_tower_s_vector() -> None:
    torch.manual_seed(0)
    branch = ConceptBranch.from_concepts(small_concepts(), 6)
    v, vf, w, wf = branch_inputs()
    expected = concept_loop(branch, w, branch.text_query.weight)
    torch.testing.assert_close(branch.text(w, wf).double(), expected, atol=1e-5, rtol=1e-5)
    own = ConceptBranch.from_concepts(small_concepts(), 6, image_aggregator=Mean())
    expected = concept_loop(own, unit(vf.values.mean(1)), own.image_query.weight)
    torch.testing.assert_close(own.image(v, vf).double(), expected, atol=1e-5, rtol=1e-5)


def test_every_parameter_learns() -> None:
    torch.manual_seed(0)
    branch = ConceptBranch.from_concepts(small_concepts(), 6)
    seen = both_sides(branch, branch_inputs())
    ((seen.image * seen.text).sum(1)[0] - seen.image[1] @ seen.text[2]).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in branch.parameters())
    assert {n for n, _ in branch.named_parameters()} == {
        "layers.0.weight", "image_query.weight", "text_query.weight",
    }  # fmt: skip


def test_the_graph_is_convolved_once_per_step_and_once_per_search(monkeypatch: pytest.MonkeyPatch) -> None:
    branch = ConceptBranch.from_concepts(small_concepts(), 6)
    calls = []
    convolve = ConceptBranch._convolve
    monkeypatch.setattr(ConceptBranch, "_convolve", lambda self: (calls.append(1), convolve(self))[1])
    v, vf, w, wf = branch_inputs()
    both_sides(branch, (v, vf, w, wf))
    assert len(calls) == 1
    branch.eval()
    with torch.inference_mode():
        first = branch.image(v, vf)
        branch.text(w, wf)
        torch.testing.assert_close(branch.image(v, vf), first)
    assert len(calls) == 2
    with torch.no_grad():
        branch.layers[0].weight.mul_(-1)
    with torch.inference_mode():
        assert not torch.allclose(branch.image(v, vf), first)  # new weights, new concepts
    assert len(calls) == 3
    branch.train()
    assert branch.image(v, vf).requires_grad


def test_branch_is_saved_with_words_graph_and_vectors(tmp_path: Path) -> None:
    torch.manual_seed(0)
    branch = ConceptBranch.from_concepts(
        small_concepts(), 6, weight=0.2, attention=5.0, text_aggregator=GPO(), image_aggregator=Mean()
    ).eval()
    config = json.loads(json.dumps(describe(branch, tmp_path)))
    other = rebuild(config, tmp_path)
    assert isinstance(other, Branch)
    other.load_state_dict(branch.state_dict(), strict=True)
    assert set(branch.state_dict()) >= {"vectors", "adjacency"}
    assert (other.words, other.weight, other.attention, other.dim) == (branch.words, 0.2, 5.0, 6)
    inputs = branch_inputs()
    assert torch.equal(both_sides(other.eval(), inputs).text, both_sides(branch, inputs).text)
    assert len(list(tmp_path.glob("concepts-*.json"))) == 1


def test_unknown_words_get_random_vectors_of_the_same_spread() -> None:
    torch.manual_seed(0)
    table = np.zeros((400, 50), dtype=np.float32)
    table[:200] = np.random.default_rng(0).normal(0, 0.7, (200, 50))
    vectors = WordVectors(table, np.arange(400) < 200)
    words = [f"w{i}" for i in range(400)]
    concepts = Concepts(words, np.ones(400, dtype=np.int64), np.zeros((400, 400), dtype=np.int64))
    branch = ConceptBranch.from_concepts(concepts, 8, vectors=vectors)
    np.testing.assert_allclose(branch.vectors[:200].numpy(), table[:200], rtol=1e-6)
    assert branch.vectors[200:].isfinite().all()
    assert abs(float(branch.vectors[200:].std()) - 0.7) < 0.02
    assert ConceptBranch.from_concepts(concepts, 8).vectors.shape == (400, 300)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"vectors": WordVectors(np.zeros((2, 3), np.float32), np.ones(2, bool))}, r"\b5\b.*\(2, 3\)"),
        ({"weight": 1.0}, "weight 1.0"),
    ],
)
def test_bad_branch_settings(kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        ConceptBranch.from_concepts(small_concepts(), 6, **kwargs)
