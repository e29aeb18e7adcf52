"""Structural tags that keep tool calls valid, for backends that know these: xgrammar's tags, in which a text is free or
forced, and each call has the schema of its own tool."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from shoal.pipelines.chat.required_tools import ANY_OBJECT
from shoal.pipelines.chat.tools.hermes import CLOSE, OPEN
from shoal.types import Tool


def can_tag(tools: Sequence[Tool]) -> bool:
    """Whether names can be in tags: the library encodes some letters beyond ASCII wrongly there."""
    return all(tool.name.isascii() for tool in tools)


def required_calls(tools: Sequence[Tool], key: str) -> str:
    """Return the JSON text of tags that force one or more calls and nothing else: objects with the name of a tool and
    its arguments under `key`, separated by "; "."""
    tags = [_tag(tool, key, "{", "}") for tool in tools]
    return _format(type="tags_with_separator", tags=tags, separator="; ", at_least_one=True)


def marked_calls(tools: Sequence[Tool], *, parallel: bool) -> str:
    """Return the JSON text of tags that leave the answer free up to a `<tool_call>`, and then force a valid call.
    `parallel` False: the answer ends after the first call."""
    tags = [_marked_tag(tool) for tool in tools]
    return _format(type="triggered_tags", triggers=[OPEN], tags=tags, stop_after_first=not parallel)


def calls_or_answer(tools: Sequence[Tool], schema: Any, *, parallel: bool) -> str:
    """Return the JSON text of tags that force an answer of the JSON `schema`, or calls as those of `marked_calls` and
    nothing else. `parallel` False: one call."""
    answer = {"type": "json_schema", "json_schema": schema}
    if not parallel:
        return _format(type="or", elements=[answer, *(_marked_tag(tool) for tool in tools)])
    # The library accepts an open number of calls beside an answer only within a tag.
    tags = [_tag(tool, "arguments", "\n{", "}\n") for tool in tools]
    calls = {"type": "tags_with_separator", "tags": tags, "separator": f"{CLOSE}\n{OPEN}", "at_least_one": True}
    return _format(type="or", elements=[answer, {"type": "tag", "begin": OPEN, "content": calls, "end": CLOSE}])


def _marked_tag(tool: Tool) -> dict[str, Any]:
    return _tag(tool, "arguments", f"{OPEN}\n{{", f"}}\n{CLOSE}")


def _tag(tool: Tool, key: str, begin: str, end: str) -> dict[str, Any]:
    name = json.dumps(tool.name)
    content = {"type": "json_schema", "json_schema": tool.parameters or ANY_OBJECT}
    return {"type": "tag", "begin": f'{begin}"name": {name}, "{key}": ', "content": content, "end": end}


def _format(**fields: Any) -> str:
    return json.dumps({"type": "structural_tag", "format": fields}, ensure_ascii=False)
