"""Estimate the tokens of a conversation whose tokenizer is unknown."""

from __future__ import annotations

import msgspec

from shoal.types import Generate, Part

BYTES_PER_TOKEN = 4
"""About the average of English; code and other languages have fewer."""
TOKENS_PER_IMAGE = 1000
"""The order of magnitude of what vision models make of an image of a megapixel."""


def estimate_tokens(task: Generate) -> int:
    """Estimate the tokens of all prompts, or of the messages and tools; at least 1."""
    size = sum(len(each.encode()) if isinstance(each, str) else len(each) * BYTES_PER_TOKEN for each in task.prompts)
    size += sum(len(msgspec.json.encode(tool)) for tool in task.tools)
    images = 0
    for message in task.messages:
        parts = message.content if isinstance(message.content, list) else [Part(text=message.content or "")]
        size += sum(len(part.text.encode(errors="replace")) for part in parts) + len(message.reasoning or "")
        size += sum(len(call.name) + len(call.arguments) for call in message.tool_calls)
        images += sum(part.type == "image" for part in parts)
    return max(1, size // BYTES_PER_TOKEN) + images * TOKENS_PER_IMAGE
