"""auto-batching-proxy's two routes, as its README, types and tests define them."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from shoal.backends.fake.model import FakeScript
from shoal.core.gateway import Gateway
from shoal.core.lane_runner import LaneRunner
from shoal.core.registry import Model, Registry
from shoal.errors import (
    DeadlineExceeded,
    EmptyInput,
    EngineFailed,
    InputRejected,
    InternalError,
    ModelFailed,
    ModelNotReady,
    NotFinite,
    Overloaded,
    ShoalError,
    TooLong,
    TransportFailed,
    Unavailable,
    UpstreamRefused,
)
from shoal.http.openapi import OpenApi
from shoal.surfaces import Options, build_app, build_surfaces
from shoal.surfaces.proxy.auto_batching import AutoBatchingProxy
from shoal.types import BatchFacts
from tests.surfaces.surface_kit import FACTS, MODEL, Exchange, RecordingRunner, Server, request_scope, vector
from tests.unit.core.conftest import Run, until, virtual
from tests.unit.core.lanes import engine, make_lane

__all__ = ["virtual"]  # pytest finds fixtures by their names in this module

DIALECT = "auto-batching-proxy"


def proxy(runner: RecordingRunner | None = None, *, batched: LaneRunner | None = None, **options: Any) -> Server:
    """A server under the preset, whose model is ready; `batched` replaces the scripted runner."""
    runner = runner or RecordingRunner()
    registry = Registry()
    model = Model(name=MODEL)
    registry.add(model)
    model.mark_loaded(batched or runner)
    gateway = Gateway(registry)
    settings = Options(**{"embed_dialect": DIALECT, "max_inputs": 32, **options})
    surfaces = build_surfaces(settings)
    return Server(build_app(gateway, [*surfaces, OpenApi(surfaces)], settings), runner, gateway, model)


async def test_embeddings() -> None:
    """One vector per text, in an object with no other field; fields that only TEI has are ignored, like in the
    original."""
    server = proxy()
    body = {"inputs": ["ab", "cd"], "truncate": True, "normalize": False, "prompt_name": "query", "dimensions": 2}
    answer = await server.call("POST", "/embed", body)
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.body == b'{"embeddings":[[1.0,24.25,24.375,-0.5],[1.0,24.75,24.875,-0.5]]}'
    (task,) = server.runner.tasks
    assert (task.inputs, task.normalize, task.truncate, task.prompt_name) == (["ab", "cd"], True, None, None)
    assert task.dimensions is None
    assert answer.headers["x-shoal-batch-size"] == "7"
    assert answer.headers["x-shoal-cached"] == "0"


async def test_many_texts() -> None:
    """A request with the maximum number of texts is answered over several slices of the response."""
    texts = [f"text {number}" for number in range(200)]
    answer = await proxy(max_inputs=200).call("POST", "/embed", {"inputs": texts})
    assert answer.json() == {"embeddings": [vector(text) for text in texts]}


class _Flush(RecordingRunner):
    """A runner that returns the given batch facts."""

    def __init__(self, facts: BatchFacts) -> None:
        super().__init__()
        self.batch = facts

    async def run(self, task: Any, ctx: Any) -> Any:
        return msgspec.structs.replace(await super().run(task, ctx), facts=self.batch)


@pytest.mark.parametrize(
    ("flush", "expected"),
    [
        (
            "full",
            {"batch_id": 42, "batch_type": "max_batch_size", "batch_size": 3, "inference_time_ms": 3.75},
        ),
        *(
            (
                flush,
                {
                    "batch_id": 42,
                    "batch_type": "max_wait_time_ms",
                    "batch_size": 3,
                    "batch_wait_time_ms": 1,
                    "inference_time_ms": 3.75,
                },
            )
            for flush in ("age", "idle")
        ),
    ],
)
async def test_batch_info(flush: str, expected: dict[str, Any]) -> None:
    """`batch_info` is sent if enabled, with keys in order; the real wait is included only if the batch was not full."""
    facts = msgspec.structs.replace(FACTS, flush=flush, requests=3)
    answer = await proxy(_Flush(facts), batch_info=True).call("POST", "/embed", {"inputs": ["a"]})
    reply = answer.json()
    assert list(reply) == ["embeddings", "batch_info"]
    assert reply["batch_info"] == expected
    assert list(reply["batch_info"]) == list(expected)


def test_equal_texts_in_batch_info(virtual: Run[None]) -> None:
    """The batch size counts requests: each request with the same text once, and a request that repeats a text once."""

    async def main() -> None:
        lane = make_lane(FakeScript(delay_ms=20, dimension=4))
        server = proxy(batched=LaneRunner(lane, RecordingRunner().facts), batch_info=True)
        first = asyncio.create_task(server.call("POST", "/embed", {"inputs": ["first"]}))
        await until(lambda: bool(engine(lane).running))
        groups = [["same"], ["same"], ["own", "own"]]
        answers = await asyncio.gather(*(server.call("POST", "/embed", {"inputs": texts}) for texts in groups))
        reply = [(await first).json(), *(answer.json() for answer in answers)]
        assert [each["batch_info"]["batch_size"] for each in reply] == [1, 3, 3, 3]
        assert len({each["batch_info"]["batch_id"] for each in reply[1:]}) == 1
        assert [size for size, _ in engine(lane).batches] == [1, 2]
        await lane.aclose()

    virtual(main)


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (b'{"inputs": []}', 400, "`inputs` can't be empty"),
        (b'{"inputs": [' + b'"a",' * 20 + b'"a"]}', 413, "`inputs` can't be greater than 20"),
        (b'{"inputs": ["dummy plain text}', 400, "Bad Request"),
        (b"dummy plain text", 400, "Bad Request"),
        (b"", 400, "Bad Request"),
        (b"{}", 422, "Unprocessable Entity"),
        (b'{"inputs": "one text"}', 422, "Unprocessable Entity"),
        (b'{"inputs": [1]}', 422, "Unprocessable Entity"),
        (b'["a"]', 422, "Unprocessable Entity"),
        (b'{"inputs": ["' + b"a" * 2000 + b'"]}', 413, "Payload Too Large"),
    ],
)
async def test_refusals(body: bytes, status: int, text: str) -> None:
    """Status and message are those of the original's tests and web framework, in an object with `error` alone."""
    server = proxy(max_inputs=20, max_body_bytes=1500)
    answer = await server.call("POST", "/embed", body=body, headers={"content-type": "application/json"})
    assert (answer.status, answer.json()) == (status, {"error": text})
    assert answer.headers["content-type"] == "application/json"
    assert not server.runner.tasks


async def test_the_maximum_number_of_texts() -> None:
    answer = await proxy(max_inputs=20).call("POST", "/embed", {"inputs": ["a"] * 20})
    assert len(answer.json()["embeddings"]) == 20


async def test_plain_text() -> None:
    """400, like in the original, whatever the body: another site's page can send text/plain without a preflight."""
    for body in (b"blah", b'{"inputs": ["a"]}'):
        answer = await proxy().call("POST", "/embed", body=body, headers={"content-type": "text/plain"})
        assert (answer.status, answer.json()) == (400, {"error": "Bad Request"})


@pytest.mark.parametrize(
    ("method", "path", "status", "text"),
    [("GET", "/nonexistent", 404, "Not Found"), ("GET", "/embed", 405, "Method Not Allowed")],
)
async def test_unknown_routes(method: str, path: str, status: int, text: str) -> None:
    """Unknown paths get the original's errors, too."""
    answer = await proxy().call(method, path)
    assert (answer.status, answer.json()) == (status, {"error": text})


@pytest.mark.parametrize(
    ("error", "status", "start"),
    [
        (InputRejected("bad text"), 422, 'HTTP error: 422 Unprocessable Entity: {"error":"bad text"'),
        (TooLong("600 tokens"), 422, 'HTTP error: 422 Unprocessable Entity: {"error":"600 tokens"'),
        (EmptyInput("empty", param="text"), 400, 'HTTP error: 400 Bad Request: {"error":"empty","error_type":"Empty"}'),
        (EngineFailed("broke"), 424, 'HTTP error: 424 Failed Dependency: {"error":"broke","error_type":"Backend"}'),
        (NotFinite("NaN"), 424, "HTTP error: 424 Failed Dependency: "),
        (Overloaded("full", retry_after=2), 429, "HTTP error: 429 Too Many Requests: "),
        (TransportFailed("gone"), 503, "Network error: gone"),
        (Unavailable("draining"), 503, "Network error: draining"),
        (ModelNotReady("loading"), 503, "Network error: loading"),
        (ModelFailed("no"), 503, "Network error: no"),
        (DeadlineExceeded("late"), 408, "Request timed out"),
        (InternalError("bug"), 500, "HTTP error: 500 Internal Server Error: "),
        (UpstreamRefused("no", status=418, body=b"teapot"), 418, "HTTP error: 418 I'm a Teapot: teapot"),
        (UpstreamRefused("no", status=599, body=b""), 599, "HTTP error: 599 <unknown status code>: "),
    ],
)
async def test_errors_of_the_model(error: ShoalError, status: int, start: str) -> None:
    """Errors match those the original reports for its inference service; a timeout is 408."""
    answer = await proxy(RecordingRunner(error=error)).call("POST", "/embed", {"inputs": ["a"]})
    assert answer.status == status
    assert answer.json()["error"].startswith(start)
    assert set(answer.json()) == {"error"}


async def test_overload_names_a_retry_time() -> None:
    answer = await proxy(RecordingRunner(error=Overloaded("full", retry_after=2))).call(
        "POST", "/embed", {"inputs": ["a"]}
    )
    assert answer.headers["retry-after"] == "2"


async def test_no_model() -> None:
    """Without a model, the inference service counts as unreachable."""
    server = proxy()
    server.gateway.registry.remove(server.model)
    answer = await server.call("POST", "/embed", {"inputs": ["a"]})
    assert answer.status == 503
    assert answer.json()["error"].startswith("Network error: ")


class TestHealth:
    async def test_ok(self) -> None:
        answer = await proxy().call("GET", "/health")
        assert (answer.status, answer.body, answer.headers["content-type"]) == (200, b"OK", "text/plain; charset=utf-8")

    async def test_a_model_that_cannot_answer(self) -> None:
        """503 with the reason, although the original still reports OK."""
        answer = await proxy(RecordingRunner(able=False)).call("GET", "/health")
        assert answer.status == 503
        assert answer.json()["error"].startswith(f"{MODEL}: it is loaded but does not respond")

    async def test_an_unreachable_backend(self) -> None:
        """The reason is shown, without any hint that its model is ready."""
        server = proxy(RecordingRunner(able=False))
        server.gateway.pending_sources["tei+http://there"] = "connection refused"
        error = (await server.call("GET", "/health")).json()["error"]
        assert "[address hidden]: connection refused" in error
        assert "ready" not in error

    async def test_a_pending_source(self) -> None:
        server = proxy()
        server.gateway.registry.remove(server.model)
        assert (await server.call("GET", "/health")).json() == {"error": "no model is served"}
        server.gateway.pending_sources["tei+http://there"] = "connection refused"
        answer = await server.call("GET", "/health")
        assert (answer.status, answer.json()) == (503, {"error": "[address hidden]: connection refused"})

    async def test_draining(self) -> None:
        """While it shuts down, the server reports 503, so that load balancers stop sending requests."""
        server = proxy()
        server.gateway.draining = True
        answer = await server.call("GET", "/health")
        assert (answer.status, answer.json()) == (503, {"error": "the server is shutting down"})


class TestKeys:
    async def test_a_key_is_required(self) -> None:
        """The error has the original's format; health needs no key."""
        server = proxy(api_key=("k",))
        answer = await server.call("POST", "/embed", {"inputs": ["a"]})
        assert (answer.status, answer.json()) == (401, {"error": "Unauthorized"})
        assert answer.headers["www-authenticate"] == "Bearer"
        right = await server.call("POST", "/embed", {"inputs": ["a"]}, headers={"authorization": "Bearer k"})
        assert right.status == 200
        assert (await server.call("GET", "/health")).status == 200


class TestOtherRoutes:
    """Routes that the preset changes, and those that it does not."""

    async def test_tei_embed_without_the_dialect(self) -> None:
        """The default dialect returns a bare array."""
        answer = await proxy(embed_dialect="tei").call("POST", "/embed", {"inputs": ["ab"]})
        assert answer.json() == [vector("ab")]

    async def test_other_routes_are_unchanged(self) -> None:
        """OpenAI's routes, TEI's others and readiness keep their own error formats."""
        server = proxy()
        answer = await server.call("POST", "/v1/embeddings", {"model": MODEL, "input": "ab"})
        assert answer.json()["data"][0]["embedding"] == vector("ab")
        assert (await server.call("POST", "/v1/embeddings", {"model": MODEL})).json()["error"]["type"]
        assert (await server.call("GET", "/info")).json()["model_id"]
        assert (await server.call("GET", "/health/ready")).json()["status"] == "ready"

    async def test_openapi_describes_the_dialect(self) -> None:
        """/embed appears once, with this surface's bodies."""
        server = proxy()
        paths = (await server.call("GET", "/openapi.json")).json()["paths"]
        shown = paths["/embed"]["post"]["responses"]
        assert shown["200"]["content"]["application/json"]["schema"]["$ref"].endswith("ProxyResponse")
        assert set(shown["422"]["content"]) == {"application/json"}
        assert "/embed_all" in paths

    async def test_disconnect_cancels_work(self) -> None:
        """The original would keep computing."""
        server = proxy(RecordingRunner(release=asyncio.Event()))
        exchange = Exchange([b'{"inputs": ["a"]}'])
        headers = {"host": "127.0.0.1:8080", "content-type": "application/json"}
        scope = request_scope("POST", "/embed", headers)
        call = asyncio.create_task(server.app(scope, exchange.receive, exchange.send))
        await server.runner.begun.wait()
        exchange.leave()
        await call
        assert server.runner.cancelled == 1


async def test_every_refusal_is_declared() -> None:
    """Every error that the endpoint answers is in its operation."""
    (embed, _) = AutoBatchingProxy(Options()).routes(Gateway(Registry()))
    assert {400, 408, 413, 422, 424, 429, 500, 503} <= set(embed.errors)
