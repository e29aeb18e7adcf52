"""The Jinja that chat templates are written in: that of transformers' `apply_chat_template`, in a sandbox with bounds.

A template comes with a model's files, and so from strangers: it may read what it is given and make a text of it,
nothing else. Its loops, and whatever it puts together, have bounds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Environment, Template, TemplateError, TemplateRuntimeError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MOST_STEPS = 1_000_000
"""Turns of all loops of one rendering."""
MOST_CHARS = 1 << 26
"""Characters of one rendering, and of any text that is built up within it."""
_STEPS = "_steps"


class Bounded(ImmutableSandboxedEnvironment):
    """A sandbox whose loops are counted and whose sums and products have a largest size."""

    intercepted_binops = frozenset(("+", "*", "**"))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and _size(left) + _size(right) > MOST_CHARS:
            raise SecurityError("a sum in the template is too large")
        if operator == "*" and (_size(left) * _number(right) > MOST_CHARS or _size(right) * _number(left) > MOST_CHARS):
            raise SecurityError("a product in the template is too large")
        if operator == "**" and (_number(left) > 1 << 20 or _number(right) > 64):
            raise SecurityError("a power in the template is too large")
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Bounds().visit(super()._parse(source, name, filename))
        return tree


class _Bounds(NodeTransformer):
    """Puts the filters below around what a loop runs over, and in the place of `~`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        node.iter = nodes.Filter(node.iter, "_counted", [], [], None, None, lineno=node.lineno)
        return self.generic_visit(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return self.generic_visit(nodes.Filter(parts, "_joined", [], [], None, None, lineno=node.lineno))


class _Generation(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; its contents are rendered like anything else."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> Environment:
    """Names and filters that chat templates count on."""
    made = Bounded(trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _Generation])
    made.filters["tojson"] = _to_json
    made.filters["_counted"] = _counted
    made.filters["_joined"] = _joined
    made.globals["raise_exception"] = _raise
    made.globals["strftime_now"] = _now
    return made


def render(template: Template, variables: dict[str, Any]) -> str:
    """Raises TemplateError, with the template's own words where it has some, for whatever goes wrong in it."""
    told: list[str] = []
    size = 0
    try:
        for part in template.generate({**variables, _STEPS: [0]}):
            size += len(part)
            if size > MOST_CHARS:
                raise SecurityError(f"the rendered text has more than {MOST_CHARS} characters")
            told.append(part)
    except TemplateError:
        raise
    except Exception as error:  # a template is a program of its own, and may fail with anything that Python raises
        raise TemplateRuntimeError(f"{type(error).__name__}: {error}") from error
    return "".join(told)


@pass_context
def _counted(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    steps = context[_STEPS]
    for item in items:
        steps[0] += 1
        if steps[0] > MOST_STEPS:
            raise SecurityError(f"the template's loops turn more than {MOST_STEPS} times")
        yield item


def _joined(parts: Iterable[Any]) -> str:
    texts = [str(part) for part in parts]
    if sum(map(len, texts)) > MOST_CHARS:
        raise SecurityError("a text in the template is too large")
    return "".join(texts)


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def _number(value: Any) -> int:
    return abs(value) if isinstance(value, int) else 0


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter of this name writes HTML entities and sorts keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
