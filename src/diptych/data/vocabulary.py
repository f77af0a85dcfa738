"""Words of a text by the rules of NLTK's ``word_tokenize``, and the vocabulary of the published BiGRU models.

The published vocabularies and texts were cut by ``word_tokenize``: Punkt splits sentences, then Penn Treebank
rules split words. The word rules are written here as a scanner over the chunks between spaces, so that
neither NLTK nor its downloaded Punkt model is needed; on caption text they give the words of
``NLTKWordTokenizer``, other ones only in odd runs of marks such as ``::a`` or two quotation marks in a row.
Of Punkt one thing reaches the words: a period inside the text that ends a sentence becomes a word of its own.
Here it does unless the word before it is a known abbreviation, or an initial or a number and the sentence
goes on. Punkt's rule is the same with a trained list of abbreviations in the place of ours, so a rare
abbreviation may be cut differently.

``read_pieces`` reads the word pieces of BERT from a folder's tokenizer.json without importing transformers, which takes
longer than all the rest of a search. A folder that is in any way unusual is left to transformers.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from diptych.errors import DataError, SettingsError
from diptych.storage import MODEL, parse_json

PAD, START, END, UNKNOWN, MASK = "<pad>", "<start>", "<end>", "<unk>", "<mask>"
MIN_COUNT = 4  # rarer words become <unk> (published rule)

ABBREVIATION = re.compile(
    r"(?:.*-)?(?:a\.m|p\.m|u\.s|u\.k|u\.n|e\.g|i\.e|d\.c|dr|mrs?|ms|st|[js]r|vs|ft|inc|ltd|co|corp|no|gen|sen"
    r"|rep|prof|rev|mt|ave)"
)
CONTRACTIONS = frozenset(["cannot", "d'ye", "gimme", "lemme", "gonna", "wanna", "gotta", "more'n"])
CLOSERS = "])}>\"'»”’"
_PIECE = re.compile(
    r"""(?P<mark>[«“‘„»”’]|`+|\.{2,}|[;@\#$%&?!*\[\](){}<>\u2012-\u2015]|--|[:,](?!\d)|[:,]$)
      | (?P<quote>"|'')
      | (?P<word>(?:(?!--|''|\.\.)[^«“‘„»”’`;@\#$%&?!*\[\](){}<>\u2012-\u2015:,"]|[:,](?=\d))+)""",
    re.VERBOSE,
)
_CLITIC = re.compile(r"(?P<stem>.*[^'])(?P<tail>'(?:s|m|d|ll|re|ve)?|n't)")
_APOSTROPHE = re.compile(r"'(\w+)")
# what may follow an apostrophe that leans on the word before, so that it opens no quotation
LEANING = frozenset(["re", "ve", "ll", "m", "t", "s", "d", "n"])
_CONTRACTION = re.compile(r"(can|d|gim|lem|gon|wan|got|more)(not|'ye|me|na|ta|'n)")


def tokenize(text: str) -> list[str]:
    """The words of a text, lower-cased."""
    chunks = text.lower().split()
    words: list[str] = []
    for number, chunk in enumerate(chunks):
        following = chunks[number + 1] if number + 1 < len(chunks) else None
        chunk, period, closers = _final_period(chunk, following)
        _split(chunk, words, before=" " if number else "^")
        if period:
            words.append(".")
            _split(closers, words, before=".")
    return words


def build_vocabulary(texts: Iterable[str], min_count: int = MIN_COUNT) -> list[str]:
    """Words by id: four specials, the words seen ``min_count`` times or more by frequency, ``<mask>``."""
    if min_count < 1:
        raise SettingsError(f"min_count={min_count} is out of range: give at least 1.")
    counts = Counter(word for text in texts for word in tokenize(text))
    frequent = sorted((w for w, n in counts.items() if n >= min_count), key=lambda w: (-counts[w], w))
    return [PAD, START, END, UNKNOWN, *frequent, MASK]


def vocabulary_words(vocabulary: Sequence[str] | Mapping[str, Any]) -> list[str]:
    """Words by id from a list of them or from the published form {"word2idx", "idx2word", "idx"}; checked."""
    if isinstance(vocabulary, Mapping):
        word2idx = vocabulary.get("word2idx")
        if not isinstance(word2idx, Mapping) or not word2idx:
            raise DataError(
                "this vocabulary has no 'word2idx' table: give the published JSON or a list of words."
            )
        words = sorted(word2idx, key=lambda word: int(word2idx[word]))
        if [int(word2idx[word]) for word in words] != list(range(len(words))):
            raise DataError(
                f"the ids in this vocabulary's word2idx are not 0…{len(words) - 1}, each used once."
            )
    else:
        words = list(vocabulary)
    if len(set(words)) != len(words):
        twice = next(word for word, n in Counter(words).items() if n > 1)
        raise DataError(f"this vocabulary holds the word '{twice}' twice: each word needs one id.")
    if words[:4] != [PAD, START, END, UNKNOWN]:
        raise DataError(
            f"this vocabulary starts with {words[:4]}: ids 0–3 must be {PAD}, {START}, {END}, {UNKNOWN}."
        )
    return words


def read_vocabulary(path: str | Path) -> list[str]:
    """Words by id from a published vocabulary file, with ``<mask>`` appended where it has none."""
    path = Path(path)
    try:
        words = vocabulary_words(parse_json(path.read_text("utf-8")))
    except FileNotFoundError as error:
        raise DataError(f"the vocabulary {path} does not exist: check the path.") from error
    except (UnicodeDecodeError, ValueError) as error:
        raise DataError(
            f"{path} is not a vocabulary in JSON ({error}): a .pkl must be converted first."
        ) from error
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    return words if MASK in words else [*words, MASK]


def published_form(words: Sequence[str]) -> dict[str, Any]:
    """{"word2idx", "idx2word", "idx"}: what the published code writes and reads."""
    return {
        "word2idx": {word: number for number, word in enumerate(words)},
        "idx2word": {str(number): word for number, word in enumerate(words)},
        "idx": len(words),
    }


def _final_period(chunk: str, following: str | None) -> tuple[str, bool, str]:
    """Take the sentence's period off a chunk: what is before it, whether it was there, the closers after."""
    core = chunk.rstrip(CLOSERS)
    closers = chunk[len(core) :]
    stem = core[:-1]
    if not core.endswith(".") or not stem or stem.endswith("."):
        return chunk, False, ""
    if following is not None:
        word = stem.lstrip("([{<\"'`«“‘„")
        abbreviated = ABBREVIATION.fullmatch(word) is not None
        initial = len(word) == 1 and word.isalpha()
        number = word.replace(",", "").replace(".", "").isdigit()
        if abbreviated or ((initial or number) and following[0].isalpha()):
            return chunk, False, ""
    return stem, True, closers


def _split(chunk: str, words: list[str], before: str) -> None:
    """Append the words of a chunk that comes after the character ``before`` ("^" = the start of the text)."""
    if chunk.isalpha() and chunk not in CONTRACTIONS:
        words.append(chunk)
        return
    for match in _PIECE.finditer(chunk):
        piece = match.group()
        if match.lastgroup == "quote":
            opens = before in " ([{<" or (before == "^" and piece == '"')
            words.append("``" if opens else "''")
        elif match.lastgroup == "word":
            _split_word(piece, words)
        else:
            words.append(piece)
        before = piece[-1]


def _split_word(word: str, words: list[str]) -> None:
    """Append a run of letters, digits and inner marks, its clitics and contractions cut apart."""
    quoted = _APOSTROPHE.match(word)
    if quoted and quoted.group(1) not in LEANING:
        words.append("'")
        word = word[1:]
    clitic = _CLITIC.fullmatch(word)
    tail = clitic.group("tail") if clitic else ""
    word = clitic.group("stem") if clitic else word
    contraction = _CONTRACTION.fullmatch(word) if word in CONTRACTIONS else None
    words.extend(contraction.groups() if contraction else [word])
    if tail:
        words.append(tail)


CLASSES = ("BertTokenizer", "BertTokenizerFast")
SPECIAL = ("unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
NORMALIZER = {
    "do_lower_case": "lowercase", "strip_accents": "strip_accents", "tokenize_chinese_chars": "handle_chinese_chars",
}  # fmt: skip
"""What tokenizer_config.json and tokenizer.json call the same thing."""


class BertPieces:
    """A fast tokenizer with the names that those of transformers have."""

    is_fast = True

    def __init__(self, backend: Any, settings: dict[str, Any]) -> None:
        self.backend_tokenizer, self._settings = backend, settings
        self.model_max_length = int(settings["model_max_length"])
        self.truncation_side = str(settings.get("truncation_side", "right"))
        self.all_special_tokens = [_content(settings[name]) for name in SPECIAL]
        self.all_special_ids = [int(backend.token_to_id(token)) for token in self.all_special_tokens]
        self.pad_token_id = int(backend.token_to_id(_content(settings["pad_token"])))
        self.mask_token_id = int(backend.token_to_id(_content(settings["mask_token"])))

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def get_vocab(self) -> dict[str, int]:
        """Each piece and its id."""
        return dict(self.backend_tokenizer.get_vocab(with_added_tokens=True))

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        """The pieces of some ids."""
        return [str(self.backend_tokenizer.id_to_token(int(id))) for id in ids]

    def save_pretrained(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json."""
        folder.mkdir(parents=True, exist_ok=True)
        state = json.loads(self.backend_tokenizer.to_str())
        state["truncation"] = state["padding"] = None  # of the last call, not of the tokenizer
        MODEL.write(folder / "tokenizer.json", json.dumps(state, ensure_ascii=False))
        settings = json.dumps(self._settings, indent=2, sort_keys=True, ensure_ascii=False)
        MODEL.write(folder / "tokenizer_config.json", settings)


def read_pieces(source: str | Path) -> BertPieces | None:
    """The tokenizer of a local folder, where it is BERT's and its files agree; None leaves it to transformers."""
    from tokenizers import Tokenizer

    folder = Path(source)
    try:
        settings = parse_json(MODEL.read(folder / "tokenizer_config.json"))
        file = MODEL.read(folder / "tokenizer.json")
        state = parse_json(file)
        if not _is_plain(settings, state):
            return None
        return BertPieces(Tokenizer.from_str(file.decode("utf-8")), settings)
    except Exception:  # missing, damaged or unusual: transformers has the sentence, or reads it after all
        return None


def _is_plain(settings: dict[str, Any], state: dict[str, Any]) -> bool:
    """Whether the two files describe one WordPiece tokenizer, so that no wish of the first changes the second."""
    normalizer = state["normalizer"]
    added = {token["content"] for token in state["added_tokens"]}
    further = settings.get("added_tokens_decoder", {}).values()
    return (
        settings.get("tokenizer_class") in CLASSES
        and "auto_map" not in settings
        and isinstance(settings.get("model_max_length"), int)
        and state["model"]["type"] == "WordPiece"
        and normalizer["type"] == "BertNormalizer"
        and state["pre_tokenizer"]["type"] == "BertPreTokenizer"
        and all(settings.get(key, normalizer[own]) == normalizer[own] for key, own in NORMALIZER.items())
        and all(_content(settings[name]) in added for name in SPECIAL)
        and all(token["content"] in added for token in further)
        and not settings.get("extra_special_tokens")
        and not settings.get("additional_special_tokens")
    )


def _content(token: Any) -> str:
    """A special token, written alone or with its properties."""
    return str(token["content"] if isinstance(token, dict) else token)
