"""Twenty steps of every recipe on toy data: every loss of every step, and the model at the end."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from commands import diptych, flags
from golden.reach import RECIPES
from safetensors.torch import load_file

from diptych import Retriever
from diptych.settings import UNCHANGED

STEPS = 20
SMALL: dict[str, Any] = {
    "dim": 16, "batch_size": 12, "min_count": 1, "word_dim": 8, "log_steps": 1, "seed": 0, "patience": 0,
    "queue_size": 30, "clusters": 6, "concept_size": 10, "prototype_epoch": 1,
    "blocks": 1, "feedforward": 32, "region_clusters": 5, "similarity_dim": 8,
}  # fmt: skip
CLIP = {"model": "toys/clip"}
ENCODERS = {
    "image_encoder": "toys/vit", "text_encoder": "toys/bert", "image_size": 32,
    "fusion_layers": 1, "fusion_heads": 2, "candidates": 4,
}  # fmt: skip
ON_PHOTOS: dict[str, dict[str, Any]] = {
    "clip": CLIP,
    "ridge": ENCODERS,
    "photos": ENCODERS,
    "fusion": ENCODERS,
    "cusa-clip": {**CLIP, "image_teacher": "toys/vit"},
    "cusa-fusion": {**ENCODERS, "image_teacher": "toys/vit", "uni_dim": 8},
}
ON_LABELS = ("labelwise", "cookie-hash")


def train(name: str, folder: Path, **changes: Any) -> None:
    """Train a recipe for twenty steps in the present folder, which holds the toys.

    A setting that came later than the recording has the value that runs had before it.
    """
    entries = dataclasses.fields(RECIPES[name].settings)
    known = {field.name for field in entries}
    later = {f.name: f.metadata["before"] for f in entries if f.metadata["before"] is not UNCHANGED}
    data, epochs = "toys/features", 2
    if name in ON_LABELS:
        data += "?instances=toys/features"
    if name in ON_PHOTOS:
        data, epochs = "toys/photos", 10
    own = {
        **SMALL,
        **later,
        **ON_PHOTOS.get(name, {}),
        "text_teacher": "toys/bert",
        "epochs": epochs,
        **changes,
    }
    chosen = flags({k: v for k, v in own.items() if k in known})
    diptych("train", name, "--data", data, *chosen, "--output_dir", folder)


def outcome(run: Path) -> dict[str, Any]:
    """What must stay as it is of a run: losses by term, validations, fingerprints, digests of its last state.

    ``final`` is the fingerprint of the best model with the weights of the last step.
    """
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text("utf-8").splitlines()]
    steps = [line for line in lines if "loss" in line]
    terms = [name for name in steps[0] if name != "pairs_per_second"]  # a time
    model = Retriever.from_pretrained(run)
    best = model.fingerprint()
    model.load_state_dict(load_file(run / "last" / "retriever.safetensors"))
    return {
        "losses": {term: [line[term] for line in steps] for term in terms},
        "validations": [line for line in lines if "loss" not in line],
        "config": digest((run / "best" / "config.json").read_bytes()),
        "best": best,
        "final": model.fingerprint(),
        "state": {path.stem: of_tensors(path) for path in sorted((run / "last").glob("*.safetensors"))},
    }


def of_tensors(path: Path) -> str:
    """A digest of the names and contents of a file's tensors."""
    parts = []
    for name, value in sorted(load_file(path).items()):
        parts += [f"{name} {value.dtype} {[*value.shape]}".encode()]
        parts += [value.contiguous().flatten().view(torch.uint8).numpy().tobytes()]
    return digest(*parts)


def digest(*parts: bytes) -> str:
    """24 hex digits that stand for the parts."""
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]
