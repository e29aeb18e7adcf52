"""A front's gateway: tasks, streams, the copy of the models, and what happens without a model process."""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import shoal.workers.front
from shoal.core.packed_error import PackedError
from shoal.errors import (
    Crashed,
    DeadlineExceeded,
    InvalidValue,
    ModelFailed,
    ModelNotFound,
    ModelNotReady,
    TooLong,
    Unavailable,
)
from shoal.http.hand_over import HandOver
from shoal.types import Chunk, Context, Embed, TokenizedTexts
from shoal.workers import messages
from shoal.workers.front import STREAM_WINDOW
from tests.unit.core.runners import Embedder
from tests.unit.workers.kit import (
    CONTEXT,
    EMBED,
    build_gateway,
    build_model,
    front,
    generate,
    is_connected,
    model_end,
    pair,
    raw_models,
    until,
)

NO_MODELS = messages.Models(1, [], {}, set(), {})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "models"


class NamedTokenizer:
    """Puts the model's name in the place of tokens."""

    def __init__(self) -> None:
        self.updates: list[list[str]] = []

    def update(self, states: Sequence[messages.ModelState]) -> None:
        self.updates.append([each.tokenizer.decode() for each in states])

    async def tokenize(self, name: str, task: Any) -> Any:
        return msgspec.structs.replace(task, tokenized=TokenizedTexts(name, b"", 0.5))


async def test_tokens_go_with_the_task(path: Path) -> None:
    """Under a name, an alias and none; a task for an unknown model goes alone."""
    runner, tokenizers = Embedder(), NamedTokenizer()
    model = build_model(runner, aliases=("alias",))
    async with model_end(build_gateway(model), path), front(path, tokenizers) as remote:
        await until(lambda: is_connected(remote))
        for name in ("m", "alias", ""):
            await remote.run(Embed(model=name, inputs=["a"]), CONTEXT)
            assert runner.tasks[-1] == Embed(model=name, inputs=["a"], tokenized=TokenizedTexts("m", b"", 0.5))
        with pytest.raises(ModelNotFound):
            await remote.run(Embed(model="nobody", inputs=["a"]), CONTEXT)
        assert tokenizers.updates == [[""]]


async def test_a_task_runs_in_the_model_process(path: Path) -> None:
    """The answer is that of the model process's runner."""
    runner = Embedder()
    async with pair(build_gateway(build_model(runner)), path) as (remote, _):
        answer = await remote.run(EMBED, CONTEXT)
        assert np.array_equal(answer.vectors, runner.answer.vectors)
        assert runner.begun == 1


async def test_an_error_of_the_model_process_is_raised(path: Path) -> None:
    """A task that fails raises the same class with the same attributes."""
    error = TooLong("too long", param="input", retry_after=3.0)
    async with pair(build_gateway(build_model(Embedder(error=error))), path) as (remote, _):
        with pytest.raises(TooLong, match="too long") as raised:
            await remote.run(EMBED, CONTEXT)
        assert (raised.value.param, raised.value.retry_after) == ("input", 3.0)


async def test_a_cancelled_task_is_cancelled_in_the_model_process(path: Path) -> None:
    """A client that leaves frees the model."""
    model = build_model(Embedder(release=asyncio.Event()))
    async with pair(build_gateway(model), path) as (remote, _):
        task = asyncio.create_task(remote.run(EMBED, CONTEXT))
        await until(lambda: model.inflight == 1)
        task.cancel()
        await until(lambda: model.inflight == 0)


async def test_a_stream_yields_every_chunk(path: Path) -> None:
    """A stream longer than the window arrives whole, in order."""
    words = 5 * STREAM_WINDOW + 3
    async with pair(build_gateway(build_model(Embedder(("generate",)))), path) as (remote, _):
        texts = [chunk.text async for chunk in remote.stream(generate(words), CONTEXT)]
        assert texts == [str(word) for word in range(words)]


async def test_a_stream_waits_for_its_reader(path: Path) -> None:
    """The model is at most a window ahead of a reader that has stopped."""
    produced = 0

    class Counting(Embedder):
        async def stream(self, task: Any, ctx: Context) -> Any:
            nonlocal produced
            while True:
                produced += 1
                yield Chunk(text="x")

    async with pair(build_gateway(build_model(Counting(("generate",)))), path) as (remote, _):
        chunks = remote.stream(generate(1), CONTEXT)
        await anext(chunks)
        await until(lambda: produced == STREAM_WINDOW + 1)
        assert not await remote.wait_for_first_answer(0.0)  # whatever was on its way has arrived
        assert produced == STREAM_WINDOW + 1
        for _ in range(STREAM_WINDOW):
            await anext(chunks)
        await until(lambda: produced > STREAM_WINDOW + 1)
        await chunks.aclose()


async def test_a_closed_stream_stops_the_model(path: Path) -> None:
    """A reader that leaves in mid-stream closes the runner's stream, even if the model is waiting for it."""
    runner = Embedder(("generate",))
    async with pair(build_gateway(build_model(runner)), path) as (remote, _):
        async with aclosing(remote.stream(generate(9 * STREAM_WINDOW), CONTEXT)) as chunks:
            await anext(chunks)
        await until(lambda: runner.streams_closed == 1)


async def test_an_error_in_mid_stream_is_raised(path: Path) -> None:
    """The chunks before the error arrive."""
    runner = Embedder(("generate",), error=TooLong("now"))
    async with pair(build_gateway(build_model(runner)), path) as (remote, _):
        texts = []
        with pytest.raises(TooLong, match="now"):
            async for chunk in remote.stream(generate(3), CONTEXT):
                texts.append(chunk.text)  # noqa: PERF401 - the error must not lose them
        assert texts == ["0", "1", "2"]


async def test_a_lost_model_process_fails_what_is_under_way(path: Path) -> None:
    """Tasks and streams raise Crashed; later ones ModelNotReady, until the process is there again."""
    gateway = build_gateway(build_model(Embedder(("embed", "generate"), release=asyncio.Event())))
    async with front(path) as remote:
        async with model_end(gateway, path):
            await until(lambda: is_connected(remote))
            task = asyncio.create_task(remote.run(EMBED, CONTEXT))
            stream = remote.stream(generate(1), CONTEXT)
            await anext(stream)
            waiting = asyncio.ensure_future(anext(stream))
            model = next(iter(gateway.registry))
            await until(lambda: model.inflight == 2)
        for one in (task, waiting):
            with pytest.raises(Crashed, match="send the request again"):
                await one
        assert not remote.ready()
        with pytest.raises(ModelNotReady):
            await remote.run(EMBED, CONTEXT)
        with pytest.raises(ModelNotReady):
            await anext(remote.stream(generate(1), CONTEXT))
        assert not await remote.wait_for_first_answer(math.inf)
        remote.record_lag(0.1)  # nobody takes it
        assert [(card.name, card.state) for card in remote.models()] == [("m", "loading")]
        async with model_end(build_gateway(build_model(Embedder())), path):
            await until(remote.ready)
            assert (await remote.run(EMBED, CONTEXT)).tokens == [1]


async def test_a_front_may_start_first(path: Path) -> None:
    """Before the model process is there, a front is not ready and knows no model; then it connects by itself."""
    async with front(path) as remote:
        assert not remote.ready()
        with pytest.raises(ModelNotReady):
            await remote.run(EMBED, CONTEXT)
        with pytest.raises(ModelNotReady):
            remote.registry.find("m")
        async with model_end(build_gateway(build_model(Embedder())), path):
            await until(remote.ready)


async def test_a_link_that_ends_at_once_is_not_repeated_at_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model process that closes each connection does not keep the front busy."""
    monkeypatch.setattr(shoal.workers.front, "RETRY_S", 3600.0)
    accepted = 0

    async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal accepted
        accepted += 1
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_unix_server(refuse, str(path)), front(path):
        await until(lambda: accepted > 0)
        for _ in range(200):
            await asyncio.sleep(0)
        assert accepted == 1


async def test_a_hanging_model_process_ends_calls_at_their_deadlines(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task and a stream without an answer raise DeadlineExceeded, and are cancelled; others go on."""
    monkeypatch.setattr(shoal.workers.front, "SWEEP_S", 0.01)
    async with raw_models(path) as ends, front(path) as remote:
        end = await ends.get()
        end.write(NO_MODELS)
        await until(lambda: is_connected(remote))
        assert await end.read() == messages.Known(1)
        soon = Context(id="r", deadline=time.monotonic())
        later = asyncio.create_task(remote.run(EMBED, CONTEXT))
        late = [
            asyncio.create_task(remote.run(EMBED, soon)),
            asyncio.ensure_future(anext(remote.stream(generate(1), soon))),
        ]
        for one in late:
            with pytest.raises(DeadlineExceeded, match="try again later"):
                await one
        sent = [await end.read() for _ in range(5)]
        assert [type(message) for message in sent[:3]] == [messages.Run, messages.Run, messages.Stream]
        assert {message.id for message in sent[3:]} == {message.id for message in sent[1:3]}
        assert all(isinstance(message, messages.Cancel) for message in sent[3:])
        end.write(messages.Done(sent[0].id, True))
        assert await later is True


async def test_a_hanging_model_process_is_not_ready(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a tick for a while a front is not ready, and requests handed over end, since they have no deadline."""
    monkeypatch.setattr(shoal.workers.front, "SWEEP_S", 0.01)
    async with raw_models(path) as ends, front(path) as remote:
        end = await ends.get()
        end.write(NO_MODELS)
        await until(lambda: is_connected(remote))
        assert remote.ready()
        monkeypatch.setattr(shoal.workers.front, "HANG_S", 0.0)
        assert not remote.ready()
        request = messages.Request(remote.new_number(), "GET", "/", b"", [], ("", 0))
        opened = remote.open_request(request, math.inf)
        assert isinstance(await anext(opened), messages.Failure)
        await opened.aclose()
        monkeypatch.setattr(shoal.workers.front, "HANG_S", 600.0)
        end.write(messages.Tick())
        await until(remote.ready)


async def test_answers_that_nobody_waits_for_are_ignored(path: Path) -> None:
    """A late answer to a call that was cancelled does no harm."""
    async with raw_models(path) as ends, front(path) as remote:
        end = await ends.get()
        end.write(NO_MODELS)
        await until(lambda: is_connected(remote))
        for late in (messages.Done(99), messages.Failure(99, PackedError("TooLong", "x")), messages.Receive(99)):
            end.write(late)
        end.write(messages.Piece(99, Chunk(text="x")), messages.Body(99, b"", False), messages.Start(99, 200, []))
        call = asyncio.create_task(remote.wait_for_first_answer(math.inf))
        assert await end.read() == messages.Known(1)
        end.write(messages.Done((await end.read()).id, True))
        assert await call is True


async def test_a_text_that_is_not_unicode_is_an_invalid_value(path: Path) -> None:
    """A lone surrogate fails its own request, before it is sent."""
    async with pair(build_gateway(build_model(Embedder(("embed", "generate")))), path) as (remote, _):
        with pytest.raises(InvalidValue, match="Unicode"):
            await remote.run(Embed(model="m", inputs=["\ud800"]), CONTEXT)
        assert (await remote.run(EMBED, CONTEXT)).tokens == [1]


async def test_a_prompt_that_is_not_unicode_is_an_invalid_value(path: Path) -> None:
    """A lone surrogate fails a stream as it fails a task."""
    async with pair(build_gateway(build_model(Embedder(("generate",)))), path) as (remote, _):
        task = generate(1)
        task.prompts[0] = "\ud800"
        with pytest.raises(InvalidValue, match="Unicode"):
            await anext(remote.stream(task, CONTEXT))


async def test_the_registry_is_a_copy(path: Path) -> None:
    """Names, states, reasons and unloaded models are those of the model process, and change with it."""
    failed = build_model(name="broken")
    failed.mark_failed(TooLong("no"))
    gateway = build_gateway(
        build_model(Embedder(), aliases=("n",), default_for=("embed",)),
        build_model(name="slow", note="downloading", required=False),
        failed,
    )
    gateway.registry.remember_unloaded(build_model(name="old", aliases=("older",)))
    async with pair(gateway, path) as (remote, _):
        assert remote.models() == gateway.models()
        assert not remote.ready()
        assert remote.registry.find("n").name == "m"
        assert remote.registry.find("", "embed").name == "m"
        assert dict(remote.registry.unloaded) == dict(gateway.registry.unloaded)
        for name, error in (("slow", ModelNotReady), ("broken", ModelFailed)):
            with pytest.raises(error) as here:
                remote.registry.find(name).ready_runner()
            with pytest.raises(error) as there:
                gateway.registry.find(name).ready_runner()
            assert str(here.value) == str(there.value)
        for name in ("old", "older", "nobody", "slo"):
            with pytest.raises(ModelNotFound) as mine:
                remote.registry.find(name)
            with pytest.raises(ModelNotFound) as theirs:
                gateway.registry.find(name)
            assert str(mine.value) == str(theirs.value)
        gateway.registry.find("slow").mark_loaded(Embedder())
        await until(lambda: remote.registry.find("slow").state == "ready")


async def test_a_model_that_stops_answering_ends_readiness(path: Path) -> None:
    """Readiness follows the runner of the model process, with no change of a state."""
    runner = Embedder()
    async with pair(build_gateway(build_model(runner)), path) as (remote, _):
        assert remote.ready()
        runner.is_ready = False
        await until(lambda: not remote.ready())


async def test_refusals_and_lag_are_reported(path: Path) -> None:
    """What a front rejects itself, and how late its loop was, is counted in the model process."""
    async with pair(build_gateway(), path) as (remote, end):
        remote.report_refusal(TooLong("no"), "tei")
        remote.record_lag(0.5)
        await until(lambda: bool(end.lags))
        assert (end.refusals, end.lags) == (["tei too_long"], [0.5])


async def test_only_the_model_process_has_a_lifecycle(path: Path) -> None:
    """Whatever needs the models themselves is handed over."""
    async with pair(build_gateway(build_model(Embedder())), path) as (remote, _):
        assert remote.lifecycle is not None
        with pytest.raises(HandOver):
            remote.lifecycle.load  # noqa: B018 - the access is what raises
        with pytest.raises(HandOver):
            remote.using_codec("m", CONTEXT)
        with pytest.raises(HandOver):
            await remote.statistics()


async def test_the_end_of_a_drain_ends_streams(path: Path) -> None:
    """Streams end with an error that their clients can read, and in the model process, too."""
    runner = Embedder(("generate",), release=asyncio.Event())
    async with pair(build_gateway(build_model(runner)), path) as (remote, _):
        stream = remote.stream(generate(1), CONTEXT)
        await anext(stream)
        remote.abort_generations()
        with pytest.raises(Unavailable, match="shutting down"):
            await anext(stream)
        await until(lambda: runner.streams_closed == 1)


async def test_a_stream_left_open_is_collected(path: Path) -> None:
    """A stream that was never read costs the model process nothing."""
    model = build_model(Embedder(("generate",)))
    async with pair(build_gateway(model), path) as (remote, _):
        stream = remote.stream(generate(1), CONTEXT)
        await stream.aclose()
        del stream
        gc.collect()
        assert model.inflight == 0
