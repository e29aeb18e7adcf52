"""Requests that arrive before the servers named at startup have responded for the first time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from shoal.app import App, open_app
from shoal.config import load
from tests.fakes.tei import FakeTei
from tests.fakes.tei_model import dense_of
from tests.surfaces.surface_kit import Answer, Exchange, request_scope
from tests.unit.backends.triton.open.kit import grpc_in_use
from tests.unit.core.conftest import until


@pytest.fixture
async def tei() -> AsyncIterator[FakeTei]:
    """A server whose first response is delayed."""
    async with FakeTei() as server:
        server.info_gate.clear()
        yield server


async def embed(app: App, model: str, **headers: str) -> Answer:
    body = json.dumps({"model": model, "input": "a", "encoding_format": "float"}).encode()
    sent = {"content-type": "application/json", "content-length": str(len(body))}
    sent |= {name.replace("_", "-"): text for name, text in headers.items()}
    exchange = Exchange([body])
    await app.asgi(request_scope("POST", "/v1/embeddings", sent), exchange.receive, exchange.send)
    return exchange.answer()


def vector_of(answer: Answer) -> Any:
    assert answer.status == 200, answer.body
    return answer.json()["data"][0]["embedding"]


@pytest.mark.parametrize("named", [False, True])
async def test_a_request_waits_for_the_first_response(tei: FakeTei, named: bool) -> None:
    """Requests wait for servers with an unknown model list and for those of a named model; others do not wait."""
    address, name = (f"m={tei.address}", "m") if named else (tei.address, "org/model")
    async with open_app(load({}, {}), ["other=fake:", address]) as app:
        pending = asyncio.create_task(embed(app, name))
        await until(lambda: tei.looks > 0)
        assert len(vector_of(await embed(app, "other"))) == 32
        assert not pending.done()
        tei.info_gate.set()
        assert np.allclose(vector_of(await pending), dense_of("a"), atol=1e-6)


@pytest.mark.parametrize("named", [False, True])
async def test_the_deadline_bounds_the_wait(tei: FakeTei, named: bool) -> None:
    """After the deadline the error names the server and asks to retry."""
    address = f"m={tei.address}" if named else tei.address
    async with open_app(load({}, {}), [address]) as app:
        answer = await embed(app, "m", x_request_timeout="0.05")
        assert answer.status == 503
        assert answer.headers["retry-after"] == "2"
        assert ("loading" if named else "not queried yet") in answer.json()["error"]["message"]


@pytest.mark.parametrize("scheme", ["tei+http", "openai+http", "triton"])
@pytest.mark.parametrize("named", [False, True])
async def test_a_refusal_ends_the_wait(scheme: str, named: bool, unused_tcp_port: int) -> None:
    """Every backend reports the reason at once, long before the deadline."""
    address = f"{scheme}://127.0.0.1:{unused_tcp_port}" + ("#m" if named else "")
    async with grpc_in_use(), open_app(load({}, {}), [f"m={address}" if named else address]) as app:
        answer = await asyncio.wait_for(embed(app, "m"), 20)
        assert answer.status == 503
        assert "is not reachable" in answer.json()["error"]["message"]
