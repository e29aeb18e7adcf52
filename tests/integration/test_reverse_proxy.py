"""`shoal serve` behind the committed configurations of nginx and Caddy, each run by the real program with TLS.

Only ports, paths and the certificate are replaced. All addresses of 127.0.0.0/8 are this machine's, so that the proxy,
its clients and a client that passes the proxy by are different peers.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPSConnection
from typing import Any

import httpx
import pytest

from tests.integration.llm_kit import MODEL, metric, running, user_messages
from tests.integration.proxy_kit import COMMANDS, Proxy, proxying
from tests.integration.server_kit import Server, wait_until

CLIENT, BYPASS = "127.0.0.7", "127.0.0.8"
"""A client of the proxy, and one that reaches Shoal directly. The proxy's own address is 127.0.0.1."""
TOKEN_MS = 60
SHORT_CHAT: Any = user_messages("a b c d e f g h i j")
LONG_CHAT: Any = user_messages("word " * 4000)
"""An answer of four minutes."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--client-header", "X-Real-IP", "--trusted-proxies", "127.0.0.1", "--log-format", "json")
    with running(tmp_path_factory.mktemp("shoal"), f"{MODEL}=fake:token_ms={TOKEN_MS}", flags=flags) as started:
        yield started


@pytest.fixture(scope="module", params=COMMANDS)
def proxy(request: pytest.FixtureRequest, server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    with proxying(request.param, server, tmp_path_factory.mktemp(request.param)) as found:
        yield found


def logged(server: Server, request_id: str) -> dict[str, Any]:
    """Return the line of the access log with this id, which may be written after the response."""
    lines: list[dict[str, Any]] = []

    def is_there() -> bool:
        records = (json.loads(line) for line in server.log.read_text().splitlines() if f'"{request_id}"' in line)
        lines[:] = [each for each in records if each.get("request_id") == request_id]
        return bool(lines)

    wait_until(is_there, server.process, server.log)
    return lines[0]


def embed_from(connection: HTTPConnection, request_id: str) -> int:
    """Embed on this connection with forged headers of a proxy, and return the status."""
    headers = {"content-type": "application/json", "x-request-id": request_id}
    forged = {"x-real-ip": "10.9.9.9", "x-forwarded-for": "10.9.9.9"}
    body = json.dumps({"model": MODEL, "input": "one"})
    try:
        connection.request("POST", "/v1/embeddings", body, headers | forged)
        return connection.getresponse().status
    finally:
        connection.close()


def test_embeddings_and_request_ids(proxy: Proxy) -> None:
    """A client's id of a request reaches Shoal and comes back; a request without one gets an id of the proxy."""
    mine = f"mine-{proxy.name}"
    with proxy.openai() as client:
        embeddings = client.embeddings.with_raw_response
        named = embeddings.create(model=MODEL, input=["one", "two"], extra_headers={"x-request-id": mine})
        unnamed = embeddings.create(model=MODEL, input="one").headers["x-request-id"]
    assert len(named.parse().data) == 2
    assert named.headers["x-request-id"] == mine
    assert unnamed and not unnamed.startswith("req_")
    assert logged(proxy.server, unnamed)["path"] == "/v1/embeddings"


def test_the_proxy_names_the_client(proxy: Proxy) -> None:
    """Shoal knows the address of the proxy's client, whatever addresses the client claims."""
    request_id = f"through-{proxy.name}"
    connection = HTTPSConnection("localhost", proxy.port, context=proxy.tls, source_address=(CLIENT, 0))
    assert embed_from(connection, request_id) == 200
    assert logged(proxy.server, request_id)["client"] == CLIENT


def test_only_the_proxy_names_the_client(server: Server) -> None:
    """A client that passes the proxy by cannot claim another address."""
    connection = HTTPConnection("127.0.0.1", server.port, source_address=(BYPASS, 0))
    assert embed_from(connection, "past-the-proxy") == 200
    assert logged(server, "past-the-proxy")["client"] == BYPASS


def test_a_chat_streams_in_pieces(proxy: Proxy) -> None:
    """Each event arrives when Shoal sends it; buffered, all would arrive at once."""
    with proxy.openai() as client:
        stream = client.chat.completions.create(model=MODEL, messages=SHORT_CHAT, stream=True)
        times = [time.monotonic() for chunk in stream if chunk.choices and chunk.choices[0].delta.content]
    assert len(times) >= 8
    assert times[-1] - times[0] > 4 * TOKEN_MS / 1000


def test_lines_of_ollama_stream_in_pieces(proxy: Proxy) -> None:
    """Streams that are not server-sent events are not buffered either."""
    body = {"model": MODEL, "messages": SHORT_CHAT}
    with proxy.http() as client, client.stream("POST", "/api/chat", json=body) as response:
        times = [time.monotonic() for _ in response.iter_lines()]
    assert len(times) >= 8
    assert times[-1] - times[0] > 4 * TOKEN_MS / 1000


def test_a_client_that_leaves_ends_its_generation(proxy: Proxy) -> None:
    """The proxy closes its connection to Shoal, which stops the model."""
    server = proxy.server
    with (
        proxy.openai() as client,
        client.chat.completions.create(model=MODEL, messages=LONG_CHAT, stream=True) as stream,
    ):
        next(iter(stream))
        assert metric(server, "shoal_requests_in_flight") == 1
    wait_until(lambda: metric(server, "shoal_requests_in_flight") == 0, server.process, server.log)


def test_large_bodies(proxy: Proxy) -> None:
    """Shoal's own limit decides, and its error is in the format of its API; nginx refuses a larger body."""
    with proxy.http() as client:

        def post(size: int) -> httpx.Response:
            return client.post("/v1/embeddings", json={"model": MODEL, "input": "a" * size})

        assert post(4_000_000).status_code == 200
        refused = post(17_000_000)
        assert refused.status_code == 413
        assert "max_body_bytes" in refused.json()["error"]["message"]
        too_large = post(19_000_000)
        assert too_large.status_code == 413
        # Caddy passes bodies on as they come, so that Shoal is the first to refuse.
        assert ("max_body_bytes" in too_large.text) is (proxy.name == "caddy")


def test_files_of_batches_may_be_larger(proxy: Proxy) -> None:
    """Files have their own limit, which is higher."""
    line = b'{"custom_id": "1", "method": "POST", "url": "/v1/embeddings", "body": {"model": "talker", "input": "a"}}\n'
    content = line * (24_000_000 // len(line))
    with proxy.openai() as client:
        assert client.files.create(file=("big.jsonl", content), purpose="batch").bytes == len(content)


def test_what_is_not_for_everyone(proxy: Proxy) -> None:
    """Without an admin key nobody changes models through the proxy; the page reads its live figures."""
    with proxy.http() as client:
        assert client.get("/metrics").status_code == 200
        assert client.get("/health/ready").status_code == 200
        assert client.post(f"/v1/models/{MODEL}/unload").status_code == 403


def test_protocols(proxy: Proxy) -> None:
    """Clients may speak HTTP/2, and HTTP without TLS is redirected."""
    context = proxy.tls
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("127.0.0.1", proxy.port)) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secure,
    ):
        assert secure.selected_alpn_protocol() == "h2"
    if proxy.plain:
        redirect = httpx.get(f"http://localhost:{proxy.plain}/v1/models")
        assert (redirect.status_code, redirect.headers["location"]) == (308, "https://localhost/v1/models")
