"""The place where the search half opens models; nothing else of it knows what runs them.

``onnx`` runs the encoders in ``runtime/`` of the model folder, without torch; ``torch`` runs the model itself, on any
device and in any precision.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from diptych.encoders.known_names import is_pretrained_name
from diptych.errors import DiptychError, QueryError, RuntimeFault, SettingsError
from diptych.index.protocol import IndexInfo
from diptych.model.protocol import OpenedModel, Rows
from diptych.progress import printable
from diptych.runtime.folder import PROBES, best_folder, find_runtime, has_pair_scorer
from diptych.runtime.probes import Probes, compare

BACKENDS = ("torch", "onnx")
VARIABLE = "DIPTYCH_BACKEND"  # the backend where a command does not say

Say = Callable[[str], None]
"""Told in sentences what the user should know: the device, what was skipped."""


def tell(sentence: str) -> None:
    """Print a sentence beside the answers."""
    print(printable(sentence), file=sys.stderr, flush=True)


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
    backend = _chosen(backend)
    if backend == "onnx" and (_is_gpu(device) or precision != "no"):
        raise SettingsError(
            "the backend onnx computes in float32 on the CPU: leave out --device and --compute_precision, or use "
            "--backend torch."
        )
    if backend == "torch" or (backend is None and (_is_gpu(device) or precision != "no")):
        return _torch_model(place, device, precision)
    home = find_runtime(place, fingerprint)
    if home is None and make and has_torch():
        home = _made(place, say)
    if home is None:
        if backend is None and has_torch():
            return _torch_model(place, device, precision)
        raise _no_runtime(place)
    try:
        return _light_model(home, place, backend, say)
    except RuntimeFault as fault:
        if backend == "onnx" or not has_torch():
            raise
        from diptych.model.light import instead

        say(instead(fault))
        return _torch_model(place, device, precision)


def backend_of(place: str | Path, fingerprint: str | None = None) -> str:
    """The backend that a search takes for a model."""
    chosen = _chosen(None)
    if chosen is None:
        chosen = "onnx" if not _is_gpu("auto") and find_runtime(place, fingerprint) else "torch"
    return chosen


def check_probes(model: OpenedModel, place: str | Path, say: Say = tell) -> None:
    """Compare what a model makes of the probes in its folder, before vectors of it are stored.

    A runtime is compared whenever it is opened. Without probes nothing is compared.
    """
    file = best_folder(place) / PROBES
    if model.backend == "onnx" or not file.is_file():
        return
    probes = Probes.read(file)
    if probes.fingerprint != model.fingerprint():  # of a model that was there before
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


def _chosen(backend: str | None) -> str | None:
    chosen = backend or os.environ.get(VARIABLE) or None
    if chosen is not None and chosen not in BACKENDS:
        raise SettingsError(f"there is no backend '{chosen}': choose {' or '.join(BACKENDS)}.")
    return chosen


def _is_gpu(device: str | None) -> bool:
    """Whether a device is a GPU; for ``auto``, whether torch is installed and the machine seems to have one."""
    if device != "auto":
        return device not in (None, "cpu")
    if not has_torch():
        return False
    if "torch" in sys.modules:
        from diptych.devices import pick_device

        return pick_device(device).type != "cpu"
    return Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None


def _light_model(home: Path, place: str | Path, backend: str | None, say: Say) -> OpenedModel:
    from diptych.model.light import LightModel
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


def _made(place: str | Path, say: Say) -> Path | None:
    """Write the runtime of a model; where it has none, the model is as good as before."""
    from diptych.model.runtime_export import place_runtime

    say("writing the model's encoders for searches without torch, once.")
    try:
        return place_runtime(place)[0]
    except DiptychError as error:
        say(f"no runtime was written: {error}")
    return None


def _no_runtime(place: str | Path) -> DiptychError:
    if has_torch():
        return RuntimeFault(f"{place} has no runtime: write it with diptych export runtime {place}.")
    if not is_pretrained_name(place) and not (best_folder(place) / "config.json").is_file():
        return RuntimeFault(f"{place} is not a model folder (no config.json): give the folder of a model.")
    return RuntimeFault(
        f"{place} needs torch here: install it with pip install 'diptych[train]', or give --model FOLDER with a "
        f"runtime/ that diptych export runtime {place} FOLDER wrote on another machine."
    )


class StoredVectors:
    """Stands for the model of an index in queries that name items alone: their vectors are stored."""

    device, precision, backend = "cpu", "no", "none"

    def __init__(self, info: IndexInfo) -> None:
        self._info = info

    @property
    def dim(self) -> int:
        """Length of a stored vector."""
        return self._info.dimension

    def fingerprint(self) -> str:
        """That of the model that made the index."""
        return self._info.fingerprint

    def encode_image(self, images: Any, *, batch_size: int | None = None) -> Rows:
        """Refused: nothing here encodes."""
        raise QueryError("this index was opened without its model: ask for more like one of its items.")

    encode_text = encode_image
