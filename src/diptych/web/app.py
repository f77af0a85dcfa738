"""The HTTP API and the page, over an index and the model it was made with."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path, PurePath
from typing import Annotated, Any

from fastapi import FastAPI, File, Form, Query, Response, UploadFile
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, PlainTextResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

import diptych
from diptych.errors import DiptychError
from diptych.index.base import Index
from diptych.model.protocol import Model
from diptych.web.bodies import PAGE, REFERENCE, Access, BodyLimit, form_route
from diptych.web.limits import Limits, Turns
from diptych.web.monitoring import CountRequests
from diptych.web.reference import reference_page
from diptych.web.replies import (
    Failure,
    ImageSearchRequest,
    PlacedReply,
    SearchReply,
    SearchRequest,
    SentFile,
    add_handlers,
    failure,
    item_reply,
    search_reply,
)
from diptych.web.service import Service, check_text, parse_items
from diptych.web.uploads import Served

FILES = Path(__file__).parent
UPLOADING, CHANGING, SHOWING, DESCRIBING, WATCHING = 4, 2, 8, 2, 4  # threads for each sort of request
ADDING = 30  # times the seconds of a request: it may encode hundreds of images
WAITING = 32  # requests of a sort that may wait for one
DESCRIPTION = (
    "Search a collection of images and texts with the model it was indexed with. Every refusal is one "
    'sentence: `{"error": "…"}`. Ids travel as query parameters, since they may hold any character.'
)
REFUSALS: dict[int | str, dict[str, Any]] = {
    code: {"model": Failure} for code in (400, 401, 403, 404, 408, 409, 413, 414, 421, 422, 500, 503, 507)
}


class Added(BaseModel):
    """What a change did."""

    added: int


class Deleted(BaseModel):
    """What a change did."""

    deleted: int


class Health(BaseModel):
    """That the index can be read, and what is in it."""

    status: str = "ok"
    version: str
    engine: str
    model: str
    images: int
    texts: int


class About(Health):
    """What the page needs to know."""

    columns: dict[str, list[str]] = Field(description="metadata columns and the kinds of value each holds")
    values: dict[str, list[Any]] = Field(description="common values of the columns of texts and booleans")
    recall: dict[str, dict[str, Any]] = Field(
        description="of approximate indexes, as measured when they were built"
    )
    words: bool = Field(description="whether an item has a text, which hybrid searches")
    backend: str = Field(description="what runs the model: torch or onnx")
    writable: bool
    rerank: bool
    limits: dict[str, int]


def create_app(
    index: Index,
    model: Model,
    *,
    token: str | None = None,
    private: bool = False,
    limits: Limits | None = None,
    hosts: Sequence[str] | None = None,
    origins: Sequence[str] = (),
    local: bool = False,
    audit: tuple[bytes, str] | None = None,
    **options: Any,
) -> FastAPI:
    """The service as an ASGI application; the index stays the caller's to close.

    ``token`` is needed for changes (none are taken without one) and, when ``private``, for everything but the
    page's own files. ``hosts`` are the host names it answers to (None: any), ``origins`` the sites that may call it
    from a browser (CORS). ``local`` says that clients are people of this machine: only they are told where a file lies.
    ``audit`` is a page to judge pairs and its security policy, shown at ``/audit``. ``options`` are those of
    ``Service``.
    """
    limits = limits or Limits()
    service = Service(index, model, limits=limits, **options)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(
        title="Diptych", version=diptych.__version__, description=DESCRIPTION, lifespan=lifespan,
        docs_url=None, redoc_url=None, responses=REFUSALS,
    )  # fmt: skip
    app.state.service = service
    app.router.route_class = form_route(limits)
    _add_routes(app, service, local, token is not None, audit)
    # the last one added sees a request first
    app.add_middleware(BodyLimit, limits=limits)
    app.add_middleware(
        Access, token=token, private=private, hosts=None if hosts is None else tuple(hosts),
        origins=tuple(origins),
    )  # fmt: skip
    if origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(origins), allow_methods=["*"], allow_headers=["Authorization"]
        )
    known = frozenset(str(getattr(route, "path", "")) for route in app.routes)
    app.add_middleware(CountRequests, metrics=service.metrics, known=known)
    return app


def _add_routes(
    app: FastAPI, service: Service, local: bool, writable: bool, audit: tuple[bytes, str] | None
) -> None:
    add_handlers(app)
    _add_page(app, audit)
    _add_search(app, service)
    _add_items(app, service, local)
    _add_pictures(app, service)
    _add_state(app, service, writable)


def _add_page(app: FastAPI, audit: tuple[bytes, str] | None) -> None:
    for path, (name, media_type) in PAGE.items():
        content, headers = (FILES / name).read_bytes(), {"Cache-Control": "no-cache"}
        _add_document(app, path, partial(Response, content, media_type=media_type, headers=headers))
    _add_document(app, REFERENCE, lambda: HTMLResponse(reference_page(app.openapi())))
    if audit is not None:
        policy = {"Content-Security-Policy": audit[1]}
        _add_document(app, "/audit", partial(HTMLResponse, audit[0], headers=policy))


def _add_document(app: FastAPI, path: str, make: Callable[[], Response]) -> None:
    async def document() -> Response:
        return make()

    app.add_api_route(path, document, include_in_schema=False)


def _answer(service: Service, search: SearchRequest) -> SearchReply:
    start = time.perf_counter()
    with service.traffic.request(), service.limited():
        hits, passing = service.search(search), service.count_passing(search.kind, search.filter)
    seconds = time.perf_counter() - start
    service.metrics.search_seconds.observe(seconds)
    return search_reply(hits, seconds, passing)


def _add_search(app: FastAPI, service: Service) -> None:
    @app.get("/api/search", tags=["search"], summary="Search by text, expression or item")
    def search(request: Annotated[SearchRequest, Query()]) -> SearchReply:
        """Terms given together are mixed; the ranking is that of their sum."""
        return _answer(service, request)

    @app.post("/api/search", tags=["search"], summary="Search with uploaded images, alone or mixed with text")
    @Turns(UPLOADING, WAITING)
    def search_with_images(request: Annotated[ImageSearchRequest, File()]) -> SearchReply:
        """The same as GET, with files. Nothing that is uploaded is kept."""
        return _answer(service, request)

    @app.get("/api/browse", tags=["search"], summary="Items spread over the collection, without a query")
    def browse(k: int = 24, kind: str = "image", filter: str = "") -> SearchReply:
        """A look at the collection, or at what a filter leaves of it. Scores are 0."""
        start = time.perf_counter()
        with service.limited():
            hits, passing = service.browse(k, kind, filter), service.count_passing(kind, filter)
        return search_reply(hits, time.perf_counter() - start, passing)


def _add_items(app: FastAPI, service: Service, local: bool) -> None:
    changing = Turns(CHANGING, WAITING)

    @app.get("/api/items", tags=["items"], summary="Items by id")
    def items(id: Annotated[list[str], Query(description="one or several")]) -> list[PlacedReply | None]:
        """null where there is none."""
        with service.limited():
            return [
                None if item is None else item_reply(item, service.pictures.file(item) if local else None)
                for item in service.items(id)
            ]

    @app.post("/api/items", tags=["items"], summary="Add or replace items")
    @changing
    def add(
        items: Annotated[str, Form(description='JSON: [{"id", "text", "image", "image_id", "metadata"}]')],
        images: Annotated[list[UploadFile], File(description="files that items name as image")] = [],  # noqa: B006
    ) -> Added:
        """An item that names an uploaded file is an image, any other a text; durable when answered."""
        uploads: dict[str, bytes] = {}
        for upload in images:
            name = upload.filename or ""
            if name in uploads:
                raise HTTPException(
                    400, f"two of the files are called '{name[:100]}': give each its own name."
                )
            uploads[name] = upload.file.read()
        with service.limited(ADDING):
            return Added(added=service.add(parse_items(items), uploads))

    @app.delete("/api/items", tags=["items"], summary="Remove items")
    @changing
    def delete(id: Annotated[list[str], Query(description="one or several")]) -> Deleted:
        """Texts of a removed image go with it."""
        with service.limited():
            return Deleted(deleted=service.delete(id))


def _add_pictures(app: FastAPI, service: Service) -> None:
    showing = Turns(SHOWING, 8 * WAITING)

    @app.get("/api/thumbnail", tags=["items"], summary="A small JPEG of an item", response_class=Response)
    @showing
    def thumbnail(id: str) -> Response:
        check_text(id, service.limits.query, "the id")
        with service.limited():
            return _picture(service.pictures.thumbnail(id), id)

    @app.get("/api/image", tags=["items"], summary="The picture of an item", response_class=Response)
    @showing
    def image(id: str) -> Response:
        """Its file where it lies below the indexed folder, its thumbnail otherwise."""
        check_text(id, service.limits.query, "the id")
        with service.limited():
            return _picture(service.pictures.image(id), id)

    @app.get(
        "/api/video", tags=["items"], summary="The video that an item is a frame of", response_class=Response
    )
    def video(id: str) -> Response:
        """Its file where it lies below the indexed folder; ranges are served, so that a player can seek."""
        check_text(id, service.limits.query, "the id")
        with service.limited():
            found = service.pictures.video(id)
        if found is None:
            return failure(404, f"there is no video of '{id[:200]}': check the id.")
        path, media_type = found
        return SentFile(
            path, headers={"Cache-Control": "private, max-age=600"}, media_type=media_type, filename=path.name,
            content_disposition_type="inline",
        )  # fmt: skip


def _add_state(app: FastAPI, service: Service, writable: bool) -> None:
    watching = Turns(WATCHING, WAITING)

    def health_of() -> dict[str, Any]:
        info = service.index.info
        return {
            "version": diptych.__version__,
            "engine": info.engine,
            "model": PurePath(info.model).name,  # where it lies is nobody's business
            "images": info.counts["image"],
            "texts": info.counts["text"],
        }

    @app.get("/api/health", tags=["state"], summary="Whether the index can be read")
    @watching
    def health() -> Health:
        with service.limited():
            return Health(**health_of())

    @app.get("/api/about", tags=["state"], summary="Columns, their common values, and limits")
    @Turns(DESCRIBING, WAITING)
    def about() -> About:
        with service.limited():
            info = service.index.info
            columns = {name: list(kinds) for name, kinds in info.columns.items()}
            recall = {kind: asdict(found) for kind, found in info.recall.items()}
            return About(
                **health_of(), columns=columns, recall=recall, values=service.values(), writable=writable,
                words=service.words(), backend=service.backend, rerank=service.rerank, limits=asdict(service.limits),
            )  # fmt: skip

    @app.get("/metrics", tags=["state"], summary="Counters for Prometheus", response_class=PlainTextResponse)
    @watching
    def metrics() -> PlainTextResponse:
        try:
            with service.limited():
                info = service.index.info
                counts, recall = info.counts, info.recall
        except DiptychError:  # a database that is away: what was counted here is wanted now of all times
            counts, recall = {}, {}
        text = service.metrics.render(counts, service.traffic.active, recall)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


def _picture(found: Served | None, id: str) -> Response:
    if found is None:
        return failure(404, f"there is no picture of '{id[:200]}': check the id.")
    headers = {"Cache-Control": "private, max-age=600", "Content-Disposition": "inline"}
    if isinstance(found.data, Path):  # sent a piece at a time: it may be of any size
        return SentFile(found.data, media_type=found.media_type, headers=headers)
    return Response(found.data, media_type=found.media_type, headers=headers)
