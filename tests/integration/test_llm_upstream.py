"""Shoal in front of Shoal, and in front of a server that records its requests: what passes through, and the errors that
clients get when the upstream dies. All run in their own processes."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.fakes.openai_server import DONE, FakeUpstream, answer, event, stream
from tests.integration.llm_kit import (
    FAKE,
    MODEL,
    ask,
    free_port,
    metric,
    read_until,
    running,
    running_beside,
    until,
    upstream_of,
    user_messages,
)
from tests.integration.server_kit import Server

FAR = "far"
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
TRICKY = 'the "model":"talker" is {"model": "talker"} été \U0001f41f'
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": user_messages(TRICKY), "n": 2, "logprobs": True},
    TEXT: {"prompt": [TRICKY, "b"], "echo": True},
    RESPONSES: {"input": TRICKY, "instructions": "no"},
}
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """(front server for clients, server with the model)."""
    folder = tmp_path_factory.mktemp("pair")
    with ExitStack() as stack:
        behind = stack.enter_context(running(folder, FAKE, flags=("--tool-call-parser", "hermes")))
        yield stack.enter_context(running(folder, f"{FAR}={upstream_of(behind)}")), behind


@pytest.fixture
def client(pair: tuple[Server, Server]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{pair[0].base_url}/v1", api_key="any", max_retries=0) as client:
        yield client


def test_everything_passes_through(client: openai.OpenAI) -> None:
    """Every generation API, streamed and not, under the name served here."""
    messages: Any = user_messages("one two three")
    chat = client.chat.completions.create(model=FAR, messages=messages, n=2, stop="three")
    assert [choice.message.content for choice in chat.choices] == ["one two "] * 2
    assert chat.model == FAR
    chunks = list(client.chat.completions.create(model=FAR, messages=messages, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "one two three"
    assert {chunk.model for chunk in chunks} == {FAR}
    called: Any = user_messages('<tool_call> {"name": "add", "arguments": {"a": 1}} </tool_call>')
    with client.chat.completions.stream(model=FAR, messages=called, tools=[ADD]) as helper:
        calls = helper.get_final_completion().choices[0].message.tool_calls
    assert calls is not None
    assert [(call.function.name, call.function.arguments) for call in calls] == [("add", '{"a": 1}')]
    assert client.completions.create(model=FAR, prompt="a b", echo=True).choices[0].text == "a ba b"
    assert client.responses.create(model=FAR, input="a b").output_text == "a b"
    with client.responses.stream(model=FAR, input="a b") as items:
        assert items.get_final_response().output_text == "a b"
    embedded = client.embeddings.create(model=FAR, input=["a", "b"])
    assert (embedded.model, [len(each.embedding) for each in embedded.data]) == (FAR, [32, 32])
    assert next(iter(client.models.list())).id == FAR


def mask_ids_and_times(body: bytes) -> str:
    """Replace every id, time and duration by its kind."""
    text = re.sub(r"(chatcmpl-|cmpl-|resp_|msg_|rs_|fc_|call_)[0-9a-f]{24,32}", r"\1ID", body.decode())
    text = re.sub(r'("(?:created|created_at|completed_at)"):\d+', r"\1:TIME", text)
    return re.sub(r'("\w+_(?:ms|per_second)"):[-0-9.e]+', r"\1:MS", text)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_bytes_stay_as_they_are(pair: tuple[Server, Server], path: str, streams: bool) -> None:
    """Answers and events are the upstream's, byte for byte, except for the model's name in its field; text that looks
    like that field is unchanged."""
    front, behind = pair
    body = {**BODIES[path], "stream": streams}
    if streams and path == CHAT:
        body["stream_options"] = {"include_usage": True}
    status, headers, content = front.request("POST", path, {"model": FAR, **body})
    _, own, expected = behind.request("POST", path, {"model": MODEL, **body})
    assert (status, headers["content-type"]) == (200, own["content-type"])
    assert f'"model":"{FAR}"'.encode() in content
    assert mask_ids_and_times(content).replace(f'"model":"{FAR}"', f'"model":"{MODEL}"') == mask_ids_and_times(expected)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"messages": user_messages("reject-item")},
        {"messages": user_messages("poison-item")},
        {"messages": user_messages("a"), "response_format": {"type": "json_object"}},
    ],
)
def test_refusals_stay_as_they_are(pair: tuple[Server, Server], fields: dict[str, Any], streams: bool) -> None:
    """Status and body of the upstream's errors are unchanged, also for a stream that never began."""
    front, behind = pair
    status, headers, content = front.request("POST", CHAT, {"model": FAR, "stream": streams, **fields})
    own_status, _, own = behind.request("POST", CHAT, {"model": MODEL, "stream": streams, **fields})
    assert status == own_status >= 400
    assert (headers["content-type"], content) == ("application/json", own)


EXACT = {
    "temperature": "0.10",
    "seed": "7",
    "top_k": "40",
    "some_new_field": '{"b" : [1.50, 1e-3, 12345678901234567890123, null],  "a":"\\u00e9\\/"}',
    "cache_salt": '"x"',
    "messages": '[ {"role":"user","content":"hi","name_of_tomorrow":{"deep":[true]}} ]',
    "logit_bias": '{"50256": -100}',
    "stream": "true",
    "stream_options": '{"include_usage":true,"continuous_usage_stats":true}',
}
EVENTS = [
    event({"id": "c1", "object": "chat.completion.chunk", "model": "up/model", "new": 1.0, "choices": [{"index": 0}]}),
    b'data: {"choices" : [ ] , "model" : "up/model","usage":{"prompt_tokens":4,"completion_tokens":2}}\r\n\r\n',
]


async def test_unknown_fields_pass_through(tmp_path: Path) -> None:
    """Every value reaches the server with the bytes that the client wrote; its events return unchanged as well."""
    async with FakeUpstream() as upstream:
        upstream.on("/chat/completions", answer({"error": {"message": "no messages"}}, 400))
        async with running_beside(tmp_path, f"{FAR}=openai+{upstream.base}#up/model") as front:
            upstream.on("/chat/completions", stream(b": ping\n\n", *EVENTS, DONE))
            fields = ",".join(f'"{name}":{value}' for name, value in EXACT.items())
            body = f'{{"model":"{FAR}",{fields}}}'.encode()
            content = await asyncio.to_thread(read_stream, front, body)
            received = await upstream.request(2)
            assert received.json["model"] == "up/model"
            for name, value in EXACT.items():
                assert f'"{name}":{value}'.encode() in received.body, received.body
            assert len(received.json) == len(EXACT) + 1
    for each in EVENTS:
        assert each.replace(b'"up/model"', b'"far"') in content, content


def read_stream(server: Server, body: bytes) -> bytes:
    """Return the complete response to a streaming request."""
    with ask(server, CHAT, body) as connection:
        return read_until(connection, b"0\r\n\r\n")


def test_a_server_that_dies_in_mid_stream(tmp_path: Path) -> None:
    """After a SIGKILL, the stream carries an error and ends without [DONE]; the next requests fail, soon by readiness;
    model lists keep working; and once the server is back, so is the model."""
    with ExitStack() as stack:
        behind = stack.enter_context(running(tmp_path, f"{FAKE}token_ms=30"))
        front = stack.enter_context(running(tmp_path, f"{FAR}={upstream_of(behind)}"))
        body = {"model": FAR, "messages": user_messages("word " * 2000), "stream": True}
        with ask(front, CHAT, body) as connection:
            read_until(connection, b'"content":" word"')
            behind.process.kill()
            rest = read_until(connection, b"0\r\n\r\n")
        *_, error = [line for line in rest.split(b"\n") if line.startswith(b"data: ")]
        assert json.loads(error.removeprefix(b"data: "))["error"]["message"]
        assert b'"finish_reason":"stop"' not in rest
        status, headers, refused = front.request("POST", CHAT, {"model": FAR, "messages": user_messages("a")})
        assert (status, headers["content-type"]) == (502, "application/json")
        assert set(json.loads(refused)["error"]) == {"message", "type", "param", "code"}
        until(lambda: not front.ready())
        assert list_models(front) == [FAR]
        stack.enter_context(running(tmp_path, FAKE, port=behind.port))
        until(front.ready)
        assert front.request("POST", CHAT, {"model": FAR, "messages": user_messages("a")})[0] == 200


def list_models(server: Server) -> list[str]:
    status, _, body = server.request("GET", "/v1/models")
    assert status == 200
    return [entry["id"] for entry in json.loads(body)["data"]]


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    """Shoal starts, reports that it is not ready, lists the model, and rejects requests at once with the reason; it
    serves as soon as the server is up."""
    port = free_port()
    with ExitStack() as stack:
        address = f"openai+http://127.0.0.1:{port}/v1#{MODEL}"
        front = stack.enter_context(running(tmp_path, f"{FAR}={address}", wait=False))
        assert front.request("GET", "/health/ready")[0] == 503
        assert front.request("GET", "/health/live")[0] == 200
        assert list_models(front) == [FAR]
        for streams in (False, True):
            body = {"model": FAR, "messages": user_messages("a"), "stream": streams}
            status, headers, refused = front.request("POST", CHAT, body)
            assert (status, headers["content-type"]) == (503, "application/json")
            assert float(headers["retry-after"]) > 0
            assert "is not reachable" in json.loads(refused)["error"]["message"]
            assert str(port).encode() not in refused
        stack.enter_context(running(tmp_path, FAKE, port=port))
        until(front.ready)
        assert front.request("POST", CHAT, {"model": FAR, "messages": user_messages("a")})[0] == 200


def test_a_server_that_accepts_no_connection(tmp_path: Path) -> None:
    """If the port accepts no connection, as behind a firewall, the error comes after the connect timeout."""
    with ExitStack() as stack:
        behind = stack.enter_context(running(tmp_path, FAKE))
        flags = ("--connect-timeout-s", "0.5")
        front = stack.enter_context(running(tmp_path, f"{FAR}={upstream_of(behind)}", flags=flags))
        behind.process.kill()
        behind.process.wait()
        full = stack.enter_context(socket.create_server(("127.0.0.1", behind.port), backlog=0))
        stack.enter_context(socket.create_connection(full.getsockname()))
        until(lambda: not takes_connections(behind.port))
        status, headers, _ = front.request("POST", CHAT, {"model": FAR, "messages": user_messages("a")})
        assert (status, headers["content-type"]) == (502, "application/json")
        assert list_models(front) == [FAR]


def takes_connections(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=0.1).close()
    except TimeoutError:
        return False
    return True


def test_one_of_two_servers_dies_under_load(tmp_path: Path) -> None:
    """Only non-streaming requests that the dead server was computing fail; no later one does."""
    callers = 8
    with ExitStack() as stack:
        doomed, other = (stack.enter_context(running(tmp_path / name, f"{FAKE}token_ms=5")) for name in "ab")
        front = stack.enter_context(running(tmp_path, f"{FAR}={upstream_of(doomed)},{upstream_of(other)}"))
        body = {"model": FAR, "messages": user_messages("one two three four")}
        outcomes: list[tuple[float, int]] = []
        stop = threading.Event()

        def call() -> None:
            while not stop.is_set():
                start = time.monotonic()
                status = front.request("POST", CHAT, body)[0]
                outcomes.append((start, status))

        with ThreadPoolExecutor(callers) as pool:
            threads = [pool.submit(call) for _ in range(callers)]
            try:
                until(lambda: len(outcomes) >= 50)
                doomed.process.send_signal(signal.SIGKILL)
                doomed.process.wait()
                dead = time.monotonic()
                until(lambda: sum(start > dead for start, _ in outcomes) >= 200)
            finally:
                stop.set()
            for thread in threads:
                thread.result()
        failed = [(start - dead, status) for start, status in outcomes if status != 200]
        assert len(failed) <= callers
        assert all(since < 0 and status == 502 for since, status in failed), failed
        assert front.ready()


def test_one_of_two_servers_is_found_dead(tmp_path: Path) -> None:
    """Before the failure is detected, the other server answers requests routed to the dead one, streamed or not."""
    with ExitStack() as stack:
        doomed, other = (stack.enter_context(running(tmp_path / name, FAKE)) for name in "ab")
        front = stack.enter_context(running(tmp_path, f"{FAR}={upstream_of(doomed)},{upstream_of(other)}"))
        body = {"model": FAR, "messages": user_messages("one two")}
        for server in (doomed, other):  # both are used in turn, and connections to both stay open
            until(partial(send_and_check, front, server, body))
        doomed.process.kill()
        doomed.process.wait()
        for number in range(6):
            status, _, answer_to_it = front.request("POST", CHAT, {**body, "stream": number % 3 == 0})
            assert status == 200, answer_to_it
            assert b'"error"' not in answer_to_it


def send_and_check(front: Server, server: Server, body: dict[str, Any]) -> bool:
    """Send one request; return whether that server has answered any."""
    assert front.request("POST", CHAT, body)[0] == 200
    return metric(server, "shoal_requests_total", task="generate", outcome="ok") >= 1
