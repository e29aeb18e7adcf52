"""Ollama's dialect: requests to tasks, and chunks to lines."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
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
        """Each with the name as asked and a time; the last with why it ended, and what it took in nanoseconds."""
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

    async def test_a_chat_in_one_piece(self) -> None:
        """One object with all of it."""
        server, model = serve_chat()
        answer = await server.call("POST", "/api/chat", {**CHAT_BODY, "stream": False})
        assert answer.headers["content-type"] == "application/json"
        found = answer.json()
        assert (found["message"], found["done"], found["done_reason"]) == (
            {"role": "assistant", "content": "Hello"},
            True,
            "stop",
        )
        assert (found["prompt_eval_count"], found["eval_count"]) == (7, 2)
        assert [task.stream for task in model.generations] == [False]

    @pytest.mark.parametrize("stream", [True, False])
    async def test_an_answer_that_came_at_once(self, stream: bool) -> None:
        """Nobody can tell the time of the prompt from that of the answer then: both are absent."""
        server, _ = serve_chat(Chunk(text="Hello"), Chunk(finish_reason="stop"), HELLO[-1])
        answer = await server.call("POST", "/api/chat", {**CHAT_BODY, "stream": stream})
        last = lines(answer)[-1] if stream else answer.json()
        assert (last["prompt_eval_count"], last["eval_count"]) == (7, 2)
        assert "total_duration" in last
        assert not {"prompt_eval_duration", "eval_duration"} & last.keys()

    async def test_a_prompt(self) -> None:
        """The text stands in `response`, in lines or in one piece."""
        server, model = serve_chat()
        *reply, last = lines(await server.call("POST", "/api/generate", PROMPT))
        assert [each["response"] for each in (*reply, last)] == ["Hel", "lo", ""]
        assert last["done_reason"] == "stop"
        found = (await server.call("POST", "/api/generate", {**PROMPT, "stream": False})).json()
        assert (found["response"], found["done"]) == ("Hello", True)
        assert [task.stream for task in model.generations] == [True, False]
        assert "message" not in found

    @pytest.mark.parametrize(
        ("reason", "word"),
        [("stop", "stop"), ("length", "length"), ("tool_calls", "stop"), ("content_filter", "stop")],
    )
    async def test_why_it_ended(self, reason: str, word: str) -> None:
        """Ollama has two words for it."""
        server, _ = serve_chat(Chunk(text="a", finish_reason=reason))
        assert lines(await server.call("POST", "/api/chat", CHAT_BODY))[-1]["done_reason"] == word

    async def test_what_the_model_thinks_stands_apart(self) -> None:
        """In `thinking`, of a message or of a line."""
        chunks = (Chunk(reasoning="Hm"), Chunk(text="Yes"), Chunk(finish_reason="stop"))
        server, _ = serve_chat(*chunks)
        first, second, _ = lines(await server.call("POST", "/api/chat", CHAT_BODY))
        assert first["message"] == {"role": "assistant", "content": "", "thinking": "Hm"}
        assert second["message"] == {"role": "assistant", "content": "Yes"}
        found = (await server.call("POST", "/api/generate", {**PROMPT, "stream": False})).json()
        assert (found["thinking"], found["response"]) == ("Hm", "Yes")

    async def test_calls_of_tools_come_whole_with_an_object(self) -> None:
        """Whatever the fragments were: one call when the next begins, the last when the answer ends."""
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
        found = lines(await server.call("POST", "/api/chat", CHAT_BODY))
        assert [each["message"].get("tool_calls") for each in found] == [None, [calls[0]], [calls[1]], None]
        whole = (await server.call("POST", "/api/chat", {**CHAT_BODY, "stream": False})).json()
        assert whole["message"] == {"role": "assistant", "content": "Let me see", "tool_calls": calls}

    @pytest.mark.parametrize("arguments", ['{"city": "Os', "[1]", "Oslo"])
    @pytest.mark.parametrize("reason", ["length", "tool_calls", None])
    async def test_calls_without_an_object_are_text(self, arguments: str, reason: str | None) -> None:
        """Cut off or badly written: nothing is lost, and nothing is made up."""
        chunks = [Chunk(tools=[ToolDelta(index=0, id="a", name="weather", arguments=arguments)])]
        server, _ = serve_chat(*chunks, *([Chunk(finish_reason=reason)] if reason else []))
        found = (await server.call("POST", "/api/chat", {**CHAT_BODY, "stream": False})).json()
        content = f'{{"name": "weather", "arguments": {arguments}}}'
        assert found["message"] == {"role": "assistant", "content": content}
        reply = lines(await server.call("POST", "/api/chat", CHAT_BODY))
        assert "".join(each["message"]["content"] for each in reply) == content

    async def test_log_probabilities(self) -> None:
        """With the bytes of each token, and the likeliest beside it where they were asked for."""
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
    async def test_a_conversation_that_was_cut(self, stream: bool) -> None:
        """Where the server may leave turns out, the reply says so."""
        server, _ = serve_chat(Chunk(text="a", cut=3, ignored=("tools",)), Chunk(finish_reason="stop"))
        answer = await server.call("POST", "/api/chat", {**CHAT_BODY, "stream": stream})
        assert answer.headers["x-shoal-prompt-cut"] == "3"
        assert answer.headers["x-shoal-ignored"] == "tools"

    async def test_the_access_log_counts_tokens(self, caplog: pytest.LogCaptureFixture) -> None:
        """Those of a stream, too."""
        caplog.set_level("INFO", "shoal.access")
        server, _ = serve_chat()
        await server.call("POST", "/api/chat", CHAT_BODY)
        (record,) = caplog.records
        assert (record.__dict__["model"], record.__dict__["completion_tokens"]) == (MODEL, 2)


class TestErrors:
    async def test_an_unknown_model_is_not_found(self) -> None:
        """In the words and with the status by which clients decide to pull it."""
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
    async def test_no_model_is_named(self, path: str) -> None:
        """Unlike elsewhere there is no default."""
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
    async def test_before_the_first_chunk(self, error: ShoalError, status: int) -> None:
        """A status of its own, in lines or not."""
        model = ChatModel(chunks=(), end=error)
        for stream in (True, False):
            answer = await serve(model).call("POST", "/api/chat", {**CHAT_BODY, "stream": stream})
            assert (answer.status, answer.json()) == (status, {"error": error.message})
            assert ("retry-after" in answer.headers) == (error.retry_after is not None)

    async def test_in_mid_stream(self) -> None:
        """A line with the error is the last."""
        model = ChatModel(chunks=HELLO[:1], end=EngineFailed("it broke"))
        *reply, last = lines(await serve(model).call("POST", "/api/generate", PROMPT))
        assert [each["response"] for each in reply] == ["Hel"]
        assert last == {"error": "it broke"}
        answer = await serve(model).call("POST", "/api/generate", {**PROMPT, "stream": False})
        assert (answer.status, answer.json()) == (500, {"error": "it broke"})

    async def test_a_client_that_leaves_stops_the_work(self) -> None:
        """In the middle of its stream."""
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
    async def test_what_is_not_done_here(self, path: str) -> None:
        """Refused in the dialect, with what to do instead."""
        async with living() as life:
            answer = await life.manage("POST", path, {"model": "a", "source": "a", "destination": "b"})
            assert answer.status == 400
            assert re.search("`|[Uu]pload", answer.json()["error"])

    async def test_a_file_that_is_not_taken_is_not_read(self) -> None:
        """Ollama's client sends a model's file before it asks to create one."""
        async with living() as life:
            exchange = Exchange([b"x" * 65536] * 10)
            headers = {"host": "localhost", "content-type": "application/json", "transfer-encoding": "chunked"}
            scope = request_scope("POST", "/api/blobs/sha256:5e", headers)
            await life.server.app(scope, exchange.receive, exchange.send)
        assert "not create models" in exchange.answer().json()["error"]
        assert (exchange.answer().status, exchange.reads_before_answer) == (400, 0)


class TestTasks:
    async def test_options(self) -> None:
        """By Shoal's names; what is about loading is passed over."""
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
        found = (await task_of({**CHAT_BODY, "options": options})).sampling
        assert (found.temperature, found.top_k, found.top_p, found.min_p) == (0.5, 3, 0.25, 0.125)
        assert (found.seed, found.max_tokens, found.stop) == (9, 5, ["END"])
        assert (found.repetition_penalty, found.presence_penalty, found.frequency_penalty) == (1.5, 0.75, -0.5)
        assert found.logprobs is None

    async def test_an_option_is_refused_by_its_own_name(self) -> None:
        """By models on this machine and on Triton, which read it in the task."""
        task = await task_of({**CHAT_BODY, "options": {"repeat_penalty": 1.5}})
        with pytest.raises(Unsupported, match="does not support 'repeat_penalty'"):
            merge_sampling(task.sampling, Sampling(), (), (), task.names)

    async def test_options_of_other_servers(self) -> None:
        """A remote server may know them; models on this machine and on Triton refuse them by name."""
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

    async def test_integers_that_are_written_with_a_point(self) -> None:
        """Ollama takes them, and leaves out what is behind the point."""
        found = (await task_of({**CHAT_BODY, "options": {"num_predict": 5.0, "seed": 42.0, "top_k": 3.9}})).sampling
        assert (found.max_tokens, found.seed, found.top_k) == (5, 42, 3)
        assert "options" in await refused({**CHAT_BODY, "options": {"seed": "42"}})

    @pytest.mark.parametrize("number", [-2, -1, 0])
    async def test_values_that_ask_for_nothing(self, number: int) -> None:
        """An answer as long as it likes, any seed, all tokens."""
        found = (await task_of({**CHAT_BODY, "options": {"num_predict": number, "seed": -1, "top_k": 0}})).sampling
        assert (found.max_tokens, found.seed, found.top_k) == (None, None, -1)
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
        """The template is told, and with false nothing of it comes back."""
        for path, body in (("/api/chat", CHAT_BODY), ("/api/generate", PROMPT)):
            task = await task_of({**body, "think": think}, path)
            assert (task.template_kwargs, task.include_reasoning) == (template_kwargs, shown)

    async def test_a_conversation_with_tools(self) -> None:
        """Arguments become text; results find their call by id, by the tool's name, or by their turn."""
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
        """Known by how they begin; the text follows them."""
        image = Part(type="image", url=f"data:image/{kind};base64,{head}")
        task = await task_of({"model": MODEL, "messages": [{"role": "user", "content": "What?", "images": [head]}]})
        assert task.messages[0].content == [image, Part(text="What?")]
        task = await task_of({"model": MODEL, "images": [image.url]}, "/api/generate")
        assert task.messages[0].content == [image]

    async def test_prompts(self) -> None:
        """A turn after the system's, or the text as it is."""
        task = await task_of({**PROMPT, "system": "Be brief", "suffix": "", "context": []}, "/api/generate")
        assert task.messages == [Message(role="system", content="Be brief"), Message(role="user", content="Hi")]
        assert task.prompts == []
        task = await task_of({**PROMPT, "raw": True}, "/api/generate")
        assert (task.prompts, task.messages) == (["Hi"], [])

    async def test_adapters(self) -> None:
        """After the colon."""
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
    async def test_what_is_refused(self, field: str, value: Any, more: dict[str, Any]) -> None:
        """By its name, before the model hears of it."""
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


@settings(max_examples=150)
@given(path=st.sampled_from(ROUTES), body=bodies)
def test_whatever_is_sent(path: str, body: Any) -> None:
    """An answer in lines or in one piece, or a refusal in the dialect; never a failure."""
    server, _ = serve_chat()
    answer = asyncio.run(server.call("POST", path, body))
    if answer.status != 200:
        assert 400 <= answer.status < 500, answer.body
        assert set(answer.json()) == {"error"}
    elif answer.headers["content-type"] == "application/x-ndjson":
        assert lines(answer)[-1]["done"] is True
    else:
        assert isinstance(answer.json(), dict)
