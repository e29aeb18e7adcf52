"""Rejects oversized guides by their text, before anything is compiled.

The library expands nested repeats: `((a{1,1000}){1,1000}){1,1000}` has 29 characters and fills 20 GB. This check saves
a trial that would run into its time limit; guides that pass are tried as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from shoal.errors import InvalidValue
from shoal.types import Guide

MAX_NESTED_REPEATS = 10_000
"""Maximum product of nested repeats."""

MAX_REPEAT = 100_000
"""Maximum of a single repeat and of each upper limit in a schema."""

MAX_LOWER_LIMIT = 10_000
"""Maximum of each lower limit in a schema, since the model must generate that much."""

MAX_ENTRIES = 10_000
"""Maximum values of an enum and members of a list."""

MAX_DEPTH = 100
"""Maximum nesting of parentheses, or of lists and objects in a schema."""

_UPPER = ("maxLength", "maxItems", "maxProperties", "maxContains")
_LOWER = ("minLength", "minItems", "minProperties", "minContains")
_DIGITS = 9
"""Maximum digits of a number that is parsed: a longer one exceeds every limit."""

_REPEAT = r"\{\s*(?P<least>\d*)\s*(?P<comma>,?)\s*(?P<most>\d*)\s*\}"
_REGEX = re.compile(rf"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|{_REPEAT}|.", re.DOTALL)
_EBNF = re.compile(
    rf'#[^\n]*|"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|{_REPEAT}|(?P<name>[A-Za-z_][\w.-]*)|\s+|.', re.DOTALL
)
_RULE = re.compile(r"([A-Za-z_][\w.-]*)\s*::=")


def check(guide: Guide) -> None:
    """Raise InvalidValue for an oversized guide, with the client's field name."""
    try:
        if guide.kind == "regex":
            _check_regex(guide.value)
        elif guide.kind == "grammar":
            _GrammarRules(guide.value).check()
        elif guide.kind in ("json_schema", "structural_tag", "calls_or_answer"):
            _check_schema(guide.value)
    except RecursionError:
        raise _too_large_error(f"it is nested more than {MAX_DEPTH} levels deep: flatten it", guide.field) from None
    except InvalidValue as error:
        raise _too_large_error(error.message, guide.field) from None


def _too_large_error(reason: str, field: str) -> InvalidValue:
    return InvalidValue(f"the output format is too large: {reason}", param=field)


def _check_regex(text: str) -> None:
    _max_repeat_product(_REGEX.finditer(text), {})


def _max_repeat_product(tokens: Iterator[re.Match[str]], weights: dict[str, int]) -> int:
    """Return the largest product of nested repeats. `weights`: the product of each named rule. Raises InvalidValue if
    it is too large. Invalid repeats count as one: the library will reject them.
    """
    levels, last = [1], 1
    for token in tokens:
        text = token[0]
        if text == "(":
            if len(levels) > MAX_DEPTH:
                raise InvalidValue(f"it is nested more than {MAX_DEPTH} levels deep: flatten it")
            levels.append(1)
            last = 1
        elif text == ")":
            last = levels.pop() if len(levels) > 1 else 1
            levels[-1] = max(levels[-1], last)
        elif token["comma"] is not None and (token["least"] or token["most"]):
            bound = max(1, _number(token["most"] or token["least"]))
            limit = MAX_NESTED_REPEATS if last > 1 and bound > 1 else MAX_REPEAT
            last *= bound
            if last > limit:
                what = "nested repeats multiply to" if limit == MAX_NESTED_REPEATS else "the repeat count is"
                raise InvalidValue(f"{what} {last} (maximum {limit}): repeat less, or use * or +")
            levels[-1] = max(levels[-1], last)
        elif text not in "?*+" and not text.isspace():
            last = weights.get(text, 1)
            levels[-1] = max(levels[-1], last)
    return max(levels)


def _number(digits: str) -> int:
    return int(digits) if len(digits) <= _DIGITS else 10**_DIGITS


class _GrammarRules:
    """The rules of a grammar; a rule's repeats multiply with those around each reference to it."""

    def __init__(self, text: str) -> None:
        found = list(_RULE.finditer(text))
        ends = [*(rule.start() for rule in found[1:]), len(text)]
        self._bodies = {rule[1]: text[rule.end() : end] for rule, end in zip(found, ends, strict=True)} if found else {}
        self._weights: dict[str, int] = {}

    def check(self) -> None:
        for name in self._bodies:
            self._weigh(name)

    def _weigh(self, name: str) -> int:
        if name not in self._weights:
            self._weights[name] = 1  # stops the recursion of a rule that references itself
            body = self._bodies[name]
            for token in _EBNF.finditer(body):
                if token["name"] in self._bodies:
                    self._weigh(token["name"])
            self._weights[name] = _max_repeat_product(_EBNF.finditer(body), self._weights)
        return self._weights[name]


def _check_schema(text: str) -> None:
    try:
        schema = json.loads(text)
    except ValueError:  # the library rejects it with the position of the error
        return
    waiting: list[tuple[Any, int]] = [(schema, 0)]
    while waiting:
        node, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise InvalidValue(f"it is nested more than {MAX_DEPTH} levels deep: flatten it")
        if isinstance(node, dict):
            _check_node(node)
            waiting += [(value, depth + 1) for value in node.values()]
        elif isinstance(node, list):
            if len(node) > MAX_ENTRIES:
                raise InvalidValue(f"a list has {len(node)} members (maximum {MAX_ENTRIES}): use fewer")
            waiting += [(value, depth + 1) for value in node]


def _check_node(node: dict[str, Any]) -> None:
    """Check one object of a schema, or of a structural tag, which uses the same keys."""
    for names, limit in ((_UPPER, MAX_REPEAT), (_LOWER, MAX_LOWER_LIMIT)):
        for name in names:
            value = node.get(name)
            if isinstance(value, int | float) and value > limit:
                raise InvalidValue(f"{name} is {value} (maximum {limit}): lower it, or remove it")
    if isinstance(node.get("pattern"), str):
        _check_regex(node["pattern"])
    if isinstance(node.get("grammar"), str):
        _GrammarRules(node["grammar"]).check()
    if isinstance(node.get("patternProperties"), dict):
        for pattern in node["patternProperties"]:
            _check_regex(pattern)
