"""Pictures of attention, and the report on two texts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from PIL import Image
from small import WORDS, pictures, precomputed

from diptych.aggregators import Max
from diptych.cli import main
from diptych.data.images import PixelInput
from diptych.data.text import WordInput
from diptych.encoders.bigru import BiGRU
from diptych.encoders.cnn import Grid
from diptych.encoders.lite0 import Lite0
from diptych.encoders.shared import Contextual, TokenTransformer
from diptych.model.retriever import Retriever, Tower
from diptych.reports.sheets import lit
from diptych.runs.show_attention import attended

VOCABULARY = ["<pad>", "<start>", "<end>", "<unk>", *WORDS, "<mask>"]


def model(folder: Path, *, depth: int = 1, shared: bool = True, seed: int = 0) -> Path:
    """A small untrained model with transformers on top."""
    torch.manual_seed(seed)
    transformers = [TokenTransformer(16, depth, heads=2, feedforward=32) for _ in range(2)]
    Retriever(
        Tower(Contextual(Grid(Lite0(size=64), 16), transformers[0]), Max()),
        Tower(Contextual(BiGRU(len(VOCABULARY), 8, 16), transformers[0 if shared else 1]), Max()),
        PixelInput(64),
        WordInput(VOCABULARY),
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    for number, path in enumerate(pictures(folder, 5)):
        path.with_suffix(".txt").write_text(
            f"a {WORDS[number + 2]} dog\nthe {WORDS[number + 2]} cat\n", "utf-8"
        )
    return folder


def show(*words: object) -> Result:
    return CliRunner().invoke(main, ["show", *map(str, words)])


def test_attention_of_two_runs(tmp_path: Path, data: Path) -> None:
    runs = model(tmp_path / "shared"), model(tmp_path / "unshared", shared=False)
    output = tmp_path / "attention.png"
    done = show("attention", *runs, "--data", data, "--split", "train", "--count", 3, "--output", output)
    assert done.exit_code == 0, done.output
    for name in ("shared", "unshared", "3 pairs", "as many as", "cosine"):
        assert name in done.output
    with Image.open(output) as sheet:
        assert sheet.width == 10 + 3 * 234  # the picture and two runs


def test_shares_are_of_cells_and_words(tmp_path: Path) -> None:
    retriever = Retriever.from_pretrained(model(tmp_path / "model"))
    found = attended(retriever, Image.new("RGB", (50, 40), (200, 10, 10)), "a red dog")
    assert found.cells.shape == (2, 2)
    assert found.cells.sum() == pytest.approx(1.0, abs=1e-5)
    assert [word for word, _ in found.words] == ["<start>", "a", "red", "dog", "<end>"]
    assert sum(share for _, share in found.words) == pytest.approx(1.0, abs=1e-5)


def test_bright_cells_are_those_looked_at() -> None:
    shares = np.zeros((4, 4))
    shares[0, 0] = 1.0
    pixels = np.asarray(lit(Image.new("RGB", (64, 64), (200, 200, 200)), shares))
    assert pixels[2, 2].mean() > 190
    assert pixels[60, 60].mean() == pytest.approx(40, abs=1)


def test_a_run_without_attention_is_refused(tmp_path: Path, data: Path) -> None:
    done = show("attention", model(tmp_path / "flat", depth=0), "--data", data, "--split", "train")
    assert done.exit_code == 2
    assert "has no transformer whose attention could be shown" in done.output
    done = show(
        "attention", model(tmp_path / "deep"), "--data", data, "--split", "train", "--output", "x.pdf"
    )
    assert done.exit_code == 2
    assert ".png" in done.output


def test_two_texts(tmp_path: Path, data: Path) -> None:
    run, output = model(tmp_path / "run"), tmp_path / "knowledge.png"
    texts = ("a red dog runs", "a blue dog sits")
    done = show("knowledge", run, "--texts", *texts, "--data", data, "--split", "train", "--output", output)
    assert done.exit_code == 0, done.output
    retriever = Retriever.from_pretrained(run)
    vectors = retriever.encode_text(list(texts))
    assert f"{5 * float(vectors[0] @ vectors[1]):.2f}" in done.output
    assert f"{5 * 2 / 6:.2f}" in done.output  # two words of six
    assert "words in common: a, dog" in done.output
    assert "of the 4 pictures it finds are the same" in done.output
    with Image.open(output) as sheet:
        assert sheet.width == 10 + 4 * 234


def test_two_texts_need_words_and_pictures(tmp_path: Path, data: Path) -> None:
    run = model(tmp_path / "run")
    done = show("knowledge", run, "--texts", "a dog", " ", "--data", data, "--split", "train")
    assert done.exit_code == 2
    assert "a text is empty" in done.output
    stored = precomputed(tmp_path / "precomp")
    done = show("knowledge", run, "--texts", "a dog", "a cat", "--data", stored, "--split", "train")
    assert done.exit_code == 2
    assert "not pictures" in done.output
