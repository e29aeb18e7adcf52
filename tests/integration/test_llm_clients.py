"""The current OpenAI client against a server whose model repeats its input."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from tests.integration.llm_kit import FAKE, MODEL, metric, running, until
from tests.integration.server_kit import Server

TURNS: Any = [{"role": "user", "content": "one two three"}]
CALLED = '<tool_call> {"name": "add", "arguments": {"a": 1, "b": [2, "x y"]}} </tool_call>'
ARGUMENTS = '{"a": 1, "b": [2, "x y"]}'
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--tool-call-parser", "hermes", "--reasoning-parser", "think")
    with running(tmp_path_factory.mktemp("talker"), FAKE, flags=flags) as started:
        yield started


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="any") as client:
        yield client


@pytest.fixture
async def async_client(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.base_url}/v1", api_key="any") as client:
        yield client


def turn(text: str) -> Any:
    return [{"role": "user", "content": text}]


def text_of(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    """Return the text of one choice over all chunks."""
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


def test_a_chat(client: openai.OpenAI) -> None:
    """The complete answer in the client's types: text, finish reason, token counts, id, and no refusal."""
    answer = client.chat.completions.create(model=MODEL, messages=TURNS, temperature=0.5, seed=7, user="somebody")
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.message.refusal) == ("assistant", "one two three", None)
    assert (choice.finish_reason, choice.logprobs, choice.message.tool_calls) == ("stop", None, None)
    assert (answer.object, answer.model, answer.id[:9]) == ("chat.completion", MODEL, "chatcmpl-")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 3, 6)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_a_chat_as_a_stream(client: openai.OpenAI) -> None:
    """The role comes first, then one word per chunk, and the finish reason last; every chunk has a choice, none has
    usage."""
    chunks = list(client.chat.completions.create(model=MODEL, messages=TURNS, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert text_of(chunks) == "one two three"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert {(chunk.id, chunk.created, chunk.model) for chunk in chunks} == {(chunks[0].id, chunks[0].created, MODEL)}
    assert all(chunk.usage is None for chunk in chunks)


def test_the_usage_of_a_stream(client: openai.OpenAI) -> None:
    """Usage comes in one more chunk without choices, as the client documents."""
    *chunks, last = client.chat.completions.create(
        model=MODEL, messages=TURNS, stream=True, stream_options={"include_usage": True}
    )
    assert all(len(chunk.choices) == 1 and chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (3, 3)


def test_several_choices(client: openai.OpenAI) -> None:
    """n answers, in order, streamed or not; usage counts all of them."""
    answer = client.chat.completions.create(model=MODEL, messages=TURNS, n=3, max_tokens=2)
    assert [(choice.index, choice.message.content) for choice in answer.choices] == [(at, "one two") for at in range(3)]
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 6)
    chunks = list(client.chat.completions.create(model=MODEL, messages=TURNS, n=2, stream=True))
    assert [text_of(chunks, index) for index in (0, 1)] == ["one two three"] * 2


@pytest.mark.parametrize(("stop", "text"), [("two", "one "), (["three", "x"], "one two "), ("ne tw", "o"), ([], None)])
def test_stop(client: openai.OpenAI, stop: Any, text: str | None) -> None:
    """The stop text is not part of the answer, even if it spans tokens; the same when streamed."""
    answer = client.chat.completions.create(model=MODEL, messages=TURNS, stop=stop)
    assert answer.choices[0].message.content == (text or "one two three")
    assert answer.choices[0].finish_reason == "stop"
    assert text_of(list(client.chat.completions.create(model=MODEL, messages=TURNS, stop=stop, stream=True))) == (
        text or "one two three"
    )


def test_logprobs(client: openai.OpenAI) -> None:
    """Each token has its bytes and alternatives; in a stream they come with the text of the token."""
    options: Any = {"model": MODEL, "messages": turn("on été"), "logprobs": True, "top_logprobs": 2}
    logprobs = client.chat.completions.create(**options).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [(each.token, each.logprob) for each in logprobs.content] == [("on", 0.0), (" été", -0.1)]
    assert bytes(logprobs.content[1].bytes or []).decode() == " été"
    assert [top.token for top in logprobs.content[1].top_logprobs] == [" été", " été1"]
    chunks = list(client.chat.completions.create(**options, stream=True))
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices[0].logprobs]
    assert [(choice.delta.content, [each.token for each in choice.logprobs.content]) for choice in choices] == [
        ("on", ["on"]),
        (" été", [" été"]),
    ]


def test_a_tool_is_called(client: openai.OpenAI) -> None:
    """A call that the model writes becomes a tool call with its arguments verbatim; the result is sent back."""
    answer = client.chat.completions.create(model=MODEL, messages=turn(CALLED), tools=[ADD])
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("add", ARGUMENTS)
    result = {"role": "tool", "tool_call_id": call.id, "content": "it is 3"}
    history: Any = [*turn(CALLED), choice.message.to_dict(), result]
    again = client.chat.completions.create(model=MODEL, messages=history, tools=[ADD])
    assert again.choices[0].message.content == "it is 3"


def test_a_tool_is_called_in_a_stream(client: openai.OpenAI) -> None:
    """The client's own accumulator joins the fragments; text before the call stays text."""
    with client.chat.completions.stream(model=MODEL, messages=turn(f"well {CALLED} {CALLED}"), tools=[ADD]) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    assert kinds.count("tool_calls.function.arguments.done") == 2
    (choice,) = final.choices
    assert (choice.finish_reason, (choice.message.content or "").strip()) == ("tool_calls", "well")
    assert choice.message.tool_calls is not None
    assert [(call.function.name, call.function.arguments) for call in choice.message.tool_calls] == [
        ("add", ARGUMENTS)
    ] * 2


def test_without_tools_a_call_is_text(client: openai.OpenAI) -> None:
    """Without `tools`, text that looks like a call stays text."""
    answer = client.chat.completions.create(model=MODEL, messages=turn(CALLED))
    assert (answer.choices[0].message.content, answer.choices[0].message.tool_calls) == (CALLED, None)


def test_the_helper_for_streams(client: openai.OpenAI) -> None:
    """`chat.completions.stream`: its events and the accumulated completion, usage included."""
    options: Any = {"model": MODEL, "messages": TURNS, "stream_options": {"include_usage": True}}
    with client.chat.completions.stream(**options) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content == "one two three"
    assert final.usage is not None
    assert final.usage.total_tokens == 6


def test_reasoning(client: openai.OpenAI) -> None:
    """Reasoning is returned beside the content, where this client exposes fields that it does not know."""
    options: Any = {"model": MODEL, "messages": turn("<think> so so </think> yes")}
    message = client.chat.completions.create(**options).choices[0].message
    assert message.content is not None
    assert (message.content.strip(), (message.model_extra or {})["reasoning_content"].strip()) == ("yes", "so so")
    thoughts = [
        (chunk.choices[0].delta.model_extra or {}).get("reasoning_content", "")
        for chunk in client.chat.completions.create(**options, stream=True)
    ]
    assert "".join(thoughts).strip() == "so so"


def test_completions(client: openai.OpenAI) -> None:
    """A list of prompts with two answers each, numbered prompt by prompt; echo puts the prompt before the answer."""
    answer = client.completions.create(model=MODEL, prompt=["a b", "c d e"], n=2, max_tokens=2)
    assert [(choice.index, choice.text) for choice in answer.choices] == [
        (0, "a b"),
        (1, "a b"),
        (2, "c d"),
        (3, "c d"),
    ]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop", "length", "length"]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 8)
    echoed = client.completions.create(model=MODEL, prompt="a b", echo=True)
    assert echoed.choices[0].text == "a ba b"


def test_logprobs_of_completions(client: openai.OpenAI) -> None:
    """Four parallel lists; offsets count the characters of the answer."""
    logprobs = client.completions.create(model=MODEL, prompt="a bc d", logprobs=1).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", " bc", " d"]
    assert logprobs.token_logprobs == [0.0, -0.1, -0.2]
    assert logprobs.text_offset == [0, 1, 4]
    assert logprobs.top_logprobs == [{"a": 0.0}, {" bc": -0.1}, {" d": -0.2}]


def test_completions_as_a_stream(client: openai.OpenAI) -> None:
    """Chunks carry the index of their prompt's answer; usage comes if requested."""
    *pieces, last = client.completions.create(
        model=MODEL, prompt=["a b", "c d"], stream=True, stream_options={"include_usage": True}
    )
    for index, text in enumerate(("a b", "c d")):
        assert "".join(piece.choices[0].text for piece in pieces if piece.choices[0].index == index) == text
    assert (last.choices, last.usage.completion_tokens if last.usage else 0) == ([], 4)


def test_responses(client: openai.OpenAI) -> None:
    """The Responses API: text, status, usage; a conversation of items; a tool call."""
    answer = client.responses.create(model=MODEL, input="one two three", instructions="be short")
    assert (answer.output_text, answer.status, answer.error) == ("one two three", "completed", None)
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (3, 3, 6)
    cut = client.responses.create(model=MODEL, input=turn("one two three"), max_output_tokens=2)
    assert (cut.output_text, cut.status) == ("one two", "incomplete")
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"
    tool: Any = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
    (item,) = client.responses.create(model=MODEL, input=CALLED, tools=[tool]).output
    assert item.type == "function_call"
    assert (item.name, item.arguments) == ("add", ARGUMENTS)


def test_responses_as_a_stream(client: openai.OpenAI) -> None:
    """The client knows every event; they are numbered, in the documented order, and its accumulator agrees."""
    with client.responses.stream(model=MODEL, input="one two three") as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert deltas >= 1
    assert kinds == [
        *("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"),
        *["response.output_text.delta"] * deltas,
        *("response.output_text.done", "response.content_part.done", "response.output_item.done"),
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert final.output_text == "one two three"
    raw = list(client.responses.create(model=MODEL, input="a b", stream=True))
    assert "".join(event.delta for event in raw if event.type == "response.output_text.delta") == "a b"


def test_stored_responses(client: openai.OpenAI) -> None:
    """A conversation goes on from a response, which is shown, listed and deleted; so it does in a stream."""
    first = client.responses.create(model=MODEL, input="one")
    again = client.responses.create(model=MODEL, input="two", previous_response_id=first.id)
    assert (again.output_text, again.previous_response_id) == ("two", first.id)
    assert client.responses.retrieve(again.id).output_text == "two"
    items: Any = client.responses.input_items.list(again.id, order="asc").data
    assert [(item.role, item.content[0].text) for item in items] == [
        *(("user", "one"), ("assistant", "one"), ("user", "two"))
    ]
    with client.responses.stream(model=MODEL, input="three", previous_response_id=again.id) as stream:
        stream.until_done()
        third = stream.get_final_response()
    assert len(client.responses.input_items.list(third.id).data) == 5
    client.responses.delete(again.id)
    with pytest.raises(openai.NotFoundError, match="not stored here"):
        client.responses.retrieve(again.id)


def test_custom_tools(client: openai.OpenAI) -> None:
    """A tool whose input is a text: the client's accumulator knows its events."""
    called = '<tool_call> {"name": "write", "arguments": {"input": "a b"}} </tool_call>'
    tool: Any = {"type": "custom", "name": "write", "description": "Writes"}
    with client.responses.stream(model=MODEL, input=called, tools=[tool]) as stream:
        kinds = [event.type for event in stream]
        (item,) = stream.get_final_response().output
    assert "response.custom_tool_call_input.done" in kinds
    assert item.type == "custom_tool_call"
    assert (item.name, item.input) == ("write", "a b")


def test_embeddings_beside_it(client: openai.OpenAI) -> None:
    """The server still embeds with the same model."""
    reply = client.embeddings.create(model=MODEL, input=["one", "two"])
    assert [len(each.embedding) for each in reply.data] == [32, 32]


def test_models(client: openai.OpenAI) -> None:
    """The model list and one model, with its capabilities in a field of their own."""
    assert next(iter(client.models.list())).id == MODEL
    assert (client.models.retrieve(MODEL).model_extra or {})["tasks"] == ["embed", "generate"]


def test_no_field_has_to_be_sent(client: openai.OpenAI) -> None:
    """An empty name selects the default model; unknown fields are ignored."""
    extras: Any = {"some_new_field": {"deep": [1]}, "chat_template_kwargs": {"enable_thinking": False}}
    answer = client.chat.completions.create(
        model="", messages=TURNS, extra_body=extras, metadata={"a": "b"}, store=True
    )
    assert (answer.model, answer.choices[0].message.content) == (MODEL, "one two three")


def test_headers(client: openai.OpenAI) -> None:
    """The request id is the server's, or the client's own; the raw response has all headers."""
    answer = client.chat.completions.create(model=MODEL, messages=TURNS)
    assert (answer._request_id or "").startswith("req_")
    own = client.chat.completions.create(model=MODEL, messages=TURNS, extra_headers={"x-request-id": "mine-1"})
    assert own._request_id == "mine-1"
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=TURNS)
    assert raw.headers["content-type"] == "application/json"
    assert "first;dur=" in raw.headers["server-timing"]
    assert raw.parse().choices[0].message.content == "one two three"
    with client.chat.completions.with_streaming_response.create(model=MODEL, messages=TURNS, stream=True) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-cache, no-transform"
        assert response.request_id is not None
        *_, done = [line for line in response.iter_lines() if line]
    assert done == "data: [DONE]"


REFUSED = [
    ({"response_format": {"type": "json_object"}}, 400, "unsupported_parameter", "response_format"),
    ({"tools": [ADD], "tool_choice": "required"}, 400, "unsupported_parameter", "tool_choice"),
    ({"messages": []}, 400, None, "messages"),
    ({"messages": turn("reject-item")}, 400, "invalid_value", None),
    ({"temperature": 3}, 400, None, "temperature"),
    ({"model": "nobody"}, 404, "model_not_found", "model"),
    ({"model": f"{MODEL}:quiet"}, 404, "model_not_found", "model"),
    ({"messages": turn("poison-item")}, 500, None, None),
]
CLASSES = {400: openai.BadRequestError, 404: openai.NotFoundError, 500: openai.InternalServerError}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "status", "code", "param"), REFUSED)
def test_refusals(
    server: Server,
    client: openai.OpenAI,
    fields: dict[str, Any],
    status: int,
    code: str | None,
    param: str | None,
    stream: bool,
) -> None:
    """Each raises the client's own exception with code, param, type, message and id, also for a stream that never
    began. The client retries none of them, although it retries every 500 that does not forbid it."""
    before = count_requests(server, "/v1/chat/completions")
    with pytest.raises(CLASSES[status]) as caught:
        client.chat.completions.create(**{"model": MODEL, "messages": TURNS, "stream": stream, **fields})
    error = caught.value
    assert (error.status_code, error.code, error.param) == (status, code, param)
    assert error.type == ("server_error" if status == 500 else "invalid_request_error")
    assert error.request_id is not None
    assert param is None or param in error.message or param == "model"
    until(lambda: count_requests(server, "/v1/chat/completions") > before)
    assert count_requests(server, "/v1/chat/completions") == before + 1


def count_requests(server: Server, path: str) -> int:
    """Return the number of requests in the access log."""
    return server.log.read_text().count(f'"path":"{path}"')


@pytest.mark.parametrize(
    ("call", "status", "param"),
    [
        (lambda client: client.completions.create(model=MODEL, prompt=[1, 2]), 400, "prompt"),
        (lambda client: client.completions.create(model=MODEL, prompt="a", suffix="b"), 400, "suffix"),
        (lambda client: client.responses.create(model=MODEL, input="a", previous_response_id="x"), 400,
         "previous_response_id"),
        (lambda client: client.models.retrieve("nobody"), 404, "model"),
        (lambda client: client.audio.speech.create(model=MODEL, input="a", voice="alloy"), 404, None),
    ],
)  # fmt: skip
def test_refusals_on_other_routes(
    client: openai.OpenAI, call: Callable[[openai.OpenAI], Any], status: int, param: str
) -> None:
    """Other routes, and unknown ones, report errors in the same shape."""
    with pytest.raises(CLASSES[status]) as caught:
        call(client)
    assert (caught.value.param, caught.value.type) == (param, "invalid_request_error")


def test_an_error_in_mid_stream(client: openai.OpenAI) -> None:
    """The client yields the text before the error, then raises it with its message; other requests continue."""
    chunks: list[ChatCompletionChunk] = []
    with pytest.raises(openai.APIError, match="the model failed") as caught:
        chunks.extend(client.chat.completions.create(model=MODEL, messages=turn("one two poison-item"), stream=True))
    assert caught.value.type == "server_error"
    assert not isinstance(caught.value, openai.APIStatusError)
    assert client.chat.completions.create(model=MODEL, messages=TURNS).choices[0].message.content == "one two three"


def test_an_error_in_mid_stream_of_responses(client: openai.OpenAI) -> None:
    """The Responses API has an event for errors."""
    events = list(client.responses.create(model=MODEL, input="one two poison-item", stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error is not None
    assert "the model failed" in events[-1].response.error.message


def test_keys(tmp_path: Path) -> None:
    """A wrong key raises the client's AuthenticationError; the right key succeeds."""
    with running(tmp_path, FAKE, flags=("--api-key", "secret")) as server:
        base = f"{server.base_url}/v1"
        with (
            openai.OpenAI(base_url=base, api_key="wrong") as client,
            pytest.raises(openai.AuthenticationError) as caught,
        ):
            client.chat.completions.create(model=MODEL, messages=TURNS)
        assert caught.value.code == "invalid_api_key"
        with openai.OpenAI(base_url=base, api_key="secret") as client:
            assert client.chat.completions.create(model=MODEL, messages=TURNS).choices


async def test_the_asynchronous_client(async_client: openai.AsyncOpenAI) -> None:
    """Many concurrent streams never mix their words."""

    async def one(number: int) -> str:
        stream = await async_client.chat.completions.create(
            model=MODEL, messages=turn(f"this is {number}"), stream=True
        )
        return text_of([chunk async for chunk in stream])

    assert await asyncio.gather(*map(one, range(64))) == [f"this is {number}" for number in range(64)]


async def test_the_asynchronous_client_without_streams(async_client: openai.AsyncOpenAI) -> None:
    """Chat, completions and responses concurrently."""
    chat, text, response = await asyncio.gather(
        async_client.chat.completions.create(model=MODEL, messages=TURNS),
        async_client.completions.create(model=MODEL, prompt="a b"),
        async_client.responses.create(model=MODEL, input="c d"),
    )
    assert (chat.choices[0].message.content, text.choices[0].text, response.output_text) == (
        "one two three",
        "a b",
        "c d",
    )


async def test_a_client_that_retries_until_a_slot_is_free(tmp_path: Path) -> None:
    """With the server full, the client's own retries succeed after the time in `Retry-After`."""
    flags = ("--max-streams", "1", "--max-queued-streams", "0")
    with running(tmp_path, f"{FAKE}token_ms=300", flags=flags) as server:
        async with openai.AsyncOpenAI(base_url=f"{server.base_url}/v1", api_key="any", max_retries=4) as client:
            first = await client.chat.completions.create(model=MODEL, messages=TURNS, stream=True)
            with pytest.raises(openai.RateLimitError) as caught:
                await client.with_options(max_retries=0).chat.completions.create(model=MODEL, messages=TURNS)
            assert float(caught.value.response.headers["retry-after"]) >= 1
            second = asyncio.create_task(client.chat.completions.create(model=MODEL, messages=turn("second")))
            assert text_of([chunk async for chunk in first]) == "one two three"
            assert (await second).choices[0].message.content == "second"


async def test_a_stream_that_the_client_closes(tmp_path: Path) -> None:
    """`close` on a stream stops the model, and the connection does not leak."""
    with running(tmp_path, f"{FAKE}token_ms=50") as server:
        async with openai.AsyncOpenAI(base_url=f"{server.base_url}/v1", api_key="any") as client:
            stream = await client.chat.completions.create(model=MODEL, messages=turn("word " * 1000), stream=True)
            await anext(aiter(stream))
            await stream.close()
            until(lambda: metric(server, "shoal_cancelled_total") == 1)
            assert metric(server, "shoal_requests_in_flight") == 0
