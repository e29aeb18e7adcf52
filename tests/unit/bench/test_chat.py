"""Load on language models against a minimal server, and event parsing against a scripted clock."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import pytest

from shoal.bench.answers import Answer
from shoal.bench.chat import ChatPlan, ChatStreamReader, cpu_s, measure_http, run_level, run_levels


class FakeChatServer:
    """Streams three words and a usage event, or what a test sets; `refuse`: a status to answer instead."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.heads: list[bytes] = []
        self.tail = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":4}}\n\ndata: [DONE]\n\n'
        self.refuse = ""
        self.now = self.peak = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads.append(head)
                if head.startswith(b"GET"):
                    writer.write(whole("200 OK", b'{"data":[{"id":"vectors","tasks":["embed"]},{"id":"first"}]}'))
                    continue
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.requests.append(json.loads(await reader.readexactly(length)))
                self.now += 1
                self.peak = max(self.peak, self.now)
                await self.answer(writer)
                self.now -= 1
        except asyncio.IncompleteReadError:
            pass  # the client disconnected
        finally:
            writer.close()

    async def answer(self, writer: asyncio.StreamWriter) -> None:
        request = self.requests[-1]
        if self.refuse:
            writer.write(whole(self.refuse, b'{"error":{"message":"not now"}}'))
        elif not request["stream"]:
            writer.write(whole("200 OK", b'{"choices":[{"text":"a b"}],"usage":{"completion_tokens":2}}'))
        else:
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            for word in ("", "a", "b", "c"):
                choice = {"delta": {"content": word}} if "messages" in request else {"text": word}
                writer.write(chunked(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"))
                await asyncio.sleep(0)
            writer.write(chunked(self.tail) + b"0\r\n\r\n")


def chunked(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def whole(status: str, body: bytes) -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


@asynccontextmanager
async def run_server() -> AsyncIterator[FakeChatServer]:
    server = FakeChatServer()
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listener.close()
        await listener.wait_closed()


async def test_streams_are_requested_and_timed() -> None:
    """Two levels; requests in flight stay within the limit; prompts differ; the server's token counts are used."""
    async with run_server() as server:
        plan = ChatPlan(concurrency=(1, 3), requests=7, input_tokens=12, output_tokens=5)
        one, three = await measure_http(server.url, plan, key="secret")
    assert (one.concurrency, one.requests, three.concurrency, three.requests) == (1, 7, 3, 7)
    assert not three.errors
    assert three.rows["Output Sequence Length (tokens)"].avg == 4
    assert three.rows["Input Sequence Length (tokens)"].avg == 9
    assert one.rows["Time To First Token (ms)"].max <= one.rows["Request Latency (ms)"].max
    assert server.peak <= 3
    prompts = [body["messages"][0]["content"] for body in server.requests]
    assert len(set(prompts)) == len(prompts) == 15
    assert {len(prompt.split()) for prompt in prompts} == {12}
    assert {(body["model"], body["max_tokens"], body["stream"]) for body in server.requests} == {("first", 5, True)}
    assert all(body["stream_options"] == {"include_usage": True} for body in server.requests)
    assert all(b"authorization: Bearer secret\r\n" in head for head in server.heads)


async def test_the_other_endpoint_whole_answers_and_exact_lengths() -> None:
    """/v1/completions takes a prompt; an answer without streaming has no first token."""
    async with run_server() as server:
        plan = ChatPlan(model="m", requests=2, endpoint="completions", stream=False, exact=True, output_tokens=8)
        (found,) = await measure_http(server.url, plan)
    assert server.heads[0].startswith(b"POST /v1/completions ")
    body = server.requests[0]
    assert (body["model"], body["ignore_eos"], body["min_tokens"]) == ("m", True, 8)
    assert "stream_options" not in body
    assert isinstance(body["prompt"], str)
    assert "Time To First Token (ms)" not in found.rows
    assert found.rows["Output Sequence Length (tokens)"].avg == 2


async def test_a_refusal_at_the_start_ends_with_the_server_s_message() -> None:
    """No load is measured."""
    async with run_server() as server:
        server.refuse = "429 Too Many Requests"
        with pytest.raises(RuntimeError, match=r"429: .*not now"):
            await measure_http(server.url, ChatPlan(model="m"))
    assert len(server.requests) == 1


async def test_an_error_in_mid_stream_is_a_failure() -> None:
    """It counts as its message, although the status is 200."""
    async with run_server() as server:
        server.tail = b'data: {"error":{"message":"out of memory"}}\n\n'
        with pytest.raises(RuntimeError, match=r"in mid-stream: .*out of memory"):
            await measure_http(server.url, ChatPlan(model="m"))


async def test_a_refused_connection_is_an_error() -> None:
    """Before the model is known this is an OSError, and later the reason of a failed answer."""
    with pytest.raises(OSError):
        await measure_http("http://127.0.0.1:9", ChatPlan())
    with pytest.raises(RuntimeError, match="connect: "):
        await measure_http("http://127.0.0.1:9", ChatPlan(model="m"))


def test_every_piece_of_text_is_timed_once() -> None:
    """Roles, finish reasons and usage are not pieces; reasoning is; so is each of two events in one network part."""
    ticks = count(1.0)
    reader = ChatStreamReader(0.0, lambda: next(ticks))
    reader(b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n')
    reader(b'data: {"choices":[{"delta":{"reasoning":"hm"}}]}\n\ndata: {"choices":[{"text":"a"}]}\n\n')
    reader(b'data: {"choices":[{"delta":{"reasoning_content":"hm"}}]}\n\n: ping\n\n')
    reader(b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n')
    assert reader.answer.arrivals == [1.0, 2.0, 3.0]
    assert reader.answer.tokens == 3
    assert not reader.answer.error


@pytest.mark.parametrize("data", [b"data: {nonsense\n\n", b'data: {"choices":3}\n\n'])
def test_unreadable_data_is_an_error(data: bytes) -> None:
    """It is reported, not skipped."""
    reader = ChatStreamReader(0.0)
    reader(data)
    assert reader.answer.error.startswith("unreadable answer")


class ScriptedClient:
    """Answers at once; `wrong`: how many answers fail after the first."""

    def __init__(self, wrong: int = 0) -> None:
        self.wrong = wrong
        self.calls = 0

    async def ask(self, prompt: str) -> Answer:
        self.calls += 1
        return Answer(0.0, 1.0, [0.5, 1.0], error="broken" if 1 < self.calls <= 1 + self.wrong else "")


async def test_the_concurrency_is_kept() -> None:
    """Three callers meet at a barrier for three: fewer would hang, more are counted."""
    gate, now, peak = asyncio.Barrier(3), 0, 0

    class BarrierClient:
        async def ask(self, prompt: str) -> Answer:
            nonlocal now, peak
            now += 1
            peak = max(peak, now)
            await gate.wait()
            now -= 1
            return Answer(0.0, 1.0)

    level_result = await run_level(BarrierClient(), ChatPlan(requests=9), 3, lambda: "a")
    assert (level_result.requests, peak) == (9, 3)


async def test_failures_during_a_run_are_counted() -> None:
    """The run continues; the number of requests is exact, also if it is no multiple of the streams."""
    asks = ScriptedClient(wrong=2)
    (found,) = await run_levels(asks, ChatPlan(requests=10, concurrency=(4,)), seed=1)
    assert (found.requests, found.errors, asks.calls) == (8, {"broken": 2}, 11)


async def test_without_a_number_each_stream_sends_four_requests() -> None:
    """At least twenty requests are sent."""
    plan = ChatPlan()
    asks = ScriptedClient()
    await run_level(asks, plan, 1, lambda: "a")
    assert asks.calls == 20
    await run_level(asks, plan, 10, lambda: "a")
    assert asks.calls == 60


async def test_the_server_s_processor_time_is_reported() -> None:
    """For the given process: this one."""
    (found,) = await run_levels(ScriptedClient(), ChatPlan(server_pid=os.getpid()), seed=1)
    assert found.server_cpu_us is not None
    assert found.server_cpu_us >= 0


def test_a_missing_process_is_an_error() -> None:
    """The error is one line that names the option."""
    assert cpu_s(None) is None
    with pytest.raises(RuntimeError, match="is --server-pid right"):
        cpu_s(2**22 + 1)
