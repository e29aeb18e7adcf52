"""Files of pictures that a command line names: looked at before long work begins, and read when their turn comes."""

from __future__ import annotations

import re
import sys
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from shoal.errors import InvalidValue, ShoalError
from shoal.python.images import check_head, check_picture, read_picture
from shoal.types import Image

STDIN = "-"

Input: TypeAlias = str | Path | Image
"""A text, or a picture that is not read yet, or that could be read only once."""

# What is said of a picture by those who see no names, alone or counted.
_UNNAMED = re.compile(r"(?:(?:input|picture) ([0-9]+): )?(?=the picture )")


def check_images(names: Sequence[str]) -> list[Path | Image]:
    """Raises InvalidValue, naming it, for the first file that is not there or does not begin like a picture; "-" is
    standard input."""
    return [_standard_input() if name == STDIN else check_picture(Path(name)) for name in names]


def read_image(given: Input) -> str | Image:
    """Raises InvalidValue where the file has gone since."""
    return read_picture(given) if isinstance(given, Path) else given


def to_data_uri(picture: Image) -> str:
    """As a server is sent it, which looks itself at what it is."""
    return f"data:application/octet-stream;base64,{b64encode(picture.data).decode()}"


@contextmanager
def name_in_errors(names: Sequence[str]) -> Iterator[None]:
    """Puts a file's name into an error about the picture that was sent in its place; texts have the name ""."""
    try:
        yield
    except ShoalError as error:
        found = _UNNAMED.search(error.message)
        place = int(found[1] or 0) if found else len(names)
        # Who is not told which one it was does not guess.
        if found and place < len(names) and names[place] and (found[1] or len(names) == 1):
            error.message = f"{error.message[: found.start()]}{names[place]}: {error.message[found.end() :]}"
            error.args = (error.message,)
        raise


def _standard_input() -> Image:
    if sys.stdin.isatty():
        raise InvalidValue("standard input is a terminal: pipe a picture in, or name its file")
    data = sys.stdin.buffer.read()
    check_head(data, "standard input")
    return Image(data)
