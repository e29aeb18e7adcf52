"""Requests for models of servers, and the servers' answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from typing import Any

from shoal.core.protocols import Runner
from shoal.types import Classify, Context, Embed, Embedded, Rerank, Scored, TextPair
from tests.fakes.openai_server import Exchange, answer

NO_MESSAGES = answer({"error": {"message": "messages: at least one is needed"}}, 400)
NO_ROUTE = answer({"detail": "Not Found"}, 404)
NO_MODEL = answer({"error": {"message": "The model `other` does not exist.", "code": "model_not_found"}}, 404)
HEY = {"choices": [{"index": 0, "message": {"content": "hey"}, "finish_reason": "stop"}], "model": "up/model"}

Open = Callable[..., Coroutine[Any, Any, Runner]]


async def chats(exchange: Exchange) -> None:
    await (answer(HEY) if exchange.request.json["messages"] else NO_MESSAGES)(exchange)


async def embed(runner: Runner, *texts: str, **fields: Any) -> Embedded:
    ctx = Context(id="r", deadline=time.monotonic() + 10.0)
    answer = await runner.run(Embed(model="m", inputs=list(texts), **fields), ctx)
    assert isinstance(answer, Embedded)
    return answer


async def rerank(runner: Runner, query: str, *documents: str, **fields: Any) -> Scored:
    ctx = Context(id="r", deadline=time.monotonic() + 10.0)
    found = await runner.run(Rerank(model="m", queries=[query], documents=list(documents), **fields), ctx)
    assert isinstance(found, Scored)
    return found


async def classify(runner: Runner, *inputs: str | TextPair, **fields: Any) -> Scored:
    ctx = Context(id="r", deadline=time.monotonic() + 10.0)
    found = await runner.run(Classify(model="m", inputs=list(inputs), **fields), ctx)
    assert isinstance(found, Scored)
    return found
