from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from encoding_help import ids, lengths, rebuilt, tiny_bert
from torch import Tensor, nn

from diptych.encoders.bigru import BiGRU, UniGRU
from diptych.encoders.cnn import Grid, PrecomputedGrid
from diptych.encoders.encoder import Backbone, drop_each, drop_per_image, drop_words
from diptych.encoders.lite0 import Lite0
from diptych.encoders.regions import MaskedBatchNorm, Regions
from diptych.encoders.transformer import TransformerText
from diptych.errors import DataError, SettingsError
from diptych.types import Features

SIZE = 64  # of the pictures in these tests


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bert(tmp_path_factory.mktemp("bert"))


# ----------------------------------------------------------------------------------------- size augmentation


def test_each_element_is_dropped_at_the_rate() -> None:
    torch.manual_seed(0)
    mask = lengths(*[36] * 4000)
    kept = drop_each(mask, 0.2).sum(1).double()
    assert abs(kept.mean() - 28.8) < 0.15
    assert abs(kept.var() - 36 * 0.2 * 0.8) < 0.5


@pytest.mark.parametrize("drop", [drop_each, drop_per_image])
def test_no_set_is_emptied_and_padding_stays_padding(drop) -> None:
    torch.manual_seed(0)
    mask = lengths(*([1, 2, 3] * 500), longest=5)
    kept = drop(mask, 0.99)
    assert (kept.sum(1) >= 1).all()
    assert not (kept & ~mask).any()
    assert torch.equal(drop(mask, 0.0), mask)


def test_word_states_are_dropped_as_often_as_words_are_deleted_and_never_the_specials() -> None:
    torch.manual_seed(0)
    mask = lengths(*([1, 2, 30] * 2000), longest=32)
    kept = drop_words(mask, 0.2)
    assert not (kept & ~mask).any()
    assert kept[:, 0].all()
    assert kept[2::3, 29].all()
    assert torch.equal(kept[0::3], mask[0::3])
    assert torch.equal(kept[1::3], mask[1::3])
    inner = kept[2::3, 1:29].double().mean()
    assert abs((1 - inner) - 0.08) < 0.003


def test_grid_cells_are_dropped_at_a_rate_of_the_image() -> None:
    torch.manual_seed(0)
    cells, rate = 2000, 0.2
    dropped = 1 - drop_per_image(lengths(*[cells] * 4000), rate).double().mean(1)
    whole = dropped == 0
    assert abs(whole.double().mean() - 0.2) < 0.02  # r ≤ 0.2 keeps every cell
    assert abs(dropped[~whole].mean() - 0.12) < 0.003  # else U(0.04, 0.2)
    assert dropped[~whole].min() > 0.02
    assert abs(dropped.max() - 0.2) < 0.04
    quarter = torch.quantile(dropped[~whole], torch.tensor([0.25, 0.75], dtype=torch.float64))
    assert torch.allclose(quarter, torch.tensor([0.08, 0.16], dtype=torch.float64), atol=0.005)


@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(SettingsError, match=f"drop={rate}"):
        Regions(4, 4, drop=rate)


# --------------------------------------------------------------------------------------------------- regions


@pytest.mark.parametrize("sizes", [(3, 1, 4), (5, 5), (1, 1)])
def test_masked_batch_norm_is_batch_norm_of_the_valid_rows(sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    plain = nn.BatchNorm1d(6).double()
    nn.init.normal_(plain.weight)
    nn.init.normal_(plain.bias)
    masked = MaskedBatchNorm(6).double()
    masked.load_state_dict(plain.state_dict(), strict=True)
    mask = lengths(*sizes)
    for _ in range(3):  # running statistics accumulate
        x = torch.randn(*mask.shape, 6, dtype=torch.float64) * 3 + 2
        one, two = x.clone().requires_grad_(), x.clone().requires_grad_()
        out, expected = masked(one, mask), plain(two[mask])
        assert torch.allclose(out[mask], expected, atol=1e-12)
        weights = torch.randn_like(expected)
        (out[mask] * weights).sum().backward()
        (expected * weights).sum().backward()
        assert torch.allclose(one.grad, two.grad, atol=1e-12)
    assert torch.allclose(masked.weight.grad, plain.weight.grad)
    for name, value in plain.state_dict().items():
        assert torch.allclose(masked.state_dict()[name], value, atol=1e-12), name
    masked.eval(), plain.eval()
    assert torch.allclose(masked(x, mask)[mask], plain(x[mask]), atol=1e-12)
    # the deliberate mistake: statistics over the padding too
    everything = MaskedBatchNorm(6).double()
    everything.load_state_dict(plain.state_dict())
    spoiled = x.masked_fill(~mask[..., None], 0.0)
    if not mask.all():
        masked.train()
        assert not torch.allclose(
            everything(spoiled, torch.ones_like(mask))[mask], masked(spoiled, mask)[mask]
        )


def test_regions_follow_the_equation() -> None:
    torch.manual_seed(0)
    encoder = Regions(input_dim=5, dim=4, drop=0.2, hidden=3).double().eval()
    encoder.norm.running_mean.normal_()
    encoder.norm.running_var.uniform_(0.5, 2)
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    out = encoder(Features.whole(x)).values
    state = {k: v.numpy() for k, v in encoder.state_dict().items()}
    for b in range(2):
        for r in range(3):
            row = x[b, r].numpy()
            inner = state["first.weight"] @ row + state["first.bias"]
            inner = (inner - state["norm.running_mean"]) / np.sqrt(state["norm.running_var"] + 1e-5)
            inner = np.maximum(inner * state["norm.weight"] + state["norm.bias"], 0)
            y = state["linear.weight"] @ row + state["linear.bias"]
            y = y + state["second.weight"] @ inner + state["second.bias"]
            assert np.allclose(out[b, r].detach().numpy(), y, atol=1e-12)


def test_dropped_regions_leave_the_statistics() -> None:
    torch.manual_seed(0)
    encoder = Regions(5, 4, drop=0.5, hidden=3).double()
    x = torch.randn(6, 10, 5, dtype=torch.float64)
    out = encoder(Features.whole(x))
    assert 0 < (~out.mask).sum() < 60
    hidden = encoder.first(x)[out.mask]
    assert torch.allclose(encoder.norm.running_mean, 0.1 * hidden.mean(0))
    assert torch.allclose(encoder.norm.running_var, 0.9 + 0.1 * hidden.var(0, unbiased=True))
    assert torch.equal(encoder.eval()(Features.whole(x)).mask, torch.ones(6, 10, dtype=torch.bool))


def test_regions_under_autocast() -> None:
    torch.manual_seed(0)
    encoder = Regions(16, 8, hidden=4)
    stored = Features.whole(torch.randn(4, 6, 16).half())
    with torch.autocast("cpu", torch.bfloat16):
        out = encoder(stored).values
    assert out.dtype == torch.bfloat16
    assert encoder.norm.running_mean.dtype == torch.float32
    out.float().sum().backward()
    assert encoder.linear.weight.grad.isfinite().all()
    assert encoder(stored).values.dtype == torch.float32


def test_regions_refuse_what_they_cannot_read() -> None:
    encoder = Regions(16, 8)
    with pytest.raises(DataError):
        encoder(torch.zeros(1, 3, 8, 8))
    with pytest.raises(DataError, match=r"\b12\b.*\b16\b"):
        encoder(Features.whole(torch.zeros(1, 2, 12)))


# ---------------------------------------------------------------------------------------------- sets as such


SET_ENCODERS = {
    "regions": lambda: Regions(12, 8, hidden=6),
    "stored grid": lambda: PrecomputedGrid(12, 8),
    "unit vectors": lambda: PrecomputedGrid(12, 8, unit_input=True),
    "cached grid": lambda: Grid(Toy(12), 8),
}


class Toy(Backbone):
    """A backbone with real BatchNorm and dropout, to watch their modes."""

    def __init__(self, channels: int = 12) -> None:
        super().__init__(size=8, mean=(0.0,) * 3, std=(1.0,) * 3)
        self.channels = channels
        self.conv = nn.Conv2d(3, channels, 4, stride=4)
        self.norm = nn.BatchNorm2d(channels)
        self.dropout = nn.Dropout(0.5)

    def forward(self, pixels: Tensor) -> Tensor:
        cells: Tensor = self.dropout(self.norm(self.conv(pixels)))
        return cells.flatten(2).transpose(1, 2)


@pytest.mark.parametrize("name", SET_ENCODERS)
def test_padding_never_reaches_a_result_or_a_gradient(name: str) -> None:
    torch.manual_seed(0)
    encoder = SET_ENCODERS[name]().double()
    encoder.drop = 0.0
    mask = lengths(3, 5, 1)
    values = torch.randn(3, 5, 12, dtype=torch.float64)
    results = []
    for fill in (0.0, torch.nan):
        twin = copy.deepcopy(encoder)
        out = twin(Features(torch.where(mask[..., None], values, fill), mask))
        assert torch.equal(out.mask, mask)
        out.values[mask].square().sum().backward()
        results.append([out.values[mask], *(p.grad for p in twin.parameters() if p.grad is not None)])
    assert len(results[0]) > 2
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)
    more = torch.cat([values, torch.randn(3, 2, 12, dtype=torch.float64)], 1)
    wide = encoder(Features(more, lengths(3, 5, 1, longest=7)))
    assert torch.allclose(wide.values[:, :5][mask], results[0][0], atol=1e-12)


@pytest.mark.parametrize("name", SET_ENCODERS)
def test_order_of_elements_is_carried_along(name: str) -> None:
    torch.manual_seed(0)
    encoder = SET_ENCODERS[name]().double()
    encoder.drop = 0.0
    x, order = torch.randn(2, 6, 12, dtype=torch.float64), torch.randperm(6)
    shuffled = encoder(Features.whole(x[:, order])).values
    assert torch.allclose(encoder(Features.whole(x)).values[:, order], shuffled, atol=1e-12)


def test_unit_input_gives_each_vector_unit_length() -> None:
    encoder = PrecomputedGrid(12, 8, drop=0.0, unit_input=True)
    x = torch.randn(2, 1, 12)
    expected = encoder.linear(x / x.norm(dim=-1, keepdim=True))
    assert torch.allclose(encoder(Features.whole(7 * x)).values, expected, atol=1e-6)
    with pytest.raises(DataError):
        encoder(torch.zeros(1, 3, 8, 8))


# ------------------------------------------------------------------------------------------------------ grid


def test_a_frozen_backbone_keeps_its_mode_and_a_trained_one_its_statistics() -> None:
    torch.manual_seed(0)
    grid = Grid(Toy(), 8).train()
    assert not grid.backbone.training
    assert not any(p.requires_grad for p in grid.backbone.parameters())
    grid.let_train(True)
    assert grid.backbone.dropout.training
    assert not grid.backbone.norm.training
    before = grid.backbone.norm.running_mean.clone()
    grid(torch.randn(4, 3, 8, 8)).values.sum().backward()
    assert torch.equal(before, grid.backbone.norm.running_mean)
    assert grid.backbone.norm.weight.grad is not None
    grid.eval()
    assert not grid.backbone.dropout.training
    grid.train().let_train(False)
    assert not grid.backbone.dropout.training
    assert Grid(Toy(), 8, trainable=True).backbone.conv.weight.requires_grad


def test_cells_computed_before_skip_the_backbone() -> None:
    torch.manual_seed(0)
    grid = Grid(Toy(), 8).eval()
    pixels = torch.randn(2, 3, 8, 8)
    cells = Features.whole(grid.backbone(pixels))
    assert torch.equal(grid(pixels).values, grid(cells).values)
    grid.train()
    assert grid(Features.whole(torch.randn(500, 4, 12))).mask.float().mean() < 1
    with pytest.raises(DataError, match=r"\b12\b"):
        grid(Features.whole(torch.zeros(1, 2, 5)))


def test_parameter_names_carry_the_parts_that_have_their_own_learning_rate(text_model: Path) -> None:
    assert {n.split(".")[0] for n, _ in Grid(Toy(), 8).named_parameters()} == {"backbone", "linear"}
    text = TransformerText(text_model, dim=8)
    assert {n.split(".")[0] for n, _ in text.named_parameters()} == {"model", "linear"}


# --------------------------------------------------------------------------------------------- every encoder


ENCODERS = {
    "regions": lambda text: (Regions(12, 8, hidden=6), Features.whole(torch.randn(4, 5, 12))),
    "stored grid": lambda text: (PrecomputedGrid(12, 8), Features.whole(torch.randn(4, 5, 12))),
    "lite0": lambda text: (Grid(Lite0(pretrained=False), 8, trainable=True), torch.randn(2, 3, SIZE, SIZE)),
    "bigru": lambda text: (BiGRU(50, 6, 8), ids(4, 6, 2)),
    "unigru": lambda text: (UniGRU(50, 6, 8), ids(4, 6, 2)),
    "transformer": lambda text: (TransformerText(text, 8), ids(4, 6, 2)),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_every_encoder_trains_rebuilds_and_is_deterministic_in_evaluation(
    name: str, text_model: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    encoder, inputs = ENCODERS[name](text_model)
    assert encoder.dim == 8
    out = encoder.train()(inputs)
    assert out.values.shape[-1] == 8
    (out.values * torch.randn_like(out.values))[out.mask].sum().backward()
    silent = [
        n for n, p in encoder.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())
    ]
    assert [n for n in silent if "key.bias" not in n] == []  # attention is invariant to the bias of its keys
    encoder.eval()
    twin = rebuilt(encoder, tmp_path)
    with torch.no_grad():
        assert torch.equal(encoder(inputs).values, encoder(inputs).values)
        assert torch.equal(twin(inputs).values, encoder(inputs).values)


@pytest.mark.parametrize("name", ["regions", "stored grid", "lite0"])
def test_encoders_compile_without_a_break(name: str, text_model: Path) -> None:
    torch.manual_seed(0)
    encoder, inputs = ENCODERS[name](text_model)
    encoder.drop = 0.0
    twin = copy.deepcopy(encoder)
    compiled = torch.compile(encoder, fullgraph=True, backend="eager")
    assert torch.allclose(compiled(inputs).values, twin(inputs).values, atol=1e-5)
    for one, two in zip(encoder.buffers(), twin.buffers(), strict=True):
        assert torch.allclose(one.float(), two.float())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_are_captured_in_a_cuda_graph(name: str, text_model: Path) -> None:
    torch.manual_seed(0)
    encoder, inputs = ENCODERS[name](text_model)
    inputs = inputs.to("cuda")
    expected = encoder.eval()(inputs.to("cpu")).values
    encoder = encoder.cuda()
    valid = inputs.mask if isinstance(inputs, Features) and name != "unigru" else ...
    with torch.no_grad():  # a graph kept alive from here would break the capture below
        found = encoder(inputs).values
    assert torch.allclose(found[valid].cpu(), expected[valid.cpu() if valid is not ... else ...], atol=2e-2)
    encoder.train()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            encoder(inputs).values.sum().backward()
    torch.cuda.current_stream().wait_stream(stream)
    encoder.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = encoder(inputs)
        out.values.float().square().sum().backward()
    masks = []
    for _ in range(2):
        graph.replay()
        masks.append(out.mask.clone())
        assert out.values[out.mask].isfinite().all()
    if name in ("regions", "stored grid"):
        assert masks[0].sum() <= inputs.mask.sum()
