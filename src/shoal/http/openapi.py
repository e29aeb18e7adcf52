"""Generate the OpenAPI 3.1 document from the operations of all surfaces and their msgspec types.

Nothing is described twice: paths, schemas, statuses and headers come from the Operations, and the errors raised before
an endpoint from how its surface renders them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec

from shoal._version import __version__
from shoal.core.protocols import Operation, Surface
from shoal.errors import ModelNotFound, ModelNotReady, ShoalError
from shoal.http import status_codes
from shoal.http.documented_errors import as_tuple, with_common_errors
from shoal.http.operation import DocumentedOperation
from shoal.http.request import JSON, Reply, Request
from shoal.types import TaskKind

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway

SCHEMES = {
    "user": ("key", "A key given with `--api-key`; a server without keys ignores it."),
    "admin": ("admin_key", "A key given with `--admin-key`."),
}
ERROR_HEADERS = {
    401: {"www-authenticate": "How to authenticate: `Bearer`."},
    429: {"retry-after": "Seconds to wait before retrying."},
    503: {"retry-after": "Seconds to wait before retrying."},
}
REQUEST_ID = {"x-request-id": "ID of the request: the client's own, or a generated one."}
REQUEST_HEADERS: dict[str, dict[str, Any]] = {
    "x-request-id": {
        "name": "x-request-id",
        "in": "header",
        "description": "ID of this request, returned in the response and written to the logs.",
        "schema": {"type": "string", "maxLength": 128},
    },
    "x-request-timeout": {
        "name": "x-request-timeout",
        "in": "header",
        "description": "Timeout of the request in seconds, limited by the server's own.",
        "schema": {"type": "number", "exclusiveMinimum": 0},
    },
    "x-shoal-class": {
        "name": "x-shoal-class",
        "in": "header",
        "description": "Traffic class: interactive (a person waits) or bulk (a job). Default: the key's class, else by "
        "the number of inputs. A bulk key is always bulk.",
        "schema": {"type": "string", "enum": ["interactive", "bulk"]},
    },
}
PHRASES = {status.value: status.phrase for status in HTTPStatus}
_TEXT = {"type": "string"}
PATH_PARAMETER = re.compile(r"\{(\w+)(:path)?\}")

PATHS = ("/openapi.json", "/api-doc/openapi.json", "/explorer/swagger.json")
"""Where the document is: the second path is TEI's, the third triton-grpc-proxy's."""

Table = Mapping[str, Sequence[Operation]]
"""Operations by surface name, in the order of the document."""


class OpenApi:
    """Serves GET /openapi.json: the document of the given surfaces, and of this one.

    It is built on the first request, and again when the default models change, because examples name them.
    """

    name = "openapi"
    error: Any = dict[str, str]

    def __init__(self, surfaces: Sequence[Surface]) -> None:
        self._surfaces = tuple(surfaces)

    def routes(self, gateway: Gateway) -> Sequence[Operation]:
        made: dict[tuple[str, str], bytes] = {}

        async def endpoint(request: Request) -> Reply:
            models = _default_model(gateway, "embed"), _default_model(gateway, "generate")
            if models not in made:
                made.clear()
                table = {surface.name: list_operations(surface, gateway) for surface in self._surfaces}
                made[models] = msgspec.json.encode(build_document({**table, self.name: operations}, *models))
            body = made[models]
            if request.path.count("/") > 1:  # the server URL is relative to the document's own path
                body = body.replace(b'"url":"./"', b'"url":"../"', 1)
            return Reply(headers=[JSON, (b"cache-control", b"no-cache")], body=body)

        operations = [
            Operation(
                method="GET",
                path=path,
                endpoint=endpoint,
                summary="This document",
                access="public",
                response=dict[str, Any],
            )
            for path in PATHS
        ]
        return operations

    def render_error(self, error: ShoalError) -> tuple[int, dict[str, str], bytes]:
        status = status_codes.find_row(error).openai.status
        body = msgspec.json.encode({"error": error.message})
        return status, {"content-type": "application/json", **status_codes.headers(error, status)}, body


def list_operations(surface: Surface, gateway: Gateway) -> list[Operation]:
    """Return a surface's operations with the common errors added to their `errors`."""
    return [with_common_errors(surface, operation) for operation in surface.routes(gateway)]


def build_document(table: Table, model: str = "", talker: str = "") -> dict[str, Any]:
    """Build the whole document, ready for JSON. Examples with a model name use `model`, or `talker` if they generate,
    unless it is empty.

    Raises ValueError when two operations share a path and method, or when an endpoint's type has no JSON schema.
    """
    writer = _Writer(table, model, talker)
    paths: dict[str, dict[str, Any]] = {}
    for name, operations in table.items():
        for operation in operations:
            item = paths.setdefault(to_openapi_path(operation.path), {})
            if operation.method.lower() in item:
                raise ValueError(f"{operation.method} {operation.path} is defined twice, once by {name}")
            item[operation.method.lower()] = writer.describe_operation(name, operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Shoal",
            "version": __version__,
            "summary": "One inference gateway: the APIs your clients speak, batched across users.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "./", "description": "This server"}],
        "tags": [{"name": name} for name, operations in table.items() if operations],
        "paths": paths,
        "components": writer.build_components(),
    }


def to_openapi_path(path: str) -> str:
    """Convert a route's path to OpenAPI's syntax: `/v1/models/{id:path}` becomes `/v1/models/{id}`."""
    return PATH_PARAMETER.sub(r"{\1}", path)


def operation_id(operation: Operation) -> str:
    """Build an id from method and path alone, so that it survives refactoring: `post_v1_embeddings`."""
    words = re.sub(r"\W+", "_", to_openapi_path(operation.path)).strip("_")
    return f"{operation.method.lower()}_{words or 'root'}"


def _default_model(gateway: Gateway, task: TaskKind) -> str:
    try:
        return gateway.resolve("", task)[0]
    except (ModelNotFound, ModelNotReady):
        return ""


class _Writer:
    """Describes operations and collects their shared schemas, headers, parameters and security schemes."""

    def __init__(self, table: Table, model: str, talker: str) -> None:
        self._model = model
        self._language_model = talker
        kinds = [kind for operations in table.values() for each in operations for kind in _collect_types(each)]
        types = list({id(kind): kind for kind in kinds}.values())
        made, self._schemas = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
        self._schema_of = dict(zip(map(id, types), made, strict=True))
        self._headers: dict[str, str] = {}
        self._parameters: dict[str, Any] = {}
        self._accesses: set[str] = set()

    def build_components(self) -> dict[str, Any]:
        schemes = {
            scheme: {"type": "http", "scheme": "bearer", "description": text}
            for access, (scheme, text) in SCHEMES.items()
            if access in self._accesses
        }
        headers = {name: _describe_header(text) for name, text in self._headers.items()}
        parts = {
            "schemas": self._schemas,
            "headers": headers,
            "parameters": self._parameters,
            "securitySchemes": schemes,
        }
        return {name: part for name, part in parts.items() if part}

    def describe_operation(self, tag: str, operation: Operation) -> dict[str, Any]:
        self._accesses.add(operation.access)
        operation_object: dict[str, Any] = {
            "operationId": operation_id(operation),
            "tags": [tag],
            "summary": operation.summary,
            "responses": self._describe_responses(operation),
            "security": [{SCHEMES[operation.access][0]: []}] if operation.access in SCHEMES else [],
        }
        if operation.description:
            operation_object["description"] = operation.description
        parameters = [*_path_parameters(operation.path), *_query_parameters(operation)]
        if parameters := [*parameters, *self._request_headers(operation)]:
            operation_object["parameters"] = parameters
        form = operation.form if isinstance(operation, DocumentedOperation) else None
        content: dict[str, Any] = {}
        if operation.request is not None:
            content["application/json"] = {"schema": self._schema_of[id(operation.request)]}
            if operation.example is not None:
                content["application/json"]["example"] = self._fill_example(operation)
        if form is not None:
            content |= self._describe_content(form, "multipart/form-data")
        if content:
            required = not (isinstance(operation, DocumentedOperation) and operation.optional)
            operation_object["requestBody"] = {"required": required, "content": content}
        return operation_object

    def _describe_responses(self, operation: Operation) -> dict[str, Any]:
        success: dict[str, Any] = {
            "description": "OK",
            "headers": self._reference_headers({**REQUEST_ID, **operation.headers}),
        }
        if operation.response is not None:
            success["content"] = self._describe_content(operation.response, operation.media_type)
            for media_type, kind in operation.other_responses if isinstance(operation, DocumentedOperation) else ():
                success["content"].update(self._describe_content(kind, media_type))
        responses = {"200": success}
        if isinstance(operation, DocumentedOperation) and operation.accepted is not None:
            headers = {**REQUEST_ID, "location": "Where to look for the job."}
            content = self._describe_content(operation.accepted, "application/json")
            responses["202"] = {
                "description": "Accepted",
                "headers": self._reference_headers(headers),
                "content": content,
            }
        for status, kinds in sorted(operation.errors.items()):
            response: dict[str, Any] = {
                "description": PHRASES.get(status, "Refused"),
                "headers": self._reference_headers({**REQUEST_ID, **ERROR_HEADERS.get(status, {})}),
            }
            for media_type, types in (
                ("application/json", tuple(kind for kind in as_tuple(kinds) if kind is not str)),
                ("text/plain", tuple(kind for kind in as_tuple(kinds) if kind is str)),
            ):
                if types:
                    response.setdefault("content", {}).update(self._describe_content(types, media_type))
            responses[str(status)] = response
        return responses

    def _describe_content(self, kind: Any, media_type: str) -> dict[str, Any]:
        schemas = [self._schema_of[id(each)] for each in as_tuple(kind)]
        return {media_type: {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}}

    def _reference_headers(self, headers: Mapping[str, str]) -> dict[str, Any]:
        """Describe headers, by reference if the description of a name is always the same."""
        return {
            name: {"$ref": f"#/components/headers/{name}"}
            if self._headers.setdefault(name, text) == text
            else _describe_header(text)
            for name, text in headers.items()
        }

    def _request_headers(self, operation: Operation) -> list[dict[str, Any]]:
        """Describe the request headers: those of every operation with a body, and the class if it reports batches."""
        names = ["x-request-id", "x-request-timeout"] if operation.request is not None else []
        if "x-shoal-batch-size" in operation.headers:
            names.append("x-shoal-class")
        self._parameters.update({name: REQUEST_HEADERS[name] for name in names})
        return [{"$ref": f"#/components/parameters/{name}"} for name in names]

    def _fill_example(self, operation: Operation) -> Any:
        """Return the example with a served model's name; admin operations keep theirs, so as not to act on that one."""
        example = operation.example
        model = self._language_model if operation.generates else self._model
        if model and isinstance(example, dict) and operation.access != "admin":
            return {**example, **{name: model for name in ("model", "model_name") if name in example}}
        return example


def _collect_types(operation: Operation) -> list[Any]:
    errors = [kind for kinds in operation.errors.values() for kind in as_tuple(kinds)]
    more: tuple[Any, ...] = ()
    if isinstance(operation, DocumentedOperation):
        more = (operation.accepted, operation.form, *(kind for _, kind in operation.other_responses))
    kinds = (operation.request, *as_tuple(operation.response), *more, *errors)
    return [kind for kind in kinds if kind is not None]


def _path_parameters(path: str) -> list[dict[str, Any]]:
    return [
        {
            "name": found[1],
            "in": "path",
            "required": True,
            "schema": {"type": "string"},
            **({"description": "May contain slashes."} if found[2] else {}),
        }
        for found in PATH_PARAMETER.finditer(path)
    ]


def _query_parameters(operation: Operation) -> list[dict[str, Any]]:
    if not isinstance(operation, DocumentedOperation):
        return []
    return [
        {
            "name": name,
            "in": "query",
            "required": name in operation.required_query,
            "description": text,
            "schema": _TEXT,
        }
        for name, text in operation.query.items()
    ]


def _describe_header(text: str) -> dict[str, Any]:
    return {"description": text, "schema": {"type": "string"}}
