"""Workers of `shoal bulk --ray`, without Ray: how they share a cluster, and whether they are equal."""

from __future__ import annotations

import sys

import pytest

from shoal import config
from shoal.bulk.computing import Column, Task
from shoal.bulk.run import BLOCK_ROWS, blocks_in_flight
from shoal.cli.bulk import _collect_resources
from shoal.errors import ConfigError
from shoal.ray.bulk import Job, Ready, Resources, find_difference, open_workers, plan_cores


@pytest.mark.parametrize(
    ("nodes", "workers", "cores"),
    [
        ([8.0], 2, 4),
        ([8.0], 3, 2),
        ([2.0], 2, 1),
        ([3.0, 3.0], 3, 1),  # with two each, only one would fit a machine
        ([16.0, 4.0], 4, 4),
        ([16.0, 4.0], 5, 4),
        ([1.0], 2, 0),
        ([], 1, 0),
    ],
)
def test_workers_share_the_cores_of_machines(nodes: list[float], workers: int, cores: int) -> None:
    """Each has the same number, and all fit."""
    assert plan_cores(nodes, workers) == cores


def test_workers_with_other_models_do_not_share_a_run() -> None:
    ready = Ready("1.0", {"id": "m", "precision": "bf16"}, 512, {})
    assert find_difference(ready, ready) == ""
    assert "precision is bf16 on one worker and f32" in find_difference(
        ready, ready._replace(facts={"id": "m", "precision": "f32"})
    )
    assert "Shoal 1.1" in find_difference(ready, ready._replace(version="1.1"))


@pytest.mark.parametrize(("calls", "texts", "blocks"), [(4, 512, 2), (8, 512, 3), (64, 512, 17), (16, 1, 2)])
def test_blocks_in_flight_feed_all_calls(calls: int, texts: int, blocks: int) -> None:
    async def call(_: object) -> dict[str, Column]:
        return {}

    assert blocks_in_flight(Task(call, texts, calls, {}), BLOCK_ROWS) == blocks


def test_flags() -> None:
    """They mean nothing without --ray."""
    assert _collect_resources(None, None, None) is None
    assert _collect_resources(2, None, None) == Resources(2)
    assert _collect_resources(2, 1.5, 0.5) == Resources(2, 1.5, 0.5)
    with pytest.raises(ConfigError, match="--ray-gpus has no effect without --ray"):
        _collect_resources(None, None, 1.0)


async def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install -e '.\[ray\]'"):
        async with open_workers(Job(config.load({}, {}, None), "fake:", "embed", {}, 16), Resources(1)):
            pass
