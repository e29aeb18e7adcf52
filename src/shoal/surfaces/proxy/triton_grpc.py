"""The API of the Triton proxy in Rust, which maps `[{"query": ...}]` to `[{"embedding": [...]}]`."""

from __future__ import annotations

from collections.abc import Sequence
from types import GenericAlias
from typing import TYPE_CHECKING, Any, cast

import msgspec
import orjson

from shoal.core.protocols import Operation
from shoal.errors import ShoalError, TooManyInputs
from shoal.http import status_codes
from shoal.http.json import decoder
from shoal.http.json.complexity import check_values
from shoal.http.request import JSON, Options, Reply, Request
from shoal.surfaces.proxy import wire
from shoal.surfaces.shared import batch_headers, vector_encoding
from shoal.surfaces.shared.task_runs import run_task
from shoal.types import Embed

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway

_ERRORS: dict[int, Any] = dict.fromkeys((400, 404, 429, 500, 502, 503, 504), wire.HttpError)


class Embedding:
    name = "embedding"
    error = wire.HttpError

    def __init__(self, options: Options) -> None:
        self._options = options

    def routes(self, gateway: Gateway) -> Sequence[Operation]:
        return [
            Operation(
                method="POST",
                path="/v1/embedding",
                endpoint=_QueryEndpoint(gateway, self._options.max_inputs),
                summary="Embed queries with the default model",
                request=list[wire.Query],
                response=list[wire.QueryEmbedding],
                errors=_ERRORS,
                headers=batch_headers.HEADER_DOCS,
                example=[{"query": "What is a shoal?"}],
            )
        ]

    def render_error(self, error: ShoalError) -> tuple[int, dict[str, str], bytes]:
        status = status_codes.find_row(error).embedding
        headers = {"content-type": "application/json", **status_codes.headers(error, status)}
        return status, headers, orjson.dumps({"msg": error.message})


class _QueryEndpoint:
    def __init__(self, gateway: Gateway, max_inputs: int) -> None:
        self._gateway = gateway
        self._limit = max_inputs
        self._queries = 0
        # Decoding stops at the first query above the limit, however long the list is.
        counted = msgspec.defstruct(
            "Query", [], bases=(wire.Query,), namespace={"__post_init__": lambda query: self._count()}, kw_only=True
        )
        kind = cast(type[list[wire.Query]], GenericAlias(list, (counted,)))
        self._decode = decoder.Decoder(kind, "embedding")

    def _count(self) -> None:
        self._queries += 1
        if self._queries > self._limit:
            raise TooManyInputs(f"The request has more than {self._limit} queries; split it.")

    async def __call__(self, request: Request) -> Reply:
        if len(request.body) > decoder.LARGE:
            await check_values(memoryview(request.body), self._limit)
        self._queries = 0
        queries = self._decode(request.body)
        if not queries:
            return Reply(200, [JSON], b"[]")
        task = Embed(model=self._gateway.model("").name, inputs=[each.query for each in queries])
        result = await run_task(self._gateway, request, task)
        body = await vector_encoding.encode_rows(
            vector_encoding.to_contiguous(result.vectors), _encode_entry, b"[", b"]"
        )
        return Reply(200, [JSON, *batch_headers.batch_headers(request, result)], body)


def _encode_entry(index: int, row: Any) -> bytes:
    return b'{"embedding":%b}' % vector_encoding.encode_numbers(row)
