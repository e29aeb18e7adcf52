"""Events of OpenAI's chat stream, with the fields that a client reads."""

from __future__ import annotations

from typing import Any

import msgspec


class Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    @property
    def thoughts(self) -> str:
        """The reasoning, under either name that servers give it."""
        return self.reasoning or self.reasoning_content or ""


class Choice(msgspec.Struct):
    """`text`: of /v1/completions."""

    delta: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class ChatEvent(msgspec.Struct):
    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None


decode_event = msgspec.json.Decoder(ChatEvent).decode
