"""The other kinds of names from outside: a recipe, encoders, teachers, an objective, judgements, an exporter.

An engine of a package of its own is tested in ``test_own_engine.py``.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from small import photos, precomputed
from test_plugins import package, ran, refusal, run, small

from diptych import create_index
from diptych.evaluation.report import Report

ENCODERS = """
from torch import nn
from diptych.encoders.encoder import Encoder
from diptych.parts import part
from diptych.types import Features

@part
class Line(Encoder):
    def __init__(self, width, dim):
        super().__init__()
        self.dim, self.line = dim, nn.Linear(width, dim)

    def forward(self, inputs):
        return Features(self.line(inputs.values.float()), inputs.mask)

@part
class Table(Encoder):
    def __init__(self, words, dim):
        super().__init__()
        self.dim, self.table = dim, nn.Embedding(words, dim)

    def forward(self, inputs):
        return Features(self.table(inputs.values), inputs.mask)
"""
BACKBONE = """
from torch import nn
from diptych.encoders.encoder import Backbone

class Colours(Backbone):
    '''Patches of 16 x 16 pixels, each as three numbers.'''
    channels = 3

    def __init__(self, size=32):
        super().__init__(size, (0.5,) * 3, (0.5,) * 3)
        self.patches = nn.Conv2d(3, 3, 16, 16)

    def forward(self, pixels):
        return self.patches(pixels).flatten(2).transpose(1, 2)
"""
TEACHER = """
import numpy as np
from torch import nn
from diptych.targets.teachers import TextTeacher

class Letters(TextTeacher):
    '''How often each letter is in a text.'''
    def __init__(self, project=0):
        self.encoder = nn.Identity()

    def identity(self):
        return "letters"

    def __call__(self, texts):
        counts = np.array([[text.count(chr(97 + n)) for n in range(26)] for text in texts], np.float32)
        return counts / np.linalg.norm(counts, axis=1, keepdims=True).clip(1e-6)
"""
OBJECTIVE = """
from diptych.objectives.objective import Objective

class Pull(Objective):
    '''Draw the two sides of a pair together.'''
    def forward(self, embeddings, batch):
        return {"pull": (embeddings.image - embeddings.text).square().sum(dim=1).mean()}
"""
JUDGED = """
from diptych.evaluation.judgements import Judgements

def every_text():
    return Judgements("every-text", {0: frozenset(range(5))}, {0: frozenset({0})}, rows=True)
"""
EXPORTER = """
import click

@click.command("ids")
@click.argument("place")
def ids(place):
    from diptych import open_index
    with open_index(place) as index:
        click.echo(f"{index.info.counts['image']} images")
"""
RECIPE = """
from dataclasses import replace
from diptych.recipes.vse_infinity import RECIPE

MINE = replace(RECIPE, name="mine", title="VSE∞ by another name")
"""
POINTS = """
[diptych.recipes]
mine = kinds_recipe:MINE
[diptych.image_encoders]
line = kinds_encoders:Line
[diptych.text_encoders]
table = kinds_encoders:Table
[diptych.backbones]
colours = kinds_backbone:Colours
[diptych.image_teachers]
colours = kinds_backbone:Colours
[diptych.text_teachers]
letters = kinds_teacher:Letters
[diptych.objectives]
pull = kinds_objective:Pull
[diptych.judgements]
every-text = kinds_judged:every_text
[diptych.exporters]
ids = kinds_exporter:ids
"""


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package with a name of each kind."""
    return package(
        tmp_path_factory.mktemp("kinds"), "kinds", POINTS, kinds_encoders=ENCODERS, kinds_backbone=BACKBONE,
        kinds_teacher=TEACHER, kinds_objective=OBJECTIVE, kinds_judged=JUDGED, kinds_exporter=EXPORTER,
        kinds_recipe=RECIPE,
    )  # fmt: skip


def test_encoders_an_objective_and_judgements(kinds: Path, tmp_path: Path) -> None:
    data = precomputed(tmp_path / "toy_precomp", train=24, dev=8)
    folder, report = tmp_path / "run", tmp_path / "report.json"
    words = small(
        "vse-infinity", data, image_encoder="line", text_encoder="table", objective="own + 0.5*pull"
    )
    run(*words, "--output_dir", folder, path=kinds)
    assert ran(kinds) == {"kinds_encoders", "kinds_objective"}
    steps = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert all(line["pull"] > 0 for line in steps if "loss" in line)
    evaluation = ("evaluate", folder, "--data", data, "--bootstrap=0", "--output", report)
    run(*evaluation, "--judgements=every-text", path=kinds)
    assert Report.load(report).groups[0].metrics["every-text_image_to_text_map@r"] > 0


def test_a_backbone_and_teachers(kinds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path / "cache"))
    folder = photos(tmp_path / "photos")
    run(
        "extract",
        folder,
        "--output_dir",
        tmp_path / "cells",
        "--backbone=colours",
        "--image_size=32",
        path=kinds,
    )
    cells = [np.load(file) for file in (tmp_path / "cells").glob("*_ims.npy")]
    assert {rows.shape[1:] for rows in cells} == {(4, 3)}
    ran(kinds)
    run("teach", folder, "--image_teacher=colours", "--text_teacher=letters", "--image_size=32", path=kinds)
    assert ran(kinds) == {"kinds_backbone", "kinds_teacher"}


def test_an_exporter(kinds: Path, tmp_path: Path) -> None:
    ran(kinds)
    create_index(tmp_path / "index", np.eye(3, 4, dtype=np.float32)).close()
    assert "ids" in run("export", "--help", path=kinds).stdout
    assert run("export", "ids", tmp_path / "index", path=kinds).stdout == "3 images\n"
    assert ran(kinds) == {"kinds_exporter"}


def test_a_recipe(kinds: Path, tmp_path: Path) -> None:
    ran(kinds)
    assert "VSE∞ by another name" in run("train", "--help", path=kinds).stdout
    data, folder = precomputed(tmp_path / "toy_precomp", train=24, dev=8), tmp_path / "run"
    ran(kinds)
    run(*small("mine", data), "--output_dir", folder, path=kinds)
    assert ran(kinds) == {"kinds_recipe"}
    run("evaluate", folder, "--data", data, "--bootstrap=0", path=kinds)
    assert " mine" in refusal("train", "mien", "--data", data, path=kinds)
    assert json.loads((folder / "run.json").read_text())["recipe"] == "mine"
