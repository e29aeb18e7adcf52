"""The name under which Shoal serves a model of another server."""

from __future__ import annotations

import re

_NO_PART = re.compile(r"[^A-Za-z0-9._-]+")


def served_name(model: str) -> str:
    """Return a server's name of a model in Shoal's form: without a tag `latest`, with other tags after a dash, and of a
    path the last two parts, or the file alone."""
    parts = [_NO_PART.sub("-", part).strip("-.") for part in model.removesuffix(":latest").split("/")]
    return "/".join(parts[-1:] if model.startswith(("/", ".")) else parts[-2:])
