"""The RayService that Helm made of the chart: fields that KubeRay knows, and pods that Kubernetes accepts. Whether Ray
Serve and `shoal.ray.build` accept its configuration: tests/integration/test_ray_chart.py.

Kubernetes' own schemas do not have KubeRay's kinds, so the fields are listed here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]  # it has no types
import msgspec
import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]  # it has no types

from tests.unit.deploy.chart import CASES, ON_RAY
from tests.unit.deploy.test_helm import VALUES_SCHEMA, VERSIONS, manifests

SPEC_FIELDS = {
    "rayClusterDeletionDelaySeconds",
    "upgradeStrategy",
    "excludeHeadPodFromServeSvc",
    "serveService",
    "serveConfigV2",
    "rayClusterConfig",
}
CLUSTER_FIELDS = {
    "rayVersion",
    "authOptions",
    "gcsFaultToleranceOptions",
    "enableInTreeAutoscaling",
    "autoscalerOptions",
    "headGroupSpec",
    "workerGroupSpecs",
}
AUTOSCALER_FIELDS = {
    *("version", "idleTimeoutSeconds", "imagePullPolicy", "env", "resources", "securityContext", "volumeMounts"),
}
GROUP_FIELDS = {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}
RAY_ENV = {
    "RAY_SERVE_ENABLE_HA_PROXY": {"value": "1"},
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": {"value": "1"},
    "RAY_AUTH_MODE": {"value": "token"},
    "RAY_AUTH_TOKEN": {"valueFrom": {"secretKeyRef": {"name": "shoal-ray", "key": "auth_token"}}},
}
"""Variables of every container that runs Ray."""


def service(case: str) -> dict[str, Any]:
    found: dict[str, Any] = manifests(case)["RayService"]["spec"]
    return found


def templates(case: str) -> Iterator[dict[str, Any]]:
    """Yield the pod templates: the head's, then those of the groups."""
    cluster = service(case)["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        yield group["template"]


def serve_config(case: str) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.yaml.decode(service(case)["serveConfigV2"])
    return found


def deployments(case: str) -> dict[str, dict[str, Any]]:
    (application,) = serve_config(case)["applications"]
    return {each["name"]: each for each in application["deployments"]}


def mounts(case: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = next(templates(case))["spec"]["containers"][0]["volumeMounts"]
    return found


@pytest.mark.parametrize("case", ON_RAY)
def test_kuberay_knows_the_fields(case: str) -> None:
    """The RayService has only fields of KubeRay 1.6, and those that it requires."""
    spec = service(case)
    cluster = spec["rayClusterConfig"]
    assert spec.keys() == SPEC_FIELDS
    assert cluster.keys() <= CLUSTER_FIELDS
    assert cluster["authOptions"] == {"mode": "token", "secretName": "shoal-ray"}
    assert cluster.get("autoscalerOptions", {}).keys() <= AUTOSCALER_FIELDS
    assert ("autoscalerOptions" in cluster) is cluster["enableInTreeAutoscaling"]
    assert cluster["headGroupSpec"].keys() == {"rayStartParams", "template"}
    assert cluster["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0", "num-gpus": "0"}
    for group in cluster["workerGroupSpecs"]:
        assert group.keys() == GROUP_FIELDS
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("case", ON_RAY)
def test_kubernetes_accepts_pods_and_service(case: str, version: str) -> None:
    """The pod templates and the Service inside of the RayService follow the strict schemas of Kubernetes."""
    kubernetes_validate.validate(
        {"apiVersion": "v1", "kind": "Service", **service(case)["serveService"]}, version, strict=True
    )
    for template in templates(case):
        kubernetes_validate.validate({"apiVersion": "v1", "kind": "Pod", **template}, version, strict=True)


@pytest.mark.parametrize("case", ON_RAY)
def test_no_deployment(case: str) -> None:
    """KubeRay makes pods and Service; nothing else of the chart would select them."""
    assert (
        manifests(case)
        .keys()
        .isdisjoint({"Deployment", "Service", "PodDisruptionBudget", "HorizontalPodAutoscaler", "ScaledObject"})
    )


@pytest.mark.parametrize("case", ON_RAY)
def test_pods_are_confined(case: str) -> None:
    """No root, no writable root file system, and a token of Kubernetes only for Ray's autoscaler."""
    for number, template in enumerate(templates(case)):
        spec = template["spec"]
        (container,) = spec["containers"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        scales = number == 0 and service(case)["rayClusterConfig"]["enableInTreeAutoscaling"]
        assert spec.get("automountServiceAccountToken", True) is scales
        assert spec["enableServiceLinks"] is False
        writable = {each["mountPath"] for each in container["volumeMounts"] if not each.get("readOnly")}
        assert writable == {"/var/lib/shoal", "/tmp"}
        assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in spec["volumes"]}
    options = service(case)["rayClusterConfig"].get("autoscalerOptions")
    assert options is None or options["securityContext"]["readOnlyRootFilesystem"] is True


@pytest.mark.parametrize("case", ON_RAY)
def test_environment_and_keys(case: str) -> None:
    """Every pod has HAProxy, Ray's token, and the key files that the settings name."""
    for template in templates(case):
        (container,) = template["spec"]["containers"]
        variables = {each.pop("name"): each for each in container["env"]}
        assert variables.items() >= RAY_ENV.items()
        drain = CASES[case].get("drain", {}).get("timeoutSeconds", 30)
        assert int(variables["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"]["value"]) >= drain
        secrets = {each["name"]: each["secret"] for each in template["spec"]["volumes"] if "secret" in each}
        assert secrets["api-keys"]["secretName"] == "shoal-keys"
        assert {each["defaultMode"] for each in secrets.values()} == {0o400}
        folders = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
        files = {f"{folders[name]}/{secret['items'][0]['path']}" for name, secret in secrets.items()}
        settings = serve_config(case)["applications"][0]["args"]["settings"]
        assert files == {value for name, value in settings.items() if name.endswith("_key_file")}


@pytest.mark.parametrize("case", ON_RAY)
def test_ports_and_labels(case: str) -> None:
    """The Service, its Ingress and the policy meet the port of Serve, and KubeRay's own selectors keep their label."""
    made = manifests(case)
    (port,) = service(case)["serveService"]["spec"]["ports"]
    http = serve_config(case)["http_options"]
    assert (port["name"], port["targetPort"], http["host"]) == ("serve", http["port"], "0.0.0.0")
    for number, template in enumerate(templates(case)):
        (container,) = template["spec"]["containers"]
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        assert ports["serve"] == http["port"]
        assert ports["metrics"] == 8080
        assert {"gcs-server", "dashboard"} <= ports.keys() or number
        assert "app.kubernetes.io/name" not in template["metadata"]["labels"]
        if "NetworkPolicy" in made:
            selector = made["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]
            assert selector.items() <= template["metadata"]["labels"].items()
    if "Ingress" in made:
        (path,) = made["Ingress"]["spec"]["rules"][0]["http"]["paths"]
        assert path["backend"]["service"] == {
            "name": service(case)["serveService"]["metadata"]["name"],
            "port": {"name": "serve"},
        }


def test_policy_admits_the_cluster_and_the_operator() -> None:
    """Clients reach Serve, the cluster's pods reach each other, and KubeRay's operator reaches the dashboard."""
    clients, cluster, operator = manifests("ray-gpu")["NetworkPolicy"]["spec"]["ingress"]
    assert clients["ports"] == [{"port": "serve"}]
    assert "ports" not in cluster
    assert operator["ports"] == [{"port": "serve"}, {"port": "dashboard"}]


def test_gpu_group() -> None:
    """Only the group with GPUs asks for them; its nodes and tolerations are its own."""
    head, cpu, gpu = (each["spec"] for each in templates("ray-gpu"))
    for other in (head, cpu):
        assert "nvidia.com/gpu" not in other["containers"][0]["resources"]["limits"]
        assert other["nodeSelector"] == {"pool": "cpu"}
        assert "tolerations" not in other
    assert gpu["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert gpu["nodeSelector"] == {"accelerator": "h100"}
    assert gpu["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert gpu["runtimeClassName"] == "nvidia"


def test_options_of_deployments() -> None:
    """A model's own options override the defaults, and a fixed number of replicas replaces scaling."""
    found = deployments("ray-gpu")
    assert list(found) == ["front", "org~large", "small"]
    large, small = found["org~large"], found["small"]
    assert large["ray_actor_options"] == {"num_cpus": 1, "num_gpus": 1}
    assert large["autoscaling_config"]["min_replicas"] == 0
    assert large["autoscaling_config"]["upscale_delay_s"] == 5
    assert "num_replicas" not in large
    assert (large["max_surge_percent"], small["max_surge_percent"]) == (0, 25)
    assert small["ray_actor_options"] == {"num_cpus": 2, "num_gpus": 0}
    assert small["num_replicas"] == 2
    assert "autoscaling_config" not in small
    drain = CASES["ray-gpu"]["drain"]["timeoutSeconds"]
    assert {each["graceful_shutdown_timeout_s"] for each in found.values()} == {drain + 5}
    spec = service("ray-gpu")
    assert spec["rayClusterDeletionDelaySeconds"] > drain + 5
    assert {each["spec"]["terminationGracePeriodSeconds"] > drain + 5 for each in templates("ray-gpu")} == {True}


def test_tables_of_models() -> None:
    """Only keys that the application's arguments cannot hold are in the file; a change of it replaces the pods."""
    toml = manifests("ray-gpu")["ConfigMap"]["data"]["shoal.toml"]
    assert msgspec.toml.decode(toml) == {
        "models": {
            "org/large": {"prompts": {"query": "query: ", "document": "passage: <é>"}},
            "later": {"max_tokens": 128},
        }
    }
    assert msgspec.toml.decode(manifests("ray")["ConfigMap"]["data"]["shoal.toml"]) == {}
    sums = {case: {each["metadata"]["annotations"]["checksum/config"] for each in templates(case)} for case in ON_RAY}
    assert {len(each) for each in sums.values()} == {1}
    assert sums["ray"] != sums["ray-gpu"]


@pytest.mark.parametrize(
    "ray",
    [
        {"enable": True},
        {"version": "2.60"},
        {"upgradeStrategy": "NewClusterWithIncrementalUpgrade"},
        {"workerGroups": []},
        {"workerGroups": [{"name": "a", "replicas": 1}]},
        {"workerGroups": [{"name": "A", "replicas": 1, "resources": {}}]},
        {"deployment": {"name": "all"}},
        {"front": {"name": "back"}},
    ],
    ids=str,
)
def test_wrong_values_are_refused(ray: dict[str, Any]) -> None:
    """Misspelled and impossible values of `ray` do not reach a cluster."""
    assert list(Draft202012Validator(VALUES_SCHEMA).iter_errors({"ray": ray}))
