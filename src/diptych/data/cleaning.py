"""Caption cleaning as published code does it: CUSA's, for students and teachers alike, and X-VLM's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from diptych.data.text import TextInput, TextStore
from diptych.errors import DataError
from diptych.parts import part

MARKS, JOINTS = re.compile(r"""[,.'!?"()*#:;~]"""), re.compile(r"[-/]")
CleaningForm = Literal["cusa", "x-vlm"]
FORMS: dict[CleaningForm, tuple[str, int]] = {"cusa": (" ", 64), "x-vlm": ("", 30)}
"""What takes the place of a mark, and the most words."""


def clean_caption(text: str, form: CleaningForm = "cusa") -> str:
    """Lower case; ``-`` and ``/`` become spaces, ``<person>`` a person; the first words.

    CUSA puts a space in the place of other marks ("dog's" → "dog s") and keeps 64 words, X-VLM drops the marks
    ("dogs") and keeps 30. A text of which nothing is left is an error.
    """
    gap, most_words = FORMS[form]
    words = MARKS.sub(gap, JOINTS.sub(" ", text.lower())).replace("<person>", "person").split()
    if not words:
        raise DataError(f"the text '{text}' has no words: correct it, or train with --no_clean_captions.")
    return " ".join(words[:most_words])


@part
class CleanedInput(TextInput):
    """Cleaned texts, handed to another input: a model trained on them cleans queries too."""

    LATER = ("form",)

    def __init__(self, inner: TextInput, form: CleaningForm = "cusa") -> None:
        self.inner, self.form = inner, form

    def prepare(self, texts: Sequence[str], *, show_progress: bool = False) -> TextStore:
        """Clean, then tokenise."""
        cleaned = [clean_caption(text, self.form) for text in texts]
        return self.inner.prepare(cleaned, show_progress=show_progress)
