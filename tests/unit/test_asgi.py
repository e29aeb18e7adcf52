"""`shoal.asgi:app`: the lifespan, and who is answered without keys."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shoal.asgi import LifespanApp, _load, local_only


class Call:
    """One ASGI call and what was sent."""

    def __init__(self, **scope: Any) -> None:
        self.scope = {
            "type": "http",
            "method": "GET",
            "path": "/health/live",
            "http_version": "1.1",
            "headers": [(b"host", b"127.0.0.1")],
            "query_string": b"",
        } | scope
        self.received: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue()
        self.sent: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue()

    def start(self, asgi: Any) -> asyncio.Task[None]:
        return asyncio.ensure_future(asgi(self.scope, self.received.get, self.sent.put))

    async def status(self, asgi: Any) -> int:
        self.received.put_nowait({"type": "http.request", "body": b"", "more_body": False})
        await self.start(asgi)
        return int(self.sent.get_nowait()["status"])


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore a settings file in the current folder."""
    monkeypatch.chdir(tmp_path)


async def test_the_lifespan_starts_and_stops_the_application(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are answered only between startup and shutdown."""
    monkeypatch.setenv("SHOAL_MODELS", "fake:")
    asgi = LifespanApp(_load)
    with pytest.raises(RuntimeError, match="lifespan"):
        await Call().status(asgi)
    life = Call(type="lifespan")
    living = life.start(asgi)
    life.received.put_nowait({"type": "lifespan.startup"})
    assert (await life.sent.get())["type"] == "lifespan.startup.complete"
    assert await Call(server=("127.0.0.1", 80), client=("127.0.0.1", 5)).status(asgi) == 200
    life.received.put_nowait({"type": "lifespan.shutdown"})
    assert (await life.sent.get())["type"] == "lifespan.shutdown.complete"
    await living


async def test_remote_clients_need_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server also starts without a model if the default model is disabled."""
    monkeypatch.setenv("SHOAL_API_KEY", "s3cret")
    monkeypatch.setenv("SHOAL_DEFAULT_MODEL", "false")
    asgi = LifespanApp(_load)
    life = Call(type="lifespan")
    living = life.start(asgi)
    life.received.put_nowait({"type": "lifespan.startup"})
    assert (await life.sent.get())["type"] == "lifespan.startup.complete"
    outside = {"server": ("10.1.2.3", 80), "client": ("10.1.2.4", 5)}
    assert await Call(**outside).status(asgi) == 200
    assert await Call(**outside, path="/health/ready").status(asgi) == 200
    assert await Call(**outside, path="/v1/models").status(asgi) == 401
    life.received.put_nowait({"type": "lifespan.shutdown"})
    await living


async def test_grpc_needs_shoal_serve(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A setting without effect is reported."""
    monkeypatch.setenv("SHOAL_GRPC_PORT", "8001")
    monkeypatch.setenv("SHOAL_DEFAULT_MODEL", "false")
    asgi = LifespanApp(_load)
    life = Call(type="lifespan")
    living = life.start(asgi)
    life.received.put_nowait({"type": "lifespan.startup"})
    assert (await life.sent.get())["type"] == "lifespan.startup.complete"
    assert "gRPC is served by `shoal serve`" in caplog.text
    life.received.put_nowait({"type": "lifespan.shutdown"})
    await living


async def test_an_invalid_address_fails_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check needs no model to be loaded."""
    monkeypatch.setenv("SHOAL_MODELS", "tei+http://a,tei+http://b")
    life = Call(type="lifespan")
    life.received.put_nowait({"type": "lifespan.startup"})
    await life.start(LifespanApp(_load))
    sent = life.sent.get_nowait()
    assert sent["type"] == "lifespan.startup.failed"
    assert "NAME=tei+http://a,..." in sent["message"]


async def test_a_wrong_setting_fails_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server shows the message, and nothing is started."""
    monkeypatch.setenv("SHOAL_PORT", "eighty")
    life = Call(type="lifespan")
    life.received.put_nowait({"type": "lifespan.startup"})
    await life.start(LifespanApp(_load))
    sent = life.sent.get_nowait()
    assert sent["type"] == "lifespan.startup.failed"
    assert "SHOAL_PORT" in sent["message"]


@pytest.mark.parametrize(
    ("server", "status"),
    [
        (("127.0.0.1", 80), 200),
        (("::1", 80), 200),
        (("/run/shoal.sock", None), 200),
        (None, 200),
        (("10.1.2.3", 80), 403),
        (("fe80::1", 80), 403),
    ],
)
async def test_only_loopback_clients_need_no_key(server: tuple[str, int | None] | None, status: int) -> None:
    """The address on which the connection arrived decides; a server without one is an in-process client."""

    async def open_to_all(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    assert await Call(server=server).status(local_only(open_to_all)) == status


def test_importing_it_reads_and_starts_nothing() -> None:
    """A broken environment has no effect before the lifespan."""
    environment = {"SHOAL_PORT": "eighty", "SHOAL_CONFIG": "/nowhere.toml"}
    code = "import shoal.asgi, sys; assert 'openvino' not in sys.modules and 'onnx' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
