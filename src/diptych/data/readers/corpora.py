"""Several corpora at once: a JSON manifest that lists webdataset tars, or other data, with weights, for pre-training.

Its fields (``Corpus``) are described in docs/data.md. Only headers and texts are read to start; samples that cannot be
used are skipped and counted. The order in which an epoch shows the texts (``CorpusMixture``) is a function of the seed
and the epoch, with no state to lose.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diptych.data.captions import (
    UNSPLIT,
    Captions,
    ImageStore,
    StoreChain,
    canonical_split,
    first_of_each,
    split_in_name,
)
from diptych.data.files import head, read_json
from diptych.data.formats import open_captions, split_options
from diptych.data.problems import STOP, AllProblems, Problem, Problems
from diptych.data.readers.pretraining import KIND, QUESTION
from diptych.data.readers.webdataset import JSON_TEXTS, ShardImages, StringColumn, TarShard, index_shard, tars
from diptych.errors import DataError
from diptych.progress import echo, track
from diptych.storage import expanded

Ints = NDArray[np.int64]
WINDOW = 16_384  # texts that are shuffled together; their images lie in a few neighbouring shards
_MIXTURE, _PASS = 0, 1  # keys of the two streams of random numbers


@dataclass(frozen=True, eq=False)
class Stream:
    """The texts of one corpus, shard by shard: ``texts`` are rows, ``shards`` the size of each shard in texts.

    ``weight`` is how often an epoch passes over the corpus: 1 shows every text once, 0.5 half of them (the other half
    comes in the next epoch), 2 every text twice.
    """

    name: str
    texts: Ints
    shards: Sequence[int]
    weight: float = 1.0

    @property
    def size(self) -> int:
        """Texts of this corpus in an epoch."""
        return round(self.weight * len(self.texts))

    def one_pass(self, rng: np.random.Generator, window: int) -> Ints:
        """All texts once: the shards in random order, then windows of ``window`` texts shuffled."""
        ends = np.cumsum(self.shards)
        pieces = [self.texts[ends[s] - self.shards[s] : ends[s]] for s in rng.permutation(len(self.shards))]
        order = np.concatenate(pieces)
        for start in range(0, len(order), window):
            rng.shuffle(order[start : start + window])
        return order


@dataclass(frozen=True, eq=False)
class CorpusMixture:
    """Several corpora at once, each in its own order, mixed evenly over the epoch in proportion to their weights.

    A corpus is an endless sequence of passes, each in an order drawn from (seed, corpus, pass); epoch e takes the
    e-th piece of it, so over time every text is seen equally often whatever the weight. Nothing but the seed and the
    epoch decides what stands at a position: a killed run goes on at the exact sample.
    """

    streams: tuple[Stream, ...]
    window: int = WINDOW

    def __len__(self) -> int:
        return sum(stream.size for stream in self.streams)

    def epoch(self, seed: int, number: int) -> Ints:
        """The rows of the texts of an epoch, in order."""
        rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(_MIXTURE, number)))
        corpus_at = rng.permutation(np.repeat(np.arange(len(self.streams)), [s.size for s in self.streams]))
        order = np.empty(len(self), dtype=np.int64)
        for corpus in range(len(self.streams)):
            order[corpus_at == corpus] = self._piece(seed, corpus, number)
        return order

    def renumbered(self, new_row: Ints) -> CorpusMixture:
        """The same corpora without the texts that were left out; a corpus without texts disappears."""
        streams = []
        for stream in self.streams:
            rows = new_row[stream.texts]
            keep = rows >= 0
            ends = np.cumsum(stream.shards)
            counts = [
                int(keep[end - size : end].sum()) for end, size in zip(ends, stream.shards, strict=True)
            ]
            if keep.any():
                streams.append(replace(stream, texts=rows[keep], shards=[c for c in counts if c]))
        return replace(self, streams=tuple(streams))

    def _piece(self, seed: int, corpus: int, number: int) -> Ints:
        stream = self.streams[corpus]
        size, first, last = len(stream.texts), number * stream.size, (number + 1) * stream.size
        pieces = [np.empty(0, dtype=np.int64)]
        for turn in range(first // size, -(-last // size)):
            rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(_PASS, corpus, turn)))
            begin = turn * size
            pieces.append(stream.one_pass(rng, self.window)[max(first - begin, 0) : last - begin])
        return np.concatenate(pieces)


_START = re.compile(r'\s*\{\s*("window"\s*:\s*\d+\s*,\s*)?"corpora"\s*:')
TEXTS = (*JSON_TEXTS, "questions", "question")
FIELDS = ("path", "name", "weight", "texts", "split", "images")


@dataclass(frozen=True)
class Corpus:
    """One entry of the manifest."""

    name: str
    place: str  # with the options behind it
    files: tuple[Path, ...]  # its tars; none of other data
    weight: float
    texts: tuple[str, ...]
    split: str | None
    images: str | None


def matches(path: Path) -> bool:
    """Whether ``path`` is such a manifest."""
    return path.is_file() and path.suffix.lower() == ".json" and bool(_START.match(head(path)))


@dataclass(frozen=True, eq=False)
class _CorpusPiece:
    """A tar, or a data set of another format: its images by key, their names in the corpus, and their texts."""

    corpus: int
    images: TarShard | ImageStore
    keys: Sequence[str]
    names: Sequence[str]
    splits: Sequence[str]
    texts: StringColumn
    image_of: Ints
    kinds: Sequence[str | None]


def read(path: Path, *, problems: Problems = STOP) -> Captions:
    """Read a manifest of corpora: one data set whose order passes over each corpus by its weight."""
    entries, window = _entries(path, problems)
    pieces: list[_CorpusPiece] = []
    skipped: list[Problem] = []
    notes: list[str] = []
    files = [(n, corpus, file) for n, corpus in enumerate(entries) for file in corpus.files or (None,)]
    for number, corpus, file in track(files, "listing shards"):
        if file is None:
            other = open_captions(corpus.place, problems=problems)
            notes += other.notes
            pieces.append(_other(number, corpus, other))
        else:
            shard = index_shard(file, corpus.texts)
            skipped += shard.skipped
            pieces.append(_tar(number, corpus, shard))
    _report(path, skipped, problems)
    if not sum(len(piece.texts) for piece in pieces):
        raise DataError(f"{path}: no sample of its corpora can be used: see 'diptych data check {path}'.")
    return replace(_captions(path, entries, pieces, window), notes=notes)


def _tar(number: int, corpus: Corpus, shard: TarShard) -> _CorpusPiece:
    stems = Counter(file.stem for file in corpus.files)
    stem = shard.path.stem if stems[shard.path.stem] == 1 else f"{shard.path.parent.name}/{shard.path.stem}"
    split, count = corpus.split or split_in_name(shard.path.name) or UNSPLIT, len(shard.offsets)
    kind = QUESTION if set(corpus.texts) <= {"question", "questions"} else None
    names = [f"{stem}/{key}" for key in shard.keys]
    return _CorpusPiece(
        number, shard, shard.keys, names, [split] * count, shard.texts, shard.image_of, [kind] * count
    )


def _other(number: int, corpus: Corpus, data: Captions) -> _CorpusPiece:
    splits = data.splits if corpus.split is None else [corpus.split] * len(data.images)
    kinds = data.labels.get(KIND, [None] * len(data.images))
    ids, texts = data.image_ids, StringColumn.of(data.texts)
    return _CorpusPiece(number, data.images, ids, ids, splits, texts, data.image_of, kinds)


def _captions(path: Path, entries: list[Corpus], pieces: list[_CorpusPiece], window: int) -> Captions:
    ids, image_of, images = [], [np.empty(0, np.int64)], 0
    splits: list[str] = []
    pictures: list[Any] = []
    kinds: list[str | None] = []
    for piece in pieces:
        corpus = entries[piece.corpus]
        ids.append(StringColumn.of([f"{corpus.name}/{name}" for name in piece.names]))
        splits += piece.splits
        kinds += piece.kinds
        if any(entry.images for entry in entries):
            pictures += [
                (corpus.images, key) if corpus.images else (images, place)
                for place, key in enumerate(piece.keys)
            ]
        image_of.append(piece.image_of + images)
        images += len(piece.keys)
    sizes = np.array([len(piece.texts) for piece in pieces])
    ends = np.cumsum(sizes)
    streams = []
    for number, corpus in enumerate(entries):
        own = [i for i, piece in enumerate(pieces) if piece.corpus == number and sizes[i]]
        if own:
            rows = np.concatenate([np.arange(ends[i] - sizes[i], ends[i]) for i in own])
            streams.append(Stream(corpus.name, rows, [int(sizes[i]) for i in own], corpus.weight))
    return Captions(
        images=_images(pieces),
        texts=StringColumn.join([piece.texts for piece in pieces]),
        image_of=np.concatenate(image_of),
        image_ids=StringColumn.join(ids),
        splits=splits,
        labels={KIND: kinds} if any(kinds) else {},
        name=str(path),
        order=CorpusMixture(tuple(streams), window),
        unreadable="skip",
        picture_of=first_of_each(pictures) if pictures else None,
    )


def _images(pieces: Sequence[_CorpusPiece]) -> ImageStore:
    """The images of all pieces, one after the other; tars that follow one another are one store."""
    stores: list[ImageStore] = []
    for in_tars, some in groupby(pieces, lambda piece: isinstance(piece.images, TarShard)):
        members = [piece.images for piece in some]
        stores += [ShardImages(members)] if in_tars else members  # type: ignore[arg-type]
    return stores[0] if len(stores) == 1 else StoreChain(stores)


def _entries(path: Path, problems: Problems) -> tuple[list[Corpus], int]:
    content = read_json(path, problems)
    corpora = content.get("corpora") if isinstance(content, dict) else None
    if not isinstance(corpora, list) or not corpora:
        raise DataError(f'{path}: "corpora" must be a list with at least one corpus.')
    window = content.get("window", WINDOW)
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise DataError(f'{path}: "window" is {window!r}: give how many texts are shuffled together.')
    entries = [_entry(path, number, entry) for number, entry in enumerate(corpora, 1)]
    twice = [name for name, count in Counter(entry.name for entry in entries).items() if count > 1]
    if twice:
        raise DataError(f'{path}: two corpora are called "{twice[0]}": give each its own "name".')
    return entries, window


def _entry(path: Path, number: int, entry: Any) -> Corpus:
    where = f"{path}, corpus {number}"
    if not isinstance(entry, dict) or not isinstance(entry.get("path"), str):
        raise DataError(f'{where}: it needs a "path": a folder, a tar or a pattern of tars.')
    unknown = next((field for field in entry if field not in FIELDS), None)
    if unknown is not None:
        raise DataError(f'{where}: there is no field "{unknown}": its fields are {", ".join(FIELDS)}.')
    weight = entry.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not weight > 0:
        raise DataError(f'{where}: "weight" is {weight!r}: give the passes over it in an epoch, more than 0.')
    place = str(path.parent / expanded(entry["path"]))
    files = tars(Path(place))
    if not files and not expanded(split_options(place)[0]).exists():
        raise DataError(f"{where}: {place} holds no tar: give tars, or another data set.")
    texts = entry.get("texts", list(TEXTS))
    split, images = entry.get("split"), entry.get("images")
    if images is not None and not (isinstance(images, str) and images):
        raise DataError(f'{where}: "images" is {images!r}: give a name that such corpora share.')
    return Corpus(
        name=str(entry.get("name", entry["path"])),
        place=place,
        files=tuple(files),
        weight=float(weight),
        texts=(texts,) if isinstance(texts, str) else tuple(map(str, texts)),
        split=canonical_split(split) if isinstance(split, str) else None,
        images=images,
    )


def _report(path: Path, skipped: list[Problem], problems: Problems | None) -> None:
    """Tell a check every sample that was skipped; tell anyone else how many, and where to see which."""
    if isinstance(problems, AllProblems):
        for problem in skipped:
            problems.warn(problem.kind, problem.file, f"skipped: {problem.message}", problem.expected)
    elif skipped:
        kinds = ", ".join(f"{n} {kind}" for kind, n in Counter(problem.kind for problem in skipped).items())
        echo(
            f"{path}: {len(skipped)} samples were skipped ({kinds}): 'diptych data check {path}' lists them.",
            err=True,
        )
