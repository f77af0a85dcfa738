"""Audits and corrections, on made data whose pictures and texts are linear views of the same thing."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from browsers import chromium
from click.testing import CliRunner
from commands import refused
from PIL import Image

from diptych.audit import findings
from diptych.audit.fit import find_wrong, fit_features
from diptych.audit.mixture import Mixture
from diptych.cli import main
from diptych.data.arrays import ArrayStore
from diptych.data.captions import Captions
from diptych.data.corrections import apply_corrections, data_hash, file_hash, read_corrections, text_names
from diptych.data.formats import open_captions
from diptych.errors import DataError, SettingsError
from diptych.evaluation.judgements import check_corrections, judge_scores, with_matches
from diptych.evaluation.retrieval import evaluate_scores
from diptych.model.scores import EmbeddingScores
from diptych.recipes import RECIPES
from diptych.reports.audit import Question, audit_page, read_page
from diptych.runs import audit as runs_audit
from diptych.runs.audit import audit, audit_vectors
from diptych.runs.train import open_run
from diptych.settings import TrainingSettings
from diptych.training.ridge import NormalEquations

N, PER = 800, 5


def made(images: int = N, per: int = PER, seed: int = 0):
    """Features (N, 40), text vectors (M, 16) and image_of: noisy linear views of a thing with 16 sides."""
    rng = np.random.default_rng(seed)
    thing = rng.standard_normal((images, 16))
    x = thing @ rng.standard_normal((16, 40)) + 2.0 * rng.standard_normal((images, 40))
    image_of = np.repeat(np.arange(images), per)
    v = thing[image_of] + 0.8 * rng.standard_normal((images * per, 16))
    return x.astype(np.float32), v.astype(np.float32), image_of


def captions_of(image_of, images, **fields):
    texts = fields.pop("texts", [f"text {row}" for row in range(len(image_of))])
    stored = np.random.default_rng(0).standard_normal((images, 1, 4)).astype(np.float32)
    ids, splits = [f"i{row}" for row in range(images)], fields.pop("splits", ["train"] * images)
    return Captions(ArrayStore(stored), texts, np.asarray(image_of), ids, splits, name="made", **fields)


def auc(score, bad):
    rank = np.argsort(np.argsort(score))
    return (rank[bad].sum() - bad.sum() * (bad.sum() - 1) / 2) / bad.sum() / (~bad).sum()


def test_a_solve_gives_the_weights_of_the_eigendecomposition():
    x, v, image_of = made(60)
    whole, first, rest = (NormalEquations(40, 16) for _ in range(3))
    whole.add(x.astype(float), v.astype(float), image_of)
    first.add(x[:20].astype(float), v[:100].astype(float), image_of[:100])
    rest.add(x[20:].astype(float), v[100:].astype(float), image_of[100:] - 20)
    np.testing.assert_allclose(whole.weights(0.3), whole.solve().weights(0.3), atol=1e-9)
    np.testing.assert_allclose(whole.without(first).weights(0.3), rest.weights(0.3), atol=1e-9)


def test_an_image_is_predicted_without_its_own_fold():
    x, v, image_of = made(100)
    before = fit_features(x, v, image_of)
    changed = v.copy()
    changed[:PER] = -50.0  # the texts of image 0
    after = fit_features(x, changed, image_of)
    same = before.fold_of == before.fold_of[0]
    np.testing.assert_allclose(before.pictures.one.rows[same], after.pictures.one.rows[same], atol=1e-5)
    assert not np.allclose(before.pictures.one.rows[~same], after.pictures.one.rows[~same], atol=1e-3)


def test_z_of_a_block_and_of_pairs_agree_with_their_definition():
    x, v, image_of = made(60)
    fit = fit_features(x, v, image_of)
    p, u = fit.pictures.one.rows, fit.pictures.text.rows
    scores = p @ u.T
    z = (scores - scores.mean(1, keepdims=True)) / scores.std(1, keepdims=True) / 2
    z += (scores - scores.mean(0)) / scores.std(0) / 2
    np.testing.assert_allclose(fit.pictures.block(slice(7, 20)), z.T[7:20], atol=1e-3)
    texts = np.arange(len(v))
    np.testing.assert_allclose(fit.pictures.pairs(image_of, texts), z[image_of, texts], atol=1e-3)


def test_single_texts_that_were_exchanged_are_found_and_counted():
    x, v, image_of = made()
    rows = np.random.default_rng(1).choice(len(v), 200, replace=False)
    source = np.arange(len(v))
    source[rows] = np.roll(rows, 1)
    bad = image_of[source] != image_of
    found = find_wrong(fit_features(x, v[source], image_of))
    assert auc(found.probability, bad) > 0.97
    assert found.low <= bad.sum() <= found.high


def test_images_with_the_texts_of_others_are_found_and_counted():
    x, v, image_of = made()
    rows = np.random.default_rng(1).choice(N, 160, replace=False)
    owner = np.arange(N)
    owner[rows] = np.roll(rows, 1)
    source = (owner[:, None] * PER + np.arange(PER)).ravel()
    bad = np.repeat(owner != np.arange(N), PER)
    found = find_wrong(fit_features(x, v[source], image_of))
    assert auc(found.probability, bad) > 0.95
    assert found.low <= bad.sum() <= found.high


@pytest.mark.parametrize("share", [0.0, 0.05, 0.3])
def test_the_share_of_a_mixture_lies_in_its_interval(share: float):
    """Normal numbers with one spread: the log of their ratio is linear. In 10 of 12 draws, where 11.4 are expected."""
    held = []
    for seed in range(12):
        rng = np.random.default_rng(seed)
        bad = rng.random(1500) < share
        condition = rng.standard_normal((6, 1500))
        number = rng.standard_normal((6, 1500))
        number[0] += np.where(bad, 0, 1.5 + 0.5 * condition[0])  # pictures that tell more fit better
        both = np.stack([number, condition], axis=2)
        mixture = Mixture(both[0], both[1:].reshape(-1, 2))
        found, low, high = mixture.share()
        held.append(low <= bad.mean() <= high)
        assert high - low < 0.2
        if share:
            assert auc(mixture.probability(found), bad) > auc(-number[0], bad) - 0.01
    assert sum(held) >= 10


def test_right_pairs_are_not_called_wrong():
    x, v, image_of = made()
    found = find_wrong(fit_features(x, v, image_of))
    assert found.low == 0
    assert found.expected < 0.01 * len(v)
    assert (found.probability > 0.5).mean() < 0.005


@pytest.mark.parametrize("shift", [None, -1, 2])
def test_a_shard_whose_order_was_lost_is_found_and_explained(shift):
    x, v, image_of = made()
    rows = np.arange(200, 320)
    owner = np.arange(N)
    owner[rows] = np.random.default_rng(3).permutation(rows) if shift is None else np.roll(rows, shift)
    source = (owner[:, None] * PER + np.arange(PER)).ravel()
    fit = fit_features(x, v[source], image_of)
    (lost,) = findings.lost_order(fit, find_wrong(fit))
    assert abs(lost.first - 200) <= 3
    assert abs(lost.last - 319) <= 3
    assert (lost.shift, lost.inside) == (shift, True)


def test_scattered_errors_are_no_lost_order():
    x, v, image_of = made()
    rows = np.random.default_rng(1).choice(N, 160, replace=False)
    owner = np.arange(N)
    owner[rows] = np.roll(rows, 1)
    fit = fit_features(x, v[(owner[:, None] * PER + np.arange(PER)).ravel()], image_of)
    assert findings.lost_order(fit, find_wrong(fit)) == []


def test_a_shift_of_all_texts_is_named():
    x, v, image_of = made(300)
    moved = audit_vectors(
        captions_of((image_of + 1) % 300, 300, text_ids=[f"t{n}" for n in range(1500)]), x, v, "h"
    )
    assert any("1 before" in note for note in moved.notes)


def test_a_text_that_fits_another_image_is_a_missing_positive():
    x, v, image_of = made()
    x[700], v[3500:3505] = x[30], v[150:155]  # image 700 shows what image 30 shows
    fit = fit_features(x, v, image_of)
    found, tried = findings.missing_positives(fit, find_wrong(fit))
    assert tried == len(v)
    first = {(one.image, one.text // PER) for one in found[:10]}
    assert first & {(30, 700), (700, 30)}
    assert all(image_of[one.text] != one.image for one in found)
    assert (30, 700) in {pair[:2] for pair in findings.near_pictures(x)}


def test_any_image_and_text_can_be_scored():
    x, v, image_of = made(400)
    every = np.arange(400)
    x = np.r_[x, x + np.random.default_rng(2).standard_normal(x.shape).astype(np.float32)]  # each thing twice
    v = np.r_[v, v + 0.5 * np.random.default_rng(3).standard_normal(v.shape).astype(np.float32)]
    ids = [f"t{n}" for n in range(len(v))]
    found = audit_vectors(captions_of(np.r_[image_of, image_of + 400], 800, text_ids=ids), x, v, "h")
    own, twin, other = (
        found.scores([(f"i{n}", f"t{PER * ((n + step) % 800)}") for n in every]) for step in (0, 400, 100)
    )
    right = np.r_[np.zeros(len(twin)), np.ones(len(other))] > 0
    assert auc(-np.r_[twin, other], right) > 0.97
    assert abs(other.mean()) < 0.5 < own.mean()
    wrong = found.wrong
    np.testing.assert_allclose(own, (wrong.z + wrong.agreement)[PER * every], atol=1e-4)
    one = found.missing[0]  # the best other image of a text
    assert found.scores([(f"i{one.image}", f"t{one.text}")])[0] == pytest.approx(one.score, abs=1e-3)
    with pytest.raises(DataError, match="nobody"):
        found.scores([("i0", "nobody")])


def test_texts_that_say_nothing_are_named_with_the_reason():
    texts = ["IMG_2041.JPG", "DSC 0012", "...", "i3", "a red bus"] + ["photo of the day"] * 20 + ["1984 Ford"]
    image_of = np.arange(len(texts))
    ids = [f"i{row}" for row in image_of]
    found = dict(findings.empty_texts(texts, image_of, ids))
    assert [found.get(row) for row in range(5)] == [
        "a file name",
        "a file name",
        "no word",
        "a file name",
        None,
    ]
    assert {found[row] for row in range(5, 25)} == {"the same on 20 images"}
    assert 25 not in found


def test_equal_texts_in_two_splits_leak():
    splits = ["train", "val", "train"]
    assert findings.leaked_texts(["A dog.", "a dog", "a cat"], np.arange(3), splits) == [[0, 1]]
    assert findings.leaked_texts(["A dog.", "a cat", "a dog"], np.arange(3), splits) == []


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sixty pictures with five texts each, whose vectors are made."""
    lines = ["image,text,split"]
    for row in range(60):
        Image.new("RGB", (12, 12), (row * 4, 255 - row * 4, row)).save(tmp_path / f"p{row:02}.png")
        lines += [
            f"p{row:02}.png,picture {row} said {n} <b>,{'train' if row < 50 else 'val'}" for n in range(PER)
        ]
    table = tmp_path / "photos.csv"
    table.write_text("\n".join(lines))
    x, v, _ = made(60)

    def vectors(captions, *_):
        rows = [int(name[1:3]) for name in captions.image_ids]
        texts = [rows[image] * PER + int(captions.texts[n].split(" said ")[1][0])
                 for n, image in enumerate(captions.image_of.tolist())]  # fmt: skip
        return x[rows], v[texts]

    monkeypatch.setattr(runs_audit, "_vectors", vectors)
    return table


def test_the_command_writes_a_table_json_and_a_page(photos: Path):
    before = {file: file.read_bytes() for file in photos.parent.iterdir()}
    out = photos.parent / "out"
    result = CliRunner().invoke(main, ["audit", str(photos), "--output_dir", str(out)], standalone_mode=False)
    assert result.exception is None, result.output
    assert "wrong pairs" in result.output
    assert "diptych data check" in result.output
    assert {file: file.read_bytes() for file in before} == before  # nothing of the user's is changed
    content = json.loads((out / "audit.json").read_text())
    assert content["hash"] == data_hash(open_captions(photos))
    assert content["texts"] == 300
    page = (out / "audit.html").read_text()
    inside = json.loads(re.search(r'type="application/json">(.*?)</script>', page, re.S)[1])
    assert inside["columns"] == ["image_id", "text_id", "verdict", "by", "data"]
    assert inside["questions"][0]["picture"]
    assert "<b>" not in page  # texts are data, not markup
    assert page.count(f"Audit of {content['data']}") == 2  # in the title and above the summary
    assert read_corrections(out / "suggested.csv") is not None


def test_an_audit_names_texts_as_corrections_do(photos: Path):
    whole = open_captions(photos)
    found = audit(str(photos), split="train")
    assert found.hash == data_hash(whole)
    assert set(found.captions.text_ids) <= set(text_names(whole))


def test_one_text_per_image_is_said_and_goes_on():
    x, v, image_of = made(400, per=1)
    found = audit_vectors(captions_of(image_of, 400, text_ids=[f"t{n}" for n in range(400)]), x, v, "h")
    assert found.wrong.agreement is None
    assert any("cannot vote" in note for note in found.notes)


def test_vectors_of_a_model_are_compared_as_they_are():
    _, v, image_of = made(400)
    rng = np.random.default_rng(1)
    images = v.reshape(400, PER, -1).mean(axis=1) + 0.5 * rng.standard_normal((400, 16)).astype(np.float32)
    rows = rng.choice(len(v), 100, replace=False)
    source = np.arange(len(v))
    source[rows] = np.roll(rows, 1)
    images[1] = images[0]  # the same for the model, which may be two pictures
    ids = [f"t{n}" for n in range(len(v))]
    captions = captions_of(image_of, 400, text_ids=ids)
    found = audit_vectors(captions, images, v[source], "h", model="runs/photos")
    assert auc(found.wrong.probability, image_of[source] != image_of) > 0.97
    assert found.near == []
    assert any("by heart" in note for note in found.notes)
    assert audit_vectors(captions, images, v, "h").near[0][:2] == (0, 1)


def test_pictures_that_are_all_the_same_say_nothing():
    x, v, image_of = made(100)
    captions = captions_of(image_of, 100, text_ids=[f"t{n}" for n in range(len(v))])
    found = audit_vectors(captions, np.ones_like(x), v, "h")
    assert found.wrong.low == 0.0
    assert any("nothing to do with each other" in note for note in found.notes)


def test_ids_of_any_characters_are_written_and_read_back(tmp_path: Path):
    x, v, image_of = made(60)
    v[:40] = v[100:140]
    ids = [f'a,"{n}"\n' if n % 3 == 0 else f"\udcff{n}" if n % 3 == 1 else f" é{n}" for n in range(60)]
    texts = ["half \ud800" if n == 0 else "</script><b>" for n in range(300)]
    captions = replace(captions_of(image_of, 60, texts=texts), image_ids=ids)
    found = audit_vectors(replace(captions, text_ids=text_names(captions)), x, v, data_hash(captions))
    found.save(tmp_path)
    assert json.loads((tmp_path / "audit.json").read_text("utf-8"))["pairs"][0]["image_id"] in ids
    wrong = read_corrections(tmp_path / "suggested.csv")
    assert len(wrong) >= 20
    assert len(apply_corrections(captions, tmp_path / "suggested.csv").texts) == 300 - len(wrong)


def test_too_few_pairs_are_refused(photos: Path):
    with pytest.raises(DataError, match="50 pairs"):
        audit(str(small(photos)))
    with pytest.raises(SettingsError, match="corrections"):
        audit(f"{photos}?corrections=c.csv")


def small(photos: Path) -> Path:
    table = photos.with_name("small.csv")
    table.write_text("\n".join(photos.read_text().split("\n")[:51]))
    return table


def written(folder: Path, rows, data: str) -> Path:
    file = folder / "corrections.csv"
    lines = [f"{image},{text},{verdict},me,{data}" for image, text, verdict in rows]
    file.write_text("\n".join(["image_id,text_id,verdict,by,data", *lines]) + "\n")
    return file


def test_corrections_leave_wrong_pairs_out_behind_the_reader(photos: Path):
    whole = open_captions(photos)
    every = [("p03.png", f"p03.png#{n}", "wrong") for n in range(PER)]
    rows = [("p00.png", "p00.png#1", "wrong"), ("p01.png", "p01.png#0", "keep")]
    rows += [("p02.png", "p00.png#0", "matches"), ("p05.png", "p00.png#0", "unsure")]  # both of another image
    file = written(photos.parent, [*rows, *every], data_hash(whole))
    fixed = open_captions(f"{photos}?corrections={file}")
    assert len(fixed.texts) == 300 - 6
    assert "picture 0 said 1 <b>" not in fixed.texts
    assert "p03.png" not in fixed.image_ids
    assert len(fixed.images) == 59
    assert "6 wrong pairs left out" in " ".join(fixed.notes)
    assert len(open_captions(f"{photos}?corrections={file}", split="val").texts) == 50
    for data, named in (
        (f"{photos}?corrections={file}", {"file": str(file), "hash": file_hash(file)}),
        (str(photos), None),
    ):
        open_run(RECIPES["photos"], TrainingSettings(), data)[3].save(photos.parent)
        assert json.loads((photos.parent / "run.json").read_text()).get("corrections") == named


@pytest.mark.parametrize(
    ("rows", "word"),
    [
        ([("p99.png", "p00.png#0", "wrong")], "p99.png"),
        ([("p00.png", "p00.png#9", "wrong")], "p00.png#9"),
        ([("p00.png", "p00.png#0", "wrong"), ("p00.png", "p00.png#0", "keep")], "both 'wrong' and 'keep'"),
        ([("p00.png", "p00.png#0", "nonsense")], "nonsense"),
        ([("p00.png", "p00.png#0", "matches")], "matches"),
        ([("p00.png", "p01.png#0", "wrong")], "no pair"),
    ],
)
def test_corrections_that_make_no_sense_are_refused(photos: Path, rows, word: str):
    file = written(photos.parent, rows, data_hash(open_captions(photos)))
    with pytest.raises(DataError, match=re.escape(word)):
        open_captions(f"{photos}?corrections={file}")


def test_corrections_of_other_data_and_other_files_are_refused(photos: Path):
    file = written(photos.parent, [("p00.png", "p00.png#0", "wrong")], "0123456789abcdef")
    with pytest.raises(DataError, match="0123456789abcdef"):
        open_captions(f"{photos}?corrections={file}")
    with pytest.raises(DataError, match="image,text,split"):
        read_corrections(photos)
    with pytest.raises(DataError, match=re.escape("absent.csv")):
        read_corrections(photos.parent / "absent.csv")


def test_texts_keep_their_names_when_others_are_left_out(photos: Path):
    rows = [("p00.png", "p00.png#0", "wrong"), ("p01.png", "p00.png#3", "matches")]
    file = written(photos.parent, rows, data_hash(open_captions(photos)))
    fixed = open_captions(f"{photos}?corrections={file}")
    right = with_matches(file, fixed).image_to_text[1]
    assert {fixed.texts[row] for row in right} == {
        "picture 0 said 3 <b>",
        *(f"picture 1 said {n} <b>" for n in range(PER)),
    }


def test_judgements_with_unknown_ids_are_refused(photos: Path):
    rows = [("p00.png", "p00.png#0", "keep"), ("p00.png", "p77.png#0", "matches")]
    file = written(photos.parent, rows, data_hash(open_captions(photos)))
    with pytest.raises(DataError, match=re.escape("p77.png#0")):
        check_corrections([str(file)], str(photos))


def test_missing_positives_count_as_right_beside_the_plain_recall(tmp_path: Path):
    captions = captions_of([0, 1, 2], 3)
    file = written(tmp_path, [("i1", "i0#0", "matches"), ("i9", "i8#0", "keep")], "any")
    image = torch.tensor([[0.6, 0.8, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    text = torch.tensor([[1.0, 0.0, 0.0], [0.8, 0.6, 0.0], [0.0, 0.0, 1.0]])
    scores = EmbeddingScores(image, text)
    rows = np.arange(3)
    found = judge_scores(scores, with_matches(file, captions), rows, rows)["text_to_image"].values["recall@1"]
    np.testing.assert_allclose(
        found, [100.0, 0.0, 100.0]
    )  # text 1 finds image 0, and nobody says that it fits
    report = evaluate_scores(scores, captions, judgements=[str(file)], bootstrap=0).metrics
    plain, with_them = report["text_to_image_recall@1"], report["corrections_text_to_image_recall@1"]
    assert with_them > plain
    with pytest.raises(DataError, match="i5"):
        with_matches(written(tmp_path, [("i5", "i5#0", "keep")], "any"), captions)


def test_the_command_refuses_in_one_sentence(photos: Path):
    assert "50 pairs" in refused("audit", str(small(photos)))


def test_corrected_data_without_a_wrong_pair_are_the_same(photos: Path):
    whole = open_captions(photos)
    file = written(photos.parent, [("p00.png", "p00.png#0", "keep")], data_hash(whole))
    assert apply_corrections(whole, file).fingerprint() == whole.fingerprint()


def test_the_page_is_driven_by_keys_and_saves_corrections_that_are_read_back(photos: Path):
    found = audit(str(photos))
    found.save(photos.parent / "out")
    asked = found.questions()
    assert asked[0].matches is False
    with chromium() as browser:
        page = browser.new_page()
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto((photos.parent / "out" / "audit.html").as_uri())
        page.fill("#by", 'a, "b"')
        page.focus("article")
        for key in (
            "w",
            "k",
            "m",
            "u",
        ):  # m is no verdict on a pair of the data: the third stays and becomes unsure
            page.keyboard.press(key)
        page.wait_for_function("document.getElementById('count').textContent.startsWith('3 of ')")
        page.reload()  # verdicts stay
        page.wait_for_function("document.getElementById('count').textContent.startsWith('3 of ')")
        with page.expect_download() as saved:
            page.click("#save")
        file = photos.parent / "corrections.csv"
        saved.value.save_as(file)
    assert errors == []
    rows = read_corrections(file)
    assert [(row.image_id, row.text_id, row.verdict) for row in rows] == [
        (one.image_id, one.text_id, verdict)
        for one, verdict in zip(asked, ("wrong", "keep", "unsure"), strict=False)
    ]
    assert {row.by for row in rows} == {'a, "b"'}
    assert len(open_captions(f"{photos}?corrections={file}").texts) == 299


def test_the_bar_of_the_page_hides_nothing_on_a_phone(photos: Path):
    audit(str(photos)).save(photos.parent / "out")
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 390, "height": 664}, has_touch=True, is_mobile=True)
        page.goto((photos.parent / "out" / "audit.html").as_uri())
        assert page.evaluate("scrollY") == 0  # the summary is read first
        for _ in range(3):
            page.keyboard.press("w")
            bar, picture = (page.locator(one).bounding_box() for one in (".bar", "article:focus img"))
            assert picture["y"] >= bar["y"] + bar["height"]
        page.mouse.wheel(0, 200)  # texts go behind the bar
        page.wait_for_timeout(100)
        points = "[...Array(20).keys()].map(n => document.elementFromPoint(20 + 15 * n, 20).closest('.bar'))"
        assert all(page.evaluate(f"{points}.map(Boolean)"))


@pytest.mark.parametrize(
    "more", ["<meta http-equiv=refresh content='0;url=//x'>", "<a href='//x'>log in</a>", "<p>x"]
)
@pytest.mark.parametrize("place", ["</title>", "</ul>", "</html>"])
def test_a_page_with_anything_else_in_it_is_not_served(more: str, place: str, tmp_path: Path) -> None:
    """The policy stops scripts, but no redirections and no links."""
    file = tmp_path / "audit.html"
    question = Question("i</script>", "t", "<b> & 'x' \\\\", ["</script>"], "why", picture=b"jpeg")
    sound = audit_page("Audit of <x>", ["1 of 2 </li> pairs", "& more"], [question], "hash")
    file.write_text(sound, "utf-8")
    assert read_page(file)[0] == sound.encode()
    assert place in sound
    file.write_text(sound.replace(place, place + more, 1), "utf-8")
    with pytest.raises(DataError, match=r"audit\.html"):
        read_page(file)
