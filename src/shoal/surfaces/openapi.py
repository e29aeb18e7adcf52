"""The OpenAPI 3.1 document, generated from the operations of all surfaces and their msgspec types.

Nothing is described twice: a path, a schema, a status or a header is in the document because its Operation says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec

from shoal._version import __version__
from shoal.core.protocols import Operation, Surface
from shoal.errors import ShoalError
from shoal.surfaces import _status
from shoal.surfaces._request import JSON, Reply, Request

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway

SCHEMES = {
    "user": ("key", "A key given with `--api-key`; a server without keys ignores it."),
    "admin": ("admin_key", "A key given with `--admin-key`."),
}
ERROR_HEADERS = {
    401: {"www-authenticate": "How to authenticate: `Bearer`."},
    429: {"retry-after": "Seconds until another try may succeed."},
    503: {"retry-after": "Seconds until another try may succeed."},
}
REQUEST_ID = {"x-request-id": "The request's id: the caller's own, or a new one."}
PHRASES = {status.value: status.phrase for status in HTTPStatus}
PARAMETER = re.compile(r"\{(\w+)(:path)?\}")

Table = Mapping[str, Sequence[Operation]]
"""A surface's name to its operations, in the order that the document shows them."""


class OpenApi:
    """GET /openapi.json: the document of the given surfaces and of itself, made when it is first asked for."""

    name = "openapi"

    def __init__(self, surfaces: Sequence[Surface]) -> None:
        self._surfaces = tuple(surfaces)

    def routes(self, gateway: Gateway) -> Sequence[Operation]:
        made: list[bytes] = []

        async def endpoint(request: Request) -> Reply:
            if not made:
                table = {surface.name: surface.routes(gateway) for surface in self._surfaces}
                made.append(msgspec.json.encode(document({**table, self.name: operations})))
            return Reply(headers=[JSON, (b"cache-control", b"no-cache")], body=made[0])

        operations = [
            Operation(
                method="GET",
                path="/openapi.json",
                endpoint=endpoint,
                summary="This document",
                access="public",
                response=dict[str, Any],
            )
        ]
        return operations

    def render_error(self, error: ShoalError) -> tuple[int, dict[str, str], bytes]:
        status = _status.row(error).openai.status
        body = msgspec.json.encode({"error": error.message})
        return status, {"content-type": "application/json", **_status.headers(error, status)}, body


def document(table: Table) -> dict[str, Any]:
    """The whole document, ready for JSON.

    Raises ValueError when two operations share a path and method, or when an endpoint's type has no JSON schema.
    """
    schema_of = _Schemas(table)
    paths: dict[str, dict[str, Any]] = {}
    used: set[str] = set()
    for name, operation in _each(table):
        item = paths.setdefault(template(operation.path), {})
        if operation.method.lower() in item:
            raise ValueError(f"{operation.method} {operation.path} is claimed twice, once by {name}")
        item[operation.method.lower()] = _operation(name, operation, schema_of)
        used.add(operation.access)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Shoal",
            "version": __version__,
            "summary": "One inference gateway: the APIs your clients speak, batched across users.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "./"}],
        "tags": [{"name": name} for name, operations in table.items() if operations],
        "paths": paths,
        "components": {
            "schemas": schema_of.components,
            "securitySchemes": {
                scheme: {"type": "http", "scheme": "bearer", "description": text}
                for access, (scheme, text) in SCHEMES.items()
                if access in used
            },
        },
    }


def template(path: str) -> str:
    """A route's path as OpenAPI writes it: `/v1/models/{id:path}` is `/v1/models/{id}`."""
    return PARAMETER.sub(r"{\1}", path)


def operation_id(operation: Operation) -> str:
    """Made of method and path alone, so that it stays when code moves: `post_v1_embeddings`."""
    words = re.sub(r"\W+", "_", template(operation.path)).strip("_")
    return f"{operation.method.lower()}_{words or 'root'}"


class _Schemas:
    """Every type that an operation names, as a JSON schema; structs become shared components."""

    def __init__(self, table: Table) -> None:
        types = list({id(kind): kind for _, operation in _each(table) for kind in _types(operation)}.values())
        made, self.components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
        self._made = dict(zip(map(id, types), made, strict=True))

    def __call__(self, kind: Any) -> dict[str, Any]:
        return self._made[id(kind)]


def _each(table: Table) -> Iterator[tuple[str, Operation]]:
    return ((name, operation) for name, operations in table.items() for operation in operations)


def _types(operation: Operation) -> list[Any]:
    return [kind for kind in (operation.request, operation.response, *operation.errors.values()) if kind is not None]


def _operation(tag: str, operation: Operation, schema_of: _Schemas) -> dict[str, Any]:
    said: dict[str, Any] = {
        "operationId": operation_id(operation),
        "tags": [tag],
        "summary": operation.summary,
        "responses": _responses(operation, schema_of),
        "security": [{SCHEMES[operation.access][0]: []}] if operation.access in SCHEMES else [],
    }
    if operation.description:
        said["description"] = operation.description
    if parameters := [_parameter(found) for found in PARAMETER.finditer(operation.path)]:
        said["parameters"] = parameters
    if operation.request is not None:
        content: dict[str, Any] = {"schema": schema_of(operation.request)}
        if operation.example is not None:
            content["example"] = operation.example
        said["requestBody"] = {"required": True, "content": {"application/json": content}}
    return said


def _parameter(found: re.Match[str]) -> dict[str, Any]:
    said: dict[str, Any] = {"name": found[1], "in": "path", "required": True, "schema": {"type": "string"}}
    if found[2]:
        said["description"] = "May hold slashes."
    return said


def _responses(operation: Operation, schema_of: _Schemas) -> dict[str, Any]:
    success: dict[str, Any] = {"description": "OK", "headers": _headers({**REQUEST_ID, **operation.headers})}
    if operation.response is not None:
        success["content"] = {operation.media_type: {"schema": schema_of(operation.response)}}
    responses = {"200": success}
    for status, kind in sorted(operation.errors.items()):
        media_type = "text/plain" if kind is str else "application/json"
        responses[str(status)] = {
            "description": PHRASES.get(status, "Refused"),
            "headers": _headers({**REQUEST_ID, **ERROR_HEADERS.get(status, {})}),
            "content": {media_type: {"schema": schema_of(kind)}},
        }
    return responses


def _headers(texts: Mapping[str, str]) -> dict[str, Any]:
    return {name: {"description": text, "schema": {"type": "string"}} for name, text in texts.items()}
