"""Split a conversation into turns, to drop its oldest ones."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.types import Message

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
