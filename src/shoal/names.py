"""The grammar of served names: `NAME` or `ORG/NAME`. Who refuses one does it with an error of its own."""

from __future__ import annotations

import re

PART = r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,95}"
"""One side of the "/", as a regular expression: also what revisions and paths in addresses are made of."""

NAME = rf"{PART}(?:/{PART})?"

NAME_RULE = (
    "use ASCII letters, digits, '.', '_' and '-' with at most one '/', 1 to 96 characters per part, no leading dot"
)
"""The grammar in words, to follow what was refused."""

RESERVED = frozenset({"sse", "load", "unload"})
"""Of the grammar, and no names all the same: the API's routes have them in a name's place."""

_PART = re.compile(PART)
_NAME = re.compile(NAME)


def is_part(text: str) -> bool:
    """Whether `text` may be one side of a name: safe as a folder, and the same in a URL."""
    return _PART.fullmatch(text) is not None


def is_name(text: str) -> bool:
    """Whether `text` is of the grammar; `RESERVED` is not looked at."""
    return _NAME.fullmatch(text) is not None
