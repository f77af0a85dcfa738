"""A score matrix on disk: equal to the scores, resumed after a kill, refused for other models or data."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from bombs import UNCLOSED
from torch import Tensor

from diptych.cache.rows import RowFile
from diptych.errors import DataError, StorageError
from diptych.evaluation import score_matrix
from diptych.evaluation.score_matrix import stored_scores
from diptych.interaction.sgraf import SAF, SGR
from diptych.interaction.similarity import PairScorer
from diptych.model.scores import MeanScores, PairScores, Where
from diptych.types import Features, Ragged

DIM = 8
BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "score_matrix.py"
WHO = {"model": "abc", "data": "def"}


def ragged(count: int, seed: int) -> Ragged:
    torch.manual_seed(seed)
    sizes = torch.arange(count) % 3 + 2
    mask = torch.arange(int(sizes.max())) < sizes[:, None]
    return Ragged.join([Features(F.normalize(torch.randn(*mask.shape, DIM), dim=-1), mask)])


def scores_of(
    kind: type[SGR] | type[SAF] = SGR, precision: str = "no", n: int = 11, m: int = 13
) -> PairScores:
    torch.manual_seed(0)
    scorer = kind(DIM, 4).eval()
    with torch.no_grad():
        for parameter in scorer.parameters():
            parameter.mul_(3)
    return PairScores(scorer, ragged(n, 1), ragged(m, 2), torch.device("cpu"), precision)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_matrix, "IMAGES", 4)
    monkeypatch.setattr(score_matrix, "TEXTS", 5)


def whole(scores: Any) -> Tensor:
    found: Tensor = scores.tile(slice(None), slice(None))
    return found


def test_the_file_holds_the_scores(tmp_path: Path) -> None:
    scores = scores_of()
    stored = stored_scores(scores, tmp_path / "s.npy", WHO)
    assert stored.kind == "sgr"
    torch.testing.assert_close(whole(stored), whole(scores), rtol=0, atol=1e-6)
    np.testing.assert_array_equal(np.load(tmp_path / "s.npy"), whole(stored).numpy())


class Own(PairScorer):
    """A scorer of a plugin: the cosine of the means; it says whether single pairs can be scored again."""

    kind = "own"

    def __init__(self, refines: bool) -> None:
        super().__init__()
        self.refines = refines

    def forward(self, images: Features, texts: Features) -> Tensor:
        return (images.values.mean(1) @ texts.values.mean(1).T).bfloat16().float()

    def pairs(self, images: Features, texts: Features) -> Tensor:
        return torch.full((len(images.mask),), 7.0)


@pytest.mark.parametrize("refines", [True, False])
def test_a_scorer_says_whether_it_is_refined(tmp_path: Path, refines: bool) -> None:
    scores = PairScores(Own(refines), ragged(3, 1), ragged(4, 2), torch.device("cpu"), "bf16")
    found = whole(stored_scores(scores, tmp_path / "s.npy", WHO))
    assert bool((found == 7).all()) == refines


class Killed:
    """Computes so many tiles, then the process dies."""

    def __init__(self, scores: PairScores, tiles: int) -> None:
        self.scores, self.left, self.asked = scores, tiles, 0

    def tile(self, images: Where, texts: Where) -> Tensor:
        if self.asked == self.left:
            raise KeyboardInterrupt
        self.asked += 1
        return self.scores.tile(images, texts)


def test_a_killed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    scores = scores_of()
    path = tmp_path / "s.npy"
    first = Killed(scores, 5)  # three tiles to a block of images: the second block is half done
    with pytest.raises(KeyboardInterrupt):
        stored_scores(scores, path, WHO, first.tile)
    with RowFile(path, RowFile(path, None).held_key(), dtype="<f4") as file:
        assert file.progress.done == 4
    second = Killed(scores, 100)
    stored = stored_scores(scores, path, WHO, second.tile)
    assert second.asked == 6  # the blocks of images 4 to 8 and 8 to 11, not the first
    torch.testing.assert_close(whole(stored), whole(scores), rtol=0, atol=1e-6)
    third = Killed(scores, 0)  # a finished file is read, nothing is computed
    torch.testing.assert_close(whole(stored_scores(scores, path, WHO, third.tile)), whole(stored))


def test_a_run_killed_in_its_first_block_starts_again(tmp_path: Path) -> None:
    scores, path = scores_of(), tmp_path / "s.npy"
    with pytest.raises(KeyboardInterrupt):
        stored_scores(scores, path, WHO, Killed(scores, 1).tile)
    torch.testing.assert_close(whole(stored_scores(scores, path, WHO)), whole(scores), rtol=0, atol=1e-6)
    (tmp_path / "s.json").unlink()  # killed between the matrix and the card
    torch.testing.assert_close(whole(stored_scores(scores, path, WHO)), whole(scores), rtol=0, atol=1e-6)


def earlier_version(path: Path, done: int, refined: bool = False) -> None:
    """Make of a finished matrix what versions without a log left: all its room, and a card with what is done."""
    matrix, card = np.load(path), json.loads(path.with_suffix(".json").read_text())
    matrix[done:] = 0
    np.save(path, matrix)
    path.with_name(f".{path.name}.log").unlink()
    path.with_suffix(".json").write_text(json.dumps({**card, "done": done, "refined": refined}))


@pytest.mark.parametrize("kills", [(), (0,), (2,)])
def test_a_matrix_of_an_earlier_version_goes_on(kills: tuple[int, ...], tmp_path: Path) -> None:
    scores, path = scores_of(), tmp_path / "s.npy"
    stored_scores(scores, path, WHO)
    card = json.loads((tmp_path / "s.json").read_text())
    earlier_version(path, 6)
    for tiles in kills:
        with pytest.raises(KeyboardInterrupt):
            stored_scores(scores, path, WHO, Killed(scores, tiles).tile)
    rest = Killed(scores, 100)
    stored = stored_scores(scores, path, WHO, rest.tile)
    assert rest.asked == 6  # the blocks of images 6 to 10 and 10 to 11
    torch.testing.assert_close(whole(stored), whole(scores), rtol=0, atol=1e-6)
    assert json.loads((tmp_path / "s.json").read_text()) == card
    earlier_version(path, 11, refined=True)
    stored = stored_scores(scores, path, WHO, Killed(scores, 0).tile)
    torch.testing.assert_close(whole(stored), whole(scores), rtol=0, atol=1e-6)


def test_a_flipped_byte_is_computed_again(tmp_path: Path) -> None:
    scores, path = scores_of(), tmp_path / "s.npy"
    stored_scores(scores, path, WHO)
    data = bytearray(path.read_bytes())
    data[256 + 4 * 13 * 5] ^= 0xFF  # in the second block of images
    path.write_bytes(data)
    again = Killed(scores, 100)
    stored = stored_scores(scores, path, WHO, again.tile)
    assert again.asked == 6
    torch.testing.assert_close(whole(stored), whole(scores), rtol=0, atol=1e-6)


def test_a_kill_while_the_best_are_refined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores, path, refine = scores_of(precision="bf16"), tmp_path / "s.npy", score_matrix._refine
    expected = whole(stored_scores(scores, tmp_path / "whole.npy", WHO))

    def killed(members: Any, matrix: Any, show_progress: bool) -> None:
        refine(members, matrix, show_progress)
        matrix[0] += 1e-5  # as if some of the pairs only
        raise KeyboardInterrupt

    monkeypatch.setattr(score_matrix, "_refine", killed)
    with pytest.raises(KeyboardInterrupt):
        stored_scores(scores, path, WHO)
    monkeypatch.setattr(score_matrix, "_refine", refine)
    again = Killed(scores, 0)  # no tile is computed again
    torch.testing.assert_close(
        whole(stored_scores(scores, path, WHO, again.tile)), expected, rtol=0, atol=1e-4
    )
    torch.testing.assert_close(
        whole(stored_scores(scores, path, WHO, again.tile)), expected, rtol=0, atol=1e-4
    )


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="files have holes here")
def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageError, match=r"s\.npy"):
        stored_scores(scores_of(), tmp_path / "s.npy", WHO)
    assert [found.suffix for found in tmp_path.iterdir()] in ([], [".lock"])


def test_the_benchmark_kills_resumes_and_compares() -> None:
    for scorer, precision in (("sgr", "no"), ("saf", "bf16")):
        command = [sys.executable, str(BENCHMARK), "--tiny", "--scorer", scorer, "--precision", precision]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "killed after 7 of 12 tiles: status -9, 12 images finished" in done.stdout
        assert "6 tiles for the 12 images that were left, 0 of them scored again" in done.stdout


def test_files_of_others_are_refused(tmp_path: Path) -> None:
    scores, path = scores_of(), tmp_path / "s.npy"
    stored_scores(scores, path, WHO)
    before = path.read_bytes()
    with pytest.raises(DataError, match=r"s\.npy"):
        stored_scores(scores, path, {**WHO, "model": "xyz"})
    with pytest.raises(DataError, match="bf16"):
        stored_scores(scores_of(precision="bf16"), path, WHO)
    with pytest.raises(DataError, match=r"s\.npy"):
        stored_scores(scores_of(m=12), path, WHO)
    assert path.read_bytes() == before
    (tmp_path / "s.json").write_text("[]")
    with pytest.raises(DataError, match=r"s\.json"):
        stored_scores(scores, path, WHO)
    (tmp_path / "s.json").unlink()
    (tmp_path / ".s.npy.log").unlink()
    with pytest.raises(DataError, match=r"s\.json"):
        stored_scores(scores, path, WHO)


def test_a_finished_file_that_is_no_array_is_one_sentence(tmp_path: Path) -> None:
    """One of an earlier version, without a log: nothing else would notice."""
    scores, path = scores_of(), tmp_path / "s.npy"
    stored_scores(scores, path, WHO)
    (tmp_path / ".s.npy.log").unlink()
    path.write_bytes(UNCLOSED)
    with pytest.raises(DataError, match=r"s\.npy"):
        stored_scores(scores, path, WHO)


@pytest.mark.parametrize("title", [None, "damaged"])
def test_a_file_of_features_is_refused(title: str | None, tmp_path: Path) -> None:
    path = tmp_path / "train_ims.npy"
    with RowFile(path, "key") as file:
        file.append(np.ones((3, 2)), 3)
        file.finish()
    if title is not None:
        file.log.write_text(title)
    with pytest.raises(DataError, match=r"train_ims\.npy"):
        stored_scores(scores_of(), path, WHO)
    assert np.array_equal(np.load(path), np.ones((3, 2)))


@pytest.mark.parametrize("ensemble", [False, True])
def test_half_precision_is_refined(tmp_path: Path, ensemble: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_matrix, "EXACT", 3)

    def of(precision: str) -> Any:
        both = [scores_of(kind, precision) for kind in (SGR, SAF)]
        return MeanScores(both) if ensemble else both[0]

    exact, rough = whole(of("no")), whole(of("bf16"))
    assert not torch.equal(exact, rough)
    stored = whole(stored_scores(of("bf16"), tmp_path / "s.npy", WHO))
    best = stored.topk(2, dim=1).indices
    torch.testing.assert_close(stored.gather(1, best), exact.gather(1, best), rtol=0, atol=1e-5)
    assert torch.equal(best, exact.topk(2, dim=1).indices)
    assert json.loads((tmp_path / "s.json").read_text())["refined"]
