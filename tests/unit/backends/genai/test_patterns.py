"""Regular expressions as grammars, compared with Python's own and tested with the library."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]  # it has no types

from shoal.backends.genai.compact_schema import write_grammar
from shoal.backends.genai.patterns import ANY, bound_length, other_than, parse_pattern
from shoal.backends.genai.string_formats import FORMATS
from shoal.errors import InvalidValue

if find_spec("openvino_genai") is None:
    pytest.skip("needs the 'llm' extra", allow_module_level=True)

from tests.unit.backends.genai.grammar_matcher import GrammarMatcher

ATOMS = st.sampled_from(["a", "b", "-", "[ab]", "[^a]", "ab", "\\w", "\\W", "é", '"', '["a]', "\\\\"])
REPEATS = st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{0,2}", "+?"])
EXPRESSIONS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda two: f"({two[0]}|{two[1]})"),
        st.tuples(inner, REPEATS).map(lambda two: f"(?:{two[0]}){two[1]}"),
    ),
    max_leaves=6,
)
FRAMES = st.sampled_from(["^%s$", "^(%s)$", "^(?:%s)", "(?:%s)$", "%s", "(^|-)(?:%s)(b|$)"])
TEXTS = st.text(alphabet='ab-é"\\', max_size=6)


@pytest.fixture(scope="module")
def matcher() -> GrammarMatcher:
    return GrammarMatcher()


def string_grammar(**keys: object) -> str:
    return write_grammar(json.dumps({"type": "string", **keys}))


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


@given(frame=FRAMES, inner=EXPRESSIONS, texts=st.lists(TEXTS, min_size=1, max_size=8))
def test_what_a_pattern_finds(matcher: GrammarMatcher, frame: str, inner: str, texts: list[str]) -> None:
    """The grammar accepts a text exactly if the pattern is found in it."""
    pattern = frame % inner
    ascii_only = re.compile(pattern, re.ASCII)
    grammar = string_grammar(pattern=pattern)
    for text in texts:
        assert matcher.accepts(quoted(text), grammar=grammar) == bool(ascii_only.search(text)), (pattern, text)


@given(frame=FRAMES, inner=EXPRESSIONS, minimum=st.integers(0, 5), extra=st.integers(0, 5), seed=st.integers(0, 99))
def test_lengths_beside_a_pattern(
    matcher: GrammarMatcher, frame: str, inner: str, minimum: int, extra: int, seed: int
) -> None:
    """The grammar satisfies both, or the combination is rejected."""
    pattern = frame % inner
    try:
        grammar = string_grammar(pattern=pattern, minLength=minimum, maxLength=minimum + extra)
    except InvalidValue as error:
        assert "`pattern` conflicts with" in error.message
        assume(False)
    text = matcher.sample(seed, grammar=grammar)
    assert text is not None
    value = json.loads(text)
    assert re.search(pattern, value, re.ASCII)
    assert minimum <= len(value) <= minimum + extra


@pytest.mark.parametrize(
    ("pattern", "fitting", "others"),
    [
        (r"^\d{3}-\d{4}$", ["555-1234"], ["5551234", "٣٣٣-٣٣٣٣", "x555-1234"]),
        (r"^[\w-.]+$", ["a-b.c"], ["a b", ""]),
        (r"^[^\s\]]+$", ["a[b"], ["a b", "a]b", "\ufeff"]),
        (r"^\x41\u0042\u{1F600}\ud83d\ude00\cJ\t\/\-[\b]$", ["AB😀😀\n\t/-\b"], ["AB"]),
        ("^.$", ["x", "😀", "\\", '"', "\x01", "\x7f"], ["\n", "\u2028", "xx"]),
        ("^(?<year>[12]\\d{3})?$", ["1984", ""], ["984"]),
        ("^a{,2}$", ["a{,2}"], ["a", "aa"]),
        ("^größe[a-f]é[0-9]$", ["größecé7"], ["größec", "größeé7"]),
        ("^(0\\.25|0\\.5|0\\.75)$", ["0.25", "0.5", "0.75"], ["0.725", "0.77225", "0."]),
        ("^a*acd$", ["acd", "aaacd"], ["cd"]),
        ("^[^@]+@[^@]+\\.[^@]+$", ["a.b@c.d.e"], ["a@b", "@b.c"]),
        ("^(foo|bar$)|^$", ["foox", "bar", ""], ["barx", "xfoo"]),
        (r'^(\Wa|"b)$', [",a", '"a', '"b'], [",b", "\\b", "\nb"]),
        (r'^(["\\,]a|"b|\\c)$', [",a", '"a', '"b', "\\c"], [",b", "\\b", '"c', ",c"]),
        (r'^(?:"?|\\+|\Wa)b$', ["b", '"b', "\\b", "\nab"], ["\nb", ",b"]),
        ("", ["", "x"], []),
    ],
)
def test_syntax(matcher: GrammarMatcher, pattern: str, fitting: list[str], others: list[str]) -> None:
    """Escapes, classes and groups are those of ECMAScript."""
    grammar = string_grammar(pattern=pattern)
    assert [text for text in fitting if not matcher.accepts(quoted(text), grammar=grammar)] == []
    assert [text for text in others if matcher.accepts(quoted(text), grammar=grammar)] == []


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("^(?!a)b", "lookahead"),
        ("(?<=a)b", "lookbehind"),
        ("(?i)a", "flag"),
        (r"(a)\1", "references"),
        (r"\k<a>", "references"),
        (r"\bword\b", "word boundaries"),
        (r"\p{L}", "Unicode properties"),
        (r"\q", "unknown"),
        ("a^b", "middle"),
        ("(a$)*", "middle"),
        ("^*", "repeated anchor"),
        ("*a", "nothing to repeat"),
        ("a**", "nothing to repeat"),
        ("a{3,2}", "minimum exceeds its maximum"),
        ("(a", "unclosed"),
        ("a)", "unmatched"),
        ("[a", "unexpected end"),
        ("[]", "empty character class"),
        ("[z-a]", "reversed range"),
        (r"\ud800", "lone surrogate"),
        (r"\u{110000}", "lone surrogate"),
        ("\\", "unexpected end"),
        ("(^|" * 40 + "a" + ")" * 40 + "|(^|b)" * 120, "alternatives"),
    ],
)
def test_what_no_grammar_keeps(pattern: str, why: str) -> None:
    """The error names the unsupported syntax and its position."""
    with pytest.raises(InvalidValue, match=why):
        string_grammar(pattern=pattern)


@given(st.text(alphabet="ab(|)[]^$*+?{}1,\\d-.", max_size=20))
def test_any_pattern(pattern: str) -> None:
    """Any pattern is converted or rejected."""
    try:
        string_grammar(pattern=pattern, maxLength=5)
    except InvalidValue as error:
        assert error.message.startswith("unsupported JSON schema at #: ")


def test_lengths_that_nothing_has() -> None:
    """They are rejected, since the grammar would accept no text."""
    for pattern, minimum, maximum in (("^abc$", 0, 2), ("^abc$", 4, None), ("^(abc){1,3}$", 4, 5)):
        with pytest.raises(InvalidValue, match="minLength"):
            bound_length(parse_pattern(pattern), minimum, maximum)
    assert bound_length(ANY, 0, None) == ANY


@given(
    names=st.frozensets(st.text(alphabet="ab\\", max_size=3), max_size=4), text=st.text(alphabet="ab\\é", max_size=4)
)
def test_names_that_are_none_of_these(matcher: GrammarMatcher, names: frozenset[str], text: str) -> None:
    """The name of an additional property differs from those of the named ones."""
    properties = {name: {"const": 1} for name in names} or {"a": {"const": 1}}
    schema = {"type": "object", "properties": properties, "additionalProperties": {"const": 2}}
    grammar = write_grammar(json.dumps(schema))
    assert matcher.accepts(f"{{{quoted(text)}:2}}", grammar=grammar) == (text not in properties)
    assert other_than(frozenset(properties))


VALID = {
    "date": ["2024-02-29", "1999-12-31"],
    "time": ["23:59:59Z", "08:30:00.125+02:00"],
    "date-time": ["2024-02-29T08:30:00Z"],
    "duration": ["P3Y6M4DT12H30M5S", "PT36H", "P2W"],
    "email": ["first.last+tag@mail.example.co.uk"],
    "hostname": ["example.com", "a-b.example"],
    "ipv4": ["192.168.0.1", "255.255.255.255"],
    "ipv6": ["::", "::1", "2001:db8::8a2e:370:7334", "fe80::", "1:2:3:4:5:6:7:8"],
    "uuid": ["123e4567-e89b-12d3-a456-426614174000"],
    "uri": ["https://example.com:8080/a/b?c=d%20e#f", "mailto:a@example.com", "file:///tmp/x", "urn:isbn:1"],
    "uri-reference": ["/a/b?c", "a/b", "https://example.com", "#x", ""],
    "json-pointer": ["", "/a~1b/0"],
    "relative-json-pointer": ["0#", "1/a"],
}
WRONG = {
    "date": ["2023-02-29", "1900-02-29", "2024-13-01", "24-01-01"],
    "time": ["24:00:00Z", "08:30:00"],
    "date-time": ["2024-02-29 08:30:00Z"],
    "duration": ["P", "PT", "P1D2W"],
    "email": ["a", "a@b", ".a@b.com"],
    "hostname": ["-a.com", "a..b", ""],
    "ipv4": ["256.1.1.1", "1.2.3", "01.2.3.4"],
    "ipv6": ["1:2:3:4:5:6:7:8:9", "1::2::3", ":"],
    "uuid": ["123e4567-e89b-12d3-a456-42661417400"],
    "uri": ["example.com", "http://a b", "//x"],
    "uri-reference": ["a b"],
    "json-pointer": ["a", "/~2"],
    "relative-json-pointer": ["-1", "01"],
}


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_formats(matcher: GrammarMatcher, name: str) -> None:
    """Usual texts of a format are accepted, wrong ones are not, and samples are valid."""
    grammar = string_grammar(format=name)
    alike = name.replace("idn-", "").replace("iri", "uri")
    assert [text for text in VALID[alike] if not matcher.accepts(quoted(text), grammar=grammar)] == []
    assert [text for text in WRONG[alike] if matcher.accepts(quoted(text), grammar=grammar)] == []
    validator = Draft202012Validator({"format": name}, format_checker=Draft202012Validator.FORMAT_CHECKER)
    drawn = [matcher.sample(seed, grammar=string_grammar(format=name, maxLength=60)) for seed in range(8)]
    for text in drawn:
        assert text is not None
        assert len(json.loads(text)) <= 60
        validator.validate(json.loads(text))


def test_formats_beside_other_keys(matcher: GrammarMatcher) -> None:
    """A pattern takes precedence over a format; unknown formats restrict nothing, others are rejected."""
    assert matcher.accepts('"x"', grammar=string_grammar(format="date", pattern="^x$"))
    assert matcher.accepts('"x"', grammar=string_grammar(format="password"))
    for name in ("regex", "uri-template"):
        with pytest.raises(InvalidValue, match=name):
            string_grammar(format=name)
