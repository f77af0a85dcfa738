"""Names from strangers in what a command prints: nothing in them moves a cursor or breaks a line."""

from __future__ import annotations

import ast
import fcntl
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from commands import diptych, refused
from PIL import Image
from resealed import VECTORS, D, make

from diptych import progress
from diptych.cache.feature_pack import FeaturePack
from diptych.cache.rows import kept_rows
from diptych.data.problems import LeftOut
from diptych.errors import DataError, StorageError
from diptych.evaluation.classes import ClassList
from diptych.evaluation.uni_modal import _digest
from diptych.index.engines.embedded.index import EmbeddedIndex
from diptych.index.protocol import Item
from diptych.progress import LOG, PrintableLines, echo, printable
from diptych.vectors.manifest import _name

ESCAPE = "\x1b[2J\x9b31m\x07\u202egnp\u2028"


def test_control_characters_are_written_out() -> None:
    assert printable("a\x1b[2Jb\nc") == "a\\u001b[2Jb\\u000ac"
    assert printable("a\nb\tc\x7f", keep="\n\t") == "a\nb\tc\\u007f"
    assert (
        printable("né 日本\u202f\u200d👩") == "né 日本\u202f\u200d👩"
    )  # names of photos, as people give them
    assert printable("\udcff\u202e") == "\\udcff\\u202e"


def plain(text: str) -> bool:
    return printable(text, keep="\n\t") == text


def test_names_of_pictures(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    for number in range(3):
        Image.new("RGB", (40, 40), (90 * number, 9, 9)).save(photos / f"{number}{ESCAPE}.png")
    (photos / f"broken{ESCAPE}\n.png").write_bytes(b"no picture")
    said = diptych("data", "check", photos, status=1)
    assert plain(said.stdout + said.stderr)
    assert "\\u001b" in said.stdout + said.stderr
    assert "\\u000a" in said.stdout + said.stderr


@pytest.fixture
def index(tmp_path: Path) -> Path:
    path = make(tmp_path / "index")
    with EmbeddedIndex.open(path, writable=True) as opened:
        opened.add([Item(f"id{ESCAPE}\n", text=f"text{ESCAPE}")], VECTORS[:1])
    return path


def test_errors(index: Path) -> None:
    for command in (("index", "info", f"no{ESCAPE}\nindex"), ("index", "remove", index, f"none{ESCAPE}\n")):
        said = refused(*command)
        assert plain(said)
        assert "\\u001b" in said


def test_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        LOG.warning("%s is damaged", f"a{ESCAPE}\n")
    (said,) = caplog.messages
    assert printable(said) == said


def test_tracebacks_in_the_log_of_the_service(capsys: pytest.CaptureFixture[str]) -> None:
    log, handler = logging.getLogger("of a test"), logging.StreamHandler()
    handler.setFormatter(PrintableLines("%(levelname)s: %(message)s"))
    log.addHandler(handler)
    try:
        raise ValueError(f"a{ESCAPE}\n")
    except ValueError:
        log.exception("it failed")
    log.removeHandler(handler)
    said = capsys.readouterr().err
    assert plain(said)
    assert "\\u001b" in said
    assert "Traceback" in said


def test_json_stays_json() -> None:
    text = printable(json.dumps({"id": ESCAPE}, ensure_ascii=False))
    assert json.loads(text) == {"id": ESCAPE}


# ---------------------------------------------------------------------- other raw errors


@pytest.mark.parametrize("number", ["ENOLCK", "EOPNOTSUPP", "EINVAL", "ENOSYS"])
def test_a_file_system_without_locks(number: str, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    def fails(*_: object) -> None:
        raise OSError(getattr(errno, number), os.strerror(getattr(errno, number)))

    monkeypatch.setattr(fcntl, "flock", fails)
    places: list[Callable[[], object]] = [
        lambda: EmbeddedIndex.open(index, writable=True),
        lambda: kept_rows(index.parent / "rows.npy", "key", lambda done: ()),
        lambda: FeaturePack(index.parent / "pack").append(["a"], np.ones((1, 3))),
        lambda: FeaturePack(index.parent / "pack").work_lock("a"),
    ]
    for place in places:
        with pytest.raises(StorageError, match="without locks"):
            place()


@pytest.mark.parametrize("name", ["a\x00b", "", "..", "a/b", None, 7])
def test_a_name_of_a_shard(name: object) -> None:
    with pytest.raises(ValueError, match="name of a shard"):
        _name(name)


@pytest.mark.parametrize(
    "vectors",
    [np.ones((1, D), complex), np.full((1, D), "x"), np.full((1, D), None), np.ones((1, D), "M8[s]")],
)
def test_vectors_that_are_no_real_numbers(vectors: np.ndarray, index: Path) -> None:
    with EmbeddedIndex.open(index, writable=True) as opened:
        with pytest.raises(DataError, match="real numbers"):
            opened.add([Item("new")], vectors)
        with pytest.raises(DataError, match="real numbers"):
            opened.search(vectors[0], 3)


def test_everything_is_printed_through_one_function() -> None:
    """What a file is called reaches a terminal with its control characters made visible."""
    package = Path(progress.__file__).parent
    bare = [
        f"{path.relative_to(package)}:{node.lineno}"
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert {where.partition(":")[0] for where in bare} == {"progress.py"}


def test_what_runs_print(capsys: pytest.CaptureFixture[str]) -> None:
    echo(f"a{ESCAPE}\tb\nc")
    echo(ESCAPE, err=True)
    said = capsys.readouterr()
    assert plain(said.out + said.err)
    assert said.out.endswith("\tb\nc\n")


def test_names_that_are_not_utf8_are_kept_in_files_or_quoted_alone(tmp_path: Path) -> None:
    odd, photos = os.fsdecode(b"caf\xe9.png"), tmp_path / "photos"
    photos.mkdir()
    for name in ("a.png", odd):
        Image.new("RGB", (40, 40)).save(photos / name)
    said = refused("extract", photos, "--output_dir", tmp_path / "out")
    assert "the name 'caf\\udce9.png' is not UTF-8" in said  # without what stood behind it
    LeftOut({odd: "damaged"}).save(tmp_path)
    assert (tmp_path / "unreadable.txt").read_text("utf-8", "surrogatepass") == f"{odd}\tdamaged\n"
    assert _digest(ClassList("cub", [photos / odd], np.zeros(1, np.int64))).startswith("cub ")


def test_a_folder_whose_name_is_not_utf8(tmp_path: Path) -> None:
    """It ended in a traceback."""
    photos = tmp_path / os.fsdecode(b"photos\xff")
    photos.mkdir()
    Image.new("RGB", (40, 40)).save(photos / "a.png")
    assert "\\udcff" in refused("search", photos, "dog")
