"""Convert messages to the dicts that transformers passes to `apply_chat_template`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from msgspec import structs

from shoal.pipelines.chat.tools import hermes, phi4
from shoal.types import Message, Tool, ToolCall


@dataclass(frozen=True, slots=True)
class Form:
    """The message form a template expects. `parts`: whether it reads content parts "never", "also", or "only". `empty`:
    the content of a turn that only calls tools. `json_arguments`: a call's arguments are JSON text, not an object.
    `developer`, `function`: it knows these roles. `later_instructions`: it shows those behind the first
    message. `tools_in_system`: it shows tools as a text of the system message. `calls_as_text`: it shows calls only as
    part of the content, in the format of this parser."""

    parts: Literal["never", "also", "only"] = "never"
    empty: str | None = ""
    json_arguments: bool = False
    developer: bool = False
    function: bool = False
    later_instructions: bool = False
    tools_in_system: bool = False
    calls_as_text: Literal["hermes", "phi4"] | None = None


def text_of(message: Message) -> str | None:
    """Return the content as one text, with its text parts on separate lines."""
    if isinstance(message.content, list):
        return "\n".join(part.text for part in message.content if part.type == "text")
    return message.content


def as_dicts(messages: Sequence[Message], form: Form, tools: Sequence[Tool] = ()) -> list[dict[str, Any]]:
    """Convert messages to dicts. A tool result gets the name of the called function if only the call has it. `tools`
    are for templates that show them in the system message."""
    names: dict[str, str] = {}
    made: list[dict[str, Any]] = []
    for message in messages:
        names |= {call.id: call.name for call in message.tool_calls}
        made.append(_as_dict(message, form, names))
    if tools and form.tools_in_system:
        if not made or made[0]["role"] != "system":
            made.insert(0, {"role": "system", "content": ""})
        made[0]["tools"] = json.dumps(functions_as_dicts(tools), ensure_ascii=False)
    return made


def _as_dict(message: Message, form: Form, names: Mapping[str, str]) -> dict[str, Any]:
    if message.tool_calls and form.calls_as_text:
        message = structs.replace(message, content=_write_calls(message, form), tool_calls=[])
    made: dict[str, Any] = {"role": _role(message.role, form), "content": _content(message, form)}
    name = message.name
    if message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
        name = name or names.get(message.tool_call_id)
    if name is not None:
        made["name"] = name
    if message.tool_calls:
        made["tool_calls"] = [_call(call, form) for call in message.tool_calls]
    if message.reasoning is not None:
        made["reasoning_content"] = message.reasoning
    return made


def _role(role: str, form: Form) -> str:
    if role == "developer" and not form.developer:
        return "system"
    if role == "function" and not form.function:
        return "tool"
    return role


def _content(message: Message, form: Form) -> str | list[dict[str, str]] | None:
    content = message.content
    if content is None or (message.tool_calls and not content):  # clients send null or an empty text
        return [] if form.parts == "only" else form.empty if message.tool_calls else ""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if form.parts == "only" else content
    if form.parts == "only" or (form.parts == "also" and len(content) > 1):
        return [{"type": "text", "text": part.text} for part in content if part.type == "text"]
    return text_of(message)


def _write_calls(message: Message, form: Form) -> str:
    """Return the content with the calls behind it, as the model writes them."""
    text = text_of(message) or ""
    calls = [json.dumps(_call(call, form)["function"], ensure_ascii=False) for call in message.tool_calls]
    if form.calls_as_text == "hermes":
        return "\n".join(filter(None, (text, *(f"{hermes.OPEN}\n{call}\n{hermes.CLOSE}" for call in calls))))
    end = phi4.CLOSE if form.tools_in_system else ""  # Granite has no end marker
    return f"{text}{phi4.OPEN}[{', '.join(calls)}]{end}"


def _call(call: ToolCall, form: Form) -> dict[str, Any]:
    arguments: Any = call.arguments
    if not form.json_arguments:
        try:
            arguments = json.loads(call.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = call.arguments  # return badly formed arguments to the model unchanged
    return {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": arguments}}


def functions_as_dicts(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Convert tools to dicts of their functions alone, as SmolLM3's `xml_tools` are."""
    return [_function(tool) for tool in tools]


def tools_as_dicts(tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
    """Convert tools to dicts; None without tools, the one form of "no tools" that all templates understand."""
    return [{"type": "function", "function": _function(tool)} for tool in tools] or None


def _function(tool: Tool) -> dict[str, Any]:
    parameters = tool.parameters or {"type": "object", "properties": {}}
    return {"name": tool.name, "description": tool.description, "parameters": parameters}
