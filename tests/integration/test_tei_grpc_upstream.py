"""Shoal in front of the gRPC build of text-embeddings-inference, each in its own process."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fakes.tei_model import dense_of
from tests.integration.llm_kit import UNBOUNDED_QUEUE, ask, metric, running
from tests.integration.server_kit import Server
from tests.integration.tei_kit import FakeProcess, eventually, fake_process

Reply = tuple[int, dict[str, str], bytes]


@pytest.fixture
def fake() -> Iterator[FakeProcess]:
    with fake_process("--delay-ms", "20", grpc=True) as process:
        yield process


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(64) as executor:
        yield executor


def embed(server: Server, inputs: Any, **options: Any) -> Reply:
    return server.request("POST", "/embed", {"inputs": inputs, **options})


def rows_of(reply: Reply) -> Any:
    assert reply[0] == 200, reply[2]
    return np.array(json.loads(reply[2]), dtype=np.float32)


def test_one_bad_text_fails_alone(tmp_path: Path, pool: ThreadPoolExecutor, fake: FakeProcess) -> None:
    """Users of single texts share streams; those that shared one with a bad text still get their answers."""
    with running(tmp_path, f"m={fake.address}", flags=UNBOUNDED_QUEUE) as server:
        texts = [f"text {at}" for at in range(60)]
        bad = {13: ("poison-item", 502), 31: ("w " * 600, 422)}
        pending: list[Future[Reply]] = [
            pool.submit(embed, server, bad[at][0] if at in bad else text, truncate=False)
            for at, text in enumerate(texts)
        ]
        for at, text in enumerate(texts):
            status, _, body = pending[at].result()
            assert status == (bad[at][1] if at in bad else 200), body
            if status == 200:
                assert np.allclose(json.loads(body), [dense_of(text)], atol=1e-6)
        report = fake.report()
        assert report["most_in_flight"] <= 2
        assert max(report["sizes"]) > 10
        assert len(report["sizes"]) < 40, "some 2 for the texts, and halves of those with a bad one"


def test_large_requests_and_few_permits(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    with (
        fake_process("--max-concurrent-requests", "8", grpc=True) as fake,
        running(tmp_path, f"m={fake.address}", flags=UNBOUNDED_QUEUE) as server,
    ):
        texts = [f"text {at}" for at in range(300)]
        pending = [pool.submit(embed, server, texts[at : at + 30]) for at in range(0, 300, 30)]
        vectors = np.concatenate([rows_of(one.result()) for one in pending])
        assert np.allclose(vectors, np.stack([dense_of(text) for text in texts]), atol=1e-6)
        report = fake.report()
        assert report["most_permits"] <= 8
        assert set(report["statuses"]) == {200}


def test_scores(tmp_path: Path) -> None:
    with fake_process("--kind", "reranker", grpc=True) as fake, running(tmp_path, f"m={fake.address}") as server:
        body = {"query": "q", "texts": ["one", "two", "three"], "raw_scores": True}
        status, _, reply = server.request("POST", "/rerank", body)
        assert (status, sorted(rank["index"] for rank in json.loads(reply))) == (200, [0, 1, 2])


def test_tokens_and_ids(tmp_path: Path, fake: FakeProcess) -> None:
    with running(tmp_path, f"m={fake.address}", flags=("--token-ids", "accept")) as server:
        status, _, reply = server.request("POST", "/tokenize", {"inputs": "two words", "add_special_tokens": False})
        assert (status, [token["text"] for token in json.loads(reply)[0]]) == (200, ["two", "words"])
        status, _, reply = server.request("POST", "/v1/embeddings", {"model": "m", "input": [7, 8]})
        assert status == 200
        assert np.allclose(json.loads(reply)["data"][0]["embedding"], dense_of("w7 w8"), atol=1e-6)


def test_a_server_names_its_model(tmp_path: Path) -> None:
    """The address alone is enough; the error of a wrong key names the setting."""
    with fake_process("--api-key", "sesame", "--model-id", "BAAI/bge", grpc=True) as fake:
        with running(tmp_path / "right", fake.address, flags=("--upstream-api-key", "sesame")) as server:
            eventually(lambda: b'"BAAI/bge"' in server.request("GET", "/v1/models")[2], "the model in /v1/models")
            assert embed(server, "a")[0] == 200
        with running(tmp_path / "wrong", f"m={fake.address}", wait=False) as server:
            assert server.process.wait(30) == 1  # its only model can never be served
            assert "upstream_api_key" in server.log.read_text().splitlines()[-1]


def test_a_server_that_dies_and_comes_back(tmp_path: Path, fake: FakeProcess) -> None:
    with running(tmp_path, f"m={fake.address}", flags=("--embed-timeout-s", "2")) as server:
        assert embed(server, "die-item")[0] in (502, 503, 504)
        eventually(lambda: server.request("GET", "/health/ready")[0] == 503, "/health/ready to return 503")
        fake.kill()
        fake.start()
        eventually(lambda: server.request("GET", "/health/ready")[0] == 200, "/health/ready to return 200")
        assert np.allclose(rows_of(embed(server, "a")), [dense_of("a")], atol=1e-6)


def test_disconnected_callers_cost_no_more_calls(tmp_path: Path, fake: FakeProcess) -> None:
    """Their stream is cancelled, and their queued texts are never sent."""
    with running(tmp_path, f"m={fake.address}") as server:
        callers: list[socket.socket] = []
        for running_calls in (1, 2, 2, 2, 2, 2, 2, 2):  # one after the other: together they would share a call
            callers.append(ask(server, "/embed", {"inputs": [f"slow-item {len(callers)}"]}))
            eventually(partial(fake.runs, running_calls), "the fake server to run the calls")
        sent = fake.report()["inputs"]
        eventually(lambda: metric(server, "shoal_queue_items") == 6, "6 queued items")
        for caller in callers[2:]:
            caller.close()
        eventually(lambda: metric(server, "shoal_queue_items") == 0, "an empty queue")
        for caller in callers[:2]:
            caller.close()
        eventually(lambda: fake.report()["in_flight"] == 0, "the fake server to be idle")
        assert (fake.report()["aborted"], fake.report()["inputs"]) == (2, sent)
        assert embed(server, "after")[0] == 200


def test_it_drains(tmp_path: Path, pool: ThreadPoolExecutor, fake: FakeProcess) -> None:
    """SIGTERM: accepted requests are answered, then the process exits by itself."""
    fake.change(delay_ms=700)
    with running(tmp_path, f"m={fake.address}") as server:
        before = fake.report()["calls"]
        pending = pool.submit(embed, server, "last words")
        eventually(lambda: fake.report()["calls"] > before, "a new call")
        server.process.send_signal(signal.SIGTERM)
        assert np.allclose(rows_of(pending.result()), [dense_of("last words")], atol=1e-6)
        assert server.exit_code() == 0
