"""How a passed-on stream ends: complete, truncated, or with an error, which is reported once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.backends.openai.body import ModelNameRewriter
from shoal.backends.openai.stream_passthrough import RESPONSES, PassThroughStream
from shoal.errors import ShoalError, TransportFailed, UpstreamFailed, UpstreamRefused
from shoal.types import Chunk, Usage
from tests.fakes.openai_server import DONE, event
from tests.unit.backends.openai.kit import USAGE, delta, last, passed_on

CHAT = "openai.chat"
CREATED = event({"type": "response.created", "response": {"model": "up", "error": None, "metadata": {}}})


def passed(
    groups: Sequence[Sequence[bytes]], dialect: str = CHAT, key: bytes = b""
) -> tuple[list[Chunk], ShoalError | None]:
    """Return the chunks of a stream whose events came in these groups, and its error."""
    stream = PassThroughStream(dialect, ModelNameRewriter("mine"), key)
    chunks: list[Chunk] = []
    try:
        for events in groups:
            if (chunk := stream.push(events)) is not None:
                chunks.append(chunk)
            if stream.error is not None:
                raise stream.error
            if stream.has_ended:
                break
        chunks += stream.finish()
    except ShoalError as error:
        return chunks, error
    return chunks, None


def typed_event(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\n" + event({"type": kind, **fields})


class TestEnds:
    @pytest.mark.parametrize("ends", [[DONE], [delta("", finish="stop")], [delta("", finish="stop"), DONE]])
    def test_whole(self, ends: list[bytes]) -> None:
        chunks, error = passed([[delta()], ends])
        assert error is None
        assert passed_on(chunks) == (delta() + b"".join(ends)).replace(b"up/model", b"mine")

    @pytest.mark.parametrize(
        "events",
        [
            [],
            [delta()],
            [delta(), last()],
            [delta('"finish_reason":"stop"')],
            [event({"type": "response.completed"})],
        ],
    )
    def test_cut_off(self, events: list[bytes]) -> None:
        assert isinstance(passed([events])[1], TransportFailed)

    @pytest.mark.parametrize("kind", ["response.completed", "response.incomplete"])
    def test_of_a_response(self, kind: str) -> None:
        """A response ends with its last event and without [DONE]; a text that looks like it does not end it."""
        text = typed_event("response.output_text.delta", delta='{"type":"response.completed"}')
        metadata = typed_event("response.in_progress", response={"metadata": {"type": "response.completed"}})
        usage = {"input_tokens": 4, "output_tokens": 6}
        ends = typed_event(kind, response={"model": "up", "error": None, "usage": usage})
        chunks, error = passed([[CREATED, text], [metadata], [ends, text]], RESPONSES)
        assert error is None
        assert passed_on(chunks) == (CREATED + text + metadata + ends).replace(b'"up"', b'"mine"')
        assert [chunk.usage for chunk in chunks if chunk.usage] == [Usage(prompt_tokens=4, completion_tokens=6)]
        assert isinstance(passed([[CREATED, text]], RESPONSES)[1], TransportFailed)

    def test_usage_of_a_truncated_stream(self) -> None:
        chunks, error = passed([[delta(usage=USAGE)]])
        assert chunks[-1].usage == Usage(prompt_tokens=5, completion_tokens=2)
        assert isinstance(error, TransportFailed)

    def test_nothing_follows_the_end(self) -> None:
        chunks, _ = passed([[delta(), DONE, delta("b")]])
        assert passed_on(chunks) == delta(model="mine") + DONE

    @given(st.lists(st.booleans(), min_size=5, max_size=5))
    def test_whatever_came_together(self, cuts: list[bool]) -> None:
        events = [delta("a"), delta("b"), delta("", finish="stop"), last(), DONE]
        groups: list[list[bytes]] = [[]]
        for one, cut in zip(events, cuts, strict=True):
            groups[-1].append(one)
            if cut:
                groups.append([])
        chunks, error = passed(groups)
        assert error is None
        assert passed_on(chunks) == b"".join(events).replace(b"up/model", b"mine")
        assert [chunk.usage for chunk in chunks if chunk.usage] == [Usage(prompt_tokens=5, completion_tokens=2)]


class TestErrors:
    @pytest.mark.parametrize(
        ("dialect", "end", "message"),
        [
            (CHAT, event({"error": {"message": "boom"}}), "boom"),
            (CHAT, event({"error": "boom"}), None),
            (CHAT, b"event: error\n" + event({"message": "boom"}), "boom"),
            (CHAT, b'event:error\r\ndata: {"message":"boom"}\r\n\r\n', "boom"),
            (RESPONSES, typed_event("error", message="boom", code="server_error", param=None), "boom"),
            (RESPONSES, typed_event("error", error={"message": "boom"}), "boom"),
            (RESPONSES, typed_event("response.failed", response={"error": {"code": "x", "message": "boom"}}), "boom"),
            (RESPONSES, typed_event("response.failed", response=None), "the response failed"),
        ],
    )
    def test_are_raised_after_what_came_before(self, dialect: str, end: bytes, message: str | None) -> None:
        chunks, error = passed([[delta(), end, DONE]], dialect)
        assert passed_on(chunks) == delta(model="mine")
        assert isinstance(error, UpstreamRefused)
        assert error.status == 500
        reply = json.loads(error.body)["error"]
        assert (reply["message"] if message is not None else reply) == (message or "boom")
        assert (message or "boom") in error.message

    def test_the_key_stays_here(self) -> None:
        _, error = passed([[event({"error": {"message": "sk-SECRET is no key"}})]], key=b"sk-SECRET")
        assert isinstance(error, UpstreamRefused)
        assert b"SECRET" not in error.body + error.message.encode()

    @pytest.mark.parametrize(
        "body",
        [b'{"error":' + b"[" * 5000 + b"]" * 5000 + b"}", b'{"x":' + b"[" * 5000 + b'"error"' + b"]" * 5000 + b"}"],
    )
    def test_that_nest_too_deep(self, body: bytes) -> None:
        assert isinstance(passed([[b"data: " + body + b"\n\n"]])[1], UpstreamFailed)

    @pytest.mark.parametrize(
        "data",
        [
            delta('"error"'),
            event({"choices": [{"delta": {"error": {"message": "x"}}}]}),
            event({"error": None, "choices": []}),
            b'data: "error" is no JSON\n\n',
            b'data: {"error":\xff}\n\n',
            event({"type": "response.failed"}),
        ],
    )
    def test_that_are_none(self, data: bytes) -> None:
        chunks, error = passed([[data, DONE]])
        assert error is None
        assert passed_on(chunks) == data.replace(b"up/model", b"mine") + DONE
