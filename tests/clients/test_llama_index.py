"""LlamaIndex's classes for OpenAI and for OpenAI-compatible servers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai import OpenAI
from llama_index.llms.openai_like import OpenAILike

from tests.clients.conftest import KNOWN
from tests.integration.llm_kit import MODEL, running

MESSAGES = [ChatMessage(role="system", content="be kind"), ChatMessage(role="user", content="one two three")]
CALLED = '<tool_call> {"name": "add", "arguments": {"a": 1, "b": 2}} </tool_call>'
BREAKS = "one two poison-item three"


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@pytest.fixture(params=["like", "openai"])
def model(request: pytest.FixtureRequest, base_url: str) -> Any:
    """The class for compatible servers, and OpenAI's own under a model name that it knows."""
    if request.param == "openai":
        return OpenAI(model=KNOWN, api_base=base_url, api_key="any", max_retries=0)
    return OpenAILike(
        model=MODEL,
        api_base=base_url,
        api_key="any",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=4096,
        max_retries=0,
    )


def test_chat(model: Any) -> None:
    """A conversation of its messages; the raw answer has the counts."""
    answer = model.chat(MESSAGES)
    assert (answer.message.role.value, answer.message.content) == ("assistant", "one two three")
    assert answer.raw.usage.total_tokens == 6


def test_stream_chat(model: Any) -> None:
    """Deltas, and the text so far with each."""
    pieces = list(model.stream_chat(MESSAGES))
    assert "".join(piece.delta or "" for piece in pieces) == "one two three"
    assert pieces[-1].message.content == "one two three"


def test_complete(model: Any) -> None:
    """A text completion over the chat route."""
    assert model.complete("one two").text == "one two"
    assert "".join(piece.delta for piece in model.stream_complete("one two")) == "one two"


async def test_asynchronous(model: Any) -> None:
    """Concurrent streams and answers never mix their words."""

    async def one(number: int) -> str:
        stream = await model.astream_chat([ChatMessage(role="user", content=f"it is {number}")])
        return "".join([piece.delta or "" async for piece in stream])

    assert await asyncio.gather(*map(one, range(16))) == [f"it is {number}" for number in range(16)]
    assert (await model.achat(MESSAGES)).message.content == "one two three"
    assert (await model.acomplete("a b")).text == "a b"


def test_tools(model: Any) -> None:
    """It reads the calls, complete and in a stream, and runs them."""
    tool = FunctionTool.from_defaults(add)
    answer = model.chat_with_tools([tool], user_msg=CALLED)
    (call,) = model.get_tool_calls_from_response(answer)
    assert (call.tool_name, call.tool_kwargs) == ("add", {"a": 1, "b": 2})
    *_, last = model.stream_chat_with_tools([tool], user_msg=CALLED)
    (streamed,) = model.get_tool_calls_from_response(last)
    assert streamed.tool_kwargs == {"a": 1, "b": 2}
    *_, last = model.stream_chat_with_tools([tool], user_msg=f"{CALLED} {CALLED}", allow_parallel_tool_calls=True)
    both = model.get_tool_calls_from_response(last)
    assert [each.tool_kwargs for each in both] == [{"a": 1, "b": 2}] * 2
    assert model.predict_and_call([tool], user_msg=CALLED).response == "3"


def test_texts_without_a_chat(base_url: str) -> None:
    """A completion model: the older route, complete and in a stream."""
    model: Any = OpenAILike(model=MODEL, api_base=base_url, api_key="any", is_chat_model=False, context_window=4096)
    assert model.complete("one two").text == "one two"
    assert "".join(piece.delta for piece in model.stream_complete("one two")) == "one two"
    with pytest.raises(openai.APIError, match="the model failed"):
        list(model.stream_complete(BREAKS))


def test_errors(model: Any) -> None:
    """OpenAI's exceptions, before the answer and in it."""
    with pytest.raises(openai.InternalServerError, match="the model failed"):
        model.complete("poison-item")
    with pytest.raises(openai.APIError, match="the model failed"):
        list(model.stream_complete("one poison-item"))


async def test_a_broken_stream(model: Any) -> None:
    """An error follows the words, however the stream is read, so no caller takes them for a complete answer."""
    messages = [ChatMessage(role="user", content=BREAKS)]
    pieces: list[str] = []
    with pytest.raises(openai.APIError, match="the model failed"):
        pieces.extend(piece.delta or "" for piece in model.stream_chat(messages))
    assert "".join(pieces) == "one two"
    with pytest.raises(openai.APIError, match="the model failed"):
        [piece async for piece in await model.astream_chat(messages)]
    with pytest.raises(openai.APIError, match="the model failed"):
        [piece async for piece in await model.astream_complete(BREAKS)]
    with pytest.raises(openai.APIError, match="the model failed"):
        list(model.stream_chat_with_tools([FunctionTool.from_defaults(add)], user_msg=BREAKS))


def test_a_server_that_dies(tmp_path: Path) -> None:
    """If it dies during a stream, both routes raise a connection error."""
    with running(tmp_path, f"{MODEL}=fake:token_ms=200") as server:
        known: dict[str, Any] = {"api_base": f"{server.base_url}/v1", "api_key": "any", "max_retries": 0}
        streams = [
            OpenAILike(model=MODEL, is_chat_model=chat, context_window=4096, **known).stream_complete("word " * 100)
            for chat in (True, False)
        ]
        for stream in streams:
            next(stream)
        server.process.kill()
        for stream in streams:
            with pytest.raises(Exception, match=r"incomplete|closed|reset"):
                list(stream)
