"""Streams of chat completions: the rules of server-sent events."""

from __future__ import annotations

import asyncio
import logging
import re
from pathlib import Path
from typing import Any

import orjson
import pytest

from shoal.core.protocols import GenerationReport, Observer
from shoal.errors import EngineFailed, UpstreamRefused
from shoal.http.request import Request
from shoal.surfaces.openai.chat import ChatEvents
from shoal.surfaces.openai.events import AnswerHeader
from shoal.types import Chunk, Result, TaskKind, TokenLogprob, ToolDelta, Usage
from tests.surfaces.surface_kit import Answer, request_scope
from tests.surfaces.talk_kit import MODEL, FakeRunner, WatchedExchange, data_of, run_loop, serve_chat

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = [{"role": "user", "content": "one two three"}]
USAGE = Chunk(usage=Usage(prompt_tokens=3, completion_tokens=2))
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES, "stream": True},
    TEXT: {"prompt": "one two three", "stream": True},
    RESPONSES: {"input": "one two three", "stream": True},
}


async def streamed(runner: FakeRunner | None = None, **fields: Any) -> Answer:
    return await serve_chat(runner).call("POST", CHAT, {**BODIES[CHAT], **fields})


def choices(answer: Answer) -> list[dict[str, Any]]:
    return [event["choices"][0] for event in data_of(answer.body)[:-1] if event["choices"]]


@pytest.mark.parametrize("path", BODIES)
async def test_headers(path: str) -> None:
    """Headers against caching, transformation and buffering by proxies; no length."""
    answer = await serve_chat().call("POST", path, BODIES[path])
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache, no-transform"
    assert answer.headers["x-accel-buffering"] == "no"
    assert "content-length" not in answer.headers


async def test_streaming_is_requested_in_the_body() -> None:
    """OpenAI's clients accept only JSON even if they want a stream."""
    server = serve_chat()
    answer = await server.call("POST", CHAT, BODIES[CHAT], headers={"accept": "application/json"})
    assert answer.headers["content-type"].startswith("text/event-stream")
    answer = await server.call("POST", CHAT, {"messages": MESSAGES}, headers={"accept": "text/event-stream"})
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize("runner", [FakeRunner(), FakeRunner(error=EngineFailed("gone"), fail_after=2)])
async def test_the_end_comes_with_the_last_piece(runner: FakeRunner) -> None:
    """A write of its own would be a system call and would wake the client once more."""
    exchange, task = serve_chat(runner).open(CHAT, BODIES[CHAT])
    await task
    last = exchange.messages[-1]
    assert last["body"].endswith(b"\n\n")
    assert not last["more_body"]


async def test_the_order_of_events() -> None:
    """Role, text, one event with the finish reason, [DONE]; all have the same id, time and model."""
    answer = await streamed()
    *events, done = data_of(answer.body)
    assert done == "[DONE]"
    assert answer.body.endswith(b"data: [DONE]\n\n")
    assert len({(each["id"], each["created"], each["model"], each["object"]) for each in events}) == 1
    assert events[0]["object"] == "chat.completion.chunk"
    assert [each["delta"] for each in choices(answer)] == [
        {"role": "assistant", "content": ""},
        {"content": "one"},
        {"content": " two"},
        {"content": " three"},
        {},
    ]
    assert [each["finish_reason"] for each in choices(answer)] == [None, None, None, None, "stop"]
    assert all(each["logprobs"] is None for each in choices(answer))


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
async def test_without_usage(options: Any) -> None:
    """No event has a usage or empty choices, which clients fail on. The last one has the timings."""
    *events, _ = data_of((await streamed(stream_options=options)).body)
    assert all(len(each["choices"]) == 1 and "usage" not in each for each in events)
    assert [("timings" in each) for each in events] == [False] * 4 + [True]
    assert events[-1]["timings"]["predicted_n"] == 3


async def test_with_usage() -> None:
    """null in every event, then one full usage with empty choices, after the reasons and before [DONE]."""
    *events, last, _ = data_of((await streamed(stream_options={"include_usage": True}, n=2)).body)
    assert all(each["usage"] is None and len(each["choices"]) == 1 for each in events)
    assert last["choices"] == []
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"], last["usage"]["total_tokens"]) == (
        7,
        6,
        13,
    )
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
    assert (last["timings"]["prompt_n"], last["timings"]["cache_n"]) == (5, 2)


async def test_options_without_a_stream() -> None:
    """They are rejected, like in OpenAI's API; null is accepted."""
    for path, fields in ((CHAT, {"messages": MESSAGES}), (TEXT, {"prompt": "one"})):
        for stream in ({}, {"stream": False}, {"stream": None}):
            answer = await serve_chat().call(
                "POST", path, {**fields, **stream, "stream_options": {"include_usage": True}}
            )
            assert (answer.status, answer.json()["error"]["param"]) == (400, "stream_options")
        assert (await serve_chat().call("POST", path, {**fields, "stream_options": None})).status == 200


async def test_several_choices() -> None:
    """They alternate; each has its own role in its first event, and its own reason in its last."""
    answer = await streamed(n=3)
    for index in range(3):
        own = [each for each in choices(answer) if each["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert [each["finish_reason"] for each in own] == [None, None, None, None, "stop"]
        assert "".join(each["delta"].get("content", "") for each in own) == "one two three"
    assert [each["index"] for each in choices(answer)[:4]] == [0, 0, 1, 1]


async def test_tool_calls() -> None:
    """One fragment per event; each has the index, only a call's first has id, type and name."""
    chunks = [
        Chunk(tools=[ToolDelta(index=0, id="call_a", name="add")]),
        Chunk(tools=[ToolDelta(index=0, arguments='{"a":')]),
        Chunk(tools=[ToolDelta(index=0, arguments="1}"), ToolDelta(index=1, id="call_b", name="sub", arguments="{}")]),
        Chunk(finish_reason="tool_calls"),
        USAGE,
    ]
    answer = await streamed(FakeRunner(reply=lambda task: chunks))
    assert [each["delta"].get("tool_calls") for each in choices(answer)[1:]] == [
        [{"index": 0, "id": "call_a", "type": "function", "function": {"name": "add", "arguments": ""}}],
        [{"index": 0, "function": {"arguments": '{"a":'}}],
        [{"index": 0, "function": {"arguments": "1}"}}],
        [{"index": 1, "id": "call_b", "type": "function", "function": {"name": "sub", "arguments": "{}"}}],
        None,
    ]
    assert choices(answer)[-1]["finish_reason"] == "tool_calls"
    function = {"name": "add"}
    answer = await streamed(FakeRunner(reply=lambda task: chunks), functions=[function])
    assert [each["delta"].get("function_call") for each in choices(answer)[1:]] == [
        {"name": "add", "arguments": ""},
        {"arguments": '{"a":'},
        {"arguments": "1}"},
        None,
    ]
    assert choices(answer)[-1]["finish_reason"] == "function_call"


async def test_reasoning_and_logprobs() -> None:
    """Reasoning is not content; tokens come with their text, or alone while the text is held back."""
    chunks = [Chunk(reasoning="hm"), Chunk(reasoning="so", text="yes"), Chunk(finish_reason="length"), USAGE]
    answer = await streamed(FakeRunner(reply=lambda task: chunks))
    assert [each["delta"] for each in choices(answer)[1:]] == [
        {"reasoning_content": "hm"},
        {"reasoning_content": "so"},
        {"content": "yes"},
        {},
    ]
    assert choices(answer)[-1]["finish_reason"] == "length"
    answer = await streamed(logprobs=True, top_logprobs=1)
    tokens = [each["logprobs"]["content"][0]["token"] for each in choices(answer) if each["logprobs"]]
    assert tokens == ["one", " two", " three"]
    later = [Chunk(logprobs=[TokenLogprob(token="a", logprob=0.0)]), Chunk(finish_reason="stop")]
    event = choices(await streamed(FakeRunner(reply=lambda task: later), logprobs=True))[1]
    assert (event["delta"], len(event["logprobs"]["content"])) == ({"content": ""}, 1)


async def test_texts_with_line_breaks() -> None:
    """Every event is one line, whatever the text."""
    text = 'a\nb\r\n\n"data: [DONE]"\u2028\u2029\x00 é \U0001f41f'
    chunks = [Chunk(text="x"), Chunk(text=text), Chunk(finish_reason="stop")]
    answer = await streamed(FakeRunner(reply=lambda task: chunks))
    assert choices(answer)[2]["delta"]["content"] == text
    assert answer.body.count(b"\n\n") == 5


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("fail_after", [1, 3])
async def test_errors_in_mid_stream(path: str, fail_after: int) -> None:
    """An error event without choices, which clients raise, ends the stream; nothing stays open."""
    server = serve_chat(FakeRunner(error=EngineFailed("the GPU fell off"), fail_after=fail_after))
    answer = await server.call("POST", path, BODIES[path])
    *_, error = data_of(answer.body)
    assert answer.status == 200
    assert b"event: error\ndata: " in answer.body
    assert b"[DONE]" not in answer.body
    assert error == {"error": {"message": "the GPU fell off", "type": "server_error", "param": None, "code": None}}
    assert server.runner.open == 0


async def test_errors_after_the_finish_reason() -> None:
    """The finish reason was sent before the error."""
    chunks = [Chunk(text="a"), Chunk(finish_reason="stop")]
    answer = await streamed(FakeRunner(reply=lambda task: chunks, error=EngineFailed("late"), fail_after=2))
    *_, finish, error = data_of(answer.body)
    assert (finish["choices"][0]["finish_reason"], error["error"]["message"]) == ("stop", "late")


async def test_upstream_errors_in_mid_stream() -> None:
    """The upstream's own error object, else the message in OpenAI's format."""
    own = UpstreamRefused("no", status=400, body=b'{"error":{"message":"too\\nlong","code":"x"}}')
    *_, error = data_of((await streamed(FakeRunner(error=own, fail_after=1))).body)
    assert error == {"error": {"message": "too\nlong", "code": "x"}}
    for body in (b"<html>", b'{"detail":1}', b'{"error":"text"}'):
        page = UpstreamRefused("bad gateway", status=502, body=body)
        *_, error = data_of((await streamed(FakeRunner(error=page, fail_after=1))).body)
        assert (error["error"]["message"], error["error"]["type"]) == ("bad gateway", "upstream_error")


async def test_bugs_in_mid_stream(caplog: pytest.LogCaptureFixture) -> None:
    """The log has the traceback with the request's id, the client only the id."""
    answer = await streamed(FakeRunner(error=ZeroDivisionError("secret"), fail_after=2))
    *_, error = data_of(answer.body)
    assert answer.headers["x-request-id"] in error["error"]["message"]
    assert b"secret" not in answer.body
    assert "ZeroDivisionError" in caplog.text
    assert answer.headers["x-request-id"] in caplog.text


RAW = [b'data: {"choices": [ {"delta": {}} ]}\n\n', b'data: {"choices":[]}\n\ndata: [DONE]\n\n']


@pytest.mark.parametrize("ends", [True, False])
async def test_upstream_events_are_passed_on(ends: bool) -> None:
    """Byte for byte, including [DONE]; if it is missing, it is added."""
    usage = Usage(prompt_tokens=1, completion_tokens=2)
    pieces = RAW if ends else RAW[:1]
    chunks = [*(Chunk(raw=("openai.chat", piece)) for piece in pieces[:-1])]
    chunks.append(Chunk(raw=("openai.chat", pieces[-1]), usage=usage))
    answer = await streamed(FakeRunner(reply=lambda task: chunks))
    assert answer.body == b"".join(pieces) + (b"" if ends else b"data: [DONE]\n\n")


@pytest.mark.parametrize("done", [b"data:[DONE]\n\n", b"data: [DONE]\r\n\r\n"])
async def test_other_spellings_of_done(done: bytes) -> None:
    """No second [DONE] is added."""
    chunks = [Chunk(raw=("openai.chat", RAW[0] + done))]
    assert (await streamed(FakeRunner(reply=lambda task: chunks))).body == RAW[0] + done


async def test_headers_wait_for_the_first_token() -> None:
    """Nothing is sent before it, so an earlier failure has its own status."""
    release = asyncio.Event()
    server = serve_chat(FakeRunner(waits={0: release}))
    exchange, task = server.open(CHAT, BODIES[CHAT])
    await server.runner.begun.wait()
    await run_loop()
    assert exchange.messages == []
    release.set()
    await task
    assert exchange.answer().status == 200


async def test_heartbeats() -> None:
    """Comments between events while the model is silent; the first opens the stream."""
    release, more = asyncio.Event(), asyncio.Event()
    server = serve_chat(FakeRunner(waits={0: release, 1: more}), heartbeat_s=0.002)
    exchange, task = server.open(CHAT, BODIES[CHAT])
    await exchange.until(lambda sent: len(sent) == 4)
    assert exchange.messages[0]["status"] == 200
    assert {each["body"] for each in exchange.messages[1:]} == {b": ping\n\n"}
    release.set()
    await exchange.until(lambda sent: b"one" in sent[-1]["body"])
    more.set()
    await task
    answer = exchange.answer()
    assert answer.body.startswith(b": ping\n\n")
    assert choices(answer)[-1]["finish_reason"] == "stop"


async def test_errors_after_a_heartbeat() -> None:
    """The status was sent, so the error is an event."""
    release = asyncio.Event()
    server = serve_chat(FakeRunner(waits={0: release}, error=EngineFailed("gone")), heartbeat_s=0.002)
    exchange, task = server.open(CHAT, BODIES[CHAT])
    await exchange.until(bool)
    release.set()
    await task
    *_, error = data_of(exchange.answer().body)
    assert error["error"]["message"] == "gone"


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("stream", [True, False])
async def test_disconnects(path: str, at: int, stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Before the first token or later, streamed or not: the work ends, no task is left, and the log has 499."""
    before = asyncio.all_tasks()
    server = serve_chat(FakeRunner(waits={at: asyncio.Event()}))
    with caplog.at_level(logging.INFO, logger="shoal.access"):
        exchange, task = server.open(path, {**BODIES[path], "stream": stream})
        await server.runner.waiting.wait()
        exchange.leave()
        async with asyncio.timeout(30):
            await task
    await run_loop()
    assert server.runner.open == 0
    if stream and at:
        assert all(each.get("more_body", True) for each in exchange.messages), "the stream has an end"
    assert asyncio.all_tasks() == before
    (record,) = [record for record in caplog.records if record.name == "shoal.access"]
    assert record.__dict__["status"] == 499


async def test_a_stopping_server() -> None:
    """A request cancelled from outside closes its stream, too."""
    server = serve_chat(FakeRunner(waits={1: asyncio.Event()}))
    exchange, task = server.open(CHAT, BODIES[CHAT])
    await exchange.until(lambda sent: len(sent) == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert server.runner.open == 0


async def test_headers_that_cannot_be_sent() -> None:
    """A disconnect before the first byte of a stream leaves nothing open."""
    server = serve_chat(FakeRunner(waits={1: asyncio.Event()}))
    exchange = WatchedExchange([orjson.dumps(BODIES[CHAT])])

    async def fail(message: dict[str, Any]) -> None:
        raise asyncio.CancelledError

    scope = request_scope("POST", CHAT, {"content-type": "application/json"})
    with pytest.raises(asyncio.CancelledError):
        await server.app(scope, exchange.receive, fail)
    assert server.runner.open == 0


async def test_slow_readers_slow_the_model() -> None:
    """Generation pauses when the buffer is full."""
    chunks = [*[Chunk(text="x" * 100)] * 5000, Chunk(finish_reason="stop")]
    server = serve_chat(FakeRunner(reply=lambda task: chunks))
    exchange = WatchedExchange([orjson.dumps(BODIES[CHAT])])
    reads = asyncio.Event()

    async def slow(message: dict[str, Any]) -> None:
        await exchange.send(message)
        if message["type"] == "http.response.body":
            await reads.wait()

    scope = request_scope("POST", CHAT, {"content-type": "application/json"})
    task = asyncio.create_task(server.app(scope, exchange.receive, slow))
    await exchange.until(lambda sent: len(sent) == 2)
    await run_loop(2000)
    assert server.runner.produced < 600
    reads.set()
    await task
    assert server.runner.produced == 5001


class RecordingObserver(Observer):
    def __init__(self) -> None:
        self.entries: list[str] = []
        self.reports: list[GenerationReport] = []

    def generated(self, report: GenerationReport) -> None:
        self.reports.append(report)

    def finished(
        self, model: str, task: TaskKind, outcome: str, seconds: float, result: Result | None, surface: str = ""
    ) -> None:
        self.entries.append(outcome)


async def test_counts(caplog: pytest.LogCaptureFixture) -> None:
    """Tokens and model of a stream are in the access log and in the metrics, once."""
    observer = RecordingObserver()
    server = serve_chat(observer=observer)
    for path, body in BODIES.items():
        for stream in (True, False):
            caplog.clear()
            with caplog.at_level(logging.INFO, logger="shoal.access"):
                await server.call("POST", path, {**body, "stream": stream})
            (record,) = [record.__dict__ for record in caplog.records if record.name == "shoal.access"]
            assert (record["model"], record["tokens"], record["completion_tokens"], record["items"]) == (
                MODEL,
                10,
                3,
                1,
            )
    assert observer.entries == ["ok"] * 6
    assert {report.completion_tokens for report in observer.reports} == {3}


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES])
async def test_failures_in_mid_stream_are_logged(path: str, caplog: pytest.LogCaptureFixture) -> None:
    """The status was sent before, so the access log adds the error's kind."""
    error = EngineFailed("broken")
    for runner, kind in ((FakeRunner(error=error, fail_after=1), error.kind), (FakeRunner(), None)):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="shoal.access"):
            assert (await serve_chat(runner).call("POST", path, {**BODIES[path], "stream": True})).status == 200
        (record,) = [record for record in caplog.records if record.name == "shoal.access"]
        assert record.__dict__["status"] == 200
        assert record.__dict__.get("kind") == kind
        assert record.getMessage().endswith(f" and failed: {kind}" if kind else " ms")


@pytest.mark.parametrize(("piece", "start_ms"), [(Chunk(text="x"), 800), (Chunk(tools=[ToolDelta(index=0)]), None)])
def test_a_call_sent_at_once_has_no_rate(piece: Chunk, start_ms: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens were generated before it was sent, so the times say nothing."""
    request = Request(request_scope("POST", CHAT, {}), 0.0)
    events = ChatEvents(AnswerHeader("id", 0, MODEL), request, choices=1, include_usage=False)
    usage = Chunk(usage=Usage(prompt_tokens=7, completion_tokens=40))
    pieces = [piece] * (40 if piece.text else 1)
    times = iter([0.8, 1.0])
    monkeypatch.setattr(events, "_clock", lambda: next(times))
    sent = b"".join(map(events.encode_chunk, [*pieces, Chunk(finish_reason="stop"), usage])) + events.encode_end()
    timings = data_of(sent)[-2]["timings"]
    if start_ms is None:
        assert timings == {"prompt_n": 7, "predicted_n": 40, "cache_n": 0}
    else:
        assert (timings["prompt_ms"], timings["predicted_ms"]) == pytest.approx((start_ms, 1000 - start_ms))


async def test_generations_have_their_own_timeout() -> None:
    """Ten minutes instead of the 30 s of embeddings; the client may set less."""
    server = serve_chat()
    for headers, seconds in (({}, 600.0), ({"x-request-timeout": "5"}, 5.0), ({"x-request-timeout": "9999"}, 600.0)):
        before = asyncio.get_running_loop().time()
        await server.call("POST", CHAT, {"messages": MESSAGES}, headers=headers)
        left = server.runner.contexts[-1].deadline - before
        assert seconds <= left < seconds + 1


TRACES = Path(__file__).parent / "traces"


@pytest.mark.parametrize(
    ("name", "path", "fields"),
    [
        ("chat", CHAT, {}),
        ("chat_usage", CHAT, {"n": 2, "stream_options": {"include_usage": True}}),
        ("chat_logprobs", CHAT, {"logprobs": True, "top_logprobs": 1}),
        ("completions", TEXT, {}),
        ("completions_usage", TEXT, {"logprobs": 1, "stream_options": {"include_usage": True}}),
        ("responses", RESPONSES, {}),
    ],
)
async def test_traces(name: str, path: str, fields: dict[str, Any]) -> None:
    """Whole streams, byte for byte, except for ids and times."""
    answer = await serve_chat().call("POST", path, {**BODIES[path], **fields})
    assert mask(answer.body) == (TRACES / f"{name}.sse").read_text()


def mask(body: bytes) -> str:
    """Replace every id and time with a placeholder."""
    text = re.sub(r"(chatcmpl-|cmpl-|resp_|msg_|rs_|fc_)[0-9a-f]{32}", r"\1ID", body.decode())
    text = re.sub(r'("created(?:_at)?"):\d+', r"\1:TIME", text)
    return re.sub(r'("\w+_(?:ms|per_second)"):[-0-9.e]+', r"\1:MS", text)
