"""Convert requests of Anthropic's Messages to tasks. Raises RequestErrors that name the field."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from shoal.errors import InvalidValue, Unsupported, WrongType
from shoal.http.json.extras import check_depth, to_json_bytes
from shoal.surfaces.anthropic import wire
from shoal.surfaces.anthropic.conversation import Ignore, to_messages
from shoal.surfaces.shared.sampling import schema_guide
from shoal.types import Fields, Generate, Guide, Message, Sampling, Tool

DIALECT = "anthropic.messages"

_NAMES = {"stop": "stop_sequences"}
_EMPTY = frozenset({b"[]", b"{}", b'""'})
_CLIENT_TEXT = re.compile(r"[\w.-]{1,64}")
_EFFORTS = {"low": "low", "medium": "medium", "xhigh": "high", "max": "high"}
"""Template variables. `high` is the default of Anthropic's models: it sets nothing, as if it were absent."""


class _Selection(NamedTuple):
    mode: Literal["auto", "none", "required", "function"] = "auto"
    name: str = ""


class Conversion(NamedTuple):
    """A task, and the names of what was left out of its request."""

    task: Generate
    ignored: tuple[str, ...]


def build_task(
    payload: wire.MessagesRequest, model: str, adapter: str, *, raw: tuple[str, Fields], extras: Fields
) -> Conversion:
    """Build the task. Raises EmptyInput, InvalidValue, WrongType and Unsupported, with the field at fault."""
    _refuse_hosted(payload)
    ignored: dict[str, None] = {}

    def ignore(name: str) -> None:
        ignored[name if _CLIENT_TEXT.fullmatch(name) else name.partition(".")[0]] = None

    if to_json_bytes(payload.context_management) is not None:
        ignore("context_management")
    tools = _to_tools(payload.tools or (), ignore)
    mode, name = _to_selection(payload.tool_choice, tools)
    messages = to_messages(payload, ignore)
    continues = _continues(messages)
    task = Generate(
        model=model,
        messages=messages,
        sampling=_to_sampling(payload),
        stream=bool(payload.stream),
        tools=tools,
        tool_choice=mode,
        tool_name=name,
        parallel_tool_calls=not (payload.tool_choice and payload.tool_choice.disable_parallel_tool_use),
        continue_final=continues,
        add_generation_prompt=not continues,
        template_kwargs=_to_template_kwargs(payload),
        adapter=adapter,
        raw=raw,
        extras=extras,
        # Claude Code sends system messages within conversations, and expects every model to accept them.
        folds_instructions=True,
        names=_NAMES,
    )
    return Conversion(task, tuple(ignored))


def _refuse_hosted(payload: wire.MessagesRequest) -> None:
    """Refuse fields whose work Anthropic's service does itself. Raises Unsupported."""
    hosted = {
        "thread": "this server stores nothing; send the whole conversation as 'messages'",
        "compaction": "let the model summarize in a message of its own; omit it",
        "container": "this server runs no code; omit it",
        "mcp_servers": "this server connects to no MCP servers; connect the client to them, and send 'tools'",
    }
    for name, why in hosted.items():
        value = to_json_bytes(getattr(payload, name))
        if value is not None and value not in _EMPTY:
            raise Unsupported(f"'{name}' is not supported: {why}.", param=name)


def _to_tools(definitions: Sequence[wire.ToolDefinition], ignore: Ignore) -> list[Tool]:
    tools = []
    for at, each in enumerate(definitions):
        if each.type not in (None, "custom"):
            ignore(f"tools.{each.type}")
            continue
        if not each.name:
            raise WrongType(f"Missing required field 'tools[{at}].name'.", param="tools")
        schema = each.input_schema or {}
        check_depth(schema, "tools")
        tools.append(
            Tool(name=each.name, description=each.description or "", parameters=schema, strict=bool(each.strict))
        )
    return tools


def _to_selection(choice: wire.ToolChoice | None, tools: Sequence[Tool]) -> _Selection:
    if choice is None or choice.type == "auto":
        return _Selection()
    if choice.type == "none":
        return _Selection("none")
    if not tools:
        raise InvalidValue(
            "'tool_choice' requires a tool, but there are none that the client runs; send 'tools'.", param="tool_choice"
        )
    if choice.type == "any":
        return _Selection("required")
    if choice.name not in {tool.name for tool in tools}:
        raise InvalidValue(
            f"'tool_choice' names {(choice.name or '')[:64]!r}, which is not in 'tools'.", param="tool_choice"
        )
    return _Selection("function", choice.name or "")


def _continues(messages: Sequence[Message]) -> bool:
    """Whether the last message begins the answer: a turn of the assistant with text and without calls."""
    return messages[-1].role == "assistant" and not messages[-1].tool_calls if messages else False


def _to_sampling(payload: wire.MessagesRequest) -> Sampling:
    return Sampling(
        max_tokens=payload.max_tokens,
        temperature=payload.temperature,
        top_p=payload.top_p,
        top_k=-1 if payload.top_k == 0 else payload.top_k,
        stop=[text for text in payload.stop_sequences or () if text],
        guide=_to_guide(payload),
    )


def _to_guide(payload: wire.MessagesRequest) -> Guide | None:
    field = "output_config"
    form = payload.output_config.format if payload.output_config is not None else None
    if form is None:
        field, form = "output_format", payload.output_format
    if form is None:
        return None
    guide = schema_guide(to_json_bytes(form.schema), field)
    if guide is None:
        raise WrongType(f"The schema of '{field}' is missing; send the schema of the answer.", param=field)
    return msgspec.structs.replace(guide, field=field)


def _to_template_kwargs(payload: wire.MessagesRequest) -> dict[str, Any]:
    """Return the template variables for thinking, under the names that templates of thinking models read. The other
    types leave the decision to the model."""
    made: dict[str, Any] = {}
    if payload.thinking is not None and payload.thinking.type in ("enabled", "disabled"):
        made["enable_thinking"] = payload.thinking.type == "enabled"
    effort = _EFFORTS.get(payload.output_config.effort or "") if payload.output_config is not None else None
    if effort is not None:
        made["reasoning_effort"] = effort
    return made
