"""The tables of the papers: every row builds and makes a step, and one table of each kind of column runs to its end."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from paper_world import World, run_to_the_end

from diptych import tables
from diptych.data.formats import open_captions
from diptych.registries import PROTOCOLS, RECIPES
from diptych.reports.page import COLOURS
from diptych.reports.tables import TableResults
from diptych.runs import columns
from diptych.runs.columns import counts_of, measure_steps
from diptych.settings import from_json, to_json
from diptych.tables import PaperTable, main_recipe, papers, presets, slug, tables_of

EVERY = [table for paper in papers() for table in tables_of(paper).values()]
KINDS = {  # a table for each kind of column: kind of group, or protocol of a measured run
    "recall": ("vse-infinity", "1"),
    "judged": ("cusa", "9"),
    "classes": ("cusa", "10"),
    "sts": ("cookie", "sharing"),
    "video": ("cookie", "3"),
    "hashing": ("cookie", "bits"),
    "labels": ("labelwise", "consistency"),
    "speed": ("coder", "f4"),
    "settings": ("cusa", "7"),
    "step": ("cusa", "13"),
    "teachers": ("cusa", "12"),
    "counts": ("cookie", "1"),
    "pooling": ("vse-infinity", "6"),
}
FEW = {
    "cusa-9": ["SGR", "SAF", "SGRAF", "CLIP B/32"],
    "cusa-10": ["SGR + USA", "CLIP B/32"],
    "cusa-13": ["contrastive loss", "+ CUSA, image and text live"],
    "coder-f4": ["VSE∞", "SGR"],
    "cookie-bits": ["16 bits"],
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World.made(tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize("paper", papers())
def test_every_row_builds_and_makes_a_step(paper: str, world: World, tmp_path: Path) -> None:
    opened: dict[str, Any] = {}
    done = set()
    for table in tables_of(paper).values():
        runner = world.runner(table, tmp_path)
        cells = [one for cell in runner.cells() for one in (cell.members or (cell,))]
        assert {cell.row.name for cell in cells} >= {row.name for row in table.rows if row.recipe}
        for cell in (cell for cell in cells if cell.row.recipe):
            settings = runner.settings(cell, 0)
            key = (cell.row.recipe, settings, cell.path)
            if key in done:
                continue
            done.add(key)
            captions = opened.setdefault(cell.path, None) or open_captions(cell.path)
            opened[cell.path] = captions
            cost = measure_steps(RECIPES[cell.row.recipe], settings, captions, steps=1)
            assert cost.seconds > 0
            assert cost.cpu > 0
            assert cost.parameters > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_of_each_kind_runs_to_its_end(
    kind: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paper, name = KINDS[kind]
    said = run_to_the_end(
        tables_of(paper)[name], world, tmp_path, monkeypatch, FEW.get(f"{paper}-{name}", ())
    )
    assert ("trained on" in said) == (kind in ("classes", "sts"))


def test_every_kind_of_column_has_a_table_that_is_run() -> None:
    ran = {f"{paper}-{name}" for paper, name in KINDS.values()}
    groups = [(table, group) for table in EVERY for group in table.groups]
    kinds = {group.kind if group.kind != "test" else group.protocol for _, group in groups}
    plain = {
        name
        for name in kinds
        if name in PROTOCOLS and name not in ("sts", "video", "hashing", "image-classes")
    }
    seen = {
        group.kind if group.kind != "test" else group.protocol
        for table, group in groups
        if f"{table.paper}-{table.name}" in ran
    }
    assert kinds - plain <= seen


def test_a_list_of_classes_is_counted(world: World) -> None:
    assert counts_of(str(world.folder / "Stanford_Online_Products")) == {"images": 12.0, "classes": 4.0}


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="only Linux forgets a peak")
def test_the_memory_of_a_row_is_not_that_of_an_earlier_one() -> None:
    most = 2**27
    columns._forget_memory()
    before = columns._memory()
    held = np.ones(most, np.uint8)
    assert columns._memory() - before > 0.9 * most
    del held
    columns._forget_memory()
    assert columns._memory() - before < 0.5 * most


def test_published_numbers_are_whole() -> None:
    """Where a paper prints the sum or the mean of its cells, the cells that we have agree with it."""
    recalls = [f"{way}_recall@{k}" for way in ("image_to_text", "text_to_image") for k in (1, 5, 10)]
    checked = 0
    for table in EVERY:
        for row in table.rows:
            for numbers in row.published.values():
                if "rsum" in numbers and set(recalls) <= set(numbers):
                    assert sum(numbers[name] for name in recalls) == pytest.approx(
                        numbers["rsum"], abs=0.35
                    ), row.name
                    checked += 1
                for mean in ("image_classes_average", "sts_average"):
                    if mean in numbers:
                        rest = [value for name, value in numbers.items() if name != mean]
                        assert sum(rest) / len(rest) == pytest.approx(numbers[mean], abs=0.11), row.name
                        checked += 1
    assert checked > 100


def test_every_table_that_the_papers_have_is_there() -> None:
    assert {"1", "2", "3", "4", "5", "6", "7", "8"} <= set(tables_of("vse-infinity"))
    assert {"1", "2", "3", "4", "s1", "s2", "s3", "f3", "f4", "sf2"} <= set(tables_of("coder"))
    assert {"6", "7", "8", "9", "10", "11", "12", "13"} <= set(tables_of("cusa"))
    assert {"1", "1b", "2", "3"} <= set(tables_of("cookie"))
    assert {"1", "consistency", "lambda", "figure-2"} <= set(tables_of("labelwise"))
    assert "figure-3" in tables_of("vse-infinity")
    assert {"figure-5", "figure-s3"} <= set(tables_of("coder"))
    assert {"figure-1", "figure-2"} <= set(tables_of("cookie"))
    assert main_recipe("coder") == "coder"
    assert [row.name for row in tables_of("cusa-saf")["8"].rows] == [
        "SAF",
        "SAF + CSA",
        "SAF + USA",
        "SAF + CUSA",
    ]


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_every_preset_is_of_settings_that_the_recipe_has(recipe: str) -> None:
    default = to_json(RECIPES[recipe].settings())
    for values in presets(recipe).values():
        from_json(RECIPES[recipe].settings, values)
    reasons = tables.differences(recipe)
    assert reasons.keys() <= default.keys()
    published = presets(recipe).get("paper", {})  # where a default differs, docs/recipes.md says why
    assert {name for name, value in published.items() if value != default[name]} <= reasons.keys()


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_a_preset_has_the_encoders_of_its_name(recipe: str) -> None:
    encoders = {"resnet101", "resnext101", "resnet152", "bert", "bigru"}
    for name, values in presets(recipe).items():
        for word in encoders.intersection(name.split("-")):
            assert any(word in str(value) for value in values.values()), name


def test_what_cookie_pre_trains_fits_its_tasks() -> None:
    """The presets of the tasks name the encoders of the pre-trained model, where they read what it reads."""
    whole = presets("cookie")["paper"]
    for recipe, names in (
        ("cookie-match", ["image_encoder", "train_backbone", "text_encoder"]),
        ("cookie-hash", ["image_encoder", "train_backbone", "text_encoder"]),
        ("cookie-video", ["text_encoder"]),
    ):
        assert {name: presets(recipe)["paper"][name] for name in names} == {
            name: whole[name] for name in names
        }


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_any_recipe_is_varied_without_a_table(recipe: str) -> None:
    table = tables.sweep(recipe)
    assert [row.recipe for row in table.rows] == [recipe]
    assert table.groups[0].kind == "test"
    assert table.data


def test_the_lines_of_a_figure_of_rows() -> None:
    """A line for each series of rows over the batch sizes, the published numbers of one of them beside it."""
    table = tables_of("coder")["f3"]
    assert table.figure is not None
    metrics = dict.fromkeys(table.figure.metrics, 1.0)
    results = TableResults(
        table, table.groups, table.rows, {row.name: {"f30k": [metrics]} for row in table.rows}, []
    )
    lines = results._over_rows(table.figure, table.rows, table.groups[0])
    assert all(list(line.x) == [0, 1] for line in lines)  # 32, 128
    assert [line.name for line in lines[::2]] == [
        "image → text R@1, DCL",
        "text → image R@1, DCL",
        "image → text R@1, DCL + M-DCL",
    ]
    assert [line.style for line in lines] == ["-", "--", "-", "--", "-", "-"]
    assert len({line.colour for line in lines}) == 4


@pytest.mark.parametrize("table", EVERY, ids=lambda table: f"{table.paper}-{table.name}")
def test_latex_has_a_command_for_every_letter(table: PaperTable) -> None:
    measured = {
        row.name: {group.name: [dict.fromkeys(group.columns, 1.0)] * 2 for group in table.groups}
        for row in table.rows
    }
    content = TableResults(table, table.groups, table.rows, measured, []).latex()
    assert "".join(line for line in content.splitlines() if not line.startswith("%")).isascii()


def test_a_figure_shows_every_data_set(tmp_path: Path) -> None:
    """λ on two of its three data sets: two lines each."""
    table = tables_of("labelwise")["lambda"]
    assert table.figure is not None
    runs = [dict.fromkeys(table.figure.metrics, 50.0)]
    measured = {row.name: {"flickr25k": runs, "coco": runs} for row in table.rows}
    TableResults(table, table.groups, table.rows, measured, []).draw(tmp_path / "figure.svg")
    drawn = (tmp_path / "figure.svg").read_text()
    for name in ("FLICKR25K, text", "FLICKR25K, image", "COCO, text", "COCO, image"):
        assert f"<!-- {name} → " in drawn


def test_no_two_points_of_a_figure_look_alike(tmp_path: Path) -> None:
    """Each method has a colour and a mark that no other has both of, and the interval of several seeds."""
    table = tables_of("coder")["f4"]
    assert table.figure is not None
    rows = [row for row in table.rows if not row.published_only]
    runs = [{"speed_thousand_pairs_per_second": 10.0, "rsum": 100.0 + seed} for seed in range(3)]
    results = TableResults(table, table.groups, rows, {row.name: {"f30k": runs} for row in rows}, [])
    points = results._by_speed(table.figure, rows, table.groups[0])
    assert len({(point.colour % len(COLOURS), point.mark) for point in points}) == len(rows)
    results.draw(tmp_path / "figure.svg")
    bars = (tmp_path / "figure.svg").read_text().count('id="LineCollection_')
    assert bars == len(rows)


def test_folders_of_rows_differ() -> None:
    assert slug("VSE++, BUTD region + BiGRU") == "vse-plus-plus-butd-region-plus-bigru"
    assert slug("VSE∞") != slug("VSE++")
    assert slug("Consistency−") != slug("Consistency+")


@pytest.mark.parametrize("table", EVERY, ids=lambda table: f"{table.paper}-{table.name}")
def test_a_table_refers_to_what_is_there(table: PaperTable) -> None:
    groups, rows = {group.name for group in table.groups}, {row.name for row in table.rows}
    assert {group.kind for group in table.groups} <= set(get_args(tables.Kind))
    assert len({slug(name) for name in rows}) == len(table.rows)  # each has a folder of its own
    for row in table.rows:
        assert set(row.mean_of) <= rows, row.name
        assert groups.issuperset({*row.only, *row.published}), row.name


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"colour": 1}, "colour"),
        ({"groups": {"coco": {"title": "COCO", "columns": "recalls"}}}, "recalls"),
        ({"rows": [{"name": "a", "published": {"coco": [1.0, 2.0]}}]}, "argument 2"),
        ({"rows": [{"name": "a", "published": {"f30k": [1.0]}}]}, "f30k"),
    ],
)
def test_a_wrong_file_is_refused(changes: dict[str, Any], named: str) -> None:
    entry = {"title": "t", "groups": {"coco": {"title": "COCO", "columns": "recall"}}, "rows": [], **changes}
    with pytest.raises(Exception, match=named):
        tables._table("paper", "1", entry, "vse-infinity", "title")


def test_a_table_knows_its_data() -> None:
    table: PaperTable = tables_of("cusa")["10"]
    assert table.data == ["coco", "cub", "sop", "in-shop", "inaturalist", "coco-pictures"]


def test_our_own_tables_repeat_the_numbers_of_published_ones() -> None:
    printed = {row.name: row.published["f30k"] for row in tables_of("cusa")["8"].rows if row.published}
    for row in tables_of("cusa")["hosts"].rows:
        assert row.published == ({} if row.name.startswith("VSE∞") else {"f30k": printed[row.name]})
    table, own = tables_of("vse-infinity")["4"], tables_of("vse-infinity")["baselines"]
    names = {"SCAN": ", BUTD region, two models", "CVSE": ", BUTD region", "VSE∞": ", BUTD region + BiGRU"}
    for name, rest in names.items():
        assert own.row(name).published["f30k"] == table.row(f"{name}{rest}").published["f30k"]
