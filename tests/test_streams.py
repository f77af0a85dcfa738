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
from on_cpu import cpu_accelerator
from small import bert_folder, precomputed

from diptych.aggregators.gpo import GPO
from diptych.data.formats import open_captions
from diptych.data.images import RegionInput
from diptych.data.text import WordInput
from diptych.encoders.bigru import BiGRU
from diptych.encoders.regions import Regions
from diptych.model.retriever import Retriever, Tower
from diptych.objectives import soft_labels
from diptych.objectives.combine import On, Sum
from diptych.objectives.contrastive import InfoNCE
from diptych.recipes import RECIPES
from diptych.targets.columns import fill_targets
from diptych.training.loading import PairLoader
from diptych.training.method import Method
from diptych.training.step import Step
from diptych.training.streams import beside
from diptych.types import Batch, Embeddings, Features, Sides, as_inputs

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

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: made.current)
    for name, stand_in in (("Stream", Stream), ("Event", Event), ("stream", On)):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return made


def watched(order: Order, module: torch.nn.Module, name: str, *needed: str) -> list[set[str]]:
    """From now on the module must find what it needs; what it knew at its beginning is noted."""
    knew: list[set[str]] = []
    plain = module.forward

    def forward(*given: object, **named: object) -> object:
        order.begins(name, *needed)
        knew.append(set(order.current.known))
        found = plain(*given, **named)
        order.over(name)
        return found

    module.forward = forward
    return knew


def stepped(folder: Path, order: Order, watch: Callable[[Any], None]) -> None:
    """One step of CUSA on VSE∞, watched."""
    training = open_captions(str(precomputed(folder / "data", train=8, dev=4))).split("train")
    recipe = RECIPES["cusa-vse-infinity"]
    teacher = str(bert_folder(folder / "bert"))
    settings = recipe.settings(dim=8, batch_size=6, min_count=1, word_dim=4, text_teacher=teacher)
    method = recipe.build(settings, training)
    targets = fill_targets(method.targets, training, device=CPU, show_progress=False)
    texts = method.retriever.text_input.prepare(training.texts)
    batches = PairLoader(
        training, method.retriever.image_input, texts, 6, 0, targets=targets, pin_memory=False
    )
    # not AdamW: where there is a real GPU it refuses to step inside what it takes for a recording
    optimizer = torch.optim.SGD(method.retriever.parameters(), lr=settings.learning_rate)
    step = Step(method, method.retriever.train(), optimizer, cpu_accelerator(), 0.0)
    batch = next(iter(batches.epoch(0)))
    watch(method)
    with beside(method, step):
        step(batch)


def test_a_step_reads_nothing_too_early(
    tmp_path: Path, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    knew: dict[str, list[set[str]]] = {"cosines": []}
    cosines = soft_labels.teacher_cosines

    def noted(batch: Batch, column: str) -> torch.Tensor:
        knew["cosines"].append(set(order.current.known))
        found = cosines(batch, column)
        order.over("cosines")
        return found

    monkeypatch.setattr(soft_labels, "teacher_cosines", noted)

    def watch(method: Any) -> None:
        retriever, members = method.retriever, method.objective.members
        towers = ("image", "text")
        knew["image"] = watched(order, retriever.image, "image")
        knew["text"] = watched(order, retriever.text, "text")
        knew["uni"] = watched(order, retriever.branches["uni"], "uni", *towers)
        knew["hard"] = watched(order, members["hard"], "hard", *towers)
        knew["csa"] = watched(order, members["csa"], "csa", *towers)
        knew["usa"] = watched(order, members["usa"], "usa", "uni")

    stepped(tmp_path, order, watch)
    assert order.main.known == {"image", "text", "cosines", "uni", "hard", "csa", "usa"}  # all is joined
    # and what may run side by side does
    assert "image" not in knew["text"][0]
    assert "text" not in knew["image"][0]
    assert knew["cosines"] == [set(), set()]  # one for each teacher, read by both objectives
    for name in ("hard", "csa", "usa"):
        assert not {"hard", "csa", "usa", "cosines"} & knew[name][0]


def test_a_recording_leaves_no_trace(tmp_path: Path, order: Order) -> None:
    traces = []

    def watch(method: Any) -> None:
        parts = [method.retriever, *method.retriever.modules(), *method.objective.modules(), soft_labels]
        traces.append([(part, dict(vars(part))) for part in parts])

    stepped(tmp_path, order, watch)
    for part, before in traces[0]:
        names = ("forward", "rows_of_every_size", "teacher_cosines")
        assert [vars(part).get(name) for name in names] == [before.get(name) for name in names]


def test_a_pooling_of_every_size_waits_for_no_encoder(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of GPO need the weights alone, and a second look at a view stays where it is."""
    monkeypatch.setattr("diptych.aggregators.gpo.every_size", lambda *_: True)  # as while recording
    retriever = small_retriever()
    begun = watched(order, retriever.image.encoder, "encoder")
    table, rows = retriever.image.aggregator.rows_of_every_size, list[set[str]]()

    def noted(*given: Any) -> torch.Tensor:
        rows.append(set(order.current.known))
        found: torch.Tensor = table(*given)
        order.over("rows")
        return found

    retriever.image.aggregator.rows_of_every_size = noted
    values = Features.whole(torch.randn(5, 3, 4))
    words = as_inputs(retriever.text_input.prepare(["a b"] * 5).collate(range(5)))
    ids = torch.arange(5)
    batch = Batch(values, words, ids, ids, views={"again": Sides(images=values)})
    method = Method(retriever, InfoNCE())
    with beside(method, _Seeing()):
        retriever(batch)
    assert rows == [set(), {"encoder", "rows"}]
    assert begun == [set(), {"encoder", "rows"}]


def test_towers_of_shared_weights_stay_on_one_stream(order: Order) -> None:
    retriever = small_retriever()
    retriever.text.encoder.shared = retriever.image.encoder
    knew = watched(order, retriever.text, "text")
    watched(order, retriever.image, "image")
    values = Features.whole(torch.randn(5, 3, 4))
    words = as_inputs(retriever.text_input.prepare(["a b"] * 5).collate(range(5)))
    ids = torch.arange(5)
    with beside(Method(retriever, InfoNCE()), _Seeing()):
        retriever(Batch(values, words, ids, ids))
    assert "image" in knew[0]


class _Seeing:
    def seen_by_objective(self, batch: Batch) -> Batch:
        return batch


def small_retriever() -> Any:
    words = ["<pad>", "<start>", "<end>", "<unk>", "a", "b"]
    towers = Tower(Regions(4, 8), GPO()), Tower(BiGRU(len(words), 4, 8), GPO())
    return Retriever(*towers, RegionInput(4), WordInput(words, augment=0.0))


def test_a_sum_over_a_view_waits_for_the_view(order: Order) -> None:
    rows = Embeddings(torch.zeros(2, 2), torch.zeros(2, 2))
    seen = Embeddings(rows.image, rows.text, views={"concept": rows})
    nothing = Features.whole(torch.zeros(2, 1, 1))
    inner = InfoNCE()
    watched(order, inner, "inner", "concept")
    objective = On(Sum({"x": (inner, 1.0)}), "concept")
    order.over("concept")
    with beside(Method(small_retriever(), objective), _Seeing()):
        objective(seen, Batch(nothing, nothing, torch.arange(2), torch.arange(2)))
    assert "inner" in order.main.known
