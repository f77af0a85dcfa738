"""The recipe of label-wise retrieval: every baseline, its targets, its evaluator, and the commands."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import diptych, flags, refused
from small import WORDS, bert_folder, pictures
from test_label_data import label_arrays

from diptych.branches.labels import ContextPrediction, LabelView
from diptych.data.captions import Captions
from diptych.data.formats import open_captions
from diptych.errors import DataError, SettingsError
from diptych.evaluation.label_retrieval import LabelRetrieval
from diptych.evaluation.labels import label_metrics, micro_f1
from diptych.evaluation.prepared import Prepared
from diptych.model.retriever import Retriever
from diptych.recipes.labelwise import RECIPE, Settings
from diptych.runs.train import seed_everything
from diptych.targets.columns import fill_targets
from diptych.targets.labels import LabelTargets, RegionTargets, detector_classes
from diptych.training.loading import PairLoader
from diptych.training.method import Method
from diptych.types import as_inputs

TINY = {
    "dim": 16, "blocks": 1, "heads": 2, "feedforward": 16, "word_dim": 8, "batch_size": 8, "epochs": 3,
    "learning_rate": 3e-3, "region_clusters": 5, "log_steps": 1,
}  # fmt: skip
BASELINES = ["ours", "ours+con", "independent", "traditional", "traditional+con", "dscmr"]


def label_data(folder: Path, train: int = 24, dev: int = 12, test: int = 0) -> Path:
    """Precomputed regions whose words are their labels, and COCO-like annotations that say so."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(1)
    codes = rng.standard_normal((len(WORDS), 12)).astype(np.float32)
    notes, number = [], 0
    for split, count in (("train", train), ("dev", dev), ("test", test)):
        if not count:
            continue
        lines, features = [], np.zeros((count, 4, 12), np.float32)
        for image in range(count):
            chosen = rng.choice(6, size=2, replace=False) + 9  # dog, cat, bird, house, tree, car
            features[image] = codes[np.concatenate([chosen, rng.choice(9, 2)])] + 0.1 * rng.standard_normal(
                (4, 12)
            )
            lines += [" ".join(["the", *(WORDS[w] for w in rng.permutation(chosen))]) for _ in range(5)]
            number += 1
            notes += [{"image_id": number, "category_id": int(w)} for w in chosen]
        np.save(folder / f"{split}_ims.npy", features)
        (folder / f"{split}_caps.txt").write_text("\n".join(lines) + "\n", "utf-8")
        ids = range(number - count + 1, number + 1)
        (folder / f"{split}_ids.txt").write_text("\n".join(map(str, ids)) + "\n")
    names = [{"id": w, "name": WORDS[w]} for w in range(9, 15)]
    (folder / "instances_val2014.json").write_text(json.dumps({"categories": names, "annotations": notes}))
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = label_data(tmp_path_factory.mktemp("labels") / "toy")
    return f"{folder}?instances={folder}"


@pytest.fixture(scope="module")
def captions(data: str) -> Captions:
    return open_captions(data)


def built(captions: Captions, **changes: object) -> tuple[Method, Settings]:
    settings = Settings(**{**TINY, **changes})  # type: ignore[arg-type]
    seed_everything(0)
    return RECIPE.build(settings, captions.split("train")), settings


def names(method: Method) -> set[str]:
    return set(method.retriever.branches)


def test_what_is_shared_and_what_each_baseline_adds(captions: Captions) -> None:
    ours = built(captions)[0].retriever
    assert ours.image.encoder.blocks is ours.text.encoder.blocks
    assert ours.image.aggregator is ours.text.aggregator
    assert ours.dim == 6
    assert names(built(captions)[0]) == {"labels", "context"}
    assert names(built(captions, baseline="ours+con")[0]) == {"labels", "context", "front"}
    assert names(built(captions, context_weight=0)[0]) == {"labels"}
    assert names(built(captions, baseline="traditional+con")[0]) == {"labels", "front"}
    for baseline in ("independent", "traditional"):
        two = built(captions, baseline=baseline)[0].retriever
        assert set(two.branches) == {"labels"}
        assert two.image.encoder.blocks is not two.text.encoder.blocks
        assert two.image.aggregator is not two.text.aggregator
    dscmr = built(captions, baseline="dscmr")[0].retriever
    assert dscmr.dim == 16
    assert dscmr.image.aggregator.common is dscmr.text.aggregator.common
    assert dscmr.image.aggregator.own is not dscmr.text.aggregator.own


def test_feature_space_is_a_switch(captions: Captions) -> None:
    method, _ = built(captions, space="feature")
    model = method.retriever
    assert model.dim == 16
    text = model.encode_text("the dog")
    states = model.text.encoder.eval()(as_inputs(model.text_input(["the dog"])))
    mean = states.values[states.mask].mean(0, keepdim=True)
    assert torch.allclose(text, torch.nn.functional.normalize(mean, dim=1), atol=1e-5)


def test_two_networks_get_no_gradient_from_each_other(captions: Captions) -> None:
    """Independent: what moves the image network does not depend on the texts at all."""
    method, _ = built(captions, baseline="independent")
    train = captions.split("train")
    targets = fill_targets(method.targets, train, device=torch.device("cpu"), show_progress=False)
    texts = method.retriever.text_input.prepare(train.texts)
    batch = next(PairLoader(train, method.retriever.image_input, texts, 8, 0, targets=targets).epoch(0))
    method.retriever.eval()

    def gradients(batch: object) -> list[torch.Tensor]:
        method.retriever.zero_grad()
        terms = method.objective(method.retriever(batch), batch)  # type: ignore[arg-type]
        torch.stack(list(terms.values())).sum().backward()
        return [p.grad.clone() for p in method.retriever.image.parameters() if p.grad is not None]

    first = gradients(batch)
    other = replace(batch, texts=batch.texts.map(lambda t: t.flip(0)))
    assert first
    assert all(torch.equal(a, b) for a, b in zip(first, gradients(other), strict=True))


@pytest.mark.parametrize("baseline", BASELINES)
def test_every_baseline_trains_evaluates_and_labels(baseline: str, data: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = diptych(
        "train", "labelwise", "--data", data, "--output_dir", run, *flags({**TINY, "baseline": baseline})
    )
    assert "best validation NDCG" in done.stdout
    evaluated = diptych("evaluate", run, "--bootstrap", "20").stdout
    assert "NDCG@500" in evaluated
    assert "micro-F1" in evaluated
    assert "chosen on this split" in evaluated
    evaluated = diptych("evaluate", run, "--split", "train", "--bootstrap", "0").stdout
    assert "of the model, chosen on its validation split" in evaluated
    assert "RSUM" in evaluated
    model = Retriever.from_pretrained(run)
    assert model.branches["labels"].labels.names == ["bird", "car", "cat", "dog", "house", "tree"]
    assert len(model.predict_labels(texts=["the dog"], top=1)[0]) == 1


@pytest.mark.parametrize(
    "changes", [{"space": "feature"}, {"interactive": "alternate"}, {"label_loss": "bce"}]
)
def test_the_switches_train(changes: dict[str, str], data: str, tmp_path: Path) -> None:
    diptych("train", "labelwise", "--data", data, "--output_dir", tmp_path / "r", *flags({**TINY, **changes}))
    history = [json.loads(line) for line in (tmp_path / "r" / "log.jsonl").read_text().splitlines()]
    assert any("validation_ndcg" in line for line in history)


def test_it_learns_the_labels(data: str, tmp_path: Path) -> None:
    changes = {**TINY, "epochs": 16, "learning_rate": 5e-3, "dropout": 0}
    diptych("train", "labelwise", "--data", data, "--output_dir", tmp_path / "r", *flags(changes))
    diptych("evaluate", tmp_path / "r", "--bootstrap", 0, "--output", tmp_path / "report.json")
    metrics = json.loads((tmp_path / "report.json").read_text())["groups"][0]["metrics"]
    assert min(metrics["image_f1"], metrics["text_f1"]) > 65  # an untrained model: below 55
    assert metrics["ndcg"] > 85


def test_a_stopped_run_goes_on_to_the_same_weights(data: str, tmp_path: Path) -> None:
    for interactive in ("joint", "alternate"):
        changes = {
            **TINY,
            "interactive": interactive,
            "batch_size": 40,
        }  # three steps an epoch: the turn is odd
        whole, part = tmp_path / f"{interactive}-whole", tmp_path / f"{interactive}-part"
        diptych("train", "labelwise", "--data", data, "--output_dir", whole, *flags(changes))
        diptych("train", "labelwise", "--data", data, "--output_dir", part, *flags({**changes, "epochs": 1}))
        diptych("train", "labelwise", "--resume_from_checkpoint", part, "--epochs", 3)
        first, second = (sorted((run / "last").glob("*.safetensors")) for run in (whole, part))
        assert [file.read_bytes() for file in first] == [file.read_bytes() for file in second]


def test_the_evaluator_says_what_the_functions_say(captions: Captions) -> None:
    method, _ = built(captions)
    model, part = method.retriever.eval(), captions.split("val")
    ready = Prepared(part, model.text_input.prepare(part.texts))
    group = LabelRetrieval(depth=7, choose=True, bootstrap=50)(model, ready)
    view = model.branches["labels"]
    rows = view.labels.rows_of(part)
    scores = model.encode_image(part.images) @ model.encode_text(part.texts).T
    expected = label_metrics(scores, rows, rows[part.image_of], depth=7)
    for name, value in expected.items():
        assert group.metrics[name] == pytest.approx(value, abs=1e-6), name
        low, high = group.intervals[name]
        assert low <= value + 1e-9
        assert value <= high + 1e-9
    p = model.encode_image(part.images, view="labels")
    chosen = float(view.thresholds[0])
    assert group.metrics["image_f1"] == pytest.approx(micro_f1(p, rows, round(chosen, 6)))
    assert f"image {chosen:.2f}" in "\n".join(group.card.lines())
    assert group.primary == "ndcg"
    view.thresholds[:] = 0.0
    again = LabelRetrieval(depth=7, choose=False)(model, ready)
    assert view.thresholds.tolist() == [0.0, 0.0]  # left alone
    assert again.metrics["text_f1"] == pytest.approx(micro_f1(torch.ones(60, 6), rows[part.image_of], 0.5))
    feature = built(captions, space="feature")[0].retriever.eval()
    metrics = LabelRetrieval(depth=7)(feature, Prepared(part, feature.text_input.prepare(part.texts))).metrics
    scores = feature.encode_image(part.images) @ feature.encode_text(part.texts).T
    assert metrics["ndcg"] == pytest.approx(label_metrics(scores, rows, rows[part.image_of], depth=7)["ndcg"])


def test_equal_tag_sets_are_merged_where_the_model_says_so(tmp_path: Path) -> None:
    captions = open_captions(label_arrays(tmp_path))
    model = built(captions, merge_texts=True)[0].retriever.eval()
    part = captions.split("test")
    part = replace(part, texts=[part.texts[1]] * len(part.texts))
    ready = Prepared(part, model.text_input.prepare(part.texts))
    group = LabelRetrieval(choose=True, bootstrap=10)(model, ready)
    assert "merged, each distinct text once" in "\n".join(group.card.lines())
    view = model.branches["labels"]
    assert isinstance(view, LabelView)
    rows = view.labels.rows_of(part)
    alone = label_metrics(np.zeros((len(rows), 1)), rows, rows[:1])
    assert group.metrics["image_to_text_ndcg@500"] == pytest.approx(alone["image_to_text_ndcg@500"])
    scores = model.encode_image(part.images) @ model.encode_text(part.texts[:1]).T
    once = label_metrics(scores, rows, rows[part.image_of][:1])
    assert group.metrics["text_to_image_ndcg@500"] == pytest.approx(once["text_to_image_ndcg@500"])


def test_regions_get_the_detector_s_classes_or_clusters(tmp_path: Path, captions: Captions) -> None:
    stored = open_captions(label_arrays(tmp_path)).split("train")
    method, _ = built(open_captions(tmp_path), context_weight=0.1)
    context = method.retriever.branches["context"]
    assert isinstance(context, ContextPrediction)
    assert context.region.out_features == detector_classes(stored) == 7
    found = fill_targets(method.targets, stored, device=torch.device("cpu"), show_progress=False)
    classes = found["region_classes"].values
    assert np.array_equal(classes, np.load(tmp_path / "train_cls.npy").argmax(-1))
    train = captions.split("train")
    source = RegionTargets(5, method.retriever.image_input)
    made = source.columns(train, device=torch.device("cpu"), show_progress=False)["region_classes"].values
    again = source.columns(train, device=torch.device("cpu"), show_progress=False)["region_classes"].values
    assert np.array_equal(made, again)
    assert made.shape == (24, 4)
    assert len(np.unique(made)) == 5
    # regions made of the same word look alike: the commonest cluster of each holds most of them
    plain = replace(train, labels={"labels": [("a",)] * 24, "region_classes": [[0, 3], [1]] * 12})
    assert detector_classes(plain) == 4
    padded = RegionTargets(5, method.retriever.image_input).columns(plain, device=torch.device("cpu"))
    assert padded["region_classes"].values[:2].tolist() == [[0, 3], [1, -1]]


def test_pictures_are_labelled_through_their_cached_cells(tmp_path: Path) -> None:
    pictures(tmp_path, 6)
    lines = [
        f"picture{n}.png,{'red dog' if n % 2 else 'the cat'},{'dog' if n % 2 else 'cat;pet'}"
        for n in range(6)
    ]
    (tmp_path / "data.csv").write_text("\n".join(["image,text,labels", *lines]) + "\n")
    run, small = tmp_path / "run", {**TINY, "batch_size": 4, "epochs": 1, "image_size": 64}
    diptych("train", "labelwise", "--data", tmp_path / "data.csv", "--output_dir", run, *flags(small))
    diptych("label", run, tmp_path / "data.csv", "--output", tmp_path / "out.csv", "--top", 1)
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 13


def test_a_text_transformer_masks_its_own_pieces(captions: Captions, tmp_path: Path) -> None:
    bert = bert_folder(tmp_path / "bert")
    method, _ = built(captions, text_encoder=str(bert))
    encoder = method.retriever.text.encoder
    tokenizer = method.retriever.text_input.tokenizer
    assert encoder.mask_id == tokenizer.mask_token_id
    states = encoder.train()(as_inputs(method.retriever.text_input(["the dog runs near a tree"] * 50)))
    assert states.chosen.any()
    assert not torch.isin(states.words[states.chosen], torch.tensor(tokenizer.all_special_ids)).any()
    with pytest.raises(SettingsError, match="--train_text"):
        built(captions, text_encoder=str(bert), train_text=False)


def test_bad_input_is_one_sentence(data: str, captions: Captions, tmp_path: Path) -> None:
    train = ["train", "labelwise", "--data", data, "--output_dir", tmp_path / "run", *flags(TINY)]
    assert "--context_weight" in refused(*train, "--context_weight", "-0.5")
    assert "--context_weight" in refused(*train, "--context_weight", "nan")
    assert "topic" in refused(*train, "--label_columns", "topic")
    assert "--label_columns" in refused(*train, "--label_columns", ",")
    said = refused(*train, "--interactive", "alternate", "--baseline", "ours+con")
    assert "--baseline" in said
    assert "--image_encoder" in refused(*train, "--image_encoder", "regions")
    assert "--text_encoder" in refused(*train, "--text_encoder", "gru")
    plain = data.partition("?")[0]
    said = refused("train", "labelwise", "--data", plain, "--output_dir", tmp_path / "run", *flags(TINY))
    assert "labels" in said
    source = LabelTargets(built(captions)[0].retriever.branches["labels"].labels)
    val = captions.split("val")
    other = replace(val, labels={"labels": [("wolf",)] * len(val.images)})
    with pytest.raises(DataError, match=r"wolf.*'25'"):
        source.columns(other, device=torch.device("cpu"))
    none = replace(val, labels={"labels": [()] * len(val.images)})
    with pytest.raises(DataError, match=r"\b12\b"):
        source.columns(none, device=torch.device("cpu"))


def test_validation_data_are_looked_at_before_training(tmp_path: Path) -> None:
    """A label that only the validation split has, or an image without one there: refused before the first step."""
    images = pictures(tmp_path)
    rows = [f"{image.name},picture {n},{'val' if n > 3 else 'train'}" for n, image in enumerate(images)]
    for name, last, said in (("unseen", "wolf", "wolf"), ("none", "", "1 of 2")):
        labels = ["dog"] * 5 + [last]
        lines = [
            "image,text,split,labels",
            *(f"{row},{label}" for row, label in zip(rows, labels, strict=True)),
        ]
        (tmp_path / f"{name}.csv").write_text("\n".join(lines) + "\n")
        run = tmp_path / f"run-{name}"
        train = ("train", "labelwise", "--data", tmp_path / f"{name}.csv", "--output_dir", run, *flags(TINY))
        assert said in refused(*train, "--image_size", 64)
        assert not run.exists()


def test_confusions_are_shown_by_pair(data: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    diptych("train", "labelwise", "--data", data, "--output_dir", run, *flags({**TINY, "epochs": 1}))
    said = diptych("show", "confusions", run, "--output", tmp_path / "c.html", "--count", 4).stdout
    assert "query's label" in said
    assert "Items that miss labels of the query among the first 5 and 3" in said
    page = (tmp_path / "c.html").read_text("utf-8")
    assert "Semantic confusion" in page
    assert page.count("<h2>") == 4
    assert "labelwise" in refused("show", "confusions", _vse(tmp_path), "--data", data)


def _vse(folder: Path) -> Path:
    from small import precomputed

    data = precomputed(folder / "plain")
    tiny = {"dim": 16, "batch_size": 12, "epochs": 1, "min_count": 1, "word_dim": 8}
    diptych("train", "vse-plus-plus", "--data", data, "--output_dir", folder / "vse", *flags(tiny))
    return folder / "vse"
