"""The events in which Anthropic's Messages API streams."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import EngineFailed, ShoalError, Unavailable
from shoal.types import Chunk, ToolDelta, Usage
from tests.surfaces.surface_kit import Answer
from tests.surfaces.talk_kit import FakeRunner, data_of, serve_chat
from tests.surfaces.test_anthropic import ADD, CALLS, PATH, ask

USAGE = Chunk(usage=Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=2))


async def streamed(chunks: Sequence[Chunk], error: ShoalError | None = None, **fields: Any) -> Answer:
    runner = FakeRunner(reply=lambda task: chunks, error=error, fail_after=len(chunks))
    headers = {"accept": "application/json"}  # as the TypeScript client sends, whatever it asks for
    return await serve_chat(runner).call("POST", PATH, ask(stream=True, **fields), headers=headers)


def rebuild(events: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the blocks that a client makes of the events. Checks that they are opened and closed one by one."""
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(blocks)
                blocks.append({**event["content_block"], "json": ""})
                is_open = True
            case "content_block_delta":
                assert is_open
                assert event["index"] == len(blocks) - 1
                delta = event["delta"]
                kind = delta.pop("type")
                ((name, value),) = delta.items()
                field = "json" if kind == "input_json_delta" else name
                blocks[-1][field] += value
            case "content_block_stop":
                assert is_open
                assert event["index"] == len(blocks) - 1
                is_open = False
    assert not is_open
    return blocks


async def test_the_events_of_a_text() -> None:
    """Exactly Anthropic's, each named twice; usage and stop reason come in the last but one."""
    answer = await streamed([Chunk(text="one"), Chunk(text=" two"), Chunk(finish_reason="stop"), USAGE])
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    events = data_of(answer.body)
    names = [line.removeprefix("event: ") for line in answer.body.decode().split("\n") if line.startswith("event: ")]
    assert names == [each["type"] for each in events]
    message = events[0]["message"]
    none = {
        **{"input_tokens": 0, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 0},
        "output_tokens_details": {"thinking_tokens": 0},
    }
    assert message.pop("id").startswith("msg_")
    assert message == {
        **{"type": "message", "role": "assistant", "model": "talker", "content": []},
        **{"stop_reason": None, "stop_sequence": None, "usage": none},
    }
    assert events[1:] == [
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "one"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": " two"}},
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": {**none, "input_tokens": 5, "cache_read_input_tokens": 2, "output_tokens": 3},
        },
        {"type": "message_stop"},
    ]


async def test_blocks_of_several_kinds() -> None:
    """Thinking ends with its signature; arguments come as they are."""
    answer = await streamed(CALLS, tools=[ADD], thinking={"type": "adaptive"})
    events = data_of(answer.body)
    thought, said, *calls = rebuild(events)
    assert (thought["type"], thought["thinking"]) == ("thinking", "let me see")
    assert thought["signature"] == events[0]["message"]["id"]
    assert (said["type"], said["text"]) == ("text", "Adding.")
    assert [(each["id"], each["name"], each["input"], each["json"]) for each in calls] == [
        ("call_a", "add", {}, '{"a": 1.50}'),
        ("call_b", "sub", {}, ""),
        ("call_c", "cut", {}, '{"a'),
    ]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize(("thinking", "shown"), [(None, 0), ({"type": "adaptive", "display": "omitted"}, 1)])
async def test_thinking_that_is_not_shown(thinking: Any, shown: int) -> None:
    """No block, or one with a signature alone."""
    blocks = rebuild(data_of((await streamed(CALLS, thinking=thinking)).body))
    thoughts = [each for each in blocks if each["type"] == "thinking"]
    assert [each["thinking"] for each in thoughts] == [""] * shown
    assert all(each["signature"] for each in thoughts)


async def test_calls_whose_fragments_alternate() -> None:
    """One block is open at a time: a call that begins early waits for the end of the one before it."""
    parts = [
        ToolDelta(index=0, id="a", name="first"),
        ToolDelta(index=1, id="b", name="second", arguments="["),
        ToolDelta(index=0, arguments='{"x"'),
        ToolDelta(index=1, arguments="]"),
        ToolDelta(index=0, arguments=":1}"),
        ToolDelta(index=2, id="c", name="third", arguments="{}"),
        ToolDelta(index=0, arguments=" \n"),
    ]
    chunks = [*(Chunk(tools=[part]) for part in parts), Chunk(finish_reason="tool_calls"), USAGE]
    blocks = rebuild(data_of((await streamed(chunks, tools=[ADD])).body))
    assert {each["id"]: each["json"] for each in blocks} == {"a": '{"x":1}', "b": "[]", "c": "{}"}


async def test_a_call_that_goes_on_after_its_end() -> None:
    """No event can say that: the stream fails instead of losing it."""
    parts = [ToolDelta(index=0, id="a", name="first", arguments="{}"), ToolDelta(index=1, id="b", name="second")]
    chunks = [*(Chunk(tools=[part]) for part in parts), Chunk(tools=[ToolDelta(index=0, arguments="!")])]
    last = data_of((await streamed(chunks, tools=[ADD])).body)[-1]
    assert last["type"] == "error"
    assert "continued a tool call" in last["error"]["message"]


async def test_blanks_within_a_call() -> None:
    """They end no call."""
    parts = [
        Chunk(tools=[ToolDelta(index=0, id="a", name="first", arguments='{"x"')]),
        Chunk(text="\n"),
        Chunk(tools=[ToolDelta(index=0, arguments=":1}")]),
        Chunk(finish_reason="tool_calls"),
        USAGE,
    ]
    blocks = rebuild(data_of((await streamed(parts, tools=[ADD])).body))
    assert [(each["id"], each["json"]) for each in blocks] == [("a", '{"x":1}')]


async def test_an_empty_answer() -> None:
    """A message without content is complete, too."""
    events = data_of((await streamed([Chunk(finish_reason="stop"), USAGE])).body)
    assert [each["type"] for each in events] == ["message_start", "message_delta", "message_stop"]


async def test_errors_in_mid_stream() -> None:
    """An error event in the form of errors, and nothing after it; before the first chunk it has a status."""
    answer = await streamed([Chunk(text="one")], EngineFailed("x"))
    assert data_of(answer.body)[-1] == {
        "type": "error",
        "error": {"type": "api_error", "message": "x"},
        "request_id": answer.headers["x-request-id"],
    }
    assert b"message_stop" not in answer.body
    assert (await streamed([], Unavailable("x"))).status == 529


async def test_pings() -> None:
    """Heartbeats are events that clients skip."""
    runner = FakeRunner(waits={1: asyncio.Event()})
    server = serve_chat(runner, heartbeat_s=0.01)
    exchange, task = server.open(PATH, ask("one two", stream=True))
    await exchange.until(lambda messages: any(b"ping" in each.get("body", b"") for each in messages))
    runner.waits[1].set()
    await task
    events = data_of(exchange.answer().body)
    assert {"type": "ping"} in events
    assert events[-1] == {"type": "message_stop"}


async def test_an_upstream_is_passed_on() -> None:
    """Its events byte for byte and no others; a later failure is an error event."""
    raw = b'event: message_start\ndata: {"type": "message_start"}\n\n'
    chunks = [Chunk(raw=("anthropic.messages", raw), usage=Usage(completion_tokens=1))]
    passed = await streamed(chunks, tools=[{"type": "web_search_20250305", "name": "web_search"}])
    assert passed.body == raw
    assert "x-shoal-ignored" not in passed.headers  # it has got everything
    answer = await streamed(chunks, EngineFailed("gone"))
    assert answer.body.startswith(raw)
    assert data_of(answer.body)[-1]["error"]["message"] == "gone"


FRAGMENTS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["a", '"', "{", "é"])), max_size=20)


@given(FRAGMENTS)
async def test_any_order_of_fragments(fragments: list[tuple[int, str]]) -> None:
    """Every call arrives whole, once. No beginning of these arguments is JSON, so none ends early."""
    wanted: dict[str, str] = {}
    chunks = []
    for index, piece in fragments:
        ident = f"call_{index}"
        begun = ident in wanted
        argument = piece if begun else f"<{piece}"
        wanted[ident] = wanted.get(ident, "") + argument
        delta = ToolDelta(index=index, id="" if begun else ident, name="" if begun else "f", arguments=argument)
        chunks.append(Chunk(tools=[delta]))
    answer = await streamed([*chunks, Chunk(finish_reason="tool_calls"), USAGE], tools=[ADD])
    blocks = rebuild(data_of(answer.body))
    assert {each["id"]: each["json"] for each in blocks} == wanted
    assert orjson.loads(orjson.dumps(blocks)) == blocks
