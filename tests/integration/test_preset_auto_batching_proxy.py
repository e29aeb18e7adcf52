"""`shoal serve --as auto-batching-proxy` as a drop-in for the original: the curl lines of its README and its scripts,
verbatim, against a fake text-embeddings-inference server."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fakes.tei import FakeTei
from tests.fakes.tei_model import Script, dense_of
from tests.integration.server_kit import Server, ShoalServer, wait_until

DIRECT = r"""curl -X POST http://localhost:8080/embed \
  -H "Content-Type: application/json" \
  -d '{"inputs": ["Hello world"]}'
"""

PROXY = r"""curl -X POST http://localhost:3000/embed \
  -H "Content-Type: application/json" \
  -d '{"inputs": ["Hello", "World"]}'
"""

PROXY_SIMPLE = r"""curl -X POST http://localhost:3000/embed \
  -H "Content-Type: application/json" \
  -d '{"inputs": ["Hello world"]}'"""

SEQUENTIAL = r"""for i in {1..2}; do
  curl -s -X POST http://localhost:3000/embed \
    -H "Content-Type: application/json" \
     -d '{"inputs": ["Request '"$i"' - What is Vector search?"]}'
done
"""

CONCURRENT = r"""for i in {1..30}; do
  curl -s -X POST http://localhost:3000/embed \
    -H "Content-Type: application/json" \
     -d '{"inputs": ["Request '"$i"' - What is Vector search?"]}' > /dev/null &
done

# Wait for all background jobs to complete
wait
"""


@pytest.fixture
async def upstream() -> AsyncIterator[FakeTei]:
    async with FakeTei(Script(delay_ms=20)) as server:
        yield server


class Shell:
    """Runs the original's command lines, with their ports mapped to those of the test."""

    def __init__(self, folder: Path, server: Server, upstream: FakeTei) -> None:
        places = ((3000, server.port), (8080, upstream.port))
        lines = [f'connect-to = "localhost:{theirs}:127.0.0.1:{ours}"' for theirs, ours in places]
        (folder / ".curlrc").write_text("\n".join([*lines, "noproxy = *", "silent"]))
        self._environ = {**os.environ, "CURL_HOME": str(folder)}

    async def run(self, script: str) -> str:
        result = await asyncio.to_thread(
            subprocess.run, ["bash", "-c", script], env=self._environ, capture_output=True, text=True, timeout=30
        )
        assert result.returncode == 0, result.stderr
        return str(result.stdout)


@pytest.fixture
async def server(shoal_server: ShoalServer, upstream: FakeTei) -> Server:
    """A server with the original's defaults except for its port and its upstream's, and with batch facts."""
    flags = ("--inference-url", f"{upstream.base}/embed", "--include-batch-info", "true")
    started: Server = await asyncio.to_thread(shoal_server, [], "--as", "auto-batching-proxy", *flags)
    upstream.calls.clear()
    return started


@pytest.fixture
def shell(tmp_path: Path, server: Server, upstream: FakeTei) -> Shell:
    if shutil.which("curl") is None:
        pytest.skip("there is no curl on this machine")
    return Shell(tmp_path, server, upstream)


def check(answer: dict[str, Any], *texts: str) -> None:
    """The upstream's vectors for these texts."""
    assert np.allclose(answer["embeddings"], [dense_of(text) for text in texts], atol=1e-6)


async def test_the_readme_s_lines(shell: Shell) -> None:
    """To the inference service and to the proxy: a bare array there, `embeddings` here, the same numbers."""
    (direct,) = json.loads(await shell.run(DIRECT))
    assert np.allclose(direct, dense_of("Hello world"), atol=1e-6)
    check(json.loads(await shell.run(PROXY)), "Hello", "World")
    check(json.loads(await shell.run(PROXY_SIMPLE)), "Hello world")


async def test_its_sequential_script(shell: Shell) -> None:
    """Sequential requests each wait their own time and form their own batch."""
    decoder, rest, answers = json.JSONDecoder(), await shell.run(SEQUENTIAL), []
    while rest:
        answer, end = decoder.raw_decode(rest)
        answers.append(answer)
        rest = rest[end:]
    for number, answer in enumerate(answers, 1):
        check(answer, f"Request {number} - What is Vector search?")
        info = answer["batch_info"]
        assert (info["batch_type"], info["batch_size"]) == ("max_wait_time_ms", 1)
        assert 450 <= info["batch_wait_time_ms"] <= 5000
    assert len({answer["batch_info"]["batch_id"] for answer in answers}) == 2


async def test_its_concurrent_script(shell: Shell, upstream: FakeTei) -> None:
    """Thirty concurrent requests reach the service in few calls of at most eight texts."""
    await shell.run(CONCURRENT)
    calls = [call for call in upstream.calls if call.path == "/embed"]
    texts = [text for call in calls for text in call.inputs]
    assert sorted(texts) == sorted(f"Request {number} - What is Vector search?" for number in range(1, 31))
    assert max(len(call.inputs) for call in calls) == 8
    assert len(calls) <= 12


async def test_its_health_and_its_errors(server: Server) -> None:
    """The statuses and bodies of the original's own tests, over HTTP."""
    assert (await asyncio.to_thread(server.request, "GET", "/health"))[::2] == (200, b"OK")
    for method, path, body, status, text in (
        ("GET", "/nonexistent", None, 404, "Not Found"),
        ("POST", "/embed", {}, 422, "Unprocessable Entity"),
        ("POST", "/embed", {"inputs": []}, 400, "`inputs` can't be empty"),
        ("POST", "/embed", {"inputs": ["a"] * 33}, 413, "`inputs` can't be greater than 32"),
    ):
        found, _, reply = await asyncio.to_thread(server.request, method, path, body)
        assert (found, json.loads(reply)) == (status, {"error": text})


async def test_batches_by_size_and_by_time(shoal_server: ShoalServer, upstream: FakeTei) -> None:
    """The original's own case: seven requests, batches of five, a wait of one second: five leave as a full batch, two
    after the wait."""
    flags = (*("--max-batch-size", "5"), *("--max-wait-time-ms", "1000"), *("--include-batch-info", "true"))
    address = ("--inference-url", f"{upstream.base}/embed")
    server = await asyncio.to_thread(shoal_server, [], "--as", "auto-batching-proxy", *flags, *address)
    calls = [asyncio.to_thread(server.request, "POST", "/embed", {"inputs": [f"text {number}"]}) for number in range(7)]
    answers = [json.loads(body) for _, _, body in await asyncio.gather(*calls)]
    for number, answer in enumerate(answers):
        check(answer, f"text {number}")
    kinds = [(answer["batch_info"]["batch_type"], answer["batch_info"]["batch_size"]) for answer in answers]
    assert sorted(kinds) == [("max_batch_size", 5)] * 5 + [("max_wait_time_ms", 2)] * 2


async def test_a_client_that_starts_right_after_listening(shoal_server: ShoalServer, upstream: FakeTei) -> None:
    """The original answers as soon as it listens: requests and /health wait for the service's first answer."""
    upstream.info_gate.clear()
    flags = ("--inference-url", f"{upstream.base}/embed", "--max-wait-time-ms", "0")
    server = await asyncio.to_thread(shoal_server, [], "--as", "auto-batching-proxy", *flags, wait=False)
    embedding = asyncio.create_task(asyncio.to_thread(server.request, "POST", "/embed", {"inputs": ["a"]}))
    health = asyncio.create_task(asyncio.to_thread(server.request, "GET", "/health"))
    await asyncio.to_thread(wait_until, lambda: upstream.looks > 0, server.process, server.log)
    models = await asyncio.to_thread(server.request, "GET", "/v1/models")  # it answers, and the others had time to
    assert (models[0], json.loads(models[2])["data"]) == (200, [])
    assert not embedding.done()
    assert not health.done()
    upstream.info_gate.set()
    status, _, body = await embedding
    assert status == 200, body
    check(json.loads(body), "a")
    assert (await health)[::2] == (200, b"OK")


async def test_a_service_that_is_not_there_at_the_start(shoal_server: ShoalServer, upstream: FakeTei) -> None:
    """A refused connection counts as an answer: 503 with the reason, at once."""
    await upstream.stop()
    address = ("--inference-url", f"{upstream.base}/embed")
    server = await asyncio.to_thread(shoal_server, [], "--as", "auto-batching-proxy", *address, wait=False)
    status, _, body = await asyncio.to_thread(server.request, "POST", "/embed", {"inputs": ["a"]})
    assert status == 503, body
    assert "is not reachable" in json.loads(body)["error"]
    assert (await asyncio.to_thread(server.request, "GET", "/health"))[0] == 503


async def test_one_bad_text_fails_alone(shoal_server: ShoalServer, upstream: FakeTei) -> None:
    """In the original it fails its whole batch."""
    flags = ("--inference-url", f"{upstream.base}/embed", "--max-wait-time-ms", "200")
    server = await asyncio.to_thread(shoal_server, [], "--as", "auto-batching-proxy", *flags)
    texts = ["good one", "poison-item", "good two"]
    calls = [asyncio.to_thread(server.request, "POST", "/embed", {"inputs": [text]}) for text in texts]
    answers = await asyncio.gather(*calls)
    assert [status for status, _, _ in answers] == [200, 424, 200]
    assert json.loads(answers[1][2])["error"].startswith("HTTP error: 424 Failed Dependency: ")
    check(json.loads(answers[2][2]), "good two")


async def test_the_service_goes_away(shoal_server: ShoalServer, upstream: FakeTei) -> None:
    """Requests at that moment may wait until their deadline; then requests and health return 503, until the service is
    back."""
    waits = ("--max-wait-time-ms", "0", "--inference-timeout-secs", "2")
    flags = ("--inference-url", f"{upstream.base}/embed", *waits)
    server = await asyncio.to_thread(shoal_server, [], "--as", "auto-batching-proxy", *flags)
    await upstream.stop()
    status, _, body = await asyncio.to_thread(server.request, "POST", "/embed", {"inputs": ["a"]})
    assert (status, json.loads(body)) == (408, {"error": "Request timed out"})
    status, _, body = await asyncio.to_thread(server.request, "POST", "/embed", {"inputs": ["a"]})
    assert status == 503, body
    assert json.loads(body)["error"].startswith("Network error: ")
    assert (await asyncio.to_thread(server.request, "GET", "/health"))[0] == 503
    await upstream.start()
    await asyncio.to_thread(wait_until, lambda: server.request("GET", "/health")[0] == 200, server.process, server.log)
    status, _, body = await asyncio.to_thread(server.request, "POST", "/embed", {"inputs": ["a"]})
    assert status == 200, body
