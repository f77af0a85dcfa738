"""Many-to-many judgements: mAP@R, R-Precision and R@K when a query has any number of right answers.

For a query with relevant set G, R = |G|, and ranked list L (rel(r) = 1 where L_r ∈ G):

* mAP@R = 1/R · Σ_{r ≤ R} rel(r) · Prec@r
* R-Precision = Prec@R = |L_1..R ∩ G| / R
* R@K = 1 if any of L_1..K is in G

in percent, averaged over the judged queries of each direction. Lists are ranked by (score descending,
gallery index ascending), the ``index`` tie rule. ECCV Caption [1] and Crisscrossed Captions (CxC) [2] judge
the COCO test split; their files come with the package ``eccv-caption`` (extra ``eccv``).

[1] Chun et al., ECCV Caption, 2022. [2] Parekh et al., Crisscrossed Captions, 2021.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diptych.data.captions import Captions
from diptych.data.corrections import check_ids, corrections_of, read_corrections, text_names
from diptych.data.formats import open_captions, split_options
from diptych.data.problems import ToBeLeftOut
from diptych.errors import DataError, MissingExtra, SettingsError
from diptych.evaluation.leading import leading
from diptych.evaluation.metrics import KS
from diptych.model.scores import Scores, checked_tile
from diptych.registries import JUDGEMENTS
from diptych.storage import MISREAD, parse_json

FILES = {"eccv": "eccv", "cxc": "cxc", "coco": "original"}  # our name -> the package's file names
_SIDES = ("image_to_caption", "caption_to_image")
CHUNK = 256  # queries ranked at a time
_TRAILING_NUMBER = re.compile(r"(\d+)(?:\.\w+)?$")
Ids = tuple[NDArray[np.int64], NDArray[np.int64]]
"""The ids of the images and of the texts that judgements name."""


@dataclass(frozen=True, slots=True)
class Judgements:
    """Relevant items by id: image id -> text ids, text id -> image ids. Only listed queries are averaged.

    Ids are COCO's, or with ``rows`` the rows of the images and of the texts in the data. ``images`` and ``texts`` are
    the size of the gallery they were made for (None: any). A relevant id outside the gallery counts in R and is never
    found, as in the published numbers (ECCV Caption has two).
    """

    name: str
    image_to_text: Mapping[int, frozenset[int]]
    text_to_image: Mapping[int, frozenset[int]]
    images: int | None = None
    texts: int | None = None
    rows: bool = False
    corrections: str = ""  # the file of corrections that these are to be read from, once the data are known

    @staticmethod
    def of_rows(
        name: str, pairs: Iterable[tuple[int, int]], gallery: tuple[int | None, int | None] = (None, None)
    ) -> Judgements:
        """Judgements of pairs (image row, text row): what is relevant one way is relevant the other way."""
        images: dict[int, set[int]] = {}
        texts: dict[int, set[int]] = {}
        for image, text in pairs:
            images.setdefault(image, set()).add(text)
            texts.setdefault(text, set()).add(image)
        sides = [{row: frozenset(right) for row, right in sorted(side.items())} for side in (images, texts)]
        return Judgements(name, sides[0], sides[1], gallery[0], gallery[1], rows=True)

    def on(self, captions: Captions) -> Judgements:
        """These judgements, read for the data where they are a file of corrections."""
        return with_matches(self.corrections, captions) if self.corrections else self

    def ids_of(self, captions: Captions) -> Ids:
        """The ids of the images and of the texts of ``captions``, of the kind that these judgements name."""
        if self.rows:
            return np.arange(len(captions.images)), np.arange(len(captions.texts))
        return coco_ids(captions)

    def check(self, images: int, texts: int) -> None:
        """Refuse a gallery of another size: fewer wrong answers would flatter the model."""
        if (self.images or images, self.texts or texts) != (images, texts):
            raise DataError(
                f"{self.name} is judged on {self.images or images:,} images and {self.texts or texts:,} "
                f"texts, but the data have {images:,} and {texts:,}: evaluate on that split."
            )


@dataclass(frozen=True, slots=True)
class QueryMetrics:
    """Per-query results in percent: the query ids and, by metric name, one value each."""

    queries: NDArray[np.int64]
    values: Mapping[str, NDArray[np.float64]]


def load_judgements(name: str, folder: str | Path | None = None) -> Judgements:
    """ECCV Caption (``eccv``), CxC (``cxc``) or the original pairs (``coco``), by COCO ids, or a file of corrections.

    ``folder`` holds ``eccv_image_to_caption.json`` and its siblings; by default it is the installed
    package's, read by path since importing the package warns.
    """
    if name.endswith(".csv"):
        read_corrections(name)
        return Judgements(Path(name).stem, {}, {}, corrections=name)
    found = JUDGEMENTS.find(name)
    made = found(*([] if folder is None else [folder])) if callable(found) else found
    if not isinstance(made, Judgements):
        raise SettingsError(f"the judgements '{name}' are a {type(made).__name__}: give Judgements.")
    return made


def _published(name: str, folder: str | Path | None = None) -> Judgements:
    """Judgements of the COCO test split, from the files of the package ``eccv-caption``."""
    folder = _package_folder() if folder is None else Path(folder)
    images, texts = (_read(folder / f"{FILES['coco']}_{side}.json") for side in _SIDES)
    image_to_text, text_to_image = (_read(folder / f"{FILES[name]}_{side}.json") for side in _SIDES)
    return Judgements(name, image_to_text, text_to_image, len(images), len(texts))


eccv, cxc, coco = (partial(_published, name) for name in FILES)


def coco_ids(captions: Captions) -> Ids:
    """COCO ids of the images and of the texts (annotation ids).

    An image id may be a number or a COCO file name. Without text ids (precomputed folders have none) the
    five texts of an image are taken to be in the order of their annotation ids, as in Karpathy's split.
    """
    images = np.array([_number(name, "image") for name in captions.image_ids], dtype=np.int64)
    if captions.text_ids is not None:
        return images, np.array([_number(name, "text") for name in captions.text_ids], dtype=np.int64)
    published = np.load(_package_folder() / "coco_test_ids.npy", allow_pickle=False)
    image_of = _read(_package_folder() / f"{FILES['coco']}_{_SIDES[1]}.json")
    texts_of: dict[int, list[int]] = {}
    for text in published.tolist():
        texts_of.setdefault(next(iter(image_of[text])), []).append(text)
    ids = np.empty(len(captions.texts), dtype=np.int64)
    for image, rows in zip(images.tolist(), captions.texts_of(), strict=True):
        if len(rows) != len(texts_of.get(image, [])):
            raise DataError(
                f"{captions.name} has no text ids, and image {image} with {len(rows)} texts is not an "
                "image of the COCO test split with its five: give text_ids (COCO annotation ids)."
            )
        ids[rows] = texts_of[image]
    return images, ids


def check_corrections(judgements: Sequence[str | Judgements], place: str | Path) -> None:
    """Refuse files of corrections that are not of the data at ``place``, all splits together."""
    files = [one for one in judgements if isinstance(one, str) and one.endswith(".csv")]
    if files:
        path, options = split_options(place)
        options.pop("corrections", None)
        whole = open_captions(path, problems=ToBeLeftOut(), **options)
        for file in files:
            check_ids(corrections_of(whole, file), whole, file)


def with_matches(path: str | Path, captions: Captions) -> Judgements:
    """The pairs of the data and those that a file of corrections adds (``matches``), by rows of images and texts.

    The data may be one split: corrections of images and texts of other splits play no part.
    """
    text_row = {name: row for row, name in enumerate(text_names(captions))}
    image_row = {name: row for row, name in enumerate(captions.image_ids)}
    corrections = read_corrections(path)
    here = [one for one in corrections if one.image_id in image_row and one.text_id in text_row]
    if corrections and not here:
        raise DataError(
            f"{path} names no pair of {captions.name} (image '{corrections[0].image_id}' first): give the corrections "
            "of this data."
        )
    check_ids(here, captions, path)
    pairs = [(image, text) for text, image in enumerate(captions.image_of.tolist())]
    pairs += [(image_row[one.image_id], text_row[one.text_id]) for one in here if one.verdict == "matches"]
    return Judgements.of_rows(Path(path).stem, pairs, (len(captions.images), len(captions.texts)))


def judge_lists(
    ranked: Mapping[int, Sequence[int]], relevant: Mapping[int, Collection[int]], ks: Sequence[int] = KS
) -> QueryMetrics:
    """Judge ranked lists of ids, best first, by query id; a list shorter than R is an error."""
    found: list[list[float]] = []
    for query, right in relevant.items():
        if query not in ranked:
            raise DataError(f"query {query} is judged but was not ranked: rank every judged query.")
        size, answers = len(right), ranked[query]
        if not size:
            raise DataError(f"query {query} has no relevant item: leave it out of the judgements.")
        if len(answers) < size:
            raise DataError(
                f"the list of query {query} has {len(answers)} items, but {size} are relevant: "
                f"rank at least {size}, a shorter list would flatter the model."
            )
        hits = np.array([answer in right for answer in answers[: max(size, *ks)]])
        precision = np.cumsum(hits[:size]) / np.arange(1, size + 1)
        recalls = [float(hits[:k].any()) for k in ks]
        found.append([float((precision * hits[:size]).sum()) / size, float(precision[-1]), *recalls])
    names = ["map@r", "r_precision", *(f"recall@{k}" for k in ks)]
    table = 100.0 * np.array(found, dtype=np.float64).reshape(-1, len(names))
    return QueryMetrics(np.array(list(relevant), dtype=np.int64), dict(zip(names, table.T, strict=True)))


def judge_scores(
    scores: Scores, judgements: Judgements, image_ids: NDArray[np.int64], text_ids: NDArray[np.int64]
) -> dict[str, QueryMetrics]:
    """Judge scores whose rows and columns are named by ids, in both directions by their name in words."""
    judgements.check(*scores.shape)
    judged: dict[str, QueryMetrics] = {}
    for direction, queries, gallery, dim in (
        ("image_to_text", image_ids, text_ids, 1),
        ("text_to_image", text_ids, image_ids, 0),
    ):
        relevant = getattr(judgements, direction)
        row_of = {int(number): row for row, number in enumerate(queries)}
        absent = [query for query in relevant if query not in row_of]
        if absent:
            raise DataError(
                f"{len(absent)} queries of {judgements.name} are not in the data (id {absent[0]} first): "
                "evaluate on the COCO test split with COCO ids."
            )
        rows = torch.tensor([row_of[query] for query in relevant])
        depth = min(len(gallery), max([*KS, *map(len, relevant.values())]))
        lists = gallery[top_lists(scores, rows, depth, dim)[0]]
        judged[direction] = judge_lists(dict(zip(relevant, lists.tolist(), strict=True)), relevant)
    return judged


def top_lists(
    scores: Scores, queries: Tensor, depth: int, gallery_dim: int
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """The first ``depth`` gallery rows of each query and their scores, by (score descending, index ascending).

    Both are (Q, depth). ``gallery_dim`` is 1 where the queries are images, 0 where they are texts.
    """
    found, values = [], []
    for chunk in torch.split(queries.to(scores.device), CHUNK):
        if gallery_dim == 1:
            block = checked_tile(scores, chunk, slice(None))
        else:
            block = checked_tile(scores, slice(None), chunk).T.contiguous()
        rows = leading(block, depth)
        found.append(rows.cpu())
        values.append(block.gather(1, rows.to(block.device)).cpu())
    return torch.cat(found).numpy(), torch.cat(values).numpy()


def _package_folder() -> Path:
    spec = importlib.util.find_spec("eccv_caption")
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtra("eccv-caption", "eccv", "judging with ECCV Caption or CxC")
    return Path(spec.submodule_search_locations[0]) / "data"


def _read(path: Path) -> dict[int, frozenset[int]]:
    try:
        content = parse_json(path.read_text("utf-8"))
        return {int(query): frozenset(map(int, items)) for query, items in content.items()}
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing: give a folder with the files of eccv-caption.") from error
    except MISREAD as error:
        raise DataError(f'{path} is not {{"id": [ids]}} ({error}): install eccv-caption again.') from error


def _number(name: str, what: str) -> int:
    match = _TRAILING_NUMBER.search(str(name))
    if match is None:
        raise DataError(f"the {what} id '{name}' is not a COCO id: judgements need COCO's numbers.")
    return int(match[1])
