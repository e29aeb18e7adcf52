"""The manifests that Helm made of the chart, against the schemas of Kubernetes and Shoal's own settings.

They are in `rendered/`, so that these tests need no Helm: a hash shows that they are of this chart. `make test-helm`
renders them again.
"""

from __future__ import annotations

import json
import re
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]  # it has no types
import msgspec
import pytest
import typer.main
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]  # it has no types
from typer.testing import CliRunner

from shoal.cli import app
from shoal.config.settings import SETTINGS
from shoal.observability.metrics import PrometheusObserver
from tests.unit.deploy.chart import (
    CASES,
    CHART,
    ON_RAY,
    OWNED,
    RENDERED,
    RENEW,
    RENEW_SCHEMA,
    SCHEMA,
    describe_settings,
    digest,
)

VERSIONS = ("1.28", "1.34")
"""Of Kubernetes: an old one that is still in use, and one that is current."""

VALUES_SCHEMA: dict[str, Any] = json.loads(SCHEMA.read_text())
DEPLOYED = tuple(case for case in CASES if case not in ON_RAY)
"""Cases with a Deployment."""
CUSTOM = {"ScaledObject": "keda.sh/v1alpha1", "ServiceMonitor": "monitoring.coreos.com/v1", "RayService": "ray.io/v1"}
"""Kinds without a schema here, because they are not Kubernetes' own."""


def manifests(case: str) -> dict[str, Any]:
    """Return the manifests of one case by kind; the chart makes one of each."""
    documents = re.split(r"^---\n", (RENDERED / f"{case}.yaml").read_text(), flags=re.MULTILINE)[1:]
    found: list[dict[str, Any]] = [msgspec.yaml.decode(each) for each in documents]
    assert len({each["kind"] for each in found}) == len(found)
    return {each["kind"]: each for each in found}


def pod(case: str) -> dict[str, Any]:
    found: dict[str, Any] = manifests(case)["Deployment"]["spec"]["template"]["spec"]
    return found


def container(case: str) -> dict[str, Any]:
    (found,) = pod(case)["containers"]
    return dict(found)


@pytest.fixture
def started(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lay out the files of a case's container under `tmp_path`, and return its arguments."""
    case: str = request.param
    config: str = manifests(case)["ConfigMap"]["data"]["shoal.toml"]
    (tmp_path / "shoal.toml").write_text(config.replace("/run/secrets/shoal/", f"{tmp_path}/"))
    for volume in pod(case)["volumes"]:
        for item in volume.get("secret", {}).get("items", ()):
            file = tmp_path / volume["name"].removesuffix("-keys") / item["path"]
            file.parent.mkdir()
            file.touch(mode=0o600)
            file.write_text("a-key\n")
    for variable in container(case)["env"]:
        if variable["name"] == "SHOAL_CONFIG":
            assert variable["value"] == "/etc/shoal/shoal.toml"
            monkeypatch.setenv("SHOAL_CONFIG", str(tmp_path / "shoal.toml"))
        elif variable["name"].startswith("SHOAL_"):
            monkeypatch.setenv(variable["name"], variable.get("value", "from-a-secret"))
    arguments: list[str] = container(case)["args"]
    return arguments


@pytest.mark.parametrize("case", CASES)
def test_the_rendered_files_are_of_this_chart(case: str) -> None:
    """A change of the chart or of the values without rendering them again fails."""
    assert digest(case) in (RENDERED / f"{case}.yaml").read_text().splitlines()[0], RENEW
    assert {each.stem for each in RENDERED.iterdir()} == set(CASES)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("case", CASES)
def test_kubernetes_accepts_the_manifests(case: str, version: str) -> None:
    """Every manifest is valid under the strict schemas of Kubernetes, which reject unknown fields."""
    for kind, manifest in manifests(case).items():
        if kind in CUSTOM:
            assert manifest["apiVersion"] == CUSTOM[kind]
        else:
            kubernetes_validate.validate(manifest, version, strict=True)


def test_a_wrong_field_is_found() -> None:
    """The schemas are strict: a misspelled field deep in a manifest is an error."""
    manifest = manifests("default")["Deployment"]
    manifest["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]["httpGet"]["paths"] = "/"
    with pytest.raises(kubernetes_validate.ValidationError, match="paths"):
        kubernetes_validate.validate(manifest, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("case", CASES)
def test_values_follow_their_schema(case: str) -> None:
    """The defaults and every case are valid values."""
    validator = Draft202012Validator(VALUES_SCHEMA)
    defaults = msgspec.yaml.decode((CHART / "values.yaml").read_text())
    assert not list(validator.iter_errors(defaults))
    assert not list(validator.iter_errors(CASES[case]))
    assert set(VALUES_SCHEMA["properties"]) - {"global"} == set(defaults)


@pytest.mark.parametrize(
    "values",
    [
        {"replica": 3},
        {"settings": {"max_batch_sizes": 3}},
        {"settings": {"max_batch_size": 0}},
        {"settings": {"upstream_api_key": "secret"}},
        {"settings": {"port": 9000}},
        {"models": [{"name": "a", "backend_s": []}]},
        {"models": [{"backends": ["hf:a/b"]}]},
        {"autoscaling": {"minReplicas": 0}},
        {"drain": {"delaySeconds": -1}},
        {"as": "unknown"},
    ],
    ids=str,
)
def test_wrong_values_are_refused(values: dict[str, Any]) -> None:
    """Misspelled, impossible and secret values do not reach a cluster."""
    assert list(Draft202012Validator(VALUES_SCHEMA).iter_errors(values))


def test_the_schema_knows_all_settings() -> None:
    """A new setting or key of a model can be used in the chart, with the type that Shoal gives it."""
    assert VALUES_SCHEMA["$defs"] == describe_settings(), RENEW_SCHEMA
    assert {row.name for row in SETTINGS} >= OWNED


def test_every_value_is_commented() -> None:
    """Each key of values.yaml, but those of a one-line list of alike ones, follows a comment on it."""
    lines = (CHART / "values.yaml").read_text().splitlines()
    undocumented = []
    for before, line in pairwise(lines):
        key = re.match(r"( *)([A-Za-z]+):(.*)", line)
        is_group = key is not None and not key[3].strip()
        if key and not is_group and not before.lstrip().startswith("#"):
            undocumented.append(key[2])
    assert set(undocumented) <= {
        "extraVolumeMounts",
        *("podAnnotations", "tolerations", "affinity", "topologySpreadConstraints"),
        *("type", "rollingUpdate", "requests", "limits", "stabilizationWindowSeconds"),
        *("runAsNonRoot", "runAsUser", "runAsGroup", "fsGroup", "fsGroupChangePolicy", "seccompProfile"),
        *("allowPrivilegeEscalation", "readOnlyRootFilesystem", "capabilities"),
    }


@pytest.mark.parametrize("started", DEPLOYED, indirect=True)
def test_shoal_accepts_flags_and_settings(started: list[str]) -> None:
    """`shoal serve` parses the container's arguments, and loads the file, the keys and the environment without a
    warning.
    """
    command, *arguments = started
    group = typer.main.get_command(app)
    assert command == "serve"
    serve = group.get_command(None, command)  # type: ignore[attr-defined]  # it is a group
    assert serve.make_context(command, list(arguments))
    shown = CliRunner().invoke(app, ["config", "--json", *arguments])
    assert (shown.exit_code, shown.stderr) == (0, "")


@pytest.mark.parametrize("started", ["gateway"], indirect=True)
def test_settings_arrive_as_they_were_written(started: list[str]) -> None:
    """Values of every type survive the way from YAML over Helm and TOML; flags override them."""
    shown = json.loads(CliRunner().invoke(app, ["config", "--json", *started[1:]]).stdout)
    settings = {name: entry["value"] for name, entry in shown["settings"].items()}
    assert settings["embed_timeout_s"] == 12.5
    assert (settings["drain_delay_s"], settings["drain_timeout_s"], settings["drain_idle_s"]) == (2.5, 600, 5)
    assert (settings["workers"], settings["grpc_port"], settings["cache_mb"]) == (4, 8001, 64)
    assert (settings["max_inputs"], settings["access_log"], settings["log_level"]) == (64, False, "debug")
    assert (settings["host"], settings["port"], settings["home"]) == ("0.0.0.0", 8080, "/var/lib/shoal")
    assert settings["hf_token"] == "****"
    chat, retriever = (CASES["gateway"]["models"][place] for place in (0, 1))
    assert shown["models"]["value"] == [f"{each['name']}={','.join(each['backends'])}" for each in (chat, retriever)]
    for each in (chat, retriever):
        table = {key: entry["value"] for key, entry in shown["tables"][each["name"]].items()}
        assert table == {key: value for key, value in each.items() if key != "name"}


@pytest.mark.parametrize("started", ["ingress"], indirect=True)
def test_a_preset_keeps_the_port(started: list[str]) -> None:
    """The port of the chart's Service wins over that of the preset."""
    shown = json.loads(CliRunner().invoke(app, ["config", "--json", *started[1:]]).stdout)
    assert shown["settings"]["port"] == {"value": 8080, "source": shown["settings"]["drain_timeout_s"]["source"]}
    assert shown["settings"]["any_model"]["value"] is True  # a default of the preset


@pytest.mark.parametrize("started", DEPLOYED, indirect=True)
def test_only_keys_or_insecure(started: list[str]) -> None:
    """Every case serves other machines with keys or with an explicit `insecure`."""
    settings = json.loads(CliRunner().invoke(app, ["config", "--json", *started[1:]]).stdout)["settings"]
    assert bool(settings["api_key"]["value"]) is not settings["insecure"]["value"]


@pytest.mark.parametrize("case", DEPLOYED)
def test_probes_and_grace_period(case: str) -> None:
    """Liveness does not wait for models, readiness does, and the pod may drain to the end."""
    found = container(case)
    paths = {kind: found[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
    assert paths == {"startup": "/health/live", "readiness": "/health/ready", "liveness": "/health/live"}
    drain = {"delaySeconds": 10, "timeoutSeconds": 30} | CASES[case].get("drain", {})
    assert pod(case)["terminationGracePeriodSeconds"] - sum(drain.values()) > 2
    assert "lifecycle" not in found  # Shoal itself delays the end of a drain


@pytest.mark.parametrize("case", DEPLOYED)
def test_the_container_is_confined(case: str) -> None:
    """No root, no writable root file system, no token of Kubernetes; home and /tmp are volumes."""
    found = container(case)
    assert pod(case)["securityContext"]["runAsNonRoot"] is True
    assert pod(case)["securityContext"]["runAsUser"] == pod(case)["securityContext"]["fsGroup"] == 10001
    assert found["securityContext"]["readOnlyRootFilesystem"] is True
    assert found["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert pod(case)["automountServiceAccountToken"] is False
    assert pod(case)["enableServiceLinks"] is False
    writable = {each["mountPath"] for each in found["volumeMounts"] if not each.get("readOnly")}
    assert writable == {"/var/lib/shoal", "/tmp"}
    assert {each["name"] for each in found["volumeMounts"]} == {each["name"] for each in pod(case)["volumes"]}


def test_key_files() -> None:
    """Keys are files of the named Secrets, which only the pod's user and group can read."""
    secrets = {each["name"]: each["secret"] for each in pod("gateway")["volumes"] if "secret" in each}
    assert {name: each["secretName"] for name, each in secrets.items()} == {
        "api-keys": "shoal-keys",
        "admin-keys": "shoal-admin",
    }
    assert {each["defaultMode"] for each in secrets.values()} == {0o400}
    assert secrets["admin-keys"]["items"] == [{"key": "admin.txt", "path": "admin.txt"}]
    assert container("gateway")["envFrom"] == [{"secretRef": {"name": "shoal-upstream"}}]


@pytest.mark.parametrize("case", DEPLOYED)
def test_names_and_selectors_agree(case: str) -> None:
    """Service, budget, policy and monitor select the pods, ports exist, and scalers name the Deployment."""
    made = manifests(case)
    labels = made["Deployment"]["spec"]["template"]["metadata"]["labels"]
    ports = {each["name"] for each in container(case)["ports"]}
    service = made["Service"]["spec"]
    assert service["selector"].items() <= labels.items()
    assert made["Deployment"]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert {each["targetPort"] for each in service["ports"]} == ports
    for kind, path in (
        ("PodDisruptionBudget", "selector"),
        ("NetworkPolicy", "podSelector"),
        ("ServiceMonitor", "selector"),
    ):
        if kind in made:
            assert made[kind]["spec"][path]["matchLabels"].items() <= labels.items()
    for kind in ("HorizontalPodAutoscaler", "ScaledObject"):
        if kind in made:
            target = made[kind]["spec"]["scaleTargetRef"]
            assert target == {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "name": made["Deployment"]["metadata"]["name"],
            }
    assert ("replicas" in made["Deployment"]["spec"]) is (case not in ("hpa", "keda"))


def test_a_change_of_settings_restarts_the_pods() -> None:
    """The annotation differs between cases whose shoal.toml differs, and agrees where it is the same."""
    found = {
        case: manifests(case)["Deployment"]["spec"]["template"]["metadata"]["annotations"]["checksum/config"]
        for case in DEPLOYED
    }
    assert found["default"] == found["hpa"]
    assert len(set(found.values())) == len(DEPLOYED) - 1


def test_disruption_budget() -> None:
    """One pod at a time may be drained from its node, unless the budget is off."""
    assert manifests("default")["PodDisruptionBudget"]["spec"]["maxUnavailable"] == 1
    assert "PodDisruptionBudget" not in manifests("ingress")


def test_gpu() -> None:
    """A GPU case asks for the GPU, runs PyTorch, tolerates the taint, and keeps models on a claim of its own."""
    made = manifests("gpu")
    assert container("gpu")["resources"]["limits"] == {"cpu": "2", "memory": "4Gi", "nvidia.com/gpu": 1}
    assert 'engine = "torch"' in made["ConfigMap"]["data"]["shoal.toml"]
    assert pod("gpu")["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert pod("gpu")["runtimeClassName"] == "nvidia"
    assert made["Deployment"]["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    claim = made["PersistentVolumeClaim"]
    assert {"name": "home", "persistentVolumeClaim": {"claimName": claim["metadata"]["name"]}} in pod("gpu")["volumes"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


def test_autoscalers_use_a_metric_of_shoal() -> None:
    """Both autoscalers ask for a metric that /metrics has, per pod."""
    exported = PrometheusObserver(queues=lambda: [("a", 1, 2)]).render().decode()
    spec = manifests("hpa")["HorizontalPodAutoscaler"]["spec"]
    queue, cpu = spec["metrics"]
    assert f"\n{queue['pods']['metric']['name']}{{" in exported
    assert queue["pods"]["target"] == {"type": "AverageValue", "averageValue": "64"}
    assert cpu["resource"]["target"]["averageUtilization"] == 80
    assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 8)
    assert spec["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 300
    scaled = manifests("keda")["ScaledObject"]["spec"]
    (trigger,) = scaled["triggers"]
    assert trigger["metadata"] == {
        "serverAddress": "http://prometheus.monitoring:9090",
        "query": 'sum(shoal_queue_items{namespace="inference",service="shoal"})',
        "threshold": "32",
    }
    assert (trigger["type"], trigger["metricType"]) == ("prometheus", "AverageValue")
    assert scaled["fallback"] == {"failureThreshold": 3, "replicas": 4}


def test_scrapes_carry_a_key() -> None:
    """The ServiceMonitor scrapes the Service's HTTP port, with a key if Shoal requires one."""
    (endpoint,) = manifests("gateway")["ServiceMonitor"]["spec"]["endpoints"]
    assert (endpoint["port"], endpoint["path"]) == ("http", "/metrics")
    assert endpoint["authorization"] == {"credentials": {"name": "shoal-scrape", "key": "key"}}
    assert "authorization" not in manifests("keda")["ServiceMonitor"]["spec"]["endpoints"][0]


def test_ingress_and_policies() -> None:
    """The Ingress routes all paths of its host; the policies open only the ports that the pods have."""
    spec = manifests("ingress")["Ingress"]["spec"]
    (rule,) = spec["rules"]
    (path,) = rule["http"]["paths"]
    assert (spec["ingressClassName"], rule["host"], path["path"]) == ("nginx", "shoal.example.org", "/")
    assert path["backend"]["service"] == {"name": "shoal", "port": {"name": "http"}}
    policy = manifests("ingress")["NetworkPolicy"]["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    assert policy["ingress"] == [{"ports": [{"port": "http"}], "from": [{"podSelector": {}}]}]
    assert manifests("gateway")["NetworkPolicy"]["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert pod("ingress")["serviceAccountName"] == "default"


def test_examples_of_the_guide_are_valid() -> None:
    """Every example of values in docs/kubernetes.md follows the schema."""
    text = (CHART.parents[2] / "docs" / "kubernetes.md").read_text()
    examples = [msgspec.yaml.decode(each) for each in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]
    values = [each for each in examples if "rules" not in each]  # those are prometheus-adapter's
    assert len(values) == len(examples) - 1
    for each in values:
        assert not list(Draft202012Validator(VALUES_SCHEMA).iter_errors(each))


def test_commands_of_the_guides_use_known_values() -> None:
    """Every `--set` in the guide and the chart's README names a value."""
    defaults = msgspec.yaml.decode((CHART / "values.yaml").read_text())
    texts = [(CHART / "README.md").read_text(), (CHART.parents[2] / "docs" / "kubernetes.md").read_text()]
    pairs = [pair for text in texts for pair in re.findall(r"--set (\S+)", text)]
    assert pairs
    for pair in pairs:
        found = defaults
        for key in shlex.split(pair)[0].partition("=")[0].split("."):
            found = found[key]
