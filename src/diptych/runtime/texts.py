"""Texts as token ids, by what a runtime says about its model's text input; no transformers, no torch.

==============  ==================================================================================================
``kind``        how ``runtime.json`` describes it
==============  ==================================================================================================
``words``       words of ``vocabulary.json``, cut at ``max_length`` tokens (None: never)
``pieces``      ``tokenizer.json`` of the package tokenizers, cut at ``max_length`` tokens on the side ``cut``, padded
                with ``pad``; with ``length`` every text is padded to it on the side ``side``, and the padding is part
                of the text unless ``masked``
==============  ==================================================================================================

``clean`` says in which form captions are cleaned first, as the model was trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from diptych.data.text import CHUNK, TextInput, TextStore, TokenTexts, WordInput, flatten
from diptych.data.tokenizers import check_tokenizer, tokenizing
from diptych.entries import MODEL
from diptych.errors import RuntimeFault
from diptych.parts import misfit
from diptych.runtime.folder import LARGEST, TOKENIZER, VOCABULARY, advice, is_size
from diptych.storage import parse_json


class Pieces(TextInput):
    """Pieces of a tokenizer of the package tokenizers, its special tokens around them."""

    def __init__(
        self,
        file: Path,
        max_length: int,
        cut: str = "right",
        pad: int = 0,
        length: int | None = None,
        side: str = "right",
        masked: bool = True,
    ) -> None:
        from tokenizers import Tokenizer

        # a text is cut at ``max_length``, padded to ``length``: only the latter is allocated
        if not (0 < max_length <= 2**31 and (length is None or is_size(length)) and 0 <= pad <= LARGEST):
            raise ValueError(f"sizes of texts that are none: {max_length}, {length}, {pad}")
        content = MODEL.read(file)
        check_tokenizer(content)
        self.file = file
        with tokenizing(file):
            self.backend = Tokenizer.from_buffer(content)
        if length is None:
            self.backend.no_padding()
        else:
            self.backend.enable_padding(direction=side, pad_id=pad, length=length)
        self.backend.enable_truncation(max_length, direction=cut)
        self.pad, self.length, self.masked = pad, length, masked

    def prepare(self, texts: Sequence[str], *, show_progress: bool = False) -> TextStore:
        lists: list[list[int]] = []
        masks: list[list[int]] = []
        with tokenizing(self.file):
            for start in range(0, len(texts), CHUNK):
                found = self.backend.encode_batch_fast(list(texts[start : start + CHUNK]))
                lists += [one.ids for one in found]
                masks += [] if self.length is None else [one.attention_mask for one in found]
            if self.length is None:
                ids, offsets = flatten(lists)
                return TokenTexts(ids, np.full_like(ids, -1), offsets, self.pad)
            rows = np.array(lists, np.int32).reshape(len(texts), self.length)
        from diptych.data.text_inputs import FixedTexts

        mask = np.array(masks, bool).reshape(rows.shape)
        return FixedTexts(rows, mask if self.masked else np.ones_like(mask))


def text_reader(folder: Path, described: Mapping[str, Any]) -> TextInput:
    """The reader that the ``runtime.json`` of a runtime describes."""
    settings = dict(described)
    try:
        clean, kind = settings.pop("clean", None), settings.pop("kind")
        reader: TextInput
        if (name := misfit(WordInput if kind == "words" else Pieces, settings)) is not None:
            raise ValueError(f"{name} is {settings[name]!r:.40}")
        if kind == "words":
            reader = WordInput(parse_json(MODEL.read(folder / VOCABULARY)), augment=0.0, **settings)
        elif kind == "pieces":
            reader = Pieces(folder / TOKENIZER, **settings)
        else:
            raise ValueError(f"texts of the unknown kind {kind!r:.40}")
        if clean is not None:
            from diptych.data.text_inputs import FORMS, CleanedInput

            if clean not in FORMS:
                raise ValueError(f"captions cleaned in the unknown form {clean!r:.40}")
            reader = CleanedInput(reader, clean)
    except Exception as error:  # the package tokenizers raises plain ones
        raise RuntimeFault(
            f"the tokenizer in {folder} cannot be read ({error}): {advice(folder.parent)}."
        ) from error
    return reader
