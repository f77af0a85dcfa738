"""Failure cases of a label-wise model by confused label pair: what ``diptych show confusions`` does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from diptych.branches.labels import label_view
from diptych.data.readable import ToBeLeftOut
from diptych.evaluation.confusions import DEPTHS, Failures, find_confusions
from diptych.evaluation.metrics import DIRECTIONS
from diptych.evaluation.report import aligned_rows
from diptych.model.retriever import Retriever
from diptych.model.scores import Scores
from diptych.reports.grids import Shown
from diptych.reports.page import Answer, QueryCard, cases_page
from diptych.runs.reading import views_of
from diptych.runs.show import shown_views
from diptych.storage import write_text
from diptych.training.prepare import prepare

EXAMPLES = 3  # examples of each pair on the page
KINDS = ("semantic", "super-class")


def show_confusions(
    run: Path,
    output: Path,
    *,
    data: Sequence[str] = (),
    split: str = "val",
    count: int = 12,
    show_progress: bool = True,
) -> str:
    """Write a page with the ``count`` most confused label pairs, and return the table of them."""
    model = Retriever.from_pretrained(run, "auto")
    _, view = label_view(model.branches.items())
    captions = shown_views([model], views_of([run], data, split, ToBeLeftOut()), show_progress)[0]
    rows = view.labels.rows_of(captions)
    ready = prepare(model, captions, device=model.device.type, show_progress=show_progress)
    scores = model.scores(ready.captions.images, ready.texts, show_progress=show_progress)
    found = find_confusions(scores, rows, rows[captions.image_of], view.labels.names, examples=EXAMPLES)
    heads = ["kind", "query's label", "retrieved instead", "image → text", "text → image"]
    shown = found.confusions[:count]
    table = [[one.kind, one.missed, one.found, *(str(one.counts[d]) for d in DIRECTIONS)] for one in shown]
    summary = _summary(found)
    cards = Shown(captions)
    cases = {
        f"{one.missed} → {one.found} ({one.kind})": [_card(cards, scores, *case) for case in one.examples]
        for one in shown
    }
    introduction = (
        f"{captions.name}, split {split}: {len(captions.images)} images and {len(captions.texts)} texts, model "
        f"{model.fingerprint()}. {summary} Semantic confusion: query and item share no label. Super-class confusion: "
        "they share another one."
    )
    write_text(output, cases_page("Confused labels", introduction, (heads, table), cases))
    return "\n".join([*aligned_rows([heads, *table]), summary, f"{output}: {len(shown)} pairs with examples"])


def _summary(found: Failures) -> str:
    parts = [
        f"{found.failed[d]:,} of {found.retrieved[d]:,} ({100 * found.failed[d] / max(1, found.retrieved[d]):.1f} %) "
        f"{d.replace('_to_', ' → ')}"
        for d in DIRECTIONS
    ]
    kinds = {kind: sum(one.count for one in found.confusions if one.kind == kind) for kind in KINDS}
    pairs = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items())
    depths = " and ".join(str(DEPTHS[d]) for d in DIRECTIONS)
    return (
        f"Items that miss labels of the query among the first {depths}: {'; '.join(parts)}. Pairs: {pairs}."
    )


def _card(shown: Shown, scores: Scores, direction: str, query: int, item: int) -> QueryCard:
    """One query with the item that confused its labels."""
    image, text = (query, item) if direction == DIRECTIONS[0] else (item, query)
    score = float(scores.tile(torch.tensor([image]), torch.tensor([text])))
    name, picture, words = shown.name(image), shown.picture(image), shown.data.texts[text]
    if direction == DIRECTIONS[0]:
        return QueryCard(name, [Answer(words, score, False)], picture)
    return QueryCard(words, [Answer(name, score, False, picture)])
