"""Small real things made on the spot: feature folders, picture folders, transformer folders."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image

WORDS = [
    "a",
    "the",
    "red",
    "green",
    "blue",
    "dark",
    "light",
    "big",
    "small",
    "dog",
    "cat",
    "bird",
    "house",
    "tree",
    "car",
    "runs",
    "sits",
    "on",
    "under",
    "near",
]


def texts(count: int, seed: int = 0) -> list[str]:
    """Short texts over a small vocabulary."""
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, size=rng.integers(3, 9))) for _ in range(count)]


def precomputed(
    folder: Path, *, train: int = 24, dev: int = 10, testall: int = 0, regions: int = 6, width: int = 16
) -> Path:
    """A SCAN-style folder whose features carry the words of their texts, so that a model can learn from it."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(1)
    codes = rng.standard_normal((len(WORDS), width)).astype(np.float32)
    for split, count, seed in (("train", train, 2), ("dev", dev, 3), ("testall", testall, 5)):
        if not count:
            continue
        lines, features = [], np.zeros((count, regions, width), np.float32)
        for image in range(count):
            chosen = np.random.default_rng(seed * 1000 + image).choice(len(WORDS), size=regions)
            features[image] = codes[chosen] + 0.1 * rng.standard_normal((regions, width))
            order = np.random.default_rng(seed * 2000 + image)
            lines += [" ".join(WORDS[w] for w in order.permutation(chosen)[:5]) for _ in range(5)]
        np.save(folder / f"{split}_ims.npy", features)
        (folder / f"{split}_caps.txt").write_text("\n".join(lines) + "\n", "utf-8")
    return folder


def coco_like(folder: Path, *, test: int = 4, testall: int = 12) -> Path:
    """A folder as COCO's: ``test`` is the first images of ``testall``, and every split has ids."""
    precomputed(folder, testall=testall)
    np.save(folder / "test_ims.npy", np.load(folder / "testall_ims.npy")[:test])
    lines = (folder / "testall_caps.txt").read_text("utf-8").splitlines()[: 5 * test]
    (folder / "test_caps.txt").write_text("\n".join(lines) + "\n", "utf-8")
    for first, split in ((1000, "train"), (2000, "dev"), (3000, "testall"), (3000, "test")):
        count = len(np.load(folder / f"{split}_ims.npy"))
        ids = [str(first + row) for row in range(count) for _ in range(5)]  # one per text, as published
        (folder / f"{split}_ids.txt").write_text("\n".join(ids) + "\n", "utf-8")
    return folder


def pictures(folder: Path, count: int = 6, size: int = 48) -> list[Path]:
    """Plain-coloured PNG files with a little noise."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(4)
    paths = []
    for i in range(count):
        colour = rng.integers(0, 255, size=3)
        pixels = np.clip(colour + rng.integers(-20, 20, size=(size, size, 3)), 0, 255).astype(np.uint8)
        paths.append(folder / f"picture{i}.png")
        Image.fromarray(pixels).save(paths[-1])
    return paths


def photos(folder: Path, count: int = 12) -> Path:
    """Pictures with two texts each, as a data set; every picture is its own colour."""
    lines = [
        json.dumps({"image": path.name, "caption": f"{text} number {number}"})
        for path in pictures(folder, count)
        for number, text in enumerate(texts(2, seed=len(path.name) + int(path.stem[7:])))
    ]
    (folder / "metadata.jsonl").write_text("\n".join(lines), "utf-8")
    return folder


def bert_folder(folder: Path, positions: int = 64) -> Path:
    """A tiny BERT with random weights and a word-level vocabulary, saved in the real format."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordPiece
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: i for i, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {f"{t[1:-1].lower()}_token": t for t in special}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=positions,
    )  # fmt: skip
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    return folder
