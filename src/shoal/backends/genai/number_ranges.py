"""Converts ranges of numbers to grammar expressions, digit by digit.

Bounded numbers have no exponent. Their fractions are short enough that parsing rounds no number across a bound.
"""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal, localcontext
from fractions import Fraction
from typing import NamedTuple

from shoal.backends.genai.grammar_spelling import write_choice
from shoal.errors import InvalidValue

MAX_DIGITS = 15
"""Maximum digits of a number, before and after the point together, as many as a double preserves."""

LARGEST = Decimal(10) ** 60
"""Magnitude limit of bounded numbers: each digit of a bound takes time to compile."""

MAX_MULTIPLES = 1000
"""Maximum multiples that are enumerated."""


class Range(NamedTuple):
    """Lower and upper bound, None if unbounded. `open_*`: the bound is exclusive."""

    lower: Decimal | None = None
    upper: Decimal | None = None
    open_lower: bool = False
    open_upper: bool = False
    step: Decimal | None = None

    def __neg__(self) -> Range:
        lower, upper = (None if each is None else -each for each in (self.upper, self.lower))
        return Range(lower, upper, self.open_upper, self.open_lower, self.step)


def write_integers(bounds: Range) -> str:
    """Return the integers within bounds. Raises InvalidValue if there are none, or no grammar for them."""
    step = bounds.step or Decimal(1)
    if (1 / Fraction(step)).denominator == 1:
        return _alternatives(_integers(*_multiples_within(bounds, Decimal(1))))
    zeros = _zeros(step)
    if zeros is None:
        return _write_multiples(bounds, step, integers=True)
    lower, upper = _multiples_within(bounds, step)
    made = [f'{each} "{zeros}"' for each in (*_negative(lower, upper), *_positive(lower, upper))]
    return _alternatives(made + ['"0"'] * _spans(lower, upper, 0))


def write_numbers(bounds: Range) -> str:
    """Return the decimal numbers within bounds. Raises InvalidValue if there are none, or no grammar for them."""
    step = bounds.step
    if step is not None and step == step.to_integral_value():
        return write_integers(bounds)
    if step is not None and _zeros(1 / step) is None:
        return _write_multiples(bounds, step, integers=False)
    bounds = _narrow(bounds)
    bounds = bounds._replace(lower=_round(bounds.lower, ROUND_CEILING), upper=_round(bounds.upper, ROUND_FLOOR))
    digits = MAX_DIGITS if step is None else min(MAX_DIGITS, -int(step.normalize().as_tuple().exponent))
    for each in (bounds.lower, bounds.upper):
        if each is not None:
            whole, fraction = _digits(each)
            digits = min(digits, max(MAX_DIGITS - len(whole), len(fraction)))
    made = _decimals(bounds, digits)
    if bounds.lower is None or bounds.lower < 0:
        made += [f'"-" {each}' for each in _decimals(-bounds, digits, signed=True)]
    return _alternatives(made)


def _round(bound: Decimal | None, direction: str) -> Decimal | None:
    """Round a bound inward to as many digits as a double preserves."""
    return None if bound is None else Context(prec=MAX_DIGITS, rounding=direction).create_decimal(bound)


def _narrow(bounds: Range) -> Range:
    """Clamp bounds to +-LARGEST, which few numbers exceed."""
    if (bounds.lower or 0) > LARGEST or (bounds.upper or 0) < -LARGEST:
        raise InvalidValue(f"no number up to {LARGEST:.0e} is within the bounds: change them")
    if bounds.lower is not None and bounds.lower < -LARGEST:
        bounds = bounds._replace(lower=-LARGEST)
    if bounds.upper is not None and bounds.upper > LARGEST:
        bounds = bounds._replace(upper=LARGEST)
    return bounds


def _multiples_within(bounds: Range, unit: Decimal) -> tuple[int | None, int | None]:
    """Return the smallest and the largest multiple of `unit` within bounds, in units."""
    bounds = _narrow(bounds)
    lower = upper = None
    if bounds.lower is not None:
        edge = Fraction(bounds.lower) / Fraction(unit)
        lower = math.ceil(edge) + (bounds.open_lower and edge.denominator == 1)
    if bounds.upper is not None:
        edge = Fraction(bounds.upper) / Fraction(unit)
        upper = math.floor(edge) - (bounds.open_upper and edge.denominator == 1)
    return lower, upper


def _zeros(step: Decimal) -> str | None:
    """Return the zeros of a power of ten, else None."""
    sign, digits, exponent = step.normalize().as_tuple()
    return "0" * int(exponent) if digits == (1,) and not sign and int(exponent) >= 0 else None


def _write_multiples(bounds: Range, step: Decimal, *, integers: bool) -> str:
    lower, upper = _multiples_within(bounds, step)
    if lower is None or upper is None or upper - lower >= MAX_MULTIPLES:
        raise InvalidValue(
            f"`multipleOf` {step} allows more than {MAX_MULTIPLES} numbers: set `minimum` and `maximum` closer "
            "together, or use a power of ten"
        )
    with localcontext(prec=1000):
        found = [(step * each).normalize() if each else Decimal(0) for each in range(lower, upper + 1)]
    texts = [f"{each:f}" for each in found if not integers or each == each.to_integral_value()]
    return _alternatives([f"({write_choice(texts)})"] if texts else [])


def _alternatives(made: list[str]) -> str:
    if not made:
        raise InvalidValue("no number is within the bounds: widen them")
    return made[0] if len(made) == 1 else f"({' | '.join(made)})"


def _spans(lower: int | None, upper: int | None, value: int) -> bool:
    return (lower is None or lower <= value) and (upper is None or value <= upper)


def _integers(lower: int | None, upper: int | None) -> list[str]:
    return [*_negative(lower, upper), *(['"0"'] if _spans(lower, upper, 0) else []), *_positive(lower, upper)]


def _negative(lower: int | None, upper: int | None) -> list[str]:
    mirrored = _positive(None if upper is None else -upper, None if lower is None else -lower)
    return [f'"-" {each}' for each in mirrored]


def _positive(lower: int | None, upper: int | None) -> list[str]:
    """Return the integers >= 1 within bounds."""
    low = max(lower or 1, 1)
    if upper is not None and upper < low:
        return []
    made: list[str] = []
    digits, longest = len(str(low)), len(str(upper)) if upper is not None else None
    while longest is None or digits <= longest:
        if low == 10 ** (digits - 1) and (longest is None or digits < longest):  # all numbers with this many digits
            more = "" if longest is None else str(longest - 2)
            return [
                *made,
                f"[1-9] [0-9]{{{digits - 1},{more}}}",
                *(_positive(10 ** (longest - 1), upper) if longest else []),
            ]
        made.append(_same_length(str(low), str(upper) if digits == longest else "9" * digits))
        low, digits = 10**digits, digits + 1
    return made


def _same_length(low: str, high: str) -> str:
    """Return the digits from `low` to `high`, which have the same length."""
    if not low:
        return '""'
    if not low.strip("0") and not high.strip("9"):
        return _some_digits(len(low), len(low))
    if low[0] == high[0]:
        return f'"{low[0]}" {_same_length(low[1:], high[1:])}'
    rest = len(low) - 1
    made = [f'"{low[0]}" {_same_length(low[1:], "9" * rest)}']
    if (between := _digit_class(int(low[0]) + 1, int(high[0]) - 1)) is not None:
        made.append(f"{between} {_some_digits(rest, rest)}")
    made.append(f'"{high[0]}" {_same_length("0" * rest, high[1:])}')
    return f"({' | '.join(made)})"


def _digit_class(low: int, high: int) -> str | None:
    return f"[{low}-{high}]" if low <= high else None


def _some_digits(lower: int, upper: int) -> str:
    return f"[0-9]{{{lower},{upper}}}" if upper else '""'


def _digits(value: Decimal) -> tuple[str, str]:
    """Return the digits before and after the point, without trailing zeros."""
    whole, _, fraction = f"{abs(value):f}".partition(".")
    return whole, fraction.rstrip("0")


def _decimals(bounds: Range, digits: int, *, signed: bool = False) -> list[str]:
    """Return the numbers >= 0, or > 0 if they get a sign, with at most `digits` digits after the point."""
    low, open_low = bounds.lower, bounds.open_lower
    if low is None or low < 0 or (low == 0 and signed):
        low, open_low = Decimal(0), signed
    high = bounds.upper
    if high is not None and (high < low or (high == low and (open_low or bounds.open_upper))):
        return []
    whole, fraction = _digits(low)
    bottom = _Edge(fraction, open_low)
    if high is None:
        return [*_with_fraction(whole, _fraction(bottom, None, digits)), *_wholes(int(whole) + 1, None, digits)]
    high_whole, high_fraction = _digits(high)
    top = _Edge(high_fraction, bounds.open_upper)
    if whole == high_whole:
        return _with_fraction(whole, _fraction(bottom, top, digits))
    return [
        *_with_fraction(whole, _fraction(bottom, None, digits)),
        *_wholes(int(whole) + 1, int(high_whole) - 1, digits),
        *_with_fraction(high_whole, _fraction(None, top, digits)),
    ]


def _wholes(lower: int, upper: int | None, digits: int) -> list[str]:
    """Return the numbers whose integer part is within bounds above 0."""
    return [f'{each} ("." {_some_digits(1, digits)})?' if digits else each for each in _positive(lower, upper)]


class _Edge(NamedTuple):
    """The remaining digits of a bound. Once none are left, the number equals the bound, which an open one excludes."""

    digits: str
    is_open: bool

    def step(self) -> tuple[int, _Edge]:
        return int(self.digits[:1] or 0), _Edge(self.digits[1:], self.is_open)


def _with_fraction(whole: str, fraction: tuple[bool, str | None]) -> list[str]:
    empty, some = fraction
    if some is None:
        return [f'"{whole}"'] if empty else []
    return [f'"{whole}" ("." {some}){"?" if empty else ""}']


def _fraction(low: _Edge | None, high: _Edge | None, digits: int) -> tuple[bool, str | None]:
    """Return the fraction digits between two edges: whether they may be absent, and their expression otherwise."""
    if low is not None and not low.digits and not low.is_open:
        low = None
    empty = low is None and not (high is not None and not high.digits and high.is_open)
    if not digits:
        return empty, None
    if low is None and high is None:
        return empty, _some_digits(1, digits)
    first, below = low.step() if low is not None else (-1, None)
    last, above = high.step() if high is not None else (10, None)
    made = []
    if (between := _digit_class(first + 1, last - 1)) is not None:
        made.append(f"{between} {_some_digits(0, digits - 1)}")
    if first == last:
        made += _after(first, _fraction(below, above, digits - 1))
    else:
        if low is not None and first < last:
            made += _after(first, _fraction(below, None, digits - 1))
        if high is not None and first < last:
            made += _after(last, _fraction(None, above, digits - 1))
    return empty, f"({' | '.join(made)})" if made else None


def _after(digit: int, rest: tuple[bool, str | None]) -> list[str]:
    empty, some = rest
    if some is None:
        return [f'"{digit}"'] if empty else []
    return [f'"{digit}" ({some}){"?" if empty else ""}']
