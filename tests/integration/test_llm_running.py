"""A real server during generation: disconnects, slow readers, long silence, and SIGTERM."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.fakes.openai_server import Exchange, FakeUpstream, answer, event
from tests.integration.llm_kit import (
    FAKE,
    MODEL,
    ask,
    encode_request,
    metric,
    read_until,
    running,
    running_beside,
    until,
    upstream_of,
    user_messages,
)
from tests.integration.server_kit import PATIENCE_S, Server

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
NEVER_MS = 3_600_000
LONG = "word " * 1000


def body(text: str = LONG, *, stream: bool = True, model: str = MODEL, **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": user_messages(text), "stream": stream, **fields}


def in_flight(server: Server) -> float:
    return metric(server, "shoal_requests_in_flight")


def cancelled(server: Server) -> float:
    return metric(server, "shoal_cancelled_total", task="generate")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["queued", "silent", "streaming"])
def test_clients_that_disconnect(tmp_path: Path, phase: str, stream: bool) -> None:
    """A request that waits for a slot, for the first token or for more tokens ends soon after its client disconnects;
    it is counted once, and its slot is free for the next one."""
    pace = NEVER_MS if phase == "silent" else 20
    with running(tmp_path, f"{FAKE}token_ms={pace}", flags=("--max-streams", "1")) as server, ExitStack() as stack:
        others = 0
        if phase == "queued":
            holder = stack.enter_context(ask(server, CHAT, body()))
            read_until(holder, b" word")
            others = 1
        leaving = ask(server, CHAT, body(stream=stream))
        until(lambda: in_flight(server) == others + 1)
        if phase == "streaming" and stream:
            read_until(leaving, b'" word"')
        elif phase == "streaming":
            time.sleep(0.2)  # ten tokens or so, none of them visible
        assert cancelled(server) == 0
        leaving.close()
        until(lambda: cancelled(server) == 1)
        assert in_flight(server) == others
        if phase == "queued":  # the other requests are not affected
            read_until(holder, b'" word"')
            holder.close()
        if phase != "silent":
            status, _, _ = server.request("POST", CHAT, body("a b", stream=False))
            assert status == 200
        assert "Traceback" not in server.log.read_text()


async def _silent(exchange: Exchange) -> None:
    await exchange.left()


async def _halfway(exchange: Exchange) -> None:
    """Read the beginning of an answer, streamed or not."""
    if exchange.request.json.get("stream"):
        await exchange.head(content_type="text/event-stream")
        await exchange.piece(event({"model": "up/model", "choices": [{"index": 0, "delta": {"content": " word"}}]}))
    else:
        await exchange.head(length=1000, content_type="application/json")
        await exchange.piece(b'{"model":"up/model","choices":[{"index":0,')
    await exchange.left()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["queued", "silent", "streaming"])
async def test_disconnects_reach_the_upstream(tmp_path: Path, phase: str, stream: bool) -> None:
    """The connection to the upstream closes soon as well; requests still queued were never sent there."""
    async with FakeUpstream() as upstream:
        upstream.on("/chat/completions", answer({"error": {"message": "no messages"}}, 400))
        address = f"{MODEL}=openai+{upstream.base}#up/model"
        async with running_beside(tmp_path, address, flags=("--max-streams", "1")) as server:
            upstream.on("/chat/completions", _silent if phase == "silent" else _halfway)
            before = _count_chats(upstream)
            if phase == "queued":
                _, holder = await _open(server, body())
                request = await upstream.request(before + 1)
            reader, writer = await _open(server, body(stream=stream))
            if phase == "queued":
                await asyncio.to_thread(until, lambda: in_flight(server) == 2)
            else:
                request = await upstream.request(before + 1)
            if phase == "streaming" and stream:
                await reader.readuntil(b" word")
            writer.close()
            async with asyncio.timeout(PATIENCE_S):
                if phase == "queued":
                    await asyncio.to_thread(until, lambda: in_flight(server) == 1)
                else:
                    await request.disconnected.wait()
            assert request.disconnected.is_set() == (phase != "queued")
            await asyncio.to_thread(until, lambda: cancelled(server) == 1)
            if phase == "queued":
                holder.close()
                async with asyncio.timeout(PATIENCE_S):
                    await request.disconnected.wait()
            assert _count_chats(upstream) == before + 1


def _count_chats(upstream: FakeUpstream) -> int:
    return sum(request.path.endswith("/chat/completions") for request in upstream.requests)


async def _open(server: Server, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(encode_request(CHAT, body))
    await writer.drain()
    return reader, writer


def test_cancelling_goes_through_two_servers(tmp_path: Path) -> None:
    """With Shoal in front of Shoal, the last server sees the disconnect soon as well."""
    with ExitStack() as stack:
        behind = stack.enter_context(running(tmp_path, f"{FAKE}token_ms=20"))
        front = stack.enter_context(running(tmp_path, f"far={upstream_of(behind)}"))
        leaving = ask(front, CHAT, body(model="far"))
        read_until(leaving, b'" word"')
        leaving.close()
        until(lambda: cancelled(behind) == 1 and cancelled(front) == 1)
        assert in_flight(behind) == in_flight(front) == 0


def test_many_disconnects_at_once(tmp_path: Path) -> None:
    """Two hundred streams and those queued behind them: all end soon, and the server is idle again."""
    with running(tmp_path, f"{FAKE}token_ms=20", flags=("--max-streams", "50")) as server:
        callers = [ask(server, CHAT, body()) for _ in range(200)]
        until(lambda: in_flight(server) == 200)
        for caller in callers:
            caller.close()
        until(lambda: in_flight(server) == 0)
        assert cancelled(server) == 200
        assert server.request("POST", CHAT, body("a b", stream=False))[0] == 200


def test_streams_in_flight_survive_sigterm(tmp_path: Path) -> None:
    """Requests in flight run to completion, streamed or not, new ones are rejected, and the exit code is 0."""
    text = " ".join(f"w{number}" for number in range(40))
    with running(tmp_path, f"{FAKE}token_ms=40") as server, ThreadPoolExecutor() as pool:
        whole = pool.submit(server.request, "POST", CHAT, body(text, stream=False))
        until(lambda: in_flight(server) == 1)
        streams = [ask(server, CHAT, body(text)) for _ in range(3)]
        for stream in streams:
            read_until(stream, b'" w1"')
        assert in_flight(server) == 4
        server.process.send_signal(signal.SIGTERM)
        until(server.refuses)
        for stream in streams:
            rest = read_until(stream, b"data: [DONE]\n\n")
            stream.close()
            assert b'" w39"' in rest
            assert b'"finish_reason":"stop"' in rest
            assert b'"error"' not in rest
        status, _, reply = whole.result()
        assert (status, json.loads(reply)["choices"][0]["message"]["content"]) == (200, text)
        assert server.exit_code() == 0
        assert "Traceback" not in server.log.read_text()


def test_the_drain_is_bounded(tmp_path: Path) -> None:
    """A long stream is cut off when the drain ends, and not as if it were complete; the process exits by itself."""
    flags = ("--drain-timeout-s", "0.5")
    with running(tmp_path, f"{FAKE}token_ms=50", flags=flags) as server, ask(server, CHAT, body()) as stream:
        read_until(stream, b'" word"')
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_code() == 0
        rest = b""
        while piece := stream.recv(65536):
            rest += piece
        assert b'"finish_reason":"stop"' not in rest
        assert b"\r\n0\r\n\r\n" not in rest or b'"error"' in rest
        assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize("behind", [False, True])
def test_heartbeats(tmp_path: Path, behind: bool) -> None:
    """A silent stream sends heartbeats, from before its first token, between complete events; clients do not see
    them."""
    with ExitStack() as stack:
        flags = ("--heartbeat-s", "0.1")
        server = stack.enter_context(running(tmp_path, f"{FAKE}token_ms=500", flags=() if behind else flags))
        if behind:
            server = stack.enter_context(running(tmp_path, f"{MODEL}={upstream_of(server)}", flags=flags))
        with ask(server, CHAT, body("one two")) as connection:
            received = read_until(connection, b"data: [DONE]\n\n")
        _, _, events = received.partition(b"\r\n\r\n")
        assert events.partition(b"\r\n")[2].startswith(b": ping\n\n")
        assert 3 <= received.count(b": ping\n\n") <= 20
        with ask(server, RESPONSES, {"model": MODEL, "input": "one", "stream": True}) as connection:
            assert b": ping\n\n" in read_until(connection, b"response.completed")
        with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="any") as client:
            messages: Any = user_messages("one two")
            chunks = list(client.chat.completions.create(model=MODEL, messages=messages, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "one two"


def test_a_failure_after_a_heartbeat(tmp_path: Path) -> None:
    """The status is already sent, so the stream carries the error."""
    with (
        running(tmp_path, f"{FAKE}token_ms=300", flags=("--heartbeat-s", "0.1")) as server,
        openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="any") as client,
    ):
        messages: Any = user_messages("poison-item")
        chunks = client.chat.completions.create(model=MODEL, messages=messages, stream=True)
        with pytest.raises(openai.APIError, match="the model failed"):
            list(chunks)


def memory(server: Server) -> int:
    """Resident memory of the process, in bytes."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to see the memory of a process")
@pytest.mark.parametrize("behind", [False, True])
def test_slow_readers(tmp_path: Path, behind: bool) -> None:
    """A client that does not read pauses the model and fills no memory, here or in the upstream; other clients are
    served meanwhile, and once it reads it gets the complete answer."""
    word, count = "x" * 20_000, 5000  # 100 MB
    with ExitStack() as stack:
        servers = [stack.enter_context(running(tmp_path, FAKE))]
        if behind:
            servers.append(stack.enter_context(running(tmp_path, f"{MODEL}={upstream_of(servers[0])}")))
        front = servers[-1]
        for server in servers:  # memory that the first large request loads or reserves is no buffer of this stream
            server.request("POST", CHAT, body(word, stream=False, min_tokens=100, max_tokens=100))
        before = [memory(server) for server in servers]
        connection = stack.enter_context(ask(front, CHAT, body(word, min_tokens=count, max_tokens=count)))
        connection.settimeout(60)
        quiet(lambda: metric(servers[0], "process_cpu_seconds_total"))
        grown = [memory(server) - bytes_before for server, bytes_before in zip(servers, before, strict=True)]
        assert max(grown) < 30e6, grown
        assert [in_flight(server) for server in servers] == [1] * len(servers)
        assert front.request("POST", CHAT, body("a b", stream=False))[0] == 200
        size = 0
        tail = b""
        while b"data: [DONE]" not in tail:
            piece = connection.recv(1 << 20)
            assert piece
            size += len(piece)
            tail = (tail + piece)[-100:]
        assert size > len(word) * count


def quiet(value: Callable[[], float]) -> None:
    """Return once a value has hardly changed for a second."""
    last = value()
    while True:
        time.sleep(1)
        now = value()
        if now - last < 0.1:
            return
        last = now
