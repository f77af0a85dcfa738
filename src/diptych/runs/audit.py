"""What is wrong with the pairs of a data set: what ``diptych audit`` does. The data are read, never changed."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diptych.audit.findings import (
    NO_FIT,
    LostOrder,
    Positive,
    empty_texts,
    leaked_texts,
    lost_order,
    missing_positives,
    near_pictures,
    whole_shift,
)
from diptych.audit.fit import FOLDS, VOTERS, Fit, Wrong, compared, find_wrong, fit_features
from diptych.data.captions import Captions, ImageStore, StoreRows, canonical_split, small_jpeg
from diptych.data.corrections import COLUMNS, data_hash, text_names
from diptych.data.formats import open_captions, split_options
from diptych.data.problems import LeftOut, ToBeLeftOut, undecodable, unopenable
from diptych.devices import pick_device
from diptych.errors import DataError, ImageError, SettingsError
from diptych.model.retriever import Retriever
from diptych.reports.audit import SIDE, Question, audit_page
from diptych.runs.reading import encode_split
from diptych.storage import write_bytes
from diptych.training.teachers import Teachers

FEWEST = 200  # pairs: with fewer, planted errors say nothing about an interval
FEWEST_IMAGES = 25
LISTED = 100  # pairs and missing positives that the page shows, each
LIKELY = 0.5  # probability from which on a pair is suggested as wrong
MOST = 1000  # missing positives that audit.json lists
WRITTEN = 0.05  # probability from which on audit.json lists a pair


@dataclass(frozen=True)
class Audit:
    """What an audit found in ``captions``, whose texts all have ids."""

    captions: Captions
    hash: str
    features: str
    fit: Fit
    wrong: Wrong
    missing: list[Positive]
    tried: int  # texts that were tried on other images
    near: list[tuple[int, int, float]]
    leaked: list[list[int]]
    empty: list[tuple[int, str]]
    lost: list[LostOrder]
    notes: list[str]

    @property
    def worst(self) -> list[int]:
        """The texts, those most likely wrong first."""
        found: list[int] = np.lexsort((self.wrong.z, -self.wrong.probability)).tolist()
        return found

    def scores(self, pairs: Sequence[tuple[str, str]]) -> NDArray[np.float32]:
        """How well images and texts, any of the data by their ids, fit each other; about 0 for strangers.

        The z of picture and text; where the texts of an image can vote, plus that of the text and the other texts.
        """
        captions = self.captions
        rows = [
            {id: row for row, id in enumerate(ids or ())} for ids in (captions.image_ids, captions.text_ids)
        ]
        try:
            image, text = (np.array([known[pair[n]] for pair in pairs]) for n, known in enumerate(rows))
        except KeyError as id:
            raise DataError(f"{captions.name} has no {id}: give its ids, (image, text).") from id
        found = self.fit.pictures.pairs(image, text)
        if self.wrong.agreement is None:
            return found
        others = self.fit.siblings.pairs(image, text)
        return found + np.where(captions.image_of[text] == image, self.wrong.agreement[text], others)

    def lines(self) -> list[str]:
        wrong, total = self.wrong, len(self.captions.texts)
        splits = self.captions.splits
        leaks = [pair for pair in self.near if splits[pair[0]] != splits[pair[1]]]
        likely = int((wrong.probability >= LIKELY).sum())
        rows = [
            ("wrong pairs", f"{wrong.expected:,.0f} expected of {total:,} (95 %: {wrong.low:,.0f} to "
             f"{wrong.high:,.0f}); {likely:,} more likely wrong than not"),
            ("missing positives", f"{len(self.missing):,} texts may be: another image fits as well as their own "
             f"({self.tried:,} tried)"),
            ("near-duplicate pictures", f"{len(self.near):,} pairs, {len(leaks):,} of them in two splits"),
            ("texts in two splits", f"{len(self.leaked):,}"),
            ("texts that say nothing", f"{len(self.empty):,}"),
            ("lost order", "; ".join(self.described(one) for one in self.lost) or "none"),
        ]  # fmt: skip
        return [f"{name + ':':25}{text}" for name, text in rows] + self.notes

    def described(self, lost: LostOrder) -> str:
        """A run of images in words, with the shard or folder it lies in."""
        ids = self.captions.image_ids
        places = list(
            dict.fromkeys(place_of(self.captions.images, row) for row in range(lost.first, lost.last + 1))
        )
        where = f" in {', '.join(places)}" if any(places) and len(places) <= 3 else ""
        if lost.shift is not None:
            how = (
                f"the texts fit the images {abs(lost.shift)} {'before' if lost.shift > 0 else 'after'} theirs"
            )
        else:
            how = "their texts fit others of them" if lost.inside else "their texts fit none of them"
        count = lost.last - lost.first + 1
        return f"{count:,} images in a row, '{ids[lost.first]}' to '{ids[lost.last]}'{where}: {how}"

    def as_dict(self) -> dict[str, Any]:
        wrong, ids = self.wrong, self.captions.image_ids
        rows = [row for n, row in enumerate(self.worst) if n < LISTED or wrong.probability[row] >= WRITTEN]
        return {
            "data": self.captions.name, "hash": self.hash, "features": self.features,
            "images": len(self.captions.images), "texts": len(self.captions.texts), "notes": self.notes,
            "wrong": {"expected": wrong.expected, "low": wrong.low, "high": wrong.high},
            "pairs": [
                {**self._pair(row), "probability": float(wrong.probability[row]),
                 "z": float(wrong.z[row]),
                 "agreement": None if wrong.agreement is None else float(wrong.agreement[row])}
                for row in rows
            ],
            "missing_positives": [
                {**self._ids(one.image, one.text), "score": one.score, "own": one.own} for one in self.missing[:MOST]
            ],
            "near_pictures": [
                {"images": [ids[one], ids[two]], "splits": [self.captions.splits[row] for row in (one, two)],
                 "cosine": cosine}
                for one, two, cosine in self.near
            ],
            "leaked_texts": [[self._pair(row) for row in rows] for rows in self.leaked],
            "empty_texts": [{**self._pair(row), "why": why} for row, why in self.empty],
            "lost_order": [{**asdict(one), "said": self.described(one)} for one in self.lost],
        }  # fmt: skip

    def save(self, folder: Path) -> None:
        """Write ``audit.json``, the page ``audit.html``, and ``suggested.csv``: corrections that nobody has seen."""
        out = io.StringIO()
        table = csv.writer(out)
        table.writerow(COLUMNS)
        for row in self.worst:
            if self.wrong.probability[row] >= LIKELY:
                named = self._pair(row)
                table.writerow([named["image_id"], named["text_id"], "wrong", "diptych audit", self.hash])
        page = audit_page(f"Audit of {self.captions.name}", self.lines(), self.questions(), self.hash)
        folder.mkdir(parents=True, exist_ok=True)
        for name, text, halves in (  # a file name may hold half of a character
            ("audit.json", json.dumps(self.as_dict(), indent=1, ensure_ascii=False), "backslashreplace"),
            ("audit.html", page, "backslashreplace"),
            ("suggested.csv", out.getvalue(), "surrogatepass"),
        ):
            write_bytes(folder / name, text.encode("utf-8", halves))

    def questions(self) -> list[Question]:
        """What the page asks: the worst pairs, then the best missing positives."""
        texts_of, wrong, images = self.captions.texts_of(), self.wrong, self.captions.images
        pairs = [
            (
                int(self.captions.image_of[row]),
                row,
                f"wrong with probability {wrong.probability[row]:.2f}",
                False,
            )
            for row in self.worst[:LISTED]
        ]
        pairs += [(one.image, one.text, f"score {one.score:.1f}, with its own {one.own:.1f}", True)
                  for one in self.missing[:LISTED]]  # fmt: skip
        return [
            Question(
                **self._ids(image, text), why=why, matches=matches, picture=small_jpeg(images, image, SIDE),
                others=[self.captions.texts[row] for row in texts_of[image].tolist() if row != text],
            )
            for image, text, why, matches in pairs
        ]  # fmt: skip

    def _pair(self, text: int) -> dict[str, str]:
        return self._ids(int(self.captions.image_of[text]), text)

    def _ids(self, image: int, text: int) -> dict[str, str]:
        assert self.captions.text_ids is not None
        return {"image_id": self.captions.image_ids[image], "text_id": self.captions.text_ids[text],
                "text": self.captions.texts[text]}  # fmt: skip


def audit(
    data: str,
    *,
    split: str | None = None,
    model: str | None = None,
    image_size: int = 224,
    device: str = "auto",
    seed: int = 0,
) -> Audit:
    """Audit a data set, or one split of it, on frozen features or on a model's vectors."""
    if "corrections" in split_options(data)[1]:
        raise SettingsError("an audit looks at the data as they are: leave out ?corrections.")
    captions = open_captions(data, problems=ToBeLeftOut())
    whole = data_hash(captions)
    captions = replace(captions, text_ids=text_names(captions))
    if split is not None:
        captions = captions.split(canonical_split(split))
    left_out = LeftOut()
    captions = left_out.add(captions, unopenable(captions.images))
    with_texts = np.unique(captions.image_of)
    if len(with_texts) < len(captions.images):
        captions = captions.subset(with_texts.tolist())
    if len(captions.texts) < FEWEST or len(captions.images) < FEWEST_IMAGES:
        raise DataError(
            f"{captions.name} has {len(captions.texts)} pairs of {len(captions.images)} images: an audit needs at "
            f"least {FEWEST} pairs of {FEWEST_IMAGES} images, for what is usual is learned from the rest."
        )
    try:
        x, v = _vectors(captions, model, image_size, device)
    except ImageError:  # a picture that cannot be decoded: look for all of them, then once more
        captions = left_out.add(captions, undecodable(captions.images, show_progress=True))
        x, v = _vectors(captions, model, image_size, device)
    left_out.tell(len(captions.images) + len(left_out.reasons), advice=False)
    return audit_vectors(captions, x, v, whole, model=model, seed=seed)


def audit_vectors(
    captions: Captions,
    x: NDArray[Any],
    v: NDArray[Any],
    data: str,
    *,
    model: str | None = None,
    seed: int = 0,
) -> Audit:
    """The audit of captions whose images (N, C) and texts (M, D) have these vectors; ``data`` is their hash."""
    if model is None:
        fit = fit_features(x, v, captions.image_of, seed=seed)
    else:
        fold_of = np.random.default_rng(seed).permutation(len(x)) % FOLDS
        fit = compared(x - x.mean(axis=0), v - v.mean(axis=0), captions.image_of, fold_of)
    wrong = find_wrong(fit, seed=seed)
    missing, tried = missing_positives(fit, wrong, seed=seed)
    notes = []
    if wrong.agreement is None:
        notes.append(
            f"No image has {VOTERS} texts, so texts cannot vote on each other: each is judged by its picture alone."
        )
    if model is not None:
        notes.append(
            f"{model} may have learned the wrong pairs of its own training data by heart. Near-duplicates are looked "
            "for without --model: what a model takes for the same may be two pictures."
        )
    if wrong.z.mean() < NO_FIT:
        shift = None if model else whole_shift(x, v, captions.image_of)
        how = (
            f"Texts fit the images {abs(shift)} {'after' if shift > 0 else 'before'} theirs." if shift else ""
        )
        notes.append(
            f"Pictures and texts have nothing to do with each other: the order of all is lost. {how}".strip()
        )
    notes.append("Files, formats and exact duplicates: diptych data check.")
    return Audit(
        captions, data, model or "frozen encoders", fit, wrong, missing, tried, [] if model else near_pictures(x),
        leaked_texts(captions.texts, captions.image_of, captions.splits),
        empty_texts(captions.texts, captions.image_of, captions.image_ids), lost_order(fit, wrong), notes,
    )  # fmt: skip


def place_of(store: ImageStore, row: int) -> str:
    """The tar or folder that an image lies in, empty where the store does not say."""
    if isinstance(store, StoreRows):
        return place_of(store.store, int(store.rows[row]))
    if hasattr(store, "member"):
        return Path(store.member(row).tar).name
    return Path(store.path(row)).parent.name if hasattr(store, "path") else ""


def _vectors(
    captions: Captions, model: str | None, image_size: int, device: str
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Vectors of all images and texts: of the frozen encoders, from the cache, or of a model."""
    if model is None:
        teachers, place = Teachers(image_size=image_size), pick_device(device)
        x, v = teachers.image_vectors(captions, device=place), teachers.text_vectors(captions, device=place)
        return x.rows(np.arange(len(captions.images))), v.rows(np.arange(len(captions.texts)))
    images, texts = encode_split(Retriever.from_pretrained(model, device), captions)
    return images.numpy(), texts.numpy()
