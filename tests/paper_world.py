"""Small data of every kind that a paper's table names, and settings small enough to train its rows in a blink."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dual_folders import clip_folder, vit_folder
from PIL import Image
from small import bert_folder, pictures, precomputed, texts
from small_senteval import write_senteval
from test_cookie_downstream import draw_lists, write_videos
from test_labelwise import label_data

from diptych import open_captions
from diptych.data.corrections import COLUMNS, data_hash, text_names
from diptych.data.held_out import open_split
from diptych.registries import RECIPES
from diptych.runs import synthetic_pooling
from diptych.runs.ablate import Runner
from diptych.runs.table_plan import Cell, TableRequest
from diptych.settings import TrainingSettings, from_json, setting_names, to_json
from diptych.tables import PaperTable

SMALL: dict[str, Any] = {
    "dim": 16, "batch_size": 12, "epochs": 1, "min_count": 1, "word_dim": 8, "heads": 2, "feedforward": 16, "blocks": 1,
    "queue_size": 30, "clusters": 6, "concept_size": 10, "prototype_epoch": 1, "similarity_dim": 8,
    "region_clusters": 5, "image_size": 32, "fusion_layers": 1, "fusion_heads": 2, "uni_dim": 8, "text_length": 16,
    "candidates": 2, "augmented_copies": 1, "loss_parts": 1, "all_negatives_epochs": 0, "ridge_baseline": False,
}  # fmt: skip


@dataclass(frozen=True)
class World:
    """A folder of small data and models."""

    folder: Path

    @staticmethod
    def made(folder: Path) -> World:
        """Write everything."""
        precomputed(folder / "features", train=26, dev=10, testall=10)
        label_data(folder / "labels", test=12)
        for part in ("ims.npy", "caps.txt"):
            (folder / "features" / f"testall_{part}").rename(folder / "features" / f"test_{part}")
        _photos(folder / "pictures")
        draw_lists(folder / "lists")
        write_videos(folder / "videos")
        write_senteval(folder / "senteval", pairs=12)
        _products(folder / "Stanford_Online_Products")
        for make, name in ((bert_folder, "bert"), (clip_folder, "clip"), (vit_folder, "vit")):
            make(folder / name)
        return World(folder)

    def place(self, table: PaperTable, name: str) -> str:
        """The small data that stand for those of this name."""
        special = {"sts": "senteval", "msrvtt": "videos", "coco-hash": "lists", "nus-wide-hash": "lists"}
        if name in ("cub", "sop", "in-shop", "inaturalist"):
            return str(self.folder / "Stanford_Online_Products")
        if table.paper == "labelwise":
            return f"{self.folder / 'labels'}?instances={self.folder / 'labels'}"
        return str(self.folder / special.get(name, "pictures" if name.endswith("-pictures") else "features"))

    def judgements(self, table: PaperTable, reads: str) -> str:
        """A text that is right for another image too, in a file of corrections of the data that stand for COCO's."""
        place = self.place(table, f"coco-{reads}" if reads else "coco")
        captions, whole = open_split(place, "test"), open_captions(place)
        rows = [captions.image_ids[1], text_names(captions)[0], "matches", "", data_hash(whole)]
        file = self.folder / "judged.csv"
        file.write_text(f"{','.join(COLUMNS)}\n{','.join(rows)}\n")
        return str(file)

    def data(self, table: PaperTable) -> dict[str, str]:
        """Data for every name of a table; of the lists of classes, one."""
        unlike = ("cub", "in-shop", "inaturalist")
        return {name: self.place(table, name) for name in table.data if name not in unlike}

    def runner(self, table: PaperTable, folder: Path, **wanted: Any) -> Runner:
        """The table on small data, with small settings and models."""
        options: dict[str, Any] = {"data": self.data(table), "published": True, "protocol": "plain"}
        return SmallRunner(self, table, folder, TableRequest(**{**options, **wanted, "show_progress": False}))


class SmallRunner(Runner):
    """Rows as they are published, but for their size, and for models that would be downloaded."""

    def __init__(self, world: World, table: PaperTable, folder: Path, wanted: TableRequest) -> None:
        self.world = world
        super().__init__(table, folder, wanted)

    def settings(self, cell: Cell, seed: int) -> TrainingSettings:
        """Small ones."""
        found = super().settings(cell, seed)
        recipe = cell.row.recipe
        values = {**to_json(found), **{k: v for k, v in SMALL.items() if k in setting_names(type(found))}}
        local = {
            "text_encoder": "bert", "text_teacher": "bert", "model": "clip",
            "image_encoder": "vit" if recipe.endswith("fusion") else "", "concept_vectors": "",
        }  # fmt: skip
        for name, folder in local.items():
            value = values.get(name, "")
            if isinstance(value, str) and (":" in value or value == "minilm" or value.endswith(".txt")):
                values[name] = str(self.world.folder / folder) if folder else "lite0"
                if name == "concept_vectors":
                    values[name] = ""
        if recipe == "labelwise":
            values["batch_size"] = 8
        if recipe == "cookie-hash":
            values["min_count"] = 1
        return from_json(RECIPES[recipe].settings, values)


def _photos(folder: Path) -> None:
    """Pictures with two texts each in three splits."""
    lines = []
    for number, path in enumerate(pictures(folder, 40)):
        split = "train" if number < 28 else "val" if number < 34 else "test"
        for text in texts(2, seed=number):
            lines.append(json.dumps({"image": path.name, "caption": f"{text} {number}", "split": split}))
    (folder / "metadata.jsonl").write_text("\n".join(lines), "utf-8")


def _products(root: Path) -> None:
    """A list of classes as Stanford Online Products writes it, three pictures of each of four, and their regions."""
    rng = np.random.default_rng(0)
    lines = ["image_id class_id super_class_id path"]
    for number in range(12):
        path = root / "chair_final" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (32, 32, 3)).astype(np.uint8)).save(path)
        lines.append(f"{number + 1} {11_319 + number // 3} 1 chair_final/{number}.png")
    (root / "Ebay_test.txt").write_text("\n".join(lines) + "\n")
    np.save(root / "test_ims.npy", rng.standard_normal((12, 6, 16)).astype(np.float32))
    (root / "test_ids.txt").write_text("".join(f"chair_final/{number}.png\n" for number in range(12)))


def run_to_the_end(
    table: PaperTable, world: World, folder: Path, monkeypatch: pytest.MonkeyPatch, rows: Sequence[str] = ()
) -> str:
    """Train and measure a table on small data: every cell whose data are there has a number; gives what it says."""
    defaults = synthetic_pooling.run.__defaults__
    assert defaults is not None
    monkeypatch.setattr(synthetic_pooling.run, "__defaults__", (*defaults[:3], 2, 1, False))
    judged = any(group.judgements for group in table.groups)
    forms = {row.reads for row in table.rows if not rows or row.name in rows} if judged else {""}
    said = ""
    for form in sorted(forms):  # the pictures of the small data are not those of its features
        chosen = [row.name for row in table.rows if row.reads == form and (not rows or row.name in rows)]
        options = (
            {"judgements": [world.judgements(table, form)], "rows": chosen} if judged else {"rows": rows}
        )
        said += _run_rows(world.runner(table, folder / form, **options), folder)
    return said


def _run_rows(runner: Runner, folder: Path) -> str:
    table = runner.table
    runner.check()
    results = runner.results()
    cells = list(runner.cells())
    assert cells
    for cell in cells:
        measured = results.measured[cell.row.name][cell.group.name]
        assert len(measured) == 1
        assert set(cell.group.columns) & set(measured[0]), (cell.row.name, cell.group.name)
    assert "measured" in results.markdown()
    assert results.latex().count(r"\\") > len(results.rows)
    if table.figure is not None:
        results.draw(folder / "figure.svg")
        assert "<svg" in (folder / "figure.svg").read_text()
    return results.markdown()
