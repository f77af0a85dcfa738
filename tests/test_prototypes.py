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
from diptych.objectives.clustering import kmeans, largest_first, nearest
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
    centroids = kmeans(given, 8, seed=1)
    labels, scores = assign(rows, centroids)
    assert purity(labels, which) == 1.0
    assert scores.min() > 0.9
    torch.testing.assert_close(centroids.norm(dim=1), torch.ones(8))
    assert torch.equal(kmeans(given, 8, seed=1), centroids)


def test_kmeans_improves_and_leaves_no_cluster_empty() -> None:
    g = torch.Generator().manual_seed(3)
    rows = unit(torch.randn(60, 4, generator=g))
    quality = [float(assign(rows, kmeans(rows, 12, iterations=n))[1].mean()) for n in (0, 1, 3, 20)]
    assert quality == sorted(quality)
    assert len(assign(rows, kmeans(rows, 12))[0].unique()) == 12


def test_an_empty_cluster_moves_into_the_largest() -> None:
    # six copies of one row: of the starts among them all but one stay empty, until they are put elsewhere
    rest = unit(torch.randn(40, 4, generator=torch.Generator().manual_seed(0)))
    rows = torch.cat([torch.eye(4)[:1].repeat(6, 1), rest])
    centroids = kmeans(rows, 10, seed=5)
    assert len(assign(rows, centroids)[0].unique()) >= 9


def test_kmeans_of_chosen_rows_ignores_the_rest() -> None:
    rows, _ = blobs(3, 10)
    spoiled = torch.cat([rows, torch.full((5, 8), torch.nan)])
    centroids = kmeans(spoiled, 3, chosen=np.arange(30))
    assert centroids.isfinite().all()
    assert torch.equal(centroids, kmeans(rows, 3))


def test_kmeans_of_more_clusters_than_rows() -> None:
    with pytest.raises(SettingsError, match="31 clusters of 30 vectors: give a number from 1 to 30"):
        kmeans(blobs(3, 10)[0], 31)


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


def run_epoch(objective: PrototypeClassification, rows: Tensor, epoch: int, size: int = 10) -> list[float]:
    objective.start_epoch(epoch)
    losses = []
    for embeddings, batch in steps(rows, size, epoch):
        losses.append(objective(embeddings, batch)["prototypes"].item())
        with torch.no_grad():
            objective.after_step(embeddings, batch)
    with torch.no_grad():
        objective.after_epoch(epoch)
    return losses


def ready(clusters: int = 6, **kwargs: object) -> tuple[PrototypeClassification, Tensor, Tensor]:
    torch.manual_seed(0)
    rows, which = blobs(4, 20)
    objective = PrototypeClassification(clusters, 8, len(rows), **kwargs)  # type: ignore[arg-type]
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
    return total


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


def test_first_epoch_collects_and_then_clusters() -> None:
    torch.manual_seed(0)
    rows, which = blobs(4, 20)
    objective = PrototypeClassification(8, 8, 80)
    assert not objective.started
    assert objective.phase() is False
    assert run_epoch(objective, rows, 0) == [0.0] * 8
    assert objective.started
    assert objective.phase() is True
    assert objective.memory.shape == (0, 8)
    assert purity(assign(rows, objective.centroids)[0], which) == 1.0
    assert min(run_epoch(objective, rows, 1)) > 0


def test_the_memory_holds_the_unit_sums() -> None:
    rows, _ = blobs(2, 6)
    objective = PrototypeClassification(2, 8, 12)
    for embeddings, batch in steps(rows, 5):
        objective.after_step(embeddings, batch)
        expected = unit(embeddings.image + embeddings.text)
        torch.testing.assert_close(objective.memory[batch.text_ids].float(), expected, atol=1e-3, rtol=0)


def test_centroids_move_by_the_mean_of_their_pairs() -> None:
    objective, rows, _ = ready(momentum=0.9)
    embeddings, batch = next(steps(rows, 16, 1))
    before = objective.centroids.clone()
    labels = objective.labels(embeddings).tolist()
    u = unit(embeddings.image + embeddings.text)
    assert len(set(labels)) < len(labels)  # several pairs of one cluster
    objective.after_step(embeddings, batch)
    for k in range(6):
        members = [u[n] for n in range(16) if labels[n] == k]
        if members:
            mean = sum(members) / len(members)
            torch.testing.assert_close(objective.centroids[k], unit(0.9 * before[k] + 0.1 * mean))
        else:
            assert torch.equal(objective.centroids[k], before[k])
        assert int(objective.hits[k]) == len(members)


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
    objective, rows, _ = ready(momentum=0.95)
    first = assign(rows, objective.centroids)[0]
    for epoch in (1, 2, 3):
        run_epoch(objective, rows, epoch)
    again = assign(rows, objective.centroids)[0]
    # which blob a cluster number stands for never changes
    assert float((first == again).float().mean()) > 0.6
    for k in first.unique():
        mine, later = rows[first == k].mean(0), rows[again == k].mean(0)
        assert float(unit(mine) @ unit(later)) > 0.9


def test_an_empty_cluster_is_put_beside_the_largest() -> None:
    objective, rows, _ = ready(5)
    with torch.no_grad():
        objective.centroids[2] = -unit(rows.mean(0))  # nobody will come
    before, head = objective.centroids.clone(), objective.head.detach().clone()
    for embeddings, batch in steps(rows, 10, 1):
        objective.after_step(embeddings, batch)
    assert int(objective.hits[2]) == 0
    large, moved = int(objective.hits.argmax()), objective.centroids.clone()
    objective.after_epoch(1)
    assert float(objective.centroids[2] @ moved[large]) > 0.98
    assert float(objective.centroids[large] @ moved[large]) > 0.98
    assert not torch.equal(objective.head[2], head[2])
    others = [k for k in range(5) if k not in (2, large)]
    assert torch.equal(objective.centroids[others], moved[others])
    assert torch.equal(objective.head[[k for k in range(5) if k != 2]], head[[k for k in range(5) if k != 2]])
    assert int(objective.hits.sum()) == 0
    for embeddings, batch in steps(rows, 10, 2):
        objective.after_step(embeddings, batch)
    assert int(objective.hits[2]) > 0
    assert not torch.equal(before, objective.centroids)


@pytest.mark.parametrize("epochs", [0, 1, 2])
def test_state_round_trip_continues_bit_for_bit(epochs: int) -> None:
    torch.manual_seed(0)
    rows, _ = blobs(4, 20)
    one = PrototypeClassification(6, 8, 80)
    for epoch in range(epochs):
        run_epoch(one, rows, epoch)
    batches = list(steps(rows, 10, epochs))
    for embeddings, batch in batches[:3]:
        one.after_step(embeddings, batch)
    two = PrototypeClassification(6, 8, 80)
    two.load_state_dict(load(save(one.state_dict())), strict=True)
    assert two.started == (epochs > 0)
    for objective in (one, two):
        for embeddings, batch in batches[3:]:
            objective.after_step(embeddings, batch)
        with torch.no_grad():
            objective.after_epoch(epochs)
    for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_forward_is_pure() -> None:
    objective, rows, _ = ready()
    embeddings, batch = next(steps(rows, 8, 1))
    state = {name: value.clone() for name, value in objective.state_dict().items()}
    assert torch.equal(objective(embeddings, batch)["prototypes"], objective(embeddings, batch)["prototypes"])
    assert all(torch.equal(value, state[name]) for name, value in objective.state_dict().items())


def test_bad_input() -> None:
    with pytest.raises(
        SettingsError, match="20 prototypes are more than the 12 training pairs: give --clusters 12 or fewer"
    ):
        PrototypeClassification(20, 8, 12)
    with pytest.raises(SettingsError, match="0 prototypes"):
        PrototypeClassification(0, 8, 12)
    with pytest.raises(SettingsError, match="momentum of the prototypes is 2"):
        PrototypeClassification(2, 8, 12, momentum=2)
    rows, _ = blobs(2, 6)
    objective = PrototypeClassification(8, 8, 12)
    embeddings, batch = next(steps(rows, 6))
    objective.after_step(embeddings, batch)
    with pytest.raises(SettingsError, match="saw 6 pairs, fewer than the 8 prototypes"):
        objective.after_epoch(0)
    short = PrototypeClassification(2, 8, 4)
    with pytest.raises(SettingsError, match="made for 4 pairs, but a batch names text"):
        short.after_step(embeddings, batch)
    other, _, _ = ready()
    with pytest.raises(SettingsError, match=r"view 'concept'.*none"):
        other(Embeddings(embeddings.image, embeddings.text), batch)


def test_resuming_with_other_data_is_refused() -> None:
    objective, _, _ = ready()
    with pytest.raises(CheckpointError, match="made over 80 pairs, and the data now has 81"):
        PrototypeClassification(6, 8, 81).load_state_dict(objective.state_dict())
