"""Health, readiness, metrics."""

from __future__ import annotations

from typing import Any

import pytest

from shoal._version import __version__
from shoal.core.registry import Model
from shoal.errors import ModelFileError
from shoal.types import ModelStats
from tests.surfaces.surface_kit import MODEL, serve


async def test_health() -> None:
    """Two bytes of text, as the oldest clients compare them; JSON if the client asks for it by name."""
    server = serve()
    answer = await server.call("GET", "/health", headers={"accept": "*/*"})
    assert (answer.status, answer.body, answer.headers["content-type"]) == (200, b"ok", "text/plain; charset=utf-8")
    answer = await server.call("GET", "/health", headers={"accept": "application/json"})
    assert answer.json() == {"status": "ok", "version": __version__, "models": {MODEL: "ready"}}


async def test_head() -> None:
    """HEAD answers like GET, without the body."""
    answer = await serve().call("HEAD", "/health")
    assert (answer.status, answer.body, answer.headers["content-length"]) == (200, b"", "2")


async def test_ready() -> None:
    """200 if every model can answer."""
    answer = await serve().call("GET", "/health/ready")
    assert (answer.status, answer.json()["status"]) == (200, "ready")


@pytest.mark.parametrize("fails", [False, True])
async def test_one_model_cannot_answer(fails: bool) -> None:
    """Not ready, with the reason for each model; still healthy, because another one answers."""
    server = serve()
    other = Model(name="other")
    server.gateway.registry.add(other)
    if fails:
        other.mark_failed(ModelFileError("is missing", file="config.json"))
    answer = await server.call("GET", "/health/ready")
    assert answer.status == 503
    reason = "config.json: is missing" if fails else "loading"
    assert answer.json()["status"] == ("failed" if fails else "loading")
    assert answer.json()["models"] == {MODEL: "ready", "other": reason}
    assert (await server.call("GET", "/health")).status == 200


async def test_no_model_can_answer() -> None:
    """503 from /health as well, with the reason as text or JSON; the process is still live."""
    server = serve()
    server.gateway.registry.remove(server.model)
    server.gateway.registry.add(Model(name="slow"))
    answer = await server.call("GET", "/health")
    assert (answer.status, answer.body) == (503, b"slow: loading")
    answer = await server.call("GET", "/health", headers={"accept": "application/json"})
    assert (answer.status, answer.json()["status"]) == (503, "loading")
    assert (await server.call("GET", "/health/live")).body == b"ok"


async def test_a_loaded_model_that_cannot_answer() -> None:
    """It makes the server unhealthy and not ready, and no list calls it loaded."""
    server = serve()
    server.runner.able = False
    answer = await server.call("GET", "/health")
    assert answer.status == 503
    assert answer.body.startswith(b"all-MiniLM-L6-v2: it is loaded but does not respond: see the server's log")
    answer = await server.call("GET", "/health/ready")
    assert (answer.status, answer.json()["status"]) == (503, "failed")
    assert "does not respond" in answer.json()["models"][MODEL]
    for path in ("/v1/models", "/models"):
        (entry,) = (await server.call("GET", path)).json()["data"]
        assert (entry["status"]["value"], entry["status"]["failed"]) == ("unloaded", True)
        assert "does not respond" in entry["status"]["error"]
    entry = (await server.call("GET", f"/v1/models/{MODEL}")).json()
    assert entry["status"]["failed"] is True
    server.runner.able = True
    assert (await server.call("GET", "/health")).status == 200


async def test_a_sleeping_model_can_answer() -> None:
    """It wakes for a request, so the server is healthy and ready."""
    server = serve()
    server.model.is_sleeping = True
    server.model.transition("unload")
    assert (await server.call("GET", "/health")).status == 200
    answer = await server.call("GET", "/health/ready")
    assert (answer.status, answer.json()["models"]) == (200, {MODEL: "sleeping"})
    server.model.transition("closed")
    assert (await server.call("GET", "/health/ready")).json()["models"] == {MODEL: "sleeping"}
    server.model.transition("load")
    server.model.note = "compiling"
    assert (await server.call("GET", "/health/ready")).json()["models"] == {MODEL: "loading: compiling"}


async def test_a_pending_source() -> None:
    """Not ready, with the reason under the source's name."""
    server = serve()
    server.gateway.pending_sources["triton://gpu:8001"] = "connection refused"
    answer = await server.call("GET", "/health/ready")
    assert (answer.status, answer.json()["status"]) == (503, "loading")
    assert answer.json()["models"] == {MODEL: "ready", "[address hidden]": "connection refused"}
    assert (await server.call("GET", "/health")).status == 200


async def test_draining() -> None:
    """Not ready, but live."""
    server = serve()
    server.gateway.draining = True
    answer = await server.call("GET", "/health/ready")
    assert (answer.status, answer.json()["status"]) == (503, "draining")
    assert (await server.call("GET", "/health/live")).status == 200


async def test_metrics() -> None:
    """The app's metrics in Prometheus' text format; without a source the route does not exist."""
    answer = await serve(metrics=lambda _: b"shoal_up 1\n").call("GET", "/metrics")
    assert (answer.status, answer.body) == (200, b"shoal_up 1\n")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert (await serve().call("GET", "/metrics")).status == 404


PROMETHEUS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"


@pytest.mark.parametrize(
    ("default", "query", "accept", "json"),
    [
        ("prometheus", "", None, False),
        ("prometheus", "", "*/*", False),
        ("prometheus", "", "application/json", True),
        ("prometheus", "?format=json", PROMETHEUS, True),
        ("prometheus", "?format=prometheus", "application/json", False),
        ("json", "", None, True),
        ("json", "", "*/*", True),
        ("json", "", PROMETHEUS, False),
        ("json", "", "text/html,application/xhtml+xml,*/*;q=0.8", False),
        ("json", "?format=prometheus", None, False),
    ],
)
async def test_metrics_format(default: Any, query: str, accept: str | None, json: bool) -> None:
    """The query decides, then a named type, then the preset."""
    server = serve(metrics=lambda _: b"shoal_up 1\n", metrics_default=default)
    answer = await server.call("GET", f"/metrics{query}", headers={} if accept is None else {"accept": accept})
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("application/json" if json else "text/plain")


async def test_unknown_metrics_format() -> None:
    """400."""
    answer = await serve(metrics=lambda _: b"").call("GET", "/metrics?format=xml")
    assert (answer.status, answer.json()["error"]["param"]) == (400, "format")


async def test_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway's statistics of its models, in the JSON that Triton's clients write for ModelStatistics."""
    server = serve(metrics=lambda _: b"")

    async def statistics() -> list[ModelStats]:
        return [ModelStats(name="a", version="1", inference_count=2**40), ModelStats(name="b")]

    monkeypatch.setattr(server.gateway, "statistics", statistics)
    answer = await server.call("GET", "/metrics?format=json")
    first, second = answer.json()["model_stats"]
    assert (first["name"], first["version"], first["inference_count"]) == ("a", "1", "1099511627776")
    assert set(second) == {"name", "inference_stats"}


@pytest.mark.parametrize("query", ["", "?format=json"])
async def test_names_of_statistics(monkeypatch: pytest.MonkeyPatch, query: str) -> None:
    """In inference-server's format, statistics have the models' Triton names, unless the client asks for JSON by
    name."""
    server = serve(metrics=lambda _: b"", metrics_default="json")
    names = ["org/m", "ViT-B-32/laion/text_encoder"]

    async def statistics() -> list[ModelStats]:
        return [ModelStats(name=name) for name in names]

    monkeypatch.setattr(server.gateway, "statistics", statistics)
    reported = [each["name"] for each in (await server.call("GET", f"/metrics{query}")).json()["model_stats"]]
    assert reported == (names if query else ["org_m", "ViT-B-32_laion_text_encoder"])


async def test_statistics_of_a_real_gateway() -> None:
    """The model's requests are counted, whatever runs it."""
    answer = await serve(metrics=lambda _: b"").call("GET", "/metrics", headers={"accept": "application/json"})
    assert [each["name"] for each in answer.json()["model_stats"]] == [MODEL]


async def test_health_of_other_servers() -> None:
    """triton-openai has it under /v1 as well; inference-server answers an object if the client names no type."""
    server = serve(metrics_default="json")
    for path in ("/health", "/v1/health"):
        assert (await serve().call("GET", path)).body == b"ok"
        assert (await server.call("GET", path)).json() == {"message": "The server is running."}
