"""Texts as the model reads them: tokenised once to flat arrays, then augmented and padded by batch."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from diptych.data.arrays import ArrayStore, Sets, flat_index
from diptych.data.tokenizers import check_tokenizer, tokenizing
from diptych.data.vocabulary import (
    END,
    MASK,
    PAD,
    START,
    UNKNOWN,
    published_form,
    tokenize,
    vocabulary_words,
)
from diptych.entries import MODEL
from diptych.errors import DataError, SettingsError, reason_of
from diptych.parts import content_digest, part
from diptych.progress import track

if TYPE_CHECKING:
    from diptych.data.augmentation import WordAugmentation

_TOKENIZER_LOCK = threading.Lock()
CHUNK = 8192  # texts read at a time, which bounds what a tokenizer's encodings hold
UNSTATED = 2**31  # tokens; a tokenizer that does not say what its model reads has 10^30
COUNT_FROM_PAD = ("roberta", "xlm-roberta", "camembert")
"""Models whose first position is that of the pad token, plus 1."""


@runtime_checkable
class TextStore(Protocol):
    """Prepared texts: token ids or cached token states, padded on request, by any thread.

    ``pad_to_multiple`` rounds the padded length up, which leaves few shapes to compile or to record.
    """

    pad_to_multiple: int

    def __len__(self) -> int: ...

    def size(self, index: int) -> int:
        """Tokens of one text, specials included."""

    def collate(self, rows: Sequence[int], rng: np.random.Generator | None = None) -> Sets:
        """Token ids (B, W) int64 or states (B, W, H) of some texts; ``rng`` given = training augmentation."""


class TextInput(ABC):
    """Turns texts into what a text encoder reads."""

    @abstractmethod
    def prepare(self, texts: Sequence[str], *, show_progress: bool = False) -> TextStore:
        """Tokenise once; the store then pads any rows of it quickly."""

    def read(self, texts: Sequence[str]) -> TextStore:
        """The same without what training augmentation needs: for encoding."""
        return self.prepare(texts)

    def augmentation(self, rate: float, *, keep_a_word: bool = False) -> WordAugmentation:
        """How words are masked, replaced and deleted at this rate."""
        raise SettingsError(f"{type(self).__name__} cannot augment words: use a BiGRU or a text transformer.")

    def spell(self, ids: Sequence[int]) -> list[str]:
        """How the tokens of these ids are written, for people to read."""
        return [str(number) for number in ids]

    def __call__(self, texts: Sequence[str]) -> Sets:
        """Token ids (B, W) of a few texts, without augmentation."""
        return self.read(texts).collate(range(len(texts)))


class FlatTexts:
    """Many texts end to end in flat arrays: text i lies from ``offsets[i]`` to ``offsets[i + 1]``."""

    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def size(self, index: int) -> int:
        return int(self.offsets[index + 1] - self.offsets[index])

    def runs(self, rows: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where some texts begin, and how long they are."""
        numbers = np.asarray(rows, dtype=np.int64)
        return self.offsets[numbers], self.offsets[numbers + 1] - self.offsets[numbers]


class TokenTexts(FlatTexts):
    """Token ids of many texts in flat arrays: text i is ``ids[offsets[i]:offsets[i+1]]``.

    ``words`` numbers the words of each text, −1 for tokens that are never touched. ``pad_to_multiple`` rounds the
    padded length W up, which gives a GPU few distinct shapes to compile for.
    """

    def __init__(
        self,
        ids: NDArray[np.int32],
        words: NDArray[np.int32],
        offsets: NDArray[np.int64],
        pad_id: int,
        augmentation: WordAugmentation | None = None,
        pad_to_multiple: int = 1,
    ) -> None:
        self.ids, self.words, self.offsets = ids, words, offsets
        self.pad_id, self.augmentation, self.pad_to_multiple = pad_id, augmentation, pad_to_multiple

    def augmented(self, augmentation: WordAugmentation | None) -> TokenTexts:
        """The same texts with another augmentation; the arrays are shared."""
        return TokenTexts(self.ids, self.words, self.offsets, self.pad_id, augmentation, self.pad_to_multiple)

    def collate(self, rows: Sequence[int], rng: np.random.Generator | None = None) -> Sets:
        """Token ids (B, W) int64 of some texts; ``rng`` given = words augmented before padding."""
        starts, sizes = self.runs(rows)
        where = flat_index(starts, sizes)
        ids = self.ids[where].astype(np.int64)
        row_of = np.repeat(np.arange(len(starts)), sizes)
        if rng is not None and self.augmentation is not None:
            ids, row_of = self.augmentation(ids, self.words[where].astype(np.int64), row_of, rng)
            sizes = np.bincount(row_of, minlength=len(starts))
        mask = _mask(sizes, self.pad_to_multiple)
        values = np.full(mask.shape, self.pad_id, dtype=np.int64)
        values[mask] = ids  # both are in row order
        return Sets(values, mask)


class CachedTexts(FlatTexts):
    """Token states of a frozen transformer: text i is ``states[offsets[i]:offsets[i+1]]``, (W_i, H).

    ``states`` (total, H), float16 or float32, may be an array, a memory map, or a ``ArrayStore`` of an
    ``.npy`` file, of which a batch reads only its own rows.
    """

    def __init__(
        self, states: NDArray[Any] | ArrayStore, offsets: NDArray[np.int64], pad_to_multiple: int = 1
    ) -> None:
        self.states = states if isinstance(states, ArrayStore) else ArrayStore(states)
        self.offsets = np.asarray(offsets, dtype=np.int64)
        self.pad_to_multiple = pad_to_multiple
        if len(self.states.shape) != 2:
            raise DataError(f"cached token states must have shape (tokens, dim), not {self.states.shape}.")
        rises = len(self.offsets) > 0 and self.offsets[0] == 0 and bool((np.diff(self.offsets) > 0).all())
        if not rises or self.offsets[-1] != len(self.states):
            raise DataError(f"the offsets of texts do not rise from 0 to {len(self.states)}: delete it.")

    def collate(self, rows: Sequence[int], rng: np.random.Generator | None = None) -> Sets:
        """States (B, W, H) float32; ``rng`` changes nothing, since the encoder drops cached words by mask."""
        starts, sizes = self.runs(rows)
        mask = _mask(sizes, self.pad_to_multiple)
        values = np.zeros((*mask.shape, self.states.shape[1]), dtype=np.float32)
        values[mask] = self.states.spans(starts, sizes)
        return Sets(values, mask)


class HubInput(TextInput):
    """An input whose tokenizer is one of Hugging Face's; its files are saved with the model."""

    tokenizer: Any

    @property
    def vocabulary_size(self) -> int:
        """Rows that an embedding of these tokens needs."""
        return len(self.tokenizer)

    def save_assets(self, folder: Path) -> dict[str, Any]:
        self.tokenizer.save_pretrained(folder / "tokenizer")
        return {"source": "tokenizer"}


@part
class WordInput(TextInput):
    """Words of a fixed vocabulary: ``<start>`` words ``<end>``, unknown ones as ``<unk>`` (for a BiGRU).

    ``words`` are the words by id, or the published form {"word2idx", ...}. While training each word, ``<start>`` and
    ``<end>`` too, is touched with probability ``augment``. Texts are cut at ``max_length`` tokens; None: never.
    """

    LATER = ("max_length",)

    def __init__(
        self, words: Sequence[str] | Mapping[str, Any], augment: float = 0.2, max_length: int | None = None
    ) -> None:
        self.words = vocabulary_words(words)
        self.augment = _probability(augment)
        if max_length is not None and max_length < 3:
            raise SettingsError(f"max_length={max_length} leaves no word: give 3 or more.")
        self.max_length = max_length
        self._ids = {word: number for number, word in enumerate(self.words)}
        if augment and MASK not in self._ids:
            raise SettingsError(f"word augmentation needs {MASK} in the words: append it or set augment=0.")

    @property
    def vocabulary_size(self) -> int:
        return len(self.words)

    def prepare(self, texts: Sequence[str], *, show_progress: bool = False) -> TokenTexts:
        start, end, unknown = self._ids[START], self._ids[END], self._ids[UNKNOWN]
        most = None if self.max_length is None else self.max_length - 2
        lists = [
            [start, *(self._ids.get(word, unknown) for word in tokenize(text)[:most]), end]
            for first in track(range(0, len(texts), CHUNK), "reading texts", show=show_progress)
            for text in texts[first : first + CHUNK]
        ]
        ids, offsets = flatten(lists)
        words = flat_index(np.zeros(len(lists), dtype=np.int64), np.diff(offsets)).astype(np.int32)
        augmentation = self.augmentation(self.augment) if self.augment else None
        return TokenTexts(ids, words, offsets, self._ids[PAD], augmentation)

    def augmentation(self, rate: float, *, keep_a_word: bool = False) -> WordAugmentation:
        """Any word of the vocabulary may stand for a replaced one."""
        if MASK not in self._ids:
            raise SettingsError(f"word augmentation needs {MASK} in the words: append it or set augment=0.")
        from diptych.data.augmentation import WordAugmentation

        choices = np.arange(len(self.words), dtype=np.int64)
        return WordAugmentation(rate, self._ids[MASK], choices, keep_a_word=keep_a_word)

    def spell(self, ids: Sequence[int]) -> list[str]:
        return [self.words[number] for number in ids]

    def save_assets(self, folder: Path) -> dict[str, Any]:
        content = json.dumps(published_form(self.words), ensure_ascii=False)
        MODEL.write(folder / "vocabulary.json", content)
        return {"words": "vocabulary.json"}

    def content_arguments(self) -> dict[str, Any]:
        return {"words": content_digest("\n".join(self.words))}


@part
class WordPieceInput(HubInput):
    """Pieces of any Hugging Face fast tokenizer, its special tokens around them (a transformer's input).

    ``source`` is a folder or a hub id. Texts are cut at ``max_length`` tokens, by default at what the tokenizer or its
    model says that this can read. While training each word, all its pieces together, is touched with probability
    ``augment``.
    """

    def __init__(self, source: str | Path, augment: float = 0.2, max_length: int | None = None) -> None:
        self.tokenizer = load_tokenizer(source)
        self.augment = _probability(augment)
        limit = int(min(self.tokenizer.model_max_length, UNSTATED))
        if max_length is not None and not 3 <= max_length <= limit:
            raise SettingsError(f"max_length={max_length} is out of range: give 3 to {limit} tokens.")
        self.max_length = max_length or limit
        self._mask_id: int | None = self.tokenizer.mask_token_id
        if augment and self._mask_id is None:
            raise SettingsError(f"the tokenizer '{source}' has no mask token to augment with: set augment=0.")

    def read(self, texts: Sequence[str]) -> TokenTexts:
        """Ids of all texts in flat arrays, a few times faster than ``prepare``: no lists are made but the ids."""
        lists = [encoding.ids for some in self._encodings(texts, fast=True) for encoding in some]
        ids, offsets = flatten(lists)
        return TokenTexts(ids, np.full_like(ids, -1), offsets, self.tokenizer.pad_token_id or 0)

    def prepare(self, texts: Sequence[str], *, show_progress: bool = False) -> TokenTexts:
        ids: list[list[int]] = []
        words: list[list[int]] = []
        chunks = -(-len(texts) // CHUNK)
        for some in track(self._encodings(texts), "reading texts", total=chunks, show=show_progress):
            for encoding in some:
                ids.append(encoding.ids)
                words.append([-1 if word is None else word for word in encoding.word_ids])
        flat_ids, offsets = flatten(ids)
        flat_words, _ = flatten(words)
        augmentation = self.augmentation(self.augment) if self.augment else None
        return TokenTexts(flat_ids, flat_words, offsets, self.tokenizer.pad_token_id or 0, augmentation)

    def _encodings(self, texts: Sequence[str], *, fast: bool = False) -> Iterator[list[Any]]:
        """The encodings of ``CHUNK`` texts at a time, cut to length; fast ones know no words."""
        backend = self.tokenizer.backend_tokenizer
        encode = backend.encode_batch_fast if fast else backend.encode_batch
        for start in range(0, len(texts), CHUNK):
            with _TOKENIZER_LOCK, tokenizing(self.tokenizer.name_or_path):  # it keeps these between calls
                backend.no_padding()
                backend.enable_truncation(self.max_length, direction=self.tokenizer.truncation_side)
                encodings = encode(list(texts[start : start + CHUNK]), add_special_tokens=True)
            yield encodings

    def augmentation(self, rate: float, *, keep_a_word: bool = False) -> WordAugmentation:
        """Any piece of the vocabulary may stand for a replaced one."""
        if self._mask_id is None:
            raise SettingsError("this tokenizer has no mask token to augment with: set augment=0.")
        from diptych.data.augmentation import WordAugmentation

        choices = np.fromiter(sorted(self.tokenizer.get_vocab().values()), dtype=np.int64)
        return WordAugmentation(rate, self._mask_id, choices, keep_a_word=keep_a_word)

    def spell(self, ids: Sequence[int]) -> list[str]:
        return list(self.tokenizer.convert_ids_to_tokens(list(ids)))

    def content_arguments(self) -> dict[str, Any]:
        return {"source": self._digest}

    @cached_property
    def _digest(self) -> str:
        return content_digest(tokenizer_state(self.tokenizer))


def tokenizer_state(tokenizer: Any) -> str:
    """What a tokenizer does to a text, as a string: the same wherever its files lie."""
    if not tokenizer.is_fast:
        pieces = hashlib.sha256(tokenizer.sp_model.serialized_model_proto()).hexdigest()
        return f"{type(tokenizer).__name__} {pieces} {sorted(tokenizer.get_added_vocab().items())}"
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    for setting in ("truncation", "padding"):  # of the last call, not of the tokenizer
        state.pop(setting, None)
    return json.dumps(state, sort_keys=True)


def load_tokenizer(source: str | Path, fast: bool = True) -> Any:
    """The tokenizer of a folder or a hub id; with ``fast`` one that numbers the words of its pieces.

    One that does not say how many tokens its model reads is told by the model's configuration, and saved with it.
    """
    from transformers import AutoTokenizer

    is_path = isinstance(source, Path) or Path(source).is_dir() or str(source).startswith((".", "/", "~"))
    if is_path and not Path(source).is_dir():
        raise DataError(f"the tokenizer folder {source} does not exist: check the path.")
    MODEL.check_below(Path(source))
    for file in sorted(Path(source).glob("tokenizer*.json")) if is_path else ():
        try:
            check_tokenizer(MODEL.read(file))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(f"{file} is not read ({reason_of(error, 200)}): copy the model again.") from error
    try:
        with tokenizing(source):
            tokenizer = AutoTokenizer.from_pretrained(
                str(source), use_fast=True, local_files_only=is_path, trust_remote_code=False
            )
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        if is_path:
            raise DataError(f"{source} holds no tokenizer: give tokenizer.json or vocab.txt.") from error
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") else ""
        raise DataError(
            f"no tokenizer called '{source}' in the local cache or on the hub{offline}: give a folder that "
            "holds tokenizer.json, or the id of a model that can be downloaded."
        ) from error
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        # transformers makes an empty tokenizer where the files of one are missing
        raise DataError(
            f"{source} has no tokenizer: put tokenizer.json (or vocab.json and merges.txt, or spiece.model) "
            "beside its config.json."
        )
    if fast and not tokenizer.is_fast:
        raise DataError(f"the tokenizer '{source}' has no fast version: convert it to tokenizer.json first.")
    if tokenizer.model_max_length > UNSTATED:
        tokenizer.model_max_length = _positions(source, is_path) or tokenizer.model_max_length
    return tokenizer


def _positions(source: str | Path, is_path: bool) -> int | None:
    """How many tokens the model beside a tokenizer has positions for; None where there is none, or any number."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(source), local_files_only=is_path, trust_remote_code=False)
        most = int(config.max_position_embeddings)
        return most - (config.pad_token_id + 1) if config.model_type in COUNT_FROM_PAD else most
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def flatten(lists: Sequence[Sequence[int]]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Lists end to end (total,), and where each begins (len + 1,)."""
    offsets = np.zeros(len(lists) + 1, dtype=np.int64)
    np.cumsum([len(one) for one in lists], out=offsets[1:])
    flat = np.fromiter(chain.from_iterable(lists), dtype=np.int32, count=int(offsets[-1]))
    return flat, offsets


def _mask(sizes: NDArray[np.int64], multiple: int) -> NDArray[np.bool_]:
    """(B, W) bool for rows of these sizes, W rounded up to a multiple."""
    longest = int(sizes.max(initial=0))
    width = -(-longest // multiple) * multiple
    return np.asarray(np.arange(width) < sizes[:, None])


def _probability(value: float) -> float:
    if not 0 <= value < 1:
        raise SettingsError(f"augment={value} is no probability for words: give 0 or a number below 1.")
    return value
