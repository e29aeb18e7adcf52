"""Limits of conversations, and the types of their fields, which are the same in every dialect that generates."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

MAX_MESSAGES = 8192
MAX_CALLS = 128
"""Tool calls of one message."""

MAX_TOOLS = 512
MAX_STOP_CHARACTERS = 1024

Json: TypeAlias = msgspec.Raw | msgspec.UnsetType
"""JSON that is looked at later, if at all: to skip it costs a fraction of decoding it."""

Object: TypeAlias = Annotated[Json, Meta(extra_json_schema={"type": ["object", "null"]})]
Stop: TypeAlias = Annotated[str, Meta(max_length=MAX_STOP_CHARACTERS)]
