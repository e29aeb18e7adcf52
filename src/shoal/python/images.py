"""Images of whoever runs this process: files on their own disk, and images that Pillow holds.

For the command line and for Python, where the caller's files are the caller's to name. A server never opens one.
"""

from __future__ import annotations

import io
import os
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from shoal.errors import InvalidValue
from shoal.types import Image

if TYPE_CHECKING:
    from PIL import Image as pillow

ImageInput: TypeAlias = "Image | bytes | os.PathLike[str] | pillow.Image"
"""What stands for an image in Python: the bytes of its file, where that file is, or one that Pillow holds."""

FORMATS: Final = "JPEG, PNG, WebP, GIF or BMP"

_HEAD: Final = 12
_SIGNATURES: Final = {
    b"\xff\xd8\xff": "image/jpeg",
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"GIF87a": "image/gif",
    b"GIF89a": "image/gif",
    b"BM": "image/bmp",
}


def to_image(value: object) -> Image | Path | None:
    """The image that an argument of a Python call is, or the file to read it from; None where it is none. An image
    of Pillow's is taken as its pixels stand. Raises InvalidValue for one that cannot be written."""
    if isinstance(value, Image):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return Image(bytes(value))
    if isinstance(value, os.PathLike):
        return Path(os.fsdecode(value))
    drawn = sys.modules.get("PIL.Image")  # nobody has an image of Pillow's without it
    return _encode_png(value) if drawn is not None and isinstance(value, drawn.Image) else None


def read_image_file(path: Path) -> Image:
    """The whole file; what it holds is for the model to judge. Raises InvalidValue where it cannot be read."""
    try:
        return Image(path.read_bytes())
    except OSError as error:
        raise _unreadable_error(path, error) from None


def check_image_file(path: Path) -> Path | Image:
    """Whether there is a file that begins like an image, to be known before long work; a pipe, which can be read once,
    is read here. Raises InvalidValue, naming it."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            read = read_image_file(path)
            check_head(read.data, str(path))
            return read
        with path.open("rb") as file:
            check_head(file.read(_HEAD), str(path))
    except OSError as error:
        raise _unreadable_error(path, error) from None
    return path


def check_head(head: bytes, name: str) -> None:
    """Raises InvalidValue unless bytes begin as a file of one of FORMATS does."""
    if not head:
        raise InvalidValue(f"{name} is empty: pass a {FORMATS} file")
    if media_type(head) is None:
        raise InvalidValue(f"{name} is not an image: pass a {FORMATS} file")


def media_type(head: bytes) -> str | None:
    """The media type of a file of one of FORMATS that begins like this; None for any other."""
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for signature, kind in _SIGNATURES.items() if head.startswith(signature)), None)


def _unreadable_error(path: Path, error: OSError) -> InvalidValue:
    return InvalidValue(f"{path} cannot be read: {error.strerror or error}")


def _encode_png(image: pillow.Image) -> Image:
    """Without loss, and hardly compressed: it is read again at once."""
    file = io.BytesIO()
    try:
        image.save(file, "PNG", compress_level=1)
    except (OSError, ValueError) as error:
        raise InvalidValue(
            f"the image of mode {image.mode} cannot be encoded ({error}): convert it with .convert('RGB')"
        ) from None
    return Image(file.getvalue())
