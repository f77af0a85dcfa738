"""Toy data and toy pretrained models: made once, then kept in an archive, so that no library's version moves them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from dual_folders import clip_folder, vit_folder
from golden.reach import seed_everything
from PIL import Image
from small import bert_folder, precomputed, texts

IMAGES = {"train": (24, 1000), "dev": (10, 2000)}  # of the features: how many, and the first image's id
PHOTOS = 14
LABELS = ("dog", "cat", "bird", "tree")


def make_toys(folder: Path) -> None:
    """``features`` with labels, ``photos``, and the models ``bert``, ``vit`` and ``clip``."""
    _label(precomputed(folder / "features"))
    _photos(folder / "photos")
    for name, make in (("bert", bert_folder), ("vit", vit_folder), ("clip", clip_folder)):
        seed_everything(0)
        make(folder / name)


def _label(folder: Path) -> None:
    """Annotations as COCO's: an image has the labels that its first text names."""
    notes = []
    for split, (count, first) in IMAGES.items():
        lines = (folder / f"{split}_caps.txt").read_text("utf-8").splitlines()
        for image in range(count):
            named = [n for n, label in enumerate(LABELS) if label in lines[5 * image].split()]
            notes += [{"image_id": first + image, "category_id": n} for n in named or [len(LABELS)]]
        ids = [str(first + image) for image in range(count) for _ in range(5)]
        (folder / f"{split}_ids.txt").write_text("\n".join(ids) + "\n", "utf-8")
    names = [{"id": n, "name": label} for n, label in enumerate((*LABELS, "other"))]
    (folder / "instances_val2014.json").write_text(json.dumps({"categories": names, "annotations": notes}))


def _photos(folder: Path) -> None:
    """Small pictures of a colour each with some noise, two texts and a price each."""
    folder.mkdir()
    rng, lines = np.random.default_rng(4), []
    for image in range(PHOTOS):
        pixels = rng.integers(0, 235, size=3) + rng.integers(0, 20, size=(12, 12, 3))
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"photo{image:02}.png")
        for text in texts(2, seed=image):
            row = {
                "image": f"photo{image:02}.png",
                "caption": f"{text} number {image}",
                "price": 7 * image % 10,
            }
            lines.append(json.dumps(row))
    (folder / "metadata.jsonl").write_text("\n".join(lines), "utf-8")
