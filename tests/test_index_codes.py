"""Binary codes as proposer: the Hamming shortlist, then the stored vectors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from colour_model import ColourModel
from commands import diptych
from test_index_build import drawn

from diptych.codes import pack
from diptych.index.engines.coding import Coder, random_rotation
from diptych.index.engines.embedded.approximate import CodeTable
from diptych.index.engines.embedded.index import EmbeddedIndex
from diptych.index.ingest.build import index_collection
from diptych.index.protocol import Item, Vectors

D, N = 64, 2000


def vectors(n: int, seed: int, shift: float = 0.0) -> Vectors:
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(n, D)) + shift
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), np.float32)


def table_of(rows: Vectors) -> CodeTable:
    table = CodeTable(D)
    for start in range(0, len(rows), 700):
        part = rows[start : start + 700]
        table.add(np.arange(start, start + len(part)).astype(np.uint64), part)
    return table


def test_proposals_are_the_nearest_codes_by_distance_then_row() -> None:
    rows, queries = vectors(N, 0), vectors(5, 1)
    table = table_of(rows)
    assert table.coder is not None
    assert table.coder.bits == 256
    mean, rotation = rows[:700].mean(0).astype(np.float64), random_rotation(D, 256).astype(np.float64)
    signs = np.where((rows - mean) @ rotation >= 0, 1, -1)
    for query, proposed in zip(queries, table.propose(queries, 50), strict=True):
        distances = (256 - signs @ np.where(query @ rotation >= 0, 1, -1)) // 2
        expected = np.argsort(distances, kind="stable")[:50]
        assert (
            len(set(proposed.tolist()) & set(expected.tolist())) >= 48
        )  # a number at 0 may round to either sign


def test_a_rotation_keeps_lengths_and_angles() -> None:
    rotation = random_rotation(D, 256)
    assert rotation.shape == (D, 256)
    rows = vectors(20, 3)
    turned = rows @ rotation
    assert np.allclose(turned @ turned.T, 4 * rows @ rows.T, atol=1e-4)
    agree = np.array([[np.mean((a >= 0) == (b >= 0)) for b in turned] for a in turned])
    angles = np.arccos(np.clip(rows @ rows.T, -1, 1))
    assert np.abs((1 - agree) - angles / np.pi).max() < 0.12


def test_the_mean_of_the_vectors_tells_nothing_and_is_taken_out() -> None:
    """Embeddings lie in a cone: without centring every code begins alike, and bits are wasted."""
    rows, queries = vectors(N, 0, shift=0.6), vectors(40, 1, shift=0.6)
    truth = [set(np.argsort(-(rows @ q))[:10].tolist()) for q in queries]
    table = table_of(rows)

    def recall(proposed: Any) -> float:
        return float(np.mean([len(t & set(p.tolist())) / 10 for t, p in zip(truth, proposed, strict=True)]))

    centred = recall(table.propose(queries, 100))
    assert table.coder is not None
    table.coder = Coder(np.zeros(D, np.float32), table.coder.rotation)
    table._codes = np.asfortranarray(pack(rows @ table.coder.rotation))
    assert centred > recall(table.propose(queries, 100)) + 0.02
    assert centred > 0.85


def test_a_table_survives_saving_removing_and_renaming(tmp_path: Path) -> None:
    rows = vectors(N, 0)
    table = table_of(rows)
    table.save(str(tmp_path / "a.codes"))
    again = CodeTable(D)
    again.load(str(tmp_path / "a.codes"))
    query = vectors(3, 1)
    assert all(
        np.array_equal(a, b) for a, b in zip(table.propose(query, 9), again.propose(query, 9), strict=True)
    )
    gone = table.propose(query, 5)[0].astype(np.uint64)
    again.remove(gone)
    assert len(again) == N - 5
    assert not set(again.propose(query, 50)[0].tolist()) & set(gone.tolist())
    kept = again.propose(query, 5)[1]
    again.rename(kept.astype(np.uint64), (kept + 10_000).astype(np.uint64))
    assert again.propose(query, 5)[1].tolist() == (kept + 10_000).tolist()
    again.rename(np.zeros(0, np.uint64), np.zeros(0, np.uint64))
    assert CodeTable(D).propose(query, 5)[0].tolist() == []


@pytest.mark.parametrize("content", [b"", b"noise", b"\x93NUMPY\x01\x00"])
def test_a_damaged_table_is_scanned_instead(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.codes").write_bytes(content)
    with pytest.raises(RuntimeError, match="holds no codes"):
        CodeTable(D).load(str(tmp_path / "a.codes"))
    table = table_of(vectors(10, 0))
    table.save(str(tmp_path / "a.codes"))
    with pytest.raises(RuntimeError, match="another kind"):
        CodeTable(D + 1).load(str(tmp_path / "a.codes"))
    index = EmbeddedIndex.create(tmp_path / "i", D)
    index.add([Item(str(n)) for n in range(50)], vectors(50, 0))
    index.build_graph("image", codes=True)
    (file,) = index.path.glob("graph-*.codes")
    file.write_bytes(content)
    assert index.search(vectors(1, 1)[0], 3, kind="image").exact
    assert any("cut short" in fault for fault in index.verify())


def test_codes_and_graph_replace_each_other_and_last(tmp_path: Path) -> None:
    pytest.importorskip("usearch")
    index = EmbeddedIndex.create(tmp_path / "i", D)
    index.add([Item(str(n)) for n in range(500)], vectors(500, 0))
    index.build_graph("image", codes=True)
    assert index.info.coded == ("image",)
    index.build_graph("image")  # None keeps what there is
    assert [file.suffix for file in index.path.glob("graph-*")] == [".codes"]
    index.build_graph("image", codes=False)
    assert [file.suffix for file in index.path.glob("graph-*")] == [".usearch"]
    assert index.info.coded == ()
    index.build_graph("image", codes=True)
    index.close()
    with EmbeddedIndex(tmp_path / "i") as again:
        hits = again.search(vectors(1, 1)[0], 5, kind="image")
        assert not hits.exact
        exact = again.search(vectors(1, 1)[0], 5, kind="image", exact=True)
        assert hits.ids == exact.ids
        assert hits.scores == exact.scores


def test_codes_need_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "usearch", None)
    monkeypatch.setitem(sys.modules, "usearch.index", None)
    built = index_collection(ColourModel(), drawn(3), tmp_path / "i", approximate_above=1, codes=True)
    assert built.notes == []
    with EmbeddedIndex(tmp_path / "i") as index:
        assert "image" in index.info.coded


def test_the_command_line_offers_codes(tmp_path: Path) -> None:
    said = diptych("index", "build", "--exact", "--codes", tmp_path, tmp_path, status=2)
    assert "--exact" in said.stderr
