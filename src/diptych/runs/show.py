"""Show what runs have learned: what ``diptych show`` does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from diptych.data.captions import Captions
from diptych.data.formats import open_captions
from diptych.data.readable import LeftOut, ToBeLeftOut, unopenable
from diptych.errors import CheckpointError, SettingsError
from diptych.evaluation.metrics import DIRECTIONS, KS, summary
from diptych.evaluation.report import aligned_rows
from diptych.model.retriever import Retriever
from diptych.model.scores import EmbeddingScores
from diptych.recipes import find_recipe
from diptych.reports.charts import (
    Closeness,
    Space,
    check_output,
    drawn_images,
    picture_of_poolings,
    picture_of_spaces,
    pooled_elements,
    save_picture,
)
from diptych.reports.grids import Compared, has_pictures
from diptych.reports.page import QueryComparison, comparison_page
from diptych.runs.poolings import learned_poolings
from diptych.runs.reading import readable_views, views_of
from diptych.runs.train import captions_fingerprint, resumed_settings, seed_everything, training_splits
from diptych.storage import write_text
from diptych.training.checkpoint import read_run
from diptych.training.prepare import prepare

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
    show_progress: bool = True,
) -> str:
    """Draw the joint space of each run, before training too where asked, and return the numbers beside it.

    The same ``count`` images with all their texts are drawn in every panel; the numbers are over the whole split.
    """
    check_output(output)
    names, views = names_of(runs), views_of(runs, data, split, ToBeLeftOut())
    models = [Retriever.from_pretrained(run) for run in runs]
    views = shown_views(models, views, show_progress)
    if untrained:
        models.insert(0, model_at_start(runs[0], data))
        names, views = [f"{names[0]}, before training", *names], [views[0], *views]
    spaces = [
        Space.of(name, *encoded(model, view, show_progress), view.image_of)
        for name, model, view in zip(names, models, views, strict=True)
    ]
    rows = drawn_images(spaces[0], count, seed)
    shown = [space.some(rows) for space in spaces]
    numbers = [space.closeness() for space in spaces]
    below = [_sentence(one) for one in numbers]
    save_picture(picture_of_spaces(shown, below=below, seed=seed, show_progress=show_progress), output)
    table = [["distance (1 − score)", "matched pairs", "other pairs", "modality gap"]]
    table += [
        [name, f"{one.matched:.3f}", f"{one.others:.3f}", f"{one.gap:.3f}"]
        for name, one in zip(names, numbers, strict=True)
    ]
    asked = f" ({count} asked, no more have a text)" if len(rows) < count else ""
    return "\n".join(
        [
            *aligned_rows(table),
            f"numbers: all {len(views[0].images)} images and {len(views[0].texts)} texts of {views[0].name}, {split}",
            f"{output}: {len(rows)} images{asked} with their {len(shown[0].text)} texts, seed {seed}",
        ]
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
    show_progress: bool = True,
) -> str:
    """Write one page with what two runs answer to the same queries, and return how they compare in all."""
    if len(runs) != 2:
        raise SettingsError(f"grids compare two runs, not {len(runs)}: diptych show grids RUN1 RUN2.")
    names, views = names_of(runs), views_of(runs, data, split, ToBeLeftOut())
    models = [Retriever.from_pretrained(run) for run in runs]
    views = shown_views(models, views, show_progress)
    scores = {
        name: EmbeddingScores(*encoded(model, view, show_progress))
        for name, model, view in zip(names, models, views, strict=True)
    }
    shown = next((view for view in views if has_pictures(view)), views[0])
    compared = Compared(shown, scores)
    found = {name: summary(ranks) for name, ranks in compared.ranks.items()}
    metrics = [f"{way}_recall@{k}" for way in DIRECTIONS for k in KS] + ["rsum"]
    rows = [[metric, *(f"{found[name][metric]:.1f}" for name in names)] for metric in metrics]
    grids: dict[str, tuple[str, Sequence[QueryComparison]]] = {}
    for way, title in ASKED.items():
        queries = compared.comparisons(way, count, where=where, seed=seed)
        grids[title] = (_chosen(compared, way, len(queries), where, seed), queries)
    fingerprints = ", ".join(
        f"{name} is {model.fingerprint()}" for name, model in zip(names, models, strict=True)
    )
    introduction = (
        f"{shown.name}, split {split}: {len(shown.images)} images and {len(shown.texts)} texts, data "
        f"{shown.fingerprint()}, ties by index. Models: {fingerprints}. Right answers are framed in green."
    )
    title = f"{names[0]} and {names[1]}"
    write_text(output, comparison_page(title, introduction, (("", *names), rows), grids))
    return "\n".join(
        [
            *aligned_rows([["", *names], *rows]),
            *(f"{title}: {sentence}" for title, (sentence, _) in grids.items()),
            f"{output}",
        ]
    )


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
    return "\n".join(
        [
            *aligned_rows(table),
            "as many as: e^entropy of the weights, 1 for max pooling and the set size for mean pooling",
            *(f"left out, no weights by rank: {one}" for one in without),
            f"{output}",
        ]
    )


def names_of(runs: Sequence[Path]) -> list[str]:
    """A name for each run: its folder's, or the whole path where two folders have the same."""
    for run in runs:
        if sum(run.resolve() == other.resolve() for other in runs) > 1:
            raise SettingsError(f"{run} is given twice: give different runs.")
    names = [run.resolve().name for run in runs]
    return names if len(set(names)) == len(names) else [str(run) for run in runs]


def shown_views(
    models: Sequence[Retriever], views: Sequence[Captions], show_progress: bool
) -> list[Captions]:
    """What each model reads, without the images that cannot be read; these are told."""
    return readable_views(models, views, LeftOut(), advice=False, show_progress=show_progress)


def model_at_start(run: Path, data: Sequence[str] = ()) -> Retriever:
    """The model a run started from: built again from its recipe, settings, seed and training data."""
    card = read_run(run)
    source = data[0] if data else str(card["data"])
    parts = training_splits(open_captions(source, problems=ToBeLeftOut()))
    training, validation = (LeftOut().add(part, unopenable(part.images)) for part in parts)
    if captions_fingerprint(training, validation) != card["data_fingerprint"]:
        raise CheckpointError(
            f"{source} is not what {run} was trained on ({card['data']}, as it was then): "
            "give that as --data, or leave out --untrained."
        )
    recipe = find_recipe(card["recipe"])
    if recipe is None:
        raise CheckpointError(
            f"{run} is a run of the recipe '{card['recipe']}', which this version does not know: update diptych."
        )
    settings = resumed_settings(recipe, run, {})
    seed_everything(settings.seed)  # as before training
    return recipe.build(settings, training).retriever.eval()


def encoded(model: Retriever, view: Captions, show_progress: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The vectors of every image (N, D) and text (M, D) of a split, as evaluation makes them."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ready = prepare(model.to(device), view, device=device, show_progress=show_progress)
    return (
        model.encode_image(ready.captions.images, show_progress=show_progress),
        model.encode_text(ready.texts, show_progress=show_progress),
    )


def _sentence(one: Closeness) -> str:
    return (
        f"distance (1 − score): {one.matched:.2f} of matched pairs, {one.others:.2f} of others\n"
        f"modality gap {one.gap:.2f}"
    )


def _chosen(compared: Compared, way: str, count: int, where: str, seed: int) -> str:
    first, second, equal = compared.counts(way)
    names, total = list(compared.scores), first + second + equal
    how = {
        "random": f"{count} of {total} queries, drawn at random (seed {seed}).",
        "differs": f"The {count} of {total} queries whose rank differs most: the extremes, not a fair sample.",
    }[where]
    return (
        f"{how} Of all, {names[0]} ranks the right answer higher for {first}, {names[1]} for {second}; "
        f"{equal} are ranked alike."
    )
