"""Served names as the names of folders in a Triton repository.

Triton takes any folder's name, but its HTTP API does not decode `%2B`, and `tritonclient` sends "+" so: a name must
survive URL quoting. "~" does, and no served name holds it. So "/" becomes "~", and the parts of a model that is
written as several have "~~" in their names, which no served name ever leads to.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from shoal.errors import InvalidValue
from shoal.names import NAME_RULE, is_name

Part: TypeAlias = Literal["model", "encoder", "tokenizer", "image"]
"""The whole; the two of an ensemble that takes texts; the image tower beside a text tower, which is then the whole."""


def check_served_name(name: str) -> str:
    """Answer `name` if it may be a served model's name, by the rule of addresses; else raise InvalidValue.

    It is checked here too, because what follows from it is written and deleted.
    """
    if not is_name(name):
        raise InvalidValue(f"{name!r} cannot name a model: {NAME_RULE}", param="model")
    return name


def triton_name(served: str, part: Part = "model") -> str:
    """The folder of a served model, or of one of its parts. Raises InvalidValue for a name that no model may have."""
    whole = check_served_name(served).replace("/", "~")
    return whole if part == "model" else f"{whole}~~{part}"


def image_folder(triton: str) -> str:
    """The folder of the image tower beside the text tower that a folder holds."""
    return f"{triton}~~image"


def is_part(triton: str) -> bool:
    """Whether a folder's name is that of a part of a model, which its whole stands for."""
    return "~~" in triton


def served_name(triton: str) -> str | None:
    """The served name whose folder this is; None for a part, and for what no served name leads to."""
    served = triton.replace("~", "/")
    try:
        return check_served_name(served)
    except InvalidValue:
        return None
