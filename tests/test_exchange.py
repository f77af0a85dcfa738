"""Models and vectors of other programs in, ours out: published VSE∞ checkpoints, clip-retrieval, faiss, ONNX."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet as parquet
import pytest
import torch
from colour_model import WORDS, ColourModel
from commands import diptych, refused
from encoding_help import tiny_bert
from PIL import Image
from small import precomputed
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from transformers import BertConfig, BertModel

from diptych.data.text import load_tokenizer
from diptych.data.vocabulary import published_form
from diptych.encoders.pretrained import minilm_folder
from diptych.errors import CheckpointError, DataError, SettingsError
from diptych.index.engines.opening import index_exists, open_index
from diptych.index.ingest.build import index_collection
from diptych.model.retriever import Retriever
from diptych.runs.embeddings import export_faiss, export_vectors, import_embeddings
from diptych.runs.published import import_vse_infinity
from diptych.types import Features

DIM, WIDTH, WORD_DIM, SIZES = 8, 12, 6, [5, 3, 1]
VOCABULARY = ["<pad>", "<start>", "<end>", "<unk>", "a", "red", "green", "dog", "cat", "<mask>"]
IDS = torch.tensor([[1, 4, 5, 7, 2], [1, 8, 2, 0, 0], [6, 0, 0, 0, 0]])


# --- the public code's own computation, written again: sorted values times softmax of a BiGRU over positions


def pool(state: dict[str, Tensor], rows: Tensor, size: int) -> Tensor:
    gru = nn.GRU(32, 32, batch_first=True, bidirectional=True).double()
    names = list(gru.state_dict())
    gru.load_state_dict({n: state[f"gpool.gru.{n}"].double() for n in names})
    codes = torch.zeros(size, 32, dtype=torch.float64)
    for position in range(size):
        for j in range(16):
            angle = position / 10000 ** (2 * j / 32)
            codes[position, 2 * j], codes[position, 2 * j + 1] = np.sin(angle), np.cos(angle)
    out = gru(codes[None])[0][0]
    score = ((out[:, :32] + out[:, 32:]) / 2) @ state["gpool.linear.weight"].double().T  # (size, 1)
    pooled = (rows[:size].sort(dim=0, descending=True).values * (score / 0.1).softmax(0)).sum(0)
    return pooled / (pooled.norm() + 1e-8)


def published_image(state: dict[str, Tensor], regions: Tensor, size: int) -> Tensor:
    s = {name: value.double() for name, value in state.items()}
    x = regions.double()
    inner = x @ s["mlp.layers.0.weight"].T + s["mlp.layers.0.bias"]
    inner = (inner - s["mlp.bns.0.running_mean"]) / (s["mlp.bns.0.running_var"] + 1e-5).sqrt()
    inner = (inner * s["mlp.bns.0.weight"] + s["mlp.bns.0.bias"]).relu()
    rows = x @ s["fc.weight"].T + s["fc.bias"] + inner @ s["mlp.layers.1.weight"].T + s["mlp.layers.1.bias"]
    return pool(state, rows, size)


def published_bigru(state: dict[str, Tensor], ids: Tensor, size: int) -> Tensor:
    rnn = nn.GRU(WORD_DIM, DIM, batch_first=True, bidirectional=True).double()
    rnn.load_state_dict({n: state[f"rnn.{n}"].double() for n in rnn.state_dict()})
    packed = pack_padded_sequence(state["embed.weight"].double()[ids[:size]][None], [size], batch_first=True)
    out = pad_packed_sequence(rnn(packed)[0], batch_first=True)[0][0]
    return pool(state, (out[:, :DIM] + out[:, DIM:]) / 2, size)


def drawn(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) / 2 for name, shape in shapes.items()}


def gru_shapes(start: str, inputs: int, hidden: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for end in ("", "_reverse"):
        shapes[f"{start}.weight_ih_l0{end}"] = (3 * hidden, inputs)
        shapes[f"{start}.weight_hh_l0{end}"] = (3 * hidden, hidden)
        shapes[f"{start}.bias_ih_l0{end}"] = shapes[f"{start}.bias_hh_l0{end}"] = (3 * hidden,)
    return shapes


GPO_SHAPES = {**gru_shapes("gpool.gru", 32, 32), "gpool.linear.weight": (1, 32)}


def image_state() -> dict[str, Tensor]:
    state = drawn(
        {
            "fc.weight": (DIM, WIDTH), "fc.bias": (DIM,),
            "mlp.layers.0.weight": (DIM // 2, WIDTH), "mlp.layers.0.bias": (DIM // 2,),
            "mlp.layers.1.weight": (DIM, DIM // 2), "mlp.layers.1.bias": (DIM,),
            "mlp.bns.0.weight": (DIM // 2,), "mlp.bns.0.bias": (DIM // 2,), "mlp.bns.0.running_mean": (DIM // 2,),
            "mlp.bns.1.weight": (DIM,), "mlp.bns.1.bias": (DIM,), "mlp.bns.1.running_mean": (DIM,), **GPO_SHAPES,
        },
        1,
    )  # fmt: skip
    state["mlp.bns.0.running_var"] = torch.linspace(0.5, 1.5, DIM // 2)
    state["mlp.bns.1.running_var"] = torch.ones(DIM)
    for n in (0, 1):
        state[f"mlp.bns.{n}.num_batches_tracked"] = torch.tensor(7)
    return state


def bigru_state() -> dict[str, Tensor]:
    shapes = {"embed.weight": (len(VOCABULARY), WORD_DIM), **gru_shapes("rnn", WORD_DIM, DIM), **GPO_SHAPES}
    return drawn(shapes, 2)


def save(file: Path, images: dict[str, Any], texts: dict[str, Any], prefix: str = "", **options: Any) -> Path:
    states = [{f"{prefix}{name}": value for name, value in one.items()} for one in (images, texts)]
    opt = argparse.Namespace(embed_size=DIM, data_name="f30k", learning_rate=5e-4, **options)
    torch.save({"epoch": 24, "model": states, "best_rsum": 490.1, "opt": opt, "Eiters": 9}, file)
    return file


@pytest.fixture
def words(tmp_path: Path) -> Path:
    file = tmp_path / "vocabulary.json"
    file.write_text(json.dumps(published_form(VOCABULARY)))
    return file


def regions() -> Features:
    values = torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(3))
    return Features(values, torch.arange(5) < torch.tensor(SIZES)[:, None])


@pytest.mark.parametrize("prefix", ["", "module."], ids=["plain", "data parallel"])
def test_a_published_bigru_checkpoint_gives_its_own_vectors(tmp_path: Path, words: Path, prefix: str) -> None:
    file = save(tmp_path / "model_best.pth", image_state(), bigru_state(), prefix)
    model = import_vse_infinity(file, vocabulary=words).double()
    given = regions()
    image, _ = model.image(Features(given.values.double(), given.mask))
    text, _ = model.text(Features(IDS, torch.arange(5) < torch.tensor(SIZES)[:, None]))
    for n, size in enumerate(SIZES):
        assert torch.allclose(
            image[n].double(), published_image(image_state(), given.values[n], size), atol=1e-6
        )
        assert torch.allclose(text[n].double(), published_bigru(bigru_state(), IDS[n], size), atol=1e-6)
    model.float().save_pretrained(tmp_path / "model")
    again = Retriever.from_pretrained(tmp_path / "model")
    assert torch.allclose(again.encode_text(["a red dog"]), model.encode_text(["a red dog"]))


def test_the_comparison_notices_swapped_directions(tmp_path: Path, words: Path) -> None:
    state = bigru_state()
    swapped = {
        (n.removesuffix("_reverse") if n.endswith("_reverse") else f"{n}_reverse")
        if n.startswith("rnn.")
        else n: v
        for n, v in state.items()
    }
    model = import_vse_infinity(save(tmp_path / "m.pth", image_state(), swapped), vocabulary=words).double()
    text, _ = model.text(Features(IDS[:1], torch.ones(1, 5, dtype=torch.bool)))
    assert not torch.allclose(text[0].double(), published_bigru(state, IDS[0], 5), atol=1e-3)


def test_a_published_bert_checkpoint_gives_its_own_vectors(tmp_path: Path) -> None:
    folder = tiny_bert(tmp_path / "bert")
    load_tokenizer(minilm_folder()).save_pretrained(folder)
    config = BertConfig.from_pretrained(folder)
    torch.manual_seed(5)
    bert = BertModel(config).eval()
    shapes = {"linear.weight": (DIM, config.hidden_size), "linear.bias": (DIM,), **GPO_SHAPES}
    state = {**{f"bert.{n}": v for n, v in bert.state_dict().items()}, **drawn(shapes, 6)}
    state["bert.embeddings.position_ids"] = torch.arange(config.max_position_embeddings)[None]
    file = save(tmp_path / "bert.pth", image_state(), state)
    model = import_vse_infinity(file, text_model=str(folder)).double().eval()
    ids = torch.tensor([[2, 5, 6, 7, 3], [2, 8, 3, 0, 0]])
    mask = ids != 0
    text, _ = model.text(Features(ids, mask))
    states = bert.double()(ids, attention_mask=mask.double()).last_hidden_state
    for n, size in enumerate((5, 3)):
        rows = states[n] @ state["linear.weight"].double().T + state["linear.bias"].double()
        assert torch.allclose(text[n].double(), pool(state, rows, size), atol=1e-6)
    with pytest.raises(SettingsError, match=r"bert\.pt"):
        import_vse_infinity(file)


class Code:
    """Something that unpickling would run."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch /tmp/this-must-not-be-run",)


def test_checkpoints_that_are_none(tmp_path: Path, words: Path) -> None:
    good = tmp_path / "good.pth"
    save(good, image_state(), bigru_state())
    out = tmp_path / "out"

    def said(file: Path, *more: object) -> str:
        sentence = refused("import", "vse-infinity", file, out, "--vocabulary", words, *more)
        assert not out.exists()
        return sentence

    code = tmp_path / "code.pth"
    torch.save({"model": [Code(), {}], "opt": None}, code)
    assert "code.pt" in said(code)
    assert "weights_only" not in said(code)  # torch advises to run it
    (tmp_path / "half.pth").write_bytes(good.read_bytes()[:900])
    assert "half.pt" in said(tmp_path / "half.pth")
    assert "nowhere" in said(tmp_path / "nowhere.pth")
    torch.save({"state_dict": {}}, tmp_path / "other.pth")
    assert "'model'" in said(tmp_path / "other.pth")
    save(tmp_path / "cnn.pth", {"backbone.conv.weight": torch.ones(1)}, bigru_state())
    assert "cnn.pt" in said(tmp_path / "cnn.pth")
    save(tmp_path / "nan.pth", {**image_state(), "fc.bias": torch.full((DIM,), torch.nan)}, bigru_state())
    assert "nan.pt" in said(tmp_path / "nan.pth")
    save(tmp_path / "more.pth", {**image_state(), "further.weight": torch.ones(2)}, bigru_state())
    assert "further.weight" in said(tmp_path / "more.pth")
    less = {n: v for n, v in image_state().items() if n != "mlp.layers.1.bias"}
    save(tmp_path / "less.pth", less, bigru_state())
    assert "encoder.second.bias" in said(tmp_path / "less.pth")
    save(tmp_path / "raw.pth", image_state(), bigru_state(), no_txtnorm=True)
    assert "no_txtnorm" in said(tmp_path / "raw.pth")
    words.write_text(json.dumps(published_form(VOCABULARY[:7])))
    assert "vocabulary.json" in said(good)
    with pytest.raises(SettingsError, match=r"good\.pt"):
        import_vse_infinity(good)
    with pytest.raises(CheckpointError):
        import_vse_infinity(code)


def test_import_vse_infinity_as_a_user_runs_it(tmp_path: Path, words: Path) -> None:
    data = precomputed(tmp_path / "data")
    width = np.load(next(data.glob("*_ims.npy"))).shape[-1]
    state = image_state() | {
        "fc.weight": torch.randn(DIM, width), "mlp.layers.0.weight": torch.randn(DIM // 2, width)
    }  # fmt: skip
    file = save(tmp_path / "model_best.pth", state, bigru_state())
    said = diptych("import", "vse-infinity", file, tmp_path / "model", "--vocabulary", words).stdout
    assert "8 dimensions" in said
    assert "R@1" in diptych("evaluate", tmp_path / "model", "--data", data, "--bootstrap", 0).stdout
    assert "model" in refused("import", "vse-infinity", file, tmp_path / "model", "--vocabulary", words)


# --- vectors


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for name, colour in WORDS.items():
        Image.new("RGB", (8, 8), colour).save(folder / f"{name}.png")
    return folder


def clip_retrieval(folder: Path, photos: Path, *, shards: int = 2, **changes: Any) -> Path:
    """What clip-retrieval writes of a folder."""
    model = ColourModel()
    names = sorted(WORDS)
    for part in ("img_emb", "metadata"):
        (folder / part).mkdir(parents=True)
    for number in range(shards):
        some = names[number::shards]
        pictures = [Image.open(photos / f"{name}.png") for name in some]
        vectors = np.asarray(model.encode_image(pictures), np.float32) * 3  # not of unit length
        np.save(folder / "img_emb" / f"img_emb_{number}.npy", changes.get("vectors", lambda v: v)(vectors))
        table = {
            "image_path": [str(photos / f"{name}.png") for name in some],
            "caption": [f"a {name} square" for name in some],
            "width": [8] * len(some),
        }
        parquet.write_table(pyarrow.table(table), folder / "metadata" / f"metadata_{number}.parquet")
    return folder


def test_a_folder_of_clip_retrieval_becomes_an_index(tmp_path: Path, photos: Path) -> None:
    model = ColourModel()
    done = import_embeddings(clip_retrieval(tmp_path / "emb", photos), tmp_path / "i", model)
    assert (done.images, done.notes) == (4, [])
    with open_index(tmp_path / "i", fingerprint=model.fingerprint()) as index:
        (hit,) = index.search(model.encode_text(["red"])[0], 1)
        assert (hit.item.id, hit.item.text, hit.item.metadata) == ("red.png", "a red square", {"width": 8})
        assert index.file(hit.item) == photos / "red.png"
        assert abs(np.linalg.norm(index.vectors(["red.png"])) - 1) < 1e-6
        assert index.search(model.encode_text(["red"])[0], 1, filter="width < 9").ids == ["red.png"]
        assert index.search_words("green", 1).ids == ["green.png"]
    again = ColourModel()
    built = index_collection(again, photos, tmp_path / "i")  # the folder itself, later: vectors are kept
    assert (built.images, built.total, again.encoded_images) == (4, 4, 0)


def test_an_array_with_paths_and_a_table_of_vectors(tmp_path: Path, photos: Path) -> None:
    model = ColourModel()
    names = [f"{name}.png" for name in WORDS]
    vectors = np.asarray(model.encode_image([Image.open(photos / name) for name in names]), np.float32)
    np.save(tmp_path / "v.npy", vectors.astype(np.float16))
    (tmp_path / "paths.txt").write_text("\n".join(names))
    for table in ("paths.txt", "paths.csv", "paths.jsonl"):
        file = tmp_path / table
        if file.suffix == ".csv":
            file.write_text("filename,title\n" + "\n".join(f"{n},t" for n in names))
        if file.suffix == ".jsonl":
            file.write_text("\n".join(json.dumps({"file": n}) for n in names))
        import_embeddings(tmp_path / "v.npy", tmp_path / table[-3:], model, paths=file, root=photos)
    parquet.write_table(pyarrow.table({"path": names, "embedding": list(vectors)}), tmp_path / "all.parquet")
    import_embeddings(tmp_path / "all.parquet", tmp_path / "whole", model, root=photos)
    for place in ("txt", "csv", "onl", "whole"):
        with open_index(tmp_path / place) as index:
            assert index.search(model.encode_text(["blue"])[0], 1).ids == ["blue.png"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda v: v[:, :5], r"\b5\b.*\b8\b"),
        (
            lambda v: np.where(np.arange(len(v))[:, None] == 1, np.nan, v),
            r"\b1\b",
        ),
        (lambda v: v * (np.arange(len(v))[:, None] != 0), r"\b0\b"),
        (lambda v: v[:1], r"\b1\b.*metadata_0\.parquet.*\b2\b"),
        (lambda v: v[:, 0], r"img_emb_0\.npy"),
        (lambda v: v.astype(str), "<U32"),
        (lambda v: np.flip(v, 1), r"\b4\b"),
    ],
)
def test_vectors_that_are_refused_leave_nothing(
    tmp_path: Path, photos: Path, change: Any, sentence: str
) -> None:
    folder = clip_retrieval(tmp_path / "emb", photos, vectors=change)
    with pytest.raises(DataError, match=sentence):
        import_embeddings(folder, tmp_path / "i", ColourModel())
    assert not index_exists(tmp_path / "i")


@pytest.mark.parametrize(
    ("cosine", "kind", "outcome"),
    [
        (1.0, np.float32, "taken"), (0.9995, np.float32, "said"), (0.998, np.float32, "refused"),
        (0.998, np.float16, "said"), (0.98, np.float16, "refused"),
    ],
)  # fmt: skip
def test_one_vector_that_differs_is_said_or_refused(
    tmp_path: Path, photos: Path, cosine: float, kind: Any, outcome: str
) -> None:
    def turned(vectors: np.ndarray) -> np.ndarray:
        """The first vector moved by an angle; the median of all of them stays 1."""
        first = vectors[0] / np.linalg.norm(vectors[0])
        other = np.roll(first, 1) - first * (np.roll(first, 1) @ first)
        other /= np.linalg.norm(other)
        moved = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        moved[0] = cosine * first + (1 - cosine**2) ** 0.5 * other
        return moved.astype(kind)

    folder = clip_retrieval(tmp_path / "emb", photos, shards=1, vectors=turned)
    if outcome == "refused":
        with pytest.raises(DataError, match=f"{cosine:.3f}"):
            import_embeddings(folder, tmp_path / "i", ColourModel())
        assert import_embeddings(folder, tmp_path / "i", ColourModel(), check=False).images == 4
    else:
        notes = import_embeddings(folder, tmp_path / "i", ColourModel()).notes
        assert len(notes) == (outcome == "said")


def test_other_mistakes_of_an_import(tmp_path: Path, photos: Path) -> None:
    model = ColourModel()
    folder = clip_retrieval(tmp_path / "emb", photos)
    cases = [
        (lambda: import_embeddings(tmp_path / "nowhere", tmp_path / "i", model), "nowhere"),
        (lambda: import_embeddings(photos, tmp_path / "i", model), r"\b0\b.*img_emb"),
        (lambda: import_embeddings(photos / "red.png", tmp_path / "i", model), r"red\.png"),
        (lambda: import_embeddings(folder / "img_emb" / "img_emb_0.npy", tmp_path / "i", model), "--paths"),
        (lambda: import_embeddings(folder / "metadata" / "metadata_0.parquet", tmp_path / "i", model), "metadata_0"),
    ]  # fmt: skip
    for act, words in cases:
        with pytest.raises(DataError, match=words):
            act()
    for file in photos.glob("*.png"):
        file.unlink()
    assert "could not be compared" in import_embeddings(folder, tmp_path / "i", model).notes[0]


def test_what_is_exported_can_be_imported(tmp_path: Path, photos: Path) -> None:
    model = ColourModel()
    (photos / "red.txt").write_text("a red square\n")
    index_collection(model, photos, tmp_path / "i")
    with open_index(tmp_path / "i") as index:
        assert export_vectors(index, tmp_path / "out") == 4
        assert export_vectors(index, tmp_path / "texts", "text") == 1
        with pytest.raises(DataError, match="texts/none"):
            import_embeddings(tmp_path / "texts" / "none", tmp_path / "x", model)
    rows = parquet.read_table(tmp_path / "out" / "metadata" / "metadata_0.parquet").to_pylist()
    assert {row["image_path"] for row in rows} == {str(file) for file in photos.glob("*.png")}
    import_embeddings(tmp_path / "out", tmp_path / "again", model)
    query = model.encode_text(["green"])[0]
    with open_index(tmp_path / "i") as first, open_index(tmp_path / "again") as second:
        assert first.search(query, 4, kind="image").ids == second.search(query, 4).ids
        assert first.search(query, 4, kind="image").scores == pytest.approx(second.search(query, 4).scores)


def test_faiss_finds_what_the_index_finds(tmp_path: Path, photos: Path) -> None:
    faiss = pytest.importorskip("faiss")
    model = ColourModel()
    index_collection(model, photos, tmp_path / "i")
    assert "vectors" in diptych("export", "faiss", tmp_path / "i", tmp_path / "out" / "photos.faiss").stdout
    rows = json.loads((tmp_path / "out" / "photos.faiss.json").read_text())
    read = faiss.read_index(str(tmp_path / "out" / "photos.faiss"))
    query = np.asarray(model.encode_text(["blue"]), np.float32)
    scores, found = read.search(query, 3)
    with open_index(tmp_path / "i") as index:
        hits = index.search(query[0], 3)
        assert [rows[n]["id"] for n in found[0]][:1] == hits.ids[:1]  # the next are tied
        assert scores[0] == pytest.approx(hits.scores, abs=1e-6)
        with pytest.raises(DataError):
            export_faiss(index, tmp_path / "t.faiss", "text")
    assert diptych("export", "vectors", tmp_path / "i", tmp_path / "v").stdout.endswith("4 vectors\n")
