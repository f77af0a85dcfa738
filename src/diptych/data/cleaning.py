"""Caption cleaning as CUSA's published code does it, for students and teachers alike."""

from __future__ import annotations

import re
from collections.abc import Sequence

from diptych.data.text import TextInput, TextStore
from diptych.errors import DataError
from diptych.parts import part

MARKS = re.compile(r"""[,.'!?"()*#:;~\-/]""")
MOST_WORDS = 64


def clean_caption(text: str, most_words: int = MOST_WORDS) -> str:
    """Lower case; punctuation becomes spaces, ``<person>`` a person; the first ``most_words`` words.

    A text of which nothing is left is an error.
    """
    words = MARKS.sub(" ", text.lower()).replace("<person>", "person").split()
    if not words:
        raise DataError(f"the text '{text}' has no words: correct it, or train with --no_clean_captions.")
    return " ".join(words[:most_words])


@part
class CleanedInput(TextInput):
    """Cleaned texts, handed to another input: a model trained on them cleans queries too."""

    def __init__(self, inner: TextInput) -> None:
        self.inner = inner

    def prepare(self, texts: Sequence[str], *, show_progress: bool = False) -> TextStore:
        """Clean, then tokenise."""
        return self.inner.prepare([clean_caption(text) for text in texts], show_progress=show_progress)
