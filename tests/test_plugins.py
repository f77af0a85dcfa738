"""Names from outside: a package that is not Diptych's adds a pooling, a protocol, a reader and a command.

The package is real: modules and metadata with entry points in a folder on ``PYTHONPATH``, as pip writes them. Every
command runs in a process of its own. A module that is imported writes a file, so that a test sees whether it ran.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from commands import training
from small import precomputed

from diptych.errors import MissingExtra, SettingsError
from diptych.evaluation.report import Report
from diptych.names import Entry, Registry
from diptych.recipes import RECIPES
from diptych.registries import POOLINGS, REGISTRIES
from diptych.settings import check_saved

SOURCE = Path(__file__).parent.parent / "src"
MARK = "from pathlib import Path\nPath(__file__).with_suffix('.ran').touch()\n"

POOLING = """
import torch
from diptych.aggregators import Aggregator
from diptych.parts import part

@part
class LogMeanExp(Aggregator):
    def forward(self, features):
        values = features.values.float().masked_fill(~features.mask[..., None], float("-inf"))
        return values.logsumexp(dim=1) - features.mask.sum(dim=1, keepdim=True).log()
"""
PROTOCOL = """
from diptych.evaluation.cards import Facts
from diptych.evaluation.protocols import EvaluationProtocol
from diptych.evaluation.report import Group

HALVES = EvaluationProtocol("halves", folds=2)

class FirstText:
    def __init__(self, bootstrap=0):
        self.bootstrap = bootstrap

    def __call__(self, model, data, *, show_progress=False):
        scores = model.encode_image(data.captions.images) @ model.encode_text(data.texts).T
        right = 100 * float((scores.argmax(dim=1) == 0).float().mean())
        return Group("first", {"first_text": right}, "first_text", Facts({"data": data.captions.name}, {}))
"""
READER = """'''Lines of numbers, each with its texts behind it (.acme).'''
import numpy as np
from diptych.data.arrays import ArrayStore
from diptych.data.captions import Captions

def matches(path):
    return path.suffix == ".acme"

def read(path):
    rows = [line.split("|") for line in path.read_text().splitlines()]
    images = np.array([[[float(n) for n in row[0].split()]] for row in rows], np.float32)
    return Captions(images=ArrayStore(images), texts=[row[1] for row in rows], image_of=np.arange(len(rows)),
                    image_ids=[str(n) for n in range(len(rows))], splits=["train"] * len(rows), name=path.stem)
"""
COMMAND = """
import torch
import click

@click.command("count-words")
@click.argument("words", nargs=-1)
def count_words(words):
    "Count words."
    click.echo(len(words))
"""
OBJECTIVE = """
from diptych.objectives.objective import Objective

class Powered(Objective):
    "The mean distance of a pair, to a power."

    def __init__(self, power: float = 1.0):
        super().__init__()
        self.power = power

    def forward(self, embeddings, batch):
        near = (embeddings.image * embeddings.text).sum(dim=1)
        return {"powered": (1 - near).clamp_min(1e-6).pow(self.power).mean()}
"""
POINTS = """
[diptych.objectives]
powered = acme_objective:Powered
[diptych.poolings]
log-mean-exp = acme_pool:LogMeanExp
[diptych.protocols]
halves = acme_protocol:HALVES
first-text = acme_protocol:FirstText
[diptych.readers]
acme = acme_reader
[diptych.commands]
count-words = acme_command:count_words
"""


def package(folder: Path, name: str, points: str, **modules: str) -> Path:
    """An installed package: modules, and metadata that declares entry points."""
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(points)
    for module, content in modules.items():
        (folder / f"{module}.py").write_text(content + MARK)
    return folder


@pytest.fixture(scope="module")
def acme(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package that declares its names."""
    return package(
        tmp_path_factory.mktemp("acme"), "acme", POINTS,
        acme_pool=POOLING, acme_protocol=PROTOCOL, acme_reader=READER, acme_command=COMMAND,
        acme_objective=OBJECTIVE,
    )  # fmt: skip


@pytest.fixture(scope="module")
def undeclared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package that declares nothing."""
    return package(tmp_path_factory.mktemp("undeclared"), "other", "", acme=POOLING)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return precomputed(tmp_path_factory.mktemp("data") / "toy_precomp", train=24, dev=8)


def run(
    *args: object, path: Path | None = None, status: int = 0, plugins: str = ""
) -> subprocess.CompletedProcess[str]:
    """A command in a fresh process that finds the packages of a folder."""
    where = os.pathsep.join([str(SOURCE), *([str(path)] if path else [])])
    environment = {**os.environ, "PYTHONPATH": where, "DIPTYCH_PLUGINS": plugins, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "diptych", *map(str, args)],
        env=environment, capture_output=True, text=True, cwd=path,
    )  # fmt: skip
    assert done.returncode == status, done.stdout + done.stderr
    return done


def refusal(*args: object, path: Path, plugins: str = "") -> str:
    """The one sentence of a command that is refused."""
    said = run(*args, path=path, status=2, plugins=plugins).stderr
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, said
    assert "Traceback" not in said
    return lines[0]


def ran(folder: Path) -> set[str]:
    """The modules that were imported since the last look."""
    found = {mark.stem for mark in folder.glob("*.ran")}
    for mark in folder.glob("*.ran"):
        mark.unlink()
    return found


def small(recipe: str, data: Path, **changes: object) -> list[object]:
    """Two steps of a recipe."""
    heads = {"heads": 2} if recipe == "cookie-match" else {}
    more = {"prototypes": False, "concept": False} if recipe == "coder" else {}
    words = training(recipe, data, epochs=1, batch_size=60, **heads, **changes)
    return [*words, *(f"--no_{name}" for name in more), "--no_ridge_baseline"]


@pytest.mark.parametrize("recipe", ["vse-infinity", "coder", "cookie-match"])
def test_a_pooling_that_a_person_types(recipe: str, data: Path, undeclared: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    queue = {"queue_size": 120} if recipe == "coder" else {}
    words = small(recipe, data, image_pool="acme:LogMeanExp", **queue)
    run(*words, "--output_dir", folder, path=undeclared)
    steps = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert len([line for line in steps if "loss" in line]) == 2
    assert json.loads((folder / "run.json").read_text())["settings"]["image_pool"] == "acme:LogMeanExp"
    config = (folder / "best" / "config.json").read_text()
    assert '"LogMeanExp"' in config
    assert '"from": "acme"' in config


@pytest.fixture(scope="module")
def foreign_run(data: Path, undeclared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose pooling is of a package that declares nothing."""
    folder = tmp_path_factory.mktemp("foreign") / "run"
    run(
        *small("vse-infinity", data, image_pool="acme:LogMeanExp", save_steps=1),
        "--output_dir", folder, path=undeclared,
    )  # fmt: skip
    return folder


def test_a_saved_part_never_makes_its_module_run(foreign_run: Path, data: Path, undeclared: Path) -> None:
    ran(undeclared)
    evaluation = ("evaluate", foreign_run, "--data", data, "--bootstrap=0")
    said = refusal(*evaluation, path=undeclared)
    assert "the part 'LogMeanExp' of the module 'acme'" in said
    assert "DIPTYCH_PLUGINS=acme" in said
    assert not ran(undeclared)
    run(*evaluation, path=undeclared, plugins="acme")
    assert ran(undeclared) == {"acme"}


def test_a_saved_setting_never_makes_its_module_run(foreign_run: Path, undeclared: Path) -> None:
    ran(undeclared)
    resume = ("train", "vse-infinity", "--resume_from_checkpoint", foreign_run, "--epochs=2")
    said = refusal(*resume, path=undeclared)
    assert "the saved settings name the pooling 'acme:LogMeanExp'" in said
    assert not ran(undeclared)
    run(*resume, "--image_pool=acme:LogMeanExp", path=undeclared)  # the person says it again
    run(*resume[:-1], "--epochs=3", path=undeclared, plugins="acme")


@pytest.mark.parametrize(
    "saved",
    [{"image_encoder": "acme_nowhere:Encoder"}, {"objective": "own + 0.5*acme_nowhere:Loss"}],
    ids=lambda saved: next(iter(saved)),
)
def test_settings_taken_from_another_run_are_looked_at_too(saved: dict[str, str]) -> None:
    kind = RECIPES["cookie-match"].settings
    with pytest.raises(SettingsError, match="acme_nowhere"):
        check_saved(kind, saved)
    check_saved(kind, {"image_encoder": "hf:some/model", "image_pool": "gpo", "objective": "own + 0.5*dcl"})


def test_names_that_a_package_declares(data: Path, acme: Path, tmp_path: Path) -> None:
    ran(acme)
    folder = tmp_path / "run"
    words = small("vse-infinity", data, image_pool="log-mean-exp")
    run(*words, "--output_dir", folder, path=acme)
    assert ran(acme) == {"acme_pool", "acme_reader"}  # a reader is asked whether it knows the data
    report = tmp_path / "report.json"
    evaluation = ("evaluate", folder, "--data", data, "--bootstrap=0", "--output", report)
    run(*evaluation, "--protocol=halves", path=acme)
    assert Report.load(report).groups[0].card.described()["protocol"] == "halves"
    for name in ("first-text", "acme_protocol:FirstText"):
        run(*evaluation, f"--protocol={name}", path=acme)
        assert Report.load(report).primary_metric == "first_text"
    assert "halves?" in refusal(*evaluation, "--protocol=halfs", path=acme)


def test_a_reader_of_another_package(acme: Path, tmp_path: Path) -> None:
    file = tmp_path / "toy.acme"
    file.write_text("1 2 3|a dog runs\n4 5 6|a cat sits\n")
    assert "acme" in run("data", "check", file, path=acme).stdout
    assert "Lines of numbers" in run("data", "formats", path=acme).stdout


def test_a_command_of_another_package(acme: Path) -> None:
    ran(acme)
    listed = run("--help", path=acme).stdout
    assert "count-words  From the package acme 1.0." in listed
    assert not ran(acme)
    assert run("count-words", "a", "b", path=acme).stdout == "2\n"
    assert "did you mean count-words?" in refusal("count-word", path=acme)


def test_the_version_imports_no_plugin(acme: Path, tmp_path: Path) -> None:
    """CPU seconds of the whole process, with plugins of every sort installed that import torch."""
    slow = package(tmp_path, "slow", "[diptych.plugins]\nslow = slow\n", slow="import torch\n")
    both = os.pathsep.join([str(SOURCE), str(acme), str(slow)])
    code = (
        "import os, subprocess, sys\n"
        "subprocess.run([sys.executable, '-m', 'diptych', sys.argv[1]], check=True, stdout=subprocess.DEVNULL)\n"
        "used = os.times(); print(used.children_user + used.children_system)"
    )
    ran(acme)
    for word in ("--version", "--help"):
        environment = {**os.environ, "PYTHONPATH": both, "DIPTYCH_PLUGINS": "acme_command"}
        tries = [
            float(subprocess.run([sys.executable, "-c", code, word], env=environment, capture_output=True,
                                 text=True, check=True).stdout)
            for _ in range(3)
        ]  # fmt: skip
        assert min(tries) < (0.2 if word == "--version" else 0.4)
    assert not ran(acme) | ran(slow)


def test_a_plugin_that_cannot_be_imported_is_one_sentence(data: Path, tmp_path: Path) -> None:
    points = "[diptych.poolings]\nbroken = bad:Pool\n[diptych.commands]\nbroken = bad:command\n"
    path = package(tmp_path / "site", "bad", points, bad="raise ValueError('no such device')\n")
    words = (*small("vse-infinity", data), "--output_dir", tmp_path / "run")
    run("data", "formats", path=path)  # nothing asks for it
    for said in (
        refusal("broken", path=path),
        refusal(*words, "--image_pool=broken", path=path),
        refusal(*words, "--image_pool=bad:Pool", path=path),
        refusal(*words, path=path, plugins="bad"),
    ):
        assert "bad" in said
        assert "ValueError: no such device" in said
    assert not (tmp_path / "run").exists()


def test_two_plugins_with_one_name_are_one_sentence(data: Path, tmp_path: Path) -> None:
    points = "[diptych.poolings]\ntwice = {0}:LogMeanExp\n[diptych.commands]\ntwice = {0}:command\n"
    path = tmp_path / "site"
    for name in ("one", "two"):
        package(path, name, points.format(name), **{name: POOLING})
    words = (*small("vse-infinity", data), "--output_dir", tmp_path / "run")
    for said in (refusal("twice", path=path), refusal(*words, "--image_pool=twice", path=path)):
        assert "one 1.0 and two 1.0" in said
    assert not (tmp_path / "run").exists()
    assert not ran(path)
    run("--help", path=path)
    run(
        *words, "--image_pool=one:LogMeanExp", "--text_pool=two:LogMeanExp", path=path
    )  # one class name, two parts
    run("evaluate", tmp_path / "run", "--data", data, "--bootstrap=0", path=path)


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--image_pool=acmee:LogMeanExp", "there is no module 'acmee'"),
        ("--image_pool=acme:logmeanexp", "did you mean LogMeanExp?"),
        ("--image_pool=acme:Nothing", "the module 'acme' has no 'Nothing'"),
        ("--image_pool=os:abort", "os:abort is no pooling: name a class derived from"),
        ("--image_pool=meen", "there is no pooling 'meen': did you mean mean?"),
        ("--image_pool=quux", "use gpo, mean, max, kmax, first, gem or module:Class"),
        ("--image_encoder=acme:LogMeanExp", "acme:LogMeanExp is no image encoder"),
        ("--image_encoder=lite", "there is no image encoder 'lite': did you mean lite0?"),
        ("--text_encoder=bigrru", "there is no text encoder 'bigrru': did you mean bigru?"),
        ("--objective=own + acme:LogMeanExp", "acme:LogMeanExp is no objective"),
    ],
)
def test_names_that_nothing_has(flag: str, said: str, data: Path, undeclared: Path, tmp_path: Path) -> None:
    words = (*small("vse-infinity", data), flag, "--output_dir", tmp_path / "run")
    assert said in refusal(*words, path=undeclared)
    assert not (tmp_path / "run").exists()


def test_a_registry_keeps_one_thing_by_one_name() -> None:
    registry = Registry("toy", "toys", [Entry("car", "a car", "os:getcwd")], typed=False)
    registry["boat"] = "os:getpid"
    registry["boat"] = "os:getpid"  # imported again
    assert list(registry) == ["car", "boat"]
    assert registry.find("boat") is os.getpid
    for name in ("car", "boat"):
        with pytest.raises(SettingsError, match=f"toy '{name}'"):
            registry[name] = "os:sep"
    assert not registry.is_foreign("os:sep")


def test_pretrained_names_win_over_modules() -> None:
    for name in ("hf:model", "timm:resnet18", "open_clip:ViT"):
        assert not any(registry.is_foreign(name) for registry in REGISTRIES)
    assert POOLINGS.is_foreign("acme.pool:LogMeanExp")
    assert not POOLINGS.is_foreign("mean")


@pytest.mark.parametrize("registry", REGISTRIES, ids=lambda registry: registry.group)
def test_every_entry_has_its_help_and_its_target(registry: Registry) -> None:
    for entry in registry.own.values():
        assert entry.help or registry is RECIPES  # a recipe has its title
        with suppress(MissingExtra):  # an engine whose client is not installed here
            assert registry.find(entry.name) is not None


@pytest.mark.parametrize("name", ["powered", "acme_objective:Powered"])
def test_an_objective_of_a_package_takes_its_argument(
    name: str, acme: Path, data: Path, tmp_path: Path
) -> None:
    words = (*small("vse-infinity", data, log_steps=1), "--output_dir", tmp_path / "run")
    run(*words, f"--objective=own + 0.5*{name}(power=2)", path=acme)
    last = json.loads((tmp_path / "run" / "log.jsonl").read_text("utf-8").splitlines()[0])
    assert 0 < last[name] < 2
    words = (*small("vse-infinity", data), "--output_dir", tmp_path / "other")
    said = run(*words, f"--objective=own + {name}(powr=2)", path=acme, status=2)
    assert not (tmp_path / "other").exists()
    assert "'powr'" in said.stderr
    assert "power?" in said.stderr
