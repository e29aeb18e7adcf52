"""The contract of `Engine`, on an engine that takes texts: a text-embeddings-inference server, over HTTP and over gRPC,
in this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from shoal.backends.base.http_client import Client
from shoal.backends.tei.engine import TeiEngine
from shoal.backends.tei.grpc_link import GrpcLink
from shoal.backends.tei.http_link import HttpLink
from shoal.backends.tei.link import Link
from shoal.errors import DeadlineExceeded, EngineFailed, InputRejected, TransportFailed
from shoal.types import Array
from tests.fakes.tei import FakeTei
from tests.fakes.tei_grpc import FakeTeiGrpc
from tests.fakes.tei_model import dense_of, tokens_of
from tests.unit.backends.tei.kit import batch
from tests.unit.backends.triton.open.kit import grpc_in_use

OUTPUTS = ("embedding", "tokens", "token_count")


@dataclass(frozen=True)
class Subject:
    """An engine under test and its server."""

    engine: TeiEngine
    server: FakeTei


@pytest.fixture(params=["http", "grpc"])
async def subject(request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    async def admit(engine: TeiEngine) -> None:
        raise AssertionError("nobody watches it, so it joins once")

    async with grpc_in_use(), FakeTei() if request.param == "http" else FakeTeiGrpc() as server:
        link: Link = HttpLink(Client(server.base)) if request.param == "http" else GrpcLink(server.target)
        info = await link.info(time.monotonic() + 10)
        engine = TeiEngine(link, info, "tei-0", admit=admit, serving=True)
        server.calls.clear()
        yield Subject(engine, server)
        server.gate.set()
        await engine.aclose()
        await link.aclose()


async def infer(
    subject: Subject, texts: Sequence[str], outputs: Sequence[str] = ("embedding",), seconds: float = 10.0
) -> dict[str, Array]:
    return await subject.engine.infer(batch(texts), outputs, {}, time.monotonic() + seconds)


async def is_right(subject: Subject, texts: Sequence[str]) -> None:
    outputs = await infer(subject, texts, OUTPUTS)
    assert np.array_equal(outputs["embedding"], np.stack([dense_of(text) for text in texts]))
    for row, text in zip(outputs["tokens"], texts, strict=True):
        assert np.array_equal(row, tokens_of(text))
    assert outputs["token_count"].shape == (len(texts), 1)


async def test_it_computes_the_model(subject: Subject) -> None:
    """Any mix of lengths, and more texts than the server takes at once."""
    for lengths in ((1,), (5, 3, 9), (2,) * 17, (64,), range(1, 80)):
        await is_right(subject, [" ".join(f"w{at}" for at in range(length)) for length in lengths])


async def test_only_the_requested_outputs_are_returned(subject: Subject) -> None:
    expected: list[list[str]] = [["token_count"], ["embedding"], ["tokens", "embedding"], list(reversed(OUTPUTS))]
    for outputs in expected:
        assert list(await infer(subject, ["a", "b"], outputs)) == outputs


async def test_rows_keep_their_order(subject: Subject) -> None:
    texts = [f"text {at}" for at in range(9)]
    forward = (await infer(subject, texts))["embedding"]
    assert np.array_equal(forward, (await infer(subject, texts[::-1]))["embedding"][::-1])


async def test_answers_belong_to_the_caller(subject: Subject) -> None:
    answer = await infer(subject, ["a", "b"])
    copy = answer["embedding"].copy()
    for at in range(5):
        await infer(subject, [f"text {at}", "b"])
    assert np.array_equal(answer["embedding"], copy)
    answer["embedding"][:] = -1.0
    await is_right(subject, ["a", "b"])


async def test_batches_in_flight_do_not_mix(subject: Subject) -> None:
    """More concurrent batches than slots."""
    count = subject.engine.facts.slots * 4
    await asyncio.gather(*(is_right(subject, [f"text {at} {n}" for n in range(1 + at)]) for at in range(count)))


@pytest.mark.parametrize(
    ("bad", "error"), [("", InputRejected), ("w " * 600, InputRejected), ("poison-item", EngineFailed)]
)
async def test_a_batch_that_fails_fails_alone(subject: Subject, bad: str, error: type[Exception]) -> None:
    neighbour = asyncio.create_task(is_right(subject, ["one", "other"]))
    with pytest.raises(error):
        await subject.engine.infer(batch(["fine", bad]), ["embedding"], {"truncate": False}, time.monotonic() + 10)
    await neighbour
    await is_right(subject, ["a"])


async def test_the_deadline_ends_a_batch(subject: Subject) -> None:
    subject.server.gate.clear()
    for seconds in (0.2, -1.0):
        with pytest.raises(DeadlineExceeded):
            await infer(subject, ["a"], seconds=seconds)
    subject.server.gate.set()
    await is_right(subject, ["a", "b"])


async def test_cancelling_frees_the_slot(subject: Subject) -> None:
    subject.server.gate.clear()
    slots = subject.engine.facts.slots
    running = [asyncio.create_task(infer(subject, [f"text {at}"])) for at in range(slots)]
    await subject.server.call(slots)
    for task in running:
        task.cancel()
    outcomes = await asyncio.gather(*running, return_exceptions=True)
    assert [type(each) for each in outcomes] == [asyncio.CancelledError] * slots
    subject.server.gate.set()
    await asyncio.gather(*(is_right(subject, [f"text {at}"]) for at in range(slots)))


async def test_closing_waits_for_batches_in_flight(subject: Subject) -> None:
    """A batch in flight is answered before the engine closes; closing twice is the same as once; then nothing runs."""
    subject.server.gate.clear()
    running = asyncio.create_task(infer(subject, ["a"]))
    await subject.server.call()
    closing = asyncio.create_task(subject.engine.aclose())
    await asyncio.sleep(0)
    assert not closing.done()
    subject.server.gate.set()
    assert np.array_equal((await running)["embedding"][0], dense_of("a"))
    await closing
    await subject.engine.aclose()
    assert not subject.engine.ready()
    with pytest.raises(TransportFailed):
        await infer(subject, ["a"])


async def test_facts_match_the_server(subject: Subject) -> None:
    facts: Any = subject.engine.facts
    assert (facts.inputs, facts.outputs) == (("text",), OUTPUTS)
    assert (facts.slots, facts.max_batch_size, facts.precision) == (2, 32, "f32")
    assert subject.engine.facts is facts
