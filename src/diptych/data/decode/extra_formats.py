"""Pictures and videos by the names of their files; HEIC, camera RAW and SVG, which Pillow alone does not read.

Light enough for the decoder processes; a package is imported when the first picture of its kind is opened.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, BinaryIO

from diptych.errors import ImageError
from diptych.progress import counted

if TYPE_CHECKING:
    from PIL import Image

COMPRESSED = frozenset({".jpg", ".jpeg", ".png", ".webp", ".gif", ".avif"})
IMAGE_SUFFIXES = COMPRESSED | {".bmp", ".tif", ".tiff", ".ppm"}
VIDEO_SUFFIXES = frozenset(
    {".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ts", ".ogv", ".flv", ".wmv", ".3gp"}
)
SVG_SIDE = 1024  # pixels of the longer side that a drawing, which has no pixels of its own, is rendered at
SVG_BYTES = 20_000_000
SVG_SECONDS, SVG_PATIENCE = 3, 20  # of a core that a drawing may take, and on a machine with other work
SVG_MEMORY = 1_000_000_000
_DRAW = """
import sys
sys.path[:] = {path!r}
try:
    import resource
    for limit, value in zip((resource.RLIMIT_CPU, resource.RLIMIT_AS), map(int, sys.argv[1:])):
        resource.setrlimit(limit, (value, value))
except (ImportError, ValueError, OSError):
    pass  # a system without such limits
import resvg_py
try:
    svg = sys.stdin.buffer.read().decode("utf-8")
    # a drawing fits into both sides, its proportions kept
    png = resvg_py.svg_to_bytes(svg_string=svg, width={side}, height={side}, skip_system_fonts={bare})
except ValueError as error:
    sys.exit(str(error))
sys.stdout.buffer.write(png)
"""
HEIF_BRANDS = (b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"hevm", b"hevs", b"mif1", b"msf1")
# only these are followed by the renderer without opening another file
_REFERENCE = re.compile(rb"""href\s*=\s*["']?\s*(?!#|data:|https?:|mailto:|["'\s>])""", re.IGNORECASE)


@dataclass(frozen=True)
class Kind:
    """A kind of picture: the suffixes of its files, and the package and extra that read it ("": nothing here does)."""

    name: str
    suffixes: frozenset[str]
    module: str = ""
    package: str = ""
    extra: str = ""

    @property
    def is_read(self) -> bool:
        """Whether its package is installed."""
        return bool(self.module) and _is_installed(self.module)

    @property
    def advice(self) -> str:
        """What to do to have such files read."""
        if not self.package:
            return "convert such files to JPEG or PNG"
        return f"pip install {self.package} reads such files (extra '{self.extra}')"


HEIC = Kind("HEIC", frozenset({".heic", ".heif", ".hif"}), "pillow_heif", "pillow-heif", "heic")
CAMERAS = frozenset(
    {".dng", ".nef", ".cr2", ".cr3", ".arw", ".raf", ".orf", ".rw2", ".pef", ".srw", ".nrw", ".3fr"}
)
RAW = Kind("RAW", CAMERAS, "rawpy", "rawpy", "raw")
SVG = Kind("SVG", frozenset({".svg"}), "resvg_py", "resvg-py", "svg")
OTHERS = [
    Kind("JPEG XL", frozenset({".jxl"})),
    Kind("JPEG 2000", frozenset({".jp2", ".j2k"})),
    Kind("Photoshop", frozenset({".psd"})),
    Kind("icon", frozenset({".ico", ".icns"})),
    Kind("PostScript", frozenset({".eps", ".ai"})),
]
KINDS = [HEIC, RAW, SVG, *OTHERS]
_OF_SUFFIX = {suffix: kind for kind in KINDS for suffix in kind.suffixes}


@cache
def _is_installed(module: str) -> bool:
    return find_spec(module) is not None


def kind_of(name: str) -> Kind | None:
    """The kind of a file by its name, None for what Pillow reads and what is not a picture."""
    return _OF_SUFFIX.get(os.path.splitext(name)[1].lower())


def is_image(name: str) -> bool:
    """Whether a file name is that of an image that can be read (not a hidden or macOS ``._`` file)."""
    base = name.rsplit("/", 1)[-1]
    if base.startswith("."):
        return False
    kind = kind_of(base)
    return os.path.splitext(base)[1].lower() in IMAGE_SUFFIXES or (kind is not None and kind.is_read)


def is_video(name: str) -> bool:
    """Whether a file name is that of a video (not a hidden or macOS ``._`` file)."""
    base = name.rsplit("/", 1)[-1]
    return not base.startswith(".") and os.path.splitext(base)[1].lower() in VIDEO_SUFFIXES


def left_out_by_kind(names: Iterable[str]) -> list[str]:
    """Sentences that count the pictures among files that are not read, one for each kind."""
    counts = Counter(kind.name for name in names if (kind := kind_of(name)) is not None and not kind.is_read)
    advice = {kind.name: kind.advice for kind in KINDS}
    return [f"left out {counted(count, f'{name} file')}: {advice[name]}." for name, count in counts.items()]


def register_heif() -> bool:
    """Let Pillow open HEIC, and say whether it can."""
    if not HEIC.is_read:
        return False
    from PIL import Image

    if "HEIF" not in Image.OPEN:
        import pillow_heif

        pillow_heif.register_heif_opener(thumbnails=False, decode_threads=1)
    return True


def is_heif(head: bytes) -> bool:
    """Whether the first bytes of a file are those of HEIC."""
    return head[4:8] == b"ftyp" and head[8:12] in HEIF_BRANDS


def open_extra(stream: BinaryIO, label: str, max_pixels: int) -> Image.Image | None:
    """A camera RAW or an SVG picture by the name of its file, not yet RGB; None for any other file."""
    kind = kind_of(label)
    if kind is not RAW and kind is not SVG:
        return None
    if not kind.is_read:
        raise ImageError(f"{label} is {kind.name}: {kind.advice}, or remove it.")
    return _open_raw(stream, label, max_pixels) if kind is RAW else _open_svg(stream, label)


def _open_svg(stream: BinaryIO, label: str) -> Image.Image:
    from PIL import Image

    data = stream.read(SVG_BYTES + 1)
    if len(data) > SVG_BYTES:
        raise ImageError(f"{label} is an SVG of more than {SVG_BYTES // 10**6} MB: simplify it.")
    if _REFERENCE.search(data) or b"<!ENTITY" in data:
        raise ImageError(f"{label} is an SVG that refers to other files, which are not opened: embed them.")
    # looking for fonts takes longer than drawing
    code = _DRAW.format(path=sys.path, side=SVG_SIDE, bare=b"<text" not in data)
    command = [sys.executable, "-I", "-S", "-c", code, str(SVG_SECONDS), str(SVG_MEMORY)]
    try:  # a few lines of SVG may stand for hours of work, or crash the renderer
        result = subprocess.run(command, input=data, capture_output=True, timeout=SVG_PATIENCE)
    except subprocess.TimeoutExpired as error:
        raise ImageError(f"{label} takes too long to draw: simplify it.") from error
    if result.returncode:
        reason = "it is damaged, or takes more time or memory than one picture may"
        if result.returncode == 1:
            reason = result.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise ImageError(f"{label} is not an SVG that can be drawn ({reason}): replace or remove it.")
    return Image.open(io.BytesIO(result.stdout), formats=["PNG"])


def _open_raw(stream: BinaryIO, label: str, max_pixels: int) -> Image.Image:
    """The preview that the camera wrote into the file, or where there is none the developed picture at half size."""
    import rawpy
    from PIL import Image

    with rawpy.imread(stream) as raw:
        sizes = raw.sizes
        if sizes.raw_width * sizes.raw_height > max_pixels:
            raise ImageError(
                f"{label} claims {sizes.raw_width}×{sizes.raw_height} pixels, over {max_pixels:,}: shrink it."
            )
        preview = _preview(raw, rawpy)
        if preview is not None and max(preview.size) * 2 >= max(sizes.width, sizes.height):
            if preview.width * preview.height > max_pixels:
                raise ImageError(f"{label} has a preview of {preview.size} pixels: shrink it.")
            return preview
        return Image.fromarray(raw.postprocess(half_size=True, use_camera_wb=True, output_bps=8))


def _preview(raw: Any, rawpy: Any) -> Image.Image | None:
    from PIL import Image

    try:
        thumbnail = raw.extract_thumb()
    except rawpy.LibRawError:  # none, or one in a format of its own
        return None
    if thumbnail.format != rawpy.ThumbFormat.JPEG:
        return None
    return Image.open(io.BytesIO(thumbnail.data), formats=["JPEG"])
