"""Durations as Go programs write them: "5m", "1h30m", "500ms" (https://pkg.go.dev/time#ParseDuration)."""

from __future__ import annotations

import re

_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:ns|us|µs|μs|ms|s|m|h)"
_WHOLE = re.compile(rf"([+-]?)(0|(?:{_PART})+)")
_PARTS = re.compile(r"([0-9.]+)([a-zµμ]+)")


def parse_duration(text: str) -> float | None:
    """In seconds, below 0 where it begins with "-"; None for what is no duration."""
    found = _WHOLE.fullmatch(text)
    if found is None:
        return None
    size = sum(float(number) * _SECONDS[unit] for number, unit in _PARTS.findall(found[2]))
    return -size if found[1] == "-" else size
