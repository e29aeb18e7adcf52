"""POST /plain: one text to one vector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from shoal.core.protocols import Operation
from shoal.errors import ShoalError
from shoal.http import status_codes
from shoal.http.json.decoder import Decoder
from shoal.http.request import JSON, Options, Reply, Request
from shoal.surfaces.shared import batch_headers, vector_encoding
from shoal.types import Embed

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway


class PlainRequest(msgspec.Struct, kw_only=True):
    text: str


class PlainError(msgspec.Struct, kw_only=True):
    msg: str


class Plain:
    name = "plain"
    error = PlainError

    def __init__(self, options: Options) -> None:
        self._decode = Decoder(PlainRequest, self.name)

    def routes(self, gateway: Gateway) -> Sequence[Operation]:
        async def endpoint(request: Request) -> Reply:
            text = self._decode(request.body).text
            model = gateway.model("").name
            request.model, request.items = model, 1
            request.result = await gateway.run(Embed(model=model, inputs=[text]), request.context())
            body = vector_encoding.encode_numbers(vector_encoding.to_contiguous(request.result.vectors)[0])
            return Reply(200, [JSON, *batch_headers.batch_headers(request, request.result)], body)

        return [
            Operation(
                method="POST",
                path="/plain",
                endpoint=endpoint,
                summary="Embed one text with the default model",
                request=PlainRequest,
                response=list[float],
                errors=dict.fromkeys((400, 404, 429, 500, 502, 503, 504), PlainError),
                headers=batch_headers.HEADER_DOCS,
                example={"text": "What is a shoal?"},
            )
        ]

    def render_error(self, error: ShoalError) -> tuple[int, dict[str, str], bytes]:
        status = status_codes.status(error)
        headers = {"content-type": "application/json", **status_codes.headers(error, status)}
        return status, headers, msgspec.json.encode(PlainError(msg=error.message))
