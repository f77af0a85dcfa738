"""BERT and its word pieces without transformers: the same numbers and identity, and a search that answers at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import diptych
from small import pictures
from test_packing import text_folder

from diptych.data.text import WordPieceInput, load_tokenizer, tokenizer_state
from diptych.data.vocabulary import BertPieces, read_pieces
from diptych.encoders.bert import Bert, read_bert
from diptych.encoders.pretrained import config_identity, load_config, load_model, minilm_folder
from diptych.model.retriever import Retriever

IDS = torch.tensor([[5, 6, 7, 8, 9], [10, 11, 12, 0, 0], [13, 0, 0, 0, 0]])
TEXTS = ["Two Parrots on a café table", "", "naïve 鸟 bird's-eye [MASK] view", "word " * 900]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    return text_folder(tmp_path / "bert", "bert")


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("width", [5, 1], ids=["padded", "whole"])
def test_states_and_gradients_are_those_of_transformers(folder: Path, training: bool, width: int) -> None:
    own, theirs = read_bert(folder, True), load_model(folder, load_config(folder), True)
    assert isinstance(own, Bert)
    ids = IDS[:, :width]
    states = []
    for model in (own, theirs):
        model.train(training)
        torch.manual_seed(3)  # of dropout
        state = model(input_ids=ids, attention_mask=(ids > 0).long()).last_hidden_state
        state.square().sum().backward()
        states.append(state)
    assert torch.equal(*states)
    for (name, mine), (other, other_one) in zip(
        own.named_parameters(), theirs.named_parameters(), strict=True
    ):
        assert name == other
        assert torch.equal(mine, other_one)
        assert (mine.grad is None) == (other_one.grad is None)
        assert mine.grad is None or torch.allclose(mine.grad, other_one.grad, atol=1e-6)


def test_the_comparison_notices_another_norm(folder: Path) -> None:
    own, theirs = read_bert(folder, True), load_model(folder, load_config(folder), True)
    assert own is not None
    layer = own.encoder.layer[0]
    layer.output.LayerNorm.eps = 0.1
    mask = (IDS > 0).long()
    assert not torch.allclose(
        own(input_ids=IDS, attention_mask=mask).last_hidden_state,
        theirs(input_ids=IDS, attention_mask=mask).last_hidden_state,
    )


def test_its_identity_and_its_folder_are_those_of_transformers(folder: Path, tmp_path: Path) -> None:
    for source in (folder, Path(minilm_folder())):
        own = read_bert(source, True)
        assert own is not None
        assert config_identity(own.config) == config_identity(load_config(source))
        own.config.save_pretrained(tmp_path / source.name)
        assert config_identity(load_config(tmp_path / source.name)) == config_identity(own.config)


def test_loading_draws_no_random_numbers_and_starting_draws_berts(folder: Path) -> None:
    torch.manual_seed(0)
    read_bert(folder, True)
    after = torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(after, torch.rand(1))
    fresh = read_bert(folder, False)
    assert fresh is not None
    weight = fresh.encoder.layer[0].intermediate.dense.weight
    assert 0.015 < weight.std() < 0.025
    assert not fresh.embeddings.word_embeddings.weight[0].any()
    assert torch.equal(fresh.encoder.layer[0].output.LayerNorm.weight, torch.ones(32))


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "relu"},
        {"is_decoder": True},
        {"position_embedding_type": "relative_key"},
        {"num_attention_heads": 3},
        {"hidden_size": -1},
        {"vocab_size": 10**12},
        {"pad_token_id": 99},
        {"auto_map": {"AutoModel": "code.Model"}},
        {"model_type": "roberta"},
        {"hidden_dropout_prob": "0.1"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_is_unusual_is_left_to_transformers(folder: Path, changes: dict[str, object]) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    assert read_bert(folder, True) is None


def test_weights_that_are_missing_damaged_or_too_many_are_left_to_transformers(folder: Path) -> None:
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    assert read_bert(folder, True) is None
    weights.unlink()
    assert read_bert(folder, True) is None
    assert read_bert("nobody/no-such-model", True) is None


# --- word pieces


def test_ids_words_and_identity_are_those_of_transformers(tmp_path: Path) -> None:
    own, theirs = read_pieces(minilm_folder()), load_tokenizer(minilm_folder())
    assert isinstance(own, BertPieces)
    assert tokenizer_state(own) == tokenizer_state(theirs)
    for name in ("model_max_length", "mask_token_id", "pad_token_id"):
        assert getattr(own, name) == getattr(theirs, name)
    assert sorted(own.all_special_ids) == sorted(theirs.all_special_ids)
    assert len(own) == len(theirs)
    assert own.get_vocab() == theirs.get_vocab()
    assert own.convert_ids_to_tokens([101, 2048]) == theirs.convert_ids_to_tokens([101, 2048])
    texts = WordPieceInput(minilm_folder(), augment=0.0)
    prepared, read = texts.prepare(TEXTS), texts.read(TEXTS)
    for row, text in enumerate(TEXTS):
        ids = theirs(text, truncation=True, max_length=512)["input_ids"]
        assert prepared.collate([row]).values[0].tolist() == ids
        assert read.collate([row]).values[0].tolist() == ids
    own.save_pretrained(tmp_path / "saved")
    again = read_pieces(tmp_path / "saved")
    assert again is not None
    assert (
        tokenizer_state(again)
        == tokenizer_state(load_tokenizer(tmp_path / "saved"))
        == tokenizer_state(theirs)
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"do_lower_case": False},
        {"tokenizer_class": "RobertaTokenizer"},
        {"mask_token": "<mask>"},
        {"auto_map": {}},
        {"model_max_length": None},
        {"additional_special_tokens": ["[X]"]},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_an_unusual_tokenizer_is_left_to_transformers(tmp_path: Path, changes: dict[str, object]) -> None:
    source = read_pieces(minilm_folder())
    assert source is not None
    source.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    assert read_pieces(tmp_path) is None
    assert read_pieces(tmp_path / "nowhere") is None


# --- a search as a user runs it


def test_a_search_imports_neither_transformers_nor_the_compiler(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    pictures(photos)
    diptych("index", photos, "--batch_size", 8)
    code = (
        "import resource, sys; from diptych.cli import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "heavy = ('transformers', 'torch._dynamo', 'sympy', 'scipy', 'pandas', 'accelerate', 'matplotlib')\n"
        "print([m for m in heavy if m in sys.modules], used.ru_utime + used.ru_stime)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "search", f"{photos}.index", "a red thing", "-k", "2"],
        capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    *answers, last = done.stdout.splitlines()
    assert len(answers) == 2, done.stderr
    heavy, _, seconds = last.rpartition(" ")
    assert heavy == "[]"
    assert float(seconds) < 25.0  # measured: 2.4


def test_the_untrained_model_is_the_same_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Retriever.from_pretrained("lite0+minilm")
    monkeypatch.setattr("diptych.encoders.transformer.read_bert", lambda *_: None)
    monkeypatch.setattr("diptych.data.text.read_pieces", lambda *_: None)
    theirs = Retriever.from_pretrained("lite0+minilm")
    assert own.fingerprint() == theirs.fingerprint()
    assert torch.equal(torch.as_tensor(own.encode_text(TEXTS)), torch.as_tensor(theirs.encode_text(TEXTS)))
