"""Requests of Anthropic's Messages: passed on to servers that speak it, converted for others."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from shoal.backends.openai.answers import parse_usage
from shoal.backends.openai.runner import LACKING_S, UpstreamOptions, UpstreamRunner
from shoal.core.generation.affinity import estimate_demand
from shoal.errors import TransportFailed, UpstreamRefused
from shoal.types import Generate, Sampling, Usage
from tests.fakes.openai_server import Exchange, FakeUpstream, Script, answer, event, stream
from tests.unit.backends.openai.kit import USAGE, chunks_of, context, make_task, passed_on, runner_of, typed

BODY = rb'{"model":"mine","max_tokens":9,"messages":[ ],"thinking":{"type": "adaptive"},"future":1.50}'
COUNT = "/messages/count_tokens"


def asking(**fields: Any) -> Generate:
    return make_task({"model": "mine", "messages": [], **fields}, dialect="anthropic.messages")


def named(data: dict[str, Any]) -> bytes:
    return f"event: {data['type']}\n".encode() + event(data)


START = named(
    {"type": "message_start", "message": {"model": "up/model", "usage": {"input_tokens": 3, "output_tokens": 1}}}
)
TEXT = named({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a message_stop"}})
LAST = named({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 6}})
STOP = named({"type": "message_stop"})


@pytest.fixture
async def server() -> AsyncIterator[FakeUpstream]:
    async with FakeUpstream() as made:
        yield made


@pytest.fixture
async def runner(server: FakeUpstream) -> AsyncIterator[UpstreamRunner]:
    made = runner_of(server)
    yield made
    await made.aclose()


async def test_the_body_goes_on_byte_for_byte(server: FakeUpstream, runner: UpstreamRunner) -> None:
    """And so does the answer, but for the model's name; input from a cache is input, too."""
    counts = {"input_tokens": 3, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 5, "output_tokens": 6}
    server.on("/messages", answer({"type": "message", "model": "up/model", "content": [], "usage": counts}))
    (chunk,) = await chunks_of(runner, make_task(BODY, dialect="anthropic.messages"))
    assert server.requests[0].body == BODY.replace(b'"mine"', b'"up/model"')
    assert chunk.raw is not None
    assert chunk.raw[0] == "anthropic.messages"
    assert chunk.raw[1].startswith(b'{"type": "message", "model": "mine"')
    assert chunk.usage == Usage(prompt_tokens=12, completion_tokens=6, cached_tokens=4)


async def test_a_stream(server: FakeUpstream, runner: UpstreamRunner) -> None:
    """It ends with `message_stop`; the first event has the input tokens, a later one the output tokens."""
    server.on("/messages", stream(START, named({"type": "ping"}), TEXT, LAST, STOP))
    chunks = await chunks_of(runner, asking(stream=True))
    assert passed_on(chunks) == (START + named({"type": "ping"}) + TEXT + LAST + STOP).replace(b"up/model", b"mine")
    assert chunks[-1].usage == Usage(prompt_tokens=3, completion_tokens=6)


async def test_a_stream_that_breaks(server: FakeUpstream, runner: UpstreamRunner) -> None:
    server.on("/messages", stream(START, TEXT))
    with pytest.raises(TransportFailed):
        await chunks_of(runner, asking(stream=True))


async def test_an_error_in_the_stream(server: FakeUpstream, runner: UpstreamRunner) -> None:
    detail = {"type": "overloaded_error", "message": "busy"}
    server.on("/messages", stream(START, named({"type": "error", "error": detail})))
    with pytest.raises(UpstreamRefused, match="busy"):
        await chunks_of(runner, asking(stream=True))


LITERAL = "Input should be 'user' or 'assistant'"


@pytest.mark.parametrize(
    "refusal",
    [
        answer({"detail": "Not Found"}, 404),
        answer({"detail": "Method Not Allowed"}, 405),
        answer({"error": {"message": f"1 validation error: {LITERAL}", "code": 400}}, 400),
        answer({"detail": [{"loc": ["body", "messages", 1, "role"], "msg": LITERAL, "input": "system"}]}, 422),
    ],
)
async def test_a_server_without_the_route(server: FakeUpstream, runner: UpstreamRunner, refusal: Script) -> None:
    """It gets the task as chat, and the next one at once. So does one that knows no system messages in a
    conversation."""
    server.on("/messages", refusal)
    choice = {"message": {"content": "hey"}, "finish_reason": "stop", "stop_reason": "END"}
    server.on("/chat/completions", answer({"choices": [choice], "usage": USAGE}))
    for _ in range(2):
        chunks = await chunks_of(runner, asking(messages=[{"role": "system", "content": "be brief"}]))
        assert [chunk.text for chunk in chunks][:1] == ["hey"]
        assert [chunk.stop for chunk in chunks if chunk.finish_reason] == ["END"]
    paths = [request.path for request in server.requests]
    assert paths == ["/v1/messages", "/v1/chat/completions", "/v1/chat/completions"]


@pytest.mark.parametrize(("field", "value", "stop"), [("stop_reason", 7, ""), ("matched_stop", "END", "END")])
async def test_what_ended_an_answer(
    server: FakeUpstream, runner: UpstreamRunner, field: str, value: Any, stop: str
) -> None:
    """vLLM and SGLang say which stop text did; the id of a token is none."""
    pieces = [event({"choices": [{"delta": {"content": "a"}, "finish_reason": "stop", field: value}]})]
    server.on("/chat/completions", stream(*pieces))
    chunks = await chunks_of(runner, typed(sampling=Sampling(stop=["END"])))
    assert [chunk.stop for chunk in chunks if chunk.finish_reason] == [stop]


async def test_a_server_with_another_name_for_the_length(
    server: FakeUpstream, runner: UpstreamRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets the task again, and the next ones at once, for a time: another may take its place. Chats that are passed
    on keep their fields."""
    words = "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
    refusal = answer({"error": {"message": words, "param": "max_tokens", "code": "unsupported_parameter"}}, 400)
    reply = answer({"choices": [{"message": {"content": "a"}}]})

    async def choose(exchange: Exchange) -> None:
        await (refusal if "max_tokens" in exchange.request.json else reply)(exchange)

    server.on("/chat/completions", choose)
    task = typed(sampling=Sampling(max_tokens=3), stream=False)
    for _ in range(2):
        assert (await chunks_of(runner, task))[0].text == "a"
    with pytest.raises(UpstreamRefused):
        await chunks_of(runner, make_task({"model": "mine", "messages": [], "max_tokens": 3}))
    sent = [[name for name in request.json if "max" in name] for request in server.requests]
    assert sent == [["max_tokens"], ["max_completion_tokens"], ["max_completion_tokens"], ["max_tokens"]]
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + LACKING_S)
    await chunks_of(runner, task, context())
    assert [name for name in server.requests[4].json if "max" in name] == ["max_tokens"]


async def test_a_server_that_takes_no_length(server: FakeUpstream, runner: UpstreamRunner) -> None:
    """Or quotes these words of a client: the next task has the usual name again."""
    error = {"message": "'max_tokens' is not supported; use 'max_completion_tokens'"}
    server.on("/chat/completions", answer({"error": error}, 400))
    for _ in range(2):
        with pytest.raises(UpstreamRefused, match="not supported"):
            await chunks_of(runner, typed(sampling=Sampling(max_tokens=3)))
    sent = [[name for name in request.json if "max" in name] for request in server.requests]
    assert sent == [["max_tokens"], ["max_completion_tokens"]] * 2


async def test_an_unknown_model_is_another_matter(server: FakeUpstream, runner: UpstreamRunner) -> None:
    detail = {"type": "not_found_error", "message": "The model `up/model` does not exist."}
    server.on("/messages", answer({"type": "error", "error": detail}, 404))
    with pytest.raises(UpstreamRefused):
        await chunks_of(runner, asking())


async def test_other_refusals_are_passed_on(server: FakeUpstream, runner: UpstreamRunner) -> None:
    server.on("/messages", answer({"type": "error", "error": {"type": "invalid_request_error", "message": "x"}}, 400))
    for _ in range(2):
        with pytest.raises(UpstreamRefused, match="x"):
            await chunks_of(runner, asking())
    assert [request.path for request in server.requests] == ["/v1/messages"] * 2


async def test_tokens_are_counted_by_the_server(server: FakeUpstream) -> None:
    runner = runner_of(server, options=UpstreamOptions(strip=frozenset({"future"}), defaults={"top_k": 4}))
    server.on(COUNT, answer({"input_tokens": 42}))
    assert await runner.count_tokens(asking(future=1), context()) == 42
    assert server.requests[0].json == {"model": "up/model", "messages": []}
    await runner.aclose()


async def test_tokens_are_estimated_elsewhere(server: FakeUpstream, runner: UpstreamRunner) -> None:
    """The route is tried once."""
    for _ in range(2):
        assert await runner.count_tokens(asking(), context()) == 1
    assert [request.path for request in server.requests] == [f"/v1{COUNT}"]
    assert await runner.count_tokens(typed(), context()) == 1


async def test_a_count_that_is_none(server: FakeUpstream, runner: UpstreamRunner) -> None:
    server.on(COUNT, answer([1]))
    with pytest.raises(UpstreamRefused, match="no count of tokens"):
        await runner.count_tokens(asking(), context())


def test_the_usage_of_several_events() -> None:
    """A count that an event lacks is that of the event before it."""
    first = parse_usage(b'{"message":{"usage":{"input_tokens":3,"cache_read_input_tokens":2}}}')
    assert first == Usage(prompt_tokens=5, cached_tokens=2)
    assert parse_usage(b'{"usage":{"output_tokens":6}}', first) == Usage(
        prompt_tokens=5, completion_tokens=6, cached_tokens=2
    )


def test_the_session_is_in_the_metadata() -> None:
    """Where others say `user`; of OpenAI's fields, metadata says nothing about sessions."""
    user = {"user_id": "somebody"}
    keys = [estimate_demand(asking(metadata=metadata), context(), "session").key for metadata in (user, user, None)]
    assert keys[0] == keys[1] != b""
    assert keys[2] == b""
    assert estimate_demand(make_task({"model": "mine", "metadata": user}), context(), "session").key == b""
