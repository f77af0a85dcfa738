"""The twin's arithmetic, the queue's bookkeeping, and M-DCL against a float64 loop."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from coder_oracles import diversity_loop, made, positive_loop
from pairs import batch_of
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from diptych.errors import SettingsError
from diptych.model.twin import Twin, bare
from diptych.objectives.combine import Sum
from diptych.objectives.contrast import Contrast, CoupledQueue
from diptych.objectives.diversity import DiversityContrast, Enqueue, MomentumContrast
from diptych.objectives.objective import after_step
from diptych.ops import unit
from diptych.types import Batch, Embeddings, Features


class Small(nn.Module):
    """A stand-in retriever: a frozen backbone, batch norm, a GRU, an input not to be copied, a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(4, 4).requires_grad_(False)
        self.image = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
        self.text = nn.GRU(4, 3, batch_first=True)
        self.text_input = {"words": ["a"]}
        self.branches = nn.ModuleDict({"concept": nn.Linear(3, 3)})

    def forward(self, batch: Batch) -> Embeddings:
        assert isinstance(batch.images, Tensor)
        image = unit(self.image(self.backbone(batch.images)).float())
        text = unit(self.text(batch.texts.values)[0][:, -1].float())
        branches = {name: Embeddings(b(image), b(text)) for name, b in self.branches.items()}
        return Embeddings(image, text, views=branches)


def inputs(b: int = 5, seed: int = 0) -> Batch:
    g = torch.Generator().manual_seed(seed)
    words = Features.whole(torch.randn(b, 2, 4, generator=g))
    return Batch(torch.randn(b, 4, generator=g), words, torch.arange(b), torch.arange(b))


def test_twin_starts_equal_and_takes_no_gradient() -> None:
    torch.manual_seed(0)
    model, batch = Small().eval(), inputs()
    twin = Twin(model, precision="same")
    seen = twin(batch)
    torch.testing.assert_close(seen.image, model(batch).image)
    torch.testing.assert_close(seen.text, model(batch).text)
    assert not seen.image.requires_grad
    assert not any(p.requires_grad for p in twin.parameters())
    assert not seen.views


def test_twin_moves_by_momentum_and_copies_buffers() -> None:
    torch.manual_seed(0)
    model, m = Small(), 0.9
    twin = Twin(model, m)
    before = {n: p.clone() for n, p in twin.retriever.named_parameters()}
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn_like(p))
    model.train()(inputs())  # moves the running statistics
    for _ in range(3):
        twin.update(model)
    online = dict(model.named_parameters())
    for name, p in twin.retriever.named_parameters():
        expected = (
            before[name] if name.startswith("backbone") else m**3 * before[name] + (1 - m**3) * online[name]
        )
        torch.testing.assert_close(p, expected)
    assert torch.equal(twin.retriever.image[1].running_mean, model.image[1].running_mean)
    assert int(twin.retriever.image[1].num_batches_tracked) == 1


def test_twin_encodes_with_its_own_weights_after_an_update() -> None:
    torch.manual_seed(0)
    model, batch = Small().eval(), inputs()
    twin = Twin(model, 0.0, precision="same")
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3) if p.requires_grad else None
    assert not torch.allclose(twin(batch).text, model(batch).text)
    twin.update(model)  # momentum 0: the twin is the retriever
    torch.testing.assert_close(twin(batch).text, model(batch).text)
    torch.testing.assert_close(twin(batch).image, model(batch).image)


def test_twin_stays_in_evaluation_mode() -> None:
    twin = Twin(Small().train()).train()
    assert not any(module.training for module in twin.modules())
    batch = inputs()
    assert torch.equal(twin(batch).image, twin(batch).image)  # no dropout
    assert int(twin.retriever.image[1].num_batches_tracked) == 0


def test_frozen_weights_and_inputs_are_shared() -> None:
    model = Small()
    twin = Twin(model)
    assert twin.retriever.backbone.weight is model.backbone.weight
    assert twin.retriever.text_input is model.text_input
    assert twin.retriever.image[0].weight is not model.image[0].weight
    assert not any("backbone" in name or "branches" in name for name in twin.state_dict())
    assert any("running_mean" in name for name in twin.state_dict())


def test_a_weight_that_thaws_gets_its_own_copy() -> None:
    model, batch = Small().eval(), inputs()
    twin = Twin(model, 0.5)
    old = model.backbone.weight.clone()
    model.backbone.requires_grad_(True)
    twin.update(model)
    with torch.no_grad():
        model.backbone.weight.add_(1.0)
    twin.update(model)
    torch.testing.assert_close(twin.retriever.backbone.weight, old + 0.5)
    assert "retriever.backbone.weight" in twin.state_dict()
    fresh = Twin(Small().eval())  # resumed before the thaw happened again
    fresh.load_state_dict(twin.state_dict(), strict=True)
    torch.testing.assert_close(fresh(batch).image, twin(batch).image)


def test_twin_state_round_trip_through_safetensors() -> None:
    torch.manual_seed(0)
    model, batch = Small().eval(), inputs()
    twin = Twin(model, 0.7)
    with torch.no_grad():
        model.image[0].weight.add_(1.0)
    twin.update(model)
    other = Twin(model, 0.7)
    assert not torch.equal(other(batch).image, twin(batch).image)
    other.load_state_dict(load(save(twin.state_dict())), strict=True)
    assert torch.equal(other(batch).image, twin(batch).image)
    other.update(model)
    twin.update(model)
    assert torch.equal(other(batch).image, twin(batch).image)
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict({}, strict=True)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # raised by torch on itself
def test_twin_of_a_compiled_retriever() -> None:
    model = Small()
    compiled = torch.compile(model)  # nothing is compiled until it is called
    assert bare(compiled) is model
    twin = Twin(compiled)
    assert type(twin.retriever) is Small
    twin.update(compiled)


def test_momentum_out_of_range() -> None:
    with pytest.raises(SettingsError, match=r"1\.5"):
        Twin(Small(), 1.5)


# --- queue


def rows(n: int, first: int) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.arange(first, first + n)
    return ids[:, None].float().expand(n, 2), -ids[:, None].float().expand(n, 2), ids


@pytest.mark.parametrize("sizes", [[3, 3, 3, 3], [7], [1, 6, 5, 2], [4, 7, 7], [7, 1, 1]])
def test_queue_wraps_around(sizes: list[int]) -> None:
    queue, first = CoupledQueue(7, 2), 0
    slots = [-1] * 7  # the same, one row at a time
    for size in sizes:
        queue.push(*rows(size, first))
        for i in range(first, first + size):
            slots[i % 7] = i
        first += size
    assert queue.ids.tolist() == slots
    assert queue.image[:, 0].tolist() == [max(i, 0) for i in slots]
    assert queue.text[:, 1].tolist() == [-max(i, 0) for i in slots]
    assert int(queue.pointer) == first % 7
    assert int(queue.count) == min(first, 7)
    assert queue.valid.tolist() == [i >= 0 for i in slots]
    assert bool(queue.ready) == (first >= 7)


def test_queue_smaller_than_the_batch() -> None:
    with pytest.raises(SettingsError, match=r"\b4\b.*\b5\b.*--queue_size"):
        CoupledQueue(4, 2).push(*rows(5, 0))


def test_queue_state_round_trip_keeps_the_pointer() -> None:
    queue, other = CoupledQueue(5, 2), CoupledQueue(5, 2)
    queue.push(*rows(4, 0))
    other.load_state_dict(load(save(queue.state_dict())), strict=True)
    for q in (queue, other):
        q.push(*rows(3, 4))
    assert all(
        torch.equal(a, b)
        for a, b in zip(queue.state_dict().values(), other.state_dict().values(), strict=True)
    )


def test_queue_bad_settings() -> None:
    with pytest.raises(SettingsError, match=r"\b0\b"):
        CoupledQueue(0, 2)
    with pytest.raises(SettingsError, match="soon"):
        CoupledQueue(2, 2, start="soon")  # type: ignore[arg-type]
    queue = CoupledQueue(2, 2)
    Enqueue(queue)
    with pytest.raises(SettingsError, match="queue"):
        MomentumContrast(queue)


# --- M-DCL


def mdcl_loop(
    e: Embeddings,
    t: Embeddings,
    ids: list[int],
    bank: Embeddings,
    bank_ids: list[int],
    c: Contrast,
    both: bool,
) -> float:
    """Eq. 6 by loops: anchors of the batch, positives the twin's keys, negatives filled rows of the bank."""
    total, n = 0.0, len(ids)
    for anchors, others, keys, bank_rows in (
        (e.image, e.text, t.text, bank.text),
        (e.text, e.image, t.image, bank.image),
    ):
        names = ids if c.mask_same_image else list(range(n))
        near = [[float(anchors[i] @ others[j]) for j in range(n) if names[i] != names[j]] for i in range(n)]
        kept = [[j for j in range(len(bank_ids)) if not c.mask_same_image or i != bank_ids[j]] for i in ids]
        far = [[float(anchors[i] @ bank_rows[j]) for j in kept[i]] for i in range(n)]
        div = diversity_loop(near, c.diversity, c.epsilon)
        if both:
            div = [(a + b) / 2 for a, b in zip(div, diversity_loop(far, c.diversity, c.epsilon), strict=True)]
        for i in range(n):
            inner = sum(math.exp((s - c.margin) / (c.temperature * div[i])) for s in far[i])
            scale = c.temperature if c.pos_scale == "mu" else float(c.pos_scale)
            pull = scale * positive_loop(float(anchors[i] @ keys[i]), c.positive)
            total += (c.temperature * math.log(1 + inner) - pull) / n
    return total


CASES = [
    Contrast(),
    Contrast(diversity="none"),
    Contrast(diversity="entropy"),
    Contrast(diversity="std_reversed", mask_same_image=False),
    Contrast(diversity="std_supplement", pos_scale="mu", positive="raw"),
    Contrast(temperature=0.03, margin=0.1, epsilon=0.4, positive="relu"),
]
BANK_IDS = [3, 1, 9, 0, 1, 2, 8]


def momentum_case(
    ids: list[int], filled: int, contrast: Contrast, **kwargs: object
) -> tuple[MomentumContrast, Embeddings, Batch, Embeddings]:
    e, t, bank = made(len(ids), shift=0.3), made(len(ids), seed=1, shift=0.3), made(7, seed=2)
    queue = CoupledQueue(7, 6, start="now").double()
    objective = MomentumContrast(queue, contrast, **kwargs)  # type: ignore[arg-type]
    if filled:
        queue.push(bank.image[:filled], bank.text[:filled], torch.tensor(BANK_IDS[:filled]))
    return objective, Embeddings(e.image, e.text, views={"twin": t}), batch_of(ids), bank


@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize("filled", [0, 1, 4, 7])
@pytest.mark.parametrize("ids", [[0], [0, 1, 2, 3], [1, 1, 5, 1, 0]])
@pytest.mark.parametrize("contrast", CASES)
def test_momentum_contrast_equals_the_equation(
    contrast: Contrast, ids: list[int], filled: int, both: bool
) -> None:
    objective, e, batch, bank = momentum_case(ids, filled, contrast, bank_diversity=both)
    assert "twin" in e.views
    held = Embeddings(bank.image[:filled], bank.text[:filled])
    # a queue that holds nothing does not count yet
    expected = mdcl_loop(e, e.views["twin"], ids, held, BANK_IDS[:filled], contrast, both) if filled else 0.0
    assert objective(e, batch)["momentum"].item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_the_oracle_notices_a_mutation() -> None:
    ids = [0, 1, 2, 3]
    objective, e, batch, bank = momentum_case(ids, 7, Contrast())
    assert "twin" in e.views
    found = objective(e, batch)["momentum"].item()
    wrong = [
        mdcl_loop(e, e, ids, bank, BANK_IDS, Contrast(), True),  # online positives
        mdcl_loop(
            e, e.views["twin"], ids, Embeddings(bank.text, bank.image), BANK_IDS, Contrast(), True
        ),  # own side
        mdcl_loop(e, e.views["twin"], ids, bank, [-1] * 7, Contrast(), True),  # same image not masked
        mdcl_loop(e, e.views["twin"], ids, bank, BANK_IDS, Contrast(), False),
    ]
    assert all(abs(found - w) > 1e-4 for w in wrong)


@pytest.mark.parametrize("filled", [0, 3, 7])
@pytest.mark.parametrize("contrast", CASES)
def test_momentum_gradcheck(contrast: Contrast, filled: int) -> None:
    # smooth enough for finite differences; a stopped gradient is looked at in test_diversity.py
    contrast = replace(contrast, stop_gradient=False, temperature=max(0.3, contrast.temperature))
    objective, e, batch, _ = momentum_case([0, 1, 1], filled, contrast)

    def loss(image: Tensor, text: Tensor) -> Tensor:
        return objective(Embeddings(image, text, views={"twin": e.views["twin"]}), batch)["momentum"]

    assert torch.autograd.gradcheck(loss, (e.image.clone().requires_grad_(), e.text.clone().requires_grad_()))


def test_the_term_waits_for_a_full_queue_and_then_uses_old_rows() -> None:
    torch.manual_seed(0)
    queue = CoupledQueue(6, 4)
    objective = Sum({
        "dcl": (DiversityContrast(bank=queue), 3.0),
        "m_dcl": (MomentumContrast(queue), 1.0),
    })  # fmt: skip
    seen = []
    for step in range(4):
        draw = lambda: unit(torch.randn(3, 4))  # noqa: E731
        e = Embeddings(
            draw().requires_grad_(), draw().requires_grad_(), views={"twin": Embeddings(draw(), draw())}
        )
        batch = batch_of([10 * step + i for i in range(3)])
        before = queue.image.clone()
        terms = objective(e, batch)
        assert torch.equal(objective(e, batch)["m_dcl"], terms["m_dcl"])
        assert torch.equal(queue.image, before)  # forward is pure
        torch.stack(list(terms.values())).sum().backward()
        assert e.image.grad is not None
        assert e.image.grad.isfinite().all()
        with torch.no_grad():
            after_step(objective, e, batch)
        assert not torch.equal(queue.image, before)
        seen.append(terms["m_dcl"].item())
    assert seen[:2] == [0.0, 0.0]
    assert seen[2] != 0.0
    assert seen[3] != 0.0
    names = list(objective.state_dict())
    assert sorted(names) == sorted(
        f"members.m_dcl.queue.{n}" for n in ("image", "text", "ids", "pointer", "count")
    )


def test_a_missing_twin_is_named() -> None:
    objective, e, batch, _ = momentum_case([0, 1], 3, Contrast())
    with pytest.raises(SettingsError, match="Twin"):
        objective(Embeddings(e.image, e.text), batch)


def test_keys_in_bf16_are_float32_near_the_exact_ones_and_same_means_exact() -> None:
    torch.manual_seed(0)
    model, batch = Small().eval(), inputs()
    exact = model(batch)
    same = Twin(model, precision="same")(batch)
    assert torch.equal(same.image, exact.image)
    keys = Twin(model, precision="bf16")(batch)
    assert keys.image.dtype == keys.text.dtype == torch.float32
    assert not torch.equal(keys.image, exact.image)
    assert (keys.image * exact.image).sum(dim=1).min() > 0.999
    assert not torch.is_autocast_enabled("cpu")


def test_keys_in_bf16_turn_each_weight_once_however_many_words() -> None:
    class Casts(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._to_copy.default and args[0].data_ptr() in weights:
                self.count += 1
            return func(*args, **(kwargs or {}))

    torch.manual_seed(0)
    twin, batch = Twin(Small(), precision="bf16"), inputs()
    weights = {p.data_ptr() for p in twin.retriever.text.parameters()}
    for words in (2, 9):
        values = torch.randn(5, words, 4)
        with Casts() as casts:
            twin(replace(batch, texts=Features.whole(values)))
        assert casts.count == 4  # two weights and two biases
    assert not any(p.requires_grad for p in twin.parameters())


@pytest.mark.parametrize("native", [True, False])
def test_auto_computes_keys_in_bf16_where_the_device_can(
    native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diptych.model.twin.computes_bf16", lambda device: native)
    torch.manual_seed(0)
    model, batch = Small().eval(), inputs()
    explicit = Twin(model, precision="bf16" if native else "same")(batch)
    assert torch.equal(Twin(model)(batch).image, explicit.image)


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(SettingsError, match="'fp8'"):
        Twin(Small(), precision="fp8")  # type: ignore[arg-type]
