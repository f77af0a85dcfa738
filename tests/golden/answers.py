"""What the fixtures answer, in a present folder that holds the toys, the models and the fixture.

``saved`` depends on nothing but what was saved; ``computed`` on the machine too.
"""

from __future__ import annotations

import json
import lzma
import shutil
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
from commands import diptych
from golden.fixtures import DIM, DUMP, MODELS, PRECISIONS, SCHEMA, collection, evaluate, use_caches
from golden.reach import FeatureFile, Item, open_vectors
from golden.runs import digest, of_tensors, outcome

from diptych import Retriever, open_captions, open_index
from diptych.index.engines.embedded.approximate import signed
from diptych.index.engines.embedded.index import EmbeddedIndex
from diptych.machine import own_key

TEXTS = ["a red dog", "the big house near a tree", "bird", "an unknown word runs"]
FILTERS = (
    None,
    "price < 50",
    "color = 'red' and tags contains 'red'",
    "sale = true or price is null",
    "rating > 3",
)


def of_models() -> dict[str, Any]:
    """Fingerprints, and the vectors of some texts and images."""
    saved, computed = {}, {}
    for name in MODELS:
        model = Retriever.from_pretrained(f"models/{name}")
        saved[name] = model.fingerprint()
        data = "toys/photos" if name == "fusion" else "toys/features"
        images = open_captions(data).images
        pair = model.encode_image([images[n] for n in range(4)]), model.encode_text(TEXTS)
        computed[name] = [side.tolist() for side in pair]
    return {"saved": saved, "computed": computed}


def of_run() -> dict[str, Any]:
    """Fingerprint and state as saved; then the run goes on."""
    saved = {
        "best": Retriever.from_pretrained("run").fingerprint(),
        "state": {path.stem: of_tensors(path) for path in sorted(Path("run/last").glob("*.safetensors"))},
    }
    diptych("train", "cusa-saf", "--resume_from_checkpoint", "run")
    return {"saved": saved, "computed": outcome(Path("run"))}


def of_index(place: str) -> dict[str, Any]:
    """What an index says of itself, its items, and its answers to vectors, words and filters."""
    sign_graphs(place)
    with open_index(place) as index:
        info, ids = index.info, [item.id for item in collection()[0]]
        items = {item.id: item for item in index.get(ids) if item is not None}
        saved = {
            "info": [info.dimension, info.precision, info.fingerprint, info.version, info.deleted],
            "counts": dict(info.counts),
            "columns": {name: [*kinds] for name, kinds in info.columns.items()},
            "approximate": [dict(info.approximate), [*info.coded]],
            "items": of_items(items.values()),
            "vectors": digest(index.vectors([*items]).tobytes()),
            "thumbnail": (index.thumbnail("item4") or b"").decode(),
            "values": [[*pair] for pair in index.values("color")],
            "passing": [index.count(None, filter) for filter in FILTERS],
            "faults": index.verify(),
        }
        queries = np.random.default_rng(5).normal(size=(2, DIM)).astype(np.float32)
        asked: list[Any] = [
            index.search(query, 7, kind=kind, filter=filter, exact=True)
            for query in queries for kind in ("image", "text", None) for filter in FILTERS
        ]  # fmt: skip
        if info.approximate:
            asked += [index.search(query, 7, kind="image", exact=False) for query in queries]
        for text in ("red shoes", "CAFE 日本語"):
            asked += [index.search_words(text, 7), index.search_words(text, 7, kind="text")]
        pairs = [[p.first.id, p.second.id, p.score] for p in index.near_duplicates(threshold=0.999)]
    return {"saved": saved, "computed": {"hits": [[h.ids, h.scores, h.exact] for h in asked], "pairs": pairs}}


def sign_graphs(place: str) -> None:
    """Trust the graphs of an index that was recorded elsewhere, with this user's key."""
    if "://" in place:
        return
    with EmbeddedIndex.open(place, writable=True) as index:
        graphs = [graph for graph in index._store.state.graphs if not graph.is_codes]
        if graphs:
            with index._store.writing() as db:
                for graph in graphs:
                    signature = signed(Path(place) / graph.file, graph.size, own_key(make=True))[1]
                    index._graphs.record(db, replace(graph, signature=signature))


def of_items(items: Iterable[Item]) -> str:
    """A digest of items."""
    facts = [(i.id, i.kind, i.path, i.text, i.image_id, [*i.metadata.items()], i.content) for i in items]
    return digest(*(repr(one).encode() for one in facts))


def of_photos() -> dict[str, Any]:
    """The command line's answers from an index that knows its model, also re-ranked from local features."""
    with open_index("indexes/photos") as index:
        saved: dict[str, Any] = {"model": index.info.model, "fingerprint": index.info.fingerprint}
        saved |= {"counts": dict(index.info.counts), "faults": index.verify()}
    with closing(sqlite3.connect("indexes/photos.features")) as db:
        rows = db.execute("select model, id, content, elements, data from features order by id").fetchall()
        saved["features"] = digest(*(repr(row).encode() for row in rows))
    said = []
    for more in ((), ("--hybrid",), ("--kind", "text"), ("--filter", "price < 5"), ("--rerank", 6)):
        found = json.loads(diptych("search", "indexes/photos", "red dog", "--json", "-k", 5, *more).stdout)
        said.append([[hit["id"], hit["score"], hit["details"]] for hit in found["hits"]])
    return {"saved": saved, "computed": {"answers": said}}


def of_vectors() -> dict[str, Any]:
    """Every row; then the folder is embedded again, evaluated, and loaded into an index."""
    folder = open_vectors("vectors")
    rows = [batch for shard in folder.shards for batch in shard.batches()]
    saved: dict[str, Any] = {
        "model": folder.manifest.fingerprint,
        "data": folder.manifest.data,
        "items": of_items(item for items, _ in rows for item in items),
        "vectors": digest(*(vectors.tobytes() for _, vectors in rows)),
    }
    again = diptych("embed", "models/sgr", "toys/features", "vectors", "--rows", 12).stdout
    saved["embedded again"] = "(3 shards were there" not in again
    diptych("evaluate", "vectors", "--output", "vectors.json", "--bootstrap", 0)
    diptych("index", "load", "vectors", "--index", "loaded")
    with open_index("loaded") as index:
        saved["counts"] = dict(index.info.counts)
        hits = index.search(rows[0][1][0], 5, kind="text")
    return {
        "saved": saved,
        "computed": {"report": metrics("vectors.json"), "answers": [hits.ids, hits.scores]},
    }


def of_caches() -> dict[str, Any]:
    """The caches after the commands that use them; no file may be new, and none computed again."""
    use_caches()
    found = [
        path
        for folder in ("caches", "extracted")
        for path in sorted(Path(folder).rglob("*"))
        if path.suffix in (".npy", ".npz", ".f16", ".part") or path.name == "index"
    ]
    with FeatureFile(Path("half/half_ims.npy"), "key") as file:
        half: list[Any] = [file.progress.done, file.progress.rows, file.progress.notes, file.finished]
        file.append(np.arange(12.0).reshape(2, 6), 2)
        file.finish()
    half.append(np.load("half/half_ims.npy").tolist())
    saved = {"files": {str(path): digest(path.read_bytes()) for path in found}, "half": half}
    return {"saved": saved, "computed": outcome(Path("cached"))}


def of_scores() -> dict[str, Any]:
    """The half that was saved; then the rest is computed. Rows that were there are not computed again."""
    path = Path("scores/scores.npy")
    saved: dict[str, Any] = {
        "card": json.loads(path.with_suffix(".json").read_text("utf-8")),
        "rows": digest(np.load(path)[:4].tobytes()),
    }
    shutil.copytree("scores", "changed")
    matrix = np.lib.format.open_memmap("changed/scores.npy", "r+")
    matrix[:4] += 1
    matrix.flush()
    before = matrix[:4].copy()
    evaluate("changed/scores.npy")
    saved["kept"] = bool((np.load("changed/scores.npy")[:4] == before).all())
    evaluate("scores/scores.npy")
    saved["done"] = json.loads(path.with_suffix(".json").read_text("utf-8"))
    return {"saved": saved, "computed": {"scores": np.load(path).tolist(), "report": metrics("report.json")}}


def metrics(report: str) -> list[Any]:
    """The metrics and ranks of a report."""
    groups = json.loads(Path(report).read_text("utf-8"))["groups"]
    return [[group["name"], group["metrics"], group["outcomes"]] for group in groups]


def of_dump(server: Any) -> dict[str, Any]:
    """The answers of an index that is restored into an empty database."""
    with psycopg.connect(server.url, autocommit=True) as db:
        db.execute(f"DROP SCHEMA IF EXISTS {SCHEMA} CASCADE")
        db.execute("CREATE EXTENSION IF NOT EXISTS vector")
        db.execute(lzma.decompress(DUMP.read_bytes()))
    return of_index(server.index_url(SCHEMA))


INDEXES = (*PRECISIONS, "graph")
FIXTURES: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "models": ("models", of_models), "run": ("run", of_run), "photos": ("indexes", of_photos),
    "vectors": ("vectors", of_vectors), "caches": ("caches", of_caches), "scores": ("scores", of_scores),
    **{name: ("indexes", partial(of_index, f"indexes/{name}")) for name in INDEXES},
}  # fmt: skip
"""The archive of each fixture in files, and what asks it."""
