"""A real gateway over a scripted language model, and a reader of its streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from shoal.core.gateway import Gateway
from shoal.core.protocols import ModelFacts, Observer
from shoal.core.registry import Model, Registry
from shoal.surfaces import SURFACES, Options, build_app
from shoal.types import BatchTask, Chunk, Context, Generate, Result, TokenLogprob, Usage
from tests.surfaces.surface_kit import Exchange, Server, request_scope

MODEL = "talker"


def words_of(task: Generate) -> list[list[str]]:
    """Return the words that each choice repeats: those of its prompt or of the last message."""
    if task.messages:
        content = task.messages[-1].content
        text = content if isinstance(content, str) else " ".join(part.text for part in content or [])
        return [text.split()] * task.n
    texts = [each if isinstance(each, str) else " ".join(map(str, each)) for each in task.prompts]
    return [text.split() for text in texts for _ in range(task.n)]


def echo(task: Generate) -> list[Chunk]:
    """Return one chunk per word, alternating between choices, then each choice's finish reason, then the usage."""
    choices = words_of(task)
    chunks: list[Chunk] = []
    for at in range(max(map(len, choices), default=0)):
        for index, words in enumerate(choices):
            if at < len(words):
                text = words[at] if at == 0 else f" {words[at]}"
                logprobs = [] if task.sampling.logprobs is None else [logprob(text, at, task.sampling.logprobs)]
                chunks.append(Chunk(text=text, index=index, logprobs=logprobs))
    chunks += [Chunk(index=index, finish_reason="stop") for index in range(len(choices))]
    count = sum(map(len, choices))
    return [*chunks, Chunk(usage=Usage(prompt_tokens=7, completion_tokens=count, cached_tokens=2, reasoning_tokens=1))]


def logprob(text: str, at: int, count: int) -> TokenLogprob:
    top = [TokenLogprob(token=f"{text}{number or ''}", logprob=-(at + number) / 4) for number in range(count)]
    return TokenLogprob(token=text, logprob=-at / 4, top=top)


@dataclass
class FakeRunner:
    """A runner that records its tasks. `reply` makes the chunks; `error` is raised after `fail_after` of them. Before
    each chunk whose number is in `waits`, it sets `waiting` and waits for that event."""

    reply: Callable[[Generate], Sequence[Chunk]] = echo
    error: Exception | None = None
    fail_after: int = 0
    waits: dict[int, asyncio.Event] = field(default_factory=dict)
    adapters: tuple[str, ...] = ("loud",)
    able: bool = True
    tasks: list[Generate] = field(default_factory=list)
    contexts: list[Context] = field(default_factory=list)
    produced: int = 0
    open: int = 0
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def facts(self) -> ModelFacts:
        return ModelFacts(
            source="fake:", backend="fake", tasks=("generate",), context_tokens=4096, adapters=self.adapters
        )

    @property
    def task(self) -> Generate:
        return self.tasks[-1]

    async def run(self, task: BatchTask, ctx: Context) -> Result:
        raise AssertionError("it does not embed")

    async def stream(self, task: Generate, ctx: Context) -> AsyncGenerator[Chunk]:
        self.tasks.append(task)
        self.contexts.append(ctx)
        self.open += 1
        self.begun.set()
        try:
            for number, chunk in enumerate(self.reply(task)):
                if number in self.waits:
                    self.waiting.set()
                    await self.waits[number].wait()
                if self.error is not None and number == self.fail_after:
                    raise self.error
                self.produced += 1
                yield chunk
            if self.error is not None:
                raise self.error
        finally:
            self.open -= 1

    def ready(self) -> bool:
        return self.able

    async def aclose(self) -> None:
        return None


class WatchedExchange(Exchange):
    """An exchange whose messages a test can wait for."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        super().__init__(pieces)
        self._changed = asyncio.Event()

    async def send(self, message: dict[str, Any]) -> None:
        await super().send(message)
        self._changed.set()

    async def until(self, accepts: Callable[[list[dict[str, Any]]], bool]) -> None:
        """Wait until `accepts` is true for the messages sent so far."""
        while not accepts(self.messages):
            self._changed.clear()
            await self._changed.wait()


@dataclass
class ChatServer(Server):
    """A server with one generative model, MODEL."""

    runner: FakeRunner  # type: ignore[assignment]

    def open(self, path: str, json: Any, **headers: str) -> tuple[WatchedExchange, asyncio.Task[None]]:
        """Start a request whose client can disconnect."""
        exchange = WatchedExchange([orjson.dumps(json)])
        scope = request_scope("POST", path, {"content-type": "application/json", **headers})
        return exchange, asyncio.create_task(self.app(scope, exchange.receive, exchange.send))


def add_runner(gateway: Gateway, runner: FakeRunner) -> Model:
    model = Model(name=MODEL, created=1_700_000_000)
    gateway.registry.add(model)
    model.mark_loaded(runner)
    return model


def serve_chat(runner: FakeRunner | None = None, *, observer: Observer | None = None, **options: Any) -> ChatServer:
    runner = runner or FakeRunner()
    gateway = Gateway(Registry(), observer)
    model = add_runner(gateway, runner)
    settings = Options(**options)
    return ChatServer(build_app(gateway, [make(settings) for make in SURFACES], settings), runner, gateway, model)


def data_of(body: bytes) -> list[Any]:
    """Return the JSON of each event, and "[DONE]"; skip comments. Every event must be one line of data."""
    events: list[Any] = []
    text = body.decode()
    assert text.endswith("\n\n")
    for block in text.removesuffix("\n\n").split("\n\n"):
        lines = [line for line in block.split("\n") if not line.startswith((":", "event: "))]
        assert len(lines) <= 1, block
        for line in lines:
            data = line.removeprefix("data: ")
            assert data != line
            events.append(data if data == "[DONE]" else orjson.loads(data))
    return events


def run_loop(count: int = 20) -> Any:
    """Run the event loop until no task can continue."""

    async def wait() -> None:
        for _ in range(count):
            await asyncio.sleep(0)

    return wait()
