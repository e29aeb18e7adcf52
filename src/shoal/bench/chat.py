"""Load on a server of language models: so many streams at once, every prompt different, every piece of text timed."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from shoal.bench.answers import Answer, Level, compute_level
from shoal.bench.chat_events import Choice, decode_event
from shoal.bench.client import ConnectionLost, Pool, Target
from shoal.bench.sse import DONE, Events
from shoal.bench.texts import Texts

Endpoint = Literal["chat", "completions"]
PATHS: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPlan:
    """What is asked, at each concurrency in turn. `requests`: in all, 0: four for each stream and at least 20.

    `exact` asks for exactly `output_tokens` by ignore_eos, which not every server knows. `server_pid`: whose processor
    time is counted, on this machine.
    """

    model: str = ""
    concurrency: Sequence[int] = (1,)
    requests: int = 0
    warmup: int = 1
    input_tokens: int = 200
    output_tokens: int = 100
    stream: bool = True
    exact: bool = False
    endpoint: Endpoint = "chat"
    server_pid: int | None = None


class ChatClient(Protocol):
    """Who puts one prompt to a server and times the answer; never raises for what the server does."""

    async def ask(self, prompt: str) -> Answer: ...


class HttpChatClient:
    """A server that speaks OpenAI's API over HTTP, asked on one keep-alive connection for each request in flight."""

    def __init__(self, pool: Pool, host: str, plan: ChatPlan, *, model: str, key: str | None = None) -> None:
        self._pool = pool
        self._plan = plan
        self._model = model
        authorization = f"authorization: Bearer {key}\r\n" if key else ""
        path = PATHS[plan.endpoint]
        self._head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n{authorization}"

    async def ask(self, prompt: str) -> Answer:
        request = self.request(prompt)
        reader = ChatStreamReader(time.perf_counter())
        answer = reader.answer
        try:
            reply = await self._pool.ask(
                request, keep=not self._plan.stream, sink=reader if self._plan.stream else None
            )
        except ConnectionLost:
            answer.error = "connection lost"
            return answer
        except OSError as error:
            answer.error = f"connect: {error.strerror or type(error).__name__}"
            return answer
        answer.ended = time.perf_counter()
        body = bytes(reply.body or b"")
        if reply.status != 200:
            answer.error = f"{reply.status}: {body[:300].decode(errors='replace')}"
        elif not self._plan.stream:
            reader.read(body)
            answer.arrivals.clear()
        return answer

    def request(self, prompt: str) -> bytes:
        """The bytes of one request."""
        plan = self._plan
        body: dict[str, Any] = {"model": self._model, "max_tokens": plan.output_tokens, "stream": plan.stream}
        body |= {"messages": [{"role": "user", "content": prompt}]} if plan.endpoint == "chat" else {"prompt": prompt}
        if plan.stream:
            body["stream_options"] = {"include_usage": True}
        if plan.exact:
            body |= {"ignore_eos": True, "min_tokens": plan.output_tokens}
        encoded = msgspec.json.encode(body)
        return f"{self._head}content-length: {len(encoded)}\r\n\r\n".encode() + encoded


class ChatStreamReader:
    """Reads a stream of events into an Answer: call it with each part of the body as it arrives."""

    def __init__(self, sent: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.answer = Answer(sent)
        self._clock = clock
        self._events = Events()

    def __call__(self, part: bytes) -> None:
        for data in self._events.feed(part):
            if data != DONE:
                self.read(data)

    def read(self, data: bytes) -> None:
        """One event, or a whole answer, in JSON."""
        try:
            event = decode_event(data)
        except msgspec.MsgspecError as error:
            self.answer.error = f"unreadable answer: {error}"
            return
        if event.error:
            self.answer.error = f"in mid-stream: {msgspec.json.encode(event.error)[:300].decode(errors='replace')}"
        if any(map(_has_text, event.choices or ())):
            self.answer.arrivals.append(self._clock())
        if event.usage is not None:
            self.answer.token_count = event.usage.completion_tokens
            self.answer.prompt_tokens = event.usage.prompt_tokens


def _has_text(choice: Choice) -> bool:
    return bool(choice.text or (choice.delta and (choice.delta.content or choice.delta.thoughts)))


async def run_level(asks: ChatClient, plan: ChatPlan, concurrency: int, prompts: Callable[[], str]) -> Level:
    """A closed loop: `concurrency` callers, each with one request in flight, until all requests are answered."""
    left = itertools.count(plan.requests or max(4 * concurrency, 20), -1)
    answers: list[Answer] = []

    async def caller() -> None:
        while next(left) > 0:
            answers.append(await asks.ask(prompts()))

    before = await asyncio.to_thread(cpu_s, plan.server_pid)
    start = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(concurrency)))
    seconds = time.perf_counter() - start
    after = await asyncio.to_thread(cpu_s, plan.server_pid)
    spent = after - before if after is not None and before is not None else None
    return compute_level(answers, concurrency=concurrency, seconds=seconds, cpu_s=spent)


async def run_levels(asks: ChatClient, plan: ChatPlan, seed: int) -> list[Level]:
    """Warm up, then each concurrency in turn. Raises RuntimeError, with the server's words, when a request of the
    warm-up fails."""
    texts = Texts(plan.input_tokens + 2, seed=seed)  # words alone are counted here, no special tokens

    def prompt() -> str:
        return texts.take(1)[0]

    for _ in range(max(1, plan.warmup)):
        first = await asks.ask(prompt())
        if first.error:
            raise RuntimeError(f"the first request failed: {first.error}")
    return [await run_level(asks, plan, concurrency, prompt) for concurrency in plan.concurrency]


async def measure_http(url: str, plan: ChatPlan, *, key: str | None = None) -> list[Level]:
    """The figures of an HTTP server at each concurrency. Without a model, the first one that the server lists is asked.

    Raises OSError when nothing listens, ValueError for a bad URL and RuntimeError when the server refuses.
    """
    from shoal.bench.run import first_model

    target = Target(url)
    pool = Pool(target, max(plan.concurrency))
    try:
        headers = f"authorization: Bearer {key}\r\n" if key else ""
        model = plan.model or await first_model(pool, target.name, headers, "generate")
        return await run_levels(HttpChatClient(pool, target.name, plan, model=model, key=key), plan, time.time_ns())
    finally:
        pool.close()


def cpu_s(pid: int | None) -> float | None:
    """Processor seconds that a process of this machine has used, over all its threads; None for None.

    Raises RuntimeError where there is no such process.
    """
    if pid is None:
        return None
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError as error:
        raise RuntimeError(f"process {pid} cannot be read ({error.strerror}): is --server-pid right?") from None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
