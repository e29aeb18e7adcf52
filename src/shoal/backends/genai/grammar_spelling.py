"""Works around texts that the library's grammars encode wrongly, or rejects them.

xgrammar encodes a letter of U+0080 to U+00FF as \\x and two digits, and reads a following hexadecimal digit as a third:
for "größe" it makes the model write "grö෾". Regular expressions are not affected.
"""

from __future__ import annotations

import os.path
import re
from typing import Any

from shoal.errors import InvalidValue

_WRONG = re.compile(r"[\x80-\xff][0-9a-fA-F]")


def to_literals(text: str) -> str:
    """Return a text as a sequence of grammar literals. A literal ends after a numeric escape and after a letter that
    the library encodes as one."""
    escaped = re.sub(r'["\\]', r"\\\g<0>", text)
    ended = re.sub(r"[\x80-\xff]", r'\g<0>" "', escaped)
    numbered = re.sub(r"[\x00-\x1f\x7f]", lambda found: f'\\u{ord(found[0]):04x}" "', ended)
    return f'"{numbered}"'.removesuffix(' ""')


def write_choice(texts: list[str]) -> str:
    """Return the texts as alternatives of a grammar, with common prefixes factored out: the library confuses the ends
    of alternatives with a common prefix, and accepts "0.725" for "0.25", "0.5" and "0.75"."""
    groups: dict[str, list[str]] = {}
    for text in dict.fromkeys(texts):
        groups.setdefault(text[:1], []).append(text)
    made = []
    for group in groups.values():
        shared = os.path.commonprefix(group)  # noqa: RUF071  # these are texts, not paths
        rest = "" if len(group) == 1 else f" ({write_choice([text[len(shared) :] for text in group])})"
        made.append(to_literals(shared) + rest)
    return " | ".join(made)


def check_grammar(text: str) -> str:
    """Return the grammar unchanged. Raises InvalidValue if the library would misread it."""
    if found := _WRONG.search(text):
        raise InvalidValue(
            f'{found[0]!r} in a grammar literal is misread: end the literal after the letter, as in "\xdf" "e"',
            param="response_format",
        )
    return text


def check_literal(text: Any) -> None:
    """Raise InvalidValue for a text that the library would encode wrongly in a structural tag."""
    if isinstance(text, str) and (found := _WRONG.search(text)):
        raise InvalidValue(
            f"{text!r} cannot be encoded, because of {found[0]!r}: do not use letters such as \xe9 and \xdf",
            param="response_format",
        )
