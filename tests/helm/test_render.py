"""What only Helm itself shows (`make test-helm`): the committed manifests are what it renders, and what it refuses."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from tests.unit.deploy.chart import CASES, CHART, KEYS, RENDERED, RENEW, render, render_case


@pytest.mark.parametrize("case", CASES)
def test_the_committed_manifests(case: str) -> None:
    """Helm renders the committed manifests."""
    assert render_case(case) == (RENDERED / f"{case}.yaml").read_text(), RENEW


def test_lint() -> None:
    """Helm finds nothing to complain about."""
    done = subprocess.run(["helm", "lint", "--strict", str(CHART)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "auth.apiKeys.existingSecret"),
        ({"auth": KEYS, "settings": {"max_batch_sizes": 1}}, "max_batch_sizes"),
        ({"auth": KEYS, "settings": {"hf_token": "secret"}}, "hf_token"),
        ({"auth": KEYS, "models": [{"name": "a"}, {"name": "a"}]}, "a is there twice"),
        ({"auth": KEYS, "autoscaling": {"kind": "keda"}}, "autoscaling.keda.serverAddress"),
        ({"auth": KEYS, "autoscaling": {"minReplicas": 9}}, "autoscaling.minReplicas"),
        ({"auth": KEYS, "serviceMonitor": {"enabled": True}}, "serviceMonitor.bearerTokenSecret"),
        ({"auth": KEYS, "ingress": {"enabled": True}}, "ingress.hosts"),
        ({"auth": KEYS, "grpc": {"port": 8080}}, "/grpc/port"),
    ],
    ids=str,
)
def test_refused_values(values: dict[str, Any], message: str) -> None:
    """Values that cannot work are refused with a message that names them."""
    done = render(values)
    assert done.returncode != 0
    assert message in done.stderr
