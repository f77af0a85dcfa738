"""Names of pretrained models, told from paths without importing what loads them."""

from __future__ import annotations

from pathlib import Path

HUGGING_FACE, OPEN_CLIP = "hf:", "open_clip:"
OPEN_CLIP_CONFIG = "open_clip_config.json"  # in a folder in the format of open_clip
PREFIXES = (HUGGING_FACE, OPEN_CLIP)
CLASS_WORDS = "lite0+minilm"  # the model of ``class_words``, which needs no training


def is_pretrained_name(source: str | Path) -> bool:
    """Whether a model is called by a name of a hub or library rather than by a path: ``hf:ID``, ``lite0+minilm``."""
    return str(source) == CLASS_WORDS or str(source).startswith(PREFIXES)


def is_open_clip(source: str | Path) -> bool:
    """Whether a name or folder is one of open_clip's."""
    return str(source).startswith(OPEN_CLIP) or (Path(source) / OPEN_CLIP_CONFIG).is_file()


def recorded_name(source: str | Path) -> str:
    """The name under which an index finds a model again: names as they are, folders as absolute paths."""
    name = str(source)
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    if is_pretrained_name(source) and not Path(name).expanduser().is_dir():
        return str(source)
    return str(Path(name).expanduser().resolve())
