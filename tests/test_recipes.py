"""Every recipe: builds, one step moves every trainable parameter, save and load change nothing."""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from dual_folders import clip_folder, vit_folder
from on_cpu import cpu_accelerator
from small import bert_folder, photos, pictures, precomputed

from diptych.aggregators import Mean
from diptych.data.captions import Captions
from diptych.data.formats import open_captions
from diptych.data.held_out import training_splits
from diptych.encoders.bigru import UniGRU
from diptych.errors import DataError, SettingsError
from diptych.evaluation.prepared import Prepared
from diptych.model.retriever import Retriever, Tower
from diptych.objectives.objective import after_epoch, after_step, start_epoch
from diptych.parts import describe
from diptych.recipes import RECIPES
from diptych.runs.train import seed_everything
from diptych.targets.columns import fill_targets
from diptych.training.loading import PairLoader
from diptych.training.method import Method
from diptych.training.optim import build_optimizer, trainable
from diptych.training.step import Step
from diptych.training.validation import show_pairs

SMALL = {
    "dim": 16, "batch_size": 12, "min_count": 1, "word_dim": 8,
    "queue_size": 30, "clusters": 6, "concept_size": 10, "prototype_epoch": 1,
    "blocks": 1, "feedforward": 32, "region_clusters": 5,
}  # fmt: skip


@pytest.fixture(scope="module")
def captions(tmp_path_factory: pytest.TempPathFactory) -> Captions:
    data = precomputed(tmp_path_factory.mktemp("data") / "toy_precomp")
    training = training_splits(open_captions(str(data)))[0]
    animals = [tuple(w for w in ("dog", "cat", "bird", "tree") if w in training.texts[5 * n]) or ("other",)
               for n in range(len(training.images))]  # fmt: skip
    return dataclasses.replace(training, labels={"labels": animals})


@dataclasses.dataclass(frozen=True)
class World:
    """Data that a recipe can read, and small models for those that start from pretrained ones."""

    features: Captions
    photos: Captions
    models: dict[str, dict[str, Any]]

    def captions(self, name: str) -> Captions:
        return self.photos if name in self.models else self.features


@pytest.fixture(scope="module")
def world(captions: Captions, tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("world")
    seen = training_splits(open_captions(str(photos(folder / "photos"))))[0]
    dual = {"model": str(clip_folder(folder / "clip"))}
    encoders = {
        "image_encoder": str(vit_folder(folder / "vit")), "text_encoder": str(bert_folder(folder / "bert")),
        "image_size": 32, "fusion_layers": 1, "fusion_heads": 2, "candidates": 4,
    }  # fmt: skip
    teacher = {"image_teacher": encoders["image_encoder"]}
    return World(
        captions, seen,
        {
            "clip": dual, "ridge": encoders, "photos": encoders, "fusion": encoders, "cusa-clip": {**dual, **teacher},
            "cusa-fusion": {**encoders, **teacher, "uni_dim": 8},
        },
    )  # fmt: skip


def built(name: str, captions: Captions, world: World | None = None, **changes: Any) -> tuple[Method, Any]:
    recipe = RECIPES[name]
    known = {field.name for field in dataclasses.fields(recipe.settings)}
    models = {} if world is None else world.models.get(name, {})
    values = {k: v for k, v in {**SMALL, **models, **changes}.items() if k in known}
    if "clusters" in values:
        values["clusters"] = min(values["clusters"], SMALL["clusters"])  # the tables' K need their data
    if values["batch_size"] > SMALL["batch_size"]:
        values["batch_size"] = SMALL["batch_size"]
    if "text_teacher" in known:
        values["text_teacher"] = teacher()
    settings = recipe.settings(**values)
    seed_everything(settings.seed)
    return recipe.build(settings, captions), settings


@functools.cache
def folder() -> Path:
    """A folder for the vectors of teachers, and for a small teacher of texts."""
    return Path(tempfile.mkdtemp())


@functools.cache
def teacher() -> str:
    return str(bert_folder(folder() / "bert"))


def loader_of(method: Method, captions: Captions, settings: Any) -> PairLoader:
    texts = method.retriever.text_input.prepare(captions.texts)
    device = torch.device("cpu")
    targets = fill_targets(method.targets, captions, device=device, show_progress=False)
    return PairLoader(
        captions,
        method.retriever.image_input,
        texts,
        settings.batch_size,
        settings.seed,
        targets=targets,
        views=method.views,
    )


def step(method: Method, optimizer: torch.optim.Optimizer, batch: Any) -> float:
    """One step of training itself, without the loop around it."""
    method.retriever.train()
    run = Step(method, method.retriever, optimizer, cpu_accelerator(), clip_norm=0.0)
    embeddings, whole, terms = run(batch)
    with torch.no_grad():
        after_step(method.objective, embeddings, whole)
    return float(torch.stack(list(terms.values())).sum())


@pytest.mark.parametrize("name", list(RECIPES))
def test_two_epochs_move_every_trainable_parameter(name: str, world: World) -> None:
    captions = world.captions(name)
    method, settings = built(name, captions, world)
    optimizer = build_optimizer(method, settings)
    before = {k: p.detach().clone() for k, p in trainable(method).items()}
    for epoch in range(2):  # prototypes start in the second
        start_epoch(method.objective, epoch)
        for batch in loader_of(method, captions, settings).epoch(epoch):
            step(method, optimizer, batch)
        with torch.no_grad():
            ready = Prepared(captions, method.retriever.text_input.prepare(captions.texts))
            show_pairs(method.objective, epoch, method.retriever, ready, show_progress=False)
            after_epoch(method.objective, epoch)
    assert before
    still = [k for k, p in trainable(method).items() if torch.equal(p, before[k])]
    # rows of words that no batch holds may stay; whole tensors may not
    assert not still


def test_a_part_may_be_replaced_after_build(captions: Captions) -> None:
    method, settings = built("coder", captions)
    words = method.retriever.text_input.vocabulary_size  # type: ignore[attr-defined]
    method.retriever.text = Tower(UniGRU(words, 4, settings.dim), Mean())
    optimizer = build_optimizer(method, settings)
    before = {name: p.clone() for name, p in method.retriever.text.named_parameters()}
    for _, batch in zip(range(2), loader_of(method, captions, settings).epoch(0), strict=False):
        step(method, optimizer, batch)
    assert method.twin is not None
    keys = dict(method.twin.get_submodule("retriever.text").named_parameters())
    assert set(keys) == set(before)
    for name, parameter in method.retriever.text.named_parameters():
        assert not torch.equal(parameter, before[name])
        # the twin starts at the new tower and follows it slowly
        assert (keys[name] - before[name]).norm() < (parameter - before[name]).norm()


@pytest.mark.parametrize("name", list(RECIPES))
def test_save_and_load_change_nothing(name: str, world: World, tmp_path: Path) -> None:
    captions = world.captions(name)
    method, settings = built(name, captions, world)
    optimizer = build_optimizer(method, settings)
    for batch in loader_of(method, captions, settings).epoch(0):
        step(method, optimizer, batch)
    model = method.retriever
    model.save_pretrained(tmp_path / "model")
    loaded = Retriever.from_pretrained(tmp_path / "model")
    assert loaded.fingerprint() == model.fingerprint()
    assert torch.equal(loaded.encode_text(captions.texts), model.encode_text(captions.texts))
    assert torch.equal(loaded.encode_image(captions.images), model.encode_image(captions.images))
    norms = model.encode_text(captions.texts).norm(dim=1)
    assert torch.allclose(norms, torch.ones_like(norms), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("vse-infinity", "c1eed6b09f6f533c"),
        ("vse-plus-plus", "72ee3ef6bcd30c14"),
        ("coder", "cf16ad3bf226b47f"),
    ],
)
def test_models_are_described_as_ever(name: str, digest: str, captions: Captions) -> None:
    """Indexes know their model by a fingerprint of its description and weights: a new argument goes into LATER."""
    described = json.dumps(describe(built(name, captions)[0].retriever), sort_keys=True)
    assert hashlib.sha256(described.encode()).hexdigest()[:16] == digest


def test_a_changed_weight_changes_the_fingerprint(captions: Captions) -> None:
    model = built("vse-infinity", captions)[0].retriever
    other = copy.deepcopy(model)
    assert other.fingerprint() == model.fingerprint()
    with torch.no_grad():
        next(other.parameters()).add_(1e-3)
    assert other.fingerprint() != model.fingerprint()


def test_transformer_text_and_multipliers(captions: Captions, tmp_path: Path) -> None:
    bert = bert_folder(tmp_path / "bert")
    method, settings = built("vse-infinity", captions, text_encoder=str(bert))
    optimizer = build_optimizer(method, settings)
    rates = sorted(group["lr"] for group in optimizer.param_groups)
    assert rates == pytest.approx([5e-5, 5e-4])
    slow = {id(p) for g in optimizer.param_groups if g["lr"] < 1e-4 for p in g["params"]}
    assert slow == {id(p) for p in method.retriever.text.encoder.model.parameters()}  # type: ignore[union-attr]
    method.retriever.save_pretrained(tmp_path / "model")
    loaded = Retriever.from_pretrained(tmp_path / "model")
    assert loaded.fingerprint() == method.retriever.fingerprint()
    assert torch.equal(loaded.encode_text("a dog"), method.retriever.encode_text("a dog"))


def test_pictures_given_to_a_region_model(captions: Captions, tmp_path: Path) -> None:
    picture = pictures(tmp_path, 1)[0]
    model = built("vse-infinity", captions)[0].retriever
    with pytest.raises(DataError, match=r"\b16\b"):
        model.encode_image(picture)


def test_encoder_names_that_do_not_fit(captions: Captions) -> None:
    with pytest.raises(SettingsError, match="bertt"):
        built("vse-infinity", captions, text_encoder="bertt")
    with pytest.raises(SettingsError, match="lite0"):
        built("vse-infinity", captions, image_encoder="lite0")
    with pytest.raises(SettingsError, match="--gpo_data_dependent"):
        built("vse-infinity", captions, gpo_data_dependent=True, gpo_sequence="transformer")


def test_info_nce_in_the_place_of_the_hinge(captions: Captions) -> None:
    method, settings = built("vse-infinity", captions, objective="info_nce")
    optimizer = build_optimizer(method, settings)
    before = [p.detach().clone() for p in method.objective.parameters()]
    batches = list(loader_of(method, captions, settings).epoch(0))
    losses = [step(method, optimizer, batch) for _ in range(4) for batch in batches]
    assert losses[-1] < losses[0]
    assert before
    assert not any(torch.equal(a, b) for a, b in zip(before, method.objective.parameters(), strict=True))


@pytest.mark.parametrize("name", list(RECIPES))
def test_any_objective_on_any_host(name: str, world: World) -> None:
    captions = world.captions(name)
    method, settings = built(name, captions, world, objective="own + 0.5*info_nce + dcl")
    batch = next(loader_of(method, captions, settings).epoch(0))
    start_epoch(method.objective, 1)
    run = Step(method, method.retriever.train(), build_optimizer(method, settings), cpu_accelerator(), 0.0)
    _, _, terms = run(batch)
    assert {"info_nce", "dcl"} <= set(terms)
    assert len(terms) >= 3


def test_settings_that_coder_would_not_read_are_refused(captions: Captions) -> None:
    with pytest.raises(SettingsError, match="--contrast_margin"):
        built("coder", captions, margin=0.3)


def test_settings_of_another_kind_of_images_are_refused(captions: Captions) -> None:
    with pytest.raises(SettingsError, match="--train_backbone"):
        built("vse-infinity", captions, train_backbone=True)
    with pytest.raises(SettingsError, match="--image_encoder"):
        built("vse-infinity", captions, unit_input=True)
    method, _ = built("vse-plus-plus", captions, image_encoder="grid", unit_input=True)
    assert method.retriever.image.encoder.unit_input is True
