"""Tool calls in what a model writes: one streaming parser for each format, and which one a chat template speaks of.

A call's name and its arguments are told as they come. Nothing that a model writes is lost: what begins like a call and
is none comes back as content. Names that nobody offered are told as well, where the format marks the call, so that the
client can say so to the model; where only the form of the text speaks for a call, its name must have been offered.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal, Protocol, TypeAlias

from shoal.pipelines.chat.tools.hermes import HermesParser
from shoal.pipelines.chat.tools.llama3 import Llama3Parser
from shoal.pipelines.chat.tools.mistral import MistralParser
from shoal.pipelines.chat.tools.outlet import DeltaCollector, call_id, short_call_id
from shoal.pipelines.chat.tools.pythonic import PythonicParser
from shoal.pipelines.chat.tools.reader import Reader
from shoal.types import Tool, ToolDelta

__all__ = ["ParserKind", "ToolParser", "detect", "marks", "tool_parser"]

ParserKind: TypeAlias = Literal["hermes", "llama3", "mistral", "pythonic"]


class ToolParser(Protocol):
    """Reads one answer, a fragment at a time.

    - `push` answers the content that is certainly no call, and fragments of calls: of each call first its index, id
      and name, then its arguments, which join to the JSON text of an object.
    - `flush` answers the rest, once. A call that the model did not end keeps the arguments that it has.
    - `calls`: how many were told so far.
    """

    @property
    def calls(self) -> int: ...

    def push(self, text: str) -> tuple[str, list[ToolDelta]]: ...

    def flush(self) -> tuple[str, list[ToolDelta]]: ...


def tool_parser(
    kind: ParserKind, tools: Sequence[Tool], *, parallel: bool = True, new_id: Callable[[], str] | None = None
) -> ToolParser:
    """A fresh parser for one answer. `parallel` False: calls after the first are dropped. `new_id` makes the calls'
    ids, else they are random, in the form that the models' templates want back."""
    out = DeltaCollector(parallel=parallel, new_id=new_id or (short_call_id if kind == "mistral" else call_id))
    if kind == "hermes":
        return HermesParser(out, tools)
    if kind == "mistral":
        return MistralParser(out)
    names = frozenset(tool.name for tool in tools)
    return Llama3Parser(out, names) if kind == "llama3" else PythonicParser(out, names)


def marks(kind: ParserKind) -> tuple[str, ...]:
    """What a parser tells calls by, often special tokens: a detokenizer must not leave them out of its text."""
    return _PARSERS[kind].markup


_PARSERS: dict[ParserKind, type[Reader]] = {
    "hermes": HermesParser,
    "llama3": Llama3Parser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
}

_FOREIGN = ("<arg_key>", "<steptml:")
"""GLM and Step put forms of their own in `<tool_call>`."""

_PYTHON_CALL = re.compile(r"\[\s*\w+\(\w+\s*=")
_LLAMA_JSON = re.compile(r"""\{\\?"name\\?": function name, \\?"parameters""")


def detect(template: str) -> ParserKind | None:
    """Which parser reads what a model with this chat template writes; None where nothing in it is known."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        return None if any(mark in template for mark in _FOREIGN) else "hermes"
    if _PYTHON_CALL.search(template) or "<|tool_call_start|>" in template:
        return "pythonic"
    if "<|python_tag|>" in template or _LLAMA_JSON.search(template):
        return "llama3"
    return None
