"""Split a conversation into turns, to drop its oldest ones, and move instructions into them."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from shoal.pipelines.chat.messages import text_of
from shoal.types import Message, Part

INSTRUCTIONS = ("system", "developer")
_RESULTS = ("tool", "function")


def split_turns(messages: Sequence[Message]) -> list[list[int]]:
    """Return the message indices of each turn: a user message and everything after it, so that no tool result loses its
    call and no answer its question. Instructions belong to no turn."""
    made: list[list[int]] = []
    for place, message in enumerate(messages):
        if message.role in INSTRUCTIONS:
            continue
        if message.role == "user" or not made:
            made.append([])
        made[-1].append(place)
    return made


def drop_turns(messages: Sequence[Message], left_out: Sequence[Sequence[int]]) -> list[Message]:
    gone = {place for turn in left_out for place in turn}
    return [message for place, message in enumerate(messages) if place not in gone]


def fold_instructions(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation with instructions only in its first message, for models that accept none elsewhere.

    Those at the beginning are joined. Later ones become part of a tool's result before them, else of the user's turn,
    in tags. No instruction adds a neighbor of one role, or separates a call from its results.
    """
    made: list[Message] = []
    waiting: Message | None = None  # instructions behind an answer or calls
    is_folded = False  # the last message is a user's and ends in an instruction
    for message in messages:
        last = made[-1].role if made else ""
        if message.role in INSTRUCTIONS:
            note = message
            if last and last not in INSTRUCTIONS:
                note = Message(role="user", content=f"<system>\n{text_of(message)}\n</system>")
            if waiting is not None:
                waiting = _join(waiting, note)
            elif last in ("user", *_RESULTS, *INSTRUCTIONS):
                made[-1] = _join(made[-1], note)
                is_folded = last == "user"
            elif last:
                waiting = note
            else:
                made.append(note)
            continue
        if is_folded and message.role == "user":
            made[-1] = _join(made[-1], message)
            continue
        if waiting is None:
            made.append(message)
        elif message.role == "user":
            made.append(_join(waiting, message))
        elif message.role in _RESULTS:
            made.append(_join(message, waiting))
        else:
            made += [waiting, message]
        waiting, is_folded = None, False
    return made if waiting is None else [*made, waiting]


def _join(first: Message, second: Message) -> Message:
    """Return the first message with the content of both."""
    one, two = first.content or "", second.content or ""
    if isinstance(one, str) and isinstance(two, str):
        return structs.replace(first, content=f"{one}\n\n{two}")
    parts = [[Part(text=content)] if isinstance(content, str) else content for content in (one, two)]
    return structs.replace(first, content=[*parts[0], *parts[1]])
