"""CUSA on CLIP and on the fusion re-ranker: where its heads sit, its weights, its teachers, and what α = β = 0 is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dual_folders import clip_folder, vit_folder
from on_cpu import cpu_accelerator
from small import bert_folder, photos
from small_senteval import write_senteval
from torch import nn

from diptych.branches.branch import FirstVectors, UniModalHeads
from diptych.data.captions import Captions
from diptych.data.formats import open_captions
from diptych.data.text_inputs import clean_caption
from diptych.errors import SettingsError
from diptych.evaluation.sts import Sts, name_of_view
from diptych.model.named import text_teacher
from diptych.objectives.combine import Parted, Sum
from diptych.objectives.contrastive import ITM
from diptych.objectives.soft_labels import CrossModalSoftLabels, UniModalSoftLabels
from diptych.recipes import RECIPES
from diptych.recipes.provide import provided
from diptych.runs.train import run_recipe, seed_everything
from diptych.targets.columns import Resident, fill_targets
from diptych.targets.teachers import vectors_of_texts
from diptych.training.loading import PairLoader
from diptych.training.method import Method
from diptych.training.optim import build_optimizer
from diptych.training.step import Step
from diptych.training.teachers import Teachers
from diptych.types import as_inputs

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("cusa")
    clip_folder(made / "clip")
    vit_folder(made / "vit")
    bert_folder(made / "bert")
    photos(made / "photos")
    return made


def built(name: str, folder: Path, **changes: Any) -> tuple[Method, Any, Captions]:
    recipe = RECIPES[name]
    values: dict[str, Any] = {"batch_size": 6}
    if "clip" in name:
        values["model"] = str(folder / "clip")
    else:
        values |= {
            "image_encoder": str(folder / "vit"),
            "text_encoder": str(folder / "bert"),
            "image_size": 32,
        }
        values |= {"fusion_layers": 1, "fusion_heads": 2, "dim": 8}
    if name.startswith("cusa"):
        values |= {"image_teacher": str(folder / "vit"), "text_teacher": str(folder / "bert")}
    settings = recipe.settings(**{**values, **changes})
    captions = open_captions(str(folder / "photos"))
    seed_everything(0)
    return recipe.build(settings, captions), settings, captions


def stepped(
    name: str, folder: Path, *, held: bool = False, **changes: Any
) -> tuple[Method, dict[str, float]]:
    """The method after one step, and the terms of that step; teachers' vectors from the loader, or ``held``."""
    method, settings, captions = built(name, folder, **changes)
    seed_everything(1)
    targets = fill_targets(method.targets, captions, device=CPU, show_progress=False)
    texts = method.retriever.text_input.prepare(captions.texts)
    resident = Resident(targets if held else {}, captions, CPU)
    loader = PairLoader(
        captions,
        method.retriever.image_input,
        texts,
        settings.batch_size,
        0,
        targets={} if held else targets,
    )
    optimizer = build_optimizer(method, settings)
    step = Step(method, method.retriever.train(), optimizer, cpu_accelerator(), 0.0, resident)
    _, _, terms = step(next(iter(loader.epoch(0))))
    return method, {name: float(value) for name, value in terms.items()}


@pytest.mark.parametrize(
    ("name", "host", "more"), [("cusa-clip", "clip", {"cross_head": True}), ("cusa-fusion", "fusion", {})]
)
def test_without_soft_labels_it_is_the_host_bit_for_bit(
    name: str, host: str, more: dict[str, Any], folder: Path
) -> None:
    rate = {"learning_rate": 1e-3}
    soft, soft_terms = stepped(name, folder, csa=0.0, usa=0.0, **rate)
    plain, terms = stepped(host, folder, **more, **rate)
    assert soft_terms == terms
    assert soft.targets == ()
    states = soft.retriever.state_dict(), plain.retriever.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())


@pytest.mark.parametrize("name", ["cusa-clip", "cusa-fusion"])
def test_vectors_held_on_the_device_train_the_same(name: str, folder: Path) -> None:
    (read, terms), (held, held_terms) = stepped(name, folder), stepped(name, folder, held=True)
    assert terms == held_terms
    other = held.retriever.state_dict()
    assert all(torch.equal(value, other[key]) for key, value in read.retriever.state_dict().items())


def test_clip_has_four_independent_heads(folder: Path) -> None:
    method, terms = stepped("cusa-clip", folder)
    assert set(terms) == {"hard", "csa", "usa"}
    assert isinstance(method.objective, Sum)
    assert method.objective.weights == {"hard": 1.0, "csa": 0.10, "usa": 0.50}
    model = method.retriever
    uni = model.branches["uni"]
    assert isinstance(uni, UniModalHeads)
    heads = [model.image.aggregator.head, model.text.aggregator.head, uni.image_head, uni.text_head]
    for head in heads:
        assert isinstance(head[0], nn.LayerNorm)
        assert isinstance(head[1], nn.Linear)
        assert (head[1].in_features, head[1].out_features) == (12, 12)
    assert len({id(parameter) for head in heads for parameter in head.parameters()}) == 4 * 4
    # every head reads the encoder's own vector f, not the other head's output
    plain = built("clip", folder)[0].retriever
    with torch.no_grad():
        f = model.text.encoder(as_inputs(model.text_input(["a red dog"]))).values[:, 0]
        expected = nn.functional.normalize(uni.text_head(f))
    model.eval()
    assert torch.allclose(model.encode_text("a red dog", view="uni"), expected, atol=1e-6)
    assert plain.dim == model.dim == 12


def test_rows_without_usa_compare_the_encoders_own_vectors(folder: Path) -> None:
    model = built("cusa-clip", folder, usa=0.0)[0].retriever.eval()
    assert isinstance(model.branches["uni"], FirstVectors)
    plain = built("clip", folder)[0].retriever.eval()
    assert torch.allclose(
        model.encode_text("a red dog", view="uni"), plain.encode_text("a red dog"), atol=1e-6
    )


@pytest.mark.parametrize(("name", "more"), [("fusion", {}), ("cusa-fusion", {"csa": 0.0, "usa": 0.0})])
def test_a_fusion_model_without_heads_compares_raw_tokens(
    name: str, more: dict[str, Any], folder: Path
) -> None:
    model = built(name, folder, **more)[0].retriever.eval()
    with torch.no_grad():
        text = model.text.encoder(as_inputs(model.text_input(["a red dog"]))).values[:, 0]
    found = model.encode_text("a red dog", view="uni")
    assert torch.allclose(found, nn.functional.normalize(text), atol=1e-6)
    image = model.encode_image(open_captions(str(folder / "photos")).images, view="uni")
    assert (image.shape[1], found.shape[1]) == (model.image.encoder.dim, model.text.encoder.dim)
    assert name_of_view(model) == "the encoders' own"


def test_a_report_names_the_vectors_it_compares(folder: Path) -> None:
    assert name_of_view(built("cusa-clip", folder)[0].retriever) == "uni-modal heads"
    assert name_of_view(built("clip", folder, cross_head=True)[0].retriever) == "the encoders' own"
    assert name_of_view(built("clip", folder)[0].retriever) == "the towers' own"


@pytest.mark.parametrize("name", ["fusion", "cusa-fusion"])
def test_new_layers_of_a_fusion_learn_faster_with_the_betas_of_x_vlm(name: str, folder: Path) -> None:
    method, settings, _ = built(name, folder)
    groups = build_optimizer(method, settings).param_groups
    assert {group["betas"] for group in groups} == {(0.9, 0.98)}
    rates = {id(p): group["lr"] for group in groups for p in group["params"]}
    for name, parameter in method.retriever.named_parameters():
        new = not name.startswith(("image.encoder", "text.encoder"))
        assert rates[id(parameter)] == pytest.approx(settings.learning_rate * (2 if new else 1)), name


def test_a_teacher_reads_its_own_size_and_cleaned_texts(folder: Path) -> None:
    assert built("cusa-fusion", folder)[0].targets[0].image_size == 224
    assert built("cusa-fusion", folder, teacher_image_size=64)[0].targets[0].image_size == 64
    own, _, captions = built("clip", folder)
    added = replace(own, objective=Sum({"own": (own.objective, 1.0), "csa": (CrossModalSoftLabels(), 1.0)}))
    assert provided(added, None, captions).targets[0].clean


def test_uni_modal_soft_labels_train_heads_and_not_the_encoders_own_vectors(folder: Path) -> None:
    own, _, captions = built("clip", folder, cross_head=True)
    added = replace(own, objective=Sum({"own": (own.objective, 1.0), "usa": (UniModalSoftLabels(), 1.0)}))
    assert isinstance(provided(added, None, captions).retriever.branches["uni"], UniModalHeads)
    trained = built("cusa-clip", folder)[0]
    assert provided(trained, None, captions).retriever is trained.retriever


def test_only_a_teacher_that_opens_pictures_needs_all_of_them() -> None:
    assert Teachers("lite0").opens_every_picture
    assert not Teachers("lite0", live=("image", "text")).opens_every_picture
    assert not Teachers("train_unicom.npy").opens_every_picture


def test_a_mode_that_a_fusion_cannot_follow_is_refused(folder: Path) -> None:
    with pytest.raises(SettingsError, match="--soft_mode"):
        built("cusa-fusion", folder, soft_mode="add")


def test_a_damaged_picture_does_not_stop_the_teacher(folder: Path, tmp_path: Path) -> None:
    data = photos(tmp_path / "photos")
    first = sorted(file for file in data.iterdir() if file.suffix == ".png")[0]
    first.write_bytes(first.read_bytes()[:100])
    settings = built("cusa-clip", folder, epochs=1)[1]
    run_recipe(
        RECIPES["cusa-clip"],
        settings,
        str(data),
        tmp_path / "run",
        show_progress=False,
    )
    assert first.name in (tmp_path / "run" / "unreadable.txt").read_text()


def test_weights_keep_their_balance_beside_a_loss_per_row(folder: Path) -> None:
    method, settings, _ = built("cusa-clip", folder, hard_reduction="per_row")
    assert method.objective.weights["csa"] == pytest.approx(0.10 * settings.batch_size)
    parted, settings, _ = built("cusa-clip", folder, hard_reduction="per_row", loss_parts=3)
    assert isinstance(parted.objective, Parted)
    assert parted.objective.objective.weights["csa"] == pytest.approx(0.10 * settings.batch_size / 3)
    with pytest.raises(SettingsError, match="--batch_size 6"):
        built("cusa-clip", folder, loss_parts=4)


def test_sts_sentences_are_read_as_they_are(folder: Path, tmp_path: Path) -> None:
    """The published rows do not clean: a model that cleans captions must see "isn't", not "isn t"."""
    cleans = built("cusa-clip", folder)[0].retriever.eval()
    raw = built("cusa-clip", folder, clean_captions=False)[0].retriever.eval()
    raw.load_state_dict(cleans.state_dict())
    text = "He ISN'T here, is he?"
    assert not torch.allclose(cleans.encode_text(text), raw.encode_text(text))
    data = Sts(write_senteval(tmp_path, pairs=8))
    assert data(cleans).metrics == data(raw).metrics
    assert "not cleaned" in "\n".join(data(cleans).card.lines())


@pytest.mark.parametrize("clean", [True, False])
def test_the_text_teacher_reads_what_the_model_reads(clean: bool, folder: Path, tmp_path: Path) -> None:
    method, _, captions = built("cusa-clip", folder, clean_captions=clean)
    loud = [f"{text.upper()}!" for text in captions.texts]
    captions = Captions(captions.images, loud, captions.image_of, captions.image_ids, captions.splits)
    columns = fill_targets(method.targets, captions, device=CPU, show_progress=False)
    read = [clean_caption(text) for text in loud] if clean else loud
    expected = vectors_of_texts(
        text_teacher(str(folder / "bert")), read, tmp_path / "own", show_progress=False
    )
    rows = torch.arange(len(loud)).numpy()
    assert (columns["teacher_text"].rows(rows) == expected.rows(rows)).all()


def test_soft_labels_enter_the_fusion_through_its_match_targets(folder: Path) -> None:
    method, terms = stepped("cusa-fusion", folder)
    assert set(terms) == {"itc", "itm", "usa"}
    members = method.objective.members
    assert isinstance(members["itm"], ITM)
    assert members["itm"].alpha == 0.30
    assert method.objective.weights == {"itc": 1.0, "itm": 1.0, "usa": 0.75}
    uni = method.retriever.branches["uni"]
    assert isinstance(uni.image_head, nn.Linear)
    assert (uni.image_head.in_features, uni.image_head.out_features) == (16, 256)
    _, hard = stepped("cusa-fusion", folder, csa=0.0)
    assert hard["itm"] != terms["itm"]
    assert hard["itc"] == terms["itc"]
