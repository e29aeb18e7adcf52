"""Converts regular expressions in JSON schemas to grammars of JSON strings.

A `pattern` uses the ECMAScript dialect and may match anywhere in the text unless it has anchors. Its tree becomes a
grammar expression in which quotes, backslashes and control characters are escaped as in JSON. Python's own regex parser
is private and reads another dialect (`\\Z`, `(?P<name>)`, `{,3}`), so this module has its own.

Length limits are built into the repeats of the tree. The grammar may be narrower than the schema, never wider.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import NamedTuple

from shoal.backends.genai.grammar_spelling import to_literals
from shoal.errors import InvalidValue

MAX_CODE = 0x10FFFF

MAX_BRANCHES = 100
"""Maximum alternatives that anchors in groups may expand to."""

Ranges = tuple[tuple[int, int], ...]
"""Ranges of code points, (first, last) each, ascending and not adjacent."""


class Chars(NamedTuple):
    """One character of a set."""

    ranges: Ranges


class Anchor(NamedTuple):
    """The start or the end of the text."""

    sign: str


class Sequence(NamedTuple):
    parts: tuple[Node, ...]


class Choice(NamedTuple):
    options: tuple[Node, ...]


class Repeat(NamedTuple):
    """`maximum` None: without limit."""

    node: Node
    minimum: int
    maximum: int | None


Node = Chars | Anchor | Sequence | Choice | Repeat
Rule = Callable[[str], str]
"""Adds a rule of this body to the grammar and returns its name."""

_START, _END = Anchor("^"), Anchor("$")


def parse_pattern(text: str) -> Node:
    """Return the tree of all texts that contain a match of the pattern. Raises InvalidValue."""
    return _search(_Parser(text).parse())


def bound_length(node: Node, minimum: int, maximum: int | None) -> Node:
    """Return the tree of the texts with `minimum` to `maximum` characters. Raises InvalidValue if there are none."""
    if maximum is not None and _lengths(node)[0] <= maximum:
        node = _shorten(node, maximum)
    shortest, longest = _lengths(node)
    if (maximum is not None and shortest > maximum) or (longest is not None and longest < minimum):
        raise InvalidValue("`pattern` conflicts with `minLength` or `maxLength`: limit the length in the pattern")
    return _lengthen(node, minimum)


def other_than(texts: frozenset[str]) -> Node:
    """Return the tree of every text except these."""
    firsts = {text[0] for text in texts if text}
    options: list[Node] = [Sequence((Chars(complement(single(*firsts))), ANY))]
    options += [] if "" in texts else [Sequence(())]
    for first in sorted(firsts):
        rest = frozenset(text[1:] for text in texts if text[:1] == first)
        options.append(Sequence((Chars(single(first)), other_than(rest))))
    return Choice(tuple(options))


def write_node(node: Node, rule: Rule) -> str:
    """Return the tree as a grammar expression, without the quotes around the string."""
    match node:
        case Chars():
            return _write_chars(node, rule)
        case Repeat():
            bounds = f"{{{node.minimum},{'' if node.maximum is None else node.maximum}}}"
            return '""' if node.maximum == 0 else f"({write_node(node.node, rule)}){bounds}"
        case Choice():
            return f"({' | '.join(write_node(each, rule) for each in _factor(node.options))})"
        case Sequence():
            return " ".join(_write_parts(node.parts, rule)) or '""'
        case Anchor():
            raise InvalidValue(
                f"`{node.sign}` in the middle of a pattern is not supported: move it to the start or the end"
            )


def union(*sets: Ranges) -> Ranges:
    made: list[tuple[int, int]] = []
    for first, last in sorted(each for ranges in sets for each in ranges):
        if made and first <= made[-1][1] + 1:
            made[-1] = made[-1][0], max(made[-1][1], last)
        else:
            made.append((first, last))
    return tuple(made)


def complement(ranges: Ranges) -> Ranges:
    made, start = [], 0
    for first, last in ranges:
        if first > start:
            made.append((start, first - 1))
        start = last + 1
    return (*made, (start, MAX_CODE)) if start <= MAX_CODE else tuple(made)


def single(*texts: str) -> Ranges:
    """Return the ranges of characters, or of pairs of a first and a last character."""
    return union(tuple((ord(text[0]), ord(text[-1])) for text in texts))


_DIGITS = single("09")
_WORDS = single("09", "AZ", "az", "_")
_SPACES = single("\t\r", " ", "\xa0", "\u1680", "\u2000\u200a", "\u2028\u2029", "\u202f", "\u205f", "\u3000", "\ufeff")
_CLASSES = {"d": _DIGITS, "w": _WORDS, "s": _SPACES}
_CLASSES |= {name.upper(): complement(ranges) for name, ranges in _CLASSES.items()}
_LINE_ENDS = single("\n", "\r", "\u2028\u2029")
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
ANY = Repeat(Chars(((0, MAX_CODE),)), 0, None)
"""Any text."""

_REPEAT = re.compile(r"(?:([*+?])|\{(\d+)(?:(,)(\d*))?\})\??")
_BOUNDS = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_HEX = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}")
_LOW_HALF = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})")
_REFUSED_ESCAPES = dict.fromkeys("bB", "word boundaries") | dict.fromkeys("pP", "Unicode properties")
_REFUSED_ESCAPES |= dict.fromkeys("123456789k", "references to groups")


class _Parser:
    """Parses one expression. Raises InvalidValue for invalid or unsupported syntax."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0

    def parse(self) -> Node:
        node = self._choice()
        if self._position < len(self._text):
            raise self._refusal("an unmatched ')'")
        return node

    def _refusal(self, what: str) -> InvalidValue:
        return InvalidValue(f"the pattern {self._text[:80]!r} has {what} at character {self._position + 1}")

    def _takes(self, text: str) -> bool:
        found = self._text.startswith(text, self._position)
        self._position += len(text) if found else 0
        return found

    def _next(self) -> str:
        if self._position == len(self._text):
            raise self._refusal("an unexpected end")
        self._position += 1
        return self._text[self._position - 1]

    def _choice(self) -> Node:
        options = [self._sequence()]
        while self._takes("|"):
            options.append(self._sequence())
        return Choice(tuple(options)) if len(options) > 1 else options[0]

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while self._position < len(self._text) and self._text[self._position] not in "|)":
            parts.append(self._repeated(self._atom()))
        return Sequence(tuple(parts))

    def _repeated(self, node: Node) -> Node:
        found = _REPEAT.match(self._text, self._position)
        if found is None:
            return node
        if isinstance(node, Anchor):
            raise self._refusal("a repeated anchor")
        self._position = found.end()
        if found[1]:
            minimum, maximum = _BOUNDS[found[1]]
        else:
            minimum = int(found[2])
            maximum = minimum if found[3] is None else int(found[4]) if found[4] else None
        if maximum is not None and maximum < minimum:
            raise self._refusal("a repeat whose minimum exceeds its maximum")
        return Repeat(node, minimum, maximum)

    def _atom(self) -> Node:
        sign = self._next()
        match sign:
            case "^" | "$":
                return Anchor(sign)
            case ".":
                return Chars(complement(_LINE_ENDS))
            case "(":
                return self._group()
            case "[":
                return self._class()
            case "\\":
                return Chars(self._escape())
            case "*" | "+" | "?":
                raise self._refusal("nothing to repeat")
        return Chars(single(sign))

    def _group(self) -> Node:
        if self._takes("?") and not self._takes(":"):
            name = re.compile(r"P?<[A-Za-z_$][\w$]*>").match(self._text, self._position)
            if name is None:
                raise self._refusal("an unsupported lookahead, lookbehind or flag")
            self._position = name.end()
        node = self._choice()
        if not self._takes(")"):
            raise self._refusal("an unclosed '('")
        return node

    def _class(self) -> Node:
        negated = self._takes("^")
        found: list[Ranges] = []
        while not self._takes("]"):
            first = self._class_member()
            if self._takes("-"):
                if self._text.startswith("]", self._position):
                    last = single("-")
                else:
                    last = self._class_member()
                    if len(first) == len(last) == 1 and first[0][0] == first[0][1] and last[0][0] == last[0][1]:
                        if first > last:
                            raise self._refusal("a reversed range")
                        first, last = ((first[0][0], last[0][0]),), ()
                    else:  # a hyphen beside a class is literal
                        last = union(last, single("-"))
                found.append(last)
            found.append(first)
        ranges = union(*found)
        if negated:
            ranges = complement(ranges)
        if not ranges:
            raise self._refusal("an empty character class")
        return Chars(ranges)

    def _class_member(self) -> Ranges:
        if self._takes("\\b"):
            return single("\b")
        sign = self._next()
        return self._escape() if sign == "\\" else single(sign)

    def _escape(self) -> Ranges:
        numbered = _HEX.match(self._text, self._position)
        if numbered is not None:
            self._position = numbered.end()
            return self._code(int(next(filter(None, numbered.groups())), 16))
        sign = self._next()
        if sign in _CLASSES:
            return _CLASSES[sign]
        if sign in _CONTROLS:
            return single(chr(_CONTROLS[sign]))
        if sign == "c" and re.match("[A-Za-z]", self._text[self._position :]):
            return single(chr(ord(self._next()) % 32))
        if sign.isalnum():
            raise self._refusal(f"an unsupported escape \\{sign} ({_REFUSED_ESCAPES.get(sign, 'unknown')})")
        return single(sign)

    def _code(self, code: int) -> Ranges:
        if 0xD800 <= code < 0xDC00 and (low := _LOW_HALF.match(self._text, self._position)):
            self._position = low.end()
            code = 0x10000 + (code - 0xD800) * 0x400 + int(low[1], 16) - 0xDC00
        if code > MAX_CODE or 0xD800 <= code < 0xE000:
            raise self._refusal("a lone surrogate or an invalid code point")
        return ((code, code),)


def _search(node: Node) -> Node:
    """Return the tree of all texts that contain a match. Anchors at the ends are removed, others stay."""
    branches = [node]
    done: list[Node] = []
    while branches:
        parts = _parts(branches.pop(0))
        for at in sorted({0, len(parts) - 1}) if parts else ():
            part = parts[at]
            if isinstance(part, Choice | Sequence) and _has_anchor(part):
                options = part.options if isinstance(part, Choice) else (part,)
                branches += [Sequence((*parts[:at], *_parts(each), *parts[at + 1 :])) for each in options]
                break
        else:
            starts, ends = parts[:1] == (_START,), parts[-1:] == (_END,)
            inner = parts[starts : len(parts) - ends]
            done.append(Sequence((*(() if starts else (ANY,)), *inner, *(() if ends else (ANY,)))))
        if len(branches) + len(done) > MAX_BRANCHES:
            raise InvalidValue(f"anchors in groups expand to more than {MAX_BRANCHES} alternatives: use fewer")
    return Choice(tuple(done)) if len(done) > 1 else done[0]


def _parts(node: Node) -> tuple[Node, ...]:
    return node.parts if isinstance(node, Sequence) else (node,)


def _has_anchor(node: Node) -> bool:
    match node:
        case Anchor():
            return True
        case Sequence():
            return any(map(_has_anchor, node.parts))
        case Choice():
            return any(map(_has_anchor, node.options))
    return False


def _lengths(node: Node) -> tuple[int, int | None]:
    """Return the lengths in characters of the shortest and the longest text; None: unlimited."""
    match node:
        case Chars():
            return 1, 1
        case Anchor():
            return 0, 0
        case Repeat():
            minimum, maximum = _lengths(node.node)
            endless = node.maximum is None or maximum is None
            longest = (
                0 if maximum == 0 or node.maximum == 0 else None if endless else (node.maximum or 0) * (maximum or 0)
            )
            return node.minimum * minimum, longest
        case Sequence():
            all_ = [_lengths(each) for each in node.parts]
            return sum(each[0] for each in all_), _total([each[1] for each in all_])
        case Choice():
            all_ = [_lengths(each) for each in node.options]
            ends = [each[1] for each in all_]
            return min(each[0] for each in all_), None if None in ends else max(each or 0 for each in ends)


def _total(lengths: list[int | None]) -> int | None:
    return None if None in lengths else sum(each or 0 for each in lengths)


def _shorten(node: Node, max_length: int) -> Node:
    """Limit a node to texts of at most `max_length` characters; its shortest text must fit."""
    shortest, longest = _lengths(node)
    if longest is not None and longest <= max_length:
        return node
    match node:
        case Choice():
            return Choice(tuple(_shorten(each, max_length) for each in node.options if _lengths(each)[0] <= max_length))
        case Sequence():
            # Each part gets what its shortest text needs; the rest goes first to the part that can use the least.
            sizes = [_lengths(each) for each in node.parts]
            wants = [max_length if maximum is None else maximum - minimum for minimum, maximum in sizes]
            spare, parts = max_length - shortest, list(node.parts)
            for left, at in enumerate(sorted(range(len(parts)), key=wants.__getitem__)):
                extra = min(wants[at], spare // (len(parts) - left))
                spare -= extra
                parts[at] = _shorten(parts[at], sizes[at][0] + extra)
            return Sequence(tuple(parts))
        case Repeat():
            maximum = _lengths(node.node)[1]
            if maximum is not None and (times := max_length // maximum) >= max(node.minimum, 1):
                return Repeat(node.node, node.minimum, times)
            times = max(node.minimum, 1)
            if _lengths(node.node)[0] * times > max_length:
                return Sequence(())
            return Repeat(_shorten(node.node, max_length // times), node.minimum, times)
    raise AssertionError(node)  # one character, but the limit is 0


def _lengthen(node: Node, need: int) -> Node:
    """Limit a node to texts of at least `need` characters; its longest text must reach that."""
    shortest = _lengths(node)[0]
    if shortest >= need:
        return node
    match node:
        case Choice():
            fitting = [each for each in node.options if (longest := _lengths(each)[1]) is None or longest >= need]
            return Choice(tuple(_lengthen(each, need) for each in fitting))
        case Sequence():
            parts = list(node.parts)
            for at in reversed(range(len(parts))):
                minimum, maximum = _lengths(parts[at])
                more = need - shortest if maximum is None else min(need - shortest, maximum - minimum)
                parts[at] = _lengthen(parts[at], minimum + more)
                shortest += more
            return Sequence(tuple(parts))
        case Repeat():
            minimum, maximum = _lengths(node.node)
            if minimum and (node.maximum is None or -(-need // minimum) <= node.maximum):
                return Repeat(node.node, max(node.minimum, -(-need // minimum)), node.maximum)
            times = node.maximum or max(node.minimum, -(-need // maximum) if maximum else 1)
            return Repeat(_lengthen(node.node, -(-need // times)), times, node.maximum)
    raise AssertionError(node)  # one character, but more are needed


def _factor(options: tuple[Node, ...]) -> list[Node]:
    """Merge options with a common first part, as in `write_choice`."""
    groups: dict[Node | None, list[tuple[Node, ...]]] = {}
    for each in options:
        for one in each.options if isinstance(each, Choice) else (each,):
            parts = _parts(one)
            groups.setdefault(parts[0] if parts else None, []).append(parts)
    made: list[Node] = []
    for first, group in groups.items():
        if first is None or len(set(group)) == 1:
            made.append(Sequence(group[0]))
        else:
            rests = tuple(dict.fromkeys(Sequence(parts[1:]) for parts in group))
            made.append(Sequence((first, Choice(rests))))
    return made


def _write_parts(parts: tuple[Node, ...], rule: Rule) -> list[str]:
    """Return the expressions of the parts; consecutive single characters are joined into literals."""
    made, text = [], ""
    for part in (*parts, Sequence(())):
        code = part.ranges[0][0] if isinstance(part, Chars) and len(part.ranges) == 1 else -1
        if isinstance(part, Chars) and part.ranges == ((code, code),):
            text += json.dumps(chr(code), ensure_ascii=False)[1:-1]
            continue
        if text:
            made.append(to_literals(text))
            text = ""
        if part != Sequence(()):
            made.append(write_node(part, rule))
    return made


def _write_chars(node: Chars, rule: Rule) -> str:
    """Write a set. Its escaped characters are a rule of their own: if another alternative begins with one of them, the
    library would otherwise accept what follows it there after every character of the set."""
    raw = _intersect(node.ranges, _RAW)
    escaped = [text for code, text in _ESCAPES.items() if any(first <= code <= last for first, last in node.ranges)]
    if not raw and not escaped:
        raise InvalidValue("the pattern has a character class of lone surrogates only")
    if not escaped:
        return _write_class(raw)
    escapes = escaped[0] if len(escaped) == 1 and not raw else rule(" | ".join(escaped))
    return rule(f"{_write_class(raw)} | {escapes}") if raw else escapes


def _write_class(ranges: Ranges) -> str:
    blocks = [block for first, last in ranges for block in _blocks(first, last)]
    return f"[{''.join(f'{_write_code(first)}-{_write_code(last)}' for first, last in blocks)}]"


def _blocks(first: int, last: int) -> list[tuple[int, int]]:
    """Split a range into parts whose UTF-8 encodings are a product of byte ranges. For other ranges the library accepts
    invalid bytes and even other characters."""
    for end in (0x7F, 0x7FF, 0xFFFF):
        if first <= end < last:
            return [*_blocks(first, end), *_blocks(end + 1, last)]
    for bits in (6, 12, 18) if last > 0x7F else ():
        mask = (1 << bits) - 1
        if first | mask == last | mask:
            break
        if first & mask:
            return [*_blocks(first, first | mask), *_blocks((first | mask) + 1, last)]
        if last & mask != mask:
            return [*_blocks(first, (last & ~mask) - 1), *_blocks(last & ~mask, last)]
    return [(first, last)]


def _write_code(code: int) -> str:
    return chr(code) if chr(code).isascii() and chr(code).isalnum() else f"\\U{code:08x}"


def _intersect(one: Ranges, other: Ranges) -> Ranges:
    return complement(union(complement(one), complement(other)))


_ESCAPES = {code: to_literals(json.dumps(chr(code))[1:-1]) for code in (*range(0x20), ord('"'), ord("\\"))}
"""Literals of the characters that must be escaped in a JSON string."""
_RAW = union(single(" !", "#[", "]\ud7ff"), ((0xE000, MAX_CODE),))
RAW_CLASS = _write_class(_RAW)
"""Class of the characters that need no escape in a JSON string."""
