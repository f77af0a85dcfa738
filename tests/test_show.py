"""Pictures of runs: the joint space, two runs' answers side by side, learned pooling weights."""

from __future__ import annotations

import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from PIL import Image
from small import pictures, precomputed

from diptych.cli import main
from diptych.data.captions import Captions
from diptych.data.files import FileImages
from diptych.errors import DataError, MissingExtra, SettingsError
from diptych.evaluation.metrics import DIRECTIONS
from diptych.model.retriever import Retriever
from diptych.model.scores import MatrixScores
from diptych.recipes import RECIPES
from diptych.reports.charts import (
    DPI,
    IMAGES,
    PANEL,
    TEXTS,
    Space,
    drawn_images,
    flattened,
    picture_of_spaces,
    pooled_elements,
)
from diptych.reports.grids import Compared, chosen_queries
from diptych.reports.page import comparison_page
from diptych.runs.show import learned_poolings, model_at_start, show_pooling, show_space
from diptych.runs.train import run_recipe
from diptych.types import Features

SMALL: dict[str, Any] = {
    "dim": 16, "batch_size": 12, "epochs": 12, "decay_epoch": 10, "min_count": 1, "word_dim": 8, "learning_rate": 5e-3,
    "queue_size": 30, "clusters": 6, "concept_size": 10,
}  # fmt: skip


def trained(name: str, data: Path, folder: Path, **changes: Any) -> Path:
    recipe = RECIPES[name]
    known = {field.name for field in fields(recipe.settings)}
    settings = {key: value for key, value in {**SMALL, **changes}.items() if key in known}
    run_recipe(recipe, recipe.settings(**settings), str(data), folder, show_progress=False)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return precomputed(tmp_path_factory.mktemp("data") / "toy_precomp", dev=14)


@pytest.fixture(scope="module")
def runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return (
        trained("vse-infinity", data, folder / "learned"),
        trained("vse-plus-plus", data, folder / "fixed", epochs=3, decay_epoch=2),
    )


def diptych(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["show", *map(str, arguments)])


def size_of(file: Path) -> tuple[int, int]:
    with Image.open(file) as picture:
        assert picture.format == "PNG"
        picture.load()
        return picture.size


def coloured(file: Path, colour: str) -> int:
    """Pixels near a colour."""
    wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])
    with Image.open(file) as picture:
        pixels = np.asarray(picture.convert("RGB"), dtype=int)
    return int((np.abs(pixels - wanted).max(axis=2) < 40).sum())


# the joint space


def test_one_command_shows_before_and_after(runs: tuple[Path, Path], tmp_path: Path) -> None:
    done = diptych("space", runs[0], "--untrained", "--output", tmp_path / "space.png", "--count", 8)
    assert done.exit_code == 0, done.output
    assert size_of(tmp_path / "space.png") == (round(2 * PANEL * DPI), round((PANEL + 0.9) * DPI))
    assert coloured(tmp_path / "space.png", IMAGES) > 500
    assert coloured(tmp_path / "space.png", TEXTS) > 500
    table = [line.split()[-3:] for line in done.stdout.splitlines()[1:3]]
    (before, apart, _), (after, others, _) = [[float(cell) for cell in row] for row in table]
    assert "learned, before training" in done.stdout.splitlines()[1]
    assert others - after > (apart - before) + 0.05  # training drew matched pairs together
    assert "8 images with their 40 texts, seed 0" in done.output
    assert "all 14 images and 70 texts" in done.output


def test_the_same_seed_draws_the_same_picture(runs: tuple[Path, Path], tmp_path: Path) -> None:
    files = [tmp_path / f"{i}.png" for i in range(3)]
    for file, seed in zip(files, (0, 0, 1), strict=True):
        show_space(runs[:1], file, count=8, seed=seed)
    first, again, other = (file.read_bytes() for file in files)
    assert first == again != other


def test_every_text_is_joined_to_its_own_image() -> None:
    rng = np.random.default_rng(0)
    image_of = np.array([2, 0, 1, 1, 3, 0, 2])
    space = Space("one", rng.standard_normal((4, 6)), rng.standard_normal((7, 6)), image_of)
    figure = picture_of_spaces([space, space], below=["left", "right"])
    assert len(figure.axes) == 2
    for axes, said in zip(figure.axes, ("left", "right"), strict=True):
        assert (axes.get_title(), axes.get_xlabel()) == ("one", said)
        lines, texts, images = (
            next(c for c in axes.collections if c.get_label() == label)
            for label in ("matched pair", "text", "image")
        )
        ends = np.array([path.vertices for path in lines.get_paths()])  # (M, 2, 2)
        assert np.allclose(ends[:, 1], texts.get_offsets())
        assert np.allclose(ends[:, 0], images.get_offsets()[image_of])
        assert (
            len(np.unique(ends.round(3).reshape(-1, 2), axis=0)) == 11
        )  # 4 + 7 places, none drawn over another


def test_what_is_near_stays_near() -> None:
    rng = np.random.default_rng(1)
    image = rng.standard_normal((40, 8))
    text = image + 0.05 * rng.standard_normal((40, 8))
    places, text_places = flattened(Space("near", image, text, np.arange(40)))
    distance = np.linalg.norm(places[:, None] - text_places[None], axis=2)
    assert (distance.argmin(axis=0) == np.arange(40)).mean() > 0.9


def test_closeness_is_that_of_every_pair() -> None:
    rng = np.random.default_rng(2)
    image_of = np.array([0, 0, 1, 2, 2, 2])
    image, text = (torch.nn.functional.normalize(torch.from_numpy(rng.random((n, 5)))) for n in (4, 6))
    found = Space.of("some", image, text, image_of).closeness()
    own = [1 - float(image[i] @ text[j]) for j, i in enumerate(image_of)]
    others = [1 - float(image[i] @ text[j]) for i in range(4) for j in range(6) if i != image_of[j]]
    assert found.matched == pytest.approx(np.mean(own))
    assert found.others == pytest.approx(np.mean(others))
    assert found.gap == pytest.approx(float((image.mean(0) - text.mean(0)).norm()))


def test_some_images_bring_their_texts() -> None:
    image_of = np.array([3, 1, 1, 0, 3])
    space = Space("s", np.arange(4.0)[:, None], np.arange(10.0, 15)[:, None], image_of)
    part = space.some(np.array([1, 3]))
    assert part.image[:, 0].tolist() == [1, 3]
    assert part.text[:, 0].tolist() == [10, 11, 12, 14]
    assert part.image_of.tolist() == [1, 0, 0, 1]
    assert drawn_images(space, 9, 0).tolist() == [0, 1, 3]  # image 2 has no text to be joined to
    assert drawn_images(space, 2, 0).tolist() == drawn_images(space, 2, 0).tolist()
    assert len({tuple(drawn_images(space, 2, seed)) for seed in range(20)}) == 3


def test_more_images_than_there_are_is_said(runs: tuple[Path, Path], tmp_path: Path) -> None:
    said = show_space(runs, tmp_path / "space.png")
    assert "14 images (200 asked, no more have a text) with their 70 texts" in said
    assert size_of(tmp_path / "space.png")[0] == round(2 * PANEL * DPI)


@pytest.mark.parametrize("name", ["vse-infinity", "coder"])
def test_untrained_is_the_model_the_run_started_from(name: str, data: Path, tmp_path: Path) -> None:
    still = trained(name, data, tmp_path / "still", learning_rate=1e-30, epochs=1, decay_epoch=1)
    at_start, after = dict(model_at_start(still).named_parameters()), Retriever.from_pretrained(still)
    assert all(
        torch.allclose(value, at_start[name], rtol=0, atol=1e-20) for name, value in after.named_parameters()
    )
    other = precomputed(tmp_path / "other_precomp", dev=8)
    done = diptych("space", still, "--untrained", "--data", other, "--output", tmp_path / "x.png")
    assert done.exit_code == 2
    assert "other_precomp" in done.stderr
    assert not (tmp_path / "x.png").exists()


def test_a_collapsed_model_and_too_few_points_are_refused() -> None:
    with pytest.raises(DataError, match="flat"):
        flattened(Space("flat", np.ones((5, 3)), np.ones((5, 3)), np.arange(5)))
    with pytest.raises(DataError, match=r"\b1\b.*\b2\b"):
        flattened(Space("few", np.eye(3)[:1], np.eye(3)[1:], np.array([0, 0])))
    broken = torch.full((1, 3), torch.nan)
    with pytest.raises(DataError, match=r"\b0\b"):
        Space.of("broken", broken, broken, np.array([0]))


@pytest.mark.parametrize("missing", ["matplotlib.figure", "sklearn.manifold"])
def test_missing_packages_are_named(
    runs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(MissingExtra, match=r"diptych\[plots\]"):
        show_space(runs[:1], tmp_path / "space.png")


# two runs' answers


def toy() -> tuple[Captions, dict[str, np.ndarray]]:
    """Captions with 0 to 3 texts per image, and two score matrices with ties."""
    rng = np.random.default_rng(5)
    image_of = np.array([0, 0, 1, 3, 3, 3, 4, 5, 6, 6, 7, 8, 9, 9])  # image 2 has none
    features = [rng.random((2, 3)) for _ in range(10)]

    class Store(list[np.ndarray]):
        def content_key(self, index: int) -> str:
            return str(index)

    texts = [f"text {i}" for i in range(len(image_of))]
    ids = [f"picture {i}" for i in range(10)]
    captions = Captions(Store(features), texts, image_of, ids, ["val"] * 10)
    return captions, {name: rng.integers(0, 4, (10, 14)).astype(float) for name in ("a", "b")}


def brute_ranks(scores: np.ndarray, image_of: np.ndarray, direction: str) -> dict[int, int]:
    """Ranks from 0 by a stable sort of Python lists."""
    ranks = {}
    rows = scores if direction == "image_to_text" else scores.T
    for query, row in enumerate(rows.tolist()):
        order = sorted(range(len(row)), key=lambda item: -row[item])
        own = {
            "image_to_text": set(np.flatnonzero(image_of == query)),
            "text_to_image": {image_of[query % 14]},
        }
        if own[direction]:
            ranks[query] = min(order.index(item) for item in own[direction])
    return ranks


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_answers_and_ranks_are_those_of_a_plain_sort(direction: str) -> None:
    captions, matrices = toy()
    compared = Compared(captions, {name: MatrixScores(matrix) for name, matrix in matrices.items()})
    brute = {name: brute_ranks(matrix, captions.image_of, direction) for name, matrix in matrices.items()}
    queries = sorted(brute["a"])
    wins = [brute["a"][q] - brute["b"][q] for q in queries]
    expected = (sum(w < 0 for w in wins), sum(w > 0 for w in wins), sum(w == 0 for w in wins))
    assert compared.counts(direction) == expected
    shown = compared.comparisons(direction, 99, answers=4)
    assert len(shown) == len(queries)
    for one in shown:
        number = int(re.findall(r"\d+", one.text)[0])
        for result in one.results:
            matrix = matrices[result.name]
            row = matrix[number] if direction == "image_to_text" else matrix[:, number]
            order = sorted(range(len(row)), key=lambda item: -row[item])[:4]
            assert [int(re.findall(r"\d+", answer.text)[0]) for answer in result.answers] == order
            assert [answer.score for answer in result.answers] == [row[item] for item in order]
            own = [
                captions.image_of[item if direction == "image_to_text" else number]
                == (number if direction == "image_to_text" else item)
                for item in order
            ]
            assert [answer.right for answer in result.answers] == own
            assert result.rank == brute[result.name][number] + 1


def test_the_chosen_queries() -> None:
    rng = np.random.default_rng(3)
    a, b = (rng.integers(0, 6, 50).astype(float) for _ in range(2))
    drawn = chosen_queries(a, b, 10, "random", seed=4)
    assert drawn == chosen_queries(b, a, 10, "random", seed=4) != chosen_queries(a, b, 10, "random", seed=5)
    assert len(set(drawn)) == 10
    assert sorted(chosen_queries(a, b, 99, "random", seed=0)) == list(range(50))
    most = chosen_queries(a, b, 99, "differs", seed=0)
    assert sorted(most) == [i for i in range(50) if a[i] != b[i]]
    factor = [max((a[i] + 1) / (b[i] + 1), (b[i] + 1) / (a[i] + 1)) for i in most]
    assert factor == pytest.approx(sorted(factor, reverse=True))
    assert chosen_queries(a, b, 3, "differs", seed=0) == most[:3]
    assert chosen_queries(np.array([0.0, 800]), np.array([9.0, 809]), 1, "differs", seed=0) == [0]
    with pytest.raises(SettingsError, match="best"):
        chosen_queries(a, b, 3, "best", seed=0)


def test_the_page_compares_two_runs(runs: tuple[Path, Path], tmp_path: Path) -> None:
    file = tmp_path / "grids.html"
    done = diptych("grids", *runs, "--output", file, "--count", 3, "--where", "differs")
    assert done.exit_code == 0, done.output
    page = file.read_text("utf-8")
    assert page.count("<div class='pair'>") == 6
    assert page.count("right at rank") == 12
    for name, run in zip(("learned", "fixed"), runs, strict=True):
        assert f"{name} is {Retriever.from_pretrained(run).fingerprint()}" in page
    assert "The 3 of 70 queries whose rank differs most: the extremes, not a fair sample." in page
    evaluated = CliRunner().invoke(main, ["evaluate", str(runs[0]), "--bootstrap", "0"])
    recall = re.findall(r"image → text +([\d.]+)", evaluated.output)[0]
    assert re.findall(r"image_to_text_recall@1 +([\d.]+)", done.output) == [recall]


def test_the_page_of_one_run_shows_its_answers_alone(runs: tuple[Path, Path], tmp_path: Path) -> None:
    file = tmp_path / "one.html"
    done = diptych("grids", runs[0], "--output", file, "--count", 3)
    assert done.exit_code == 0, done.output
    page = file.read_text("utf-8")
    assert page.count("<div class='pair'>") == 6
    assert page.count("right at rank") == 6
    assert "3 of 70 queries, drawn at random (seed 0)." in page
    assert "ranks the right answer higher" not in page


def test_pictures_are_shown_and_names_escaped(tmp_path: Path) -> None:
    paths = pictures(tmp_path / "p", count=3)
    captions = Captions(
        FileImages(tmp_path / "p", [path.name for path in paths]),
        ["<u>", "two", "three"],
        np.arange(3),
        ["x", "y", "z"],
        ["val"] * 3,
    )
    scores = {"a": MatrixScores(np.eye(3)), "<i>": MatrixScores(np.eye(3)[::-1].copy())}
    compared = Compared(captions, scores)
    shown = {"both": ("said", compared.comparisons("text_to_image", 3))}
    page = comparison_page("title", "intro", (("", "a"), [("R@1", "1.0")]), shown)
    assert page.count("<img ") == 18  # three queries, two models, three answers
    assert "<u>" not in page
    assert page.count("<b>right at rank 1</b>") == 4  # the better of each two, both where they are alike
    assert "<i>" not in page
    shown = {"both": ("said", compared.comparisons("image_to_text", 3))}
    assert comparison_page("title", "intro", (("",), []), shown).count("<img ") == 3  # the queries
    with pytest.raises(SettingsError, match=r"\b3\b"):
        Compared(captions, dict.fromkeys("abc", scores["a"]))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["grids", 0, "--where", "differs"], "differs"),
        (["grids", 0, 1, 1], "not 3"),
        (["grids", 0, 0], "learned"),
        (["space", 0, "--split", "test"], "test"),
        (
            ["space", 0, "--output", "space.gif"],
            "space.gif",
        ),
        (["space", "nowhere"], "nowhere"),
        (
            ["pooling", 1],
            "--gpo_data_dependent",
        ),
        (["pooling", 0, "--sizes", "4,x"], "--sizes"),
        (["pooling", 0, "--sizes", "0"], "--sizes"),
    ],
)
def test_mistakes_are_one_sentence(
    runs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[Any], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = diptych(*(runs[one] if isinstance(one, int) else one for one in arguments))
    assert done.exit_code == 2
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


# learned pooling


def test_the_weights_shown_are_those_the_model_pools_with(runs: tuple[Path, Path]) -> None:
    model = Retriever.from_pretrained(runs[0])
    found = learned_poolings("learned", model, (3, 6))
    assert [one.name for one in found] == ["learned, images", "learned, texts"]
    values = torch.randn(1, 6, 16)
    with torch.no_grad():
        pooled = model.image.aggregator(Features(values, torch.ones(1, 6, dtype=torch.bool)))[0]
    ranked = values[0].sort(dim=0, descending=True).values.double()
    assert torch.allclose(torch.from_numpy(found[0].theta[6]) @ ranked, pooled.double(), atol=1e-5)
    for one in found:
        for size, theta in one.theta.items():
            assert theta.shape == (size,)
            assert theta.sum() == pytest.approx(1, abs=1e-5)


def test_how_many_elements_are_pooled() -> None:
    assert pooled_elements(np.eye(7)[0]) == pytest.approx(1)
    assert pooled_elements(np.full(7, 1 / 7)) == pytest.approx(7)
    assert pooled_elements(np.array([0.5, 0, 0, 0.5])) == pytest.approx(2)


def test_the_pooling_picture_and_its_numbers(runs: tuple[Path, Path], tmp_path: Path) -> None:
    done = diptych("pooling", *runs, "--output", tmp_path / "pooling.png", "--sizes", "8,2")
    assert done.exit_code == 0, done.output
    assert size_of(tmp_path / "pooling.png") == (1500, round((2 * 3.1 + 0.6) * DPI))
    rows = [line.split() for line in done.output.splitlines()[1:5]]
    assert [(row[1], row[2]) for row in rows] == [
        ("images", "2"),
        ("images", "8"),
        ("texts", "2"),
        ("texts", "8"),
    ]
    model = learned_poolings("learned", Retriever.from_pretrained(runs[0]), (2, 8))
    assert rows[1][3:7] == [f"{model[0].theta[8][k]:.3f}" for k in (0, 1, 2, -1)]
    assert "left out, no weights by rank: fixed (Mean for images, Mean for texts)" in done.output
    show_pooling(runs[:1], tmp_path / "pooling.pdf")
    assert (tmp_path / "pooling.pdf").read_bytes().startswith(b"%PDF")


def test_weights_that_depend_on_the_features_are_no_picture(data: Path, tmp_path: Path) -> None:
    short = {"epochs": 1, "decay_epoch": 1}
    run = trained("vse-infinity", data, tmp_path / "dependent", gpo_data_dependent=True, **short)
    with pytest.raises(SettingsError, match="--gpo_data_dependent"):
        show_pooling([run], tmp_path / "pooling.png")
    run = trained("vse-infinity", data, tmp_path / "wide", gpo_per_dimension=True, text_pool="mean", **short)
    model = Retriever.from_pretrained(run)
    (one,) = learned_poolings("wide", model, (5,))
    with torch.no_grad():
        every = model.image.aggregator.coefficients(torch.tensor([5]), 5)[0]  # type: ignore[operator]
    assert every.shape == (5, 16)
    assert np.allclose(one.theta[5], every.numpy().mean(axis=1))


def test_runs_of_the_same_name_go_by_their_paths(runs: tuple[Path, Path], tmp_path: Path) -> None:
    for place in ("one", "two"):
        Retriever.from_pretrained(runs[0]).save_pretrained(tmp_path / place / "model")
    said = show_pooling([tmp_path / "one" / "model", tmp_path / "two" / "model"], tmp_path / "p.png")
    assert f"{tmp_path / 'one' / 'model'}, images" in said
    assert f"{tmp_path / 'two' / 'model'}, texts" in said
