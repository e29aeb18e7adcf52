"""What /set and /show of a chat change and show, by the names of Ollama's CLI.

Source: cmd/interactive.go of https://github.com/ollama/ollama, and its docs/modelfile.md for the parameters.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec

from shoal.errors import SetupError
from shoal.types import Guide, Sampling

FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "num_predict": "max_tokens",
    "stop": "stop",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
"""Ollama's names of parameters, and the fields of Sampling that hold them."""

_BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "top_k": (0, 2**31),
    "num_predict": (-2, 2**31),
    "seed": (-(2**63), 2**63 - 1),
    "repeat_penalty": (0.01, 10),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
}
_WHOLE = ("top_k", "seed", "num_predict")
_USAGE = "/set parameter NAME VALUE, with one of " + ", ".join(FIELDS)


def change_parameter(sampling: Sampling, text: str) -> Sampling:
    """Return `sampling` with the parameter of "NAME VALUE..." set; `stop` takes several values. As for Ollama, a
    `num_predict` that is not positive removes the limit, and a negative `seed` the seed. Raises SetupError."""
    name, *values = text.split() or [""]
    if name not in FIELDS or not values:
        raise SetupError(f"{name} is no parameter: {_USAGE}" if name and name not in FIELDS else f"write {_USAGE}")
    return msgspec.structs.replace(sampling, **{FIELDS[name]: values if name == "stop" else _read(name, values)})


def read_format(text: str) -> Guide:
    """Return the format of answers that `json` or the name of a file with a JSON schema stands for. Raises
    SetupError."""
    if text == "json":
        return Guide(kind="json_object", field="format")
    if not text:
        raise SetupError("write /set format json, or /set format FILE with a JSON schema")
    try:
        schema = json.loads(expand_path(text).read_bytes())
    except OSError as error:
        raise SetupError(f"{text} cannot be read ({error.strerror}): write json, or a file with a schema") from None
    except (ValueError, RecursionError) as error:
        raise SetupError(f"{text} is not JSON ({error}): correct it") from None
    if not isinstance(schema, dict):
        raise SetupError(f"{text} is not a JSON schema, which is an object: correct it")
    return Guide(kind="json_schema", value=json.dumps(schema), field="format")


def expand_path(text: str) -> Path:
    """Return the path that a user typed, with the home folder for `~`. Raises SetupError."""
    try:
        path = Path(text).expanduser()
        if b"\0" in os.fsencode(path):
            raise ValueError("a null character")
    except (RuntimeError, ValueError) as error:
        raise SetupError(f"{text!r} is not a path ({error}): choose another name") from None
    return path


def describe_parameters(sampling: Sampling) -> list[str]:
    """Return a line for each parameter that is set."""
    found = ((name, getattr(sampling, field)) for name, field in FIELDS.items())
    return [f"{name:<20}{_to_text(value)}" for name, value in found if value not in (None, [])]


def _read(name: str, values: list[str]) -> float | None:
    low, high = _BOUNDS[name]
    kind = int if name in _WHOLE else float
    try:
        (word,) = values
        value = kind(word)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise SetupError(f"{name} must be {what} (got {' '.join(values)})") from None
    if not low <= value <= high:
        raise SetupError(f"{name} must be between {low:g} and {high:g} (got {word})")
    is_none = (name == "num_predict" and value <= 0) or (name == "seed" and value < 0)
    return None if is_none else value


def _to_text(value: object) -> str:
    return " ".join(value) if isinstance(value, list) else str(value)
