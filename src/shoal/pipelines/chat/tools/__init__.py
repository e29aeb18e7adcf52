"""Streaming parsers for tool calls in model output, one per format, and detection of the format from a chat template.

Names and arguments of calls are emitted as they arrive. No model output is lost: text that begins like a call but is
not one comes back as content. If the format marks calls explicitly, unknown tool names are emitted too, so that the
client can tell the model. If only the form of the text suggests a call, its name must be among the offered tools.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal, Protocol, TypeAlias

from shoal.pipelines.chat.tools.deepseek import DeepSeekParser
from shoal.pipelines.chat.tools.gemma import GemmaParser
from shoal.pipelines.chat.tools.hermes import HermesParser
from shoal.pipelines.chat.tools.llama3 import Llama3Parser
from shoal.pipelines.chat.tools.mistral import MistralParser
from shoal.pipelines.chat.tools.phi4 import Phi4Parser
from shoal.pipelines.chat.tools.pythonic import PythonicParser
from shoal.pipelines.chat.tools.qwen import FUNCTION
from shoal.pipelines.chat.tools.reader import Reader
from shoal.pipelines.chat.tools.result_collector import DeltaCollector, call_id, short_call_id
from shoal.types import Tool, ToolDelta

__all__ = ["ParserKind", "ToolParser", "detect", "marks", "tool_parser"]

ParserKind: TypeAlias = Literal["hermes", "llama3", "mistral", "pythonic", "deepseek", "phi4", "gemma"]


class ToolParser(Protocol):
    """Reads one answer, a fragment at a time.

    - `push` returns the content that is certainly not a call, and fragments of calls: for each call first its index, id
      and name, then its arguments, which join to the JSON text of an object.
    - `flush` returns the rest, once. A call that the model did not finish keeps the arguments that it has.
    - `calls`: number of calls emitted so far.
    """

    @property
    def calls(self) -> int: ...

    def push(self, text: str) -> tuple[str, list[ToolDelta]]: ...

    def flush(self) -> tuple[str, list[ToolDelta]]: ...


def tool_parser(
    kind: ParserKind, tools: Sequence[Tool], *, parallel: bool = True, new_id: Callable[[], str] | None = None
) -> ToolParser:
    """Return a new parser for one answer. `parallel` False: drop calls after the first. `new_id` creates call ids; by
    default they are random, in the form that the model's template expects."""
    out = DeltaCollector(parallel=parallel, new_id=new_id or (short_call_id if kind == "mistral" else call_id))
    return _PARSERS[kind](out, tools)


def marks(kind: ParserKind) -> tuple[str, ...]:
    """Return the parser's markers of calls. They are often special tokens, which a detokenizer must not omit."""
    return _PARSERS[kind].markup


_PARSERS: dict[ParserKind, type[Reader]] = {
    "hermes": HermesParser,
    "llama3": Llama3Parser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
    "deepseek": DeepSeekParser,
    "phi4": Phi4Parser,
    "gemma": GemmaParser,
}

_SHOWN: dict[ParserKind, tuple[str, ...]] = {
    "mistral": ("[TOOL_CALLS]",),
    "deepseek": ("<\uff5ctool\u2581calls\u2581begin\uff5c>",),
    "gemma": ("<start_function_call>", "<|tool_call>"),
    "phi4": ("<|tool_call|>", "<|tool|>", "functools["),
}
"""Texts that only templates of one format have."""

_FOREIGN = ("<arg_key>", "<steptml:", "<invoke name=", "<tool_calls>[")
"""Markers of the formats of GLM, Step, MiniMax and Apriel, whose templates have `<tool_call>` too."""

_LFM = ("<|tool_call_start|>", "<|tool_list_start|>", "List of tools: [")
_PYTHON_CALL = re.compile(r"\[\s*\w+\(\w+\s*=")
_LLAMA_JSON = re.compile(r"""\{\\?"name\\?": function name, \\?"parameters""")


def detect(template: str) -> ParserKind | None:
    """Return the parser for a model with this chat template; None if it shows no known format."""
    for kind, found in _SHOWN.items():
        if any(mark in template for mark in found):
            return kind
    if "<tool_call>" in template:
        return None if any(mark in template for mark in _FOREIGN) else "hermes"
    if _PYTHON_CALL.search(template) or any(mark in template for mark in _LFM):
        return "pythonic"
    if FUNCTION in template:  # Functionary's `<function=NAME>{...}`, beside a tag of Llama
        return None
    if "<|python_tag|>" in template or _LLAMA_JSON.search(template):
        return "llama3"
    return None
