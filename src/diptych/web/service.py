"""What the routes do: an index, its model and the limits, behind methods that know nothing of HTTP."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from fastapi import UploadFile
from PIL import Image

from diptych import addresses
from diptych.data.decode.opening import make_thumbnail
from diptych.errors import DataError, DiptychError, QueryError, SettingsError, Unavailable
from diptych.index import deadline
from diptych.index.base import Index
from diptych.index.protocol import KINDS, Hit, Hits, Item, Kind, Query, Term, Vectors
from diptych.index.query.frames import one_per_video
from diptych.index.query.parse import parse_query
from diptych.index.query.search import HitScorer, Searcher
from diptych.model.protocol import Model
from diptych.web.batching import BatchedIndex, BatchedModel, Traffic
from diptych.web.limits import Limits
from diptych.web.monitoring import Metrics
from diptych.web.replies import ImageSearchRequest, SearchRequest
from diptych.web.uploads import Pictures

# the collection of items that came through the service: no re-index of a folder removes them
UPLOADS = "uploads"
PIXELS = 16_000_000  # decoded pixels that one request holds at once
VALUES = 50  # largest number of values of a column that the page offers
COLUMNS = 100  # largest number of columns whose values the page offers
COUNTING = 3.0  # seconds to count them: a page that waits longer shows the rest without
STOPPING = 0.5  # seconds that work which is told to stop has to notice
TURN = 10.0  # seconds a change waits for those before it
_ADDRESS = re.compile(r"https?://", re.IGNORECASE)

Writer = Callable[[], AbstractContextManager[Index]]
"""Opens the index for one change: the service reads all the time, but holds the writer's lock only then."""


@dataclass(frozen=True, slots=True)
class NewItem:
    """An item to add; with ``image``, the name of an uploaded file, it is an image, otherwise a text."""

    id: str
    text: str = ""
    image: str = ""
    image_id: str = ""
    metadata: dict[str, Any] | None = None


class Service:
    """Everything a running service holds; safe to share between threads.

    ``roots`` are the folders that files may be served from; without it, those that this person indexed on this machine.
    ``writer`` opens the index for a change; without it, ``index`` itself is used. ``chance`` sets the cut-off of a
    search; without it, captions of the collection do, where they can.
    """

    def __init__(
        self,
        index: Index,
        model: Model,
        *,
        limits: Limits,
        roots: Sequence[str | Path] | None = None,
        allow_urls: bool = False,
        writer: Writer | None = None,
        model_name: str = "",
        pair_scorer: HitScorer | None = None,
        chance: float | None = None,
    ) -> None:
        self.index, self.limits, self.allow_urls = index, limits, allow_urls
        self.chance: float | Literal["calibrated"] = chance or "calibrated"
        self.metrics, self.traffic = Metrics(), Traffic()
        self.pictures = Pictures(index, limits, roots)
        self._writer: Writer = writer or (lambda: nullcontext(index))
        self._writing = threading.Lock()
        self._stopped = threading.Event()
        self._model = BatchedModel(model, self.traffic, self.metrics.encode_batch.observe)
        self._batched = BatchedIndex(index, self.traffic, self.metrics.search_batch.observe)
        self._values: tuple[int, dict[str, list[Any]]] | None = None
        try:
            self._searcher = Searcher(
                cast(Index, self._batched), cast(Model, self._model), model_name=model_name, pair_scorer=pair_scorer,
            )  # fmt: skip
        except BaseException:
            self.close()
            raise
        self.rerank = self._searcher.pair_scorer is not None
        threading.Thread(target=self._warm, name="warming", daemon=True).start()

    @contextmanager
    def limited(self, times: int = 1) -> Iterator[None]:
        """Give what runs inside the seconds that a request has; none of it goes on once the service stops."""
        with deadline.within(times * self.limits.seconds, self._stopped):
            yield

    @property
    def backend(self) -> str:
        return str(getattr(self._model, "backend", "torch"))

    def _warm(self) -> None:
        """Compare the vectors with their checksums before somebody waits for it; what is damaged is told to them."""
        warm = getattr(self.index, "warm", None)  # only the embedded engine compares them itself
        if warm is not None:
            with suppress(DiptychError), deadline.within(float("inf"), self._stopped):
                warm()

    def search(self, request: SearchRequest) -> Hits:
        """The best items for what was asked."""
        self._check(request)
        kind = check_kind(request.kind)
        images = request.images if isinstance(request, ImageSearchRequest) else []
        query = Query(self._terms(request, images))
        filter = request.filter.strip() or None
        # more like an item: what is nearest, without asking whether it is near
        alone = all(term.kind == "item" for term in query.terms)
        return self._searcher.search(
            query, request.k, kind=kind, filter=filter, hybrid=request.hybrid, rerank=request.rerank,
            chance=None if alone else self.chance, frames=request.frames,
        )  # fmt: skip

    def count_passing(self, kind: str, filter: str) -> int | None:
        """How many items of a kind pass a filter; None where there is no filter."""
        return self.index.count(check_kind(kind), filter) if filter.strip() else None

    def browse(self, k: int, kind: str, filter: str) -> Hits:
        """Items spread evenly over the collection, for a page without a query; their scores mean nothing.

        Of each video one frame is shown.
        """
        self._check(SearchRequest(k=k, filter=filter))
        items = self.index.sample_items(check_kind(kind), filter.strip() or None, k)
        return Hits(tuple(one_per_video(Hit(item, 0.0) for item in items)))

    def add(self, new: Sequence[NewItem], uploads: dict[str, bytes]) -> int:
        """Add items, replacing those whose id is present; how many."""
        if not 0 < len(new) <= self.limits.items:
            raise SettingsError(f"give 1 to {self.limits.items} items at a time, not {len(new)}.")
        for item in new:
            check_text(item.id, self.limits.query, "the id")
            check_text(item.text, self.limits.text, f"the text of '{item.id}'")
            if not item.image and not item.text.strip():
                raise DataError(f"item '{item.id}' has neither an image nor a text: give one of them.")
            self._check_metadata(item)
            if item.image and item.image not in uploads:
                raise DataError(
                    f"item '{item.id}' names the image '{item.image}', which was not uploaded: send it too."
                )
        # several items may show one file: it is decoded and encoded once
        images, thumbnails = self._encode_uploads(
            dict.fromkeys(item.image for item in new if item.image), uploads
        )
        texts = [item.text for item in new if not item.image]
        encoded = iter(self._model.encode_text(texts) if texts else ())
        rows = np.stack([images[i.image] if i.image else next(encoded) for i in new])
        with self._changing() as index:
            where = index.collection(UPLOADS).number
            items = [
                Item(
                    id=item.id,
                    kind="image" if item.image else "text",
                    text=item.text,
                    image_id=item.image_id,
                    metadata=item.metadata or {},
                    collection=where,
                    thumbnail=thumbnails.get(item.image),
                )
                for item in new
            ]
            index.update(items, rows)
        return len(items)

    def _encode_uploads(
        self, names: Iterable[str], uploads: dict[str, bytes]
    ) -> tuple[dict[str, Vectors], dict[str, bytes]]:
        """Vectors and thumbnails of uploaded files, by name; a limited number of decoded files is in memory at once."""
        vectors: dict[str, Vectors] = {}
        thumbnails: dict[str, bytes] = {}
        waiting: dict[str, Image.Image] = {}

        def encode() -> None:
            rows = self._model.encode_image(list(waiting.values())) if waiting else ()
            vectors.update(zip(waiting, rows, strict=True))
            waiting.clear()

        for name in names:
            waiting[name] = self.pictures.open_upload(uploads[name], name)
            thumbnails[name] = make_thumbnail(waiting[name])
            if sum(picture.width * picture.height for picture in waiting.values()) >= PIXELS:
                encode()
        encode()
        return vectors, thumbnails

    def items(self, ids: Sequence[str]) -> list[Item | None]:
        self._check_ids(ids)
        return self.index.get(ids)

    def delete(self, ids: Sequence[str]) -> int:
        self._check_ids(ids)
        with self._changing() as index:
            return index.delete(ids)

    def words(self) -> bool:
        """Whether some item has a text: without one, there are no words to match."""
        if self.index.count("text"):
            return True
        with suppress(Unavailable), deadline.within(COUNTING, self._stopped):
            return bool(self.index.sample_items("image", "text is not null", 1))
        return True

    def values(self) -> dict[str, list[Any]]:
        """The common values of each column of texts or booleans, most frequent first."""
        generation = self.index.generation
        known = self._values
        if known is None or known[0] != generation:
            columns = [c for c, kinds in self.index.info.columns.items() if set(kinds) & {"text", "boolean"}]
            found: dict[str, list[Any]] = {c: [] for c in columns[:COLUMNS]}
            with suppress(Unavailable), deadline.within(COUNTING, self._stopped):
                for c in found:
                    found[c] = [value for value, _ in self.index.values(c, VALUES)]
            self._values = known = (generation, {c: values for c, values in found.items() if values})
        return known[1]

    def close(self) -> None:
        """Stop, and whatever is still being answered with it; the index stays open."""
        self._stopped.set()
        self._model.close(STOPPING)
        self._batched.close(STOPPING)
        self.pictures.close()

    @contextmanager
    def _changing(self) -> Iterator[Index]:
        """The index, open for a change, one at a time; threads that wait in vain would be missing to searches."""
        if not self._writing.acquire(timeout=TURN):
            raise Unavailable(f"other changes have taken more than {TURN} seconds: try again in a moment.")
        try:
            with self._writer() as index:
                yield index
        finally:
            self._writing.release()

    def _check(self, request: SearchRequest) -> None:
        if not 1 <= request.k <= self.limits.k:
            raise SettingsError(f"k must lie between 1 and {self.limits.k}, not {request.k}.")
        if not 0 <= request.rerank <= self.limits.k:
            raise SettingsError(f"rerank must lie between 0 and {self.limits.k}, not {request.rerank}.")
        if not 0.01 <= abs(request.image_weight) <= 100:
            raise SettingsError(
                f"image_weight must lie between 0.01 and 100 either side of 0, not {request.image_weight}."
            )
        for value, limit, what in (
            (request.text, self.limits.query, "the text"),
            (request.query, self.limits.query, "the query"),
            (request.like, self.limits.query, "the id"),
            (request.filter, self.limits.filter, "the filter"),
        ):
            check_text(value, limit, what)

    def _check_images(self, count: int) -> None:
        if count > self.limits.images:
            raise SettingsError(
                f"the query has {count} images, the limit is {self.limits.images}: leave some out."
            )

    def _check_metadata(self, item: NewItem) -> None:
        columns = item.metadata or {}
        if len(columns) > self.limits.columns:
            raise DataError(
                f"item '{item.id[:100]}' has {len(columns)} columns of metadata, the limit is {self.limits.columns}: "
                "send fewer."
            )
        size = sum(len(name) + _size(value) for name, value in columns.items())
        if size > self.limits.metadata:
            raise DataError(
                f"the metadata of '{item.id[:100]}' has {size} characters, the limit is {self.limits.metadata}: "
                "send less."
            )

    def _check_ids(self, ids: Sequence[str]) -> None:
        if not 0 < len(ids) <= self.limits.items:
            raise SettingsError(f"give 1 to {self.limits.items} ids at a time, not {len(ids)}.")
        for id in ids:
            check_text(id, self.limits.query, "the id")

    def _terms(self, request: SearchRequest, images: Sequence[UploadFile]) -> tuple[Term, ...]:
        self._check_images(len(images))
        terms: list[Term] = []
        if request.text.strip():
            terms.append(Term(request.text.strip()))
        if request.query.strip():
            parsed = parse_query(request.query, paths=False).terms
            if self.allow_urls:
                self._check_images(len(images) + sum(_is_address(term) for term in parsed))
            until = time.monotonic() + addresses.PATIENCE
            terms += [self._safe(term, until) for term in parsed]
        for one in images:
            picture = self.pictures.open_upload(one.file.read(), one.filename)
            terms.append(Term(picture, "image", request.image_weight))
        if request.like:
            if self.index.get([request.like]) == [None]:
                raise QueryError(f"'{request.like[:200]}' is not in the index: it may have been removed.")
            terms.append(Term(request.like, "item", request.image_weight))
        if not terms:
            raise QueryError("the query is empty: give a text, an image, or the id of an item.")
        return tuple(terms)

    def _safe(self, term: Term, until: float) -> Term:
        """A term that names no file of this machine and, unless that is allowed, nothing on the web."""
        if term.kind == "text" and not _is_address(term):
            return term
        if term.kind == "image":
            raise QueryError("a query here cannot name a file: upload the image.")
        if not self.allow_urls:
            raise QueryError(
                f"{str(term.value)[:200]} is a web address, which is not fetched: upload the image."
            )
        return Term(self.pictures.open_address(str(term.value), until), "image", term.weight)


def _is_address(term: Term) -> bool:
    return term.kind == "url" or (term.kind == "text" and _ADDRESS.match(str(term.value)) is not None)


def parse_items(text: str) -> list[NewItem]:
    """The items of a request to add some: a JSON list of objects."""
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"items is not JSON ({error}): send a list of objects with an id.") from error
    if isinstance(rows, dict):
        rows = [rows]
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError("items must be a JSON list of objects with an id.")
    return [_new_item(row) for row in rows]


def check_kind(kind: str) -> Kind | None:
    """The kind a client named; 'any' is all of them."""
    if kind not in (*KINDS, "any"):
        raise QueryError(f"kind is '{kind[:40]}': choose image, text or any.")
    return None if kind == "any" else cast(Kind, kind)


def _new_item(row: dict[str, Any]) -> NewItem:
    known = ("id", "text", "image", "image_id", "metadata")
    for name in row:
        if name not in known:
            raise DataError(f"an item has the field '{name[:40]}': the fields are {', '.join(known)}.")
    for name in known[:4]:
        if not isinstance(row.get(name, ""), str):
            plain = isinstance(row[name], int | float | None)
            shown = json.dumps(row[name])[:60] if plain else "a list or object"
            raise DataError(f"the field {name} of an item must be a text, not {shown}.")
    if not row.get("id"):
        raise DataError("an item has no id: give each a unique name.")
    metadata = row.get("metadata", {})
    if not isinstance(metadata, dict):
        raise DataError(f"the metadata of '{row['id'][:100]}' must be an object of columns and values.")
    return NewItem(row["id"], row.get("text", ""), row.get("image", ""), row.get("image_id", ""), metadata)


def _size(value: Any) -> int:
    """About how many characters a value takes; what is nested deeper than a list is refused elsewhere."""
    if isinstance(value, list):
        return sum(_size(one) if not isinstance(one, list | dict) else 1 for one in value) + 2 * len(value)
    if isinstance(value, str):
        return len(value)
    return 300 if isinstance(value, int) and abs(value) > 1 << 64 else 20


def check_text(text: str, limit: int, what: str) -> None:
    """Raise for a text that is too long or that no database holds."""
    if len(text) > limit:
        raise QueryError(f"{what} has {len(text)} characters, the limit is {limit}: shorten it.")
    bad = next((n for n, c in enumerate(text) if c == "\x00" or "\ud800" <= c <= "\udfff"), None)
    if bad is not None:
        raise QueryError(f"{what} holds a character that is not text at {bad + 1}: remove it.", bad)
