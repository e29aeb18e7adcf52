"""Requests that may hold more fields than are known: decoded to a type, with the rest kept as it came."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Generic, TypeVar, get_type_hints

import msgspec

from shoal.errors import InvalidValue
from shoal.surfaces._lists import Lists
from shoal.surfaces._wire import LARGE, refusal

log = logging.getLogger("shoal.http")

T = TypeVar("T")

MOST_BESIDE = 1_048_576
"""Bytes of a body beside the field that may be long: tools and schemas take some, and nothing else does."""

MOST_PIECES = 200_000
"""Objects and lists in that field. Each costs a third of a microsecond while the interpreter is held."""

MOST_DEEP = 64
_MOST_NAMES = 256
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_REFUSED = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


class Extras(Generic[T]):
    """Decodes bodies to the struct `kind`, and answers its fields that `kind` does not have, each name logged once.

    `long` names the field that makes a body long: a conversation, texts or token ids. `limit`: of a list of texts or
    lists of ids there, no more than `limit` + 1 come back; without it the field holds objects.
    Raises Malformed for what is not JSON, WrongType for the wrong JSON, InvalidValue for what is too much of it.
    """

    def __init__(self, kind: Any, surface: str, long: str, limit: int | None = None) -> None:
        self._surface = surface
        self._long = long
        self._whole: msgspec.json.Decoder[T] = msgspec.json.Decoder(kind)
        self._known = frozenset(kind.__struct_encode_fields__)
        field: Any = (long, msgspec.Raw | msgspec.UnsetType, msgspec.UNSET)
        self._peek = msgspec.json.Decoder(msgspec.defstruct("Peek", [field]))
        self._lists: Lists | None = None
        self._shell = self._whole
        if limit is not None:
            self._lists = Lists(long, get_type_hints(kind, include_extras=True)[long], limit)
            shell = msgspec.defstruct(kind.__name__, [(long, msgspec.Raw)], bases=(kind,), kw_only=True)
            self._shell = msgspec.json.Decoder(shell)
        self._logged: set[str] = set()

    async def __call__(self, body: bytes) -> tuple[T, dict[str, msgspec.Raw]]:
        try:
            value = self._whole.decode(body) if len(body) <= LARGE else await self._in_turns(body)
            fields = _FIELDS.decode(body)
        except _REFUSED as error:
            raise refusal(error, body) from None
        extras = {name: fields[name] for name in fields.keys() - self._known}
        for name in extras:
            self._note(name)
        return value, extras

    async def _in_turns(self, body: bytes) -> T:
        """A large body: first it is skipped over, which is quick and shows that it is JSON; then decoded, if there is
        not too much in it."""
        await asyncio.sleep(0)  # to put the body together took its time, too
        raw = memoryview(getattr(self._peek.decode(body), self._long) or b"")
        if len(body) - len(raw) > MOST_BESIDE:
            raise InvalidValue(
                f"The body holds more than {MOST_BESIDE} bytes beside '{self._long}'; send smaller tools and schemas."
            )
        await asyncio.sleep(0)
        if self._lists is not None:
            value = self._shell.decode(body)
            await asyncio.sleep(0)
            setattr(value, self._long, await self._lists.decode(memoryview(getattr(value, self._long))))
            return value
        whole = bytes(raw)
        if whole.count(b"{") + whole.count(b"[") > MOST_PIECES:
            raise InvalidValue(
                f"'{self._long}' holds more than {MOST_PIECES} objects and lists; shorten it.", param=self._long
            )
        await asyncio.sleep(0)
        return self._whole.decode(body)

    def _note(self, name: str) -> None:
        if name not in self._logged and len(self._logged) < _MOST_NAMES:
            self._logged.add(name)
            log.info("%s: the field %.64r is not known; only servers behind may use it", self._surface, name)


def json_of(raw: msgspec.Raw | msgspec.UnsetType | None) -> bytes | None:
    """The JSON of a field that is looked at later; None where it is absent or null."""
    if raw is None or raw is msgspec.UNSET:
        return None
    text = bytes(raw)
    return None if text == b"null" else text


def check_depth(value: Any, name: str) -> None:
    """Raises InvalidValue for JSON that is nested deeper than anybody means it."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MOST_DEEP:
            raise InvalidValue(f"'{name}' is nested deeper than {MOST_DEEP} levels; flatten it.", param=name)
        level = [
            inner
            for each in level
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, dict | list)
        ]
