from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from encoding_help import ids, lengths, rebuilt, tiny_bert
from torch import nn

from diptych.encoders.bigru import BiGRU, UniGRU
from diptych.encoders.transformer import TransformerText
from diptych.errors import DataError, SettingsError
from diptych.parts import describe, rebuild
from diptych.types import Features

# ------------------------------------------------------------------------------------------------------- GRU


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bert(tmp_path_factory.mktemp("bert"))


def gru_step(state: dict[str, np.ndarray], x: np.ndarray, h: np.ndarray) -> np.ndarray:
    """One step of a gated recurrent unit: r, z, n as in Cho et al. 2014 (reset after the product)."""
    inputs = state["weight_ih_l0"] @ x + state["bias_ih_l0"]
    hidden = state["weight_hh_l0"] @ h + state["bias_hh_l0"]
    (ir, iz, i_n), (hr, hz, hn) = np.split(inputs, 3), np.split(hidden, 3)
    r, z = 1 / (1 + np.exp(-(ir + hr))), 1 / (1 + np.exp(-(iz + hz)))
    n = np.tanh(i_n + r * hn)
    return (1 - z) * n + z * h


def gru_states(module: nn.GRU, xs: np.ndarray) -> np.ndarray:
    state = {name: value.detach().numpy() for name, value in module.state_dict().items()}
    h, out = np.zeros(module.hidden_size), []
    for x in xs:
        h = gru_step(state, x, h)
        out.append(h)
    return np.stack(out)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_bigru_averages_the_two_directions_of_each_text(bidirectional: bool) -> None:
    torch.manual_seed(0)
    encoder = BiGRU(50, word_dim=5, dim=4, bidirectional=bidirectional).double()
    texts = ids(3, 6, 1, 6)
    out = encoder(texts)
    assert torch.equal(out.mask, texts.mask)
    for row, size in enumerate(texts.sizes.tolist()):
        words = encoder.words(texts.values[row, :size]).detach().numpy()
        expected = gru_states(encoder.ahead, words)
        if bidirectional:
            expected = (expected + gru_states(encoder.back, words[::-1])[::-1]) / 2
            # the deliberate mistake: a backward direction that starts in the padding
            padded = encoder.words(texts.values[row]).detach().numpy()
            wrong = (gru_states(encoder.ahead, padded) + gru_states(encoder.back, padded[::-1])[::-1]) / 2
            assert size == 6 or not np.allclose(
                out.values[row, :size].detach().numpy(), wrong[:size], atol=1e-6
            )
        assert np.allclose(out.values[row, :size].detach().numpy(), expected, atol=1e-12)


def test_unigru_gives_the_last_state() -> None:
    torch.manual_seed(0)
    encoder = UniGRU(50, word_dim=5, dim=4).double()
    texts = ids(3, 6, 1)
    out = encoder(texts)
    assert out.values.shape == (3, 1, 4)
    assert out.mask.all()
    for row, size in enumerate(texts.sizes.tolist()):
        words = encoder.words(texts.values[row, :size]).detach().numpy()
        assert np.allclose(
            out.values[row, 0].detach().numpy(), gru_states(encoder.ahead, words)[-1], atol=1e-12
        )


@pytest.mark.parametrize("kind", [BiGRU, UniGRU])
def test_gru_ignores_where_the_padding_stands_and_what_it_holds(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    encoder = kind(50, word_dim=5, dim=4).double()
    texts = ids(3, 5)
    expected = encoder(texts)
    left = torch.tensor([[7, 9, 0, 0, 0], [0] * 5])
    left[0, 2:] = texts.values[0, :3]
    left[1] = texts.values[1]
    mask = torch.tensor([[False, False, True, True, True], [True] * 5])
    found = encoder(Features(left, mask))
    assert torch.allclose(found.values[found.mask], expected.values[expected.mask], atol=1e-12)
    wider = encoder(Features(torch.nn.functional.pad(texts.values, (0, 3)), lengths(3, 5, longest=8)))
    assert torch.allclose(wider.values[wider.mask], expected.values[expected.mask], atol=1e-12)


def test_gru_without_packing_gives_the_same_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU nothing is packed; the same path on the CPU."""
    import diptych.encoders.bigru as module

    torch.manual_seed(0)
    encoder, texts = BiGRU(50, word_dim=5, dim=4).double(), ids(3, 6, 1)
    expected = encoder(texts)
    monkeypatch.setattr(module, "_run", lambda gru, x, ids: gru(x)[0])
    found = encoder(texts)
    assert torch.allclose(found.values[found.mask], expected.values[expected.mask], atol=1e-12)


@pytest.mark.parametrize("kind", [BiGRU, UniGRU])
def test_word_vectors_start_the_words_that_were_found(kind: type[nn.Module], tmp_path: Path) -> None:
    encoder = kind(6, word_dim=5, dim=4)
    assert encoder.words.weight.abs().max() <= 0.1
    before = encoder.words.weight.detach().clone()
    found = torch.tensor([False, False, True, True, False, True])
    matrix = torch.randn(6, 5, dtype=torch.float64)
    encoder.load_word_vectors(matrix, found)
    assert torch.allclose(encoder.words.weight[found], matrix[found].float())
    assert torch.equal(encoder.words.weight[~found], before[~found])
    with pytest.raises(SettingsError, match=r"word_dim.*\b7\b"):
        encoder.load_word_vectors(torch.zeros(6, 7), found)
    texts = ids(2, 3, vocabulary=6)
    assert torch.equal(rebuilt(encoder, tmp_path)(texts).values, encoder(texts).values)


def test_gru_reads_ids_only() -> None:
    with pytest.raises(DataError, match="GRU"):
        BiGRU(6, 5, 4)(Features.whole(torch.zeros(1, 2, 5)))


# ----------------------------------------------------------------------------------------------- transformer


def test_transformer_text_is_the_last_hidden_layer_projected(text_model: Path) -> None:
    from transformers import BertModel

    reference = BertModel.from_pretrained(text_model).eval()
    encoder = TransformerText(text_model, dim=8).eval()
    texts = ids(4, 6, 2)
    with torch.no_grad():
        states = reference(texts.values, attention_mask=texts.mask.long()).last_hidden_state
        out = encoder(texts)
        assert torch.allclose(out.values[texts.mask], encoder.linear(states)[texts.mask], atol=1e-5)
        alone = encoder(Features(texts.values[:1, :4], texts.mask[:1, :4]))
        assert torch.allclose(alone.values[0], out.values[0, :4], atol=1e-5)
    assert encoder.model.pooler is None
    plain = TransformerText(text_model, projection=False).eval()
    assert plain.dim == 16
    assert torch.allclose(plain(texts).values[texts.mask], states[texts.mask], atol=1e-5)


def test_cached_states_skip_the_transformer_and_lose_words_while_training(text_model: Path) -> None:
    torch.manual_seed(0)
    encoder = TransformerText(text_model, dim=8, trainable=False, drop=0.3).eval()
    texts = ids(4, 6)
    with torch.no_grad():
        cached = encoder.states(texts)
        assert torch.equal(encoder(cached).values, encoder(texts).values)
    stored = Features(cached.values.half(), cached.mask)
    assert encoder(stored).values.dtype == torch.float32
    encoder.train()
    many = Features.whole(torch.randn(400, 10, 16))
    inner = encoder(many).mask[:, 1:-1].float().mean()
    assert abs(inner - (1 - 0.4 * 0.3)) < 0.02  # CLS and SEP always stay
    assert encoder(texts).mask.equal(texts.mask)
    with pytest.raises(DataError, match=r"\b16\b"):
        encoder(Features.whole(torch.zeros(1, 2, 5)))
    with pytest.raises(DataError):
        encoder(torch.zeros(1, 3, 8, 8))


def test_a_frozen_transformer_has_no_dropout(text_model: Path) -> None:
    frozen = TransformerText(text_model, dim=8, trainable=False).train()
    texts = ids(4, 6)
    assert not frozen.model.training
    assert torch.equal(frozen(texts).values, frozen(texts).values)
    frozen(texts).values.sum().backward()
    assert frozen.linear.weight.grad is not None
    assert all(p.grad is None for p in frozen.model.parameters())
    frozen.let_train(True)
    assert frozen.model.training
    frozen(texts).values.square().sum().backward()
    unused = [n for n, p in frozen.model.named_parameters() if p.grad is None]
    assert unused == []


def test_transformer_rebuilds_without_its_source(text_model: Path, tmp_path: Path) -> None:
    encoder = TransformerText(text_model, dim=8, trainable=False).eval()
    pair = nn.ModuleList([encoder, TransformerText(text_model, dim=8)])
    folder = tmp_path / "model"
    folder.mkdir()
    first, second = (describe(module, folder) for module in pair)
    assert (first["source"], second["source"]) == ({"asset": "text_encoder"}, {"asset": "text_encoder-2"})
    twin = rebuild(json.loads(json.dumps(first)), folder)
    twin.load_state_dict(encoder.state_dict(), strict=True)
    texts = ids(3, 5)
    assert torch.equal(twin.eval()(texts).values, encoder(texts).values)
    assert not twin.trainable
    assert twin.fingerprint() == encoder.fingerprint()
    assert describe(twin) == describe(encoder)
    other = copy.deepcopy(encoder)
    other.model.config.num_attention_heads = 4
    assert other.fingerprint() != encoder.fingerprint()
    assert describe(other) != describe(encoder)


def test_a_source_that_is_no_model(text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="nobody/no-such-model"):
        TransformerText("nobody/no-such-model")
    with pytest.raises(DataError, match="/no/such/folder"):
        TransformerText("/no/such/folder")
    with pytest.raises(DataError, match=r"config\.json"):
        TransformerText(tmp_path)
    (tmp_path / "config.json").write_text((text_model / "config.json").read_text())
    with pytest.raises(DataError, match=r"config\.json"):
        TransformerText(tmp_path)


def test_an_encoder_with_a_decoder_is_no_encoder(tmp_path: Path) -> None:
    from transformers import T5Config, T5Model

    sizes = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    T5Model(T5Config(**sizes)).save_pretrained(tmp_path)
    with pytest.raises(DataError, match="'t5'"):
        TransformerText(tmp_path)


def test_weights_that_are_missing_are_never_random(text_model: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(text_model / "model.safetensors")
    tensors.pop("encoder.layer.1.output.dense.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((text_model / "config.json").read_text())
    with pytest.raises(DataError, match=r"\b1\b.*encoder\.layer\.1\.output\.dense\.weight"):
        TransformerText(tmp_path)
