"""A model without torch: its runtime gives the vectors that its ``Retriever`` would give."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from diptych.data.arrays import Arrays, Sets, are_features, read_ahead, read_items
from diptych.data.text import TextInput
from diptych.entries import MODEL
from diptych.errors import DataError, DiptychError, RuntimeFault, SettingsError
from diptych.progress import track
from diptych.runtime.folder import (
    BACKBONE,
    FOLDER,
    IMAGE,
    PROBES,
    TEXT,
    Probes,
    RuntimeFacts,
    advice,
    best_folder,
    compare,
    file_facts,
    read_facts,
    written_from_another,
)
from diptych.runtime.session import OnnxSession
from diptych.runtime.texts import text_reader

if TYPE_CHECKING:  # a query of words needs nothing of pictures
    from diptych.data.captions import ImageStore, StoredImage
    from diptych.data.images import ImageInput, ImageLike

Side = Literal["image", "text"]
Vectors = NDArray[np.float32]

PICTURES = 4  # per batch: more of them do not fit into the caches of a processor, and take longer
SETS = 64  # sets of features per batch
TEXTS = 64
SET_READER = "RegionInput"
READERS = {
    "PixelInput": "diptych.data.images",
    "ProcessedPixels": "diptych.data.processors",
    SET_READER: "diptych.data.images",
}
"""What may prepare images, and where it is; ``runtime.json`` names one of them."""


class RuntimeModel:
    """The encoders of a model folder in ONNX Runtime.

    ``fingerprint``, ``dim`` and the vectors are those of the folder's ``Retriever``; vectors are float32 arrays.
    ``backbone`` is the fingerprint of the frozen one whose cells ``encode_image`` takes in the place of pictures. A
    side is opened when it is first used, and compared with the folder's probes before it answers; ``notes`` then says
    what a person should know. It may be used from several threads.
    """

    backend = "onnx"
    device = "cpu"
    precision = "no"

    def __init__(self, folder: Path, facts: RuntimeFacts, threads: int | None = None) -> None:
        self.folder, self.home, self.facts, self.threads = folder, folder.parent, facts, threads
        self.dim, self.backbone = facts.dimension, facts.backbone
        self.notes: list[str] = []
        self._lock = threading.RLock()
        self._sessions: dict[str, OnnxSession] = {}
        self._reader: TextInput | None = None
        part = facts.images.get("part")
        if not isinstance(part, str) or part not in READERS:
            raise _unprepared(folder, part)

    @staticmethod
    def open(place: str | Path, *, threads: int | None = None) -> RuntimeModel:
        """The runtime of a model folder, of the best model of a run, or of a folder in the cache.

        ``threads`` None: one for each core. Whatever is wrong with the runtime is a ``RuntimeFault``; the model itself
        may still be fine, for the workbench.
        """
        home = best_folder(place)
        opened = RuntimeModel(home / FOLDER, read_facts(home), threads)
        opened._probes()  # the fingerprint is asked for before any vector is
        return opened

    @cached_property
    def image_input(self) -> ImageInput:
        """How pictures are prepared, as ``runtime.json`` describes it: one of our own inputs."""
        from diptych.parts import check_arguments

        arguments = dict(self.facts.images)
        name = arguments.pop("part")
        try:
            kind = getattr(import_module(READERS[name]), name)
            check_arguments(kind, arguments)
            found: ImageInput = kind(**arguments)
        except (DiptychError, ValueError, TypeError) as error:
            raise _unprepared(self.folder, error) from error
        return found

    def fingerprint(self) -> str:
        return self.facts.fingerprint

    @property
    def text_input(self) -> TextInput | None:
        """How texts are read; the text side is opened for it."""
        self._ready("text")
        return self._reader

    def encode_image(
        self,
        images: ImageLike | Sequence[ImageLike] | ImageStore,
        *,
        view: str | None = None,
        batch_size: int | None = None,
        show_progress: bool = False,
    ) -> Vectors:
        """Unit rows (N, dim) for a path, PIL image, array, a list of these, or an image store; order is kept.

        Cells of the model's frozen backbone that were computed before, as float arrays (cells, channels), skip it.
        """
        from diptych.data.images import ImageLike

        self._ready("image")
        return self._images(
            [images] if isinstance(images, ImageLike) else images, view, batch_size, show_progress
        )

    def cells(self, pictures: Sequence[StoredImage]) -> Vectors:
        """What the frozen backbone makes of pictures, (n, R, C)."""
        self._ready("image")
        pixels = self.image_input(pictures)
        starts = range(0, len(pictures), PICTURES)
        assert not isinstance(pixels, Sets)
        return np.concatenate(
            [self._sessions["backbone"]("cells", images=pixels[one : one + PICTURES]) for one in starts]
        )

    def encode_text(
        self,
        texts: str | Sequence[str],
        *,
        view: str | None = None,
        batch_size: int | None = None,
        show_progress: bool = False,
    ) -> Vectors:
        """Unit rows (M, dim) for a text or a list of texts; order is kept."""
        self._ready("text")
        return self._texts([texts] if isinstance(texts, str) else texts, view, batch_size, show_progress)

    def predict_labels(
        self,
        images: ImageLike | Sequence[ImageLike] | ImageStore | None = None,
        texts: str | Sequence[str] | None = None,
        *,
        threshold: float | None = None,
        top: int | None = None,
        batch_size: int | None = None,
        show_progress: bool = False,
    ) -> list[dict[str, float]]:
        """Labels of images, or of texts, with their scores, best first; for models that were trained with labels."""
        known = self.facts.labels
        if known is None:
            raise SettingsError("this model predicts no labels: train one with labels, such as 'labelwise'.")
        from diptych.data.labels import predicted_labels

        return predicted_labels(
            self, images, texts, known["view"], known["names"], known["thresholds"], threshold, top,
            batch_size=batch_size, show_progress=show_progress,
        )  # fmt: skip

    def check_files(self) -> None:
        """Raise where a file is not as it was written, or the model's own files, if here, are not its origin."""
        for name, facts in self.facts.files.items():
            if file_facts(MODEL.path(self.folder, name)) != facts:
                raise RuntimeFault(
                    f"{self.folder / name} has changed since it was written: {advice(self.home)}."
                )
        for name, facts in self.facts.model.items():
            file = MODEL.path(self.home, name)
            if file.is_file() and file_facts(file) != facts:
                raise written_from_another(self.home, name)

    def check(self) -> list[str]:
        """Open both sides and compare them with the probes; what a person should know."""
        self._ready("image")
        self._ready("text")
        return self.notes

    def _ready(self, side: Side) -> None:
        """Open a side and compare its vectors with the probes, once."""
        with self._lock:
            if side in self._sessions:
                return
            if side == "image":
                cells = self.facts.backbone is not None
                sets = cells or self._reads_sets
                if cells:
                    self._sessions["backbone"] = self._session(BACKBONE, ["images"], ["cells"])
                session = self._session(IMAGE, ["images", "mask"] if sets else ["images"], self._outputs)
            else:
                self._reader = text_reader(self.folder, self.facts.texts)
                session = self._session(TEXT, ["ids", "mask"], self._outputs)
            self._sessions[side] = session
            try:
                self._compare(side)
            except BaseException:
                del self._sessions[side]
                raise

    def _probes(self) -> Probes:
        probes = Probes.read(self.home / PROBES)
        if probes.fingerprint != self.facts.fingerprint:
            raise RuntimeFault(
                f"{self.folder} belongs to model {self.facts.fingerprint}, {PROBES} beside it to "
                f"{probes.fingerprint}: {advice(self.home)}."
            )
        return probes

    def _compare(self, side: Side) -> None:
        probes = self._probes()
        try:
            if side == "image":
                # one at a time: ONNX Runtime keeps the memory of the largest batch, and a service needs no more
                found, wanted = self._images(probes.images, None, 1, False), probes.image_vectors
            else:  # one padded batch, as the probes were made
                found, wanted = self._texts(probes.texts, None, len(probes.texts), False), probes.text_vectors
        except (DataError, ValueError) as error:  # ValueError: vectors of another length
            raise RuntimeFault(
                f"the probes of {self.home} do not fit it ({error}): {advice(self.home)}."
            ) from error
        name = self.folder / (IMAGE if side == "image" else TEXT)
        note = compare(found, wanted, f"the vectors of {name}", advice(self.home))
        self.notes += [] if note is None else [note]

    def _images(self, store: Any, view: str | None, batch_size: int | None, show_progress: bool) -> Vectors:
        output, width = self._output(view)
        out = np.zeros((len(store), width), dtype=np.float32)
        size = batch_size or (SETS if are_features(store) else PICTURES)
        for rows, inputs in self._image_batches(store, size, show_progress):
            out[rows] = self._image(output, inputs)
        return out

    def _image_batches(self, store: Any, size: int, show_progress: bool) -> Iterator[tuple[slice, Any]]:
        """Which images, and their inputs; the next batch is read and decoded meanwhile."""
        from diptych.data.captions import holds_features
        from diptych.data.images import as_item

        jobs = [slice(start, min(start + size, len(store))) for start in range(0, len(store), size)]
        shared = isinstance(store, list | tuple) and len({id(item) for item in store}) < len(store)

        def read(job: slice) -> tuple[slice, Any]:
            rows = np.arange(job.start, job.stop)
            if holds_features(store):
                return job, self.image_input(read_items(store, rows))
            return job, self.image_input([as_item(store[row]) for row in rows.tolist()])

        # Pillow must not load one picture in two threads; one batch alone needs no thread
        found = read_ahead(jobs, read, 0 if shared or len(jobs) < 2 else 1)
        yield from track(found, "encode images", len(jobs), show_progress)

    def _image(self, output: str, inputs: Arrays) -> Vectors:
        session = self._sessions["image"]
        if isinstance(inputs, Sets):
            if self.facts.backbone is None and not self._reads_sets:
                raise DataError("this model reads pictures, not stored features: give pictures.")
            self._check_size("image", inputs)
            return session(output, images=inputs.values.astype(np.float32, copy=False), mask=inputs.mask)
        if self.facts.backbone is None:
            return session(output, images=inputs)
        cells = self._sessions["backbone"]("cells", images=inputs)
        return session(output, images=cells, mask=np.ones(cells.shape[:2], dtype=bool))

    def _texts(
        self, texts: Sequence[str], view: str | None, batch_size: int | None, show_progress: bool
    ) -> Vectors:
        """Texts of like length go together, so that little is padding."""
        assert self._reader is not None
        output, width = self._output(view)
        out = np.zeros((len(texts), width), dtype=np.float32)
        read, size = self._reader.read(texts), batch_size or TEXTS
        order = sorted(range(len(texts)), key=read.size)
        starts = range(0, len(order), size)
        for start in track(starts, "encode texts", len(starts), show_progress):
            rows = order[start : start + size]
            sets = read.collate(rows)
            self._check_size("text", sets)
            out[rows] = self._sessions["text"](output, ids=sets.values, mask=sets.mask)
        return out

    def _check_size(self, side: Side, sets: Sets) -> None:
        largest, found = self.facts.largest.get(side), sets.mask.shape[1]
        if largest is not None and found > largest:
            what = "an image has {} regions" if side == "image" else "a text has {} tokens"
            raise DataError(
                f"{what.format(found)}, this model was made for {largest}: give at most {largest}."
            )

    @property
    def _reads_sets(self) -> bool:
        return bool(self.facts.images["part"] == SET_READER)

    @property
    def _outputs(self) -> list[str]:
        return ["vectors"] if self.facts.labels is None else ["vectors", "labels"]

    def _output(self, view: str | None) -> tuple[str, int]:
        """The name and the width of an output."""
        if view is None:
            return "vectors", self.dim
        labels = self.facts.labels
        if labels is None or labels["view"] != view:
            raise SettingsError(
                f"the runtime of this model has no view '{view}': leave view out for the vectors of its score, or "
                "use torch."
            )
        return "labels", len(labels["names"])

    def _session(self, name: str, inputs: list[str], outputs: list[str]) -> OnnxSession:
        return OnnxSession(self.folder / name, inputs, outputs, self.threads)


def _unprepared(folder: Path, reason: object) -> RuntimeFault:
    return RuntimeFault(
        f"{folder} does not say how pictures are prepared ({reason}): {advice(folder.parent)}."
    )
