"""Errors as OpenAI's clients read them: in a reply, and inside of a stream."""

from __future__ import annotations

from typing import Any

import msgspec

from shoal.errors import ModelNotFound, ShoalError, UpstreamRefused
from shoal.surfaces import _status, _wire

_ENCODE = msgspec.json.Encoder()


def render_error(error: ShoalError) -> tuple[int, dict[str, str], bytes]:
    """OpenAI's error object: all four keys, always. What an OpenAI-compatible server refused is passed on as it is."""
    status = _status.status(error)
    headers = {"content-type": "application/json", **_status.headers(error, status)}
    if isinstance(error, UpstreamRefused) and error.body and status == error.status:
        return status, {**headers, "content-type": error.content_type}, error.body
    return status, headers, _ENCODE.encode(_wire.OpenAIError(error=detail(error)))


def detail(error: ShoalError) -> _wire.OpenAIErrorDetail:
    row = _status.row(error).openai
    param = "model" if isinstance(error, ModelNotFound) else error.param
    return _wire.OpenAIErrorDetail(message=error.message, type=row.type, param=param, code=row.code)


def error_object(error: ShoalError) -> bytes:
    """`{"error": {...}}` on one line, for a stream: the upstream's own object where there is one."""
    if isinstance(error, UpstreamRefused):
        try:
            said: Any = msgspec.json.decode(error.body)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            said = None  # an upstream may refuse in HTML; the message says the same in short
        if isinstance(said, dict) and isinstance(said.get("error"), dict):
            return _ENCODE.encode({"error": said["error"]})
    return _ENCODE.encode(_wire.OpenAIError(error=detail(error)))
