"""Requests of OpenAI's API are passed on, and answers passed back, byte for byte except for the model's name."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.backends.base import http_client as client_module
from shoal.backends.base.http_client import Client
from shoal.backends.openai import runner as runner_module
from shoal.backends.openai.replicas import Attempt, Replica, ServerPool
from shoal.backends.openai.runner import UpstreamOptions, UpstreamRunner
from shoal.core.recording import RECORD, TaskRecord
from shoal.core.scheduling.ejection import MAX_FAILURES
from shoal.errors import (
    BackendError,
    DeadlineExceeded,
    InvalidValue,
    ShoalError,
    TransportFailed,
    Unsupported,
    UpstreamFailed,
    UpstreamRefused,
)
from shoal.http import status_codes
from shoal.types import Chunk, Embed, Generate, Message, Part, Untranslated, Usage
from tests.fakes.openai_server import DONE, Exchange, FakeUpstream, Script, answer, event, stream
from tests.unit.backends.openai.kit import (
    FACTS,
    HEAD,
    USAGE,
    chunks_of,
    context,
    delta,
    last,
    make_task,
    passed_on,
    runner_of,
    streaming,
    typed,
)

RESPONSE = {"model": "mine", "stream": True}


def begin_record() -> TaskRecord:
    """Make what this test does a task whose calls are noted."""
    record = TaskRecord("r", "m", "generate", 1, time.monotonic())
    RECORD.set(record)
    return record


async def broken(runner: UpstreamRunner, task: Generate) -> tuple[list[Chunk], ShoalError]:
    """Return the bytes before the error, and the error."""
    got: list[Chunk] = []
    with pytest.raises(ShoalError) as caught:
        async with aclosing(runner.stream(task, context())) as chunks:
            async for chunk in chunks:
                got.append(chunk)  # noqa: PERF401 - what came before the error is what counts
    return got, caught.value


@pytest.fixture
async def server() -> AsyncIterator[FakeUpstream]:
    async with FakeUpstream() as made:
        yield made


@pytest.fixture
async def runner(server: FakeUpstream) -> AsyncIterator[UpstreamRunner]:
    made = runner_of(server, lora="up/lora")
    yield made
    await made.aclose()


class TestRequests:
    @pytest.mark.parametrize(
        ("dialect", "path"),
        [
            ("openai.chat", "/chat/completions"),
            ("openai.completions", "/completions"),
            ("openai.responses", "/responses"),
        ],
    )
    async def test_a_dialect_has_its_route(
        self, server: FakeUpstream, runner: UpstreamRunner, dialect: str, path: str
    ) -> None:
        server.on(path, answer({"model": "up/model", "choices": [1], "output": []}))
        chunks = await chunks_of(runner, make_task({"model": "mine"}, dialect=dialect))
        assert chunks[0].raw == (dialect, b'{"model": "mine", "choices": [1], "output": []}')
        assert server.requests[0].path == "/v1" + path
        assert server.requests[0].headers["x-request-id"] == "req-1"

    @pytest.mark.parametrize(
        ("dialect", "path"),
        [
            ("openai.chat", "/chat/completions"),
            ("openai.responses", "/responses"),
            ("anthropic.messages", "/messages"),
        ],
    )
    @pytest.mark.parametrize(
        ("body", "message"),
        [
            ({}, "returned no (choices|output): check"),
            ([], "returned no (choices|output): check"),
            ({"error": {"message": "boom"}}, "boom"),
        ],
    )
    async def test_an_answer_that_is_none(
        self, server: FakeUpstream, runner: UpstreamRunner, dialect: str, path: str, body: Any, message: str
    ) -> None:
        server.on(path, answer(body))
        with pytest.raises(UpstreamRefused, match=message):
            await chunks_of(runner, make_task({"model": "mine"}, dialect=dialect))

    async def test_a_response_that_failed_is_an_answer(self, server: FakeUpstream, runner: UpstreamRunner) -> None:
        server.on("/responses", answer({"status": "failed", "error": {"message": "boom"}, "output": []}))
        chunks = await chunks_of(runner, make_task({"model": "mine"}, dialect="openai.responses"))
        assert chunks[0].raw is not None

    async def test_unknown_fields_go_on_byte_for_byte(self, server: FakeUpstream, runner: UpstreamRunner) -> None:
        server.on("/chat/completions", answer({"choices": [1]}))
        body = rb'{"model":"mine","messages":[ ],"vllm_xargs":{"a": [1.50, "\u00e9"]},"n":1e0,"top_k":40}'
        await chunks_of(runner, make_task(body))
        assert server.requests[0].body == body.replace(b'"mine"', b'"up/model"')

    @pytest.mark.parametrize("kind", ["input_audio", "audio_url", "video_url", "file"])
    async def test_parts_that_nobody_here_reads_go_on(
        self, server: FakeUpstream, runner: UpstreamRunner, kind: str
    ) -> None:
        server.on("/chat/completions", answer({"choices": [1]}))
        sent = [{"role": "user", "content": [{"type": kind, kind: {"data": "AA"}}]}]
        read = [Message(role="user", content=[Part(type="other", kind=kind)])]
        await chunks_of(runner, make_task({"model": "mine", "messages": sent}, messages=read))
        assert server.requests[0].json["messages"] == sent

    async def test_fields_of_the_operator(self, server: FakeUpstream) -> None:
        """Fields are removed, and defaults added where the client has none; the Responses API has other fields."""
        runner = runner_of(server, options=UpstreamOptions(strip=frozenset({"priority"}), defaults={"top_k": 4}))
        for path in ("/chat/completions", "/responses"):
            server.on(path, answer({"choices": [1], "output": []}))
        await chunks_of(runner, make_task({"model": "mine", "priority": 1, "seed": 2}))
        assert server.requests[0].json == {"model": "up/model", "seed": 2, "top_k": 4}
        await chunks_of(runner, make_task({"model": "mine", "priority": 1}, dialect="openai.responses"))
        assert server.requests[1].json == {"model": "up/model"}
        await runner.aclose()

    @pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
    async def test_a_length_of_minus_one_is_none(self, server: FakeUpstream, field: str) -> None:
        """As documented in docs/api.md, -1 is replaced by the operator's default."""
        runner = runner_of(server, options=UpstreamOptions(defaults={"max_tokens": 64}))
        server.on("/chat/completions", answer({"choices": [1]}))
        for length in (b"-1", b"-1.0"):
            await chunks_of(runner, make_task(b'{"model":"mine","%b": %b}' % (field.encode(), length)))
            assert server.requests[-1].json == {"model": "up/model", "max_tokens": 64}
        await chunks_of(runner, make_task({"model": "mine", "max_tokens": 5}))
        assert server.requests[-1].json == {"model": "up/model", "max_tokens": 5}
        await chunks_of(runner, make_task({"model": "mine", "max_tokens": "-1"}))
        assert server.requests[-1].json["max_tokens"] == "-1"
        await runner.aclose()

    async def test_an_adapter_is_a_model_of_the_server(self, server: FakeUpstream, runner: UpstreamRunner) -> None:
        server.on("/chat/completions", answer({"model": "up/lora", "choices": [1]}))
        chunks = await chunks_of(runner, make_task({"model": "mine:lora"}, adapter="lora"))
        assert server.requests[0].json == {"model": "up/lora"}
        assert passed_on(chunks) == b'{"model": "mine:lora", "choices": [1]}'
        with pytest.raises(InvalidValue, match="no adapter 'other'; it has lora"):
            await chunks_of(runner, make_task({"model": "mine:other"}, adapter="other"))

    async def test_unsupported_requests(self, runner: UpstreamRunner) -> None:
        with pytest.raises(Unsupported, match="only generates text"):
            await runner.run(Embed(model="mine", inputs=["a"]), context())


class TestWholeAnswers:
    async def test_bytes_and_usage(self, server: FakeUpstream, runner: UpstreamRunner) -> None:
        body = b'{ "id":"c","model" : "up/model","choices":[{"message":{"content":"up/model"}}],"usage":'
        body += json.dumps({**USAGE, "prompt_tokens_details": {"cached_tokens": 3}}).encode() + b',"x":1.0}'
        server.on("/chat/completions", answer(body))
        (chunk,) = await chunks_of(runner, make_task())
        assert chunk.raw == ("openai.chat", body.replace(b': "up/model"', b': "mine"'))
        assert chunk.usage == Usage(prompt_tokens=5, completion_tokens=2, cached_tokens=3)

    async def test_a_client_that_names_no_model_reads_the_served_name(
        self, server: FakeUpstream, runner: UpstreamRunner
    ) -> None:
        server.on("/chat/completions", answer({"model": "up/model", "choices": [1]}))
        assert passed_on(await chunks_of(runner, make_task({"messages": []}))) == b'{"model": "mine", "choices": [1]}'

    @pytest.mark.parametrize(
        ("script", "words"),
        [
            (answer(b"<html>"), "invalid JSON"),
            (answer(b"{}", content_type="text/event-stream"), "a stream instead of one body"),
            (answer(b"", 201), "status 201"),
            (answer(b'{"x":"' + b"y" * 2000 + b'"}'), "more than 1000 bytes"),
        ],
    )
    async def test_answers_that_are_none(
        self,
        server: FakeUpstream,
        runner: UpstreamRunner,
        script: Script,
        words: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(runner_module, "MAX_ANSWER_BYTES", 1000)
        server.on("/chat/completions", script)
        with pytest.raises(BackendError, match=words):
            await chunks_of(runner, make_task())

    @pytest.mark.parametrize("body", [b"{}", b'"hello"', b"[1]", b'{"choices":[]}', b'{"choices":null}'])
    @pytest.mark.parametrize("task", [make_task(), typed(stream=False)])
    async def test_an_empty_answer(
        self, server: FakeUpstream, runner: UpstreamRunner, task: Generate, body: bytes
    ) -> None:
        """An empty answer is the server's failure whatever its status, and the error says what to check."""
        server.on("/chat/completions", answer(body))
        _, error = await broken(runner, task)
        assert (status_codes.status(error), status_codes.find_row(error).openai.type) == (502, "upstream_error")
        assert "check that the model's address" in error.message


class TestStreams:
    async def test_events_as_they_came(self, server: FakeUpstream, runner: UpstreamRunner) -> None:
        events = [delta("", role="x"), delta("Grüße"), delta('{"model":"up/model"}'), delta("", finish="stop"), DONE]
        server.on("/chat/completions", stream(*events))
        chunks = await chunks_of(runner, streaming())
        expected = b"".join(events).replace(b'"model":"up/model","ch', b'"model":"mine","ch')
        assert passed_on(chunks) == expected
        assert [chunk.usage for chunk in chunks] == [None] * len(chunks)
        assert server.requests[0].json == {"model": "up/model", "messages": [], "stream": True}

    async def test_events_that_came_together_are_one_chunk(self, server: FakeUpstream, runner: UpstreamRunner) -> None:
        server.on("/chat/completions", stream(delta() + delta("b") + delta("c", finish="stop") + DONE))
        assert len(await chunks_of(runner, streaming())) == 1

    async def test_a_connection_serves_stream_after_stream(self, server: FakeUpstream, runner: UpstreamRunner) -> None:
        server.on("/chat/completions", stream(delta(), DONE))
        for _ in range(3):
            await chunks_of(runner, streaming())
            await asyncio.gather(*runner._fleet.replicas[0].client._ending)
        assert server.connections == 1

    @given(
        cuts=st.lists(st.integers(0, 2000), max_size=10),
        ends=st.sampled_from([b"\n", b"\r\n", b"\r"]),
        texts=st.lists(st.sampled_from(["a", "Grüße", "🐟", '"model":"up/model"', "data: x", ""]), max_size=4),
    )
    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_whatever_the_pieces(self, cuts: list[int], ends: bytes, texts: list[str]) -> None:
        """Chunks of any size, split inside characters, names and line ends, give the same stream."""

        async def run() -> tuple[bytes, bytes]:
            events = [*map(delta, texts), delta("", finish="stop"), DONE]
            data = b"".join(event.replace(b"\n", ends) for event in events)
            places = sorted({0, len(data), *(cut % len(data) for cut in cuts)})
            pieces = [data[a:b] for a, b in itertools.pairwise(places)]
            async with FakeUpstream() as server:
                server.on("/chat/completions", stream(*pieces))
                runner = runner_of(server)
                got = passed_on(await chunks_of(runner, streaming()))
                await runner.aclose()
            return got, data.replace(b'"model":"up/model","choices"', b'"model":"mine","choices"')

        got, expected = asyncio.run(run())
        assert got.rstrip(b"\r\n") == expected.rstrip(b"\r\n")

    async def test_heartbeats_stay_here(self, server: FakeUpstream, runner: UpstreamRunner) -> None:
        """Heartbeats are not passed on: the server sends its own, and silence of the model must stay visible."""
        server.on("/chat/completions", stream(b": ping\n\n", delta(), b":\n\n: x\n\n", delta("b", finish="stop"), DONE))
        got = passed_on(await chunks_of(runner, streaming()))
        assert got == delta(model="mine") + delta("b", "mine", finish="stop") + DONE

    async def test_usage_is_reported_once_at_the_end(self, server: FakeUpstream, runner: UpstreamRunner) -> None:
        server.on("/chat/completions", stream(delta(usage=None), delta("", finish="stop", usage=None), last(), DONE))
        chunks = await chunks_of(runner, streaming(stream_options={"include_usage": True}))
        assert [chunk.usage for chunk in chunks if chunk.usage] == [Usage(prompt_tokens=5, completion_tokens=2)]

    @pytest.mark.parametrize("ends", [[DONE], []])
    async def test_continuous_usage(self, server: FakeUpstream, runner: UpstreamRunner, ends: list[bytes]) -> None:
        """With vLLM's continuous_usage_stats the last usage counts."""
        counts = [{"prompt_tokens": 5, "completion_tokens": n} for n in (1, 2, 3)]
        events = [delta(usage=count, finish="stop") for count in counts]
        server.on("/chat/completions", stream(*events, *ends))
        chunks = await chunks_of(runner, streaming())
        assert [chunk.usage for chunk in chunks if chunk.usage] == [Usage(prompt_tokens=5, completion_tokens=3)]
        assert chunks[-1].usage is not None
        assert passed_on(chunks) == b"".join(event.replace(b"up/model", b"mine") for event in [*events, *ends])

    async def test_the_responses_api(self, server: FakeUpstream, runner: UpstreamRunner) -> None:
        """The Responses API has no [DONE], named events, and usage in the last one."""
        usage = {"input_tokens": 4, "output_tokens": 6, "output_tokens_details": {"reasoning_tokens": 1}}
        made = b"event: response.created\n" + event({"type": "response.created", "response": {"model": "up/model"}})
        text = b"event: response.output_text.delta\n" + event({"type": "response.output_text.delta", "delta": "a"})
        whole = {"type": "response.completed", "response": {"model": "up/model", "usage": usage}}
        done = b"event: response.completed\n" + event(whole)
        server.on("/responses", stream(made, text, done))
        chunks = await chunks_of(runner, make_task({"model": "mine", "stream": True}, dialect="openai.responses"))
        assert passed_on(chunks) == (made + text + done).replace(b"up/model", b"mine")
        assert chunks[-1].usage == Usage(prompt_tokens=4, completion_tokens=6, reasoning_tokens=1)

    async def test_a_stream_without_done(self, server: FakeUpstream, runner: UpstreamRunner) -> None:
        server.on("/chat/completions", stream(delta(), delta("", finish="stop")))
        assert passed_on(await chunks_of(runner, streaming())).endswith(delta("", "mine", finish="stop"))

    @pytest.mark.parametrize("done", [b"data: [DONE]", b"data:[DONE]\n", b"data: [DONE]\r\n"])
    @pytest.mark.parametrize("task", [streaming(), typed()], ids=["passed", "typed"])
    async def test_a_done_without_an_empty_line(
        self, server: FakeUpstream, runner: UpstreamRunner, done: bytes, task: Generate
    ) -> None:
        """The answer is complete."""
        server.on("/chat/completions", stream(delta(), delta("", finish="stop"), done))
        chunks = await chunks_of(runner, task)
        if task.raw:
            assert passed_on(chunks).endswith(done + b"\n\n")
        else:
            assert ("".join(chunk.text for chunk in chunks), chunks[-1].finish_reason) == ("a", "stop")

    async def test_what_follows_done_is_nothing(self, server: FakeUpstream, runner: UpstreamRunner) -> None:
        server.on("/chat/completions", stream(delta() + DONE + delta("b")))
        assert passed_on(await chunks_of(runner, streaming())) == delta(model="mine") + DONE

    @pytest.mark.parametrize("together", [True, False])
    async def test_an_error_in_the_stream_is_raised(
        self, server: FakeUpstream, runner: UpstreamRunner, together: bool
    ) -> None:
        """The error has the server's text, follows the chunks before it, and is a failure of the replica."""
        detail = {"message": "boom", "type": "server_error", "code": 500}
        events = [delta(), event({"error": detail}), DONE]
        server.on("/chat/completions", stream(*([b"".join(events)] if together else events)))
        got, error = await broken(runner, streaming())
        assert passed_on(got) == delta(model="mine")
        assert isinstance(error, UpstreamRefused)
        assert (error.status, json.loads(error.body)) == (500, {"error": detail})
        assert runner._fleet.replicas[0].failures == 1

    async def test_an_error_that_is_the_clients(self, server: FakeUpstream, runner: UpstreamRunner) -> None:
        server.on("/chat/completions", stream(event({"error": {"message": "too long", "code": 400}}), DONE))
        got, error = await broken(runner, streaming())
        assert isinstance(error, UpstreamRefused)
        assert (got, error.status, runner._fleet.replicas[0].failures) == ([], 400, 0)

    @pytest.mark.parametrize("dialect", ["openai.chat", "openai.responses"])
    async def test_a_stream_that_ends_before_its_answer(
        self, server: FakeUpstream, runner: UpstreamRunner, dialect: str
    ) -> None:
        """A stream without [DONE] and finish reason is incomplete."""
        for path in ("/chat/completions", "/responses"):
            server.on(path, stream(delta(usage=USAGE)))
        got, error = await broken(runner, make_task({"model": "mine", "stream": True}, dialect=dialect))
        assert passed_on(got) == delta(model="mine", usage=USAGE)
        assert got[-1].usage == Usage(prompt_tokens=5, completion_tokens=2)
        assert isinstance(error, TransportFailed)
        assert runner._fleet.replicas[0].failures == 1

    @pytest.mark.parametrize("task", [streaming(), typed()], ids=["passed", "typed"])
    async def test_an_empty_reason_ends_nothing(
        self, server: FakeUpstream, runner: UpstreamRunner, task: Generate
    ) -> None:
        server.on("/chat/completions", stream(delta("a", finish=""), delta("b", finish="")))
        got, error = await broken(runner, task)
        assert [chunk.finish_reason for chunk in got] == [None] * len(got)
        assert isinstance(error, TransportFailed)

    async def test_every_stream_of_a_server_breaks(self, server: FakeUpstream, runner: UpstreamRunner) -> None:
        """A first chunk does not count as success: the server is ejected in the end."""
        server.on("/chat/completions", stream(delta()))
        for _ in range(MAX_FAILURES):
            await broken(runner, streaming())
        assert not runner._fleet.replicas[0].is_usable(time.monotonic())

    @pytest.mark.parametrize("task", [streaming(), typed(), make_task(RESPONSE, dialect="openai.responses")])
    async def test_an_answer_ends_with_its_last_event(
        self, server: FakeUpstream, runner: UpstreamRunner, task: Generate, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The answer ends with its last event, whatever the server does with the connection."""

        async def chatters(exchange: Exchange) -> None:
            while not exchange.request.disconnected.is_set():
                await exchange.piece(b": still here\n\n")
                await asyncio.sleep(0)

        whole = event({"type": "response.completed", "response": {"model": "up/model"}})
        server.on("/chat/completions", stream(delta(finish="stop"), DONE, after=chatters))
        server.on("/responses", stream(whole, after=chatters))
        monkeypatch.setattr(client_module, "END_S", 3600.0)
        async with asyncio.timeout(30):
            chunks = await chunks_of(runner, task)
        assert chunks
        assert runner._fleet.replicas[0].in_flight == 0

    @pytest.mark.parametrize("how", ["ends", "breaks"])
    async def test_a_stream_that_stops_inside_of_an_event(
        self, server: FakeUpstream, runner: UpstreamRunner, how: str
    ) -> None:
        """Events that were complete before are passed on."""

        async def ending(exchange: Exchange) -> None:
            await (exchange.end() if how == "ends" else exchange.cut())

        server.on("/chat/completions", stream(delta(), b'data: {"choi', after=ending))
        got, error = await broken(runner, streaming())
        assert isinstance(error, TransportFailed)
        assert passed_on(got) == delta(model="mine")

    async def test_an_answer_that_is_no_stream(self, server: FakeUpstream, runner: UpstreamRunner) -> None:
        server.on("/chat/completions", answer({"choices": []}))
        with pytest.raises(UpstreamFailed, match="instead of a stream"):
            await chunks_of(runner, streaming())


class TestErrors:
    @pytest.mark.parametrize("task", [make_task(), streaming(), typed(), typed(stream=False)])
    async def test_a_refusal_comes_before_the_first_chunk(
        self, server: FakeUpstream, runner: UpstreamRunner, task: Any
    ) -> None:
        body = b'{"error": {"message":"context length", "code":"context_length_exceeded" }}'
        server.on("/chat/completions", answer(body, 400, retry_after="3"))
        chunks = runner.stream(task, context())
        with pytest.raises(UpstreamRefused, match="context length") as caught:
            await anext(chunks)
        assert (caught.value.status, caught.value.body, caught.value.retry_after) == (400, body, 3.0)

    async def test_a_page_of_a_proxy_is_not_passed_on(self, server: FakeUpstream, runner: UpstreamRunner) -> None:
        server.on("/chat/completions", answer(b"<html>", 502, content_type="text/html"))
        with pytest.raises(UpstreamRefused) as caught:
            await chunks_of(runner, make_task())
        assert (caught.value.status, caught.value.body) == (502, b"")

    async def test_a_body_without_end_is_cut(self, server: FakeUpstream, runner: UpstreamRunner) -> None:
        server.on("/chat/completions", answer(b'{"error":"' + b"x" * 2**20 + b'"}', 500))
        with pytest.raises(UpstreamRefused) as caught:
            await chunks_of(runner, make_task())
        assert caught.value.body == b""

    async def test_shoals_own_key(self, server: FakeUpstream, runner: UpstreamRunner) -> None:
        server.on("/chat/completions", answer({"error": {"message": "bad key sk-1"}}, 401))
        with pytest.raises(UpstreamFailed, match="upstream_api_key"):
            await chunks_of(runner, make_task())

    @pytest.mark.parametrize("task", [make_task(), streaming(), typed(), typed(stream=False)])
    @pytest.mark.parametrize(
        ("status", "body"),
        [(400, b'{"error":{"message":"auth Bearer sk-SE/CRET"}}'), (500, b'{"error":{"message":"sk-SE\\/CRET"}}')],
    )
    async def test_a_refusal_that_quotes_the_key(
        self, server: FakeUpstream, task: Generate, status: int, body: bytes
    ) -> None:
        """The status is passed on, the text is not."""
        runner = runner_of(server, key="sk-SE/CRET")
        server.on("/chat/completions", answer(body, status))
        _, error = await broken(runner, task)
        assert isinstance(error, UpstreamRefused)
        assert error.status == status
        assert "is withheld" in json.loads(error.body)["error"]["message"]
        assert "CRET" not in error.message + error.body.decode()
        await runner.aclose()

    @pytest.mark.parametrize("task", [streaming(), typed()])
    async def test_an_error_in_the_stream_that_quotes_the_key(self, server: FakeUpstream, task: Generate) -> None:
        runner = runner_of(server, key="sk-SECRET")
        server.on("/chat/completions", stream(delta(), event({"error": {"message": "sk-SECRET expired"}})))
        _, error = await broken(runner, task)
        assert isinstance(error, UpstreamRefused)
        assert "SECRET" not in error.message + error.body.decode()
        await runner.aclose()

    @pytest.mark.parametrize("task", [make_task(), typed(stream=False)])
    async def test_an_error_of_status_200(self, server: FakeUpstream, runner: UpstreamRunner, task: Generate) -> None:
        server.on("/chat/completions", answer({"error": {"message": "boom", "code": 429}}))
        _, error = await broken(runner, task)
        assert isinstance(error, UpstreamRefused)
        assert error.status == 429

    @pytest.mark.parametrize("task", [make_task(), streaming(), typed(), typed(stream=False)])
    @pytest.mark.parametrize("status", [200, 400, 500])
    async def test_an_error_that_nests_too_deep(
        self, server: FakeUpstream, runner: UpstreamRunner, task: Generate, status: int
    ) -> None:
        deep = b'{"error":' + b"[" * 3000 + b"]" * 3000 + b"}"
        server.on("/chat/completions", stream(b"data: " + deep + b"\n\n", DONE))
        if status != 200 or not task.stream:
            server.on("/chat/completions", answer(deep, status))
        _, error = await broken(runner, task)
        assert isinstance(error, UpstreamFailed | UpstreamRefused)

    @pytest.mark.parametrize("script", [Exchange.left, stream(delta(), after=Exchange.left)])
    async def test_the_deadline(self, server: FakeUpstream, runner: UpstreamRunner, script: Script) -> None:
        server.on("/chat/completions", script)
        record = begin_record()
        with pytest.raises(DeadlineExceeded):
            await chunks_of(runner, streaming(), context(0.05))
        assert runner.ready()
        assert [each.error for each in record.attempts] == ["deadline"]

    @pytest.mark.parametrize("script", [Exchange.left, stream(delta(), after=Exchange.left)])
    async def test_a_caller_that_leaves(self, server: FakeUpstream, runner: UpstreamRunner, script: Script) -> None:
        """Before the answer begins, and during it, the call is in the record, and did not end well."""
        server.on("/chat/completions", script)
        record = begin_record()
        asked = asyncio.create_task(chunks_of(runner, streaming()))
        async with asyncio.timeout(30):
            while not server.requests:  # noqa: ASYNC110 - the fake server has no event for it
                await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert [each.error for each in record.attempts] == ["cancelled"]

    async def test_a_hanging_first_piece_is_no_client_that_left(self) -> None:
        """The gateway cancels a call whose first piece is late."""
        record = begin_record()
        replica = Replica(Client("http://127.0.0.1:1"), "m")
        with pytest.raises(asyncio.CancelledError), Attempt(replica, since=0.0, first_s=0.01, deadline=math.inf):
            raise asyncio.CancelledError
        assert [each.error for each in record.attempts] == ["deadline"]

    async def test_nobody_there(self, server: FakeUpstream, runner: UpstreamRunner) -> None:
        await server.stop()
        with pytest.raises(TransportFailed, match="is not reachable"):
            await chunks_of(runner, make_task())

    async def test_a_part_that_cannot_be_closed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The others are closed all the same."""
        closed: list[str] = []

        async def aclose(client: Client) -> None:
            closed.append(client.base)
            raise RuntimeError("broken")

        monkeypatch.setattr(Client, "aclose", aclose)
        replicas = [Replica(Client(f"http://127.0.0.1:{port}"), "m") for port in (1, 2)]
        runner = UpstreamRunner(ServerPool(replicas), FACTS)
        with pytest.raises(RuntimeError, match="broken"):
            await runner.aclose()
        assert closed == ["http://127.0.0.1:1", "http://127.0.0.1:2"]

    async def test_after_closing(self, runner: UpstreamRunner) -> None:
        await runner.aclose()
        await runner.aclose()
        with pytest.raises(ShoalError):
            await chunks_of(runner, make_task())


class TestServersWithoutResponses:
    async def test_responses_fall_back_to_chat(self, server: FakeUpstream, runner: UpstreamRunner) -> None:
        """A server without the Responses API gets the task as chat, and the next one at once."""
        choice = {"index": 0, "message": {"content": "hey"}, "finish_reason": "stop"}
        server.on("/chat/completions", answer({**HEAD, "choices": [choice], "usage": USAGE}))
        for _ in range(2):
            chunks = await chunks_of(runner, make_task({"model": "mine", "input": "hi"}, dialect="openai.responses"))
            assert "".join(chunk.text for chunk in chunks) == "hey"
        paths = [request.path for request in server.requests]
        assert paths == ["/v1/responses", "/v1/chat/completions", "/v1/chat/completions"]

    async def test_what_is_not_translated_falls_back_to_an_error(
        self, server: FakeUpstream, runner: UpstreamRunner
    ) -> None:
        why = Untranslated(message="'conversation' is not supported", param="conversation")
        task = make_task({"model": "mine", "input": "hi"}, dialect="openai.responses", untranslated=why)
        with pytest.raises(Unsupported, match="'conversation' is not supported"):
            await chunks_of(runner, task)
        assert [request.path for request in server.requests] == ["/v1/responses"]

    @pytest.mark.parametrize(("translates", "dialect"), [(("openai.responses",), "openai.responses"), ((), "")])
    async def test_servers_that_do_not_get_them(
        self, server: FakeUpstream, translates: tuple[str, ...], dialect: str
    ) -> None:
        """Because the operator says so, or because the body refers to what only Shoal stores."""
        choice = {"index": 0, "message": {"content": "hey"}, "finish_reason": "stop"}
        server.on("/chat/completions", answer({**HEAD, "choices": [choice], "usage": USAGE}))
        runner = runner_of(server, options=UpstreamOptions(translates=frozenset(translates)))
        chunks = await chunks_of(runner, make_task({"model": "mine", "input": "hi"}, dialect=dialect))
        assert "".join(chunk.text for chunk in chunks) == "hey"
        assert [request.path for request in server.requests] == ["/v1/chat/completions"]
        await runner.aclose()

    async def test_a_model_that_is_gone_is_another_matter(self, server: FakeUpstream, runner: UpstreamRunner) -> None:
        server.on("/responses", answer({"error": {"message": "The model `up/model` does not exist."}}, 404))
        with pytest.raises(UpstreamRefused):
            await chunks_of(runner, make_task({"model": "mine"}, dialect="openai.responses"))
