"""Errors of dialects with a single error field: `detail` (Voyage, Jina, NVIDIA NIM) or `message` (Cohere)."""

from __future__ import annotations

import msgspec
import orjson

from shoal.errors import ShoalError
from shoal.http import status_codes


class DetailError(msgspec.Struct, kw_only=True):
    detail: str


class MessageError(msgspec.Struct, kw_only=True):
    message: str


def render_detail(error: ShoalError) -> tuple[int, dict[str, str], bytes]:
    return _render(error, "detail")


def render_message(error: ShoalError) -> tuple[int, dict[str, str], bytes]:
    return _render(error, "message")


def _render(error: ShoalError, field: str) -> tuple[int, dict[str, str], bytes]:
    status = status_codes.status_with_422(error)
    headers = {"content-type": "application/json", **status_codes.headers(error, status)}
    return status, headers, orjson.dumps({field: error.message})
