"""OpenAI's client, version 1, which many applications still pin."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.integration.llm_kit import MODEL

ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALLED = '<tool_call> {"name": "add", "arguments": {"a": 1}} </tool_call>'


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="any") as client:
        yield client


def turn(text: str) -> Any:
    return [{"role": "user", "content": text}]


def test_the_version() -> None:
    """The installed client is version 1."""
    assert openai.__version__.startswith("1.")


def test_chat(client: openai.OpenAI) -> None:
    """Several choices in one answer, with log probabilities and counts."""
    answer = client.chat.completions.create(
        model=MODEL, messages=turn("one two three"), n=2, max_tokens=2, logprobs=True, top_logprobs=1
    )
    assert [choice.message.content for choice in answer.choices] == ["one two"] * 2
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert [each.token for each in logprobs.content or []] == ["one", " two"]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 4)
    assert (answer._request_id or "").startswith("req_")


def test_chat_as_a_stream(client: openai.OpenAI) -> None:
    """Word by word, and usage at the end if requested."""
    *chunks, last = client.chat.completions.create(
        model=MODEL, messages=turn("one two three"), stream=True, stream_options={"include_usage": True}
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "one two three"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert (last.choices, last.usage.total_tokens if last.usage else 0) == ([], 6)


def test_tools(client: openai.OpenAI) -> None:
    """Complete, and accumulated from a stream by the helper that was in `beta` then."""
    answer = client.chat.completions.create(model=MODEL, messages=turn(CALLED), tools=[ADD])
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}')
    beta: Any = client.beta.chat.completions if hasattr(client.beta, "chat") else client.chat.completions
    with beta.stream(model=MODEL, messages=turn(f"well {CALLED} {CALLED}"), tools=[ADD]) as stream:
        message = stream.get_final_completion().choices[0].message
    assert [each.function.arguments for each in message.tool_calls] == ['{"a": 1}'] * 2


def test_completions(client: openai.OpenAI) -> None:
    """Prompts in a list, echo, and a stream."""
    answer = client.completions.create(model=MODEL, prompt=["a b", "c"], echo=True)
    assert [choice.text for choice in answer.choices] == ["a ba b", "cc"]
    pieces = client.completions.create(model=MODEL, prompt="a b c", stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == "a b c"


def test_responses(client: openai.OpenAI) -> None:
    """This version already has them: its types parse the answer and each event."""
    assert client.responses.create(model=MODEL, input="a b").output_text == "a b"
    with client.responses.stream(model=MODEL, input="a b") as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == "a b"
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")


def test_embeddings(client: openai.OpenAI) -> None:
    """base64, its default, gives the same numbers as JSON."""
    short = client.embeddings.create(model=MODEL, input=["one", "two"])
    plain = client.embeddings.create(model=MODEL, input=["one", "two"], encoding_format="float")
    assert [len(each.embedding) for each in short.data] == [32, 32]
    assert short.data[1].embedding == pytest.approx(plain.data[1].embedding)


def test_models(client: openai.OpenAI) -> None:
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "error", "code", "param"),
    [
        ({"model": "nobody"}, openai.NotFoundError, "model_not_found", "model"),
        (
            {"response_format": {"type": "json_object"}},
            openai.BadRequestError,
            "unsupported_parameter",
            "response_format",
        ),
        ({"messages": turn("poison-item")}, openai.InternalServerError, None, None),
    ],
)
def test_errors(
    client: openai.OpenAI,
    fields: dict[str, Any],
    error: type[openai.APIStatusError],
    code: str | None,
    param: str | None,
    stream: bool,
) -> None:
    """Its own exceptions with code and param, also for a stream that never began."""
    with pytest.raises(error) as caught:
        client.chat.completions.create(**{"model": MODEL, "messages": turn("a"), "stream": stream, **fields})
    assert (caught.value.code, caught.value.param) == (code, param)


def test_an_error_in_mid_stream(client: openai.OpenAI) -> None:
    """It raises the event's message."""
    with pytest.raises(openai.APIError, match="the model failed"):
        list(client.chat.completions.create(model=MODEL, messages=turn("one poison-item"), stream=True))


async def test_the_asynchronous_client(base_url: str) -> None:
    """Many concurrent streams never mix their words."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key="any") as client:

        async def one(number: int) -> str:
            stream = await client.chat.completions.create(model=MODEL, messages=turn(f"it is {number}"), stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        assert await asyncio.gather(*map(one, range(32))) == [f"it is {number}" for number in range(32)]
