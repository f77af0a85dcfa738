"""Fine-tuning a dual encoder: in full, its heads, or adapters; and training a fusion re-ranker, as a user would."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from commands import diptych, flags, refused
from dual_folders import clip_folder, vit_folder
from safetensors.torch import load_file
from small import bert_folder, photos, precomputed

from diptych.data.formats import open_captions
from diptych.model.retriever import Retriever
from diptych.objectives.contrastive import InfoNCE
from diptych.recipes import RECIPES
from diptych.training.optim import build_optimizer, schedule_of
from diptych.types import as_inputs

SMALL = {"epochs": 2, "batch_size": 8, "learning_rate": 1e-3, "log_steps": 1}


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clip_folder(tmp_path_factory.mktemp("models") / "clip")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photos(tmp_path_factory.mktemp("data") / "photos")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def train(recipe: str, data: Path, run: Path, *more: object, **settings: object) -> None:
    diptych("train", recipe, "--data", data, "--output_dir", run, *flags({**SMALL, **settings}), *more)


def changed(run: Path, clip: Path) -> set[str]:
    """Names of the weights that training moved."""
    before = Retriever.from_pretrained(clip).state_dict()
    after = Retriever.from_pretrained(run).state_dict()
    return {name for name, value in before.items() if not torch.equal(value, after[name])}


@pytest.mark.parametrize("tune", ["full", "lora"])
def test_a_tuned_model_is_searched_like_any_other(tune: str, clip: Path, data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train("clip", data, run, model=clip, tune=tune, lora_rank=2)
    moved = changed(run, clip)
    assert moved
    if tune == "lora":
        assert all("q_proj.weight" in name or "v_proj.weight" in name for name in moved)
        assert not any("lora" in name for name in load_file(run / "best" / "model.safetensors"))
    else:
        assert any("mlp" in name for name in moved)
    diptych("index", run, data, "--index", tmp_path / "index")
    hits = json.loads(diptych("search", tmp_path / "index", "a red dog", "--json").stdout)["hits"]
    assert hits


def test_heads_are_trained_on_vectors_computed_once(
    clip: Path, data: Path, tmp_path: Path, cache: Path
) -> None:
    run = tmp_path / "run"
    train("clip", data, run, "--cross_head", model=clip, tune="heads")
    model, plain = Retriever.from_pretrained(run), Retriever.from_pretrained(clip)
    assert model.dim == plain.dim
    for name, value in plain.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])
    assert any(cache.glob("images/*/rows-*.f16"))
    assert "--cross_head" in refused(
        "train", "clip", "--data", data, "--output_dir", tmp_path / "none", "--model", clip, "--tune", "heads"
    )


def test_a_run_with_adapters_goes_on_where_it_stopped(clip: Path, data: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train("clip", data, whole, model=clip, tune="lora", schedule="step")
    train("clip", data, parts, model=clip, tune="lora", schedule="step", epochs=1)
    diptych("train", "clip", "--resume_from_checkpoint", parts, "--epochs", "2")
    for name in ("whole", "parts"):
        assert (tmp_path / name / "best" / "config.json").is_file()
    states = [
        load_file(next((tmp_path / name).glob("**/retriever.safetensors"))) for name in ("whole", "parts")
    ]
    assert states[0].keys() == states[1].keys()
    assert any(".lora_A." in name for name in states[0])
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_the_numbers_are_those_of_the_paper(clip: Path, data: Path) -> None:
    recipe = RECIPES["clip"]
    settings = recipe.settings(model=str(clip))
    method = recipe.build(settings, open_captions(str(data)))
    assert isinstance(method.objective, InfoNCE)
    assert float(method.objective.temperature.detach()) == pytest.approx(0.05)
    assert (method.objective.clamp, method.objective.reduction) == ((0.01, 0.1), "per_entry")
    groups = build_optimizer(method, settings).param_groups
    for group in groups:
        assert group["lr"] == pytest.approx(1e-5)
        wanted = {parameter.dim() != 1 for parameter in group["params"]}
        assert wanted == {group["weight_decay"] == pytest.approx(1e-4)}
    schedule = schedule_of(settings, steps_per_epoch=7)
    for epoch in (0, 10, 39):  # per epoch, from 1e-5 to 1e-6 along a cosine
        share = epoch / settings.epochs
        expected = 0.1 + 0.9 * (1 + math.cos(math.pi * share)) / 2
        assert schedule.factor(7 * epoch) == schedule.factor(7 * epoch + 6)
        assert schedule.factor(7 * epoch) == pytest.approx(expected, abs=0.02)
    own = recipe.build(recipe.settings(model=str(clip), temperature=0), open_captions(str(data)))
    assert float(own.objective.temperature.detach()) == pytest.approx(
        method.retriever.image.encoder.temperature, abs=1e-3
    )


def test_a_fusion_run_is_evaluated_by_reranking(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(
        "fusion", data, run, image_encoder=vit_folder(tmp_path / "vit"), text_encoder=bert_folder(tmp_path / "bert"),
        image_size=32, fusion_layers=1, fusion_heads=2, dim=8, candidates=500,
    )  # fmt: skip
    said = diptych("evaluate", run, "--data", data, "--split", "train", "--bootstrap", "0").stdout
    assert "fusion" in said  # the card names the scorer; k above the gallery means all of it
    diptych("index", run, data, "--index", tmp_path / "index")
    asked = ("search", tmp_path / "index", "a red dog", "--all", "-k", "20", "--json")
    plain, judged = (json.loads(diptych(*asked, *more).stdout)["hits"] for more in ((), ("--rerank", "12")))
    assert {hit["id"] for hit in plain} == {hit["id"] for hit in judged}
    model = Retriever.from_pretrained(run)
    files = [data / hit["id"] for hit in judged]
    expected = model.scores(files, ["a red dog"]).tile(slice(None), slice(None))[:, 0]
    assert [hit["score"] for hit in judged] == pytest.approx(expected.tolist(), abs=1e-2)
    assert (expected.diff() <= 1e-3).all()  # best first


def test_stored_features_are_refused(clip: Path, tmp_path: Path) -> None:
    features = precomputed(tmp_path / "toy_precomp")
    said = refused("train", "clip", "--data", features, "--output_dir", tmp_path / "run", "--model", clip)
    assert "toy_precomp" in said
    assert not (tmp_path / "run").exists()


def test_poolings_read_patches_and_words(clip: Path, data: Path, tmp_path: Path) -> None:
    """In a set of the pooled vector alone, all poolings would be the same."""
    run, captions = tmp_path / "run", open_captions(data)
    train("clip", data, run, model=clip, image_pool="max", text_pool="mean")
    model = Retriever.from_pretrained(run).eval()
    with torch.inference_mode():
        patches = model.image.encoder(as_inputs(model.image_input(captions.images))).values
    assert patches.shape[1] > 2
    expected = torch.nn.functional.normalize(patches.amax(1), dim=-1)
    torch.testing.assert_close(model.encode_image(captions.images), expected)
    diptych("export", "runtime", run, tmp_path / "light")  # compares both
