"""CUSA's teachers as targets of a run: a vector for every training image and every training text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from diptych.branches.heads import UniModalHeads
from diptych.data.arrays import ArrayStore
from diptych.data.captions import Captions, holds_features
from diptych.data.text_inputs import CleanedInput, clean_caption
from diptych.errors import SettingsError
from diptych.model import named
from diptych.model.retriever import Retriever
from diptych.objectives.soft_labels import (
    IMAGE_TEACHER,
    TEXT_TEACHER,
    UNI,
    CrossModalSoftLabels,
    UniModalSoftLabels,
)
from diptych.targets.columns import Column, Of
from diptych.targets.published_teachers import read_vectors
from diptych.targets.teachers import (
    ImageTeacher,
    Space,
    StoredTeacher,
    cache_image_vectors,
    cache_text_vectors,
    live_image_vectors,
    live_text_vectors,
)
from diptych.training.method import Method

PUBLISHED = "train_unicom.npy"
VECTOR_FILES = (".npy", ".pkl", ".pickle")


@dataclass(frozen=True)
class Teachers:
    """The columns ``teacher_image`` and ``teacher_text``.

    ``live`` teachers look at every batch; else their vectors are computed once, kept as one float16 matrix
    each in the cache folder, and shared by all processes and all later runs. With ``clean`` the text teacher reads
    cleaned texts (``clean_caption``), as the student does.
    """

    image: str = "auto"
    text: str = "minilm"
    live: tuple[Of, ...] = ()
    space: Space = "pooled"
    project: int = 0
    image_size: int = 224
    clean: bool = False

    def columns(
        self,
        captions: Captions,
        *,
        device: torch.device,
        cache_dir: Path | None = None,
        show_progress: bool = True,
    ) -> dict[str, Column]:
        """A vector per image and per text of ``captions``."""
        images = self.image_vectors(captions, device=device, cache_dir=cache_dir, show_progress=show_progress)
        texts = self.text_vectors(captions, device=device, cache_dir=cache_dir, show_progress=show_progress)
        return {IMAGE_TEACHER: Column(images, "image"), TEXT_TEACHER: Column(texts, "text")}

    def image_vectors(
        self,
        captions: Captions,
        *,
        device: torch.device,
        cache_dir: Path | None = None,
        show_progress: bool = True,
    ) -> ArrayStore:
        """(N, dim), a row per image."""
        name = self._source
        if name.endswith(VECTOR_FILES):
            if "image" in self.live:
                raise SettingsError(
                    f"{name} holds vectors already: live teachers need a model, give its name."
                )
            return read_vectors(
                name, captions.image_ids, cache_dir, project=self.project, show_progress=show_progress
            )
        if name == "auto":
            name = "stored" if holds_features(captions.images) else "lite0"
        teacher: ImageTeacher | StoredTeacher
        if name == "stored":
            teacher = StoredTeacher(self.project)
        else:
            teacher = named.image_teacher(name, self.image_size, self.space, self.project)
            teacher.backbone.to(device)
        if "image" in self.live:
            return live_image_vectors(teacher, captions.images, cache_dir)
        return cache_image_vectors(teacher, captions.images, cache_dir, show_progress=show_progress)

    @property
    def opens_every_picture(self) -> bool:
        """Whether all pictures are opened before the first step, so that those that cannot be read must go first."""
        return "image" not in self.live and not self._source.endswith(VECTOR_FILES)

    @property
    def _source(self) -> str:
        """The image teacher's name; for the folder of the public code's vectors, their file."""
        file = Path(self.image) / PUBLISHED
        return str(file) if file.is_file() else self.image

    def text_vectors(
        self,
        captions: Captions,
        *,
        device: torch.device,
        cache_dir: Path | None = None,
        show_progress: bool = True,
    ) -> ArrayStore:
        """(M, dim), a row per text."""
        texts = [clean_caption(text) for text in captions.texts] if self.clean else captions.texts
        teacher = named.text_teacher(self.text, self.project)
        teacher.encoder.to(device)
        if "text" in self.live:
            return live_text_vectors(teacher, texts)
        return cache_text_vectors(teacher, texts, cache_dir, show_progress=show_progress)


def with_teachers(method: Method) -> Method:
    """The method with what its soft labels need and it lacks: teachers as targets, uni-modal heads for USA."""
    parts = list(method.objective.modules())
    uni = any(isinstance(part, UniModalSoftLabels) for part in parts)
    if not uni and not any(isinstance(part, CrossModalSoftLabels) for part in parts):
        return method
    model = method.retriever
    if not any(isinstance(source, Teachers) for source in method.targets):
        clean = isinstance(model.text_input, CleanedInput)  # a teacher reads what the model reads
        method = replace(method, targets=(*method.targets, Teachers(clean=clean)))
    if uni and not (UNI in model.branches and isinstance(model.branches[UNI], UniModalHeads)):
        heads = UniModalHeads(model.image.dim, model.image.dim, model.text.dim)
        branches = {**dict(model.branches.items()), UNI: heads}
        inputs = (model.image, model.text, model.image_input, model.text_input)
        method = replace(method, retriever=Retriever(*inputs, branches=branches, scorer=model.scorer))  # type: ignore[arg-type]
    return method
