"""Folders of models and runs from a stranger or a failing disk: one sentence each, and nothing in them is run."""

from __future__ import annotations

import ast
import copy
import json
import os
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small import texts

import diptych
from diptych import Retriever
from diptych.aggregators import GPO, Mean
from diptych.data.images import RegionInput
from diptych.data.text import WordInput, load_tokenizer
from diptych.data.vocabulary import build_vocabulary
from diptych.encoders.bigru import BiGRU
from diptych.encoders.pretrained import load_config
from diptych.encoders.regions import Regions
from diptych.errors import CheckpointError, DataError, DiptychError
from diptych.model.retriever import Tower
from diptych.settings import TrainingSettings, to_json
from diptych.training.checkpoint import Progress, RunCard, _progress, check_resumable, read_run
from diptych.training.log import Log, read_log
from diptych.training.processes import interruptible

SOURCES = sorted(Path(diptych.__file__).parent.rglob("*.py"))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    words = build_vocabulary(texts(50), min_count=1)
    towers = Tower(Regions(16, 12, hidden=8), Mean()), Tower(BiGRU(len(words), 6, 12), GPO())
    folder = tmp_path_factory.mktemp("models") / "sound"
    Retriever(*towers, RegionInput(16), WordInput(words)).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "model"))


def places(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to everything inside a JSON value."""
    yield here
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*here, key))


def mutants(config: Any, count: int) -> Iterator[Any]:
    """The same configuration with one thing in it changed, taken out or put in."""
    draw = random.Random(0)
    values = [None, -1, 0, 3, 10**30, 1e308, 0.5, True, "", "x", "../x", [], {}, [[1]], {"part": "Mean"}]
    values += [
        {"part": "Nothing"},
        {"part": 5},
        {"asset": "/etc/passwd"},
        {"asset": 5},
        {"is": 9},
        {"is": []},
    ]
    values += [{"asset": "../../model/config.json"}, {"asset": "a\x00b"}, {"part": "Regions", "dim": "x"}]
    ways = [way for way in places(config) if way]
    for _ in range(count):
        mutant = copy.deepcopy(config)
        inner, way = mutant, draw.choice(ways)
        for key in way[:-1]:
            inner = inner[key]
        kind = draw.random()
        if kind < 0.2:
            del inner[way[-1]]
        elif kind < 0.3 and isinstance(inner, dict):
            inner["further"] = draw.choice(values)
        else:
            inner[way[-1]] = draw.choice(values)
        yield mutant


def test_no_mutant_of_a_configuration_is_a_traceback(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    refused = 0
    for mutant in mutants(config, 340):
        (folder / "config.json").write_text(json.dumps(mutant))
        try:
            Retriever.from_pretrained(folder)
        except DiptychError:
            refused += 1
    assert refused > 200


@pytest.mark.parametrize(
    "text", ["", "[" * 100_000, "[]", "5", '{"format": 1e999}', '{"format": []}', "\xff"]
)
def test_a_configuration_that_is_none(folder: Path, text: str) -> None:
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError):
        Retriever.from_pretrained(folder)


@pytest.mark.parametrize("name", ["/etc/hostname", "../secret.json", "sub/../../secret.json", "link.json"])
def test_an_asset_stays_in_its_folder(folder: Path, name: str) -> None:
    (folder.parent / "secret.json").write_text('["<pad>", "secret"]')
    if name == "link.json":
        (folder / name).symlink_to(folder.parent / "secret.json")
    config = json.loads((folder / "config.json").read_text())
    text = json.dumps(config)
    for way in places(config):
        inner = config
        for key in way:
            inner = inner[key]
        if isinstance(inner, dict) and "asset" in inner:
            text = text.replace(json.dumps(inner), json.dumps({"asset": name}))
    assert name in text
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"plain|refers"):
        Retriever.from_pretrained(folder)


def test_damaged_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    draw = random.Random(1)
    refusals = 0
    for _ in range(60):
        data = bytearray(whole)
        head = 8 + int.from_bytes(whole[:8], "little")
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(head)] = draw.randrange(256)
        weights.write_bytes(bytes(data[: draw.choice([len(data), draw.randrange(len(data))])]))
        try:
            Retriever.from_pretrained(folder)
        except DiptychError:
            refusals += 1
    assert refusals > 50  # what is left changed a space or a letter of the metadata


def test_a_saved_model_is_as_readable_as_the_umask_says(folder: Path, sound: Path) -> None:
    (folder / "probe").touch()
    wanted = (folder / "probe").stat().st_mode & 0o777
    for file in sound.rglob("*"):
        assert not file.is_file() or file.stat().st_mode & 0o777 == wanted, file


def test_code_in_a_folder_is_never_run(tmp_path: Path) -> None:
    for name, key in (("config.json", "AutoConfig"), ("tokenizer_config.json", "AutoTokenizer")):
        (tmp_path / name).write_text(
            json.dumps({"model_type": "unheard-of", "auto_map": {key: ["evil.Evil", "evil.Evil"]}})
        )
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    for load in (load_config, load_tokenizer):
        with pytest.raises(DataError):
            load(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_nothing_of_a_hub_is_trusted_anywhere() -> None:
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
            if node.func.attr in ("from_pretrained", "from_config") and owner.startswith("Auto"):
                said = {keyword.arg: keyword.value for keyword in node.keywords}
                value = said.get("trust_remote_code")
                assert isinstance(value, ast.Constant), f"{path.name}:{node.lineno}"
                assert value.value is False, f"{path.name}:{node.lineno}"


def test_nothing_is_unpickled_anywhere() -> None:
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                names = {alias.name.split(".")[0] for alias in node.names}
                assert not names & {"pickle", "cPickle", "dill", "joblib", "marshal", "shelve"}, path.name
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                assert node.module.split(".")[0] not in {"pickle", "dill", "joblib", "marshal"}, path.name
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "load"
            ):
                owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
                said = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
                if owner == "torch":
                    assert said.get("weights_only") is True, f"{path.name}:{node.lineno}"
                if owner == "np":
                    assert said.get("allow_pickle", False) is False, f"{path.name}:{node.lineno}"


# ---------------------------------------------------------------------- runs


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_both_signals_ask_a_run_to_save(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with interruptible() as interrupt:
        assert not interrupt.asked
        os.kill(os.getpid(), number)
        assert interrupt.asked
    assert signal.getsignal(number) is before


def test_a_damaged_line_of_the_log_is_lost_alone(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    lines = [json.dumps({"step": n, "loss": 1.0}).encode() for n in range(1, 101)]
    lines[45] = b'{"step": 46, "lo\xff\xfe'
    lines[50] = b"[" * 100_000
    lines[60] = b"[1, 2]"
    lines[70] = b'{"loss": 5}'
    log.write_bytes(b"\n".join(lines) + b"\n" + b'{"step": 101, "cut of')
    assert len(read_log(log)) == 96
    Log(tmp_path, resumed_at=90).close()
    assert [line["step"] for line in read_log(log)][-1] == 90
    assert len(read_log(log)) == 86


RUN = {
    "format": 1,
    "recipe": "r",
    "data": "d",
    "data_fingerprint": "f",
    "settings": to_json(TrainingSettings()),
}


@pytest.mark.parametrize(
    "change",
    [
        {"format": [1]}, {"recipe": 5}, {"data": None}, {"data_fingerprint": {}}, {"settings": []},
        {"settings": {**RUN["settings"], "epochs": "many"}}, {"settings": {**RUN["settings"], "epochs": True}},  # type: ignore[dict-item]
        {"settings": {"nothing": 1}}, {"settings": {**RUN["settings"], "learning_rate": [1]}},  # type: ignore[dict-item]
    ],
)  # fmt: skip
def test_a_damaged_run_card(tmp_path: Path, change: dict[str, Any]) -> None:
    (tmp_path / "run.json").write_text(json.dumps({**RUN, **change}))
    with pytest.raises(DiptychError):
        check_resumable(tmp_path, RunCard("r", TrainingSettings(), "d", "f"))


@pytest.mark.parametrize("text", ["", "[]", "5", "[" * 100_000, "9" * 9_000, "\xff\xfe"])
def test_a_run_card_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"run\.json"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        {"step": "x"},
        {"step": -1},
        {"step": True},
        {"best": []},
        {"history": 5},
        {"history": [1]},
        {"best_epoch": 0.5},
    ],
)
def test_damaged_progress(content: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        _progress(content)
    assert _progress({"step": 5, "best": None}) == Progress(step=5)


def test_weights_are_numbers_only(sound: Path) -> None:
    assert all(isinstance(value, torch.Tensor) for value in load_file(sound / "model.safetensors").values())
