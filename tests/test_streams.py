"""What runs side by side in a recorded step: nothing is read before it is there.

Streams and events of CUDA are stood in for by what they promise: each stream knows the work that is over before its
next one begins.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from small import bert_folder, precomputed

from diptych.data.formats import open_captions
from diptych.kernels.streams import Beside, branching, scored
from diptych.objectives.combine import On, Sum
from diptych.objectives.contrastive import InfoNCE
from diptych.recipes import RECIPES
from diptych.targets.filling import fill_targets
from diptych.training.loading import PairLoader
from diptych.training.step import Step
from diptych.types import Batch, Embeddings, Features

CPU = torch.device("cpu")


class Order:
    """The streams of a recording, and what each of them knows to be over."""

    def __init__(self) -> None:
        self.main = self.current = Stream()

    def over(self, work: str) -> None:
        self.current.known.add(work)

    def begins(self, work: str, *needed: str) -> None:
        missing = set(needed) - self.current.known
        assert not missing, f"{work} begins without {missing}"


class Stream:
    def __init__(self) -> None:
        self.known: set[str] = set()

    def wait_event(self, event: Any) -> None:
        self.known |= event.known

    def wait_stream(self, other: Stream) -> None:
        self.known |= other.known


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> Order:
    made = Order()

    class Event:
        def record(self) -> None:
            self.known = set(made.current.known)

    class On:
        def __init__(self, stream: Stream) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            self.before, made.current = made.current, self.stream

        def __exit__(self, *_: object) -> None:
            made.current = self.before

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: made.current)
    for name, stand_in in (("Stream", Stream), ("Event", Event), ("stream", On)):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return made


def watched(order: Order, module: torch.nn.Module, name: str, *needed: str) -> list[set[str]]:
    """From now on the module must find what it needs; what it knew at its beginning is noted."""
    knew: list[set[str]] = []

    def before(*_: object) -> None:
        order.begins(name, *needed)
        knew.append(set(order.current.known))

    module.register_forward_pre_hook(before)
    module.register_forward_hook(lambda *_: order.over(name))
    return knew


def stepped(folder: Path, order: Order, watch: Callable[[Any], None]) -> None:
    """One step of CUSA on VSE∞, watched."""
    training = open_captions(str(precomputed(folder / "data", train=8, dev=4))).split("train")
    recipe = RECIPES["cusa-vse-infinity"]
    teacher = str(bert_folder(folder / "bert"))
    settings = recipe.settings(dim=8, batch_size=6, min_count=1, word_dim=4, text_teacher=teacher)
    method = recipe.build(settings, training)
    targets = fill_targets(
        method.targets, training, device=CPU, cache_dir=folder / "cache", show_progress=False
    )
    texts = method.retriever.text_input.prepare(training.texts)
    batches = PairLoader(
        training, method.retriever.image_input, texts, 6, 0, targets=targets, pin_memory=False
    )
    # not AdamW: where there is a real GPU it refuses to step inside what it takes for a recording
    optimizer = torch.optim.SGD(method.retriever.parameters(), lr=settings.learning_rate)
    step = Step(method, method.retriever.train(), optimizer, Accelerator(cpu=True), 0.0)
    batch = next(iter(batches.epoch(0)))
    watch(method)
    step(batch)


def test_a_step_reads_nothing_too_early(tmp_path: Path, order: Order) -> None:
    knew: dict[str, list[set[str]]] = {}

    def watch(method: Any) -> None:
        retriever, members = method.retriever, method.objective.members
        prepare = method.objective.prepare

        def prepared(batch: Batch) -> Batch:
            found: Batch = prepare(batch)
            order.over("cosines")
            return found

        method.objective.prepare = prepared
        towers, labels = ("image", "text"), ("cosines",)
        knew["image"] = watched(order, retriever.image, "image")
        knew["text"] = watched(order, retriever.text, "text")
        knew["uni"] = watched(order, retriever.branches["uni"], "uni", *towers)
        knew["hard"] = watched(order, members["hard"], "hard", *towers)
        knew["csa"] = watched(order, members["csa"], "csa", *towers, *labels)
        knew["usa"] = watched(order, members["usa"], "usa", "uni", *labels)

    stepped(tmp_path, order, watch)
    assert order.main.known == {"image", "text", "cosines", "uni", "hard", "csa", "usa"}  # all is joined
    # and what may run side by side does
    assert "image" not in knew["text"][0]
    assert "cosines" not in knew["image"][0] | knew["text"][0]
    assert "uni" not in knew["hard"][0] | knew["csa"][0]
    assert not {"hard", "csa"} & knew["usa"][0]


def test_a_sum_over_a_view_waits_for_the_view(order: Order) -> None:
    rows = Embeddings(torch.zeros(2, 2), torch.zeros(2, 2))
    seen = Embeddings(rows.image, rows.text, views={"concept": rows})
    nothing = Features.whole(torch.zeros(2, 1, 1))
    with branching():
        with Beside() as other:
            order.over("concept")
        scored()
        other.join()
    inner = InfoNCE()
    watched(order, inner, "inner", "concept")
    On(Sum({"x": (inner, 1.0)}), "concept")(seen, Batch(nothing, nothing, torch.arange(2), torch.arange(2)))
    assert "inner" in order.main.known
