"""Retrieve, then re-rank: quick scores choose candidates, a pair scorer judges them."""

from __future__ import annotations

import torch
from torch import Tensor

from diptych.devices import autocast
from diptych.errors import SettingsError, at_least
from diptych.model.scores import PairScores, Scores, Where, evaluating
from diptych.progress import track

OUTSIDE = -100.0  # the score of a pair that nobody proposed
BLOCK = 512  # images whose quick scores are in memory at a time


class RerankedScores:
    """Scores of a pair scorer for candidates, and −100 for every other pair.

    The candidates of an image are its k best texts by the ``quick`` scores and the texts for which it is among the k
    best images: a pair is judged once for both directions. The scorer sees one image beside all its candidates, so
    that what depends on the image alone is computed once. A k above the number of items means all of them. The
    quick scores are not added. Pairs are judged when the first tile is asked for.
    """

    def __init__(self, quick: Scores, judge: PairScores, k: int, *, show_progress: bool = False) -> None:
        if quick.shape != judge.shape:
            raise SettingsError(
                f"quick scores of {quick.shape} pairs do not fit {judge.shape[0]} images and {judge.shape[1]} texts: "
                "compute both for the same data."
            )
        self.quick, self.judge, self.show_progress, self.shape = quick, judge, show_progress, quick.shape
        self.k = at_least(k, "k, the candidates of a query,", 1)
        self.device, self.encode_seconds = judge.device, judge.encode_seconds
        self.kind = f"{quick.kind}, best {k} by {judge.kind}"
        self._judged: tuple[Tensor, Tensor, Tensor] | None = None

    def tile(self, images: Where, texts: Where) -> Tensor:
        """Judged scores where there is one, −100 elsewhere."""
        bounds, columns, values = self.candidate_scores()
        rows = torch.arange(self.shape[0])[images.cpu() if isinstance(images, Tensor) else images]
        starts, sizes = bounds[rows], bounds[rows + 1] - bounds[rows]
        inside = torch.arange(int(sizes.sum())) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        at = starts.repeat_interleave(sizes) + inside
        out = torch.full((len(rows), self.shape[1]), OUTSIDE)
        out[torch.arange(len(rows)).repeat_interleave(sizes), columns[at]] = values[at]
        return out[:, texts.cpu() if isinstance(texts, Tensor) else texts].to(self.device)

    def candidate_scores(self) -> tuple[Tensor, Tensor, Tensor]:
        """Every candidate with its score: image i's lie at bounds[i]…bounds[i + 1] of ``columns`` and ``values``."""
        if self._judged is None:
            rows, columns = candidates(self.quick, self.k)
            counts = torch.bincount(rows, minlength=self.shape[0])
            bounds = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
            # scores stay on the device until all are there: nothing waits for a copy
            found = [torch.empty(0, device=self.device)]
            judge = self.judge
            with torch.inference_mode(), evaluating(judge.scorer), autocast(self.device, judge.precision):
                own = torch.split(columns, counts.tolist())
                for image in track(range(self.shape[0]), "re-rank", None, self.show_progress):
                    if len(own[image]):
                        found.append(judge.judged(torch.tensor([image]), own[image])[0].float())
            self._judged = bounds, columns, torch.cat(found).cpu()
        return self._judged


def candidates(quick: Scores, k: int) -> tuple[Tensor, Tensor]:
    """The pairs (rows, columns) in the best k of their image or of their text, each once, sorted by image."""
    n, m = quick.shape
    pairs, best, whose = [], torch.empty(0, m), torch.empty(0, m, dtype=torch.int64)
    for rows in (slice(start, min(start + BLOCK, n)) for start in range(0, n, BLOCK)):
        scores = quick.tile(rows, slice(None)).cpu()  # (block, M)
        texts = scores.topk(min(k, m), dim=1).indices
        numbers = torch.arange(rows.start, rows.stop)
        pairs.append(numbers.repeat_interleave(texts.shape[1]) * m + texts.flatten())
        joined = torch.cat([best, scores])
        owners = torch.cat([whose, numbers[:, None].expand(-1, m)])
        best, places = joined.topk(min(k, len(joined)), dim=0)
        whose = owners.gather(0, places)
    pairs.append((whose * m + torch.arange(m)).flatten())
    found: Tensor = torch.unique(torch.cat(pairs))
    return found // m, found % m
