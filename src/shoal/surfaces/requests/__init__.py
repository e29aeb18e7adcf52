"""What happened to one of the last requests, for `shoal explain`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from shoal.core.protocols import Operation
from shoal.errors import ObjectNotFound, ShoalError
from shoal.http.errors import OpenAIError, render_error
from shoal.http.request import JSON, Options, Reply, Request
from shoal.surfaces.requests.wire import Explanation, explain

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway

_ENCODE = msgspec.json.Encoder()


class Requests:
    """The route of the last requests. It needs an admin key: a record names the client."""

    name = "requests"
    error = OpenAIError

    def __init__(self, options: Options) -> None:
        self._log = options.log

    def routes(self, gateway: Gateway) -> Sequence[Operation]:
        return [
            Operation(
                method="GET",
                path="/v1/requests/{id:path}",
                endpoint=self._explain,
                summary="Show what happened to one of the last requests",
                access="admin",
                response=Explanation,
                errors={404: OpenAIError},
                description="The id is that of the header `x-request-id`. `explain_requests` sets how many are kept.",
            )
        ]

    def render_error(self, error: ShoalError) -> tuple[int, dict[str, str], bytes]:
        return render_error(error)

    async def _explain(self, request: Request) -> Reply:
        wanted, log = request.parameter, self._log
        if log is None or not log.size:
            raise ObjectNotFound("No requests are kept: set explain_requests to how many are to be.")
        found = await log.find(wanted)
        if found is None:
            raise ObjectNotFound(
                f"The request {wanted[:128]!r} is not among the last {log.size}: it is older, still running, or of "
                "another server. Check the id (x-request-id), or raise explain_requests."
            )
        return Reply(200, [JSON], _ENCODE.encode(explain(wanted, found)))
