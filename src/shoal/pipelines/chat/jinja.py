"""The Jinja environment of chat templates: that of transformers' `apply_chat_template`, in a sandbox with limits.

A template comes with a model's files, so it is untrusted. It may read its variables and produce text, nothing else. The
constants in `bounds` limit one rendering:

- Steps: each loop iteration, each call (also of a macro by itself), filter, sum or product, and output.
- Sizes, checked before anything is built: sums, products and powers of texts, lists and integers; widths and precisions
  of formats, fills and indentations; replacements; the rendered text; and values that are printed, compared, sorted or
  hashed, where everything a value contains twice counts twice.
- Memory: the total of everything that is built.
- Time: the clock is checked every thousand steps, and large values count as many steps.

A single Python operation on a text of the largest size (searching backwards, sorting a million items) is not
interrupted and may take seconds. The memory of the messages themselves is not counted, nor is the compilation of the
source, which is as long as its file. Filters that chat templates do not need are removed: `UNUSED`.
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
"""Filters that look only at the outside of a value, or at one item at a time."""
_COMPARING = frozenset((
    "!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt", "in", "le", "lessthan", "lt", "ne",
))
"""Tests that look at a whole value."""
_EACH = frozenset((
    "batch", "groupby", "list", "map", "max", "min", "reject", "rejectattr", "select", "selectattr", "slice", "sort",
    "sum", "title", "unique", "urlencode", "wordcount",
))
"""Filters that iterate over a text character by character in Python."""
# fmt: on
_SMALL = 16
"""Items of a list literal whose memory is not counted: the number of steps is limited anyway."""
_MOST_INDENT = 16
_MOST_FORM = 1_000


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox that counts everything that can repeat or grow before it runs."""

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
        """Return Jinja's own formatter, with limits."""
        if super().wrap_str_format(value) is None:
            return None
        text: str = value.__self__
        form = _EscapingFormatter(self, escape=text.escape) if isinstance(text, Markup) else _Formatter(self)

        @wraps(value)
        def call(*args: Any, **kwargs: Any) -> str:
            mapping = args[0] if value.__name__ == "format_map" else kwargs
            return type(text)(form.vformat(text, () if value.__name__ == "format_map" else args, mapping))

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
    """The formatter of texts that are marked as safe."""


class _BoundsTransformer(NodeTransformer):
    """Wraps the filters below around loop iterables, comparisons, and values built without a call."""

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
    """Whether comparing with it is cheap, whatever the other side is."""
    if isinstance(node, nodes.List | nodes.Tuple):
        return all(map(_is_cheap, node.items))
    return isinstance(node, nodes.Const)


class _Generation(Extension):
    """Renders the contents of `{% generation %}`, which marks the assistant's text for training, like anything else."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def create_environment() -> Environment:
    """Create an environment with the names and filters that chat templates expect. Compile templates within a budget,
    since compilation evaluates constant parts."""
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
    """Render a template. Raises TemplateError for any failure in it, with the template's own message if it has one."""
    parts: list[str] = []
    size = 0
    try:
        with bounds.budget():
            for part in template.generate(variables):
                size += len(part)
                if size > bounds.MOST_CHARS:
                    raise SecurityError(f"the rendered text has more than {bounds.MOST_CHARS} characters")
                parts.append(part)
    except TemplateError:
        raise
    except Exception as error:  # a template is a program and may fail with any Python exception
        raise TemplateRuntimeError(f"{type(error).__name__}: {error}") from error
    return "".join(parts)


@pass_context
def _charge(context: Context, value: Any) -> Any:
    """Charge a value. Taking the context keeps it from being a constant: it is built anew each time it is reached."""
    return bounds.charge_value(value)


def _check_output(value: Any) -> Any:
    """Charge a value before it is converted to text for output."""
    if isinstance(value, str):
        bounds.charge(len(value))
    elif isinstance(value, bounds.NESTING):
        bounds.charge(bounds.size(value))
    else:
        bounds.spend()
    return value


def _add_bounds(name: str, func: Any, check: Callable[..., None] | None) -> Callable[..., Any]:
    """Wrap a filter or test: count a step, check its arguments, and charge what it builds."""
    own = 0 if _PassArg.from_obj(func) is None else 1
    deep = name not in _SHALLOW

    @wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        bounds.spend()
        arguments = args[own:]
        for each in (*arguments, *kwargs.values()) if kwargs else arguments:
            if isinstance(each, bounds.NESTING):
                if deep:
                    bounds.check_size(each)
            elif isinstance(each, str | bytes) and name in _EACH:
                bounds.check_items(len(each))
        if check is not None:
            check(*arguments, **kwargs)
        made = func(*args, **kwargs)
        return made if arguments and made is arguments[0] else bounds.charge_value(made)

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
    """Serialize to JSON. Unlike Jinja's own filter of this name, it neither escapes HTML nor sorts keys."""
    bounds.check_width(len(indent) if isinstance(indent, str) else indent, _MOST_INDENT)
    for each in separators or ():
        bounds.check_width(len(each), _MOST_INDENT)
    pair = (separators[0], separators[1]) if separators else None
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=pair, sort_keys=sort_keys)
    # Indented JSON may be far longer than its value, and the encoder produces it in parts anyway.
    return encoder.encode(value) if indent is None else bounds.join_parts(encoder.iterencode(value))


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*map(bounds.check_size, args), **kwargs)


def _raise(message: Any) -> NoReturn:
    raise TemplateError(str(bounds.check_size(message)))


def _now(form: str) -> str:
    bounds.check_width(len(form), _MOST_FORM)
    if any(len(digits) > 3 for digits in "".join(each if each.isdecimal() else " " for each in form).split()):
        raise SecurityError("a width in the template is too large: use at most three digits")
    return datetime.now().strftime(form)
