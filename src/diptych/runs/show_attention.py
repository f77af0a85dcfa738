"""Show where the towers of runs look, and what pictures add to texts: ``diptych show attention`` and ``knowledge``."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from diptych import ops
from diptych.data.captions import Captions
from diptych.data.images import as_item
from diptych.data.problems import LeftOut, ToBeLeftOut
from diptych.data.vocabulary import tokenize
from diptych.encoders.shared import Contextual
from diptych.errors import DataError, SettingsError
from diptych.evaluation.report import aligned_rows
from diptych.model.retriever import Retriever, Tower
from diptych.reports.sheets import Attended, attention_sheet, recalled_sheet
from diptych.runs.reading import views_of
from diptych.runs.show import encoded, names_of, shown_views
from diptych.storage import write_bytes
from diptych.types import Inputs, as_inputs

SCALE = 5.0  # STS scores run from 0 to 5


def show_attention(
    runs: Sequence[Path],
    output: Path,
    *,
    data: Sequence[str] = (),
    split: str = "val",
    count: int = 4,
    seed: int = 0,
) -> str:
    """Draw, for the same pairs, which cells and words each run's transformer looks at; return the numbers beside it.

    A token's share is the attention it gets in the last layer of the transformer, averaged over heads and queries.
    """
    _check_png(output)
    names, views = names_of(runs), views_of(runs, data, split, ToBeLeftOut())
    models = [Retriever.from_pretrained(run) for run in runs]
    for run, model in zip(runs, models, strict=True):
        _transformers(run, model)
    view = views[0]
    texts_of, with_text = view.texts_of(), np.unique(view.image_of)
    left_out = LeftOut()
    rows = left_out.draw(view, np.random.default_rng(seed).permutation(with_text).tolist(), count)
    left_out.tell(len(view.images), advice=False)
    chosen = [int(texts_of[row][0]) for row in rows]
    pictures = [_picture(view, row) for row in rows]
    seen = [
        [attended(model, picture, view.texts[text]) for model in models]
        for picture, text in zip(pictures, chosen, strict=True)
    ]
    _write_png(attention_sheet(names, pictures, seen), output)
    table = [["attended to, on average", "of cells", "as many as", "of tokens", "as many as", "cosine"]]
    for number, (name, model) in enumerate(zip(names, models, strict=True)):
        own = [panels[number] for panels in seen]
        cells = [one.cells.ravel().tolist() for one in own]
        words = [[share for _, share in one.words] for one in own]
        near = [cosine_of_attended(model, p, view.texts[t]) for p, t in zip(pictures, chosen, strict=True)]
        table.append(
            [
                name,
                *(f"{value:.1f}" for side in (cells, words) for value in _counts(side)),
                f"{np.mean(near):.3f}",
            ]
        )
    return "\n".join(
        [
            *aligned_rows(table),
            "as many as: e^entropy of the shares, 1 where one token gets everything",
            "cosine: of what the image side and the text side look at (means of their tokens, weighted by the shares)",
            f"{output}: {len(rows)} pairs of {view.name}, {split}, seed {seed}",
        ]
    )


def show_knowledge(
    runs: Sequence[Path],
    texts: tuple[str, str],
    output: Path,
    *,
    data: Sequence[str] = (),
    split: str = "val",
    count: int = 4,
    show_progress: bool = True,
) -> str:
    """How alike two texts are by their words and by each run, on the 0…5 scale of STS, and the pictures each calls up.

    The pictures are those the first run finds for either text in the split.
    """
    _check_png(output)
    if not all(text.strip() for text in texts):
        raise SettingsError("a text is empty: give two sentences.")
    names, views = names_of(runs), views_of(runs, data, split, ToBeLeftOut())
    models = [Retriever.from_pretrained(run) for run in runs]
    views = shown_views(models, views, show_progress)
    view = views[0]
    _picture(view, 0)
    sets = [set(tokenize(text.lower())) for text in texts]
    common = sorted(sets[0] & sets[1])
    table = [["similarity of the two texts, 0 to 5", ""]]
    table.append(["words in common (Jaccard)", f"{SCALE * len(common) / len(sets[0] | sets[1]):.2f}"])
    found = []
    for name, model in zip(names, models, strict=True):
        vectors = model.encode_text(list(texts))
        images, _ = encoded(model, view, show_progress)
        scores = ops.cosine_scores(images, vectors)  # (N, 2)
        tops = [torch.topk(scores[:, side], min(count, len(scores))) for side in (0, 1)]
        table.append([name, f"{SCALE * max(0.0, float(vectors[0] @ vectors[1])):.2f}"])
        shared = len(set(tops[0].indices.tolist()) & set(tops[1].indices.tolist()))
        found.append((tops, shared))
    answers = [
        [
            (_picture(view, row), score)
            for row, score in zip(top.indices.tolist(), top.values.tolist(), strict=True)
        ]
        for top in found[0][0]
    ]
    _write_png(recalled_sheet(texts, answers, [" | ".join(row) for row in table[1:]]), output)
    lines = [
        f"{name}: {shared} of the {len(tops[0].indices)} pictures it finds are the same for both texts"
        for name, (tops, shared) in zip(names, found, strict=True)
    ]
    said = ", ".join(common) or "none"
    return "\n".join(
        [*aligned_rows(table), f"words in common: {said}", *lines, f"{output}: pictures of {view.name}"]
    )


@torch.inference_mode()
def attended(model: Retriever, picture: Image.Image, text: str) -> Attended:
    """Where a model looks in a picture and in a text."""
    cells = _shares(model.image, as_inputs(model.image_input([as_item(picture)])))[0]
    side = math.isqrt(len(cells))
    if side * side != len(cells):
        raise DataError(
            f"the image encoder makes {len(cells)} cells, which form no square: use a grid encoder (lite0, a CNN)."
        )
    ids = as_inputs(model.text_input([text]))
    shares = _shares(model.text, ids)[0]
    words = model.text_input.spelled(ids.values[0][ids.mask[0]].tolist())
    return Attended(
        cells.reshape(side, side).double().numpy(),
        list(zip(words, shares[: len(words)].tolist(), strict=True)),
    )


@torch.inference_mode()
def cosine_of_attended(model: Retriever, picture: Image.Image, text: str) -> float:
    """The cosine of what the two sides look at: the means of their tokens, weighted by the attention they get."""
    means = []
    for tower, inputs in (
        (model.image, as_inputs(model.image_input([as_item(picture)]))),
        (model.text, as_inputs(model.text_input([text]))),
    ):
        features = tower.encoder(inputs)
        means.append(ops.unit((features.values * _shares(tower, inputs)[..., None]).sum(1))[0])
    return float(means[0] @ means[1])


def _shares(tower: Tower, inputs: Inputs) -> torch.Tensor:
    encoder = tower.encoder
    assert isinstance(encoder, Contextual)
    return encoder.transformer.attention(encoder.inner(inputs))


def _transformers(run: Path, model: Retriever) -> None:
    for side, tower in (("image", model.image), ("text", model.text)):
        if not isinstance(tower.encoder, Contextual) or not len(tower.encoder.transformer.layers):
            raise SettingsError(
                f"the {side} side of {run} has no transformer whose attention could be shown: give a run of the "
                "recipe 'cookie' with --depth 1 or more."
            )


def _picture(view: Captions, row: int) -> Image.Image:
    item = view.images[row]
    if not isinstance(item, Image.Image):
        raise DataError(f"{view.name} holds features, not pictures: give data with pictures.")
    return item


def _counts(shares: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Tokens of a set, and e^entropy of their shares, on average."""
    entropies = [-sum(p * math.log(p) for p in row if p > 0) for row in shares]
    return float(np.mean([len(row) for row in shares])), float(np.mean([math.exp(e) for e in entropies]))


def _check_png(output: Path) -> None:
    if output.suffix.lower() != ".png":
        raise SettingsError(
            f"{output} cannot be written: the picture is a PNG, give a name that ends in .png."
        )


def _write_png(sheet: Image.Image, output: Path) -> None:
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG", optimize=True)
    write_bytes(output, buffer.getvalue())
