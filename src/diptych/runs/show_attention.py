"""Show where the towers of runs look, and what pictures add to texts: ``diptych show attention`` and ``knowledge``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from diptych import ops
from diptych.data.images import as_item
from diptych.data.problems import ToBeLeftOut
from diptych.data.vocabulary import tokenize
from diptych.encoders.shared import Contextual
from diptych.errors import DataError, SettingsError
from diptych.evaluation.report import table_text
from diptych.model.retriever import Retriever, Tower
from diptych.reports.sheets import Attended, attention_sheet, check_png, recalled_sheet, write_png
from diptych.runs.reading import encode_split, views_of
from diptych.runs.show import drawn_pictures, names_of, open_runs, picture_of
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
    check_png(output)
    names, views = names_of(runs), views_of(runs, data, split, ToBeLeftOut())
    models = [Retriever.from_pretrained(run) for run in runs]
    for run, model in zip(runs, models, strict=True):
        _transformers(run, model)
    view = views[0]
    texts_of = view.texts_of()
    rows, pictures = drawn_pictures(view, count, seed)
    texts = [view.texts[int(texts_of[row][0])] for row in rows]
    seen = [
        [attended(model, picture, text) for model in models]
        for picture, text in zip(pictures, texts, strict=True)
    ]
    write_png(attention_sheet(names, pictures, seen), output)
    table = [["attended to, on average", "of cells", "as many as", "of tokens", "as many as", "cosine"]]
    for number, name in enumerate(names):
        own = [panels[number] for panels in seen]
        cells = [one.cells.ravel().tolist() for one in own]
        words = [[share for _, share in one.words] for one in own]
        near = np.mean([one.cosine for one in own])
        counts = [f"{value:.1f}" for side in (cells, words) for value in _counts(side)]
        table.append([name, *counts, f"{near:.3f}"])
    return table_text(
        table,
        "as many as: e^entropy of the shares, 1 where one token gets everything",
        "cosine: of what the image side and the text side look at (means of their tokens, weighted by the shares)",
        f"{output}: {len(rows)} pairs of {view.name}, {split}, seed {seed}",
    )


def show_knowledge(
    runs: Sequence[Path],
    texts: tuple[str, str],
    output: Path,
    *,
    data: Sequence[str] = (),
    split: str = "val",
    count: int = 4,
) -> str:
    """How alike two texts are by their words and by each run, on the 0…5 scale of STS, and the pictures each calls up.

    The pictures are those the first run finds for either text in the split.
    """
    check_png(output)
    if not all(text.strip() for text in texts):
        raise SettingsError("a text is empty: give two sentences.")
    names, models, views = open_runs(runs, data, split)
    view = views[0]
    picture_of(view, 0)
    sets = [set(tokenize(text.lower())) for text in texts]
    common = sorted(sets[0] & sets[1])
    table = [["similarity of the two texts, 0 to 5", ""]]
    table.append(["words in common (Jaccard)", f"{SCALE * len(common) / len(sets[0] | sets[1]):.2f}"])
    found = []
    for name, model in zip(names, models, strict=True):
        vectors = model.encode_text(list(texts))
        images, _ = encode_split(model, view)
        scores = ops.cosine_scores(images, vectors)  # (N, 2)
        tops = [torch.topk(scores[:, side], min(count, len(scores))) for side in (0, 1)]
        table.append([name, f"{SCALE * max(0.0, float(vectors[0] @ vectors[1])):.2f}"])
        shared = len(set(tops[0].indices.tolist()) & set(tops[1].indices.tolist()))
        found.append((tops, shared))
    answers = [
        [(picture_of(view, int(row)), float(score)) for score, row in zip(*top, strict=True)]
        for top in found[0][0]
    ]
    write_png(recalled_sheet(texts, answers, [" | ".join(row) for row in table[1:]]), output)
    return table_text(
        table,
        f"words in common: {', '.join(common) or 'none'}",
        *(
            f"{name}: {shared} of the {len(tops[0].indices)} pictures it finds are the same for both texts"
            for name, (tops, shared) in zip(names, found, strict=True)
        ),
        f"{output}: pictures of {view.name}",
    )


@torch.inference_mode()
def attended(model: Retriever, picture: Image.Image, text: str) -> Attended:
    """Where a model looks in a picture and in a text, and how alike the two places are."""
    pixels, ids = as_inputs(model.image_input([as_item(picture)])), as_inputs(model.text_input([text]))
    (cells, seen), (shares, read) = _looks(model.image, pixels), _looks(model.text, ids)
    side = math.isqrt(len(cells))
    if side * side != len(cells):
        raise DataError(
            f"the image encoder makes {len(cells)} cells, which form no square: use a grid encoder (lite0, a CNN)."
        )
    words = model.text_input.spell(ids.values[0][ids.mask[0]].tolist())
    looked_at = list(zip(words, shares[: len(words)].tolist(), strict=True))
    return Attended(cells.reshape(side, side).double().numpy(), looked_at, float(seen @ read))


def _looks(tower: Tower, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The shares of the one set's tokens, and the unit mean of the tokens, weighted by them."""
    encoder = tower.encoder
    assert isinstance(encoder, Contextual)
    shares = encoder.transformer.attention(encoder.inner(inputs))
    values = encoder(inputs).values * shares[..., None]
    return shares[0], ops.unit(values.sum(1))[0]


def _transformers(run: Path, model: Retriever) -> None:
    for side, tower in (("image", model.image), ("text", model.text)):
        if not isinstance(tower.encoder, Contextual) or not len(tower.encoder.transformer.layers):
            raise SettingsError(
                f"the {side} side of {run} has no transformer whose attention could be shown: give a run of the "
                "recipe 'cookie' with --depth 1 or more."
            )


def _counts(shares: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Tokens of a set, and e^entropy of their shares, on average."""
    entropies = [-sum(p * math.log(p) for p in row if p > 0) for row in shares]
    return float(np.mean([len(row) for row in shares])), float(np.mean([math.exp(e) for e in entropies]))
