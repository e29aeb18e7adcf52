"""Limit the steps, memory and time of rendering a chat template, counted where no template can interfere."""

from __future__ import annotations

import re
import sys
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from time import monotonic
from typing import Any, cast

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

MOST_STEPS = 4_000_000
"""Loop iterations, calls, filters, sums and outputs, together."""
MOST_CHARS = 1 << 26
"""Characters of the rendered text, and of any text built within it."""
MOST_OCTETS = 1 << 29
"""Bytes of everything that is built, in total, whether it is kept or not."""
MOST_ITEMS = 1 << 20
"""Items of one list."""
MOST_VALUES = 1 << 18
"""Values nested in a value that is printed, compared or hashed."""
MOST_BITS = 1 << 16
"""Bits of an integer that is multiplied or raised to a power."""
MOST_WIDTH = 10_000
"""Width of any padding: a format's width, an indentation, the parts of a list."""
MOST_SECONDS = 2.0
_LOOK = 1_000
"""Steps between two checks of the clock."""
_STEP = 1 << 12
"""Bytes that take about as long as a step."""
# A key in parentheses, a width, a precision. Anything else Python accepts only makes them look larger.
_SPEC = re.compile(r"%(\([^)]*\))?[-+ #0]*(\*|\d*)(?:\.(\*|\d*))?")
_BLANKS = "\t\n\v\f\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
_ENCODINGS = frozenset({"utf-8", "utf8", "ascii", "latin-1"})

NESTING: tuple[type, ...] = (
    list,
    tuple,
    dict,
    set,
    frozenset,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
    Namespace,
)
"""Types that may contain themselves many times over without using memory."""


class BudgetExceeded(SecurityError):
    """The budget of a rendering is used up."""


class Budget:
    """The budget of one rendering. Raises BudgetExceeded once it is used up, and on every later use."""

    def __init__(self) -> None:
        self._steps = 0
        self._octets = 0
        self._next_check = _LOOK
        self._deadline = monotonic() + MOST_SECONDS

    def spend(self, steps: int = 1) -> None:
        self._steps += steps
        if self._steps >= self._next_check:
            self._next_check = self._steps + _LOOK
            if self._steps > MOST_STEPS:
                self._next_check = 0
                raise BudgetExceeded(f"the template needs more than {MOST_STEPS} steps")
            if monotonic() > self._deadline:
                self._next_check = 0
                raise BudgetExceeded(f"the template needs more than {MOST_SECONDS:g} seconds")

    def charge(self, octets: int) -> None:
        """Count `octets` bytes of allocated memory."""
        self._octets += octets
        if self._octets > MOST_OCTETS:
            raise BudgetExceeded(f"the template allocates more than {MOST_OCTETS} bytes")
        self.spend(1 + octets // _STEP)


_current: ContextVar[Budget] = ContextVar("budget")


@contextmanager
def budget() -> Generator[Budget]:
    """Count everything in the body against one new budget."""
    made = Budget()
    before = _current.set(made)
    try:
        yield made
    finally:
        _current.reset(before)


def spend(steps: int = 1) -> None:
    _current.get().spend(steps)


def charge(octets: int) -> None:
    _current.get().charge(octets)


def charge_value(value: Any) -> Any:
    """Charge the memory of a value itself, and return it."""
    if isinstance(value, str | bytes | list | tuple | dict | int):
        _current.get().charge(sys.getsizeof(value))
    return value


def count_steps(items: Iterable[Any], octets: int = 0) -> Iterator[Any]:
    """Yield the items and count each as a step. `octets`: bytes written for each, whatever the item is."""
    now = _current.get()
    for item in items:
        if octets:
            now.charge(octets)
        else:
            now.spend()
        yield item


def check_size(value: Any) -> Any:
    """Return the value after checking that it is not too large to be printed, hashed or compared."""
    if isinstance(value, NESTING):
        size(value)
    return value


def size(value: Any) -> int:
    """Return the characters of a printed value, without punctuation. Anything it contains twice counts twice."""
    if isinstance(value, str | bytes):
        return len(value)
    nodes = chars = 0
    left: list[Any] = [value]
    while left:
        each = left.pop()
        nodes += 1
        if isinstance(each, str | bytes):
            chars += len(each)
        elif isinstance(each, dict):
            left.extend(each)
            left.extend(each.values())
        elif isinstance(each, Namespace):
            left.append(each._Namespace__attrs)  # its only field, which is printed with it
        elif isinstance(each, NESTING):
            left += [*cast(Iterable[Any], each)]
        else:
            chars += 8
        if nodes + len(left) > MOST_VALUES or chars > MOST_CHARS:
            raise SecurityError("a value in the template is too large to print or compare")
    _current.get().spend(nodes // 8)
    return chars + nodes


def join_parts(parts: Iterable[Any], separator: str = "") -> str:
    now = _current.get()
    texts: list[str] = []
    chars = 0
    for part in parts:
        now.spend()
        text = str(check_size(part))
        chars += len(text) + len(separator)
        check_chars(chars)
        texts.append(text)
    return str(charge_value(separator.join(texts)))


def check_chars(chars: int) -> None:
    if chars > MOST_CHARS:
        raise SecurityError(f"a text in the template is too large: it has more than {MOST_CHARS} characters")


def check_items(items: int) -> None:
    if items > MOST_ITEMS:
        raise SecurityError(f"a list in the template is too large: it has more than {MOST_ITEMS} items")


def check_width(width: Any, max_width: int | None = None) -> None:
    max_width = MOST_WIDTH if max_width is None else max_width
    if isinstance(width, int) and abs(width) > max_width:
        raise SecurityError(f"a width in the template is too large: it is more than {max_width}")


def check_sum(left: Any, right: Any) -> None:
    if isinstance(left, str | bytes) and isinstance(right, str | bytes):
        check_chars(len(left) + len(right))
    elif isinstance(left, list | tuple) and isinstance(right, list | tuple):
        check_items(len(left) + len(right))


def check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
    for many, times in ((left, right), (right, left)):
        if not isinstance(times, int):
            continue
        if isinstance(many, str | bytes):
            check_chars(len(many) * abs(times))
        elif isinstance(many, list | tuple):
            check_items(len(many) * abs(times))


def check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * abs(right))


def _check_bits(bits: int) -> None:
    if bits > MOST_BITS:
        raise SecurityError(f"a number in the template is too large: it has more than {MOST_BITS} bits")


def check_percent(form: str | bytes, values: Any) -> None:
    """Check the size of `form % values`."""
    text = form if isinstance(form, str) else form.decode("latin-1")
    chars, specs = len(text), 0
    for key, width, precision in _SPEC.findall(text):
        if "*" in (width, precision) or "(" in key[1:]:
            raise SecurityError("a format in the template is too large: its width is not literal")
        for digits in (width, precision):
            check_width(int(digits[:8] or "0"))
            chars += int(digits or "0")
        specs += 1
    spend(specs)
    check_chars(chars + size(values) * (specs if isinstance(values, dict) else 1))


def check_replace(text: str | bytes, old: Any, new: Any) -> None:
    if isinstance(text, str) and isinstance(old, str) and isinstance(new, str):
        check_chars(len(text) + text.count(old) * max(0, len(new) - len(old)))
    if isinstance(text, bytes) and isinstance(old, bytes) and isinstance(new, bytes):
        check_chars(len(text) + text.count(old) * max(0, len(new) - len(old)))


def check_indent(text: Any, width: Any) -> None:
    check_width(width)
    if isinstance(text, str):
        wide = len(width) if isinstance(width, str) else width
        check_chars(len(text) + (sum(map(text.count, "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029")) + 1) * wide)


def check_method(owner: Any, name: str, values: tuple[Any, ...]) -> None:
    """Check a method of a text, number or list, with its arguments in the order given."""
    if name == "join" and isinstance(owner, str | bytes):
        items = values[0] if values and isinstance(values[0], list | tuple) else ()
        check_chars(sum(len(each) + len(owner) for each in items if isinstance(each, str | bytes)))
        spend(len(items) // 8)
        return
    for each in values:
        check_size(each)
    if isinstance(owner, int) and name == "to_bytes":
        check_width(values[0] if values else 1)
    if not isinstance(owner, str | bytes):
        return
    if name in ("center", "ljust", "rjust", "zfill", "expandtabs"):
        for each in values:
            check_width(each)
            if name == "expandtabs" and isinstance(each, int):
                check_chars(len(owner) + _tabs(owner) * each)
    elif name == "replace" and len(values) > 1:
        check_replace(owner, values[0], values[1])
    elif name == "translate" and values:
        table = values[0].values() if isinstance(values[0], dict) else ()
        check_chars(len(owner) * max((len(each) for each in table if isinstance(each, str)), default=1))
    elif name in ("encode", "decode") and not _ENCODINGS.issuperset(values[:1]):
        raise SecurityError("templates can only encode as UTF-8")
    elif name in ("split", "rsplit", "splitlines") and isinstance(owner, str):
        _check_split(owner, values[0] if name != "splitlines" and values else None)


def _tabs(text: str | bytes) -> int:
    return text.count("\t") if isinstance(text, str) else text.count(b"\t")


def _check_split(text: str, separator: Any) -> None:
    if isinstance(separator, str) and separator:
        number = text.count(separator)
    else:
        number = sum(map(text.count, _BLANKS)) if len(text) > MOST_ITEMS else len(text)
    check_items(number)
    charge(number * sys.getsizeof(""))
