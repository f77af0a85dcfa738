"""What a model answers to queries drawn from captions, and what one or two models answer to the same ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from diptych.data.captions import Captions
from diptych.errors import SettingsError
from diptych.evaluation.metrics import DIRECTIONS, Placement, Ranks, count_ranks
from diptych.model.scores import Scores
from diptych.reports.page import Answer, QueryComparison, Result

Where = Literal["random", "differs"]
WHERE: tuple[str, ...] = get_args(Where)


class Showcase:
    """Captions as a page shows them: names, pictures, and the best answers to a query, given its scores."""

    def __init__(self, data: Captions) -> None:
        self.data, self.texts_of, self.pictures = data, data.texts_of(), has_pictures(data)

    def answers(self, direction: str, query: int, scores: torch.Tensor, count: int) -> list[Answer]:
        """The best ``count`` items for a query of a direction; ``scores`` are those of the whole gallery."""
        # of equal ones the smaller number first, as ranks are counted
        values, rows = scores.sort(descending=True, stable=True)
        best, data = list(zip(values[:count].tolist(), rows[:count].tolist(), strict=True)), self.data
        if direction == "text_to_image":
            right = int(data.image_of[query])
            return [Answer(self.name(row), v, row == right, self.picture(row)) for v, row in best]
        own = set(self.texts_of[query].tolist())
        return [Answer(data.texts[row], value, row in own) for value, row in best]

    def name(self, image: int) -> str:
        """The first text of a picture; of features, which cannot be shown, the id too."""
        first = next((self.data.texts[i] for i in self.texts_of[image]), "")
        return first if first and self.pictures else f"{self.data.image_ids[image]} {first}".strip()

    def picture(self, image: int) -> Image.Image | None:
        """The picture of an image, if it has one."""
        if not self.pictures:
            return None
        item = self.data.images[image]
        assert isinstance(item, Image.Image)
        return item


class Compared:
    """One or two models over the same captions; ``scores`` maps a model's name to its scores (images, texts)."""

    def __init__(self, data: Captions, scores: Mapping[str, Scores]) -> None:
        if len(scores) not in (1, 2):
            raise SettingsError(f"{len(scores)} models to compare: give one, or two of different names.")
        self.data, self.scores, self.showcase = data, dict(scores), Showcase(data)
        self.ranks: dict[str, Ranks] = {
            name: count_ranks(one, data.image_of) for name, one in self.scores.items()
        }

    def comparisons(
        self, direction: str, count: int, *, answers: int = 6, where: str = "random", seed: int = 0
    ) -> list[QueryComparison]:
        """``count`` queries of a direction with the best ``answers`` of each model."""
        if where == "differs" and len(self.scores) == 1:
            raise SettingsError("where='differs' compares two models and there is one: say random.")
        a, b = (self._placements(direction) * 2)[:2]
        places = chosen_queries(a.ranks(), b.ranks(), count, where, seed)
        return [self._comparison(direction, int(a.queries[place]), place, answers) for place in places]

    def counts(self, direction: str) -> tuple[int, int, int]:
        """Queries whose right answer the first model ranks higher, the second ranks higher, and neither."""
        first, second = (placement.ranks() for placement in (self._placements(direction) * 2)[:2])
        return int((first < second).sum()), int((second < first).sum()), int((first == second).sum())

    def _placements(self, direction: str) -> list[Placement]:
        assert direction in DIRECTIONS
        return [getattr(ranks, direction) for ranks in self.ranks.values()]

    def _comparison(self, direction: str, query: int, place: int, answers: int) -> QueryComparison:
        to_images, asked, results = direction == "text_to_image", slice(query, query + 1), []
        for (name, scores), placement in zip(self.scores.items(), self._placements(direction), strict=True):
            tile = scores.tile(slice(None), asked).T if to_images else scores.tile(asked, slice(None))
            found = self.showcase.answers(direction, query, tile[0], answers)
            results.append(Result(name, int(placement.ranks()[place]) + 1, found))
        if to_images:
            return QueryComparison(self.data.texts[query], results)
        return QueryComparison(self.showcase.name(query), results, self.showcase.picture(query))


def has_pictures(data: Captions) -> bool:
    """Whether the images can be shown: stored features cannot."""
    return len(data.images) > 0 and isinstance(data.images[0], Image.Image)


def chosen_queries(
    a: NDArray[np.float64], b: NDArray[np.float64], count: int, where: str, seed: int
) -> Sequence[int]:
    """Places of the queries to show, given their ranks (Q,) from 0 by either model.

    ``random``: drawn with the seed, so that nobody chose them. ``differs``: those whose rank, counted from 1, changes
    by the largest factor: 1 → 10 says more than 801 → 810.
    """
    if where not in WHERE:
        raise SettingsError(f"where='{where}' is unknown: choose one of {', '.join(WHERE)}.")
    order = random_order(len(a), seed)
    if where == "differs":  # a stable sort of the draw: equal changes in random order
        change = np.abs(np.log((a[order] + 1) / (b[order] + 1)))
        order = order[np.argsort(-change, kind="stable")]
        order = order[a[order] != b[order]]
    places: list[int] = order[:count].tolist()
    return places


def random_order(count: int, seed: int = 0) -> NDArray[np.int64]:
    """0 … count − 1 in a random order that the seed fixes, so that nobody chose what is shown."""
    return np.random.default_rng(seed).permutation(count)
