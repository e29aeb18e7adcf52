"""Convert the turns of Anthropic's Messages to messages of a task. Raises RequestErrors that name the field.

As in Anthropic's API, neighboring turns of one role are one turn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from shoal.errors import EmptyInput, InvalidValue, Unsupported, WrongType
from shoal.http.json.extras import ArgumentsLimit, to_json_text
from shoal.surfaces.anthropic import wire
from shoal.surfaces.shared.wire_conversations import MAX_CALLS
from shoal.types import Message, Part, ToolCall

Ignore = Callable[[str], None]
"""Takes the name of something that is left out."""

_BILLING = "x-anthropic-billing-header:"
"""Begins a system block of Claude Code that is for Anthropic alone; as it changes, it would spoil prefix caches."""
_IMAGES = frozenset({"image/jpeg", "image/png", "image/gif", "image/webp"})
# Of tools that run in Anthropic's service, and what it adds to conversations.
_SERVER_BLOCK = re.compile(
    r"server_tool_use|mcp_tool_(?:use|listing)|container_upload|fallback|browser_state|\w+_tool_result"
    r"|tool_(?:reference|addition|removal)"
)


class _Piece(NamedTuple):
    """A block and its place in the body."""

    block: wire.Block
    where: str


class _Turn(NamedTuple):
    role: str
    pieces: list[_Piece]


def to_messages(payload: wire.MessagesRequest, ignore: Ignore) -> list[Message]:
    """Convert a whole conversation. What is left out goes to `ignore`."""
    if not payload.messages:
        raise EmptyInput("'messages' is empty; send at least one message.", param="messages")
    system, turns = _join_turns(payload)
    made = [Message(role="system", content=system)] if system else []
    arguments = ArgumentsLimit("messages")
    end = 0  # of the last answer and its results: more results go there, before system messages
    for turn in turns:
        if turn.role == "system":
            made.append(Message(role="system", content=_system_text(turn.pieces)))
        elif turn.role == "assistant":
            made += _to_assistant(turn, arguments, ignore)
            end = len(made)
        else:
            results, rest = _to_user(turn, ignore)
            if results:
                at = end or len(made)
                made[at:at] = results
                end = at + len(results)
            made += rest
    return made


def _join_turns(payload: wire.MessagesRequest) -> tuple[str, list[_Turn]]:
    """Return the system prompt, which has the system messages at the beginning, and the turns."""
    system = [_system_text(_to_pieces(payload.system or [], "system"))]
    turns: list[_Turn] = []
    for at, message in enumerate(payload.messages):
        role, pieces = message.role, _to_pieces(message.content, f"messages[{at}].content")
        if role not in ("user", "assistant", "system"):
            raise WrongType(
                f"'messages[{at}].role' is {role[:64]!r}; send user, assistant or system.", param="messages"
            )
        if role == "system" and not turns:
            system.append(_system_text(pieces))
        elif turns and turns[-1].role == role:
            turns[-1].pieces.extend(pieces)
        else:
            turns.append(_Turn(role, pieces))
    return "\n\n".join(filter(None, system)), turns


def _to_pieces(content: wire.Content, where: str) -> list[_Piece]:
    if isinstance(content, str):
        return [_Piece(wire.Block(type="text", text=content), where)]
    return [_Piece(block, f"{where}[{at}]") for at, block in enumerate(content)]


def _system_text(pieces: Sequence[_Piece]) -> str:
    for piece in pieces:
        if piece.block.type != "text":
            raise _unsupported_error(piece, "text")
    texts = [_require(piece.block.text, piece, "text") for piece in pieces]
    return "\n\n".join(text for text in texts if text and not text.startswith(_BILLING))


def _to_user(turn: _Turn, ignore: Ignore) -> tuple[list[Message], list[Message]]:
    """Return the results of tools, each a message, and the rest of the turn. Images of results are moved to the
    rest: most servers read no images of tools."""
    results: list[Message] = []
    rest: list[Part] = []
    for piece in turn.pieces:
        if piece.block.type == "tool_result":
            message, images = _to_result(piece, ignore)
            results.append(message)
            rest += images
        else:
            rest += _to_parts(piece, ignore)
    return results, [Message(role="user", content=_to_content(rest))] if rest or not results else []


def _to_result(piece: _Piece, ignore: Ignore) -> tuple[Message, list[Part]]:
    block = piece.block
    ident = _require(block.tool_use_id, piece, "tool_use_id")
    content = block.content if isinstance(block.content, str | list) else ""
    parts = [part for inner in _to_pieces(content, f"{piece.where}.content") for part in _to_parts(inner, ignore)]
    others = [part for part in parts if part.type != "text"]
    text = "\n".join(part.text for part in parts if part.type == "text")
    if block.is_error and not text.casefold().startswith(("error", "<tool_use_error")):
        text = f"Error: {text}"
    if others:
        text = text or "See the next message."
        others.insert(0, Part(text=f"From the result of {ident}:"))
    return Message(role="tool", content=text, tool_call_id=ident), others


def _to_content(parts: Sequence[Part]) -> str | list[Part]:
    """Return texts alone as one text, which more servers and templates accept."""
    if all(part.type == "text" for part in parts):
        return "\n\n".join(part.text for part in parts)
    return list(parts)


def _to_parts(piece: _Piece, ignore: Ignore) -> Iterator[Part]:
    block = piece.block
    match block.type:
        case "text":
            yield Part(text=_require(block.text, piece, "text"))
        case "image":
            yield Part(type="image", url=_to_url(piece))
        case "document":
            yield from _to_document(piece, ignore)
        case "search_result":
            source = block.source if isinstance(block.source, str) else ""
            yield Part(text="\n".join(filter(None, (block.title, source))))
            yield from _to_inner(block.content, piece, ignore)
        case kind if _SERVER_BLOCK.fullmatch(kind):
            ignore(f"messages.{kind}")
        case _:
            raise _unsupported_error(piece, "text, image, document, search_result and tool_result")


def _to_document(piece: _Piece, ignore: Ignore) -> Iterator[Part]:
    source = piece.block.source
    if not isinstance(source, wire.Source):
        raise WrongType(f"'{piece.where}.source' is missing; send the document.", param="messages")
    if source.type not in ("text", "content"):
        yield Part(type="other", kind="document")  # a PDF: servers that speak this API may read it
        return
    if piece.block.title:
        yield Part(text=piece.block.title)
    yield from _to_inner(source.data if source.type == "text" else source.content, piece, ignore)


def _to_inner(content: object, piece: _Piece, ignore: Ignore) -> Iterator[Part]:
    inner = content if isinstance(content, str | list) else []
    for each in _to_pieces(inner, f"{piece.where}.content"):
        yield from _to_parts(each, ignore)


def _to_url(piece: _Piece) -> str:
    source = piece.block.source
    if isinstance(source, wire.Source):
        if source.type == "base64" and source.data and source.media_type in _IMAGES:
            return f"data:{source.media_type};base64,{source.data}"
        if source.type == "url" and source.url:
            return source.url
        if source.type == "file":
            raise Unsupported(
                f"'{piece.where}.source' is a file, and this server stores none; send base64 or a url.",
                param="messages",
            )
    raise WrongType(
        f"'{piece.where}.source' must be a url, or base64 with 'data' and 'media_type': {', '.join(sorted(_IMAGES))}.",
        param="messages",
    )


def _to_assistant(turn: _Turn, arguments: ArgumentsLimit, ignore: Ignore) -> list[Message]:
    """Return the turn as one message, or none if nothing is left of it."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for piece in turn.pieces:
        block = piece.block
        match block.type:
            case "text":
                texts.append(_require(block.text, piece, "text"))
            case "thinking":
                thoughts.append(block.thinking or "")
            case "tool_use":
                calls.append(_to_call(piece, arguments))
            case "compaction" if isinstance(block.content, str):
                texts.append(block.content)  # the summary of earlier turns
            case "redacted_thinking":
                pass  # encrypted: only Anthropic's models read it
            case kind if _SERVER_BLOCK.fullmatch(kind):
                ignore(f"messages.{kind}")
            case _:
                raise _unsupported_error(piece, "text, thinking and tool_use")
    if len(calls) > MAX_CALLS:
        raise InvalidValue(f"'messages' has more than {MAX_CALLS} calls in one turn; remove some.", param="messages")
    text, thought = "".join(texts), "".join(thoughts)
    if not (text or calls):
        return []
    return [Message(role="assistant", content=text or None, tool_calls=calls, reasoning=thought or None)]


def _to_call(piece: _Piece, arguments: ArgumentsLimit) -> ToolCall:
    block = piece.block
    text = to_json_text(block.input) or "{}"
    ident, name = _require(block.id, piece, "id"), _require(block.name, piece, "name")
    return ToolCall(id=ident, name=name, arguments=arguments.check(text))


def _require(value: str | None, piece: _Piece, field: str) -> str:
    if value is None:
        raise WrongType(f"Missing required field '{piece.where}.{field}'.", param=piece.where.partition("[")[0])
    return value


def _unsupported_error(piece: _Piece, accepted: str) -> Unsupported:
    return Unsupported(
        f"'{piece.where}' is of type {piece.block.type[:64]!r}; send {accepted} blocks.",
        param=piece.where.partition("[")[0],
    )
