"""OpenAI's error format, used by OpenAI's routes and by every surface whose dialect has no format of its own."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from shoal.errors import ModelNotFound, ShoalError, UpstreamRefused
from shoal.http import status_codes

_ENCODE = msgspec.json.Encoder()


class OpenAIErrorDetail(msgspec.Struct, kw_only=True):
    message: str
    type: str
    param: Annotated[str | None, Meta(description="The invalid field.")]
    code: str | None


class OpenAIError(msgspec.Struct, kw_only=True):
    error: OpenAIErrorDetail


def render_error(error: ShoalError) -> tuple[int, dict[str, str], bytes]:
    """Render a reply: status, headers and an object with all four keys. An upstream's own refusal passes unchanged."""
    status = status_codes.status(error)
    headers = {"content-type": "application/json", **status_codes.headers(error, status)}
    if isinstance(error, UpstreamRefused) and error.body and status == error.status:
        return status, {**headers, "content-type": error.content_type}, error.body
    return status, headers, _ENCODE.encode(OpenAIError(error=describe_error(error)))


def render_stream_error(error: ShoalError) -> bytes:
    """Render `{"error": {...}}` on one line, for a stream: the upstream's own object where there is one."""
    if isinstance(error, UpstreamRefused):
        try:
            upstream: Any = msgspec.json.decode(error.body)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            upstream = None  # for example HTML; the message summarizes it
        if isinstance(upstream, dict) and isinstance(upstream.get("error"), dict):
            return _ENCODE.encode({"error": upstream["error"]})
    return _ENCODE.encode(OpenAIError(error=describe_error(error)))


def describe_error(error: ShoalError) -> OpenAIErrorDetail:
    row = status_codes.find_row(error).openai
    param = "model" if isinstance(error, ModelNotFound) else error.param
    return OpenAIErrorDetail(message=error.message, type=row.type, param=param, code=row.code)
