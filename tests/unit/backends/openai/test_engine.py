"""Embeddings of a server as an engine: row order, limits, failures, and how it returns to service."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

from shoal.backends.base.http_client import Client
from shoal.backends.openai import engine as engine_module
from shoal.backends.openai.engine import MAX_BATCH_SIZE, UpstreamEngine, parse_batch_limit
from shoal.errors import (
    ConfigError,
    DeadlineExceeded,
    InputRejected,
    InternalError,
    OutOfMemory,
    Overloaded,
    ShoalError,
    TransportFailed,
    UpstreamFailed,
)
from shoal.types import Array
from tests.fakes.openai_server import DIMENSION, Exchange, FakeUpstream, answer, vector_of

WORDS = ["one", "two words", "drei Wörter"]


class FakeAdmission:
    """The check before a server may serve again; it raises `error`."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.calls = 0

    async def __call__(self, engine: UpstreamEngine) -> None:
        self.calls += 1
        assert not engine.ready()
        if self.error is not None:
            raise self.error


@pytest.fixture(autouse=True)
def fast_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the watch poll all the time."""
    monkeypatch.setattr(engine_module, "LOOK_S", 0.001)
    monkeypatch.setattr(engine_module, "LOOK_AGAIN_S", 0.001)


@pytest.fixture
async def server() -> AsyncIterator[FakeUpstream]:
    async with FakeUpstream() as made:
        yield made


@pytest.fixture
def admission() -> FakeAdmission:
    return FakeAdmission()


@pytest.fixture
async def engine(server: FakeUpstream, admission: FakeAdmission) -> AsyncIterator[UpstreamEngine]:
    client = Client(server.base, connect_timeout_s=30.0)
    made = UpstreamEngine(client, "up/model", "emb-0", admit=admission, serving=True)
    yield made
    await made.aclose()
    await client.aclose()


def batch(*texts: str) -> dict[str, Array]:
    array = np.empty(len(texts), dtype=object)
    array[:] = texts
    return {"text": array}


async def ask(engine: UpstreamEngine, *texts: str, seconds: float = 10.0) -> Array:
    outputs = await engine.infer(batch(*texts), ["embedding"], {}, time.monotonic() + seconds)
    assert list(outputs) == ["embedding"]
    return outputs["embedding"]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - the watch tells nobody
            await asyncio.sleep(0.001)


def rows(*vectors: Any, **more: Any) -> dict[str, Any]:
    return {"data": [{"index": at, "embedding": vector} for at, vector in enumerate(vectors)], **more}


class TestBatches:
    async def test_rows_are_in_order_and_float32(self, server: FakeUpstream, engine: UpstreamEngine) -> None:
        found = await ask(engine, *WORDS)
        assert found.dtype == np.float32
        assert np.array_equal(found, np.stack([vector_of(word) for word in WORDS]))
        assert server.requests[0].json == {"model": "up/model", "input": WORDS, "encoding_format": "base64"}

    async def test_lists_of_floats_will_do(self, server: FakeUpstream, engine: UpstreamEngine) -> None:
        server.on("/embeddings", answer(rows([0.5, -1.25], [3, 1e-3])))
        assert np.array_equal(await ask(engine, "a", "b"), np.array([[0.5, -1.25], [3, 1e-3]], dtype=np.float32))

    async def test_a_server_without_base64(self, server: FakeUpstream, engine: UpstreamEngine) -> None:
        """The engine falls back to floats, for this call and all later ones."""

        async def picky(exchange: Exchange) -> None:
            body = exchange.request.json
            if body["encoding_format"] != "float":
                await answer({"error": {"message": "encoding_format: unsupported value"}}, 400)(exchange)
            else:
                await answer(server.embeddings_reply(body))(exchange)

        server.on("/embeddings", picky)
        for _ in range(2):
            assert np.array_equal((await ask(engine, "a"))[0], vector_of("a"))
        assert len(server.requests) == 3

    async def test_rows_go_by_their_index(self, server: FakeUpstream, engine: UpstreamEngine) -> None:
        reply = rows([1.0], [2.0], [3.0])
        reply["data"].reverse()
        server.on("/embeddings", answer(reply))
        assert (await ask(engine, "a", "b", "c")).ravel().tolist() == [1.0, 2.0, 3.0]

    async def test_tokens_are_divided_by_size(self, server: FakeUpstream, engine: UpstreamEngine) -> None:
        server.on("/embeddings", answer(rows([1.0], [2.0], usage={"prompt_tokens": 9, "total_tokens": 9})))
        outputs = await engine.infer(batch("a" * 10, "b" * 20), ["token_count"], {}, time.monotonic() + 10)
        assert outputs["token_count"].tolist() == [[3], [6]]
        assert engine.reports_tokens

    @pytest.mark.parametrize(("count", "tokens"), [(10**30, 2**53), (10**400, 2**53), (-9, 2)])
    async def test_invalid_token_counts(
        self, server: FakeUpstream, engine: UpstreamEngine, count: int, tokens: int
    ) -> None:
        """Invalid token counts do not fail the request and are never negative; a missing count is estimated."""
        server.on("/embeddings", answer(rows([1.0], usage={"prompt_tokens": count})))
        outputs = await engine.infer(batch("a" * 10), ["token_count"], {}, time.monotonic() + 10)
        assert outputs["token_count"].tolist() == [[tokens]]

    async def test_tokens_that_nobody_counts_are_guessed(self, server: FakeUpstream, engine: UpstreamEngine) -> None:
        server.usage = False
        outputs = await engine.infer(batch("a" * 10, ""), ["token_count"], {}, time.monotonic() + 10)
        assert outputs["token_count"].tolist() == [[2], [1]]
        assert not engine.reports_tokens

    async def test_facts(self, server: FakeUpstream, engine: UpstreamEngine) -> None:
        facts = engine.facts
        assert (facts.name, facts.slots, facts.max_batch_size, facts.pads_batches) == (
            "emb-0",
            2,
            MAX_BATCH_SIZE,
            False,
        )
        with pytest.raises(InternalError, match="no output 'x'"):
            await engine.infer(batch("a"), ["x"], {}, time.monotonic() + 10)

    async def test_a_server_that_takes_fewer_at_once(self, server: FakeUpstream, engine: UpstreamEngine) -> None:
        """The refusal states the batch limit: the batch is split, and the planner makes smaller ones."""

        async def small(exchange: Exchange) -> None:
            body = exchange.request.json
            if len(body["input"]) > 2:
                message = f"batch size {len(body['input'])} > maximum allowed batch size 2"
                await answer({"message": message, "code": 422}, 422)(exchange)
            else:
                await answer(server.embeddings_reply(body))(exchange)

        server.on("/embeddings", small)
        assert np.array_equal(await ask(engine, *"abcde"), np.stack([vector_of(text) for text in "abcde"]))
        assert [len(request.json["input"]) for request in server.requests] == [5, 2, 2, 1]
        assert engine.facts.max_batch_size == 2

    async def test_ids_and_texts_are_separate_calls(self, server: FakeUpstream, engine: UpstreamEngine) -> None:
        """OpenAI accepts lists of one kind; rows and tokens return to their inputs."""
        inputs = batch(*("a" * 8, "ids", "b" * 8))
        inputs["text"][1] = [1, 2, 3]
        outputs = await engine.infer(inputs, ["embedding", "token_count"], {}, time.monotonic() + 10)
        expected = np.stack([vector_of(each) for each in inputs["text"]])
        assert np.array_equal(outputs["embedding"], expected)
        assert outputs["token_count"].tolist() == [[3], [5], [3]]
        assert [request.json["input"] for request in server.requests] == [["a" * 8, "b" * 8], [[1, 2, 3]]]

    async def test_options_are_sent_as_they_are(self, server: FakeUpstream, engine: UpstreamEngine) -> None:
        params = {"dimensions": 4, "input_type": "query"}
        outputs = await engine.infer(batch("a"), ["embedding"], params, time.monotonic() + 10)
        assert outputs["embedding"].shape == (1, 4)
        assert server.requests[0].json.items() >= params.items()

    async def test_a_total_alone_will_do(self, server: FakeUpstream, engine: UpstreamEngine) -> None:
        server.on("/embeddings", answer(rows([1.0], usage={"total_tokens": 9})))
        outputs = await engine.infer(batch("a"), ["token_count"], {}, time.monotonic() + 10)
        assert outputs["token_count"].tolist() == [[9]]

    async def test_a_call_with_too_many_tokens_is_halved(self, server: FakeUpstream, engine: UpstreamEngine) -> None:
        """The batch is halved by the lane, as one that exceeds memory."""
        assert engine.facts.max_batch_tokens == 300_000
        message = "Requested 400000 tokens, max 300000 tokens per request"
        server.on("/embeddings", answer({"error": {"message": message}}, 400))
        with pytest.raises(OutOfMemory, match="300000 tokens per request"):
            await ask(engine, "a", "b")

    async def test_many_rows_let_others_run(self, server: FakeUpstream, engine: UpstreamEngine) -> None:
        texts = [str(number) for number in range(200)]
        assert np.array_equal(await ask(engine, *texts), np.stack([vector_of(text) for text in texts]))


def encoded(*values: float) -> str:
    return base64.b64encode(np.array(values, dtype="<f4").tobytes()).decode()


class TestAnswersThatAreNone:
    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"<html>",
            {},
            {"data": []},
            rows([1.0]),
            rows([1.0], [1.0], [1.0]),
            rows([1.0], [1.0, 2.0]),
            rows([], []),
            rows("!!", "!!"),
            rows("AAA=", "AAA="),
            rows([1.0], None),
            rows(["x"], ["y"]),
            {"data": [{"index": 0, "embedding": [1.0]}, {"index": 0, "embedding": [1.0]}]},
            {"data": [{"index": -1, "embedding": [1.0]}, {"index": 0, "embedding": [1.0]}]},
            b'{"data":' + b"[" * 5000 + b"]" * 5000 + b"}",
            b'{"data":[{"embedding":' + b"[" * 5000 + b"]" * 5000 + b"}]}",
        ],
    )
    async def test_are_the_servers_fault(self, server: FakeUpstream, engine: UpstreamEngine, body: Any) -> None:
        server.on("/embeddings", answer(body))
        with pytest.raises(UpstreamFailed) as caught:
            await ask(engine, "a", "b")
        assert type(caught.value) is UpstreamFailed
        assert engine.ready()

    async def test_not_finite_numbers_are_for_the_pipeline(self, server: FakeUpstream, engine: UpstreamEngine) -> None:
        server.on("/embeddings", answer(rows(encoded(float("nan"), 1.0))))
        assert np.isnan((await ask(engine, "a"))[0, 0])
        server.on("/embeddings", answer(rows([1e300, 1.0], [2.0, 1.0])))
        assert np.isinf(await ask(engine, "a", "b")).tolist() == [[True, False], [False, False]]


class TestWidth:
    async def test_rows_of_another_width_take_it_out(
        self, server: FakeUpstream, engine: UpstreamEngine, admission: FakeAdmission
    ) -> None:
        """A row of another width ejects the server, also for a single text; after admission it serves again."""
        engine.dimension = DIMENSION
        assert (await ask(engine, "a")).shape == (1, DIMENSION)
        server.on("/embeddings", answer(rows([1.0, 2.0])))
        with pytest.raises(
            UpstreamFailed, match=f"vectors of 2 numbers instead of {DIMENSION}: it is a different model"
        ):
            await ask(engine, "a")
        assert not engine.ready()
        assert f"instead of {DIMENSION}" in engine.reason
        engine.start()
        await until(engine.ready)
        assert admission.calls == 1

    @pytest.mark.parametrize("width", [DIMENSION - 1, DIMENSION + 1, 3])
    async def test_of_cut_vectors(self, server: FakeUpstream, engine: UpstreamEngine, width: int) -> None:
        """Longer vectors of another model are not truncated to the requested dimensions."""
        engine.dimension = DIMENSION
        server.on("/embeddings", answer(rows([1.0] * width)))
        with pytest.raises(UpstreamFailed, match=f"vectors of {width} numbers instead of 4"):
            await engine.infer(batch("a"), ["embedding"], {"dimensions": 4}, time.monotonic() + 10)
        assert not engine.ready()

    @pytest.mark.parametrize("normalize", [None, False, True])
    async def test_a_server_that_does_not_cut(
        self, server: FakeUpstream, engine: UpstreamEngine, normalize: bool | None
    ) -> None:
        """The model is the same, so its vectors are truncated here, and normalized if the request says so."""
        engine.dimension = DIMENSION
        server.on("/embeddings", answer(rows(vector_of("a").tolist())))
        params = {"dimensions": 4} | ({} if normalize is None else {"normalize": normalize})
        outputs = await engine.infer(batch("a"), ["embedding"], params, time.monotonic() + 10)
        expected = vector_of("a")[:4]
        expected = expected / np.linalg.norm(expected) if normalize else expected
        assert np.allclose(outputs["embedding"], [expected], atol=1e-6)
        assert engine.ready()


class TestFailures:
    @pytest.mark.parametrize(
        ("status", "kind", "ready"),
        [
            (400, InputRejected, True),
            (413, OutOfMemory, True),
            (429, Overloaded, True),
            (500, UpstreamFailed, True),
            (502, TransportFailed, False),
        ],
    )
    async def test_statuses(
        self, server: FakeUpstream, engine: UpstreamEngine, status: int, kind: type[ShoalError], ready: bool
    ) -> None:
        server.on("/embeddings", answer({"error": {"message": "no"}}, status))
        with pytest.raises(kind):
            await ask(engine, "a")
        assert engine.ready() is ready

    async def test_a_refusal_that_quotes_the_key(self, server: FakeUpstream, admission: FakeAdmission) -> None:
        client = Client(server.base, key="sk-SECRET")
        engine = UpstreamEngine(client, "up/model", "emb-0", admit=admission, serving=True)
        server.on("/embeddings", answer({"error": {"message": "auth Bearer sk-SECRET"}}, 400))
        with pytest.raises(InputRejected) as caught:
            await ask(engine, "a")
        assert "SECRET" not in caught.value.message
        await engine.aclose()
        await client.aclose()

    async def test_the_deadline(self, server: FakeUpstream, engine: UpstreamEngine) -> None:
        server.on("/embeddings", Exchange.left)
        with pytest.raises(DeadlineExceeded):
            await ask(engine, "a", seconds=0.02)
        assert engine.ready()

    async def test_a_cancelled_batch_leaves_the_server(self, server: FakeUpstream, engine: UpstreamEngine) -> None:
        server.on("/embeddings", Exchange.left)
        task = asyncio.create_task(ask(engine, "a"))
        request = await server.request(path="/embeddings")
        task.cancel()
        async with asyncio.timeout(30):
            await request.disconnected.wait()
        await asyncio.gather(task, return_exceptions=True)

    async def test_closing_waits_for_batches(self, server: FakeUpstream, engine: UpstreamEngine) -> None:
        go = asyncio.Event()

        async def waits(exchange: Exchange) -> None:
            await go.wait()
            await answer(server.embeddings_reply(exchange.request.json))(exchange)

        server.on("/embeddings", waits)
        task = asyncio.create_task(ask(engine, "a"))
        await server.request(path="/embeddings")
        closing = asyncio.create_task(engine.aclose())
        await asyncio.sleep(0)
        assert not closing.done()
        go.set()
        assert (await task).shape == (1, DIMENSION)
        await closing
        await engine.aclose()
        with pytest.raises(TransportFailed, match="is closed"):
            await ask(engine, "a")


class TestService:
    async def test_a_server_that_goes_and_comes_back(
        self, server: FakeUpstream, engine: UpstreamEngine, admission: FakeAdmission
    ) -> None:
        engine.start()
        await server.stop()
        await until(lambda: "not reachable" in engine.reason)  # first, perhaps, that the connection was closed
        assert not engine.ready()
        admission.error = ConfigError("it is a different model")
        await server.start()
        await until(lambda: admission.calls > 2)
        assert not engine.ready()
        assert engine.reason == "it is a different model"
        admission.error = None
        await until(engine.ready)
        assert engine.reason == ""

    async def test_a_lost_batch_takes_it_out_at_once(
        self, server: FakeUpstream, engine: UpstreamEngine, admission: FakeAdmission, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A lost batch wakes the watch, which may sleep for long."""
        monkeypatch.setattr(engine_module, "LOOK_S", 60.0)
        engine.start()
        server.on("/embeddings", Exchange.cut)
        with pytest.raises(TransportFailed):
            await ask(engine, "a")
        assert not engine.ready()
        await until(engine.ready)
        assert admission.calls == 1

    async def test_a_bug_does_not_end_the_watch(
        self, engine: UpstreamEngine, server: FakeUpstream, admission: FakeAdmission, caplog: pytest.LogCaptureFixture
    ) -> None:
        admission.error = ValueError("bug")
        server.on("/embeddings", Exchange.cut)
        with pytest.raises(TransportFailed):
            await ask(engine, "a")
        engine.start()
        await until(lambda: admission.calls > 1)
        assert "unexpectedly" in caplog.text
        admission.error = None
        await until(engine.ready)


class TestNumbers:
    @pytest.mark.parametrize(
        ("words", "limit"),
        [
            ("batch size 64 > maximum allowed batch size 32", 32),
            ("Batch size 300 exceeds limit of 128", 128),
            ("the input array may have at most 2048 elements", 2048),
            ("total number of texts must be at most 96 - received 100", 96),
            ("The batch size limit is 128. Your batch has 200 inputs.", 128),
            ("List should have at most 32 items after validation, not 64", 32),
            ("'input' has more than 2048 entries; split the request.", 2048),
            ("a text may have at most 512 tokens", None),
            ("the input must have at most 8192 tokens, and has 9000", None),
            ("batch size too large", None),
            ("batch size 3 > maximum allowed batch size 0", None),
            ("", None),
        ],
    )
    def test_the_limit_in_a_refusal(self, words: str, limit: int | None) -> None:
        assert parse_batch_limit(words) == limit
