"""Texts that the library's grammars spell wrongly, spelt so that they come out right, or refused.

xgrammar writes a letter of U+0080 to U+00FF down as \\x and two digits, and reads a hexadecimal digit after it as a
third one: asked for "größe" it makes the model write "grö෾". Expressions are not written down that way.
"""

from __future__ import annotations

import os.path
import re
from typing import Any

from shoal.errors import InvalidValue

_WRONG = re.compile(r"[\x80-\xff][0-9a-fA-F]")


def to_literals(text: str) -> str:
    """A text as literals of a grammar, one after the other. An escape by number, and a letter that is written down as
    one, end a literal."""
    escaped = re.sub(r'["\\]', r"\\\g<0>", text)
    ended = re.sub(r"[\x80-\xff]", r'\g<0>" "', escaped)
    numbered = re.sub(r"[\x00-\x1f\x7f]", lambda found: f'\\u{ord(found[0]):04x}" "', ended)
    return f'"{numbered}"'.removesuffix(' ""')


def write_choice(texts: list[str]) -> str:
    """One of the texts, as alternatives of a grammar. Texts that begin alike share what they begin with: the library
    mixes up the ends of alternatives that do so, and takes "0.725" for one of "0.25", "0.5" and "0.75"."""
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
    """The grammar itself. Raises InvalidValue for one that would be misread."""
    if found := _WRONG.search(text):
        raise InvalidValue(
            f'{found[0]!r} in a literal of a grammar is misread: end the literal after the letter, as in "\xdf" "e"',
            param="response_format",
        )
    return text


def check_literal(text: Any) -> None:
    """Raises InvalidValue for a text that would come out wrong in a structural tag."""
    if isinstance(text, str) and (found := _WRONG.search(text)):
        raise InvalidValue(
            f"{text!r} would come out wrong, because of {found[0]!r}: write it without letters like \xe9 and \xdf",
            param="response_format",
        )
