"""Evaluation over shards equals one process: every rank, every tie, every interval."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from colour_model import ColourModel
from commands import diptych, refused
from shard_data import write_tars

from diptych.errors import DataError, SettingsError
from diptych.evaluation import shards as evaluation
from diptych.evaluation.metrics import TIES, count_ranks
from diptych.evaluation.retrieval import evaluate_scores
from diptych.evaluation.shards import blocks, count_pair, evaluate_vectors, own_scores, read_block
from diptych.index.protocol import Item
from diptych.model.scores import EmbeddingScores
from diptych.vectors.embed import embed
from diptych.vectors.files import open_vectors, shard_writer
from diptych.vectors.load import open_sources
from diptych.vectors.manifest import (
    Manifest,
    Receipt,
    complete_manifest,
    join_manifest,
    shard_file,
    write_receipt,
)


def write_vectors(
    folder: Path, image: np.ndarray, text: np.ndarray, image_of: np.ndarray, cuts: list[int]
) -> Path:
    """A folder of given vectors, its images cut into shards before these rows; every third is of the split test."""
    edges = [0, *cuts, len(image)]
    names = tuple(f"{number:03d}" for number in range(len(edges) - 1))
    manifest = join_manifest(folder, Manifest("given", "f" * 16, image.shape[1], "given", "", names))
    for name, start, stop in zip(names, edges[:-1], edges[1:], strict=True):
        rows = np.arange(start, stop)
        texts = np.flatnonzero((image_of >= start) & (image_of < stop))
        with shard_writer(shard_file(folder, name), image.shape[1]) as writer:
            columns = {int(row): {"split": "test" if row % 3 == 0 else "train"} for row in rows}
            writer.write([Item(id=str(row), metadata=columns[int(row)]) for row in rows], image[rows])
            items = [
                Item(id=f"{image_of[n]}#{n}", kind="text", image_id=str(image_of[n]), text=f"text {n}",
                     metadata=columns[int(image_of[n])])
                for n in texts
            ]  # fmt: skip
            writer.write(items, text[texts])
        write_receipt(folder, Receipt(name, len(rows), len(texts), writer.bytes, writer.sha256))
    assert complete_manifest(folder, manifest)
    return folder


def tied_vectors(
    images: int = 700, dim: int = 24, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Vectors of which many are equal, zero to four texts an image, texts in the order of their images."""
    rng = np.random.default_rng(seed)
    kinds = rng.standard_normal((images // 7, dim)).astype(np.float32)
    kinds /= np.linalg.norm(kinds, axis=1, keepdims=True)
    own = rng.standard_normal((images, dim)).astype(np.float32)
    own /= np.linalg.norm(own, axis=1, keepdims=True)
    image = np.where(rng.random((images, 1)) < 0.5, kinds[rng.integers(len(kinds), size=images)], own)
    image_of = np.sort(rng.choice(images, size=2 * images))
    noise = own[rng.integers(images, size=len(image_of))]
    text = np.where(rng.random((len(image_of), 1)) < 0.5, image[image_of], noise)
    return image.astype(np.float32), text.astype(np.float32), image_of.astype(np.int64)


def ranks_of(folder: Path, rows: int, split: str | None = None) -> list[np.ndarray]:
    found: list[np.ndarray] = []
    real = evaluation.evaluate_ranks
    with pytest.MonkeyPatch.context() as patch:

        def kept(ranks, *args, **options):  # type: ignore[no-untyped-def]
            found.extend(
                array
                for _, p in ranks
                for array in (p.queries, p.above, p.tied, p.earlier, *(p.ranks(ties) for ties in TIES))
            )
            return real(ranks, *args, **options)

        patch.setattr(evaluation, "evaluate_ranks", kept)
        evaluate_vectors(folder, split=split, rows=rows, bootstrap=0, device="cpu")
    return found


def expected(image: np.ndarray, text: np.ndarray, image_of: np.ndarray) -> list[np.ndarray]:
    ranks = count_ranks(EmbeddingScores(torch.from_numpy(image), torch.from_numpy(text)), image_of)
    return [
        array
        for _, p in ranks
        for array in (p.queries, p.above, p.tied, p.earlier, *(p.ranks(ties) for ties in TIES))
    ]


@pytest.mark.parametrize(
    ("cuts", "rows"), [([], 10**6), ([1, 2, 350], 10**6), ([100, 101, 250, 640], 1), ([3, 600], 900)]
)
def test_ranks_are_those_of_one_process(tmp_path: Path, cuts: list[int], rows: int) -> None:
    image, text, image_of = tied_vectors()
    folder = write_vectors(tmp_path, image, text, image_of, cuts)
    found, whole = ranks_of(folder, rows), expected(image, text, image_of)
    assert whole[2].sum() > 1000, "the vectors should make ties"
    assert len(found) == len(whole)
    for one, other in zip(found, whole, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dim", [7, 64, 512])
def test_ranks_over_several_tiles(tmp_path: Path, dim: int) -> None:
    """More rows than one product has, and dimensions that are no multiple of a register."""
    image, text, image_of = tied_vectors(1300, dim, seed=dim)
    folder = write_vectors(tmp_path, image, text, image_of, [500, 513, 1299])
    for one, other in zip(ranks_of(folder, 1000), expected(image, text, image_of), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_comparison_notices_a_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image, text, image_of = tied_vectors()
    folder = write_vectors(tmp_path, image, text, image_of, [100, 250])
    real = evaluation.count_pair

    def without_numbers(a, b, own_a, own_b, starts, device):  # type: ignore[no-untyped-def]
        return real(a, b, own_a, own_b, (0, 0, 0, 0), device)

    monkeypatch.setattr(evaluation, "count_pair", without_numbers)
    pairs = list(zip(ranks_of(folder, 1), expected(image, text, image_of), strict=True))
    assert not all(np.array_equal(one, other) for one, other in pairs)
    np.testing.assert_array_equal(*pairs[1])  # what is above depends on no number


def test_a_split_is_ranked_alone(tmp_path: Path) -> None:
    image, text, image_of = tied_vectors(400)
    folder = write_vectors(tmp_path, image, text, image_of, [7, 150])
    kept, chosen = np.arange(0, 400, 3), image_of % 3 == 0
    whole = expected(image[kept], text[chosen], image_of[chosen] // 3)
    for one, other in zip(ranks_of(folder, 300, split="test"), whole, strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(DataError, match="'val'"):
        evaluate_vectors(folder, split="validation")


def test_the_report_is_that_of_one_process(tmp_path: Path) -> None:
    image, text, image_of = tied_vectors()
    folder = write_vectors(tmp_path / "a", image, text, image_of, [100, 250])
    whole = evaluate_scores(
        EmbeddingScores(torch.from_numpy(image), torch.from_numpy(text)), image_of, bootstrap=50
    )
    report = evaluate_vectors(folder, bootstrap=50, device="cpu")
    assert report.metrics == whole.metrics
    assert report.intervals == whole.intervals
    card, other = report.card, whole.card
    for name in ("protocol", "images", "texts", "texts_per_image", "folds", "ties", "tied_queries", "score"):
        assert getattr(card, name) == getattr(other, name)
    assert card.described()["split"] == "test+train"
    same = evaluate_vectors(
        write_vectors(tmp_path / "b", image, text, image_of, [100, 250]), bootstrap=0, rows=9
    )
    assert same.card.described()["data hash"] == card.described()["data hash"]
    changed = write_vectors(tmp_path / "c", image, text, np.sort((image_of + 1) % 700), [100, 250])
    assert (
        evaluate_vectors(changed, bootstrap=0).card.described()["data hash"] != card.described()["data hash"]
    )


def test_blocks_are_bounded(tmp_path: Path) -> None:
    image, text, image_of = tied_vectors(100)
    shards = open_vectors(write_vectors(tmp_path, image, text, image_of, [10, 20, 30, 95])).shards
    found = blocks(shards, 80)
    assert [shard for group in found for shard in group] == list(shards)
    assert all(len(group) == 1 or sum(s.receipt.rows for s in group) <= 80 for group in found)
    assert len(found) < len(shards)
    both = [read_block(group) for group in blocks(shards, 10**6)]
    assert len(both) == 1
    own = own_scores(both[0])
    counts = count_pair(both[0], both[0], own, own, (0, 0, 0, 0))
    assert counts.image.shape == (3, 100)
    assert np.isneginf(own.best).sum() == 100 - len(np.unique(image_of))


def test_own_scores_have_the_bits_of_the_tiles() -> None:
    """Where a pair stands in a product must not matter, or rounding would make and break ties."""
    rng = np.random.default_rng(0)
    image, text = (torch.from_numpy(rng.standard_normal((n, 48)).astype(np.float32)) for n in (900, 1500))
    product = evaluation._Product(48, torch.device("cpu"))
    whole = torch.cat(
        [torch.cat([product(image[i : i + 512], text[j : j + 1024]) for j in (0, 1024)], 1) for i in (0, 512)]
    )
    assert torch.equal(product(image[3:40], text[7:90]), whole[3:40, 7:90])
    assert torch.equal(product(image[700:], text[1400:]), whole[700:, 1400:])


# --- bad input, and the command ----------------------------------------------------------------------


def test_vectors_that_cannot_be_ranked_are_refused(tmp_path: Path) -> None:
    data = write_tars(tmp_path / "tars", tars=2)
    embed(ColourModel(), open_sources(data), tmp_path / "bare", texts=False)
    with pytest.raises(DataError, match="--texts"):
        evaluate_vectors(tmp_path / "bare")
    embed(ColourModel(), open_sources(data), tmp_path / "half", part=(1, 2))
    with pytest.raises(DataError, match=r"\b1\b.*\b2\b"):
        evaluate_vectors(tmp_path / "half")
    embed(ColourModel(), open_sources(data), tmp_path / "out")
    with pytest.raises(SettingsError, match=r"coco-1k.*\b5\b"):
        evaluate_vectors(tmp_path / "out", protocol="coco-1k")
    file = tmp_path / "out" / "shards" / "part-001.parquet"
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(DataError, match="half-written"):
        evaluate_vectors(tmp_path / "out")


def test_the_command(tmp_path: Path) -> None:
    data = write_tars(tmp_path / "tars", tars=3)
    embed(ColourModel(), open_sources(data), tmp_path / "out")
    said = diptych("evaluate", tmp_path / "out", "--output", tmp_path / "report.json").stdout
    assert "split train, protocol plain (1 fold): 17 images, 34 texts, 2 per image" in said
    assert (
        json.loads((tmp_path / "report.json").read_text())["groups"][0]["card"]["model"]
        == ColourModel().fingerprint()
    )
    assert "--data" in refused("evaluate", tmp_path / "out", "--data", data)
    assert "evaluated alone" in refused("evaluate", tmp_path / "out", tmp_path / "out")
    assert "'val'" in refused("evaluate", tmp_path / "out", "--split", "val")
    assert "coco-1k" in refused("evaluate", tmp_path / "out", "--protocol", "coco-1k")
