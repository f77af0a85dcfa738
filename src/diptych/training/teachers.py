"""CUSA's teachers as targets of a run: a vector for every training image and every training text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diptych.data.arrays import ArrayStore
from diptych.data.captions import Captions, holds_features
from diptych.data.text_inputs import clean_caption
from diptych.errors import SettingsError
from diptych.model import named
from diptych.objectives.soft_labels import IMAGE_TEACHER, TEXT_TEACHER
from diptych.settings import TeacherSettings
from diptych.targets.columns import Column, Of
from diptych.targets.published_teachers import read_vectors
from diptych.targets.teachers import (
    ImageTeacher,
    Space,
    StoredTeacher,
    vectors_of_images,
    vectors_of_texts,
)

PUBLISHED = "train_unicom.npy"
VECTOR_FILES = (".npy", ".pkl", ".pickle")

LIVE: dict[str, tuple[Of, ...]] = {
    "cached": (), "live": ("image", "text"), "live_image": ("image",), "live_text": ("text",)
}  # fmt: skip


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

    def columns(self, captions: Captions, **how: Any) -> dict[str, Column]:
        """A vector per image and per text of ``captions``."""
        images, texts = self.image_vectors(captions, **how), self.text_vectors(captions, **how)
        return {IMAGE_TEACHER: Column(images, "image"), TEXT_TEACHER: Column(texts, "text")}

    def image_vectors(
        self,
        captions: Captions,
        *,
        device: torch.device,
        show_progress: bool = True,
    ) -> ArrayStore:
        """(N, dim), a row per image."""
        live = "image" in self.live
        if self._source.endswith(VECTOR_FILES):
            if live:
                raise SettingsError(
                    f"{self._source} holds vectors: live teachers need a model, give its name."
                )
            ids = captions.image_ids
            return read_vectors(self._source, ids, project=self.project, show_progress=show_progress)
        teacher = self._of_images(captions)
        if isinstance(teacher, ImageTeacher):
            teacher.backbone.to(device)
        return vectors_of_images(teacher, captions.images, live=live, show_progress=show_progress)

    def check(self, captions: Captions) -> None:
        """Refuse models and files that are not there, or not for these images, before anything is trained."""
        if self._source.endswith(VECTOR_FILES):
            self.image_vectors(captions, device=torch.device("cpu"), show_progress=False)
        else:
            self._of_images(captions).check(captions.images)
        named.text_teacher(self.text, self.project)

    def _of_images(self, captions: Captions) -> ImageTeacher | StoredTeacher:
        name = self._source
        if name == "auto":
            name = "stored" if holds_features(captions.images) else "lite0"
        if name == "stored":
            return StoredTeacher(self.project)
        return named.image_teacher(name, self.image_size, self.space, self.project)

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
        show_progress: bool = True,
    ) -> ArrayStore:
        """(M, dim), a row per text."""
        texts = [clean_caption(text) for text in captions.texts] if self.clean else captions.texts
        teacher = named.text_teacher(self.text, self.project)
        teacher.encoder.to(device)
        live = "text" in self.live
        return vectors_of_texts(teacher, texts, live=live, show_progress=show_progress)


def teachers_of(settings: Any, image_size: int = 224, clean: bool = False) -> Teachers:
    """The teachers that settings name, or the usual ones where they name none."""
    if not isinstance(settings, TeacherSettings):
        return Teachers(clean=clean)
    return Teachers(
        settings.image_teacher,
        settings.text_teacher,
        live=LIVE[settings.teacher_mode],
        space=settings.image_teacher_space,
        project=settings.teacher_projection,
        image_size=settings.teacher_image_size or image_size,
        clean=clean,
    )
