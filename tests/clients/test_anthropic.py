"""Anthropic's Python client."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, TextBlock, ThinkingBlock, ToolUseBlock

from tests.fakes.openai_server import Exchange, FakeUpstream, answer
from tests.integration.llm_kit import FAKE, MODEL, running
from tests.integration.server_kit import Server

CALLED = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": [2, "x y"]}}</tool_call>'
ADD: Any = {"name": "add", "description": "Adds", "input_schema": {"type": "object", "properties": {}}}
SEEN = {"choices": [{"message": {"content": "a fish"}, "finish_reason": "stop"}], "usage": {"prompt_tokens": 9}}
THINKING: Any = {"type": "enabled", "budget_tokens": 1024}


@pytest.fixture
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.base_url, api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(server: Server) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=server.base_url, api_key="any", max_retries=0) as client:
        yield client


def ask(content: Any = "one two three", **fields: Any) -> Any:
    return {"model": MODEL, "max_tokens": 64, "messages": [{"role": "user", "content": content}], **fields}


def check_answer(message: Message) -> None:
    assert [(block.type, getattr(block, "text", None)) for block in message.content] == [("text", "one two three")]
    assert (message.role, message.model, message.stop_reason) == ("assistant", MODEL, "end_turn")
    assert (message.usage.input_tokens, message.usage.output_tokens) == (3, 3)


def check_call(message: Message) -> None:
    """Thinking, a text and a call."""
    thought, said, call = message.content
    assert isinstance(thought, ThinkingBlock)
    assert isinstance(said, TextBlock)
    assert isinstance(call, ToolUseBlock)
    assert (thought.thinking, said.text.strip(), call.name) == ("so", "Adding.", "add")
    assert call.input == {"a": 1, "b": [2, "x y"]}
    assert thought.signature
    assert message.stop_reason == "tool_use"


def test_a_message(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**ask(), extra_body={"temperature": 0.5}, metadata={"user_id": "somebody"})
    check_answer(message)
    assert message._request_id


def test_a_stream(client: anthropic.Anthropic) -> None:
    """The helper's texts, and the message that it rebuilds."""
    with client.messages.stream(**ask()) as stream:
        assert "".join(stream.text_stream) == "one two three"
        check_answer(stream.get_final_message())


def test_raw_events(client: anthropic.Anthropic) -> None:
    events = [event.type for event in client.messages.create(**ask(), stream=True)]
    assert (events[:2], events[-3:]) == (
        ["message_start", "content_block_start"],
        ["content_block_stop", "message_delta", "message_stop"],
    )


def test_tools_and_thinking(client: anthropic.Anthropic) -> None:
    """As a whole and as a stream; the results go back and are read."""
    asked = ask(f"<think>so</think>Adding.{CALLED}", tools=[ADD], thinking=THINKING)
    message = client.messages.create(**asked)
    check_call(message)
    with client.messages.stream(**asked) as stream:
        check_call(stream.get_final_message())
    result: Any = {"type": "tool_result", "tool_use_id": message.content[-1].to_dict()["id"], "content": "three"}
    turns: Any = [
        *asked["messages"],
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    check = client.messages.create(**{**asked, "messages": turns})
    assert isinstance(check.content[0], TextBlock)
    assert check.content[0].text == "three"


def test_stops(client: anthropic.Anthropic) -> None:
    """A stop sequence is named; a length ends an answer, too."""
    message = client.messages.create(**ask("one two three"), stop_sequences=["three"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "three")
    assert client.messages.create(**{**ask(), "max_tokens": 2}).stop_reason == "max_tokens"


def test_a_count_of_tokens(client: anthropic.Anthropic) -> None:
    asked = ask()
    assert client.messages.count_tokens(model=MODEL, messages=asked["messages"]).input_tokens == 3


def test_models(client: anthropic.Anthropic) -> None:
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).display_name == MODEL


def test_images(client: anthropic.Anthropic) -> None:
    """A model that reads none refuses them."""
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(b"\x89PNG").decode()}
    with pytest.raises(anthropic.BadRequestError, match="does not accept images"):
        client.messages.create(**ask([{"type": "image", "source": source}, {"type": "text", "text": "?"}]))


def test_errors(client: anthropic.Anthropic) -> None:
    """Each is the client's own class, with the message and the request's id."""
    with pytest.raises(anthropic.NotFoundError, match="talker") as caught:
        client.messages.create(**{**ask(), "model": "none"})
    assert caught.value.request_id
    assert caught.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match=">= 1"):
        client.messages.create(**{**ask(), "max_tokens": 0})


async def test_the_async_client(async_client: anthropic.AsyncAnthropic) -> None:
    check_answer(await async_client.messages.create(**ask()))
    async with async_client.messages.stream(**ask()) as stream:
        check_answer(await stream.get_final_message())


async def test_a_vision_model_behind_chat_completions(tmp_path: Path) -> None:
    """Images reach it, those of tools too; the client retries while it is overloaded."""
    source: Any = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
    image: Any = {"type": "image", "source": source}
    turns: Any = [
        {"role": "user", "content": [image, {"type": "text", "text": "Look."}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": [image]}]},
    ]
    replies = iter([answer({"error": {"message": "busy"}}, 503), answer(SEEN)])

    async def script(exchange: Exchange) -> None:
        reply = next(replies) if exchange.request.json["messages"] else answer({"error": {"message": "none"}}, 400)
        await reply(exchange)

    async with FakeUpstream() as upstream:
        upstream.on("/chat/completions", script)
        with ExitStack() as stack:
            address = f"{MODEL}=openai+{upstream.base}#up/model"
            server = await asyncio.to_thread(stack.enter_context, running(tmp_path, address))
            async with anthropic.AsyncAnthropic(base_url=server.base_url, api_key="any") as client:
                message = await client.messages.create(**{**ask(), "messages": turns})
            await asyncio.to_thread(stack.close)
        sent = upstream.requests[-1].json["messages"]
    assert [block.to_dict()["text"] for block in message.content] == ["a fish"]
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    assert sent[0]["content"][0] == url
    assert [each["role"] for each in sent] == ["user", "assistant", "tool", "user"]
    assert sent[-1]["content"][-1] == url


def test_keys_and_broken_streams(tmp_path: Path) -> None:
    """Either header holds the key; what breaks in mid-stream is raised."""
    with running(tmp_path, f"{FAKE}poison=poison", flags=("--api-key", "secret")) as server:
        for key in ({"api_key": "secret"}, {"api_key": None, "auth_token": "secret"}):
            with anthropic.Anthropic(base_url=server.base_url, max_retries=0, **key) as client:
                check_answer(client.messages.create(**ask()))
                with (
                    pytest.raises(anthropic.APIStatusError, match="failed without a reason"),
                    client.messages.stream(**ask("one poison two")) as stream,
                ):
                    stream.until_done()
        with (
            anthropic.Anthropic(base_url=server.base_url, api_key="wrong", max_retries=0) as client,
            pytest.raises(anthropic.AuthenticationError, match="API key is invalid"),
        ):
            client.messages.create(**ask())
