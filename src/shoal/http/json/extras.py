"""Decodes requests that may hold unknown fields: known ones to a type, the others as raw JSON."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from functools import cache
from typing import Any, Generic, TypeVar, get_args, get_type_hints

import msgspec

from shoal.errors import InvalidValue
from shoal.http.json.complexity import check_values, count_pieces, count_pieces_async
from shoal.http.json.decoder import LARGE, to_request_error
from shoal.http.json.raw_fields import raw_fields_decoder
from shoal.types import Fields

log = logging.getLogger("shoal.http")

T = TypeVar("T")

MAX_OTHER_BYTES = 1_048_576
"""Maximum bytes of a body beside its long fields: only tools and schemas need some."""

MAX_PIECES = 65_536
"""Maximum objects, lists and commas of the long field. Decoding one takes a third of a microsecond and converting it to
a message several, during which the GIL is held."""

MAX_OTHER_PIECES = 20_000
"""Maximum objects, lists and commas of any other field, and of JSON inside a text."""

MAX_ARGUMENTS = 2_097_152
"""Maximum characters in the arguments of all tool calls in a request."""

MAX_UNKNOWN_FIELDS = 1000
"""Maximum unknown fields of a body."""

MAX_DEPTH = 64
_MAX_LOGGED_NAMES = 256
_FIELDS = msgspec.json.Decoder(Fields)
_DECODE_ERRORS = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


class ExtrasDecoder(Generic[T]):
    """Decodes bodies to the struct `kind`, and returns all fields as raw JSON, and the unknown ones of them; each name
    of those is logged once. Of a duplicate field the last value counts.

    `long` names the field that makes a body long: a conversation, texts or token ids; `also` names further long texts.
    `max_inputs`: maximum texts or id lists in `long`; None if it holds objects. Fields of type Raw are not checked.
    Raises Malformed for invalid JSON, WrongType for JSON of the wrong type, InvalidValue and TooManyInputs for too much
    of it.
    """

    def __init__(
        self,
        kind: Any,
        surface: str,
        long: str,
        max_inputs: int | None = None,
        *,
        also: Sequence[str] = (),
    ) -> None:
        self._surface = surface
        self._long_field = long
        self._max_inputs = max_inputs
        self._full_decoder: msgspec.json.Decoder[T] = msgspec.json.Decoder(kind)
        self._known_fields = frozenset(kind.__struct_encode_fields__)
        self._max_fields = len(self._known_fields) + MAX_UNKNOWN_FIELDS
        self._decoded = _decoded_fields(kind)
        self._may_be_long = (long, *also)
        self._peek = raw_fields_decoder(*self._may_be_long)
        self._logged_fields: set[str] = set()

    async def __call__(self, body: bytes) -> tuple[T, Fields, Fields]:
        large = len(body) > LARGE
        try:
            if large:
                await self._check_sizes(body)
            fields = _FIELDS.decode(body)
            unknown: Collection[str] = ()
            if not fields.keys() <= self._known_fields:
                unknown = fields
                if len(fields) <= self._max_fields:
                    unknown = [name for name in fields if name not in self._known_fields]
            if len(unknown) > MAX_UNKNOWN_FIELDS:
                raise InvalidValue(f"The body has more than {MAX_UNKNOWN_FIELDS} unknown fields; remove them.")
            if large:
                await self._check_complexity(fields)
            value = self._full_decoder.decode(body)
        except _DECODE_ERRORS as error:
            raise to_request_error(error, body) from None
        if large:
            await asyncio.sleep(0)
        for name in unknown:
            self._log_unknown_field(name)
        return value, fields, {name: fields[name] for name in unknown}

    async def _check_sizes(self, body: bytes) -> None:
        """Reject a body with too many bytes outside its long fields. Skipping over the values is fast, and checks that
        the body is JSON."""
        await asyncio.sleep(0)  # assembling the body took time as well
        peeked = self._peek.decode(body)
        size = sum(len(memoryview(getattr(peeked, name) or b"")) for name in self._may_be_long)
        if len(body) - size > MAX_OTHER_BYTES:
            raise InvalidValue(
                f"The body has more than {MAX_OTHER_BYTES} bytes besides '{self._long_field}'; send smaller tools and "
                f"schemas."
            )
        await asyncio.sleep(0)

    async def _check_complexity(self, fields: Fields) -> None:
        """Reject fields that take too long to decode."""
        for name in fields.keys() & self._decoded:
            raw = memoryview(fields[name])
            if name == self._long_field and self._max_inputs is not None:
                await check_values(raw, self._max_inputs, name)
                continue
            most = MAX_PIECES if name == self._long_field else MAX_OTHER_PIECES
            if await count_pieces_async(raw, most) > most:
                raise _too_complex_error(name, most)
        await asyncio.sleep(0)

    def _log_unknown_field(self, name: str) -> None:
        if name not in self._logged_fields and len(self._logged_fields) < _MAX_LOGGED_NAMES:
            self._logged_fields.add(name)
            log.info("%s: unknown field %.64r", self._surface, name)


@cache
def _decoded_fields(kind: Any) -> frozenset[str]:
    """Return the fields of a struct whose values are decoded with it."""
    return frozenset(name for name, each in get_type_hints(kind).items() if msgspec.Raw not in get_args(each))


def to_json_bytes(raw: msgspec.Raw | msgspec.UnsetType | None) -> bytes | None:
    """Return the JSON of a field that is decoded later, or None if it is absent or null."""
    if raw is None or raw is msgspec.UNSET:
        return None
    text = bytes(raw)
    return None if text == b"null" else text


def to_json_text(raw: msgspec.Raw | msgspec.UnsetType | None) -> str | None:
    """Return what `to_json_bytes` does as text. Raises Malformed for texts in it that are not UTF-8."""
    data = to_json_bytes(raw)
    try:
        return None if data is None else data.decode()
    except UnicodeDecodeError as error:
        raise to_request_error(error, data or b"") from None


def check_pieces(raw: bytes, name: str) -> None:
    """Raise InvalidValue for JSON with too many objects, lists and commas to decode; `name` is its field."""
    if len(raw) > LARGE and count_pieces(raw, MAX_OTHER_PIECES) > MAX_OTHER_PIECES:
        raise _too_complex_error(name, MAX_OTHER_PIECES)


def _too_complex_error(name: str, limit: int) -> InvalidValue:
    return InvalidValue(f"'{name}' has more than {limit} objects, lists and commas; shorten it.", param=name)


class ArgumentsLimit:
    """Limits the arguments of the tool calls in one request's field `name`: JSON texts that templates decode."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._size = 0
        self._pieces = 0

    def check(self, text: str) -> str:
        """Return `text`. Raises InvalidValue if all arguments together exceed the limits."""
        self._size += len(text)
        if self._size > LARGE:
            if self._size > MAX_ARGUMENTS:
                raise InvalidValue(
                    f"The arguments of the calls in '{self._name}' have more than {MAX_ARGUMENTS} characters "
                    "in total; remove older calls.",
                    param=self._name,
                )
            self._pieces += count_pieces(text.encode(), MAX_PIECES)
            if self._pieces > MAX_PIECES:
                raise InvalidValue(
                    f"The arguments of the calls in '{self._name}' have more than {MAX_PIECES} objects, lists and "
                    "commas in total; remove older calls.",
                    param=self._name,
                )
        return text


def check_depth(value: Any, name: str) -> None:
    """Raise InvalidValue for JSON that is nested too deeply, or holds integers of more than 64 bits, which cannot be
    encoded again."""
    level, depth = [value] if value else [], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise InvalidValue(f"'{name}' is nested deeper than {MAX_DEPTH} levels; flatten it.", param=name)
        below = []
        for each in level:
            for inner in each.values() if isinstance(each, dict) else each:
                if isinstance(inner, dict | list):
                    below.append(inner)
                elif isinstance(inner, int) and not -(2**63) <= inner < 2**64:
                    raise InvalidValue(f"'{name}' contains an integer of more than 64 bits; send a string.", param=name)
        level = below
