"""Limits and field types of conversations, shared by all dialects that generate."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

MAX_MESSAGES = 8192
MAX_CALLS = 128
"""Maximum tool calls in one message."""

MAX_TOOLS = 512
MAX_STOP_CHARACTERS = 1024

Json: TypeAlias = msgspec.Raw | msgspec.UnsetType
"""JSON that is decoded later, if at all: skipping it costs a fraction of decoding it."""

Object: TypeAlias = Annotated[Json, Meta(extra_json_schema={"type": ["object", "null"]})]
Stop: TypeAlias = Annotated[str, Meta(max_length=MAX_STOP_CHARACTERS)]
