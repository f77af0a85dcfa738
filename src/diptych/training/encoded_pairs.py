"""All training pairs as the model sees them at the end of an epoch, for objectives that ask for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from PIL import Image

from diptych.data.captions import ImageStore, StoredImage, holds_features
from diptych.errors import ImageError
from diptych.evaluation.prepared import Prepared
from diptych.model.encoding import collect, encoded_images, encoded_texts
from diptych.model.retriever import Retriever
from diptych.objectives.objective import Objective, PairVectors


def show_pairs(
    objective: Objective, epoch: int, retriever: Retriever | None, training: Prepared, *, show_progress: bool
) -> None:
    """Encode the training pairs once and show them to every part of the objective that wants them.

    The main process encodes, with the ``retriever``; the others give None. Every process must call it.
    """
    wanting = wanting_pairs(objective, epoch)
    if not wanting:
        return
    pairs = None if retriever is None else encode_pairs(retriever, training, show_progress=show_progress)
    for part in wanting:
        part.see_pairs(epoch, pairs)


def wanting_pairs(objective: Objective, epoch: int) -> Sequence[Objective]:
    """The parts of an objective that want to see all pairs after this epoch."""
    return [part for part in objective.modules() if isinstance(part, Objective) and part.wants_pairs(epoch)]


def encode_pairs(retriever: Retriever, training: Prepared, *, show_progress: bool = False) -> PairVectors:
    """The vectors of the towers alone, without branches, each image once."""
    captions = training.captions
    store: ImageStore = captions.images
    unreadable: dict[int, str] = dict(getattr(store, "unreadable", {}))  # as a cache of features knows them
    if captions.unreadable == "skip" and not holds_features(store):
        store = _Noting(store, unreadable)
    image = torch.zeros(len(store), retriever.image.dim, dtype=torch.float16)
    text = torch.zeros(len(training.texts), retriever.text.dim, dtype=torch.float16)
    collect(encoded_images(retriever, store, lambda x: retriever.image(x)[0], None, show_progress), image)
    collect(
        encoded_texts(retriever, training.texts, lambda x: retriever.text(x)[0], None, show_progress), text
    )
    image_of = torch.from_numpy(captions.image_of.copy())
    for row in unreadable:
        image_of[image_of == row] = -1
    return PairVectors(image, text, image_of)


class _Noting:
    """A store that gives a white picture where it cannot read one, and notes the reason by its row."""

    features = False

    def __init__(self, store: ImageStore, unreadable: dict[int, str]) -> None:
        self.store, self.unreadable = store, unreadable

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, index: int) -> StoredImage:
        try:
            return self.store[index]
        except ImageError as error:
            self.unreadable[index] = str(error)
            return Image.new("RGB", (64, 64), "white")

    def content_key(self, index: int) -> str:
        """The key of the image."""
        return self.store.content_key(index)
