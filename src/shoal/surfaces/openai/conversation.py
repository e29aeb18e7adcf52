"""Convert messages and tools of chat completions to those of a task. Raises RequestErrors that name the field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from shoal.errors import InvalidValue, Unsupported, WrongType
from shoal.http.json.extras import ArgumentsLimit, check_depth
from shoal.surfaces.openai import wire_chat as wire
from shoal.types import Message, Part, Tool, ToolCall

ToolChoice = Literal["auto", "none", "required", "function"]

_TEXTS = frozenset({"text", "input_text", "output_text"})
_UPSTREAM_PARTS = frozenset({"input_audio", "audio_url", "video_url", "file"})
"""Parts that only upstream servers may read."""


class ToolSelection(NamedTuple):
    """The tool choice. `name` is the function that must be called in mode "function"."""

    mode: ToolChoice = "auto"
    name: str = ""


def to_messages(messages: Sequence[wire.ChatMessage]) -> list[Message]:
    arguments = ArgumentsLimit("messages")
    return [_to_message(message, at, arguments) for at, message in enumerate(messages)]


def to_content(content: str | Sequence[wire.ContentPart] | None, where: str) -> str | list[Part] | None:
    """Convert content to a text or parts. A single text part becomes a text, which more templates support.

    `where` is the place in the body.
    """
    if content is None or isinstance(content, str):
        return content
    parts = [to_part(each, f"{where}[{at}]") for at, each in enumerate(content)]
    return parts[0].text if len(parts) == 1 and parts[0].type == "text" else parts


def to_part(part: wire.ContentPart, where: str) -> Part:
    if part.type in _TEXTS and part.text is not None:
        return Part(text=part.text)
    if part.type == "refusal" and part.refusal is not None:
        return Part(text=part.refusal)
    if part.type in ("image_url", "input_image"):
        url = part.image_url.url if isinstance(part.image_url, wire.ImageUrl) else part.image_url
        if url:
            return Part(type="image", url=url)
    if part.type in _UPSTREAM_PARTS:
        return Part(type="other", kind=part.type)
    field = where.partition("[")[0]
    if part.type in (*_TEXTS, "refusal", "image_url", "input_image"):
        raise WrongType(f"'{where}' is a part of type {part.type!r} without its content; add it.", param=field)
    raise Unsupported(f"'{where}' is of type {part.type[:64]!r}; send text and image_url parts.", param=field)


def to_tools(definitions: Sequence[wire.ToolDefinition] | None) -> list[Tool]:
    tools = []
    for at, each in enumerate(definitions or ()):
        if each.type != "function":
            raise Unsupported(
                f"'tools[{at}]' is of type {each.type[:64]!r}; only functions are supported.", param="tools"
            )
        if each.function is None:
            raise WrongType(f"Missing required field 'tools[{at}].function'.", param="tools")
        tools.append(to_tool(each.function, "tools"))
    return tools


def to_tool(function: wire.FunctionDefinition, field: str) -> Tool:
    parameters = function.parameters or {}
    check_depth(parameters, field)
    return Tool(
        name=function.name,
        description=function.description or "",
        parameters=parameters,
        strict=bool(function.strict),
    )


def to_tool_selection(
    choice: str | wire.NamedTool | wire.FunctionName | None, tools: Sequence[Tool], field: str
) -> ToolSelection:
    """Convert `tool_choice`, or the older `function_call`, and check it against the tools."""
    if choice is None:
        return ToolSelection()
    if isinstance(choice, wire.NamedTool):
        if choice.type != "function":
            raise Unsupported(f"'{field}' is of type {choice.type[:64]!r}; name a function.", param=field)
        if choice.function is None:
            raise WrongType(f"Missing required field '{field}.function'.", param=field)
        choice = choice.function
    if isinstance(choice, wire.FunctionName):
        if choice.name not in {tool.name for tool in tools}:
            raise InvalidValue(f"'{field}' names {choice.name[:64]!r}, which is not in 'tools'.", param=field)
        return ToolSelection("function", choice.name)
    match choice:
        case "auto" | "none":
            return ToolSelection(choice)
        case "required" if tools:
            return ToolSelection("required")
        case "required":
            raise InvalidValue(f"'{field}' requires a tool, but there are none; send 'tools'.", param=field)
        case _:
            raise WrongType(f"'{field}' is {choice[:64]!r}; send none, auto, required or one function.", param=field)


def _to_message(message: wire.ChatMessage, at: int, arguments: ArgumentsLimit) -> Message:
    """Convert the message at index `at`."""
    calls = [_to_call(each, number, arguments) for number, each in enumerate(message.tool_calls or ())]
    role, call_id = message.role, message.tool_call_id
    if message.function_call is not None:
        called = message.function_call
        calls.append(ToolCall(id=f"call_{called.name}", name=called.name, arguments=arguments.check(called.arguments)))
    if role == "function" and call_id is None:
        # The predecessor of "tool" had no ids: only the function's name links an answer to its call.
        call_id = f"call_{message.name or ''}"
    content: str | list[Part] | None
    if isinstance(message.content, str):
        content = message.content
    else:
        content = to_content(message.content, f"messages[{at}].content")
        if content is None and message.refusal is not None:
            content = message.refusal
        if content is None and role != "assistant":
            raise WrongType(
                f"'messages[{at}].content' is missing; only assistant messages may omit it.", param="messages"
            )
        if content is None and not calls:
            content = ""
    reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    return Message(
        role=role, content=content, name=message.name, tool_calls=calls, tool_call_id=call_id, reasoning=reasoning
    )


def _to_call(call: wire.SentToolCall, at: int, arguments: ArgumentsLimit) -> ToolCall:
    called = call.function
    return ToolCall(id=call.id or f"call_{at}", name=called.name, arguments=arguments.check(called.arguments))
