"""What a search asks in its fields, and what the service answers: hits and items as JSON, failures as one sentence."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, UploadFile
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse
from starlette.types import Message, Receive, Scope, Send

from diptych.errors import (
    AddressError,
    DataError,
    DiptychError,
    IndexFault,
    QueryError,
    SettingsError,
    StorageError,
    Unavailable,
)
from diptych.index.protocol import Hits, Item
from diptych.index.query.frames import frame_of

RANGES = 8  # of a file, in one answer
STATUSES = (  # the first that fits
    (Unavailable, 503), (StorageError, 507), (IndexFault, 409), (AddressError, 400),
    ((QueryError, DataError, SettingsError), 422),
)  # fmt: skip


class SearchRequest(BaseModel):
    """A search as a client asks it."""

    model_config = ConfigDict(extra="forbid")
    text: str = Field(default="", description="plain text")
    query: str = Field(default="", description='an expression: "2:red shoe" - "sneaker"')
    like: str = Field(default="", description="the id of an item: more like this")
    image_weight: float = Field(
        default=1.0, description="weight of images and the item; below 0, away from them"
    )
    k: int = Field(default=24, description="hits wanted")
    kind: str = Field(default="image", description="image, text or any")
    filter: str = Field(default="", description='a filter: price < 50 and color = "red"')
    hybrid: bool = Field(default=False, description="fuse with full-text search")
    rerank: int = Field(default=0, description="re-rank this many of the top hits with the pair scorer")
    frames: bool = Field(default=False, description="every frame of a video, not the best of each")


class ImageSearchRequest(SearchRequest):
    """The same with uploaded images."""

    images: list[UploadFile] = Field(default=[], description="image files")


class Failure(BaseModel):
    """Why a request was refused."""

    error: str = Field(description="one sentence with its correction")
    position: int | None = Field(
        None, description="the character of the query or filter, from 0, where known"
    )


class ItemReply(BaseModel):
    """An image or text of the index."""

    id: str
    kind: str
    text: str = Field(description="the text itself, or the texts of an image, one a line")
    path: str = Field(description="relative to the folder it was indexed from; empty without a file")
    image_id: str = Field(description="the image a text belongs to")
    time: float | None = Field(description="of a frame: seconds into the video at path")
    metadata: dict[str, Any]


class PlacedReply(ItemReply):
    """An item, and where its file lies."""

    file: str = Field(description="told only to people of this machine; empty without a file")


class HitReply(ItemReply):
    """An item and how well it matches."""

    score: float
    details: dict[str, float] = Field(description="what a fused or re-ranked score was made of")
    matches: bool | None = Field(description="whether it reaches the cut-off of this query; null without one")


class SearchReply(BaseModel):
    """The best items, best first."""

    hits: list[HitReply]
    exact: bool = Field(description="whether every candidate was scored")
    matched: bool | None = Field(
        description="false when nothing in the collection matches the query; null without a cut-off"
    )
    cutoff: float | None = Field(description="the score below which an item does not match this query")
    strength: float | None = Field(description="the best score, in spreads above the collection's median")
    note: str = Field(description="how reliable the cut-off is, or why there is none")
    warning: str = Field(description="that the model may not know the words of the query; empty otherwise")
    passing: int | None = Field(description="items of this kind that pass the filter; null without one")
    seconds: float


def item_reply(item: Item, file: Path | None = None) -> PlacedReply:
    """An item as JSON, with the place of its file where that is told."""
    return PlacedReply(**_fields(item), file="" if file is None else str(file.absolute()))


def search_reply(hits: Hits, seconds: float, passing: int | None = None) -> SearchReply:
    """Hits as JSON; ``passing`` counts the items that pass the filter."""
    judged = hits.cutoff is not None
    passed = {hit.item.id for hit in hits.matches}
    answers = [
        HitReply(
            **_fields(hit.item), score=hit.score, details=dict(hit.details),
            matches=hit.item.id in passed if judged else None,
        )
        for hit in hits
    ]  # fmt: skip
    return SearchReply(
        hits=answers,
        exact=hits.exact,
        matched=hits.matched if judged else None,
        cutoff=hits.cutoff,
        strength=hits.strength,
        note=hits.note,
        warning=hits.warning,
        passing=passing,
        seconds=seconds,
    )


def failure(status: int, sentence: str, position: int | None = None) -> JSONResponse:
    """A refusal as JSON."""
    shown = sentence.encode(errors="backslashreplace").decode()  # it may quote half a surrogate pair
    content = {"error": shown} if position is None else {"error": shown, "position": position}
    headers = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "2"}}.get(status)
    return JSONResponse(content, status, headers)


class SentFile(FileResponse):
    """A file, or the part of it that a header ``Range`` asks for; a wrong one is refused like any other mistake."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wanted = Headers(scope=scope).get("range", "")
        if wanted.count(",") >= RANGES:
            answer = failure(416, f"the header asks for more than {RANGES} ranges: ask for fewer.")
            await answer(scope, receive, send)
            return
        refused = False

        async def send_unless_refused(message: Message) -> None:
            nonlocal refused
            if refused:
                return  # the text of starlette's own refusal
            refused = message["type"] == "http.response.start" and message["status"] in (400, 416)
            if refused:
                await _range_refusal(wanted, Headers(raw=message["headers"]))(scope, receive, send)
            else:
                await send(message)

        await super().__call__(scope, receive, send_unless_refused)


def _range_refusal(wanted: str, headers: Headers) -> JSONResponse:
    place = headers.get("content-range")  # of a range behind the end: bytes */SIZE
    if place is None:
        return failure(400, f"the range {wanted[:60]!a} is not one: write it as bytes=0-99.")
    size = place.rpartition("/")[2]
    sentence = f"the range {wanted[:60]!a} is outside the file, which has {size} bytes: ask for less."
    answer = failure(416, sentence)
    answer.headers["Content-Range"] = place
    return answer


async def refuse(scope: Scope, send: Send, status: int, sentence: str) -> None:
    """Answer before the body is read."""

    async def nothing() -> Any:
        return {"type": "http.disconnect"}

    await failure(status, sentence)(scope, nothing, send)


def add_handlers(app: FastAPI) -> None:
    """Turn every error into its status and sentence."""

    @app.exception_handler(DiptychError)
    async def expected(request: Request, error: DiptychError) -> JSONResponse:
        status = next((status for kind, status in STATUSES if isinstance(error, kind)), 500)
        return failure(status, str(error), getattr(error, "position", None))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        sentence = {
            404: f"there is nothing at {request.url.path[:200]}: see /docs for what there is.",
            405: f"{request.method} is not possible at {request.url.path[:200]}: see /docs.",
        }.get(
            error.status_code if error.detail in ("Not Found", "Method Not Allowed") else 0, str(error.detail)
        )
        return failure(error.status_code, sentence)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first: Mapping[str, Any] = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"][1:]) or "the request"
        given = first.get("input")
        given = json.dumps(given[:60] if isinstance(given, str) else str(given)[:60], ensure_ascii=False)
        value = f" (given {given[:60]})" if "input" in first and first["type"] != "missing" else ""
        if first["type"] == "extra_forbidden":
            return failure(
                422, f"there is no parameter '{name[:60]}': /docs lists those of {request.url.path}."
            )
        return failure(422, f"{name}: {first['msg']}{value}.")

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        return failure(500, "the service failed on this request; its log says why, and it keeps running.")


def _fields(item: Item) -> dict[str, Any]:
    frame = frame_of(item)
    return {
        "id": item.id,
        "kind": item.kind,
        "text": item.text,
        "path": item.path,
        "image_id": item.image_id,
        "time": None if frame is None else frame.time,
        "metadata": dict(item.metadata),
    }
