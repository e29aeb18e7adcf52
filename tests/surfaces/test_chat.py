"""Chat completions: fields reach the task, and chunks come back in OpenAI's format."""

from __future__ import annotations

import logging
from typing import Any

import orjson
import pytest

from shoal.errors import Overloaded, TooLong, UpstreamRefused
from shoal.types import Chunk, Guide, Message, Part, Sampling, TokenLogprob, Tool, ToolCall, ToolDelta, Usage
from tests.fakes.openai_server import fields_of
from tests.surfaces.surface_kit import serve
from tests.surfaces.talk_kit import MODEL, FakeRunner, serve_chat

USER = {"role": "user", "content": "one two three"}
ADD = {"type": "function", "function": {"name": "add", "description": "Adds", "parameters": {"type": "object"}}}
PATHS = ["/v1/chat/completions", "/chat/completions", "/v1/chat/completions/", "/chat/completions/"]


def ask(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": list(messages or (USER,)), **fields}


@pytest.mark.parametrize("path", PATHS)
async def test_an_answer(path: str) -> None:
    """All keys of OpenAI's answer, on every spelling of the path; the id has the prefix, the time is current."""
    server = serve_chat()
    answer = await server.call("POST", path, ask())
    body = answer.json()
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["server-timing"].startswith("first;dur=")
    assert body.pop("id").startswith("chatcmpl-")
    assert body.pop("created") > 1_700_000_000
    assert set(body.pop("timings")) == {
        *("prompt_n", "prompt_ms", "prompt_per_second"),
        *("predicted_n", "predicted_ms", "predicted_per_second", "cache_n"),
    }
    assert body == {
        "object": "chat.completion",
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "one two three", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 3,
            "total_tokens": 10,
            "prompt_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0, "audio_tokens": 0},
            "completion_tokens_details": {
                "reasoning_tokens": 1,
                "audio_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        },
    }


async def test_ids_differ() -> None:
    """Ids have at least 24 random characters, so that none repeats."""
    server = serve_chat()
    ids = {(await server.call("POST", PATHS[0], ask())).json()["id"] for _ in range(20)}
    assert len(ids) == 20
    assert {len(each.removeprefix("chatcmpl-")) >= 24 for each in ids} == {True}


@pytest.mark.parametrize("model", [None, "", MODEL, f"{MODEL}:latest"])
async def test_the_default_model(model: str | None) -> None:
    """The model may be omitted; the answer names the default."""
    server = serve_chat()
    answer = await server.call("POST", PATHS[0], {"messages": [USER], "model": model})
    assert (answer.json()["model"], server.runner.task.model, server.runner.task.adapter) == (
        MODEL,
        MODEL,
        "",
    )


async def test_adapters() -> None:
    """MODEL:ADAPTER selects a LoRA, and the answer names it."""
    server = serve_chat()
    answer = await server.call("POST", PATHS[0], ask(model=f"{MODEL}:loud"))
    assert (answer.json()["model"], server.runner.task.model, server.runner.task.adapter) == (
        f"{MODEL}:loud",
        MODEL,
        "loud",
    )
    answer = await server.call("POST", PATHS[0], ask(model=f"{MODEL}:quiet"))
    assert (answer.status, answer.json()["error"]["code"]) == (404, "model_not_found")


async def test_a_model_that_embeds() -> None:
    """The model exists but cannot generate: 400."""
    answer = await serve().call("POST", PATHS[0], {"model": "mini", "messages": [USER]})
    assert (answer.status, answer.json()["error"]["param"]) == (400, "model")


async def test_sampling_reaches_the_task() -> None:
    """Every field of OpenAI and vLLM arrives under its name in the task."""
    same: dict[str, Any] = {
        **{"temperature": 0.5, "top_p": 0.25, "seed": -5, "presence_penalty": -2, "frequency_penalty": 2},
        **{"top_k": 40, "min_p": 0.125, "repetition_penalty": 1.5, "length_penalty": 0.5, "stop_token_ids": [7, 8]},
        **{"min_tokens": 3, "ignore_eos": True, "skip_special_tokens": False, "bad_words": ["bad"]},
    }
    server = serve_chat()
    renamed = {"include_stop_str_in_output": True, "logit_bias": {"50256": -100, "7": 1.5}, "max_tokens": 9}
    answer = await server.call("POST", PATHS[0], ask(stop=["a", "b", ""], logprobs=True, **same, **renamed))
    assert answer.status == 200
    assert server.runner.task.sampling == Sampling(
        **same, stop=["a", "b"], logprobs=0, include_stop=True, logit_bias={50256: -100.0, 7: 1.5}, max_tokens=9
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": None}, 5),
        ({"max_tokens": -1}, None),
    ],
)
async def test_max_tokens(fields: dict[str, Any], expected: int | None) -> None:
    """The newer name wins; -1 means no limit, as clients of other servers send it."""
    server = serve_chat()
    await server.call("POST", PATHS[0], ask(**fields))
    assert server.runner.task.sampling.max_tokens == expected


async def test_null_means_absent() -> None:
    """A null field is the same as an absent field."""
    server = serve_chat()
    await server.call("POST", PATHS[0], ask())
    names = [
        *("max_tokens", "temperature", "top_p", "n", "seed", "stop", "presence_penalty", "frequency_penalty"),
        *("logit_bias", "stream", "stream_options", "response_format", "user", "top_k", "logprobs", "top_logprobs"),
        *("tools", "tool_choice", "parallel_tool_calls", "functions", "function_call", "reasoning_effort", "metadata"),
        *("store", "chat_template_kwargs", "continue_final_message", "add_generation_prompt", "guided_json"),
        *("structured_outputs", "include_reasoning", "max_completion_tokens", "bad_words", "modalities"),
    ]
    answer = await server.call("POST", PATHS[0], ask(**dict.fromkeys(names)))
    assert answer.status == 200
    plain, nulls = ({**_fields(task), "raw": None} for task in server.runner.tasks)
    assert plain == nulls


def _fields(task: Any) -> dict[str, Any]:
    return {name: getattr(task, name) for name in task.__struct_fields__}


async def test_messages() -> None:
    """Roles, texts, parts, images, tool calls and results, reasoning, and the functions that preceded tools."""
    server = serve_chat()
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA", "detail": "low"}}
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": "be brief"},
        {"role": "system", "content": [{"type": "text", "text": "be kind"}], "name": "boss"},
        {"role": "user", "content": [{"type": "text", "text": "see"}, image]},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
        {"role": "assistant", "content": None, "function_call": {"name": "sub", "arguments": "{}"}},
        {"role": "function", "name": "sub", "content": "4"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "reasoning": "well"},
        {"role": "assistant", "content": None, "refusal": "never"},
        {"role": "assistant"},
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}]},
        {"role": "user", "content": ""},
    ]
    answer = await server.call("POST", PATHS[0], ask(*messages))
    assert answer.status == 200
    assert server.runner.task.messages == [
        Message(role="developer", content="be brief"),
        Message(role="system", content="be kind", name="boss"),
        Message(role="user", content=[Part(text="see"), Part(type="image", url="data:image/png;base64,AA")]),
        Message(
            role="assistant",
            tool_calls=[ToolCall(id="call_1", name="add", arguments='{"a":1}')],
            reasoning="hm",
        ),
        Message(role="tool", content="3", tool_call_id="call_1"),
        Message(role="assistant", tool_calls=[ToolCall(id="call_sub", name="sub", arguments="{}")]),
        Message(role="function", content="4", name="sub", tool_call_id="call_sub"),
        Message(role="assistant", content="no", reasoning="well"),
        Message(role="assistant", content="never"),
        Message(role="assistant", content=""),
        Message(role="user", content=[Part(type="other", kind="input_audio")]),
        Message(role="user", content=""),
    ]


@pytest.mark.parametrize(
    ("choice", "mode", "name"),
    [
        (None, "auto", ""),
        ("auto", "auto", ""),
        ("none", "none", ""),
        ("required", "required", ""),
        ({"type": "function", "function": {"name": "add"}}, "function", "add"),
    ],
)
async def test_tools(choice: Any, mode: str, name: str) -> None:
    """Functions keep their schemas, and `tool_choice` becomes mode and name."""
    server = serve_chat()
    strict = {"type": "function", "function": {"name": "sub", "strict": True}}
    await server.call("POST", PATHS[0], ask(tools=[ADD, strict], tool_choice=choice, parallel_tool_calls=False))
    task = server.runner.task
    assert task.tools == [
        Tool(name="add", description="Adds", parameters={"type": "object"}),
        Tool(name="sub", strict=True),
    ]
    assert (task.tool_choice, task.tool_name, task.parallel_tool_calls) == (mode, name, False)


async def test_deprecated_functions() -> None:
    """`functions` are tools, and `function_call` chooses among them."""
    server = serve_chat()
    fields = {"functions": [ADD["function"]], "function_call": {"name": "add"}}
    await server.call("POST", PATHS[0], ask(**fields))
    task = server.runner.task
    assert ([tool.name for tool in task.tools], task.tool_choice, task.tool_name) == (["add"], "function", "add")


@pytest.mark.parametrize(
    ("fields", "guide"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Guide(kind="json_object")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}},
            Guide(kind="json_schema", value='{"type":"object"}'),
        ),
        (
            {"response_format": {"type": "structural_tag", "structures": [], "triggers": ["<f"]}},
            Guide(kind="structural_tag", value='{"type":"structural_tag","structures":[],"triggers":["<f"]}'),
        ),
        ({"guided_json": {"type": "array"}}, Guide(kind="json_schema", value='{"type":"array"}', field="guided_json")),
        (
            {"guided_json": '{"type": "array"}'},
            Guide(kind="json_schema", value='{"type": "array"}', field="guided_json"),
        ),
        ({"guided_regex": "a+"}, Guide(kind="regex", value="a+", field="guided_regex")),
        ({"guided_choice": ["a", "b"]}, Guide(kind="choice", value='["a","b"]', field="guided_choice")),
        ({"guided_grammar": "root ::= x"}, Guide(kind="grammar", value="root ::= x", field="guided_grammar")),
        ({"structured_outputs": {"regex": "a+"}}, Guide(kind="regex", value="a+", field="structured_outputs")),
        (
            {"structured_outputs": {"json": {"a": 1}}},
            Guide(kind="json_schema", value='{"a":1}', field="structured_outputs"),
        ),
        ({"structured_outputs": {"choice": ["a"]}}, Guide(kind="choice", value='["a"]', field="structured_outputs")),
        ({"structured_outputs": {"json_object": True}}, Guide(kind="json_object", field="structured_outputs")),
        ({"structured_outputs": {}}, None),
    ],
)
async def test_guides(fields: dict[str, Any], guide: Guide | None) -> None:
    """Each field for guided output; a schema text stays unchanged."""
    server = serve_chat()
    answer = await server.call("POST", PATHS[0], ask(**fields))
    assert answer.status == 200
    assert server.runner.task.sampling.guide == guide


async def test_template_arguments() -> None:
    """Open WebUI's "continue", and the fields for templates."""
    server = serve_chat()
    fields = {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low", "include_reasoning": False}
    await server.call("POST", PATHS[0], ask(continue_final_message=True, add_generation_prompt=False, **fields))
    task = server.runner.task
    assert task.template_kwargs == {"enable_thinking": False, "reasoning_effort": "low"}
    assert (task.continue_final, task.add_generation_prompt, task.include_reasoning) == (True, False, False)
    await server.call("POST", PATHS[0], ask(continue_final_message=True))
    assert server.runner.task.add_generation_prompt is False


async def test_the_raw_body_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    """Backends that speak the dialect get the fields byte for byte; unknown ones are kept, and logged once per name."""
    server = serve_chat()
    body = orjson.dumps(ask(truncate_prompt_tokens=5, future={"deep": [1]}))
    with caplog.at_level(logging.INFO, logger="shoal.http"):
        for _ in range(2):
            await server.call("POST", PATHS[0], body=body)
    task = server.runner.task
    assert task.raw == ("openai.chat", fields_of(body))
    assert {name: bytes(raw) for name, raw in task.extras.items()} == {
        "truncate_prompt_tokens": b"5",
        "future": b'{"deep":[1]}',
    }
    assert caplog.text.count("future") == caplog.text.count("truncate_prompt_tokens") == 1


async def test_several_choices() -> None:
    """`n` answers, each with its index."""
    server = serve_chat()
    choices = (await server.call("POST", PATHS[0], ask(n=3))).json()["choices"]
    assert [each["index"] for each in choices] == [0, 1, 2]
    assert server.runner.task.n == 3


async def test_logprobs() -> None:
    """The chosen token and the top tokens, with their bytes; minus infinity becomes -9999."""
    tokens = [
        TokenLogprob(token="é", logprob=-0.5, top=[TokenLogprob(token="\ufffd", data=b"\xc3", logprob=float("-inf"))])
    ]
    server = serve_chat(FakeRunner(reply=lambda task: [Chunk(text="é", logprobs=tokens), Chunk(finish_reason="stop")]))
    answer = await server.call("POST", PATHS[0], ask(logprobs=True, top_logprobs=1))
    assert server.runner.task.sampling.logprobs == 1
    assert answer.json()["choices"][0]["logprobs"] == {
        "content": [
            {
                "token": "é",
                "logprob": -0.5,
                "bytes": [195, 169],
                "top_logprobs": [{"token": "\ufffd", "logprob": -9999.0, "bytes": [195]}],
            }
        ],
        "refusal": None,
    }


CALLS = [
    Chunk(reasoning="let me see"),
    Chunk(tools=[ToolDelta(index=0, id="call_a", name="add", arguments="")]),
    Chunk(tools=[ToolDelta(index=0, arguments='{"a":')]),
    Chunk(tools=[ToolDelta(index=0, arguments="1}"), ToolDelta(index=1, id="call_b", name="sub", arguments="{}")]),
    Chunk(finish_reason="tool_calls"),
    Chunk(usage=Usage(prompt_tokens=1, completion_tokens=4)),
]


async def test_tool_calls() -> None:
    """Fragments are joined; the content is null if there are only calls; reasoning has its own field."""
    server = serve_chat(FakeRunner(reply=lambda task: CALLS))
    choice = (await server.call("POST", PATHS[0], ask(tools=[ADD]))).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "reasoning_content": "let me see",
        "tool_calls": [
            {"id": "call_a", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}},
            {"id": "call_b", "type": "function", "function": {"name": "sub", "arguments": "{}"}},
        ],
    }


async def test_deprecated_function_calls() -> None:
    """A request with `functions` is answered with `function_call`."""
    server = serve_chat(FakeRunner(reply=lambda task: CALLS))
    choice = (await server.call("POST", PATHS[0], ask(functions=[ADD["function"]]))).json()["choices"][0]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == {"name": "add", "arguments": '{"a":1}'}
    assert "tool_calls" not in choice["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_ignored_fields(stream: bool) -> None:
    """A header names the fields that the model ignored."""
    chunks = [Chunk(text="a", ignored=("tools", "min_p")), Chunk(finish_reason="stop")]
    answer = await serve_chat(FakeRunner(reply=lambda task: chunks)).call("POST", PATHS[0], ask(stream=stream))
    assert answer.headers["x-shoal-ignored"] == "tools, min_p"
    assert "x-shoal-ignored" not in (await serve_chat().call("POST", PATHS[0], ask(stream=stream))).headers


@pytest.mark.parametrize("stream", [False, True])
async def test_truncated_messages(stream: bool) -> None:
    """A header reports how many messages the truncation policy removed."""
    chunks = [Chunk(text="a", cut=3), Chunk(finish_reason="stop")]
    answer = await serve_chat(FakeRunner(reply=lambda task: chunks)).call("POST", PATHS[0], ask(stream=stream))
    assert answer.headers["x-shoal-prompt-cut"] == "3"
    assert "x-shoal-prompt-cut" not in (await serve_chat().call("POST", PATHS[0], ask(stream=stream))).headers


async def test_an_upstream_answer_is_passed_on() -> None:
    """The body is passed on byte for byte; so is an error's status, body and type, with Retry-After."""
    body = b'{"id":"x", "choices":[]}'
    runner = FakeRunner(reply=lambda task: [Chunk(raw=("openai.chat", body), usage=Usage(completion_tokens=5))])
    assert (await serve_chat(runner).call("POST", PATHS[0], ask())).body == body
    refusal = UpstreamRefused("no", status=429, body=b'{"error":{"message":"no"}}', retry_after=2.5)
    answer = await serve_chat(FakeRunner(error=refusal)).call("POST", PATHS[0], ask())
    assert (answer.status, answer.body, answer.headers["retry-after"]) == (429, refusal.body, "3")
    assert "x-should-retry" not in answer.headers
    page = UpstreamRefused("bad gateway", status=502, body=b"<html>", content_type="text/html")
    answer = await serve_chat(FakeRunner(error=page)).call("POST", PATHS[0], ask())
    assert (answer.status, answer.headers["content-type"], answer.body) == (502, "text/html", b"<html>")
    moved = UpstreamRefused("no", status=302, body=b"x")
    answer = await serve_chat(FakeRunner(error=moved)).call("POST", PATHS[0], ask())
    assert (answer.status, answer.json()["error"]["type"]) == (502, "upstream_error")


@pytest.mark.parametrize("status", [404, 413, 429, 500, 502, 503])
async def test_an_upstream_error_without_a_body(status: int) -> None:
    """If a proxy answers for a busy or missing server, the status is kept, because clients retry by it."""
    refusal = UpstreamRefused("it is busy", status=status, retry_after=2.5)
    answer = await serve_chat(FakeRunner(error=refusal)).call("POST", PATHS[0], ask())
    reply = answer.json()["error"]
    assert (answer.status, reply["type"], reply["message"]) == (status, "upstream_error", "it is busy")
    assert answer.headers["retry-after"] == "3"
    assert "x-should-retry" not in answer.headers


@pytest.mark.parametrize("stream", [False, True])
async def test_errors_before_the_first_token(stream: bool) -> None:
    """They have their own status, streamed or not."""
    for error, status, code in (
        (TooLong("too long", param="messages"), 400, "context_length_exceeded"),
        (Overloaded("later", retry_after=1.0), 429, "rate_limit_exceeded"),
    ):
        server = serve_chat(FakeRunner(error=error))
        answer = await server.call("POST", PATHS[0], ask(stream=stream))
        assert (answer.status, answer.json()["error"]["code"]) == (status, code)
        assert server.runner.open == 0
