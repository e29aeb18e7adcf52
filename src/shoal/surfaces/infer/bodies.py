"""Decode bodies of the `infer` surface to structs: JSON, or forms with images as files."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import msgspec
import orjson

from shoal.errors import InvalidValue, Malformed, WrongType
from shoal.http import multipart
from shoal.http.json import decoder
from shoal.http.json.complexity import check_values
from shoal.http.json.raw_fields import raw_fields_decoder
from shoal.http.request import Request
from shoal.surfaces.infer.errors import InvalidBody, UnknownField

T = TypeVar("T", bound=msgspec.Struct)

IMAGE_FIELD: Final = "image"
HEADER_FIELDS: Final = ("image_download_headers", "imageDownloadHeaders")

_MAX_DECODED_BYTES = 65_536
_MAX_HEADER_BYTES = 32_768
_OTHER_FIELDS = 16
_MAX_SHOWN = 64


class BodyDecoder(Generic[T]):
    """Decodes one type of body. `name` is accepted for `model_name`, as in the original's later versions.

    `limit` is how many inputs a body may hold.
    """

    def __init__(self, kind: type[T], limit: int = 0) -> None:
        self._limit = limit
        self._decode = decoder.Decoder(kind, "infer", limit)
        self._raw = raw_fields_decoder(*kind.__struct_encode_fields__)

    async def __call__(self, body: bytes) -> T:
        """Decode a body. Raises InvalidBody, Malformed, TooManyInputs and, for too long headers, InvalidValue."""
        if len(body) > decoder.LARGE:
            await check_values(memoryview(body), self._limit)
            _check_headers(body)
            await asyncio.sleep(0)
        try:
            return await self._decode.decode_async(body)
        except WrongType as error:
            if isinstance(error, decoder.FieldError) and error.missing and error.at == "model_name":
                await asyncio.sleep(0)
                name = _find_name(body)
                await asyncio.sleep(0)
                if name is not None:
                    return await self(b'{"model_name":%b,%b' % (orjson.dumps(name), body.lstrip()[1:]))
            if len(body) <= _MAX_DECODED_BYTES:
                raise InvalidBody(error, decoder.decode_any(body)) from None
            await asyncio.sleep(0)
            raise InvalidBody(error, self._invalid_field(body, error)) from None

    def _invalid_field(self, body: bytes, error: WrongType) -> dict[str, Any] | None:
        """Return only the invalid field of a large body; None if it is itself too long, or missing."""
        at = error.at if isinstance(error, decoder.FieldError) else ""
        field = re.split(r"[.\[]", at)[0]
        try:
            raw = getattr(self._raw.decode(body), field, msgspec.UNSET) or msgspec.Raw()
            if not 0 < len(memoryview(raw)) <= _MAX_DECODED_BYTES:
                return None
            return {field: msgspec.json.decode(raw)}
        except _DECODE_ERRORS:
            return None


@dataclass(frozen=True, slots=True)
class ParsedBody(Generic[T]):
    """A decoded body and its `images`, in order: each a text (URL, data URI, base64) or the bytes of a file.

    `images` is None if the body has no such field. Do not use `body.image`.
    """

    body: T
    images: Sequence[str | bytes] | None


class ImageBodyDecoder(Generic[T]):
    """Decodes one type of body with the field `image`, from JSON or a form."""

    def __init__(self, kind: type[T], lists: tuple[str, ...], limit: int) -> None:
        self._kind = kind
        self._json = BodyDecoder(kind, limit)
        self._lists = frozenset(lists)
        self._known_fields = frozenset({*kind.__struct_encode_fields__, "name"})
        self._max_parts = len(lists) * limit + _OTHER_FIELDS

    async def __call__(self, request: Request) -> ParsedBody[T]:
        """Decode the body. Raises what `BodyDecoder` raises, and TooManyInputs for a form with too many parts."""
        content_type = request.headers.get(b"content-type", b"")
        if multipart.is_form(content_type):
            return self._parse_form(await multipart.parse_parts(content_type, request.body, max_parts=self._max_parts))
        body = await self._json(request.body)
        images = getattr(body, IMAGE_FIELD)
        return ParsedBody(body, [images] if isinstance(images, str) else images)

    def _parse_form(self, parts: Sequence[multipart.Part]) -> ParsedBody[T]:
        fields: dict[str, Any] = {}
        images: list[str | bytes] = []
        for part in parts:
            self._check_part(part, fields)
            if part.name == IMAGE_FIELD:
                images.append(part.data if part.is_file else part.text())
            elif part.name in self._lists:
                fields.setdefault(part.name, []).append(part.text())
            elif part.name in HEADER_FIELDS:
                fields[part.name] = _parse_headers(part)
            else:
                fields[part.name] = part.text()
        if "name" in fields:
            fields.setdefault("model_name", fields.pop("name"))
        if images:
            fields[IMAGE_FIELD] = [""] * len(images)
        try:
            return ParsedBody(msgspec.convert(fields, self._kind, strict=False), images or None)
        except msgspec.ValidationError as error:
            raise decoder.to_request_error(error, b"") from None

    def _check_part(self, part: multipart.Part, fields: dict[str, Any]) -> None:
        """Raise FieldError for an unknown field, a duplicate field, or a file in any other field than `image`."""
        name = part.name[:_MAX_SHOWN]
        if part.name not in self._known_fields:
            reason = f"The form may contain {', '.join(sorted(self._known_fields))}; rename this field or omit it"
            raise UnknownField(f"Unknown field {name!r}. {reason}.", at=name, reason=reason)
        if part.is_file and part.name != IMAGE_FIELD:
            reason = f"Only `{IMAGE_FIELD}` may be a file; send this field without a filename"
            raise decoder.FieldError(f"The field {name!r} is a file. {reason}.", at=name, reason=reason)
        if part.name in fields and part.name not in self._lists:
            reason = "Sent more than once; send this field once"
            raise decoder.FieldError(f"The field {name!r} appears twice in the form.", at=name, reason=reason)


class _HeaderFields(msgspec.Struct):
    snake: msgspec.Raw | msgspec.UnsetType = msgspec.field(name=HEADER_FIELDS[0], default=msgspec.UNSET)
    camel: msgspec.Raw | msgspec.UnsetType = msgspec.field(name=HEADER_FIELDS[1], default=msgspec.UNSET)


class _NameField(msgspec.Struct):
    name: str | None = None


_HEADER_DECODER = msgspec.json.Decoder(_HeaderFields)
_NAME_DECODER = msgspec.json.Decoder(_NameField)
_DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def _check_headers(body: bytes) -> None:
    """Raise InvalidValue for download headers that would be slow to decode; no fetch sends that many."""
    try:
        head = _HEADER_DECODER.decode(body)
    except _DECODE_ERRORS:
        return  # the next decoder reports the error
    for raw in (head.snake, head.camel):
        if raw is not msgspec.UNSET and len(memoryview(raw)) > _MAX_HEADER_BYTES:
            raise _too_long_error()


def _parse_headers(part: multipart.Part) -> Any:
    if len(part.data) > _MAX_HEADER_BYTES:
        raise _too_long_error()
    try:
        return decoder.decode_any(part.data)
    except Malformed as error:
        raise decoder.FieldError(
            f"'{part.name}' is not JSON: {error.message}",
            at=part.name,
            reason='Expected `object`: JSON such as {"authorization": "..."}',
        ) from None


def _too_long_error() -> InvalidValue:
    return InvalidValue(
        f"{HEADER_FIELDS[0]} have more than {_MAX_HEADER_BYTES} bytes in total; send fewer.", param=HEADER_FIELDS[0]
    )


def _find_name(body: bytes) -> str | None:
    """Return the field `name` of a valid JSON object, or None."""
    try:
        return _NAME_DECODER.decode(body).name
    except msgspec.ValidationError:
        return None
