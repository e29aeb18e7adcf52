"""Small images of every format that Shoal reads."""

from __future__ import annotations

import io

from PIL import Image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")


def file_of(colour: str = "red", form: str = "PNG") -> bytes:
    """The bytes of an image of 8 x 6 pixels."""
    file = io.BytesIO()
    Image.new("RGB", (8, 6), colour).save(file, form)
    return file.getvalue()
