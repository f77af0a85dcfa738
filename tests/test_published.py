"""``vse-infinity-published`` against the public code's choices, stated again in plain float64 torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from on_cpu import cpu_accelerator
from small import bert_folder, precomputed
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from diptych.data.captions import Captions
from diptych.data.formats import open_captions
from diptych.data.held_out import training_splits
from diptych.encoders import regions
from diptych.objectives.combine import Ramp
from diptych.objectives.objective import Objective, after_epoch, after_step, start_epoch
from diptych.recipes import RECIPES
from diptych.runs.train import seed_everything
from diptych.training.method import Method
from diptych.training.optim import build_optimizer, schedule_of, set_rates
from diptych.training.step import Step
from diptych.types import Batch, Embeddings, Features, as_inputs

DIM, WIDTH, BATCH = 8, 16, 12
SMALL = {"dim": DIM, "batch_size": BATCH, "min_count": 1, "word_dim": 6, "size_augmentation": "visual"}
RECIPE = RECIPES["vse-infinity-published"]


@pytest.fixture(scope="module")
def captions(tmp_path_factory: pytest.TempPathFactory) -> Captions:
    data = precomputed(tmp_path_factory.mktemp("data") / "toy_precomp", width=WIDTH)
    return training_splits(open_captions(str(data)))[0]


# --- the public code, restated


class Pooling(nn.Module):
    """GPO: cosines and sines of the rank → BiGRU → one number each → softmax / 0.1 over the ranks of a set."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(32, 32, batch_first=True, bidirectional=True)
        self.score = nn.Linear(32, 1, bias=False)

    def forward(self, sets: list[Tensor]) -> Tensor:
        rows = []
        for one in sets:
            n = len(one)
            angles = torch.arange(n).double()[:, None] * 10000.0 ** (-torch.arange(0, 32, 2).double() / 32)
            codes = torch.stack([angles.sin(), angles.cos()], dim=2).reshape(n, 32)
            states = self.gru(codes[None])[0][0]
            weights = torch.softmax(self.score((states[:, :32] + states[:, 32:]) / 2) / 0.1, dim=0)  # (n, 1)
            rows.append((one.sort(dim=0, descending=True).values * weights).sum(dim=0))
        pooled = torch.stack(rows)
        return pooled / (pooled.norm(dim=1, keepdim=True) + 1e-8)


class Published(nn.Module):
    """Region MLP with BatchNorm over zero-padded rows, words by a BiGRU, the hinge without a mask."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, DIM)
        self.first, self.norm, self.second = nn.Linear(WIDTH, 512), nn.BatchNorm1d(512), nn.Linear(512, DIM)
        self.embed = nn.Embedding(words, 6)
        self.rnn = nn.GRU(6, DIM, batch_first=True, bidirectional=True)
        self.image_pool, self.text_pool = Pooling(), Pooling()

    def images(self, kept: list[Tensor]) -> Tensor:
        longest = max(map(len, kept))
        padded = torch.stack([torch.cat([x, x.new_zeros(longest - len(x), WIDTH)]) for x in kept])
        flat = padded.reshape(-1, WIDTH)
        inner = torch.relu(self.norm(self.first(flat)))  # padding included
        out = (self.fc(flat) + self.second(inner)).view(len(kept), longest, DIM)
        return self.image_pool([row[: len(x)] for row, x in zip(out, kept, strict=True)])  # type: ignore[no-any-return]

    def texts(self, ids: Tensor, sizes: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embed(ids), sizes, batch_first=True, enforce_sorted=False)
        states = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]
        states = (states[..., :DIM] + states[..., DIM:]) / 2
        return self.text_pool([row[:n] for row, n in zip(states, sizes.tolist(), strict=True)])  # type: ignore[no-any-return]


def hinge(image: Tensor, text: Tensor, hardest: bool) -> Tensor:
    scores = image @ text.T
    total = scores.new_zeros(())
    rows, columns = [], []
    for i in range(len(scores)):
        others = [j for j in range(len(scores)) if j != i]  # also texts of the same image
        rows.append([(0.2 + scores[i, j] - scores[i, i]).clamp_min(0) for j in others])
        columns.append([(0.2 + scores[j, i] - scores[i, i]).clamp_min(0) for j in others])
    for costs in (*rows, *columns):
        found = torch.stack(costs)
        total = total + (found.max() if hardest else found.sum())
    return total


def both_ways(ahead: nn.GRU, back: nn.GRU) -> dict[str, Tensor]:
    return {**ahead.state_dict(), **{f"{name}_reverse": value for name, value in back.state_dict().items()}}


def copied(method: Method) -> Published:
    """The restatement with the weights of a model."""
    image, text = method.retriever.image, method.retriever.text
    own: Any = {
        "fc": image.encoder.linear, "first": image.encoder.first, "second": image.encoder.second,
        "norm": image.encoder.norm, "embed": text.encoder.words,
    }  # fmt: skip
    other = Published(text.encoder.words.num_embeddings).double()  # type: ignore[union-attr, arg-type]
    for name, module in own.items():
        getattr(other, name).load_state_dict(module.state_dict())
    words: Any = text.encoder
    other.rnn.load_state_dict(both_ways(words.ahead, words.back))
    for pool, tower in ((other.image_pool, image), (other.text_pool, text)):
        generator: Any = tower.aggregator.generator
        pool.gru.load_state_dict(both_ways(generator.gru.ahead, generator.gru.back))
        pool.score.load_state_dict(generator.head.state_dict())
    return other


def batches(method: Method, captions: Captions, count: int) -> list[tuple[Batch, Tensor]]:
    """Batches with the regions that are kept of each image; two texts of one image are in every batch."""
    rng, store = np.random.default_rng(0), method.retriever.text_input.prepare(captions.texts)
    found = []
    for _ in range(count):
        rows = np.concatenate([[0, 1], rng.permutation(np.arange(5, len(captions.texts)))[: BATCH - 2]])
        images = np.stack([np.asarray(captions.images[int(i)]) for i in captions.image_of[rows]])
        kept = torch.from_numpy(rng.random(images.shape[:2]) > 0.4)
        kept[:, 0] = True
        kept[0] = True  # one set is whole, so that padding goes up to it
        values = Features.whole(torch.from_numpy(images).double())
        texts = as_inputs(store.collate(rows.tolist()))
        found.append(
            (Batch(values, texts, torch.from_numpy(captions.image_of[rows]), torch.from_numpy(rows)), kept)
        )
    return found


@pytest.mark.parametrize("wrong", ["", "weight_decay", "mask_same_image", "count_padding", "warmup_epoch"])
def test_training_follows_the_public_code(
    captions: Captions, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight steps over two epochs, weights and running statistics equal; each choice undone is noticed."""
    changes: dict[str, Any] = {"weight_decay": 1e-4, "mask_same_image": True, "warmup_epoch": 1}
    settings = RECIPE.settings(**SMALL, **({wrong: changes[wrong]} if wrong in changes else {}))
    seed_everything(0)
    method = RECIPE.build(settings, captions)
    if wrong == "count_padding":
        method.retriever.image.encoder.count_padding = False  # type: ignore[assignment]
    method.retriever.double().train()
    other = copied(method).train()
    theirs = torch.optim.AdamW(other.parameters(), lr=5e-4)  # weight decay as torch has it
    optimizer, schedule = build_optimizer(method, settings), schedule_of(settings, 4)
    step = Step(method, method.retriever, optimizer, cpu_accelerator(), settings.clip_norm)
    losses = []
    for number, (batch, kept) in enumerate(batches(method, captions, 8)):
        monkeypatch.setattr(regions, "drop_each", lambda mask, rate, kept=kept: kept)
        start_epoch(method.objective, number // 4)
        set_rates(optimizer, settings.learning_rate * schedule.factor(number))
        terms = step(batch)[2]
        assert isinstance(batch.images, Features)
        chosen = [x[k] for x, k in zip(batch.images.values, kept, strict=True)]
        vectors = other.images(chosen), other.texts(batch.texts.values, batch.texts.sizes)
        loss = hinge(*vectors, hardest=number >= 4)
        theirs.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(other.parameters(), 2.0)
        theirs.step()
        losses.append((float(sum(terms.values())), float(loss.detach())))
    again = copied(method).state_dict()
    away = max(float((again[name] - value).abs().max()) for name, value in other.state_dict().items())
    if wrong:
        assert away > 1e-5
    else:
        assert away < 1e-6  # a tower gives its vectors in float32
        assert [ours for ours, _ in losses] == pytest.approx([them for _, them in losses], abs=1e-5)


def test_weight_decay_is_that_of_each_public_run() -> None:
    assert RECIPE.settings().weight_decay == 1e-2
    assert RECIPE.settings(text_encoder="hf:bert-base-uncased").weight_decay == 1e-4
    assert RECIPE.settings(image_encoder="lite0").weight_decay == 1e-4
    assert RECIPE.settings(weight_decay=3e-3).weight_decay == 3e-3
    assert RECIPE.settings().warmup_epoch == -1


def test_the_projection_of_bert_starts_as_torch_does(captions: Captions, tmp_path: Path) -> None:
    source = str(bert_folder(tmp_path / "bert"))
    starts = {}
    for name in ("vse-infinity", "vse-infinity-published"):
        settings = RECIPES[name].settings(**{**SMALL, "dim": 600, "text_encoder": source})
        starts[name] = RECIPES[name].build(settings, captions).retriever.text.encoder.linear
    layer = starts["vse-infinity-published"]
    assert isinstance(layer, nn.Linear)
    bound = layer.in_features**-0.5
    weight = layer.weight.detach()
    assert 0.95 * bound < float(weight.abs().max()) <= bound
    assert float(weight.std()) == pytest.approx(bound / 3**0.5, rel=0.02)
    assert layer.bias.detach().any()
    assert not starts["vse-infinity"].bias.detach().any()  # type: ignore[union-attr]


class One(Objective):
    def forward(self, embeddings: Embeddings, batch: Batch) -> dict[str, Tensor]:
        return {"one": embeddings.image.new_ones(())}


def test_the_loss_of_one_epoch_rises_with_its_steps() -> None:
    ramp, seen = Ramp(One(), epoch=1, steps=4), Embeddings(torch.ones(2, 1), torch.ones(2, 1))
    empty = Features.whole(torch.zeros(2, 1))
    batch = Batch(empty, empty, torch.arange(2), torch.arange(2))
    found = []
    for epoch in range(3):
        start_epoch(ramp, epoch)
        for number in range(4):
            if (epoch, number) == (1, 2):  # a run that was stopped goes on where it was
                again = Ramp(One(), epoch=1, steps=4)
                again.load_state_dict(ramp.state_dict())
                start_epoch(again, epoch)
                ramp = again
            found.append(float(ramp(seen, batch)["one"]))
            after_step(ramp, seen, batch)
        after_epoch(ramp, epoch)
    assert found == [1, 1, 1, 1, 0, 0.25, 0.5, 0.75, 1, 1, 1, 1]
