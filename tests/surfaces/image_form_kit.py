"""Multipart forms as clients send them, and the vectors of the fake image model."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from shoal.backends.fake.model import compute_vector, tokenize_item
from shoal.types import Image
from tests.surfaces.family_kit import DIMENSION

RED, BLUE = b"red picture " * 4, b"blue picture " * 4
BOUNDARY = "----shoal7MA4YWxkTrZu0gW"
FORM = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}

File = tuple[str, bytes]


def inline(image: bytes) -> str:
    return base64.b64encode(image).decode()


def wanted(item: str | bytes, dimensions: int = DIMENSION) -> list[float]:
    """Return the unit vector of a text or of an image's bytes."""
    image = Image(item) if isinstance(item, bytes) else item
    raw = compute_vector(tokenize_item(image), DIMENSION)[:dimensions]
    return [float(each) for each in (raw / np.linalg.norm(raw)).astype(np.float32)]


def form(*fields: tuple[str, str | File]) -> bytes:
    """Encode a form; each field is a text, or a file's name and bytes."""
    lines: list[bytes] = []
    for name, value in fields:
        file = f'; filename="{value[0]}"\r\nContent-Type: image/png' if isinstance(value, tuple) else ""
        data = value[1] if isinstance(value, tuple) else value.encode()
        head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'
        lines.append(head.encode() + data + b"\r\n")
    return b"".join(lines) + f"--{BOUNDARY}--\r\n".encode()


def close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.array(actual), np.array(expected), atol=1e-6)
