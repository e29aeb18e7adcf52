"""What every kind of language model must do, tested with OpenAI's client over a real connection.

A kind rejects what it does not support with a 400 that names the field; it never ignores it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from tests.integration.llm_conformance_kit import (
    KINDS,
    ROUTES,
    TOO_LONG,
    Completion,
    Kind,
    Stack,
    chat,
    complete,
    processes_of,
    render_chat,
    start_stack,
)
from tests.integration.llm_kit import ask, read_until
from tests.integration.triton_app_kit import until
from tests.integration.triton_kit import Triton

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "one two three four five six seven eight"
TRICKY = "naïve 東京 👩\u200d👩\u200d👧 e\u0301 🇯🇵 नमस्ते 🐟 ok"
CALL = '<tool_call> {"name": "add", "arguments": {"a": 1}} </tool_call>'
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}

FIELDS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.5},
    "top_p": {"top_p": 0.9},
    "top_k": {"extra_body": {"top_k": 5}},
    "min_p": {"extra_body": {"min_p": 0.1}},
    "seed": {"seed": 5},
    "presence_penalty": {"presence_penalty": 0.5},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "repetition_penalty": {"extra_body": {"repetition_penalty": 1.1}},
    "length_penalty": {"extra_body": {"length_penalty": 1.1}},
    "min_tokens": {"extra_body": {"min_tokens": 1}},
    "stop_token_ids": {"extra_body": {"stop_token_ids": [300]}},
    "ignore_eos": {"extra_body": {"ignore_eos": True}},
    "bad_words": {"extra_body": {"bad_words": ["never"]}},
    "logit_bias": {"logit_bias": {"7": 1}},
    "logprobs": {"logprobs": True},
    "top_logprobs": {"logprobs": True, "top_logprobs": 1},
    "response_format": {"response_format": {"type": "json_object"}},
    "tool_choice": {"tools": [ADD], "tool_choice": "required"},
}
"""Request fields, by the name in the error's `param`."""

kinds = pytest.mark.parametrize("kind", KINDS, ids=str)
routes = pytest.mark.parametrize("route", ROUTES)
streams = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@pytest.fixture(scope="module")
def stack(triton: Triton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with start_stack(triton, tmp_path_factory.mktemp("conformance")) as stack:
        yield stack


@pytest.fixture(autouse=True)
def every_model_is_back(stack: Stack) -> None:
    """After a crash of Triton: see `triton_recovers`."""
    until(stack.front.ready, what="readiness")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{stack.front.base_url}/v1", api_key="any", max_retries=0) as client:
        yield client


Client = openai.AsyncOpenAI


async def say(stack: Stack, client: Client, kind: Kind, text: str, *, route: str = "chat", **fields: Any) -> Completion:
    """Make a model answer with a text; `fields` are those of the request."""
    prompt = stack.prompt_for(kind, text)
    body = {**prompt.fields, **fields.pop("extra_body", {})}
    return await ROUTES[route](client, kind, prompt.words, extra_body=body, **fields)


@routes
@kinds
async def test_the_text(stack: Stack, client: Client, kind: Kind, route: str) -> None:
    """Streamed and not: the same text and finish reason, and token counts for the whole prompt and the answer."""
    words = stack.prompt_for(kind, TEXT).words
    counted = []
    for stream in (False, True):
        completion = await say(stack, client, kind, TEXT, route=route, stream=stream)
        assert (completion.text, completion.reason) == (TEXT, "stop")
        counted.append(completion.token_counts)
    prompt, answer = counted[0]
    assert counted[0] == counted[1]
    assert prompt == stack.read(kind, words, chat=route == "chat")
    assert answer == stack.completion_tokens(kind, TEXT) or (
        kind.script_style == "guide" and answer > len(TEXT.split())
    )
    if kind.script_style != "guide":  # everything before it is sent at once
        assert (completion.pieces > 5) == kind.streams


@kinds
async def test_a_text_of_many_scripts(stack: Stack, client: Client, kind: Kind) -> None:
    """Models that produce tokens split characters; clients never receive half of one."""
    for route in ROUTES:
        for stream in (False, True):
            completion = await say(stack, client, kind, TRICKY, route=route, stream=stream)
            assert (completion.text, completion.reason) == (TRICKY, "stop")


@streams
@kinds
async def test_the_length(stack: Stack, client: Client, kind: Kind, stream: bool) -> None:
    """An answer has at most the requested number of tokens, whether or not the model supports a limit."""
    for route in ROUTES:
        completion = await say(stack, client, kind, TEXT, route=route, stream=stream, max_tokens=3)
        assert completion.reason == "length"
        assert completion.token_counts[1] == 3
        assert TEXT.startswith(completion.text)
        assert 0 < len(completion.text) <= len("one two three")
        if kind.counts in ("tokens", "end") and kind.script_style != "guide":
            assert completion.text == "one two th"


@streams
@kinds
async def test_max_completion_tokens(stack: Stack, client: Client, kind: Kind, stream: bool) -> None:
    completion = await say(stack, client, kind, TEXT, stream=stream, max_completion_tokens=2)
    assert (completion.reason, completion.token_counts[1]) == ("length", 2)


@streams
@kinds
async def test_stop(stack: Stack, client: Client, kind: Kind, stream: bool) -> None:
    """Stop texts are found across pieces, and included on request; a partial match is returned as text."""
    for route in ROUTES:
        completion = await say(stack, client, kind, TEXT, route=route, stream=stream, stop=["never", "ree fo"])
        assert (completion.text, completion.reason) == ("one two th", "stop")
        shown = {"include_stop_str_in_output": True}
        completion = await say(stack, client, kind, TEXT, route=route, stream=stream, stop="ree fo", extra_body=shown)
        assert (completion.text, completion.reason) == ("one two three fo", "stop")
        completion = await say(stack, client, kind, TEXT, route=route, stream=stream, stop="eight nine")
        assert (completion.text, completion.reason) == (TEXT, "stop")


@streams
@kinds
async def test_several_choices(stack: Stack, client: Client, kind: Kind, stream: bool) -> None:
    """Three numbered choices, each with its reason; usage counts the prompt once and every answer."""
    for route in ROUTES:
        one = await say(stack, client, kind, TEXT, route=route)
        completion = await say(stack, client, kind, TEXT, route=route, stream=stream, n=3)
        assert completion.texts == dict.fromkeys(range(3), TEXT)
        assert completion.reasons == dict.fromkeys(range(3), "stop")
        assert completion.token_counts[0] == one.token_counts[0]
        if kind.script_style == "guide":  # each choice is sampled separately, and a text can be tokenized in many ways
            assert completion.token_counts[1] > 3 * len(TEXT.split())
        else:
            assert completion.token_counts[1] == 3 * one.token_counts[1]


@kinds
async def test_a_seed(stack: Stack, client: Client, kind: Kind) -> None:
    """Each choice has its own seed, counted up; models that use seeds repeat their answers."""
    if "seed" not in kind.able:
        await refused(say(stack, client, kind, TEXT, seed=5, n=3), "seed")
        return
    if kind.script_style == "pieces":
        completion = await chat(client, kind, "echo", seed=5, n=3)
        assert [seed_in(completion.texts[index]) for index in range(3)] == [5, 6, 7]
        return
    fields: Any = {"seed": 5, "max_tokens": 12, "temperature": 1.0}
    alone = (await chat(client, kind, "some words", **fields)).text
    assert (await chat(client, kind, "some words", stream=True, **fields)).text == alone
    completion = await chat(client, kind, "some words", n=3, **fields)
    if kind.script_style != "words":
        assert len(set(completion.texts.values())) == 3
    if kind.script_style != "guide":  # its sums depend on the other requests of a step, which rarely changes a token
        assert completion.texts == (await chat(client, kind, "some words", n=3, stream=True, **fields)).texts
        assert completion.texts[0] == alone


def seed_in(text: str) -> int:
    """Return the seed that a model received, as a tensor or within vLLM's parameters."""
    parameters = json.loads(text)
    if "sampling_parameters" in parameters:
        parameters = json.loads(parameters["sampling_parameters"])
    return next(int(value) for name, value in parameters.items() if name.endswith("seed"))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.script_style == "pieces" and kind.model], ids=str)
async def test_the_prompt(client: Client, kind: Kind) -> None:
    """Text models get the rendered conversation without the first token, which their own tokenizer adds; for a
    completion they get the text itself."""
    inputs = json.loads((await chat(client, kind, "echo été 🐟")).text)
    assert inputs["text_input"] == render_chat("echo été 🐟").removeprefix("<s>")
    assert json.loads((await complete(client, kind, "echo été 🐟")).text)["text_input"] == "echo été 🐟"


@kinds
async def test_every_field(stack: Stack, client: Client, kind: Kind) -> None:
    """Each field is supported, or rejected by name before anything starts."""
    for name, fields in FIELDS.items():
        prompt = stack.prompt_for(kind, CALL if name == "tool_choice" else TEXT)
        beside = {} if name in ("response_format", "tool_choice") else prompt.fields  # one guide is enough
        options = {"max_tokens": 60, **fields, "extra_body": {**beside, **fields.get("extra_body", {})}}
        able = kind.able | ({"tool_choice"} if "response_format" in kind.able else set())
        if name in able:
            assert (await chat(client, kind, prompt.words, **options)).reasons, name
        else:
            wrong = "logprobs" if name == "top_logprobs" and "logprobs" not in kind.able else name
            await refused(chat(client, kind, prompt.words, **options), wrong)
            await refused(chat(client, kind, prompt.words, stream=True, **options), wrong)


async def refused(answer: Any, param: str, *, code: str | None = None) -> openai.BadRequestError:
    """Check for a 400 that names the field, and return it."""
    with pytest.raises(openai.BadRequestError) as caught:
        completion = await answer
        pytest.fail(f"{param} was not refused: {completion}")
    error = caught.value
    assert error.param == param, error
    assert error.type == "invalid_request_error"
    assert code is None or error.code == code
    assert len(error.message) > 20
    return error


@streams
@kinds
async def test_log_probabilities(stack: Stack, client: Client, kind: Kind, stream: bool) -> None:
    """One per token, so that they spell the text; models without them reject the request."""
    for route in ROUTES:
        options: Any = {"logprobs": True} if route == "chat" else {"logprobs": 0}
        if "logprobs" not in kind.able:
            await refused(say(stack, client, kind, "one two", route=route, stream=stream, **options), "logprobs")
            continue
        completion = await say(stack, client, kind, "one two", route=route, stream=stream, **options)
        assert completion.text == "one two"
        assert "".join(completion.logprobs) == "one two"
        assert len(completion.logprobs) >= 2


@kinds
async def test_an_unknown_field(stack: Stack, client: Client, kind: Kind) -> None:
    fields: Any = {"extra_body": {"some_new_field": {"deep": [1, None]}}, "user": "me", "metadata": {"a": "b"}}
    for stream in (False, True):
        assert (await say(stack, client, kind, TEXT, stream=stream, **fields)).text == TEXT


@kinds
async def test_a_tool(stack: Stack, client: Client, kind: Kind) -> None:
    """A call that the model writes becomes a tool call, streamed and not; its result is part of the next turn."""
    for stream in (False, True):
        prompt = stack.prompt_for(kind, f"well {CALL}")
        tools: Any = {"tools": [ADD], "stream": stream}
        completion = await chat(client, kind, prompt.words, extra_body=prompt.fields, **tools)
        assert (completion.text.strip(), completion.reason) == ("well", "tool_calls")
        assert completion.calls == {0: [("add", '{"a": 1}')]}
        [id] = completion.ids
        then = stack.prompt_for(kind, TEXT)
        calls = [{"id": id, "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]
        messages = [
            {"role": "user", "content": prompt.words},
            {"role": "assistant", "content": completion.text, "tool_calls": calls},
            {"role": "tool", "tool_call_id": id, "content": then.words},
        ]
        completion = await chat(client, kind, messages, extra_body=then.fields, **tools)
        assert (completion.text, completion.reason, completion.calls) == (TEXT, "stop", {0: []})


@routes
@streams
@kinds
async def test_an_error_before_the_first_token(
    stack: Stack, client: Client, kind: Kind, route: str, stream: bool
) -> None:
    """A status and an error body, streamed or not; the next request is answered."""
    prompt = stack.prompt_for(kind, TEXT, fails=0)
    if kind.script_style == "guide":  # this engine fails only by dying: see the end of this file
        prompt.fields["structured_outputs"] = {"regex": "(unclosed"}
    with pytest.raises(openai.APIStatusError) as caught:
        await ROUTES[route](client, kind, prompt.words, stream=stream, extra_body=prompt.fields)
    error = caught.value
    status = 400 if kind.script_style == "guide" else 500 if kind.name in ("fake", "upstream") else 502
    assert error.status_code == status
    assert error.response.headers["content-type"] == "application/json"
    reply = error.response.json()["error"]
    assert set(reply) == {"message", "type", "param", "code"}
    assert reply["message"]
    assert (await say(stack, client, kind, TEXT, route=route, stream=stream)).text == TEXT


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.name not in ("bls", "embedded")], ids=str)
async def test_an_error_in_mid_stream(stack: Stack, client: Client, kind: Kind) -> None:
    """The text before it arrives; then the error, without a finish reason or [DONE]. A model that answers in one
    piece fails before the first byte. The embedded engine fails only by dying: see the end of this file. Triton 2.51
    loses such an error of a model that another one calls."""
    prompt = stack.prompt_for(kind, TEXT, fails=2)
    with pytest.raises(openai.InternalServerError):
        await chat(client, kind, prompt.words)
    if not kind.streams:
        with pytest.raises(openai.InternalServerError):
            await chat(client, kind, prompt.words, stream=True)
        return
    for route in ("chat/completions", "completions"):
        words = {"prompt": prompt.words} if route == "completions" else {"messages": user_message(prompt.words)}
        body = {"model": kind.name, "stream": True, **words}
        response = await asyncio.to_thread(read_stream, stack, f"/v1/{route}", body)
        *events, error = [line.removeprefix("data: ") for line in response.splitlines() if line.startswith("data: ")]
        choices = [choice for event in events for choice in json.loads(event)["choices"]]
        texts = [choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices]
        assert "".join(texts) == "one two"
        assert {choice["finish_reason"] for choice in choices} == {None}
        assert set(json.loads(error)["error"]) == {"message", "type", "param", "code"}
    with pytest.raises(openai.APIError):
        await chat(client, kind, prompt.words, stream=True)


def user_message(words: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": words}]


def read_stream(stack: Stack, path: str, body: dict[str, Any]) -> str:
    with ask(stack.front, path, body) as connection:
        return read_until(connection, b"0\r\n\r\n").decode()


@kinds
async def test_a_prompt_that_is_too_long(stack: Stack, client: Client, kind: Kind) -> None:
    """Shoal rejects it before the model gets it if the context length is known; otherwise the model rejects it."""
    prompt = stack.prompt_for(kind, TEXT)
    for stream in (False, True):
        words = f"{TOO_LONG} {prompt.words}"
        if kind.knows_context:
            code = "context_length_exceeded"
            error = await refused(chat(client, kind, words, stream=stream), "messages", code=code)
            assert "maximum context length is 2048 tokens" in error.message
            await refused(complete(client, kind, words, stream=stream), "prompt", code=code)
        else:
            assert (await chat(client, kind, words, stream=stream)).text.startswith("one ")


@kinds
async def test_many_at_once(stack: Stack, client: Client, kind: Kind) -> None:
    """Sixteen clients, half of them streaming, each get their own answer."""

    async def one(number: int) -> None:
        text = f"this is number {number} of {16 * number}"
        for stream in (bool(number % 2), not number % 2):
            assert (await say(stack, client, kind, text, stream=stream)).text == text

    await asyncio.gather(*(one(number) for number in range(16)))


async def test_an_engine_that_dies_in_mid_stream(stack: Stack, client: Client) -> None:
    """The embedded engine is a process: its death fails the answers in progress, and no others; it works again after
    a reload."""
    kind = next(kind for kind in KINDS if kind.script_style == "guide")
    [worker] = processes_of(stack.front, "shoal.backends.genai.worker")
    body = {
        "model": kind.name,
        "stream": True,
        "messages": user_message("go on"),
        "ignore_eos": True,
        "max_tokens": 1900,
    }

    def broken() -> str:
        with ask(stack.front, "/v1/chat/completions", body) as connection:
            begun = read_until(connection, b'"content":')
            worker.kill()
            return (begun + read_until(connection, b"0\r\n\r\n")).decode()

    *_, error = [
        line.removeprefix("data: ")
        for line in (await asyncio.to_thread(broken)).splitlines()
        if line.startswith("data: ")
    ]
    assert set(json.loads(error)["error"]) == {"message", "type", "param", "code"}
    other = next(kind for kind in KINDS if kind.name == "fake")
    assert (await say(stack, client, other, TEXT)).text == TEXT
    await asyncio.to_thread(stack.front.request, "POST", "/models/load", {"model": kind.name})
    await asyncio.to_thread(until, stack.front.ready, what="the engine's return")
    assert (await say(stack, client, kind, TEXT)).text == TEXT
