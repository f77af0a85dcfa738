"""Runtimes that are damaged, foreign or of another model: the probes notice, and each is one sentence."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from commands import diptych, refused
from disks import fill, make_read_only, small_disk
from dual_folders import siglip_folder
from onnx import TensorProto, helper, numpy_helper
from PIL import Image
from test_runtime import picture_model, small_model, written

from diptych.data.text import WordPieceInput
from diptych.errors import DiptychError, RuntimeFault, SettingsError, StorageError
from diptych.index.models import check_probes, open_model
from diptych.model.adapter import TorchModel
from diptych.model.retriever import Retriever
from diptych.model.runtime_export import export_runtime, place_runtime
from diptych.runtime.folder import (
    FACTS,
    FOLDER,
    IMAGE,
    PROBES,
    TEXT,
    TOKENIZER,
    VOCABULARY,
    Probes,
    compare,
    drawn_pictures,
    file_facts,
    find_runtime,
    worst_cosine,
)
from diptych.runtime.model import RuntimeModel
from diptych.runtime.session import OnnxSession

Change = Callable[[Any], None]


@pytest.fixture(scope="module")
def model() -> Retriever:
    return picture_model()


@pytest.fixture(scope="module")
def original(model: Retriever, tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("original") / "model"
    written(model, home)
    return home


@pytest.fixture
def home(original: Path, tmp_path: Path) -> Path:
    """A model folder to damage."""
    return shutil.copytree(original, tmp_path / "model")


def refusal(home: Path) -> str:
    """The one sentence with which a runtime is refused, and how it is corrected."""
    with pytest.raises(RuntimeFault) as caught:
        RuntimeModel.open(home, threads=1).check()
    said = str(caught.value)
    assert "\n" not in said
    assert said.endswith(".")
    assert ": " in said
    return said


def wrong(home: Path) -> str:
    """The file whose vectors the probes refuse."""
    found = re.search(r"(\w+\.onnx) .*worst cosine -?0\.\d+ .*0\.999 ", refusal(home))
    assert found is not None
    return found[1]


def settle(home: Path) -> None:
    """Make ``runtime.json`` agree with the files again, as if they had been written so."""
    file = home / FOLDER / FACTS
    facts = json.loads(file.read_text())
    facts["files"] = {name: file_facts(home / FOLDER / name) for name in facts["files"]}
    file.write_text(json.dumps(facts))


def change_facts(home: Path, change: Change) -> None:
    file = home / FOLDER / FACTS
    facts = json.loads(file.read_text())
    change(facts)
    file.write_text(json.dumps(facts))


def change_weights(file: Path, size: int, change: Callable[[Any], Any]) -> None:
    """Change the matrices of an ONNX file that have so many rows or columns."""
    found = onnx.load(str(file))
    chosen = [one for one in found.graph.initializer if size in one.dims]
    assert chosen
    for one in chosen:
        changed = change(numpy_helper.to_array(one).copy()).astype(np.float32)
        one.CopyFrom(numpy_helper.from_array(changed, one.name))
    onnx.save(found, str(file))


# --- the probes: wrong vectors


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("one layer changed", lambda w: w + 0.3 * np.random.default_rng(0).standard_normal(w.shape)),
        ("NaN", lambda w: np.full_like(w, np.nan)),
        ("zeros", lambda w: np.zeros_like(w)),
    ],
)
@pytest.mark.parametrize(("file", "size"), [("backbone.onnx", 1280), (IMAGE, 1280), (TEXT, 25)])
def test_probes_notice_other_weights(
    home: Path, name: str, change: Callable[[Any], Any], file: str, size: int
) -> None:
    change_weights(home / FOLDER / file, size, change)
    settle(home)
    side = TEXT if file == TEXT else IMAGE
    assert wrong(home) == side


def test_probes_notice_the_encoder_of_another_model(home: Path, model: Retriever, tmp_path: Path) -> None:
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.text.encoder.ahead.weight_hh_l0.add_(torch.randn_like(other.text.encoder.ahead.weight_hh_l0))  # type: ignore[union-attr, operator]
    written(other, tmp_path / "other")
    shutil.copyfile(tmp_path / "other" / FOLDER / TEXT, home / FOLDER / TEXT)
    settle(home)
    assert wrong(home) == TEXT


@pytest.mark.parametrize(
    "change",
    [
        lambda images: images.update(interpolation="bicubic"),
        lambda images: images.update(resize="crop"),
        lambda images: images.update(bgr=True),
        lambda images: images.update(mean=[0.4, 0.5, 0.6]),
    ],
    ids=["filter", "crop", "colours", "mean"],
)
def test_probes_notice_pictures_prepared_otherwise(home: Path, change: Change) -> None:
    change_facts(home, lambda facts: change(facts["images"]))
    assert wrong(home) == IMAGE


def test_probes_notice_another_vocabulary(home: Path) -> None:
    file = home / FOLDER / VOCABULARY
    words = json.loads(file.read_text())["word2idx"]
    turned = {word: number if number < 4 else len(words) + 3 - number for word, number in words.items()}
    file.write_text(json.dumps({"word2idx": turned}))
    settle(home)
    assert wrong(home) == TEXT


def test_probes_notice_another_tokenizer_and_padding(tmp_path: Path) -> None:
    own, _ = place_runtime(siglip_folder(tmp_path / "siglip"), tmp_path / "own")
    for number, change in enumerate(
        (
            lambda texts: texts.update(side="left"),
            lambda texts: texts.update(pad=5),
            lambda texts: texts.update(length=24),
        )
    ):
        home = shutil.copytree(own, tmp_path / f"padded{number}")
        change_facts(home, lambda facts, change=change: change(facts["texts"]))  # type: ignore[misc]
        assert "text.onnx" in refusal(home)
    state = json.loads((own / FOLDER / TOKENIZER).read_text())
    state["normalizer"] = None
    (own / FOLDER / TOKENIZER).write_text(json.dumps(state))
    settle(own)
    assert wrong(own) == TEXT


def other_tokenizer(retriever: Any) -> None:
    tokens = retriever.text_input.tokenizer
    retriever.text_input.tokenizer = lambda texts, **options: tokens([one[::-1] for one in texts], **options)


def one_layer(change: Callable[[Any], Any]) -> Change:
    def changed(retriever: Any) -> None:
        weight = retriever.image.encoder.get_parameter("model.encoder.layers.0.mlp.fc1.weight")
        with torch.no_grad():
            weight.copy_(change(weight))

    return changed


def zeros(retriever: Any) -> None:
    """As a device may give that computes nothing."""
    retriever.image.encoder.register_forward_hook(
        lambda _, inputs, found: replace(found, values=torch.zeros_like(found.values))
    )


TORCH_FAULTS: dict[str, Change] = {
    "tokenizer": other_tokenizer,
    "padding side": lambda model: setattr(model.text_input.tokenizer, "padding_side", "left"),
    "filter": lambda model: setattr(model.image_input, "filter", Image.Resampling.NEAREST),
    "one layer": one_layer(lambda weight: weight + torch.randn_like(weight)),
    "NaN": one_layer(lambda weight: weight * torch.nan),
    "zeros": zeros,
}


@pytest.fixture(scope="module")
def siglip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("probes")
    return place_runtime(siglip_folder(folder / "siglip"), folder / "own")[0]


@pytest.mark.parametrize("name", TORCH_FAULTS)
def test_probes_notice_what_torch_computes_otherwise(siglip: Path, name: str) -> None:
    """After a change that the fingerprint does not show, such as another version of a library."""
    opened = open_model(siglip, "cpu", backend="torch")
    assert isinstance(opened, TorchModel)
    check_probes(opened, siglip, pytest.fail)  # the true model is never refused, and nothing is said of it
    true = opened.fingerprint()
    TORCH_FAULTS[name](opened.retriever)
    opened.fingerprint = lambda: true  # type: ignore[method-assign]
    with pytest.raises(RuntimeFault, match="cosine"):
        check_probes(opened, siglip)


def test_a_model_whose_files_were_changed_is_not_verified(siglip: Path, tmp_path: Path) -> None:
    home = shutil.copytree(siglip, tmp_path / "model")
    file = home / "config.json"
    content = json.loads(file.read_text())
    content["retriever"]["image_input"]["resample"] = 2
    file.write_text(json.dumps(content))
    assert "its weights of" in refused("model", "verify", home, "--backend", "torch")


def test_region_models_have_probes_too(tmp_path: Path) -> None:
    written(small_model("GPO"), tmp_path / "model")
    change_weights(tmp_path / "model" / FOLDER / IMAGE, 6, lambda w: w[::-1])
    settle(tmp_path / "model")
    assert wrong(tmp_path / "model") == IMAGE


def test_pictures_are_compared_one_at_a_time(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime keeps the memory of the largest batch, which a service would hold for ever."""
    sizes, run = [], OnnxSession.__call__

    def noted(self: OnnxSession, output: str, **fed: Any) -> Any:
        sizes.extend(len(value) for name, value in fed.items() if name == "images")
        return run(self, output, **fed)

    monkeypatch.setattr(OnnxSession, "__call__", noted)
    RuntimeModel.open(home, threads=1).check()
    assert len(sizes) >= 3
    assert set(sizes) == {1}


def test_worst_cosine_by_a_plain_loop() -> None:
    rng = np.random.default_rng(0)
    wanted = rng.standard_normal((6, 9))
    found = wanted + 0.2 * rng.standard_normal((6, 9))
    found /= np.linalg.norm(found, axis=1, keepdims=True) / np.linalg.norm(wanted, axis=1, keepdims=True)
    plain = min(
        sum(a * b for a, b in zip(x, y, strict=True)) / (sum(a * a for a in x) * sum(b * b for b in y)) ** 0.5
        for x, y in zip(found.tolist(), wanted.tolist(), strict=True)
    )
    assert worst_cosine(found, wanted) == pytest.approx(plain, abs=1e-12)
    assert worst_cosine(2 * wanted, wanted) == pytest.approx(0.5)  # of another length
    assert worst_cosine(0 * wanted, wanted) == worst_cosine(wanted * np.nan, wanted) == 0.0
    assert worst_cosine(wanted[:3], wanted) == 0.0


def turned(cosine: float) -> tuple[Any, Any]:
    return np.array([[cosine, (1 - cosine**2) ** 0.5], [0, 1]]), np.array([[1.0, 0], [0, 1]])


def test_what_is_refused_and_what_is_said() -> None:
    assert compare(*turned(0.99995), "the vectors", "copy it") is None
    said = compare(*turned(0.9998), "the vectors", "copy it")
    assert said is not None
    assert "0.999800" in said
    with pytest.raises(RuntimeFault, match=r"0\.9985 .*0\.999 "):
        compare(*turned(0.9985), "the vectors", "copy it")
    assert compare(*turned(0.9985), "the vectors", "copy it", half=True) is not None
    with pytest.raises(RuntimeFault, match=r"0\.9850 .*0\.99 "):
        compare(*turned(0.985), "the vectors", "copy it", half=True)


def test_small_differences_are_notes(home: Path) -> None:
    probes = Probes.read(home / PROBES)
    moved = probes.text_vectors + 0.008 * np.random.default_rng(0).standard_normal(probes.text_vectors.shape)
    moved /= np.linalg.norm(moved, axis=1, keepdims=True)
    Probes(
        probes.fingerprint, probes.texts, probes.images, moved.astype(np.float32), probes.image_vectors
    ).save(home / PROBES)
    runtime = RuntimeModel.open(home)
    runtime.encode_text("a dog")
    assert len(runtime.notes) == 1
    assert TEXT in runtime.notes[0]


def test_pictures_of_the_probes_show_the_filter() -> None:
    for picture in drawn_pictures():
        assert picture.std(axis=(0, 1)).min() > 40
        assert np.abs(np.diff(picture.astype(int), axis=1)).mean() > 20


# --- files


def test_a_folder_without_a_runtime(home: Path) -> None:
    shutil.rmtree(home / FOLDER)
    assert find_runtime(home) is None
    assert f"diptych export runtime {home}" in refusal(home)


@pytest.mark.parametrize("file", [IMAGE, TEXT, "backbone.onnx", VOCABULARY])
def test_missing_and_truncated_files(home: Path, file: str) -> None:
    content = (home / FOLDER / file).read_bytes()
    (home / FOLDER / file).write_bytes(content[: len(content) // 2])
    said = refusal(home)
    assert all(value in said for value in (file, f"{len(content) // 2:,}", f"{len(content):,}"))
    settle(home)  # even where the sizes agree
    assert (file if file.endswith(".onnx") else "tokenizer") in refusal(home)
    (home / FOLDER / file).unlink()
    assert file in refusal(home)


def foreign(
    file: Path, operator: str = "Identity", domain: str = "", names: tuple[str, str] = ("x", "y")
) -> None:
    node = helper.make_node(operator, [names[0]], [names[1]], domain=domain)
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 3]) for name in names]
    graph = helper.make_graph([node], "foreign", [tensors[0]], [tensors[1]])
    sets = [helper.make_opsetid("", 18), *([helper.make_opsetid(domain, 1)] if domain else [])]
    onnx.save(helper.make_model(graph, opset_imports=sets, ir_version=8), str(file))


def test_the_file_of_another_program(home: Path) -> None:
    foreign(home / FOLDER / TEXT)
    settle(home)
    said = refusal(home)
    assert all(value in said for value in ("text.onnx", "reads x and gives y", "ids, mask", "vectors"))


def test_an_operator_that_this_onnx_runtime_lacks(home: Path) -> None:
    foreign(home / FOLDER / IMAGE, "Telepathy", "org.future")
    settle(home)
    said = refusal(home)
    assert "Telepathy" in said
    assert "INVALID_GRAPH" not in said


def test_a_written_file_that_this_onnx_runtime_does_not_run(
    model: Retriever, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing it again would not help."""
    monkeypatch.setattr(
        torch.onnx, "export", lambda _, __, file, **___: foreign(Path(file), "Telepathy", "org.future")
    )
    with pytest.raises(SettingsError, match=r"Telepathy.*: search with torch\.$") as caught:
        export_runtime(model, tmp_path / "model")
    assert "again" not in str(caught.value)


def test_an_operator_set_that_this_onnx_runtime_lacks(home: Path) -> None:
    file = home / FOLDER / TEXT
    found = onnx.load(str(file))
    found.opset_import[0].version = 99
    onnx.save(found, str(file))
    settle(home)
    said = refusal(home)
    assert "99" in said
    assert "onnxruntime_src" not in said


def test_a_change_that_no_probe_shows(home: Path) -> None:
    file = home / FOLDER / TEXT
    file.write_bytes(file.read_bytes().replace(b"pytorch", b"pyTorch", 1))  # who made it
    runtime = RuntimeModel.open(home, threads=1)
    assert runtime.check() == []
    with pytest.raises(RuntimeFault, match=r"text\.onnx"):
        runtime.check_files()
    said = diptych("model", "verify", home)
    assert "text.onnx" in said.stderr
    assert "by torch" in said.stdout
    assert "text.onnx" in refused("model", "verify", home, "--backend", "onnx")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda f: f.update(format=2), "format 2"),
        (lambda f: f.pop("fingerprint"), "runtime.json"),
        (lambda f: f.update(dimension="8"), "runtime.json"),
        (lambda f: f.update(dimension=0), "runtime.json"),
        (lambda f: f.update(dimension=2**31 - 1), "runtime.json"),
        (lambda f: f.update(dimension=f["dimension"] + 1), "do not fit"),
        (lambda f: f["largest"].update(text=[]), "runtime.json"),
        (lambda f: f["largest"].update(text=-1), "runtime.json"),
        (lambda f: f.update(more=1), "runtime.json"),
        (lambda f: f.update(files={}), "runtime.json"),
        (lambda f: f.update(files={IMAGE: 3, TEXT: 4}), "runtime.json"),
        (lambda f: f["files"].update({IMAGE: [[], ""]}), "runtime.json"),
        (
            lambda f: f.update(images={"part": "WordInput", "words": []}),
            "pictures",
        ),
        (lambda f: f["images"].update(size="big"), "pictures"),
        (lambda f: f["images"].update(part=[]), "pictures"),
        (lambda f: f["texts"].update(max_length=9.5), "9.5"),
        (lambda f: f.update(texts={"kind": "runes"}), "runes"),
        (lambda f: f["texts"].update(more=1), "tokenizer"),
        (lambda f: f.update(fingerprint="0" * 16), "0000000000000000"),
        (lambda f: f["model"].update({"config.json": [1, ""]}), "not written from this config.json"),
    ],
)
def test_damaged_facts(home: Path, change: Change, said: str) -> None:
    change_facts(home, change)
    assert said in refusal(home)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"[" * 100_000, b"\xff"])
def test_facts_that_are_no_facts(home: Path, content: bytes) -> None:
    (home / FOLDER / FACTS).write_bytes(content)
    assert "runtime.json" in refusal(home)


def test_missing_and_damaged_probes(home: Path) -> None:
    content = (home / PROBES).read_bytes()
    (home / PROBES).write_bytes(content[: len(content) // 2])
    assert "probes.safetensors" in refusal(home)
    (home / PROBES).unlink()
    assert "probes.safetensors" in refusal(home)


# --- files of a stranger that ask for more than they are


def graph(nodes: list[Any], *constants: Any) -> Any:
    """A text side of these nodes, which fits the facts."""
    inputs = [
        helper.make_tensor_value_info("ids", TensorProto.INT64, ["b", "l"]),
        helper.make_tensor_value_info("mask", TensorProto.BOOL, ["b", "l"]),
    ]
    vectors = helper.make_tensor_value_info("vectors", TensorProto.FLOAT, None)
    made = helper.make_graph(nodes, "hostile", inputs, [vectors], initializer=list(constants))
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def constant(name: str, *numbers: int) -> Any:
    return numpy_helper.from_array(np.array(numbers, np.int64), name)


def endless() -> Any:
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["on"]), helper.make_node("Identity", ["x"], ["y"])],
        "body",
        [
            helper.make_tensor_value_info("turn", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("x", TensorProto.INT64, None),
        ],
        [
            helper.make_tensor_value_info("on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("y", TensorProto.INT64, None),
        ],
    )
    nodes = [
        helper.make_node("Loop", ["turns", "", "ids"], ["z"], body=body),
        helper.make_node("Cast", ["z"], ["vectors"], to=1),
    ]
    return graph(nodes, numpy_helper.from_array(np.array(2**62), "turns"))


def functions() -> Any:
    """Ten calls of a function of ten calls, and so on."""
    own = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    names = ["a", *(f"k{n}" for n in range(9)), "b"]

    def calls(name: str, domain: str = "own") -> list[Any]:
        return [helper.make_node(name, [names[n]], [names[n + 1]], domain=domain) for n in range(10)]

    made = [helper.make_function("own", "f0", ["a"], ["b"], calls("Relu", ""), own)]
    made += [
        helper.make_function("own", f"f{depth}", ["a"], ["b"], calls(f"f{depth - 1}"), own)
        for depth in range(1, 13)
    ]
    found = graph(
        [
            helper.make_node("Cast", ["ids"], ["a"], to=1),
            helper.make_node("f12", ["a"], ["vectors"], domain="own"),
        ]
    )
    found.functions.extend(made)
    found.opset_import.append(own[1])
    return found


def outside(location: str) -> Any:
    tensor = TensorProto(name="w", data_type=TensorProto.UINT8, dims=[4], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    return graph([helper.make_node("Cast", ["w"], ["vectors"], to=1)], tensor)


def doubled(*sizes: int) -> Any:
    """Constants that become forty times twice as large."""
    nodes = [helper.make_node("ConstantOfShape", ["size"], ["a0"])]
    nodes += [helper.make_node("Concat", [f"a{n}", f"a{n}"], [f"a{n + 1}"], axis=0) for n in range(40)]
    return graph([*nodes, helper.make_node("Identity", ["a40"], ["vectors"])], constant("size", *sizes))


def multiplied(many: int = 10_000) -> Any:
    """Constants whose product takes hours, before a text is read."""
    nodes = [helper.make_node("ConstantOfShape", ["size"], ["a0"])]
    nodes += [helper.make_node("MatMul", [f"a{n}", "a0"], [f"a{n + 1}"]) for n in range(many)]
    return graph(
        [*nodes, helper.make_node("Identity", [f"a{many}"], ["vectors"])], constant("size", 2000, 2000)
    )


def texts_of(count: int) -> Any:
    """Texts where numbers belong, copied as often as is said."""
    long = helper.make_tensor("long", TensorProto.STRING, [1], [b"x" * 100_000])
    nodes = [helper.make_node("Tile", ["long", "times"], ["vectors"])]
    return graph(nodes, long, constant("times", count))


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (functions, "functions"),
        (lambda: outside("config.json"), "another file"),
        (lambda: outside("../../secret"), "another file"),
        (lambda: outside("/dev/zero"), "another file"),
        (lambda: texts_of(10**6), "texts"),
    ],
    ids=["functions", "own file", "file outside", "device", "texts"],
)
def test_what_no_runtime_holds(home: Path, made: Callable[[], Any], said: str) -> None:
    (home / FOLDER / TEXT).write_bytes(made().SerializeToString())
    settle(home)
    assert said in refusal(home)


@pytest.mark.skipif(sys.platform != "linux", reason="a process tells its memory in /proc")
def test_memory_that_a_graph_asks_for(home: Path) -> None:
    """On a machine of a gigabyte, in a process of its own: all files share one limit."""
    (home / FOLDER / TEXT).write_bytes(doubled(2000, 2000).SerializeToString())
    settle(home)
    code = (
        "import os, sys; from pathlib import Path; real = os.sysconf\n"
        "os.sysconf = lambda name: 2**30 // real('SC_PAGE_SIZE') if name == 'SC_PHYS_PAGES' else real(name)\n"
        "from diptych.runtime.model import RuntimeModel\n"
        "from diptych.errors import RuntimeFault\n"
        "try: RuntimeModel.open(sys.argv[1], threads=1).encode_text('a')\n"
        "except RuntimeFault as error:\n"
        "    status = Path('/proc/self/status').read_text()\n"  # ru_maxrss would be that of the parent too
        "    print(int(status.split('VmHWM:')[1].split()[0]) // 1000, error)"
    )
    done = subprocess.run([sys.executable, "-c", code, home], capture_output=True, text=True, check=True)
    megabytes, said = done.stdout.split(maxsplit=1)
    assert int(megabytes) < 800
    assert TEXT in said


@pytest.mark.parametrize("made", [endless, multiplied])
def test_work_that_a_graph_asks_for(
    made: Callable[[], Any], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diptych.runtime.session.SECONDS", 0.1)
    (home / FOLDER / TEXT).write_bytes(made().SerializeToString())
    settle(home)
    start = time.process_time()
    assert "terminate" in refusal(home)
    assert time.process_time() - start < 20


GROWS = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
PANICS = {"type": "Split", "pattern": {"Regex": "(e+)+$"}, "behavior": "Isolated", "invert": False}
NO_UNKNOWN = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "none"}
CALLED = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "q", "type_id": 0}}] * 10_000,
    "pair": [],
    "special_tokens": {"q": {"id": "q", "ids": [0] * 10_000, "tokens": ["q"] * 10_000}},
}


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Sequence", "normalizers": [GROWS] * 6}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "x" * 9000}] * 99}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}] * 40}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAAAA"}},
        {"post_processor": CALLED},
        {"pre_tokenizer": PANICS},
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        {"model": NO_UNKNOWN},
        {"normalizer": 5},
        {"model": {"type": "WordLevel", "vocab": {"a": 0, "?": 2**32 - 1}, "unk_token": "?"}},
    ],
    ids=["replace", "prepend", "bytes", "huge map", "empty map", "template", "regex", "length", "unknown", "5", "ids"],
)  # fmt: skip
def test_tokenizers_that_ask_for_too_much(change: dict[str, Any], siglip: Path, tmp_path: Path) -> None:
    """In the runtime, and in the folder that transformers reads."""
    home = shutil.copytree(siglip, tmp_path / "model")
    state = json.dumps(json.loads((home / FOLDER / TOKENIZER).read_text()) | change)
    (home / FOLDER / TOKENIZER).write_text(state)
    settle(home)
    texts = ["e" * 40 + "b", "zzz"]
    with pytest.raises(DiptychError):
        RuntimeModel.open(home, threads=1).encode_text(texts)
    other = tmp_path / "other"
    other.mkdir()
    (other / TOKENIZER).write_text(state)
    (other / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(DiptychError):
        WordPieceInput(other).read(texts)


@pytest.mark.parametrize(
    "settings", [{"length": 10**12}, {"max_length": -1}, {"length": "8"}, {"pad": 2**40}]
)
def test_sizes_of_texts(settings: dict[str, Any], siglip: Path, tmp_path: Path) -> None:
    home = shutil.copytree(siglip, tmp_path / "model")
    change_facts(home, lambda facts: facts["texts"].update(settings))
    assert "tokenizer" in refusal(home)


def test_the_size_of_pictures(home: Path) -> None:
    change_facts(home, lambda facts: facts["images"].update(size=10**6))
    assert "pictures" in refusal(home)


# --- places


def test_a_read_only_model_folder_has_its_runtime_in_the_cache(
    model: Retriever, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path / "cache"))
    with small_disk(tmp_path / "disk", 40) as disk:
        model.save_pretrained(disk / "model")
        make_read_only(disk)
        home, _ = place_runtime(disk / "model")
        assert home == tmp_path / "cache" / "runtimes" / model.fingerprint()
        assert find_runtime(disk / "model", model.fingerprint()) == home
        assert find_runtime(disk / "model", f"../runtimes/{model.fingerprint()}") is None
    assert RuntimeModel.open(home).check() == []


def test_a_full_disk_keeps_the_old_runtime(model: Retriever, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 60) as disk:
        written(model, disk / "model")
        ballast = fill(disk, 1_000_000)
        with pytest.raises(StorageError, match="runtime"):
            export_runtime(model, disk / "model")
        assert RuntimeModel.open(disk / "model").check() == []
        ballast.unlink()
