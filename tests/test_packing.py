"""Packed texts: the transformer computes no padding, and nothing else changes."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from diptych.encoders.transformer import LONGEST, PackedIds, TransformerText, attend, can_pack, pack
from diptych.types import Features

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def ids(*sizes: int, longest: int | None = None, vocabulary: int = 50) -> Features:
    mask = torch.arange(longest or max(sizes)) < torch.tensor(sizes)[:, None]
    return Features(torch.randint(4, vocabulary, mask.shape) * mask, mask)


def text_folder(folder: Path, kind: str, **changes: object) -> Path:
    from transformers import (
        BertConfig,
        BertModel,
        DistilBertConfig,
        DistilBertModel,
        RobertaConfig,
        RobertaModel,
    )

    from diptych.encoders.pretrained import quiet

    size = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    size |= {"intermediate_size": 24, "max_position_embeddings": 80} | changes
    with quiet():
        if kind == "bert":
            BertModel(BertConfig(**size)).save_pretrained(folder)
        elif kind == "roberta":
            RobertaModel(RobertaConfig(pad_token_id=0, **size)).save_pretrained(folder)
        else:
            DistilBertModel(DistilBertConfig(vocab_size=50, dim=32, n_layers=1, n_heads=2)).save_pretrained(
                folder
            )
    return folder


def moved(encoder: TransformerText) -> TransformerText:
    """Biases and norms off their round starting values, in float64."""
    generator = torch.Generator().manual_seed(1)
    for p in encoder.parameters():
        p.data += 0.05 * torch.randn(p.shape, generator=generator)
    return encoder.double()


# ------------------------------------------------------------------------------------------------------- packing


def test_tokens_stand_end_to_end() -> None:
    features = ids(3, 1, 2, longest=4)
    packed = pack(features, multiple=4)
    assert isinstance(packed, PackedIds)
    assert packed.places.tolist() == [0, 1, 2, 4, 8, 9, 12, 12]  # 12 = B · W: nobody's
    assert packed.starts.tolist() == [0, 3, 4, 6]
    assert packed.values is features.values
    assert packed.mask is features.mask


def test_a_full_multiple_gets_no_rest() -> None:
    packed = pack(ids(4, 4), multiple=8)
    assert isinstance(packed, PackedIds)
    assert len(packed.places) == 8


@pytest.mark.parametrize(
    "features",
    [
        ids(2, LONGEST + 1),
        Features.whole(torch.zeros(2, 3, 4)),
        Features(torch.zeros(0, 3).long(), torch.ones(0, 3)),
    ],
    ids=["too long", "states", "no texts"],
)
def test_what_cannot_be_packed_stays_as_it_is(features: Features) -> None:
    assert pack(features) is features


def test_a_slice_of_rows_is_no_longer_packed() -> None:
    packed = pack(ids(3, 2, 5))
    assert isinstance(packed.map(torch.clone), PackedIds)
    assert isinstance(packed.to("cpu"), PackedIds)
    sliced = packed.map(lambda t: t[:2])
    assert type(sliced) is Features
    assert sliced.values.shape == (2, 5)
    assert type(packed.map(lambda t: t[:3])) is Features  # all rows, but not all places


# ------------------------------------------------------------------------------------------------------- attention


def oracle(qkv: Tensor, starts: list[int], heads: int) -> np.ndarray:
    """softmax(q·k / √width) v by loops over documents, heads and tokens, in float64."""
    q, k, v = (part.reshape(len(qkv), heads, -1) for part in np.split(qkv.double().numpy(), 3, axis=1))
    out = np.zeros_like(q)
    for first, end in itertools.pairwise(starts):
        for head in range(heads):
            for i in range(first, end):
                scores = np.array([q[i, head] @ k[j, head] for j in range(first, end)]) / np.sqrt(q.shape[2])
                weights = np.exp(scores - scores.max())
                out[i, head] = sum(
                    w * v[j, head] for w, j in zip(weights / weights.sum(), range(first, end), strict=True)
                )
    return out.reshape(len(qkv), -1)


def documents(heads: int = 2, width: int = 16, rest: int = 3) -> tuple[Tensor, Tensor]:
    starts = torch.tensor([0, 3, 4, 9], dtype=torch.int32)
    return torch.randn(9 + rest, 3 * heads * width, dtype=torch.float64), starts


def test_attention_stays_inside_a_document() -> None:
    qkv, starts = documents()
    seed = torch.zeros(1, dtype=torch.int64)
    found = attend(qkv, starts, seed, 2, 8, 0.0).numpy()
    np.testing.assert_allclose(found, oracle(qkv, starts.tolist(), 2), atol=1e-12)
    # the oracle notices a boundary that is off by one
    wrong = attend(qkv, torch.tensor([0, 3, 5, 9], dtype=torch.int32), seed, 2, 8, 0.0).numpy()
    assert np.abs(wrong - oracle(qkv, starts.tolist(), 2)).max() > 1e-3


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_gradients_of_attention(dropout: float) -> None:
    qkv, starts = documents(heads=1, width=4)
    seed = torch.tensor([7])
    assert torch.autograd.gradcheck(lambda x: attend(x, starts, seed, 1, 8, dropout), qkv.requires_grad_())
    torch.library.opcheck(attend, (qkv, starts, seed, 1, 8, dropout))


def test_dropout_keeps_the_mean_and_follows_its_seed() -> None:
    qkv, starts = documents(width=4)
    seeds = [torch.tensor([s]) for s in range(400)]
    drawn = torch.stack([attend(qkv, starts, seed, 2, 8, 0.3) for seed in seeds])
    assert torch.equal(drawn[3], attend(qkv, starts, seeds[3], 2, 8, 0.3))
    plain = attend(qkv, starts, seeds[0], 2, 8, 0.0)
    error = (drawn.mean(0) - plain).abs() / (drawn.std(0) / len(seeds) ** 0.5 + 1e-9)
    assert error.max() < 5
    assert not torch.equal(drawn[0], drawn[1])


# ------------------------------------------------------------------------------------------------------- encoder


@pytest.mark.parametrize("kind", ["bert", "roberta"])
@pytest.mark.parametrize("projection", [True, False])
def test_packed_states_are_the_padded_ones(kind: str, projection: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    encoder = moved(TransformerText(text_folder(tmp_path, kind), dim=8, projection=projection)).eval()
    assert encoder.can_pack
    texts = ids(5, 2, 11, 1, 7, longest=12)
    results = []
    for inputs in (texts, pack(texts)):
        encoder.zero_grad()
        out = encoder(inputs)
        values = out.values * out.mask[..., None]
        (values * torch.arange(values.numel()).view_as(values).sin()).sum().backward()
        gradients = {n: p.grad for n, p in encoder.named_parameters() if p.grad is not None}
        results.append((values.detach(), {n: copy.deepcopy(g) for n, g in gradients.items()}))
    (padded, of_padded), (packed, of_packed) = results
    torch.testing.assert_close(packed, padded, atol=1e-10, rtol=1e-8)
    for name in of_padded.keys() | of_packed.keys():
        torch.testing.assert_close(of_packed[name], of_padded[name], atol=1e-8, rtol=1e-6, msg=name)


def test_packed_texts_move_under_dropout(tmp_path: Path) -> None:
    encoder = TransformerText(text_folder(tmp_path, "bert"), dim=8).train()
    texts = pack(ids(5, 9))
    assert not torch.equal(encoder(texts).values, encoder(texts).values)
    encoder.let_train(False)
    assert torch.equal(encoder(texts).values, encoder(texts).values)


@pytest.mark.parametrize(("kind", "changes"), [("distilbert", {}), ("bert", {"hidden_size": 16})])
def test_other_models_read_packed_texts_padded(kind: str, changes: dict[str, int], tmp_path: Path) -> None:
    encoder = TransformerText(text_folder(tmp_path, kind, **changes), dim=8).eval()
    texts = ids(5, 9)
    assert not encoder.can_pack
    assert torch.equal(encoder(pack(texts)).values, encoder(texts).values)


def test_an_adapter_is_never_left_out(tmp_path: Path) -> None:
    class Adapted(torch.nn.Linear):
        pass

    model = TransformerText(text_folder(tmp_path, "bert"), dim=8).model
    assert can_pack(model)
    model.encoder.layer[1].attention.self.value = Adapted(32, 32)  # type: ignore[union-attr]
    assert not can_pack(model)


def test_a_cpu_pads(tmp_path: Path) -> None:
    assert not TransformerText(text_folder(tmp_path, "bert"), dim=8).packs(torch.device("cpu"))


# ------------------------------------------------------------------------------------------------------- GPU


@CUDA
@pytest.mark.parametrize("width", [16, 32, 64])
@pytest.mark.parametrize("longest", [9, 24, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_is_the_plain_form(width: int, longest: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    sizes = [1, longest, *torch.randint(1, longest + 1, (30,)).tolist()]
    starts = torch.tensor([0, *np.cumsum(sizes)], dtype=torch.int32)
    qkv = torch.randn(-(-sum(sizes) // 128) * 128, 3 * 2 * width).to(dtype)
    weight = torch.randn(len(qkv), 2 * width).to(dtype)
    seed = torch.tensor([3])
    found = []
    for device, kind in (("cpu", torch.float64), ("cuda", dtype)):
        x = qkv.to(device, kind).requires_grad_()
        out = attend(x, starts.to(device), seed.to(device), 2, longest, 0.0)
        out.backward(weight.to(device, kind))
        found.append((out.detach().cpu().double(), x.grad.cpu().double()))
    for exact, close in zip(*found, strict=True):
        error = (close - exact).norm() / exact.norm()
        assert error < (1e-5 if dtype is torch.float32 else 1e-2), error


@CUDA
def test_dropout_of_the_kernel() -> None:
    qkv, starts = documents(width=32, rest=119)
    qkv, starts = qkv.float().cuda(), starts.cuda()
    seeds = torch.arange(400, device="cuda")[:, None]
    drawn = torch.stack([attend(qkv, starts, seed, 2, 8, 0.3) for seed in seeds])
    plain = attend(qkv, starts, seeds[0], 2, 8, 0.0)
    error = (drawn.mean(0) - plain).abs() / (drawn.std(0) / len(seeds) ** 0.5 + 1e-6)
    assert error.max() < 5
    assert not drawn[:, 9:].any()
    x = qkv.clone().requires_grad_()
    weight, step = torch.randn_like(plain), 1e-2 * torch.randn_like(qkv)
    attend(x, starts, seeds[5], 2, 8, 0.3).backward(weight)
    there, back = (attend(qkv + s * step, starts, seeds[5], 2, 8, 0.3) for s in (1, -1))
    expected = ((there - back) * weight).double().sum() / 2
    assert x.grad is not None
    assert abs(float((x.grad * step).double().sum() - expected)) < 1e-3 * abs(float(expected)) + 1e-3
