"""Which sampling fields a request ends up with: its own, the model's defaults, and what the model can honour."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from shoal.errors import Unsupported
from shoal.types import Guide, Sampling

logger = logging.getLogger("shoal.core")

FIELDS = Sampling.__struct_fields__
UNSET = Sampling()

WIRE_NAMES = {"include_stop": "include_stop_str_in_output"}
"""What clients of OpenAI's and vLLM's API call a field, where that differs; a guide says that itself."""

NEUTRAL: Mapping[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "min_tokens": 0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "ignore_eos": False,
    "skip_special_tokens": True,
}
"""Values that ask for nothing: clients send them without meaning anything by it, so no model refuses them."""

CUT_HERE = frozenset({"max_tokens", "stop", "include_stop"})
"""Honoured by Shoal itself, whatever the backend can."""

OF_IDS = frozenset({"stop_token_ids", "skip_special_tokens"})
"""Honoured by Shoal too where it sees token ids."""


def honoured(
    asked: Sampling,
    defaults: Sampling,
    able: Collection[str],
    ignore: Collection[str],
    names: Mapping[str, str],
) -> Sampling:
    """The sampling of a request: what it asks for, else the model's defaults, as far as the model is `able`.

    Raises Unsupported for a field that the request sets and the model cannot honour, unless `ignore` has it. Both may
    go by the name of the field or by what clients call it, of whom `names` tells what they call otherwise.
    """
    values: dict[str, Any] = {}
    for name in FIELDS:
        value = getattr(asked, name)
        given = value != getattr(UNSET, name)
        if name in able:
            values[name] = value if given else getattr(defaults, name)
        elif given and value != NEUTRAL.get(name, _NOTHING):
            wire = value.field if isinstance(value, Guide) else {**WIRE_NAMES, **names}.get(name, name)
            if name not in ignore and wire not in ignore:
                raise Unsupported(
                    f"this model cannot honour {wire!r}: leave it out (the operator can have it ignored with "
                    "ignore_parameters)",
                    param=wire,
                )
    return Sampling(**values)


def defaults_of(settings: Mapping[str, Any], able: Collection[str], model: str) -> Sampling:
    """A model's default sampling from its table; a field that it cannot honour is left out, with a warning.

    Raises msgspec.ValidationError for a value of the wrong type and KeyError for a name that is no field.
    """
    for name in settings:
        if name not in FIELDS:
            raise KeyError(name)
    for name in sorted(settings.keys() - set(able)):
        logger.warning("%s cannot honour %r of its sampling defaults: it is left out", model, name)
    return msgspec.convert({name: value for name, value in settings.items() if name in able}, Sampling)


_NOTHING = object()
