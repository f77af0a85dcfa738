"""Encoding speed as users meet it: ``Retriever.encode_image`` and ``encode_text``, and what half precision changes.

    python benchmarks/encode.py                 # on a GPU
    python benchmarks/encode.py --tiny          # on a CPU: checks that it runs

Images are 36×2048 stored regions (float16, read from a file), texts have 10 to 13 words and go through a BERT-base.
Data are made up, but scored: every region shows one word, and a text names words that its image shows. The model is
trained on them for two epochs (the random BERT frozen, its projection and the image tower trained), so that recall says
whether bf16 ranks as float32 does.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from train_step import make_text_model

from diptych import Retriever
from diptych.data.arrays import ArrayStore
from diptych.data.captions import StoreRows
from diptych.data.formats import open_captions
from diptych.evaluation.evaluate import evaluate
from diptych.recipes import RECIPES
from diptych.runs.train import run_recipe

NAMED = 8  # words of a text that its image shows; the others are any, so that recall is neither 0 nor 100
NOISE = 0.5  # of a region, beside the vector of unit variance of its word


def make_scored_data(
    folder: Path, counts: dict[str, int], words: list[str], regions: int, width: int
) -> None:
    """A precomputed folder of images whose regions show words, and five texts that name some of them."""
    rng = np.random.default_rng(0)
    bank, vectors = np.array(words), rng.standard_normal((len(words), width), dtype=np.float32)
    noise = NOISE * rng.standard_normal((256, regions, width), dtype=np.float32)
    for split, count in counts.items():
        shown = rng.integers(len(words), size=(count, regions))
        features = np.lib.format.open_memmap(
            folder / f"{split}_ims.npy", mode="w+", dtype=np.float16, shape=(count, regions, width)
        )
        for start in range(0, count, 256):
            some = shown[start : start + 256]
            features[start : start + 256] = vectors[some] + rng.permutation(noise)[: len(some)]
        features.flush()
        lines = []
        for own in shown.repeat(5, axis=0):
            others = rng.integers(len(words), size=rng.integers(10, 14) - NAMED)
            text = rng.permutation(
                np.concatenate([rng.choice(own, min(NAMED, len(own)), replace=False), others])
            )
            lines.append(" ".join(bank[text]))
        (folder / f"{split}_caps.txt").write_text("\n".join(lines) + "\n")


def rate(count: int, work: object) -> tuple[float, torch.Tensor]:
    """Items per second of the second of two calls, and what it returned."""
    work()  # type: ignore[operator]
    began = time.perf_counter()
    found = work()  # type: ignore[operator]
    return count / (time.perf_counter() - began), found


def main() -> None:
    """Train, then encode and evaluate in both precisions."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a machine without a GPU")
    parser.add_argument(
        "--images", type=int, default=40_000, help="images encoded, the training images again and again"
    )
    parser.add_argument("--texts", type=int, default=40_000, help="texts encoded")
    parser.add_argument("--epochs", type=int, default=2, help="of the short training")
    args = parser.parse_args()
    if not args.tiny and not torch.cuda.is_available():
        parser.error("no CUDA GPU here: use --tiny to see that it runs.")
    if args.tiny:
        args.images, args.texts, args.epochs = 200, 200, 2
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        (root / "data").mkdir()
        words = make_text_model(root / "bert", args.tiny)[:500]
        counts = (
            {"train": 64, "dev": 32, "test": 32} if args.tiny else {"train": 4000, "dev": 200, "test": 1000}
        )
        regions, width = (6, 32) if args.tiny else (36, 2048)
        make_scored_data(root / "data", counts, words, regions, width)
        recipe = RECIPES["vse-infinity"]
        small = {"dim": 32, "batch_size": 16} if args.tiny else {"workers": 8}
        if torch.cuda.is_available():
            small |= {"precision": "bf16", "cuda_graphs": True}
        settings = recipe.settings(
            epochs=args.epochs, text_encoder=str(root / "bert"), train_text=False, decay_epoch=args.epochs - 1,
            **small,
        )  # fmt: skip
        os.environ["DIPTYCH_CACHE"] = str(root / "cache")
        run_recipe(recipe, settings, str(root / "data"), root / "run", show_progress=False)
        test = open_captions(str(root / "data")).split("test")
        store = ArrayStore(root / "data" / "train_ims.npy")
        images = StoreRows(store, np.arange(args.images) % len(store))
        lines = (root / "data" / "train_caps.txt").read_text().splitlines()
        texts = [lines[n % len(lines)] for n in range(args.texts)]
        device = "cuda" if torch.cuda.is_available() else "cpu"
        name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
        print(
            f"{name}, torch {torch.__version__}, {args.images} images of {regions}×{width}, {args.texts} texts\n"
        )
        print(
            "| precision | images/s | texts/s | vectors apart, images · texts | i2t R@1, 5, 10 | t2i R@1, 5, 10 |"
        )
        print("|---|---|---|---|---|---|")
        exact = None
        for precision in ("no", "bf16", "fp16") if device == "cuda" else ("no", "bf16"):
            model = Retriever.from_pretrained(root / "run", device=device, precision=precision)
            speed, image = rate(args.images, lambda model=model: model.encode_image(images))
            text_speed, text = rate(args.texts, lambda model=model: model.encode_text(texts))
            exact = exact or (image, text)
            apart = [float((a - b).abs().max()) for a, b in zip((image, text), exact, strict=True)]
            metrics = evaluate(model, test, bootstrap=0).metrics
            recall = " | ".join(
                ", ".join(f"{metrics[f'{way}_recall@{k}']:.2f}" for k in (1, 5, 10))
                for way in ("image_to_text", "text_to_image")
            )
            print(
                f"| {precision} | {speed:,.0f} | {text_speed:,.0f} | {apart[0]:.1e}, {apart[1]:.1e} | {recall} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
