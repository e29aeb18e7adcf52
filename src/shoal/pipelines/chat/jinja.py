"""The Jinja that chat templates are written in: that of transformers' `apply_chat_template`, in a sandbox with bounds.

A template comes with a model's files, and so from strangers: it may read what it is given and make a text of it,
nothing else. What one rendering takes is bounded, by the numbers in `bounds`:

- Steps: each turn of a loop, each call (also of a macro by itself), filter, sum or product, and output.
- Sizes, looked at before anything is made: sums, products and powers of texts, lists and whole numbers; widths and
  precisions of formats, fills and indentations; replacements; what is written out, compared, sorted or hashed, where
  all counts that a value holds twice; the rendered text.
- Memory: of everything that is made, one after the other.
- Time: the clock is looked at every thousand steps, and large values count as many.

One operation of Python's own on a text of the largest size (to search backwards, to sort a million items) is not
interrupted, and may take seconds. What the messages themselves take is not counted, nor the compilation of the source,
which is as long as its file. Filters that chat templates have no use for are left out: `UNUSED`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import reduce, wraps
from types import BuiltinMethodType, MethodType
from typing import Any, NoReturn

from jinja2 import Environment, Template, TemplateError, TemplateRuntimeError, nodes, pass_context, pass_environment
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from jinja2.utils import _PassArg
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

from shoal.pipelines.chat import bounds

UNUSED = ("filesizeformat", "forceescape", "pprint", "striptags", "urlize", "wordwrap", "xmlattr")
# fmt: off
_SHALLOW = frozenset((
    "attr", "batch", "count", "d", "default", "first", "items", "join", "last", "length", "list", "map", "random",
    "reject", "rejectattr", "reverse", "select", "selectattr", "slice", "sum",
))
"""Filters that only look at the outside of a value, or at one item after the other."""
_COMPARING = frozenset((
    "!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt", "in", "le", "lessthan", "lt", "ne",
))
"""Tests that look at all of a value."""
_EACH = frozenset((
    "batch", "groupby", "list", "map", "max", "min", "reject", "rejectattr", "select", "selectattr", "slice", "sort",
    "sum", "title", "unique", "urlencode", "wordcount",
))
"""Filters that go through a text letter by letter, at Python's own speed."""
# fmt: on
_SMALL = 16
"""Items of a list in the source whose memory nobody counts: there are only so many steps."""
_MOST_INDENT = 16
_MOST_FORM = 1_000


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox in which everything that can be repeated or can grow is counted first."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            bounds.check_sum(left, right)
        elif operator == "*":
            bounds.check_product(left, right)
        elif operator == "**":
            bounds.check_power(left, right)
        elif isinstance(left, str | bytes):
            bounds.check_percent(left, right)
        return bounds.charge_value(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        bounds.spend()
        if isinstance(__obj, LoopContext):
            args = (*map(bounds.count_steps, args[:1]), *args[1:])
        elif isinstance(__obj, BuiltinMethodType | MethodType):
            if __obj.__name__ == "join" and args and not isinstance(args[0], str | bytes | Mapping):
                args = (list(bounds.count_steps(args[0])), *args[1:])
            bounds.check_method(__obj.__self__, __obj.__name__, (*args, *kwargs.values()))
        return bounds.charge_value(super().call(__context, __obj, *args, **kwargs))

    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(obj, bounds.check_size(argument) if isinstance(argument, tuple) else argument)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Jinja's own formatter, with bounds."""
        if super().wrap_str_format(value) is None:
            return None
        text: str = value.__self__
        form = _EscapingFormatter(self, escape=text.escape) if isinstance(text, Markup) else _Formatter(self)

        @wraps(value)
        def call(*args: Any, **kwargs: Any) -> str:
            given = args[0] if value.__name__ == "format_map" else kwargs
            return type(text)(form.vformat(text, () if value.__name__ == "format_map" else args, given))

        return call

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _BoundsTransformer().visit(super()._parse(source, name, filename))
        return tree


class _Formatter(SandboxedFormatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        for digits in "".join(letter if letter.isdecimal() else " " for letter in format_spec).split():
            bounds.check_width(int(digits[:8]))
        return str(bounds.charge_value(super().format_field(bounds.check_size(value), format_spec)))

    def convert_field(self, value: Any, conversion: Any) -> Any:
        return bounds.charge_value(super().convert_field(bounds.check_size(value) if conversion else value, conversion))


class _EscapingFormatter(_Formatter, SandboxedEscapeFormatter):
    """Of a text that is marked as safe."""


class _BoundsTransformer(NodeTransformer):
    """Puts the filters below around what a loop runs over, what is compared, and what is made without a call."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        written = sum(len(each.data) for each in node.find_all(nodes.TemplateData))
        node.iter = _wrap_in_filter(node.iter, "_counted", nodes.Const(written, lineno=node.lineno))
        return self.generic_visit(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        return self.generic_visit(_wrap_in_filter(nodes.List(node.nodes, lineno=node.lineno), "_joined"))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        if len(sides) > 2 or not any(map(_is_cheap, sides)):
            node.expr = _wrap_in_filter(node.expr, "_measured")
            for operand in node.ops:
                operand.expr = _wrap_in_filter(operand.expr, "_measured")
        return self.generic_visit(node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        sliced = isinstance(node.arg, nodes.Slice)
        self.generic_visit(node)
        return _wrap_in_filter(node, "_charged") if sliced else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        for pair in node.items:
            if not isinstance(pair.key, nodes.Const):
                pair.key = _wrap_in_filter(pair.key, "_measured")
        return self._literal(node)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return self._literal(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self._literal(node) if node.ctx == "load" else self.generic_visit(node)

    def _literal(self, node: nodes.List | nodes.Tuple | nodes.Dict) -> nodes.Expr:
        self.generic_visit(node)
        return _wrap_in_filter(node, "_charged") if len(node.items) > _SMALL else node


def _wrap_in_filter(node: nodes.Node, name: str, *args: nodes.Expr) -> nodes.Expr:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


def _is_cheap(node: nodes.Expr) -> bool:
    """To compare with it takes no time, whatever the other side is."""
    if isinstance(node, nodes.List | nodes.Tuple):
        return all(map(_is_cheap, node.items))
    return isinstance(node, nodes.Const)


class _Generation(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; its contents are rendered like anything else."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def create_environment() -> Environment:
    """Names and filters that chat templates count on. What it compiles is to be compiled within a budget, as constant
    parts are worked out then."""
    made = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, finalize=_check_output, extensions=[LoopControlExtension, _Generation]
    )
    for name in UNUSED:
        del made.filters[name]
    made.filters |= {"tojson": _to_json, "join": _join, "sum": _sum}
    made.filters = {name: _add_bounds(name, filter, _CHECKS.get(name)) for name, filter in made.filters.items()}
    made.tests = {
        name: _add_bounds(name, test, None) if name in _COMPARING else test for name, test in made.tests.items()
    }
    made.filters["_counted"] = bounds.count_steps
    made.filters["_joined"] = bounds.join_parts
    made.filters["_measured"] = bounds.check_size
    made.filters["_charged"] = _charge
    del made.globals["lipsum"]
    made.globals["dict"] = _dict
    made.globals["raise_exception"] = _raise
    made.globals["strftime_now"] = _now
    return made


def render(template: Template, variables: dict[str, Any]) -> str:
    """Raises TemplateError, with the template's own words where it has some, for whatever goes wrong in it."""
    told: list[str] = []
    size = 0
    try:
        with bounds.budget():
            for part in template.generate(variables):
                size += len(part)
                if size > bounds.MOST_CHARS:
                    raise SecurityError(f"the rendered text has more than {bounds.MOST_CHARS} characters")
                told.append(part)
    except TemplateError:
        raise
    except Exception as error:  # a template is a program of its own, and may fail with anything that Python raises
        raise TemplateRuntimeError(f"{type(error).__name__}: {error}") from error
    return "".join(told)


@pass_context
def _charge(context: Context, value: Any) -> Any:
    """With the context, so that it is no constant: each time that it is come to it is made anew."""
    return bounds.charge_value(value)


def _check_output(value: Any) -> Any:
    """What an output shows, before it is made a text of."""
    if isinstance(value, str):
        bounds.charge(len(value))
    elif isinstance(value, bounds.NESTING):
        bounds.charge(bounds.size(value))
    else:
        bounds.spend()
    return value


def _add_bounds(name: str, func: Any, check: Callable[..., None] | None) -> Callable[..., Any]:
    """A filter or test that is a step, looks at what it is given, and is charged what it makes."""
    own = 0 if _PassArg.from_obj(func) is None else 1
    deep = name not in _SHALLOW

    @wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        bounds.spend()
        given = args[own:]
        for each in (*given, *kwargs.values()) if kwargs else given:
            if isinstance(each, bounds.NESTING):
                if deep:
                    bounds.check_size(each)
            elif isinstance(each, str | bytes) and name in _EACH:
                bounds.check_items(len(each))
        if check is not None:
            check(*given, **kwargs)
        made = func(*args, **kwargs)
        return made if given and made is given[0] else bounds.charge_value(made)

    return call


def _check_center(value: Any, width: Any = 80) -> None:
    bounds.check_width(width)


def _check_format(value: Any, *args: Any, **kwargs: Any) -> None:
    bounds.check_percent(str(value), kwargs or args)


def _check_indent(s: Any, width: Any = 4, first: Any = False, blank: Any = False) -> None:
    bounds.check_indent(s, width)


def _check_parts(value: Any, number: Any = 0, fill_with: Any = None, **named: Any) -> None:
    for each in (number, *named.values()):
        bounds.check_width(each)


def _check_replace(s: Any, old: Any, new: Any, count: Any = None) -> None:
    bounds.check_replace(str(s), str(old), str(new))


def _check_round(value: Any, precision: Any = 0, method: Any = "common") -> None:
    bounds.check_width(precision, 64)


_CHECKS: dict[str, Callable[..., None]] = {
    "center": _check_center,
    "format": _check_format,
    "indent": _check_indent,
    "batch": _check_parts,
    "slice": _check_parts,
    "replace": _check_replace,
    "round": _check_round,
}


@pass_environment
def _join(environment: Environment, value: Iterable[Any], d: Any = "", attribute: str | int | None = None) -> str:
    items = value if attribute is None else map(make_attrgetter(environment, attribute), value)
    return bounds.join_parts(items, str(d))


@pass_environment
def _sum(environment: Environment, iterable: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
    items = iterable if attribute is None else map(make_attrgetter(environment, attribute), iterable)
    return reduce(_add, bounds.count_steps(items), start)


def _add(left: Any, right: Any) -> Any:
    bounds.check_sum(left, right)
    return bounds.charge_value(left + right)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter of this name writes HTML entities and sorts keys."""
    bounds.check_width(len(indent) if isinstance(indent, str) else indent, _MOST_INDENT)
    for each in separators or ():
        bounds.check_width(len(each), _MOST_INDENT)
    given = (separators[0], separators[1]) if separators else None
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=given, sort_keys=sort_keys)
    # Indented it may be far longer than what it holds, and is made part by part in any case.
    return encoder.encode(value) if indent is None else bounds.join_parts(encoder.iterencode(value))


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*map(bounds.check_size, args), **kwargs)


def _raise(message: Any) -> NoReturn:
    raise TemplateError(str(bounds.check_size(message)))


def _now(form: str) -> str:
    bounds.check_width(len(form), _MOST_FORM)
    if any(len(digits) > 3 for digits in "".join(each if each.isdecimal() else " " for each in form).split()):
        raise SecurityError("a width in the template is too large: give one of three digits at most")
    return datetime.now().strftime(form)
