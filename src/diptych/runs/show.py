"""Show what runs have learned: what ``diptych show`` does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from diptych.aggregators import GPO, Generator
from diptych.branches.labels import label_view
from diptych.data.captions import Captions
from diptych.data.formats import open_captions
from diptych.data.held_out import training_splits
from diptych.data.problems import LeftOut, ToBeLeftOut, unopenable
from diptych.errors import CheckpointError, DataError, SettingsError
from diptych.evaluation.label_retrieval import DEPTHS, Failures, find_confusions
from diptych.evaluation.metrics import DIRECTIONS, KS, summary
from diptych.evaluation.report import table_text
from diptych.model.retriever import Retriever
from diptych.model.scores import EmbeddingScores, Scores
from diptych.recipes import RECIPES
from diptych.recipes.recipe import Recipe
from diptych.reports.charts import (
    LearnedPooling,
    Space,
    check_output,
    drawn_images,
    picture_of_poolings,
    picture_of_spaces,
    pooled_elements,
    save_picture,
)
from diptych.reports.grids import Compared, Showcase, has_pictures
from diptych.reports.page import Answer, QueryCard, QueryComparison, comparison_page
from diptych.reports.sheets import check_png, contact_sheet, write_png
from diptych.runs.reading import encode_split, readable_views, views_of
from diptych.runs.train import captions_fingerprint, noisy, resumed_settings, seed_everything
from diptych.storage import write_text
from diptych.training.checkpoint import read_run
from diptych.training.prepare import prepare


def show_augmentation(
    data: str, output: Path, *, split: str = "train", count: int = 3, draws: int = 2, seed: int = 0
) -> str:
    """Draw ``count`` pictures of a split after every step of augmentation, ``draws`` times each, as a PNG."""
    check_png(output)
    captions = open_captions(data, split=split, problems=ToBeLeftOut())
    rows, pictures = drawn_pictures(captions, count, seed)
    if not rows:
        raise DataError(f"{captions.name}, split {split}, has no image with a text: give other data.")
    texts_of = captions.texts_of()
    texts = [max((captions.texts[text] for text in texts_of[row].tolist()), key=len) for row in rows]
    write_png(contact_sheet(pictures, texts, draws=draws, seed=seed), output)
    return f"{output}: {len(rows)} pictures of {captions.name}, {split}, {draws} draws each, seed {seed}"


def drawn_pictures(captions: Captions, count: int, seed: int) -> tuple[list[int], list[Image.Image]]:
    """Rows and pictures of ``count`` images that have a text and can be read; says which cannot."""
    with_text, left_out = np.unique(captions.image_of), LeftOut()
    rows = left_out.draw(captions, np.random.default_rng(seed).permutation(with_text).tolist(), count)
    left_out.tell(len(captions.images), advice=False)
    return rows, [picture_of(captions, row) for row in rows]


def picture_of(captions: Captions, row: int) -> Image.Image:
    """The picture of an image; features are refused."""
    item = captions.images[row]
    if not isinstance(item, Image.Image):
        raise DataError(f"{captions.name} holds features, not pictures: give data with pictures.")
    return item


def learned_poolings(name: str, retriever: Retriever, sizes: Sequence[int]) -> list[LearnedPooling]:
    """The coefficients of every GPO of a model whose weights depend on the size of a set alone.

    Coefficients per dimension are averaged over the dimensions.
    """
    found = []
    for path, module in retriever.named_modules():
        if isinstance(module, GPO) and isinstance(module.generator, Generator):
            theta = {}
            for size in sizes:
                with torch.no_grad():
                    row = module.coefficients(torch.tensor([size], device=retriever.device), size)[0]
                theta[size] = row.mean(dim=1).double().cpu().numpy()  # of (size, K)
            where = {"image.aggregator": "images", "text.aggregator": "texts"}.get(path)
            where = where or path.replace(".", " ").replace("_", " ")
            found.append(LearnedPooling(f"{name}, {where}", theta))
    return found


SIZES = (4, 12, 36)  # set sizes of the pooling picture: a few words, a sentence, the regions of an image
ASKED = {"image_to_text": "Image → text", "text_to_image": "Text → image"}


def show_space(
    runs: Sequence[Path],
    output: Path,
    *,
    data: Sequence[str] = (),
    split: str = "val",
    count: int = 200,
    seed: int = 0,
    untrained: bool = False,
) -> str:
    """Draw the joint space of each run, before training too where asked, and return the numbers beside it.

    The same ``count`` images with all their texts are drawn in every panel; the numbers are over the whole split.
    """
    check_output(output)
    names, models, views = open_runs(runs, data, split)
    if untrained:
        models.insert(0, model_at_start(runs[0], data).to(models[0].device))
        names, views = [f"{names[0]}, before training", *names], [views[0], *views]
    spaces = [
        Space.of(name, *encode_split(model, view), view.image_of)
        for name, model, view in zip(names, models, views, strict=True)
    ]
    rows = drawn_images(spaces[0], count, seed)
    parts = [space.some(rows) for space in spaces]
    numbers = [space.closeness() for space in spaces]
    below = [
        f"distance (1 − score): {one.matched:.2f} of matched pairs, {one.others:.2f} of others\n"
        f"modality gap {one.gap:.2f}"
        for one in numbers
    ]
    save_picture(picture_of_spaces(parts, below=below, seed=seed), output)
    table = [["distance (1 − score)", "matched pairs", "other pairs", "modality gap"]]
    table += [
        [name, f"{one.matched:.3f}", f"{one.others:.3f}", f"{one.gap:.3f}"]
        for name, one in zip(names, numbers, strict=True)
    ]
    asked = f" ({count} asked, no more have a text)" if len(rows) < count else ""
    return table_text(
        table,
        f"numbers: all {len(views[0].images)} images and {len(views[0].texts)} texts of {views[0].name}, {split}",
        f"{output}: {len(rows)} images{asked} with their {len(parts[0].text)} texts, seed {seed}",
    )


def show_grids(
    runs: Sequence[Path],
    output: Path,
    *,
    data: Sequence[str] = (),
    split: str = "val",
    where: str = "random",
    count: int = 12,
    seed: int = 0,
) -> str:
    """Write one page with what one or two runs answer to the same queries, and return how they do in all."""
    if len(runs) > 2:
        raise SettingsError(f"grids show one run or two, not {len(runs)}: diptych show grids RUN1 RUN2.")
    names, models, views = open_runs(runs, data, split)
    scores = {
        name: EmbeddingScores(*encode_split(model, view))
        for name, model, view in zip(names, models, views, strict=True)
    }
    view = next((view for view in views if has_pictures(view)), views[0])
    compared = Compared(view, scores)
    found = {name: summary(ranks) for name, ranks in compared.ranks.items()}
    metrics = [f"{way}_recall@{k}" for way in DIRECTIONS for k in KS] + ["rsum"]
    rows = [[metric, *(f"{found[name][metric]:.1f}" for name in names)] for metric in metrics]
    grids: dict[str, tuple[str, Sequence[QueryCard | QueryComparison]]] = {}
    for way, title in ASKED.items():
        queries = compared.comparisons(way, count, where=where, seed=seed)
        grids[title] = (_choice_note(compared, way, len(queries), where, seed), queries)
    fingerprints = ", ".join(
        f"{name} is {model.fingerprint()}" for name, model in zip(names, models, strict=True)
    )
    introduction = (
        f"{view.name}, split {split}: {len(view.images)} images and {len(view.texts)} texts, data "
        f"{view.fingerprint()}, ties by index. Models: {fingerprints}. Right answers are framed in green."
    )
    title = " and ".join(names)
    write_text(output, comparison_page(title, introduction, (("", *names), rows), grids))
    sentences = (f"{title}: {sentence}" for title, (sentence, _) in grids.items())
    return table_text([["", *names], *rows], *sentences, f"{output}")


def show_pooling(runs: Sequence[Path], output: Path, *, sizes: Sequence[int] = SIZES) -> str:
    """Draw the weights every GPO of these runs has learned, and return them as a table."""
    check_output(output)
    if not sizes or min(sizes) < 1:
        raise SettingsError(f"set sizes {list(sizes)}: give whole numbers from 1 on, as in --sizes 4,12,36.")
    sizes = sorted(set(sizes))
    poolings, without = [], []
    for name, run in zip(names_of(runs), runs, strict=True):
        model = Retriever.from_pretrained(run)
        learned = learned_poolings(name, model, sizes)
        poolings += learned
        if not learned:
            kinds = [type(tower.aggregator).__name__ for tower in (model.image, model.text)]
            without.append(f"{name} ({kinds[0]} for images, {kinds[1]} for texts)")
    if not poolings:
        raise SettingsError(
            f"no weights by rank in {', '.join(without)}: give a run with GPO on a side, not --gpo_data_dependent."
        )
    save_picture(picture_of_poolings(poolings), output)
    table = [["weight θ of the sorted values", "set size", "1st", "2nd", "3rd", "last", "as many as"]]
    for pooling in poolings:
        for size, theta in pooling.theta.items():
            first = [f"{theta[k]:.3f}" if k < size else "" for k in range(3)]
            table.append(
                [pooling.name, str(size), *first, f"{theta[-1]:.3f}", f"{pooled_elements(theta):.1f}"]
            )
    return table_text(
        table,
        "as many as: e^entropy of the weights, 1 for max pooling and the set size for mean pooling",
        *(f"left out, no weights by rank: {one}" for one in without),
        f"{output}",
    )


def names_of(runs: Sequence[Path]) -> list[str]:
    """A name for each run: its folder's, or the whole path where two folders have the same."""
    for run in runs:
        if sum(run.resolve() == other.resolve() for other in runs) > 1:
            raise SettingsError(f"{run} is given twice: give different runs.")
    names = [run.resolve().name for run in runs]
    return names if len(set(names)) == len(names) else [str(run) for run in runs]


def open_runs(
    runs: Sequence[Path],
    data: Sequence[str],
    split: str,
    device: str = "auto",
    compute_precision: str = "no",
    cut: Callable[[Captions], Captions] = lambda view: view,
) -> tuple[list[str], list[Retriever], list[Captions]]:
    """Names, models and what each reads of a split; says which images cannot be read."""
    names, views = names_of(runs), [cut(view) for view in views_of(runs, data, split, ToBeLeftOut())]
    models = [Retriever.from_pretrained(run, device, compute_precision) for run in runs]
    return names, models, readable_views(models, views, LeftOut(), advice=False)


def model_at_start(run: Path, data: Sequence[str] = ()) -> Retriever:
    """The model a run started from: built again from its recipe, settings, seed and training data."""
    card = read_run(run)
    source = data[0] if data else str(card["data"])
    parts = training_splits(open_captions(source, problems=ToBeLeftOut()))
    parts, _ = noisy(parts, str(card["settings"].get("noise", "")))
    training, validation = (LeftOut().add(part, unopenable(part.images)) for part in parts)
    if captions_fingerprint(training, validation) != card["data_fingerprint"]:
        raise CheckpointError(
            f"{source} is not what {run} was trained on ({card['data']}, as it was then): "
            "give that as --data, or leave out --untrained."
        )
    recipe: Recipe | None = RECIPES.get(card["recipe"])
    if recipe is None:
        raise CheckpointError(
            f"{run} is a run of the recipe '{card['recipe']}', which this version does not know: update diptych."
        )
    settings = resumed_settings(recipe, run, {})
    seed_everything(settings.seed)  # as before training
    return recipe.build(settings, training).retriever.eval()


def _choice_note(compared: Compared, way: str, count: int, where: str, seed: int) -> str:
    first, second, equal = compared.counts(way)
    names, total = list(compared.scores), first + second + equal
    how = {
        "random": f"{count} of {total} queries, drawn at random (seed {seed}).",
        "differs": f"The {count} of {total} queries whose rank differs most: the extremes, not a fair sample.",
    }[where]
    if len(names) == 1:
        return how
    return (
        f"{how} Of all, {names[0]} ranks the right answer higher for {first}, {names[1]} for {second}; "
        f"{equal} are ranked alike."
    )


EXAMPLES = 3  # examples of each pair on the page
KINDS = ("semantic", "super-class")


def show_confusions(
    run: Path,
    output: Path,
    *,
    data: Sequence[str] = (),
    split: str = "val",
    count: int = 12,
) -> str:
    """Write a page with the ``count`` most confused label pairs, and return the table of them."""
    _, (model,), (captions,) = open_runs([run], data, split)
    _, view = label_view(model.branches.items())
    rows = view.labels.rows_of(captions)
    ready = prepare(model, captions, device=model.device.type)
    scores = model.scores(ready.captions.images, ready.texts, show_progress=True)
    found = find_confusions(scores, rows, rows[captions.image_of], view.labels.names, examples=EXAMPLES)
    heads = ["kind", "query's label", "retrieved instead", "image → text", "text → image"]
    confusions = found.confusions[:count]
    table = [
        [one.kind, one.missed, one.found, *(str(one.counts[d]) for d in DIRECTIONS)] for one in confusions
    ]
    summary = _summary(found)
    cards = Showcase(captions)
    cases = {
        f"{one.missed} → {one.found} ({one.kind})": (
            "",
            [_card(cards, scores, *case) for case in one.examples],
        )
        for one in confusions
    }
    introduction = (
        f"{captions.name}, split {split}: {len(captions.images)} images and {len(captions.texts)} texts, model "
        f"{model.fingerprint()}. {summary} Semantic confusion: query and item share no label. Super-class confusion: "
        "they share another one."
    )
    write_text(output, comparison_page("Confused labels", introduction, (heads, table), cases))
    return table_text([heads, *table], summary, f"{output}: {len(confusions)} pairs with examples")


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


def _card(showcase: Showcase, scores: Scores, direction: str, query: int, item: int) -> QueryCard:
    """One query with the item that confused its labels."""
    image, text = (query, item) if direction == DIRECTIONS[0] else (item, query)
    score = float(scores.tile(torch.tensor([image]), torch.tensor([text])))
    name, picture, words = showcase.name(image), showcase.picture(image), showcase.data.texts[text]
    if direction == DIRECTIONS[0]:
        return QueryCard(name, [Answer(words, score, False)], picture)
    return QueryCard(words, [Answer(name, score, False, picture)])
