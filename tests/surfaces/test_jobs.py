"""Long actions: a request waits for them without a deadline, or polls a job."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shoal.core.protocols import Observer
from shoal.errors import SourceError
from tests.surfaces.life_kit import OTHER, Scripted, living
from tests.surfaces.surface_kit import MODEL, Exchange, request_scope, serve
from tests.unit.core.conftest import run_virtual

LOAD = "/load_sentence_transformer_model"
BODY = {"model_name": OTHER}


@pytest.mark.parametrize("wait", ["false", "0"])
async def test_without_waiting(wait: str) -> None:
    """202 with a job at once; polling shows its progress and its end."""
    loader = Scripted(hold=asyncio.Event())
    async with living(loader) as life:
        answer = await life.manage("POST", f"{LOAD}?wait={wait}", BODY)
        job = answer.json()
        assert (answer.status, answer.headers["location"]) == (202, f"/jobs/{job['job']}")
        assert (job["action"], job["model"], job["state"]) == ("load", OTHER, "running")
        await loader.begun.wait()
        running = (await life.call("GET", answer.headers["location"])).json()
        progress = (running["stage"], running["progress"], running["done"], running["total"])
        assert progress == ("downloading model.onnx", 0.25, 30, 120)
        assert "finished" not in running
        assert loader.hold is not None
        loader.hold.set()
        await life.lifecycle.job(job["job"]).wait()
        ended = (await life.call("GET", answer.headers["location"])).json()
        assert (ended["state"], ended["changed"], ended["progress"]) == ("done", True, 1.0)
        assert ended["finished"] >= ended["created"]


@pytest.mark.parametrize(
    ("method", "path", "body", "action"),
    [
        ("POST", "/unload_model", {"model_name": MODEL}, "unload"),
        ("POST", "/delete_model", {"model_name": MODEL}, "delete"),
        ("POST", "/v1/models", {"model": OTHER}, "download"),
        ("POST", f"/v1/models/{OTHER}/load", None, "load"),
        ("POST", f"/v1/models/{MODEL}/unload", None, "unload"),
        ("DELETE", f"/v1/models/{MODEL}", None, "delete"),
    ],
)
async def test_every_action_can_be_polled(method: str, path: str, body: Any, action: str) -> None:
    """Every route of both dialects accepts `wait=false`."""
    async with living() as life:
        answer = await life.manage(method, f"{path}?wait=false", body)
        assert (answer.status, answer.json()["action"]) == (202, action)
        await life.lifecycle.job(answer.json()["job"]).wait()


async def test_a_failed_job_has_a_reason() -> None:
    async with living(Scripted(error=SourceError("no such model"))) as life:
        job = (await life.manage("POST", f"{LOAD}?wait=false", BODY)).json()["job"]
        with pytest.raises(SourceError):
            await life.lifecycle.job(job).wait()
        ended = (await life.call("GET", f"/jobs/{job}")).json()
        assert (ended["state"], ended["error"]) == ("failed", "no such model")
        assert "changed" not in ended


async def test_list_of_jobs() -> None:
    """All jobs, in the order of their start."""
    async with living() as life:
        first = (await life.manage("POST", f"{LOAD}?wait=false", BODY)).json()["job"]
        second = (await life.manage("POST", "/unload_model?wait=false", BODY)).json()["job"]
        jobs = [each["job"] for each in (await life.call("GET", "/jobs")).json()["jobs"]]
        assert jobs[-2:] == [first, second]


async def test_unknown_job() -> None:
    """404 with a `detail`."""
    async with living() as life:
        answer = await life.call("GET", "/jobs/job_0")
        assert answer.status == 404
        assert set(answer.json()) == {"detail"}


async def test_invalid_wait() -> None:
    """Nothing starts if `wait` is invalid."""
    async with living() as life:
        answer = await life.manage("POST", f"{LOAD}?wait=perhaps", BODY)
        assert (answer.status, answer.json()) == (400, {"detail": "wait='perhaps' is neither true nor false."})
        assert life.loader.touched == []


async def test_a_disconnect_does_not_stop_the_load() -> None:
    """Others may have joined it, and the next request finds it done."""
    loader = Scripted(hold=asyncio.Event())
    async with living(loader) as life:
        exchange = Exchange([b'{"model_name":"%b"}' % OTHER.encode()])
        headers = {"host": "localhost", "content-type": "application/json"}
        task = asyncio.create_task(
            life.server.app(request_scope("POST", LOAD, headers), exchange.receive, exchange.send)
        )
        await loader.begun.wait()
        exchange.leave()
        await task
        assert exchange.answer().status == 499
        assert loader.hold is not None
        loader.hold.set()
        (job,) = [each for each in life.lifecycle.jobs() if each.model == OTHER]
        await job.wait()
        assert (await life.call("POST", "/infer_text", {**BODY, "text": "a"})).status == 200


def test_loads_ignore_the_request_deadline() -> None:
    """A load may take minutes, whatever the timeout for embeddings is."""

    async def load_for_minutes() -> int:
        loader = Scripted(hold=asyncio.Event())
        async with living(loader, embed_timeout_s=0.001, body_timeout_s=0.02) as life:
            loading = asyncio.create_task(life.server.call("POST", LOAD, BODY, headers={"x-request-timeout": "1e-9"}))
            await loader.begun.wait()
            await asyncio.sleep(300)
            assert loader.hold is not None
            loader.hold.set()
            return (await loading).status

    assert run_virtual(load_for_minutes) == 200


class Refusals(Observer):
    def __init__(self) -> None:
        self.reasons: list[str] = []

    def refused(self, reason: str, surface: str = "") -> None:
        self.reasons.append(reason)


async def test_a_failed_load_is_no_rejected_request() -> None:
    """The metric counts requests rejected before they start: a bad name is one, a failed load is not."""
    observer = Refusals()
    async with living(Scripted(error=SourceError("no such model"))) as life:
        life.server.gateway._observer = observer
        await life.manage("POST", LOAD, BODY)
        assert observer.reasons == []
        await life.manage("POST", LOAD, {"model_name": ".."})
        assert observer.reasons == ["invalid_value"]


async def test_a_server_of_fixed_models_has_no_jobs() -> None:
    """The error says so."""
    answer = await serve().call("GET", "/jobs")
    assert (answer.status, "fixed set of models" in answer.json()["detail"]) == (400, True)
