"""Requests that may hold more fields than are known: decoded to a type, with the rest kept as it came."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Generic, TypeVar, get_args, get_type_hints

import msgspec

from shoal.errors import InvalidValue
from shoal.http.json.complexity import pieces, pieces_in_turns
from shoal.http.json.decoder import LARGE, refusal
from shoal.http.json.lists import Lists

log = logging.getLogger("shoal.http")

T = TypeVar("T")

MOST_BESIDE = 1_048_576
"""Bytes of a body beside the fields that may be long: tools and schemas take some, and nothing else does."""

MOST_PIECES = 65_536
"""Objects, lists and commas of the field that may be long. To decode one takes a third of a microsecond, to make a
message of it several, and the interpreter is held so long."""

MOST_PIECES_BESIDE = 20_000
"""Of any other field, and of JSON that comes as a text."""

MOST_ARGUMENTS = 2_097_152
"""Characters of the arguments of all calls that a request sends back."""

MOST_UNKNOWN = 1000
"""Fields that are not known."""

MOST_DEEP = 64
_MOST_NAMES = 256
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_REFUSED = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


class Extras(Generic[T]):
    """Decodes bodies to the struct `kind`, and answers its fields that `kind` does not have, each name logged once.

    `long` names the field that makes a body long: a conversation, texts or token ids; `also` others, which are texts.
    `limit`: of a list of texts or lists of ids in `long`, no more than `limit` + 1 come back; without it the field
    holds objects. Fields that `kind` has as Raw are not looked into.
    Raises Malformed for what is not JSON, WrongType for the wrong JSON, InvalidValue for what is too much of it.
    """

    def __init__(
        self, kind: Any, surface: str, long: str, limit: int | None = None, *, also: Sequence[str] = ()
    ) -> None:
        self._surface = surface
        self._long = long
        self._whole: msgspec.json.Decoder[T] = msgspec.json.Decoder(kind)
        self._known = frozenset(kind.__struct_encode_fields__)
        self._most = len(self._known) + MOST_UNKNOWN
        types = get_type_hints(kind)
        self._decoded = frozenset(name for name, each in types.items() if msgspec.Raw not in get_args(each))
        self._may_be_long = (long, *also)
        fields: list[Any] = [(name, msgspec.Raw | msgspec.UnsetType, msgspec.UNSET) for name in self._may_be_long]
        self._peek = msgspec.json.Decoder(msgspec.defstruct("Peek", fields))
        self._lists: Lists | None = None
        self._shell = self._whole
        if limit is not None:
            self._lists = Lists(long, get_type_hints(kind, include_extras=True)[long], limit)
            shell = msgspec.defstruct(kind.__name__, [(long, msgspec.Raw)], bases=(kind,), kw_only=True)
            self._shell = msgspec.json.Decoder(shell)
        self._logged: set[str] = set()

    async def __call__(self, body: bytes) -> tuple[T, dict[str, msgspec.Raw]]:
        large = len(body) > LARGE
        try:
            if large:
                await self._skip(body)
            fields = _FIELDS.decode(body)
            unknown = [name for name in fields if name not in self._known] if len(fields) <= self._most else fields
            if len(unknown) > MOST_UNKNOWN:
                raise InvalidValue(
                    f"The body holds more than {MOST_UNKNOWN} fields that are not known here; leave them out."
                )
            if large:
                await self._weigh(fields)
            value = await self._in_turns(body) if large and self._lists is not None else self._whole.decode(body)
        except _REFUSED as error:
            raise refusal(error, body) from None
        for name in unknown:
            self._note(name)
        return value, {name: fields[name] for name in unknown}

    async def _skip(self, body: bytes) -> None:
        """To skip over a large body is quick, and shows that it is JSON and what makes it large."""
        await asyncio.sleep(0)  # to put the body together took its time, too
        peeked = self._peek.decode(body)
        size = sum(len(memoryview(getattr(peeked, name) or b"")) for name in self._may_be_long)
        if len(body) - size > MOST_BESIDE:
            raise InvalidValue(
                f"The body holds more than {MOST_BESIDE} bytes beside '{self._long}'; send smaller tools and schemas."
            )
        await asyncio.sleep(0)

    async def _weigh(self, fields: dict[str, msgspec.Raw]) -> None:
        """Refuse what takes too long to decode."""
        for name in fields.keys() & self._decoded:
            most = MOST_PIECES if name == self._long else MOST_PIECES_BESIDE
            if name == self._long and self._lists is not None:
                continue
            if await pieces_in_turns(memoryview(fields[name]), most) > most:
                raise _too_much(name, most)
        await asyncio.sleep(0)

    async def _in_turns(self, body: bytes) -> T:
        """The long list is decoded piece by piece, and the rest of the body at once."""
        assert self._lists is not None
        value = self._shell.decode(body)
        await asyncio.sleep(0)
        setattr(value, self._long, await self._lists.decode(memoryview(getattr(value, self._long))))
        return value

    def _note(self, name: str) -> None:
        if name not in self._logged and len(self._logged) < _MOST_NAMES:
            self._logged.add(name)
            log.info("%s: the field %.64r is not known here", self._surface, name)


def json_of(raw: msgspec.Raw | msgspec.UnsetType | None) -> bytes | None:
    """The JSON of a field that is looked at later; None where it is absent or null."""
    if raw is None or raw is msgspec.UNSET:
        return None
    text = bytes(raw)
    return None if text == b"null" else text


def check_pieces(raw: bytes, name: str) -> None:
    """Raises InvalidValue for JSON that holds more than anybody means, before it is decoded; `name` is its field."""
    if len(raw) > LARGE and pieces(raw, MOST_PIECES_BESIDE) > MOST_PIECES_BESIDE:
        raise _too_much(name, MOST_PIECES_BESIDE)


def _too_much(name: str, most: int) -> InvalidValue:
    return InvalidValue(f"'{name}' holds more than {most} objects, lists and commas; shorten it.", param=name)


class Arguments:
    """Judges the arguments of the calls that one request sends back in its field `name`: JSON as text, which templates
    decode."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._size = 0
        self._pieces = 0

    def checked(self, text: str) -> str:
        """`text` itself. Raises InvalidValue where all of them together are too much."""
        self._size += len(text)
        if self._size > LARGE:
            if self._size > MOST_ARGUMENTS:
                raise InvalidValue(
                    f"The arguments of the calls in '{self._name}' are longer than {MOST_ARGUMENTS} characters "
                    "together; leave older calls out.",
                    param=self._name,
                )
            self._pieces += pieces(text.encode(), MOST_PIECES)
            if self._pieces > MOST_PIECES:
                raise InvalidValue(
                    f"The arguments of the calls in '{self._name}' hold more than {MOST_PIECES} objects, lists and "
                    "commas together; leave older calls out.",
                    param=self._name,
                )
        return text


def check_depth(value: Any, name: str) -> None:
    """Raises InvalidValue for JSON that is nested deeper than anybody means it, or holds integers that cannot be
    written again: those of more than 64 bits."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MOST_DEEP:
            raise InvalidValue(f"'{name}' is nested deeper than {MOST_DEEP} levels; flatten it.", param=name)
        below = []
        for each in level:
            for inner in each.values() if isinstance(each, dict) else each:
                if isinstance(inner, dict | list):
                    below.append(inner)
                elif isinstance(inner, int) and not -(2**63) <= inner < 2**64:
                    raise InvalidValue(f"'{name}' holds an integer of more than 64 bits; send a text.", param=name)
        level = below
