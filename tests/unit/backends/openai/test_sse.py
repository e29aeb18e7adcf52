"""Server-sent events from bytes: no event is lost or split, whatever the chunks and line ends."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.backends.openai.sse import EventSplitter, has_data, is_done, payload, split_events
from shoal.errors import UpstreamFailed

ENDS = [b"\n", b"\r", b"\r\n"]
TEXTS = ["hello", "Grüße", "鯡魚 🐟", '{"a":"b"}', "", "[DONE]", "a: b", " x"]


def split(stream: bytes, cuts: list[int]) -> tuple[list[bytes], bytes]:
    """Return the events of a stream that arrives in chunks, and the rest."""
    splitter = EventSplitter()
    events: list[bytes] = []
    places = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    for start, stop in itertools.pairwise(places):
        events += split_events(splitter.push(stream[start:stop]))
    return events, splitter.rest


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, list[str]]:
    """A stream with one kind of line end, and the data of its events."""
    end = draw(st.sampled_from(ENDS))
    texts = draw(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=6))
    out = b""
    for text in texts:
        if draw(st.booleans()):
            out += b": ping" + end + end
        if draw(st.booleans()):
            out += b"event: delta" + end
        out += b"data: " + text.encode() + end + end
    return out, texts


class TestSplitting:
    @given(streams(), st.lists(st.integers(min_value=0), max_size=12))
    def test_any_pieces_give_the_same_events(self, made: tuple[bytes, list[str]], cuts: list[int]) -> None:
        """Chunks may split a character, a CRLF, or the end of an event."""
        stream, texts = made
        events, rest = split(stream, cuts)
        assert b"".join(events) + rest == stream
        payloads = [payload(event).decode() for event in events if has_data(event)]
        assert payloads == texts
        assert not has_data(rest)

    @pytest.mark.parametrize("end", ENDS)
    def test_every_single_cut(self, end: bytes) -> None:
        stream = (
            "data: Grüße 鯡".encode()
            + end
            + b": c"
            + end
            + end
            + b"data: two"
            + end
            + end
            + b"data: [DONE]"
            + end
            + end
        )
        for cut in range(len(stream) + 1):
            events, rest = split(stream, [cut])
            assert b"".join(events) + rest == stream
            assert [payload(event).decode() for event in events if has_data(event)] == ["Grüße 鯡", "two", "[DONE]"]

    @given(st.lists(st.sampled_from([b"data: a", b"\n", b"\r", b"\r\n", b"x", b":"]), max_size=30), st.data())
    def test_nothing_is_lost_of_any_bytes(self, parts: list[bytes], data: st.DataObject) -> None:
        stream = b"".join(parts)
        cuts = data.draw(st.lists(st.integers(0, max(1, len(stream))), max_size=8))
        events, rest = split(stream, cuts)
        assert b"".join(events) + rest == stream

    def test_byte_by_byte(self) -> None:
        stream = "data: 🐟\r\n\r\ndata: b\r\n\r\n".encode()
        events, rest = split(stream, list(range(len(stream))))
        assert [payload(event).decode() for event in events if has_data(event)] == ["🐟", "b"]
        assert rest.strip() == b""

    def test_an_event_is_emitted_at_once(self) -> None:
        """An event is emitted before the LF of its last CRLF arrives; that LF then starts the next one."""
        splitter = EventSplitter()
        assert split_events(splitter.push(b"data: a\r\n\r")) == [b"data: a\r\n\r"]
        assert split_events(splitter.push(b"\ndata: b\r\n\r\n")) == [b"\ndata: b\r\n\r\n"]
        assert payload(b"\ndata: b\r\n\r\n") == b"b"

    @given(st.lists(st.integers(min_value=0), max_size=4))
    def test_a_byte_order_mark_is_no_part_of_the_first_event(self, cuts: list[int]) -> None:
        stream = b"data: a\n\ndata: \xef\xbb\xbf\n\n"
        events, rest = split(b"\xef\xbb\xbf" + stream, cuts)
        assert (b"".join(events), rest) == (stream, b"")
        assert has_data(events[0])
        assert payload(events[1]) == b"\xef\xbb\xbf"

    def test_half_a_mark_is_none(self) -> None:
        assert split(b"\xef\xbbdata: a\n\n", [1, 2]) == ([b"\xef\xbbdata: a\n\n"], b"")

    def test_a_crlf_is_one_line_end(self) -> None:
        splitter = EventSplitter()
        assert splitter.push(b"event: x\r\ndata: a\r\n") == b""
        assert splitter.rest == b"event: x\r\ndata: a\r\n"

    def test_an_endless_event_is_refused(self) -> None:
        splitter = EventSplitter(max_bytes=100)
        splitter.push(b"data: " + b"x" * 90)
        with pytest.raises(UpstreamFailed, match="more than 100 bytes"):
            splitter.push(b"x" * 10)

    def test_many_events_at_once_are_not_one(self) -> None:
        splitter = EventSplitter(max_bytes=100)
        assert len(split_events(splitter.push(b"data: abc\n\n" * 50))) == 50
        assert splitter.rest == b""


class TestEvents:
    @pytest.mark.parametrize("event", [b": ping\n\n", b":\r\n\r\n", b"\n\n", b"event: ping\n\n", b"id: data:\n\n"])
    def test_events_without_data(self, event: bytes) -> None:
        assert not has_data(event)

    @pytest.mark.parametrize(
        "event", [b"data: x\n\n", b"data\n\n", b": c\ndata:x\n\n", b"id: 1\rdata: x\r\r", b"\ndata: x\n\n"]
    )
    def test_events_with_data(self, event: bytes) -> None:
        assert has_data(event)

    @pytest.mark.parametrize(
        "event", [b"data: [DONE]\n\n", b"data:[DONE]\r\n\r\n", b"event: e\ndata: [DONE]\n\n", b"\ndata: [DONE]\r\r"]
    )
    def test_done(self, event: bytes) -> None:
        assert is_done(event)

    @pytest.mark.parametrize("event", [b'data: {"a":"data: [DONE]"}\n\n', b"data: [DONE] x\n\n", b": data: [DONE]\n\n"])
    def test_not_done(self, event: bytes) -> None:
        assert not is_done(event)

    @pytest.mark.parametrize(
        ("event", "expected"),
        [
            (b"data: {}\n\n", b"{}"),
            (b"data:{}\n\n", b"{}"),
            (b"data:  x\n\n", b" x"),
            (b"data: a\ndata: b\n\n", b"a\nb"),
            (b"event: e\r\ndata: a\r\nid: 3\r\n\r\n", b"a"),
            (b": c\rdata: a\r\r", b"a"),
            (b"data\n\n", b""),
            (b"datax: a\n\n", b""),
        ],
    )
    def test_payload(self, event: bytes, expected: bytes) -> None:
        assert payload(event) == expected
