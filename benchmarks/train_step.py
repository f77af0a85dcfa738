"""VSE∞ training speed through the product's own loop: 36×2048 regions, a BERT-base text tower, batch 128.

    python benchmarks/train_step.py                 # on a GPU: every row, pairs per second
    python benchmarks/train_step.py --tiny          # on a CPU: checks that it runs

Features, texts, vocabulary and weights are random: only the speed is looked at. Each row trains the recipe with
``run_recipe`` and reads the pairs per second from the run's own log, the median over the lines after warm-up.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from diptych.recipes import RECIPES
from diptych.runs.train import run_recipe

ROWS: dict[str, dict[str, Any]] = {
    "fp32, eager": {"precision": "no"},
    "bf16, eager": {"precision": "bf16"},
    "bf16, compiled": {"precision": "bf16", "compile": True},
    "bf16, CUDA graph": {"precision": "bf16", "cuda_graphs": True},
    "bf16, compiled, CUDA graph": {"precision": "bf16", "compile": True, "cuda_graphs": True},
}
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def make_text_model(folder: Path, tiny: bool) -> list[str]:
    """A BERT of the published size with random weights and a vocabulary of made-up words, in the real format."""
    words = [f"w{i}" for i in range(500 if tiny else 30_000)]
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *words])}
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(t, vocabulary[t]) for t in ("[CLS]", "[SEP]")]
    )
    names = {
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    }
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    size = (
        {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
        if tiny
        else {}
    )
    BertModel(BertConfig(vocab_size=len(vocabulary), **size), add_pooling_layer=False).save_pretrained(folder)
    return words


def make_data(folder: Path, images: int, words: list[str]) -> None:
    """A precomputed folder: train and dev features in fp16, five texts of about 10.5 words per image."""
    rng, bank = np.random.default_rng(0), np.array(words)
    for split, count in (("train", images), ("dev", 64)):
        features = np.lib.format.open_memmap(
            folder / f"{split}_ims.npy", mode="w+", dtype=np.float16, shape=(count, 36, 2048)
        )
        for start in range(0, count, 256):
            features[start : start + 256] = rng.standard_normal(
                (min(256, count - start), 36, 2048), dtype=np.float32
            )
        features.flush()
        lengths = np.clip(rng.normal(10.5, 2.4, size=count * 5).round(), 5, 30).astype(int)
        lines = (" ".join(bank[rng.integers(len(bank), size=n)]) for n in lengths)
        (folder / f"{split}_caps.txt").write_text("\n".join(lines) + "\n")


def measure(
    name: str, changes: dict[str, Any], data: Path, text: Path, run: Path, args: argparse.Namespace
) -> float:
    """Median pairs per second of one row."""
    recipe = RECIPES["vse-infinity"]
    small = {"dim": 64, "batch_size": 16} if args.tiny else {"batch_size": 128}
    settings = recipe.settings(
        epochs=args.epochs,
        text_encoder=str(text),
        log_steps=5 if args.tiny else 20,
        workers=args.workers,
        **small,
        **changes,
    )
    run_recipe(recipe, settings, str(data), run, show_progress=False)
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    # the first epoch compiles and captures, for the first objective; the second for the hinge on the hardest negative
    speeds = [
        x["pairs_per_second"] for x in lines if "pairs_per_second" in x and x["epoch"] >= args.epochs - 1
    ]
    return statistics.median(speeds)


def main() -> None:
    """Run every row and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a machine without a GPU")
    parser.add_argument("--images", type=int, default=4000, help="training images (five texts each)")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rows", nargs="*", default=list(ROWS), help="only these rows")
    args = parser.parse_args()
    if args.tiny:
        args.images, args.workers = 64, 0
    elif not torch.cuda.is_available():
        parser.error("no CUDA GPU here: use --tiny to see that it runs.")
    rows = {name: ROWS[name] for name in args.rows}
    if not torch.cuda.is_available():
        rows = {
            name: row for name, row in rows.items() if not row.get("cuda_graphs") and not row.get("compile")
        }
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        (root / "precomp").mkdir()
        words = make_text_model(root / "bert", args.tiny)
        make_data(root / "precomp", args.images, words)
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        print(f"{device}, torch {torch.__version__}\n\n| row | pairs/s | ratio to the first |\n|---|---|---|")
        first = None
        for number, (name, changes) in enumerate(rows.items()):
            speed = measure(name, changes, root / "precomp", root / "bert", root / f"run{number}", args)
            first = first or speed
            print(f"| {name} | {speed:,.0f} | {speed / first:.2f} |", flush=True)


if __name__ == "__main__":
    main()
