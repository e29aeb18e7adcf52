"""The API of auto-batching-proxy (https://github.com/sitetester/auto-batching-proxy, src/routes.rs and src/types.rs).

It maps `{"inputs": [...]}` to `{"embeddings": [...]}` on /embed, which is TEI's path otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec
import orjson

from shoal.core.protocols import Operation
from shoal.errors import (
    CapacityError,
    DeadlineExceeded,
    EmptyInput,
    ModelNotFound,
    Overloaded,
    SetupError,
    ShoalError,
    TooManyInputs,
    TransportFailed,
    UpstreamRefused,
)
from shoal.http import status_codes
from shoal.http.json import decoder
from shoal.http.request import JSON, TEXT, Options, Reply, Request
from shoal.surfaces.proxy import wire
from shoal.surfaces.shared import batch_headers, listing, vector_encoding
from shoal.surfaces.shared.task_runs import run_task
from shoal.types import BatchFacts, Embed

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway

_ENCODE = msgspec.json.Encoder()

_FRAMEWORK_STATUSES = {
    "malformed": HTTPStatus.BAD_REQUEST,
    "wrong_type": HTTPStatus.UNPROCESSABLE_ENTITY,
    "media_type": HTTPStatus.BAD_REQUEST,
    "too_large": HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    "route_not_found": HTTPStatus.NOT_FOUND,
    "method_not_allowed": HTTPStatus.METHOD_NOT_ALLOWED,
    "unauthorized": HTTPStatus.UNAUTHORIZED,
    "forbidden": HTTPStatus.FORBIDDEN,
    "request_timeout": HTTPStatus.REQUEST_TIMEOUT,
}
"""Statuses of errors that the original's web framework reports, with only the status phrase as text."""

_PHRASES = {413: "Payload Too Large", 422: "Unprocessable Entity"}
"""Status phrases of Rocket and reqwest that differ from Python's."""


_ERRORS: dict[int, Any] = dict.fromkeys((400, 408, 413, 422, 424, 429, 500, 503), wire.ProxyError)


class AutoBatchingProxy:
    """Replaces the original, so it is the first of all surfaces and also renders the errors of unknown paths."""

    name = "auto-batching-proxy"
    error = wire.ProxyError

    def __init__(self, options: Options) -> None:
        self._options = options

    def routes(self, gateway: Gateway) -> Sequence[Operation]:
        return [
            Operation(
                method="POST",
                path="/embed",
                endpoint=_EmbedEndpoint(gateway, self._options),
                summary="Embed texts with the default model",
                request=wire.ProxyRequest,
                response=wire.ProxyResponse,
                errors=_ERRORS,
                headers=batch_headers.HEADER_DOCS,
                example={"inputs": ["Hello", "World"]},
            ),
            Operation(
                method="GET",
                path="/health",
                endpoint=_HealthEndpoint(gateway),
                summary="Check whether any model is ready",
                access="public",
                quiet=True,
                response=str,
                media_type="text/plain",
                errors={503: wire.ProxyError},
            ),
        ]

    def render_error(self, error: ShoalError) -> tuple[int, dict[str, str], bytes]:
        status, text = _describe_error(error)
        headers = {"content-type": "application/json", **status_codes.headers(error, status)}
        return status, headers, _ENCODE.encode(wire.ProxyError(error=text))


class _EmbedEndpoint:
    def __init__(self, gateway: Gateway, options: Options) -> None:
        self._gateway = gateway
        self._limit = options.max_inputs
        self._adds_batch_info = options.batch_info
        self._decode = decoder.Decoder(wire.ProxyRequest, "auto-batching-proxy", options.max_inputs)

    async def __call__(self, request: Request) -> Reply:
        inputs = (await self._decode.decode_async(request.body)).inputs
        if not inputs:
            raise EmptyInput("`inputs` can't be empty", param="inputs")
        if len(inputs) > self._limit:
            raise TooManyInputs(f"`inputs` can't be greater than {self._limit}", param="inputs")
        model, _ = self._gateway.resolve("", "embed")
        result = await run_task(self._gateway, request, Embed(model=model, inputs=[*inputs]))
        tail = b"]}"
        if self._adds_batch_info:
            tail = b'],"batch_info":%b}' % _ENCODE.encode(_to_batch_info(result.facts))
        vectors = vector_encoding.to_contiguous(result.vectors)
        body = await vector_encoding.encode_rows(
            vectors, lambda _, row: vector_encoding.encode_numbers(row), b'{"embeddings":[', tail
        )
        return Reply(200, [JSON, *batch_headers.batch_headers(request, result)], body)


class _HealthEndpoint:
    """Returns `OK` while any model can answer. The original does so regardless of its upstream, and from the start on:
    so this waits until the upstream answers for the first time."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, request: Request) -> Reply:
        while not self._gateway.draining:
            if any(model.can_answer() for model in self._gateway.registry):
                return Reply(200, [TEXT], b"OK")
            if not await self._gateway.wait_for_first_answer(request.deadline):
                break
        why = "; ".join(f"{name}: {reason}" for name, reason in listing.list_statuses(self._gateway).items())
        if self._gateway.draining:
            why = "the server is shutting down"
        return Reply(503, [JSON], _ENCODE.encode(wire.ProxyError(error=why or "no model is served")))


def _to_batch_info(facts: BatchFacts) -> wire.ProxyBatch:
    full = facts.flush == "full"
    return wire.ProxyBatch(
        batch_id=facts.id,
        batch_type="max_batch_size" if full else "max_wait_time_ms",
        batch_size=max(1, facts.requests),
        batch_wait_time_ms=None if full else round(facts.queue_ms),
        inference_time_ms=round(facts.infer_ms, 3),
    )


def _describe_error(error: ShoalError) -> tuple[int, str]:
    """Return the status and text of an error.

    Client errors have the framework's texts. A model takes the place of the original's upstream: its errors read like
    those of a TEI server, or of an unreachable one.
    """
    if error.kind in _FRAMEWORK_STATUSES:
        status = _FRAMEWORK_STATUSES[error.kind]
        return status, _phrase(status)
    match error:
        case TooManyInputs():
            return 413, error.message
        case EmptyInput(param="inputs"):
            return 400, error.message
        case DeadlineExceeded():
            return 408, "Request timed out"
        case UpstreamRefused():
            return error.status, _http_error(error.status, error.body.decode(errors="replace"))
        case Overloaded():
            return _as_tei(error)
        case TransportFailed() | CapacityError() | ModelNotFound() | SetupError():
            return 503, f"Network error: {error.message}"
    return _as_tei(error)


def _as_tei(error: ShoalError) -> tuple[int, str]:
    status, kind = status_codes.find_row(error).tei
    if error.kind == "upstream_failed":
        status = 424  # the original passes on this status of its TEI server for a failed batch
    return status, _http_error(status, orjson.dumps({"error": error.message, "error_type": kind or "Backend"}).decode())


def _http_error(status: int, body: str) -> str:
    return f"HTTP error: {status} {_phrase(status)}: {body}"


def _phrase(status: int) -> str:
    if status in _PHRASES:
        return _PHRASES[status]
    try:
        return HTTPStatus(status).phrase
    except ValueError:  # an upstream may return any number
        return "<unknown status code>"
