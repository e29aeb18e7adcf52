"""Chat sources: a model opened in this process, or a server that speaks OpenAI's API."""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from shoal.bench.chat_events import Choice, Delta, decode_event
from shoal.bench.sse import DONE, Events
from shoal.cli._asking import REQUEST_TIMEOUT_S, ServerClient, extract_reason
from shoal.cli._chat_settings import FIELDS
from shoal.errors import EngineFailed, SetupError, TransportFailed
from shoal.types import Chunk, Context, Generate, Guide, Message, Sampling, Usage

if TYPE_CHECKING:
    from shoal.app import App

POLL_INTERVAL_S = 0.5
"""Interval at which to check whether a model is waiting for its server."""


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What is known of a model; "" for what is not. `info`: facts by name."""

    info: Mapping[str, str]
    license: str = ""
    modelfile: str = ""
    template: str = ""


class ChatSource(Protocol):
    """A model to talk to. Calls raise ShoalErrors.

    `ask` streams the answer to a conversation, and may fail after some chunks; closing the iterator stops it. `think`
    turns the reasoning of models that have such a switch on or off; None leaves it to the model.
    """

    def ask(
        self, messages: Sequence[Message], sampling: Sampling, think: bool | None = None
    ) -> Generator[Chunk, None, None]: ...

    def describe(self) -> ModelDescription: ...


class LocalChat:
    """A model in this process. Its event loop has its own thread, so that it keeps running while the user types."""

    def __init__(self, app: App, loop: asyncio.AbstractEventLoop) -> None:
        self._app = app
        self._loop = loop
        self._model, self._adapter = app.gateway.resolve("")

    def describe(self) -> ModelDescription:
        facts = self._app.gateway.model(self._model).facts
        if facts is None:
            return ModelDescription({})
        count = facts.details.get("parameters")
        info = {
            "architecture": facts.details.get("architecture"),
            "parameters": f"{count:,}" if isinstance(count, int) and count else None,
            "context length": facts.context_tokens,
            "precision": facts.precision,
        }
        template = facts.details.get("chat_template")
        return ModelDescription(
            {name: str(value) for name, value in info.items() if value},
            modelfile=f"FROM {facts.source}" if facts.source else "",
            template=template if isinstance(template, str) else "",
        )

    def ask(
        self, messages: Sequence[Message], sampling: Sampling, think: bool | None = None
    ) -> Generator[Chunk, None, None]:
        task = Generate(
            model=self._model,
            adapter=self._adapter,
            messages=[*messages],
            sampling=sampling,
            stream=True,
            template_kwargs=_template_variables(think),
        )
        ctx = Context(id="chat", deadline=time.monotonic() + REQUEST_TIMEOUT_S)
        came: queue.SimpleQueue[Chunk | None] = queue.SimpleQueue()

        async def pump() -> None:
            async with contextlib.aclosing(self._app.gateway.stream(task, ctx)) as chunks:
                async for chunk in chunks:
                    came.put(chunk)

        pumping = asyncio.run_coroutine_threadsafe(pump(), self._loop)
        pumping.add_done_callback(lambda _: came.put(None))
        try:
            while (chunk := came.get()) is not None:
                yield chunk
            pumping.result()
        finally:
            pumping.cancel()


@contextlib.contextmanager
def open_local_chat(opening: AbstractAsyncContextManager[App], noted: Callable[[str], None]) -> Iterator[LocalChat]:
    """Open an app with one model, and close it on exit. `noted` is called once per message about what startup waits
    for.

    Raises SetupError if the model cannot be loaded or does not generate text, and errors of opening and closing.
    """
    ready: Future[LocalChat] = Future()
    left, stop = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []
    broken: list[BaseException] = []

    async def hold() -> None:
        loops.append(asyncio.get_running_loop())
        if left.is_set():
            return
        async with opening as app:
            stopping: asyncio.Future[Any] = asyncio.ensure_future(stop.wait())
            await _wait_until_loaded(app, stopping, noted)
            if not stopping.done():
                _check(app)
                ready.set_result(LocalChat(app, loops[0]))
            await stopping

    def work() -> None:
        import uvloop

        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(hold())
        except BaseException as error:  # the waiting thread re-raises it
            if ready.done():
                broken.append(error)
            else:
                ready.set_exception(error)

    thread = threading.Thread(target=work, name="shoal-chat")
    thread.start()
    try:
        yield ready.result()
    finally:
        left.set()
        if loops:
            with contextlib.suppress(RuntimeError):  # the loop has ended with the error that is raised
                loops[0].call_soon_threadsafe(stop.set)
        thread.join()
    if broken:
        raise broken[0]


async def _wait_until_loaded(app: App, stopping: asyncio.Future[Any], noted: Callable[[str], None]) -> None:
    """Wait until the app's models have loaded or failed, or until `stopping` is done."""
    loading: asyncio.Future[Any] = asyncio.ensure_future(app.wait_until_loaded())
    seen: set[str] = set()
    try:
        while not (loading.done() or stopping.done()):
            await asyncio.wait({loading, stopping}, timeout=POLL_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED)
            waits = [f"{card.name} is not ready yet: {card.note}" for card in app.gateway.models() if ": " in card.note]
            waits += [f"{place} is not ready yet: {reason}" for place, reason in app.gateway.pending_sources.items()]
            for line in waits:
                if line not in seen and not loading.done():
                    seen.add(line)
                    noted(line)
    finally:
        loading.cancel()


def _check(app: App) -> None:
    """Check that some model can generate text. Raises SetupError otherwise."""
    cards = app.gateway.models()
    if cards and all(card.state == "failed" for card in cards):
        raise SetupError("; ".join(f"{card.name}: {card.error}" for card in cards))
    if all(card.facts is not None and "generate" not in card.facts.tasks for card in cards):
        names = ", ".join(card.name for card in cards) or "the served models"
        raise SetupError(f"{names} does not generate text: name a language model")


class RemoteChat:
    """A model of the server at `url`, with or without a trailing /v1. An empty `model` is the first one listed."""

    def __init__(self, url: str, model: str, key: str | None = None) -> None:
        self._server = ServerClient(url.rstrip("/").removesuffix("/v1"), key)
        self.model = model or self._server.first_model("generate")

    def list_names(self) -> list[str]:
        """Return the server's models that generate text, or do not say what they do."""
        return self._server.list_models("generate")

    def describe(self) -> ModelDescription:
        """Ask as Ollama's client does; Shoal and Ollama answer that."""
        try:
            shown = msgspec.convert(self._server.ask("/api/show", {"model": self.model}), _Shown)
        except (SetupError, TransportFailed, msgspec.ValidationError) as error:
            raise SetupError(f"{self._server.url} does not describe its models, as Shoal and Ollama do") from error
        family = str(shown.model_info.get("general.architecture", ""))
        info = {
            "architecture": family,
            "parameters": shown.details.parameter_size,
            "context length": shown.model_info.get(f"{family}.context_length"),
            "precision": shown.details.quantization_level,
        }
        known = {name: str(value) for name, value in info.items() if value not in (None, "", "unknown")}
        return ModelDescription(known, shown.license, shown.modelfile, shown.template)

    def ask(
        self, messages: Sequence[Message], sampling: Sampling, think: bool | None = None
    ) -> Generator[Chunk, None, None]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": one.role, "content": one.content} for one in messages],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body |= {name: value for name in FIELDS.values() if (value := getattr(sampling, name)) not in (None, [])}
        if variables := _template_variables(think):
            body["chat_template_kwargs"] = variables
        if sampling.guide is not None:
            body["response_format"] = _response_format(sampling.guide)
        events, ended = Events(), False
        with self._server.open("/v1/chat/completions", body, accept="text/event-stream, application/json") as reply:
            while part := self._read(reply):
                for data in events.feed(part):
                    if data == DONE:
                        return
                    chunk = _parse_chunk(data)
                    ended = ended or chunk.finish_reason is not None
                    yield chunk
        if not ended:
            raise TransportFailed(f"{self._server.url} ended its answer early: try again")

    def _read(self, reply: Any) -> bytes:
        from http.client import HTTPException

        try:
            part: bytes = reply.read1(1 << 16)
            return part
        except (OSError, HTTPException) as error:
            raise TransportFailed(f"{self._server.url} ended its answer early ({error!r}): try again") from None


class _Details(msgspec.Struct):
    parameter_size: str = ""
    quantization_level: str = ""


class _Shown(msgspec.Struct):
    details: _Details = msgspec.field(default_factory=_Details)
    model_info: dict[str, Any] = {}
    license: str = ""
    modelfile: str = ""
    template: str = ""


def _template_variables(think: bool | None) -> dict[str, Any]:
    return {} if think is None else {"enable_thinking": think}


def _response_format(guide: Guide) -> dict[str, Any]:
    if guide.kind == "json_object":
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": json.loads(guide.value)}}


def _parse_chunk(data: bytes) -> Chunk:
    """Decode one event of the chat stream. Raises EngineFailed if it carries an error or is malformed."""
    try:
        event = decode_event(data)
    except msgspec.MsgspecError as error:
        raise EngineFailed(f"the server sent an invalid chat chunk ({error})") from None
    if event.error:
        raise EngineFailed(extract_reason(data))
    choice = event.choices[0] if event.choices else Choice()
    delta, usage = choice.delta or Delta(), event.usage
    return Chunk(
        text=delta.content or "",
        reasoning=delta.thoughts,
        finish_reason=choice.finish_reason,
        usage=Usage(prompt_tokens=usage.prompt_tokens or 0, completion_tokens=usage.completion_tokens or 0)
        if usage is not None
        else None,
    )
