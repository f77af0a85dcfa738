"""Pictures for a paper: the joint space, what GPO has learned, lines with intervals, speed."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from diptych.errors import DataError, SettingsError, import_extra
from diptych.model.scores import EmbeddingScores
from diptych.progress import track
from diptych.reports.page import COLOURS
from diptych.storage import write_bytes

FORMATS = ("png", "pdf", "svg")
DPI = 150  # resolution of a PNG
PANEL = 5.0  # inches, the side of a panel of the joint space
IMAGES, TEXTS = COLOURS[:2]  # the two colours of the joint space
PERPLEXITY = 30.0  # t-SNE's number of neighbours; as all else scikit-learn's default, the paper gives none
LEAST_POINTS = 4  # t-SNE of fewer has no neighbourhoods
NAME = 48  # characters of a name above a panel
MARKS = "osD^vP*X"


@dataclass(frozen=True)
class Closeness:
    """How near images and texts lie in the joint space itself, before anything is flattened; distance = 1 − score.

    ``matched`` and ``others`` are mean distances of a text to its own image and to the other images; ``gap`` is
    the modality gap ‖mean image − mean text‖ (Liang et al. 2022).
    """

    matched: float
    others: float
    gap: float


@dataclass(frozen=True, eq=False)
class Space:
    """One model's vectors, images (N, D) and texts (M, D), and the image of each text (M,)."""

    name: str
    image: NDArray[np.float64]
    text: NDArray[np.float64]
    image_of: NDArray[np.int64]

    @staticmethod
    def of(name: str, image: torch.Tensor, text: torch.Tensor, image_of: NDArray[np.int64]) -> Space:
        """From encoded vectors; those that are not finite are refused."""
        checked = EmbeddingScores(image, text)
        return Space(name, checked.image.double().numpy(), checked.text.double().numpy(), image_of)

    def some(self, rows: NDArray[np.int64]) -> Space:
        """The images of these rows with all their texts."""
        place = np.full(len(self.image), -1)
        place[rows] = np.arange(len(rows))
        kept = np.flatnonzero(place[self.image_of] >= 0)
        return Space(self.name, self.image[rows], self.text[kept], place[self.image_of[kept]])

    def closeness(self) -> Closeness:
        """The means over all pairs come from the mean vectors: no matrix of scores is made."""
        own = np.einsum("md,md->m", self.image[self.image_of], self.text)
        centre, other_centre = self.image.mean(axis=0), self.text.mean(axis=0)
        pairs = len(self.image) * len(self.text)
        others = (centre @ other_centre * pairs - own.sum()) / max(pairs - len(own), 1)
        gap = np.linalg.norm(centre - other_centre)
        return Closeness(float(1 - own.mean()), float(1 - others), float(gap))


@dataclass(frozen=True, eq=False)
class LearnedPooling:
    """What one GPO has learned: the coefficients θ (size,) of the sorted values, largest first, by set size."""

    name: str
    theta: Mapping[int, NDArray[np.float64]]


@dataclass(frozen=True)
class Line:
    """One line: a value for each x, and half the width of its interval where there is one (0 for none)."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    spread: Sequence[float] = ()
    colour: int = 0
    style: str = "-"  # matplotlib's
    mark: str = "o"
    size: float = 3


def check_output(output: Path) -> None:
    """Refuse a picture that could not be written at the end, before any work is done."""
    figure_class()
    _format(output)


def drawn_images(space: Space, count: int, seed: int) -> NDArray[np.int64]:
    """Rows of ``count`` images that have a text, drawn with the seed; all of them where there are fewer."""
    with_text = np.unique(space.image_of)
    drawn: NDArray[np.int64] = np.random.default_rng(seed).permutation(with_text)[:count]
    return np.sort(drawn)


def flattened(space: Space, seed: int = 0) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Places (N, 2) and (M, 2): t-SNE of images and texts together, on one thread so that a seed gives one picture."""
    manifold = import_extra("sklearn.manifold", "plots", "a picture of the joint space", "scikit-learn")
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # comes with scikit-learn

    points = np.concatenate([space.image, space.text])
    if len(points) < LEAST_POINTS:
        raise DataError(
            f"{len(space.image)} images and {len(space.text)} texts are too few for a picture of the joint space: "
            f"give at least {LEAST_POINTS} together."
        )
    if not np.ptp(points, axis=0).any():
        raise DataError(f"{space.name} gives everything the same vector: the model has collapsed.")
    perplexity = min(PERPLEXITY, (len(points) - 1) / 3)
    with threadpool_limits(limits=1):
        places = manifold.TSNE(perplexity=perplexity, random_state=seed).fit_transform(points)
    return places[: len(space.image)], places[len(space.image) :]


def picture_of_spaces(spaces: Sequence[Space], *, below: Sequence[str] | None = None, seed: int = 0) -> Any:
    """One panel per space: images and texts in two colours, each text joined to its image; ``below`` says more."""
    from matplotlib.collections import LineCollection

    figure = figure_class()(figsize=(PANEL * len(spaces), PANEL + 0.9), dpi=DPI, layout="constrained")
    panels = figure.subplots(1, len(spaces), squeeze=False)[0]
    for number, space in enumerate(track(spaces, "t-SNE")):
        axes = panels[number]
        image, text = flattened(space, seed)
        pairs = list(np.stack([image[space.image_of], text], axis=1))  # M lines (2 ends, 2)
        faint = float(np.clip(80 / max(len(pairs), 1), 0.12, 0.5))  # many lines must not hide the points
        lines = LineCollection(
            pairs, colors="#6b7280", linewidths=0.5, alpha=faint, zorder=1, label="matched pair"
        )
        axes.add_collection(lines)
        small = {"linewidths": 0, "alpha": 0.9}
        axes.scatter(*text.T, s=9, color=TEXTS, label="text", zorder=2, **small)
        axes.scatter(*image.T, s=16, color=IMAGES, marker="s", label="image", zorder=3, **small)
        axes.set(xticks=[], yticks=[], aspect="equal")
        axes.set_adjustable("datalim")
        axes.set_title(short_name(space.name), parse_math=False)
        if below is not None:
            axes.set_xlabel(below[number], parse_math=False)
    handles, labels = panels[0].get_legend_handles_labels()
    legend = figure.legend(
        handles[::-1], labels[::-1], loc="outside lower center", ncols=3, frameon=False, markerscale=1.6
    )
    for handle in legend.legend_handles:
        handle.set_alpha(1)
    return figure


def pooled_elements(theta: NDArray[np.float64]) -> float:
    """How many elements the result is made of, e^entropy: 1 for max pooling, the size of the set for mean pooling."""
    positive = theta[theta > 0]
    return float(np.exp(-(positive * np.log(positive)).sum()))


def picture_of_poolings(poolings: Sequence[LearnedPooling]) -> Any:
    """One row per GPO: θ over the rank for each set size, and its running sum between mean and max pooling."""
    from matplotlib import colormaps

    figure = figure_class()(figsize=(10, 3.1 * len(poolings) + 0.6), dpi=DPI, layout="constrained")
    rows = figure.subplots(len(poolings), 2, squeeze=False)
    for (left, right), pooling in zip(rows, poolings, strict=True):
        shades = colormaps["viridis"](np.linspace(0.1, 0.8, len(pooling.theta)))
        for colour, (size, theta) in zip(shades, pooling.theta.items(), strict=True):
            rank = np.arange(1, size + 1)
            left.plot(rank, theta, color=colour, marker="o", markersize=3, label=f"{size} elements")
            left.plot([1, size], [1 / size] * 2, color=colour, linestyle="--", linewidth=0.9)
            share = np.concatenate([[0], np.cumsum(theta)])
            right.plot(np.arange(size + 1) / size, share, color=colour, marker="o", markersize=3)
        right.plot([0, 1], [0, 1], color="#6b7280", linestyle="--", linewidth=0.9, label="mean pooling")
        right.plot([0, 0, 1], [0, 1, 1], color="#6b7280", linestyle=":", linewidth=1.2, label="max pooling")
        left.set_title(short_name(pooling.name), parse_math=False, loc="left")
        left.set(
            xlabel="rank of the value, largest first", ylabel="weight θ", xlim=(0.5, None), ylim=(0, None)
        )
        right.set(xlabel="share of the set, largest first", ylabel="share of the weight")
        left.legend(frameon=False, title="dashed: mean pooling", title_fontsize="small", fontsize="small")
        right.legend(frameon=False, loc="lower right", fontsize="small")
    return figure


def picture_of_lines(
    title: str,
    x_label: str,
    y_label: str,
    lines: Sequence[Line],
    ticks: Sequence[str] = (),
    *,
    inches: tuple[float, float] = (8, 4.5),
    logarithmic: str = "",
    legend: str = "",
) -> Any:
    """One panel; ``ticks`` name the values 0, 1, 2, … of x where they are not numbers of a scale.

    ``logarithmic`` are the scales that are, of "x" and "y"; ``legend`` is the title of the legend.
    """
    figure = figure_class()(figsize=inches, dpi=DPI, layout="constrained")
    axes = figure.subplots()
    for line in lines:
        colour = COLOURS[line.colour % len(COLOURS)]
        axes.plot(
            line.x, line.y, linestyle=line.style, color=colour, marker=line.mark, markersize=line.size,
            label=short_name(line.name),
        )  # fmt: skip
        if any(line.spread) and len(line.x) == 1:  # a band of one point has no width
            axes.errorbar(line.x, line.y, yerr=line.spread, color=colour, capsize=3)
        elif any(line.spread):
            low, high = (np.array(line.y) + sign * np.array(line.spread) for sign in (-1, 1))
            axes.fill_between(line.x, low, high, color=colour, alpha=0.12, linewidth=0)
    axes.grid(alpha=0.25)
    axes.set(xlabel=x_label, ylabel=y_label, **{f"{scale}scale": "log" for scale in logarithmic})
    if ticks:
        axes.set_xticks(range(len(ticks)), ticks)
    elif all(isinstance(x, int) for line in lines for x in line.x) and "x" not in logarithmic:
        axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_title(title, parse_math=False, loc="left")
    axes.legend(frameon=False, fontsize="small", title=legend or None)
    return figure


def save_picture(figure: Any, output: Path) -> None:
    """Write a picture in the format its name ends in."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=_format(output))
    write_bytes(output, buffer.getvalue())


def figure_class() -> Any:
    """Matplotlib's Figure, which draws without a screen."""
    return import_extra("matplotlib.figure", "plots", "a picture").Figure


def _format(output: Path) -> str:
    kind = output.suffix.removeprefix(".").lower()
    if kind not in FORMATS:
        raise SettingsError(
            f"{output} cannot be drawn: let its name end in .{', .'.join(FORMATS[:-1])} or .{FORMATS[-1]}."
        )
    return kind


def short_name(name: str) -> str:
    """A name that fits above a panel: its end where it is long."""
    return name if len(name) <= NAME else f"…{name[1 - NAME :]}"
