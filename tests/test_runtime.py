"""The runtime of a model folder: the vectors of torch without torch, for every recipe and pooling."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from commands import TINY, diptych
from dual_folders import clip_folder, one_size_siglip2_folder, siglip2_folder, siglip_folder
from small import WORDS, bert_folder, pictures, precomputed
from test_recipes import World, built, captions, loader_of, step, world  # noqa: F401  fixtures

from diptych import aggregators
from diptych.data.captions import Captions
from diptych.data.images import PixelInput, RegionInput
from diptych.data.text import WordInput, WordPieceInput
from diptych.data.text_inputs import CleanedInput
from diptych.data.vocabulary import build_vocabulary
from diptych.encoders.bigru import BiGRU
from diptych.encoders.cnn import Grid, PrecomputedGrid
from diptych.encoders.lite0 import FoldedConv, Lite0
from diptych.encoders.transformer import TransformerText
from diptych.errors import DataError, SettingsError
from diptych.index.engines.opening import empty_index
from diptych.index.models import open_model, whole_runtime
from diptych.index.protocol import Item
from diptych.model.adapter import TorchModel
from diptych.model.export_texts import ODD_TEXTS
from diptych.model.retriever import Retriever, Tower
from diptych.model.runtime_export import CLOSE, add_runtime, export_runtime, place_runtime
from diptych.objectives.objective import start_epoch
from diptych.recipes import RECIPES
from diptych.runtime.folder import BACKBONE, FOLDER, TEXT, drawn_pictures, drawn_sets, find_runtime
from diptych.runtime.model import RuntimeModel
from diptych.training.optim import build_optimizer
from diptych.types import as_inputs

TEXTS = [
    "cat",
    "a red dog sits",
    "the",
    " ".join(WORDS * 3),
    "two Unknown words, here!",
    "a bird on a dark house near a car",
]


def written(model: Retriever, home: Path) -> RuntimeModel:
    model.save_pretrained(home)
    export_runtime(model, home)
    return RuntimeModel.open(home, threads=1)


def same(found: Any, wanted: torch.Tensor) -> bool:
    assert isinstance(found, np.ndarray)
    assert found.dtype == np.float32
    return found.shape == wanted.shape and float(np.abs(found - wanted.numpy()).max()) <= CLOSE


def check_texts(runtime: RuntimeModel, model: Retriever, texts: list[str]) -> None:
    wanted = model.encode_text(texts)
    for size in (1, 3, len(texts)):  # alone, and padded in batches of several sizes
        assert same(runtime.encode_text(texts, batch_size=size), wanted)


def check_images(runtime: RuntimeModel, model: Retriever, images: list[Any]) -> None:
    wanted = model.encode_image(images)
    for size in (1, 3, len(images)):
        assert same(runtime.encode_image(images, batch_size=size), wanted)


@pytest.mark.parametrize("name", list(RECIPES))
def test_every_recipe_gives_torchs_vectors_and_hits(name: str, world: World, tmp_path: Path) -> None:  # noqa: F811
    data = world.captions(name)
    model = trained(name, data, world)
    runtime = written(model, tmp_path / "model")
    assert (runtime.fingerprint(), runtime.dim, runtime.notes) == (model.fingerprint(), model.dim, [])
    check_texts(runtime, model, [*TEXTS, *data.texts[:5]])
    if isinstance(model.image_input, RegionInput):
        largest = runtime.facts.largest["image"]
        rng = np.random.default_rng(3)
        sizes = [size for size in (1, 2, 5, 6, 17, 50) if largest is None or size <= largest]
        sets = [rng.standard_normal((size, model.image_input.dim)).astype(np.float32) for size in sizes]
        check_images(runtime, model, [*sets, sets[0].astype(np.float16)])
    else:
        check_images(runtime, model, [*drawn_pictures(), np.full((9, 31, 3), 77, np.uint8)])
    assert same(runtime.encode_image(data.images), model.encode_image(data.images))
    check_hits(runtime, model, data, tmp_path)


def trained(name: str, data: Captions, world: World) -> Retriever:  # noqa: F811
    """The small model of a recipe after some steps of training."""
    method, settings = built(name, data, world)
    optimizer = build_optimizer(method, settings)
    start_epoch(method.objective, 0)
    for batch in islice(loader_of(method, data, settings).epoch(0), 2):
        step(method, optimizer, batch)
    return method.retriever.eval()


def check_hits(runtime: RuntimeModel, model: Retriever, data: Captions, folder: Path) -> None:
    """The best ten of fifty queries are the same in indexes of both backends, but for ties."""
    names = [f"{number:03}" for number in range(len(data.images))]
    queries = list(dict.fromkeys([*data.texts, *TEXTS, *(f"{a} {b}" for a in WORDS for b in WORDS)]))[:50]
    assert len(queries) == 50
    answers = []
    for backend, encoder in (("torch", TorchModel(model)), ("onnx", runtime)):
        with empty_index(folder / backend, model.dim, model="m", fingerprint=model.fingerprint()) as index:
            index.add([Item(name, "image", "") for name in names], encoder.encode_image(data.images))
            vectors = encoder.encode_text(queries)
            answers.append([{hit.item.id: hit.score for hit in index.search(one, 10)} for one in vectors])
    for query, mine, own in zip(queries, *answers, strict=True):
        assert list(mine.values()) == pytest.approx(list(own.values()), abs=CLOSE), query
        least = min(mine.values())
        for id in set(mine) ^ set(own):  # only what ties with the tenth may be missing on one side
            assert {**mine, **own}[id] <= least + CLOSE, query
        for id in set(mine) & set(own):
            assert mine[id] == pytest.approx(own[id], abs=CLOSE), query


def small_model(pool: str, **arguments: Any) -> Retriever:
    """Regions of 6 numbers and a BiGRU, both pooled the same way."""
    torch.manual_seed(0)
    words = WordInput(build_vocabulary(WORDS, min_count=1))

    def aggregator() -> Any:
        if "generator" not in arguments:
            return getattr(aggregators, pool)(**arguments)
        kind, *given = arguments["generator"]
        made = getattr(aggregators, kind)(**dict(given))
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
        return aggregators.GPO(made)

    regions, text = PrecomputedGrid(6, 8), BiGRU(words.vocabulary_size, 5, 8)
    return Retriever(Tower(regions, aggregator()), Tower(text, aggregator()), RegionInput(6), words).eval()


@pytest.mark.parametrize(
    ("pool", "arguments"),
    [
        ("Mean", {}), ("Max", {}), ("KMax", {"k": 3}), ("First", {}), ("Last", {}), ("GeM", {}), ("GPO", {}),
        ("GPO", {"generator": ("CosSinBiGRU", ("outputs", 8))}), ("GPO", {"generator": ("CosSinMLP",)}),
        ("GPO", {"generator": ("CosSinTransformer",)}), ("GPO", {"generator": ("Interpolation",)}),
        ("GPO", {"generator": ("SortedRowBiGRU", ("dim", 8))}),
        ("GPO", {"generator": ("IndexBiGRU", ("ranks", 70))}),
    ],
)  # fmt: skip
def test_every_pooling_gives_torchs_vectors(pool: str, arguments: dict[str, Any], tmp_path: Path) -> None:
    model = small_model(pool, **arguments)
    runtime = written(model, tmp_path / "model")
    check_texts(runtime, model, TEXTS)
    check_images(runtime, model, drawn_sets(6))


@pytest.mark.parametrize("ranks", [20, 150])
def test_sets_beyond_what_the_model_accepts_are_refused_as_by_torch(ranks: int, tmp_path: Path) -> None:
    model = small_model("GPO", generator=("IndexBiGRU", ("ranks", ranks)))
    runtime = written(model, tmp_path / "model")
    assert runtime.facts.largest == {"image": ranks, "text": ranks}
    check_images(runtime, model, [*drawn_sets(6, ranks), np.ones((ranks, 6), np.float32)])
    for refused in (runtime, model):
        with pytest.raises((DataError, SettingsError), match=str(ranks)):
            refused.encode_image(np.zeros((ranks + 1, 6), np.float32))
        with pytest.raises((DataError, SettingsError), match=str(ranks)):
            refused.encode_text(" ".join(["cat"] * (ranks + 10)))


def test_a_limit_that_the_tokenizer_does_not_know_is_found(tmp_path: Path) -> None:
    from transformers import CLIPTextConfig, CLIPTextModel

    folder = bert_folder(tmp_path / "text")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    ends = {"bos_token_id": 2, "eos_token_id": 3}
    CLIPTextModel(CLIPTextConfig(vocab_size=40, max_position_embeddings=12, **sizes, **ends)).save_pretrained(
        folder
    )
    (folder / "config.json").rename(tmp_path / "config.json")
    words = WordPieceInput(folder, augment=0.0)  # of another folder
    (tmp_path / "config.json").rename(folder / "config.json")
    image = small_model("Mean").image
    text = Tower(TransformerText(folder, 8), aggregators.Mean())
    runtime = written(Retriever(image, text, RegionInput(6), words).eval(), tmp_path / "model")
    assert runtime.facts.largest["text"] == 12
    with pytest.raises(DataError, match="12"):
        runtime.encode_text(" ".join(["cat"] * 20))


def test_longer_texts_are_cut_as_torch_cuts_them(tmp_path: Path) -> None:
    words = WordInput(build_vocabulary(WORDS, min_count=1), max_length=9)
    small = small_model("GPO")
    model = Retriever(small.image, small.text, small.image_input, CleanedInput(words)).eval()
    runtime = written(model, tmp_path / "model")
    long = " ".join(WORDS * 5)
    assert same(runtime.encode_text(long), model.encode_text(long))
    assert same(runtime.encode_text(long), model.encode_text(" ".join(WORDS[:7])))
    check_texts(runtime, model, TEXTS)
    for refused in (runtime, model):
        with pytest.raises(DataError, match=r"\.\.\."):
            refused.encode_text("...")


@pytest.mark.parametrize("make", [clip_folder, siglip_folder, one_size_siglip2_folder])
def test_pretrained_dual_encoders(
    make: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path / "cache"))
    place = make(tmp_path / "dual")
    home, _ = place_runtime(place)  # a folder of transformers, which is not ours to write in
    model = Retriever.from_pretrained(place)
    assert home == tmp_path / "cache" / "runtimes" / model.fingerprint()
    assert find_runtime(place, model.fingerprint()) == home
    assert find_runtime(place) is None
    assert not (place / FOLDER).exists()
    runtime = RuntimeModel.open(home)
    check_texts(runtime, model, [*TEXTS, *ODD_TEXTS])
    check_images(runtime, model, drawn_pictures())
    own, _ = place_runtime(place, tmp_path / "own")  # a model folder to copy elsewhere
    assert RuntimeModel.open(own).fingerprint() == model.fingerprint()
    assert Retriever.from_pretrained(own).fingerprint() == model.fingerprint()


def test_a_model_without_an_onnx_form_is_told_in_a_sentence(tmp_path: Path) -> None:
    place = siglip2_folder(tmp_path / "siglip2")
    with pytest.raises(SettingsError, match="PatchedPixels"):
        place_runtime(place, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    said = add_runtime(place)
    assert "PatchedPixels" in said
    assert said.endswith(".")


def test_whatever_fails_in_the_exporter_loses_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("Mean")
    written(model, tmp_path / "model")
    before = (tmp_path / "model" / FOLDER / "runtime.json").read_bytes()

    def fails(*_: Any, **__: Any) -> None:
        raise ValueError("an operator nobody knows")

    monkeypatch.setattr(torch.onnx, "export", fails)
    assert "ValueError: an operator nobody knows" in add_runtime(tmp_path / "model")
    assert (tmp_path / "model" / FOLDER / "runtime.json").read_bytes() == before  # the old one stays
    for name in ("write_texts", "_largest_text"):
        monkeypatch.setattr(f"diptych.model.runtime_export.{name}", fails)
        assert "ValueError: an operator nobody knows" in add_runtime(tmp_path / "model")
    RuntimeModel.open(tmp_path / "model").check()
    model.save_pretrained(tmp_path / "bare")
    said: list[str] = []
    assert (
        open_model(tmp_path / "bare", make=True, say=said.append).backend == "torch"
    )  # as an index opens it
    assert "ValueError: an operator nobody knows" in said[-1]


def test_files_that_differ_from_torch_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("Mean")
    model.save_pretrained(tmp_path / "model")
    export = torch.onnx.export

    def wrong(module: Any, example: Any, *rest: Any, **options: Any) -> None:
        linear = next(part for part in module.modules() if isinstance(part, torch.nn.Linear))
        with torch.no_grad():
            linear.bias += 1e-3
            export(module, example, *rest, **options)
            linear.bias -= 1e-3

    monkeypatch.setattr(torch.onnx, "export", wrong)
    with pytest.raises(SettingsError, match=r"image\.onnx .*1e-05"):
        export_runtime(model, tmp_path / "model")
    assert not (tmp_path / "model" / FOLDER).exists()


def test_small_cells_are_compared_by_their_own_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = picture_model()
    head = model.image.encoder.frozen_backbone().head  # type: ignore[union-attr]
    with torch.no_grad():
        head.weight *= 1e-4
    export = torch.onnx.export

    def wrong(module: Any, *rest: Any, **options: Any) -> None:
        with torch.no_grad():
            head.weight *= 1.01
            export(module, *rest, **options)
            head.weight /= 1.01

    monkeypatch.setattr(torch.onnx, "export", wrong)
    with pytest.raises(SettingsError, match=r"backbone\.onnx"):
        export_runtime(model, tmp_path / "model")


def picture_model() -> Retriever:
    """A frozen Lite0 of small pictures, and a BiGRU."""
    torch.manual_seed(1)
    backbone, words = Lite0(pretrained=False, size=32), WordInput(build_vocabulary(WORDS, min_count=1))
    with torch.no_grad():
        for layer in backbone.modules():
            if isinstance(
                layer, FoldedConv
            ):  # as drawn, a depthwise filter leaves next to nothing of a picture
                layer.filters *= layer.groups**0.5
    image = Tower(Grid(backbone, 8), aggregators.GPO())
    text = Tower(BiGRU(words.vocabulary_size, 5, 8), aggregators.GPO())
    return Retriever(image, text, PixelInput(**backbone.pixel_format), words).eval()


def test_cells_computed_before_skip_the_backbone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = picture_model()
    runtime = written(model, tmp_path / "model")
    backbone = model.image.encoder.frozen_part()
    assert runtime.backbone == backbone.fingerprint()  # type: ignore[union-attr, operator]
    shown: list[Any] = pictures(tmp_path / "pictures", 5, size=70)
    check_images(runtime, model, shown)
    wanted = runtime.encode_image(shown)
    with torch.no_grad():
        cells = backbone(as_inputs(model.image_input([model_picture(one) for one in shown]))).numpy()  # type: ignore[misc]
    monkeypatch.delitem(runtime._sessions, "backbone")
    assert np.abs(runtime.encode_image(list(cells)) - wanted).max() <= CLOSE


def test_unequal_padding_is_part_of_a_convolution(tmp_path: Path) -> None:
    written(picture_model(), tmp_path / "model")
    nodes = onnx.load(tmp_path / "model" / FOLDER / BACKBONE).graph.node
    pads = {tuple(a.ints) for node in nodes for a in node.attribute if a.name == "pads"}
    assert {(0, 0, 1, 1), (1, 1, 2, 2)} < pads
    assert "Pad" not in {node.op_type for node in nodes}


def model_picture(path: Path) -> Any:
    from diptych.data.images import as_item

    return as_item(path)


def test_labels_are_those_of_torch(world: World, tmp_path: Path) -> None:  # noqa: F811
    data = world.captions("labelwise")
    model = built("labelwise", data, world)[0].retriever
    model.branches["labels"].thresholds.copy_(torch.tensor([0.1, 0.2]))  # type: ignore[union-attr, operator]
    runtime = written(model, tmp_path / "model")
    for given in ({"images": data.images}, {"texts": data.texts}):
        for how in ({}, {"top": 2}, {"threshold": 0.3}):
            for a, b in zip(
                runtime.predict_labels(**given, **how), model.predict_labels(**given, **how), strict=True
            ):  # type: ignore[arg-type]
                assert a == pytest.approx(b, abs=CLOSE)
                assert list(a.values()) == sorted(a.values(), reverse=True)
    with pytest.raises(SettingsError, match="concept"):
        runtime.encode_text("a", view="concept")
    with pytest.raises(SettingsError, match="labels"):
        written(small_model("Mean"), tmp_path / "other").predict_labels(texts=["a"])


BLOCKED = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "accelerate", "onnx"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, NoTorch())
import numpy as np
from diptych.runtime.model import RuntimeModel
from diptych.runtime.folder import drawn_pictures

model = RuntimeModel.open(sys.argv[1], threads=1)
assert model.check() == []
np.savez(sys.argv[2], image=model.encode_image(drawn_pictures()), text=model.encode_text(["a red dog", "cat"]))
assert "torch" not in sys.modules
"""


def test_a_runtime_needs_no_torch(tmp_path: Path) -> None:
    model = picture_model()
    written(model, tmp_path / "model")
    command = [
        sys.executable,
        "-W",
        "error",
        "-c",
        BLOCKED,
        str(tmp_path / "model"),
        str(tmp_path / "found.npz"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found = np.load(tmp_path / "found.npz")
    assert same(found["image"], model.encode_image(drawn_pictures()))
    assert same(found["text"], model.encode_text(["a red dog", "cat"]))


def test_nothing_gives_nothing(tmp_path: Path) -> None:
    runtime = written(small_model("Mean"), tmp_path / "model")
    assert runtime.encode_text([]).shape == runtime.encode_image([]).shape == (0, 8)


def test_the_command_line_writes_and_copies_runtimes(tmp_path: Path) -> None:
    data = precomputed(tmp_path / "toy_precomp")
    flags = [item for name, value in {**TINY, "epochs": 1}.items() for item in (f"--{name}", value)]
    run = tmp_path / "run"
    said = diptych("train", "vse-plus-plus", "--data", data, "--output_dir", run, *flags, runtime=True).stdout
    assert f"runtime for searching without torch: {run / 'best' / FOLDER}" in said
    assert RuntimeModel.open(run).fingerprint() == Retriever.from_pretrained(run).fingerprint()
    diptych(
        "train", "vse-plus-plus", "--data", data, "--output_dir", tmp_path / "bare", "--no_runtime", *flags
    )
    assert find_runtime(tmp_path / "bare") is None
    lines = diptych("export", "runtime", tmp_path / "bare").stdout.splitlines()
    assert [line.split(": ")[0] for line in lines] == [
        str(tmp_path / "bare" / "best" / FOLDER / name) for name in ("image.onnx", "text.onnx")
    ]
    assert all("of torch" in line for line in lines)
    diptych("export", "runtime", tmp_path / "bare", tmp_path / "elsewhere")
    assert RuntimeModel.open(tmp_path / "elsewhere").check() == []
    assert (
        "choose another"
        in diptych("export", "runtime", tmp_path / "bare", tmp_path / "elsewhere", status=2).stderr
    )
    diptych("export", "onnx", run, tmp_path / "onnx")
    for name in ("image.onnx", "text.onnx", "runtime.json", "vocabulary.json"):
        assert (tmp_path / "onnx" / name).read_bytes() == (run / "best" / FOLDER / name).read_bytes()
    facts = json.loads((tmp_path / "onnx" / "runtime.json").read_text())
    assert (facts["dimension"], facts["images"]["part"]) == (16, "RegionInput")
    assert "choose another" in diptych("export", "onnx", run, tmp_path / "onnx", status=2).stderr


def test_a_changed_runtime_in_the_cache_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no probe shows the change, too: it was copied to other programs."""
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path / "cache"))
    place = siglip_folder(tmp_path / "siglip")
    file = whole_runtime(place) / FOLDER / TEXT
    before = file.read_bytes()
    file.write_bytes(before.replace(b"pytorch", b"pyTorch", 1))
    assert whole_runtime(place) / FOLDER / TEXT == file
    assert file.read_bytes() == before
