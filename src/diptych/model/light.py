"""A model that runs in ONNX Runtime; torch takes over where the runtime fails, and where pairs are scored."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from diptych.errors import RuntimeFault
from diptych.model.protocol import CellCache, Local, OpenedModel, PairScoring, Rows, pairs_of
from diptych.runtime.model import RuntimeModel

Opening = Callable[[], OpenedModel]
"""Loads the same model with torch."""


class LightModel:
    """A ``Model`` whose encoders are those of a runtime.

    ``opening`` loads the model with torch. It is called when the runtime turns out to be faulty, unless that is None,
    and when pairs are scored; ``scores_pairs`` says that the model has a pair scorer. ``say`` is told what a person
    should know. It may be used from several threads.
    """

    device = "cpu"
    precision = "no"

    def __init__(
        self,
        runtime: RuntimeModel,
        opening: Opening,
        *,
        scores_pairs: bool = False,
        replaceable: bool = True,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.runtime, self.opening, self.say = runtime, opening, say
        self.scores_pairs, self.replaceable = scores_pairs, replaceable
        self._lock = threading.RLock()
        self._loaded: OpenedModel | None = None
        self._failed = False
        self._said = 0

    @property
    def backend(self) -> str:
        """``onnx``, or ``torch`` once the runtime has failed."""
        return "torch" if self._failed else "onnx"

    @property
    def dim(self) -> int:
        """Length of an encoded vector."""
        return self.runtime.dim

    def fingerprint(self) -> str:
        """The fingerprint of the model."""
        return self.runtime.fingerprint()

    def encode_image(self, images: Any, *, batch_size: int | None = None) -> Rows:
        """Rows (N, dim) for a list or store of images."""
        found: Rows = self._run("encode_image", images, batch_size=batch_size)
        return found

    def encode_text(self, texts: Any, *, batch_size: int | None = None) -> Rows:
        """Rows (M, dim) for a list or store of texts."""
        found: Rows = self._run("encode_text", texts, batch_size=batch_size)
        return found

    def predict_labels(self, images: Any = None, **options: Any) -> Sequence[Mapping[str, float]]:
        """Labels of images, or of ``texts``, with their scores, best first."""
        found: Sequence[Mapping[str, float]] = self._run("predict_labels", images, **options)
        return found

    @property
    def pairs(self) -> PairScoring | None:
        """The pair scorer, which torch runs; None where the model has none."""
        return LoadedPairs(self.torch_model) if self.scores_pairs else None

    def cell_cache(self, folder: Path | None = None) -> CellCache | None:
        """The shared cache of the frozen image backbone, None where the encoder has none."""
        if self.runtime.backbone is None:
            return None
        from diptych.cache.packed_cells import PackedCells, cell_pack  # searches need none of it

        reader = self.runtime.image_input
        size = self.runtime.facts.images.get("size", "?")
        title = f"backbone {self.runtime.backbone[:8]} at {size} pixels"
        pack = cell_pack(self.runtime.backbone, reader.identity(), "float32", title, folder)
        return PackedCells(pack, lambda pictures: self._run("cells", pictures))

    def torch_model(self) -> OpenedModel:
        """The same model in torch, loaded once."""
        with self._lock:
            if self._loaded is None:
                loaded = self.opening()
                if loaded.fingerprint() != self.fingerprint():
                    raise RuntimeFault(
                        f"{self.runtime.folder} belongs to model {self.fingerprint()}, the weights beside it are those "
                        f"of {loaded.fingerprint()}: write it again with diptych export runtime {self.runtime.home}."
                    )
                self._loaded = loaded
            return self._loaded

    def _run(self, name: str, *given: Any, **options: Any) -> Any:
        if not self._failed:
            try:
                found = getattr(self.runtime, name)(*given, **options)
            except RuntimeFault as fault:
                self._replace(fault)
            else:
                self._tell_notes()
                return found
        if name == "cells":
            cache = self.torch_model().cell_cache()  # type: ignore[attr-defined]
            return cache.cells(*given)
        return getattr(self.torch_model(), name)(*given, **options)

    def _replace(self, fault: RuntimeFault) -> None:
        with self._lock:
            if self._failed:
                return
            if not self.replaceable:
                raise fault
            self.torch_model()
            self._failed = True
            self.say(instead(fault))

    def _tell_notes(self) -> None:
        with self._lock:
            for note in self.runtime.notes[self._said :]:
                self.say(note)
            self._said = len(self.runtime.notes)


class LoadedPairs:
    """The pair scorer of a model that torch loads when pairs are scored."""

    def __init__(self, opening: Opening) -> None:
        self.opening = opening

    def image_features(self, images: Any) -> list[Local]:
        """The local features of each image, (L, D) float16."""
        return self._scorer().image_features(images)

    def scores(self, images: Sequence[Local], texts: Sequence[str]) -> Rows:
        """Scores (N, M) of images, given by their local features, against texts."""
        return self._scorer().scores(images, texts)

    def _scorer(self) -> PairScoring:
        found = pairs_of(self.opening())
        assert found is not None  # as the model's config.json says
        return found


def instead(fault: RuntimeFault) -> str:
    """The sentence of a fault that torch gets around."""
    return f"{str(fault).rstrip('.')}; torch runs the model meanwhile."
