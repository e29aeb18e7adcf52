"""Where an object in JSON ends, found in turns with the event loop: its texts may be long."""

from __future__ import annotations

import asyncio
import re

import msgspec

MAX_NESTED = 1024
"""Objects inside of one element of a list: far more than the parts of any text."""

STEP = 262_144
"""Bytes looked at between two turns."""

_BETWEEN = re.compile(rb'(?s:[^"{}]++|"(?:[^"\\]++|\\.)*+")*+')
_SPACE = re.compile(rb"[ \t\r\n,]*+")
_INSIDE = re.compile(rb'(?s:[^"\\]++|\\.)*+')
_QUOTE, _OPEN, _CLOSE, _LIST, _LIST_END = b'"{}[]'


async def find_object_end(raw: memoryview, at: int, place: str) -> int:
    """Just behind the object that begins at `at` in `raw`, which is JSON.

    Raises msgspec.ValidationError for more than MAX_NESTED objects inside of it; `place` is its name in the body.
    """
    depth = opened = 0
    turn = at
    while True:
        if at - turn > STEP:
            await asyncio.sleep(0)
            turn = at
        at = _match_end(_BETWEEN, raw, at)
        found = raw[at]
        if found == _QUOTE:  # a text that reaches beyond the step
            at = await _find_text_end(raw, at + 1)
        elif found == _OPEN:
            at, depth, opened = at + 1, depth + 1, opened + 1
            if opened > MAX_NESTED + 1:
                raise msgspec.ValidationError(f"Holds more than {MAX_NESTED} objects - at `$.{place}`")
        elif found == _CLOSE:
            at, depth = at + 1, depth - 1
            if not depth:
                return at


async def split_objects(raw: memoryview, name: str, most: int) -> list[memoryview]:
    """The objects of the list `raw`, which is JSON, as they are spelled; no more than the first `most` + 1.

    Raises msgspec.ValidationError for what is no list of objects, and as `find_object_end` does; `name` is the list's.
    """
    found: list[memoryview] = []
    at = _match_end(_SPACE, raw, 0)
    if raw[at] != _LIST:
        raise msgspec.ValidationError(f"Expected `array` - at `$.{name}`")
    at += 1
    turn = at
    while len(found) <= most:
        if at - turn > STEP:
            await asyncio.sleep(0)
            turn = at
        start = at
        at = _match_end(_SPACE, raw, at)
        if raw[at] == _LIST_END:
            return found
        if raw[at] != _OPEN:
            if at - start < STEP:
                raise msgspec.ValidationError(f"Expected `object` - at `$.{name}[{len(found)}]`")
            continue  # a step ended inside of the space
        stop = await find_object_end(raw, at, f"{name}[{len(found)}]")
        found.append(raw[at:stop])
        at = stop
    return found


async def _find_text_end(raw: memoryview, at: int) -> int:
    while True:
        at = _match_end(_INSIDE, raw, at)
        if raw[at] == _QUOTE:
            return at + 1
        await asyncio.sleep(0)


def _match_end(pattern: re.Pattern[bytes], raw: memoryview, at: int) -> int:
    found = pattern.match(raw, at, at + STEP)
    assert found is not None  # each pattern matches nothing at all, too
    return found.end()
