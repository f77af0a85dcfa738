"""A model's text input as its runtime reads it: the files it needs, and what ``runtime.json`` says about it."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import numpy as np

from diptych.data.text import TextInput, WordInput, WordPieceInput
from diptych.data.text_inputs import CleanedInput, FixedLengthInput
from diptych.data.vocabulary import published_form
from diptych.entries import MODEL
from diptych.errors import SettingsError
from diptych.runtime.folder import TOKENIZER, VOCABULARY
from diptych.runtime.texts import text_reader

ODD_TEXTS = (
    "a", "Two  spaces,\tand a tab", "  spaces around  ", "UPPER case, don't; (really?) [no] {x}", "naïve café, 3.14 €",
    "犬と猫", "emoji \U0001f436 here", "one_two-three/four@five#six", "…“quotes” – dashes — and º", "x" * 90,
    " ".join(["long"] * 600),
)  # fmt: skip
"""Texts that tokenizers treat differently: a converted one must give the same ids."""


def write_texts(text_input: TextInput, folder: Path) -> dict[str, Any]:
    """Write the files of a text input into a runtime; what ``runtime.json`` says about it (``runtime.texts``)."""
    if isinstance(text_input, CleanedInput):
        return {**write_texts(text_input.inner, folder), "clean": text_input.form}
    if isinstance(text_input, WordInput):
        words = json.dumps(published_form(text_input.words), ensure_ascii=False)
        MODEL.write(folder / VOCABULARY, words)
        described: dict[str, Any] = {"kind": "words", "max_length": text_input.max_length}
    elif isinstance(text_input, WordPieceInput | FixedLengthInput):
        lower = isinstance(text_input, FixedLengthInput) and text_input.lower
        MODEL.write(folder / TOKENIZER, _tokenizer_json(text_input.tokenizer, lower))
        described = _described(text_input)
    else:
        raise SettingsError(f"its texts are read by {type(text_input).__name__}, which needs torch")
    found, wanted = text_reader(folder, described).read(ODD_TEXTS), text_input.read(ODD_TEXTS)
    for row, text in enumerate(ODD_TEXTS):
        mine, own = found.collate([row]), wanted.collate([row])
        if not (np.array_equal(mine.values, own.values) and np.array_equal(mine.mask, own.mask)):
            raise SettingsError(f"its tokenizer reads '{text[:40]}' differently outside transformers")
    return described


def _described(text_input: WordPieceInput | FixedLengthInput) -> dict[str, Any]:
    tokenizer = text_input.tokenizer
    pad = 0 if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)
    about = {"kind": "pieces", "cut": tokenizer.truncation_side, "pad": pad}
    if isinstance(text_input, WordPieceInput):
        return {**about, "max_length": text_input.max_length}
    return {
        **about, "max_length": text_input.length, "length": text_input.length, "side": tokenizer.padding_side,
        "masked": text_input.masked,
    }  # fmt: skip


def _tokenizer_json(tokenizer: Any, lower: bool) -> str:
    """A tokenizer of transformers in the format of the package tokenizers; with ``lower``, of lower-cased texts."""
    if tokenizer.is_fast:
        state = json.loads(tokenizer.backend_tokenizer.to_str())
    elif type(tokenizer).__name__ == "SiglipTokenizer":
        state = json.loads(_siglip(tokenizer))
    else:
        raise SettingsError(f"its tokenizer is a {type(tokenizer).__name__}, which needs sentencepiece")
    state["truncation"] = state["padding"] = None  # of the last call, not of the tokenizer
    if lower:
        own = [] if state["normalizer"] is None else [state["normalizer"]]
        state["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Lowercase"}, *own]}
    return json.dumps(state, ensure_ascii=False)


def _siglip(tokenizer: Any) -> str:
    """SigLIP's sentencepiece with its own cleaning: lower case, no ASCII punctuation, single spaces."""
    from tokenizers import Regex, Tokenizer, normalizers
    from tokenizers.models import Unigram
    from tokenizers.processors import TemplateProcessing

    pieces = tokenizer.sp_model
    scores = [(pieces.id_to_piece(n), pieces.get_score(n)) for n in range(pieces.get_piece_size())]
    made = Tokenizer(Unigram(scores, unk_id=pieces.unk_id()))
    marks = "".join(f"\\{mark}" for mark in string.punctuation)
    steps = [
        normalizers.Replace("▁", " "), *([normalizers.Lowercase()] if tokenizer.do_lower_case else []),
        normalizers.Replace(Regex(f"[{marks}]"), ""), *_characters(pieces),
        normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip(), normalizers.Prepend("▁"),
        normalizers.Replace(" ", "▁"),
    ]  # fmt: skip
    made.normalizer = normalizers.Sequence(steps)
    end = (tokenizer.eos_token, tokenizer.eos_token_id)
    made.post_processor = TemplateProcessing(single=f"$A {end[0]}", special_tokens=[end])
    return str(made.to_str())


def _characters(pieces: Any) -> list[Any]:
    """The table by which sentencepiece normalises characters."""
    from tokenizers import normalizers
    from transformers.convert_slow_tokenizer import import_protobuf

    proto = import_protobuf().ModelProto()
    proto.ParseFromString(pieces.serialized_model_proto())
    table = proto.normalizer_spec.precompiled_charsmap
    return [normalizers.Precompiled(table)] if table else []
