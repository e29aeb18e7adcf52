"""Errors in the format of text-embeddings-inference."""

from __future__ import annotations

import orjson

from shoal.errors import ShoalError, Unauthorized
from shoal.http import status_codes


def render_error(error: ShoalError) -> tuple[int, dict[str, str], bytes]:
    """Render `error` and `error_type`, or plain text where the original's web framework refuses a request.

    Unauthorized has no body.
    """
    status, error_type = status_codes.find_row(error).tei
    headers = status_codes.headers(error, status)
    if isinstance(error, Unauthorized):
        return status, headers, b""
    if error_type is None:
        return status, {"content-type": "text/plain; charset=utf-8", **headers}, error.message.encode()
    body = orjson.dumps({"error": error.message, "error_type": error_type})
    return status, {"content-type": "application/json", **headers}, body
