"""Decode images inside a request: data URIs (RFC 2397) and raw base64 (RFC 4648, both alphabets).

The form of a text alone decides its kind. Any other text is rejected, paths in particular: nothing here opens a file.
Everything is pure and thread-safe. An image of 20 MB takes tens of milliseconds, so decode large ones in a thread.
"""

from __future__ import annotations

import binascii
import io
import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote_to_bytes

import pybase64

from shoal.errors import EmptyInput, InvalidValue

MAX_BYTES: Final = 20 * 2**20

MIN_BYTES: Final = 26
"""Minimum size of an image in any format: shorter raw base64 is a word or a path that happens to be valid base64."""

MAX_ESCAPED: Final = 2**20
"""Maximum characters of a percent-encoded data URI: each escape costs many times its size in memory."""

PIECE: Final = 2**18
"""Characters of base64 decoded at a time."""

MAX_BLANKS: Final = 1024
"""Maximum whitespace characters on each side of a text."""

ACCEPTED_FORMS: Final = "send an http(s) URL, a data URI (data:image/png;base64,...) or the base64 of an image file"

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,31}):")
_HEAD = 256
_MEDIA = re.compile(r"image/[a-z0-9!#$&^_.+-]+|application/octet-stream|binary/octet-stream|", re.IGNORECASE)
_BLANKS = b" \t\r\n"
_STANDARD = bytes.maketrans(b"-_", b"+/")
# Percent-encoded base64 characters and line breaks.
_ESCAPES = {b"%2b": b"+", b"%2f": b"/", b"%3d": b"=", b"%0a": b"", b"%0d": b"", b"%20": b""}
_BLANK_ESCAPES = ("%0a", "%0d", "%20")
_ESCAPES |= {escape.upper(): meant for escape, meant in _ESCAPES.items()}
_WRONG_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")


@dataclass(frozen=True, slots=True)
class Link:
    """An http(s) URL of an image, as the client wrote it; the fetcher checks it."""

    url: str


def parse_image(text: str, *, max_bytes: int = MAX_BYTES) -> bytes | Link:
    """Return the bytes of an image's file, or the link to fetch them from. The bytes are not checked to be an image.

    Raises InvalidValue for any other text and for more than `max_bytes`, and EmptyInput for an empty text.
    """
    start, end = _find_bounds(text)
    if start == end:
        raise EmptyInput(f"the image is empty: {ACCEPTED_FORMS}")
    found = _SCHEME.match(text, start)
    if found is None:
        return _decode_raw_base64(text, start, end, max_bytes)
    scheme = found[1].lower()
    if scheme in {"http", "https"}:
        return Link(text[start:end])
    if scheme == "data":
        return _decode_data_uri(text, start, max_bytes)
    raise InvalidValue(f"images are never read from {scheme!r}: {ACCEPTED_FORMS}")


def _find_bounds(text: str) -> tuple[int, int]:
    """Return the start and end of a text without surrounding whitespace.

    The text is not copied, since a copy costs as much as the image. At most MAX_BLANKS are skipped on each side; the
    decoder rejects the rest.
    """
    start, end = 0, len(text)
    while start < min(end, MAX_BLANKS) and text[start] in " \t\r\n":
        start += 1
    while end > max(start, len(text) - MAX_BLANKS) and text[end - 1] in " \t\r\n":
        end -= 1
    return start, end


def _decode_data_uri(text: str, start: int, max_bytes: int) -> bytes:
    """Decode the data after the comma of a data URI that starts at `start`."""
    comma = text.find(",", start, start + _HEAD)
    if comma < 0:
        raise InvalidValue("the data URI has no comma before its data: write data:image/png;base64,...")
    media, *params = (part.strip() for part in text[start + len("data:") : comma].split(";"))
    if not _MEDIA.fullmatch(media):
        raise InvalidValue("the data URI is not an image: write data:image/png;base64,... or the image's own type")
    if media.lower().startswith("image/svg"):
        raise InvalidValue("SVG is not supported: send the image as PNG or JPEG")
    decode = _decode_base64 if "base64" in map(str.lower, params) else _decode_percent_encoded
    decoded = decode(text, comma + 1, max_bytes)
    if not decoded:
        raise InvalidValue("the data URI has no data: send the bytes of the image file")
    return decoded


def _decode_raw_base64(text: str, start: int, end: int, max_bytes: int) -> bytes:
    """Decode base64 without a data URI: line breaks are allowed, other whitespace is not."""
    other = InvalidValue(f"the text is not an image, and files are never opened by path: {ACCEPTED_FORMS}")
    if any(text.find(blank, start, end) >= 0 for blank in " \t"):
        raise other
    try:
        decoded = _decode_base64(text, start, max_bytes)
    except _NotBase64:
        raise other from None
    if len(decoded) < MIN_BYTES:
        raise other
    return decoded


class _NotBase64(InvalidValue):
    """Raised for invalid base64; a caller that is not certain the text was meant as base64 replaces it."""


def _decode_base64(text: str, start: int, max_bytes: int) -> bytes:
    """Decode base64 in either alphabet, with optional padding and with whitespace anywhere.

    It is decoded in pieces, so that only the text and the result take memory of that size.
    """
    wrong = _NotBase64(f"the data is not base64: {ACCEPTED_FORMS}")
    if not text.isascii():
        raise wrong
    blanks = sum(text.count(blank, start) for blank in " \t\r\n")
    if (len(text) - start - blanks - 2 * text.count("%", start)) * 3 // 4 > max_bytes + 2:
        raise _too_large_error(max_bytes)
    end = _find_padding(text, start)
    decoded, carried = io.BytesIO(), b""
    try:
        while start < end:
            stop = start + PIECE
            cut = text.find("%", stop - 2, stop)
            stop = min(end, stop if cut < 0 else cut + 3)  # an escape stays whole
            carried += _to_standard_base64(text[start:stop])
            whole = len(carried) if stop == end else len(carried) // 4 * 4
            piece, carried = carried[:whole], carried[whole:]
            if b"=" in piece:
                raise wrong
            decoded.write(pybase64.b64decode(piece + b"=" * (-len(piece) % 4), validate=True))
            start = stop
    except binascii.Error:
        raise wrong from None
    if decoded.tell() > max_bytes:
        raise _too_large_error(max_bytes)
    return decoded.getvalue()


def _find_padding(text: str, start: int) -> int:
    """Return the end of the base64 without its padding and whitespace. Padding beyond two characters is kept, and
    rejected by the decoder."""
    end, pads = len(text), 0
    for _ in range(MAX_BLANKS):
        last, escape = text[max(start, end - 1) : end], text[max(start, end - 3) : end].lower()
        padding = last == "=" or escape == "%3d"
        if not last or (padding and pads == 2) or not (padding or last in " \t\r\n" or escape in _BLANK_ESCAPES):
            break
        pads += padding
        end -= 3 if escape.startswith("%") else 1
    return end


def _to_standard_base64(text: str) -> bytes:
    """Convert base64 to the standard alphabet, without escapes and whitespace."""
    raw = text.encode("ascii")
    if b"%" in raw:
        for escape, meant in _ESCAPES.items():
            raw = raw.replace(escape, meant)
    return raw.translate(_STANDARD, _BLANKS)


def _decode_percent_encoded(text: str, start: int, max_bytes: int) -> bytes:
    """Decode percent-encoded bytes (RFC 3986 2.1)."""
    if len(text) - start > MAX_ESCAPED:
        raise InvalidValue(f"a percent-encoded data URI can have at most {MAX_ESCAPED} characters: use base64")
    data = text[start:].rstrip(" \t\r\n")
    if not data.isascii() or _WRONG_ESCAPE.search(data):
        raise InvalidValue("the data URI is not correctly percent-encoded: use ;base64, followed by base64")
    if len(data) - 2 * data.count("%") > max_bytes:
        raise _too_large_error(max_bytes)
    return unquote_to_bytes(data)


def _too_large_error(max_bytes: int) -> InvalidValue:
    most = f"{max_bytes / 2**20:.3g} MiB" if max_bytes >= 2**20 else f"{max_bytes} bytes"
    return InvalidValue(f"the image is larger than the limit of {most}: send a smaller one")
