"""The HTTP API as a page to read: every route of the OpenAPI schema with its fields and answers. No script."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

Schema = Mapping[str, Any]
FRAME = Path(__file__).with_name("reference.html")  # what stands around the content


def reference_page(schema: Schema) -> str:
    """The page of an OpenAPI schema: its description, a list of the routes, then each route, then the answers."""
    routes = [
        (method.upper(), path, operation)
        for path, methods in schema["paths"].items()
        for method, operation in methods.items()
    ]
    models: Schema = schema.get("components", {}).get("schemas", {})
    asked = {str(operation.get("requestBody")) for _, _, operation in routes}
    replies = {
        name: model
        for name, model in models.items()
        if not name.startswith(("HTTPValid", "Validation")) and not any(f"/{name}'" in one for one in asked)
    }
    parts = [
        f"<p>{_prose(schema['info']['description'])} The schema is <a href='/openapi.json'>openapi.json</a>.</p>"
    ]
    parts += ["<nav aria-label='Routes'><ul>", *(_entry(*route) for route in routes), "</ul></nav>"]
    parts += [_route(*route, models) for route in routes]
    parts += ["<h2 id='answers'>Answers</h2>", *(_model(name, model) for name, model in replies.items())]
    return FRAME.read_text("utf-8").replace("<!-- content -->", "\n".join(parts))


def _entry(method: str, path: str, operation: Schema) -> str:
    link = f"<a href='#{_anchor(method, path)}'><code>{method} {escape(path)}</code></a>"
    return f"<li>{link} {escape(operation.get('summary', ''))}</li>"


def _route(method: str, path: str, operation: Schema, models: Schema) -> str:
    rows = [
        (one["name"], _kind(one["schema"]), _default(one["schema"], one.get("required", False)),
         one.get("description", one["schema"].get("description", "")))
        for one in operation.get("parameters", ())
    ]  # fmt: skip
    for content in operation.get("requestBody", {}).get("content", {}).values():
        rows += _fields(_resolved(content["schema"], models))
    answer = (
        operation["responses"].get("200", {}).get("content", {}).get("application/json", {}).get("schema", {})
    )
    answers = f"<p>Answers {_kind(answer)}.</p>" if answer else ""
    text = " ".join(filter(None, (operation.get("summary", "") + ".", operation.get("description", ""))))
    return (
        f"<h2 id='{_anchor(method, path)}'><code>{method} {escape(path)}</code></h2><p>{_prose(text)}</p>"
        f"{_table(('field', 'type', 'default', 'meaning'), rows)}{answers}"
    )


def _model(name: str, model: Schema) -> str:
    rows = [(field, kind, meaning) for field, kind, _, meaning in _fields(model)]
    text = _prose(model.get("description", ""))
    return f"<h3 id='{escape(name)}'>{escape(name)}</h3><p>{text}</p>{_table(('field', 'type', 'meaning'), rows)}"


def _fields(model: Schema) -> list[tuple[str, str, str, str]]:
    needed = model.get("required", ())
    return [
        (name, _kind(field), _default(field, name in needed), field.get("description", ""))
        for name, field in model.get("properties", {}).items()
    ]


def _resolved(schema: Schema, models: Schema) -> Schema:
    found: Schema = models[schema["$ref"].rsplit("/", 1)[-1]] if "$ref" in schema else schema
    return found


def _kind(schema: Schema) -> str:
    """The type of a field as HTML; a model of the answers is a link."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rsplit("/", 1)[-1])
        return f"<a href='#{name}'>{name}</a>"
    if "anyOf" in schema:
        return " or ".join(_kind(one) for one in schema["anyOf"])
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    if "contentMediaType" in schema or schema.get("format") == "binary":
        return "file"
    return escape(str(schema.get("type", "any value")))


def _default(schema: Schema, required: bool) -> str:
    if required:
        return "needed"
    return escape(str(schema["default"])) if schema.get("default") not in (None, "", []) else ""


def _table(heads: tuple[str, ...], rows: list[Any]) -> str:
    """A table; types come as HTML, everything else is escaped."""
    if not rows:
        return ""
    head = "".join(f"<th scope='col'>{one}</th>" for one in heads)
    body = "".join(
        f"<tr><td><code>{escape(row[0])}</code></td><td>{row[1]}</td>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[2:])
        + "</tr>"
        for row in rows
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"<div class='wide' tabindex='0' role='group' aria-label='Fields'>{table}</div>"


def _prose(text: str) -> str:
    """Text whose `quoted` parts are code."""
    pieces = escape(text).split("`")
    return "".join(f"<code>{piece}</code>" if n % 2 else piece for n, piece in enumerate(pieces))


def _anchor(method: str, path: str) -> str:
    return escape(f"{method.lower()}{path.replace('/', '-')}", quote=True)
