"""What all surfaces share: limits, ids, deadlines, unknown paths and disconnects."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import orjson
import pytest

from shoal.core.gateway import Gateway
from shoal.core.protocols import Observer, Operation
from shoal.core.registry import Registry
from shoal.errors import ShoalError
from shoal.http import body
from shoal.http.application import LARGE_BODY
from shoal.http.disconnect import WATCH_DELAY_S
from shoal.surfaces import Application, Options, Reply, Request, build_app
from shoal.types import Result, TaskKind, TrafficClass
from tests.surfaces.surface_kit import MODEL, Exchange, RecordingRunner, raising, request_scope, serve

ASK = {"input": "ab", "model": MODEL}
EMBEDDERS: list[tuple[str, Any]] = [
    ("/v1/embeddings", ASK),
    ("/embed", {"inputs": "ab"}),
    ("/v1/embedding", [{"query": "ab"}]),
]


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/v1/embeddings", "application/json"), ("/embed", "text/plain"), ("/v1/embedding", "application/json")],
)
async def test_large_bodies_are_not_read(path: str, kind: str) -> None:
    """A stated length of 40 MB gets a 413 in the dialect before a byte is read; then the connection is closed."""
    server = serve()
    exchange = Exchange([b"x" * 1000] * 100)
    await server.app(request_scope("POST", path, {"content-length": "40000000"}), exchange.receive, exchange.send)
    answer = exchange.answer()
    assert answer.status == 413
    assert answer.headers["content-type"].startswith(kind)
    assert answer.headers["connection"] == "close"
    assert int(answer.headers["content-length"]) == len(answer.body)
    assert exchange.reads_before_answer == 0


async def test_bodies_beyond_the_pending_limit_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """If other bodies being received fill the limit, the stated length alone gives a 429. Small bodies pass."""
    unfinished = body.PendingBodies(1_000_000)
    unfinished.add(0, 900_000)
    monkeypatch.setattr(body, "_PENDING_BODIES", unfinished)
    exchange = Exchange([b"x" * 1000] * 100)
    await serve().app(request_scope("POST", "/embed", {"content-length": "200000"}), exchange.receive, exchange.send)
    assert (exchange.answer().status, exchange.reads_before_answer) == (429, 0)
    assert (await serve().call("POST", "/v1/embeddings", ASK)).status == 200


async def test_the_rest_of_a_rejected_body_is_read() -> None:
    """The rest is read and discarded before the connection is closed: a reset would cost the client the reply."""
    exchange = Exchange([b"x" * 1000] * 100)
    scope = request_scope("POST", "/embed", {"content-length": "40000000"})
    await serve().app(scope, exchange.receive, exchange.send)
    assert (exchange.answer().status, exchange.reads) == (413, 100)


async def test_clients_that_wait_for_100_continue() -> None:
    """After `Expect: 100-continue` nothing is read, because reading would tell the client to send."""
    exchange = Exchange([b"x"])
    scope = request_scope("POST", "/embed", {"content-length": "40000000", "expect": "100-continue"})
    await serve().app(scope, exchange.receive, exchange.send)
    assert (exchange.answer().status, exchange.reads) == (413, 0)


async def test_clients_that_never_stop_sending(monkeypatch: pytest.MonkeyPatch) -> None:
    """Discarding the rest stops after a number of bytes or seconds."""
    monkeypatch.setattr(body, "LINGER_BYTES", 5000)
    exchange = Exchange([b"x" * 1000] * 100)
    scope = request_scope("POST", "/embed", {"content-length": "40000000"})
    await serve().app(scope, exchange.receive, exchange.send)
    assert exchange.reads == 5
    monkeypatch.setattr(body, "LINGER_S", 0.001)
    exchange = Exchange([b"x"], silent=True)
    await serve().app(scope, exchange.receive, exchange.send)
    assert exchange.answer().status == 413


async def test_chunked_bodies_are_counted() -> None:
    """Without a length the bytes are counted, and reading stops at the limit."""
    server = serve(max_body_bytes=1000)
    exchange = Exchange([b"x" * 400] * 100)
    scope = request_scope("POST", "/v1/embeddings", {"transfer-encoding": "chunked"})
    await server.app(scope, exchange.receive, exchange.send)
    answer = exchange.answer()
    assert (answer.status, answer.headers["connection"], exchange.reads_before_answer) == (413, "close", 3)
    assert answer.json()["error"]["code"] == "request_too_large"


async def test_one_large_message_is_counted() -> None:
    """The limit also applies if the server passes the body in one message."""
    answer = await serve(max_body_bytes=1000).call("POST", "/embed", body=[b"x" * 1001])
    assert answer.status == 413


async def test_bodies_in_pieces() -> None:
    """A body that arrives in many pieces is joined."""
    body = orjson.dumps(ASK)
    answer = await serve().call("POST", "/v1/embeddings", body=[body[at : at + 1] for at in range(len(body))])
    assert answer.status == 200


async def test_body_at_the_limit() -> None:
    """A body of exactly the limit is allowed."""
    body = orjson.dumps(ASK)
    assert (await serve(max_body_bytes=len(body)).call("POST", "/v1/embeddings", body=body)).status == 200
    assert (await serve(max_body_bytes=len(body) - 1).call("POST", "/v1/embeddings", body=body)).status == 413


async def test_large_bodies_are_decoded_one_per_iteration() -> None:
    """The loop serves others in between, however many bodies arrive at the same time."""
    server = serve()
    exchanges = [Exchange([orjson.dumps({"input": "x" * LARGE_BODY, "model": MODEL})]) for _ in range(5)]
    scope = request_scope("POST", "/v1/embeddings", {"content-type": "application/json"})
    calls = [asyncio.create_task(server.app(scope, each.receive, each.send)) for each in exchanges]
    begun = []
    while not all(call.done() for call in calls):
        before = len(server.runner.tasks)
        await asyncio.sleep(0)
        begun.append(len(server.runner.tasks) - before)
    assert sum(begun) == 5
    assert max(begun) == 1


async def test_slow_bodies() -> None:
    """A body that does not arrive in time is a 408, and the connection is closed."""
    server = serve(body_timeout_s=0.01)
    exchange = Exchange([b"x"], silent=True)
    scope = request_scope("POST", "/v1/embeddings", {"content-length": "5"})
    await server.app(scope, exchange.receive, exchange.send)
    answer = exchange.answer()
    assert (answer.status, answer.headers["connection"]) == (408, "close")
    assert answer.json()["error"]["type"] == "timeout"


@pytest.mark.parametrize(("path", "status"), [("/v1/embeddings", 415), ("/embed", 415), ("/v1/embedding", 400)])
@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br"])
async def test_compressed_bodies(path: str, status: int, encoding: str) -> None:
    """Compressed bodies are rejected, with the name of the encoding."""
    answer = await serve().call("POST", path, body=b"{}", headers={"content-encoding": encoding})
    assert answer.status == status
    assert encoding in answer.body.decode()


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("Application/JSON", 200),
        ("application/vnd.api+json", 200),
        ("", 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
    ],
)
async def test_content_types(kind: str, status: int) -> None:
    """JSON by any of its names, or no content type; others are rejected."""
    body = orjson.dumps(ASK)
    answer = await serve().call("POST", "/v1/embeddings", body=body, headers={"content-type": kind} if kind else {})
    assert answer.status == status
    if status == 415:
        assert answer.json()["error"]["code"] == "unsupported_content_type"


async def test_request_ids() -> None:
    """A valid id from the client is kept, others are replaced; the id is on every reply and reaches the runner."""
    server = serve()
    answer = await server.call("POST", "/v1/embeddings", ASK, headers={"x-request-id": "abc-1"})
    assert answer.headers["x-request-id"] == server.runner.contexts[0].id == "abc-1"
    new_ids = set()
    for bad in ("", "a b", "x" * 129, "\xe9", 'a\x00"'):
        answer = await server.call("GET", "/nowhere", headers={"x-request-id": bad})
        new_ids.add(answer.headers["x-request-id"])
        assert answer.headers["x-request-id"].startswith("req_")
    assert len(new_ids) == 5


@pytest.mark.parametrize(
    ("header", "seconds"),
    [(None, 30.0), ("5", 5.0), ("0.5", 0.5), ("60", 30.0), ("nan", 30.0), ("-1", 30.0), ("x", 30.0)],
)
async def test_one_deadline(header: str | None, seconds: float) -> None:
    """The server's timeout, or the client's if shorter, counted from the request's arrival."""
    server = serve()
    before = time.monotonic()
    await server.call("POST", "/v1/embeddings", ASK, headers={"x-request-timeout": header} if header else {})
    deadline = server.runner.contexts[0].deadline
    assert before + seconds <= deadline <= time.monotonic() + seconds


@pytest.mark.parametrize(("class_name", "traffic"), [("interactive", "interactive"), ("bulk", "bulk"), ("gold", None)])
async def test_class(class_name: str, traffic: str | None) -> None:
    """`x-shoal-class` reaches the planner; an unknown class is ignored."""
    server = serve()
    await server.call("POST", "/v1/embeddings", ASK, headers={"x-shoal-class": class_name})
    assert server.runner.contexts[0].traffic == traffic


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/unknown", 404),
        ("POST", "/v1/models/x", 405),
        ("GET", "/v1/embeddings", 405),
        ("OPTIONS", "/v1/embeddings", 405),
        ("BREW", "/v1/embeddings", 405),
        ("GET", "/v1/embeddings/x", 404),
        ("GET", "//", 404),
    ],
)
async def test_unknown_paths_and_methods(method: str, path: str, status: int) -> None:
    """JSON in OpenAI's format on paths without another owner, and no redirect anywhere."""
    answer = await serve().call(method, path)
    assert answer.status == status
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert ("allow" in answer.headers) == (status == 405)


async def test_errors_are_rendered_by_the_owner_of_the_path() -> None:
    """A wrong method, or a path below a known one, is answered in that path's dialect."""
    server = serve()
    answer = await server.call("GET", "/embed")
    assert (answer.status, answer.headers["allow"], answer.json()["error_type"]) == (405, "POST", "Validation")
    assert (await server.call("GET", "/health/unknown")).json()["error"]["code"] == "unknown_url"
    assert set((await server.call("GET", "/v1/embedding/x")).json()) == {"msg"}
    for method, path in (("GET", "/api/x"), ("POST", "/api/x/y"), ("GET", "/api/me"), ("PUT", "/api/tags")):
        answer = await server.call(method, path)
        assert (answer.status in (404, 405), [*answer.json()]) == (True, ["error"])
        assert isinstance(answer.json()["error"], str), path
    assert (await server.call("GET", "/v1/x")).json()["error"]["code"] == "unknown_url"
    assert (await server.call("POST", "/health")).headers["allow"] == "GET, HEAD"


class RecordingObserver(Observer):
    def __init__(self) -> None:
        self.entries: list[str] = []
        self.surfaces: set[str] = set()

    def refused(self, reason: str, surface: str = "") -> None:
        self.entries.append(f"refused {reason}")
        self.surfaces.add(surface)

    def accepted(self, model: str, task: TaskKind, items: int, traffic: TrafficClass, surface: str = "") -> None:
        self.entries.append("accepted")
        self.surfaces.add(surface)

    def finished(
        self, model: str, task: TaskKind, outcome: str, seconds: float, result: Result | None, surface: str = ""
    ) -> None:
        self.entries.append(outcome)
        self.surfaces.add(surface)


@pytest.mark.parametrize(
    ("call", "entries"),
    [
        ({"path": "/v1/embeddings", "json": {"model": "mini", "input": "a"}}, ["accepted", "ok"]),
        ({"path": "/v1/embeddings", "json": {"model": "other", "input": "a"}}, ["refused model_not_found"]),
        ({"path": "/v1/embeddings", "json": {"model": "mini", "input": []}}, ["refused empty"]),
        ({"path": "/v1/embeddings", "body": b"{"}, ["refused malformed"]),
        ({"path": "/nowhere", "json": {}}, ["refused route_not_found"]),
        ({"path": "/v1/embeddings", "json": {}, "headers": {"host": "evil.example"}}, ["refused forbidden"]),
    ],
)
async def test_every_request_is_counted_once(call: dict[str, Any], entries: list[str]) -> None:
    """A request is either rejected, or accepted and finished; it is counted exactly once, whatever rejected it."""
    observer = RecordingObserver()
    await serve(observer=observer).call("POST", **call)
    await asyncio.sleep(0)  # the count is reported after the answer
    assert observer.entries == entries
    assert observer.surfaces == {"openai"}


async def test_root_path() -> None:
    """Behind a proxy that adds a prefix, routes match without it."""
    answer = await serve().call("GET", "/ai/v1/models", root_path="/ai")
    assert answer.status == 200


@pytest.mark.parametrize(("path", "body"), EMBEDDERS)
async def test_bugs(path: str, body: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A bug is a 500 in the dialect: the log has the traceback with the request's id, the client only the id."""
    answer = await raising(ZeroDivisionError("secret")).call("POST", path, body)
    assert answer.status == 500
    assert b"secret" not in answer.body
    assert answer.headers["x-request-id"].encode() in answer.body
    assert answer.headers["x-request-id"] in caplog.text
    assert "ZeroDivisionError" in caplog.text


async def test_security_header() -> None:
    """Browsers do not guess content types."""
    for path in ("/health", "/nowhere", "/v1/models"):
        assert (await serve().call("GET", path)).headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(("path", "body"), EMBEDDERS)
async def test_disconnect_during_the_work(path: str, body: Any) -> None:
    """The work is cancelled; no task is left behind, and the caller of the app is not cancelled."""
    runner = RecordingRunner(release=asyncio.Event())
    server = serve(runner)
    exchange = Exchange([orjson.dumps(body)])
    before = asyncio.all_tasks()
    request = asyncio.create_task(server.app(request_scope("POST", path, {}), exchange.receive, exchange.send))
    await runner.begun.wait()
    exchange.leave()
    await request
    assert runner.cancelled == 1
    assert not request.cancelled()
    assert request.cancelling() == 0
    await run_pending_tasks()
    assert asyncio.all_tasks() == before


async def test_disconnect_during_the_body() -> None:
    """An incomplete body starts no work."""
    server = serve()
    exchange = Exchange([b"{", b"}"])
    exchange._pieces.pop()
    exchange.leave()

    async def receive() -> dict[str, Any]:
        message = await exchange.receive()
        return {**message, "more_body": True} if message["type"] == "http.request" else message

    await server.app(request_scope("POST", "/v1/embeddings", {}), receive, exchange.send)
    assert server.runner.tasks == []


async def test_slow_answers_leave_no_tasks() -> None:
    """A request that outlasts the watch delay and is answered leaves no task behind."""
    runner = RecordingRunner(release=asyncio.Event())
    server = serve(runner)
    before = asyncio.all_tasks()
    request = asyncio.create_task(server.call("POST", "/v1/embeddings", ASK))
    await runner.begun.wait()
    assert runner.release is not None
    asyncio.get_running_loop().call_later(WATCH_DELAY_S * 2, runner.release.set)
    assert (await request).status == 200
    await run_pending_tasks()
    assert asyncio.all_tasks() == before


async def test_cancellation_from_outside_passes() -> None:
    """Cancellation by a stopping server is not taken for a disconnect."""
    runner = RecordingRunner(release=asyncio.Event())
    request = asyncio.create_task(serve(runner).call("POST", "/v1/embeddings", ASK))
    await runner.begun.wait()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert runner.cancelled == 1


async def test_access_log(caplog: pytest.LogCaptureFixture) -> None:
    """One record per request, with what operators need; never the input."""
    server = serve()
    with caplog.at_level(logging.INFO, logger="shoal.access"):
        await server.call("POST", "/v1/embeddings", {"input": ["secret", "b"], "model": "mini"})
        await server.call("GET", "/nowhere")
    first, second = (record.__dict__ for record in caplog.records if record.name == "shoal.access")
    expected = {"method": "POST", "path": "/v1/embeddings", "status": 200, "model": MODEL, "items": 2, "tokens": 7}
    expected |= {"batch_size": 7, "queue_ms": 1.25, "client": "127.0.0.1"}
    assert {name: first[name] for name in expected} == expected
    assert first["ms"] > 0
    assert first["request_id"].startswith("req_")
    assert (second["status"], second["model"], second["batch_size"]) == (404, "", 0)
    assert "secret" not in caplog.text


async def test_probes_are_logged_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    """Probes every few seconds do not fill the log, but are visible at debug."""
    server = serve(metrics=lambda _: b"")
    paths = ["/health", "/health/live", "/health/ready", "/metrics"]
    for level, expected_paths in ((logging.INFO, []), (logging.DEBUG, paths)):
        caplog.clear()
        with caplog.at_level(level, logger="shoal.access"):
            for path in paths:
                await server.call("GET", path)
        assert [record.__dict__["path"] for record in caplog.records if record.name == "shoal.access"] == expected_paths
        assert {record.levelno for record in caplog.records} <= {logging.DEBUG}


async def test_fairness_counts_by_client() -> None:
    """The key, else the trusted header, else the peer's address; an untrusted header is ignored."""
    server = serve(api_key=("k1", "k2"), client_header="X-User")
    for key in ("k1", "k2", "k1"):
        headers = {"authorization": f"Bearer {key}", "x-user": "anna"}
        await server.call("POST", "/v1/embeddings", ASK, headers=headers)
    one, two, three = (context.client for context in server.runner.contexts)
    assert one == three != two
    assert one.startswith("key:")
    assert "k1" not in one
    open_server = serve(client_header="X-User")
    await open_server.call("POST", "/v1/embeddings", ASK, headers={"x-user": "anna"})
    await open_server.call("POST", "/v1/embeddings", ASK)
    assert [context.client for context in open_server.runner.contexts] == ["anna", "127.0.0.1"]
    server = serve()
    await server.call("POST", "/v1/embeddings", ASK, headers={"x-user": "anna"})
    assert server.runner.contexts[0].client == "127.0.0.1"


@pytest.mark.parametrize(
    ("proxies", "client"),
    [(("127.0.0.1",), "anna"), (("10.0.0.0/8", "127.0.0.0/8"), "anna"), (("10.0.0.0/8", "::1"), "127.0.0.1")],
    ids=str,
)
async def test_only_a_trusted_proxy_names_the_client(proxies: tuple[str, ...], client: str) -> None:
    """The header of any other peer is ignored: clients that reach the server directly cannot choose their name."""
    server = serve(client_header="X-User", trusted_proxies=proxies)
    await server.call("POST", "/v1/embeddings", ASK, headers={"x-user": "anna"})
    assert server.runner.contexts[0].client == client


class Streamer:
    """A surface with one route, which streams."""

    name = "streamer"
    error = None

    def __init__(self, fail: bool = False) -> None:
        self.closed = False
        self.fail = fail
        self.waits = asyncio.Event()

    def routes(self, gateway: Gateway) -> Sequence[Operation]:
        return [Operation(method="GET", path="/stream", endpoint=self.start, summary="Stream", access="public")]

    def render_error(self, error: ShoalError) -> tuple[int, dict[str, str], bytes]:
        return 500, {}, error.message.encode()

    async def start(self, request: Request) -> Reply:
        return Reply(200, [(b"content-type", b"text/event-stream")], self.pieces())

    async def pieces(self) -> AsyncIterator[bytes]:
        try:
            yield b"one "
            if self.fail:
                await self.waits.wait()
            yield b"two"
        finally:
            self.closed = True

    def app(self) -> Application:
        return build_app(Gateway(Registry()), [self], Options())


async def test_streams() -> None:
    """Pieces are sent as they come, without a length; HEAD sends none and still closes the source."""
    for method, text in (("GET", b"one two"), ("HEAD", b"")):
        streamer = Streamer()
        exchange = Exchange([b""])
        await streamer.app()(request_scope(method, "/stream", {}), exchange.receive, exchange.send)
        answer = exchange.answer()
        assert (answer.status, answer.body) == (200, text)
        assert "content-length" not in answer.headers


async def test_disconnect_during_a_stream() -> None:
    """The stream's source is closed, and nothing more is sent."""
    streamer = Streamer(fail=True)
    exchange = Exchange([b""])
    request = asyncio.create_task(streamer.app()(request_scope("GET", "/stream", {}), exchange.receive, exchange.send))
    await run_pending_tasks()
    assert len(exchange.messages) == 2
    exchange.leave()
    await request
    assert streamer.closed
    assert len(exchange.messages) == 2


async def test_a_stream_that_breaks(caplog: pytest.LogCaptureFixture) -> None:
    """After the first byte no error can be sent, so the HTTP server gets it and closes the connection."""

    async def broken(request: Request) -> Reply:
        async def pieces() -> AsyncIterator[bytes]:
            yield b"one"
            raise ZeroDivisionError

        return Reply(200, [], pieces())

    streamer = Streamer()
    streamer.start = broken  # type: ignore[method-assign]
    exchange = Exchange([b""])
    with pytest.raises(ZeroDivisionError):
        await streamer.app()(request_scope("GET", "/stream", {}), exchange.receive, exchange.send)
    assert [each["type"] for each in exchange.messages] == ["http.response.start", "http.response.body"]
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize(
    ("kind", "events", "answers"),
    [
        ("lifespan", ["startup", "shutdown"], ["lifespan.startup.complete", "lifespan.shutdown.complete"]),
        ("websocket", ["connect"], ["websocket.close"]),
    ],
)
async def test_other_protocols(kind: str, events: list[str], answers: list[str]) -> None:
    """Any ASGI server can start and stop the app; a websocket is rejected."""
    names = iter(events)
    sent: list[str] = []

    async def receive() -> Any:
        return {"type": f"{kind}.{next(names)}"}

    async def send(message: Any) -> None:
        sent.append(message["type"])

    await Streamer().app()({"type": kind, "path": "/stream", "headers": [], "state": {}}, receive, send)
    assert sent == answers


async def run_pending_tasks() -> None:
    """Let every task that can continue do so."""
    for _ in range(5):
        await asyncio.sleep(0)
