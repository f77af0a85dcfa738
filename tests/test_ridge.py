"""Ridge regression: the solution is the equation's, and its run is a run like any other."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import diptych, refused
from dual_folders import vit_folder
from numpy.typing import NDArray
from safetensors.torch import load_file
from small import bert_folder, photos, precomputed
from torch import nn

from diptych.aggregators import Mean
from diptych.data.arrays import ArrayStore
from diptych.data.captions import Captions
from diptych.data.formats import open_captions
from diptych.data.held_out import training_splits
from diptych.data.images import PixelInput, RegionInput
from diptych.data.text import CachedTexts, WordPieceInput
from diptych.encoders.class_words import NamedGrid
from diptych.encoders.encoder import Backbone
from diptych.encoders.transformer import TransformerText
from diptych.errors import DataError, SettingsError
from diptych.evaluation.prepared import Prepared
from diptych.model.retriever import Retriever, Tower
from diptych.recipes import RECIPES
from diptych.recipes.ridge import Settings
from diptych.runs.train import run_recipe
from diptych.training.log import read_log
from diptych.training.prepare import prepare
from diptych.training.ridge import NormalEquations, Ridge, accumulate, choose, names_of, pooled_pairs
from diptych.types import Features

Array = NDArray[np.float64]


def problem(seed: int = 0, images: int = 30, texts: int = 70) -> tuple[Array, Array, NDArray[np.int64]]:
    """Images (n, 5), texts (m, 4) and whose they are; some images have no text."""
    rng = np.random.default_rng(seed)
    image_of = rng.integers(0, images - 3, size=texts)
    x = rng.standard_normal((images, 5)) + 3
    v = x[image_of] @ rng.standard_normal((5, 4)) + 0.3 * rng.standard_normal((texts, 4)) - 1
    return x, v, image_of


def oracle(x: Array, v: Array, image_of: NDArray[np.int64], shrinkage: float) -> Array:
    """The minimiser, from the gradient of the sum in the module's docstring set to zero, written as loops."""
    owners = [i for i in range(len(x)) if any(image_of == i)]
    means = {i: sum(v[t] for t in range(len(v)) if image_of[t] == i) / sum(image_of == i) for i in owners}
    x_bar = sum(x[i] for i in owners) / len(owners)
    v_bar = sum(means[i] for i in owners) / len(owners)
    s_xx = sum(np.outer(x[i] - x_bar, x[i] - x_bar) for i in owners)
    s_vx = sum(np.outer(means[i] - v_bar, x[i] - x_bar) for i in owners)
    penalty = shrinkage * np.trace(s_xx) / x.shape[1]
    found: Array = s_vx @ np.linalg.inv(s_xx + penalty * np.eye(x.shape[1]))
    return found


def equations(x: Array, v: Array, image_of: NDArray[np.int64], rows: int = 100) -> NormalEquations:
    found = NormalEquations(x.shape[1], v.shape[1])
    for start in range(0, len(x), rows):
        inside = (image_of >= start) & (image_of < start + rows)
        found.add(x[start : start + rows], v[inside], image_of[inside] - start)
    return found


@pytest.mark.parametrize("shrinkage", [1e-3, 0.3, 10.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_weights_minimise_the_sum(seed: int, shrinkage: float) -> None:
    x, v, image_of = problem(seed)
    solved = equations(x, v, image_of).solve()
    wanted = oracle(x, v, image_of, shrinkage)
    assert np.allclose(solved.weights(shrinkage), wanted, atol=1e-10)
    # the oracle notices another λ, and texts that count one by one
    assert not np.allclose(solved.weights(2 * shrinkage), wanted, atol=1e-4)
    plain = equations(x[image_of], v, np.arange(len(v))).solve()
    assert not np.allclose(plain.weights(shrinkage), wanted, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_the_sums_do_not_depend_on_blocks_or_order(rows: int) -> None:
    x, v, image_of = problem()
    order, texts = np.random.default_rng(1).permutation(len(x)), np.random.default_rng(2).permutation(len(v))
    back = np.argsort(order)
    first = equations(x, v, image_of).solve()
    other = equations(x[order], v[texts], back[image_of[texts]], rows).solve()
    assert np.allclose(first.weights(0.1), other.weights(0.1))
    assert np.allclose(first.metric(0.1), other.metric(0.1))


def test_the_metric_evens_out_the_texts() -> None:
    x, v, image_of = problem()
    solved = equations(x, v, image_of).solve()
    texts = np.bincount(image_of, minlength=len(x))
    weights = 1 / texts[image_of]
    centred = v - solved.v
    spread = (centred * weights[:, None]).T @ centred
    flooring = 0.2
    floor = flooring * np.trace(spread) / 4 * np.eye(4)
    made = solved.metric(flooring) @ (spread + floor) @ solved.metric(flooring)
    assert np.allclose(made, made[0, 0] * np.eye(4), atol=1e-9)
    assert not np.allclose(solved.metric(2 * flooring) @ (spread + floor), made[0, 0] * np.eye(4), atol=1e-3)
    assert np.allclose(solved.metric(1e9), np.eye(4), atol=1e-6)


def test_features_without_spread_do_no_harm() -> None:
    x, v, image_of = problem()
    dead = np.concatenate([x, np.full((len(x), 2), 7.0)], axis=1)
    found = equations(dead, v, image_of).solve().weights(1e-3)
    assert np.isfinite(found).all()
    assert np.allclose(found[:, 5:], 0, atol=1e-5)


def test_too_little_to_learn_from() -> None:
    with pytest.raises(DataError):
        equations(*problem(images=4, texts=5)[:2], np.zeros(5, np.int64)).solve()


def ready(count: int = 40, seed: int = 0) -> Prepared:
    """Stored cells and token states from which texts can be told."""
    rng = np.random.default_rng(seed)
    cells = rng.standard_normal((count, 3, 5)).astype(np.float32)
    image_of = np.repeat(np.arange(count), 2)
    states = np.repeat(cells.mean(1)[image_of] @ np.random.default_rng(9).standard_normal((5, 4)), 3, axis=0)
    states = states + 0.05 * rng.standard_normal(states.shape)
    captions = Captions(
        ArrayStore(cells), [f"text {n}" for n in range(2 * count)], image_of,
        [str(n) for n in range(count)], ["train"] * count,
    )  # fmt: skip
    return Prepared(captions, CachedTexts(states.astype(np.float32), np.arange(0, 6 * count + 1, 3)))


def test_validation_chooses_what_ranks_best() -> None:
    solved = accumulate(ready(), RegionInput(5)).solve()
    chosen = choose(solved, ready(seed=1), RegionInput(5))
    assert chosen.rsum > 400
    for worse in (choose(solved, ready(seed=1), RegionInput(5), shrinkage=100.0),
                  choose(solved, ready(seed=1), RegionInput(5), flooring=0.1)):  # fmt: skip
        assert worse.rsum <= chosen.rsum


def test_images_that_could_not_be_read_are_left_out() -> None:
    data = ready()
    data.captions.images.unreadable = {3: "no image"}  # type: ignore[attr-defined]
    seen = np.concatenate(
        [of + start for start, (_, _, of) in zip([0], pooled_pairs(data, RegionInput(5)), strict=True)]
    )
    assert 3 not in seen
    assert len(seen) == len(data.captions.texts) - 2
    assert accumulate(data, RegionInput(5)).images == 39


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return precomputed(tmp_path_factory.mktemp("data") / "toy_precomp", train=40, dev=12)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bert_folder(tmp_path_factory.mktemp("models") / "bert")


@pytest.fixture(scope="module")
def run(data: Path, bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "ridge"
    said = diptych("train", "ridge", "--data", data, "--text_encoder", bert, "--output_dir", folder).stdout
    assert "(closed form)" in said
    return folder


def test_the_model_is_the_solution(run: Path, data: Path) -> None:
    model = Retriever.from_pretrained(run)
    training, validation = (prepare(model, part) for part in training_splits(open_captions(str(data))))
    line = read_log(run / "log.jsonl")[0]
    solved = accumulate(training, model.image_input).solve()
    metric = solved.metric(line["flooring"])
    images = np.stack([np.asarray(cells, np.float64).mean(0) for cells in validation.captions.images])  # type: ignore[arg-type, attr-defined]
    wanted = (images - solved.x) @ solved.weights(line["shrinkage"]).T @ metric
    wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
    assert np.allclose(model.encode_image(validation.captions.images).numpy(), wanted, atol=1e-5)
    said = diptych("evaluate", run, "--output", run.parent / "report.json").stdout
    best = next(line["validation_rsum"] for line in read_log(run / "log.jsonl") if "best" in line)
    assert f"{best:.1f}" in said


def test_again_is_refused_and_resuming_changes_nothing(run: Path, data: Path, bert: Path) -> None:
    arguments = ("train", "ridge", "--data", data, "--text_encoder", bert)
    assert "--resume_from_checkpoint" in refused(*arguments, "--output_dir", run)
    before = {path.name: path.read_bytes() for path in (run / "best").iterdir() if path.is_file()}
    said = diptych("train", "ridge", "--resume_from_checkpoint", run).stdout
    assert "(closed form)" in said
    assert before == {path.name: path.read_bytes() for path in (run / "best").iterdir() if path.is_file()}
    assert "--shrinkage" in refused("train", "ridge", "--resume_from_checkpoint", run, "--shrinkage", "3")


def test_more_epochs_go_on_from_the_solution(data: Path, bert: Path, tmp_path: Path) -> None:
    values = {"text_encoder": str(bert), "batch_size": 20, "learning_rate": 1e-3}
    settings = Settings(**values, epochs=2)  # type: ignore[arg-type]
    once = run_recipe(RECIPES["ridge"], settings, str(data), tmp_path / "once", show_progress=False)
    run_recipe(
        RECIPES["ridge"], replace(settings, epochs=0), str(data), tmp_path / "twice", show_progress=False
    )
    twice = run_recipe(
        RECIPES["ridge"], settings, str(data), tmp_path / "twice", resume=True, show_progress=False
    )
    assert [line["epoch"] for line in once.history] == [-1, 0, 1]
    assert once.history == twice.history
    assert once.best == max(line["validation_rsum"] for line in once.history)
    for name in ("retriever", "objective", "optimizer"):
        one, two = (load_file(tmp_path / run / "last" / f"{name}.safetensors") for run in ("once", "twice"))
        assert one.keys() == two.keys()
        assert all(torch.equal(one[key], two[key]) for key in one)


def test_too_few_texts_for_a_step(
    data: Path, bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(text_encoder=str(bert), batch_size=500, epochs=2)
    progress = run_recipe(RECIPES["ridge"], settings, str(data), tmp_path / "run", show_progress=False)
    assert [line["epoch"] for line in progress.history] == [-1]
    assert (
        "200 texts are too few for --batch_size 500: the closed form is the model." in capsys.readouterr().out
    )


def test_the_solution_stays_the_best_where_training_harms(data: Path, bert: Path, tmp_path: Path) -> None:
    settings = Settings(text_encoder=str(bert), batch_size=20, learning_rate=10.0, epochs=9, patience=2)
    progress = run_recipe(RECIPES["ridge"], settings, str(data), tmp_path / "run", show_progress=False)
    assert progress.best_epoch == -1
    assert [line["epoch"] for line in progress.history] == [-1, 0, 1]  # patience counts from the solution
    assert "closed form" in (tmp_path / "run" / "best" / "README.md").read_text("utf-8")


def test_pictures_are_indexed_and_searched(bert: Path, tmp_path: Path) -> None:
    folder, vit = photos(tmp_path / "photos"), vit_folder(tmp_path / "vit")
    diptych(
        "train", "ridge", "--data", folder, "--output_dir", tmp_path / "run", "--image_size", 32,
        "--image_encoder", vit, "--text_encoder", bert,
    )  # fmt: skip
    diptych("index", tmp_path / "run", folder)
    found = json.loads(diptych("search", f"{folder}.index", "a red dog", "-k", "3", "--json").stdout)
    assert len(found["hits"]) == 3


def test_bad_input(data: Path, bert: Path, tmp_path: Path) -> None:
    folder = ("--data", data, "--output_dir", tmp_path / "run")
    assert "--text_encoder" in refused("train", "ridge", *folder, "--text_encoder", "bigru")
    assert "--image_encoder" in refused(
        "train", "ridge", *folder, "--text_encoder", bert, "--image_encoder", "lite0"
    )
    assert "lite0" in refused(
        "train", "ridge", "--data", photos(tmp_path / "photos"), "--output_dir", tmp_path / "run",
        "--text_encoder", bert, "--image_encoder", "grid",
    )  # fmt: skip
    assert "--shrinkage" in refused("train", "ridge", *folder, "--shrinkage", "-1")
    model = RECIPES["ridge"].build(Settings(text_encoder=str(bert)), open_captions(str(data))).retriever
    prepared = prepare(model, open_captions(str(data)))
    with pytest.raises(SettingsError, match="--shrinkage"):
        Ridge()(model, prepared, None)


def named_grid() -> NamedGrid:
    """A tiny backbone whose classifier names eight things, in a space of 16 numbers."""
    torch.manual_seed(0)
    encoder = NamedGrid(Cells(), 8, 16)
    with torch.no_grad():
        encoder.words.bias.zero_()
    return encoder


class Cells(Backbone):
    """Four cells of a picture: the mean colours of its quarters, widened by a fixed layer."""

    channels = 6

    def __init__(self) -> None:
        super().__init__(size=8, mean=(0.5,) * 3, std=(0.5,) * 3)
        self.wide = nn.Linear(3, 6)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        quarters = nn.functional.adaptive_avg_pool2d(pixels, 2).flatten(2).transpose(1, 2)
        wide: torch.Tensor = self.wide(quarters)
        return wide


def test_names_follow_the_equation() -> None:
    encoder = named_grid().eval()
    encoder.share.fill_(0.5)
    pixels = torch.rand(3, 3, 8, 8)
    cells = encoder.backbone(pixels)
    found = encoder(pixels)
    assert found.values.shape == (3, 2, 16)
    assert torch.allclose(encoder(Features.whole(cells)).values, found.values, atol=1e-6)
    x = cells.mean(1).double()
    logits = x @ encoder.classifier.weight.double().T + encoder.classifier.bias.double()
    for row in range(3):
        shares = [math.exp(value / encoder.class_temperature) for value in logits[row].tolist()]
        shares = [share / sum(shares) for share in shares]
        names = sum(share * encoder.words.weight[:, c].double() for c, share in enumerate(shares))
        learned = encoder.linear.weight.double() @ x[row] + encoder.linear.bias.double()
        wanted = [learned / learned.norm(), 0.5 * names / names.norm()]  # type: ignore[union-attr, operator]
        assert torch.allclose(found.values[row].double(), torch.stack(wanted), atol=1e-5)
        assert not torch.allclose(found.values[row, 1].double(), 2 * wanted[1], atol=1e-3)
    trained = {name for name, parameter in encoder.named_parameters() if parameter.requires_grad}
    assert trained == {"linear.weight", "linear.bias"}
    with pytest.raises(SettingsError, match="class_temperature is 0"):
        NamedGrid(Cells(), 8, 16, class_temperature=0)


def test_names_help_where_they_are_right(bert: Path) -> None:
    """Names that tell the pictures apart get a share."""
    rng = np.random.default_rng(0)
    encoder = named_grid()
    text = TransformerText(str(bert), 16, trainable=False)
    retriever = Retriever(
        Tower(encoder, Mean()),
        Tower(text, Mean()),
        PixelInput(size=8),
        WordPieceInput(str(bert), augment=0.0),
    )
    data = []
    for seed, count in ((0, 6), (1, 30)):
        cells = np.random.default_rng(seed).standard_normal((count, 2, 6)).astype(np.float32) * 4
        names = names_of(encoder)(cells.mean(1).astype(np.float64))
        states = (names + 0.01 * rng.standard_normal(names.shape)).astype(np.float32)
        captions = Captions(
            ArrayStore(cells), [str(n) for n in range(count)], np.arange(count),
            [str(n) for n in range(count)], ["train"] * count,
        )  # fmt: skip
        data.append(Prepared(captions, CachedTexts(states, np.arange(count + 1))))
    chosen = Ridge()(retriever, *data)
    assert chosen["share"] > 0
    assert float(encoder.share) == chosen["share"]


def test_the_names_of_the_recipe_are_lite0s(tmp_path: Path) -> None:
    method = RECIPES["photos"].build(RECIPES["photos"].settings(), open_captions("emoji"))
    encoder = method.retriever.image.encoder
    assert isinstance(encoder, NamedGrid)
    assert encoder.words.weight.shape == (384, 1000)
    plain = RECIPES["photos"].build(RECIPES["photos"].settings(names=False), open_captions("emoji"))  # type: ignore[call-arg]
    assert not isinstance(plain.retriever.image.encoder, NamedGrid)
    method.retriever.save_pretrained(tmp_path / "model")
    loaded = Retriever.from_pretrained(tmp_path / "model")
    assert loaded.fingerprint() == method.retriever.fingerprint()
