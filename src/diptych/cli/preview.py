"""Pictures in a terminal: kitty's graphics protocol where the terminal says so, coloured half blocks elsewhere."""

from __future__ import annotations

import base64
import io
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from diptych.cli.answers import name_of, picture_of

if TYPE_CHECKING:
    from PIL import Image

    from diptych.index.base import Index
    from diptych.index.protocol import Hit

COLUMNS, ROWS = 20, 10  # characters that one picture takes; a character is about twice as high as wide
GAP = 2  # columns between two pictures
PIXELS = 16  # pixels of a column, for terminals that draw pixels
CHUNK = 4096  # characters of one message of kitty's protocol
RESET = "\x1b[0m"


def check_terminal() -> None:
    """Refuse to show pictures where there is nothing to show them on."""
    if not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        raise click.UsageError(
            "--preview shows pictures in a terminal, and the output goes elsewhere: leave it out, or use --html FILE."
        )


def show_pictures(index: Index, hits: Sequence[Hit], roots: Sequence[Path] = ()) -> None:
    """The pictures of hits in rows that fit the terminal, the score and the name below each."""
    cards = [
        (picture_of(index, hit.item, roots), f"{hit.score:.3f} {name_of(index, hit.item)}") for hit in hits
    ]
    pairs = [(_fit(picture), caption) for picture, caption in cards if picture is not None]
    across = max(1, (shutil.get_terminal_size().columns + GAP) // (COLUMNS + GAP))
    for start in range(0, len(pairs), across):
        row = pairs[start : start + across]
        pictures = [picture for picture, _ in row]
        click.echo(_kitty(pictures) if is_kitty() else _half_blocks(pictures), nl=False, color=True)
        click.echo((" " * GAP).join(_shorten(caption).ljust(COLUMNS) for _, caption in row).rstrip())


def is_kitty() -> bool:
    """Whether the terminal says that it knows kitty's graphics protocol."""
    return bool(os.environ.get("KITTY_WINDOW_ID")) or "kitty" in os.environ.get("TERM", "")


def _fit(picture: Image.Image) -> Image.Image:
    """A picture as large as its cells allow, its proportions kept."""
    from PIL import ImageOps

    scale = PIXELS if is_kitty() else 1
    small = ImageOps.contain(picture.convert("RGB"), (COLUMNS * scale, 2 * ROWS * scale))
    # a line of pixels stays one
    return small if all(small.size) else small.resize([max(1, side) for side in small.size])


def _shorten(caption: str) -> str:
    """A caption as wide as a picture; of a long path the end stays, which tells pictures apart."""
    if len(caption) <= COLUMNS:
        return caption
    score, _, name = caption.partition(" ")
    return f"{score} …{name[-(COLUMNS - len(score) - 2) :]}"


def _half_blocks(pictures: Sequence[Image.Image]) -> str:
    """Lines of ▀: its colour is the upper of two pixels, the background the lower one."""
    from numpy import asarray

    rows = [asarray(picture).tolist() for picture in pictures]
    starts = range(0, max(map(len, rows)), 2)
    return "".join("".join(_line(one[start : start + 2]) for one in rows).rstrip() + "\n" for start in starts)


def _line(rows: Sequence[Sequence[Sequence[int]]]) -> str:
    """A row of pixels or two as characters, as wide as a picture may be; blank where there is none."""
    cells = [
        "".join(
            "\x1b[{};2;{};{};{}m".format(layer, *pixel)
            for layer, pixel in zip((38, 48), column, strict=False)
        )
        for column in zip(*rows, strict=True)
    ]
    blank = " " * (COLUMNS + GAP - len(cells))
    return "".join(f"{cell}▀" for cell in cells) + (RESET if cells else "") + blank


def _kitty(pictures: Sequence[Image.Image]) -> str:
    """Room for a row of pictures, then each of them placed in it without moving the cursor (C=1)."""
    height = max(-(-picture.height // (2 * PIXELS)) for picture in pictures)
    parts = ["\n" * height, f"\x1b[{height}A"]
    for number, picture in enumerate(pictures):
        columns, rows = -(-picture.width // PIXELS), -(-picture.height // (2 * PIXELS))
        parts += [f"\x1b[{number * (COLUMNS + GAP) + 1}G", *_messages(picture, columns, rows)]
    return "".join([*parts, f"\x1b[{height}B\r"])


def _messages(picture: Image.Image, columns: int, rows: int) -> list[str]:
    """A PNG in pieces that kitty takes."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    data = base64.standard_b64encode(buffer.getvalue()).decode()
    pieces = [data[start : start + CHUNK] for start in range(0, len(data), CHUNK)]
    first = f"a=T,f=100,q=2,C=1,c={columns},r={rows},"
    return [
        f"\x1b_G{first if number == 0 else ''}m={int(number + 1 < len(pieces))};{piece}\x1b\\"
        for number, piece in enumerate(pieces)
    ]
