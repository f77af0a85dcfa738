"""What a request may cost: sizes checked before anything is read, decoded or encoded."""

from __future__ import annotations

from dataclasses import dataclass, fields

from diptych.errors import SettingsError
from diptych.settings import setting


@dataclass(frozen=True, slots=True)
class Limits:
    """The most a request may ask for; each is refused beyond it with one sentence."""

    body: int = setting(20_000_000, "bytes of a request, uploads included")
    pixels: int = setting(50_000_000, "pixels of an uploaded image")
    images: int = setting(4, "images of one query")
    k: int = setting(200, "answers to one query")
    query: int = setting(2_000, "characters of a text or query expression")
    filter: int = setting(2_000, "characters of a filter")
    items: int = setting(256, "items added or named by one request")
    text: int = setting(20_000, "characters of an added text")
    columns: int = setting(100, "metadata columns of an added item")
    metadata: int = setting(20_000, "characters of the metadata of an added item")
    seconds: int = setting(10, "seconds to answer a request")

    def __post_init__(self) -> None:
        for entry in fields(self):
            if getattr(self, entry.name) < 1:
                raise SettingsError(
                    f"the limit {entry.name}={getattr(self, entry.name)} lets nothing pass: give at least 1."
                )
