"""Uni-modal retrieval: image ↔ image by class lists, and both modalities on ordinary image-text data."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from diptych.data.captions import HALVES, Captions
from diptych.data.files import FileImages
from diptych.data.problems import LeftOut, undecodable
from diptych.errors import DataError, SettingsError
from diptych.evaluation.cards import Facts, split_names
from diptych.evaluation.classes import (
    ClassList,
    class_recall,
    is_class_list,
    open_class_list,
    stored_features,
)
from diptych.evaluation.evaluate import Evaluator, Retrieval
from diptych.evaluation.metrics import KS
from diptych.evaluation.prepared import Prepared
from diptych.evaluation.protocols import Rules
from diptych.evaluation.report import Group, Layout
from diptych.evaluation.senteval import is_senteval
from diptych.evaluation.sts import FEWEST, Sts, name_of_view, neighbour_agreement, uni_view
from diptych.model import named
from diptych.model.retriever import Retriever
from diptych.targets.teachers import vectors_of_texts


@dataclass(frozen=True)
class ImageClasses:
    """R@1 of class-based image retrieval on the lists of CUB, SOP, In-Shop or iNaturalist, and their mean.

    Pictures that cannot be read are left out, told and counted on the card, or with ``strict_images`` an error. A model
    of stored features reads those in the folders.
    """

    folders: Sequence[str | Path]
    strict_images: bool = False
    reads_captions: ClassVar[bool] = False
    reads = staticmethod(is_class_list)
    wants: ClassVar[str] = "the folder of CUB, SOP, In-Shop or iNaturalist"

    @staticmethod
    def check_folder(model: Retriever, folder: str | Path) -> None:
        """Refuse a list without what the model reads: its pictures, or their stored features."""
        pictures = model.image_input.pictures
        for side in open_class_list(folder, pictures=pictures).sides:
            if not pictures:
                stored_features(folder, side.paths)

    def __call__(
        self, model: Retriever, data: Prepared | None = None, *, show_progress: bool = False
    ) -> Group:
        view = uni_view(model)
        pictures, left_out = model.image_input.pictures, LeftOut()
        lists = [open_class_list(folder, pictures=pictures) for folder in self.folders]
        if pictures and not self.strict_images:
            total = sum(len(one.every) for one in lists)
            lists = [_readable(one, left_out, show_progress) for one in lists]
            left_out.tell(total)
        metrics: dict[str, float] = {}
        rows: list[tuple[str, list[str]]] = []
        for folder, one in zip(self.folders, lists, strict=True):
            given: list[Any] = []
            for side in one.sides:
                images = _images(side.paths) if pictures else stored_features(folder, side.paths)
                vectors = model.encode_image(images, view=view, show_progress=show_progress)
                given += [vectors, side.classes]
            found = class_recall(*given)
            name = f"{one.name}_image_to_image_recall@1"
            metrics[name] = found[1]
            rows.append((_described(one), [name]))
        metrics["image_classes_average"] = float(np.mean(list(metrics.values())))
        rows.append(("mean", ["image_classes_average"]))
        return Group(
            "image-classes",
            metrics,
            "image_classes_average",
            Facts(
                {"protocol": "image-classes", "data": ", ".join(_digest(one) for one in lists)},
                {"vectors": name_of_view(model), "model": model.fingerprint()},
            ).leaving_out(len(left_out.reasons)),
            tables=(Layout(["image → image by class", "R@1"], rows),),
        )


@dataclass(frozen=True)
class UniModal:
    """Both modalities on image-text data, by the uni-modal heads (the towers' own vectors without them).

    ============================  ==========================================================================
    ``text_to_text_recall@K``     does a text find another text of its image among the first K other texts?
    ``image_to_image_agreement``  do images order their neighbours as a text teacher orders their texts? Mean over
                                  images of Spearman's ρ × 100 between the cosines of images and those of the
                                  mean teacher vectors of their texts
    ============================  ==========================================================================

    The teacher's vectors are computed once and cached.
    """

    text_teacher: str = "minilm"

    def check(self, model: Retriever, captions: Captions) -> None:
        """Refuse a teacher that is not there, where it will be asked."""
        if len(np.unique(captions.image_of)) >= FEWEST:
            _teacher(self.text_teacher)

    def __call__(self, model: Retriever, data: Prepared, *, show_progress: bool = False) -> Group:
        captions, view = data.captions, uni_view(model)
        texts = model.encode_text(data.texts, view=view, show_progress=show_progress)
        images = model.encode_image(captions.images, view=view, show_progress=show_progress)
        metrics = text_recall(texts, captions)
        rows = [("text → text (same image)", [f"text_to_text_recall@{k}" for k in KS] + [""])]
        note, described = "", len(np.unique(captions.image_of))
        if described < FEWEST:
            note = f"{described} images with texts have no order of neighbours: image → image needs {FEWEST}."
        else:
            teacher = self._vectors(captions, model, show_progress)
            metrics["image_to_image_agreement"] = image_agreement(images.numpy(), teacher, captions)
            rows.append(
                (f"image → image (as {self.text_teacher})", [""] * len(KS) + ["image_to_image_agreement"])
            )
        return Group(
            "uni-modal",
            metrics,
            "text_to_text_recall@1",
            Facts(
                {
                    "protocol": "uni-modal",
                    "split": split_names(captions),
                    "teacher": self.text_teacher,
                    "data": captions.fingerprint(),
                },
                {"vectors": name_of_view(model), "model": model.fingerprint()},
                note,
            ),
            tables=(Layout(["", *(f"R@{k}" for k in KS), "Spearman"], rows),),
        )

    def _vectors(self, captions: Captions, model: Retriever, show_progress: bool) -> NDArray[np.float32]:
        """The teacher's vector of each text, (M, E)."""
        teacher = _teacher(self.text_teacher)
        teacher.encoder.to(model.device)
        store = vectors_of_texts(teacher, captions.texts, show_progress=show_progress)
        return store.rows(np.arange(len(store))).astype(np.float32)


@dataclass(frozen=True)
class FourDirections:
    """Image ↔ text, text ↔ text and image ↔ image on one page, with the tables of SentEval's folder and class lists."""

    folders: Sequence[str] = ()
    bootstrap: int = 0
    strict_images: bool = False

    @staticmethod
    def reads(path: str) -> bool:
        return is_senteval(path) or is_class_list(path)

    @property
    def members(self) -> list[Evaluator]:
        sentences = [path for path in self.folders if is_senteval(path)]
        classes = [path for path in self.folders if is_class_list(path)]
        if len(sentences) > 1:
            raise SettingsError("four directions need image-text data and at most one SentEval folder.")
        found: list[Evaluator] = [
            Retrieval(Rules(bootstrap=self.bootstrap)),
            UniModal(),
            *map(Sts, sentences),
        ]
        return [*found, ImageClasses(classes, self.strict_images)] if classes else found


def text_recall(texts: Tensor, captions: Captions) -> dict[str, float]:
    """``text_to_text_recall@K`` of unit text vectors (M, D); 0 where there is no other text to find."""
    alone = len(texts) < 2
    recall = dict.fromkeys(KS, 0.0) if alone else class_recall(texts, captions.image_of, ks=KS)
    return {f"text_to_text_recall@{k}": value for k, value in recall.items()}


def image_agreement(images: NDArray[Any], teacher: NDArray[np.float32], captions: Captions) -> float:
    """``image_to_image_agreement`` of image vectors (N, D) with a teacher's vectors of their texts (M, E)."""
    gold = np.zeros((len(images), teacher.shape[1]), dtype=np.float32)  # the sum points where the mean does
    np.add.at(gold, captions.image_of, teacher)
    described = np.unique(captions.image_of)  # images that have a text
    return neighbour_agreement(images[described], gold[described])


_teacher = lru_cache(maxsize=1)(named.text_teacher)  # kept: it judges every epoch of a run


def _images(paths: Sequence[Path]) -> FileImages:
    return FileImages(Path(), [str(path) for path in paths])


def _readable(one: ClassList, left_out: LeftOut, show_progress: bool) -> ClassList:
    """The list without the pictures that cannot be read, which are noted."""
    failed, paths = undecodable(_images(one.paths), show_progress=show_progress), one.paths
    if len(failed) == len(paths):
        raise DataError(f"none of the {len(paths):,} images of {one.name} could be read: {failed[0]}")
    left_out.reasons |= {str(paths[row]): reason for row, reason in failed.items()}
    rows = [row for row in range(len(paths)) if row not in failed]
    gallery = None if one.gallery is None else _readable(one.gallery, left_out, show_progress)
    return ClassList(one.name, [paths[row] for row in rows], one.classes[rows], gallery)


def _described(one: ClassList) -> str:
    if one.gallery is None:
        return f"{one.name} ({len(one.paths):,} images, each against the others)"
    return f"{one.name} ({len(one.paths):,} queries, gallery {len(one.gallery.paths):,})"


def _digest(one: ClassList) -> str:
    names = [path.name for path in one.every]
    digest = hashlib.sha256("\0".join(names).encode("utf-8", HALVES) + one.classes.tobytes())
    return f"{one.name} {digest.hexdigest()[:16]}"
