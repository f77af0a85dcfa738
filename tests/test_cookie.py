"""COOKIE: its losses against loops, weight sharing, starting from a run, and both recipes through the command line."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from pairs import batch_of
from small import pictures, precomputed
from small_senteval import write_senteval
from torch import Tensor

from diptych.cache.feature_pack import FeaturePack
from diptych.cli import main
from diptych.data.captions import Captions
from diptych.data.formats import open_captions
from diptych.data.held_out import training_splits
from diptych.data.vocabulary import published_form, read_vocabulary
from diptych.encoders.shared import Contextual
from diptych.errors import SettingsError
from diptych.model.retriever import Retriever
from diptych.ops import unit
from diptych.recipes import cookie, cookie_match
from diptych.types import Embeddings

SMALL: dict[str, Any] = {"dim": 16, "heads": 2, "batch_size": 12, "min_count": 1, "word_dim": 8}
FLAGS = [f"--{name}={value}" for name, value in SMALL.items()]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return precomputed(tmp_path_factory.mktemp("data") / "toy_precomp")


@pytest.fixture(scope="module")
def captions(data: Path) -> Captions:
    return training_splits(open_captions(data))[0]


def diptych(*words: object) -> Result:
    return CliRunner().invoke(main, list(map(str, words)))


# losses


def rows(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return unit(torch.randn(count, 6, generator=generator, dtype=torch.float64))


def looked(count: int, seed: int = 0) -> Embeddings:
    image, text, image2, text2 = (rows(count, 4 * seed + i) for i in range(4))
    return Embeddings(image, text, views={"augmented": Embeddings(image2, text2)})


def half(p: Tensor, q: Tensor, ids: list[int], tau: float, same: str) -> float:
    """ℓ(p, q) = −(1/N) Σ_i log [exp(p_i·q_i/τ) / Σ_j exp(p_i·q_j/τ)], pair by pair."""
    total = 0.0
    for i in range(len(ids)):
        scores = [
            sum(a * b for a, b in zip(p[i].tolist(), q[j].tolist(), strict=True)) / tau
            for j in range(len(ids))
        ]
        used = [j for j in range(len(ids)) if same == "negative" or j == i or ids[j] != ids[i]]
        total -= math.log(math.exp(scores[i]) / sum(math.exp(scores[j]) for j in used))
    return total / len(ids)


def oracle(seen: Embeddings, ids: list[int], tau: float, same: str) -> dict[str, float]:
    other = seen.views["augmented"]
    pairs = {
        "cross": (seen.image, seen.text),
        "visual": (seen.image, other.image),
        "textual": (seen.text, other.text),
    }
    return {n: (half(p, q, ids, tau, same) + half(q, p, ids, tau, same)) / 2 for n, (p, q) in pairs.items()}


@pytest.mark.parametrize("same", ["ignored", "negative"])
@pytest.mark.parametrize("ids", [[0, 1, 2, 3, 4], [0, 0, 1, 2, 2, 2], [7]])
@pytest.mark.parametrize("tau", [0.07, 0.5])
def test_the_three_losses_equal_loops(ids: list[int], same: Any, tau: float) -> None:
    settings = cookie.Settings(temperature=tau, same_image=same)
    for seed in range(3):
        seen = looked(len(ids), seed)
        found = {
            name: float(value) for name, value in cookie.objective(settings)(seen, batch_of(ids)).items()
        }
        assert found == pytest.approx(oracle(seen, ids, tau, same), rel=1e-9, abs=1e-12)


def test_the_oracle_notices_a_mutation() -> None:
    seen, ids = looked(5), [0, 1, 2, 3, 3]
    right = {n: float(v) for n, v in cookie.objective(cookie.Settings())(seen, batch_of(ids)).items()}
    swapped = replace(seen, views={"augmented": Embeddings(seen.views["augmented"].text, seen.image)})
    for wrong in (oracle(seen, ids, 0.08, "ignored"), oracle(seen, ids, 0.07, "negative"),
                  oracle(swapped, ids, 0.07, "ignored")):  # fmt: skip
        assert right != pytest.approx(wrong, rel=1e-6)


def test_weights_scale_the_terms_and_zero_leaves_them_out() -> None:
    seen, batch = looked(6), batch_of(list(range(6)))
    whole = cookie.objective(cookie.Settings())(seen, batch)
    half_weight = cookie.objective(cookie.Settings(visual_weight=0.5, textual_weight=0.0))(seen, batch)
    assert set(half_weight) == {"cross", "visual"}
    assert float(half_weight["visual"]) == pytest.approx(0.5 * float(whole["visual"]))
    with pytest.raises(SettingsError, match=r"\b0\b"):
        cookie.objective(cookie.Settings(cross_weight=0.0, visual_weight=0.0, textual_weight=0.0))


def test_only_the_looks_that_are_used_are_made(captions: Captions) -> None:
    none = cookie.build(cookie.Settings(**SMALL, visual_weight=0.0, textual_weight=0.0), captions)
    assert not none.views
    one = cookie.build(cookie.Settings(**SMALL, visual_weight=0.0), captions).views["augmented"]
    assert (one.pictures, one.words.rate) == (None, 0.2)  # type: ignore[attr-defined]


# the shared transformer


def transformers(model: Retriever) -> list[Any]:
    encoders = model.image.encoder, model.text.encoder
    return [encoder.transformer for encoder in encoders if isinstance(encoder, Contextual)]


@pytest.mark.parametrize("shared", [True, False])
def test_sharing_survives_saving(captions: Captions, tmp_path: Path, shared: bool) -> None:
    model = cookie.build(cookie.Settings(**SMALL, share_weights=shared), captions).retriever
    first, second = transformers(model)
    assert (first is second) == shared
    model.save_pretrained(tmp_path / "model")
    again = Retriever.from_pretrained(tmp_path / "model")
    first, second = transformers(again)
    assert (first is second) == shared
    assert torch.equal(again.encode_text(captions.texts[:5]), model.encode_text(captions.texts[:5]))


def test_sharing_halves_the_transformers(captions: Captions) -> None:
    counts = [
        sum(
            p.numel()
            for p in cookie.build(cookie.Settings(**SMALL, **changes), captions).retriever.parameters()
        )
        for changes in ({"depth": 0}, {"depth": 1}, {"depth": 1, "share_weights": False}, {"depth": 2})
    ]
    layer = counts[1] - counts[0]
    assert layer > 0
    assert counts[2] - counts[0] == counts[3] - counts[0] == 2 * layer


@pytest.mark.parametrize("pool", ["max", "mean", "gpo"])
def test_every_pooling_builds(captions: Captions, pool: Any) -> None:
    settings = cookie_match.Settings(**SMALL, image_pool=pool, text_pool=pool)
    assert cookie_match.build(settings, captions).retriever.encode_text("a dog").shape == (1, 16)


# starting from a run


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "cookie"
    done = diptych(
        "train", "cookie", "--data", data, "--output_dir", run, *FLAGS, "--epochs=1", "--log_steps=1"
    )
    assert done.exit_code == 0, done.output
    return run


def test_pre_training_logs_the_three_terms(trained: Path) -> None:
    lines = [json.loads(line) for line in (trained / "log.jsonl").read_text("utf-8").splitlines()]
    assert {"cross", "visual", "textual"} <= set(lines[0])
    assert lines[0]["loss"] == pytest.approx(sum(lines[0][name] for name in ("cross", "visual", "textual")))


def test_matching_starts_from_the_run_and_takes_its_shape(trained: Path, data: Path, tmp_path: Path) -> None:
    run = tmp_path / "match"
    done = diptych("train", "cookie-match", "--data", data, "--init", trained, "--output_dir", run, "--batch_size=12",
                   "--epochs=1", "--learning_rate=0")  # fmt: skip
    assert done.exit_code == 0, done.output
    settings = json.loads((run / "run.json").read_text("utf-8"))["settings"]
    assert (settings["dim"], settings["heads"], settings["word_dim"]) == (16, 2, 8)
    texts = ["a red dog", "the house"]
    before, after = Retriever.from_pretrained(trained), Retriever.from_pretrained(run)
    assert torch.equal(before.encode_text(texts), after.encode_text(texts))  # the rate was 0


def started(captions: Captions, trained: Path, **changes: Any) -> tuple[Retriever, str]:
    settings = cookie_match.Settings(**{**SMALL, **changes}, init=str(trained))
    method = cookie_match.RECIPE.build(settings, captions)
    return method.retriever, method.notes[0]


def test_parts_that_do_not_fit_start_fresh(trained: Path, captions: Captions) -> None:
    source = Retriever.from_pretrained(trained)
    model, said = started(captions, trained, image_pool="gpo", heads=4)
    assert torch.equal(model.text.encoder.inner.words.weight, source.text.encoder.inner.words.weight)  # type: ignore[union-attr]
    assert said.endswith("; fresh: image TokenTransformer, image CosSinBiGRU")
    assert "text BiGRU" in said
    first, second = (model_.image.encoder.transformer.layers[0].joint.weight for model_ in (model, source))  # type: ignore[union-attr]
    assert not torch.equal(first, second)


def test_a_shared_transformer_starts_one_on_each_side(trained: Path, captions: Captions) -> None:
    model, said = started(captions, trained, share_weights=False)
    assert said.endswith("fresh: nothing")
    sides = [side.encoder.transformer.layers[0].joint.weight for side in (model.image, model.text)]  # type: ignore[union-attr]
    assert torch.equal(*sides)


def test_other_words_of_the_same_number_start_fresh(
    trained: Path, captions: Captions, tmp_path: Path
) -> None:
    words = read_vocabulary(trained / "best" / "vocabulary.json")
    (tmp_path / "words.json").write_text(json.dumps(published_form(words[:4] + words[4:][::-1])), "utf-8")
    _, said = started(captions, trained, vocabulary=str(tmp_path / "words.json"))
    assert "fresh: text BiGRU" in said


def test_a_run_starts_from_another_recipe_s(data: Path, trained: Path, tmp_path: Path) -> None:
    flags = ["--batch_size=12", "--epochs=1", "--learning_rate=0", "--no_ridge_baseline"]
    run = tmp_path / "vse"
    done = diptych("train", "vse-infinity", "--data", data, "--init", trained, "--output_dir", run, *flags)
    assert f"started from {trained}: image " in done.output
    assert json.loads((run / "run.json").read_text("utf-8"))["settings"]["depth"] == 1
    back = diptych(
        "train", "cookie-match", "--data", data, "--init", run, "--output_dir", tmp_path / "match", *flags
    )
    assert "fresh: nothing" in back.output


def test_a_run_without_a_common_part_and_a_wrong_folder_are_refused(
    trained: Path, data: Path, tmp_path: Path
) -> None:
    for init, change, sentence in (
        (trained, "--dim=32", "shares no part with this model"),
        (tmp_path, "--dim=16", "is not a model folder"),
    ):
        done = diptych(
            "train", "cookie-match", "--data", data, "--init", init, change, "--output_dir", tmp_path / "run"
        )
        assert done.exit_code == 2
        assert sentence in done.output
    assert not (tmp_path / "run").exists()


def test_text_matching_is_measured_with_the_rest(data: Path, tmp_path: Path) -> None:
    folder = write_senteval(tmp_path / "senteval", pairs=40)
    run = tmp_path / "run"
    flags = [*FLAGS, "--epochs=1", f"--sts={folder}"]
    done = diptych("train", "cookie", "--data", data, "--output_dir", run, *flags)
    assert done.exit_code == 0, done.output
    last = json.loads((run / "log.jsonl").read_text("utf-8").splitlines()[-1])
    both = [name for name in last if name.endswith("both_all")]
    assert both
    for name in both:
        parts = [last[name.replace("both", kind)] for kind in ("spearman", "pearson")]
        assert last[name] == pytest.approx(sum(parts) / 2)
    assert done.output.count("validation RSUM") == 2  # retrieval still chooses the epoch


# pictures


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    for number, path in enumerate(pictures(folder, 14)):
        path.with_suffix(".txt").write_text(f"a picture of number {number}\n", "utf-8")
    return folder


def test_a_frozen_backbone_reads_augmented_copies_once(
    photographs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path / "cache"))
    flags = [
        *FLAGS,
        "--image_size=32",
        "--epochs=1",
        "--batch_size=4",
        "--augmented_copies=3",
        "--log_steps=1",
    ]
    counts = []
    for name in ("one", "two"):
        done = diptych("train", "cookie", "--data", photographs, "--output_dir", tmp_path / name, *flags)
        assert done.exit_code == 0, done.output
        # 13 training pictures, three copies of each, one validation picture; the second run finds them
        (pack,) = (tmp_path / "cache" / "images").iterdir()
        counts.append(len(FeaturePack(pack)))
    assert counts == [14 + 3 * 13] * 2
    logs = [(tmp_path / name / "log.jsonl").read_text("utf-8").splitlines() for name in ("one", "two")]
    losses = [[json.loads(line).get("loss") for line in log] for log in logs]
    assert losses[0] == losses[1]


def test_a_trained_backbone_sees_augmented_pictures(photographs: Path, tmp_path: Path) -> None:
    flags = [*FLAGS, "--image_size=32", "--epochs=1", "--batch_size=4", "--train_backbone", "--micro_batch=2"]
    done = diptych("train", "cookie", "--data", photographs, "--output_dir", tmp_path / "run", *flags)
    assert done.exit_code == 0, done.output
