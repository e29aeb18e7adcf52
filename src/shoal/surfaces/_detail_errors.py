"""Errors of the dialects that tell them in one field: `detail` (Voyage, Jina, NVIDIA NIM) or `message` (Cohere)."""

from __future__ import annotations

import msgspec
import orjson

from shoal.errors import ShoalError
from shoal.surfaces import _status


class DetailError(msgspec.Struct, kw_only=True):
    detail: str


class MessageError(msgspec.Struct, kw_only=True):
    message: str


def render_detail(error: ShoalError) -> tuple[int, dict[str, str], bytes]:
    return _rendered(error, "detail")


def render_message(error: ShoalError) -> tuple[int, dict[str, str], bytes]:
    return _rendered(error, "message")


def _rendered(error: ShoalError, field: str) -> tuple[int, dict[str, str], bytes]:
    status = _status.unprocessable(error)
    headers = {"content-type": "application/json", **_status.headers(error, status)}
    return status, headers, orjson.dumps({field: error.message})
