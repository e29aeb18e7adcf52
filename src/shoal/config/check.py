"""Finds every error of a settings file and of the environment at once, where `load` stops at the first."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from os.path import expanduser
from pathlib import Path
from typing import Any, TypeAlias

from shoal import config
from shoal.config.presets import preset as find_preset
from shoal.config.schema import ENV_PREFIX, Setting
from shoal.config.settings import BY_NAME, MODEL_KEYS
from shoal.errors import ConfigError, SetupError

AddressCheck: TypeAlias = Callable[[str], object]
"""Raises SetupError for an address that cannot be served."""

_Path: TypeAlias = tuple[str, ...]
"""Where a value is in the document: ("port",) or ("models", "small", "backends")."""

_KEY = re.compile(r"""\s*((?:"[^"]*"|'[^']*'|[\w.-]|\s)+?)\s*=""")
_AT_LINE = re.compile(r"\(at line (\d+), column \d+\)")


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong. `place` is a file or a variable, and `line` counts from 1 where it is known."""

    place: str
    message: str
    line: int | None = None
    is_error: bool = True

    def __str__(self) -> str:
        line = "" if self.line is None else f":{self.line}"
        return f"{self.place}{line}: {'error' if self.is_error else 'warning'}: {self.message}"


def find_problems(file: Path | None, environ: Mapping[str, str], check_address: AddressCheck) -> list[Problem]:
    """Return every wrong key, value, address and variable, each with its next step; warnings come last.

    Errors between settings, such as a certificate without its key, are looked for in what remains valid.
    """
    try:
        document = config.read_toml(file) if file else {}
    except ConfigError as error:
        message = _without_file(error.message, file)
        line = _AT_LINE.search(message)
        return [Problem(str(file), message, int(line[1]) if line else None)]
    lines = _number_keys(file.read_text(encoding="utf-8") if file else "")
    found = [
        Problem(str(file), _without_file(message, file), _find_line(lines, path))
        for path, message in _check_document(document, file, check_address)
    ]
    found.sort(key=lambda problem: problem.line or 0)
    variables, wrong = _check_variables(environ, check_address)
    found += wrong
    return [*found, *_check_together(document, file, variables)]


def _check_document(document: dict[str, Any], file: Path | None, check: AddressCheck) -> Iterator[tuple[_Path, str]]:
    """Yield what is wrong in a document, and remove it from the document."""
    if config.AS in document and (message := _try(find_preset, str(document[config.AS]), config.AS)):
        del document[config.AS]
        yield (config.AS,), message
    tables = document.get(config.MODELS, {})
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        del document[config.MODELS]
        tables = {}
        yield (config.MODELS,), 'models must be tables: [models."name"]'
    settings = {key: value for key, value in document.items() if key not in (config.MODELS, config.AS)}
    for key, message in _check_keys(settings, BY_NAME, file):
        del document[key]
        yield (key,), message
    for name, table in tables.items():
        for key, message in _check_keys(table, MODEL_KEYS, file):
            del table[key]
            yield (config.MODELS, name, key), message
        for address in table.get("backends", ()):
            if message := _try(check, f"{name}={address}"):
                yield (config.MODELS, name, "backends"), message


def _check_keys(values: Mapping[str, Any], known: Mapping[str, Setting], file: Path | None) -> list[tuple[str, str]]:
    found = [(key, _try(config.read_key, known, key, value, str(file))) for key, value in values.items()]
    found += [
        (key, f"{key}: {place} does not exist: create it or correct the path")
        for key, message in found
        if not message and (place := _missing_file(known[key], values[key], file))
    ]
    return [(key, message) for key, message in found if message]


def _missing_file(setting: Setting, value: Any, file: Path | None) -> Path | None:
    """Return the file that a value names, if it is not there. Folders are made when they are needed."""
    if not setting.path or not value or not setting.name.endswith(("_file", "_template")):
        return None
    place = (file.parent if file else Path()) / expanduser(value)  # unlike Path's, it leaves an unknown ~user
    return None if place.is_file() else place


def _check_variables(environ: Mapping[str, str], check: AddressCheck) -> tuple[dict[str, str], list[Problem]]:
    """Return the valid variables, and what is wrong with the others."""
    valid, wrong = dict(environ), []
    for variable, text in environ.items():
        if variable.startswith(ENV_PREFIX) and (message := _check_variable(variable, text, check)):
            del valid[variable]
            wrong.append(Problem(variable, message.removeprefix(f"{variable}: ")))
    return valid, wrong


def _check_variable(variable: str, text: str, check: AddressCheck) -> str:
    name = variable.removeprefix(ENV_PREFIX).lower()
    if name == config.AS and text.strip():
        return _try(find_preset, text.strip(), variable)
    if name == config.MODELS:
        return next(filter(None, (_try(check, address) for address in text.split())), "")
    if message := _try(config.read_variables, {variable: text}, []):
        return message
    place = _missing_file(BY_NAME[name], text, None) if name in BY_NAME else None
    return f"{place} does not exist: create it or correct the path" if place else ""


def _check_together(document: dict[str, Any], file: Path | None, environ: Mapping[str, str]) -> list[Problem]:
    """Return an error between settings, and every warning."""
    place = str(file) if file else "environment"
    try:
        loaded = config.load({}, environ, file, document)
        found = [Problem(place, warning, is_error=False) for warning in loaded.warnings]
        config.check_bind(loaded.settings)
    except ConfigError as error:
        return [Problem(place, _without_file(error.message, file))]
    return found


def _try(function: Callable[..., object], *arguments: Any) -> str:
    """Return the message of the error that a call raises, "" if it raises none."""
    try:
        function(*arguments)
    except SetupError as error:
        return error.message
    return ""


def _without_file(message: str, file: Path | None) -> str:
    return message.removeprefix(f"{file}: ")


def _number_keys(text: str) -> dict[_Path, int]:
    """Return the line of each key and table of a TOML document."""
    lines: dict[_Path, int] = {}
    header: _Path = ()
    for number, line in enumerate(text.splitlines(), 1):
        try:
            if line.lstrip().startswith("["):
                header = _read_path(tomllib.loads(line))
                for length in range(1, len(header) + 1):
                    lines.setdefault(header[:length], number)
            elif key := _KEY.match(line):
                lines.setdefault(header + _read_path(tomllib.loads(f"{key[1]} = 0")), number)
        except tomllib.TOMLDecodeError:  # a line inside a text or a list
            continue
    return lines


def _read_path(document: Any) -> _Path:
    path: _Path = ()
    while isinstance(document, dict) and document:
        (key, document), *_ = document.items()
        path += (key,)
    return path


def _find_line(lines: Mapping[_Path, int], path: _Path) -> int | None:
    """Return the line of a value, or of the table or inline table around it."""
    places = (path[:length] for length in range(len(path), 0, -1))
    return next((lines[place] for place in places if place in lines), None)
