"""Image files named on a command line: checked before long work begins, and read when needed."""

from __future__ import annotations

import re
import sys
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from shoal.errors import InvalidValue, ShoalError
from shoal.python.images import check_head, check_image_file, read_image_file
from shoal.types import Image

STDIN = "-"

Input: TypeAlias = str | Path | Image
"""A text, an image file not read yet, or an image that can be read only once (standard input)."""

# How code that does not know file names refers to an image in an error: unnumbered or numbered.
_UNNAMED = re.compile(r"(?:(?:input|image) ([0-9]+): )?(?=the image (?:cannot|has|is) )")


def check_images(names: Sequence[str]) -> list[Path | Image]:
    """Check image files; "-" is standard input.

    Raises InvalidValue, naming the file, for the first one that is missing or does not begin like an image.
    """
    return [_standard_input() if name == STDIN else check_image_file(Path(name)) for name in names]


def read_image(item: Input) -> str | Image:
    """Read an image file; return other inputs unchanged. Raises InvalidValue if the file has disappeared."""
    return read_image_file(item) if isinstance(item, Path) else item


def to_data_uri(image: Image) -> str:
    """Encode an image as a data URI for a server, which detects the format itself."""
    return f"data:application/octet-stream;base64,{b64encode(image.data).decode()}"


@contextmanager
def name_in_errors(names: Sequence[str]) -> Iterator[None]:
    """Replace the generic image reference in an error with the file's name; the name of a text is ""."""
    try:
        yield
    except ShoalError as error:
        found = _UNNAMED.search(error.message)
        place = int(found[1] or 0) if found else len(names)
        # Without a number, the file is known only if there is just one input.
        if found and place < len(names) and names[place] and (found[1] or len(names) == 1):
            error.message = f"{error.message[: found.start()]}{names[place]}: {error.message[found.end() :]}"
            error.args = (error.message,)
        raise


def _standard_input() -> Image:
    if sys.stdin.isatty():
        raise InvalidValue("standard input is a terminal: pipe an image in, or name its file")
    data = sys.stdin.buffer.read()
    check_head(data, "standard input")
    return Image(data)
