"""CODER's parts on real towers: parameters move, a resumed run goes on bit for bit, scores mix."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from diptych.aggregators import GPO
from diptych.branches.concept import ConceptBranch
from diptych.data.concepts import count_concepts
from diptych.data.images import RegionInput
from diptych.data.text import WordInput
from diptych.data.vocabulary import build_vocabulary
from diptych.encoders.bigru import BiGRU
from diptych.encoders.regions import Regions
from diptych.objectives.combine import On, Sum
from diptych.objectives.diversity import DiversityContrast
from diptych.objectives.momentum import MomentumContrast
from diptych.objectives.prototypes import PrototypeClassification
from diptych.objectives.queues import CoupledQueue
from diptych.retriever import Retriever, Tower
from diptych.twin import Twin
from diptych.types import Batch

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
                "prototypes": (PrototypeClassification(6, DIM, len(TEXTS)), 1.0),
            }
        )
        self.optimizer = torch.optim.AdamW([*self.model.parameters(), *self.objective.parameters()], 1e-2)
        self.store = self.model.text_input.prepare(TEXTS)

    def batches(self, start: int) -> Iterator[tuple[int, Batch]]:
        rng = np.random.default_rng(0)
        images = [rng.normal(size=(3, 6)).astype(np.float32) for _ in range(len(TEXTS) // 2)]
        for step in range(start, 100):
            epoch, number = divmod(step, STEPS)
            rows = np.random.default_rng(epoch).permutation(len(TEXTS))[STEP * number : STEP * (number + 1)]
            inputs = self.model.image_input([images[i // 2] for i in rows], np.random.default_rng(step))
            texts = self.store.collate(rows.tolist(), np.random.default_rng(step))
            ids = torch.from_numpy(rows)
            yield step, Batch(inputs, texts, ids // 2, ids)

    def steps(self, start: int, count: int) -> list[dict[str, float]]:
        losses = []
        self.model.train()
        self.objective.start_epoch(start // STEPS)
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
                self.objective.after_step(embeddings, batch)
                if step % STEPS == STEPS - 1:
                    self.objective.after_epoch(step // STEPS)
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
