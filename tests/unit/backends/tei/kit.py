"""Engines over a server in this process, and batches for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shoal.backends.base.http_client import Client
from shoal.backends.tei.engine import TeiEngine
from shoal.backends.tei.http_link import HttpLink
from shoal.backends.tei.info import Info
from shoal.backends.tei.link import Link
from shoal.types import Array
from tests.fakes.tei import FakeTei

PATIENCE_S = 30.0


class FakeAdmission:
    """The check before a server may serve again; it raises `error`."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.calls = 0

    async def __call__(self, engine: TeiEngine) -> None:
        self.calls += 1
        assert not engine.ready()
        if self.error is not None:
            raise self.error


async def info_from(link: Link) -> Info:
    return await link.info(time.monotonic() + PATIENCE_S)


async def engine_of(
    server: FakeTei, admission: FakeAdmission | None = None, *, key: str | None = None, **more: Any
) -> TeiEngine:
    """Return an engine in service; `close` ends it."""
    link = HttpLink(Client(server.base, key=key or server.script.api_key or None, connect_timeout_s=PATIENCE_S))
    more.setdefault("serving", True)
    return TeiEngine(link, await info_from(link), "tei-0", admit=admission or FakeAdmission(), **more)


async def close(engine: TeiEngine) -> None:
    await engine.aclose()
    await engine.link.aclose()


def batch(items: Sequence[Any], *, pairs: bool = False) -> dict[str, Array]:
    """Return texts, lists of ids, or (with `pairs`) texts and pairs, as a pipeline passes them."""
    text, pair = np.empty(len(items), dtype=object), np.empty(len(items), dtype=object)
    for at, item in enumerate(items):
        text[at], pair[at] = item if isinstance(item, tuple) else (item, None)
    return {"text": text, "pair": pair} if pairs else {"text": text}


async def ask(
    engine: TeiEngine, items: Sequence[Any], output: str = "embedding", *, seconds: float = PATIENCE_S, **params: Any
) -> Array:
    inputs = batch(items, pairs=output == "scores")
    outputs = await engine.infer(inputs, [output], params, time.monotonic() + seconds)
    assert list(outputs) == [output]
    return outputs[output]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - the watch tells nobody
            await asyncio.sleep(0.001)
