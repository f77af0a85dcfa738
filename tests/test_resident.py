"""Columns that lie whole on the device give a step the rows that a loader would have read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from diptych.data.arrays import ArrayStore
from diptych.data.captions import Captions
from diptych.errors import DataError
from diptych.targets import columns
from diptych.targets.columns import Column, Resident, divide
from diptych.types import Batch, Features

CPU = torch.device("cpu")


def captions() -> Captions:
    """Three images with two texts each, not in order."""
    pictures = ArrayStore(np.zeros((3, 2, 4), np.float32))
    image_of = np.array([0, 0, 2, 1, 2, 1])
    return Captions(pictures, [f"text {i}" for i in range(6)], image_of, ["a", "b", "c"], ["train"] * 3)


def saved(folder: Path, name: str, rows: int, width: int) -> tuple[Column, NDArray[np.float16]]:
    values = np.random.default_rng(rows).normal(size=(rows, width)).astype(np.float16)
    np.save(folder / f"{name}.npy", values)
    of = "image" if name == "teacher_image" else "text"
    return Column(ArrayStore(folder / f"{name}.npy", mapped=True), of), values  # type: ignore[arg-type]


def batch(texts: list[int]) -> Batch:
    nothing = Features.whole(torch.zeros(len(texts), 1, 1))
    numbers = torch.tensor(texts)
    return Batch(nothing, nothing, torch.zeros_like(numbers), numbers, {"other": torch.ones(len(texts))})


def test_a_batch_is_filled_with_its_rows(tmp_path: Path) -> None:
    image, of_images = saved(tmp_path, "teacher_image", 3, 5)
    text, of_texts = saved(tmp_path, "teacher_text", 6, 7)
    data = captions()
    held = Resident({"teacher_image": image, "teacher_text": text}, data, CPU)
    texts = [4, 0, 3, 3]
    filled = held.fill(batch(texts))
    assert set(filled.targets) == {"other", "teacher_image", "teacher_text"}
    assert np.array_equal(filled.targets["teacher_image"].numpy(), of_images[data.image_of[texts]])
    assert np.array_equal(filled.targets["teacher_text"].numpy(), of_texts[texts])


def test_nothing_is_held_without_a_gpu(tmp_path: Path) -> None:
    columns = {"teacher_text": saved(tmp_path, "teacher_text", 6, 7)[0]}
    held, read = divide(columns, captions(), CPU)
    assert not held.matrices
    assert read == columns
    given = batch([1])
    assert held.fill(given) is given


@pytest.mark.parametrize("free", [10**9, 1000])
def test_only_files_that_fit_go_onto_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    def hold(columns: dict[str, Column], *_: object) -> dict[str, Column]:
        return columns

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, free))
    monkeypatch.setattr(columns, "Resident", hold)
    given = {
        "teacher_text": saved(tmp_path, "teacher_text", 6, 7)[0],
        "labels": Column(np.ones((3, 2)), "image"),
    }
    held, read = divide(given, captions(), torch.device("cuda"))
    on_gpu = ["teacher_text"] if free > 1000 else []
    assert list(held) == on_gpu  # type: ignore[call-overload]
    assert list(read) == [name for name in given if name not in on_gpu]


def test_a_column_of_other_data_is_refused(tmp_path: Path) -> None:
    column, _ = saved(tmp_path, "teacher_text", 5, 7)
    with pytest.raises(DataError, match=r"teacher_text.*\b5\b.*\b6\b"):
        Resident({"teacher_text": column}, captions(), CPU)
