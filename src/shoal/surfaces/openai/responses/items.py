"""Convert the items of a request to messages. Raises RequestErrors that name the field."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from shoal.errors import EmptyInput, InvalidValue, Unsupported, WrongType
from shoal.http.json.extras import ArgumentsLimit, to_json_bytes, to_json_text
from shoal.surfaces.openai import wire_chat
from shoal.surfaces.openai.conversation import to_part
from shoal.surfaces.openai.responses import wire
from shoal.surfaces.openai.responses.custom_input import to_arguments
from shoal.surfaces.openai.responses.reasoning import join_texts, unseal
from shoal.surfaces.openai.responses.tool_names import Kind, ToolName
from shoal.surfaces.openai.responses.tools import Tools
from shoal.surfaces.shared.wire_conversations import MAX_CALLS, Json
from shoal.types import Message, Part, ToolCall

T = TypeVar("T")

_ROLES = frozenset({"developer", "system", "user", "assistant"})
_CALLS: dict[str, Kind] = {
    "function_call": "function",
    "custom_tool_call": "custom",
    "tool_search_call": "tool_search",
}
_OUTPUTS = frozenset({"function_call_output", "custom_tool_call_output"})
_SERVER_ITEMS = frozenset(
    {
        *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"),
        *("mcp_list_tools", "mcp_call", "mcp_approval_request", "mcp_approval_response"),
    }
)
"""Records of tools that another server has run: the answers after them say what came of it."""

_CONTENT = msgspec.json.Decoder(str | list[wire.ContentPart] | None)
_PARTS = msgspec.json.Decoder(list[wire.ContentPart] | None)
_TEXT = msgspec.json.Decoder(str | None)
_IMAGE: msgspec.json.Decoder[wire_chat.ImageUrl | str | None] = msgspec.json.Decoder(wire_chat.ImageUrl | str | None)
_TOOLS: msgspec.json.Decoder[Sequence[wire.ResponseTool]] = msgspec.json.Decoder(list[wire.ResponseTool])


def to_messages(items: str | Sequence[wire.InputItem], instructions: str | None, tools: Tools) -> list[Message]:
    """Convert a conversation; tools that its searches have found are added to `tools`."""
    conversation = _Conversation(tools)
    if instructions:
        conversation.messages.append(Message(role="system", content=instructions))
    if not items:
        raise EmptyInput("'input' is empty; send a text, or at least one item.", param="input")
    if isinstance(items, str):
        return [*conversation.messages, Message(role="user", content=items)]
    for at, item in enumerate(items):
        conversation.add(item, f"input[{at}]")
    return conversation.finish()


class _Conversation:
    """Collects messages. Reasoning belongs to the turn after it, calls to the turn before them. Images in outputs come
    after all outputs, as a user's, because chat completions have only texts there."""

    def __init__(self, tools: Tools) -> None:
        self.messages: list[Message] = []
        self._tools = tools
        self._thought = ""
        self._images: list[Part] = []
        self._arguments = ArgumentsLimit("input")

    def add(self, item: wire.InputItem, where: str) -> None:
        kind = item.type or ("message" if item.role is not None else "")
        if kind not in _OUTPUTS:
            self._place_images()
        match kind:
            case "message":
                self._add_message(item, where)
            case "reasoning":
                self._thought = "\n".join(filter(None, (self._thought, _read_reasoning(item, where))))
            case "tool_search_output":
                self._add_found_tools(item, where)
            case _ if kind in _CALLS:
                self._add_call(item, where, _CALLS[kind])
            case _ if kind in _OUTPUTS:
                self._add_output(item, where)
            case _ if kind in _SERVER_ITEMS:
                self._tools.ignore("input", kind)
            case _:
                raise Unsupported(
                    f"'{where}' is of type {kind[:64]!r}; send messages, function calls and their outputs.",
                    param="input",
                )

    def finish(self) -> list[Message]:
        self._place_images()
        if not self.messages:
            raise EmptyInput("'input' has no messages; send at least one.", param="input")
        return self.messages

    def _add_message(self, item: wire.InputItem, where: str) -> None:
        content = _read_content(item.content, f"{where}.content")
        if item.role not in _ROLES or content is None:
            raise WrongType(f"'{where}' needs a 'role' ({', '.join(sorted(_ROLES))}) and 'content'.", param="input")
        reasoning = self._thought if self._thought and item.role == "assistant" else None
        self._thought = ""
        self.messages.append(Message(role=item.role, content=content, reasoning=reasoning))

    def _add_call(self, item: wire.InputItem, where: str, kind: Kind) -> None:
        if kind == "tool_search" and item.call_id is None:
            self._tools.ignore("input", "tool_search_call")  # a server has run it
            return
        name = item.name or ("tool_search" if kind == "tool_search" else "")
        if item.call_id is None or not name:
            raise WrongType(f"'{where}' needs 'call_id', 'name' and 'arguments'.", param="input")
        flat = self._tools.names.flatten(ToolName(kind, name, item.namespace or ""))
        text = to_arguments(item.input or "") if kind == "custom" else _read_arguments(item, where)
        self._join_turn(ToolCall(id=item.call_id, name=flat, arguments=self._arguments.check(text)))

    def _join_turn(self, call: ToolCall) -> None:
        """Add a call to its assistant turn: here calls are separate items, not part of a message."""
        last = self.messages[-1] if self.messages else None
        if last is None or last.role != "assistant" or self._thought:
            self.messages.append(Message(role="assistant", tool_calls=[call], reasoning=self._thought or None))
            self._thought = ""
            return
        last.tool_calls.append(call)  # safe to change: this module made the message
        if len(last.tool_calls) > MAX_CALLS:
            raise InvalidValue(
                f"'input' has more than {MAX_CALLS} function calls in one turn; send their outputs after "
                "them, or remove some.",
                param="input",
            )

    def _add_output(self, item: wire.InputItem, where: str) -> None:
        content = _read_content(item.output, f"{where}.output")
        if item.call_id is None or content is None:
            raise WrongType(f"'{where}' needs 'call_id' and 'output'.", param="input")
        if isinstance(content, list):
            images = [part for part in content if part.type == "image"]
            content = "\n".join(part.text for part in content if part.type == "text")
            if images:
                self._images += images
                content = content or "(See the image below.)"
        self.messages.append(Message(role="tool", content=content, tool_call_id=item.call_id))

    def _add_found_tools(self, item: wire.InputItem, where: str) -> None:
        names = self._tools.add(_decode(item.tools, _TOOLS, f"{where}.tools") or (), f"{where}.tools")
        if item.call_id is None:
            self._tools.ignore("input", "tool_search_output")
            return
        text = f"Tools that can be called now: {', '.join(names)}" if names else "No tools were found."
        self.messages.append(Message(role="tool", content=text, tool_call_id=item.call_id))

    def _place_images(self) -> None:
        if self._images:
            self.messages.append(Message(role="user", content=self._images))
            self._images = []


def _read_reasoning(item: wire.InputItem, where: str) -> str:
    """Return the text of reasoning, in the first form that there is."""
    content = join_texts(_decode(item.content, _CONTENT, f"{where}.content"))
    summary = join_texts(_decode(item.summary, _PARTS, f"{where}.summary"), "\n\n")
    return content or unseal(item.encrypted_content or "") or summary


def _read_arguments(item: wire.InputItem, where: str) -> str:
    """Return arguments as text: those of a search are an object."""
    text = to_json_text(item.arguments) or '""'
    if not text.startswith('"'):
        return text
    return _decode(item.arguments, _TEXT, f"{where}.arguments") or ""


def _read_content(raw: Json, where: str) -> str | list[Part] | None:
    """Convert content to a text or parts. A single text part becomes a text, which more templates support."""
    content = _decode(raw, _CONTENT, where)
    if content is None or isinstance(content, str):
        return content
    parts = [_to_part(each, f"{where}[{at}]") for at, each in enumerate(content)]
    return parts[0].text if len(parts) == 1 and parts[0].type == "text" else parts


def _to_part(part: wire.ContentPart, where: str) -> Part:
    if part.type == "input_file":
        return Part(text=_read_file(part, where))
    url = _decode(part.image_url, _IMAGE, f"{where}.image_url")
    known = wire_chat.ContentPart(type=part.type, text=part.text, refusal=part.refusal, image_url=url)
    return to_part(known, where)


def _read_file(part: wire.ContentPart, where: str) -> str:
    """Return a file that is a text, after its name."""
    if not part.file_data:
        raise Unsupported(f"'{where}' is an 'input_file' without 'file_data'; send the file itself.", param="input")
    try:
        data = base64.b64decode(part.file_data.rpartition(",")[2], validate=True)
        text = data.decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        text = "\0"
    if "\0" in text:
        raise Unsupported(
            f"'{where}' is an 'input_file' that is not UTF-8 text in base64; send its text as an input_text.",
            param="input",
        )
    return f"{part.filename}:\n\n{text}" if part.filename else text


def _decode(raw: Json, decoder: msgspec.json.Decoder[T], where: str) -> T | None:
    data = to_json_bytes(raw)
    if data is None:
        return None
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WrongType(f"'{where}': {error}", param="input") from None
