"""Answers of chat and completions as typed chunks, for clients of other APIs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.backends.base.http_answer import Answer
from shoal.backends.openai.answers import AnswerReader, parse_usage, read_typed_whole
from shoal.backends.openai.runner import UpstreamOptions, UpstreamRunner
from shoal.backends.openai.wire import MAX_COUNT
from shoal.errors import TransportFailed, UpstreamFailed, UpstreamRefused
from shoal.types import Chunk, TokenLogprob, ToolDelta, Usage
from tests.fakes.openai_server import DONE, FakeUpstream, Script, answer, event, stream
from tests.unit.backends.openai.kit import HEAD, USAGE, chunks_of, context, delta, last, runner_of, typed


@pytest.fixture
async def server() -> AsyncIterator[FakeUpstream]:
    async with FakeUpstream() as made:
        yield made


@pytest.fixture
async def runner(server: FakeUpstream) -> AsyncIterator[UpstreamRunner]:
    made = runner_of(server)
    yield made
    await made.aclose()


def read(*choices: Any, reader: AnswerReader | None = None, **more: Any) -> list[Chunk]:
    return list((reader or AnswerReader()).read(json.dumps({"choices": choices, **more}).encode()))


def choice(index: int = 0, finish: str | None = None, logprobs: Any = None, **delta: Any) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": finish, "logprobs": logprobs}


def read_fragments(*fragments: dict[str, Any]) -> list[ToolDelta]:
    """Read a stream with one fragment of a call in each event."""
    reader = AnswerReader()
    return [
        tool for each in fragments for chunk in read(choice(tool_calls=[each]), reader=reader) for tool in chunk.tools
    ]


class TestStreams:
    async def test_text_then_reason_then_usage(self, server: FakeUpstream, runner: UpstreamRunner) -> None:
        events = [delta(""), delta("Grü"), delta("ße", usage=None), delta("", finish="length"), last(), DONE]
        server.on("/chat/completions", stream(b": ping\n\n", *events))
        assert await chunks_of(runner, typed()) == [
            Chunk(text="Grü"),
            Chunk(text="ße"),
            Chunk(finish_reason="length"),
            Chunk(usage=Usage(prompt_tokens=5, completion_tokens=2)),
        ]
        sent = server.requests[0].json
        assert (sent["model"], sent["stream_options"]) == ("up/model", {"include_usage": True})

    async def test_prompts_go_to_completions(self, server: FakeUpstream, runner: UpstreamRunner) -> None:
        chunk = {"choices": [{"index": 0, "text": "b", "finish_reason": "stop"}], "usage": USAGE}
        server.on("/completions", stream(event(chunk), DONE))
        chunks = await chunks_of(runner, typed(messages=[], prompts=["a"]))
        assert [(chunk.text, chunk.finish_reason) for chunk in chunks] == [("b", None), ("", "stop"), ("", None)]
        assert server.requests[0].json["prompt"] == "a"

    async def test_fields_of_the_operator(self, server: FakeUpstream) -> None:
        runner = runner_of(server, options=UpstreamOptions(strip=frozenset({"stream_options"}), defaults={"top_k": 4}))
        server.on("/chat/completions", stream(delta("", finish="stop"), DONE))
        await chunks_of(runner, typed())
        sent = server.requests[0].json
        assert sent["top_k"] == 4
        assert "stream_options" not in sent
        await runner.aclose()

    async def test_a_server_that_forgets_the_reason(self, server: FakeUpstream, runner: UpstreamRunner) -> None:
        server.on("/chat/completions", stream(delta("a"), DONE))
        assert await chunks_of(runner, typed()) == [Chunk(text="a"), Chunk(finish_reason="stop")]

    async def test_a_stream_that_ends_too_early(self, server: FakeUpstream, runner: UpstreamRunner) -> None:
        server.on("/chat/completions", stream(delta("a")))
        got = []
        with pytest.raises(TransportFailed, match="before the answer was complete"):
            async with aclosing(runner.stream(typed(), context())) as chunks:
                async for chunk in chunks:
                    got.append(chunk)  # noqa: PERF401 - what came before the error is what counts
        assert got == [Chunk(text="a")]

    async def test_a_stream_that_ends_without_done(self, server: FakeUpstream, runner: UpstreamRunner) -> None:
        server.on("/chat/completions", stream(delta("a", finish="stop")))
        assert await chunks_of(runner, typed()) == [Chunk(text="a"), Chunk(finish_reason="stop")]

    async def test_a_stream_that_goes_on_after_its_reason(self, server: FakeUpstream, runner: UpstreamRunner) -> None:
        """Some servers send the reason with every event: the last one is reported once, after everything else."""
        server.on("/chat/completions", stream(delta("a", finish="stop"), delta("b", finish="length"), delta("c"), DONE))
        assert await chunks_of(runner, typed()) == [
            Chunk(text="a"),
            Chunk(text="b"),
            Chunk(text="c"),
            Chunk(finish_reason="length"),
        ]

    @pytest.mark.parametrize(
        ("script", "streams"), [(stream(last(), DONE), True), (stream(DONE), True), (answer({"choices": []}), False)]
    )
    async def test_an_answer_without_choices(
        self, server: FakeUpstream, runner: UpstreamRunner, script: Script, streams: bool
    ) -> None:
        server.on("/chat/completions", script)
        with pytest.raises(UpstreamRefused, match="no choices: check") as caught:
            await chunks_of(runner, typed(stream=streams))
        assert caught.value.status == 502

    async def test_an_error_in_the_stream(self, server: FakeUpstream, runner: UpstreamRunner) -> None:
        server.on("/chat/completions", stream(delta("a"), event({"error": {"message": "boom", "code": 500}})))
        chunks = runner.stream(typed(), context())
        assert await anext(chunks) == Chunk(text="a")
        with pytest.raises(UpstreamRefused, match="boom"):
            await anext(chunks)

    async def test_a_whole_answer(self, server: FakeUpstream, runner: UpstreamRunner) -> None:
        call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        message = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
        server.on("/chat/completions", answer({**HEAD, "choices": [choice], "usage": USAGE}))
        chunks = await chunks_of(runner, typed(stream=False))
        assert chunks == [
            Chunk(reasoning="hm", tools=[ToolDelta(index=0, id="c1", name="f", arguments="{}")]),
            Chunk(finish_reason="tool_calls"),
            Chunk(usage=Usage(prompt_tokens=5, completion_tokens=2)),
        ]
        assert "stream" not in server.requests[0].json


class TestReading:
    def test_choices_are_separate(self) -> None:
        reader = AnswerReader()
        assert read(choice(1, content="b"), choice(0, content="a"), reader=reader) == [
            Chunk(index=1, text="b"),
            Chunk(index=0, text="a"),
        ]
        assert not reader.finished
        read(choice(0, "stop"), reader=reader)
        assert not reader.finished
        assert list(reader.finish()) == [Chunk(index=1, finish_reason="stop"), Chunk(finish_reason="stop")]

    @pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
    def test_thoughts_come_before_text(self, name: str) -> None:
        event = {"index": 0, "delta": {"content": "a", name: "hm"}}
        assert read(event) == [Chunk(reasoning="hm"), Chunk(text="a")]
        assert read(event, reader=AnswerReader(reasoning=False)) == [Chunk(text="a")]

    @pytest.mark.parametrize(
        ("reason", "expected"),
        [("stop", "stop"), ("length", "length"), ("function_call", "tool_calls"), ("eos_token", "stop")],
    )
    def test_reasons(self, reason: str, expected: str) -> None:
        reader = AnswerReader()
        assert read(choice(0, reason), reader=reader) == []
        assert list(reader.finish()) == [Chunk(finish_reason=expected)]

    @pytest.mark.parametrize("reason", ["abort", "error", "Cancelled"])
    def test_an_aborted_answer_is_an_error(self, reason: str) -> None:
        """Its text is not all that the model would have said."""
        with pytest.raises(UpstreamFailed, match=f"aborted the answer \\({reason}\\)"):
            read(choice(0, reason))

    def test_an_empty_reason_is_none(self) -> None:
        """Some servers send an empty reason in every event but the last."""
        reader = AnswerReader()
        assert read({"delta": {"content": "a"}, "finish_reason": ""}, reader=reader) == [Chunk(text="a")]
        assert not reader.finished
        read({"delta": {}, "finish_reason": "length"}, reader=reader)
        read({"delta": {"content": "b"}, "finish_reason": ""}, reader=reader)
        assert list(reader.finish()) == [Chunk(finish_reason="length")]

    @pytest.mark.parametrize("pieces", [["", '{"a": {', "}", "}", ""], ['{"a": 1}', "\n"], ["}", "{}"]])
    def test_pieces_under_ids_that_are_always_new(self, pieces: list[str]) -> None:
        """Older versions of vLLM stream the call of a named function with the name and a new id in each fragment."""
        reader = AnswerReader()
        tools = []
        for place, piece in enumerate(pieces):
            call = {"index": 0, "id": f"c{place}", "function": {"name": "f", "arguments": piece}}
            tools += read(choice(tool_calls=[call]), reader=reader)[0].tools
        first, *others = pieces
        assert tools == [
            ToolDelta(index=0, id="c0", name="f", arguments=first),
            *(ToolDelta(index=0, arguments=piece) for piece in others),
        ]

    def test_one_function_called_twice_under_one_number(self) -> None:
        reader = AnswerReader()
        tools = []
        for ident in ("c1", "c2"):
            call = {"index": 0, "id": ident, "function": {"name": "f", "arguments": '{"a": 1}'}}
            tools += read(choice(tool_calls=[call]), reader=reader)[0].tools
        assert [(tool.index, tool.id, tool.name) for tool in tools] == [(0, "c1", "f"), (1, "c2", "f")]

    @pytest.mark.parametrize("repeats", [False, True], ids=["bare", "named"])
    def test_one_function_called_twice_in_pieces_under_one_number(self, repeats: bool) -> None:
        """Each call begins with its id, its name and no arguments, as OpenAI sends it; only the index is wrong."""
        pieces = []
        for ident in ("c1", "c2"):
            pieces.append({"index": 0, "id": ident, "function": {"name": "f", "arguments": ""}})
            again = {"id": ident, "function": {"name": "f", "arguments": "1}"}} if repeats else {}
            pieces.append({"index": 0, "function": {"arguments": '{"a": '}})
            pieces.append({"index": 0, "function": {"arguments": "1}"}, **again})
        tools = read_fragments(*pieces)
        assert [(tool.id, tool.name) for tool in tools if tool.id] == [("c1", "f"), ("c2", "f")]
        for number in (0, 1):
            assert "".join(tool.arguments for tool in tools if tool.index == number) == '{"a": 1}'

    @pytest.mark.parametrize("number", [{"index": 0}, {}], ids=["nought", "none"])
    def test_calls_that_are_numbered_alike(self, number: dict[str, int]) -> None:
        """Ollama and Gemini stream whole parallel calls with the same index and different ids."""
        reader = AnswerReader()
        tools = []
        for ident, name in (("c1", "f"), ("c2", "g"), ("c2", "g")):
            call = {**number, "id": ident, "function": {"name": name, "arguments": "{}"}}
            tools += read(choice(tool_calls=[call]), reader=reader)[0].tools
        assert tools == [
            ToolDelta(index=0, id="c1", name="f", arguments="{}"),
            ToolDelta(index=1, id="c2", name="g", arguments="{}"),
            ToolDelta(index=1, arguments="{}"),
        ]

    def test_calls_of_tools(self) -> None:
        """Id and name are reported once, whatever the server repeats."""
        reader = AnswerReader()
        function = {"name": "f", "arguments": ""}
        first = [{"index": 0, "id": "c1", "type": "function", "function": function}]
        assert read(choice(tool_calls=first), reader=reader)[0].tools == [ToolDelta(index=0, id="c1", name="f")]
        more = [{"index": 0, "id": "c1", "function": {"name": "f", "arguments": '{"a"'}}]
        assert read(choice(tool_calls=more), reader=reader)[0].tools == [ToolDelta(index=0, arguments='{"a"')]
        other = [{"index": 1, "id": "c2", "function": {"name": "g"}}]
        assert read(choice(tool_calls=other), reader=reader)[0].tools == [ToolDelta(index=1, id="c2", name="g")]
        again = [{"index": 0, "id": "c3", "function": {"name": "h"}}]
        assert read(choice(1, tool_calls=again), reader=reader)[0].tools == [ToolDelta(index=0, id="c3", name="h")]

    def test_calls_without_index_and_id(self) -> None:
        calls = [{"function": {"name": "f"}}, {"function": {"name": "g"}}]
        tools = read({"message": {"tool_calls": calls}})[0].tools
        assert [(tool.index, tool.name) for tool in tools] == [(0, "f"), (1, "g")]
        assert all(tool.id.startswith("call_") for tool in tools)
        assert tools[0].id != tools[1].id

    def test_calls_that_nothing_but_their_names_tell_apart(self) -> None:
        """Without index and id, a repeated name after complete arguments starts another call."""
        fragments = [("f", '{"x":'), ("f", "1}"), ("f", '{"y":2}'), ("g", ""), ("h", ""), (None, "{}"), (None, " ")]
        tools = read_fragments(*({"function": {"name": name, "arguments": arguments}} for name, arguments in fragments))
        assert [(tool.index, tool.name, tool.arguments) for tool in tools] == [
            (0, "f", '{"x":'),
            (0, "", "1}"),
            (1, "f", '{"y":2}'),
            (2, "g", ""),
            (3, "h", ""),
            (3, "", "{}"),
            (3, "", " "),
        ]
        assert len({tool.id for tool in tools if tool.name}) == 4

    def test_braces_alone_end_no_call(self) -> None:
        fragments = ('{"x":{}', "}", "}")  # the last of them is one too many
        tools = read_fragments(*({"function": {"name": "f", "arguments": each}} for each in fragments))
        assert [tool.index for tool in tools] == [0, 0, 1]

    def test_a_name_that_comes_after_its_id(self) -> None:
        """A call is reported once its name is known, with the arguments received so far."""
        fragments: list[dict[str, Any]] = [
            {"index": 0, "id": "c1"},
            {"index": 0, "function": {"arguments": '{"a"'}},
            {"index": 0, "id": "c1", "function": {"name": "f", "arguments": ":1"}},
            {"index": 0, "function": {"arguments": "}"}},
        ]
        assert read_fragments(*fragments) == [
            ToolDelta(index=0, id="c1", name="f", arguments='{"a":1'),
            ToolDelta(index=0, arguments="}"),
        ]

    def test_a_name_that_never_comes(self) -> None:
        """A call without a name is reported at the end of its choice."""
        call = {"index": 0, "id": "c1", "function": {"arguments": "{}"}}
        reader = AnswerReader()
        assert read(choice(tool_calls=[call]), reader=reader) == []
        rest = [ToolDelta(index=0, id="c1", arguments="{}")]
        assert list(reader.finish()) == [Chunk(tools=rest, finish_reason="stop")]

    def test_arguments_that_are_an_object(self) -> None:
        call = {"index": 0, "id": "c1", "function": {"name": "f", "arguments": {"x": [1.5, "é"]}}}
        assert read_fragments(call) == [ToolDelta(index=0, id="c1", name="f", arguments='{"x":[1.5,"é"]}')]

    def test_the_call_of_the_older_api(self) -> None:
        reader = AnswerReader()
        fragments: list[dict[str, Any]] = [
            {"name": "f", "arguments": ""},
            {"arguments": '{"x":'},
            {"arguments": "1}"},
            {},
        ]
        chunks = [chunk for each in fragments for chunk in read(choice(function_call=each), reader=reader)]
        (first, *more) = [tool for chunk in chunks for tool in chunk.tools]
        assert (first.index, first.name, first.id[:5]) == (0, "f", "call_")
        assert more == [ToolDelta(index=0, arguments='{"x":'), ToolDelta(index=0, arguments="1}")]
        whole = {"message": {"content": None, "function_call": {"name": "f", "arguments": "{}"}}}
        assert [(tool.name, tool.arguments) for tool in read(whole)[0].tools] == [("f", "{}")]

    def test_a_call_in_both_formats(self) -> None:
        function = {"name": "f", "arguments": "{}"}
        calls = [{"id": "c1", "function": function}]
        tools = read({"message": {"function_call": function, "tool_calls": calls}})[0].tools
        assert tools == [ToolDelta(index=0, id="c1", name="f", arguments="{}")]

    def test_log_probabilities_of_chat(self) -> None:
        """Bytes are kept where the text cannot represent them."""
        top = {"token": "b", "logprob": -2.0, "bytes": [98]}
        tokens = [
            {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": [top]},
            {"token": "\ufffd", "logprob": -1.0, "bytes": [240, 159], "top_logprobs": []},
        ]
        assert read(choice(content="a", logprobs={"content": tokens}))[0].logprobs == [
            TokenLogprob(token="a", logprob=-0.5, top=[TokenLogprob(token="b", logprob=-2.0)]),
            TokenLogprob(token="\ufffd", logprob=-1.0, data=b"\xf0\x9f"),
        ]

    def test_log_probabilities_of_completions(self) -> None:
        logprobs = {
            "tokens": ["a", "b"],
            "token_logprobs": [None, -1.0],
            "top_logprobs": [None, {"b": -1.0, "c": -2.0}],
        }
        assert read({"index": 0, "text": "ab", "logprobs": logprobs})[0].logprobs == [
            TokenLogprob(token="a", logprob=0.0),
            TokenLogprob(
                token="b",
                logprob=-1.0,
                top=[TokenLogprob(token="b", logprob=-1.0), TokenLogprob(token="c", logprob=-2.0)],
            ),
        ]

    def test_contents_in_parts(self) -> None:
        parts = [{"type": "thinking", "thinking": []}, {"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        assert read(choice(content=parts)) == [Chunk(text="ab")]

    def test_a_refusal_is_text(self) -> None:
        assert read(choice(refusal="no")) == [Chunk(text="no")]

    @pytest.mark.parametrize("body", [b"", b"[]", b'{"choices":3}', b'{"choices":[{"delta":{"content":3}}]}', b"\xff"])
    def test_what_is_no_answer(self, body: bytes) -> None:
        with pytest.raises(UpstreamRefused, match="not match OpenAI's API"):
            list(AnswerReader().read(body))


class TestUsage:
    @pytest.mark.parametrize(
        ("body", "usage"),
        [
            ({"usage": USAGE}, Usage(prompt_tokens=5, completion_tokens=2)),
            ({"usage": {"prompt_tokens": 5, "prompt_tokens_details": None}}, Usage(prompt_tokens=5)),
            (
                {"usage": {"completion_tokens": 5, "completion_tokens_details": {"reasoning_tokens": 3}}},
                Usage(completion_tokens=5, reasoning_tokens=3),
            ),
            (
                {"response": {"usage": {"input_tokens": 1, "output_tokens": 2}}},
                Usage(prompt_tokens=1, completion_tokens=2),
            ),
            ({"usage": None}, None),
            ({"choices": [{"delta": {"content": '"usage"'}}]}, None),
            ([], None),
            ({"usage": "x"}, None),
            ({"usage": {"prompt_tokens": 10**400, "completion_tokens": -7}}, Usage(prompt_tokens=MAX_COUNT)),
            (
                {"usage": {"prompt_tokens": 1e300, "completion_tokens": 3.0}},
                Usage(prompt_tokens=MAX_COUNT, completion_tokens=3),
            ),
            ({"usage": {"prompt_tokens": True, "completion_tokens": "9"}}, Usage()),
            ({"usage": {"prompt_tokens_details": {"cached_tokens": -1}}}, Usage()),
        ],
    )
    def test_of_every_shape(self, body: Any, usage: Usage | None) -> None:
        assert parse_usage(json.dumps(body).encode()) == usage

    @given(st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(), st.none()))
    def test_counts_are_counts(self, count: Any) -> None:
        body = {"usage": {"prompt_tokens": count, "completion_tokens_details": {"reasoning_tokens": count}}}
        usage = parse_usage(json.dumps(body).encode())
        assert usage is not None
        assert 0 <= usage.prompt_tokens <= MAX_COUNT
        assert usage.reasoning_tokens == usage.prompt_tokens

    def test_what_nests_too_deep_counts_nothing(self) -> None:
        deep = b"[" * 5000 + b"]" * 5000
        assert parse_usage(b'{"usage":{"prompt_tokens":1},"x":' + deep + b"}") is None
        with pytest.raises(UpstreamRefused, match="not match OpenAI's API"):
            list(AnswerReader().read(b'{"choices":' + deep + b"}"))


@pytest.mark.parametrize(
    ("body", "is_answer"),
    [
        ({"output": [], "content": "hi"}, True),
        ({"output": {"x": 1}, "content": [{"type": "text", "text": "x"}]}, True),
        ({"output": None, "content": "[]"}, False),
        ({"output": {}}, False),
    ],
)
def test_a_field_that_has_another_meaning_in_the_other_api(body: Any, is_answer: bool) -> None:
    """An answer of the Responses API or of Anthropic's Messages needs the list of one of them alone."""
    whole = Answer(
        200, {"content-type": "application/json"}, json.dumps({**body, "usage": {"input_tokens": 3}}).encode()
    )
    if is_answer:
        assert read_typed_whole(whole) == Usage(prompt_tokens=3)
    else:
        with pytest.raises(UpstreamRefused, match="no output"):
            read_typed_whole(whole)
