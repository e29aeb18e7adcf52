"""Resource limits of untrusted templates, which do not affect honest ones."""

from __future__ import annotations

import itertools

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shoal.errors import ConfigError, InvalidValue
from shoal.pipelines.chat import bounds
from shoal.pipelines.chat.template import ChatTemplate
from shoal.types import Message

BOMB = "{% set ns = namespace(a=['x']) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}"
PAIRS = "{% set ns = namespace(a=('x',)) %}{% for i in range(60) %}{% set ns.a = (ns.a, ns.a) %}{% endfor %}"
BIG = "{% set x = 'xyz ' * 200000 %}"

RUNNING = {
    "loops": "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
    "a loop without a body": "{% for a in range(90000) %}{% for b in range(90000) if b < 0 %}{% endfor %}{% endfor %}",
    "a loop that calls itself": "{% for a in range(9000) recursive %}{{ loop(range(9000)) if loop.depth < 4 }}"
    "{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "silent macros": "{% macro f(n) %}{% if n and (f(n-1) or f(n-1)) %}{% endif %}{% endmacro %}{{ f(60) }}",
    "filters of calls": "{% macro f(n) %}{{ (f(n-1) ~ f(n-1)) | upper if n }}{% endmacro %}{{ f(60) }}",
    "callers": "{% macro f(n) %}{% if n %}{% call f(n-1) %}{% endcall %}{% call f(n-1) %}{% endcall %}{% endif %}"
    "{{ caller() if caller }}{% endmacro %}{{ f(60) }}",
    "its own counter": "{% set _steps = [-10**9] %}{% set budget = 0 %}{% for a in range(90000) %}"
    "{% for b in range(90000) %}{% endfor %}{% endfor %}",
    "filters within filters": "{% for a in range(90) %}{{ range(90000) | map('string') | map('upper') | list }}"
    "{% endfor %}",
    "memory": BIG
    + "{% set ns = namespace(l=[]) %}{% for a in range(90000) %}{% set ns.l = ns.l + [x ~ a] %}{% endfor %}",
    "slices": BIG
    + "{% set ns = namespace(l=[]) %}{% for a in range(90000) %}{% set ns.l = ns.l + [x[1:]] %}{% endfor %}",
    "lists": "{% set ns = namespace(l=[]) %}{% for a in range(90000) %}{% set ns.l = [ns.l, ["
    + "1," * 2_000
    + "]] %}{% endfor %}",
    "one text again and again": BIG + "{% set y %}{% for a in range(90000) %}{{ x }}{% endfor %}{% endset %}",
    "the template's own text": "{% macro f() %}{% for a in range(90000) %}" + "static " * 9_000 + "{% endfor %}"
    "{% endmacro %}{{ f() | length }}",
    "items of a sum": "{{ ([[0] * 1000] * 100000) | sum(start=[]) | length }}",
    "pieces of a text": BIG + "{% for a in range(90000) %}{% set y = x.split(' ') %}{% endfor %}",
}
GROWING = {
    "'x' * 10**12": "text",
    "10**12 * 'x'": "text",
    "[0] * 10**12": "list",
    "(range(99999) | list * 600) | sort": "list",
    "10**10**10**10**10**10": "number",
    "2 ** (10**9)": "number",
    "(2**60000) * (2**60000)": "number",
    "'%1000000000d' % 1": "width",
    "'%.1000000000f' % 1": "width",
    "'%*d' % (1000000000, 1)": "format",
    "'%(a(b))1000000000d' % {'a(b)': 1}": "format",
    "'%99999999999999999999d' | format(1)": "width",
    "'{:>2000000000}'.format(1)": "width",
    "'{:{}}'.format(1, 2000000000)": "width",
    "'{a:.2000000000f}'.format_map({'a': 1})": "width",
    "('{0}' | attr('format'))('x' * 9) ~ ('{:2000000000}' | attr('format'))('x')": "width",
    "'a' | center(2000000000)": "width",
    "'a'.center(2000000000)": "width",
    "'a'.ljust(2000000000, 'b')": "width",
    "('a' | safe).rjust(2000000000)": "width",
    "'a'.encode().zfill(2000000000)": "width",
    "'a' | indent(2000000000)": "width",
    "('\\n' * 1000000) | indent(2000)": "text",
    "('\\n' * 1000000) | indent('x' * 20000)": "text",
    "('\\t' * 1000000).expandtabs(9999)": "text",
    "('a' * 10000) | replace('a', 'b' * 10000)": "text",
    "('a' * 10000).replace('a', 'b' * 10000)": "text",
    "('a' * 10000).encode().replace('a'.encode(), ('b' * 10000).encode())": "text",
    "('a' * 10000).translate({97: 'b' * 10000})": "text",
    "(['a' * 10000] * 10000) | join": "text",
    "(messages * 10000) | map('string') | join('a' * 10000)": "text",
    "(('a' * 10000) ~ '').join(['b'] * 10000)": "text",
    "'-'.join((['a' * 10000] * 10000) | map('string'))": "text",
    "('%(a)s' * 10000) % {'a': 'a' * 10000}": "text",
    "[[[1] * 9] * 9] | tojson(indent=20000)": "width",
    "[1] | tojson(separators=('x' * 20000, ':'))": "width",
    "([['a' * 10000] * 100] * 100) | tojson": "value",
    "[1] | batch(1000000000, 'a') | list": "width",
    "[1] | batch(linecount=1000000000, fill_with='a') | list": "width",
    "[1] | slice(1000000000) | list": "width",
    "5 | round(-1000000000)": "width",
    "5.5 | round(1000000000, 'floor')": "width",
    "5 .to_bytes(1000000000, 'big')": "width",
    "('a' * 2000000) | list": "list",
    "('a' * 2000000) | title": "list",
    "('a ' * 2000000).split()": "list",
    "('a\\n' * 2000000).splitlines()": "list",
    "('ab' * 2000000).rsplit('b')": "list",
    "'a'.encode('punycode')": "UTF-8",
    "strftime_now('%1000000000Y')": "width",
    "strftime_now('%Y' * 9999)": "width",
    "range(10**9) | list": "too big",
}
WRITING = (
    "{{ ns.a }}",
    "{{ ns }}",
    "{{ ns.a | string }}",
    "{{ ns.a | tojson }}",
    "{{ ns.a | upper }}",
    "{{ ns.a ~ '' }}",
    "{{ [ns.a] | join }}",
    "{{ '%s' % ([ns.a],) }}",
    "{{ '%s' | format(ns.a) }}",
    "{{ '{}'.format(ns.a) }}",
    "{{ '{!r}'.format(ns.a) }}",
    "{{ {'a': ns.a}.items() }}",
    "{{ raise_exception(ns.a) }}",
    "{{ [ns.a, [ns.a[0], ns.a[1]]] | sort }}",
    "{{ [ns.a] | unique | list }}",
    "{{ ns.a == [ns.a[0], ns.a[1]] }}",
    "{{ [ns.a[0], ns.a[1]] in [ns.a] }}",
    "{{ ns.a is eq([ns.a[0], ns.a[1]]) }}",
    "{{ [ns.a] | select('equalto', [ns.a[0], ns.a[1]]) | list }}",
    "{{ [ns.a].index([ns.a[0], ns.a[1]]) }}",
    "{% set ns.b = ns %}{% set ns.c = [ns.b, ns.b] %}{{ ns.c }}",
)
HASHING = (
    "{{ {ns.a: 1} | length }}",
    "{{ {'a': 1}[ns.a] }}",
    "{{ ns.a in {'a': 1} }}",
    "{{ dict([(ns.a, 1)]) | length }}",
    "{{ {'a': 1}.get(ns.a) }}",
)


def rendered(source: str) -> str:
    return ChatTemplate(source).render([Message(role="user", content="Hi")])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "MOST_STEPS": 100_000,
        "MOST_CHARS": 1 << 23,
        "MOST_OCTETS": 1 << 26,
        "MOST_VALUES": 1 << 13,
    }.items():
        monkeypatch.setattr(bounds, name, value)
    monkeypatch.setattr("shoal.pipelines.chat.bounds.monotonic", lambda: 0.0)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", RUNNING)
def test_a_template_neither_runs_nor_grows_for_ever(name: str) -> None:
    """Loading detects it, because it renders the template once."""
    with pytest.raises(ConfigError, match=r"does not finish .*: the template (needs|allocates) more than \d+"):
        ChatTemplate(RUNNING[name])


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("expression", GROWING)
def test_nothing_is_made_that_is_too_large(expression: str) -> None:
    with pytest.raises(InvalidValue, match=GROWING[expression]):
        rendered(f"{{{{ {expression} }}}}")


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("rest", WRITING)
def test_self_containing_values_are_not_written_out(rest: str) -> None:
    with pytest.raises(InvalidValue, match="too large to print or compare"):
        rendered(BOMB + rest)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("rest", HASHING)
def test_nor_is_it_hashed(rest: str) -> None:
    with pytest.raises(InvalidValue, match="too large to print or compare"):
        rendered(PAIRS + rest)


@pytest.mark.usefixtures("small")
def test_indentation_is_limited_while_rendering() -> None:
    """The indentation is far larger than the content."""
    deep = "{% set ns = namespace(a=[1] * 8000) %}{% for i in range(100) %}{% set ns.a = [ns.a] %}{% endfor %}"
    assert rendered(deep + "{{ ns.a | tojson | length }}") == str(3 * 8000 + 200)
    with pytest.raises(InvalidValue, match="a text in the template is too large"):
        rendered(deep + "{{ ns.a | tojson(indent=16) | length }}")


def test_the_clock_is_the_last_resort(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr("shoal.pipelines.chat.bounds.monotonic", lambda: next(ticks) / 10)
    source = "{% for a in range(N) %}{% endfor %}"
    assert rendered(source.replace("N", "9000")) == ""
    with pytest.raises(ConfigError, match="needs more than 2 seconds"):
        rendered(source.replace("N", "90000"))


def test_a_request_that_makes_it_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MOST_STEPS", 100_000)
    chat_template = ChatTemplate("{% for a in messages[0].content %}{% for b in range(9000) %}{% endfor %}{% endfor %}")
    with pytest.raises(InvalidValue, match="rejects these messages: the template needs more than 100000 steps"):
        chat_template.render([Message(role="user", content="a" * 100)])


def test_renderings_have_budgets_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MOST_STEPS", 20_000)
    chat_template = ChatTemplate("{% for b in range(9000) %}{% endfor %}{{ messages[0].content }}")
    assert [chat_template.render([Message(role="user", content=text)]) for text in "abcdef"] == list("abcdef")


def test_parts_that_are_worked_out_when_it_is_compiled_are_bounded() -> None:
    with pytest.raises(InvalidValue, match="width"):
        rendered("{{ 'a' | center(2000000000) | length }}")


@pytest.mark.parametrize("name", ["wordwrap", "urlize", "striptags", "pprint", "xmlattr"])
def test_filters_without_a_use_are_not_there(name: str) -> None:
    with pytest.raises(ConfigError, match=f"No filter named '{name}'"):
        ChatTemplate(f"{{{{ 'a' | {name} }}}}")


@pytest.mark.parametrize(
    "expression",
    [
        "[1, 'b', none, [2, {'a': x}]] | join(', ')",
        "[{'a': 1}, {'a': 2}] | join('-', attribute='a')",
        "'ab' | join('-')",
        "[1, 2.5] | sum",
        "[{'a': 1}, {'a': 2}] | sum('a', 10)",
        "[[1], [2]] | sum(start=[])",
        "'%5.1f|%-4s|%%|%(a)s' % {'a': 1} if false else '%5.1f|%-4s|%%' % (2.25, 'b')",
        "'%(a)s %(b)r' | format(a=1, b='c')",
        "'{0} {a[b]:>6} {1!r:^9}'.format(1, 'x', a={'b': 2})",
        "'{a}'.format_map({'a': x})",
        "(('<{}>' | safe).format('<'))",
        "'a\nb\n' | indent(2, true)",
        "'a\nb' | indent('> ')",
        "x.replace('i', 'oo', 1) ~ (x | replace('i', 'oo'))",
        "['b', 'a', 'B'] | sort ~ (['b', 'a', 'b'] | unique | list)",
        "[1, 2, 3, 4, 5] | batch(2, 'x') | list ~ ([1, 2, 3] | slice(2) | list)",
        "{'b': 1, 'a': 2} | dictsort ~ ({'a': 1}.items() | list)",
        "dict(a=1, **{'b': 2}) ~ dict([('a', 1)])",
        "[{'r': 'a', 'v': 1}, {'r': 'b', 'v': 2}] | groupby('r') | map(attribute='list') | list",
        "[{'r': 'a'}, {'r': 'b'}] | selectattr('r', 'equalto', 'a') | list | length",
        "x[1:] ~ x[::-1] ~ [1, 2, 3][-1:]",
        "2 ** 10 + 7 % 4 - 3 * 2",
        "[2, {'b': [], 'a': x}] | string",
        "'abc'.center(9) ~ 'x'.ljust(3) ~ 'y'.zfill(4) ~ 'a\tb'.expandtabs(4)",
        "','.join(['a', 'b']) ~ ','.join('ab') ~ ','.join({'a': 1}) ",
        "x.split('i') ~ ' a b '.split() ~ 'a\nb'.splitlines()",
        "'é'.encode().decode('utf-8') ~ 'abc'.translate({97: 'x'})",
        "(1 < 2 < 3) ~ ([1] == [1]) ~ ({'a': 1} != {'a': 2}) ~ (x in [x, 1]) ~ ('a' in {'a': 1})",
        "[1, 2] is eq([1, 2]) ~ (3 is in [1, 2]) ~ (x is string)",
        "2.567 | round(1) ~ (17 | int) ~ ('ff' | int(base=16)) ~ ([3, 1] | max) ~ ([3, 1] | first)",
        "undefined_name ~ (undefined_name is defined) ~ (undefined_name | default('d'))",
        "'a b' | title ~ ('a b' | wordcount) ~ (' a ' | trim) ~ ('a/b c' | urlencode)",
    ],
)
def test_expressions_keep_their_meaning(expression: str) -> None:
    source = f"{{% set x = 'Hi' %}}{{% set y = ({expression}) %}}{{{{ y }}}}|{{{{ {expression} }}}}"
    assert rendered(source) == ImmutableSandboxedEnvironment().from_string(source).render()


@pytest.mark.parametrize(
    "expression", ["','.join([1])", "'%d' % 'a'", "'{}'.format()", "1 + 'a'", "[] | first | tojson"]
)
def test_errors_are_pythons_own(expression: str) -> None:
    source = f"{{{{ {expression} }}}}"
    plain = ImmutableSandboxedEnvironment()
    with pytest.raises((TypeError, IndexError, jinja2.TemplateError)) as expected:
        plain.from_string(source).render()
    with pytest.raises(InvalidValue) as caught:
        rendered(source)
    assert str(expected.value).split(":")[0][:20] in caught.value.message
