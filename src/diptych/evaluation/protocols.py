"""Protocols: which data a published number stands for, and how it is averaged.

=============  ======  =============  =====================================================================
name           images  texts / image  averaged over
=============  ======  =============  =====================================================================
``plain``      any     any            nothing: every image and text at once
``flickr30k``  1,000   5              nothing
``coco-5k``    5,000   5              nothing
``coco-1k``    5,000   5              five folds of 1,000 consecutive images with their texts
=============  ======  =============  =====================================================================
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diptych.errors import DataError, SettingsError
from diptych.registries import PROTOCOLS


@dataclass(frozen=True, slots=True)
class EvaluationProtocol:
    """The size data must have (None: any) and the number of folds of consecutive images."""

    name: str
    images: int | None = None
    texts_per_image: int | None = None
    folds: int = 1
    expects: str = ""  # the data in words, for the error message

    def check(self, image_of: NDArray[np.int64], images: int) -> None:
        """Refuse data that are not the protocol's, with what to do about it."""
        if self.images is not None and images != self.images:
            raise DataError(
                f"the protocol {self.name} is defined on {self.expects}, but the data have {images:,} "
                "images: give that split, or use the protocol plain."
            )
        sizes = np.bincount(image_of, minlength=images)
        if self.texts_per_image is not None and (wrong := np.flatnonzero(sizes != self.texts_per_image)).size:
            raise DataError(
                f"the protocol {self.name} takes {self.texts_per_image} texts per image, but {wrong.size:,} "
                f"images differ (image row {wrong[0]} has {sizes[wrong[0]]}): keep the first "
                f"{self.texts_per_image} texts of each, or use the protocol plain."
            )
        if images % self.folds:
            raise DataError(f"{images} images do not divide into {self.folds} folds: use the protocol plain.")

    def split(
        self, image_of: NDArray[np.int64], images: int
    ) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Rows of the images and of the texts of each fold, in the order of the data."""
        rows = np.split(np.arange(images), self.folds)
        return [(fold, np.flatnonzero((image_of >= fold[0]) & (image_of <= fold[-1]))) for fold in rows]


_COCO = "the 5,000 test images of COCO (Karpathy's split, 'testall' of the precomputed folders)"
PLAIN = EvaluationProtocol("plain")
FLICKR30K = EvaluationProtocol(
    "flickr30k", 1000, 5, expects="the 1,000 test images of Flickr30K (Karpathy's split)"
)
COCO_5K = EvaluationProtocol("coco-5k", 5000, 5, expects=_COCO)
COCO_1K = EvaluationProtocol("coco-1k", 5000, 5, folds=5, expects=f"{_COCO}, cut into five folds")


def protocol_named(protocol: str | EvaluationProtocol) -> EvaluationProtocol:
    """A protocol of retrieval by its name; an ``EvaluationProtocol`` of your own passes through."""
    found = PROTOCOLS.find(protocol) if isinstance(protocol, str) else protocol
    if not isinstance(found, EvaluationProtocol):
        raise SettingsError(
            f"the protocol {protocol} has a measure of its own: evaluate one run or model folder under it."
        )
    return found
