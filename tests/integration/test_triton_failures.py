"""Triton's failures and limits: errors, full queues, deadlines, disconnects, huge answers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.backends.triton.client import Client
from shoal.backends.triton.control import Control
from shoal.backends.triton.engine import Endpoint, TritonEngine
from shoal.backends.triton.schema import Embedder
from shoal.errors import DeadlineExceeded, EngineFailed, InputRejected, TransportFailed
from shoal.kserve import protocol_pb2 as pb
from tests.integration.server_kit import Server
from tests.integration.triton_app_kit import add_model, ask, embeddings, logged, serving, status_of, until, vectors
from tests.integration.triton_kit import PATIENCE_S, OwnTriton, Triton
from tests.integration.triton_models import MODELS

pytestmark = pytest.mark.timeout(PATIENCE_S)

SERVED = ("failing", "slow", "near_free", "narrow", "queued", "away")


@pytest.fixture(scope="module")
def server(triton: Triton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server of these tests. `narrow` takes 4 rows; `queued` lets one request wait; `away` is `near_free` again."""
    add_model(triton, "narrow", "near_free", {"max_batch_size: 256": "max_batch_size: 4"})
    queue = "max_batch_size: 32\ndynamic_batching { default_queue_policy { max_queue_size: 1 } }"
    add_model(triton, "queued", "slow", {"max_batch_size: 32": queue})
    add_model(triton, "away", "near_free")
    addresses = [f"triton://{triton.url}#{name}" for name in SERVED]
    with serving(tmp_path_factory.mktemp("server"), addresses) as running:
        yield running


def at_once(count: int, request: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(request, range(count)))


def test_one_poisoned_text_fails_alone(server: Server) -> None:
    """The model fails the whole batch; its forty neighbors are retried without it."""
    replies = at_once(41, lambda number: embeddings(server, "failing", "poison" if number == 20 else f"text {number}"))
    assert [number for number, (status, _, _) in enumerate(replies) if status != 200] == [20]
    status, _, answer = replies[20]
    assert status in (500, 502), answer
    assert "this model was told to fail" in answer["error"]["message"]
    assert all(len(answer["data"][0]["embedding"]) == 8 for status, _, answer in replies if status == 200)


def test_a_refusal_of_the_model_is_the_client_s(server: Server) -> None:
    """INVALID_ARG is a 400 in each dialect, with the model's message; others' requests continue."""
    for path, body in (
        ("/v1/embeddings", {"model": "failing", "input": "reject"}),
        ("/infer", {"model_name": "failing", "text": "reject"}),
        ("/v1/embedding?model=failing", [{"query": "reject"}]),
        ("/embed", {"model": "failing", "inputs": "reject"}),
    ):
        if path.startswith("/v1/embedding?"):
            continue  # it has no way to name one of several models
        status, _, answer = ask(server, "POST", path, body)
        assert 400 <= status < 500, (path, answer)
        assert "the model said INVALID_ARG" in json.dumps(answer), path
    assert vectors(server, "failing", "fine").shape == (1, 8)


def test_a_row_that_is_no_number(server: Server) -> None:
    """A NaN is never returned: its request fails, its neighbors of the same batch do not."""
    replies = at_once(16, lambda number: embeddings(server, "failing", "nan" if number == 5 else "fine"))
    assert [number for number, (status, _, _) in enumerate(replies) if status != 200] == [5]
    assert replies[5][0] in (500, 502)
    assert "finite" in replies[5][2]["error"]["message"].lower() or "nan" in replies[5][2]["error"]["message"].lower()


def test_a_model_that_answers_unavailable(server: Server) -> None:
    """It answers so every time: the request ends within its deadline, and the model is back in service for others."""
    status, _, answer = embeddings(server, "failing", "unavailable", **{"x-request-timeout": 5})
    assert status in (502, 503, 504), answer
    until(lambda: embeddings(server, "failing", "fine")[0] == 200, what="recovery")


def test_the_batch_limit_is_respected(server: Server, triton: Triton) -> None:
    """A request of 64 texts reaches a model that takes 4 in pieces; it never gets more."""
    status, headers, _ = embeddings(server, "narrow", [f"text {number}" for number in range(64)])
    assert status == 200
    assert 1 <= int(headers["x-shoal-batch-size"]) <= 4
    assert int(headers["x-shoal-batches"]) >= 16
    _, stats = triton.http("GET", "/v2/models/narrow/stats")
    assert {each["batch_size"] for each in stats["model_stats"][0]["batch_stats"]} <= {1, 2, 3, 4}


def test_unloaded_behind_our_back(server: Server, triton: Triton) -> None:
    """The model is out of service with the reason, Shoal does not load it, and it is back by itself once somebody
    does."""
    assert vectors(server, "away", "a").shape == (1, 1024)
    triton.unload("away")
    status, _, answer = embeddings(server, "away", "a", **{"x-request-timeout": 3})
    assert status in (502, 503, 504), answer
    until(lambda: not server.ready(), what="the notice")
    time.sleep(3)
    assert triton.state("away") == "UNAVAILABLE", "what somebody unloaded is theirs to load"
    assert vectors(server, "near_free", "a").shape == (1, 1024)
    assert "away-0 is out of service" in logged(server)
    triton.load("away")
    until(lambda: embeddings(server, "away", "a")[0] == 200, what="the return")
    until(server.ready, what="readiness")


def count(triton: Triton, word: str) -> int:
    return triton.noted().count(f"slow {word}")


def test_a_deadline_reaches_the_model(server: Server, triton: Triton) -> None:
    """504, and the model's call is cancelled."""
    before = count(triton, "cancelled")
    status, _, answer = embeddings(server, "slow", "20000", **{"x-request-timeout": 0.5})
    assert status == 504, answer
    until(lambda: count(triton, "cancelled") > before, what="the cancellation")
    assert vectors(server, "slow", "0").shape == (1, 8)


def test_a_client_that_leaves_reaches_the_model(server: Server, triton: Triton) -> None:
    """With no reader left, the computation is cancelled."""
    cancelled, started = count(triton, "cancelled"), count(triton, "began")
    body = json.dumps({"model": "slow", "input": "20000"}).encode()
    head = f"POST /v1/embeddings HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n"
    head += "content-type: application/json"
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(head.encode() + b"\r\n\r\n" + body)
        until(lambda: count(triton, "began") > started, what="the request")
    until(lambda: count(triton, "cancelled") > cancelled, 10, what="the cancellation")


def test_a_full_queue_loses_no_request(server: Server, triton: Triton) -> None:
    """Other clients of the same Triton fill the model's queue: Shoal's requests wait, or get a status to retry
    later."""
    stop = time.monotonic() + 4

    def others(_: int) -> int:
        refused = 0
        while time.monotonic() < stop:
            refused += triton.infer("queued", "20")[0] != 200
        return refused

    with ThreadPoolExecutor(6) as pool:
        busy = [pool.submit(others, number) for number in range(6)]
        replies = at_once(24, lambda number: embeddings(server, "queued", f"{10 + number % 3}"))
        assert sum(each.result() for each in busy) > 0, "the queue was never full"
    assert {status for status, _, _ in replies} <= {200, 429, 503}
    assert sum(status == 200 for status, _, _ in replies) >= 12
    assert all("retry-after" in headers for status, headers, _ in replies if status != 200)
    assert vectors(server, "queued", "0").shape == (1, 8)


def test_a_model_whose_process_dies(own_triton: OwnTriton, tmp_path: Path) -> None:
    """Triton keeps reporting READY and fails every request; Shoal reloads the model by itself."""
    triton = own_triton()
    with serving(tmp_path / "server", [f"triton://{triton.url}#failing"]) as server:
        [stub] = [path for path in Path("/proc").glob("[0-9]*") if parent(path) == triton.pid]
        os.kill(int(stub.name), signal.SIGKILL)
        until(lambda: "failing-0 is out of service" in logged(server) or not answers(server), what="the notice")
        until(lambda: answers(server), what="the return")
        assert triton.state("failing") == "READY"
        assert triton.infer("failing", "fine")[0] == 200
        assert "Traceback" not in logged(server)


def test_a_text_that_kills_the_models_process(own_triton: OwnTriton, tmp_path: Path) -> None:
    """It fails alone, is not retried alone, and the others are answered once the process is back; every time."""
    triton = own_triton()
    with serving(tmp_path / "server", [f"triton://{triton.url}#failing"]) as server:
        for each in range(2):
            texts = [f"fine {each} {number}" for number in range(4)]
            replies = at_once(5, lambda number: embeddings(server, "failing", [*texts, f"crash {each}"][number]))  # noqa: B023
            assert [status for status, _, _ in replies] == [200] * 4 + [502]
            assert "process" in replies[4][2]["error"]["message"]
            assert replies[4][1]["x-should-retry"] == "false"
            until(lambda: answers(server), what="the return")


def answers(server: Server) -> bool:
    return embeddings(server, "failing", "fine", **{"x-request-timeout": 5})[0] == 200


def parent(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):  # it ended meanwhile
        return 0


def test_no_failure_leaves_a_traceback(server: Server) -> None:
    """Runs last: all models still serve."""
    assert "Traceback" not in logged(server)
    assert [status_of(server, name) for name in SERVED] == ["loaded"] * len(SERVED)


@pytest.fixture
async def control(triton: Triton) -> AsyncIterator[Control]:
    client = Client(triton.url)
    yield Control(client)
    await client.aclose()


async def engine_of(control: Control, name: str) -> TritonEngine:
    target = Endpoint(client=control.client, control=control, address=f"triton://test#{name}", model=name)

    async def admit(engine: TritonEngine) -> None:
        """Skip the comparison of vectors."""

    embedder = await target.find()
    assert isinstance(embedder, Embedder)
    return TritonEngine(target, name, embedder=embedder, admit=admit, serving=True)


def rows(*texts: str) -> dict[str, Any]:
    return {"text": np.array([[text] for text in texts], object)}


def soon(seconds: float = 50.0) -> float:
    return time.monotonic() + seconds


async def test_answers_of_a_hundred_megabytes(control: Control) -> None:
    """Returned unchanged, far over gRPC's own limit of 4 MB; small answers are returned beside them."""
    engine = await engine_of(control, "big")
    inputs = {"text": np.array(["100"], object)}
    answer = (await engine.infer(inputs, ["embedding"], {}, soon()))["embedding"]
    assert answer.nbytes == 100_000_000
    assert np.array_equal(answer.ravel(), np.arange(25_000_000, dtype=np.float32))
    await engine.aclose()


async def test_the_engine_s_errors(control: Control) -> None:
    """Each failure of a model has its own error type, so that the lane knows its cause."""
    engine = await engine_of(control, "failing")
    with pytest.raises(EngineFailed, match="told to fail"):
        await engine.infer(rows("poison"), ["embedding"], {}, soon())
    with pytest.raises(InputRejected, match="INVALID_ARG"):
        await engine.infer(rows("reject"), ["embedding"], {}, soon())
    with pytest.raises(TransportFailed):
        await engine.infer(rows("unavailable"), ["embedding"], {}, soon())
    await engine.aclose()
    with pytest.raises(TransportFailed):
        await engine.infer(rows("a"), ["embedding"], {}, soon())
    slow = await engine_of(control, "slow")
    with pytest.raises(DeadlineExceeded):
        await slow.infer(rows("20000"), ["embedding"], {}, soon(0.3))
    task = asyncio.create_task(slow.infer(rows("20000"), ["embedding"], {}, soon()))
    await asyncio.sleep(0.3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_every_call_about_the_server(control: Control, triton: Triton) -> None:
    """Calls that no model's life cycle needs, on the real server."""
    client = control.client
    assert await client.server_live(deadline=soon())
    metadata = await client.unary("ServerMetadata", pb.ServerMetadataRequest(), pb.ServerMetadataResponse, soon())
    assert metadata.name == "triton"
    assert metadata.version == triton.server.version
    assert {each.name for each in (await client.repository_index(deadline=soon())).models} >= set(MODELS)
    assert not await client.model_ready("nobody", deadline=soon())
