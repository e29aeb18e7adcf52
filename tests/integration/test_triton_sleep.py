"""Models on Triton that sleep to make room for others, or when idle."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.integration.server_kit import Server
from tests.integration.triton_app_kit import (
    OTHER,
    TINY,
    Traffic,
    ask,
    cosines,
    embeddings,
    hub_of,
    serving,
    status_of,
    until,
    vectors,
)
from tests.integration.triton_kit import PATIENCE_S, Triton, triton_home

pytestmark = pytest.mark.timeout(PATIENCE_S)


@pytest.fixture
def env(tmp_path: Path) -> Iterator[dict[str, str]]:
    with hub_of(tmp_path / "hub") as hub:
        yield {"SHOAL_HOME": str(triton_home(tmp_path / "home")), "HF_ENDPOINT": hub}


@pytest.mark.parametrize("pushed", [False, True], ids=["written", "pushed"])
def test_one_place_for_two_models(triton: Triton, tmp_path: Path, env: dict[str, str], pushed: bool) -> None:
    """Loading the second puts the first to sleep, off Triton; a request wakes it, and puts the second to sleep."""
    place = ["--triton-url", triton.url] + ([] if pushed else ["--triton-repository", str(triton.repository)])
    with serving(tmp_path / "server", [TINY], "--max-loaded-models", "1", *place, env=env) as server:
        first = vectors(server, TINY, "fish")
        status, _, answer = ask(server, "POST", f"/v1/models/{OTHER}/load", {})
        assert status == 200, answer
        assert (status_of(server, TINY), on_triton(triton, TINY)) == ("sleeping", False)
        assert vectors(server, OTHER, "fish").shape == (1, 16)
        assert server.ready(), "one that sleeps is no reason to send nobody"
        assert cosines(vectors(server, TINY, "fish"), first)[0] > 0.99999
        assert (status_of(server, OTHER), on_triton(triton, OTHER)) == ("sleeping", False)
        assert on_triton(triton, TINY)
        with ThreadPoolExecutor(8) as pool:
            pending = [pool.submit(embeddings, server, name, "fish") for name in (TINY, OTHER) * 4]
            assert [each.result()[0] for each in pending] == [200] * 8
        for name in (TINY, OTHER):
            status, _, answer = ask(server, "DELETE", f"/v1/models/{name}", {})
            assert status == 200, answer
            assert not on_triton(triton, name)


def on_triton(triton: Triton, name: str) -> bool:
    """Return whether Triton serves the model; its index omits pushed models."""
    return triton.http("GET", f"/v2/models/{name.replace('/', '~')}/ready")[0] == 200


def test_an_idle_model_goes_to_sleep(triton: Triton, tmp_path: Path) -> None:
    """After keep_alive_s it is off Triton; it stays there while requests arrive; a request brings it back."""
    triton.load("near_free")
    with serving(tmp_path, [f"triton://{triton.url}#near_free"], "--keep-alive-s", "1") as server:
        with Traffic(server, "near_free", clients=2) as traffic:
            until_later(server, 2.0)
        assert traffic.failures == []
        until(lambda: triton.state("near_free") == "UNAVAILABLE", what="sleep")
        until(lambda: status_of(server, "near_free") == "sleeping", what="sleep")
        assert server.ready()
        assert vectors(server, "near_free", "a").shape == (1, 1024)
        assert triton.state("near_free") == "READY"


def until_later(server: Server, seconds: float) -> None:
    """Let time pass while the model stays awake."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert status_of(server, "near_free") == "loaded"
        time.sleep(0.1)
