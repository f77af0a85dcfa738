"""Searching with a model: queries become vectors, vectors hits; fusion, re-ranking, cut-off on top."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

import numpy as np

from diptych.errors import IndexFault, QueryError
from diptych.index.base import Index
from diptych.index.protocol import Hit, Hits, Item, Kind, Query, Term, Vectors, check_k, other_model
from diptych.index.query.cutoff import FEWEST_QUERIES, QUERIES, Background, Calibration, background, calibrate
from diptych.index.query.frames import one_per_video
from diptych.index.query.parse import parse_query
from diptych.index.query.readable import Readable
from diptych.index.scoring import rescore
from diptych.model.protocol import Model, pairs_of

if TYPE_CHECKING:
    from diptych.data.images import ImageLike
    from diptych.index.query.filters import Filter
    from diptych.index.query.words import Tokenizer

DEEPER = 4  # times as many items are asked for when those found are frames of too few videos
DEPTH = 100  # candidates of each ranking that are fused or re-ranked, at least
MAX_DOWNLOAD = 20_000_000  # bytes of an image fetched from an address
SAMPLE = 4096  # items whose scores are a query's background


class HitScorer(Protocol):
    """Scores a query against items by looking at both sides together: what re-ranks the best hits."""

    def __call__(self, query: Query, items: Sequence[Item], files: Sequence[Path | None]) -> Sequence[float]:
        """One score per item, higher is better."""


class Searcher:
    """An index and the model it was made with.

    ``pair_scorer`` re-ranks when a search asks for it; without it, the model's own where it has one
    (which computes local features from the files of the hits). ``allow_urls`` lets a query name images
    by address.

    Example::

        with Searcher.open("photos.index") as searcher:
            hits = searcher.search("two parrots", k=5, filter="year > 2020")
            alike = searcher.more_like(hits[0].item.id)
    """

    def __init__(
        self,
        index: Index,
        model: Model,
        *,
        model_name: str = "",
        pair_scorer: HitScorer | None = None,
        allow_urls: bool = False,
    ) -> None:
        info, fingerprint = index.info, model.fingerprint()
        if info.fingerprint != fingerprint:
            raise other_model(info.path, (info.model, info.fingerprint), (model_name, fingerprint))
        self.index, self.model, self._place = index, model, info.path
        self.pair_scorer: HitScorer | None = pair_scorer or _own_scorer(model)
        self.allow_urls = allow_urls
        # whether the model was trained here, perhaps on captions of this collection; its folder may be private
        self._is_run = bool(info.model) and os.path.isfile(Path(info.model) / "run.json")
        self._readable = Readable(model)
        self._calibrations: dict[int, Calibration | None] = {}  # of the state of the index with that number

    @classmethod
    def open(
        cls,
        place: str | Path,
        model: str | Path | None = None,
        device: str = "auto",
        allow_urls: bool = False,
        compute_precision: str = "no",
    ) -> Self:
        """The index at a place with the model that it records, or with ``model``; close it, or use ``with``.

        A folder of pictures is indexed first, into the folder beside it whose name ends in ``.index``.
        """
        from diptych.index.places import open_place

        found = open_place(place, model, device, compute_precision)
        try:
            return cls(found.opened, found.model, model_name=found.name, allow_urls=allow_urls)
        except BaseException:
            found.opened.close()
            raise

    def close(self) -> None:
        """Close the index."""
        self.index.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def search(
        self,
        query: str | Query | ImageLike,
        k: int = 10,
        *,
        kind: Kind | None = "image",
        filter: str | Filter | None = None,
        hybrid: bool = False,
        rerank: int = 0,
        chance: float | Literal["calibrated"] | None = "calibrated",
        exact: bool | None = None,
        frames: bool = False,
    ) -> Hits:
        """The k best items of a kind for a query expression, a query, or an image.

        ``hybrid`` fuses the ranking with that of BM25 over the texts. ``rerank`` is how many of the best hits
        the pair scorer orders again. ``chance`` sets the cut-off (see ``cutoff``): "calibrated" takes the one that
        captions of the collection draw, and none where it would be wrong too often; None leaves it out. An item that
        the query itself names is not among its answers. Of a video the best frame stands for all; with ``frames``
        each frame is an answer.
        """
        check_k(k)
        asked = as_query(query)
        if all(term.weight < 0 for term in asked.terms):
            raise QueryError("every term of the query has a minus: add what to look for.", 0)
        if rerank and self.pair_scorer is None:
            raise QueryError("this model has no pair scorer to re-rank with: leave re-ranking out.")
        vector = self.encode(asked)
        if len(self.index) == 0:
            raise IndexFault(f"{self.index.info.path} is empty: add a collection with 'diptych index' first.")
        named = {str(term.value) for term in asked.terms if term.kind == "item"}
        depth = max(k, rerank, DEPTH if hybrid else 0) + len(named)
        hits = self._nearest(vector, depth, frames, kind=kind, filter=filter, exact=exact)
        ranked = list(hits)
        if hybrid:
            ranked = self._fused(vector, asked, ranked, depth, kind=kind, filter=filter)
        ranked = [hit for hit in ranked if hit.item.id not in named]
        ranked = ranked if frames else one_per_video(ranked)
        if hybrid:
            ranked = self._with_words(asked.text, ranked[: max(k, rerank)])
        if rerank:
            ranked = self._reranked(asked, ranked, rerank)
        found = Hits(
            tuple(ranked[:k]),
            hits.exact,
            warning=self._readable.warning(asked),
            preview=partial(_preview, self._place),
        )
        return found if chance is None else self._with_cutoff(found, vector, kind, chance)

    def more_like(
        self, id: str, k: int = 10, *, kind: Kind | None = "image", filter: str | Filter | None = None
    ) -> Hits:
        """The items nearest to one that is in the index, without itself."""
        return self.search(Query((Term(id, "item"),)), k, kind=kind, filter=filter, chance=None)

    def encode(self, query: Query) -> Vectors:
        """The vector (dimension,) of a query: unit(Σ weight · unit(encode(term)))."""
        terms = dict(enumerate(query.terms))
        texts = {n: str(term.value) for n, term in terms.items() if term.kind == "text"}
        images = {n: self._picture(term) for n, term in terms.items() if term.kind in ("image", "url")}
        found = {n: self.index.vectors([str(t.value)])[0] for n, t in terms.items() if t.kind == "item"}
        if texts:
            found |= zip(texts, self.model.encode_text(list(texts.values())), strict=True)
        if images:
            found |= zip(images, self.model.encode_image(list(images.values())), strict=True)
        total = sum(term.weight * _unit(found[n]) for n, term in terms.items())
        length = float(np.linalg.norm(total))
        if length < 1e-6:
            raise QueryError("the terms of the query cancel each other out: nothing is left to look for.")
        return np.asarray(total / length, np.float32)

    def background(self, vector: Vectors, kind: Kind | None = "image") -> Background | None:
        """The distribution of a query's scores over the collection; None when the collection is too small."""
        return background(self.index.sample(kind) @ vector, self.index.count(kind))

    def _nearest(self, vector: Vectors, depth: int, frames: bool, **asked: Any) -> Hits:
        """The nearest items: enough that ``depth`` are left when each video counts once."""
        wanted = depth
        while True:
            hits = self.index.search(vector, wanted, **asked)
            if frames or len(hits) < wanted or len(one_per_video(hits)) >= depth:
                return hits
            wanted *= DEEPER

    def calibration(self) -> Calibration | None:
        """What captions in the index say of the cut-off for images; None where there are too few of them.

        Captions of the splits val and test are preferred: the model may have been trained on the others. For a
        run, only they count.
        """
        state = self.index.generation
        if state not in self._calibrations:
            self._calibrations = {state: self._calibrated()}
        return self._calibrations[state]

    def _calibrated(self) -> Calibration | None:
        if self.index.count("text") < FEWEST_QUERIES:
            return None
        held: str | None = 'split in ("val", "test")' if "split" in self.index.info.columns else None
        texts = self.index.sample_items("text", held, QUERIES) if held else []
        if len(texts) < FEWEST_QUERIES:
            if self._is_run:
                return None
            held, texts = None, self.index.sample_items("text", None, QUERIES)
        queries = self.index.sample("text", held, QUERIES)
        pictures = self.index.sample_items("image", None, SAMPLE)
        rows: dict[str, list[int]] = {}
        for row, item in enumerate(pictures):
            rows.setdefault(item.id, []).append(row)
        # the picture of a caption may not be in the sample: it is added
        missing = list(dict.fromkeys(text.image_id for text in texts if text.image_id not in rows))
        found = self._present_vectors([id for id in missing if id])
        for id in found:
            rows[id] = [len(rows)]
        items = np.concatenate([self.index.sample("image", None, SAMPLE), *(v[None] for v in found.values())])
        kept = [n for n, text in enumerate(texts) if text.image_id in rows]
        return calibrate(queries[kept], [rows[texts[n].image_id] for n in kept], items)

    def _with_cutoff(
        self, hits: Hits, vector: Vectors, kind: Kind | None, chance: float | Literal["calibrated"]
    ) -> Hits:
        # over the whole collection, not what a filter left: the few items of a narrow filter may all match
        found = self.background(vector, kind)
        if found is None or not hits:
            return hits
        strength = found.strength(max(hit.details.get("similarity", hit.score) for hit in hits))
        if chance != "calibrated":
            return replace(hits, cutoff=found.cutoff(chance), strength=strength)
        if kind != "image":
            return replace(hits, note="no cut-off: it is measured for images that answer a text")
        calibration = self.calibration()
        if calibration is None:
            unseen = " of the splits val and test" if self._is_run else ""
            return replace(
                hits, note=f"no cut-off: fewer than {FEWEST_QUERIES} captions{unseen} to measure it with"
            )
        if not calibration.usable:
            return replace(hits, note=f"no cut-off: it would be wrong too often ({calibration})")
        return replace(
            hits, cutoff=found.calibrated(calibration), strength=strength, note=f"cut-off: {calibration}"
        )

    def _fused(self, vector: Vectors, query: Query, ranked: list[Hit], depth: int, **asked: Any) -> list[Hit]:
        from diptych.index.query.words import fuse

        words = self.index.search_words(query.text, depth, **asked)
        similar = {hit.item.id: hit for hit in ranked}
        lexical = {hit.item.id: hit for hit in words}
        only = [id for id in lexical if id not in similar]
        scores = {id: hit.score for id, hit in similar.items()}
        if only:
            rows = self._present_vectors(only)
            lexical = {id: hit for id, hit in lexical.items() if id in scores or id in rows}
            if rows:
                scores |= dict(
                    zip(rows, rescore(np.stack(list(rows.values())), vector).tolist(), strict=True)
                )
        fused = fuse([list(similar), list(lexical)])
        out = []
        for id in sorted(fused, key=lambda id: (-fused[id], -scores[id], id)):
            details = {"similarity": scores[id]}
            if id in lexical:
                details["bm25"] = lexical[id].score
            out.append(Hit((similar.get(id) or lexical[id]).item, fused[id], details))
        return out

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        from diptych.index.query.words import Tokenizer

        return Tokenizer()

    def _with_words(self, text: str, hits: list[Hit]) -> list[Hit]:
        """With the share of the query's words that each hit of BM25 has: stemmed and without accents, as there."""
        wanted = self._tokenizer.query(text).keys()
        held = self._tokenizer.words([hit.item.text for hit in hits])
        return [
            replace(hit, details={**hit.details, "words": len(wanted & words.keys()) / len(wanted)})
            if "bm25" in hit.details
            else hit
            for hit, words in zip(hits, held, strict=True)
        ]

    def _present_vectors(self, ids: Sequence[str]) -> dict[str, Vectors]:
        """Vectors of those ids that are still there: items found a moment ago may be deleted since."""
        while ids:
            try:
                return dict(zip(ids, self.index.vectors(ids), strict=True))
            except QueryError:
                there = [id for id, item in zip(ids, self.index.get(ids), strict=True) if item is not None]
                if len(there) == len(ids):
                    raise
                ids = there
        return {}

    def _reranked(self, query: Query, ranked: list[Hit], depth: int) -> list[Hit]:
        assert self.pair_scorer is not None
        head, tail = ranked[:depth], ranked[depth:]
        items = [hit.item for hit in head]
        scores = self.pair_scorer(query, items, [self.index.file(item) for item in items])
        pairs = sorted(zip(scores, head, strict=True), key=lambda pair: -pair[0])
        return [
            Hit(hit.item, float(score), {"similarity": hit.score, **hit.details, "pair": float(score)})
            for score, hit in pairs
        ] + tail

    def _picture(self, term: Term) -> Any:
        if term.kind == "image":
            from diptych.data.images import as_item

            return as_item(term.value)
        if not self.allow_urls:
            raise QueryError(
                f"{term.value} is a web address: download the image and give its path, or allow addresses "
                "(--allow_urls)."
            )
        from diptych.addresses import PATIENCE, download
        from diptych.data.decode.opening import open_image

        address = str(term.value)
        data = download(address, MAX_DOWNLOAD, time.monotonic() + PATIENCE)
        return open_image(data, name=address)


def _own_scorer(model: Model) -> HitScorer | None:
    found: HitScorer | None = getattr(model, "pair_scorer", None)
    if found is None and pairs_of(model) is not None:
        from diptych.index.query.reranking import Reranker

        return Reranker([model])
    return found


def _preview(place: str, item: Item) -> bytes | None:
    from diptych.index.places import preview

    return preview(place, item)


def as_query(query: str | Query | ImageLike) -> Query:
    """A query from an expression, or from one image (a ``Path``, a picture, an array)."""
    if isinstance(query, Query):
        return query
    return parse_query(query) if isinstance(query, str) else Query((Term(query, "image"),))


def _unit(vector: Vectors) -> Vectors:
    return np.asarray(vector / max(float(np.linalg.norm(vector)), 1e-12), np.float32)


def search(
    place: str | Path,
    query: str | Query | ImageLike,
    k: int = 10,
    *,
    filter: str | Filter | None = None,
    kind: Kind | None = "image",
    hybrid: bool = False,
    rerank: int = 0,
    model: str | Path | None = None,
    device: str = "auto",
) -> Hits:
    """The k best items of an index, or of a folder of pictures, for words, a picture, or an expression of both.

    A folder is indexed first, as by ``index_folder``. ``filter`` is a condition on metadata, ``kind`` is "image",
    "text" or None for both; ``hybrid`` adds BM25 over the texts, ``rerank`` re-ranks the top N hits with the model's
    pair scorer. ``model`` replaces the model that the index records. A string is an expression, in which ``./a.jpg``
    is a picture; a ``Path``, a picture or an array is one picture. For several queries, open a ``Searcher`` once.

    Example::

        hits = diptych.search("photos.index", "two parrots", k=5)
        print(hits[0].item.id, hits[0].score)
    """
    with Searcher.open(place, model, device) as searcher:
        return searcher.search(query, k, kind=kind, filter=filter, hybrid=hybrid, rerank=rerank)
