"""Any part on any host: poolings, terms of the loss and a transformer on top train on every two-tower recipe."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from compose import FIXED, HOSTS, PAIR_SCORERS, POOLED, POOLS, TERMS, toys, train, written

from diptych.errors import SettingsError
from diptych.model.retriever import Retriever
from diptych.recipes import RECIPES

REFUSED = ("itm", "label", "masked", "csq")
TRAINED = [term for term in TERMS if term not in REFUSED]


@pytest.fixture(scope="module", autouse=True)
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A present folder with the toys, a cache folder of its own, one thread."""
    folder = tmp_path_factory.mktemp("compose")
    toys(folder)
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("DIPTYCH_CACHE", "caches")
        torch.set_num_threads(1)
        yield folder
        torch.set_num_threads(threads)


def test_every_two_tower_recipe_is_a_host() -> None:
    assert set(RECIPES.own) - set(HOSTS) == {"labelwise"}


def test_the_tables_of_the_docs_have_every_host_and_part() -> None:
    for mark, rows, columns in (("terms", RECIPES.own, TERMS), ("poolings", POOLED, POOLS)):
        lines = written(mark).splitlines()
        assert lines[0] == f"| recipe | {' | '.join(f'`{column}`' for column in columns)} |"
        assert [line.split("`")[1] for line in lines[2:]] == list(rows)
    for line in written("poolings").splitlines()[2:]:
        marks = dict(zip(POOLS, line.split(" | ")[1:], strict=True))
        trains_pairs = line.split("`")[1] in (*PAIR_SCORERS, "labelwise")
        assert all(("✓" in marks[pool]) == (pool in FIXED or not trains_pairs) for pool in POOLS)
    for line in written("terms").splitlines()[2:]:
        marks = dict(zip(TERMS, line.split(" | ")[1:], strict=True))
        assert all("✓" in marks[term] for term in TRAINED if term != "textual")


@pytest.mark.parametrize("host", HOSTS)
def test_hosts_take_poolings_terms_and_a_transformer(host: str, tmp_path: Path) -> None:
    """Each host with two terms of its own turn, a pooling on each side and a transformer; all pairs in make docs."""
    number = HOSTS.index(host)
    pools = FIXED if host in PAIR_SCORERS else POOLS
    image, text = (pools[(number + step) % len(pools)] for step in (0, 2))
    first, second = (TRAINED[(3 * number + step) % len(TRAINED)] for step in (0, 5))
    if "clip" in host and "textual" in (first, second):
        first, second = ("usa", "prototypes")
    expression = " + ".join([TERMS[first].replace("own + ", ""), TERMS[second].replace("own + ", ""), "own"])
    terms = train(
        host, tmp_path / "run", image_pool=image, text_pool=text, objective=expression,
        depth=1, share_weights=number % 2 == 0,
    )  # fmt: skip
    assert math.isfinite(terms["loss"])
    for term in (first, second):
        found = [value for name, value in terms.items() if name.startswith(term.partition(",")[0])]
        assert found
        assert all(map(math.isfinite, found))


@pytest.mark.parametrize("loss", ["info_nce", "csa"])
def test_any_term_takes_the_place_of_dcl(loss: str, tmp_path: Path) -> None:
    terms = train("coder", tmp_path / "run", loss=loss)
    assert math.isfinite(terms["instance"])
    assert "dcl" not in terms


@pytest.mark.parametrize(
    ("host", "changes"),
    [
        ("sgr", {"image_pool": "gpo"}),
        ("scan", {"text_pool": "gem"}),
        ("labelwise", {"image_pool": "gem", "space": "feature"}),
        ("labelwise", {"text_pool": "max"}),
    ],
)
def test_a_pooling_that_nothing_would_train_or_read_is_refused(
    host: str, changes: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match="pool"):
        train(host, tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()


def test_label_wise_retrieval_in_feature_space_pools_as_asked(tmp_path: Path) -> None:
    train("labelwise", tmp_path / "run", image_pool="max", text_pool="first", space="feature")
    model = Retriever.from_pretrained(tmp_path / "run")
    assert [type(tower.aggregator).__name__ for tower in (model.image, model.text)] == ["Max", "First"]


@pytest.mark.parametrize(
    ("term", "words"), [("itm", "fusion"), ("label", "labelwise"), ("csq", "cookie-hash")]
)
def test_a_term_that_a_host_cannot_serve_names_one_that_can(term: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=f"character 7: .*{words}"):
        train("vse-infinity", tmp_path / "run", objective=f"own + {term}")
    assert not (tmp_path / "run").exists()


def test_queue_prototypes_and_soft_labels_count_on_a_plain_host(tmp_path: Path) -> None:
    text = "own + m_dcl(queue_size=100) + prototypes(clusters=3, start=1) + csa + usa + dcl(view=concepts)"
    terms = train("vse-infinity", tmp_path / "run", objective=text)
    for name in ("m_dcl", "prototypes", "csa", "usa", "dcl_concepts"):
        assert terms[name] != 0


@pytest.mark.parametrize("host", ["scan", "labelwise", "fusion"])
def test_recipes_with_other_scores_take_terms_too(host: str, tmp_path: Path) -> None:
    terms = train(host, tmp_path / "run", objective="own + dcl(view=concepts) + m_dcl(queue_size=100) + usa")
    assert {"dcl_concepts", "m_dcl", "usa"} <= set(terms)
