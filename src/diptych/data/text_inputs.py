"""Texts of one fixed length, which SigLIP reads, and captions cleaned as CUSA's and X-VLM's code does it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers.normalizers import Lowercase

from diptych.data.arrays import Sets
from diptych.data.text import CHUNK, HubInput, TextInput, TextStore, load_tokenizer, tokenizer_state
from diptych.errors import DataError, SettingsError
from diptych.parts import content_digest, part
from diptych.progress import track


class FixedTexts:
    """Token ids (M, W) of many texts, all of W tokens; ``mask`` (M, W) is what the model attends to."""

    def __init__(self, ids: NDArray[np.int32], mask: NDArray[np.bool_]) -> None:
        self.ids, self.mask = ids, mask
        self.pad_to_multiple = 1  # there is one shape already

    def __len__(self) -> int:
        return len(self.ids)

    def size(self, index: int) -> int:
        return int(self.ids.shape[1])

    def collate(self, rows: Sequence[int], rng: np.random.Generator | None = None) -> Sets:
        """Token ids (B, W) int64; ``rng`` changes nothing."""
        numbers = np.asarray(rows, dtype=np.int64)
        return Sets(self.ids[numbers].astype(np.int64), self.mask[numbers])


@part
class FixedLengthInput(HubInput):
    """Tokens of any Hugging Face tokenizer, cut or padded to ``length`` as the model was trained.

    Padding is attended to unless the tokenizer says that its model takes an attention mask. ``source`` is a
    folder or a hub id. ``lower`` lower-cases texts first, for models whose tokenizer does not do it itself.
    """

    LATER = ("lower",)

    def __init__(self, source: str | Path, length: int = 64, lower: bool = False) -> None:
        if length < 2:
            raise SettingsError(f"length={length} leaves no room for a text: give at least 2 tokens.")
        self.tokenizer = load_tokenizer(source, fast=False)
        self.length, self.lower = length, lower
        self.masked = "attention_mask" in self.tokenizer.model_input_names

    def prepare(self, texts: Sequence[str], *, show_progress: bool = False) -> FixedTexts:
        ids = np.zeros((len(texts), self.length), dtype=np.int32)
        mask = np.ones(ids.shape, dtype=bool)
        # letter by letter, as the published tokenizer does, and not as str.lower does with a final sigma
        lowered = Lowercase().normalize_str if self.lower else str
        for start in track(range(0, len(texts), CHUNK), "reading texts", show=show_progress):
            encoded = self.tokenizer(
                [lowered(text) for text in texts[start : start + CHUNK]],
                truncation=True,
                max_length=self.length,
                padding="max_length",
                return_attention_mask=True,
            )
            ids[start : start + CHUNK] = encoded["input_ids"]
            if self.masked:
                mask[start : start + CHUNK] = np.asarray(encoded["attention_mask"], dtype=bool)
        return FixedTexts(ids, mask)

    def content_arguments(self) -> dict[str, Any]:
        state = [tokenizer_state(self.tokenizer), self.masked, self.tokenizer.padding_side]
        return {"source": content_digest(json.dumps(state))}


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
        cleaned = [clean_caption(text, self.form) for text in texts]
        return self.inner.prepare(cleaned, show_progress=show_progress)
