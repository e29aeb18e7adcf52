"""Rejected chat completions: every limit, and arbitrary bodies."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.types import Message
from tests.surfaces.talk_kit import MODEL, serve_chat
from tests.surfaces.test_chat import ADD, PATHS, ask

BAD: list[tuple[dict[str, Any], str | None, str]] = [
    (ask(messages=[]), "messages", ">= 1"),
    (ask(messages=None), "messages", "got `null`"),
    (ask(messages="hi"), "messages", "got `str`"),
    ({"model": MODEL}, "messages", "Missing required field 'messages'"),
    (ask({"role": "robot", "content": "a"}), "messages", "'messages[0].role' is invalid"),
    (ask({"content": "a"}), "messages", "'messages[0].role'"),
    (ask({"role": "user"}), "messages", "'messages[0].content' is missing"),
    (ask({"role": "user", "content": [{"type": "hologram", "hologram": {}}]}), "messages", "'hologram'"),
    (ask({"role": "user", "content": [{"type": "text"}]}), "messages", "without its content; add"),
    (
        ask({"role": "user", "content": [{"type": "image_url", "image_url": {"url": ""}}]}),
        "messages",
        "without its content; add",
    ),
    (ask(max_tokens=0), "max_tokens", "at least 1"),
    (ask(max_completion_tokens=0), "max_completion_tokens", "at least 1"),
    (ask(max_tokens=-2), "max_tokens", ">= -1"),
    (ask(max_tokens=1.5), "max_tokens", "got `float`"),
    (ask(temperature=2.1), "temperature", "<= 2"),
    (ask(temperature=-0.1), "temperature", ">= 0"),
    (ask(top_p=1.1), "top_p", "<= 1"),
    (ask(presence_penalty=2.5), "presence_penalty", "<= 2"),
    (ask(frequency_penalty=-2.5), "frequency_penalty", ">= -2"),
    (ask(n=0), "n", ">= 1"),
    (ask(n=129), "n", "<= 128"),
    (ask(seed=2**63), "seed", "<= 9223372036854775807"),
    (ask(stop=["a"] * 5), "stop", "<= 4"),
    (ask(stop=7), "stop", "got `int`"),
    (ask(top_logprobs=2), "top_logprobs", "requires 'logprobs'"),
    (ask(logprobs=True, top_logprobs=21), "top_logprobs", "<= 20"),
    (ask(logprobs=2), "logprobs", "got `int`"),
    (ask(logit_bias={"7": 101}), "logit_bias", "-100 to 100"),
    (ask(logit_bias={"seven": 1}), "logit_bias", "token ids"),
    (ask(logit_bias=[1]), "logit_bias", "got `array`"),
    (ask(logit_bias={str(each): 1 for each in range(4097)}), "logit_bias", "more than 4096"),
    (ask(tools=[{"type": "web_search"}]), "tools", "'web_search'"),
    (ask(tools=[{"type": "function"}]), "tools", "'tools[0].function'"),
    (ask(tools=[{"type": "function", "function": {"name": ""}}]), "tools", ">= 1"),
    (ask(tool_choice="required"), "tool_choice", "there are none"),
    (ask(tools=[ADD], tool_choice="always"), "tool_choice", "'always'"),
    (ask(tools=[ADD], tool_choice={"type": "allowed_tools"}), "tool_choice", "'allowed_tools'"),
    (ask(tools=[ADD], tool_choice={"type": "function"}), "tool_choice", "'tool_choice.function'"),
    (
        ask(tools=[ADD], tool_choice={"type": "function", "function": {"name": "mul"}}),
        "tool_choice",
        "not in 'tools'.",
    ),
    (ask(functions=[ADD["function"]], function_call={"name": "x"}), "function_call", "not in 'tools'."),
    (ask(response_format={"type": "xml"}), "response_format", "'xml'"),
    (ask(response_format={"type": "json_schema"}), "response_format", "schema' is missing"),
    (ask(response_format={"type": "json_schema", "json_schema": {"name": "a"}}), "response_format", "is missing"),
    (ask(response_format={"type": "json_schema", "json_schema": 7}), "response_format", "got `int`"),
    (ask(guided_json="{"), "guided_json", "could not be read"),
    (ask(guided_json="7"), "guided_json", "not an object"),
    (ask(guided_json={}, guided_regex="a"), "guided_regex", "send one of them"),
    (ask(structured_outputs={"regex": "a", "grammar": "b"}), "structured_outputs", "send one of them"),
    (ask(continue_final_message=True, add_generation_prompt=True), "continue_final_message", "mutually exclusive"),
    (ask(chat_template_kwargs=[1]), "chat_template_kwargs", "got `array`"),
    (ask(stream="yes"), "stream", "got `str`"),
]


@pytest.mark.parametrize(("body", "param", "words"), BAD)
async def test_bad_bodies(body: dict[str, Any], param: str | None, words: str) -> None:
    """Each is a 400 that names the field, and no work."""
    server = serve_chat()
    answer = await server.call("POST", PATHS[0], body)
    error = answer.json()["error"]
    assert answer.status == 400, error
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert words in error["message"]
    assert server.runner.tasks == []


@pytest.mark.parametrize("field", ["tools", "response_format", "chat_template_kwargs"])
async def test_schemas_that_are_too_deep(field: str) -> None:
    """At most 64 levels: a template or a grammar might not return from more."""
    deep: Any = {}
    for _ in range(70):
        deep = {"properties": deep}
    fields: dict[str, Any] = {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": deep}}],
        "response_format": {"type": "json_schema", "json_schema": {"schema": deep}},
        "chat_template_kwargs": deep,
    }
    answer = await serve_chat().call("POST", PATHS[0], ask(**{field: fields[field]}))
    assert (answer.status, answer.json()["error"]["param"]) == (400, field)
    assert "deeper than 64" in answer.json()["error"]["message"]


async def test_large_bodies() -> None:
    """A long conversation is accepted; a body with too many values, or too much besides the messages, is not."""
    server = serve_chat()
    long = "word " * 100_000
    assert (await server.call("POST", PATHS[0], ask({"role": "user", "content": long}, future=1))).status == 200
    assert server.runner.task.messages == [Message(role="user", content=long)]
    assert set(server.runner.task.extras) == {"future"}
    many = ask(*[{"role": "user", "content": []}] * 120_000)
    answer = await server.call("POST", PATHS[0], many)
    assert (answer.status, answer.json()["error"]["param"]) == (400, "messages")
    answer = await server.call("POST", PATHS[0], ask(metadata={"a": "x" * 1_100_000}))
    assert (answer.status, "besides 'messages'" in answer.json()["error"]["message"]) == (400, True)


names = st.sampled_from(
    ["messages", "role", "content", "type", "text", "tools", "function", "name", "stream", "n", "stop", "logit_bias"]
)
leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
leaves |= st.sampled_from(["user", "assistant", "text", "image_url", "function", "json_schema"])
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names | st.text(max_size=4), inner),
    max_leaves=10,
)
message = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"]) | values, "content": st.text(max_size=8) | values},
    optional={"tool_calls": values, "function_call": values},
)
fields = [
    *("tools", "tool_choice", "response_format", "logit_bias", "stop", "n", "max_tokens", "stream", "stream_options"),
    *("functions", "guided_json", "structured_outputs", "chat_template_kwargs", "logprobs", "temperature"),
]


@given(
    body=st.fixed_dictionaries(
        {"messages": st.lists(message, max_size=3) | values}, optional=dict.fromkeys(fields, values)
    )
)
def test_any_json(body: Any) -> None:
    """Any JSON gets an answer, or an error in OpenAI's format."""
    sent = json.dumps(body).encode()  # unlike faster encoders, it writes any number
    answer = asyncio.run(serve_chat().call("POST", PATHS[0], body=sent))
    assert answer.status in (200, 400)
    if answer.status == 400:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


CALL = b'{"id":"c","call_id":"c","type":"%s","name":"f","%s":{"\xff":1}}'


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/responses", b'"input":[%b]' % (CALL % (b"function_call", b"arguments"))),
        ("/v1/messages", b'"messages":[{"role":"assistant","content":[%b]}]' % (CALL % (b"tool_use", b"input"))),
        ("/api/chat", b'"messages":[{"role":"user","content":"a"}],"options":{"\xff":1}'),
    ],
)
async def test_texts_that_are_not_utf8(path: str, fields: bytes) -> None:
    """Also where JSON is passed on as it came: its decoder does not read texts that it skips."""
    body = b'{"model":"%b",%b}' % (MODEL.encode(), fields)
    answer = await serve_chat().call("POST", path, body=body, headers={"content-type": "application/json"})
    assert answer.status == 400, answer.body
    assert b"is not UTF-8; encode it as UTF-8" in answer.body
