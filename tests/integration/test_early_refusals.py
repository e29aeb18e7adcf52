"""Real clients that upload a large body get the error response, whether or not they read before they have sent it."""

from __future__ import annotations

import asyncio
import io
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import httpx
import pytest
import requests

from tests.integration.server_kit import Server, ShoalServer

PIECE = b" " * 65_536
PIECES = 320  # 20 MB; a socket's buffers hold less
JSON = {"content-type": "application/json"}
RIGHT, WRONG = {**JSON, "authorization": "Bearer sesame"}, {**JSON, "authorization": "Bearer other"}
CASES = [
    ("POST", "/v1/embeddings", WRONG, 401),
    ("POST", "/v1/nothing", RIGHT, 404),
    ("PUT", "/v1/embeddings", RIGHT, 405),
    ("POST", "/v1/embeddings", RIGHT, 413),
    ("POST", "/v1/embeddings", {**RIGHT, "content-encoding": "gzip"}, 415),
]


@pytest.fixture
def server(shoal_server: ShoalServer) -> Server:
    return shoal_server(["fake:"], "--api-key", "sesame", "--max-body-bytes", "1000000")


def pieces() -> Iterator[bytes]:
    for _ in range(PIECES):
        yield PIECE


async def slowly() -> AsyncIterator[bytes]:
    for piece in pieces():
        yield piece


def test_requests(server: Server) -> None:
    """requests reads only after sending everything. The next request of the same session succeeds."""
    with requests.Session() as session:
        for method, path, headers, status in CASES:
            for body in (PIECE * PIECES, pieces()):
                reply = session.request(method, server.base_url + path, data=body, headers=headers, timeout=30)
                assert (reply.status_code, "error" in reply.json()) == (status, True)
        assert session.get(f"{server.base_url}/health/live", timeout=30).status_code == 200


def test_httpx(server: Server) -> None:
    with httpx.Client(timeout=30) as session:
        for method, path, headers, status in CASES:
            for body in (PIECE * PIECES, pieces()):
                reply = session.request(method, server.base_url + path, content=body, headers=headers)
                assert (reply.status_code, "error" in reply.json()) == (status, True)
        assert session.get(f"{server.base_url}/health/live").status_code == 200


async def test_aiohttp(server: Server) -> None:
    async with aiohttp.ClientSession() as session:
        for method, path, headers, status in CASES:
            for body in (io.BytesIO(PIECE * PIECES), slowly()):
                async with session.request(method, server.base_url + path, data=body, headers=headers) as reply:
                    assert (reply.status, "error" in await reply.json()) == (status, True)
        async with session.get(f"{server.base_url}/health/live") as reply:
            assert reply.status == 200
    # Its connections close once the server has discarded the rest of the body, which takes up to a second.
    await asyncio.sleep(1.5)


@pytest.mark.parametrize("expect", ["100-continue", ""])
def test_curl(server: Server, tmp_path: Path, expect: str) -> None:
    """With `Expect: 100-continue` curl never sends the body; without it, curl sends and reads at the same time."""
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    file = tmp_path / "body"
    file.write_bytes(PIECE * PIECES)
    for method, path, headers, status in CASES:
        sent = [f"-H{name}: {value}" for name, value in {"expect": expect, **headers}.items()]
        flags = ["--expect100-timeout", "30", "-w", "\n%{http_code} %{size_upload}", "--noproxy", "*"]
        done = subprocess.run(
            [curl, "-sS", "-X", method, *sent, *flags, "--data-binary", f"@{file}", server.base_url + path],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        body, _, figures = done.stdout.rpartition("\n")
        code, uploaded = figures.split()
        assert (int(code), '"error"' in body) == (status, True)
        if expect:
            assert int(uploaded) == 0
