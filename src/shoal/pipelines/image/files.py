"""Parse the headers of image files before any decoder sees them: format, size and the memory that decoding takes.

Sources: the PNG specification (third edition), GIF89a, ITU T.81 (JPEG), the WebP container and lossless specifications,
Microsoft's BITMAPINFOHEADER.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import Literal, NoReturn, TypeAlias

from shoal.errors import InvalidValue

Format: TypeAlias = Literal["JPEG", "PNG", "WEBP", "GIF", "BMP"]

MAX_PIXELS = 40_000_000
MAX_SIDE = 65_535
"""The largest side that JPEG and GIF can express; resizing needs a row or column for each pixel of a side."""

_MAX_SCANS = 100
_MAX_PARTS = 100_000
_PIXEL = 4
"""Bytes per pixel in Pillow's memory, for three channels as for four."""
_WEBP_PIXEL = 16
"""libwebp's animation decoder keeps two canvases and hands over a third, which Pillow copies."""

_MARKER = re.compile(rb"\xff+([^\x00\xff\xd0-\xd7])")
_FRAMES = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
# Chunks to keep, besides eXIf with its orientation. The rest of a PNG is text, profiles and animation.
_PNG_KEPT = frozenset({b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"})


@dataclass(frozen=True, slots=True)
class Header:
    """The parsed header of an image file. `data`: the file without the parts its image does not need. `pixel_bytes`:
    bytes per pixel that decoding holds."""

    format: Format
    width: int
    height: int
    data: bytes
    pixel_bytes: float = _PIXEL


def read_header(data: bytes) -> Header:
    """Read the header; the first bytes decide the format. The caller limits the file size. Raises InvalidValue for an
    empty file, another format, a broken header, or too many pixels."""
    if not data:
        _refuse("it has no bytes: send a JPEG, PNG, WebP, GIF or BMP file")
    header = _read(data)
    if header is None:
        _refuse("its header is incomplete: send the whole file")
    width, height = header.width, header.height
    if width < 1 or height < 1:
        _refuse(f"its header states {width} x {height} pixels: send a whole file")
    if width * height > MAX_PIXELS or max(width, height) > MAX_SIDE:
        _refuse(
            f"it has {width} x {height} = {width * height} pixels, but at most {MAX_PIXELS} are allowed, and "
            f"{MAX_SIDE} per side: send a smaller one"
        )
    return header


def _refuse(why: str) -> NoReturn:
    raise InvalidValue(f"the image cannot be read: {why}", param="input")


def _read(data: bytes) -> Header | None:
    """Return None for a file that ends within its header."""
    try:
        return _parse_header(data)
    except (struct.error, IndexError):
        return None


def _parse_header(data: bytes) -> Header:
    if data.startswith(b"\xff\xd8\xff"):
        return _parse_jpeg(data)
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return _parse_png(data)
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return _parse_webp(data)
    if data.startswith((b"GIF87a", b"GIF89a")):
        return _parse_gif(data)
    if data.startswith(b"BM"):
        return _parse_bmp(data)
    _refuse("it is not a JPEG, PNG, WebP, GIF or BMP file: convert it to one of these")


def _parse_jpeg(data: bytes) -> Header:
    """Walk all markers. For a JPEG with several scans, the decoder keeps every coefficient, two bytes each, until the
    last scan. The number of scans is limited, since a scan of a few bytes makes it go through all coefficients."""
    width = height = scans = 0
    samples = 0.0
    place = 2
    for _ in range(_MAX_PARTS):
        found = _MARKER.search(data, place)
        if found is None or found[1] == b"\xd9":
            break
        marker, place = found[1][0], found.end()
        if marker == 0x01:
            continue
        (length,) = struct.unpack_from(">H", data, place)
        if marker in _FRAMES:
            if width:
                _refuse("it is a JPEG with two frames: save it again")
            height, width, channels = struct.unpack_from(">HHB", data, place + 3)
            if not channels:
                _refuse("its JPEG states no color channels: save it again")
            rates = [data[place + 9 + 3 * each] for each in range(channels)]
            sizes = [(rate >> 4) * (rate & 15) for rate in rates]
            samples = sum(sizes) / max(1, max(rate >> 4 for rate in rates) * max(rate & 15 for rate in rates))
        scans += marker == 0xDA
        place += max(2, length)
    else:
        _refuse("its JPEG has too many segments: save it again")
    if scans > _MAX_SCANS:
        _refuse(f"its JPEG has {scans} scans, but at most {_MAX_SCANS} are allowed: save it again as a baseline JPEG")
    several = scans > 1
    return Header("JPEG", width, height, data, _PIXEL + 2 * samples if several else _PIXEL)


def _parse_png(data: bytes) -> Header:
    """Keep only the chunks that make up the image: texts and profiles would be inflated, and nothing reads them."""
    if data[12:16] != b"IHDR":
        _refuse("its PNG does not begin with a header: save it again")
    width, height = struct.unpack_from(">II", data, 16)
    kept = [data[:8]]
    exif = b""
    place = 8
    for _ in range(_MAX_PARTS):
        if place >= len(data):
            break
        (length,) = struct.unpack_from(">I", data, place)
        kind, end = data[place + 4 : place + 8], place + 12 + length
        if kind == b"eXIf":
            exif = data[place:end]
        elif kind in _PNG_KEPT:
            kept.append(data[place:end])
        if kind == b"IEND":
            break
        place = end
    else:
        _refuse("its PNG has too many chunks: save it again")
    kept.insert(2, exif)  # eXIf may follow the pixels but must be read before them
    return Header("PNG", width, height, b"".join(kept))


def _parse_webp(data: bytes) -> Header:
    kind = data[12:16]
    if kind == b"VP8X":
        width = int.from_bytes(data[24:27], "little") + 1
        height = int.from_bytes(data[27:30], "little") + 1
    elif kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    elif kind == b"VP8 ":
        width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", data, 26))
    else:
        _refuse("its WebP contains no image: save it again")
    return Header("WEBP", width, height, data, _WEBP_PIXEL)


def _parse_gif(data: bytes) -> Header:
    """Keep only the first frame, at the size of the whole image; drop comments and everything after it."""
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    place = 13 + _table(flags)
    kept = [data[:place]]
    for _ in range(_MAX_PARTS):
        start, kind = place, data[place]
        if kind == 0x2C:
            left, top, frame_width, frame_height, flags = struct.unpack_from("<HHHHB", data, place + 1)
            place = _blocks_end(data, place + 11 + _table(flags))
            kept += [data[start:place], b";"]
            # Decoders enlarge the image to hold its frame.
            sides = max(width, left + frame_width), max(height, top + frame_height)
            return Header("GIF", *sides, b"".join(kept))
        if kind != 0x21:
            break
        place = _blocks_end(data, place + 2)
        if data[start + 1] == 0xF9:
            kept.append(data[start:place])
    _refuse("its GIF has no frame: save it again")


def _table(flags: int) -> int:
    """Return the bytes of a color table."""
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _blocks_end(data: bytes, place: int) -> int:
    """Return the end of a series of blocks, each prefixed with its size; a block of size 0 is the last. A truncated
    file ends at its last byte: the decoder decides whether there is enough data."""
    while place < len(data):
        size = data[place]
        place += 1 + size
        if not size:
            break
    return min(place, len(data))


def _parse_bmp(data: bytes) -> Header:
    (size,) = struct.unpack_from("<I", data, 14)
    if size == 12:
        width, height = struct.unpack_from("<HH", data, 18)
        return Header("BMP", width, height, data)
    width, height, _, _, compression = struct.unpack_from("<iiHHI", data, 18)
    if compression not in (0, 3):
        _refuse("its BMP is compressed: send it as PNG")
    return Header("BMP", width, abs(height), data)
