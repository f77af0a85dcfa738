"""Tower = encoder → aggregator → unit norm; Retriever = two towers: encode, similarity, save and load."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from diptych import ops
from diptych.aggregators import First
from diptych.aggregators.pooling import Aggregator
from diptych.branches.branch import Branch
from diptych.branches.labels import label_view
from diptych.data.captions import ImageStore
from diptych.data.images import ImageInput, ImageLike
from diptych.data.labels import predicted_labels
from diptych.data.text import TextInput, TextStore
from diptych.devices import pick_device, pick_precision
from diptych.encoders.dual import is_dual_encoder, load_dual
from diptych.encoders.dual_side import merged
from diptych.encoders.encoder import Encoder
from diptych.entries import MODEL
from diptych.errors import SettingsError
from diptych.interaction.similarity import PairScorer
from diptych.model.encoding import collect, encoded_images, encoded_texts, encoding_mode, is_text
from diptych.model.folder import FORMAT, load_folder
from diptych.model.reranking import RerankedScores
from diptych.model.scores import EmbeddingScores, PairScores, Scores, vector_scores
from diptych.parts import describe, part
from diptych.storage import replace_folder
from diptych.types import Batch, Embeddings, Features, Inputs, Ragged, Sides
from diptych.weights import save_weights, update_digest

POOLED = 256  # sets of stored features pooled at a time


@part
class Tower(nn.Module):
    """One side: ``unit(aggregate(encode(x)))``, (B, D)."""

    def __init__(self, encoder: Encoder, aggregator: Aggregator) -> None:
        super().__init__()
        self.encoder, self.aggregator = encoder, aggregator

    @property
    def dim(self) -> int:
        """Width of a pooled vector: the aggregator's, which is the encoder's unless it is a head of its own."""
        return self.aggregator.dim_of(self.encoder.dim)

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
    ``repr`` is one line; ``print(model.image)`` and ``print(model.text)`` show the modules of a side.

    Example::

        model = diptych.Retriever.from_pretrained("runs/photos")
        scores = model.similarity(model.encode_image(["parrots.jpg"]), model.encode_text(["two parrots"]))
    """

    LATER = ("scorer",)

    def __init__(
        self,
        image: Tower,
        text: Tower,
        image_input: ImageInput,
        text_input: TextInput,
        branches: Mapping[str, Branch] | None = None,
        scorer: PairScorer | None = None,
    ) -> None:
        super().__init__()
        self.image, self.text = image, text
        self.image_input, self.text_input = image_input, text_input
        self.branches = nn.ModuleDict(dict(branches or {}))
        self.scorer = scorer
        self.precision = "no"  # of ``encode_*`` and ``scores``, not of training
        self.run: object = None  # how it was trained, where ``diptych.train`` made it: notebooks show it

    def forward(
        self, batch: Batch, image_kept: Tensor | None = None, text_kept: Tensor | None = None
    ) -> Embeddings:
        """Both sides of a batch, with every view of it; of the local features only those ``kept``."""
        image, image_features = self.image(batch.images, image_kept)
        text, text_features = self.text(batch.texts, text_kept)
        seen = Embeddings(image, text, image_features, text_features)
        views = {name: self._look(sides, seen) for name, sides in batch.views.items()}
        views |= {name: branch(seen, batch) for name, branch in self._branches()}
        matches = None
        if self.scorer is not None and self.scorer.candidates is not None:
            matches = self.scorer.compare(seen, batch)
        return replace(seen, scores=self._batch_scores(seen), views=views, matches=matches)

    @property
    def dim(self) -> int:
        """Length of an encoded vector."""
        mixed = sum(branch.dim for _, branch in self._branches() if branch.weight)
        return mixed + (self.image.dim if self._own_share() else 0)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    def image_vectors(self, inputs: Inputs, view: str | None = None) -> Tensor:
        """Score vectors (B, dim) of prepared image inputs, or their vectors in a view."""
        vector, features = self.image(inputs)
        if view is not None:
            return self._branch(view).image(vector, features)
        return self.mixed("image", vector, features)

    def text_vectors(self, inputs: Features, view: str | None = None) -> Tensor:
        """Score vectors (B, dim) of prepared text inputs, or their vectors in a view."""
        vector, features = self.text(inputs)
        if view is not None:
            return self._branch(view).text(vector, features)
        return self.mixed("text", vector, features)

    def mixed(self, side: Literal["image", "text"], vector: Tensor, features: Features) -> Tensor:
        """Score vectors (B, dim) of what a side's tower made: its own vector, and those of branches with a weight."""
        weighted = [branch for _, branch in self._branches() if branch.weight]
        if not weighted:
            return vector
        own = self._own_share()
        parts = [branch.weight**0.5 * getattr(branch, side)(vector, features) for branch in weighted]
        return torch.cat([own**0.5 * vector, *parts] if own else parts, dim=-1)

    def _own_share(self) -> float:
        """The share of the towers' own vectors in the score: what branches leave."""
        return 1.0 - sum(branch.weight for _, branch in self._branches() if branch.weight)

    def encode(self, items: Any, **options: Any) -> Tensor:
        """``encode_text`` of a string or strings, ``encode_image`` of a ``Path``, picture, array, or a list of these.

        A string is always a text: one that names a picture's file is refused, since it may mean either.
        """
        return (self.encode_text if is_text(items) else self.encode_image)(items, **options)

    def encode_image(
        self,
        images: ImageLike | Sequence[ImageLike] | ImageStore,
        *,
        view: str | None = None,
        batch_size: int | None = None,
        show_progress: bool = False,
    ) -> Tensor:
        """Unit rows (N, dim) on the CPU for a path, PIL image, array, a list of these, or an image store.

        A single item gives a single row (1, dim). Order is kept. ``view`` names a branch whose vectors are wanted
        instead of the model's own. What comes next is read, decoded and copied meanwhile (``diptych.model.encoding``);
        ``batch_size`` None suits the device.
        """
        store = [images] if isinstance(images, ImageLike) else images
        out = torch.zeros(len(store), self.dim if view is None else self._branch(view).dim)
        encode = partial(self.image_vectors, view=view)
        return collect(encoded_images(self, store, encode, batch_size, show_progress), out)

    def encode_text(
        self,
        texts: str | Sequence[str] | TextStore,
        *,
        view: str | None = None,
        batch_size: int | None = None,
        show_progress: bool = False,
    ) -> Tensor:
        """Unit rows (M, dim) on the CPU for a text, a list of texts, or prepared texts; ``view`` as for images.

        Batched by length so that little is padding, or packed so that nothing is; returned in order.
        """
        texts = [texts] if isinstance(texts, str) else texts
        out = torch.zeros(len(texts), self.dim if view is None else self._branch(view).text_dim)
        encode = partial(self.text_vectors, view=view)
        return collect(encoded_texts(self, texts, encode, batch_size, show_progress), out)

    def predict_labels(
        self,
        images: ImageLike | Sequence[ImageLike] | ImageStore | None = None,
        texts: str | Sequence[str] | TextStore | None = None,
        *,
        threshold: float | None = None,
        top: int | None = None,
        batch_size: int | None = None,
        show_progress: bool = False,
    ) -> list[dict[str, float]]:
        """Labels of images, or of texts, with their scores, best first; for models that were trained with labels.

        A label is told from ``threshold`` on, by default the one chosen on validation data, or among the best ``top``.
        """
        name, view = label_view(self._branches())
        return predicted_labels(
            self, images, texts, name, view.labels.names, view.thresholds.tolist(), threshold, top,
            batch_size=batch_size, show_progress=show_progress,
        )  # fmt: skip

    def encode_image_features(
        self,
        images: ImageStore | Sequence[ImageLike],
        *,
        batch_size: int | None = None,
        show_progress: bool = False,
    ) -> Ragged:
        """The local features of images that a pair scorer reads, in float16, on the CPU."""
        parts = encoded_images(
            self, images, lambda inputs: _halved(self.image(inputs)[1]), batch_size, show_progress
        )
        return Ragged.join([found for _, found in parts])

    def encode_text_features(
        self, texts: Sequence[str] | TextStore, *, batch_size: int | None = None, show_progress: bool = False
    ) -> Ragged:
        """The local features of texts that a pair scorer reads, in float16, on the CPU."""
        order: list[int] = []
        parts: list[Features] = []
        for rows, found in encoded_texts(
            self, texts, lambda inputs: _halved(self.text(inputs)[1]), batch_size, show_progress
        ):
            order += rows
            parts.append(found)
        return Ragged.join(parts).permuted(torch.tensor(order, dtype=torch.int64).argsort())

    def scores(
        self,
        images: ImageStore,
        texts: Sequence[str] | TextStore,
        *,
        image_batch_size: int | None = None,
        text_batch_size: int | None = None,
        device: torch.device | str | None = None,
        show_progress: bool = False,
    ) -> Scores:
        """Scores (N, M) of images against texts, tile by tile: the pair scorer's, or dot products of vectors.

        A scorer of candidates judges those that the vectors propose; every other pair scores −100.
        """
        if self.scorer is None:
            return vector_scores(
                self,
                images,
                texts,
                image_batch_size=image_batch_size,
                text_batch_size=text_batch_size,
                device=device,
                show_progress=show_progress,
            )
        start = time.perf_counter()
        image = self.encode_image_features(images, batch_size=image_batch_size, show_progress=show_progress)
        middle = time.perf_counter()
        text = self.encode_text_features(texts, batch_size=text_batch_size, show_progress=show_progress)
        seconds = middle - start, time.perf_counter() - middle
        judge = PairScores(self.scorer, image, text, self.device, self.precision, seconds)
        if self.scorer.candidates is None:
            return judge
        vectors = (self._pooled("image", image).to(self.device), self._pooled("text", text).to(self.device))
        quick = EmbeddingScores(*vectors)
        return RerankedScores(quick, judge, self.scorer.candidates, show_progress=show_progress)

    def similarity(self, a: Tensor, b: Tensor) -> Tensor:
        """Scores (len(a), len(b)) of encoded vectors."""
        return ops.cosine_scores(a, b)

    def save_pretrained(self, folder: str | Path, card: str = "") -> None:
        """Write ``config.json``, ``model.safetensors``, assets and a README card; replaces the folder atomically."""
        with replace_folder(Path(folder)) as new:
            config = {"format": FORMAT, "retriever": describe(self, new)}
            MODEL.write(new / "config.json", json.dumps(config, indent=2, ensure_ascii=False))
            save_weights(self, new / "model.safetensors", merged)
            MODEL.write(new / "README.md", card or f"A Diptych retriever, {self.dim} dimensions.\n")

    @staticmethod
    def from_pretrained(
        folder: str | Path, device: torch.device | str | None = "cpu", precision: str = "no"
    ) -> Retriever:
        """The model that ``save_pretrained`` wrote, or the best model of a run folder; loading is strict.

        Also a pretrained dual encoder (CLIP, SigLIP) that was never trained here: ``hf:ID``, or a folder in the
        format of transformers. ``device`` is a name (``auto``: the best there is), ``precision`` that of encoding.
        """
        place = pick_device(device)
        picked = pick_precision(precision, place)
        model = _load_cpu(folder).to(place).eval()
        model.precision = picked
        return model

    def __repr__(self) -> str:
        sides = (
            f"{type(side.encoder).__name__} → {type(side.aggregator).__name__}"
            for side in (self.image, self.text)
        )
        weights = sum(weight.numel() for weight in self.parameters()) / 1e6
        return (
            f"Retriever({' | '.join(sides)}; {self.dim} dimensions, {weights:.1f} M weights, {self.device})"
        )

    def compile_encoders(self) -> None:
        """Compile both encoders in place with torch.compile, for training; names of weights stay as they are."""
        for tower in (self.image, self.text):
            tower.encoder.compile(dynamic=False)  # text lengths come in few, padded sizes

    def fingerprint(self) -> str:
        """16 hex digits of the configuration and the weights: two models that score alike share it."""
        digest = hashlib.sha256(json.dumps(describe(self), sort_keys=True).encode())
        for name, value in sorted(merged(self.state_dict()).items()):
            digest.update(name.encode())
            update_digest(digest, value)
        return digest.hexdigest()[:16]

    def _branches(self) -> list[tuple[str, Branch]]:
        return [(name, branch) for name, branch in self.branches.items() if isinstance(branch, Branch)]

    def _branch(self, view: str) -> Branch:
        known = dict(self._branches())
        if view not in known:
            raise SettingsError(
                f"this model has no view '{view}': its views are {', '.join(known) or 'none'}; leave view out for "
                "the vectors of its score."
            )
        return known[view]

    def _look(self, sides: Sides, seen: Embeddings) -> Embeddings:
        """The towers' look at further inputs; a side that has none is as it was seen."""
        image = (seen.image, seen.image_features) if sides.images is None else self.image(sides.images)
        text = (seen.text, seen.text_features) if sides.texts is None else self.text(sides.texts)
        return Embeddings(image[0], text[0], image[1], text[1])

    def _batch_scores(self, seen: Embeddings) -> Tensor | None:
        """Scores (B, B) of the batch of all processes; each process scores all images against its own texts."""
        if self.scorer is None or self.scorer.candidates is not None:
            return None
        images, texts = seen.local_features()
        own: Tensor = self.scorer(ops.gather_features(images), texts)
        return ops.gather_rows(own.T.contiguous()).T

    def _pooled(self, side: Literal["image", "text"], sets: Ragged) -> Tensor:
        """Score vectors (N, dim) of local features that were encoded before, in float16."""
        tower: Tower = getattr(self, side)
        out = torch.zeros(len(sets), self.dim)
        with encoding_mode(self):
            for start in range(0, len(sets), POOLED):
                rows = torch.arange(start, min(start + POOLED, len(sets)))
                features = sets.take(rows).to(self.device)
                vector = ops.unit(tower.aggregator(features).float())
                out[rows] = self.mixed(side, vector, features).float().cpu()
        return out


def _halved(features: Features) -> Features:
    return Features(features.values.to("cpu", torch.float16), features.mask.cpu())


def _load_cpu(folder: str | Path) -> Retriever:
    """The model of a folder or of a name, on the CPU."""
    if is_dual_encoder(folder):
        dual = load_dual(folder)
        towers = Tower(dual.image, First()), Tower(dual.text, First())
        return Retriever(*towers, dual.image_input, dual.text_input)
    return load_folder(Path(folder), Retriever)
