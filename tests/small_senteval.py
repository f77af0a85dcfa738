"""A small folder in SentEval's layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from diptych.evaluation.senteval import YEARS

WORDS = ["man", "dog", "runs", "red", "ball", "plays", "small", "girl", "street", "house", "two", "people"]


def write_senteval(folder: Path, pairs: int = 4) -> Path:
    """Every STS set with ``pairs`` pairs per file; the gold score is the number of shared words."""
    rng = np.random.default_rng(0)
    sts = folder / "downstream/STS"
    for year, names in YEARS.items():
        place = sts / f"{year}-en-test"
        place.mkdir(parents=True)
        for name in names:
            rows = [_pair(rng) for _ in range(pairs)]
            if (year, name) == ("STS12", "MSRpar"):
                rows[0] = ('He  said "a,   b 0', "He said nothing .", 2.5)
            (place / f"STS.input.{name}.txt").write_text("".join(f"{a}\t{b}\n" for a, b, _ in rows), "utf-8")
            (place / f"STS.gs.{name}.txt").write_text("".join(f"{gold}\n" for *_, gold in rows), "utf-8")
    (sts / "STSBenchmark").mkdir()
    for split in ("train", "dev", "test"):
        rows = [_pair(rng) for _ in range(pairs)]
        lines = [f"main-captions\tMSRvid\t2012\t{i:04}\t{g}\t{a}\t{b}\n" for i, (a, b, g) in enumerate(rows)]
        (sts / "STSBenchmark" / f"sts-{split}.csv").write_text("".join(lines), "utf-8")
    sick = folder / "downstream/SICK"
    sick.mkdir()
    for split in ("train", "trial", "test_annotated"):
        rows = [_pair(rng) for _ in range(pairs)]
        lines = [f"{i}\t{a}\t{b}\t{g}\tNEUTRAL\n" for i, (a, b, g) in enumerate(rows)]
        head = "pair_ID\tsentence_A\tsentence_B\trelatedness_score\tentailment_judgment\n"
        (sick / f"SICK_{split}.txt").write_text(head + "".join(lines), "utf-8")
    return folder


def _pair(rng: np.random.Generator) -> tuple[str, str, float]:
    first, second = (rng.choice(WORDS, 5, replace=False).tolist() for _ in range(2))
    return " ".join(first), " ".join(second), float(len(set(first) & set(second)))
