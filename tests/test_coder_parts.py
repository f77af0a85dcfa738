"""CODER's parts on real towers: parameters move, a resumed run goes on bit for bit, scores mix."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from diptych.aggregators import GPO
from diptych.branches.concept import ConceptBranch
from diptych.data.captions import Captions
from diptych.data.concepts import count_concepts
from diptych.data.images import RegionInput
from diptych.data.text import WordInput
from diptych.data.vocabulary import build_vocabulary
from diptych.encoders.bigru import BiGRU
from diptych.encoders.regions import Regions
from diptych.evaluation.prepared import Prepared
from diptych.model.retriever import Retriever, Tower
from diptych.model.twin import Twin
from diptych.objectives.clustering import cluster, nearest
from diptych.objectives.combine import On, Sum
from diptych.objectives.contrast import CoupledQueue
from diptych.objectives.diversity import DiversityContrast, MomentumContrast
from diptych.objectives.objective import after_epoch, after_step, start_epoch
from diptych.objectives.prototypes import PrototypeClassification
from diptych.ops import unit
from diptych.training.validation import encode_pairs, show_pairs
from diptych.types import Batch, Embeddings, as_inputs

COLOURS, THINGS = ["red", "green", "blue", "grey"], ["dog", "ball", "car", "tree", "boat"]
TEXTS = [f"a {c} {t} near the {u}" for c in COLOURS for t in THINGS for u in THINGS if t != u]  # 80
DIM, STEP = 12, 10
STEPS = len(TEXTS) // STEP


class Run:
    """A run in the order of the training loop: update the twin, embed, terms, backward, step, after_step."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        words = build_vocabulary(TEXTS, min_count=1)
        branch = ConceptBranch.from_concepts(
            count_concepts([*THINGS, *COLOURS], TEXTS), DIM, word_dim=7, text_aggregator=GPO()
        )
        self.model = Retriever(
            Tower(Regions(6, DIM, hidden=8), GPO()),
            Tower(BiGRU(len(words), 5, DIM), GPO()),
            RegionInput(6),
            WordInput(words),
            branches={"concept": branch},
        )
        self.twin = Twin(self.model, 0.9)
        queue = CoupledQueue(24, DIM)
        self.objective = Sum(
            {
                "dcl": (DiversityContrast(bank=queue), 3.0),
                "m_dcl": (MomentumContrast(queue), 1.0),
                "concept": (On(DiversityContrast(), "concept"), 1.0),
                "prototypes": (PrototypeClassification(6, DIM, len(TEXTS), start=1), 1.0),
            }
        )
        self.optimizer = torch.optim.AdamW([*self.model.parameters(), *self.objective.parameters()], 1e-2)
        self.store = self.model.text_input.prepare(TEXTS)
        rng = np.random.default_rng(0)
        self.images = [rng.normal(size=(3, 6)).astype(np.float32) for _ in range(len(TEXTS) // 2)]

    def batches(self, start: int) -> Iterator[tuple[int, Batch]]:
        for step in range(start, 100):
            epoch, number = divmod(step, STEPS)
            rows = np.random.default_rng(epoch).permutation(len(TEXTS))[STEP * number : STEP * (number + 1)]
            inputs = as_inputs(
                self.model.image_input([self.images[i // 2] for i in rows], np.random.default_rng(step))
            )
            texts = as_inputs(self.store.collate(rows.tolist(), np.random.default_rng(step)))
            ids = torch.from_numpy(rows)
            yield step, Batch(inputs, texts, ids // 2, ids)

    @property
    def training(self) -> Prepared:
        ids = np.arange(len(TEXTS))
        names, splits = [str(i) for i in ids[::2]], ["train"] * len(self.images)
        return Prepared(Captions(self.images, TEXTS, ids // 2, names, splits), self.store)  # type: ignore[arg-type]

    def end_epoch(self, epoch: int) -> None:
        show_pairs(self.objective, epoch, self.model, self.training, show_progress=False)
        after_epoch(self.objective, epoch)

    def steps(self, start: int, count: int) -> list[dict[str, float]]:
        losses = []
        self.model.train()
        start_epoch(self.objective, start // STEPS)
        for step, batch in self.batches(start):
            if step == start + count:
                break
            self.twin.update(self.model)
            seen = self.model(batch)
            embeddings = replace(seen, views={**seen.views, "twin": self.twin(batch)})
            terms = self.objective(embeddings, batch)
            torch.stack(list(terms.values())).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            with torch.no_grad():
                after_step(self.objective, embeddings, batch)
                if step % STEPS == STEPS - 1:
                    self.end_epoch(step // STEPS)
            losses.append({name: value.item() for name, value in terms.items()})
        return losses


def test_every_trainable_parameter_moves() -> None:
    run = Run()
    run.steps(0, STEPS)  # the prototypes start with the second epoch
    before = {n: p.clone() for n, p in [*run.model.named_parameters(), *run.objective.named_parameters()]}
    run.steps(STEPS, 1)
    after = dict([*run.model.named_parameters(), *run.objective.named_parameters()])
    assert [n for n in before if torch.equal(before[n], after[n])] == []


def test_terms_start_in_their_time() -> None:
    losses = Run().steps(0, STEPS + 2)
    assert all(line["m_dcl"] == 0 for line in losses[:3])  # 24 slots, 10 pairs a step
    assert all(line["m_dcl"] != 0 for line in losses[3:])
    assert all(line["prototypes"] == 0 for line in losses[:STEPS])
    assert all(line["prototypes"] > 0 for line in losses[STEPS:])
    assert all(np.isfinite(list(line.values())).all() for line in losses)


@pytest.mark.parametrize("at", [1, 5, STEPS - 1, STEPS, STEPS + 3])
def test_a_resumed_run_goes_on_bit_for_bit(at: int) -> None:
    one = Run()
    one.steps(0, at)
    saved = [save(m.state_dict()) for m in (one.model, one.twin, one.objective)]
    optimizer, random = copy.deepcopy(one.optimizer.state_dict()), torch.get_rng_state()
    expected = one.steps(at, 10)

    two = Run(seed=99)
    for module, content in zip((two.model, two.twin, two.objective), saved, strict=True):
        module.load_state_dict(load(content), strict=True)
    two.optimizer.load_state_dict(optimizer)
    torch.set_rng_state(random)
    assert two.steps(at, 10) == expected
    for module, other in ((one.model, two.model), (one.twin, two.twin), (one.objective, two.objective)):
        for (name, a), b in zip(module.state_dict().items(), other.state_dict().values(), strict=True):
            assert torch.equal(a, b), name


def test_one_vector_mixes_both_scores(tmp_path: Path) -> None:
    run = Run()
    run.steps(0, 4)
    run.model.eval()
    _, batch = next(run.batches(0))
    with torch.no_grad():
        seen = run.model(batch)
    concept = seen.views["concept"]
    mixed = 0.9 * seen.image @ seen.text.T + 0.1 * concept.image @ concept.text.T
    run.model.save_pretrained(tmp_path / "model")
    model = Retriever.from_pretrained(tmp_path / "model")
    assert model.dim == 2 * DIM
    with torch.inference_mode():
        images, texts = model.image_vectors(batch.images), model.text_vectors(batch.texts)
    torch.testing.assert_close(model.similarity(images, texts), mixed)
    torch.testing.assert_close(images.norm(dim=1), torch.ones(STEP))
    assert model.fingerprint() == run.model.fingerprint()


def explained(labels: np.ndarray, steps: np.ndarray) -> float:
    """The share of the variance of ``steps`` that lies between the clusters: η² of a one-way analysis."""
    mean, between = steps.mean(), 0.0
    for one in np.unique(labels):
        members = steps[labels == one]
        between += len(members) * (members.mean() - mean) ** 2
    return float(between / ((steps - mean) ** 2).sum())


def test_clusters_do_not_tell_when_a_pair_was_seen() -> None:
    """Vectors gathered over an epoch cluster by the step they were gathered at; pairs encoded again do not."""
    run = Run()
    run.images = [
        np.float32(1 + 0.1 * image) for image in run.images
    ]  # much alike, as an untrained model sees them
    classify = run.objective.members["prototypes"]
    assert isinstance(classify, PrototypeClassification)
    gathered, seen_at = torch.zeros(len(TEXTS), DIM), np.zeros(len(TEXTS))
    move = classify.after_step

    def remember(embeddings: Embeddings, batch: Batch) -> None:
        gathered[batch.text_ids] = unit(embeddings.image + embeddings.text).detach()
        seen_at[batch.text_ids.numpy()] = remember.step  # type: ignore[attr-defined]
        remember.step += 1  # type: ignore[attr-defined]
        move(embeddings, batch)

    remember.step = 0  # type: ignore[attr-defined]
    classify.after_step = remember  # type: ignore[method-assign, assignment]
    found, earlier, chance = [], [], []
    rng = np.random.default_rng(0)
    for epoch in range(3):
        run.steps(epoch * STEPS, STEPS)
        pairs = encode_pairs(run.model, run.training)
        now = unit(pairs.image[pairs.image_of].float() + pairs.text.float())
        labels = nearest(now, classify.centroids)[1].numpy()
        found.append(explained(labels, seen_at))
        chance.append([explained(labels, rng.permutation(seen_at)) for _ in range(300)])
        by_time = nearest(gathered, cluster(gathered, classify.clusters).centroids)[1].numpy()
        earlier.append(explained(by_time, seen_at))
    averages = np.mean(chance, axis=0)  # of three epochs, under chance
    assert np.mean(found) < np.quantile(averages, 0.99)
    assert np.mean(earlier) > 2 * averages.max()  # what the test would see if vectors were gathered


def test_pairs_are_encoded_as_evaluation_sees_them() -> None:
    run = Run()
    run.steps(0, 2)
    assert run.model.training
    pairs = encode_pairs(run.model, run.training)
    assert run.model.training  # and goes on as it was
    run.model.eval()
    with torch.inference_mode():
        rows = [3, 40, 79]
        texts, _ = run.model.text(as_inputs(run.store.collate(rows)))
        images, _ = run.model.image(as_inputs(run.model.image_input([run.images[row // 2] for row in rows])))
    torch.testing.assert_close(pairs.text[rows].float(), texts, atol=1e-3, rtol=0)
    torch.testing.assert_close(pairs.image[pairs.image_of[rows]].float(), images, atol=1e-3, rtol=0)


def test_a_pair_without_its_picture_is_in_no_cluster() -> None:
    run = Run()

    class Damaged(list[np.ndarray]):
        unreadable: ClassVar = {2: "not an image"}

    training = Prepared(replace(run.training.captions, images=Damaged(run.images)), run.store)
    pairs = encode_pairs(run.model, training)
    assert [row for row in range(len(TEXTS)) if pairs.image_of[row] < 0] == [4, 5]
    classify = PrototypeClassification(6, DIM, len(TEXTS), start=1)
    classify.see_pairs(0, pairs)
    assert int(classify.hits.sum()) == len(TEXTS) - 2
