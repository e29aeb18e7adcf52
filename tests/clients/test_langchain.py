"""LangChain's classes for OpenAI."""

from __future__ import annotations

import asyncio
from functools import reduce
from operator import add as joined
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

from tests.clients.conftest import EMBEDDER
from tests.integration.llm_kit import MODEL, running

CALLED = '<tool_call> {"name": "add", "arguments": {"a": 1, "b": 2}} </tool_call>'
BREAKS = "one two poison-item three"


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class Sum(BaseModel):
    """A sum."""

    a: int
    b: int


@pytest.fixture
def model(base_url: str) -> Any:
    return ChatOpenAI(model=MODEL, base_url=base_url, api_key="any", max_retries=0)


def text_of(chunks: list[Any]) -> str:
    return "".join(chunk.text for chunk in chunks)


def test_invoke(model: Any) -> None:
    """A conversation of its message classes; text, finish reason, name and counts come back."""
    answer = model.invoke([SystemMessage("be kind"), HumanMessage("one two three")])
    assert (answer.content, answer.response_metadata["finish_reason"]) == ("one two three", "stop")
    assert answer.response_metadata["model_name"] == MODEL
    assert (answer.usage_metadata["input_tokens"], answer.usage_metadata["output_tokens"]) == (3, 3)


def test_stream(model: Any) -> None:
    """Word by word; usage if requested."""
    chunks = list(model.stream("one two three", stream_usage=True))
    assert [chunk.content for chunk in chunks if chunk.content] == ["one", " two", " three"]
    whole = reduce(joined, chunks)
    assert whole.usage_metadata["total_tokens"] == 6
    assert whole.response_metadata["finish_reason"] == "stop"


async def test_asynchronous(model: Any) -> None:
    """Many concurrent streams and answers never mix their words."""

    async def one(number: int) -> str:
        return text_of([chunk async for chunk in model.astream(f"it is {number}")])

    expected = [f"it is {number}" for number in range(16)]
    assert await asyncio.gather(*map(one, range(16))) == expected
    assert [answer.content for answer in await model.abatch(expected)] == expected


def test_batch(model: Any) -> None:
    """In threads."""
    texts = [f"text {number}" for number in range(16)]
    assert [answer.content for answer in model.batch(texts)] == texts


def test_sampling(model: Any) -> None:
    """Sampling fields arrive, both those bound to the model and those of its class."""
    answer = model.bind(stop=["three"], logprobs=True, seed=7, temperature=0.5).invoke("one two three")
    assert answer.content == "one two "
    assert [each["token"] for each in answer.response_metadata["logprobs"]["content"]][:2] == ["one", " two"]
    cut = model.bind(max_tokens=1).invoke("one two three")
    assert (cut.content, cut.response_metadata["finish_reason"]) == ("one", "length")


def test_tools(model: Any) -> None:
    """Called, complete and in a stream; the result is sent back."""
    able = model.bind_tools([StructuredTool.from_function(add)])
    answer = able.invoke(CALLED)
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("add", {"a": 1, "b": 2})
    assert answer.response_metadata["finish_reason"] == "tool_calls"
    (streamed,) = reduce(joined, list(able.stream(CALLED))).tool_calls
    assert (streamed["name"], streamed["args"]) == ("add", {"a": 1, "b": 2})
    both = reduce(joined, list(able.stream(f"{CALLED} {CALLED}"))).tool_calls
    assert [each["args"] for each in both] == [{"a": 1, "b": 2}] * 2
    history = [HumanMessage(CALLED), answer, ToolMessage("it is 3", tool_call_id=call["id"])]
    assert able.invoke(history).content == "it is 3"


def test_structured_output(model: Any) -> None:
    """By a call that the model makes by itself; an option that forces the call is rejected by name."""
    answer = CALLED.replace('"add"', '"Sum"')
    by_call = model.with_structured_output(Sum, method="function_calling", tool_choice="auto")
    assert by_call.invoke(answer) == Sum(a=1, b=2)
    for method, param in (
        ("json_schema", "response_format"),
        ("json_mode", "response_format"),
        ("function_calling", "tool_choice"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            model.with_structured_output(Sum, method=method).invoke("as JSON")
        assert (caught.value.code, caught.value.param) == ("unsupported_parameter", param)


def test_errors(model: Any) -> None:
    """OpenAI's exceptions, before the answer and in it."""
    with pytest.raises(openai.InternalServerError, match="the model failed"):
        model.invoke("poison-item")
    with pytest.raises(openai.APIError, match="the model failed"):
        list(model.stream("one poison-item"))
    with pytest.raises(openai.NotFoundError):
        model.bind(model="nobody").invoke("a")


@pytest.mark.parametrize(("responses", "error"), [(False, openai.APIError), (True, ValueError)])
async def test_a_broken_stream(base_url: str, responses: bool, error: type[Exception]) -> None:
    """An error follows the words, however the stream is read, so no caller takes them for a complete answer."""
    known: dict[str, Any] = {"model": MODEL, "base_url": base_url, "api_key": "any", "max_retries": 0}
    # Its own client: LangChain would cache one for later tests, which run on other loops.
    connections = openai.DefaultAsyncHttpxClient()
    whole: Any = ChatOpenAI(**known, use_responses_api=responses, streaming=True, http_async_client=connections)
    pieces: list[str] = []
    with pytest.raises(error, match="the model failed"):
        pieces.extend(chunk.text for chunk in whole.stream(BREAKS))
    assert "".join(pieces) == "one two"
    with pytest.raises(error, match="the model failed"):
        whole.invoke(BREAKS)
    with pytest.raises(error, match="the model failed"):
        await whole.ainvoke(BREAKS)
    with pytest.raises(error, match="the model failed"):
        list(whole.bind_tools([StructuredTool.from_function(add)]).stream(BREAKS))
    with pytest.raises(error, match="the model failed"):
        [event async for event in whole.astream_events(BREAKS, version="v2")]
    await connections.aclose()


def test_a_server_that_dies(tmp_path: Path) -> None:
    """If it dies during a stream, every route raises a connection error."""
    with running(tmp_path, f"{MODEL}=fake:token_ms=200") as server:
        known: dict[str, Any] = {"base_url": f"{server.base_url}/v1", "model": MODEL, "api_key": "any"}
        models: list[Any] = [
            ChatOpenAI(**known, max_retries=0),
            ChatOpenAI(**known, max_retries=0, use_responses_api=True),
            OpenAI(**known, max_retries=0),
        ]
        streams = [model.stream("word " * 100) for model in models]
        for stream in streams:
            next(stream)
        server.process.kill()
        for stream in streams:
            with pytest.raises(Exception, match=r"incomplete|closed|reset"):
                list(stream)


def test_responses(base_url: str) -> None:
    """Over the Responses API: complete, streamed, and with a call."""
    model: Any = ChatOpenAI(model=MODEL, base_url=base_url, api_key="any", use_responses_api=True, max_retries=0)
    answer = model.invoke("one two")
    assert (answer.text, answer.usage_metadata["output_tokens"]) == ("one two", 2)
    assert text_of(list(model.stream("one two"))) == "one two"
    (call,) = model.bind_tools([StructuredTool.from_function(add)]).invoke(CALLED).tool_calls
    assert call["args"] == {"a": 1, "b": 2}
    history = [HumanMessage("a"), AIMessage("b"), HumanMessage("c d")]
    assert model.invoke(history).text == "c d"


def test_completions(base_url: str) -> None:
    """Its class for texts: several prompts in one request, a stream, and a broken one."""
    model: Any = OpenAI(model=MODEL, base_url=base_url, api_key="any", max_tokens=8)
    result = model.generate(["one two", "three"])
    assert [each[0].text for each in result.generations] == ["one two", "three"]
    assert result.llm_output["token_usage"]["completion_tokens"] == 3
    assert "".join(model.stream("one two")) == "one two"
    with pytest.raises(openai.APIError, match="the model failed"):
        list(model.stream(BREAKS))


def test_embeddings_of_texts(base_url: str) -> None:
    """With the settings that its documentation gives for servers other than OpenAI's."""
    embedder: Any = OpenAIEmbeddings(model=MODEL, base_url=base_url, api_key="any", check_embedding_ctx_length=False)
    rows = embedder.embed_documents(["one", "two"])
    assert [len(row) for row in rows] == [32, 32]
    assert embedder.embed_query("one") == pytest.approx(rows[0])


TEXTS = ["thank you", "harbour pilot", "Where can I renew my passport, and how long does it take?", "été, 東京 🐟"]


def test_embeddings_with_default_settings(base_url: str) -> None:
    """It tokenizes with OpenAI's table, cuts to its own length and sends ids: under the name of OpenAI's model Shoal
    decodes them with the same table, and the vectors are those of the texts."""
    embedder: Any = OpenAIEmbeddings(model=EMBEDDER, base_url=base_url, api_key="any")
    plain: Any = OpenAIEmbeddings(model=EMBEDDER, base_url=base_url, api_key="any", check_embedding_ctx_length=False)
    assert np.allclose(embedder.embed_documents(TEXTS), plain.embed_documents(TEXTS), atol=1e-6)
    assert embedder.embed_query(TEXTS[0]) == pytest.approx(plain.embed_query(TEXTS[0]))


def test_embeddings_with_default_settings_of_another_model(base_url: str) -> None:
    """It sends ids of OpenAI's table, which another model would read as other words: the error names the setting to
    change."""
    embedder: Any = OpenAIEmbeddings(model=MODEL, base_url=base_url, api_key="any", tiktoken_model_name=EMBEDDER)
    with pytest.raises(openai.BadRequestError, match="check_embedding_ctx_length=False"):
        embedder.embed_documents(TEXTS)
