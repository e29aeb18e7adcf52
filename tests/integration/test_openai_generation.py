"""OpenAI's own client against its own server, whose model repeats its input."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.integration.server_kit import Server, ShoalServer, wait_until

MESSAGE: Any = {"role": "user", "content": "one two three"}
CALL = '<tool_call> {"name": "add", "arguments": {"a": 1, "b": [2]}} </tool_call>'
ADD: Any = {
    "type": "function",
    "function": {"name": "add", "description": "Adds", "parameters": {"type": "object", "properties": {}}},
}

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def server(shared_server: ShoalServer) -> Server:
    return shared_server(["fake:token_ms=1"], "--tool-call-parser", "hermes", "--heartbeat-s", "0.2")


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat(client: openai.OpenAI) -> None:
    """Complete and streamed answers agree, with usage, logprobs and several choices."""
    whole = client.chat.completions.create(model="fake", messages=[MESSAGE], n=2, logprobs=True, top_logprobs=2)
    assert [choice.message.content for choice in whole.choices] == ["one two three"] * 2
    assert {choice.finish_reason for choice in whole.choices} == {"stop"}
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (3, 6)
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [token.token for token in logprobs.content] == ["one", " two", " three"]
    assert len(logprobs.content[0].top_logprobs) == 2
    chunks = list(
        client.chat.completions.create(
            model="fake",
            messages=[MESSAGE],
            n=2,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    for index in range(2):
        own = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert "".join(choice.delta.content or "" for choice in own) == "one two three"
        assert own[0].delta.role == "assistant"
        assert [choice.finish_reason for choice in own if choice.finish_reason] == ["stop"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert {chunk.usage for chunk in chunks[:-1]} == {None}


def test_length_and_stop(client: openai.OpenAI) -> None:
    """An answer ends at the length limit or at a stop text, with the matching finish reason."""
    cut = client.chat.completions.create(model="fake", messages=[MESSAGE], max_completion_tokens=2)
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("one two", "length")
    stopped = client.chat.completions.create(model="fake", messages=[MESSAGE], stop=[" th"])
    assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == ("one two", "stop")


def test_tools(client: openai.OpenAI) -> None:
    """A call that the model writes becomes a tool call, complete and joined from its fragments."""
    request: Any = {"role": "user", "content": CALL}
    whole = client.chat.completions.create(model="fake", messages=[request], tools=[ADD])
    (call,) = whole.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, whole.choices[0].finish_reason) == ("add", "tool_calls")
    assert whole.choices[0].message.content is None
    with client.chat.completions.stream(model="fake", messages=[request], tools=[ADD]) as stream:
        final = stream.get_final_completion()
    (streamed,) = final.choices[0].message.tool_calls or []
    assert (streamed.function.name, streamed.function.arguments) == ("add", call.function.arguments)


def test_completions(client: openai.OpenAI) -> None:
    """Several prompts, echo, or logprobs and best_of; streamed too."""
    echoed = client.completions.create(model="fake", prompt=["a b", "c"], echo=True, max_tokens=5)
    assert [(choice.index, choice.text) for choice in echoed.choices] == [(0, "a ba b"), (1, "cc")]
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="fake", prompt="a b", echo=True, logprobs=1)
    assert caught.value.param == "logprobs"
    whole = client.completions.create(model="fake", prompt=["a b", "c"], logprobs=1, best_of=2, max_tokens=5)
    assert whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.tokens == ["a", " b"]
    pieces = client.completions.create(model="fake", prompt="a b c", stream=True, max_tokens=2)
    choices = [choice for piece in pieces for choice in piece.choices]
    assert "".join(choice.text for choice in choices) == "a b"
    assert choices[-1].finish_reason == "length"


def test_responses(client: openai.OpenAI) -> None:
    """Texts and calls, complete and accumulated by the client from the typed events."""
    whole = client.responses.create(model="fake", input="one two")
    assert (whole.output_text, whole.status) == ("one two", "completed")
    assert whole.usage is not None
    assert whole.usage.total_tokens == 4
    with client.responses.stream(model="fake", input="one two three") as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert ("".join(deltas), final.output_text) == ("one two three", "one two three")
    function: Any = {"type": "function", **ADD["function"]}
    with client.responses.stream(model="fake", input=CALL, tools=[function]) as stream:
        final_call = stream.get_final_response().output[-1]
    assert final_call.type == "function_call"
    assert final_call.name == "add"
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="fake", input="x", previous_response_id="resp_1")
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "invalid_value")


def test_errors(client: openai.OpenAI) -> None:
    """Each raises the client's own exception, before the stream and in the middle of it; the server keeps serving."""
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="nobody", messages=[MESSAGE])
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="fake", messages=[MESSAGE], temperature=3)
    assert wrong.value.param == "temperature"
    refused: Any = {"role": "user", "content": "reject-item"}
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="fake", messages=[refused], stream=True)
    poisoned: Any = {"role": "user", "content": "one poison-item"}
    stream = client.chat.completions.create(model="fake", messages=[poisoned], stream=True)
    with pytest.raises(openai.APIError, match="failed"):
        list(stream)
    assert client.chat.completions.create(model="fake", messages=[MESSAGE]).choices


def test_leaving_in_mid_stream(client: openai.OpenAI, server: Server) -> None:
    """Generation stops with its reader: nothing stays in flight, and the disconnect is counted."""
    long: Any = {"role": "user", "content": "word " * 2000}
    stream = client.chat.completions.create(model="fake", messages=[long], stream=True)
    next(iter(stream))
    stream.close()
    wait_until(lambda: " 499 " in server.log.read_text(), server.process, server.log)
    metrics = server.request("GET", "/metrics")[2].decode()
    assert [line for line in metrics.splitlines() if line.startswith("shoal_requests_in_flight")]
    assert all(line.endswith(" 0.0") for line in metrics.splitlines() if line.startswith("shoal_requests_in_flight{"))


def test_heartbeats(shoal_server: ShoalServer) -> None:
    """A model with a slow first token sends heartbeats for proxies; clients skip them."""
    server = shoal_server(["fake:token_ms=600"], "--heartbeat-s", "0.2")
    body = {"messages": [{"role": "user", "content": "one"}], "stream": True}
    status, headers, raw = server.request("POST", "/v1/chat/completions", body)
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert raw.startswith(b": ping\n\n")
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none") as client:
        chunks = list(client.chat.completions.create(model="fake", messages=[MESSAGE], stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "one two three"


def test_later_instructions(shoal_server: ShoalServer, tmp_path: Path) -> None:
    """In every dialect, for a template that accepts instructions in the first message alone."""
    template = tmp_path / "strict.jinja"
    template.write_text(
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
        "<{{ m.role }}> {{ m.content }} {% endfor %}"
    )
    server = shoal_server(["fake:"], "--chat-template", str(template))
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for path, field, role in (
        ("/v1/chat/completions", "messages", "developer"),
        ("/v1/responses", "input", "developer"),
        ("/v1/messages", "messages", "system"),
    ):
        later = [{"role": role, "content": "c"}, {"role": "user", "content": "d"}]
        status, _, answer = server.request("POST", path, {"model": "fake", field: turns + later})
        assert status == 200, answer
        assert b"<user> a <assistant> b <user> <system> c </system> d" in answer.replace(rb"\n", b" ")
