"""Maps served names to folder names of a Triton repository, and back.

Triton accepts any folder name, but its HTTP API does not decode `%2B`, which is how `tritonclient` sends "+": a name
must survive URL quoting. "~" does, and no served name contains it, so "/" becomes "~". The parts of a model that is
written as several folders have "~~" in their names, which no served name maps to.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from shoal.errors import InvalidValue
from shoal.names import NAME_RULE, is_name

Part: TypeAlias = Literal["model", "encoder", "tokenizer", "image"]
"""The whole model; the two parts of an ensemble that takes texts; the image tower beside a text tower, which is then
the whole model."""


def check_served_name(name: str) -> str:
    """Return `name` if it is a valid served name (`shoal.names`), else raise InvalidValue. Checked here too, because
    folders named after it are written and deleted."""
    if not is_name(name):
        raise InvalidValue(f"{name!r} cannot name a model: {NAME_RULE}", param="model")
    return name


def triton_name(served: str, part: Part = "model") -> str:
    """Return the folder name of a served model or of one of its parts. Raises InvalidValue for an invalid served
    name."""
    whole = check_served_name(served).replace("/", "~")
    return whole if part == "model" else f"{whole}~~{part}"


def image_folder(triton: str) -> str:
    """Return the folder name of the image tower beside the text tower in folder `triton`."""
    return f"{triton}~~image"


def is_part(triton: str) -> bool:
    """Return whether a folder name belongs to a part of a model, which is listed under its whole."""
    return "~~" in triton


def served_name(triton: str) -> str | None:
    """Return the served name that maps to this folder; None for a part, and for a folder that no served name maps
    to."""
    served = triton.replace("~", "/")
    try:
        return check_served_name(served)
    except InvalidValue:
        return None
