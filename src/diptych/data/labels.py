"""The labels of a data set: a vocabulary kept with the model, classes and hash centres, COCO's categories."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from diptych.data.arrays import read_array
from diptych.data.captions import Captions
from diptych.data.decode.pickles import read_pickle
from diptych.data.files import read_json
from diptych.data.problems import STOP, Problems
from diptych.entries import MODEL
from diptych.errors import DataError, SettingsError, at_least, one_of, reason_of
from diptych.parts import content_digest, part
from diptych.storage import expanded, parse_json

COLUMN = "labels"  # the column of a manifest that holds the labels of an image
SEPARATORS = ";|"  # between the labels of one cell
MOST_NAMES = 5  # labels or items a message names before it counts the rest


@part
class Labels:
    """The vocabulary of labels: ``names[c]`` is column c of every label matrix.

    ``columns`` are the columns of a data set that hold the labels.
    """

    def __init__(self, names: Sequence[str], columns: Sequence[str] = (COLUMN,)) -> None:
        self.names, self.columns = list(names), list(columns)
        self._known = set(self.names)
        if len(self._known) < len(self.names):
            raise DataError("a label vocabulary names a label twice: give each label once.")

    @staticmethod
    def of(captions: Captions, columns: Sequence[str] = (COLUMN,)) -> Labels:
        """The labels of a data set, in alphabetical order."""
        return Labels(sorted({name for item in item_labels(captions, columns) for name in item}), columns)

    def rows_of(self, captions: Captions) -> NDArray[np.float32]:
        return self.matrix(item_labels(captions, self.columns), captions.image_ids)

    def __len__(self) -> int:
        return len(self.names)

    def matrix(self, items: Sequence[Sequence[str]], ids: Sequence[str] | None = None) -> NDArray[np.float32]:
        """(items, C) of zeros and ones; a label that is not in the vocabulary is an error that names its item."""
        for row, item in enumerate(items):
            for name in item:
                if name not in self._known:
                    whose = f"item {row}" if ids is None else f"'{ids[row]}'"
                    raise DataError(
                        f"the label '{name}' of {whose} was not seen in training: the model knows "
                        f"{_list(self.names)}; remove the label, or train on data that have it."
                    )
        return class_rows(items, self.names).astype(np.float32)

    def save_assets(self, folder: Path) -> dict[str, Any]:
        MODEL.write(folder / "labels.json", json.dumps(self.names, ensure_ascii=False, indent=1))
        return {"names": "labels.json"}

    def content_arguments(self) -> dict[str, Any]:
        return {"names": content_digest("\n".join(self.names))}


def predicted_labels(
    model: Any,
    images: Any,
    texts: Any,
    view: str,
    names: Sequence[str],
    thresholds: Sequence[float],
    threshold: float | None,
    top: int | None,
    **how: Any,
) -> list[dict[str, float]]:
    """Labels of images, or of texts, best first: from the threshold on, or the best ``top``."""
    if (images is None) == (texts is None):
        raise SettingsError("labels are predicted of images or of texts: give one of them.")
    side = model.encode_text if images is None else model.encode_image
    scores = np.asarray(side(texts if images is None else images, view=view, **how))  # (N, C)
    least = float(thresholds[images is None] if threshold is None else threshold) if top is None else -np.inf
    best = np.argsort(-scores, axis=1, kind="stable")[:, :top]
    return [
        {str(names[c]): float(row[c]) for c in order if row[c] >= least}
        for row, order in zip(scores, best, strict=True)
    ]


def item_labels(captions: Captions, columns: Sequence[str] = (COLUMN,)) -> list[tuple[str, ...]]:
    """The labels of each image: the values of some columns, together; an image without any is an error.

    A value may be a list, a number, or a text of several labels between ``;`` or ``|``.
    """
    for column in columns:
        if column not in captions.labels:
            known = ", ".join(captions.labels) or "none"
            raise DataError(
                f"{captions.name} has no column '{column}' of labels (its columns: {known}): add a column 'labels' to "
                "the manifest, or name the columns to use."
            )
    items = [
        tuple(dict.fromkeys(name for column in columns for name in _names(captions.labels[column][row])))
        for row in range(len(captions.images))
    ]
    without = [captions.image_ids[row] for row, item in enumerate(items) if not item]
    if without:
        raise DataError(
            f"{captions.name}: {len(without)} of {len(items)} images have no label ({_list(without)}): give each at "
            "least one, or leave them out with '?unlabelled=drop' behind the path of the data."
        )
    return items


def drop_unlabelled(captions: Captions, unlabelled: str) -> Captions:
    """The data without the images that have no label in the column ``labels`` (``unlabelled="drop"``)."""
    one_of(unlabelled, "unlabelled", Literal["error", "drop"])
    if unlabelled == "error" or COLUMN not in captions.labels:
        item_labels(captions)
        return captions
    rows = [row for row, value in enumerate(captions.labels[COLUMN]) if any(_names(value))]
    if not rows:
        raise DataError(f"{captions.name}: no image has a label: check its column '{COLUMN}'.")
    return captions.subset(rows)


def _names(value: Any) -> Iterator[str]:
    if value is None:
        return
    if isinstance(value, list | tuple | set):
        for one in value:
            yield from _names(one)
        return
    text = str(value)
    if isinstance(value, str) and text.strip().startswith("["):
        try:
            yield from _names(parse_json(text))
            return
        except ValueError:
            pass  # a name that begins with a bracket
    yield from filter(None, (name.strip() for name in re.split(f"[{SEPARATORS}]", text)))


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(f"'{name}'" for name in names[:MOST_NAMES]) + more


def class_sets(captions: Captions, column: str = COLUMN, split: bool = True) -> list[tuple[str, ...]]:
    """The classes of each image, read as ``item_labels`` reads them; an image may have none.

    Without ``split``, a text is one class whatever it holds: how earlier versions trained hashing.
    """
    if column not in captions.labels:
        known = ", ".join(captions.labels) or "none"
        raise DataError(
            f"{captions.name} has no label column '{column}' (its columns: {known}): hashing needs the classes of the "
            "images; name the column that holds them with --label_column."
        )
    values = captions.labels[column]
    if split:
        return [tuple(dict.fromkeys(_names(value))) for value in values]
    return [_whole(value) for value in values]


def class_names(sets: Sequence[Sequence[str]]) -> list[str]:
    """The classes that occur, numbers in their order: class 2 before class 10."""
    return sorted({name for one in sets for name in one}, key=_natural)


def class_rows(sets: Sequence[Sequence[str]], names: Sequence[str]) -> NDArray[np.bool_]:
    """(images, classes): True where an image has a class; classes outside ``names`` have no column."""
    column = {name: number for number, name in enumerate(names)}
    rows = np.zeros((len(sets), len(names)), np.bool_)
    for row, one in enumerate(sets):
        rows[row, [column[name] for name in one if name in column]] = True
    return rows


def _whole(value: Any) -> tuple[str, ...]:
    if value is None or value == "":
        return ()
    if isinstance(value, list | tuple | set | frozenset):
        return tuple(str(one) for one in value)
    return (str(value),)


def _natural(name: str) -> list[tuple[int, int, str]]:
    """A key by which numbers inside a name count as numbers."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name)]


Signs = NDArray[np.int8]

BITS = (16, 32, 64)  # lengths in the papers; any power of two from 4 on has a Hadamard matrix
TORCH_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"  # how torch began its files until version 1.5
REDRAWS = 20  # most attempts at a centre that lies too close to others


def hash_centres(classes: int, bits: int, seed: int = 0) -> Signs:
    """Centres (classes, bits) of −1 and +1.

    The rows of the Hadamard matrix of size K = ``bits``, then their negatives: any two of these 2K codes differ in
    K/2 bits, a row and its negative in all K. Further classes get drawn codes with as many +1 as −1; each is drawn
    again, ``REDRAWS`` times at most, until it differs from every centre before it in more than K/4 bits and from all
    of them in K/2 on average, and the best draw is kept. The same ``seed`` gives the same centres.
    """
    checked_bits(bits)
    at_least(classes, "classes", 1)
    matrix = hadamard(bits)
    centres = np.concatenate([matrix, -matrix])[:classes]
    rng = np.random.default_rng(seed)
    while len(centres) < classes:
        centres = np.concatenate([centres, _far_from(centres, rng)[None]])
    return centres


def tie_vector(bits: int, seed: int = 0) -> Signs:
    """One fixed random code (bits,): the value of the coordinates in which the labels of an image cancel out."""
    return np.random.default_rng([seed, bits]).choice(np.array([-1, 1], np.int8), size=bits)


def read_centres(path: str | Path) -> Signs:
    """Centres (classes, bits) out of a file: CSQ's ``64_coco_80_class.pkl``, a pickled or an ``.npy`` array.

    CSQ's files are tensors as older versions of torch saved them, read with torch's unpickler of weights, which makes
    tensors and nothing else; pickled arrays go through ``data.decode.pickles``.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            start = file.read(len(TORCH_MAGIC))
        if start.startswith(b"PK") or start == TORCH_MAGIC:
            import torch

            values = torch.load(path, map_location="cpu", weights_only=True)
        else:
            values = read_array(path) if start.startswith(b"\x93NUMPY") else read_pickle(path)
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist: check the path of the hash centres.") from error
    except Exception as error:  # torch's reader of weights raises many kinds, UnpicklingError among them
        reason = reason_of(error, 200)
        raise DataError(f"{path} holds no hash centres ({reason}): give a file of −1 and +1.") from error
    return checked_centres(values, str(path))


def checked_centres(values: ArrayLike, source: str) -> Signs:
    """Centres (classes, bits) out of a file, all −1 or +1."""
    array = np.asarray(values)
    if array.ndim != 2 or 0 in array.shape or not np.isin(array, (-1, 1)).all():
        raise DataError(f"{source} of {array.shape} is no array (classes, bits) of −1 and +1: give one.")
    return array.astype(np.int8)


def hadamard(size: int) -> Signs:
    """Sylvester's Hadamard matrix: rows of −1 and +1, of which any two differ in half their places."""
    matrix = np.ones((1, 1), np.int8)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def checked_bits(bits: int) -> int:
    """A length of codes for which there are centres."""
    if bits < 4 or bits & (bits - 1):
        raise SettingsError(f"bits={bits} is no power of two: {', '.join(map(str, BITS))}.")
    return bits


def _far_from(centres: Signs, rng: np.random.Generator) -> Signs:
    """One balanced code, the best of the draws by its least and then by its mean distance to ``centres``."""
    bits = centres.shape[1]
    balanced = np.repeat(np.array([-1, 1], np.int8), bits // 2)
    best, best_quality = balanced, (-1.0, -1.0)
    for _ in range(REDRAWS):
        code = rng.permutation(balanced)
        distances = (bits - centres.astype(np.int64) @ code) / 2
        quality = float(distances.min()), float(distances.mean())
        if quality > best_quality:
            best, best_quality = code, quality
        if quality[0] > bits / 4 and quality[1] >= bits / 2:
            break
    return best


_NUMBER = re.compile(r"(\d+)(?:\.\w+)?$")


def with_instances(captions: Captions, place: str | Path, problems: Problems = STOP) -> Captions:
    """The same data with the column ``labels``: the names of the categories, each once; none where COCO marks none."""
    names_of = read_instances(expanded(place), problems)
    labels = []
    for image_id in captions.image_ids:
        number = _NUMBER.search(image_id)
        if number is None:
            raise DataError(f"{captions.name}: '{image_id}' has no COCO number: use COCO's images.")
        labels.append(names_of.get(int(number[1]), ()))
    if not any(labels):
        raise DataError(f"{place} labels none of {len(labels)} images of {captions.name}: use one release.")
    return replace(captions, labels={**captions.labels, COLUMN: labels})


def read_instances(place: Path, problems: Problems) -> dict[int, tuple[str, ...]]:
    """COCO image id → names of its categories, in the order of the categories."""
    files = [place] if place.is_file() else sorted(place.glob("instances_*.json"))
    if not files:
        raise DataError(f"{place} holds no instances_*.json: give the folder of COCO's annotations.")
    order: dict[str, int] = {}
    categories: dict[int, set[str]] = {}
    for file in files:
        data = read_json(file, problems)
        try:
            names = {int(one["id"]): str(one["name"]) for one in data["categories"]}
            for one in data["annotations"]:
                categories.setdefault(int(one["image_id"]), set()).add(names[int(one["category_id"])])
        except (TypeError, KeyError, ValueError, OverflowError) as error:
            raise DataError(f"{file} is not of COCO's instances ({error!r}): copy it again.") from error
        for name in names.values():
            order.setdefault(name, len(order))
    return {image: tuple(sorted(own, key=order.__getitem__)) for image, own in categories.items()}
