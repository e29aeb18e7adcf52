"""Chat and generation in the Python API, over scripted models and a scripted upstream server."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as pillow

import shoal
from shoal import Answer, AnswerPiece, Shoal, ShoalError
from shoal.errors import InvalidValue, ModelNotFound, Unavailable, Unsupported, UpstreamRefused, WrongType
from shoal.types import ToolCall, Usage
from tests.fakes.openai_server import DONE, FakeUpstream, Request, answer, event, stream
from tests.unit.drawn import file_of

SLOW = "fake:token_ms=600000"
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call> {"name": "add", "arguments": {"a": 1, "b": [2]}} </tool_call>'
CALLED = ToolCall(id="", name="add", arguments='{"a": 1, "b": [2]}')


def inflight(s: Shoal, name: str = "fake") -> int:
    return s._background.gateway.registry.find(name).inflight


def wait_until(true: Callable[[], bool]) -> None:
    """Another thread makes it true."""
    while not true():
        time.sleep(0.005)


class TestChat:
    def test_a_text_is_one_message_of_the_user(self) -> None:
        with shoal.open("fake:") as s:
            found = s.chat("one two")
            assert found == s.chat([{"role": "user", "content": "one two"}])
            assert found == Answer("one two", "stop", Usage(prompt_tokens=2, completion_tokens=2))
            assert found.message == {"role": "assistant", "content": "one two"}

    def test_options_reach_the_model(self) -> None:
        with shoal.open("fake:") as s:
            assert s.chat("one two three", max_tokens=2).finish_reason == "length"
            assert s.chat("one two three", stop="three").text == "one two "
            seed: Any = np.int64(3)
            assert s.chat("one two three", stop=("two",), temperature=None, seed=seed).text == "one "
            scored = s.chat("one two", logprobs=True, top_logprobs=2).logprobs
            assert [(each.token, len(each.top)) for each in scored] == [("one", 2), (" two", 2)]

    def test_tool_calls_and_their_answers(self) -> None:
        """Whole, also in a stream, and the answer's message begins the next turn."""
        with shoal.open("fake:", tool_call_parser="hermes") as s:
            found = s.chat(CALL, tools=[ADD])
            assert (found.text, found.finish_reason) == ("", "tool_calls")
            (call,) = found.tool_calls
            assert (call.name, call.arguments) == (CALLED.name, CALLED.arguments)
            pieces = list(s.chat(CALL, tools=[ADD], stream=True))
            assert [(each.name, each.arguments) for piece in pieces for each in piece.tool_calls] == [
                (CALLED.name, CALLED.arguments)
            ]
            assert [piece.finish_reason for piece in pieces if piece.tool_calls] == ["tool_calls"]
            turn = [
                {"role": "user", "content": CALL},
                found.message,
                {"role": "tool", "tool_call_id": call.id, "content": "three"},
            ]
            assert s.chat(turn, tools=[ADD]).text.endswith("three")

    @pytest.mark.parametrize(
        ("messages", "options", "error", "words"),
        [
            (3, {}, WrongType, "messages must be a text or a list of messages, not int"),
            (["a"], {}, WrongType, r"messages\[0\] must be a dict with role and content, not str"),
            ([], {}, WrongType, "'messages' is invalid"),
            ([{"role": "user"}], {}, WrongType, r"'messages\[0\]\.content' is missing"),
            ([{"role": "friend", "content": "a"}], {}, WrongType, r"'messages\[0\]\.role' is invalid"),
            (
                [{"role": "user", "content": [3]}],
                {},
                WrongType,
                r"messages\[0\]\.content\[0\] must be a text, an image",
            ),
            ([{"role": "user", "content": "a", "images": []}], {}, WrongType, r"messages\[0\] has images: put them"),
            ("\ud800", {}, InvalidValue, "messages contains half of a surrogate pair"),
            ([{"role": "user", "content": "\ud800"}], {}, InvalidValue, "half of a surrogate pair"),
            ("a", {"temperature": 9}, WrongType, "'temperature' is invalid"),
            ("a", {"max_tokens": 0}, InvalidValue, "'max_tokens' is 0"),
            ("a", {"tools": [{"type": "web"}]}, Unsupported, r"'tools\[0\]' is of type 'web'"),
            ("a", {"tools": [object()]}, WrongType, "contains a object: pass what JSON can hold"),
            ("a", {"response_format": {"type": "object"}}, Unsupported, "does not support 'response_format'"),
            ("a", {"min_p": 0.5}, Unsupported, "does not support 'min_p'"),
            ("a", {"model": "other"}, ModelNotFound, "other"),
        ],
    )
    def test_wrong_arguments(self, messages: Any, options: Any, error: type[ShoalError], words: str) -> None:
        with shoal.open("fake:") as s:
            with pytest.raises(error, match=words):
                s.chat(messages, **options)
            assert inflight(s) == 0

    def test_an_unknown_option_is_a_type_error(self) -> None:
        with shoal.open("fake:") as s:
            with pytest.raises(TypeError, match=r"chat\(\) has no option 'top'; its options are: max_tokens, "):
                s.chat("a", top=3)  # type: ignore[call-overload]
            with pytest.raises(TypeError, match=r"generate\(\) has no option 'tools'"):
                s.generate("a", tools=[])  # type: ignore[call-overload]

    def test_calls_beyond_the_queue_limit_wait(self) -> None:
        """A server would refuse them."""
        with shoal.open("fake:", max_streams=2, max_queued_streams=2) as s, ThreadPoolExecutor(16) as pool:
            assert [found.text for found in pool.map(s.chat, map(str, range(40)))] == [*map(str, range(40))]


class TestGenerate:
    def test_a_text_is_continued(self) -> None:
        """By all that the model has to say: there is no limit of 16 tokens as in OpenAI's completions."""
        text = " ".join(f"w{number}" for number in range(30))
        with shoal.open("fake:") as s:
            assert s.generate(text).text == text
            assert s.generate(text, max_tokens=2).text == "w0 w1"
            assert "".join(piece.text for piece in s.generate(text, stream=True)) == text
            with pytest.raises(WrongType, match="prompt must be a text or a list of token ids: send images with chat"):
                s.generate(file_of("red"))  # type: ignore[call-overload]
            with pytest.raises(WrongType, match="prompt must be a text, a list of token ids"):
                s.generate(None)  # type: ignore[call-overload]


class TestStreams:
    def test_pieces_arrive_one_by_one(self) -> None:
        with shoal.open("fake:") as s:
            whole = s.chat("one two")
            pieces = s.chat("one two", stream=True)
            assert next(pieces) == AnswerPiece("one")
            assert pieces.answer.text == "one"
            assert [each.text for each in pieces] == [" two", "", ""]
            assert pieces.answer == whole
            assert list(pieces) == []

    def test_the_last_pieces_end_it(self) -> None:
        with shoal.open("fake:") as s:
            *_, end, last = s.chat("one two", stream=True)
            assert (end.finish_reason, end.usage) == ("stop", None)
            assert last == AnswerPiece(usage=Usage(prompt_tokens=2, completion_tokens=2))

    def test_closing_stops_the_model(self) -> None:
        """By `close`, by leaving `with`, and by dropping the stream."""
        with shoal.open("fake:token_ms=20") as s:
            text = "word " * 400
            for end in ("close", "with", "drop"):
                pieces = s.chat(text, stream=True)
                assert next(pieces).text == "word"
                assert inflight(s) == 1
                if end == "close":
                    pieces.close()
                    pieces.close()
                    assert list(pieces) == []
                elif end == "with":
                    with pieces:
                        pass
                del pieces
                wait_until(lambda: inflight(s) == 0)
            s.chat(text, stream=True).close()  # one that never began

    def test_closing_in_another_thread_ends_a_waiting_reader(self) -> None:
        with shoal.open(SLOW) as s, ThreadPoolExecutor(1) as pool:
            pieces = s.chat("a", stream=True)
            reader = pool.submit(list, pieces)
            wait_until(lambda: inflight(s) == 1)
            pieces.close()
            assert reader.result() == []
            assert inflight(s) == 0

    def test_threads_may_share_a_stream(self) -> None:
        """Each gets other pieces, and none is lost."""
        with shoal.open("fake:token_ms=1") as s, ThreadPoolExecutor(4) as pool:
            pieces = s.chat("word " * 40, stream=True)
            parts: list[list[AnswerPiece]] = list(pool.map(list, [pieces] * 4))
            assert sum(each.text.count("word") for part in parts for each in part) == 40

    def test_an_error_ends_it(self) -> None:
        """The model's own error comes with the first piece, that of an argument at once."""
        with shoal.open("fake:") as s:
            with pytest.raises(WrongType):
                s.chat("a", stream=True, temperature=9)
            pieces = s.chat("a", stream=True, min_p=0.5)
            with pytest.raises(Unsupported, match="min_p"):
                next(pieces)
            assert list(pieces) == []


class TestAsync:
    async def test_the_same_answers(self) -> None:
        async with shoal.open("fake:") as s:
            found = await s.achat("one two")
            assert found == await asyncio.to_thread(s.chat, "one two")
            assert (await s.agenerate("one two", max_tokens=1)).text == "one"
            pieces = await s.achat("one two", stream=True)
            assert [piece.text async for piece in pieces] == ["one", " two", "", ""]
            assert pieces.answer == found
            assert [piece.text async for piece in await s.agenerate("a", stream=True)] == ["a", "", ""]

    async def test_closing_stops_the_model(self) -> None:
        async with shoal.open("fake:token_ms=20") as s:
            async with await s.achat("word " * 400, stream=True) as pieces:
                assert (await anext(pieces)).text == "word"
            assert inflight(s) == 0
            assert [piece async for piece in pieces] == []
            await pieces.aclose()

    async def test_cancelling_stops_the_model(self) -> None:
        """That of a whole answer, and that of a stream between two pieces."""

        async def read() -> None:
            async for _ in await s.achat("a", stream=True):
                raise AssertionError

        async with shoal.open(SLOW) as s:
            calls = [asyncio.create_task(s.achat("a")), asyncio.create_task(read())]
            await asyncio.to_thread(wait_until, lambda: inflight(s) == 2)
            for call in calls:
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
            await asyncio.to_thread(wait_until, lambda: inflight(s) == 0)


class TestClosing:
    def test_closing_fails_running_calls(self) -> None:
        """Whole answers and readers of streams, those between two pieces included; none hangs, nothing is logged."""
        s = shoal.open(SLOW, "quick=fake:")
        with ThreadPoolExecutor(2) as pool:
            between, unread = (s.chat("one two", stream=True, model="quick") for _ in range(2))
            assert next(between).text == "one"
            waiting = s.chat("a", stream=True)
            calls: list[Callable[[], Any]] = [
                pool.submit(s.chat, "a").result,
                pool.submit(next, waiting).result,
                partial(next, between),
                partial(next, unread),
            ]
            wait_until(lambda: inflight(s) == 2)
            s.close()
            for call in calls:
                with pytest.raises(Unavailable, match="this Shoal is closed"):
                    call()
            for each in (between, unread, waiting):
                each.close()


def last(server: FakeUpstream) -> Request:
    """Return the last conversation; the first ones are Shoal's, to learn about the model."""
    return [each for each in server.requests if each.path.endswith("/chat/completions")][-1]


class TestUpstream:
    """An OpenAI-compatible server as the backend."""

    CHUNK: Any = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m"}

    async def test_messages_images_and_options_are_sent(self, tmp_path: Path) -> None:
        """In OpenAI's form; an image in any of the forms that `embed` takes."""
        path = tmp_path / "blue.png"
        path.write_bytes(file_of("blue"))
        body = {
            **self.CHUNK,
            "object": "chat.completion",
            "choices": [{"index": 0, "message": {"role": "assistant", "content": "Red."}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11},
        }
        schema = {"type": "object", "properties": {"color": {"type": "string"}}}
        with pillow.open(path) as drawn:
            drawn.load()
        content = ["Which color?", file_of("red"), path, drawn, shoal.Image(file_of("red"))]
        part = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
        async with FakeUpstream("m") as server:
            server.on("/chat/completions", answer(body))
            async with shoal.open(f"m=openai+{server.base}#m") as s:
                found = await s.achat(
                    [{"role": "user", "content": [*content, part]}, {"role": "user", "content": path}],
                    response_format=schema,
                    temperature=0.5,
                    stop=["x"],
                )
                assert found == Answer("Red.", "stop", Usage(prompt_tokens=9, completion_tokens=2))
                sent = last(server).json
        first, second = (message["content"] for message in sent["messages"])
        assert first[0] == {"type": "text", "text": "Which color?"}
        assert first[5] == part
        for at, data in ((1, file_of("red")), (2, path.read_bytes()), (4, file_of("red"))):
            assert first[at]["image_url"]["url"] == f"data:image/png;base64,{base64.b64encode(data).decode()}"
        assert second == [first[2]]
        assert sent["response_format"]["json_schema"]["schema"] == schema
        assert (sent["temperature"], sent["stop"]) == (0.5, ["x"])

    async def test_streams_and_refusals(self) -> None:
        """Its pieces come as typed ones, closing ends its connection, and its refusal is the caller's error."""

        def delta(**fields: Any) -> bytes:
            return event({**self.CHUNK, "choices": [{"index": 0, "delta": fields, "finish_reason": None}]})

        async with FakeUpstream("m") as server:

            async def hang(exchange: Any) -> None:
                await exchange.left()

            server.on("/chat/completions", stream(delta(content="a"), DONE))
            async with shoal.open(f"m=openai+{server.base}#m") as s:
                server.on("/chat/completions", stream(delta(reasoning_content="Hm."), delta(content="Re"), after=hang))
                async with await s.achat("a", stream=True) as pieces:
                    assert await anext(pieces) == AnswerPiece(reasoning="Hm.")
                    assert (await anext(pieces)).text == "Re"
                await last(server).disconnected.wait()
                end = event({**self.CHUNK, "choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
                server.on("/chat/completions", stream(delta(content="Red"), end, DONE))
                pieces = await s.achat("a", stream=True)
                assert "".join([piece.text async for piece in pieces]) == "Red"
                assert pieces.answer.finish_reason == "length"
                server.on("/chat/completions", answer({"error": {"message": "no images here"}}, 400))
                with pytest.raises(UpstreamRefused, match="no images here"):
                    await s.achat("a")

    async def test_images_must_be_readable(self, tmp_path: Path) -> None:
        async with shoal.open("fake:") as s:
            for image, words in ((b"text", "is not an image"), (tmp_path / "none.png", "cannot be read")):
                with pytest.raises(InvalidValue, match=words):
                    await s.achat([{"role": "user", "content": ["a", image]}])
            with pytest.raises(Unsupported, match="image"):
                await s.achat([{"role": "user", "content": [file_of("red")]}])
