"""Errors of the `infer` surface, in the format and terms of the original's web framework."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import orjson

from shoal.errors import Malformed, RequestError, ShoalError, WrongType
from shoal.http import multipart, status_codes
from shoal.http.json import decoder

_KINDS = {"str": "string_type", "bool": "bool_type", "int": "int_type", "object": "model_attributes_type"}
_MAX_ECHO = 1000


class InvalidBody(WrongType):
    """A body of the wrong type. `found` is the decoded body, because the original's framework reports bad values."""

    def __init__(self, error: RequestError, found: Any) -> None:
        super().__init__(error.message, param=error.param)
        self.error = error
        self.found = found


class UnknownField(decoder.FieldError):
    """A form has an unknown field."""


class MissingParameter(WrongType):
    """A required query parameter is missing."""

    def __init__(self, name: str) -> None:
        super().__init__(f"Missing query parameter '{name}'; add ?{name}=...", param=name)


def render_error(error: ShoalError) -> tuple[int, dict[str, str], bytes]:
    """Render an error as the original does: `detail` is a text, or a list of problems for an invalid body.

    Invalid bodies return 422, as in its framework. All other statuses are those of OpenAI's dialect, because the
    original has none of its own: it returns 500 for all other errors.
    """
    if isinstance(error, Malformed | WrongType):
        detail: Any = [_to_problem(error)]
        status = 422
    else:
        detail = error.message
        status = status_codes.find_row(error).openai.status
    headers = {"content-type": "application/json", **status_codes.headers(error, status)}
    return status, headers, orjson.dumps({"detail": detail})


def _to_problem(error: RequestError) -> dict[str, Any]:
    """Convert an error to an entry of the framework's list of problems."""
    if isinstance(error, MissingParameter):
        return {"type": "missing", "loc": ["query", error.param], "msg": error.message, "input": None}
    found: Any = None
    cause: RequestError = error
    if isinstance(error, InvalidBody):
        found, cause = error.found, error.error
    if not isinstance(cause, decoder.FieldError):
        return {"type": _body_error_type(cause), "loc": ["body"], "msg": cause.message, "input": None}
    if isinstance(cause, UnknownField):
        return {"type": "extra_forbidden", "loc": ["body", cause.at], "msg": cause.reason, "input": None}
    steps = [step for step in re.split(r"[.\[\]]", cause.at) if step]
    location = ["body", *(int(step) if step.isdigit() else step for step in steps)]
    kind = "missing" if cause.missing else _field_error_type(cause.reason)
    shown = _value_at(found, location[1:-1] if cause.missing else location[1:])
    return {"type": kind, "loc": location, "msg": cause.reason, "input": shown}


def _body_error_type(cause: RequestError) -> str:
    if isinstance(cause, multipart.BadForm):
        return "multipart_invalid"
    return "json_invalid" if isinstance(cause, Malformed) else "value_error"


def _field_error_type(reason: str) -> str:
    """Return the framework's name for the expected type: string_type for "Expected `str`, got `int`"."""
    expected = reason.partition("`")[2].partition("`")[0].partition(" |")[0]
    return _KINDS.get(expected, "value_error")


def _value_at(found: Any, steps: Sequence[str | int]) -> Any:
    """Return the value at a path of the body; None if it is missing, too long or cannot be encoded."""
    try:
        for step in steps:
            found = found[step]
        # Nest it as deep as in the reply, because the encoder limits the depth.
        return found if len(orjson.dumps([[[[found]]]])) <= _MAX_ECHO else None
    except (LookupError, TypeError):
        return None
