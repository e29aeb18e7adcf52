"""Finds some fields of a JSON object without decoding their values."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec


@cache
def raw_fields_decoder(*names: str) -> msgspec.json.Decoder[Any]:
    """Return a decoder to an object with these attributes: a field's JSON as it stands, or UNSET if it is absent. Other
    fields are skipped."""
    fields: list[Any] = [(name, msgspec.Raw | msgspec.UnsetType, msgspec.UNSET) for name in names]
    return msgspec.json.Decoder(msgspec.defstruct("RawFields", fields))
