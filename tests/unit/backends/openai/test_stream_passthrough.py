"""How a passed-on stream ends: complete, truncated, or with an error, which is reported once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.backends.openai import stream_passthrough
from shoal.backends.openai.body import ModelNameRewriter
from shoal.backends.openai.sse import EventSplitter, payload, split_events
from shoal.backends.openai.stream_passthrough import RESPONSES, PassThroughStream
from shoal.errors import ShoalError, TransportFailed, UpstreamFailed, UpstreamRefused
from shoal.types import Chunk, Usage
from tests.fakes.openai_server import DONE, event
from tests.unit.backends.openai.kit import USAGE, delta, last, passed_on

CHAT = "openai.chat"
CREATED = event({"type": "response.created", "response": {"model": "up", "error": None, "metadata": {}}})


def passed(
    groups: Sequence[Sequence[bytes]],
    dialect: str = CHAT,
    key: bytes = b"",
    names: ModelNameRewriter | None = None,
) -> tuple[list[Chunk], ShoalError | None]:
    """Return the chunks of a stream whose events came in these groups, and its error."""
    stream = PassThroughStream(dialect, names or ModelNameRewriter("mine"), key)
    chunks: list[Chunk] = []
    try:
        for events in groups:
            if (chunk := stream.push(b"".join(events))) is not None:
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

    @pytest.mark.parametrize(
        ("dialect", "plain", "end"),
        [
            (CHAT, event({"choices": [{"delta": {}}]}), DONE),
            (RESPONSES, typed_event("response.output_text.delta"), b"event: done\n" + DONE),
        ],
    )
    def test_nothing_follows_the_end_where_no_event_names_a_model(self, dialect: str, plain: bytes, end: bytes) -> None:
        chunks, error = passed([[plain + end + plain]], dialect)
        assert (passed_on(chunks), error) == (plain + end, None)

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
        ("dialect", "events", "message"),
        [
            (CHAT, [DONE], "no choices"),
            (CHAT, [DONE, delta()], "no choices"),
            (CHAT, [event({"choices": []}), DONE], "no choices"),
            (RESPONSES, [DONE], "no output"),
            (RESPONSES, [b"event: done\n" + DONE], "no output"),
        ],
    )
    @pytest.mark.parametrize("together", [True, False])
    def test_an_end_without_an_answer(self, dialect: str, events: list[bytes], message: str, together: bool) -> None:
        """The error comes in place of the end, and first of all if nothing precedes that."""
        chunks, error = passed([events] if together else [[each] for each in events], dialect)
        assert isinstance(error, UpstreamRefused)
        assert (error.status, message in error.message) == (502, True)
        before = [each for each in events[:-1] if not events[0].endswith(DONE)]
        assert passed_on(chunks) == b"".join(before)

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
        chunks, error = passed([[delta(), data, DONE]])
        assert error is None
        assert passed_on(chunks) == (delta() + data).replace(b"up/model", b"mine") + DONE


TEXTS = [
    "a",
    "",
    "Grüße 🐟",
    "error",
    '"error"',
    '"model":"up"',
    'data: {"model":"up"}',
    "\n\ndata: [DONE]\n\n",
    "[DONE]",
]
NO_DATA = [b": ping\n\n", b":\n\n", b"event: ping\n\n", b"id: 7\n\n", b"\n\n", b": x\n: [DONE]\n\n"]
ERRORS = [event({"error": {"message": "boom"}}), b"event: error\n" + event({"message": "boom"})]


class Made(NamedTuple):
    """A stream of the model `up`: its bytes, and those of its events with data, up to its end, for a client."""

    sent: bytes
    expected: bytes
    usage: Usage | None
    error: type[ShoalError] | None


@st.composite
def streams(draw: st.DrawFn) -> Made:
    sent = b""
    events: list[bytes] = []
    usage, is_finished = None, False
    kinds = st.sampled_from(["plain"] * 6 + ["late", "none", "null", "usage", "reason", "lines", "named"])
    for text, kind in draw(st.lists(st.tuples(st.sampled_from(TEXTS), kinds), max_size=8)):
        fields: dict[str, Any] = {"id": "c", "model": "up", "choices": [{"delta": {"content": text}}]}
        if kind == "late":
            fields["model"] = fields.pop("model")
        elif kind == "none":
            del fields["model"]
        elif kind == "null":
            fields |= {"usage": None, "error": None}
        elif kind == "usage":
            fields["usage"], usage = USAGE, Usage(prompt_tokens=5, completion_tokens=2)
        elif kind == "reason":
            fields["choices"][0]["finish_reason"], is_finished = "stop", True
        one = event(fields)
        if kind == "lines":
            one = one.replace(b'"choices"', b'\ndata: "choices"')
        elif kind == "named":
            one = b"event: message\n" + one
        events.append(one)
        sent += draw(st.sampled_from([b"", b"", b"", *NO_DATA])) + one
    end = draw(st.sampled_from([b"", DONE, DONE, b"data:[DONE]\n\n", b"event: x\n" + DONE, *ERRORS]))
    failed = end in ERRORS
    failed = failed or bool(end and not events)
    error = UpstreamRefused if failed else None if end or is_finished else TransportFailed
    expected = b"".join(events if failed else [*events, end])
    beyond = draw(st.sampled_from([b"", delta("late"), event({"choices": []})])) if end else b""
    # Quotes in a text are escaped, so only the model's name is replaced.
    return Made(sent + end + beyond, expected.replace(b'"model":"up"', b'"model":"mine"'), usage, error)


class EventByEvent(ModelNameRewriter):
    """Never lets events pass unsplit, and remembers nothing of them."""

    def __call__(self, data: bytes) -> bytes:
        return ModelNameRewriter("mine")(data)

    def rewrite_events(self, events: bytes, *, learns: bool = True) -> None:
        return None


def choices_first(text: str, **more: Any) -> bytes:
    return event({"choices": [{"delta": {"content": text}}], "id": "c", "model": "up", **more})


@st.composite
def response_streams(draw: st.DrawFn) -> bytes:
    """The bytes of a stream of the Responses API, with all that may stand between its events."""
    response = {"id": "r", "model": "up", "error": None, "usage": None}
    sent = [typed_event("response.created", response=response)] if draw(st.booleans()) else []
    kinds = st.sampled_from(["plain"] * 6 + ["untyped", "error", "named", "usage", "model", "lines", "no type"])
    for text, kind in draw(st.lists(st.tuples(st.sampled_from(TEXTS), kinds), max_size=8)):
        one = typed_event("response.output_text.delta", sequence_number=1, delta=text)
        if kind == "untyped":
            one = event({"type": "response.output_text.delta", "delta": text})
        elif kind in ("error", "usage", "model"):
            value = {"error": None, "usage": USAGE, "model": "up"}[kind]
            one = typed_event("response.in_progress", response={"id": text, kind: value})
        elif kind == "named":
            one = one.replace(b"event: response", b"id: 4\nevent: response")
        elif kind == "lines":
            one = one.replace(b',"delta"', b'\ndata: ,"delta"')
        elif kind == "no type":
            one = one.replace(b"event:", b"event")
        sent += [draw(st.sampled_from([b"", b"", b"", *NO_DATA])), one]
    ends = [
        typed_event("response.completed", response={**response, "usage": {"input_tokens": 4, "output_tokens": 6}}),
        typed_event("response.failed", response={"error": {"message": "boom"}}),
        typed_event("error", message="boom"),
        event({"type": "error", "message": "boom"}),
        b"event: error\n" + event({"message": "boom"}),
        DONE,
        b"event: done\n" + DONE,
        b"",
    ]
    return b"".join([*sent, draw(st.sampled_from(ends)), draw(st.sampled_from([b"", typed_event("late")]))])


def cut(sent: bytes, cuts: Sequence[int]) -> list[list[bytes]]:
    """Return the whole events of a stream that came in reads which end at these places."""
    splitter = EventSplitter()
    edges = [0, *sorted(place % (len(sent) + 1) for place in cuts), len(sent)]
    return [[splitter.push(sent[start:stop])] for start, stop in pairwise(edges)]


CUTS = st.lists(st.integers(min_value=0), max_size=12)
LINE_ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])


class TestReads:
    @given(
        response_streams() | streams().map(lambda made: made.sent), CUTS, LINE_ENDS, st.sampled_from([CHAT, RESPONSES])
    )
    def test_unsplit_events_pass_as_events_read_one_by_one(
        self, sent: bytes, cuts: list[int], line_end: bytes, dialect: str
    ) -> None:
        """The same bytes and usage in each read, and the same end."""
        reads = cut(sent.replace(b"\n", line_end), cuts)
        chunks, error = passed(reads, dialect)
        expected, expected_error = passed(reads, dialect, names=EventByEvent("mine"))
        assert chunks == expected
        assert repr(error) == repr(expected_error)

    @given(streams(), CUTS, LINE_ENDS)
    def test_any_reads_of_a_stream_pass_the_same(self, made: Made, cuts: list[int], line_end: bytes) -> None:
        """Whatever arrives together, and whether or not it is passed on without being split."""
        sent, expected = (part.replace(b"\n", line_end) for part in (made.sent, made.expected))
        chunks, error = passed(cut(sent, cuts))
        got = passed_on(chunks)
        assert type(error) is (made.error or type(None))
        # The LF of a CRLF may belong to the next event, which may have no data.
        assert list(map(payload, split_events(got))) == list(map(payload, split_events(expected)))
        assert line_end != b"\n" or got == expected
        usages = [chunk.usage for chunk in chunks if chunk.usage]
        assert usages == ([made.usage] if made.usage and made.error is not UpstreamRefused else [])

    def test_events_that_need_no_change_are_passed_on_unread(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(PassThroughStream, "_read", lambda *_: pytest.fail("read"))
        stream = PassThroughStream(CHAT, ModelNameRewriter("up/model"))
        for events in (delta(), delta("b") + delta("error") + delta('"model":"up/model"')):
            assert stream.push(events) == Chunk(raw=(CHAT, events))

    @pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
    @pytest.mark.parametrize(
        ("dialect", "events"),
        [
            (CHAT, [delta(), delta("b"), delta('"model":"up/model"')]),
            (CHAT, [choices_first("a"), choices_first("error"), choices_first('","model":"up"}')]),
            (CHAT, [choices_first("a", object="x"), choices_first("", object="x"), choices_first("}", object="x")]),
            (CHAT, [event({"choices": []}), event({"choices": [{"delta": {"content": "b"}}]})]),
            (RESPONSES, [typed_event("response.output_text.delta", delta=text) for text in ("a", '"model"', "b")]),
        ],
    )
    def test_events_of_these_servers_are_not_split(
        self, monkeypatch: pytest.MonkeyPatch, dialect: str, events: list[bytes], line_end: bytes
    ) -> None:
        monkeypatch.setattr(stream_passthrough, "split_data_events", lambda *_: pytest.fail("split"))
        stream = PassThroughStream(dialect, ModelNameRewriter("mine"))
        sent = [each.replace(b"\n", line_end) for each in events]
        for together in (*sent, b"".join(sent)):
            expected = together.replace(b'"model":"up', b'"model":"mine').replace(b"mine/model", b"mine")
            assert stream.push(together) == Chunk(raw=(dialect, expected))

    def test_an_event_of_two_lines_is_not_split(self) -> None:
        """Its second line has a mark, and all that comes before that has the line ends of whole events."""
        sent = delta()[:-1] + b": x\n" + event({"error": {"message": "boom"}})
        chunks, error = passed([[delta(), sent]])
        assert passed_on(chunks) == (delta() + sent).replace(b"up/model", b"mine")
        assert isinstance(error, TransportFailed)

    def test_an_end_between_other_line_ends_is_seen(self) -> None:
        chunks, error = passed([[delta()[:-2] + b"\r\rdata: [DONE]\r\r" + delta("b")]])
        assert passed_on(chunks) == delta(model="mine")[:-2] + b"\r\rdata: [DONE]\r\r"
        assert error is None

    def test_a_line_that_is_no_data_is_no_event(self) -> None:
        named = b'id: {"model":"up"}\ndata: x\n\n'
        chunks, _ = passed([[named], [b'id: {"model":"up"}\n\n']])
        assert passed_on(chunks) == named.replace(b"up", b"mine")
