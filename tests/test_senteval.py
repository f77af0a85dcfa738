"""STS: the SentEval layout, correlations against scipy, and the three aggregations."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_senteval import write_senteval

from diptych.errors import DataError
from diptych.evaluation.senteval import SEVEN, YEARS, read_senteval, texts_of
from diptych.evaluation.sts import agreement, average_ranks, neighbour_agreement, pearson, spearman


def test_the_whole_layout(tmp_path: Path) -> None:
    found = read_senteval(write_senteval(tmp_path))
    assert found.complete
    assert [(one.name, one.split) for one in found.sets] == [
        *((year, "test") for year in YEARS),
        ("STS-B", "test"),
        ("STS-B", "dev"),
        ("SICK-R", "test"),
        ("SICK-R", "trial"),
    ]
    assert [one.name for one in found.sets if one.split == "test"] == list(SEVEN)
    twelve = found.sets[0]
    assert [file.name for file in twelve.files] == list(YEARS["STS12"])
    assert len(twelve) == sum(len(file) for file in twelve.files) == 5 * 4
    # the tokens are joined by one space; a quote or a comma is an ordinary character
    assert twelve.files[0].first[0] == 'He said "a, b 0'
    twice = texts_of([twelve, twelve])
    assert len(twice) == len(set(twice)) == 2 * len(twelve)
    assert read_senteval(tmp_path / "downstream").complete


def test_lines_without_a_gold_score_are_skipped(tmp_path: Path) -> None:
    folder = write_senteval(tmp_path)
    place = folder / "downstream/STS/STS16-en-test"
    gold = place / "STS.gs.headlines.txt"
    values = gold.read_text().split("\n")
    values[1] = ""
    gold.write_text("\n".join(values))
    sixteen = next(one for one in read_senteval(folder).sets if one.name == "STS16")
    file = next(file for file in sixteen.files if file.name == "headlines")
    assert len(file) == 3
    whole = read_senteval(write_senteval(tmp_path / "other"))
    other = next(f for one in whole.sets if one.name == "STS16" for f in one.files if f.name == "headlines")
    assert file.first == [other.first[i] for i in (0, 2, 3)]
    assert file.gold.tolist() == [other.gold[i] for i in (0, 2, 3)]


def test_separators_inside_a_sentence_do_not_end_a_line(tmp_path: Path) -> None:
    folder = write_senteval(tmp_path)
    path = folder / "downstream/STS/STS14-en-test/STS.input.images.txt"
    lines = path.read_text("utf-8").split("\n")
    lines[0] = "a\u2028b\x85c\td\x0be"
    path.write_text("\r\n".join(lines), "utf-8")
    fourteen = next(one for one in read_senteval(folder).sets if one.name == "STS14")
    file = next(file for file in fourteen.files if file.name == "images")
    assert len(file) == 4
    assert (file.first[0], file.second[0]) == ("a b c", "d e")


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    folder = write_senteval(tmp_path)
    (folder / "downstream/STS/STS13-en-test/STS.gs.FNWN.txt").unlink()
    for path in (folder / "downstream/STS/STS15-en-test").iterdir():
        path.unlink()
    (folder / "downstream/SICK/SICK_test_annotated.txt").unlink()
    found = read_senteval(folder)
    assert list(found.missing) == [
        "STS13 (downstream/STS/STS13-en-test lacks STS.gs.FNWN.txt)",
        "STS15 (downstream/STS/STS15-en-test)",
        "SICK-R test (downstream/SICK/SICK_test_annotated.txt)",
    ]
    assert "STS13" not in [one.name for one in found.sets]
    assert ("SICK-R", "trial") in [(one.name, one.split) for one in found.sets]


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        (
            "STS/STS12-en-test/STS.gs.MSRvid.txt",
            "1\n2\n",
            r"\b2\b.*\b4\b.*STS\.input\.MSRvid\.txt",
        ),
        ("STS/STS12-en-test/STS.gs.MSRvid.txt", "1\n2\nx\n3\n", "'x'"),
        ("STS/STS12-en-test/STS.gs.MSRvid.txt", "1\n2\nnan\n3\n", "'nan'"),
        ("STS/STS12-en-test/STS.gs.MSRvid.txt", "\n\n\n\n", r"STS\.input\.MSRvid\.txt"),
        (
            "STS/STS12-en-test/STS.input.MSRvid.txt",
            "a\tb\nc d\na\tb\na\tb\n",
            r"\b1\b.*\b2\b",
        ),
        ("STS/STSBenchmark/sts-test.csv", "a\tb\tc\td\t5\te\n", r"\b6\b.*\b7\b"),
        ("SICK/SICK_test_annotated.txt", "head\n1\ta\n", r"\b2\b"),
        ("SICK/SICK_test_annotated.txt", b"head\n1\ta\tb\xff\t3\n", "UTF-8"),
    ],
)
def test_bad_files(tmp_path: Path, file: str, content: str | bytes, words: str) -> None:
    folder = write_senteval(tmp_path)
    data = content.encode() if isinstance(content, str) else content
    (folder / "downstream" / file).write_bytes(data)
    with pytest.raises(DataError, match=words) as error:
        read_senteval(folder)
    assert "\n" not in str(error.value)


def test_not_a_senteval_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="downstream/STS"):
        read_senteval(tmp_path)
    with pytest.raises(DataError, match="downstream/STS"):
        read_senteval(tmp_path / "no")
    (tmp_path / "downstream/STS").mkdir(parents=True)
    with pytest.raises(DataError, match="downstream/STS"):
        read_senteval(tmp_path)


# --- correlations

numbers = st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.25, 2.0, 3.7, 5.0]), min_size=3, max_size=30)


@settings(max_examples=80)
@given(numbers, st.integers(0, 1000), st.booleans())
def test_correlations_equal_scipy(gold: list[float], seed: int, tied: bool) -> None:
    from scipy import stats

    rng = np.random.default_rng(seed)
    found = rng.normal(size=len(gold)) + np.array(gold)
    found = np.round(found) if tied else found
    np.testing.assert_allclose(average_ranks(found), stats.rankdata(found))
    if len(set(gold)) == 1 or len(set(found.tolist())) == 1:
        with pytest.warns(RuntimeWarning, match="constant values"):
            assert spearman(found, gold) == 0
        return
    assert pearson(found, gold) == pytest.approx(stats.pearsonr(found, gold)[0], abs=1e-12)
    assert spearman(found, gold) == pytest.approx(stats.spearmanr(found, gold)[0], abs=1e-12)


def test_spearman_needs_shared_ranks() -> None:
    # ranks by a plain sort would give 1 here
    assert spearman([1, 1, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9486832980505138)


def test_constant_input_is_zero_with_a_warning() -> None:
    for a, b in (([1, 1, 1], [1, 2, 3]), ([1, 2, 3], [2, 2, 2])):
        with pytest.warns(RuntimeWarning, match="reported as 0"):
            assert pearson(a, b) == 0


def test_a_similarity_that_is_no_number_counts_as_zero() -> None:
    assert pearson([np.nan, 1, 2], [1, 2, 3]) == pearson([0, 1, 2], [1, 2, 3])
    with pytest.raises(DataError):
        pearson([1, 2], [np.nan, 1])
    with pytest.raises(DataError, match=r"\b2\b"):
        pearson([1, 2], [1, 2, 3])


def test_the_three_aggregations() -> None:
    from scipy import stats

    rng = np.random.default_rng(0)
    files = [(rng.normal(size=n) + i, rng.normal(size=n) - 2 * i) for i, n in enumerate((5, 40, 12))]
    found = agreement(files)
    each = [stats.spearmanr(a, b)[0] for a, b in files]
    sizes = [len(b) for _, b in files]
    whole = [np.concatenate([file[side] for file in files]) for side in (0, 1)]
    assert found["spearman_all"] == pytest.approx(100 * stats.spearmanr(*whole)[0])
    assert found["pearson_all"] == pytest.approx(100 * stats.pearsonr(*whole)[0])
    assert found["spearman_mean"] == pytest.approx(100 * np.mean(each))
    assert found["spearman_wmean"] == pytest.approx(100 * np.average(each, weights=sizes))
    for way in ("all", "mean", "wmean"):  # COOKIE's number
        assert found[f"both_{way}"] == pytest.approx((found[f"spearman_{way}"] + found[f"pearson_{way}"]) / 2)
    assert len({round(found[f"spearman_{way}"], 3) for way in ("all", "mean", "wmean")}) == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one = agreement(files[:1])
    assert one["spearman_all"] == one["spearman_mean"] == one["spearman_wmean"]
    with pytest.raises(DataError):
        agreement([])


def test_neighbour_agreement_is_a_mean_over_items() -> None:
    from scipy import stats

    rng = np.random.default_rng(0)
    ours, gold = rng.normal(size=(8, 5)), rng.normal(size=(8, 3))
    unit = lambda x: x / np.linalg.norm(x, axis=1, keepdims=True)  # noqa: E731
    a, b = unit(ours) @ unit(ours).T, unit(gold) @ unit(gold).T
    each = []
    for i in range(8):
        others = [j for j in range(8) if j != i]
        each.append(stats.spearmanr(a[i, others], b[i, others])[0])
    assert neighbour_agreement(ours, gold) == pytest.approx(100 * np.mean(each))
    assert neighbour_agreement(ours, 3 * ours) == pytest.approx(100)
    with pytest.raises(DataError, match=r"\b3\b"):
        neighbour_agreement(ours[:2], gold[:2])
