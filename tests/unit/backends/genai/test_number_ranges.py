"""Grammars of number ranges, tested number by number with the library."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from importlib.util import find_spec

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shoal.backends.genai.number_ranges import MAX_MULTIPLES, Range, write_integers, write_numbers
from shoal.errors import InvalidValue

if find_spec("openvino_genai") is None:
    pytest.skip("needs the 'llm' extra", allow_module_level=True)

from tests.unit.backends.genai.grammar_matcher import GrammarMatcher

INTEGERS = st.integers(-12, 12) | st.integers(-10_000, 10_000) | st.integers(-(10**40), 10**40)
DECIMALS = st.builds(
    lambda digits, places: Decimal(digits).scaleb(-places), st.integers(-4000, 4000), st.integers(0, 4)
)


@pytest.fixture(scope="module")
def matcher() -> GrammarMatcher:
    return GrammarMatcher()


def holds(bounds: Range, value: Decimal) -> bool:
    minimum, maximum, open_minimum, open_maximum, step = bounds
    return (
        (minimum is None or value > minimum or (value == minimum and not open_minimum))
        and (maximum is None or value < maximum or (value == maximum and not open_maximum))
        and (step is None or (Fraction(value) / Fraction(step)).denominator == 1)
    )


@given(
    minimum=st.none() | INTEGERS,
    maximum=st.none() | INTEGERS,
    openness=st.tuples(st.booleans(), st.booleans()),
    step=st.sampled_from([None, None, 1, 10, 1000, Decimal("0.5")]),
    others=st.lists(INTEGERS, max_size=4),
)
def test_integers(
    matcher: GrammarMatcher,
    minimum: int | None,
    maximum: int | None,
    openness: tuple[bool, bool],
    step: int | None,
    others: list[int],
) -> None:
    """Integers within bounds are accepted, others are not."""
    bounds = Range(
        None if minimum is None else Decimal(minimum), None if maximum is None else Decimal(maximum), *openness
    )
    bounds = bounds._replace(step=None if step is None else Decimal(step))
    ends = [0, minimum or 0, maximum or 0]
    tried = {end + away for end in ends for away in (-1000, -1, 0, 1, 1000)} | set(others)
    try:
        grammar = f"root ::= {write_integers(bounds)}"
    except InvalidValue:
        assert not any(holds(bounds, Decimal(each)) for each in tried)
        assume(False)
    for each in tried:
        assert matcher.accepts(str(each), grammar=grammar) == holds(bounds, Decimal(each)), (each, bounds)


@given(
    minimum=st.none() | DECIMALS,
    maximum=st.none() | DECIMALS,
    openness=st.tuples(st.booleans(), st.booleans()),
    step=st.sampled_from([None, None, Decimal("0.1"), Decimal("0.01"), Decimal(10)]),
    others=st.lists(DECIMALS, max_size=6),
    seed=st.integers(0, 99),
)
def test_numbers(
    matcher: GrammarMatcher,
    minimum: Decimal | None,
    maximum: Decimal | None,
    openness: tuple[bool, bool],
    step: Decimal | None,
    others: list[Decimal],
    seed: int,
) -> None:
    """Numbers within bounds are accepted, others are not, and samples are within bounds."""
    bounds = Range(minimum, maximum, *openness, step)
    ends = [minimum or Decimal(0), maximum or Decimal(0)]
    near = [Decimal(0), Decimal("0.0001"), Decimal("-0.01"), Decimal(1), Decimal(-1)]
    tried = {end + away for end in ends for away in near} | set(others)
    try:
        grammar = f"root ::= {write_numbers(bounds)}"
    except InvalidValue:
        assert not any(holds(bounds, each) for each in tried)
        assume(False)
    for each in tried:
        text = f"{each.normalize():f}" if each else "0"
        assert matcher.accepts(text, grammar=grammar) == holds(bounds, each), (text, bounds)
    drawn = matcher.sample(seed, 60, grammar=grammar)
    if drawn is not None:
        assert holds(bounds, Decimal(drawn)), (drawn, bounds)
        # Neither is it rounded across an open bound when it is read.
        assert holds(bounds._replace(step=None), Decimal(repr(float(drawn)))), (drawn, bounds)


def test_many_digits(matcher: GrammarMatcher) -> None:
    """No number is rounded to an open bound, and bounds may have more digits than a double."""
    below_one = f"root ::= {write_numbers(Range(Decimal(0), Decimal(1), open_upper=True))}"
    assert matcher.accepts("0.99999999999999", grammar=below_one)
    assert not matcher.accepts("0.99999999999999999", grammar=below_one)
    long = Decimal("0.12345678901234567")
    above = f"root ::= {write_numbers(Range(long, None, open_lower=True))}"
    assert matcher.accepts("0.123456789012347", grammar=above)
    assert not matcher.accepts("0.12345678901234567", grammar=above)
    huge = f"root ::= {write_numbers(Range(None, Decimal('1.5e300')))}"
    assert matcher.accepts("1000000000000000000000", grammar=huge)
    far = f"root ::= {write_integers(Range(Decimal(-(10**300)), Decimal(10**300)))}"
    assert matcher.accepts("-1000000000000000000000", grammar=far)
    assert len(far) < 10_000


def test_multiples(matcher: GrammarMatcher) -> None:
    """Multiples of numbers other than powers of ten are listed if they are few."""
    sevens = Range(Decimal(-7), Decimal(7 * (MAX_MULTIPLES - 2)), step=Decimal(7))
    grammar = f"root ::= {write_integers(sevens)}"
    accepted = [each for each in range(-8, 60) if matcher.accepts(str(each), grammar=grammar)]
    assert accepted == list(range(-7, 60, 7))
    for bounds in (sevens._replace(lower=Decimal(-14)), sevens._replace(upper=None)):
        with pytest.raises(InvalidValue, match="`minimum` and `maximum`"):
            write_integers(bounds)
    quarters = f"root ::= {write_numbers(Range(Decimal('-0.25'), Decimal('0.75'), step=Decimal('0.25')))}"
    texts = ["-0.25", "0", "0.25", "0.5", "0.75", "-0", "0.725", "1"]
    assert [text for text in texts if matcher.accepts(text, grammar=quarters)] == texts[:5]
    assert matcher.accepts(
        "5", grammar=f"root ::= {write_integers(Range(Decimal(0), Decimal(9), step=Decimal('2.5')))}"
    )


def test_no_number() -> None:
    """Bounds without a number between them are rejected."""
    for bounds in (
        Range(Decimal(2), Decimal(1)),
        Range(Decimal(1), Decimal(1), True),
        Range(Decimal(1), Decimal(1), False, True),
    ):
        for write in (write_integers, write_numbers):
            with pytest.raises(InvalidValue, match="no number"):
                write(bounds)
    with pytest.raises(InvalidValue, match="no number"):
        write_integers(Range(Decimal("1.2"), Decimal("1.8")))
