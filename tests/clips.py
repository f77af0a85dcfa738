"""Small videos, encoded on the spot."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image

RATE = 5  # frames a second


def write_video(path: Path, pictures: Iterable[Image.Image], rate: int = RATE, codec: str = "mpeg4") -> Path:
    """Encode pictures, all of one size with even sides, at ``rate`` a second."""
    import av

    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate)
        stream.pix_fmt = "yuv420p"
        for number, picture in enumerate(pictures):
            if number == 0:
                stream.width, stream.height = picture.size
            frame = av.VideoFrame.from_ndarray(np.asarray(picture.convert("RGB")), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def colour_video(path: Path, colours: Iterable[str], seconds: float = 1.0, size: int = 32) -> Path:
    """One second of each colour, one after the other."""
    frames = [Image.new("RGB", (size, size), c) for c in colours for _ in range(int(seconds * RATE))]
    return write_video(path, frames)
