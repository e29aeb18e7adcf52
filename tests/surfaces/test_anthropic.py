"""Anthropic's Messages API: what becomes of a request, whole answers, token counts and errors."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import (
    BackendError,
    DeadlineExceeded,
    EngineFailed,
    ModelFailed,
    Overloaded,
    ShoalError,
    TooLong,
    Unavailable,
    UpstreamRefused,
)
from shoal.types import Chunk, Context, Generate, Guide, Message, Part, Sampling, Tool, ToolCall, ToolDelta, Usage
from tests.fakes.openai_server import fields_of
from tests.surfaces.surface_kit import Answer
from tests.surfaces.talk_kit import MODEL, ChatServer, FakeRunner, serve_chat

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
ADD = {"name": "add", "description": "Adds", "input_schema": {"type": "object"}}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
PNG = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
URL = "https://a.example/b.png"


def ask(messages: Any = "one two", **fields: Any) -> dict[str, Any]:
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return {"model": MODEL, "max_tokens": 9, "messages": messages, **fields}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words, "cache_control": {"type": "ephemeral"}}


async def converted(messages: Any, **fields: Any) -> tuple[list[Message], Answer]:
    """Return the messages that a request becomes, and its answer."""
    server = serve_chat()
    answer = await server.call("POST", PATH, ask(messages, **fields))
    assert answer.status == 200, answer.body
    return server.runner.task.messages, answer


@pytest.mark.parametrize("path", [PATH, f"{PATH}/", f"{PATH}?beta=true"])
async def test_an_answer(path: str) -> None:
    """Every key that Anthropic's clients read; unknown versions and betas are no matter."""
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "effort-2025-11-24,x", "x-request-id": "mine"}
    answer = await serve_chat().call("POST", path, ask(), headers=headers)
    body = answer.json()
    assert body.pop("id").startswith("msg_")
    assert body == {
        **{"type": "message", "role": "assistant", "model": MODEL, "content": [{"type": "text", "text": "one two"}]},
        **{"stop_reason": "end_turn", "stop_sequence": None},
        "usage": {
            "input_tokens": 5,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 2,
            "output_tokens": 2,
            "output_tokens_details": {"thinking_tokens": 1},
        },
    }
    assert (answer.headers["request-id"], answer.headers["x-request-id"]) == ("mine", "mine")
    assert "x-shoal-ignored" not in answer.headers


async def test_fields_reach_the_task() -> None:
    """Unknown ones and the whole body, too."""
    server = serve_chat()
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    sent = orjson.dumps(
        ask(
            **{"temperature": 0.5, "top_p": 0.25, "top_k": 7, "stop_sequences": ["end", ""], "future": 1},
            **{"tools": [ADD, {**ADD, "type": "custom", "name": "sub", "strict": True}]},
            tool_choice={"type": "tool", "name": "sub", "disable_parallel_tool_use": True},
            thinking={"type": "enabled", "budget_tokens": 1024},
            output_config={"effort": "max", "format": schema},
        )
    )
    assert (await server.call("POST", PATH, body=sent)).status == 200
    task = server.runner.task
    assert task.folds_instructions
    guide = Guide(kind="json_schema", value='{"type":"object"}', field="output_config")
    assert task.sampling == Sampling(max_tokens=9, temperature=0.5, top_p=0.25, top_k=7, stop=["end"], guide=guide)
    assert task.tools == [
        Tool(name="add", description="Adds", parameters={"type": "object"}),
        Tool(name="sub", description="Adds", parameters={"type": "object"}, strict=True),
    ]
    assert (task.tool_choice, task.tool_name, task.parallel_tool_calls) == ("function", "sub", False)
    assert task.template_kwargs == {"enable_thinking": True, "reasoning_effort": "high"}
    assert (task.raw, set(task.extras)) == (("anthropic.messages", fields_of(sent)), {"future"})
    assert not (task.stream or task.continue_final)


@pytest.mark.parametrize(
    ("fields", "kwargs"),
    [
        ({}, {}),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}, {}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
    ],
)
async def test_thinking(fields: dict[str, Any], kwargs: dict[str, Any]) -> None:
    """Adaptive thinking and high effort are the model's defaults."""
    server = serve_chat()
    assert (await server.call("POST", PATH, ask(**fields))).status == 200
    assert server.runner.task.template_kwargs == kwargs


@pytest.mark.parametrize(("choice", "mode"), [("auto", "auto"), ("any", "required"), ("none", "none"), (None, "auto")])
async def test_tool_choices(choice: str | None, mode: str) -> None:
    server = serve_chat()
    fields = {"tool_choice": choice and {"type": choice}}
    assert (await server.call("POST", PATH, ask(tools=[ADD], **fields))).status == 200
    assert (server.runner.task.tool_choice, server.runner.task.parallel_tool_calls) == (mode, True)


async def test_a_conversation() -> None:
    """Neighboring turns of one role are one; results come before the rest of a turn, and their images after them."""
    call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"a": 1}}
    result = {
        "type": "tool_result",
        "tool_use_id": "toolu_1",
        "content": [text("seen"), {"type": "image", "source": PNG}],
    }
    failed = {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no such file", "is_error": True}
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    messages, _ = await converted(
        [
            user(text("see"), {"type": "image", "source": {"type": "url", "url": URL}}),
            {"role": "user", "content": "now"},
            {"role": "assistant", "content": [thought, {"type": "redacted_thinking", "data": "x"}, text("Looking.")]},
            {"role": "assistant", "content": [call, {**call, "id": "toolu_2"}]},
            user(text("go on"), result, failed),
        ],
        system=[text("x-anthropic-billing-header: v=1"), text("be brief"), text("be kind")],
    )
    data = "data:image/png;base64,iVBORw0KGgo="
    assert messages == [
        Message(role="system", content="be brief\n\nbe kind"),
        Message(role="user", content=[Part(text="see"), Part(type="image", url=URL), Part(text="now")]),
        Message(
            role="assistant",
            content="Looking.",
            reasoning="hm",
            tool_calls=[ToolCall(id=f"toolu_{at}", name="look", arguments='{"a":1}') for at in (1, 2)],
        ),
        Message(role="tool", content="seen", tool_call_id="toolu_1"),
        Message(role="tool", content="Error: no such file", tool_call_id="toolu_2"),
        Message(
            role="user",
            content=[Part(text="go on"), Part(text="From the result of toolu_1:"), Part(type="image", url=data)],
        ),
    ]


async def test_results_of_tools() -> None:
    """No content is an empty text; an error that says so is not marked again; results alone make no user's turn."""
    results = [
        {"type": "tool_result", "tool_use_id": "a"},
        {"type": "tool_result", "tool_use_id": "b", "content": "Error: x", "is_error": True},
        {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image", "source": PNG}]},
    ]
    messages, _ = await converted([user(*results[:2])])
    assert [(each.role, each.content) for each in messages] == [("tool", ""), ("tool", "Error: x")]
    messages, _ = await converted([user(results[2])])
    assert [each.role for each in messages] == ["tool", "user"]
    assert messages[0].content == "See the next message."


async def test_system_messages_in_the_conversation() -> None:
    """Those at the beginning join the system prompt; a later one stays at its place, for models that accept it."""
    messages, _ = await converted(
        [
            {"role": "system", "content": "one"},
            {"role": "user", "content": "two"},
            {"role": "system", "content": [text("three")]},
        ],
        system="zero",
    )
    assert messages == [
        Message(role="system", content="zero\n\none"),
        Message(role="user", content="two"),
        Message(role="system", content="three"),
    ]


async def test_system_messages_between_calls_and_results() -> None:
    """They come behind the results."""
    calls = [{"type": "tool_use", "id": ident, "name": "add", "input": {}} for ident in "ab"]
    results = [{"type": "tool_result", "tool_use_id": ident, "content": ident} for ident in "ab"]
    system = {"role": "system", "content": "now"}
    messages, _ = await converted(
        [
            *(user(text("hi")), {"role": "assistant", "content": calls}),
            *(system, user(results[0], text("more")), system, user(results[1])),
        ]
    )
    assert [each.role for each in messages] == ["user", "assistant", "tool", "tool", "system", "user", "system"]
    assert [each.tool_call_id for each in messages[2:4]] == ["a", "b"]


async def test_documents() -> None:
    """Texts and search results are read; what only other servers read, such as a PDF, is left to them."""
    blocks = [
        {"type": "document", "title": "A", "source": {"type": "text", "media_type": "text/plain", "data": "first"}},
        {"type": "document", "source": {"type": "content", "content": [text("second")]}},
        {"type": "search_result", "title": "B", "source": "https://b.example", "content": [text("third")]},
    ]
    messages, _ = await converted([user(*blocks)])
    assert messages[0].content == "A\n\nfirst\n\nsecond\n\nB\nhttps://b.example\n\nthird"
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "x"}}
    messages, _ = await converted([user(pdf)])
    assert messages[0].content == [Part(type="other", kind="document")]


async def test_a_begun_answer_is_continued() -> None:
    server = serve_chat()
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The answer is"}]
    assert (await server.call("POST", PATH, ask(said))).status == 200
    assert server.runner.task.continue_final
    assert not server.runner.task.add_generation_prompt


async def test_what_is_left_out() -> None:
    """Anthropic's own tools and their blocks, and what its service would do to the conversation; a header says so."""
    blocks = [
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": [{"type": "web_search_result"}]},
        {"type": "compaction", "content": "Before: "},
        text("found"),
    ]
    messages, answer = await converted(
        [{"role": "user", "content": "search"}, {"role": "assistant", "content": blocks}, user(text("more"))],
        tools=[SEARCH, ADD, {"type": "bad\r\nname"}],
        context_management={"edits": []},
        container=None,
        mcp_servers=[],
        service_tier="auto",
    )
    assert messages[1] == Message(role="assistant", content="Before: found")
    assert answer.headers["x-shoal-ignored"].split(", ") == [
        *("context_management", "tools.web_search_20250305", "tools"),
        *("messages.server_tool_use", "messages.web_search_tool_result"),
    ]


CALLS = [
    Chunk(reasoning="let me see"),
    Chunk(text="Adding."),
    Chunk(tools=[ToolDelta(index=0, id="call_a", name="add", arguments='{"a": 1.50}')]),
    Chunk(tools=[ToolDelta(index=1, id="call_b", name="sub"), ToolDelta(index=2, id="call_c", name="cut")]),
    Chunk(tools=[ToolDelta(index=2, arguments='{"a')]),
    Chunk(finish_reason="tool_calls"),
    Chunk(usage=Usage(prompt_tokens=5, completion_tokens=9)),
]


def answering(*chunks: Chunk) -> ChatServer:
    return serve_chat(FakeRunner(reply=lambda task: chunks))


async def test_an_answer_of_several_blocks() -> None:
    """Thinking, text, then calls. Arguments keep their bytes; those that are no JSON are handed over as a text."""
    answer = await answering(*CALLS).call("POST", PATH, ask(tools=[ADD], thinking={"type": "adaptive"}))
    body = answer.json()
    thought, said, *calls = body["content"]
    assert thought == {"type": "thinking", "thinking": "let me see", "signature": body["id"]}
    assert said == {"type": "text", "text": "Adding."}
    assert calls == [
        {"type": "tool_use", "id": "call_a", "name": "add", "input": {"a": 1.5}},
        {"type": "tool_use", "id": "call_b", "name": "sub", "input": {}},
        {"type": "tool_use", "id": "call_c", "name": "cut", "input": {"INVALID_JSON": '{"a'}},
    ]
    assert b'"input":{"a": 1.50}' in answer.body
    assert body["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("thinking", "shown"),
    [(None, []), ({"type": "disabled"}, []), ({"type": "adaptive", "display": "omitted"}, [""])],
)
async def test_thinking_is_shown_on_request(thinking: Any, shown: list[str]) -> None:
    body = (await answering(*CALLS).call("POST", PATH, ask(thinking=thinking))).json()
    assert [each["thinking"] for each in body["content"] if each["type"] == "thinking"] == shown


@pytest.mark.parametrize(
    ("last", "reason", "stop"),
    [
        (Chunk(finish_reason="stop"), "end_turn", None),
        (Chunk(finish_reason="length"), "max_tokens", None),
        (Chunk(finish_reason="content_filter"), "refusal", None),
        (Chunk(finish_reason="stop", stop="END"), "stop_sequence", "END"),
        (Chunk(finish_reason="stop", stop="<|end|>"), "end_turn", None),
        (Chunk(finish_reason="stop", tools=[ToolDelta(index=0, id="a", name="b")]), "tool_use", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_stop_reasons(last: Chunk, reason: str, stop: str | None, stream: bool) -> None:
    """A stop text that the client did not send is the model's own."""
    answer = await answering(Chunk(text="a"), last).call("POST", PATH, ask(stop_sequences=["END"], stream=stream))
    if stream:
        line = next(
            each for each in answer.body.decode().split("\n") if each.startswith('data: {"type":"message_delta"')
        )
        body = orjson.loads(line.removeprefix("data: "))["delta"]
    else:
        body = answer.json()
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, stop)


class CountingRunner(FakeRunner):
    async def count_tokens(self, task: Generate, ctx: Context) -> int:
        self.tasks.append(task)
        return 42


async def test_a_count_of_tokens() -> None:
    """By the model if it counts them, without generating; else an estimate of texts, tools and images."""
    server = serve_chat(CountingRunner())
    answer = await server.call("POST", COUNT, ask(tools=[ADD, SEARCH], system="be brief"))
    assert (answer.status, answer.json()) == (200, {"input_tokens": 42})
    assert answer.headers["x-shoal-ignored"] == "tools.web_search_20250305"
    assert answer.headers["request-id"]
    assert (server.runner.task.tools[0].name, server.runner.produced) == ("add", 0)
    few = (await serve_chat().call("POST", COUNT, ask("x" * 400))).json()["input_tokens"]
    more = (await serve_chat().call("POST", COUNT, ask("x" * 400, tools=[ADD]))).json()["input_tokens"]
    image = (await serve_chat().call("POST", COUNT, ask([user({"type": "image", "source": PNG})]))).json()
    assert (few, image["input_tokens"]) == (100, 1001)
    assert 100 < more < 150


def error_of(answer: Answer) -> dict[str, Any]:
    body = answer.json()
    assert (body["type"], body["request_id"]) == ("error", answer.headers["request-id"])
    error: dict[str, Any] = body["error"]
    return error


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, "'messages' is empty"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "'messages[0].role' is 'robot'"),
        ({"messages": [user({"type": "tool_use", "id": "a", "name": "b"})]}, "'messages[0].content[0]' is of type"),
        ({"messages": [user({"type": "text"})]}, "'messages[0].content[0].text'"),
        ({"messages": [user({"type": "tool_result"})]}, "'messages[0].content[0].tool_use_id'"),
        ({"messages": [user({"type": "document"})]}, "'messages[0].content[0].source' is missing"),
        (
            {"messages": [user({"type": "image", "source": {"type": "file", "file_id": "f"}})]},
            "this server stores none",
        ),
        ({"messages": [user({"type": "image", "source": {**PNG, "media_type": "a/b"}})]}, "image/webp"),
        ({"messages": [{"role": "assistant", "content": [{"type": "image"}]}]}, "send text, thinking and tool_use"),
        ({"system": [{"type": "image"}]}, "'system[0]' is of type 'image'"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"tools": [{"input_schema": {}}]}, "'tools[0].name'"),
        ({"tool_choice": {"type": "any"}}, "there are none"),
        ({"tools": [SEARCH], "tool_choice": {"type": "any"}}, "there are none"),
        ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "x"}}, "'x', which is not in 'tools'"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "schema of 'output_config' is missing"),
        ({"container": "c_1"}, "runs no code"),
        ({"thread": {"type": "create"}}, "stores nothing"),
        ({"compaction": {"type": "x"}}, "summarize in a message"),
        ({"mcp_servers": [{"type": "url", "url": "https://a.example"}]}, "no MCP servers"),
    ],
)
async def test_bad_bodies(fields: dict[str, Any], words: str) -> None:
    """Each is a 400 that says what to change, and no work."""
    server = serve_chat()
    for path in (PATH, COUNT):
        answer = await server.call("POST", path, {**ask(), **fields})
        error = error_of(answer)
        assert (answer.status, error["type"]) == (400, "invalid_request_error")
        assert words in error["message"]
    assert not server.runner.tasks


async def test_an_unknown_model() -> None:
    """It is that, not a missing page, and the served ones are named."""
    answer = await serve_chat().call("POST", PATH, {**ask(), "model": "claude-none"})
    error = error_of(answer)
    assert (answer.status, error["type"]) == (404, "not_found_error")
    assert "'claude-none'" in error["message"]
    assert MODEL in error["message"]


async def test_errors_before_the_endpoint() -> None:
    """Keys, sizes, paths and methods, in the same form."""
    keyed = serve_chat(api_key=("secret",), max_body_bytes=1000)
    table = [
        (await keyed.call("POST", PATH, ask()), 401, "authentication_error"),
        (await keyed.call("POST", PATH, ask("x" * 2000), headers={"x-api-key": "secret"}), 413, "request_too_large"),
        (await keyed.call("POST", f"{PATH}/batches", ask()), 404, "not_found_error"),
        (await keyed.call("GET", PATH), 405, "invalid_request_error"),
    ]
    for answer, status, kind in table:
        assert (answer.status, error_of(answer)["type"]) == (status, kind)
    for headers in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}):
        assert (await keyed.call("POST", PATH, ask(), headers=headers)).status == 200


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (Overloaded("full", retry_after=2.0), 429, "rate_limit_error"),
        (Unavailable("none is there"), 529, "overloaded_error"),
        (ModelFailed("broken"), 503, "api_error"),
        (DeadlineExceeded("late"), 504, "timeout_error"),
        (EngineFailed("broken"), 500, "api_error"),
        (TooLong("7 tokens"), 400, "invalid_request_error"),
        (UpstreamRefused("no", status=503), 529, "overloaded_error"),
        (UpstreamRefused("no", status=422), 422, "invalid_request_error"),
    ],
)
async def test_statuses(error: ShoalError, status: int, kind: str) -> None:
    """529 is what Anthropic's clients know for overload; a failed model is not retried."""
    answer = await serve_chat(FakeRunner(error=error)).call("POST", PATH, ask())
    assert (answer.status, error_of(answer)["type"]) == (status, kind)
    assert answer.headers.get("retry-after") == ("2" if isinstance(error, Overloaded) else None)
    assert (answer.headers.get("x-should-retry") == "false") == isinstance(error, ModelFailed | BackendError) & (
        not isinstance(error, UpstreamRefused)
    )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error":{"message":"bad field","type":"x"}}', "bad field"),
        (b'{"message":"bad field"}', "bad field"),
        (b'{"error":{"message":"too many","code":"context_length_exceeded"}}', "prompt is too long: too many"),
        (
            b'{"type":"error","error":{"type":"BadRequestError","message":"maximum context length is 9"}}',
            "prompt is too long: maximum context length is 9",
        ),
        (b"<html>", "the server refused"),
        (b"[]", "the server refused"),
    ],
)
async def test_refusals_of_an_upstream(body: bytes, message: str) -> None:
    """Its own words, in Anthropic's form; agents compact their conversation at "prompt is too long"."""
    error = UpstreamRefused("the server refused", status=400, body=body)
    found = error_of(await serve_chat(FakeRunner(error=error)).call("POST", PATH, ask()))
    assert found == {"type": "invalid_request_error", "message": message}
    for status, kind in ((402, b"billing_error"), (413, b"request_too_large")):
        own = b'{"type":"error","error":{"type":"%s","message":"x"},"request_id":"theirs"}' % kind
        runner = FakeRunner(error=UpstreamRefused("no", status=status, body=own))
        passed = await serve_chat(runner).call("POST", PATH, ask())
        assert (passed.status, passed.json()) == (status, orjson.loads(own))


async def test_models_in_the_form_of_the_api() -> None:
    """For clients that send its version; others get OpenAI's."""
    server = serve_chat(FakeRunner(adapters=()))
    version = {"anthropic-version": "2023-06-01"}
    entry = {"type": "model", "id": MODEL, "display_name": MODEL, "created_at": "2023-11-14T22:13:20Z"}
    assert (await server.call("GET", "/v1/models", headers=version)).json() == {
        **{"data": [entry], "has_more": False, "first_id": MODEL, "last_id": MODEL}
    }
    assert (await server.call("GET", f"/v1/models/{MODEL}", headers=version)).json() == entry
    assert (await server.call("GET", "/v1/models")).json()["object"] == "list"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(["", "text", "tool_result", "user", "auto"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "text", "source", "id", "name", "input", "tool_use_id"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["messages", "system", "tools", "tool_choice", "thinking"]), JSON, max_size=3))
async def test_any_body_has_an_answer(fields: dict[str, Any]) -> None:
    """It is answered or refused, never a bug."""
    assert (await serve_chat().call("POST", PATH, {**ask(), **fields})).status in (200, 400)
