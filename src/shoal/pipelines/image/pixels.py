"""Decode image files to upright RGB pixels of the requested size without holding the image twice.

An image of 40 million pixels takes 160 MB in Pillow, whatever its channels, so it is converted to RGB in place, strip
by strip. Where it must be rotated, or Pillow would copy it, channels are rotated and resized one after another, which
gives the same bytes as doing all three at once.

JPEG draft mode (decoding at 1/2, 1/4 or 1/8) is not used: its result is not within 1/255 of the full decode (see
tests/unit/pipelines/image/test_pixels.py for the figures).
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable

import numpy as np
from PIL import BmpImagePlugin, GifImagePlugin, Image, ImageFile, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

from shoal.errors import InvalidValue
from shoal.pipelines.image.budget import SHARED, Budget, trim
from shoal.pipelines.image.files import Format, Header, read_header
from shoal.types import Array

Resize = Callable[[Image.Image], Image.Image]
"""Resizes an upright image (mode RGB) or one channel of it (mode L)."""

Extra = Callable[[int, int], int]
"""Returns the bytes that resizing an image of (width, height) takes in addition to the image itself."""

# One class per format, so that no other Pillow decoder ever sees the bytes.
_READERS: dict[Format, type[ImageFile.ImageFile]] = {
    "JPEG": JpegImagePlugin.JpegImageFile,
    "PNG": PngImagePlugin.PngImageFile,
    "WEBP": WebPImagePlugin.WebPImageFile,
    "GIF": GifImagePlugin.GifImageFile,
    "BMP": BmpImagePlugin.BmpImageFile,
}
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ORIENTATION = 0x0112
_TRIMMED = 16_000_000
"""Size of an image in bytes above which memory is returned to the system."""
_STRIP = 1 << 17
_TURNED_WHOLE = 4_000_000
"""Maximum pixels of an RGB image that is rotated and resized at once; this is faster, but takes 8 bytes per pixel."""
_GREY = frozenset({"1", "L", "I;16"})


def decode(data: bytes) -> Array:
    """Decode all pixels, upright: uint8 [height, width, 3]. Raises as `decode_channels` does."""
    return decode_channels(data, lambda channel: channel)


def decode_channels(
    data: bytes, resize: Resize, *, extra: Extra = lambda width, height: 0, budget: Budget = SHARED
) -> Array:
    """Decode an image and apply `resize` to its three channels: uint8 [height, width, 3].

    Applies the EXIF orientation. Composites transparent pixels over white, as transformers 5 does for its processors.
    Takes the first frame of an animation. Scales 16-bit gray to 8 bits, rounded, and ignores color profiles. Waits for
    memory in `budget`. Raises InvalidValue for anything wrong with the bytes.
    """
    header = read_header(data)
    cost = _cost(header, extra, budget.total)
    with budget.reserve(cost):
        found = _try_decode(header, resize)
        if cost > _TRIMMED:
            trim()
    if isinstance(found, str):
        raise InvalidValue(
            f"the image cannot be read: it is a broken {header.format} file ({found[:120]}); save it again",
            param="input",
        )
    return found


def _try_decode(header: Header, resize: Resize) -> Array | str:
    """Return the channels, or the reason why they cannot be decoded. It does not raise: the frames of an exception
    would keep the image alive as long as the exception."""
    try:
        image = _READERS[header.format](io.BytesIO(header.data))
        if image.size != (header.width, header.height):
            return "its size differs from its header"
        turn = _read_orientation(image)
        image.load()
        flat = _flatten(image)
        del image  # the budget does not cover the palette's or decoder's pixels beside what follows
        return _bands(flat, turn, resize)
    except Exception as error:  # Pillow raises OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error,
        # IndexError, MemoryError and more for broken bytes; the file is always the cause.
        return str(error) if error.args else type(error).__name__


def _cost(header: Header, extra: Extra, total: int) -> int:
    """Return the peak memory in bytes: that of the decoder, or that of the image with its rotated copy.

    A JPEG with several scans may need too much for its coefficients beside its pixels. It then takes the whole budget,
    so that only one such image is decoded at a time.
    """
    width, height = header.width, header.height
    pixels = width * height
    later = pixels * (8 if pixels <= _TURNED_WHOLE else 6) + max(extra(width, height), extra(height, width))
    cost = max(int(pixels * header.pixel_bytes), later)
    if header.format == "JPEG" and later <= total:
        return min(cost, total)
    if cost > total:
        raise InvalidValue(
            f"the image cannot be read: {width} x {height} pixels of this kind of {header.format} need {cost} bytes "
            f"of memory, but only {total} are allowed: send a smaller one, or a JPEG",
            param="input",
        )
    return cost


def _bands(image: Image.Image, turn: Image.Transpose | None, resize: Resize) -> Array:
    if image.mode == "L" or (image.mode == "RGB" and (turn is None or _pixels(image) <= _TURNED_WHOLE)):
        upright = image if turn is None else image.transpose(turn)
        values = np.asarray(resize(upright))
        return np.stack([values] * 3, axis=-1) if values.ndim == 2 else values
    done: list[Array] = []
    for band in range(3):
        channel = image.getchannel(band)
        if turn is not None:
            channel = channel.transpose(turn)
        done.append(np.asarray(resize(channel)))
        del channel
    return np.stack(done, axis=-1)


def _pixels(image: Image.Image) -> int:
    return image.width * image.height


def _read_orientation(image: Image.Image) -> Image.Transpose | None:
    """Return the transpose that makes the image upright, from the first directory of its EXIF (a TIFF file). None if
    there is none or it cannot be read, which is no reason to reject the pixels."""
    exif = image.info.get("exif")
    if not isinstance(exif, bytes):
        return None
    exif = exif.removeprefix(b"Exif\x00\x00")
    order = {b"II*\x00": "<", b"MM\x00*": ">"}.get(exif[:4])
    if order is None:
        return None
    try:
        (start,) = struct.unpack_from(f"{order}I", exif, 4)
        (count,) = struct.unpack_from(f"{order}H", exif, start)
        for place in range(start + 2, start + 2 + 12 * count, 12):
            tag, kind, _, value = struct.unpack_from(f"{order}HHIH", exif, place)
            if tag == _ORIENTATION:
                return _TURNS.get(value) if kind == 3 else None
    except struct.error:
        pass  # truncated EXIF
    return None


def _flatten(image: Image.Image) -> Image.Image:
    """Convert to RGB, or to L for gray; only the first channels of the result count. Modes of four bytes per pixel are
    overwritten in place; smaller ones become a new image."""
    if image.mode in ("L", "RGB") and "transparency" not in image.info:
        return image
    inside = image.mode in ("RGB", "RGBA", "CMYK", "LA")
    grey = image.mode in _GREY
    target = image if inside else Image.new("L" if grey else "RGB", image.size)
    rows = max(1, _STRIP // image.width)
    for top in range(0, image.height, rows):
        strip = image.crop((0, top, image.width, min(image.height, top + rows)))
        target.paste(_to_mode(target.mode, _remove_alpha(strip)), (0, top))
    return target.getchannel(0) if target.mode == "LA" else target


def _remove_alpha(strip: Image.Image) -> Image.Image:
    """Convert to RGB or L, composited over white."""
    if strip.mode == "I;16":
        return _to_eight_bits(strip)
    if "transparency" in strip.info or strip.mode in ("RGBA", "LA"):
        strip = strip.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", strip.size, "white"), strip).convert("RGB")
    return strip.convert("L" if strip.mode in _GREY else "RGB")


def _to_eight_bits(strip: Image.Image) -> Image.Image:
    values = np.asarray(strip).astype(np.uint32)
    scaled = ((values * 255 + 32767) // 65535).astype(np.uint8)
    hidden = strip.info.get("transparency")
    if isinstance(hidden, int):
        scaled[values == hidden] = 255
    return Image.fromarray(scaled)


def _to_mode(mode: str, strip: Image.Image) -> Image.Image:
    """Convert a strip so that it fills the first three channels of an image of `mode`."""
    if mode == "CMYK":
        return Image.merge("CMYK", [*strip.split(), Image.new("L", strip.size)])
    return strip.convert(mode)
