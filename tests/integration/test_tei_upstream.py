"""Shoal in front of text-embeddings-inference, each in its own process: a test for each weakness of the batching proxy
that Shoal replaces (reference/systems.md 4.6)."""

from __future__ import annotations

import asyncio
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

from shoal.bench.client import Pool, Target
from shoal.bench.texts import Bodies, Texts
from tests.fakes.tei_model import dense_of
from tests.integration.llm_kit import UNBOUNDED_QUEUE, ask, metric, running, running_beside
from tests.integration.server_kit import Server
from tests.integration.tei_kit import FakeProcess, eventually, fake_process

Reply = tuple[int, dict[str, str], bytes]


@pytest.fixture
def fake() -> Iterator[FakeProcess]:
    with fake_process("--delay-ms", "10") as process:
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


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, FakeProcess]]:
    """A server, and the one that it stands in front of, shared by tests that leave both as they were."""
    with (
        fake_process("--delay-ms", "10") as fake,
        running(tmp_path_factory.mktemp("joined"), f"m={fake.address}", flags=UNBOUNDED_QUEUE) as server,
    ):
        yield server, fake


class TestJoining:
    @pytest.mark.parametrize("era", ["1.8", "1.9"])
    def test_one_bad_text_fails_alone(self, tmp_path: Path, pool: ThreadPoolExecutor, era: str) -> None:
        """1. Callers that shared its call get their answers, with the statuses of old and new versions."""
        with (
            fake_process("--delay-ms", "20", "--era", era) as fake,
            running(tmp_path, f"m={fake.address}", flags=UNBOUNDED_QUEUE) as server,
        ):
            texts = [f"text {at}" for at in range(60)]
            bad = {13: "poison-item", 31: "w " * 600}
            pending: list[Future[Reply]] = [
                pool.submit(embed, server, bad.get(at, text), truncate=False) for at, text in enumerate(texts)
            ]
            for at, text in enumerate(texts):
                status, _, body = pending[at].result()
                if at in bad:
                    assert status in (413, 422, 502)
                else:
                    assert status == 200
                    assert np.allclose(json.loads(body), [dense_of(text)], atol=1e-6)

    def test_an_answer_of_the_wrong_length_is_an_error(self, joined: tuple[Server, FakeProcess]) -> None:
        """2. It never becomes an empty vector."""
        server, fake = joined
        for kind in ("short", "empty", "html"):
            fake.change(misbehaves=kind)
            status, _, body = embed(server, ["a", "b"])
            fake.change(misbehaves="")
            assert status == 502
            assert json.loads(body)["error_type"] == "Backend"
        assert embed(server, ["a", "b"])[0] == 200

    def test_a_full_queue_is_reported(self, tmp_path: Path, pool: ThreadPoolExecutor, fake: FakeProcess) -> None:
        """3. Neither queue nor calls are unbounded: 429, and never more calls in flight than configured."""
        fake.change(delay_ms=200)
        with running(tmp_path, f"m={fake.address}", flags=("--max-queue-items", "8")) as server:
            pending = [pool.submit(embed, server, f"text {at}") for at in range(40)]
            statuses = [one.result()[0] for one in pending]
            assert set(statuses) == {200, 429}
            assert fake.report()["most_in_flight"] <= 2

    def test_permits_of_the_server_are_kept(self, tmp_path: Path, pool: ThreadPoolExecutor) -> None:
        """3. The server has 8 permits for inputs, and rejects none."""
        flags = ("--max-concurrent-requests", "8", "--delay-ms", "5")
        with fake_process(*flags) as fake, running(tmp_path, f"m={fake.address}", flags=UNBOUNDED_QUEUE) as server:
            pending = [pool.submit(embed, server, [f"text {at} {n}" for n in range(10)]) for at in range(30)]
            assert {one.result()[0] for one in pending} == {200}
            report = fake.report()
            assert report["most_permits"] <= 8
            assert set(report["statuses"]) == {200}

    def test_a_lone_request_is_sent_at_once(self, joined: tuple[Server, FakeProcess]) -> None:
        """4. It does not wait, and its batch facts say so."""
        server, _ = joined
        embed(server, "first")
        _, headers, _ = embed(server, "alone")
        assert (headers["x-shoal-flush"], headers["x-shoal-batch-size"]) == ("idle", "1")
        assert float(headers["x-shoal-queue-ms"]) < 10

    def test_requests_of_any_size_are_split_and_joined(self, joined: tuple[Server, FakeProcess]) -> None:
        """5. By inputs, not by requests: 32 in a call, regardless of the caller."""
        server, fake = joined
        texts = [f"part {at}" for at in range(300)]
        before = len(fake.report()["sizes"])
        vectors = rows_of(embed(server, texts))
        assert np.allclose(vectors, np.stack([dense_of(text) for text in texts]), atol=1e-6)
        sizes = fake.report()["sizes"][before:]
        assert (max(sizes), len(sizes)) == (32, 10)

    def test_options_are_not_dropped(self, joined: tuple[Server, FakeProcess], pool: ThreadPoolExecutor) -> None:
        """6. Only texts with equal options share a call."""
        server, _ = joined
        options: list[dict[str, Any]] = [
            {},
            {"normalize": False},
            {"dimensions": 4},
            {"normalize": False, "dimensions": 4},
        ]
        pending = [(each, pool.submit(embed, server, f"text {at}", **each)) for at in range(20) for each in options]
        for at, (each, reply) in enumerate(pending):
            expected = dense_of(f"text {at // 4}", **each)
            assert np.allclose(rows_of(reply.result())[0], expected, atol=1e-6)

    def test_batch_facts_are_those_of_the_batch(
        self, tmp_path: Path, pool: ThreadPoolExecutor, fake: FakeProcess
    ) -> None:
        """10. The wait is the actual one, not the setting."""
        fake.change(delay_ms=100)
        with running(tmp_path, f"m={fake.address}", flags=(*UNBOUNDED_QUEUE, "--max-wait-time-ms", "30000")) as server:
            pending = [pool.submit(embed, server, f"text {at}") for at in range(32)]
            for one in pending:
                status, headers, _ = one.result()
                assert status == 200
                assert headers["x-shoal-batch-size"] == "32"
                assert float(headers["x-shoal-queue-ms"]) < 5000


class TestServing:
    def test_a_server_names_its_model(self, tmp_path: Path) -> None:
        """6, 7. The address alone is enough; key, metrics and health come with it."""
        flags = ("--api-key", "sesame", "--model-id", "BAAI/bge")
        own = ("--upstream-api-key", "sesame")
        with fake_process(*flags) as fake, running(tmp_path, fake.address, flags=own) as server:
            eventually(lambda: b'"BAAI/bge"' in server.request("GET", "/v1/models")[2], "the model in /v1/models")
            assert embed(server, "a")[0] == 200
            assert metric(server, "shoal_batch_size_sum", model="BAAI/bge") == 1
            fake.kill()
            eventually(lambda: server.request("GET", "/health/ready")[0] == 503, "/health/ready to return 503")

    def test_the_error_of_a_wrong_key_names_the_setting(self, tmp_path: Path) -> None:
        with (
            fake_process("--api-key", "sesame") as fake,
            running(tmp_path, f"m={fake.address}", wait=False) as server,
        ):
            assert server.process.wait(30) == 1  # its only model can never be served
            assert "upstream_api_key" in server.log.read_text().splitlines()[-1]

    def test_several_servers_under_one_name(self, tmp_path: Path, pool: ThreadPoolExecutor, fake: FakeProcess) -> None:
        """6. When one dies during its calls, the other answers; it serves again once it is back, with its limits of
        that time."""
        with (
            fake_process("--delay-ms", "10") as other,
            running(tmp_path, f"m={fake.address},{other.address}", flags=UNBOUNDED_QUEUE) as server,
        ):
            eventually(lambda: other.report()["calls"] > 0, "the first call of the new server")
            texts = [f"text {at}" for at in range(200)]
            pending = [pool.submit(embed, server, text) for text in texts]
            other.kill()
            for text, one in zip(texts, pending, strict=True):
                assert np.allclose(rows_of(one.result())[0], dense_of(text), atol=1e-6)
            other.flags = ("--max-client-batch-size", "4")
            other.start()
            eventually(lambda: other.report()["calls"] > 0, "the first call of the new server")
            eventually(
                lambda: embed(server, texts)[0] == 200 and len(other.report()["sizes"]) > 3,
                "four batches on the new server",
            )
            assert max(other.report()["sizes"]) == 4

    def test_a_text_that_kills_its_server(self, tmp_path: Path, pool: ThreadPoolExecutor, fake: FakeProcess) -> None:
        """Its request fails; later ones succeed once the server is back."""
        with running(tmp_path, f"m={fake.address}", flags=("--embed-timeout-s", "2")) as server:
            assert embed(server, "die-item")[0] in (502, 503, 504)
            eventually(lambda: server.request("GET", "/health/ready")[0] == 503, "/health/ready to return 503")
            fake.kill()
            fake.start()
            eventually(lambda: embed(server, "a")[0] == 200, "a successful request")

    def test_it_drains(self, tmp_path: Path, pool: ThreadPoolExecutor, fake: FakeProcess) -> None:
        """8. SIGTERM: accepted requests are answered, then the process exits by itself."""
        fake.change(delay_ms=700)
        with running(tmp_path, f"m={fake.address}") as server:
            before = fake.report()["calls"]
            pending = pool.submit(embed, server, "last words")
            eventually(lambda: fake.report()["calls"] > before, "a new call")
            server.process.send_signal(signal.SIGTERM)
            assert np.allclose(rows_of(pending.result())[0], dense_of("last words"), atol=1e-6)
            assert server.exit_code() == 0

    def test_a_slow_server_is_a_504_at_the_deadline(self, tmp_path: Path, fake: FakeProcess) -> None:
        """9. The request has one deadline; the call is cancelled there."""
        with running(tmp_path, f"m={fake.address}", flags=("--embed-timeout-s", "0.5")) as server:
            status, _, _ = embed(server, "slow-item")
            assert status in (503, 504)
            eventually(
                lambda: fake.report()["aborted"] == 1 and fake.report()["in_flight"] == 0,
                "one aborted call and none in flight",
            )

    def test_disconnected_callers_cost_no_more_calls(self, tmp_path: Path, fake: FakeProcess) -> None:
        """12. Their call is cancelled, and their queued texts are never sent."""
        fake.change(slow_ms=60_000)
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
            report = fake.report()
            assert (report["aborted"], report["inputs"]) == (2, sent), report
            assert embed(server, "after")[0] == 200
            eventually(lambda: metric(server, "shoal_queue_items") == 0, "an empty queue")


@pytest.fixture(scope="class")
def pair(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[tuple[Server, Server]]:
    """(front server for clients, server with the model), shared by tests of the same model."""
    folder = tmp_path_factory.mktemp("pair")
    with running(folder / "behind", f"far={request.param}", flags=UNBOUNDED_QUEUE) as behind:
        address = f"near=tei+http://127.0.0.1:{behind.port}"
        with running(folder / "front", address, flags=UNBOUNDED_QUEUE) as front:
            yield front, behind


class TestShoalBehind:
    """Shoal is a text-embeddings-inference server for another Shoal."""

    @pytest.mark.parametrize("pair", ["fake:delay_ms=2"], indirect=True)
    def test_vectors_are_the_same(self, pair: tuple[Server, Server], pool: ThreadPoolExecutor) -> None:
        front, behind = pair
        texts = [f"text {at}" for at in range(64)]
        for options in ({}, {"normalize": False}, {"dimensions": 8}):
            pending: list[Future[Reply]] = [pool.submit(embed, front, text, **options) for text in texts]
            vectors = np.concatenate([rows_of(one.result()) for one in pending])
            assert np.allclose(vectors, rows_of(embed(behind, texts, **options)), atol=1e-6)
        status, _, body = embed(front, ["fine", "poison-item"])
        assert status == 502
        assert b"poison" not in body
        pending = [pool.submit(embed, front, text) for text in (*texts, "poison-item")]
        assert sorted({one.result()[0] for one in pending}) == [200, 502]
        assert [one.result()[0] for one in pending].count(502) == 1

    @pytest.mark.parametrize("pair", ["fake:delay_ms=2"], indirect=True)
    def test_it_comes_back(self, pair: tuple[Server, Server], tmp_path: Path) -> None:
        """It comes back as another process on the same port. After the other test of this pair, which needs both."""
        front, behind = pair
        behind.process.kill()
        behind.process.wait()
        eventually(lambda: front.request("GET", "/health/ready")[0] == 503, "/health/ready to return 503")
        with running(tmp_path / "again", "far=fake:", port=behind.port):
            eventually(lambda: front.request("GET", "/health/ready")[0] == 200, "/health/ready to return 200")
            assert embed(front, "a")[0] == 200

    @pytest.mark.parametrize("pair", ["fake:labels=1"], indirect=True)
    def test_scores_are_the_same(self, pair: tuple[Server, Server]) -> None:
        front, behind = pair
        for raw in (True, False):
            body = {"query": "q", "texts": ["one", "two", "three"], "raw_scores": raw}
            ranking, own = (json.loads(server.request("POST", "/rerank", body)[2]) for server in (front, behind))
            assert [rank["index"] for rank in ranking] == [rank["index"] for rank in own]
            assert np.allclose([rank["score"] for rank in ranking], [rank["score"] for rank in own], atol=1e-5)

    @pytest.mark.parametrize("pair", ["fake:labels=3"], indirect=True)
    def test_labels_are_the_same(self, pair: tuple[Server, Server]) -> None:
        front, behind = pair
        body = {"inputs": [["one"], ["two", "words"]]}
        labels, own = (json.loads(server.request("POST", "/predict", body)[2]) for server in (front, behind))
        assert [[each["label"] for each in row] for row in labels] == [[each["label"] for each in row] for row in own]


async def test_a_thousand_at_once(tmp_path: Path) -> None:
    """1,000 distinct texts of as many callers leave in about the minimum number of calls; a poisoned one fails alone.
    bench/results has the speed."""
    with fake_process("--delay-ms", "20") as fake:
        async with running_beside(tmp_path, f"m={fake.address}", flags=("--streams", "4")) as server:
            texts = Texts(16).take(1000)
            texts[500] += " poison-item"
            bodies = Bodies("tei", "", "float", f"127.0.0.1:{server.port}")
            before = await asyncio.to_thread(fake.report)
            pool = Pool(Target(server.base_url), 1000)
            await pool.open()
            replies = await asyncio.gather(*(pool.ask(bodies.request([text]), keep=True) for text in texts))
            pool.close()
            report = await asyncio.to_thread(fake.report)
    assert [at for at, reply in enumerate(replies) if reply.status != 200] == [500]
    assert replies[500].status == 502
    for text, reply in zip(texts[:50], replies, strict=False):
        assert np.allclose(json.loads(bytes(reply.body or b"")), [dense_of(text)], atol=1e-6)
    assert report["most_in_flight"] == 4
    assert report["calls"] - before["calls"] < 100, "32 calls are the least, and 12 find the culprit"
