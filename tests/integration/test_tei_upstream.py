"""Shoal before a server of text-embeddings-inference, each a process of its own, against each weakness of the batching
proxy that this replaces (reference/systems.md 4.6)."""

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
from tests.integration.llm_kit import ask, metric, running, running_beside
from tests.integration.server_kit import Server
from tests.integration.tei_kit import FakeProcess, eventually, fake_process

Reply = tuple[int, dict[str, str], bytes]


@pytest.fixture
def fake() -> Iterator[FakeProcess]:
    with fake_process("--delay-ms", "10") as made:
        yield made


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(64) as made:
        yield made


def embed(server: Server, inputs: Any, **options: Any) -> Reply:
    return server.request("POST", "/embed", {"inputs": inputs, **options})


def rows_of(reply: Reply) -> Any:
    assert reply[0] == 200, reply[2]
    return np.array(json.loads(reply[2]), dtype=np.float32)


class TestJoining:
    @pytest.mark.parametrize("era", ["1.8", "1.9"])
    def test_one_bad_text_fails_alone(self, tmp_path: Path, pool: ThreadPoolExecutor, era: str) -> None:
        """1. Whoever shared its call gets the answer, in both eras of statuses."""
        with fake_process("--delay-ms", "20", "--era", era) as fake, running(tmp_path, f"m={fake.address}") as server:
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

    def test_an_answer_of_the_wrong_length_is_an_error(self, tmp_path: Path, fake: FakeProcess) -> None:
        """2. It never becomes an empty vector."""
        with running(tmp_path, f"m={fake.address}") as server:
            for kind in ("short", "empty", "html"):
                fake.change(misbehaves=kind)
                status, _, body = embed(server, ["a", "b"])
                assert status == 502
                assert json.loads(body)["error_type"] == "Backend"
            fake.change(misbehaves="")
            assert embed(server, ["a", "b"])[0] == 200

    def test_a_full_queue_is_reported(self, tmp_path: Path, pool: ThreadPoolExecutor, fake: FakeProcess) -> None:
        """3. No queue without bound, nor calls: 429, and never more calls in flight than were asked for."""
        fake.change(delay_ms=200)
        with running(tmp_path, f"m={fake.address}", flags=("--max-queue-items", "8")) as server:
            pending = [pool.submit(embed, server, f"text {at}") for at in range(40)]
            statuses = [one.result()[0] for one in pending]
            assert set(statuses) == {200, 429}
            assert fake.report()["most_in_flight"] <= 2

    def test_permits_of_the_server_are_kept(self, tmp_path: Path, pool: ThreadPoolExecutor) -> None:
        """3. It has 8 for inputs, and refuses nothing."""
        flags = ("--max-concurrent-requests", "8", "--delay-ms", "5")
        with fake_process(*flags) as fake, running(tmp_path, f"m={fake.address}") as server:
            pending = [pool.submit(embed, server, [f"text {at} {n}" for n in range(10)]) for at in range(30)]
            assert {one.result()[0] for one in pending} == {200}
            report = fake.report()
            assert report["most_permits"] <= 8
            assert set(report["statuses"]) == {200}

    def test_a_lone_request_waits_for_nobody(self, tmp_path: Path, fake: FakeProcess) -> None:
        """4. It is sent at once, and says so."""
        with running(tmp_path, f"m={fake.address}") as server:
            embed(server, "first")
            _, headers, _ = embed(server, "alone")
            assert (headers["x-shoal-flush"], headers["x-shoal-batch-size"]) == ("idle", "1")
            assert float(headers["x-shoal-queue-ms"]) < 10

    def test_requests_of_any_size_are_split_and_joined(
        self, tmp_path: Path, pool: ThreadPoolExecutor, fake: FakeProcess
    ) -> None:
        """5. By inputs, not by requests: 32 in a call, whoever they are of."""
        with running(tmp_path, f"m={fake.address}") as server:
            texts = [f"text {at}" for at in range(300)]
            found = rows_of(embed(server, texts))
            assert np.allclose(found, np.stack([dense_of(text) for text in texts]), atol=1e-6)
            sizes = fake.report()["sizes"][1:]
            assert (max(sizes), len(sizes)) == (32, 10)

    def test_options_are_not_dropped(self, tmp_path: Path, pool: ThreadPoolExecutor, fake: FakeProcess) -> None:
        """6. And only equal ones share a call."""
        with running(tmp_path, f"m={fake.address}") as server:
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
        """10. The wait is the one that was, not the setting."""
        fake.change(delay_ms=100)
        with running(tmp_path, f"m={fake.address}", flags=("--max-wait-time-ms", "30000")) as server:
            pending = [pool.submit(embed, server, f"text {at}") for at in range(32)]
            for one in pending:
                status, headers, _ = one.result()
                assert status == 200
                assert headers["x-shoal-batch-size"] == "32"
                assert float(headers["x-shoal-queue-ms"]) < 5000


class TestServing:
    def test_a_server_names_its_model(self, tmp_path: Path) -> None:
        """6, 7. Its address alone is enough; key, metrics and health come with it."""
        flags = ("--api-key", "sesame", "--model-id", "BAAI/bge")
        own = ("--upstream-api-key", "sesame")
        with fake_process(*flags) as fake, running(tmp_path, fake.address, flags=own) as server:
            eventually(lambda: b'"BAAI/bge"' in server.request("GET", "/v1/models")[2])
            assert embed(server, "a")[0] == 200
            assert metric(server, "shoal_batch_size_sum", model="BAAI/bge") == 1
            fake.kill()
            eventually(lambda: server.request("GET", "/health/ready")[0] == 503)

    def test_the_error_of_a_wrong_key_names_the_setting(self, tmp_path: Path) -> None:
        with (
            fake_process("--api-key", "sesame") as fake,
            running(tmp_path, f"m={fake.address}", wait=False) as server,
        ):
            assert server.process.wait(30) == 1  # its only model can never be served
            assert "upstream_api_key" in server.log.read_text().splitlines()[-1]

    def test_several_servers_under_one_name(self, tmp_path: Path, pool: ThreadPoolExecutor, fake: FakeProcess) -> None:
        """6. When one dies in the middle of its calls, the other answers; it serves again when it is back, with the
        limits that it has then."""
        with (
            fake_process("--delay-ms", "10") as other,
            running(tmp_path, f"m={fake.address},{other.address}") as server,
        ):
            eventually(lambda: other.report()["calls"] > 0)
            texts = [f"text {at}" for at in range(200)]
            pending = [pool.submit(embed, server, text) for text in texts]
            other.kill()
            for text, one in zip(texts, pending, strict=True):
                assert np.allclose(rows_of(one.result())[0], dense_of(text), atol=1e-6)
            other.flags = ("--max-client-batch-size", "4")
            other.start()
            eventually(lambda: other.report()["calls"] > 0)
            eventually(lambda: embed(server, texts)[0] == 200 and len(other.report()["sizes"]) > 3)
            assert max(other.report()["sizes"]) == 4

    def test_a_text_that_kills_its_server(self, tmp_path: Path, pool: ThreadPoolExecutor, fake: FakeProcess) -> None:
        """Its request fails, and so does nothing that comes when the server is back."""
        with running(tmp_path, f"m={fake.address}", flags=("--embed-timeout-s", "2")) as server:
            assert embed(server, "die-item")[0] in (502, 503, 504)
            eventually(lambda: server.request("GET", "/health/ready")[0] == 503)
            fake.kill()
            fake.start()
            eventually(lambda: embed(server, "a")[0] == 200)

    def test_it_drains(self, tmp_path: Path, pool: ThreadPoolExecutor, fake: FakeProcess) -> None:
        """8. SIGTERM: what was accepted is answered, then the process ends by itself."""
        fake.change(delay_ms=700)
        with running(tmp_path, f"m={fake.address}") as server:
            before = fake.report()["calls"]
            pending = pool.submit(embed, server, "last words")
            eventually(lambda: fake.report()["calls"] > before)
            server.process.send_signal(signal.SIGTERM)
            assert np.allclose(rows_of(pending.result())[0], dense_of("last words"), atol=1e-6)
            assert server.exit_code() == 0

    def test_a_slow_server_is_a_504_at_the_deadline(self, tmp_path: Path, fake: FakeProcess) -> None:
        """9. The one deadline of the request; the call is broken off there."""
        with running(tmp_path, f"m={fake.address}", flags=("--embed-timeout-s", "0.5")) as server:
            status, _, _ = embed(server, "slow-item")
            assert status in (503, 504)
            eventually(lambda: fake.report()["aborted"] == 1 and fake.report()["in_flight"] == 0)

    def test_callers_who_leave_cost_nothing_more(self, tmp_path: Path, fake: FakeProcess) -> None:
        """12. Their call is broken off, and what they had waiting is never sent."""
        fake.change(slow_ms=60_000)
        with running(tmp_path, f"m={fake.address}") as server:
            callers: list[socket.socket] = []
            for running_calls in (1, 2, 2, 2, 2, 2, 2, 2):  # one after the other: together they would share a call
                callers.append(ask(server, "/embed", {"inputs": [f"slow-item {len(callers)}"]}))
                eventually(partial(fake.runs, running_calls))
            sent = fake.report()["inputs"]
            eventually(lambda: metric(server, "shoal_queue_items") == 6)
            for caller in callers[2:]:
                caller.close()
            eventually(lambda: metric(server, "shoal_queue_items") == 0)
            for caller in callers[:2]:
                caller.close()
            eventually(lambda: fake.report()["in_flight"] == 0)
            report = fake.report()
            assert (report["aborted"], report["inputs"]) == (2, sent), report
            assert embed(server, "after")[0] == 200
            eventually(lambda: metric(server, "shoal_queue_items") == 0)


class TestShoalBehind:
    """Shoal is a server of text-embeddings-inference for another Shoal."""

    @pytest.fixture
    def pair(self, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Server, Server]]:
        """(the one that clients see, the one with the model)."""
        with running(tmp_path / "behind", f"far={request.param}") as behind:
            address = f"near=tei+http://127.0.0.1:{behind.port}"
            with running(tmp_path / "front", address) as front:
                yield front, behind

    @pytest.mark.parametrize("pair", ["fake:delay_ms=2"], indirect=True)
    def test_vectors_are_the_same(self, pair: tuple[Server, Server], pool: ThreadPoolExecutor) -> None:
        front, behind = pair
        texts = [f"text {at}" for at in range(64)]
        for options in ({}, {"normalize": False}, {"dimensions": 8}):
            pending: list[Future[Reply]] = [pool.submit(embed, front, text, **options) for text in texts]
            found = np.concatenate([rows_of(one.result()) for one in pending])
            assert np.allclose(found, rows_of(embed(behind, texts, **options)), atol=1e-6)
        status, _, body = embed(front, ["fine", "poison-item"])
        assert status == 502
        assert b"poison" not in body
        pending = [pool.submit(embed, front, text) for text in (*texts, "poison-item")]
        assert sorted({one.result()[0] for one in pending}) == [200, 502]
        assert [one.result()[0] for one in pending].count(502) == 1

    @pytest.mark.parametrize("pair", ["fake:labels=1"], indirect=True)
    def test_scores_are_the_same(self, pair: tuple[Server, Server]) -> None:
        front, behind = pair
        for raw in (True, False):
            body = {"query": "q", "texts": ["one", "two", "three"], "raw_scores": raw}
            seen, own = (json.loads(server.request("POST", "/rerank", body)[2]) for server in (front, behind))
            assert [rank["index"] for rank in seen] == [rank["index"] for rank in own]
            assert np.allclose([rank["score"] for rank in seen], [rank["score"] for rank in own], atol=1e-5)

    @pytest.mark.parametrize("pair", ["fake:labels=3"], indirect=True)
    def test_labels_are_the_same(self, pair: tuple[Server, Server]) -> None:
        front, behind = pair
        body = {"inputs": [["one"], ["two", "words"]]}
        seen, own = (json.loads(server.request("POST", "/predict", body)[2]) for server in (front, behind))
        assert [[each["label"] for each in row] for row in seen] == [[each["label"] for each in row] for row in own]

    @pytest.mark.parametrize("pair", ["fake:delay_ms=2"], indirect=True)
    def test_it_comes_back(self, pair: tuple[Server, Server], tmp_path: Path) -> None:
        """The same port, another process."""
        front, behind = pair
        behind.process.kill()
        behind.process.wait()
        eventually(lambda: front.request("GET", "/health/ready")[0] == 503)
        with running(tmp_path / "again", "far=fake:", port=behind.port):
            eventually(lambda: front.request("GET", "/health/ready")[0] == 200)
            assert embed(front, "a")[0] == 200


async def test_a_thousand_at_once(tmp_path: Path) -> None:
    """1,000 distinct texts of as many callers leave in about as few calls as they fit into; a poisoned one fails alone.
    How fast that is stands in bench/results."""
    with fake_process("--delay-ms", "20") as fake:
        async with running_beside(tmp_path, f"m={fake.address}", flags=("--streams", "4")) as server:
            texts = Texts(16).take(1000)
            texts[500] += " poison-item"
            bodies = Bodies("tei", "", "float", f"127.0.0.1:{server.port}")
            before = await asyncio.to_thread(fake.report)
            pool = Pool(Target(server.base_url), 1000)
            await pool.open()
            found = await asyncio.gather(*(pool.ask(bodies.request([text]), keep=True) for text in texts))
            pool.close()
            report = await asyncio.to_thread(fake.report)
    assert [at for at, reply in enumerate(found) if reply.status != 200] == [500]
    assert found[500].status == 502
    for text, reply in zip(texts[:50], found, strict=False):
        assert np.allclose(json.loads(bytes(reply.body or b"")), [dense_of(text)], atol=1e-6)
    assert report["most_in_flight"] == 4
    assert report["calls"] - before["calls"] < 100, "32 calls are the least, and 12 find the culprit"
