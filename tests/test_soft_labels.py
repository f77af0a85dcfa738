"""CSA and USA against float64 loops over their equations, and the tests that pin CUSA down."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diptych.branches.branch import UniModalHeads
from diptych.errors import SettingsError
from diptych.objectives.combine import Sum
from diptych.objectives.contrastive import InfoNCE
from diptych.objectives.soft_labels import CrossModalSoftLabels, UniModalSoftLabels, divergence
from diptych.types import Batch, Embeddings, Features, as_inputs

SIZES = (2, 3, 6)
CSA_SWITCHES = [
    {"mode": mode, "divergence": kind}
    for mode, kind in itertools.product(("each", "add", "dot"), ("kl", "ce"))
]


def rows(count: int, dim: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, dim, generator=generator, dtype=torch.float64)


def unit(x: Tensor) -> Tensor:
    return nn.functional.normalize(x)


def seen(count: int, ids: list[int] | None = None, dim: int = 8) -> tuple[Embeddings, Batch]:
    """Embeddings with a uni-modal view, and a batch with teacher vectors of other widths, not of unit length."""
    uni = Embeddings(unit(rows(count, dim, 2)), unit(rows(count, dim, 3)))
    embeddings = Embeddings(unit(rows(count, dim, 0)), unit(rows(count, dim, 1)), views={"uni": uni})
    nothing = Features.whole(torch.zeros(count, 1, 1))
    targets = {"teacher_image": 3 * rows(count, 11, 4), "teacher_text": 0.1 * rows(count, 5, 5)}
    numbers = torch.tensor(ids if ids is not None else list(range(count)))
    return embeddings, Batch(nothing, nothing, numbers, torch.arange(count), targets)


# --- oracles: loops over the equations


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))


def softmax(values: list[float]) -> list[float]:
    total = sum(math.exp(v) for v in values)
    return [math.exp(v) / total for v in values]


def distance(q: list[float], p: list[float], kind: str) -> float:
    entropy = -sum(x * math.log(x) for x in q)
    cross = -sum(x * math.log(y) for x, y in zip(q, p, strict=True))
    return cross - entropy if kind == "kl" else cross


def teachers(batch: Batch) -> tuple[list[list[float]], list[list[float]]]:
    x, y = batch.targets["teacher_image"], batch.targets["teacher_text"]
    return [[cosine(a, b) for b in x] for a in x], [[cosine(a, b) for b in y] for a in y]


def csa(
    e: Embeddings,
    batch: Batch,
    mode: str = "each",
    divergence: str = "kl",
    tau: float = 0.45,
    tau_t: float = 1.0,
) -> float:
    x, y = teachers(batch)
    count, total = len(x), 0.0
    c = [[float(v @ w) for w in e.text] for v in e.image]
    for i in range(count):
        if mode == "each":
            image, text = x[i], y[i]
        elif mode == "add":
            image = text = [(a + b) / 2 for a, b in zip(x[i], y[i], strict=True)]
        else:
            image = text = [math.sqrt(max(a, 0) * max(b, 0)) for a, b in zip(x[i], y[i], strict=True)]
        to_text = softmax([c[i][j] / tau for j in range(count)])
        to_image = softmax([c[j][i] / tau for j in range(count)])
        total += distance(softmax([v / tau_t for v in image]), to_text, divergence)
        total += distance(softmax([v / tau_t for v in text]), to_image, divergence)
    return total / 2 / count


def usa(
    e: Embeddings,
    batch: Batch,
    divergence: str = "kl",
    taus: tuple[float, float] = (0.45, 0.45),
    tau_t: float = 1.0,
) -> float:
    count, total = len(e), 0.0
    uni = e.views["uni"]
    for teacher, student, tau in zip(teachers(batch), (uni.image, uni.text), taus, strict=True):
        for i in range(count):
            p = softmax([float(student[i] @ student[j]) / tau for j in range(count)])
            total += distance(softmax([v / tau_t for v in teacher[i]]), p, divergence)
    return total / 2 / count


def close(found: Tensor, expected: float) -> None:
    assert found.item() == pytest.approx(expected, rel=1e-6, abs=1e-8)  # unit() adds 1e-8 to a length


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("switches", CSA_SWITCHES, ids=str)
@pytest.mark.parametrize("tau_t", [1.0, 0.3])
def test_csa_follows_the_equation(switches: dict[str, Any], count: int, tau_t: float) -> None:
    e, batch = seen(count)
    terms = CrossModalSoftLabels(0.3, teacher_temperature=tau_t, **switches).double()(e, batch)
    assert list(terms) == ["csa"]
    close(terms["csa"], csa(e, batch, tau=0.3, tau_t=tau_t, **switches))


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("kind", ["kl", "ce"])
def test_usa_follows_the_equation(count: int, kind: str) -> None:
    e, batch = seen(count)
    objective = UniModalSoftLabels(0.3, divergence=kind, teacher_temperature=0.7).double()  # type: ignore[arg-type]
    with torch.no_grad():
        objective.text_temperature.value.fill_(0.8)
    terms = objective(e, batch)
    assert list(terms) == ["usa"]
    close(terms["usa"], usa(e, batch, kind, (0.3, 0.8), 0.7))


@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": "add"},
        {"mode": "dot"},
        {"divergence": "ce"},
        {"temperature": 0.46},
        {"teacher_temperature": 0.9},
    ],
    ids=str,
)
def test_the_oracles_notice_a_mutation(wrong: dict[str, Any]) -> None:
    e, batch = seen(6)
    assert CrossModalSoftLabels(**wrong).double()(e, batch)["csa"].item() != pytest.approx(
        csa(e, batch), rel=1e-4
    )
    if "mode" not in wrong:
        assert UniModalSoftLabels(**wrong).double()(e, batch)["usa"].item() != pytest.approx(
            usa(e, batch), rel=1e-4
        )


@pytest.mark.parametrize("side", ["image", "text"])
def test_each_direction_has_the_teacher_of_its_query(side: str) -> None:
    e, batch = seen(6)
    swapped = Batch(
        batch.images, batch.texts, batch.image_ids, batch.text_ids,
        {"teacher_image": batch.targets["teacher_text"], "teacher_text": batch.targets["teacher_image"]},
    )  # fmt: skip
    objective = CrossModalSoftLabels().double()
    assert objective(e, swapped)["csa"].item() != pytest.approx(csa(e, batch), rel=1e-4)


def test_the_scores_of_a_pair_scorer_are_used() -> None:
    e, batch = seen(4)
    scores = torch.sigmoid(rows(4, 4, 9))
    scored = Embeddings(e.image, e.text, scores=scores, views=e.views)
    plain = Embeddings(scores, torch.eye(4, dtype=torch.float64))  # whose products are these scores
    close(CrossModalSoftLabels().double()(scored, batch)["csa"], csa(plain, batch))


# --- the tests of the specification, by their numbers


def test_1_a_student_like_its_teacher_has_no_loss() -> None:
    _, batch = seen(5)
    x, y = unit(batch.targets["teacher_image"]), unit(batch.targets["teacher_text"])
    e = Embeddings(x, x, views={"uni": Embeddings(x, y)})
    same = Batch(
        batch.images, batch.texts, batch.image_ids, batch.text_ids, {"teacher_image": x, "teacher_text": x}
    )
    assert abs(CrossModalSoftLabels(0.5, teacher_temperature=0.5).double()(e, same)["csa"].item()) < 1e-6
    assert abs(UniModalSoftLabels(0.5, teacher_temperature=0.5).double()(e, batch)["usa"].item()) < 1e-6
    assert CrossModalSoftLabels(0.5, teacher_temperature=0.6).double()(e, same)["csa"].item() > 1e-5


def test_2_a_batch_of_one_has_no_loss() -> None:
    e, batch = seen(1)
    for objective in (CrossModalSoftLabels(), UniModalSoftLabels(), InfoNCE()):
        assert sum(v.item() for v in objective.double()(e, batch).values()) == 0


def test_3_the_order_of_pairs_does_not_matter() -> None:
    e, batch = seen(6, [0, 1, 0, 2, 1, 0])
    order = torch.tensor([4, 2, 0, 5, 1, 3])
    uni = Embeddings(e.views["uni"].image[order], e.views["uni"].text[order])
    shuffled = Embeddings(e.image[order], e.text[order], views={"uni": uni})
    for objective in (CrossModalSoftLabels(), UniModalSoftLabels(), InfoNCE()):
        (one,) = objective.double()(e, batch).values()
        (other,) = objective.double()(shuffled, batch.map(lambda t: t[order])).values()
        torch.testing.assert_close(one, other)


def test_4_two_texts_of_one_image_can_be_swapped() -> None:
    ids = [0, 1, 0, 2]
    e, batch = seen(4, ids)
    swap = torch.tensor([2, 1, 0, 3])

    def of(texts: Tensor) -> tuple[Embeddings, Batch]:
        image, uni_image = e.image.clone(), e.views["uni"].image.clone()
        teacher = batch.targets["teacher_image"].clone()
        for rows_of_image in (image, uni_image, teacher):
            rows_of_image[2] = rows_of_image[0]  # rows 0 and 2 are one image
        uni = Embeddings(uni_image, e.views["uni"].text[texts])
        targets = {"teacher_image": teacher, "teacher_text": batch.targets["teacher_text"][texts]}
        seen_so = Embeddings(image, e.text[texts], views={"uni": uni})
        return seen_so, Batch(batch.images, batch.texts, batch.image_ids, batch.text_ids, targets)

    plain, swapped = of(torch.arange(4)), of(swap)
    for objective in (CrossModalSoftLabels(), UniModalSoftLabels(), InfoNCE()):
        (one,) = objective.double()(*plain).values()
        (other,) = objective.double()(*swapped).values()
        torch.testing.assert_close(one, other)


def test_5_the_gradient_of_csa_in_the_scores() -> None:
    e, batch = seen(5)
    c = (e.image @ e.text.T).requires_grad_()
    scored = Embeddings(e.image, e.text, scores=c)
    tau, count = 0.45, 5
    (gradient,) = torch.autograd.grad(CrossModalSoftLabels(tau).double()(scored, batch)["csa"], c)
    x, y = teachers(batch)
    table = c.detach().tolist()
    p_text = [softmax([v / tau for v in row]) for row in table]
    p_image = [softmax([table[j][i] / tau for j in range(count)]) for i in range(count)]
    q_image, q_text = [softmax(row) for row in x], [softmax(row) for row in y]
    for i, j in itertools.product(range(count), repeat=2):
        expected = (p_text[i][j] - q_image[i][j] + p_image[j][i] - q_text[j][i]) / (2 * count * tau)
        assert gradient[i, j].item() == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize("push", [-1e6, 1e6])
def test_7_temperatures_return_to_their_intervals(push: float) -> None:
    e, batch = seen(6)
    intervals = {CrossModalSoftLabels: (0.10, 0.99), UniModalSoftLabels: (0.10, 1.00)}
    for kind, (low, high) in intervals.items():
        objective = kind().double()
        optimiser = torch.optim.SGD(objective.parameters(), lr=abs(push))
        for parameter in objective.parameters():
            parameter.grad = torch.tensor(-math.copysign(1.0, push), dtype=torch.float64)
        optimiser.step()
        (loss,) = objective(e, batch).values()
        for parameter in objective.parameters():
            assert parameter.item() == pytest.approx(low if push < 0 else high)
        loss.backward()
        assert all(p.grad is not None and p.grad != 0 for p in objective.parameters())  # a bound is no trap
        assert [p.item() for p in objective.parameters()] == [low if push < 0 else high] * len(
            list(objective.parameters())
        )


# --- the rest


def test_gradients() -> None:
    e, batch = seen(4)
    cross, uni = CrossModalSoftLabels().double(), UniModalSoftLabels().double()
    inputs = [
        t.clone().requires_grad_() for t in (e.image, e.text, e.views["uni"].image, e.views["uni"].text)
    ]

    def loss(*tensors: Tensor) -> Tensor:
        image, text, a, b = tensors[:4]
        made = Embeddings(image, text, views={"uni": Embeddings(a, b)})
        return cross(made, batch)["csa"] + uni(made, batch)["usa"]

    assert torch.autograd.gradcheck(loss, (*inputs, *cross.parameters(), *uni.parameters()))


def test_the_teacher_gets_no_gradient() -> None:
    e, batch = seen(4)
    targets = {name: value.clone().requires_grad_() for name, value in batch.targets.items()}
    taught = Batch(batch.images, batch.texts, batch.image_ids, batch.text_ids, targets)
    for objective in (CrossModalSoftLabels(), UniModalSoftLabels()):
        (loss,) = objective.double()(e, taught).values()
        loss.backward()
    assert all(value.grad is None for value in targets.values())


def test_a_fixed_temperature_stays() -> None:
    objective = CrossModalSoftLabels(0.45, learned=False)
    assert not any(p.requires_grad for p in objective.parameters())


def test_half_precision_teachers_are_read_in_float32() -> None:
    e, batch = seen(6)
    single = Embeddings(e.image.float(), e.text.float(), views={"uni": Embeddings(*_floats(e.views["uni"]))})
    halves = batch.map(lambda t: t.half() if t.is_floating_point() else t)
    close_to = pytest.approx(csa(e, batch), rel=2e-3)
    assert CrossModalSoftLabels()(single, halves)["csa"].dtype == torch.float32
    assert CrossModalSoftLabels()(single, halves)["csa"].item() == close_to


def _floats(e: Embeddings) -> tuple[Tensor, Tensor]:
    return e.image.float(), e.text.float()


def test_weights_are_those_of_the_sum() -> None:
    e, batch = seen(6)
    total = Sum(
        {"hard": (InfoNCE(), 1.0), "csa": (CrossModalSoftLabels(), 0.6), "usa": (UniModalSoftLabels(), 0.75)}
    ).double()
    terms = total(e, batch)
    close(terms["csa"], 0.6 * csa(e, batch))
    close(terms["usa"], 0.75 * usa(e, batch))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: CrossModalSoftLabels(mode="both"), "both"),  # type: ignore[arg-type]
        (lambda: CrossModalSoftLabels(1.5), r"1\.5.*0\.1.*0\.99"),
        (lambda: UniModalSoftLabels(0.45, clamp=(0.0, 1.0)), r"\b0\b"),
        (lambda: UniModalSoftLabels(divergence="js"), "'js'"),  # type: ignore[arg-type]
        (lambda: UniModalSoftLabels(teacher_temperature=0), r"\b0\b"),
    ],
)
def test_bad_settings(make: Any, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        make()


def test_missing_teachers_and_views_are_named() -> None:
    e, batch = seen(3)
    bare = Batch(batch.images, batch.texts, batch.image_ids, batch.text_ids)
    with pytest.raises(SettingsError, match="teacher_image"):
        CrossModalSoftLabels()(e, bare)
    with pytest.raises(SettingsError, match="'uni'"):
        UniModalSoftLabels()(Embeddings(e.image, e.text), batch)


# --- the heads


@pytest.mark.parametrize("layer_norm", [False, True])
def test_uni_modal_heads(layer_norm: bool) -> None:
    torch.manual_seed(0)
    heads = UniModalHeads(6, image_dim=8, text_dim=4, layer_norm=layer_norm)
    v, w = unit(rows(5, 8, 0)).float(), unit(rows(5, 4, 1)).float()
    nothing = Features.whole(torch.zeros(5, 1, 1))
    for head, vector, found in (
        (heads.image_head, v, heads.image(v, nothing)),
        (heads.text_head, w, heads.text(w, nothing)),
    ):
        norm, linear = (head[0], head[1]) if isinstance(head, nn.Sequential) else (None, head)
        assert isinstance(linear, nn.Linear)
        expected = []
        for row in vector.double():
            x = row
            if norm is not None:
                x = (row - row.mean()) / torch.sqrt(((row - row.mean()) ** 2).mean() + 1e-5)
            y = linear.weight.double() @ x + linear.bias.double()
            expected.append(y / y.norm())
        torch.testing.assert_close(found.double(), torch.stack(expected), atol=1e-5, rtol=1e-5)
    assert (heads.weight, heads.dim) == (0.0, 6)
    big = UniModalHeads(256, layer_norm=True)
    assert isinstance(big.image_head, nn.Sequential)
    assert abs(float(big.image_head[1].weight.detach().std()) - 0.02) < 0.001


def test_the_heads_are_a_view_beside_the_score() -> None:
    from diptych.aggregators import Mean
    from diptych.data.images import RegionInput
    from diptych.data.text import WordInput
    from diptych.encoders.bigru import BiGRU
    from diptych.encoders.regions import Regions
    from diptych.model.retriever import Retriever, Tower

    torch.manual_seed(0)
    words = ["<pad>", "<start>", "<end>", "<unk>", "man", "dog"]
    inputs = RegionInput(5), WordInput(words, augment=0.0)
    towers = Tower(Regions(5, 8), Mean()), Tower(BiGRU(len(words), 4, 8), Mean())
    plain = Retriever(*towers, *inputs)
    model = Retriever(*towers, *inputs, branches={"uni": UniModalHeads(6, image_dim=8, text_dim=8)}).eval()
    images, some = [rows(3, 5, i).float().numpy() for i in range(4)], ["man", "dog man", "a dog", "man man"]
    assert model.dim == plain.dim == 8
    assert torch.equal(model.encode_text(some), plain.encode_text(some))
    a, b = model.encode_image(images, view="uni"), model.encode_text(some, view="uni")
    assert (a.shape, b.shape) == ((4, 6), (4, 6))
    batch = Batch(
        as_inputs(model.image_input(images)),
        as_inputs(model.text_input.prepare(some).collate(range(4))),
        torch.arange(4),
        torch.arange(4),
    )
    with torch.no_grad():
        seen_so = model(batch)
    torch.testing.assert_close(seen_so.views["uni"].image, a)
    torch.testing.assert_close(seen_so.views["uni"].text, b)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernel runs on a GPU")
@pytest.mark.parametrize("kind", ["kl", "ce"])
@pytest.mark.parametrize("count", [1, 5, 128, 300, 8192])
def test_the_kernel_equals_the_plain_operations(count: int, kind: Any) -> None:
    torch.manual_seed(0)
    cosines, start = torch.rand(count, count).cuda(), torch.rand(count, count).cuda() * 2 - 1
    for flip in (False, True):
        found = []
        for dtype in (torch.float32, torch.float64):
            scores = start.to(dtype).requires_grad_()
            tau = torch.tensor(0.31, dtype=dtype, device="cuda", requires_grad=True)
            value = divergence(cosines.to(dtype), scores.T if flip else scores, tau, 0.7, kind)
            found.append((value, *torch.autograd.grad(count * value, [scores, tau])))  # of a size to be seen
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)
