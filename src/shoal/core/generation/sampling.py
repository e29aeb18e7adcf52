"""Resolve the sampling fields of a request from its own values, the model's defaults and the model's capabilities."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from shoal.decoding import converter
from shoal.errors import Unsupported
from shoal.sampling_fields import FIELDS_OF_OTHER_APIS, UNSUPPORTED_FIELDS, WIRE_NAMES
from shoal.types import Guide, Sampling

_SAMPLING = converter(Sampling)
_KNOWN = {**UNSUPPORTED_FIELDS, **FIELDS_OF_OTHER_APIS}

logger = logging.getLogger("shoal.core")

FIELDS = Sampling.__struct_fields__
UNSET = Sampling()

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
"""Values that have no effect: clients send them by default, so no model rejects them."""

LONGEST_NEUTRAL = 32
"""Maximum bytes of JSON to compare with the values above; longer JSON, however deep, is not parsed."""

APPLIED_BY_SHOAL = frozenset({"max_tokens", "stop", "include_stop"})
"""Fields that Shoal applies itself, whatever the backend supports."""

TOKEN_ID_FIELDS = frozenset({"stop_token_ids", "skip_special_tokens"})
"""Fields that Shoal also applies where it sees token ids."""


def merge_sampling(
    requested: Sampling,
    defaults: Sampling,
    able: Collection[str],
    ignore: Collection[str],
    names: Mapping[str, str],
    *,
    ignored: list[str] | None = None,
) -> Sampling:
    """Return the sampling of a request: its own values, else the model's defaults, limited to the fields in `able`.

    Raises Unsupported for a field that the request sets and the model does not support, unless it is in `ignore`.
    `ignore` may list field names or client names; `names` maps fields to the client's names where they differ. Ignored
    fields are appended to `ignored` under their client names.
    """
    values: dict[str, Any] = {}
    for name in FIELDS:
        value = getattr(requested, name)
        is_set = value != getattr(UNSET, name)
        if name in able:
            values[name] = value if is_set else getattr(defaults, name)
        elif is_set and value != NEUTRAL.get(name, _NOTHING):
            wire = value.field if isinstance(value, Guide) else {**WIRE_NAMES, **names}.get(name, name)
            if name not in ignore and wire not in ignore:
                raise Unsupported(
                    f"this model does not support {wire!r}: omit it (the operator can ignore it with "
                    "ignore_parameters)",
                    param=wire,
                )
            if ignored is not None:
                ignored.append(wire)
    return Sampling(**values)


def check_unsupported_fields(extras: Mapping[str, msgspec.Raw], ignore: Collection[str], *, ignored: list[str]) -> None:
    """Raise Unsupported for a known field with an effective value that no model here, or not the request's API,
    supports. If it is in `ignore`, append its name to `ignored` instead."""
    for name in extras.keys() & _KNOWN.keys():
        if is_neutral(extras[name], _KNOWN[name]):
            continue
        if name not in ignore:
            where = "no model here supports" if name in UNSUPPORTED_FIELDS else "this API does not have"
            raise Unsupported(
                f"{where} {name!r}: omit it (the operator can ignore it with ignore_parameters)", param=name
            )
        ignored.append(name)


def is_neutral(raw: msgspec.Raw, neutral: tuple[Any, ...]) -> bool:
    """Whether the JSON is null or one of the neutral values; 1 equals 1.0, but 1 does not equal true.

    Raw JSON is checked for its structure only: its numbers may be out of range, and its texts not UTF-8.
    """
    if len(memoryview(raw)) > LONGEST_NEUTRAL:
        return False
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return value is None or any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral)


def parse_sampling_defaults(settings: Mapping[str, Any], able: Collection[str], model: str) -> Sampling:
    """Parse a model's default sampling from its table; unsupported fields are left out with a warning.

    Raises msgspec.ValidationError for a value of the wrong type and KeyError for an unknown field name.
    """
    for name in settings:
        if name not in FIELDS:
            raise KeyError(name)
    for name in sorted(settings.keys() - set(able)):
        logger.warning("%s does not support %r of its sampling defaults: ignoring it", model, name)
    return _SAMPLING({name: value for name, value in settings.items() if name in able})


_NOTHING = object()
