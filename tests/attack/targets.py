"""What is attacked: each target is made once in a folder, then given one hostile input after the other.

A target may raise the package's own errors and nothing else; where it answers, the answer is compared with the one of
sound input, or with another way to compute it. What it may not do (hang, grow, crash) is for ``watch`` to see.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import sqlite3
import tarfile
from pathlib import Path
from random import Random
from typing import Any

import benchmark_files
import bomb_files
import cache_files
import exchange_files
import numpy as np
import photo_files
import rivals
import strangers
import system_calls
import vector_files
from hostile import TEXTS, as_json, mutated, mutated_json, value, words
from PIL import Image
from register import CLOSING, TARGETS, Attack, attacked, target, void

# ---------------------------------------------------------------------- parsers

ROWS: list[dict[str, Any]] = [
    {"price": 10, "name": "red shoe", "new": True, "tags": ["a", 3]},
    {"price": 2**60, "name": "a_b%c" * 50},
    {"price": None, "name": "x" * 3000},
    {},
]
FILTER = (
    "price", "name", "new", "tags", "`a b`", "<", "<=", "=", "!=", "in", "not", "like", "contains", "is", "null", "and",
    "or", "(", ")", ",", '"red%"', '"%_%_a%"', "'x'", "5", "-1.5e3", "true", "9" * 400, '"', "\\",
)  # fmt: skip


TESTS = (
    "price < 5 and ", "name like '%r_d%' or ", "not ", "tags contains 3", "new = true", "price in (1, 2.5)",
    "name is not null", 'name like "%a%b%_%" and ', "(price > 1) or ", "name = 'x'",
)  # fmt: skip


@target
def filters(folder: Path) -> Attack:
    from diptych.index.query.filters import matches, parse_filter

    columns = {"price": ["number"], "name": ["text"], "new": ["boolean"], "tags": ["list"]}

    def once(draw: Random) -> None:
        pieces = FILTER if draw.random() < 0.5 else TESTS
        tree = parse_filter(words(draw, pieces, 6), columns if draw.random() < 0.5 else None)
        for row in ROWS:
            matches(tree, row)

    return once


@target
def like(folder: Path) -> Attack:
    from diptych.index.query.filters import MAX_PATTERN, like_test

    db = sqlite3.connect(":memory:")

    def once(draw: Random) -> None:
        pattern = "".join(draw.choice("ab%_%_") for _ in range(draw.randrange(draw.choice((8, MAX_PATTERN)))))
        text = "".join(draw.choice("ab") for _ in range(draw.randrange(draw.choice((10, 300)))))
        found = like_test(pattern)(text)
        if pattern.count("%") < 6:  # SQLite's own takes exponential time
            assert found == bool(db.execute("SELECT ? LIKE ?", (text, pattern)).fetchone()[0])

    return once


@target
def queries(folder: Path) -> Attack:
    from diptych.index.query.parse import parse_query

    pieces = (
        '"',
        "+",
        "-",
        " ",
        "2:",
        "1.5:",
        ":",
        "red",
        "./x",
        "https://x/y.png",
        "\\",
        "\n",
        "1" * 50,
        "  ",
    )
    return lambda draw: void(parse_query(words(draw, pieces, 30), paths=draw.random() < 0.5))


# ---------------------------------------------------------------------- readers


def written_set(folder: Path) -> list[tuple[Path, Path]]:
    """A small data set in many formats: (file, the data set it belongs to) of every file, to be damaged in turn."""
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (24, 24, 3), dtype=np.uint8))
    files = []
    for name, kind in (("a.jpg", "JPEG"), ("b.png", "PNG")):
        picture.save(folder / name, kind)
    rows = [{"image": name, "text": f"text {n}", "price": n} for n, name in enumerate(("a.jpg", "b.png"))]
    texts = {
        "m/rows.csv": "image,text,price\n../a.jpg,one,5\n../b.png,two,6\n",
        "t/rows.tsv": "image\ttext\n../a.jpg\tone\n",
        "j/rows.jsonl": "\n".join(json.dumps({**row, "image": "../" + str(row["image"])}) for row in rows)
        + "\n",
        "l/train.json": json.dumps([{"image": "../a.jpg", "caption": ["x", "y"], "image_id": 5}]),
        "k/dataset_coco.json": json.dumps(
            {
                "dataset": "coco",
                "images": [
                    {"filename": "../a.jpg", "split": "train", "sentences": [{"raw": "x", "sentid": 1}]}
                ],
            }
        ),
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
        files.append(folder / name)
    (folder / "w").mkdir()
    with tarfile.open(folder / "w" / "train.tar", "w") as tar:
        for name, data in {
            "0.jpg": (folder / "a.jpg").read_bytes(),
            "0.txt": b"x",
            "1.jpg": b"",
            "1.json": b"{}",
        }.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    files.append(folder / "w" / "train.tar")
    (folder / "p").mkdir()
    np.save(folder / "p" / "train_ims.npy", np.ones((2, 3, 4), np.float32))
    (folder / "p" / "train_caps.txt").write_text("\n".join(f"text {n}" for n in range(10)) + "\n")
    (folder / "p" / "train_ids.txt").write_text("5\n6\n")
    files += [folder / "p" / name for name in ("train_ims.npy", "train_caps.txt", "train_ids.txt")]
    return [(file, file.parent) for file in files] + further_set(folder)


def further_set(folder: Path) -> list[tuple[Path, Path]]:
    """The formats of videos, labels and hashing: one file or more of each."""
    clips = [{"video_id": f"video{n}", "split": "train", "category": n} for n in range(2)]
    sentences = [{"video_id": f"video{n}", "caption": "x"} for n in range(2)]
    texts = {
        "h/test.txt": "../a.jpg 0 1\n",
        "h/database.txt": "../b.png 1 0\n",
        "h/train.txt": "../b.png 1 0\n",
        "v/train_val_videodatainfo.json": json.dumps({"videos": clips, "sentences": sentences}),
        "c/corpora.json": json.dumps({"corpora": [{"name": "w", "path": "../w/train.tar", "weight": 0.5}]}),
        "d/TextData/xtrain.caption.txt": "video0#0 a man\nvideo1#0 a dog\n",
        "d/FeatureData/ft/shape.txt": "2 4\n",
        "d/FeatureData/ft/id.txt": "video0_0 video1_0\n",
        "d/FeatureData/ft/video2frames.txt": "{'video0': ['video0_0'], 'video1': ['video1_0']}",
        "n/ImageList/Imagelist.txt": "a.jpg\nb.jpg\n",
        "n/Groundtruth/AllLabels/Labels_sky.txt": "0\n1\n",
        "n/NUS_WID_Tags/AllTags1k.txt": "0 1\n1 0\n",
        "n/NUS_WID_Tags/TagList1k.txt": "sky\nsea\n",
        "f/mirflickr25k_annotations_v080/sky.txt": "1\n2\n",
        "f/mirflickr/meta/tags/tags1.txt": "sky\n",
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "d" / "FeatureData" / "ft" / "feature.bin").write_bytes(np.ones((2, 4), np.float32).tobytes())
    for number in range(2):
        np.save(folder / "v" / f"video{number}.npy", np.ones((3, 4), np.float32))
        shutil.copy(folder / "a.jpg", folder / "f" / "mirflickr" / f"im{number + 1}.jpg")
        (folder / "n" / "Flickr").mkdir(exist_ok=True)
        shutil.copy(folder / "a.jpg", folder / "n" / "Flickr" / f"{'ab'[number]}.jpg")
    found = [(folder / name, folder / name.split("/")[0]) for name in texts]
    found.append((folder / "v" / "video0.npy", folder / "v"))
    return [(file, file if file.name == "corpora.json" else place) for file, place in found]


@target
def readers(folder: Path) -> Attack:
    from diptych.data.check import check
    from diptych.data.formats import open_captions

    os.environ["DIPTYCH_CACHE"] = str(folder / "cache")
    files = [(file, place, file.read_bytes()) for file, place in written_set(folder)]

    def once(draw: Random) -> None:
        file, place, whole = draw.choice(files)
        data = mutated(whole, draw)
        if file.suffix == ".json" and draw.random() < 0.7:
            data = as_json(mutated_json(json.loads(whole), draw), draw)
        if file.suffix == ".jsonl" and draw.random() < 0.7:
            rows = [mutated_json(json.loads(line), draw) for line in whole.splitlines()]
            data = b"\n".join(as_json(row, draw) for row in rows)
        file.write_bytes(data)
        try:
            check(place, show_progress=False, open_images=draw.random() < 0.3)
            captions = open_captions(place)
            for row in range(min(3, len(captions.images))):
                void(captions.images[row])
        finally:
            file.write_bytes(whole)

    return once


@target
def tables(folder: Path) -> Attack:
    import datasets

    from diptych.data.formats import open_captions

    datasets.disable_progress_bars()
    rows = {
        "image": [f"{n}.jpg" for n in range(9)],
        "text": [f"text {n}" for n in range(9)],
        "price": list(range(9)),
    }
    datasets.Dataset.from_dict(rows).save_to_disk(str(folder / "saved"))
    files = [(file, file.read_bytes()) for file in (folder / "saved").iterdir()]

    def once(draw: Random) -> None:
        file, whole = draw.choice(files)
        copied = folder / "copy"
        shutil.rmtree(copied, ignore_errors=True)
        shutil.copytree(folder / "saved", copied)  # the library maps what it reads: never written under it
        (copied / file.name).write_bytes(mutated(whole, draw))
        open_captions(copied)

    return once


@target
def pictures(folder: Path) -> Attack:
    from diptych.data.decode.opening import open_image

    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 40, 3), dtype=np.uint8))
    sound = []
    for kind, options in (
        ("JPEG", {}), ("JPEG", {"progressive": True}), ("PNG", {}), ("WEBP", {}), ("GIF", {}), ("BMP", {}),
        ("TIFF", {}), ("TIFF", {"compression": "tiff_lzw"}), ("PPM", {}), ("AVIF", {}),
    ):  # fmt: skip
        out = io.BytesIO()
        try:
            noise.save(out, kind, **options)
            sound.append(out.getvalue())
        except (OSError, KeyError):  # a format that this Pillow cannot write
            continue
    return lambda draw: void(open_image(mutated(draw.choice(sound), draw), max_pixels=1_000_000))


@target
def pickles(folder: Path) -> Attack:
    from diptych.data.decode.pickles import read_pickle

    content = {"a": np.ones((3, 4), np.float32), "b": ["x", 1, None, {"c": (1, 2.5)}], "d": np.arange(5)}
    sound = [pickle.dumps(content, protocol=protocol) for protocol in range(6)]
    opcodes = (
        b"(0.1F2IJLMNPQRSTUVX]acdegil)opqrst}u\x80\x81\x82\x85\x86\x87\x88\x89\x8a\x8b\x8c\x8e\x8f\x90\x94"
    )

    def once(draw: Random) -> None:
        data = draw.choice(sound)
        if draw.random() < 0.3:
            data = b"\x80\x04" + bytes(draw.choice(opcodes) for _ in range(draw.randrange(60))) + b"."
        (folder / "a.pkl").write_bytes(mutated(data, draw))
        read_pickle(folder / "a.pkl")

    return once


# ---------------------------------------------------------------------- models and runs


@target
def models(folder: Path) -> Attack:
    import torch

    from diptych.aggregators import GPO, Mean
    from diptych.data.images import RegionInput
    from diptych.data.text import WordInput
    from diptych.data.vocabulary import build_vocabulary
    from diptych.encoders.bigru import BiGRU
    from diptych.encoders.regions import Regions
    from diptych.model.retriever import Retriever, Tower

    torch.manual_seed(0)
    vocabulary = build_vocabulary(["a red dog", "a blue cat on a mat"], min_count=1)
    towers = Tower(Regions(16, 12, hidden=8), Mean()), Tower(BiGRU(len(vocabulary), 6, 12), GPO())
    model = Retriever(*towers, RegionInput(16), WordInput(vocabulary))
    place = folder / "model"
    model.save_pretrained(place)
    expected = model.encode_text("a red dog")
    files = [(file, file.read_bytes()) for file in place.rglob("*") if file.is_file()]
    parts = [
        {"part": "Mean"},
        {"part": "Nothing"},
        {"part": "Regions", "dim": 4},
        {"asset": "../x"},
        {"is": 1},
    ]

    def once(draw: Random) -> None:
        file, whole = draw.choice(files)
        data = mutated(whole, draw)
        if file.name == "config.json" and draw.random() < 0.8:
            data = as_json(mutated_json(json.loads(whole), draw, parts), draw)
        file.write_bytes(data)
        try:
            loaded = Retriever.from_pretrained(place)
            if data == whole:
                assert torch.equal(loaded.encode_text("a red dog"), expected)
        finally:
            file.write_bytes(whole)

    return once


@target
def runs(folder: Path) -> Attack:
    from diptych.settings import TrainingSettings
    from diptych.training.checkpoint import RunCard, check_resumable
    from diptych.training.log import Log, read_log

    card = RunCard("r", TrainingSettings(), "d", "f")
    card.save(folder)
    sound = (folder / "run.json").read_bytes()
    lines = [json.dumps({"step": n, "loss": 0.5}).encode() for n in range(20)]

    def once(draw: Random) -> None:
        number = draw.randrange(20)
        damaged = b"\n".join(
            [*lines[:number], mutated(lines[number], draw).replace(b"\n", b""), *lines[number + 1 :]]
        )
        (folder / "log.jsonl").write_bytes(damaged)
        assert len(read_log(folder / "log.jsonl")) >= 19
        Log(folder, resumed_at=draw.randrange(20)).close()
        content = as_json(mutated_json(json.loads(sound), draw), draw)
        (folder / "run.json").write_bytes(content if draw.random() < 0.7 else mutated(sound, draw))
        check_resumable(folder, card)

    return once


# ---------------------------------------------------------------------- the index

DIMENSION = 16


@target
def indexes(folder: Path) -> Attack:
    from diptych.index.engines.embedded.index import EmbeddedIndex
    from diptych.index.protocol import Item

    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(60, DIMENSION)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    sound = folder / "sound"
    with EmbeddedIndex.create(sound, DIMENSION) as index:
        items = [
            Item(
                f"i{n}",
                text=f"thing number {n}",
                metadata={"price": n, "name": f"n{n}"},
                thumbnail=bytes([n]) * 90,
            )
            for n in range(48)
        ]
        for start in range(0, 48, 16):
            index.add(items[start : start + 16], vectors[start : start + 16])
        index.add(
            [Item(f"t{n}", "text", text=f"text {n}", image_id=f"i{n}") for n in range(12)], vectors[48:]
        )
        index.delete(["i3", "i20"])
        index.build_graph("image")

    def answers(place: Path) -> list[Any]:
        with EmbeddedIndex.open(place) as index:
            out: list[Any] = [index.get([f"i{n}" for n in range(48)])]
            for kind, exact, wanted in (
                ("image", True, None),
                ("image", None, None),
                ("text", True, None),
                ("image", True, "price < 20"),
            ):
                found = index.search_many(vectors[:4], 5, kind=kind, exact=exact, filter=wanted)  # type: ignore[arg-type]
                out.append([[(hit.item.id, round(hit.score, 6)) for hit in hits] for hits in found])
            out.append([index.thumbnail(f"i{n}") for n in range(0, 48, 5)])
        return out

    expected = answers(sound)
    files = [file.name for file in sound.iterdir() if file.name.startswith(("vectors", "graph", "index.db"))]
    copied = folder / "copy"

    def once(draw: Random) -> None:
        shutil.rmtree(copied, ignore_errors=True)
        shutil.copytree(sound, copied)
        file = copied / draw.choice(files)
        file.write_bytes(mutated(file.read_bytes(), draw))
        items, *found, thumbnails = answers(copied)
        sound_items, *wanted, stored = expected
        pairs = [*zip(items, sound_items, strict=True), *zip(thumbnails, stored, strict=True)]
        assert found == wanted, f"{file.name} gives other answers"
        assert all(one in (None, other) for one, other in pairs), f"{file.name} gives other items"
        with EmbeddedIndex.open(copied) as index:
            # what SQLite's own indexes no longer find is for verify to say (SECURITY.md)
            assert index.verify() or all(one == other for one, other in pairs), f"{file.name} lost an item"

    return once


# ---------------------------------------------------------------------- the service


@target
def routes(folder: Path) -> Attack:
    from colours import ColourModel, make_index
    from colours import draw as drawn
    from fastapi.testclient import TestClient

    from diptych.web.app import create_app
    from diptych.web.limits import Limits

    token = {"Authorization": "Bearer correct-horse"}
    model = ColourModel()
    index = make_index(folder, model)
    app = create_app(
        index, model, token="correct-horse", limits=Limits(body=300_000, pixels=1_000_000), allow_urls=True
    )
    client = TestClient(app, raise_server_exceptions=False)
    CLOSING.enter_context(index)
    CLOSING.enter_context(client)
    out = io.BytesIO()
    drawn("red", "circle").save(out, "PNG")
    png = out.getvalue()
    expected = client.get("/api/search", params={"text": "red", "k": 5}).json()["hits"]

    def text(draw: Random, pieces: tuple[str, ...]) -> str:
        return words(draw, pieces).encode("utf-8", "replace").decode()[:3_000]

    def fields(draw: Random) -> dict[str, Any]:
        pieces = {
            "text": ("red", "dog", '"', "-"),
            "query": ('"', "+", "-", "2:", "red", "http://[", "https://x.invalid/"),
        }
        found: dict[str, Any] = {}
        for name, some in {**pieces, "filter": FILTER, "like": ("red/ring.png", "x")}.items():
            if draw.random() < 0.5:
                found[name] = text(draw, some)
        for name in ("k", "kind", "hybrid", "rerank", "image_weight", "frames"):
            if draw.random() < 0.2:
                found[name] = draw.choice(("image", "any", "5", "0", "-1", "nan", "true", "x" * 50, "9" * 30))
        return found

    def once(draw: Random) -> None:
        kind = draw.random()
        if kind < 0.3:
            answer = client.get("/api/search", params=fields(draw))
        elif kind < 0.4:
            answer = client.get("/api/browse", params=fields(draw))
        elif kind < 0.55:
            data = mutated(png, draw) if draw.random() < 0.8 else draw.randbytes(draw.randrange(2000))
            answer = client.post(
                "/api/search", data=fields(draw), files={"images": ("a.png", data, "image/png")}
            )
        elif kind < 0.75:
            sound = [{"id": "a", "text": "b", "image": "", "image_id": "", "metadata": {"c": 1}}]
            items = as_json(mutated_json(sound, draw), draw).decode("utf-8", "replace")
            answer = client.post(
                "/api/items", data={"items": items}, files={"images": ("x", png)}, headers=token
            )
        elif kind < 0.85:
            path = draw.choice(("items", "thumbnail", "image", "video"))
            ids = [draw.choice((*TEXTS[:7], "red/ring.png", "a")) for _ in range(draw.randrange(1, 4))]
            ids = [id.encode("utf-8", "replace").decode() for id in ids]
            answer = client.request(
                draw.choice(("GET", "DELETE")), f"/api/{path}", params={"id": ids}, headers=token
            )
        else:
            body = mutated(
                b'--b\r\nContent-Disposition: form-data; name="text"\r\n\r\nred\r\n--b--\r\n', draw
            )
            types = (
                "multipart/form-data; boundary=b",
                "application/x-www-form-urlencoded",
                "application/json",
                "x",
            )
            answer = client.post("/api/search", content=body, headers={"Content-Type": draw.choice(types)})
        assert answer.status_code < 500 or answer.status_code in (503, 507), (
            answer.status_code,
            answer.text[:300],
        )
        if answer.status_code >= 400:
            assert answer.json()["error"], answer.text[:300]
        if draw.random() < 0.05:
            client.delete("/api/items", params={"id": ["a"]}, headers=token)
            assert client.get("/api/health").status_code == 200
            again = client.get("/api/search", params={"text": "red", "k": 5}).json()["hits"]
            assert [hit["id"] for hit in again] == [hit["id"] for hit in expected] or any(
                hit["id"] not in {one["id"] for one in expected} for hit in again
            )

    return once


__all__ = [
    "CLOSING",
    "TARGETS",
    "attacked",
    "benchmark_files",
    "bomb_files",
    "cache_files",
    "exchange_files",
    "photo_files",
    "rivals",
    "strangers",
    "system_calls",
    "value",
    "vector_files",
]
