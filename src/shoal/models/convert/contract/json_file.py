"""Read a model's text and JSON files, the latter key by key: every error names the file and the key."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from shoal.errors import ModelFileError

MAX_JSON_BYTES = 128 * 2**20
"""Maximum size of a JSON file. The largest tokenizer.json files have 35 MB; a few kilobytes of a zip can unpack to
hundreds of megabytes, and decoding takes several times that in memory."""


LARGEST_INTEGER = 2**40
"""Above every size that a model's files state."""


class JsonFile:
    """An object of a JSON file. `name` is the file's path inside the model's folder and `at` the object's path inside
    the file ("": the whole file), as errors show them.

    The getters return `default` for an absent key or null, and raise ModelFileError for a value of another type;
    without a default an absent key is an error too. `keys`: names that this file has for the usual keys.
    """

    def __init__(self, name: str, data: dict[str, Any], at: str = "", keys: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.data = data
        self.at = at
        self.keys = keys or {}

    def __contains__(self, key: str) -> bool:
        return self.data.get(self.keys.get(key, key)) is not None

    def integer(self, key: str, default: int | None = None, *, least: int = 0, most: int = LARGEST_INTEGER) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.refuse(key, f"must be a whole number of at least {least}, not {value!r}")
        if value > most:
            raise self.refuse(key, f"must be at most {most}, not {value}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise self.refuse(key, f"must be a number above 0, not {value!r}")
        try:
            return float(value)
        except OverflowError:
            raise self.refuse(key, "has too many digits") from None

    def boolean(self, key: str, default: bool | None = None) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, f"must be true or false, not {value!r}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.refuse(key, f"must be a string, not {value!r}")
        return value

    def texts(self, key: str) -> list[str]:
        """Return a list of strings, empty if absent."""
        value = self._get(key, [])
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self.refuse(key, f"must be a list of strings, not {value!r}")
        return value

    def object(self, key: str) -> dict[str, Any]:
        value = self._get(key, {})
        if not isinstance(value, dict):
            raise self.refuse(key, f"must be an object, not {value!r}")
        return value

    def section(self, key: str) -> JsonFile:
        """Return the object of a key, empty if absent."""
        return JsonFile(self.name, self.object(key), self._path(key))

    def with_data(self, data: dict[str, Any]) -> JsonFile:
        """Return other content for the same place."""
        return JsonFile(self.name, data, self.at)

    def with_keys(self, keys: Mapping[str, str]) -> JsonFile:
        """Return the same content, with other names for the usual keys. Errors show the file's own names."""
        return JsonFile(self.name, self.data, self.at, keys)

    def only(self, known: frozenset[str]) -> None:
        """Reject unknown keys: they may change the vectors."""
        for key in self.data:
            if key not in known:
                raise self.refuse(key, f"unknown key; Shoal knows {', '.join(map(self._path, sorted(known)))}")

    def refuse(self, key: str, why: str) -> ModelFileError:
        return ModelFileError(why, file=self.name, key=self._path(key))

    def _path(self, key: str) -> str:
        key = self.keys.get(key, key)
        return f"{self.at}.{key}" if self.at else key

    def _get(self, key: str, default: Any) -> Any:
        value = self.data.get(self.keys.get(key, key))
        if value is None:
            value = default
        if value is None:
            raise self.refuse(key, "is missing; the model's folder is incomplete or of an unsupported kind")
        return value


def is_there(folder: Path, name: str) -> bool:
    """Whether the folder has a file of that name. Raises ModelFileError for a name that no file can have."""
    try:
        return (folder / name).is_file()
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise ModelFileError("is too long for a file name", file=f"{name[:60]}...") from None


def read_json(folder: Path, name: str) -> Any:
    """Return the decoded file `name` of the folder, None if there is none. Raises ModelFileError if it is not JSON, or
    larger than MAX_JSON_BYTES."""
    if not is_there(folder, name):
        return None
    size = (folder / name).stat().st_size
    if size > MAX_JSON_BYTES:
        raise ModelFileError(
            f"has {size} bytes, and a JSON file of a model may have {MAX_JSON_BYTES}; fetch the model again", file=name
        )
    try:
        return msgspec.json.decode((folder / name).read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # brackets nested a thousand levels deep
        raise ModelFileError(f"is not valid JSON ({error}); fetch the model again", file=name) from None


def read_lines(folder: Path, name: str) -> list[str]:
    """Return the lines of a text file, without their ends. Only line feeds and carriage returns end a line: other
    Unicode line ends may be tokens. Raises ModelFileError if it is not UTF-8."""
    try:
        with (folder / name).open(encoding="utf-8") as file:
            return [line.removesuffix("\n") for line in file]
    except UnicodeDecodeError as error:
        raise ModelFileError(f"is not valid UTF-8 ({error}); fetch the model again", file=name) from None


def read_object(folder: Path, name: str) -> JsonFile | None:
    """Return the file as an object, None if there is none."""
    data = read_json(folder, name)
    if data is None:
        return None
    if not isinstance(data, dict):
        raise ModelFileError("must hold a JSON object", file=name)
    return JsonFile(name, data)
