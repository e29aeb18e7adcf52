"""The name under which Shoal serves a model of another server."""

from __future__ import annotations

import re

_NO_PART = re.compile(r"[^A-Za-z0-9._-]+")


def served_name(model: str) -> str:
    """Return the served name for a server's model name: without the tag `latest`, with other tags after a dash, and
    with only the last two parts of a path, or only the name of a file."""
    parts = [_NO_PART.sub("-", part).strip("-.") for part in model.removesuffix(":latest").split("/")]
    return "/".join(parts[-1:] if model.startswith(("/", ".")) else parts[-2:])
