"""A small model that really computes, pictures and texts by their colours, and a collection for it."""

from __future__ import annotations

import hashlib
import re
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from PIL import Image, ImageDraw

from diptych.index.base import Index
from diptych.index.engines.embedded.index import EmbeddedIndex
from diptych.index.protocol import Item
from diptych.machine import record_root
from diptych.web.connections import PatientProtocol

COLOURS = {
    "red": (220, 30, 40), "orange": (250, 140, 20), "yellow": (250, 220, 40), "green": (40, 160, 60),
    "teal": (20, 150, 150), "blue": (40, 80, 220), "purple": (130, 50, 170), "pink": (250, 130, 180),
    "brown": (120, 70, 30), "grey": (128, 128, 128), "black": (15, 15, 15), "beige": (225, 205, 165),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle", "ring", "cross")
WARM = ("red", "orange", "yellow", "pink", "brown", "beige")
NOISE = 24  # dimensions that tell nothing: what no word describes


class ColourModel:
    """Vectors of colour shares; what has no colour word is a direction of its own, made from a hash."""

    dim = len(COLOURS) + NOISE

    def __init__(self) -> None:
        self.batches: list[tuple[str, int]] = []

    def fingerprint(self) -> str:
        return "colours-1"

    def encode_image(self, images: Any, *, batch_size: int = 64) -> np.ndarray:
        self.batches.append(("image", len(images)))
        return np.stack([self._image(image) for image in images]) if len(images) else np.zeros((0, self.dim))

    def encode_text(self, texts: Sequence[str], *, batch_size: int = 256) -> np.ndarray:
        self.batches.append(("text", len(texts)))
        return np.stack([self._text(text) for text in texts]) if len(texts) else np.zeros((0, self.dim))

    def _image(self, image: Any) -> np.ndarray:
        picture = Image.open(image).convert("RGB") if isinstance(image, str | Path) else image.convert("RGB")
        pixels = np.asarray(picture.resize((32, 32)), np.float32).reshape(-1, 1, 3)
        palette = np.array([*COLOURS.values(), (255, 255, 255)], np.float32)
        nearest = ((pixels - palette) ** 2).sum(axis=2).argmin(axis=1)
        shares = np.bincount(nearest, minlength=len(palette))[: len(COLOURS)].astype(np.float32)
        return _joined(shares, pixels.tobytes())

    def _text(self, text: str) -> np.ndarray:
        words = re.findall(r"\w+", text.lower())
        shares = np.array([words.count(colour) for colour in COLOURS], np.float32)
        return _joined(shares, text.lower().encode())


def _joined(shares: np.ndarray, content: bytes) -> np.ndarray:
    seed = int.from_bytes(hashlib.sha256(content).digest()[:8], "big")
    noise = np.random.default_rng(seed).normal(size=NOISE)
    if shares.any():
        shares, noise = shares / np.linalg.norm(shares), 0.25 * noise / np.linalg.norm(noise)
    vector = np.concatenate([shares, noise])
    return (vector / np.linalg.norm(vector)).astype(np.float32)


def draw(colour: str, shape: str, side: int = 96) -> Image.Image:
    picture = Image.new("RGB", (side, side), "white")
    pen, box, fill = (
        ImageDraw.Draw(picture),
        [side // 8, side // 8, side - side // 8, side - side // 8],
        COLOURS[colour],
    )
    if shape == "circle":
        pen.ellipse(box, fill=fill)
    elif shape == "square":
        pen.rectangle(box, fill=fill)
    elif shape == "triangle":
        pen.polygon([(side // 2, box[1]), (box[0], box[3]), (box[2], box[3])], fill=fill)
    elif shape == "ring":
        pen.ellipse(box, outline=fill, width=side // 6)
    else:
        pen.line([box[0], box[1], box[2], box[3]], fill=fill, width=side // 5)
        pen.line([box[0], box[3], box[2], box[1]], fill=fill, width=side // 5)
    return picture


def fill(index: Index, folder: Path, model: ColourModel) -> list[Item]:
    """Sixty pictures in a folder and their texts, added to an index."""
    folder.mkdir(exist_ok=True)
    where = index.collection("shapes", str(folder)).number
    items, pictures, texts = [], [], []
    for n, (colour, shape) in enumerate((c, s) for c in COLOURS for s in SHAPES):
        name, text = f"{colour}/{shape}.png", f"{'an' if colour == 'orange' else 'a'} {colour} {shape}"
        (folder / colour).mkdir(exist_ok=True)
        pictures.append(draw(colour, shape))
        pictures[-1].save(folder / name)
        metadata = {
            "tone": "warm" if colour in WARM else "cool",
            "shape": shape,
            "price": n,
            "new": n % 2 == 0,
        }
        items.append(Item(name, path=name, text=text, metadata=metadata, content=str(n), collection=where))
        texts.append(Item(f"{name}#text0", "text", text=text, image_id=name, collection=where))
    index.add(items, model.encode_image(pictures))
    index.add(texts, model.encode_text([item.text for item in texts]))
    model.batches.clear()
    return items + texts


def make_index(folder: Path, model: ColourModel) -> EmbeddedIndex:
    index = EmbeddedIndex.create(
        folder / "index", model.dim, model="/models/colours", fingerprint=model.fingerprint()
    )
    fill(index, folder / "pictures", model)
    record_root(folder / "pictures")
    return index


@contextmanager
def running(app: Any, host: str = "127.0.0.1") -> Iterator[str]:
    """The address of an application served by uvicorn on a free port, shut down cleanly afterwards."""
    listening = socket.socket()
    listening.bind((host, 0))
    config = uvicorn.Config(
        app, log_level="error", http=PatientProtocol, ws="none", timeout_graceful_shutdown=5
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield f"http://{host}:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        listening.close()
        assert not thread.is_alive()
