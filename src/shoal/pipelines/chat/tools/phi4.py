"""Parser of the format of Phi-4-mini and Granite 3: `<|tool_call|>[{"name": ..., "arguments": {...}}]<|/tool_call|>`,
or `functools[{...}]`.

Source of the format: Microsoft's model card and chat templates of Phi-4-mini, IBM's of Granite 3.
"""

from __future__ import annotations

from shoal.pipelines.chat.tools import hermes
from shoal.pipelines.chat.tools.call_object import ObjectListReader

OPEN = "<|tool_call|>"
CLOSE = "<|/tool_call|>"
WORD = "functools"


class Phi4Parser(ObjectListReader):
    """Parses an array of objects or one object after each marker. Granite has no end marker, and version 3.1 writes
    Hermes's tag in place of its template's."""

    _marks = (OPEN, WORD, hermes.OPEN)
    _closes = (CLOSE, hermes.CLOSE)
    markup = (OPEN, CLOSE)
