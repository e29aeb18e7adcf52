"""Split a conversation into turns, to drop its oldest ones, and move instructions into them."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from shoal.pipelines.chat.messages import text_of
from shoal.types import Message, Part

INSTRUCTIONS = ("system", "developer")


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
    """Return the conversation with instructions only in its first message, for models that accept none elsewhere: those
    at the beginning are joined, and later ones become part of the user's turn, in tags. Turns that become neighbors of
    one role are joined, and no call is separated from its results."""
    made: list[Message] = []
    is_folded = False  # the last message is a user's, with an instruction in it
    for message in messages:
        is_instruction = message.role in INSTRUCTIONS
        if is_instruction and len(made) == 1 and made[0].role in INSTRUCTIONS:
            made[0] = _join(made[0], message)
        elif is_instruction and made:
            text = f"<system>\n{text_of(message)}\n</system>"
            is_folded = _add_to_user(made, Message(role="user", content=text))
        elif is_folded and message.role == "user":
            _add_to_user(made, message)
        elif is_folded and message.role in ("tool", "function"):
            made.insert(-1, message)
        else:
            made.append(message)
            is_folded = False
    return made


def _add_to_user(messages: list[Message], message: Message) -> bool:
    if messages[-1].role == "user":
        messages[-1] = _join(messages[-1], message)
    else:
        messages.append(message)
    return True


def _join(first: Message, second: Message) -> Message:
    one, two = first.content or "", second.content or ""
    if isinstance(one, str) and isinstance(two, str):
        return structs.replace(first, content=f"{one}\n\n{two}")
    parts = [[Part(text=content)] if isinstance(content, str) else content for content in (one, two)]
    return structs.replace(first, content=[*parts[0], *parts[1]])
