"""A retriever as the search half sees it: numpy in, numpy out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from diptych.data.captions import StoredImage
from diptych.devices import autocast
from diptych.errors import DataError
from diptych.interaction.similarity import PairScorer
from diptych.model.protocol import CellCache, Local, Rows
from diptych.model.retriever import Retriever
from diptych.model.scores import PairScores
from diptych.types import Ragged


class TorchModel:
    """A ``Model`` whose encoders are those of a retriever."""

    backend = "torch"

    def __init__(self, retriever: Retriever) -> None:
        self.retriever, self.dim, self.precision = retriever, retriever.dim, retriever.precision
        self.device, self.fingerprint = str(retriever.device), retriever.fingerprint
        self.image_input, self.text_input = retriever.image_input, retriever.text_input
        self.predict_labels = retriever.predict_labels
        scorer = retriever.scorer
        self.pairs = None if scorer is None else TorchPairs(retriever, scorer)

    def encode_image(self, images: Any, *, batch_size: int | None = None) -> Rows:
        return self.retriever.encode_image(images, batch_size=batch_size).numpy()

    def encode_text(self, texts: Any, *, batch_size: int | None = None) -> Rows:
        return self.retriever.encode_text(texts, batch_size=batch_size).numpy()

    def cell_cache(self, folder: Path | None = None) -> CellCache | None:
        """The shared cache of the frozen image backbone, None where the encoder has none."""
        frozen = self.retriever.image.encoder.frozen_backbone()
        if frozen is None:
            return None
        from diptych.cache.contents import PackedCells  # searches need none of it
        from diptych.cache.features import cells_now, picture_pack

        backbone, images = frozen.eval(), self.retriever.image_input
        precision = partial(autocast, self.retriever.device, self.retriever.precision)

        def cells(pictures: Sequence[StoredImage]) -> Rows:
            with precision():
                return cells_now(backbone, images, pictures)

        with precision():  # features of another precision are others
            return PackedCells(picture_pack(backbone, images, folder), cells)


class TorchPairs:
    """The pair scorer of a retriever."""

    def __init__(self, retriever: Retriever, scorer: PairScorer) -> None:
        self.retriever, self.scorer = retriever, scorer

    def image_features(self, images: Any) -> list[Local]:
        return [local.numpy() for local in self.retriever.encode_image_features(images).split()]

    def scores(self, images: Sequence[Local], texts: Sequence[str]) -> Rows:
        sets = [torch.from_numpy(np.array(local)) for local in images]
        width = self.retriever.image.encoder.dim
        odd = next((one.shape for one in sets if one.shape[1:] != (width,)), None)
        if odd is not None:
            raise DataError(
                f"local features of {'×'.join(map(str, odd))} numbers are not of this model, whose have {width} each: "
                "remove the file of local features, and index with --local_features."
            )
        ends = torch.tensor([0, *(len(one) for one in sets)]).cumsum(0)
        words = self.retriever.encode_text_features(texts)
        found = PairScores(
            self.scorer, Ragged(torch.cat(sets), ends), words, self.retriever.device, self.retriever.precision
        )
        return found.tile(slice(None), slice(None)).cpu().numpy()
