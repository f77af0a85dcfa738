"""Damaged and hostile data sets: one sentence each, no traceback, no endless loop, no crash."""

from __future__ import annotations

import ast
import io
import json
import os
import struct
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from colours import ColourModel
from commands import diptych
from written import encoded, save_part, save_pictures

from diptych import storage
from diptych.cache.feature_pack import FeaturePack, _entries
from diptych.data.arrays import ArrayStore
from diptych.data.check import check
from diptych.data.decode.opening import open_image
from diptych.data.files import expand
from diptych.data.formats import find, open_captions
from diptych.data.labels import read_centres
from diptych.errors import CheckpointError, DataError, DiptychError, ImageError
from diptych.evaluation.judgements import _SIDES, load_judgements
from diptych.index.ingest.build import index_collection
from diptych.training.checkpoint import noise_of

DEEP = "[" * 100_000 + "]" * 100_000
LONG = "9" * 10_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_pictures(tmp_path, ["a.jpg", "b.jpg"])
    return tmp_path


def told(path: Path, **options: Any) -> str:
    """What both reading and checking say."""
    check(path, show_progress=False)  # raises nothing
    with pytest.raises(DataError) as caught:
        open_captions(path, **options)
    return str(caught.value)


@pytest.mark.parametrize("value", [DEEP, LONG, f'{{"a": {DEEP}}}'], ids=["deep", "long", "inside"])
def test_json_that_python_does_not_read(folder: Path, value: str) -> None:
    for name, text in (
        ("rows.jsonl", f'{{"image": "a.jpg", "text": "x", "y": {value}}}\n'),
        ("train.json", f'[{{"image": "a.jpg", "caption": "x", "y": {value}}}]'),
        ("dataset_coco.json", f'{{"images": [{{"filename": "a.jpg", "sentences": [], "y": {value}}}]}}'),
    ):
        (folder / name).write_text(text)
        assert "not JSON" in told(folder / name)
    sample = {"a.jpg": encoded(0, "JPEG"), "a.json": f'{{"caption": "x", "y": {value}}}'.encode()}
    write_tar(folder / "train.tar", sample)
    assert "not JSON" in told(folder / "train.tar")


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


@pytest.mark.parametrize(
    "entry",
    [
        {"filename": 5, "split": "train", "sentences": [{"raw": "x"}]},
        {"filename": ["a.jpg"], "split": "train", "sentences": [{"raw": "x"}]},
        {"filename": "a.jpg", "filepath": {"x": 1}, "split": "train", "sentences": [{"raw": "x"}]},
        {"filename": "a.jpg", "split": "train", "sentences": {"raw": "x"}},
        {"filename": "a.jpg", "split": "train", "sentences": 7},
        {"filename": "a.jpg", "split": ["train"], "sentences": [None]},
    ],
)
def test_karpathy_of_wrong_types(folder: Path, entry: dict[str, Any]) -> None:
    path = folder / "dataset_coco.json"
    path.write_text(json.dumps({"images": [entry], "dataset": "coco"}))
    told(path)
    path.write_text(json.dumps({"dataset": "coco", "images": {"filename": entry}}))
    told(path)


@pytest.mark.parametrize("name", ["a" * 300 + ".jpg", "a\x00b.jpg", "x/\x00/a.jpg", "\ud800.jpg"])
def test_names_that_no_file_has(folder: Path, name: str) -> None:
    (folder / "rows.jsonl").write_text(json.dumps({"image": name, "text": "x"}) + "\n")
    assert "missing" in told(folder / "rows.jsonl")


def negative_tar() -> bytes:
    """A sound member, then one of -512 bytes: the next header is itself."""
    sound = tarfile.TarInfo("b.jpg")
    sound.size = 4
    info = tarfile.TarInfo("a.jpg")
    info.size = 4
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[124:136] = b"\xff" * 4 + struct.pack(">q", -512)  # base 256, two's complement
    header[148:156] = b" " * 8
    header[148:156] = f"{sum(header[:512]):06o}\0 ".encode()
    data = b"data" + bytes(508)
    return sound.tobuf(tarfile.GNU_FORMAT) + data + bytes(header) + data + bytes(1024)


def test_a_member_of_negative_size_is_told(folder: Path) -> None:
    """In a process of its own: what is wrong here would never end."""
    (folder / "train.tar").write_bytes(negative_tar())
    code = f"from diptych.data.formats import open_captions; open_captions({str(folder / 'train.tar')!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert "DataError" in done.stderr
    assert "truncated or damaged" in done.stderr


def test_tars_within_reason(folder: Path) -> None:
    start = time.monotonic()
    for pattern in ("x-{0..99999999999}.tar", f"x-{{0..{LONG}}}.tar"):
        with pytest.raises(DataError, match="1,000,000"):
            list(expand(pattern))
    write_tar(folder / "train.tar", {"a.jpg": encoded(0, "JPEG"), "a.txt": b"x" * 17_000_000})
    assert "a text file has at most" in told(folder / "train.tar")
    assert time.monotonic() - start < 10


def header(text: str, version: bytes = b"\x01\x00") -> bytes:
    data = text.encode("latin-1")
    return b"\x93NUMPY" + version + struct.pack("<H", len(data)) + data


@pytest.mark.parametrize(
    "text",
    [
        "{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296), }",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 4), }",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2.5, 4), }",
        "{'descr': '<f4', 'fortran_order': False, 'shape': 5, }",
        "{'descr': 'garbage', 'fortran_order': False, 'shape': (1, 4), }",
        "{'descr': [('a', 'O')], 'fortran_order': False, 'shape': (1, 4), }",
        "(" * 9_000,
        "{" * 5_000,
        "9" * 9_000,
        "",
        "\x00" * 100,
        f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({LONG[:5_000]}, 4), }}",
    ],
    ids=range(12),
)
def test_damaged_headers_of_arrays(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.npy"
    path.write_bytes(header(text) + bytes(64))
    with pytest.raises(DataError):
        ArrayStore(path)
    save_part(tmp_path, "train", 2)
    (tmp_path / "train_ims.npy").write_bytes(header(text) + bytes(64))
    told(tmp_path)


def test_image_numbers_of_any_length(tmp_path: Path) -> None:
    save_part(tmp_path, "train", 2)
    (tmp_path / "train_image_of.txt").write_text("\n".join([LONG] * 10) + "\n")
    assert "is not a number" in told(tmp_path)


def test_damaged_tables(tmp_path: Path) -> None:
    """Each in a process of its own: a table that is believed ends it."""
    datasets = pytest.importorskip("datasets")
    rows = {"image": [f"{n}.jpg" for n in range(20)], "text": [f"text {n}" for n in range(20)]}
    place = tmp_path / "saved"
    datasets.Dataset.from_dict(rows).save_to_disk(str(place))
    (table,) = place.glob("*.arrow")
    whole = table.read_bytes()
    code = """
import sys
from pathlib import Path
from diptych.data.formats import open_captions
from diptych.errors import DataError
place, table, whole = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[2]).read_bytes()
import numpy as np
draw = np.random.default_rng(0)
for _ in range(40):
    data = bytearray(whole)
    for at in draw.integers(len(data), size=int(draw.integers(1, 6))):
        data[at] = int(draw.integers(256))
    table.write_bytes(bytes(data))
    try:
        open_captions(place)
    except DataError:
        pass
print("alive")
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(place), str(table)], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout.strip()) == (0, "alive"), done.stderr[-2000:]
    table.write_bytes(whole)
    for name, text in (
        ("state.json", "[]"),
        ("state.json", '{"_data_files": 5}'),
        ("dataset_info.json", "[1]"),
    ):
        before = (place / name).read_text()
        (place / name).write_text(text)
        told(place)
        (place / name).write_text(before)


def test_a_cell_that_no_index_holds_costs_one_image(folder: Path) -> None:
    (folder / "rows.csv").write_text("image,text,price\na.jpg,x,5\nb.jpg,y,inf\n")
    report = check(folder / "rows.csv", show_progress=False)
    assert any("inf in column 'price'" in str(problem) for problem in report.warnings)
    built = index_collection(ColourModel(), folder / "rows.csv", folder / "index")
    assert built.images == 1
    ((name, reason),) = built.skipped
    assert name == "b.jpg"
    assert "use null for a missing number" in reason


def test_rows_of_deep_values_cost_their_images(folder: Path) -> None:
    deep: Any = 1
    for _ in range(500):
        deep = [deep]
    rows = [{"image": "a.jpg", "text": "x"}, {"image": "b.jpg", "text": "y", "z": deep}]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    try:
        built = index_collection(ColourModel(), folder / "rows.jsonl", folder / "index")
        assert len(built.skipped) == 1
    except DiptychError:
        pytest.fail("one cell stopped the run")
    np.testing.assert_equal(built.images, 1)


@pytest.mark.parametrize("name", ["train.tar", "train.parquet", "train_caps.txt"])
def test_a_pipe_among_data_is_refused(name: str, tmp_path: Path) -> None:
    """Whoever opened it would wait for ever."""
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match=name):
        find(tmp_path)


def test_a_picture_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jpg")
    (tmp_path / "a.csv").write_text("image,text\na.jpg,x\n")
    with pytest.raises(ImageError, match=r"a\.jpg"):
        open_image(tmp_path / "a.jpg")
    assert "a.jpg" in diptych("data", "check", tmp_path / "a.csv", status=1).stdout


@pytest.mark.parametrize(
    ("type", "shape"),
    [("|V0", (10**9, 4)), ("|S0", (10**9, 4)), ("<f4", (1,) * 40), ("|b1", (True, 4)), ("<M8[s]", (2, 4))],
)
def test_arrays_that_take_no_bytes_or_hold_no_numbers(
    type: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    """An array of a billion empty texts is a file of a hundred bytes: centres of it took 11 s."""
    file = tmp_path / "a.npy"
    head = repr({"descr": type, "fortran_order": False, "shape": shape}).encode()
    file.write_bytes(b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + bytes(100))
    start = time.process_time()
    for read in (ArrayStore, read_centres):
        with pytest.raises(DataError, match=r"a\.npy"):
            read(file)
    assert time.process_time() - start < 1


@pytest.mark.parametrize("number", ["Infinity", "1e999", "-Infinity"])
def test_numbers_that_are_no_whole_numbers(number: str, tmp_path: Path) -> None:
    """They were an OverflowError."""
    for name in ("eccv_image_to_caption", "eccv_caption_to_image", *(f"original_{side}" for side in _SIDES)):
        (tmp_path / f"{name}.json").write_text(f'{{"1": [{number}]}}')
    with pytest.raises(DataError, match="original_image_to_caption"):
        load_judgements("eccv", tmp_path)
    FeaturePack(tmp_path / "pack").append(["a"], np.ones((1, 3), np.float16))
    (tmp_path / "pack" / "pack.json").write_text(f'{{"format": 1, "shape": [{number}]}}')
    with pytest.raises(DataError, match=r"pack\.json"):
        FeaturePack(tmp_path / "pack")


def test_noise_of_a_run_that_is_no_number(tmp_path: Path) -> None:
    """A ratio of 400 digits was an OverflowError."""
    noise = {"given": "", "ratio": 10**400, "unit": "text", "wrong": 0, "lost": 0, "hash": ""}
    run = {"format": 1, "recipe": "ridge", "data": "", "data_fingerprint": "", "settings": {}, "noise": noise}
    (tmp_path / "run.json").write_text(json.dumps(run))
    with pytest.raises(CheckpointError, match=r"run\.json"):
        noise_of(tmp_path)


def test_what_is_read_of_json_fails_in_one_way() -> None:
    """Around what takes values of JSON for numbers and lists, errors are caught by one list of them."""
    package = Path(storage.__file__).parent
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Try) and "parse_json" in "".join(map(ast.unparse, node.body)):
                caught = [ast.unparse(one.type) for one in node.handlers if one.type is not None]
                assert not any("TypeError" in one for one in caught), f"{path}:{node.lineno}: catch MISREAD"


def test_rows_of_a_pack_that_no_file_has(tmp_path: Path) -> None:
    FeaturePack(tmp_path).append(["a", "b"], np.ones((2, 3), np.float16))
    (tmp_path / "index").write_bytes(_entries([b"x" * 16], [2**63 - 1], [0]).tobytes())
    pack = FeaturePack(tmp_path)
    pack.append(["c"], np.ones((1, 3), np.float16))
    assert pack.find(["c"]).tolist() == [0]
