"""The word pieces of BERT from a folder's tokenizer.json alone: what transformers reads, without importing it.

A search has to answer at once, and importing transformers takes longer than everything else it does. A folder that is
in any way unusual is left to transformers (``None``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from diptych.storage import parse_json

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
        (folder / "tokenizer.json").write_text(json.dumps(state, ensure_ascii=False), "utf-8")
        settings = json.dumps(self._settings, indent=2, sort_keys=True, ensure_ascii=False)
        (folder / "tokenizer_config.json").write_text(settings, "utf-8")


def read_pieces(source: str | Path) -> BertPieces | None:
    """The tokenizer of a local folder, where it is BERT's and its files agree; None leaves it to transformers."""
    from tokenizers import Tokenizer

    folder = Path(source)
    try:
        settings = parse_json((folder / "tokenizer_config.json").read_bytes())
        file = (folder / "tokenizer.json").read_bytes()
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
