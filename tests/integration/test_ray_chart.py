"""Whether Ray Serve and Shoal accept what the chart's RayService configures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.ray.scaling import QueuePolicy
from tests.unit.deploy.chart import CASES, ON_RAY
from tests.unit.deploy.test_helm import manifests
from tests.unit.deploy.test_ray import deployments, mounts, serve_config

pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")


@pytest.fixture
def args(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Lay out the files of a case's pods under `tmp_path`, and return the application's arguments with their paths."""
    case: str = request.param
    (application,) = serve_config(case)["applications"]
    found: dict[str, Any] = application["args"]
    (mount,) = (each for each in mounts(case) if each["name"] == "config")
    assert found["file"] == f"{mount['mountPath']}/shoal.toml"
    found["file"] = str(tmp_path / "shoal.toml")
    (tmp_path / "shoal.toml").write_text(manifests(case)["ConfigMap"]["data"]["shoal.toml"])
    for name in ("api_key_file", "admin_key_file"):
        if name in found["settings"]:
            file = tmp_path / name
            file.touch(mode=0o600)
            file.write_text("a-key\n")
            found["settings"][name] = str(file)
    return found


@pytest.mark.parametrize("case", ON_RAY)
def test_serve_accepts_the_configuration(case: str) -> None:
    """Ray Serve parses the file, and every scaled model uses Shoal's policy."""
    from ray.serve.config import AutoscalingConfig
    from ray.serve.schema import ServeDeploySchema

    parsed = ServeDeploySchema.model_validate(serve_config(case))
    assert [each.import_path for each in parsed.applications] == ["shoal.ray:build"]
    assert [each.name for each in parsed.applications[0].deployments] == list(deployments(case))
    scaled = [each["autoscaling_config"] for each in deployments(case).values() if "autoscaling_config" in each]
    assert scaled
    for each in scaled:
        assert AutoscalingConfig.model_validate(each).policy.get_policy() is QueuePolicy


@pytest.mark.parametrize("args", ON_RAY, indirect=True)
def test_shoal_builds_the_application(args: dict[str, Any], request: pytest.FixtureRequest) -> None:
    """`shoal.ray.build` takes the arguments, and makes the deployments that the configuration names."""
    from shoal.ray import build

    case = request.node.callspec.params["args"]
    front = build(args)._bound_deployment
    bound: Any = front.init_args
    loaded, models = bound
    made = {front.name, *(each._bound_deployment.name for each in models.values())}
    assert made == deployments(case).keys()
    assert loaded.settings.api_key
    assert str(loaded.settings.home) == "/var/lib/shoal"
    if case == "ray-gpu":
        assert loaded.settings.engine == "torch"
        assert (loaded.settings.embed_timeout_s, loaded.settings.access_log) == (12.5, False)
        assert loaded.settings.drain_timeout_s == CASES[case]["drain"]["timeoutSeconds"]
        assert loaded.table("org/large").prompts == {"query": "query: ", "document": "passage: <é>"}
