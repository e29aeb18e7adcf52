"""Flat names of tools for models that know only functions, and back."""

from __future__ import annotations

import hashlib
import re
from typing import Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal["function", "custom", "tool_search"]

MAX_NAME = 64
"""Characters of a function's name that every server of chat completions accepts."""
SEPARATOR = "__"
_ODD = re.compile(r"[^A-Za-z0-9_-]")


class ToolName(NamedTuple):
    """A tool as the client names it. `namespace`: "" for none."""

    kind: Kind
    name: str
    namespace: str = ""


class ToolNames:
    """Names of one request's tools. A tool without a namespace keeps its name unless a flat name has taken it."""

    def __init__(self) -> None:
        self._flat: dict[ToolName, str] = {}
        self._tools: dict[str, ToolName] = {}

    def flatten(self, tool: ToolName) -> str:
        """Return the flat name of a tool: the same one each time."""
        flat = self._flat.get(tool)
        if flat is None:
            flat = _join(tool)
            if flat in self._tools:
                flat = _shorten(flat, tool)
            self._flat[tool], self._tools[flat] = flat, tool
        return flat

    def restore(self, flat: str) -> ToolName:
        """Return the tool of a flat name. A name that a model invented is that of a function."""
        return self._tools.get(flat) or ToolName("function", flat)


def _join(tool: ToolName) -> str:
    if not tool.namespace:
        return tool.name
    between = "" if tool.namespace.endswith(SEPARATOR) else SEPARATOR
    flat = _ODD.sub("_", f"{tool.namespace}{between}{tool.name}")
    return flat if len(flat) <= MAX_NAME else _shorten(flat, tool)


def _shorten(flat: str, tool: ToolName) -> str:
    digest = hashlib.sha256("\0".join(tool).encode(errors="surrogatepass")).hexdigest()[:8]
    return f"{flat[: MAX_NAME - 9]}_{digest}"
