"""A scripted model of an OpenAI-compatible server without /responses: it calls tools one by one, then answers.

async with FakeUpstream() as server:
    model = AgentModel([Call("add", {"a": 1, "b": 2})])
    server.on("/chat/completions", model)
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.fakes.openai_server import DONE, Exchange, Script, answer, event, stream

USAGE = {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14}


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the tool whose name ends so: clients put prefixes before the names of some."""

    tool: str
    arguments: dict[str, Any]


@dataclass
class AgentModel:
    """Calls the next of `calls` after each result of a tool; then answers with the results, or with the user's words.
    `bodies` are the requests that it got. A request without tools, as for a title, is answered with a text; one with a
    format, with the object {"text": ...}."""

    calls: Sequence[Call] = ()
    reasoning: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)

    async def __call__(self, exchange: Exchange) -> None:
        body = exchange.request.json
        self.bodies.append(body)
        await self._script(body)(exchange)

    def _script(self, body: dict[str, Any]) -> Script:
        message, reason = self._reply(body)
        if not body.get("stream"):
            choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": reason}
            return answer({"id": "chatcmpl-1", "model": body["model"], "choices": [choice], "usage": USAGE})
        return stream(*_events(body, message, reason), DONE)

    def _reply(self, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
        results = [str(each["content"]) for each in body["messages"] if each["role"] == "tool"]
        names = [each["function"]["name"] for each in body.get("tools", ())]
        if not names or len(results) >= len(self.calls):
            text = f"I saw: {' | '.join(results)}" if results else "I saw nothing"
            return {"content": json.dumps({"text": text}) if "response_format" in body else text}, "stop"
        call = self.calls[len(results)]
        name = next((name for name in names if name.endswith(call.tool)), None)
        if name is None:
            return {"content": f"I have no {call.tool}, only {', '.join(names)}"}, "stop"
        function = {"name": name, "arguments": json.dumps(call.arguments)}
        made = {"id": f"call_{len(results)}", "type": "function", "function": function}
        thought = {"reasoning_content": self.reasoning} if self.reasoning else {}
        return {"content": None, **thought, "tool_calls": [made]}, "tool_calls"


def _events(body: dict[str, Any], message: dict[str, Any], reason: str) -> list[bytes]:
    """Return a message as a stream: a call's arguments come in two fragments."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if thought := message.get("reasoning_content"):
        deltas.append({"reasoning_content": thought})
    if message["content"]:
        deltas += [{"content": word} for word in message["content"].split(" ", 1)[:1]]
        deltas += [{"content": f" {rest}"} for rest in message["content"].split(" ", 1)[1:]]
    for index, call in enumerate(message.get("tool_calls", ())):
        text = call["function"]["arguments"]
        half = len(text) // 2
        deltas.append({"tool_calls": [{"index": index, **call, "function": {**call["function"], "arguments": ""}}]})
        deltas += [
            {"tool_calls": [{"index": index, "function": {"arguments": part}}]} for part in (text[:half], text[half:])
        ]
    head: dict[str, Any] = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": body["model"]}
    events: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas
    ]
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
    events.append({"choices": [], "usage": USAGE})
    return [event({**head, **each}) for each in events]
