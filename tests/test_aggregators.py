"""Aggregators against float64 loops written from the papers' equations, and their properties."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from aggregator_oracles import oracle
from torch import Tensor, nn

from diptych import parts
from diptych.aggregators import (
    GPO,
    CosSinBiGRU,
    CosSinMLP,
    CosSinTransformer,
    First,
    GeM,
    Generator,
    IndexBiGRU,
    Interpolation,
    KMax,
    Last,
    Max,
    Mean,
    SortedRowBiGRU,
    gpo,
    sorting,
)
from diptych.errors import SettingsError
from diptych.types import Features

D = 5
MAKE: dict[str, Callable[[], nn.Module]] = {
    "mean": Mean,
    "max": Max,
    "kmax": lambda: KMax(3),
    "first": First,
    "last": Last,
    "gem": GeM,
    "gpo": GPO,
    "gpo_per_dimension": lambda: GPO(CosSinBiGRU(outputs=D)),
    "gpo_index": lambda: GPO(IndexBiGRU(ranks=16)),
    "gpo_mlp": lambda: GPO(CosSinMLP()),
    "gpo_transformer": lambda: GPO(CosSinTransformer()),
    "gpo_interpolation": lambda: GPO(Interpolation(pieces=4)),
    "gpo_data_dependent": lambda: GPO(SortedRowBiGRU(D)),
    "gpo_data_dependent_per_dimension": lambda: GPO(SortedRowBiGRU(D, outputs=D)),
}
GENERATORS: dict[str, Callable[[], Generator]] = {
    "bigru": CosSinBiGRU,
    "index": lambda: IndexBiGRU(ranks=16),
    "mlp": CosSinMLP,
    "transformer": CosSinTransformer,
    "interpolation": lambda: Interpolation(pieces=4),
}
names = pytest.mark.parametrize("name", MAKE)


def build(name: str, seed: int = 0) -> nn.Module:
    """An aggregator in float64 whose every parameter is random, biases and knots included."""
    torch.manual_seed(seed)
    module = MAKE[name]().double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def sets(batch: int = 6, length: int = 9, seed: int = 1) -> Features:
    """Float64 sets with holes in their masks: full, single and medium sizes."""
    torch.manual_seed(seed)
    mask = torch.rand(batch, length) < 0.6
    mask[0] = True
    mask[1] = False
    mask[1, 4] = True
    mask[2:, 0] = True
    return Features(torch.randn(batch, length, D, dtype=torch.float64), mask)


@names
def test_every_aggregator_follows_its_equation(name: str) -> None:
    module, features = build(name), sets()
    with torch.no_grad():
        torch.testing.assert_close(module(features), oracle(module, features), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("mutate", "temperature"),
    [
        (lambda m: None, 0.2),
        (lambda m: m.generator.gru.back.load_state_dict(m.generator.gru.ahead.state_dict()), 0.1),
        (lambda m: m.generator.head.weight.data.mul_(1.01), 0.1),
    ],
    ids=["temperature", "one direction used twice", "head"],
)
def test_the_oracle_notices_a_mutation(mutate: Callable[[nn.Module], None], temperature: float) -> None:
    module, features = build("gpo"), sets()
    expected = oracle(module, features, temperature)
    mutate(module)
    with torch.no_grad():
        assert (module(features) - expected).abs().max() > 1e-4


def test_a_wrong_start_of_the_backward_gru_is_noticed() -> None:
    module, features = build("gpo"), sets()
    whole = Features.whole(features.values)
    theta = module.coefficients(torch.tensor([9]), 9)[0, :, 0]
    # what a GRU that starts at the pad end would use for a smaller set: the coefficients of the full one, cut
    cut = theta[:4] / theta[:4].sum()
    assert (module.coefficients(torch.tensor([4]), 9)[0, :4, 0] - cut).abs().max() > 1e-3
    assert torch.isfinite(module(whole)).all()


def test_gpo_has_12704_parameters() -> None:
    assert sum(p.numel() for p in GPO().parameters()) == 12_704


# ---------------------------------------------------------------- properties


@names
def test_gradients(name: str) -> None:
    module, features = build(name), sets(batch=3, length=5)
    values = features.values.clone().requires_grad_()
    parameters = tuple(module.parameters())

    def forward(values: Tensor, *_: Tensor) -> Tensor:
        return module(Features(values, features.mask))

    assert torch.autograd.gradcheck(forward, (values, *parameters), fast_mode=True)


@names
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_padding_reaches_neither_output_nor_gradient(name: str, garbage: float) -> None:
    module, features = build(name), sets()
    expected = module(features)
    values = features.values.masked_fill(~features.mask[..., None], garbage).requires_grad_()
    out = module(Features(values, features.mask))
    out.square().sum().backward()
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    assert values.grad is not None
    assert (values.grad[~features.mask] == 0).all()
    assert torch.isfinite(values.grad).all()
    for parameter in module.parameters():
        assert parameter.grad is not None
        assert torch.isfinite(parameter.grad).all()


@names
def test_more_padding_changes_nothing(name: str) -> None:
    module, features = build(name), sets()
    more = Features(
        nn.functional.pad(features.values, (0, 0, 0, 3), value=7.0), nn.functional.pad(features.mask, (0, 3))
    )
    torch.testing.assert_close(module(more), module(features), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [n for n in MAKE if n not in ("first", "last")])
def test_order_of_elements_does_not_matter(name: str) -> None:
    module, features = build(name), sets()
    order = torch.randperm(9)
    shuffled = features.map(lambda t: t[:, order])
    torch.testing.assert_close(module(shuffled), module(features), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [n for n in MAKE if n != "gem"])
def test_a_set_of_one_pools_to_its_element(name: str) -> None:
    features = sets()
    torch.testing.assert_close(build(name)(features)[1], features.values[1, 4], rtol=1e-12, atol=0)


@names
def test_an_empty_set_pools_to_zeros(name: str) -> None:
    module, features = build(name), sets()
    features.mask[3] = False
    values = features.values.clone().requires_grad_()
    out = module(Features(values, features.mask))
    out.sum().backward()
    assert (out[3] == 0).all()
    assert (out[[0, 1, 2, 4]] != 0).all()
    assert values.grad is not None
    assert torch.isfinite(values.grad).all()
    assert (values.grad[3] == 0).all()


@names
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_features_are_pooled_in_float32(name: str, dtype: torch.dtype) -> None:
    module, features = build(name).float(), sets()
    half = Features(features.values.to(dtype), features.mask)
    out = module(half)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, module(Features(half.values.float(), half.mask)), rtol=1e-6, atol=1e-6)


def test_autocast_does_not_round_gpo() -> None:
    module, features = build("gpo").float(), sets()
    single = Features(features.values.float(), features.mask)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = module(single)
    torch.testing.assert_close(out, module(single), rtol=0, atol=0)


@pytest.mark.parametrize("name", [n for n in MAKE if n not in ("first", "last")])
def test_a_nan_among_the_valid_values_is_not_hidden(name: str) -> None:
    module, features = build(name), sets()
    features.values[0, 3, 2] = math.nan
    assert not torch.isfinite(module(features)[0, 2])


def test_ties_share_one_value() -> None:
    features = sets()
    tied = Features(features.values.round(), features.mask)
    for name in ("gpo", "kmax", "max"):
        module = build(name)
        torch.testing.assert_close(module(tied), oracle(module, tied), rtol=1e-9, atol=1e-12)


def test_kmax_runs_from_max_to_mean() -> None:
    features = sets()
    torch.testing.assert_close(KMax(1)(features), Max()(features))
    torch.testing.assert_close(KMax(99)(features), Mean()(features))


def test_gem_approaches_max_without_overflow() -> None:
    values = torch.tensor([[[1e3], [2e3], [5.0]]])
    pooled = GeM(p=200.0)(Features.whole(values))
    assert 0.99 * 2e3 < pooled.item() <= 2e3


@names
def test_parts_rebuild_themselves(name: str) -> None:
    module, features = build(name), sets()
    twin = parts.rebuild(parts.describe(module)).double()
    twin.load_state_dict(module.state_dict(), strict=True)
    torch.testing.assert_close(twin(features), module(features), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KMax(0), r"\b0\b"),
        (lambda: GeM(p=1.0), "p > 1"),
        (lambda: GPO(temperature=0.0), "temperature"),
        (lambda: Interpolation(pieces=0), r"\b0\b"),
        (lambda: CosSinTransformer(heads=5), r"\b5\b"),
        (lambda: GPO(IndexBiGRU(ranks=8)).double()(sets()), r"\b8\b.*\b9\b"),
    ],
)
def test_bad_settings_say_so(make: Callable[[], object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        make()


# ---------------------------------------------------------------- one row per distinct size


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("batch", [4, 12], ids=["fewer samples than ranks", "more samples than ranks"])
def test_recorded_programs_use_the_same_coefficients(
    name: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    module, sizes = GPO(GENERATORS[name]()).double(), torch.randint(1, 10, (batch,))
    present = module.coefficients(sizes, 9)
    monkeypatch.setattr(gpo, "_shapes_are_fixed", lambda tensor: True)
    monkeypatch.setattr(torch, "unique", None)  # would make the host wait
    assert gpo.every_size(sizes, 9) == (batch > 9)
    distinct, row = gpo.distinct_sizes(sizes)
    assert (distinct[row] == sizes).all()
    torch.testing.assert_close(module.coefficients(sizes, 9), present, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", GENERATORS)
def test_coefficients_depend_on_the_size_alone(name: str) -> None:
    torch.manual_seed(0)
    module = GPO(GENERATORS[name]()).double()
    for size, length in itertools.product((1, 2, 7), (7, 11)):
        theta = module.coefficients(torch.tensor([size]), length)[0, :, 0]
        alone = module.coefficients(torch.tensor([size]), size)[0, :, 0]
        torch.testing.assert_close(theta[:size], alone, rtol=1e-10, atol=1e-12)
        assert (theta[size:] == 0).all()
        assert theta.sum().item() == pytest.approx(1)


def test_the_generator_runs_once_per_distinct_size() -> None:
    asked = count_calls(module := build("gpo"))
    features = sets(batch=40)
    module(features)
    assert asked == [sorted(set(features.sizes.tolist()))]


def test_coefficients_are_remembered_in_inference_until_the_weights_change() -> None:
    asked = count_calls(module := build("gpo").eval())
    features = sets()

    def encode() -> Tensor:
        with torch.inference_mode():
            return module(features).clone()

    first = encode()
    torch.testing.assert_close(encode(), first, rtol=0, atol=0)
    assert len(asked) == 1
    with torch.no_grad():
        module.generator.head.weight.mul_(2)
    second = encode()
    assert len(asked) == 2
    assert (second - first).abs().max() > 1e-3
    torch.testing.assert_close(module(features), second)  # with gradients nothing is remembered
    assert len(asked) == 3
    module.eval()
    encode()
    assert len(asked) == 4
    torch.testing.assert_close(copy.deepcopy(module)(features), second)


def test_a_twin_that_moves_without_gradient_is_not_remembered() -> None:
    asked = count_calls(module := build("gpo").eval())
    with torch.no_grad():
        module(sets())
        module(sets())
    assert len(asked) == 2


def count_calls(module: nn.Module) -> list[list[int]]:
    """The sizes each call of the generator is asked for."""
    asked: list[list[int]] = []
    module.generator.register_forward_pre_hook(lambda _, inputs: asked.append(inputs[0].tolist()))
    return asked


# ---------------------------------------------------------------- the sort


def test_the_two_sorts_agree_in_value_and_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    features, results = sets(), []
    weights = torch.randn(6, D, 9, dtype=torch.float64)
    for compiling in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda compiling=compiling: compiling)
        values = features.values.clone().requires_grad_()
        ranked = sorting.sort_sets(Features(values, features.mask))
        (ranked * weights).sum().backward()
        results.append((ranked.detach(), values.grad))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("length", [1, 9, 24, 36, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_sorts_the_same(length: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    values = torch.randn(5, length, 70).to(dtype)
    values[0, 0, :3] = torch.tensor([torch.nan, torch.inf, -1e30])
    mask = torch.rand(5, length) > 0.3
    mask[:, 0], mask[1, 1:] = True, False
    weights, results = torch.randn(5, 70, length), []
    for device in ("cpu", "cuda"):
        own = values.clone().to(device).requires_grad_()
        ranked = sorting.sort_sets(Features(own, mask.to(device)))
        alone = sorting.sort_sets(Features(own.detach(), mask.to(device)))
        assert torch.equal(ranked.nan_to_num(9), alone.nan_to_num(9))
        ranked.backward(weights.to(device))
        assert own.grad is not None
        results.append((ranked.detach().cpu(), own.grad.cpu()))
    (a, of_a), (b, of_b) = results
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    same = of_a == of_b
    assert same.float().mean() > (
        0.999 if dtype is torch.float32 else 0.8
    )  # ties may take each other's place
    torch.testing.assert_close(of_a.float().sum(1), of_b.float().sum(1), rtol=1e-2, atol=0.1)


def test_threads_sort_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    values, mask = torch.randn(5, 3, 7), torch.ones(5, 3, dtype=torch.bool)
    alone = [sorting.sort_sets(Features(v, mask)) for v in (values, values.clone().requires_grad_())]
    monkeypatch.setattr(sorting, "WORTH_A_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for expected, v in zip(alone, (values, values.clone().requires_grad_()), strict=True):
        assert torch.equal(sorting.sort_sets(Features(v, mask)), expected)


def test_without_gradient_the_values_are_the_same() -> None:
    features = sets()
    features.values[0, 0, 0] = torch.nan
    plain = sorting.sort_sets(features)
    followed = sorting.sort_sets(Features(features.values.clone().requires_grad_(), features.mask))
    torch.testing.assert_close(plain, followed.detach(), rtol=0, atol=0, equal_nan=True)


def test_sorting_leaves_its_input_alone() -> None:
    for shape in ((2, 1, 4), (2, 4, 1), (1, 1, 1)):  # transposing these may not copy
        values = torch.randn(shape)
        before = values.clone()
        sorting.sort_sets(Features(values, torch.zeros(shape[:2], dtype=torch.bool)))
        assert (values == before).all()


@pytest.mark.filterwarnings("default:The .grad attribute")  # the compiler's own, where it resumes after a GRU
def test_gpo_survives_compilation() -> None:
    module, features = build("gpo"), sets()
    compiled = torch.compile(module, backend="eager")
    torch.testing.assert_close(compiled(features), module(features), rtol=1e-12, atol=1e-12)
