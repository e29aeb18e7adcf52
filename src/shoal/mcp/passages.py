"""Passages of text files and documents: what is embedded and found."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from shoal.errors import ConfigError

PASSAGE_CHARACTERS = 1000
"""About 250 tokens, below what most embedding models read."""

MAX_FILE_BYTES = 1_048_576
_FOLDERS_OF_TOOLS = {"node_modules", "__pycache__", "venv"}


class Passage(NamedTuple):
    """A part of the text of `source`; `line` is that of its beginning, from 1."""

    source: str
    line: int
    text: str


def check_folders(folders: Sequence[Path]) -> None:
    """Raises ConfigError for one that is neither a folder nor a file."""
    for folder in folders:
        if not folder.exists():
            raise ConfigError(f"--folder {folder}: there is no such folder or file", param="--folder")


def read_passages(folders: Sequence[Path]) -> Iterator[list[Passage]]:
    """Yield the passages of each UTF-8 text file below these folders, or at these paths.

    Hidden files, links, folders of tools, files above MAX_FILE_BYTES and those that cannot be read are left out.
    """
    for path in _walk(folders):
        text = _read_text(path)
        if text is not None and (passages := split_text(str(path), text)):
            yield passages


def split_text(source: str, text: str) -> list[Passage]:
    """Cut a text at line ends into passages of at most PASSAGE_CHARACTERS; a longer line is cut inside."""
    passages: list[Passage] = []
    part, start = "", 1
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        for at in range(0, len(line), PASSAGE_CHARACTERS):
            piece = line[at : at + PASSAGE_CHARACTERS]
            if not part and not piece.strip():
                continue
            if len(part) + len(piece) > PASSAGE_CHARACTERS:
                passages.append(Passage(source, start, part.rstrip()))
                part = ""
            start = start if part else number
            part += piece
    passages.append(Passage(source, start, part.rstrip()))
    return [passage for passage in passages if passage.text]


def _walk(folders: Sequence[Path]) -> Iterator[Path]:
    for folder in folders:
        if folder.is_file():
            yield folder
        for place, inner, files in os.walk(folder):
            inner[:] = sorted(name for name in inner if name[0] != "." and name not in _FOLDERS_OF_TOOLS)
            yield from (Path(place, name) for name in sorted(files) if name[0] != ".")


def _read_text(path: Path) -> str | None:
    try:
        if path.is_symlink() or not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
            return None
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):  # not a text, or not this user's
        return None
    return None if "\0" in text else text
