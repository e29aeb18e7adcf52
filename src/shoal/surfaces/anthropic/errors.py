"""Anthropic's error format: `{"type": "error", "error": {"type", "message"}, "request_id"}`."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from shoal.errors import ShoalError, TooLong, UpstreamRefused
from shoal.http import status_codes
from shoal.surfaces.anthropic import wire

ENCODE = msgspec.json.Encoder().encode
_TOO_LONG = re.compile(r"maximum context length|context_length_exceeded|exceed_context_size|prompt is too long")
_TYPE = re.compile(r"[a-z_]+_error|request_too_large")
"""Anthropic's types. vLLM writes errors in this format with types of its own, such as BadRequestError."""
_ANY = msgspec.json.Decoder()


def render_error(error: ShoalError) -> tuple[int, dict[str, str], bytes]:
    """Render a reply: status, headers and body. An upstream's own error in this format passes unchanged."""
    status, _ = status_codes.anthropic_status(error)
    headers = {"content-type": "application/json", **status_codes.headers(error, status)}
    if error.request_id:
        headers["request-id"] = error.request_id
    return status, headers, ENCODE(describe_error(error))


def describe_error(error: ShoalError) -> Any:
    """Build the body. Of an upstream's error in another format, the message is kept."""
    upstream = _read_upstream(error)
    if _is_anthropic(upstream):
        return upstream
    _, kind = status_codes.anthropic_status(error)
    message = _find_message(upstream) or error.message
    if isinstance(error, TooLong) or (kind == "invalid_request_error" and _is_too_long(error, message)):
        # Agents compact their conversation at these words.
        message = message if message.startswith("prompt is too long") else f"prompt is too long: {message}"
    return wire.AnthropicError(error=wire.ErrorDetail(type=kind, message=message), request_id=error.request_id or None)


def _is_anthropic(body: dict[str, Any]) -> bool:
    detail = body.get("error")
    kind = detail.get("type") if isinstance(detail, dict) else None
    return body.get("type") == "error" and isinstance(kind, str) and _TYPE.fullmatch(kind) is not None


def _is_too_long(error: ShoalError, message: str) -> bool:
    body = error.body.decode(errors="replace") if isinstance(error, UpstreamRefused) else ""
    return _TOO_LONG.search(message) is not None or _TOO_LONG.search(body) is not None


def _read_upstream(error: ShoalError) -> dict[str, Any]:
    """Return the JSON object in which an upstream refused, {} if there is none."""
    if not isinstance(error, UpstreamRefused):
        return {}
    try:
        found = _ANY.decode(error.body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return {}  # for example HTML; the error's message summarizes it
    return found if isinstance(found, dict) else {}


def _find_message(body: dict[str, Any]) -> str:
    detail = body.get("error")
    message = detail.get("message") if isinstance(detail, dict) else body.get("message")
    return message if isinstance(message, str) else ""
