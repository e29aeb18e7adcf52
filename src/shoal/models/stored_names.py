"""Lists the names of stored models, importing little: a shell asks for them while somebody types."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from shoal.decoding import json_decoder


class _Named(msgspec.Struct):
    id: str


_NAMED = json_decoder(_Named)


def list_stored_names(home: str) -> list[str]:
    """Return the ids of the models in a store, without checking them further; see `shoal.models.store`."""
    names: dict[str, None] = {}
    for manifest in sorted(Path(home).expanduser().glob("models/*/*/manifest.json")):
        with contextlib.suppress(OSError, msgspec.MsgspecError):  # half written, or of another version
            names[_NAMED.decode(manifest.read_bytes()).id] = None
    return list(names)
