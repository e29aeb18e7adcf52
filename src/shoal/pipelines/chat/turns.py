"""The turns of a conversation, for leaving out its oldest ones."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.types import Message

INSTRUCTIONS = ("system", "developer")


def split_turns(messages: Sequence[Message]) -> list[list[int]]:
    """The places of each turn's messages: what a user said and all that followed, so that a tool's result never stands
    without its call, and nothing answers what is not there. Instructions are in none."""
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
