"""The parts of label-wise retrieval: shared blocks, masking, label heads, and the views the losses read."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from diptych.aggregators.labels import ClassScores, CommonLayer, CommonSpace, LabelHead
from diptych.branches.labels import ContextPrediction, FrontView, LabelView, token_losses
from diptych.data.labels import Labels
from diptych.encoders.bigru import BiGRU
from diptych.encoders.cnn import PrecomputedGrid
from diptych.encoders.shared import SharedBlocks, SharingEncoder, TokenStates
from diptych.errors import DataError, SettingsError
from diptych.parts import describe, rebuild
from diptych.types import Batch, Embeddings, Features

DIM, WORDS, MASK = 8, 12, 11
SPECIAL = (0, 1, 2, 3)


def blocks(depth: int = 2, dropout: float = 0.0) -> SharedBlocks:
    return SharedBlocks(DIM, depth=depth, heads=2, feedforward=16, dropout=dropout)


def image_side(rate: float = 0.0, shared: SharedBlocks | None = None) -> SharingEncoder:
    return SharingEncoder(PrecomputedGrid(5, DIM, drop=0.0), shared or blocks(), mask_rate=rate)


def text_side(rate: float = 0.0, shared: SharedBlocks | None = None) -> SharingEncoder:
    front = BiGRU(WORDS, 6, DIM)
    return SharingEncoder(front, shared or blocks(), mask_rate=rate, mask_id=MASK, untouched=SPECIAL)


def regions(sizes: list[int], seed: int = 0) -> Features:
    made = torch.Generator().manual_seed(seed)
    mask = torch.arange(max(sizes)) < torch.tensor(sizes)[:, None]
    values = torch.randn(len(sizes), max(sizes), 5, generator=made)
    return Features(values.masked_fill(~mask[..., None], torch.nan), mask)


def words(sizes: list[int], seed: int = 0) -> Features:
    made = torch.Generator().manual_seed(seed)
    mask = torch.arange(max(sizes)) < torch.tensor(sizes)[:, None]
    ids = torch.randint(4, MASK, mask.shape, generator=made)
    ids[:, 0] = 1
    return Features(ids.masked_fill(~mask, 0), mask)


def slow_block(block, tokens: list[list[float]], normed=None) -> list[list[float]]:
    """One pre-norm block, token by token, head by head; ``normed`` takes the place of LayerNorm."""
    w = {name: value.double().tolist() for name, value in block.state_dict().items()}

    def linear(name: str, x: list[float]) -> list[float]:
        return [sum(a * b for a, b in zip(row, x, strict=True)) + bias for row, bias in
                zip(w[f"{name}.weight"], w[f"{name}.bias"], strict=True)]  # fmt: skip

    def norm(name: str, x: list[float]) -> list[float]:
        if normed is not None:
            return normed(x, w[f"{name}.weight"], w[f"{name}.bias"])
        mean = sum(x) / len(x)
        spread = math.sqrt(sum((a - mean) ** 2 for a in x) / len(x) + 1e-5)
        scaled = zip(x, w[f"{name}.weight"], w[f"{name}.bias"], strict=True)
        return [(a - mean) / spread * weight + bias for a, weight, bias in scaled]

    seen = [norm("before", x) for x in tokens]
    q, k, v = ([linear(name, x) for x in seen] for name in ("query", "key", "value"))
    size = len(q[0]) // block.heads
    out = []
    for i in range(len(tokens)):
        mixed: list[float] = []
        for head in range(block.heads):
            part = slice(head * size, (head + 1) * size)
            scores = [
                sum(a * b for a, b in zip(q[i][part], key[part], strict=True)) / math.sqrt(size) for key in k
            ]
            largest = max(scores)
            weights = [math.exp(s - largest) for s in scores]
            mixed += [
                sum(weight * value[part][c] for weight, value in zip(weights, v, strict=True)) / sum(weights)
                for c in range(size)
            ]
        h = [a + b for a, b in zip(tokens[i], linear("out", mixed), strict=True)]
        inner = [max(0.0, a) for a in linear("first", norm("between", h))]
        out.append([a + b for a, b in zip(h, linear("second", inner), strict=True)])
    return out


@pytest.mark.parametrize("size", [1, 3, 5])
def test_the_blocks_are_pre_norm_with_a_final_norm_and_relu(size):
    torch.manual_seed(size)
    shared = blocks().double().eval()
    for weight in shared.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    tokens = torch.randn(1, size, DIM, dtype=torch.float64)
    found = shared(Features.whole(tokens)).values[0]
    expected = tokens[0].tolist()
    for block in shared.blocks:
        expected = slow_block(block, expected)
    final = torch.nn.functional.layer_norm(
        torch.tensor(expected, dtype=torch.float64), (DIM,), shared.norm.weight, shared.norm.bias
    )
    assert torch.allclose(found, final.relu())
    assert not torch.allclose(found, final)  # without the ReLU
    wrong = tokens[0].tolist()
    for block in reversed(shared.blocks):
        wrong = slow_block(block, wrong)
    assert not torch.allclose(found, torch.tensor(wrong, dtype=torch.float64).relu())


@pytest.mark.parametrize("size", [1, 3, 5])
def test_the_authors_form_is_a_loop_from_their_description(size):
    """Tokens are halved; LN(x) = a (x − mean) / (std + 1e-6) + b with the unbiased deviation, also at the end."""
    torch.manual_seed(size)
    shared = SharedBlocks(DIM, depth=2, heads=2, feedforward=16, dropout=0.0, authors=True).double().eval()
    for weight in shared.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    tokens = torch.randn(1, size, DIM, dtype=torch.float64)
    found = shared(Features.whole(tokens)).values[0]

    def slow(halved: bool, unbiased: bool) -> Tensor:
        def norm(x: list[float], weight: list[float], bias: list[float]) -> list[float]:
            mean = sum(x) / len(x)
            square = sum((a - mean) ** 2 for a in x) / (len(x) - 1 if unbiased else len(x))
            spread = math.sqrt(square) + 1e-6
            return [w * (a - mean) / spread + b for a, w, b in zip(x, weight, bias, strict=True)]

        x = [[a / 2 if halved else a for a in token] for token in tokens[0].tolist()]
        for block in shared.blocks:
            x = slow_block(block, x, norm)
        final = [norm(token, shared.norm.weight.tolist(), shared.norm.bias.tolist()) for token in x]
        return torch.tensor(final, dtype=torch.float64).relu()

    assert (found - slow(True, True)).abs().max() < 1e-12
    for mutation in ((False, True), (True, False)):
        assert (found - slow(*mutation)).abs().max() > 1e-4


def test_a_model_saved_before_keeps_its_form():
    shared = blocks()
    described = describe(shared)
    assert "authors" not in described
    assert not rebuild(described).authors
    assert describe(SharedBlocks(DIM, 2, 2, 16, 0.0, authors=True))["authors"] is True


@pytest.mark.parametrize("side", ["image", "text"])
def test_padding_never_changes_an_output(side):
    torch.manual_seed(0)
    encoder = (image_side() if side == "image" else text_side()).eval()
    head = LabelHead(DIM, 3).eval()
    both = regions([4, 2]) if side == "image" else words([4, 2])
    states = encoder(both)
    short = Features(both.values[1:, :2], both.mask[1:, :2])
    alone = encoder(short)
    assert torch.allclose(states.values[1, :2], alone.values[0], atol=1e-6)
    assert torch.allclose(states.front[1], alone.front[0], atol=1e-6)
    assert torch.allclose(head(states)[1], head(alone)[0], atol=1e-6)
    assert torch.isfinite(head(states)).all()
    if side == "image":
        filled = Features(both.values.nan_to_num(1e4), both.mask)
        assert torch.equal(head(encoder(filled)), head(states))


def test_one_set_of_blocks_reads_both_sides():
    shared = blocks()
    image, text = image_side(shared=shared), text_side(shared=shared)
    assert image.blocks is text.blocks
    assert {id(p) for p in image.blocks.parameters()} == {id(p) for p in text.blocks.parameters()}


def masked(encoder: SharingEncoder, inputs: Features, seed: int = 3) -> TokenStates:
    torch.manual_seed(seed)
    return encoder.train()(inputs)


class LeakyText(SharingEncoder):
    """The mutation: words are blanked behind the BiGRU, whose other states have read them."""

    def forward(self, inputs):
        features = self.front(inputs)
        chosen = self._choose(inputs.mask & (inputs.values > 3))
        return self._encode(
            Features(features.values.masked_fill(chosen[..., None], 0), features.mask), chosen, inputs.values
        )


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_masked_words_never_leak(dropout):
    torch.manual_seed(1)
    inputs = words([7, 5, 7, 3])
    for kind, leaks in ((SharingEncoder, False), (LeakyText, True)):
        encoder = kind(BiGRU(WORDS, 6, DIM), blocks(dropout=dropout), 0.4, MASK, SPECIAL)
        states = masked(encoder, inputs)
        assert states.chosen is not None
        assert states.chosen.any()
        other = Features(inputs.values.masked_fill(states.chosen, 5), inputs.mask)
        again = masked(encoder, other)
        assert torch.equal(again.chosen, states.chosen)
        same = torch.equal(again.values, states.values) and torch.equal(again.front, states.front)
        assert same is not leaks


class LeakyImage(SharingEncoder):
    """The mutation: selected regions are not blanked, as in the published code."""

    def forward(self, inputs):
        features = self.front(inputs)
        return self._encode(features, self._choose(features.mask), None)


def test_masked_regions_never_leak():
    torch.manual_seed(1)
    inputs = regions([6, 4, 6])
    for kind, leaks in ((SharingEncoder, False), (LeakyImage, True)):
        encoder = kind(PrecomputedGrid(5, DIM, drop=0.0), blocks(), 0.4)
        states = masked(encoder, inputs)
        assert states.chosen is not None
        assert states.chosen.any()
        other = Features(inputs.values.masked_fill(states.chosen[..., None], 9.0), inputs.mask)
        again = masked(encoder, other)
        same = torch.equal(again.values, states.values) and torch.equal(again.front, states.front)
        assert same is not leaks


def test_masking_chooses_the_right_share_and_leaves_specials_alone():
    encoder = text_side(0.15)
    inputs = words([40] * 300)
    states = masked(encoder, inputs)
    able = inputs.mask & (inputs.values > 3)
    share = (states.chosen & able).sum() / able.sum()
    assert 0.13 < float(share) < 0.17
    assert not (states.chosen & ~able).any()
    assert torch.equal(states.words, inputs.values)
    every = masked(text_side(0.9), words([2] * 50))  # one word each beside the start
    assert not every.chosen.any()
    assert encoder.eval()(inputs).chosen is None
    assert masked(text_side(0.0), inputs).chosen is None
    assert image_side(0.0).blank is None


def slow_head(head: LabelHead, tokens: list[list[float]]) -> list[float]:
    weight, bias = head.linear.weight.double().tolist(), head.linear.bias.double().tolist()
    total = [0.0] * len(bias)
    for h in tokens:
        q = [
            1 / (1 + math.exp(-sum(a * b for a, b in zip(row, h, strict=True)) - c))
            for row, c in zip(weight, bias, strict=True)
        ]
        length = math.sqrt(sum(x * x for x in q)) if head.unit_tokens else 1.0
        total = [t + x / length for t, x in zip(total, q, strict=True)]
    return [t / len(tokens) for t in total]


@pytest.mark.parametrize("unit_tokens", [True, False])
def test_the_label_head_is_the_mean_of_unit_sigmoids(unit_tokens):
    torch.manual_seed(0)
    head = LabelHead(DIM, 4, unit_tokens).double()
    torch.nn.init.normal_(head.linear.bias)
    sets = Features(
        torch.randn(3, 5, DIM, dtype=torch.float64), torch.arange(5) < torch.tensor([[5], [3], [1]])
    )
    found = head(sets)
    for row, size in enumerate((5, 3, 1)):
        tokens = sets.values[row, :size].tolist()
        assert found[row].tolist() == pytest.approx(slow_head(head, tokens), abs=1e-7)
    assert head.dim_of(DIM) == 4
    last = found[2].norm().item()
    assert (last == pytest.approx(1.0, abs=1e-6)) is unit_tokens
    with pytest.raises(SettingsError):
        LabelHead(DIM, 0)


def batch(images: Features, texts: Features, classes: Tensor | None) -> Batch:
    ids = torch.arange(len(texts.values))
    return Batch(images, texts, ids, ids, {} if classes is None else {"region_classes": classes})


def test_the_context_is_the_cross_entropy_of_what_stood_there():
    torch.manual_seed(2)
    image, text = image_side(0.4), text_side(0.4)
    inputs, texts = regions([6, 4, 6]), words([7, 5, 7])
    seen_image, seen_text = masked(image, inputs), masked(text, texts)
    view = ContextPrediction(DIM, WORDS, 9)
    classes = torch.randint(0, 9, inputs.mask.shape)
    classes[0] = -1  # no class known: never asked
    vector = torch.zeros(3, 4)
    seen = Embeddings(vector, vector, seen_image, seen_text)
    found = view(seen, batch(inputs, texts, classes))
    sides = (
        (found.image, seen_image, view.region, classes),
        (found.text, seen_text, view.word, texts.values),
    )
    for rows, states, head, target in sides:
        for row in range(3):
            total, count = 0.0, 0
            for place in range(states.values.shape[1]):
                if not states.chosen[row, place] or target[row, place] < 0:
                    continue
                logits = head(states.values[row, place]).double().tolist()
                total += math.log(sum(map(math.exp, logits))) - logits[int(target[row, place])]
                count += 1
            assert rows[row].tolist() == pytest.approx([total, count], abs=1e-4)
        known = states.chosen & (target >= 0)
        both = [token_losses(head, states, known, target, whole) for whole in (True, False)]
        assert torch.allclose(*both, atol=1e-5)
        assert torch.allclose(both[0], rows, atol=1e-5)
    assert found.image[0].tolist() == [0, 0]
    assert found.text[:, 1].sum() > 0
    with pytest.raises(DataError, match=r"region_classes.*\b0\b"):
        view(seen, batch(inputs, texts, None))
    image.eval()
    text.eval()
    quiet = view(Embeddings(vector, vector, image(inputs), text(texts)), batch(inputs, texts, None))
    assert quiet.image.tolist() == [[0.0, 0.0]] * 3
    assert view.text(vector, text(texts)).shape == (3, 2)
    with pytest.raises(SettingsError, match=r"\b0\b"):
        ContextPrediction(DIM, 0, 1)


def test_dscmr_shares_the_common_layer_and_the_classifier():
    common, classifier = CommonLayer(16, 6), CommonLayer(6, 3)
    image, text = CommonSpace(DIM, common, hidden=16), CommonSpace(DIM, common, hidden=16)
    scores = ClassScores(image, classifier), ClassScores(text, classifier)
    sets = Features(torch.randn(2, 3, DIM), torch.ones(2, 3, dtype=torch.bool))
    u = image(sets)
    expected = common.linear(torch.relu(image.own(sets.values.mean(1))))
    assert torch.allclose(u, expected)
    assert torch.allclose(scores[0](sets), classifier.linear(u))
    assert scores[0].space.common is scores[1].space.common
    assert image.dim_of(DIM) == 6
    assert scores[0].dim_of(DIM) == 3


def test_views_of_other_encoders_are_refused():
    plain = Features.whole(torch.zeros(1, 2, DIM))
    with pytest.raises(SettingsError):
        FrontView(DIM).image(torch.zeros(1, 2), plain)
    head = LabelHead(DIM, 2)
    view = LabelView(Labels(["a", "b"]), head, head)
    assert torch.allclose(view.image(torch.zeros(1, 2), plain), head(plain))
    assert view.thresholds.tolist() == [0.5, 0.5]


def test_sizes_that_do_not_fit_get_one_sentence():
    with pytest.raises(SettingsError, match=r"\b4\b"):
        SharingEncoder(PrecomputedGrid(5, 4), blocks())
    with pytest.raises(SettingsError, match=r"\b3\b"):
        SharedBlocks(8, heads=3)
    with pytest.raises(SettingsError, match=r"\b1\b"):
        SharedBlocks(8, depth=0, heads=2)
    with pytest.raises(SettingsError, match=r"mask_rate.*1\.0"):
        image_side(1.0)
