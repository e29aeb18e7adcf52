"""What sticky replicas bring: prompt tokens found in the prefix caches of three servers, by how replicas are chosen."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import OrderedDict
from typing import Any

import aiohttp
from harness import Server, medians, parser, phase, write

METHOD = """
Three servers that speak OpenAI's chat API, each with a cache of the prefixes of its 40 last conversations: they report
the words of a prompt that the last turn of the same conversation has left there, as a server with a prefix cache does.
150 conversations of eight turns, 60 of them open at a time, which all begin with the same system prompt of 50 words and
grow by 100 words a turn, are held by 16 clients in random order; an answer takes 5 ms. `hits`: cached words of all
prompts. `busiest`: requests of the busiest server, of the mean. Once through Shoal for each value of replica_routing,
once in turns without Shoal. In `hot`, a third of all turns belong to one session. Medians over rounds.
"""
CONVERSATIONS = 150
OPEN = 60
TURNS = 8
WORDS = 100
CLIENTS = 16
KEPT = 40
ANSWER_S = 0.005


class Stub(Server):
    """This file as one of the three servers."""

    program = (__file__,)
    ready_path = "/v1/models"


def serve_stub(port: int) -> None:
    import uvicorn

    kept: OrderedDict[str, int] = OrderedDict()
    served = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal served
        body = b""
        while (event := await receive()).get("more_body") or event.get("body"):
            body += event.get("body", b"")
            if not event.get("more_body"):
                break
        if scope["path"] == "/v1/chat/completions":
            served += 1
            answer = await complete(json.loads(body), kept)
        else:
            answer = {"object": "list", "data": [{"id": "stub", "object": "model"}], "served": served}
        head = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

    uvicorn.run(app, port=port, http="httptools", loop="uvloop", lifespan="off", access_log=False, log_level="warning")


async def complete(body: dict[str, Any], kept: OrderedDict[str, int]) -> dict[str, Any]:
    await asyncio.sleep(ANSWER_S)
    texts = [message["content"] for message in body["messages"]]
    words = sum(len(text.split()) for text in texts)
    system = len(texts[0].split())
    cached = max(kept.get(texts[1], 0), system if kept else 0)
    kept[texts[1]] = words
    kept.move_to_end(texts[1])
    while len(kept) > KEPT:
        kept.popitem(last=False)
    details = {"cached_tokens": min(cached, words)}
    usage = {"prompt_tokens": words, "completion_tokens": 1, "total_tokens": words, "prompt_tokens_details": details}
    message = {"role": "assistant", "content": "yes"}
    choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
    return {"id": "x", "object": "chat.completion", "created": 0, "model": "stub", "choices": choices, "usage": usage}


async def hold_conversations(urls: list[str], *, hot: bool) -> tuple[float, float]:
    """Return cached words over all words, and requests of the busiest server over the mean."""
    system = " ".join(f"rule{number}" for number in range(50))
    histories = {name: [f"{name} " + "word " * (WORDS - 1)] for name in range(CONVERSATIONS)}
    turns = order_turns()
    if hot:
        turns = [0 if number % 3 == 0 else name for number, name in enumerate(turns)]
    total = cached = number = 0
    before = await count_served(urls)

    async def work(session: aiohttp.ClientSession) -> None:
        nonlocal total, cached, number
        while turns:
            name = turns.pop(0)
            texts = histories[name]
            roles = ["system", *("user", "assistant") * len(texts)]
            messages = [{"role": role, "content": text} for role, text in zip(roles, [system, *texts], strict=False)]
            number += 1
            url = urls[number % len(urls)]
            body = {"model": "stub", "messages": messages, "user": f"session {name}"}
            async with session.post(f"{url}/v1/chat/completions", json=body) as reply:
                usage = (await reply.json())["usage"]
            total += usage["prompt_tokens"]
            cached += usage["prompt_tokens_details"]["cached_tokens"]
            if not hot or name:
                texts += ["yes", "word " * (WORDS - 1)]

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(work(session) for _ in range(CLIENTS)))
    served = [after - first for after, first in zip(await count_served(STUBS), before, strict=True)]
    return cached / total, max(served) / (sum(served) / len(served))


def order_turns() -> list[int]:
    """Return the conversation of each turn."""
    waiting = list(range(CONVERSATIONS))
    left = {waiting.pop(): TURNS for _ in range(OPEN)}
    turns: list[int] = []
    while left:
        name = random.choice(list(left))
        turns.append(name)
        left[name] -= 1
        if not left[name]:
            del left[name]
            if waiting:
                left[waiting.pop()] = TURNS
    return turns


STUBS: list[str] = []


async def count_served(_: object) -> list[int]:
    async with aiohttp.ClientSession() as session:
        counts: list[int] = []
        for url in STUBS:
            async with session.get(f"{url}/v1/models") as reply:
                counts.append((await reply.json())["served"])
        return counts


def main() -> None:
    arguments = parser(__doc__).parse_args()
    rounds: list[dict[str, float]] = []
    for number in range(arguments.rounds):
        with phase(f"round {number + 1}"):
            one: dict[str, float] = {}
            for name in ("in turns", "load", "session", "prefix"):
                for hot in (False, True):
                    label = f"{name}, hot" if hot else name
                    with Stub() as first, Stub() as second, Stub() as third:
                        STUBS[:] = [each.url for each in (first, second, third)]
                        if name == "in turns":
                            found = asyncio.run(hold_conversations(STUBS, hot=hot))
                        else:
                            address = "stub=" + ",".join(f"openai+{url}/v1#stub" for url in STUBS)
                            with Server(address, replica_routing=name) as shoal:
                                found = asyncio.run(hold_conversations([shoal.url], hot=hot))
                    one[f"{label}: hits"], one[f"{label}: busiest"] = found
            rounds.append(one)
    figures = medians(rounds)
    for name, value in figures.items():
        print(f"{name:32} {value:10.3f}")
    write("routing", METHOD, {"medians": figures, "rounds": rounds})


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve_stub(int(sys.argv[sys.argv.index("--port") + 1]))
    else:
        main()
