"""One model on two Tritons."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from tests.integration.server_kit import Server
from tests.integration.triton_app_kit import Traffic, logged, serving, until, vectors
from tests.integration.triton_kit import PATIENCE_S, OwnTriton, Triton

pytestmark = pytest.mark.timeout(PATIENCE_S)

ONES = "made = np.ones((len(texts), 1024), np.float32)"
OTHERS = "made = np.arange(1024, dtype=np.float32) * np.ones((len(texts), 1), np.float32)"


def change(triton: Triton, old: str, new: str) -> None:
    """Replace a line of near_free, and reload it."""
    path = triton.repository / "near_free" / "1" / "model.py"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    triton.load("near_free")


def executed(triton: Triton) -> int:
    _, answer = triton.http("GET", "/v2/models/near_free/stats")
    return int(answer["model_stats"][0]["inference_count"])


def both_work(server: Server, *tritons: Triton) -> bool:
    """Return whether a burst reaches both."""
    before = [executed(each) for each in tritons]
    vectors(server, "both", [f"text {number}" for number in range(2000)], dimensions=2)
    return all(executed(each) > count for each, count in zip(tritons, before, strict=True))


def test_replicas_agree_or_do_not_join(own_triton: OwnTriton, tmp_path: Path) -> None:
    """A replica with other vectors is kept out, with a log line; once it has the right ones it joins. When one is
    killed under load, no request fails."""
    first, second = own_triton(), own_triton()
    change(second, ONES, OTHERS)
    first.load("near_free")
    address = f"both=triton://{first.url}#near_free,triton://{second.url}#near_free"
    with serving(tmp_path / "server", [address]) as server:
        until(lambda: "both-1 returns different vectors than the other replicas" in logged(server), what="the refusal")
        probed = executed(second)
        rows = vectors(server, "both", [f"text {number}" for number in range(500)])
        assert np.ptp(rows[:, 1:], axis=1).max() < 1e-6, "all from the first"
        assert executed(second) - probed < 100, "probes alone"
        change(second, OTHERS, ONES)
        until(lambda: "both-1 is in service" in logged(server), what="the second replica")
        until(lambda: both_work(server, first, second), what="work for both")
        with Traffic(server, "both") as traffic:
            traffic.more()
            os.kill(first.pid, signal.SIGKILL)
            time.sleep(0.5)
            traffic.more(100)
            until(lambda: logged(server).count("both-0 is in service") == 1, what="the return of the first")
            traffic.more(100)
        assert traffic.failures == []
        until(lambda: both_work(server, first, second), what="work for both")
        assert "Traceback" not in logged(server)
