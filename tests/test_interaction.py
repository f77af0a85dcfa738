"""SGR and SAF: tiles against a float64 loop over texts and pairs, padding, order, memory, statistics."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import sgraf_oracles as oracles
import torch
import torch.nn.functional as F
from torch import Tensor

from diptych.encoders.attended import SelfAttended, TextualSelfAttention, VisualSelfAttention
from diptych.encoders.bigru import BiGRU
from diptych.encoders.cnn import PrecomputedGrid
from diptych.errors import DataError, SettingsError
from diptych.interaction import similarity_scorer
from diptych.interaction.sgraf import SAF, SGR
from diptych.interaction.similarity import squared_linear
from diptych.interaction.similarity_scorer import SimilarityScorer, length_buckets, spans
from diptych.types import Features

DIM, NODES = 12, 6
KINDS = (SGR, SAF)


def scorer_of(kind: type[SimilarityScorer], seed: int = 0) -> Any:
    """A scorer with weights that matter everywhere, biases and running statistics included."""
    torch.manual_seed(seed)
    scorer: Any = kind(DIM, NODES)
    with torch.no_grad():
        for parameter in scorer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter)).mul_(2)
        for name, buffer in scorer.named_buffers():
            if name.endswith("running_var"):
                buffer.fill_(0.3)
            elif name.endswith("running_mean"):
                buffer.fill_(0.1)
    return scorer


def sides(
    n: int = 4, sizes: tuple[int, ...] = (3, 1, 5, 3, 2), regions: int = 4, seed: int = 1
) -> tuple[Features, Features]:
    """Unit vectors behind a global one; padding holds NaN-free noise that must not matter."""
    torch.manual_seed(seed)
    images = F.normalize(torch.randn(n, 1 + regions, DIM), dim=-1)
    texts = F.normalize(torch.randn(len(sizes), 1 + max(sizes), DIM), dim=-1)
    mask = torch.arange(1 + max(sizes)) <= torch.tensor(sizes)[:, None]
    return Features.whole(images), Features(texts, mask)


def as_lists(features: Features) -> list[tuple[Tensor, Tensor]]:
    rows = []
    for values, mask in zip(features.values.double(), features.mask, strict=True):
        rows.append((values[0], values[1:][mask[1:]]))
    return rows


def oracle(scorer: Any, images: Features, texts: Features) -> tuple[Tensor, dict[str, Tensor]]:
    state = {name: value.double() for name, value in scorer.state_dict().items()}
    return oracles.score_matrix(scorer.kind, state, as_lists(images), as_lists(texts), scorer.training)


@pytest.mark.parametrize("holes", [True, False])
@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_tiles_equal_the_loop(
    kind: type[SimilarityScorer],
    training: bool,
    gradients: bool,
    holes: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scorer = scorer_of(kind).train(training)
    images, texts = sides()
    if holes:  # absent regions and words in the middle
        images.mask[1, 2] = images.mask[3, 1] = False
        texts.mask[2, 3] = False
    expected, running = oracle(scorer, images, texts)
    before = copy.deepcopy(scorer.state_dict())
    for rows in (1, 10, 10_000):  # from one pair per tile to one tile per bucket
        monkeypatch.setattr(similarity_scorer, "CPU_ROWS", rows)
        scorer.load_state_dict(before)
        with torch.set_grad_enabled(gradients):
            found = scorer(images, texts).double()
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        for name, value in running.items():
            torch.testing.assert_close(
                scorer.get_buffer(f"norm.{name}").double(), value, rtol=1e-5, atol=1e-6
            )
    if kind is SAF:
        assert int(scorer.norm.num_batches_tracked) == (len(texts.values) if training else 0)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_those_of_the_loop(
    kind: type[SimilarityScorer], recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if recompute:
        monkeypatch.setattr(similarity_scorer, "TRAINING_BYTES", 0)
    monkeypatch.setattr(similarity_scorer, "CPU_ROWS", 20)
    scorer = scorer_of(kind).train()
    images, texts = sides()
    pull = torch.randn(4, 5)
    ours = [side.values.clone().requires_grad_() for side in (images, texts)]
    (scorer(Features(ours[0], images.mask), Features(ours[1], texts.mask)) * pull).sum().backward()

    state = {name: value.detach().double() for name, value in scorer.state_dict().items()}
    for name, _ in scorer.named_parameters():
        state[name].requires_grad_()
    theirs = [side.values.double().requires_grad_() for side in (images, texts)]
    lists = [as_lists(Features(v, s.mask)) for v, s in zip(theirs, (images, texts), strict=True)]
    scores, _ = oracles.score_matrix(scorer.kind, state, lists[0], lists[1], training=True)
    (scores * pull.double()).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-4, atol=1e-5)
    for name, parameter in scorer.named_parameters():
        assert parameter.grad is not None, name
        torch.testing.assert_close(parameter.grad.double(), state[name].grad, rtol=1e-4, atol=1e-5)
    if kind is SAF:  # recomputing a tile must not count its statistics twice
        assert int(scorer.norm.num_batches_tracked) == 5


@pytest.mark.parametrize("kind", KINDS)
def test_the_loop_would_notice_a_mutation(
    kind: type[SimilarityScorer], monkeypatch: pytest.MonkeyPatch
) -> None:
    images, texts = sides()
    scorer = scorer_of(kind).train()
    expected, _ = oracle(scorer, images, texts)

    def off(changed: Any) -> float:
        return float((changed(images, texts).double() - expected).detach().abs().max())

    assert off(scorer) < 1e-5
    sharper = scorer_of(kind).train()
    sharper.vectors.sharpness = 8.0
    assert off(sharper) > 1e-4
    padded = Features(texts.values, torch.ones_like(texts.mask))  # padding taken for words
    assert float((scorer(images, padded).double() - expected).detach().abs().max()) > 1e-4
    if kind is SAF:
        shared = scorer_of(SAF).train()
        shared.norm.eval()  # running statistics in place of each text's own
        assert off(shared) > 1e-4


def test_the_bias_of_a_key_changes_nothing() -> None:
    scorer = scorer_of(SGR)
    state = {name: value.double() for name, value in scorer.state_dict().items()}
    nodes = torch.randn(5, NODES, dtype=torch.float64)
    bias = torch.randn(NODES, dtype=torch.float64)
    torch.testing.assert_close(oracles.sgr_score(state, nodes, 3), oracles.sgr_score(state, nodes, 3, bias))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_padding_is_neutral(kind: type[SimilarityScorer], training: bool) -> None:
    scorer = scorer_of(kind).train(training)
    images, texts = sides()
    wide = Features(F.pad(texts.values, (0, 0, 0, 3), value=7.0), F.pad(texts.mask, (0, 3)))
    holes = torch.tensor([0, 3, 1, 4, 2, 5])  # words in other places, padding between them
    spread = Features(texts.values[:, holes], texts.mask[:, holes])
    extra = Features(F.pad(images.values, (0, 0, 0, 2), value=7.0), F.pad(images.mask, (0, 2)))
    expected = scorer(images, texts)
    torch.testing.assert_close(scorer(images, wide), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(scorer(extra, texts), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(scorer(images, spread), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_order_of_items_and_of_words(kind: type[SimilarityScorer]) -> None:
    scorer = scorer_of(kind).train()
    images, texts = sides()
    expected = scorer(images, texts)
    rows, columns = torch.randperm(4), torch.randperm(5)
    shuffled = scorer(images.map(lambda t: t[rows]), texts.map(lambda t: t[columns]))
    torch.testing.assert_close(shuffled, expected[rows][:, columns], rtol=0, atol=1e-6)
    regions = torch.cat([torch.tensor([0]), 1 + torch.randperm(4)])
    torch.testing.assert_close(
        scorer(images.map(lambda t: t[:, regions]), texts), expected, rtol=0, atol=1e-6
    )


def test_a_fold_equals_one_update_after_another() -> None:
    scorer = scorer_of(SAF)
    mean, var = torch.randn(7), torch.rand(7)
    expected = [scorer.norm.running_mean.clone(), scorer.norm.running_var.clone()]
    for one, two in zip(mean, var, strict=True):
        expected = [0.9 * expected[0] + 0.1 * one, 0.9 * expected[1] + 0.1 * two]
    scorer.norm.fold(mean, var)
    torch.testing.assert_close(scorer.norm.running_mean, expected[0])
    torch.testing.assert_close(scorer.norm.running_var, expected[1])


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_stays_near(kind: type[SimilarityScorer]) -> None:
    torch.manual_seed(0)
    scorer = kind(DIM, NODES).eval()  # type: ignore[call-arg]
    images, texts = sides()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = scorer(images, texts)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, scorer(images, texts), rtol=0, atol=1e-2)


def test_squared_linear_has_the_right_gradient() -> None:
    tensors = [
        torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3, 4), (5, 4), (5,))
    ]
    assert torch.autograd.gradcheck(squared_linear, tensors)


def test_empty_sides() -> None:
    images, texts = sides()
    scorer = scorer_of(SGR).eval()
    assert scorer(images.map(lambda t: t[:0]), texts).shape == (0, 5)
    assert scorer(images, texts.map(lambda t: t[:0])).shape == (4, 0)


def test_bad_input_says_so() -> None:
    images, texts = sides()
    narrow = Features(images.values[..., :3], images.mask)
    with pytest.raises(DataError, match=r"\b5\b.*\b3\b.*\b1\b"):
        scorer_of(SGR)(narrow, texts)
    with pytest.raises(SettingsError, match=r"\b0\b.*\b1\b"):
        SGR(DIM, NODES, steps=0)
    attention = VisualSelfAttention(DIM, regions=3)
    with pytest.raises(DataError, match=r"\b5\b.*\b3\b"):
        attention(images)


# -------------------------------------------------------------------------------------------------- buckets


def test_buckets_hold_every_text_once_and_pad_little() -> None:
    sizes = [5, 3, 9, 3, 4, 9, 1]
    for overhead in (0.0, 3.0, 1e9):
        buckets = length_buckets(sizes, overhead)
        assert sorted(row for bucket in buckets for row in bucket.rows) == list(range(7))
        assert all(sizes[row] <= bucket.words for bucket in buckets for row in bucket.rows)
    assert [bucket.words for bucket in length_buckets(sizes, 0.0)] == [1, 3, 4, 5, 9]
    assert [bucket.words for bucket in length_buckets(sizes, 1e9)] == [9]


def test_spans_cover_everything() -> None:
    assert [list(range(10))[part] for part in spans(10, 4)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert list(spans(0, 4)) == []


# ------------------------------------------------------------------------------------------- self-attention


@pytest.mark.parametrize("training", [True, False])
def test_visual_self_attention_equals_the_loop(training: bool) -> None:
    torch.manual_seed(0)
    attention = VisualSelfAttention(DIM, regions=4, dropout=0.0).train(training)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        attention.local_norm.running_mean.copy_(torch.randn(4))
    regions = F.normalize(torch.randn(5, 4, DIM), dim=-1)
    state = {name: value.double() for name, value in attention.state_dict().items()}
    expected = oracles.visual_attention(state, regions.double(), running=not training)
    torch.testing.assert_close(attention(Features.whole(regions)).double(), expected, rtol=0, atol=1e-5)


def test_region_norm_equals_batch_norm_over_regions() -> None:
    attention = VisualSelfAttention(DIM, regions=4)
    norm, plain = attention.local_norm, torch.nn.BatchNorm1d(4)
    values = torch.randn(6, 4, DIM) * 2 + 1
    everywhere = torch.ones(6, 4, dtype=torch.bool)
    torch.testing.assert_close(norm(values, everywhere), plain(values), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(norm.running_mean, plain.running_mean)
    torch.testing.assert_close(norm.running_var, plain.running_var)
    torch.testing.assert_close(norm.eval()(values, everywhere), plain.eval()(values), rtol=1e-5, atol=1e-5)


def test_textual_self_attention_equals_the_loop_over_true_words() -> None:
    torch.manual_seed(0)
    attention = TextualSelfAttention(DIM, dropout=0.0)
    _, texts = sides()
    words = Features(texts.values[:, 1:], texts.mask[:, 1:])
    state = {name: value.double() for name, value in attention.state_dict().items()}
    expected = torch.stack([oracles.textual_attention(state, one) for _, one in as_lists(texts)])
    torch.testing.assert_close(attention(words).double(), expected, rtol=0, atol=1e-5)


def test_self_attended_puts_the_global_vector_first() -> None:
    torch.manual_seed(0)
    encoder = SelfAttended(PrecomputedGrid(7, DIM, drop=0.0), VisualSelfAttention(DIM, regions=4)).eval()
    mask = torch.tensor([[True] * 4, [True, True, False, False]])
    values = torch.randn(2, 4, 7)
    found = encoder(Features(values, mask))
    assert found.values.shape == (2, 5, DIM)
    assert found.mask.tolist() == [[True] * 5, [True, True, True, False, False]]
    torch.testing.assert_close(found.values.norm(dim=-1), found.mask.float(), rtol=0, atol=1e-5)
    values[1, 2:] = 99.0
    torch.testing.assert_close(encoder(Features(values, mask)).values, found.values)


def test_dropout_of_words_acts_only_while_training() -> None:
    torch.manual_seed(0)
    ids = Features(torch.tensor([[4, 5, 6]]), torch.ones(1, 3, dtype=torch.bool))
    gru = BiGRU(10, 8, DIM, dropout=0.4)
    assert not torch.equal(gru(ids).values, gru(ids).values)
    gru.eval()
    assert torch.equal(gru(ids).values, gru(ids).values)
    with pytest.raises(SettingsError, match=r"1\.5"):
        BiGRU(10, 8, DIM, dropout=1.5)


@pytest.mark.parametrize("kind", KINDS)
def test_matched_pairs_score_as_in_the_matrix(kind: type[SimilarityScorer]) -> None:
    scorer = scorer_of(kind).eval()
    images, texts = sides()
    images.mask[3, 2] = texts.mask[4, 1] = False
    expected = scorer(images, texts)
    rows, columns = torch.tensor([0, 3, 1, 2, 2]), torch.tensor([4, 0, 1, 2, 3])
    found = scorer.pairs(images.map(lambda t: t[rows]), texts.map(lambda t: t[columns]))
    torch.testing.assert_close(found, expected[rows, columns], rtol=0, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels run on a GPU")
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_equal_the_plain_operations(kind: type[SimilarityScorer], half: torch.dtype) -> None:
    torch.manual_seed(0)
    scorer: Any = kind(64, 64).cuda().eval()  # type: ignore[call-arg]
    sizes = torch.randint(1, 20, (40,))
    mask = torch.arange(21) <= sizes[:, None]
    texts = Features(F.normalize(torch.randn(40, 21, 64), dim=-1), mask).to("cuda")
    images = Features.whole(F.normalize(torch.randn(30, 37, 64), dim=-1)).to("cuda")
    images.mask[3, -5:] = False
    with torch.inference_mode():
        expected = scorer(images, texts)
        with torch.autocast("cuda", half):
            found = scorer(images, texts)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-3 if half == torch.float16 else 1e-2)
