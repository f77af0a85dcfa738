"""One search: open the place, ask, close it."""

from __future__ import annotations

from pathlib import Path

from diptych.data.images import ImageLike
from diptych.index.protocol import Hits, Kind, Query
from diptych.index.query.filters import Filter
from diptych.index.query.search import Searcher


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
