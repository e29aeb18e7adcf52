"""Parser of the format of Phi-4-mini and Granite 3: `<|tool_call|>[{"name": ..., "arguments": {...}}]<|/tool_call|>`,
or `functools[{...}]`.

Source of the format: Microsoft's model card and chat templates of Phi-4-mini, IBM's of Granite 3.
"""

from __future__ import annotations

from shoal.pipelines.chat.tools.call_object import ObjectListReader

OPEN = "<|tool_call|>"
CLOSE = "<|/tool_call|>"
WORD = "functools"


class Phi4Parser(ObjectListReader):
    """Parses an array of objects or one object after each marker. Granite has no end marker."""

    _marks = (OPEN, WORD)
    _closes = (CLOSE,)
    markup = (OPEN, CLOSE)
