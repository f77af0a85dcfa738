"""k-means in blocks, persistent prototypes, and PGC against a float64 loop."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from diptych.errors import CheckpointError, SettingsError
from diptych.objectives import clustering
from diptych.objectives.clustering import cluster, largest_first, nearest
from diptych.objectives.objective import PairVectors
from diptych.objectives.prototypes import PrototypeClassification
from diptych.ops import unit
from diptych.types import Batch, Embeddings, Features


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clustering, "ROWS", 7)
    monkeypatch.setattr(clustering, "COLUMNS", 3)


def blobs(groups: int, each: int, d: int = 8, spread: float = 0.05, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    centres = torch.linalg.qr(torch.randn(d, d, generator=g))[0][:groups]
    which = torch.arange(groups).repeat_interleave(each)[torch.randperm(groups * each, generator=g)]
    return unit(centres[which] + spread * torch.randn(groups * each, d, generator=g)), which


def purity(labels: Tensor, which: Tensor) -> float:
    return sum(int(which[labels == k].bincount().max()) for k in labels.unique()) / len(which)


# --- k-means


def assign(
    rows: Tensor | np.ndarray, centroids: Tensor, chosen: np.ndarray | None = None
) -> tuple[Tensor, Tensor]:
    """The nearest centroid of each row, and the product with it."""
    some = rows if chosen is None else rows[chosen]
    block = some.float() if isinstance(some, Tensor) else torch.from_numpy(np.array(some, np.float32))
    score, label = nearest(block, centroids)
    return label, score


def test_assignment_equals_a_loop(tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(0)
    rows, centroids = unit(torch.randn(23, 5, generator=g)), unit(torch.randn(8, 5, generator=g))
    expected = [max(range(8), key=lambda k: float(row @ centroids[k])) for row in rows]
    labels, scores = assign(rows, centroids)
    assert labels.tolist() == expected
    torch.testing.assert_close(
        scores, torch.stack([r @ centroids[k] for r, k in zip(rows, expected, strict=True)])
    )
    np.save(tmp_path / "rows.npy", rows.numpy())
    mapped = np.load(tmp_path / "rows.npy", mmap_mode="r")
    assert assign(mapped, centroids)[0].tolist() == expected
    chosen = np.array([20, 3, 3, 11])
    assert assign(mapped, centroids, chosen=chosen)[0].tolist() == [expected[i] for i in chosen]


@pytest.mark.parametrize("kind", ["tensor", "half", "array"])
def test_kmeans_finds_separable_blobs(kind: str) -> None:
    rows, which = blobs(5, 30)
    given = {"tensor": rows, "half": rows.half(), "array": rows.numpy()}[kind]
    centroids = cluster(given, 8, seed=1).centroids
    labels, scores = assign(rows, centroids)
    assert purity(labels, which) == 1.0
    assert scores.min() > 0.9
    torch.testing.assert_close(centroids.norm(dim=1), torch.ones(8))
    assert torch.equal(cluster(given, 8, seed=1).centroids, centroids)


def test_kmeans_improves_and_leaves_no_cluster_empty() -> None:
    g = torch.Generator().manual_seed(3)
    rows = unit(torch.randn(60, 4, generator=g))
    quality = [
        float(assign(rows, cluster(rows, 12, iterations=n).centroids)[1].mean()) for n in (0, 1, 3, 20)
    ]
    assert quality == sorted(quality)
    assert len(assign(rows, cluster(rows, 12).centroids)[0].unique()) == 12


def test_an_empty_cluster_moves_into_the_largest() -> None:
    # six copies of one row: of the starts among them all but one stay empty, until they are put elsewhere
    rest = unit(torch.randn(40, 4, generator=torch.Generator().manual_seed(0)))
    rows = torch.cat([torch.eye(4)[:1].repeat(6, 1), rest])
    centroids = cluster(rows, 10, seed=5).centroids
    assert len(assign(rows, centroids)[0].unique()) >= 9


def test_kmeans_of_chosen_rows_ignores_the_rest() -> None:
    rows, _ = blobs(3, 10)
    spoiled = torch.cat([rows, torch.full((5, 8), torch.nan)])
    centroids = cluster(spoiled, 3, subset=np.arange(30)).centroids
    assert centroids.isfinite().all()
    assert torch.equal(centroids, cluster(rows, 3).centroids)


def test_kmeans_of_more_clusters_than_rows() -> None:
    with pytest.raises(SettingsError, match=r"\b31\b.*\b30\b"):
        cluster(blobs(3, 10)[0], 31)


def test_largest_first_halves_what_it_splits() -> None:
    sizes = np.array([0, 9, 0, 6, 0, 1, 0])
    assert list(largest_first(sizes)) == [(0, 1), (2, 3), (4, 1), (6, 3)]
    assert sizes.tolist() == [0, 9, 0, 6, 0, 1, 0]
    assert list(largest_first(np.array([1, 0, 1]))) == []


# --- the objective


def steps(rows: Tensor, size: int, epoch: int = 0) -> Iterator[tuple[Embeddings, Batch]]:
    """Batches over pairs whose image and text are both near the pair's row."""
    g = torch.Generator().manual_seed(epoch)
    order = torch.randperm(len(rows), generator=g)
    for ids in order.split(size):
        near = unit(rows[ids] + 0.02 * torch.randn(4, len(ids), rows.shape[1], generator=g))
        seen = Embeddings(near[0], near[1], views={"concept": Embeddings(near[2], near[3])})
        empty = Features.whole(torch.zeros(len(ids), 1))
        yield seen, Batch(empty, empty, ids, ids)


def pairs_of(rows: Tensor) -> PairVectors:
    """Every pair as it would be encoded again: two texts of each image, both sides near the pair's row."""
    g = torch.Generator().manual_seed(99)
    near = unit(rows + 0.02 * torch.randn(2, *rows.shape, generator=g)).half()
    return PairVectors(near[0], near[1], torch.arange(len(rows)))


def run_epoch(objective: PrototypeClassification, rows: Tensor, epoch: int, size: int = 10) -> list[float]:
    objective.start_epoch(epoch)
    losses = []
    for embeddings, batch in steps(rows, size, epoch):
        losses.append(objective(embeddings, batch)["prototypes"].item())
        with torch.no_grad():
            objective.after_step(embeddings, batch)
    if objective.wants_pairs(epoch):
        objective.see_pairs(epoch, pairs_of(rows))
    with torch.no_grad():
        objective.after_epoch(epoch)
    return losses


def ready(clusters: int = 6, **kwargs: object) -> tuple[PrototypeClassification, Tensor, Tensor]:
    torch.manual_seed(0)
    rows, which = blobs(4, 20)
    objective = PrototypeClassification(clusters, 8, len(rows), start=1, **kwargs)  # type: ignore[arg-type]
    run_epoch(objective, rows, 0)
    return objective, rows, which


def pgc_loop(objective: PrototypeClassification, e: Embeddings) -> float:
    """Eq. 7 by loops in float64: the label is the nearest centroid of v + w, both sides are classified."""
    total, head, scale = 0.0, objective.head.detach().double(), objective.scale
    for side in (e.views["concept"].image, e.views["concept"].text):
        for n in range(len(e.image)):
            u = (e.image[n] + e.text[n]).double()
            near = [float(u @ c) / float(u.norm() * c.norm()) for c in objective.centroids.double()]
            z = max(range(len(near)), key=near.__getitem__)
            logits = [scale * float(row @ side[n].double()) for row in head]
            total -= (logits[z] - math.log(sum(math.exp(v) for v in logits))) / len(e.image)
    return total / scale


@pytest.mark.parametrize("size", [1, 5, 16])
@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_loss_equals_the_equation(size: int, scale: float) -> None:
    objective, rows, _ = ready(scale=scale)
    for embeddings, batch in list(steps(rows, size, 1))[:3]:
        found = objective(embeddings, batch)["prototypes"].item()
        assert found == pytest.approx(pgc_loop(objective, embeddings), rel=1e-5)
        objective.centroids.copy_(objective.centroids.roll(1, 0))  # the oracle must notice other labels
        assert abs(found - pgc_loop(objective, embeddings)) > 1e-3
        objective.centroids.copy_(objective.centroids.roll(-1, 0))


def test_gradcheck() -> None:
    objective, rows, _ = ready()
    objective.double()
    embeddings, batch = next(steps(rows, 4, 1))

    def loss(image: Tensor, text: Tensor, head: Tensor) -> Tensor:
        seen = Embeddings(embeddings.image, embeddings.text, views={"concept": Embeddings(image, text)})
        terms: dict[str, Tensor] = torch.func.functional_call(objective, {"head": head}, (seen, batch))
        return terms["prototypes"]

    concept = embeddings.views["concept"]
    inputs = [concept.image.double(), concept.text.double(), objective.head.detach().clone()]
    assert torch.autograd.gradcheck(loss, tuple(x.requires_grad_() for x in inputs))


def test_labels_carry_no_gradient() -> None:
    objective, rows, _ = ready()
    embeddings, batch = next(steps(rows, 4, 1))
    instance = [v.clone().requires_grad_() for v in (embeddings.image, embeddings.text)]
    concept = embeddings.views["concept"]
    classified = [v.clone().requires_grad_() for v in (concept.image, concept.text)]
    seen = Embeddings(*instance, views={"concept": Embeddings(*classified)})
    objective(seen, batch)["prototypes"].backward()
    assert all(v.grad is not None and v.grad.abs().sum() > 0 for v in classified)
    assert all(v.grad is None for v in instance)  # the labels come from these


def test_the_scale_sharpens_without_pulling_harder() -> None:
    """The gradient at the classified view grows with s where the term is not divided by it (the harm of s = 20)."""
    norms = []
    for scale in (1.0, 20.0):
        objective, rows, _ = ready(clusters=40, scale=scale)
        embeddings, batch = next(steps(rows, 16, 1))
        seen = embeddings.views["concept"].image.clone().requires_grad_()
        views = {"concept": Embeddings(seen, embeddings.views["concept"].text)}
        objective(Embeddings(embeddings.image, embeddings.text, views=views), batch)["prototypes"].backward()
        assert seen.grad is not None
        norms.append(float(seen.grad.norm()))
    assert norms[1] < 2 * norms[0]
    assert 20 * norms[1] > 10 * norms[0]  # the earlier form


def test_the_head_begins_as_a_linear_layer() -> None:
    torch.manual_seed(0)
    objective = PrototypeClassification(4000, 64, 4000, view_dim=16)
    assert objective.head.shape == (4000, 16)
    assert float(objective.head.detach().abs().max()) <= 16**-0.5
    torch.manual_seed(0)
    layer = torch.nn.Linear(16, 4000, bias=False)
    assert float(objective.head.detach().std()) == pytest.approx(float(layer.weight.detach().std()), rel=0.02)


def test_clusters_are_those_of_the_pairs_shown_at_the_end_of_an_epoch() -> None:
    torch.manual_seed(0)
    rows, which = blobs(4, 20)
    objective = PrototypeClassification(8, 8, 80, start=2)
    assert [objective.wants_pairs(epoch) for epoch in range(4)] == [False, True, True, True]
    assert run_epoch(objective, rows, 0) == [0.0] * 8
    assert not objective.started
    assert not objective.centroids.any()  # what was seen during the epoch leaves no trace
    assert run_epoch(objective, rows, 1) == [0.0] * 8
    assert objective.started
    labels = assign(rows, objective.centroids)[0]
    assert purity(labels, which) == 1.0
    assert int(objective.hits.sum()) == 80
    assert min(run_epoch(objective, rows, 2)) > 0


def test_centroids_move_by_the_mean_of_all_their_pairs() -> None:
    objective, rows, _ = ready()
    before, stood = objective.centroids.clone(), objective.hits.clone()
    for embeddings, batch in list(steps(rows, 16, 1))[:2]:
        labels = objective.labels(embeddings).tolist()
        u = unit(embeddings.image + embeddings.text)
        assert len(set(labels)) < len(labels)  # several pairs of one cluster
        objective.after_step(embeddings, batch)
        for k in range(6):
            # one by one, at a rate of 1/n: the running mean of what the cluster stands for
            n, mean = int(stood[k]), before[k].double()
            for member in (u[m].double() for m in range(16) if labels[m] == k):
                n += 1
                mean = mean + (member - mean) / n
            torch.testing.assert_close(objective.centroids[k].double(), unit(mean), atol=1e-6, rtol=0)
            assert int(objective.hits[k]) == n
        before, stood = objective.centroids.clone(), objective.hits.clone()


def test_after_step_alone_does_the_same_as_after_forward() -> None:
    objective, rows, _ = ready()
    other = PrototypeClassification(6, 8, 80)
    other.load_state_dict(objective.state_dict(), strict=True)
    for embeddings, batch in steps(rows, 16, 1):
        objective(embeddings, batch)
        detached = Embeddings(embeddings.image.detach(), embeddings.text.detach())
        objective.after_step(detached, batch)
        other.after_step(Embeddings(embeddings.image.clone(), embeddings.text.clone()), batch)
    assert torch.equal(objective.centroids, other.centroids)
    assert torch.equal(objective.hits, other.hits)


def test_ids_are_stable_over_epochs() -> None:
    objective, rows, _ = ready()
    first = assign(rows, objective.centroids)[0]
    for epoch in (1, 2, 3):
        run_epoch(objective, rows, epoch)
    again = assign(rows, objective.centroids)[0]
    # which blob a cluster number stands for never changes
    assert float((first == again).float().mean()) > 0.6
    for k in first.unique():
        mine, later = rows[first == k].mean(0), rows[again == k].mean(0)
        assert float(unit(mine) @ unit(later)) > 0.9


def test_a_warm_start_keeps_the_numbers_and_the_rows_of_the_head() -> None:
    objective, rows, _ = ready()
    labels, head = assign(rows, objective.centroids)[0], objective.head.detach().clone()
    objective.see_pairs(1, pairs_of(rows))
    assert assign(rows, objective.centroids)[0].tolist() == labels.tolist()
    assert torch.equal(objective.head, head)


def test_an_empty_cluster_is_put_into_the_largest() -> None:
    objective, rows, _ = ready(5)
    with torch.no_grad():
        objective.centroids[2] = -unit(rows.mean(0))  # nobody will come
    head = objective.head.detach().clone()
    objective.see_pairs(1, pairs_of(rows))
    assert (assign(rows, objective.centroids)[0] == 2).any()
    assert not torch.equal(objective.head[2], head[2])
    assert float(objective.head.detach()[2].abs().max()) <= 8**-0.5
    others = [k for k in range(5) if k != 2]
    assert torch.equal(objective.head[others], head[others])
    again, _, _ = ready(5)
    with torch.no_grad():
        again.centroids[2] = -unit(rows.mean(0))
    again.see_pairs(1, pairs_of(rows))
    assert torch.equal(again.head, objective.head)  # every process draws the same row


@pytest.mark.parametrize("epochs", [0, 1, 2])
def test_state_round_trip_continues_bit_for_bit(epochs: int) -> None:
    torch.manual_seed(0)
    rows, _ = blobs(4, 20)
    one = PrototypeClassification(6, 8, 80, start=1)
    for epoch in range(epochs):
        run_epoch(one, rows, epoch)
    batches = list(steps(rows, 10, epochs))
    for embeddings, batch in batches[:3]:
        one.after_step(embeddings, batch)
    two = PrototypeClassification(6, 8, 80, start=1)
    two.load_state_dict(load(save(one.state_dict())), strict=True)
    assert two.started == (epochs > 0)
    for objective in (one, two):
        for embeddings, batch in batches[3:]:
            objective.after_step(embeddings, batch)
        objective.see_pairs(epochs, pairs_of(rows))
    for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_forward_is_pure() -> None:
    objective, rows, _ = ready()
    embeddings, batch = next(steps(rows, 8, 1))
    state = {name: value.clone() for name, value in objective.state_dict().items()}
    assert torch.equal(objective(embeddings, batch)["prototypes"], objective(embeddings, batch)["prototypes"])
    assert all(torch.equal(value, state[name]) for name, value in objective.state_dict().items())


def test_bad_input() -> None:
    with pytest.raises(SettingsError, match=r"\b20\b.*\b12\b.*--clusters"):
        PrototypeClassification(20, 8, 12)
    with pytest.raises(SettingsError, match=r"\b0\b"):
        PrototypeClassification(0, 8, 12)
    with pytest.raises(SettingsError, match=r"\b0\b"):
        PrototypeClassification(2, 8, 12, scale=0)
    with pytest.raises(SettingsError, match=r"\b0\b.*\b1\b"):
        PrototypeClassification(2, 8, 12, start=0)
    rows, _ = blobs(2, 6)
    embeddings, batch = next(steps(rows, 6))
    unread = PairVectors(rows.half(), rows.half(), torch.tensor([0, 1, 2, 3, 4] + [-1] * 7))
    with pytest.raises(SettingsError, match=r"\b5\b.*\b8\b.*--clusters"):
        PrototypeClassification(8, 8, 12).see_pairs(0, unread)
    with pytest.raises(SettingsError, match=r"\b14\b.*\b12\b"):
        PrototypeClassification(2, 8, 14).see_pairs(0, pairs_of(rows))
    other, _, _ = ready()
    with pytest.raises(SettingsError, match="concept"):
        other(Embeddings(embeddings.image, embeddings.text), batch)


def test_resuming_with_other_data_is_refused() -> None:
    objective, _, _ = ready()
    with pytest.raises(CheckpointError, match=r"\b80\b.*\b81\b"):
        PrototypeClassification(6, 8, 81).load_state_dict(objective.state_dict())


def test_a_state_of_the_earlier_method_is_refused() -> None:
    objective, _, _ = ready()
    state = {**objective.state_dict(), "memory": torch.zeros(80, 8, dtype=torch.float16)}
    with pytest.raises(CheckpointError):
        objective.load_state_dict(state)
