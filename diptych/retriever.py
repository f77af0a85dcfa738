"""Tower = encoder → aggregator → unit norm; Retriever = two towers: encode, similarity, save and load."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from diptych import ops
from diptych.aggregators import First
from diptych.branches.branch import Branch
from diptych.data.captions import ImageStore, StoredImage
from diptych.data.images import ImageInput, ImageLike, as_item
from diptych.data.text import TextInput, TextStore
from diptych.encoders.dual import is_dual_encoder, load_dual
from diptych.errors import CheckpointError
from diptych.kernels.streams import Beside, branching
from diptych.parts import describe, part, rebuild
from diptych.progress import track
from diptych.storage import recover_folder, replace_folder
from diptych.types import Batch, Embeddings, Features, Inputs

FORMAT = 1  # of the model folder; raised when an old folder can no longer be read


@part
class Tower(nn.Module):
    """One side: ``unit(aggregate(encode(x)))``, (B, D)."""

    def __init__(self, encoder: nn.Module, aggregator: nn.Module) -> None:
        super().__init__()
        self.encoder, self.aggregator = encoder, aggregator

    @property
    def dim(self) -> int:
        """The joint dimension D."""
        return int(self.encoder.dim)  # type: ignore[arg-type]

    def forward(self, inputs: Inputs, kept: Tensor | None = None) -> tuple[Tensor, Features]:
        """Unit vectors (B, D), in float32, and the local features (B, L, D) they were pooled from.

        ``kept`` (B, L) leaves the others out, as if the encoder had dropped them.
        """
        features: Features = self.encoder(inputs)
        if kept is not None:
            features = replace(features, mask=features.mask & kept)
        return ops.unit(self.aggregator(features).float()), features


@part
class Retriever(nn.Module):
    """Two towers, the inputs they read, and the branches mixed into their score.

    ``encode_image`` and ``encode_text`` return one vector per item such that their dot product is the score: with
    branches, the concatenation of √(1 − Σ weights) · v and √weight · v_branch, which one matrix product mixes exactly.
    """

    def __init__(
        self,
        image: Tower,
        text: Tower,
        image_input: ImageInput,
        text_input: TextInput,
        branches: Mapping[str, Branch] | None = None,
    ) -> None:
        super().__init__()
        self.image, self.text = image, text
        self.image_input, self.text_input = image_input, text_input
        self.branches = nn.ModuleDict(dict(branches or {}))

    def forward(
        self, batch: Batch, image_kept: Tensor | None = None, text_kept: Tensor | None = None
    ) -> Embeddings:
        """Both sides of a batch, with every branch; of the local features only those ``kept``."""
        with branching((self.image, self.text)):
            with Beside() as other:
                image, image_features = self.image(batch.images, image_kept)
            text, text_features = self.text(batch.texts, text_kept)
            other.join()
        branches = {
            name: branch(image, image_features, text, text_features) for name, branch in self._branches()
        }
        return Embeddings(image, text, image_features, text_features, branches)

    @property
    def dim(self) -> int:
        """Length of an encoded vector."""
        return self.image.dim + sum(branch.dim for _, branch in self._branches())

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    def image_vectors(self, inputs: Inputs) -> Tensor:
        """Score vectors (B, dim) of prepared image inputs."""
        vector, features = self.image(inputs)
        return self._mix(vector, {name: b.image(vector, features) for name, b in self._branches()})

    def text_vectors(self, inputs: Features) -> Tensor:
        """Score vectors (B, dim) of prepared text inputs."""
        vector, features = self.text(inputs)
        return self._mix(vector, {name: b.text(vector, features) for name, b in self._branches()})

    @torch.inference_mode()
    def encode_image(
        self,
        images: ImageLike | Sequence[ImageLike] | ImageStore,
        *,
        batch_size: int = 64,
        show_progress: bool = False,
    ) -> Tensor:
        """Unit rows (N, dim) on the CPU for a path, PIL image, array, a list of these, or an image store.

        A single item gives a single row (1, dim). Order is kept.
        """
        store = [images] if isinstance(images, ImageLike) else images
        with evaluating(self):
            rows = [
                self.image_vectors(_to(self.image_input(chunk), self.device)).float().cpu()
                for chunk in track(
                    _chunks(store, batch_size), "encode images", _count(store, batch_size), show_progress
                )
            ]
        return torch.cat(rows) if rows else torch.zeros(0, self.dim)

    @torch.inference_mode()
    def encode_text(
        self, texts: str | Sequence[str] | TextStore, *, batch_size: int = 256, show_progress: bool = False
    ) -> Tensor:
        """Unit rows (M, dim) on the CPU for a text, a list of texts, or prepared texts.

        Batched by length so that little is padding, returned in order.
        """
        if isinstance(texts, TextStore):
            store = texts
        else:
            store = self.text_input.prepare([texts] if isinstance(texts, str) else texts)
        order = sorted(range(len(store)), key=store.size)
        out = torch.zeros(len(store), self.dim)
        with evaluating(self):
            starts = range(0, len(order), batch_size)
            for start in track(starts, "encode texts", len(starts), show_progress):
                rows = order[start : start + batch_size]
                out[rows] = self.text_vectors(store.collate(rows).to(self.device)).float().cpu()
        return out

    def similarity(self, a: Tensor, b: Tensor) -> Tensor:
        """Scores (len(a), len(b)) of encoded vectors."""
        return ops.cosine_scores(a, b)

    def save_pretrained(self, folder: str | Path, card: str = "") -> None:
        """Write ``config.json``, ``model.safetensors``, assets and a README card; replaces the folder atomically."""
        with replace_folder(Path(folder)) as new:
            config = {"format": FORMAT, "retriever": describe(self, new)}
            (new / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False), "utf-8")
            tensors = {name: value.detach().cpu().contiguous() for name, value in self.state_dict().items()}
            save_file(tensors, new / "model.safetensors")
            (new / "README.md").write_text(card or f"A Diptych retriever, {self.dim} dimensions.\n", "utf-8")

    @staticmethod
    def from_pretrained(folder: str | Path, device: torch.device | str = "cpu") -> Retriever:
        """The model that ``save_pretrained`` wrote, or the best model of a run folder; loading is strict.

        Also a pretrained dual encoder (CLIP, SigLIP) that was never trained here: ``hf:ID``, or a folder in the
        format of transformers.
        """
        import diptych.registry  # noqa: F401  every part must be known before its name is looked up

        if is_dual_encoder(folder):
            dual = load_dual(folder)
            towers = Tower(dual.image, First()), Tower(dual.text, First())
            return Retriever(*towers, dual.image_input, dual.text_input).to(device).eval()

        folder = Path(folder)
        if (folder / "run.json").is_file():  # a run folder: its best model
            folder = folder / "best"
        recover_folder(folder)
        if not (folder / "config.json").is_file():
            raise CheckpointError(
                f"{folder} is not a model folder (no config.json): give the folder of a trained run."
            )
        try:
            config = json.loads((folder / "config.json").read_text("utf-8"))
            found, tree = int(config["format"]), config["retriever"]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{folder / 'config.json'} is damaged ({error}): copy the model again."
            ) from error
        if found != FORMAT:
            raise CheckpointError(
                f"{folder} has model format {found}, this version reads {FORMAT}: update diptych."
            )
        model = rebuild(tree, folder)
        assert isinstance(model, Retriever)
        try:
            model.load_state_dict(load_file(folder / "model.safetensors"), strict=True)
        except (OSError, SafetensorError, RuntimeError) as error:
            raise CheckpointError(
                f"the weights in {folder} do not fit its config.json ({error}): copy the model again."
            ) from error
        return model.to(device).eval()

    def compile_encoders(self) -> None:
        """Compile both encoders in place with torch.compile; names of weights stay as they are."""
        for tower in (self.image, self.text):
            tower.encoder.compile(dynamic=False)  # text lengths come in few, padded sizes

    def fingerprint(self) -> str:
        """16 hex digits of the configuration and the weights: two models that score alike share it."""
        digest = hashlib.sha256(json.dumps(describe(self), sort_keys=True).encode())
        for name, value in sorted(self.state_dict().items()):
            digest.update(name.encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]

    def _branches(self) -> list[tuple[str, Branch]]:
        return [(name, branch) for name, branch in self.branches.items() if isinstance(branch, Branch)]

    def _mix(self, vector: Tensor, views: Mapping[str, Tensor]) -> Tensor:
        if not views:
            return vector
        weights = {name: branch.weight for name, branch in self._branches()}
        rest = 1.0 - sum(weights.values())
        return torch.cat(
            [rest**0.5 * vector, *(weights[name] ** 0.5 * view for name, view in views.items())], dim=-1
        )


class evaluating:  # noqa: N801  a context manager, used like a function
    """Put a module in evaluation mode for a while, and every submodule back as it was."""

    def __init__(self, module: nn.Module) -> None:
        self.modes = [(m, m.training) for m in module.modules()]
        self.module = module

    def __enter__(self) -> nn.Module:
        return self.module.eval()

    def __exit__(self, *_: object) -> None:
        for module, mode in self.modes:
            module.training = mode


def _chunks(store: Any, size: int) -> Iterator[list[StoredImage]]:
    for start in range(0, len(store), size):
        yield [as_item(store[i]) for i in range(start, min(start + size, len(store)))]


def _count(store: Any, size: int) -> int:
    return -(-len(store) // size)


def _to(inputs: Inputs, device: torch.device) -> Inputs:
    return inputs.to(device)
