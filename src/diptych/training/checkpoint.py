"""Checkpoints: everything a run needs to go on bit for bit, in safetensors and JSON.

A run folder holds ``run.json`` (recipe, settings, data), ``log.jsonl``, ``last/`` (this module's state) and ``best/``
(a model folder that ``Retriever.from_pretrained`` reads). ``last/`` is replaced atomically: a crash while saving
leaves the previous one.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from diptych import __version__
from diptych.data.corrections import Noise
from diptych.entries import MODEL
from diptych.errors import CheckpointError
from diptych.settings import TrainingSettings, differences, from_saved, to_json
from diptych.storage import MISREAD, parse_json, recover_folder, replace_folder, write_text
from diptych.training.method import Method
from diptych.training.optim import depends_on_epochs
from diptych.weights import is_divided, own_tensors, read_tensors, whole_state, whole_tensor

FORMAT = 1
# what loading a state that somebody else wrote, or a disk damaged, may raise
_UNLOADABLE = (
    OSError, ValueError, TypeError, LookupError, AttributeError, OverflowError, RuntimeError, SafetensorError,
)  # fmt: skip
FREE_TO_CHANGE = {
    "epochs", "patience", "save_steps", "log_steps", "workers", "tensorboard", "on_collapse", "compile", "cuda_graphs",
    "micro_batch", "ridge_baseline", "shard_model",
}  # fmt: skip
"""Settings that may differ when a run is resumed: they do not change the steps already made."""


@dataclass
class Progress:
    """Where a run stands: steps made, the best epoch so far and its value of the ``metric`` that decides."""

    step: int = 0
    best: float = -math.inf
    best_epoch: int = -1
    metric: str = "rsum"
    history: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class RunCard:
    """What a run is, written once at its start: the recipe, its settings, and the data it trains on."""

    recipe: str
    settings: TrainingSettings
    data: str
    data_fingerprint: str
    corrections: Mapping[str, str] = field(default_factory=dict)  # their file and its hash, if any
    noise: Noise | None = None  # in the training pairs

    def save(self, folder: Path) -> None:
        content = {
            "format": FORMAT,
            "diptych": __version__,
            "recipe": self.recipe,
            "data": self.data,
            "data_fingerprint": self.data_fingerprint,
            "settings": to_json(self.settings),
        }
        if self.corrections:
            content["corrections"] = dict(self.corrections)
        if self.noise is not None:
            content["noise"] = asdict(self.noise)
        write_text(folder / "run.json", json.dumps(content, indent=2))


def read_run(folder: Path) -> dict[str, Any]:
    """The content of ``run.json``."""
    path = folder / "run.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} is no run (no run.json): give the --output_dir of a training.")
    try:
        content = parse_json(MODEL.read(path))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} is damaged ({error}): copy the run again.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is damaged (no object): copy the run again.")
    if content.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder} has run format {content.get('format')!r:.40}, this version reads {FORMAT}: update diptych."
        )
    kinds = {"recipe": str, "data": str, "data_fingerprint": str, "settings": dict}
    wrong = [name for name, kind in kinds.items() if not isinstance(content.get(name), kind)]
    if wrong:
        raise CheckpointError(f"{path} is damaged (no {wrong[0]}): copy the run again.")
    return content


def system_of(folder: Path) -> str:
    """What runs that differ only in their seed have in common; empty where the folder is no run."""
    if not (folder / "run.json").is_file():
        return ""
    found = read_run(folder)
    dropped = {"seed"} | FREE_TO_CHANGE - {"epochs", "patience"}
    kept = {name: value for name, value in found["settings"].items() if name not in dropped}
    described = json.dumps([found["recipe"], found["data_fingerprint"], kept], sort_keys=True, default=str)
    return f"{found['recipe']} {hashlib.sha256(described.encode()).hexdigest()[:12]}"


def noise_of(folder: Path) -> Noise | None:
    """The noise that a run was trained with; None where there was none, or where the folder is no run."""
    found = read_run(folder).get("noise") if (folder / "run.json").is_file() else None
    if found is None:
        return None
    try:
        return Noise.read(found)
    except MISREAD as error:
        raise CheckpointError(f"{folder / 'run.json'} is damaged ({error}): copy the run again.") from error


def deciding_metric(folder: Path) -> str | None:
    """The metric that chose the best epoch of a run; None where its state says nothing."""
    try:
        content = parse_json(MODEL.read(folder / "last" / "progress.json"))
    except (OSError, ValueError):
        return None
    return str(content.get("metric", "rsum")) if isinstance(content, dict) else None


def read_run_of(folder: Path, recipe: str) -> dict[str, Any]:
    """The content of ``run.json`` of a run of this recipe."""
    found = read_run(folder)
    if found["recipe"] != recipe:
        raise CheckpointError(
            f"{folder} is a run of the recipe '{found['recipe']}', not '{recipe}': "
            f"resume it with 'diptych train {found['recipe']}'."
        )
    return found


def check_resumable(folder: Path, card: RunCard) -> None:
    """Refuse to resume a run of another recipe, other data, or other settings."""
    found = read_run_of(folder, card.recipe)
    if found["data_fingerprint"] != card.data_fingerprint:
        raise CheckpointError(
            f"the data changed since {folder} was started ({found['data_fingerprint']} then, "
            f"{card.data_fingerprint} now): give the data of {found['data']} as it was, or start a new run."
        )
    before = from_saved(type(card.settings), found["settings"])
    free = FREE_TO_CHANGE - ({"epochs"} if depends_on_epochs(before) else set())
    changed = {k: v for k, v in differences(before, card.settings).items() if k not in free}
    if changed:
        name, (old, new) = next(iter(changed.items()))
        raise CheckpointError(f"{folder} began with --{name} {old}, not {new}: keep the settings of a run.")


def gather_random(processes: int) -> list[dict[str, Tensor]]:
    """The random states of every process, in rank order; every process must call it."""
    own = _random_tensors()
    if processes == 1:
        return [own]
    states: list[dict[str, Tensor] | None] = [None] * processes
    torch.distributed.all_gather_object(states, own)
    return [state for state in states if state is not None]


def tensors_of(method: Method, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """The tensors of ``last/`` by file, whole and on the CPU; every process of a divided model must call it."""
    found = {name: own_tensors(whole_state(module)) for name, module in method.modules().items()}
    return {**found, "optimizer": _optimizer_tensors(method, optimizer)}


def save_state(
    folder: Path,
    tensors: dict[str, dict[str, Tensor]],
    progress: Progress,
    randoms: list[dict[str, Tensor]],
    scaler: GradScaler | None = None,
) -> None:
    """Write ``last/``: modules, optimiser, random states of all processes, loss scale of fp16, progress."""
    with replace_folder(folder / "last") as new:
        for name, content in tensors.items():
            save_file(content, new / f"{name}.safetensors")
        for rank, state in enumerate(randoms):
            save_file(state, new / f"random-{rank}.safetensors")
        if scaler is not None:
            MODEL.write(new / "scaler.json", json.dumps(scaler.state_dict()))
        saved = {**asdict(progress), "best": progress.best if math.isfinite(progress.best) else None}
        MODEL.write(new / "progress.json", json.dumps(saved))


def has_state(folder: Path) -> bool:
    """Whether a run has saved something to go on from."""
    recover_folder(folder / "last")
    return (folder / "last" / "progress.json").is_file()


def load_modules(folder: Path, method: Method) -> None:
    """The weights and buffers of a run, into modules that are not divided yet."""
    _check_state(folder)
    with _loading(folder):
        for name, module in method.modules().items():
            module.load_state_dict(read_tensors(folder / "last" / f"{name}.safetensors"), strict=True)


def load_rest(
    folder: Path,
    method: Method,
    optimizer: torch.optim.Optimizer,
    rank: int = 0,
    scaler: GradScaler | None = None,
) -> Progress:
    """The optimiser's state, the random state of this process, and where the run stands."""
    _check_state(folder)
    last = folder / "last"
    with _loading(folder):
        _load_optimizer(method, optimizer, read_tensors(last / "optimizer.safetensors"))
        randoms = last / f"random-{rank}.safetensors"
        if not randoms.exists():
            raise CheckpointError(f"{folder} was trained by fewer processes: resume it with the same number.")
        _load_random(read_tensors(randoms))
        if scaler is not None:
            scaler.load_state_dict(parse_json(MODEL.read(last / "scaler.json")))
        return _progress(parse_json(MODEL.read(last / "progress.json")))


def _check_state(folder: Path) -> None:
    MODEL.check_below(folder / "last", entry=True)
    if not has_state(folder):
        raise CheckpointError(f"{folder} has no saved state yet (no last/): start it without resuming.")


@contextmanager
def _loading(folder: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except _UNLOADABLE as error:
        raise CheckpointError(
            f"the state in {folder / 'last'} cannot be loaded ({error}): start a new run."
        ) from error


def _progress(content: dict[str, Any]) -> Progress:
    """Progress from JSON, also of runs whose one metric was RSUM; a run without validation has null for −∞."""
    content = {"best" if name == "best_rsum" else name: value for name, value in content.items()}
    progress = Progress(**{**content, "best": -math.inf if content.get("best") is None else content["best"]})
    whole = all(type(number) is int for number in (progress.step, progress.best_epoch))
    if not whole or progress.step < 0 or type(progress.best) not in (int, float):
        raise ValueError("progress.json says no step or no best epoch")
    if not isinstance(progress.history, list) or not all(isinstance(one, dict) for one in progress.history):
        raise ValueError("the history in progress.json is not a list of objects")
    return progress


def _parameter_names(method: Method) -> dict[int, str]:
    parts: dict[str, nn.Module] = {"retriever": method.retriever, "objective": method.objective}
    return {id(p): f"{part}.{n}" for part, module in parts.items() for n, p in module.named_parameters()}


def _optimizer_tensors(method: Method, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    names, tensors = _parameter_names(method), {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            tensors[f"{names[id(parameter)]}|{key}"] = whole_tensor(torch.as_tensor(value))
    return own_tensors(tensors)


def _load_optimizer(method: Method, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    names = _parameter_names(method)
    parameters: dict[str, nn.Parameter] = {
        names[id(p)]: p for group in optimizer.param_groups for p in group["params"]
    }
    optimizer.state.clear()
    for key, value in tensors.items():
        name, slot = key.rsplit("|", 1)
        parameter = parameters[name]
        # the step counter stays on the CPU unless the optimiser keeps it on the device
        on_device = slot != "step" or any(
            g.get("capturable") or g.get("fused") for g in optimizer.param_groups
        )
        placed = value.to(parameter.device) if on_device else value
        if is_divided(parameter):
            from diptych.training.sharding import share_like

            placed = share_like(placed, parameter)
        optimizer.state[parameter][slot] = placed


def _random_tensors() -> dict[str, Tensor]:
    state = np.random.get_state(legacy=False)
    assert isinstance(state, dict)
    numbers = {"torch": torch.get_rng_state()}
    for name, value in {"python": random.getstate(), "numpy": state}.items():
        text = json.dumps(value, default=_as_list)
        numbers[name] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    if torch.cuda.is_available():
        numbers["cuda"] = torch.cuda.get_rng_state()
    return numbers


def _as_list(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else list(value)


def _load_random(tensors: dict[str, Tensor]) -> None:
    torch.set_rng_state(tensors["torch"])
    version, internal, gauss = parse_json(tensors["python"].numpy().tobytes())
    random.setstate((version, tuple(internal), gauss))
    state = parse_json(tensors["numpy"].numpy().tobytes())
    state["state"]["key"] = np.array(state["state"]["key"], dtype=np.uint32)
    np.random.set_state(state)
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
