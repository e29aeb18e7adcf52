"""What only Helm itself shows (`make test-helm`): the committed manifests are what it renders, and what it refuses."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from tests.unit.deploy.chart import CASES, CHART, KEYS, RENDERED, RENEW, render, render_case

RAY: dict[str, Any] = {
    "auth": KEYS,
    "models": [{"name": "a", "backends": ["hf:a/b"]}],
    "ray": {"enabled": True, "authSecret": "shoal-ray"},
}
GROUP = {"name": "a", "replicas": 2, "resources": {}}


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
        ({**RAY, "ray": {"enabled": True}}, "ray.authSecret"),
        ({**RAY, "models": [{"name": "a"}]}, "name at least one model with backends"),
        ({**RAY, "fullnameOverride": "a" * 48}, "fullnameOverride"),
        ({**RAY, "fullnameOverride": "1a"}, "fullnameOverride"),
        ({**RAY, "autoscaling": {"kind": "hpa"}}, "autoscaling.kind must be none"),
        ({**RAY, "grpc": {"enabled": True}}, "grpc.enabled"),
        ({**RAY, "extraArgs": ["--no-access-log"]}, "extraArgs"),
        ({**RAY, "auth": {"insecure": True}, "serviceMonitor": {"enabled": True}}, "serviceMonitor.enabled"),
        ({**RAY, "gpu": {"enabled": True}}, "gpu.enabled needs a group"),
        ({**RAY, "ray": {**RAY["ray"], "workerGroups": [{**GROUP, "maxReplicas": 1}]}}, "replicas of a must be"),
        ({**RAY, "ray": {**RAY["ray"], "workerGroups": [{**GROUP, "minReplicas": 3}]}}, "replicas of a must be"),
        ({**RAY, "ray": {**RAY["ray"], "workerGroups": [GROUP, GROUP]}}, "a is there twice"),
    ],
    ids=str,
)
def test_refused_values(values: dict[str, Any], message: str) -> None:
    """Values that cannot work are refused with a message that names them."""
    done = render(values)
    assert done.returncode != 0
    assert message in done.stderr
