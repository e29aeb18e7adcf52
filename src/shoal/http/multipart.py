"""Parse bodies of multipart/form-data (RFC 7578), with limits on the number of parts and on their headers.

`parse_parts` takes a body that has been read, within the server's limit, and yields to the event loop between pieces.
`read_form` takes one as it comes, and passes its file on.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from shoal.errors import Malformed, TooManyInputs

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

FORM: Final = b"multipart/form-data"

MAX_PART_HEADERS: Final = 8
"""Maximum headers per part: a browser sends two, other clients three or four."""

MAX_HEADER_BYTES: Final = 2048
"""Maximum size of one header, which holds a field name and a file name."""

MAX_FIELD_BYTES: Final = 65_536
"""Maximum size of all fields of a form that is read as it comes, without its file."""

_TURN: Final = 32_768
_WRITE_BYTES: Final = 1_048_576
_SCAN_BYTES: Final = 1_048_576
_BOUNDARY = re.compile(rb"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]")
_ENCODINGS = {b"", b"7bit", b"8bit", b"binary"}
_SILENT_LOG = logging.getLogger("shoal.http.multipart")
_SILENT_LOG.setLevel(logging.CRITICAL + 1)  # report malformed forms to the client only, not to the log


class BadForm(Malformed):
    """The body is not the form that its content type declares."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a form. `is_file`: it has a file name, or its content type is an image or octet-stream."""

    name: str
    data: bytes
    is_file: bool = False

    def text(self) -> str:
        """Decode the data as UTF-8. Raises BadForm if it is not."""
        try:
            return self.data.decode()
        except UnicodeDecodeError:
            raise BadForm(f"The field {self.name[:64]!r} is not UTF-8; send a file with a filename.") from None


def is_form(content_type: bytes) -> bool:
    return content_type.partition(b";")[0].strip().lower() == FORM


async def parse_parts(content_type: bytes, body: bytes, *, max_parts: int) -> list[Part]:
    """Return the parts in order, without the empty ones that browsers send for unselected files.

    Raises BadForm, and TooManyInputs for more than `max_parts` parts.
    """
    found = _find_boundary(content_type)
    await _check_count(body, b"\r\n--" + found, max_parts)
    reading = _PartCollector()
    parser = MultipartParser(
        found, reading.callbacks(), max_header_count=MAX_PART_HEADERS, max_header_size=MAX_HEADER_BYTES
    )
    parser.logger = _SILENT_LOG
    try:
        for start in range(0, len(body), _TURN):
            if start:
                await asyncio.sleep(0)
            parser.write(body[start : start + _TURN])
    except FormParserError as error:
        raise BadForm(f"The body could not be read as multipart/form-data: {error}.") from None
    reading.check_end()
    return reading.parts


def _find_boundary(content_type: bytes) -> bytes:
    found: bytes = parse_options_header(content_type)[1].get(b"boundary", b"")
    if _BOUNDARY.fullmatch(found) is None:
        raise BadForm("The content type multipart/form-data has no boundary; let the HTTP client set that header.")
    return found


async def read_form(
    content_type: bytes,
    pieces: AsyncIterator[bytes],
    write: Callable[[bytes], Awaitable[None]],
    *,
    file_field: str,
    max_parts: int,
) -> tuple[dict[str, str], str | None]:
    """Read a form as it comes, and pass the content of the file in `file_field` to `write`, in pieces of a MB.

    Returns the other fields, and the file's name (None: there was no file). Raises BadForm, and TooManyInputs for more
    than `max_parts` parts or MAX_FIELD_BYTES of fields.
    """
    if not is_form(content_type):
        raise BadForm("The body must be a form with a file; send it as multipart/form-data.")
    reading = _FormCollector(file_field=file_field, max_parts=max_parts)
    parser = MultipartParser(
        _find_boundary(content_type),
        reading.callbacks(),
        max_header_count=MAX_PART_HEADERS,
        max_header_size=MAX_HEADER_BYTES,
    )
    parser.logger = _SILENT_LOG
    try:
        async for piece in pieces:
            for start in range(0, len(piece), _TURN):
                if start:
                    await asyncio.sleep(0)
                parser.write(piece[start : start + _TURN])
            if len(reading.content) >= _WRITE_BYTES:
                content, reading.content = bytes(reading.content), bytearray()
                await write(content)
    except FormParserError as error:
        raise BadForm(f"The body could not be read as multipart/form-data: {error}.") from None
    reading.check_end()
    if reading.content:
        await write(bytes(reading.content))
    return {part.name: part.text() for part in reading.parts}, reading.file_name


async def _check_count(body: bytes, delimiter: bytes, max_count: int) -> None:
    """Raise TooManyInputs if the boundary occurs more than `max_count` times.

    No part may contain its boundary (RFC 2046 5.1.1), and a body with a million of them would take seconds to parse.
    """
    count = 0
    for start in range(0, len(body), _SCAN_BYTES):
        count += body.count(delimiter, start, start + _SCAN_BYTES + len(delimiter) - 1)
        if count > max_count:
            raise TooManyInputs(f"The form has more than {max_count} parts; split the request.")
        await asyncio.sleep(0)


@dataclass(slots=True)
class _PartCollector:
    parts: list[Part] = field(default_factory=list)
    ended: bool = False
    part_count: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    name: bytes = b""
    value: bytes = b""
    pieces: list[bytes] = field(default_factory=list)

    def check_end(self) -> None:
        if not self.ended:
            raise BadForm("The form is truncated: its last boundary is missing; send it again.")

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self.begin_part,
            "on_header_field": self.add_name,
            "on_header_value": self.add_value,
            "on_header_end": self.end_header,
            "on_part_data": self.add_data,
            "on_part_end": self.end_part,
            "on_end": self.end,
        }

    def begin_part(self) -> None:
        self.part_count += 1
        self.headers, self.pieces = {}, []

    def add_name(self, data: bytes, start: int, end: int) -> None:
        self.name += data[start:end]

    def add_value(self, data: bytes, start: int, end: int) -> None:
        self.value += data[start:end]

    def end_header(self) -> None:
        self.headers[self.name.lower()] = self.value.strip()
        self.name = self.value = b""

    def add_data(self, data: bytes, start: int, end: int) -> None:
        self.pieces.append(data[start:end])

    def end_part(self) -> None:
        kind, options = parse_options_header(self.headers.get(b"content-disposition", b""))
        if kind != b"form-data" or not options.get(b"name"):
            raise BadForm(
                f"Part {self.part_count - 1} of the form has no name; "
                "give it 'Content-Disposition: form-data; name=...'."
            )
        encoding = self.headers.get(b"content-transfer-encoding", b"").lower()
        if encoding not in _ENCODINGS:
            raise BadForm("Content-Transfer-Encoding is not supported; send the raw bytes of a file.")
        try:
            name = options[b"name"].decode()
        except UnicodeDecodeError:
            raise BadForm(
                f"The name of part {self.part_count - 1} of the form is not UTF-8; encode it as UTF-8."
            ) from None
        data = b"".join(self.pieces)
        file = options.get(b"filename")
        if file == b"" and not data:
            return
        content = self.headers.get(b"content-type", b"").lower()
        is_file = file is not None or content.startswith((b"image/", b"application/octet-stream"))
        self.parts.append(Part(name, data, is_file))

    def end(self) -> None:
        self.ended = True


@dataclass(slots=True, kw_only=True)
class _FormCollector(_PartCollector):
    """Collects fields, and in `content` what has come of the file."""

    file_field: str
    max_parts: int
    file_name: str | None = None
    content: bytearray = field(default_factory=bytearray)
    field_bytes: int = 0
    is_in_file: bool = False

    def begin_part(self) -> None:
        _PartCollector.begin_part(self)
        self.is_in_file = False
        if self.part_count > self.max_parts:
            raise TooManyInputs(f"The form has more than {self.max_parts} parts; send one file and its fields.")

    def end_header(self) -> None:
        _PartCollector.end_header(self)
        options = parse_options_header(self.headers.get(b"content-disposition", b""))[1]
        name, file = options.get(b"name", b""), options.get(b"filename")
        if file is not None and name == self.file_field.encode() and not self.is_in_file:
            if self.file_name is not None:
                raise TooManyInputs(f"The form has more than one {self.file_field!r}; send one file.")
            self.is_in_file = True
            self.file_name = file.decode(errors="replace")

    def add_data(self, data: bytes, start: int, end: int) -> None:
        if self.is_in_file:
            self.content += data[start:end]
            return
        self.field_bytes += end - start
        if self.field_bytes > MAX_FIELD_BYTES:
            raise TooManyInputs(
                f"The fields of the form have more than {MAX_FIELD_BYTES} bytes; send a file as {self.file_field!r}, "
                "with a filename."
            )
        _PartCollector.add_data(self, data, start, end)

    def end_part(self) -> None:
        if not self.is_in_file:
            _PartCollector.end_part(self)
