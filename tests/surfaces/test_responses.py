"""OpenAI's Responses API: items in and out, typed events, and no stored state."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import EngineFailed, Overloaded
from shoal.types import Chunk, Guide, Message, Part, Sampling, Tool, ToolCall, ToolDelta, Usage
from tests.fakes.openai_server import fields_of
from tests.surfaces.surface_kit import Answer
from tests.surfaces.talk_kit import MODEL, FakeRunner, data_of, serve_chat

PATHS = ["/v1/responses", "/responses", "/v1/responses/", "/responses/"]
ADD = {"type": "function", "name": "add", "description": "Adds", "parameters": {"type": "object"}, "strict": True}
CALLS = [
    Chunk(reasoning="let me "),
    Chunk(reasoning="see"),
    Chunk(text="Adding."),
    Chunk(tools=[ToolDelta(index=0, id="call_a", name="add", arguments="")]),
    Chunk(tools=[ToolDelta(index=0, arguments='{"a":1}'), ToolDelta(index=1, id="call_b", name="sub")]),
    Chunk(tools=[ToolDelta(index=1, arguments="{}")]),
    Chunk(finish_reason="tool_calls"),
    Chunk(usage=Usage(prompt_tokens=5, completion_tokens=9, cached_tokens=1, reasoning_tokens=2)),
]


def ask(given_input: Any = "one two", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": given_input, **fields}


@pytest.mark.parametrize("path", PATHS)
async def test_an_answer(path: str) -> None:
    """Every key that OpenAI's clients read, on every spelling of the path."""
    body = (await serve_chat().call("POST", path, ask(instructions="be brief", user="u", metadata={"a": "b"}))).json()
    assert body.pop("id").startswith("resp_")
    assert body.pop("created_at") > 1_700_000_000
    (item,) = body.pop("output")
    assert item.pop("id").startswith("msg_")
    part = {"type": "output_text", "text": "one two", "annotations": [], "logprobs": []}
    assert item == {"type": "message", "role": "assistant", "status": "completed", "content": [part]}
    assert body == {
        **{"object": "response", "status": "completed", "background": False, "error": None, "model": MODEL},
        **{"incomplete_details": None, "instructions": "be brief", "max_output_tokens": None, "metadata": {"a": "b"}},
        **{"parallel_tool_calls": True, "previous_response_id": None, "temperature": None, "top_p": None},
        **{"reasoning": {"effort": None, "summary": None}, "store": True, "text": {"format": {"type": "text"}}},
        **{"tool_choice": "auto", "tools": [], "truncation": "disabled", "user": "u"},
        "usage": {
            "input_tokens": 7,
            "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
            "output_tokens": 2,
            "output_tokens_details": {"reasoning_tokens": 1},
            "total_tokens": 9,
        },
    }


async def test_items_become_messages() -> None:
    """Calls join their turn, reasoning joins the turn after it."""
    server = serve_chat()
    image = {"type": "input_image", "image_url": "https://a.example/b.png", "detail": "auto"}
    items = [
        {"role": "developer", "content": "be kind"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "see"}, image]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "of another server"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok"}]},
        {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": '{"a":1}'},
        {"type": "function_call", "call_id": "call_2", "name": "sub", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": "3"},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "4"}]},
        {"type": "function_call", "call_id": "call_3", "name": "add", "arguments": "{}"},
        {"type": "reasoning", "summary": []},
        {"role": "user", "content": "go on"},
    ]
    assert (await server.call("POST", PATHS[0], ask(items, instructions="be brief"))).status == 200
    one, two, three = (ToolCall(id=f"call_{at}", name=name) for at, name in ((1, "add"), (2, "sub"), (3, "add")))
    calls = [ToolCall(id=one.id, name="add", arguments='{"a":1}'), ToolCall(id=two.id, name="sub", arguments="{}")]
    assert server.runner.task.messages == [
        Message(role="system", content="be brief"),
        Message(role="developer", content="be kind"),
        Message(role="user", content=[Part(text="see"), Part(type="image", url="https://a.example/b.png")]),
        Message(role="assistant", content="ok", tool_calls=calls, reasoning="hm"),
        Message(role="tool", content="3", tool_call_id="call_1"),
        Message(role="tool", content="4", tool_call_id="call_2"),
        Message(role="assistant", tool_calls=[ToolCall(id=three.id, name="add", arguments="{}")]),
        Message(role="user", content="go on"),
    ]


async def test_fields_reach_the_task() -> None:
    """The answer repeats them."""
    server = serve_chat()
    form = {"type": "json_schema", "name": "a", "schema": {"type": "object"}, "strict": True}
    fields = {
        **{"max_output_tokens": 9, "temperature": 0.5, "top_p": 0.25, "top_logprobs": 2, "store": True},
        **{"tools": [ADD], "tool_choice": {"type": "function", "name": "add"}, "parallel_tool_calls": False},
        **{"text": {"format": form, "verbosity": "low"}, "reasoning": {"effort": "high"}, "future": 1},
    }
    sent = orjson.dumps(ask(**fields))
    body = (await server.call("POST", PATHS[0], body=sent)).json()
    task = server.runner.task
    guide = Guide(kind="json_schema", value='{"type":"object"}', field="text", name="a", strict=True)
    assert task.sampling == Sampling(max_tokens=9, temperature=0.5, top_p=0.25, logprobs=2, guide=guide)
    assert task.tools == [Tool(name="add", description="Adds", parameters={"type": "object"}, strict=True)]
    assert (task.tool_choice, task.tool_name, task.parallel_tool_calls) == ("function", "add", False)
    assert (task.template_kwargs, task.raw, set(task.extras)) == (
        {"reasoning_effort": "high"},
        ("openai.responses", fields_of(sent)),
        {"future", "verbosity"},
    )
    assert body["tools"] == [ADD]
    assert body["tool_choice"] == {"type": "function", "name": "add"}
    assert body["text"] == {"format": form, "verbosity": "low"}
    assert (body["store"], body["reasoning"]["effort"], body["max_output_tokens"]) == (True, "high", 9)


async def test_tool_calls() -> None:
    """Reasoning, text and calls are separate items, in this order."""
    body = (await serve_chat(FakeRunner(reply=lambda task: CALLS)).call("POST", PATHS[0], ask(tools=[ADD]))).json()
    thought, message, add, sub = body["output"]
    assert (thought["type"], thought["content"]) == ("reasoning", [{"type": "reasoning_text", "text": "let me see"}])
    assert (message["type"], message["content"][0]["text"]) == ("message", "Adding.")
    assert [(each["call_id"], each["name"], each["arguments"]) for each in (add, sub)] == [
        ("call_a", "add", '{"a":1}'),
        ("call_b", "sub", "{}"),
    ]
    assert len({each["id"] for each in body["output"]}) == 4


@pytest.mark.parametrize(
    ("reason", "why"), [("length", "max_output_tokens"), ("content_filter", "content_filter"), ("stop", None)]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_truncated_answers(reason: str, why: str | None, stream: bool) -> None:
    """They are incomplete, with the reason."""
    chunks = [Chunk(text="half"), Chunk(finish_reason=reason), Chunk(usage=Usage())]
    answer = await serve_chat(FakeRunner(reply=lambda task: chunks)).call("POST", PATHS[0], ask(stream=stream))
    body = data_of(answer.body)[-1]["response"] if stream else answer.json()
    status = "incomplete" if why else "completed"
    assert (body["status"], body["incomplete_details"]) == (status, {"reason": why} if why else None)
    assert body["output"][0]["status"] == status
    if stream:
        assert data_of(answer.body)[-1]["type"] == f"response.{status}"


async def test_an_empty_answer() -> None:
    """One message without text."""
    chunks = [Chunk(finish_reason="stop"), Chunk(usage=Usage())]
    body = (await serve_chat(FakeRunner(reply=lambda task: chunks)).call("POST", PATHS[0], ask())).json()
    assert [each["content"][0]["text"] for each in body["output"]] == [""]


async def test_typed_events() -> None:
    """Each item is added, sent in deltas, then done; events have sequence numbers, and their type twice."""
    answer = await serve_chat(FakeRunner(reply=lambda task: CALLS)).call(
        "POST", PATHS[0], ask(stream=True, tools=[ADD])
    )
    events = data_of(answer.body)
    names = [line.removeprefix("event: ") for line in answer.body.decode().split("\n") if line.startswith("event: ")]
    assert [each["type"] for each in events] == names
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    assert b"[DONE]" not in answer.body
    text = ["output_item.added", "content_part.added"]
    assert [each.removeprefix("response.") for each in names] == [
        *("created", "in_progress"),
        *(*text, "reasoning_text.delta", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *(*text, "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta"),
        *("output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        *("function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    whole = events[-1]["response"]
    assert [each["item"] for each in events if each["type"] == "response.output_item.done"] == whole["output"]
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}
    deltas = [each for each in events if each["type"] == "response.function_call_arguments.delta"]
    assert [each["output_index"] for each in deltas] == [2, 3]
    assert {each["response"]["id"] for each in events if "response" in each} == {whole["id"]}


@pytest.mark.parametrize(
    ("error", "code"), [(EngineFailed("x"), "server_error"), (Overloaded("x"), "rate_limit_exceeded")]
)
async def test_errors_in_mid_stream(error: Exception, code: str) -> None:
    """The response failed, with the partial output."""
    answer = await serve_chat(FakeRunner(error=error, fail_after=1)).call("POST", PATHS[0], ask(stream=True))
    last = data_of(answer.body)[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": code, "message": "x"}
    (item,) = last["response"]["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "one")
    ended = [each["type"] for each in data_of(answer.body)[-4:-1]]
    assert ended == ["response.output_text.done", "response.content_part.done", "response.output_item.done"]


async def test_an_upstream_is_passed_on() -> None:
    """Its events byte for byte, and no others; a later failure is an error event."""
    raw = b'event: response.created\ndata: {"type":"response.created"}\n\n'
    chunks = [Chunk(raw=("openai.responses", raw), usage=Usage(completion_tokens=1))]
    assert (
        await serve_chat(FakeRunner(reply=lambda task: chunks)).call("POST", PATHS[0], ask(stream=True))
    ).body == raw
    failing = FakeRunner(reply=lambda task: chunks, error=EngineFailed("gone"), fail_after=1)
    answer: Answer = await serve_chat(failing).call("POST", PATHS[0], ask(stream=True))
    error = data_of(answer.body)[-1]
    assert answer.body.startswith(raw)
    assert (error["type"], error["message"], error["code"], error["param"]) == ("error", "gone", "server_error", None)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not stored here"),
        ({"conversation": "conv_1"}, "conversation", "no such objects"),
        ({"conversation": {"id": "conv_1"}}, "conversation", "no such objects"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "no such objects"),
        ({"background": True}, "background", "set 'stream' to true"),
        ({"input": ""}, "input", "is empty"),
        ({"input": []}, "input", "is empty"),
        ({"input": None}, "input", "got `null`"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "'input[0]': Item with id 'x' not found"),
        ({"input": [{"content": "x"}]}, "input", "of type ''"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input", "needs a 'role'"),
        ({"input": [{"role": "user"}]}, "input", "needs a 'role'"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input", "'input_file'"),
        ({"input": [{"type": "function_call", "name": "a"}]}, "input", "'call_id'"),
        ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input", "'output'"),
        ({"tools": [{"type": "namespace"}]}, "tools", "'tools[0].name'"),
        ({"tools": [{"type": "custom", "name": "a", "format": 7}]}, "tools", "the format of 'a'"),
        ({"tools": [{"type": "function"}]}, "tools", "'tools[0].name'"),
        ({"tools": [ADD], "tool_choice": {"type": "file_search"}}, "tool_choice", "'file_search'"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "which is not in"),
        ({"tool_choice": "required"}, "tool_choice", "there are none"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text", "'text.format.schema' is missing"),
        ({"text": {"format": {"type": "json_schema", "schema": 7}}}, "text", "not an object"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"temperature": 3}, "temperature", "<= 2"),
        ({"top_logprobs": 21}, "top_logprobs", "<= 20"),
    ],
)
async def test_bad_bodies(fields: dict[str, Any], param: str, words: str) -> None:
    """Each is a 400 that names the field, and no work."""
    server = serve_chat()
    answer = await server.call("POST", PATHS[0], {**ask(), **fields})
    error = answer.json()["error"]
    assert (answer.status, error["type"], error["param"]) == (400, "invalid_request_error", param), error
    assert words in error["message"]
    assert server.runner.tasks == []


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"input": ""}, "invalid_value"),
        ({"previous_response_id": "resp_1"}, "invalid_value"),
        ({"tools": [{"type": "function"}]}, None),
        ({"conversation": "conv_1"}, "unsupported_parameter"),
    ],
)
async def test_codes_of_bad_bodies(fields: dict[str, Any], code: str | None) -> None:
    """What a server behind might understand is refused late, as what it is: not all of it is unsupported."""
    answer = await serve_chat().call("POST", PATHS[0], {**ask(), **fields})
    assert (answer.status, answer.json()["error"]["code"]) == (400, code)


@pytest.mark.parametrize(
    "fields",
    [
        {"store": True},
        {"background": False},
        {"truncation": "disabled"},
        {"previous_response_id": None, "conversation": None, "prompt": None, "text": None, "reasoning": None},
        {"text": {"format": {"type": "json_object"}}, "include": ["reasoning.encrypted_content"]},
        {"max_output_tokens": -1, "service_tier": "auto", "stream_options": {"include_obfuscation": False}},
    ],
)
async def test_fields_without_effect(fields: dict[str, Any]) -> None:
    """Fields that clients send by default are accepted."""
    assert (await serve_chat().call("POST", PATHS[0], ask(**fields))).status == 200


async def test_calls_in_one_turn() -> None:
    """All calls of a turn go to one message, which is not copied for each; more than 128 are rejected."""
    call = {"type": "function_call", "call_id": "a", "name": "add", "arguments": "{}"}
    question = {"role": "user", "content": "x"}
    server = serve_chat()
    assert (await server.call("POST", PATHS[0], {"input": [question, *[call] * 128]})).status == 200
    message, turn = server.runner.task.messages
    assert (message.role, turn.role, len(turn.tool_calls)) == ("user", "assistant", 128)
    answer = await server.call("POST", PATHS[0], {"input": [question, *[call] * 129]})
    assert (answer.status, answer.json()["error"]["param"]) == (400, "input")
    assert "128 function calls" in answer.json()["error"]["message"]


async def test_a_failure_before_the_answer() -> None:
    """No items are invented only to be closed."""
    chunks = [Chunk(), Chunk(text="x")]
    answer = await serve_chat(FakeRunner(reply=lambda task: chunks, error=EngineFailed("x"), fail_after=1)).call(
        "POST", PATHS[0], ask(stream=True)
    )
    events = data_of(answer.body)
    assert [each["type"] for each in events] == ["response.created", "response.in_progress", "response.failed"]
    assert events[-1]["response"]["output"] == []


async def test_logprobs() -> None:
    """They are requested by `include`, and sent with the text."""
    answer = await serve_chat().call("POST", PATHS[0], ask(include=["message.output_text.logprobs"], stream=True))
    deltas = [each for each in data_of(answer.body) if each["type"] == "response.output_text.delta"]
    assert [each["logprobs"][0]["token"] for each in deltas] == ["one", " two"]


leaves = st.none() | st.booleans() | st.integers() | st.text(max_size=6)
leaves |= st.sampled_from(["message", "function_call", "function_call_output", "reasoning", "user", "input_text"])
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner), max_leaves=6
)
item = st.fixed_dictionaries(
    {"type": leaves}, optional=dict.fromkeys(("role", "content", "call_id", "name", "arguments", "output"), values)
)
names = [
    "instructions",
    "tools",
    "tool_choice",
    "text",
    "stream",
    "reasoning",
    "include",
    "metadata",
    "max_output_tokens",
]


@given(
    body=st.fixed_dictionaries({"input": st.lists(item, max_size=3) | values}, optional=dict.fromkeys(names, values))
)
def test_any_json(body: Any) -> None:
    """Any JSON gets an answer, or an error in OpenAI's format."""
    answer = asyncio.run(serve_chat().call("POST", PATHS[0], body=json.dumps(body).encode()))
    assert answer.status in (200, 400)
    if answer.status == 400:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
