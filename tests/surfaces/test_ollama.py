"""Ollama's dialect: requests become tasks, and chunks become lines."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.generation.sampling import check_unsupported_fields, merge_sampling
from shoal.errors import DeadlineExceeded, EngineFailed, Overloaded, ShoalError, Unsupported, UpstreamRefused
from shoal.types import Chunk, Generate, Guide, Message, Part, Sampling, TokenLogprob, Tool, ToolCall, ToolDelta
from tests.surfaces.life_kit import living
from tests.surfaces.ollama_kit import CHAT_BODY, HELLO, PROMPT, ChatModel, LineExchange, lines, serve_chat
from tests.surfaces.surface_kit import MODEL, Exchange, request_scope, serve


async def task_of(body: dict[str, Any], path: str = "/api/chat") -> Generate:
    server, model = serve_chat()
    answer = await server.call("POST", path, {**body, "stream": False})
    assert answer.status == 200, answer.body
    (task,) = model.generations
    return task


async def refused(body: dict[str, Any], path: str = "/api/chat") -> str:
    server, model = serve_chat()
    answer = await server.call("POST", path, body)
    assert answer.status == 400
    assert set(answer.json()) == {"error"}
    assert not model.generations
    return str(answer.json()["error"])


class TestAnswers:
    async def test_a_chat_is_a_stream_of_lines(self) -> None:
        """Each line has the requested name and a time; the last has the reason and nanosecond timings."""
        server, _ = serve_chat()
        answer = await server.call("POST", "/api/chat", {**CHAT_BODY, "model": f"{MODEL}:latest"})
        *reply, last = lines(answer)
        assert [each["message"] for each in reply] == [
            {"role": "assistant", "content": "Hel"},
            {"role": "assistant", "content": "lo"},
        ]
        for each in (*reply, last):
            assert each["model"] == f"{MODEL}:latest"
            assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}Z", each["created_at"])
        assert [each["done"] for each in (*reply, last)] == [False, False, True]
        assert (last["message"], last["done_reason"]) == ({"role": "assistant", "content": ""}, "stop")
        assert (last["prompt_eval_count"], last["eval_count"]) == (7, 2)
        parts = last["load_duration"] + last["prompt_eval_duration"] + last["eval_duration"]
        assert 0 < parts <= last["total_duration"] + 3  # each is rounded
        assert all(isinstance(last[name], int) for name in last if name.endswith("_duration"))

    async def test_a_chat_without_a_stream(self) -> None:
        """One object."""
        server, model = serve_chat()
        answer = await server.call("POST", "/api/chat", {**CHAT_BODY, "stream": False})
        assert answer.headers["content-type"] == "application/json"
        response = answer.json()
        assert (response["message"], response["done"], response["done_reason"]) == (
            {"role": "assistant", "content": "Hello"},
            True,
            "stop",
        )
        assert (response["prompt_eval_count"], response["eval_count"]) == (7, 2)
        assert [task.stream for task in model.generations] == [False]

    @pytest.mark.parametrize("stream", [True, False])
    async def test_an_answer_in_one_chunk(self, stream: bool) -> None:
        """The times of prompt and answer cannot be told apart, so both are omitted."""
        server, _ = serve_chat(Chunk(text="Hello"), Chunk(finish_reason="stop"), HELLO[-1])
        answer = await server.call("POST", "/api/chat", {**CHAT_BODY, "stream": stream})
        last = lines(answer)[-1] if stream else answer.json()
        assert (last["prompt_eval_count"], last["eval_count"]) == (7, 2)
        assert "total_duration" in last
        assert not {"prompt_eval_duration", "eval_duration"} & last.keys()

    async def test_a_prompt(self) -> None:
        """The text is in `response`, streamed or not."""
        server, model = serve_chat()
        *reply, last = lines(await server.call("POST", "/api/generate", PROMPT))
        assert [each["response"] for each in (*reply, last)] == ["Hel", "lo", ""]
        assert last["done_reason"] == "stop"
        response = (await server.call("POST", "/api/generate", {**PROMPT, "stream": False})).json()
        assert (response["response"], response["done"]) == ("Hello", True)
        assert [task.stream for task in model.generations] == [True, False]
        assert "message" not in response

    @pytest.mark.parametrize(
        ("reason", "word"),
        [("stop", "stop"), ("length", "length"), ("tool_calls", "stop"), ("content_filter", "stop")],
    )
    async def test_done_reasons(self, reason: str, word: str) -> None:
        """Ollama has only two reasons."""
        server, _ = serve_chat(Chunk(text="a", finish_reason=reason))
        assert lines(await server.call("POST", "/api/chat", CHAT_BODY))[-1]["done_reason"] == word

    async def test_thinking_has_its_own_field(self) -> None:
        """`thinking`, in a message or a line."""
        chunks = (Chunk(reasoning="Hm"), Chunk(text="Yes"), Chunk(finish_reason="stop"))
        server, _ = serve_chat(*chunks)
        first, second, _ = lines(await server.call("POST", "/api/chat", CHAT_BODY))
        assert first["message"] == {"role": "assistant", "content": "", "thinking": "Hm"}
        assert second["message"] == {"role": "assistant", "content": "Yes"}
        response = (await server.call("POST", "/api/generate", {**PROMPT, "stream": False})).json()
        assert (response["thinking"], response["response"]) == ("Hm", "Yes")

    async def test_tool_calls_are_complete_objects(self) -> None:
        """Fragments are joined: each call is sent when the next begins, the last at the end."""
        chunks = (
            Chunk(text="Let me see"),
            Chunk(tools=[ToolDelta(index=0, id="call_a", name="weather", arguments='{"ci')]),
            Chunk(tools=[ToolDelta(index=0, arguments='ty":"Oslo"}')]),
            Chunk(tools=[ToolDelta(index=1, id="call_b", name="clock")]),
            Chunk(finish_reason="tool_calls"),
        )
        calls = [
            {"id": "call_a", "function": {"name": "weather", "arguments": {"city": "Oslo"}, "index": 0}},
            {"id": "call_b", "function": {"name": "clock", "arguments": {}, "index": 1}},
        ]
        server, _ = serve_chat(*chunks)
        replies = lines(await server.call("POST", "/api/chat", CHAT_BODY))
        assert [each["message"].get("tool_calls") for each in replies] == [None, [calls[0]], [calls[1]], None]
        whole = (await server.call("POST", "/api/chat", {**CHAT_BODY, "stream": False})).json()
        assert whole["message"] == {"role": "assistant", "content": "Let me see", "tool_calls": calls}

    async def test_fragments_of_tool_calls_alternate(self) -> None:
        """They are told apart by their index, and the calls keep their order."""
        chunks = (
            Chunk(tools=[ToolDelta(index=0, id="call_a", name="weather")]),
            Chunk(tools=[ToolDelta(index=1, id="call_b", name="clock", arguments='{"a":')]),
            Chunk(tools=[ToolDelta(index=0, arguments='{"city":"Oslo"}'), ToolDelta(index=1, arguments="1}")]),
            Chunk(finish_reason="tool_calls"),
        )
        calls = [
            {"id": "call_a", "function": {"name": "weather", "arguments": {"city": "Oslo"}, "index": 0}},
            {"id": "call_b", "function": {"name": "clock", "arguments": {"a": 1}, "index": 1}},
        ]
        server, _ = serve_chat(*chunks)
        replies = lines(await server.call("POST", "/api/chat", CHAT_BODY))
        assert [call for each in replies for call in each["message"].get("tool_calls", ())] == calls
        whole = (await server.call("POST", "/api/chat", {**CHAT_BODY, "stream": False})).json()
        assert whole["message"] == {"role": "assistant", "content": "", "tool_calls": calls}

    @pytest.mark.parametrize("arguments", ['{"city": "Os', "[1]", "Oslo", '{"a": ' + "[" * 2000])
    @pytest.mark.parametrize("reason", ["length", "tool_calls", None])
    async def test_invalid_tool_calls_are_text(self, arguments: str, reason: str | None) -> None:
        """Truncated or invalid arguments are passed on unchanged."""
        chunks = [Chunk(tools=[ToolDelta(index=0, id="a", name="weather", arguments=arguments)])]
        server, _ = serve_chat(*chunks, *([Chunk(finish_reason=reason)] if reason else []))
        response = (await server.call("POST", "/api/chat", {**CHAT_BODY, "stream": False})).json()
        content = f'{{"name": "weather", "arguments": {arguments}}}'
        assert response["message"] == {"role": "assistant", "content": content}
        reply = lines(await server.call("POST", "/api/chat", CHAT_BODY))
        assert "".join(each["message"]["content"] for each in reply) == content

    async def test_log_probabilities(self) -> None:
        """With the bytes of each token, and the top tokens on request."""
        known = TokenLogprob(token="ä", logprob=-0.5, top=[TokenLogprob(token="?", logprob=-1.5, data=b"\xff")])
        impossible = TokenLogprob(token="!", logprob=float("-inf"))
        server, model = serve_chat(Chunk(text="ä!", logprobs=[known, impossible]), Chunk(finish_reason="stop"))
        first, *_ = lines(await server.call("POST", "/api/generate", {**PROMPT, "logprobs": True, "top_logprobs": 1}))
        assert first["logprobs"] == [
            {
                "token": "ä",
                "logprob": -0.5,
                "bytes": [195, 164],
                "top_logprobs": [{"token": "?", "logprob": -1.5, "bytes": [255]}],
            },
            {"token": "!", "logprob": -9999.0, "bytes": [33]},
        ]
        await server.call("POST", "/api/generate", {**PROMPT, "top_logprobs": 3})
        assert [task.sampling.logprobs for task in model.generations] == [1, None]

    @pytest.mark.parametrize("stream", [True, False])
    async def test_a_truncated_conversation(self, stream: bool) -> None:
        """Headers report removed messages and ignored fields."""
        server, _ = serve_chat(Chunk(text="a", cut=3, ignored=("tools",)), Chunk(finish_reason="stop"))
        answer = await server.call("POST", "/api/chat", {**CHAT_BODY, "stream": stream})
        assert answer.headers["x-shoal-prompt-cut"] == "3"
        assert answer.headers["x-shoal-ignored"] == "tools"

    async def test_the_access_log_counts_tokens(self, caplog: pytest.LogCaptureFixture) -> None:
        """Those of streams, too."""
        caplog.set_level("INFO", "shoal.access")
        server, _ = serve_chat()
        await server.call("POST", "/api/chat", CHAT_BODY)
        (record,) = caplog.records
        assert (record.__dict__["model"], record.__dict__["completion_tokens"]) == (MODEL, 2)


class TestErrors:
    async def test_an_unknown_model_is_not_found(self) -> None:
        """The message and status by which clients decide to pull the model."""
        for path, body in (
            ("/api/chat", CHAT_BODY),
            ("/api/generate", PROMPT),
            ("/api/embed", {"input": "a"}),
            ("/api/embeddings", {"prompt": "a"}),
            ("/api/show", {}),
        ):
            answer = await serve().call("POST", path, {**body, "model": "llama3.2:7b"})
            assert answer.status == 404
            assert answer.json()["error"].startswith("model 'llama3.2:7b' not found: ")

    @pytest.mark.parametrize("path", ["/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/show"])
    async def test_a_model_is_required(self, path: str) -> None:
        """Unlike in other dialects there is no default."""
        answer = await serve().call("POST", path, {"model": "", "input": "a"})
        assert (answer.status, answer.json()) == (400, {"error": "model is required"})

    @pytest.mark.parametrize(
        ("error", "status"),
        [
            (Overloaded("full", retry_after=2.0), 429),
            (EngineFailed("broken"), 500),
            (DeadlineExceeded("late"), 504),
            (UpstreamRefused("no such parameter", status=422), 422),
            (UpstreamRefused("moved", status=302), 502),
        ],
    )
    async def test_errors_before_the_first_chunk(self, error: ShoalError, status: int) -> None:
        """They have their own status, streamed or not."""
        model = ChatModel(chunks=(), end=error)
        for stream in (True, False):
            answer = await serve(model).call("POST", "/api/chat", {**CHAT_BODY, "stream": stream})
            assert (answer.status, answer.json()) == (status, {"error": error.message})
            assert ("retry-after" in answer.headers) == (error.retry_after is not None)

    async def test_errors_in_mid_stream(self) -> None:
        """The last line has the error."""
        model = ChatModel(chunks=HELLO[:1], end=EngineFailed("it broke"))
        *reply, last = lines(await serve(model).call("POST", "/api/generate", PROMPT))
        assert [each["response"] for each in reply] == ["Hel"]
        assert last == {"error": "it broke"}
        answer = await serve(model).call("POST", "/api/generate", {**PROMPT, "stream": False})
        assert (answer.status, answer.json()) == (500, {"error": "it broke"})

    async def test_a_disconnect_cancels_the_work(self) -> None:
        """In the middle of a stream."""
        model = ChatModel(chunks=HELLO[:2], release=asyncio.Event())
        exchange = LineExchange(CHAT_BODY, b"lo")
        task = asyncio.create_task(exchange.call(serve(model), "/api/chat"))
        await exchange.received.wait()
        assert model.closed == 0
        exchange.leave()
        await task
        assert model.closed == 1

    @pytest.mark.parametrize(
        "path", ["/api/create", "/api/copy", "/api/push", "/api/blobs/sha256:5e", "/api/me", "/api/signout"]
    )
    async def test_unsupported_routes(self, path: str) -> None:
        """Rejected in the dialect, with an alternative."""
        async with living() as life:
            answer = await life.manage("POST", path, {"model": "a", "source": "a", "destination": "b"})
            assert answer.status == 400
            assert re.search("`|[Uu]pload", answer.json()["error"])

    async def test_an_uploaded_file_is_not_read(self) -> None:
        """Ollama's client sends a model's file before it asks to create a model."""
        async with living() as life:
            exchange = Exchange([b"x" * 65536] * 10)
            headers = {"host": "localhost", "content-type": "application/json", "transfer-encoding": "chunked"}
            scope = request_scope("POST", "/api/blobs/sha256:5e", headers)
            await life.server.app(scope, exchange.receive, exchange.send)
        assert "not create models" in exchange.answer().json()["error"]
        assert (exchange.answer().status, exchange.reads_before_answer) == (400, 0)


class TestTasks:
    async def test_options(self) -> None:
        """They get Shoal's names; options for loading are ignored."""
        options = {
            "temperature": 0.5,
            "top_k": 3,
            "top_p": 0.25,
            "min_p": 0.125,
            "typical_p": 1,
            "seed": 9,
            "num_predict": 5,
            "stop": ["END", ""],
            "repeat_penalty": 1.5,
            "presence_penalty": 0.75,
            "frequency_penalty": -0.5,
            "num_ctx": 8192,
            "num_gpu": 1,
        }
        sampling = (await task_of({**CHAT_BODY, "options": options})).sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 3, 0.25, 0.125)
        assert (sampling.seed, sampling.max_tokens, sampling.stop) == (9, 5, ["END"])
        assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.5, 0.75, -0.5)
        assert sampling.logprobs is None

    async def test_an_unsupported_option_is_named(self) -> None:
        """Local models and Triton reject it by Ollama's name."""
        task = await task_of({**CHAT_BODY, "options": {"repeat_penalty": 1.5}})
        with pytest.raises(Unsupported, match="does not support 'repeat_penalty'"):
            merge_sampling(task.sampling, Sampling(), (), (), task.names)

    async def test_options_of_other_servers(self) -> None:
        """They are passed to remote servers; local models and Triton reject them by name."""
        task = await task_of(
            {**CHAT_BODY, "options": {"typical_p": 0.5, "top_a": 0, "xtc_probability": 0.1, "made_up": 1}}
        )
        assert {name: bytes(json) for name, json in task.extras.items()} == {
            "typical_p": b"0.5",
            "xtc_probability": b"0.1",
        }
        with pytest.raises(Unsupported, match=r"here supports '(typical_p|xtc_probability)'"):
            check_unsupported_fields(task.extras, (), ignored=[])
        assert (await task_of({**CHAT_BODY, "options": {"repeat_penalty": 1.5}})).extras == {}

    async def test_integers_with_a_fraction(self) -> None:
        """Ollama accepts them and drops the fraction."""
        sampling = (await task_of({**CHAT_BODY, "options": {"num_predict": 5.0, "seed": 42.0, "top_k": 3.9}})).sampling
        assert (sampling.max_tokens, sampling.seed, sampling.top_k) == (5, 42, 3)
        assert "options" in await refused({**CHAT_BODY, "options": {"seed": "42"}})

    @pytest.mark.parametrize("number", [-2, -1, 0])
    async def test_values_for_no_limit(self, number: int) -> None:
        """Unlimited length, a random seed, all tokens."""
        sampling = (await task_of({**CHAT_BODY, "options": {"num_predict": number, "seed": -1, "top_k": 0}})).sampling
        assert (sampling.max_tokens, sampling.seed, sampling.top_k) == (None, None, -1)
        assert (await task_of({**CHAT_BODY, "options": {"stop": "END"}})).sampling.stop == ["END"]

    @pytest.mark.parametrize(
        ("form", "guide"),
        [
            ("", None),
            (None, None),
            ("json", Guide(kind="json_object", field="format")),
            ({"type": "object"}, Guide(kind="json_schema", value='{"type":"object"}', field="format")),
        ],
    )
    async def test_formats(self, form: Any, guide: Guide | None) -> None:
        """JSON, or a schema."""
        assert (await task_of({**CHAT_BODY, "format": form})).sampling.guide == guide

    @pytest.mark.parametrize(
        ("think", "template_kwargs", "shown"),
        [
            (None, {}, True),
            ("", {}, True),
            (True, {"enable_thinking": True}, True),
            (False, {"enable_thinking": False}, False),
            ("low", {"enable_thinking": True, "reasoning_effort": "low"}, True),
            ("max", {"enable_thinking": True, "reasoning_effort": "high"}, True),
        ],
    )
    async def test_thinking(self, think: Any, template_kwargs: dict[str, Any], shown: bool) -> None:
        """The template gets the value, and `false` hides the reasoning."""
        for path, body in (("/api/chat", CHAT_BODY), ("/api/generate", PROMPT)):
            task = await task_of({**body, "think": think}, path)
            assert (task.template_kwargs, task.include_reasoning) == (template_kwargs, shown)

    async def test_a_conversation_with_tools(self) -> None:
        """Arguments become text; a result matches its call by id, by tool name, or by position."""
        messages = [
            {"role": "system", "content": "Be brief"},
            {"role": "USER", "content": "Hi"},
            {
                "role": "assistant",
                "thinking": "Hm",
                "content": None,
                "tool_calls": [
                    {"function": {"name": "weather", "arguments": {"city": "Oslo"}}},
                    {"function": {"name": "clock"}},
                    {"id": "mine", "function": {"name": "weather", "arguments": {}}},
                ],
            },
            {"role": "tool", "content": "12:00", "tool_name": "clock"},
            {"role": "tool", "content": "rain", "tool_call_id": "mine"},
            {"role": "tool", "content": "sun"},
            {"role": "tool", "content": "nobody asked"},
        ]
        tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
        task = await task_of({"model": MODEL, "messages": messages, "tools": [tool]})
        system, user, assistant, *results = task.messages
        assert (system, user) == (Message(role="system", content="Be brief"), Message(role="user", content="Hi"))
        assert (assistant.content, assistant.reasoning) == (None, "Hm")
        assert assistant.tool_calls == [
            ToolCall(id="call00001", name="weather", arguments='{"city":"Oslo"}'),
            ToolCall(id="call00002", name="clock", arguments="{}"),
            ToolCall(id="mine", name="weather", arguments="{}"),
        ]
        assert [each.tool_call_id for each in results] == ["call00002", "mine", "call00001", None]
        assert [each.name for each in results] == ["clock", None, None, None]
        assert task.tools == [Tool(name="weather", parameters={"type": "object"})]

    @pytest.mark.parametrize(
        ("head", "kind"), [("iVBORw0KGgoAA", "png"), ("/9j/4AA", "jpeg"), ("UklGRAA", "webp"), ("R0lGODlh", "gif")]
    )
    async def test_images(self, head: str, kind: str) -> None:
        """The type is detected from the first bytes; the text follows the images."""
        image = Part(type="image", url=f"data:image/{kind};base64,{head}")
        task = await task_of({"model": MODEL, "messages": [{"role": "user", "content": "What?", "images": [head]}]})
        assert task.messages[0].content == [image, Part(text="What?")]
        task = await task_of({"model": MODEL, "images": [image.url]}, "/api/generate")
        assert task.messages[0].content == [image]

    async def test_prompts(self) -> None:
        """A user turn after the system's, or the raw text."""
        task = await task_of({**PROMPT, "system": "Be brief", "suffix": "", "context": []}, "/api/generate")
        assert task.messages == [Message(role="system", content="Be brief"), Message(role="user", content="Hi")]
        assert task.prompts == []
        task = await task_of({**PROMPT, "raw": True}, "/api/generate")
        assert (task.prompts, task.messages) == (["Hi"], [])

    async def test_adapters(self) -> None:
        """The adapter follows the colon."""
        task = await task_of({**CHAT_BODY, "model": f"{MODEL}:loud"})
        assert (task.model, task.adapter) == (MODEL, "loud")
        task = await task_of({**CHAT_BODY, "model": "mini:latest"})
        assert (task.model, task.adapter) == (MODEL, "")

    @pytest.mark.parametrize(
        ("field", "value", "more"),
        [
            ("suffix", "end", {}),
            ("template", "{{ .Prompt }}", {}),
            ("context", [1], {}),
            ("images", ["iVBORw0KGgo"], {"raw": True}),
            ("system", "Be brief", {"raw": True}),
            ("images", ["Qk0="], {}),
            ("format", "xml", {}),
            ("think", "deeply", {}),
            ("keep_alive", "5 minutes", {}),
            ("options", {"temperature": "hot"}, {}),
            ("top_logprobs", 21, {}),
            ("format", orjson.loads('{"a":' * 200 + "1" + "}" * 200), {}),
        ],
    )
    async def test_invalid_fields(self, field: str, value: Any, more: dict[str, Any]) -> None:
        """The error names the field, before the model is called."""
        assert field in await refused({**PROMPT, field: value, **more}, "/api/generate")


ROUTES = ["/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/show", "/api/pull", "/api/create"]
NAMES = ["model", "messages", "prompt", "input", "options", "format", "stream", "tools", "think", "keep_alive"]
NAMES += ["role", "content", "images", "tool_calls", "function", "name", "arguments", "system", "raw", "logprobs"]
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from([MODEL, "json", "user", "tool", "5m", "iVBORw0KGgo"])
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=4), inner),
    max_leaves=10,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool", "Nobody"]), "content": st.none() | st.text(max_size=9)},
        optional={
            "images": st.lists(st.sampled_from(["iVBORw0KGgo", "?"]), max_size=2),
            "tool_calls": st.lists(
                st.fixed_dictionaries(
                    {"function": st.fixed_dictionaries({"name": st.sampled_from("fg")}, optional={"arguments": values})}
                ),
                max_size=2,
            ),
            "tool_name": st.sampled_from("fgh"),
        },
    ),
    max_size=4,
)
bodies = values | st.fixed_dictionaries(
    {"model": st.just(MODEL)}, optional={**dict.fromkeys(NAMES[2:10], values), "messages": messages}
)


@given(path=st.sampled_from(ROUTES), body=bodies)
def test_any_json(path: str, body: Any) -> None:
    """Any JSON gets an answer, streamed or not, or an error in the dialect."""
    server, _ = serve_chat()
    answer = asyncio.run(server.call("POST", path, body))
    if answer.status != 200:
        assert 400 <= answer.status < 500, answer.body
        assert set(answer.json()) == {"error"}
    elif answer.headers["content-type"] == "application/x-ndjson":
        assert lines(answer)[-1]["done"] is True
    else:
        assert isinstance(answer.json(), dict)
