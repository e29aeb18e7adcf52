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

QUANTIZATION = re.compile(r"(?:ud-)?(?:i?q|tq)\d[a-z0-9_]{0,12}|b?f16|fp16|f32|mxfp4(?:_moe)?", re.IGNORECASE)
"""The quantizations in names of GGUF files: Q4_K_M, IQ4_XS, UD-Q4_K_XL, BF16."""

_GGUF_PART = re.compile(r"(.+)-\d{5}-of-(?!00000)(00\d{3})\.gguf", re.DOTALL)
_PART = re.compile(PART)
_NAME = re.compile(NAME)


def is_part(text: str) -> bool:
    """Whether `text` may be one side of a name: safe as a folder, and the same in a URL."""
    return _PART.fullmatch(text) is not None


def quantized_name(repository: str, form: str) -> str:
    """Return the name of a model in one of several quantizations; the repository's own name without a `form`."""
    return f"{repository}-{form}" if form else repository


def is_name(text: str) -> bool:
    """Whether `text` is of the grammar; `RESERVED` is not looked at."""
    return _NAME.fullmatch(text) is not None


def gguf_parts(name: str) -> list[str]:
    """Return the names of all parts of the split model that a GGUF file belongs to; only its own if it is whole."""
    found = _GGUF_PART.fullmatch(name)
    if found is None:
        return [name]
    return [f"{found[1]}-{number:05}-of-{found[2]}.gguf" for number in range(1, int(found[2]) + 1)]


def whole_gguf(name: str) -> str:
    """Return the name of a split model's file if it were whole."""
    found = _GGUF_PART.fullmatch(name)
    return f"{found[1]}.gguf" if found else name
