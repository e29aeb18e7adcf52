"""Bodies with several fields that may hold long lists: each list is decoded in turns with the event loop."""

from __future__ import annotations

import asyncio
from typing import Any, Generic, TypeVar, get_type_hints

import msgspec

from shoal.http.json import decoder
from shoal.http.json.lists import ListDecoder

T = TypeVar("T")


class FieldsDecoder(Generic[T]):
    """As decoder.Decoder with `decode_async`, for the struct `kind` whose fields `names` may all be long lists.

    Of each no more than `limit` + 1 entries come back from a large body, so that whoever counts sees it.
    """

    def __init__(self, kind: type[T], surface: str, names: tuple[str, ...], limit: int) -> None:
        self._whole = decoder.Decoder(kind, surface)
        bases: Any = (kind,)
        needed = {each.name for each in msgspec.structs.fields(bases[0]) if each.required}
        raw: list[Any] = [
            (name, msgspec.Raw) if name in needed else (name, msgspec.Raw | msgspec.UnsetType, msgspec.UNSET)
            for name in names
        ]
        self._shell: decoder.Decoder[Any] = decoder.Decoder(
            msgspec.defstruct("Body", raw, bases=bases, kw_only=True), surface
        )
        types = get_type_hints(kind, include_extras=True)
        self._lists = {name: ListDecoder(name, types[name], limit) for name in names}

    async def __call__(self, body: bytes) -> T:
        """Raises Malformed, WrongType and TooLong."""
        if len(body) <= decoder.LARGE:
            return self._whole(body)
        await asyncio.sleep(0)
        value = self._shell(body)
        for name, lists in self._lists.items():
            raw = getattr(value, name)
            await asyncio.sleep(0)
            try:
                setattr(value, name, None if raw is msgspec.UNSET else await lists.decode(memoryview(raw)))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise decoder.to_request_error(error, body) from None
        return value  # type: ignore[no-any-return]  # a subtype of T
