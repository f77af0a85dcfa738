"""Names of pretrained models, told from paths without importing what loads them."""

from __future__ import annotations

import re
from pathlib import Path

from diptych.storage import expanded

HUGGING_FACE, OPEN_CLIP = "hf:", "open_clip:"
OPEN_CLIP_CONFIG = "open_clip_config.json"  # in a folder in the format of open_clip
PREFIXES = (HUGGING_FACE, OPEN_CLIP)
CLASS_WORDS = "lite0+minilm"  # the model of ``class_words``, which needs no training
CLASS_WORDS_FINGERPRINT = "6657efb1c18d2cd5"  # the same everywhere: the packages of its weights are pinned
FAMILIES = (  # how the ids of the hub begin that people write without hf:
    "openai/clip-vit-",
    "laion/CLIP-ViT-",
    "google/siglip-",
    "google/siglip2-",
)
ALIASES = {  # names of sentence-transformers for OpenAI's weights
    f"{owner}clip-ViT-{theirs}": f"openai/clip-vit-{ours}"
    for owner in ("", "sentence-transformers/")
    for theirs, ours in (("B-32", "base-patch32"), ("B-16", "base-patch16"), ("L-14", "large-patch14"))
}
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def known_name(source: str | Path) -> str:
    """``hf:ID`` for a model that people know without ``hf:``; anything else, and a folder of that name, as it is."""
    name = str(source)
    found = ALIASES.get(name, name if name.startswith(FAMILIES) else "")
    return f"{HUGGING_FACE}{found}" if found and not expanded(name).exists() else name


def hub_hint(source: str | Path) -> str:
    """How to write what looks like an id of the hub; empty for anything else: ``runs/photos`` has that form too."""
    name = str(source)
    return f", or {HUGGING_FACE}{name} for a model of the hub" if _HUB_ID.fullmatch(name) else ""


def is_pretrained_name(source: str | Path) -> bool:
    """Whether a model is called by a name of a hub or library rather than by a path: ``hf:ID``, ``lite0+minilm``."""
    return str(source) == CLASS_WORDS or known_name(source).startswith(PREFIXES)


def is_open_clip(source: str | Path) -> bool:
    """Whether a name or folder is one of open_clip's."""
    return str(source).startswith(OPEN_CLIP) or (Path(source) / OPEN_CLIP_CONFIG).is_file()


def recorded_name(source: str | Path) -> str:
    """The name under which an index finds a model again: names as they are, folders as absolute paths."""
    source = name = known_name(source)
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    if is_pretrained_name(source) and not expanded(name).is_dir():
        return source
    return str(expanded(name).resolve())
