"""What a few hundred to a few thousand captioned pictures are best trained with: recall on held-out pictures.

    python benchmarks/small_data.py --flickr8k FOLDER_OF_TARS --work WORK [--sets emoji] [--rows ridge photos]

Sets: the built-in emoji, and subsets of Flickr8k (webdataset tars with the splits train and val): n training images,
n/5 validation images (at most 500) and 500 test images, the latter two from the split val. Each row is a command of
``diptych train``; where it draws random numbers, seeds 0, 1, 2. Numbers are those of the test split, which chooses
nothing. Every finished run is written to WORK/results.json at once, and found there when the script is started again.
Features are computed once, into the cache; run every row once before timing, or their time counts.
"""

from __future__ import annotations

import argparse
import csv
import json
import resource
import tarfile
from pathlib import Path
from typing import Any

import numpy as np

from diptych.evaluation.significance import mean_and_interval
from diptych.recipes import RECIPES
from diptych.runs.evaluate import evaluate_runs
from diptych.runs.train import run_recipe
from diptych.settings import from_json
from diptych.storage import parse_json, write_text

SIZES = (300, 1000, 6000)
TEST = 500  # images of Flickr8k's split val that are asked for in the end
UNTRAINED = "lite0+minilm"
FROZEN = {
    "text_encoder": "minilm",
    "train_text": False,
    "patience": 3,
    "dim": 256,
    "epochs": 12,
    "decay_epoch": 9,
}
ROWS: dict[str, tuple[str, dict[str, Any], bool]] = {  # recipe, its flags, whether it draws random numbers
    "untrained": (UNTRAINED, {}, False),
    "ridge": ("ridge", {}, False),
    "photos": ("photos", {}, True),
    "vse-infinity": ("vse-infinity", FROZEN, True),
    "vse-infinity, InfoNCE": ("vse-infinity", {**FROZEN, "objective": "info_nce"}, True),
    "vse-infinity, DCL": ("vse-infinity", {**FROZEN, "objective": "dcl"}, True),
    "coder": ("coder", {**FROZEN, "prototypes": False}, True),
}
SEEDS = 3
COLUMNS = {
    "image_to_text_recall@1": "i2t R@1", "image_to_text_recall@10": "R@10",
    "text_to_image_recall@1": "t2i R@1", "text_to_image_recall@10": "R@10", "rsum": "RSUM",
}  # fmt: skip


def main() -> None:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--flickr8k", type=Path, help="folder of Flickr8k's tars")
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs and results")
    parser.add_argument("--sets", nargs="*", default=["emoji", *(f"flickr8k-{n}" for n in SIZES)])
    parser.add_argument("--rows", nargs="*", default=list(ROWS))
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--epochs", type=int, help="fewer epochs than the rows say")
    parser.add_argument("--table", action="store_true", help="run nothing, print the table")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    if given.flickr8k is not None:
        write_subsets(given.flickr8k, given.work)
    file = given.work / "results.json"
    found: dict[str, Any] = parse_json(file.read_text("utf-8")) if file.exists() else {}
    for name in [] if given.table else given.sets:
        data = name if name == "emoji" else str(given.work / f"{name}.csv")
        for row in given.rows:
            for seed in range(given.seeds if ROWS[row][2] else 1):
                key = f"{name} | {row} | {seed}"
                if key not in found:
                    found[key] = measured(
                        row, data, given.work / "runs" / key.replace(" | ", "-"), seed, given.epochs
                    )
                    write_text(file, json.dumps(found, indent=1))
                    print(
                        key,
                        {k: round(v, 1) for k, v in found[key]["metrics"].items() if k in COLUMNS},
                        flush=True,
                    )
    print(table(found))


def measured(row: str, data: str, folder: Path, seed: int, epochs: int | None) -> dict[str, Any]:
    """One run: metrics of the test split with their intervals, and the CPU seconds that training took."""
    name, changes, _ = ROWS[row]
    began, progress = cpu_seconds(), None
    if name != UNTRAINED:
        recipe = RECIPES[name]
        values = {**changes, "seed": seed, "ridge_baseline": False}
        if epochs is not None and "epochs" in changes:
            values["epochs"] = epochs
        settings = from_json(recipe.settings, values)
        progress = run_recipe(recipe, settings, data, folder, show_progress=False)
    seconds = cpu_seconds() - began
    model = Path(UNTRAINED) if name == UNTRAINED else folder
    report = evaluate_runs([model], data=[data], split="test", show_progress=False)
    group = report.groups[0]
    return {
        "metrics": dict(group.metrics), "intervals": {k: list(v) for k, v in group.intervals.items()},
        "seconds": seconds, "epochs": 0 if progress is None else len(progress.history),
        "validation": None if progress is None else progress.best,
    }  # fmt: skip


def cpu_seconds() -> float:
    """CPU time of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def write_subsets(tars: Path, work: Path) -> None:
    """Pictures in WORK/pictures, and a table flickr8k-N.csv of images, texts and splits for each size."""
    records: dict[str, list[tuple[str, list[str]]]] = {"train": [], "val": []}
    if all((work / f"flickr8k-{size}.csv").exists() for size in SIZES):
        return
    (work / "pictures").mkdir(exist_ok=True)
    for tar in sorted(tars.glob("*.tar")):
        pictures: dict[str, str] = {}
        with tarfile.open(tar) as archive:
            for member in archive:
                stem, _, suffix = member.name.partition(".")
                file = archive.extractfile(member)
                assert file is not None
                if suffix == "json":
                    texts = parse_json(file.read())
                    records[tar.name.partition("-")[0]].append((pictures[stem], _texts(texts)))
                else:
                    pictures[stem] = f"pictures/{member.name}"
                    (work / "pictures" / member.name).write_bytes(file.read())
    for size in SIZES:
        order = np.random.default_rng(0).permutation(len(records["train"]))[:size]
        chosen = [(*records["train"][row], "train") for row in sorted(order.tolist())]
        held = records["val"]
        chosen += [(*record, "val") for record in held[: min(size // 5, len(held) - TEST)]]
        chosen += [(*record, "test") for record in held[-TEST:]]
        with (work / f"flickr8k-{size}.csv").open("w", encoding="utf-8", newline="") as out:
            writer = csv.writer(out)
            writer.writerow(["image", "text", "split"])
            for image, texts, split in chosen:
                writer.writerows([image, text, split] for text in texts)


def _texts(record: Any) -> list[str]:
    """The texts of one record, whatever the field is called."""
    if isinstance(record, dict):
        record = next(value for value in record.values() if isinstance(value, list))
    return [text["raw"] if isinstance(text, dict) else str(text) for text in record]


def table(found: dict[str, Any]) -> str:
    """Markdown: a section per set; three seeds with the interval of their mean, one with that of the queries."""
    lines: list[str] = []
    names = dict.fromkeys(key.split(" | ")[0] for key in found)
    for name in names:
        lines += [
            "",
            f"**{name}**",
            "",
            f"| row | {' | '.join(COLUMNS.values())} | CPU s |",
            "|---|" + "---|" * 6,
        ]
        for row in ROWS:
            runs = [run for key, run in found.items() if key.split(" | ")[:2] == [name, row]]
            if not runs:
                continue
            cells = [cell(runs, metric) for metric in COLUMNS]
            seconds = np.mean([run["seconds"] for run in runs])
            lines.append(
                f"| {row} | {' | '.join(cells)} | {seconds:.0f} |"
                if row != "untrained"
                else f"| {row} | {' | '.join(cells)} | 0 |"
            )
    return "\n".join(lines)


def cell(runs: list[dict[str, Any]], metric: str) -> str:
    """The mean over the seeds, or one run's number with its bootstrap interval."""
    values = [run["metrics"][metric] for run in runs]
    if len(values) > 1:
        return mean_and_interval(values)
    low, high = runs[0]["intervals"][metric]
    return f"{values[0]:.1f} ({low:.1f}–{high:.1f})"


if __name__ == "__main__":
    main()
