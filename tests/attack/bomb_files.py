"""Pictures that are far more work than they are large: SVG, profiles, EXIF, claimed sizes, tiles and scans."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random

import pillow_heif
from bombs import chunk, many_scans, masks, profiles, tile_bomb
from dng import dng
from PIL import Image
from register import Attack, target, void

SVG = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 300 100">'


def drawing(draw: Random) -> bytes:
    """Lines of SVG that stand for much more drawing."""
    depth, wide = draw.choice((2, 5, 12, 200, 20_000)), draw.choice((1, 2, 10))
    rect = '<rect id="a0" width="9" height="9"/>'
    blur = f'<feGaussianBlur stdDeviation="{10 ** draw.randrange(7)}"/>' * draw.choice((1, 20))
    region = f'x="-{wide * 100}" y="-{wide * 100}" width="{wide * 300}" height="{wide * 300}"'
    groups = [f'<g id="a{n}">' + f'<use href="#a{n - 1}"/>' * wide + "</g>" for n in range(1, min(depth, 9))]
    joined = "".join(groups)
    kinds = (
        masks(min(depth, 30)),
        f'<defs>{rect}{joined}</defs><use href="#a{min(depth, 9) - 1}"/>',
        f'<filter id="f" {region}><feTurbulence baseFrequency="0.9" numOctaves="{depth}"/>{blur}</filter>'
        '<rect width="300" height="100" filter="url(#f)"/>',
        "<g>" * depth + rect + "</g>" * depth,
        f'<text y="50">{"words " * depth}</text>',
        f'<path d="M0 0 L1e{wide} 1e{wide}" stroke="red" stroke-dasharray="1e-{wide} 1"/>',
        f"<style>{'g > g.b {fill:red}' * depth}</style>{rect * depth}",
    )
    return f"{SVG}{draw.choice(kinds)}</svg>".encode()


def tags(draw: Random) -> bytes:
    """EXIF whose entries lead in circles, overlap, or claim to be longer than everything."""
    spare = draw.choice((0, 10_000, 60_000))
    count = draw.choice((1, 20, 3_000))
    pointers = (0x8769, 0x8825, 0xA005, 0x014A, 0x927C)
    entries = b"".join(
        struct.pack(
            "<HHII",
            draw.choice(pointers) if draw.random() < 0.2 else draw.randrange(65_536),
            draw.randrange(1, 13),
            draw.choice((1, 4, spare // 8, 2**31 - 1, 2**32 - 1)),
            draw.choice((0, 8, 10, spare, 2**32 - 1)),
        )
        for _ in range(count)
    )
    following = draw.choice((0, 8))
    return (
        b"II*\0\x08\0\0\0" + struct.pack("<H", count) + entries + struct.pack("<I", following) + bytes(spare)
    )


def with_tags(draw: Random) -> tuple[str, bytes]:
    """A small picture with such EXIF, or with a colour profile of nothing but size."""
    kind = draw.choice(("JPEG", "PNG", "WEBP"))
    out = io.BytesIO()
    more = {"exif": tags(draw)[:65_000]} if draw.random() < 0.8 else {"icc_profile": draw.randbytes(300_000)}
    Image.new("RGB", (16, 16), "red").save(out, kind, **more)  # type: ignore[arg-type]
    return f"a.{kind.lower()}", out.getvalue()


def claimed(draw: Random) -> tuple[str, bytes]:
    """A HEIC or RAW picture that claims another size than it has."""
    size = draw.choice((0, 1, 100, 1_400, 9_000, 70_000, 2**31 - 1))
    if draw.random() < 0.5:
        return "a.dng", dng(claimed=size or None)
    out = io.BytesIO()
    pillow_heif.from_pillow(Image.new("RGB", (64, 64))).save(out, format="HEIF")
    data = out.getvalue()
    place = data.find(b"ispe") + 8
    return "a.heic", data[:place] + struct.pack(">II", size, draw.choice((64, size))) + data[place + 8 :]


def packed(draw: Random) -> tuple[str, bytes]:
    """A PNG with many compressed chunks, a TIFF in one large tile, or a JPEG of many scans."""
    kind = draw.random()
    if kind < 0.6:
        name = draw.choice((b"iCCP", b"zTXt", b"iTXt", b"eXIf"))
        return "a.png", profiles(draw.choice((1, 2, 60)), name, draw.choice((1_000, 1_000_000, 4_000_000)))
    if kind < 0.7:
        name, count = draw.choice((b"IDAT", b"tEXt", b"aaAa", b"\0\0\0\0")), draw.choice((1_000, 300_000))
        before = chunk(name, bytes(draw.choice((0, 5)))) * count
        whole = profiles(1, b"tEXt", 10)
        return "a.png", whole[:33] + before + whole[33:] if draw.random() < 0.5 else whole + before
    if kind < 0.8:
        return "a.tif", tile_bomb(draw.choice((64, 1_500, 9_000)))
    return "a.jpg", many_scans(draw.choice((2, 90, 3_000)), side=512)


@target
def bombs(folder: Path) -> Attack:
    from diptych.data.decode.opening import open_image
    from diptych.errors import ImageError
    from diptych.index.ingest.photos import photo_facts
    from diptych.index.protocol import Item, record

    kinds: tuple[Callable[[Random], tuple[str, bytes]], ...] = (
        with_tags, claimed, packed, lambda draw: ("a.svg", drawing(draw)),
    )  # fmt: skip

    def once(draw: Random) -> None:
        name, data = draw.choice(kinds)(draw)
        file = folder / name
        file.write_bytes(data)
        try:
            facts, _ = photo_facts(file)
            record(Item("a", metadata=facts))
        except ImageError:
            pass
        void(open_image(file, max_pixels=2_000_000))

    return once
