"""Typed decoders of JSON, MessagePack and plain values; the only place outside the surfaces that makes them.

msgspec describes a type the first time it decodes it, and publishes the description before it is complete. A thread
that decodes the same type meanwhile reads unset pointers, and the process dies. So each type is described under one
lock, and all threads get decoders of types that are complete.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, overload

import msgspec

T = TypeVar("T")
DecodeHook = Callable[[type, Any], Any]

_describing = threading.Lock()


def json_decoder(kind: type[T], *, dec_hook: DecodeHook | None = None) -> msgspec.json.Decoder[T]:
    with _describing:
        return msgspec.json.Decoder(kind, dec_hook=dec_hook)


@overload
def msgpack_decoder(kind: type[T], *, dec_hook: DecodeHook | None = None) -> msgspec.msgpack.Decoder[T]: ...
@overload
def msgpack_decoder(kind: Any, *, dec_hook: DecodeHook | None = None) -> msgspec.msgpack.Decoder[Any]: ...
def msgpack_decoder(kind: Any, *, dec_hook: DecodeHook | None = None) -> msgspec.msgpack.Decoder[Any]:
    with _describing:
        return msgspec.msgpack.Decoder(kind, dec_hook=dec_hook)


def converter(kind: type[T], *, strict: bool = True) -> Callable[[Any], T]:
    """`msgspec.convert` to one type. The function raises msgspec.ValidationError."""
    json_decoder(kind)
    return partial(msgspec.convert, type=kind, strict=strict)
