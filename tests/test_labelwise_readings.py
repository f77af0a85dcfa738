"""Readings of the supplement: blocks that start from BERT, 150 tokens, DSCMR's betas."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from commands import diptych, flags, refused
from small import WORDS, bert_folder
from test_labelwise import TINY, built, label_data
from torch.nn.functional import layer_norm
from transformers import BertConfig, BertModel

from diptych.data.captions import Captions
from diptych.data.formats import open_captions
from diptych.data.text import WordInput
from diptych.encoders.shared import SharedBlocks, start_from_bert
from diptych.errors import DataError, SettingsError
from diptych.parts import describe
from diptych.training.optim import build_optimizer
from diptych.types import Features, as_inputs


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = label_data(tmp_path_factory.mktemp("readings") / "toy")
    return f"{folder}?instances={folder}"


@pytest.fixture(scope="module")
def captions(data: str) -> Captions:
    return open_captions(data)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of three layers in the real format, every weight random, norms and biases too."""
    torch.manual_seed(7)
    config = BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=3, num_attention_heads=4, intermediate_size=24,
        max_position_embeddings=20,
    )  # fmt: skip
    model = BertModel(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    folder = tmp_path_factory.mktemp("bert") / "three"
    model.save_pretrained(folder)
    return folder


def test_the_blocks_start_from_the_first_layers_of_a_bert(bert: Path) -> None:
    """Attention, feed-forward and norms are BERT's, in the order in which BERT applies them."""
    blocks = SharedBlocks(16, depth=2, heads=8, feedforward=24, dropout=0.0).eval()
    start_from_bert(blocks, bert)
    model = BertModel.from_pretrained(bert)
    weights = model.state_dict()

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return layer_norm(x, (16,), weights[f"{name}.weight"], weights[f"{name}.bias"])

    x = torch.randn(2, 5, 16)
    y, before = x, "embeddings.LayerNorm"
    for number in range(2):
        layer = f"encoder.layer.{number}"
        seen = norm(y, before)
        heads = [
            linear(seen, f"{layer}.attention.self.{part}").reshape(2, 5, 8, 2).transpose(1, 2)
            for part in ("query", "key", "value")
        ]
        attention = torch.softmax(heads[0] @ heads[1].transpose(-1, -2) / 2**0.5, -1) @ heads[2]
        y = y + linear(attention.transpose(1, 2).reshape(2, 5, 16), f"{layer}.attention.output.dense")
        inner = torch.relu(
            linear(norm(y, f"{layer}.attention.output.LayerNorm"), f"{layer}.intermediate.dense")
        )
        y = y + linear(inner, f"{layer}.output.dense")
        before = f"{layer}.output.LayerNorm"
    expected = torch.relu(norm(y, before))
    assert torch.allclose(blocks(Features.whole(x)).values, expected, atol=1e-5)


def test_a_model_starts_from_bert_and_forgets_the_folder(bert: Path, data: str, tmp_path: Path) -> None:
    changes = {**TINY, "feedforward": 24, "blocks": 2, "epochs": 1, "blocks_from": bert}
    run = tmp_path / "run"
    diptych("train", "labelwise", "--data", data, "--output_dir", run, *flags(changes))
    assert str(bert) not in (run / "best" / "config.json").read_text()
    assert "NDCG@500" in diptych("evaluate", run, "--bootstrap", 0).stdout
    train = ("train", "labelwise", "--data", data, "--output_dir", tmp_path / "other")
    assert "--feedforward 24" in refused(*train, *flags({**changes, "feedforward": 16}))
    assert "4 blocks" in refused(*train, *flags({**changes, "blocks": 4}))
    assert "--blocks_from" in refused(*train, *flags({**changes, "baseline": "dscmr"}))
    missing = flags({**changes, "blocks_from": tmp_path / "nothing"})
    assert "repo_name" in refused(*train, *missing)


def test_only_a_bert_is_a_start(tmp_path: Path, bert: Path) -> None:
    from transformers import GPT2Config, GPT2Model

    GPT2Model(GPT2Config(vocab_size=9, n_embd=16, n_layer=1, n_head=2)).save_pretrained(tmp_path / "gpt")
    with pytest.raises(SettingsError, match="gpt2"):
        start_from_bert(SharedBlocks(16, 1, 2, 24), tmp_path / "gpt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"config\.json"):
        start_from_bert(SharedBlocks(16, 1, 2, 24), tmp_path / "empty")


def test_both_networks_of_a_baseline_start_from_bert(bert: Path, captions: Captions) -> None:
    method, _ = built(captions, baseline="traditional", feedforward=24, blocks_from=str(bert))
    weight = BertModel.from_pretrained(bert).state_dict()["encoder.layer.0.attention.self.query.weight"]
    for tower in (method.retriever.image, method.retriever.text):
        assert torch.equal(tower.encoder.blocks.blocks[0].query.weight, weight)


def test_texts_are_cut_at_the_limit(captions: Captions, tmp_path: Path) -> None:
    long = " ".join(WORDS[9:15] * 60)  # 360 words
    assert as_inputs(built(captions)[0].retriever.text_input([long])).mask.sum() == 150
    short = built(captions, max_tokens=7)[0].retriever.text_input
    ids = short([long, "the dog"])
    assert ids.mask.sum(1).tolist() == [7, 4]
    assert short.spell(ids.values[0].tolist()) == ["<start>", *WORDS[9:14], "<end>"]
    folder = bert_folder(tmp_path / "bert", positions=200)
    pieces = built(captions, text_encoder=str(folder), max_tokens=9)[0].retriever.text_input
    assert pieces([long]).mask.sum() == 9
    assert built(captions, text_encoder=str(folder))[0].retriever.text_input.max_length == 150
    with pytest.raises(SettingsError, match=r"max_length.*\b2\b"):
        WordInput(["<pad>", "<start>", "<end>", "<unk>"], augment=0, max_length=2)
    plain = WordInput(["<pad>", "<start>", "<end>", "<unk>"], augment=0)
    assert "max_length" not in str(describe(plain))  # models saved before it keep their fingerprint


def test_the_betas_of_each_method(captions: Captions) -> None:
    for baseline, expected in (("ours", (0.9, 0.999)), ("dscmr", (0.5, 0.999))):
        method, settings = built(captions, baseline=baseline)
        optimizer = build_optimizer(method, settings)
        assert all(group["betas"] == expected for group in optimizer.param_groups)
