"""Decodes JSON requests into the structs that surfaces declare, and reports errors in a body."""

from __future__ import annotations

import asyncio
import codecs
import logging
import re
from functools import cache
from typing import Any, Generic, TypeVar

import msgspec

from shoal.errors import Malformed, RequestError, WrongType
from shoal.http.json.complexity import check_values
from shoal.http.json.unsupported import UnsupportedFields

log = logging.getLogger("shoal.http")

T = TypeVar("T")


class FieldError(WrongType):
    """WrongType with details: `at` is the path in the body ("" for all of it), `reason` the fault there, `missing`
    whether the field is absent."""

    def __init__(self, message: str, *, at: str, reason: str, missing: bool = False) -> None:
        super().__init__(message, param=_top_level_field(at))
        self.at = at
        self.reason = reason
        self.missing = missing


class Decoder(Generic[T]):
    """Decodes JSON bytes to one type. Unknown fields are ignored, and each name is logged once.

    Raises Malformed for invalid JSON, WrongType (with the top-level field as `param`) for JSON of the wrong type,
    Unsupported for a known but unsupported field of the dialect.
    `max_inputs`: maximum inputs of a body, which sets the limit of values in `decode_async`.
    `partial`: another decoder reads the same body and handles its unknown fields.
    """

    def __init__(self, kind: type[T], surface: str, max_inputs: int = 0, *, partial: bool = False) -> None:
        self._surface = surface
        self._max_inputs = max_inputs
        self._lenient = msgspec.json.Decoder(kind)
        # A strict decoder detects unknown fields at no extra cost; only with such fields is the body decoded twice.
        self._strict: msgspec.json.Decoder[T] = self._lenient
        self._known_fields: frozenset[str] | None = None
        if not partial and isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            self._strict = _build_strict_decoder(kind)
            self._known_fields = frozenset(kind.__struct_encode_fields__)
            self._unsupported_fields = UnsupportedFields(surface, self._known_fields)
        self._logged_fields: set[str] = set()

    def __call__(self, body: bytes) -> T:
        try:
            try:
                return self._strict.decode(body)
            except msgspec.ValidationError as error:
                self._log_unknown_fields(error, body)
                return self._lenient.decode(body)
        except _DECODE_ERRORS as error:
            raise to_request_error(error, body) from None

    async def decode_async(self, body: bytes) -> T:
        """Decode like a call, but count the values of a large body first, yielding to the event loop.

        Also yields before and after decoding, which blocks the loop. Raises TooManyInputs as well, for more values than
        may be decoded at once.
        """
        if len(body) <= LARGE:
            return self(body)
        await check_values(memoryview(body), self._max_inputs)
        try:
            try:
                value = self._strict.decode(body)
            except msgspec.ValidationError as error:
                await asyncio.sleep(0)
                self._log_unknown_fields(error, body)
                await asyncio.sleep(0)
                value = self._lenient.decode(body)
        except _DECODE_ERRORS as error:
            raise to_request_error(error, body) from None
        await asyncio.sleep(0)
        return value

    def _log_unknown_fields(self, error: msgspec.ValidationError, body: bytes) -> None:
        """Log the unknown fields that caused `error`. Raises `error` if it has another cause."""
        found = _UNKNOWN.match(str(error))
        if self._known_fields is None or found is None:
            raise error
        self._unsupported_fields.check(body)
        # A large body may contain millions of names, so only the first unknown one is logged.
        names = _field_names(body) - self._known_fields if len(body) <= LARGE else {found[1]}
        for name in names:
            if name not in self._logged_fields and len(self._logged_fields) < _MAX_LOGGED_NAMES:
                self._logged_fields.add(name)
                log.info("%s: unknown field %.64r ignored", self._surface, name)


@cache
def _build_strict_decoder(kind: type[msgspec.Struct]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(
        msgspec.defstruct(kind.__name__, [], bases=(kind,), kw_only=True, forbid_unknown_fields=True)
    )


LARGE = 65_536
"""Maximum bytes of a body that is decoded without counting: at most five milliseconds, for nothing but short lists."""

_UNKNOWN = re.compile(r"(?s)Object contains unknown field `(.*?)`(?: - at .*)?$")
_MAX_LOGGED_NAMES = 256  # a client with random names must not fill the log
_DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_WHERE = re.compile(r"(?s)(.*) - at `(?:key in )?\$?([^`]*)`$")
_MISSING = re.compile(r"(?s)Object missing required field `([^`]+)`")
_FIRST_NAME = re.compile(r"\.?(\w+)")
_BYTE = re.compile(r"\(byte (\d+)\)$")
_ESCAPE = re.compile(
    rb"(?s)\\(?:u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2}|(u[dD][89a-fA-F][\da-fA-F]{2})|.)"
)


def _field_names(body: bytes) -> set[str]:
    try:
        return set(_FIELDS.decode(body))
    except msgspec.DecodeError:
        return set()  # the next decoder reports the error


def decode_any(body: bytes) -> Any:
    """Decode JSON of any type. Raises Malformed."""
    try:
        return msgspec.json.decode(body)
    except _DECODE_ERRORS as error:
        raise to_request_error(error, body) from None


def to_request_error(error: Exception, body: bytes) -> RequestError:
    """Return the client error for a msgspec error in its body."""
    if isinstance(error, msgspec.ValidationError):
        return _to_field_error(error)
    if isinstance(error, RecursionError):
        return Malformed("The body is nested too deeply.")
    if isinstance(error, UnicodeDecodeError):
        return Malformed("The body is not UTF-8; encode it as UTF-8.")
    if not body or body.isspace():
        return Malformed("The body is empty; send JSON.")
    if body.startswith(codecs.BOM_UTF8):
        return Malformed("The body starts with a byte order mark; encode it as UTF-8 without one.")
    if half := _find_lone_surrogate(str(error), body):
        return Malformed(
            f"The body contains half of a character (the lone surrogate \\{half}): a string was cut inside an emoji. "
            "Cut it between characters; in JavaScript, text.toWellFormed() repairs it."
        )
    return Malformed(f"The body could not be read as JSON: {error}.")


def _find_lone_surrogate(reason: str, body: bytes) -> str:
    """Return the lone surrogate that msgspec rejected, as written in the body, or "" for any other error.

    msgspec reports one at the very end of a body as "truncated", without a position.
    """
    if not any(word in reason for word in ("surrogate", "escape", "truncated")):
        return ""
    found = _BYTE.search(reason)
    at = int(found[1]) if found else len(body)
    halves = [each[1] for each in _ESCAPE.finditer(body, max(0, at - 18), at + 6) if each[1]]
    return halves[-1].decode() if halves else ""


def _to_field_error(error: msgspec.ValidationError) -> RequestError:
    text = str(error)
    where = ""
    if found := _WHERE.fullmatch(text):
        text, where = found[1], found[2]
    if found := _MISSING.match(text):
        name = found[1]
        at = f"{where}.{name}".lstrip(".")
        return FieldError(f"Missing required field '{at}'.", at=at, reason="Field required", missing=True)
    at = where.lstrip(".")
    subject = f"'{at}'" if where else "The body"
    return FieldError(f"{subject} is invalid: {text[:1].lower()}{text[1:]}.", at=at, reason=text)


def _top_level_field(path: str) -> str | None:
    found = _FIRST_NAME.match(path)
    return found[1] if found else None
