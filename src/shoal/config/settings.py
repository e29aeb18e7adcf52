"""Defines every setting, and every key of a model in `shoal.toml`: names, types, bounds, defaults, help.

Flags, environment names, file keys, help texts and `docs/settings.md` are all generated from these tables. A setting is
`--kebab-case` on the command line, `SHOAL_UPPER_CASE` in the environment and its own name in the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from shoal.config.schema import Setting
from shoal.sampling_fields import SamplingField

IMAGE_BATCH_MS_FACTOR = 10
"""Multiplies `max_batch_ms` for image batches, because an image takes longer than a text. With a ViT-B-32 on four
cores, batches of three or four are a fifth faster than single images, which shortens the wait as well."""

# A key travels in a header, so only visible ASCII is allowed. (\Z, because $ accepts a trailing line break.)
Key: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"^[\x21-\x7e]+( (bulk|interactive))?\Z",
        title="ASCII without spaces, optionally followed by its class (`KEY bulk`, `KEY interactive`)",
    ),
]
Origin: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"^https?://[^/\s*?#@]+\Z",
        title="an exact origin such as https://app.example.org (* would let every web page use this server)",
    ),
]
Network: TypeAlias = Annotated[
    str, Meta(pattern=r"^[0-9a-fA-F.:]+(/[0-9]{1,3})?\Z", title="an address or a network such as 10.0.0.0/8")
]
Name: TypeAlias = Annotated[str, Meta(min_length=1)]
Count: TypeAlias = Annotated[int, Meta(ge=1)]
CountOrZero: TypeAlias = Annotated[int, Meta(ge=0)]
Duration: TypeAlias = Annotated[float, Meta(gt=0)]
DurationOrZero: TypeAlias = Annotated[float, Meta(ge=0)]
Metadatum: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"^[0-9a-z_.-]+: ?[\x20-\x7e]+\Z",
        title="`name: value`, with a lower-case name and an ASCII value",
    ),
]
InputName: TypeAlias = Literal[
    "input_ids", "attention_mask", "token_type_ids", "position_ids", "pooling_mask", "adapter_ids", "text", "pair"
]
OutputName: TypeAlias = Literal[
    "sentence_embedding", "pooled", "token_embeddings", "embedding", "token_count", "logits", "sparse_embedding"
]


def _section(title: str, **marks: bool) -> Callable[..., Meta]:
    """Return a function that describes a setting of this section. It takes the help text, and marks of `Setting` that
    add to the section's own."""

    def describe(text: str, **own: bool) -> Meta:
        return Meta(description=text, extra={"section": title, **marks, **own})

    return describe


_server = _section("Server")
_limits = _section("Limits")
_batching = _section("Batching", per_model=True)
_times = _section("Deadlines")
_engine = _section("Engine", per_model=True)
_generation = _section("Generation", per_model=True)
_cache = _section("Cache", per_model=True)
_life = _section("Model lifecycle")
_triton = _section("Triton")
_files = _section("Model files")
_logs = _section("Logs")
_key = _section("")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings with type, bounds, help and default. `repr` masks secrets."""

    host: Annotated[Name, _server("Address to listen on.", essential=True)] = "127.0.0.1"
    port: Annotated[
        int, Meta(ge=0, le=65535), _server("Port to listen on; 0 lets the system choose.", essential=True)
    ] = 8080
    grpc_port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None,
        _server("Port for KServe v2 over gRPC; 0 lets the system choose."),
    ] = None
    grpc_socket: Annotated[
        str | None, _server("Unix socket for KServe v2 over gRPC; only this user can open it.", path=True)
    ] = None
    workers: Annotated[
        int,
        Meta(ge=0, le=256),
        _server(
            "Processes that speak HTTP, before one that has the models. 1: one process does both; 0: one for every "
            "4 cores.",
            essential=True,
        ),
    ] = 1
    insecure: Annotated[bool, _server("Allow serving other machines without an API key.")] = False
    api_key: Annotated[
        tuple[Key, ...], _server("Key that clients must send as `Authorization: Bearer`; repeatable.", secret=True)
    ] = ()
    api_key_file: Annotated[
        str | None,
        _server(
            "File of API keys, one per line: KEY, `KEY bulk` or `KEY interactive`; # starts a comment line.",
            path=True,
            essential=True,
        ),
    ] = None
    admin_key: Annotated[
        tuple[Key, ...], _server("Key for routes that change the server; repeatable.", secret=True)
    ] = ()
    admin_key_file: Annotated[
        str | None, _server("File of admin keys, in the format of `api_key_file`.", path=True)
    ] = None
    cors_origins: Annotated[
        tuple[Origin, ...], _server("Web origins whose pages may call this server; repeatable.")
    ] = ()
    client_header: Annotated[
        str,
        Meta(pattern=r"^[A-Za-z0-9-]*\Z", title="a header name"),
        _server("Header with the user's name, set by a trusted proxy; fairness then applies per user."),
    ] = ""
    trusted_proxies: Annotated[
        tuple[Network, ...],
        _server(
            "Addresses or networks of the proxies that may send `client_header`; repeatable. Empty: every peer. "
            "Without keys, also those whose traces are continued."
        ),
    ] = ()
    metrics_default: Annotated[
        Literal["prometheus", "json"],
        _server(
            "Default format of /metrics: Prometheus text, or Triton's statistics of each model as JSON. With json, "
            "/metrics, /health and model names follow inference-server."
        ),
    ] = "prometheus"
    embed_dialect: Annotated[
        Literal["tei", "auto-batching-proxy"],
        _server(
            "API of POST /embed: text-embeddings-inference, or auto-batching-proxy, which then also defines /health."
        ),
    ] = "tei"
    status_dialect: Annotated[
        Literal["shoal", "infinity"],
        _server(
            "Format of /health, model lists, /rerank and /classify. With infinity, lists also have Infinity's `stats` "
            "and `capabilities`, and /models omits models that are not served."
        ),
    ] = "shoal"
    batch_info: Annotated[bool, _server("Include batch details in answers of auto-batching-proxy's /embed.")] = False
    any_model: Annotated[
        bool,
        _server(
            "Let the default embedding model answer /v1/embeddings requests with a missing or unknown `model` instead "
            "of rejecting them."
        ),
    ] = False
    token_ids: Annotated[
        Literal["refuse", "accept"],
        _server(
            "Token ids as input of /v1/embeddings and /pooling: refuse them, since most clients use OpenAI's "
            "tokenizer, or accept them as the model's own."
        ),
    ] = "refuse"
    tei_metrics: Annotated[
        bool, _server("Also show the metrics of text-embeddings-inference, `te_*`, on /metrics.")
    ] = False
    proxy_metrics: Annotated[bool, _server("Also show the metrics of triton-grpc-proxy, `tgp_*`, on /metrics.")] = False

    max_body_bytes: Annotated[int, Meta(ge=1024), _limits("Maximum size of a request body.")] = 16777216
    max_inputs: Annotated[Count, _limits("Maximum inputs in one request.")] = 2048
    image_hosts: Annotated[
        str,
        _limits(
            "Comma-separated hosts to fetch images from, with a port unless it is 80 or 443; `public` allows "
            "every host on the public internet. Empty: URLs are rejected."
        ),
    ] = ""
    image_max_mb: Annotated[
        Count,
        _limits("Maximum size of one image file, and of all images fetched for one request, in MB of 2^20 bytes."),
    ] = 20
    image_seconds: Annotated[Duration, _limits("Timeout for fetching one image.")] = 10.0
    max_queue_items: Annotated[
        Count, _limits("Maximum items queued or running for a model; one client may have at most half.", per_model=True)
    ] = 16384
    max_queue_ms: Annotated[
        DurationOrZero,
        _limits("Maximum standing queue for interactive requests; 0: only their deadlines count.", per_model=True),
    ] = 1000.0
    max_streams: Annotated[Count, _limits("Maximum generation requests in flight per model.", per_model=True)] = 256
    max_queued_streams: Annotated[
        CountOrZero,
        _limits("Maximum generation requests that wait for a slot; one client may have at most half.", per_model=True),
    ] = 1024
    batch_concurrency: Annotated[
        Count, _limits("Maximum requests of OpenAI's batches (/v1/batches) in flight, all batches together.")
    ] = 64
    batch_file_mb: Annotated[Count, _limits("Maximum size of a file for batches, in MB of 2^20 bytes.")] = 200
    batch_disk_mb: Annotated[
        Count, _limits("Disk space for the files and results of batches, in `batches` under `home`.")
    ] = 10240
    response_store_mb: Annotated[
        CountOrZero,
        _limits("Memory for responses of /v1/responses that later requests refer to, in MB of 2^20 bytes. 0: none."),
    ] = 64
    response_store_s: Annotated[Duration, _limits("Time that a stored response is kept after its last use.")] = 3600.0

    max_batch_size: Annotated[Count, _batching("Maximum items in one batch.", essential=True)] = 64
    max_batch_tokens: Annotated[Count, _batching("Maximum tokens in one batch, padding included.")] = 16384
    max_batch_ms: Annotated[
        Duration,
        _batching(
            "Expected run time up to which a batch grows, or twice that of a single call if longer; ten times as long "
            "for images. Up to six times that where the engine is faster with larger batches, and longer under backlog."
        ),
    ] = 40.0
    max_wait_time_ms: Annotated[
        DurationOrZero,
        _batching("Maximum time that an idle engine waits for more items; 0 sends a batch at once."),
    ] = 0.0
    max_age_ms: Annotated[
        Duration, _batching("Age at which an item is served next, regardless of class and client.")
    ] = 250.0
    towers: Annotated[
        Literal["both", "text", "image"],
        _engine("Towers of an image-text model to load; embedding only texts needs no image tower."),
    ] = "both"
    truncate: Annotated[
        bool, _engine("Truncate inputs that are too long (reported in the answer) instead of rejecting them.")
    ] = True

    cache_mb: Annotated[
        CountOrZero,
        _cache(
            "Memory per model for cached answers, in MB of 2^20 bytes; repeated inputs are not computed again. 0: "
            "no cache.",
            essential=True,
        ),
    ] = 0
    cache_disk_mb: Annotated[
        CountOrZero,
        _cache("Disk space for cached answers, in `rows` under `home`; they survive restarts. 0: no cache."),
    ] = 0

    embed_timeout_s: Annotated[Duration, _times("Timeout of an embedding request, from its arrival.")] = 30.0
    generate_timeout_s: Annotated[Duration, _times("Timeout of a generation request, from its arrival.")] = 600.0
    first_token_timeout_s: Annotated[Duration, _times("Timeout for a model's first token.")] = 60.0
    token_timeout_s: Annotated[Duration, _times("Timeout between a model's tokens.")] = 60.0
    heartbeat_s: Annotated[
        Duration, _times("Idle time of a stream before a comment is sent to keep proxies from closing it.")
    ] = 15.0
    load_timeout_s: Annotated[Duration, _times("Timeout for loading a model, download included.")] = 600.0
    connect_timeout_s: Annotated[Duration, _times("Timeout for connecting to another server.")] = 5.0
    body_timeout_s: Annotated[Duration, _times("Timeout for receiving a request body.")] = 30.0
    drain_timeout_s: Annotated[DurationOrZero, _times("Time for requests in flight to finish after SIGTERM.")] = 30.0
    drain_idle_s: Annotated[
        DurationOrZero,
        _times("Time that idle keep-alive connections stay open while draining, each for one more request."),
    ] = 5.0
    drain_delay_s: Annotated[
        DurationOrZero,
        _times(
            "Time to keep accepting requests after SIGTERM while readiness already fails; use your load balancer's "
            "probe interval."
        ),
    ] = 0.0

    default_model: Annotated[bool, _life("Serve the default model if none is named; off starts without a model.")] = (
        True
    )
    backend: Annotated[
        Literal["auto", "local", "triton", "ray"],
        _life(
            "Where models from files (hf:, pypi:, file:) run: in this process, in Triton or on Ray Serve; auto uses "
            "Triton if `triton` or `triton_url` is set, and Ray Serve if `ray_application` is.",
            per_model=True,
        ),
    ] = "auto"
    max_loaded_models: Annotated[
        CountOrZero,
        _life(
            "Maximum models loaded at once; beyond it, the least recently used one sleeps until it is requested. 0: "
            "no limit."
        ),
    ] = 0
    max_loaded_bytes: Annotated[
        CountOrZero, _life("Maximum bytes of loaded models, enforced in the same way. 0: no limit.")
    ] = 0
    keep_alive_s: Annotated[
        DurationOrZero, _life("Idle time after which a model sleeps. 0: never.", essential=True)
    ] = 0.0

    ray_application: Annotated[
        str,
        Meta(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,63})?\Z", title="a name of letters, digits, '.', '_' and '-'"),
        _life("Ray Serve application to which models that are loaded belong; a front on Ray Serve sets it."),
    ] = ""

    triton: Annotated[bool, _triton("Start Triton alongside this server and use it.")] = False
    triton_url: Annotated[
        str,
        Meta(
            pattern=r"^((tritons?://)?[^\s/#@?%=]+|triton://(/[^\s/,#@?%]+)+)?\Z",
            title="host or host:port, tritons://host:port for TLS, or triton:///PATH for a Unix socket",
        ),
        _triton("gRPC address of the Triton that loads models for `backend`.", essential=True),
    ] = ""
    triton_repository: Annotated[
        str,
        _triton(
            "Path of that Triton's model repository on this machine; without one, files are sent in the load request.",
            path=True,
        ),
    ] = ""
    triton_metadata: Annotated[
        tuple[Metadatum, ...], _triton("Metadata sent with every call to Triton; repeatable.", secret=True)
    ] = ()
    triton_ca_file: Annotated[
        str | None, _triton("CA certificates (PEM) for verifying Triton; default: the system's.", path=True)
    ] = None
    triton_cert_file: Annotated[str | None, _triton("Client certificate (PEM) for Triton.", path=True)] = None
    triton_key_file: Annotated[str | None, _triton("Private key (PEM) of that certificate.", path=True)] = None
    triton_platform: Annotated[
        Literal["auto", "onnxruntime", "openvino", "tensorrt", "python"],
        _triton(
            "Triton backend of written models; auto uses onnxruntime, or python if Triton lacks it.",
            per_model=True,
        ),
    ] = "auto"
    triton_instances: Annotated[Count, _triton("Instances of a model in Triton.", per_model=True)] = 1
    triton_kind: Annotated[
        Literal["auto", "cpu", "gpu"],
        _triton("Device of the instances; auto lets Triton choose.", per_model=True),
    ] = "auto"
    triton_fp16: Annotated[bool, _triton("Let the accelerator compute in half precision.", per_model=True)] = False
    triton_accelerator: Annotated[
        Literal["none", "tensorrt", "openvino"],
        _triton("Accelerator inside Triton's onnxruntime backend.", per_model=True),
    ] = "none"
    triton_text_in: Annotated[
        bool,
        _triton("Also write a tokenizer and an ensemble, so that Triton clients can send text.", per_model=True),
    ] = False
    triton_dynamic_batching: Annotated[
        bool, _triton("Enable Triton's dynamic batcher, which combines batches of several clients.", per_model=True)
    ] = True
    triton_queue_size: Annotated[
        CountOrZero, _triton("Maximum requests queued in Triton's dynamic batcher. 0: no limit.", per_model=True)
    ] = 0

    engine: Annotated[
        Literal["auto", "openvino", "onnxruntime", "torch"],
        _engine("Engine for local models; torch runs their original files, on a GPU if available."),
    ] = "auto"
    precision: Annotated[
        Literal["auto", "f32", "bf16", "fp16", "int8"],
        _engine(
            "Precision of local models; auto uses 16 bits if the hardware supports it and the load-time check agrees "
            "with f32. int8 is smaller and faster, but a separate vector space.",
            essential=True,
        ),
    ] = "auto"
    streams: Annotated[
        CountOrZero,
        _engine("Batches that a local engine runs, or a TEI server receives, in parallel. 0: automatic."),
    ] = 0
    threads: Annotated[CountOrZero, _engine("CPU threads for a local engine. 0: automatic.")] = 0
    cuda_graphs: Annotated[
        bool,
        _engine("Record torch's work on a GPU for each shape of a batch: several times as fast, for more GPU memory."),
    ] = True
    reproducible: Annotated[
        bool,
        _engine(
            "Batch only items of the same padded length, so that results of OpenVINO do not depend on other items of "
            "the batch, to the bit. Few requests of many lengths share fewer batches; `shoal bulk` always does this."
        ),
    ] = False
    convert: Annotated[
        Literal["auto", "never"],
        _engine(
            "Conversion of architectures that Shoal does not build: auto exports them with PyTorch in a separate "
            "process, if the extra convert is installed."
        ),
    ] = "auto"
    convert_max_memory_mb: Annotated[
        CountOrZero, _engine("Maximum memory of that process. 0: three quarters of the machine's.")
    ] = 0
    convert_timeout_s: Annotated[Duration, _engine("Timeout of that process.")] = 1800.0

    chat_template: Annotated[
        str | None, _generation("File with the chat template (Jinja) to use instead of the model's own.", path=True)
    ] = None
    tool_call_parser: Annotated[
        Literal["auto", "none", "hermes", "llama3", "mistral", "pythonic", "deepseek", "phi4", "gemma"],
        _generation(
            "Format of a model's tool calls; auto detects it from the chat template, none leaves them in the text."
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal["none", "think"],
        _generation("Separate a model's reasoning from its answer; think is the text between <think> and </think>."),
    ] = "none"
    default_max_tokens: Annotated[
        CountOrZero,
        _generation(
            "Default maximum tokens of an answer. 0: as many as fit in the context (1024 if the context is unknown "
            "and the model requires a limit)."
        ),
    ] = 0
    prompt_truncation: Annotated[
        Literal["none", "oldest"],
        _generation(
            "Handling of a conversation that is too long: reject it, or drop its oldest turns (never the system "
            "message; the answer reports it)."
        ),
    ] = "none"
    ignore_parameters: Annotated[
        tuple[SamplingField, ...],
        _generation(
            "Request fields to ignore, instead of rejecting the request, if a model does not support them; repeatable. "
            "The header x-shoal-ignored lists them."
        ),
    ] = ()
    replica_routing: Annotated[
        Literal["session", "prefix", "load"],
        _generation(
            "Which of several replicas answers. session: requests of one session (x-session-id, prompt_cache_key, "
            "user) go to one; prefix: so do others that begin alike; load: the one with the fewest tokens in flight."
        ),
    ] = "session"
    strip_parameters: Annotated[
        tuple[Name, ...],
        _generation("Request fields not to forward to an OpenAI-compatible server; repeatable."),
    ] = ()
    translate_responses: Annotated[
        bool,
        _generation(
            "Send chat completions to an OpenAI-compatible server for /v1/responses even if it has that route, as for "
            "one that accepts only functions there."
        ),
    ] = False
    kv_cache_mb: Annotated[
        CountOrZero, _generation("Memory of a local language model for contexts, in MB. 0: automatic.")
    ] = 0
    kv_cache_precision: Annotated[
        Literal["auto", "f32", "f16", "u8"],
        _generation("Precision of the contexts of a local language model; auto is f32 with precision f32, else f16."),
    ] = "auto"
    dynamic_quantization: Annotated[
        Literal["auto", "on", "off"],
        _generation(
            "Round activations of a local language model to 8 bits if its weights are quantized; auto is off with "
            "precision f32, else the engine's default."
        ),
    ] = "auto"
    prefix_caching: Annotated[bool, _generation("Let local language models reuse common prompt prefixes.")] = True
    upstream_api_key: Annotated[
        str | None, _generation("API key for upstream OpenAI-compatible servers.", secret=True)
    ] = None

    home: Annotated[Name, _files("Folder of downloaded and converted models.", path=True, essential=True)] = (
        "~/.cache/shoal"
    )
    offline: Annotated[bool, _files("Use only models already in the folder; never download.", essential=True)] = False
    hf_token: Annotated[str | None, _files("Token for private models on the Hugging Face hub.", secret=True)] = None

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], _logs("Minimum severity to log.", essential=True)
    ] = "info"
    log_format: Annotated[
        Literal["auto", "text", "json"], _logs("Format of log lines; auto is text on a terminal, JSON elsewhere.")
    ] = "auto"
    access_log: Annotated[bool, _logs("Log one line per request.")] = True
    explain_requests: Annotated[
        CountOrZero, _logs("Last requests kept in memory for `shoal explain`, about 1 KB each. 0: none.")
    ] = 1000

    def __repr__(self) -> str:
        shown = ", ".join(f"{setting.name}={setting.mask(getattr(self, setting.name))!r}" for setting in SETTINGS)
        return f"Settings({shown})"


class ModelTable(msgspec.Struct, frozen=True, kw_only=True):
    """The table `[models."name"]` of the file. `overrides` holds settings whose values differ for this model."""

    backends: Annotated[tuple[Name, ...], _key("Addresses of the model's replicas, as on the command line.")] = ()
    aliases: Annotated[tuple[Name, ...], _key("Other names that requests may use.")] = ()
    default_for: Annotated[
        tuple[Literal["embed", "rerank", "classify", "generate"], ...],
        _key("Tasks for which it is the default model."),
    ] = ()
    tokenizer: Annotated[
        Name | None, _key("Source of a remote model's tokenizer: an address (hf:org/name) or a folder.")
    ] = None
    pooling: Annotated[
        Literal["cls", "mean", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"] | None,
        _key("Pooling of a remote model's token vectors."),
    ] = None
    max_tokens: Annotated[Count | None, _key("Maximum tokens of a text, special tokens included.")] = None
    normalize: Annotated[bool | None, _key("Normalize a remote model's vectors unless a request says otherwise.")] = (
        None
    )
    dimension: Annotated[
        Count | None, _key("Required dimension of the vectors; a model that differs is not served.")
    ] = None
    input_names: Annotated[
        dict[InputName, Name], _key("A remote model's names of its inputs, by their usual names.")
    ] = {}
    output_names: Annotated[
        dict[OutputName, Name], _key("A remote model's names of its outputs, by their usual names.")
    ] = {}
    passes: Annotated[
        tuple[
            Literal[
                "dimensions",
                "input_type",
                "normalize",
                "prompt_name",
                "truncate",
                "truncation_direction",
                "max_document_tokens",
            ],
            ...,
        ],
        _key("Request options to forward because an OpenAI-compatible server supports them itself."),
    ] = ()
    prompts: Annotated[dict[Name, str], _key("Texts to prepend to inputs, by name: query, document, ...")] = {}
    default_prompt_name: Annotated[Name | None, _key("Prompt for requests that name none.")] = None
    tasks: Annotated[
        tuple[Literal["embed", "rerank", "classify", "generate"], ...],
        _key("Tasks of a remote model, if its server does not report them."),
    ] = ()
    labels: Annotated[tuple[Name, ...], _key("Labels of a classifier on Triton, in the order of its scores.")] = ()
    activation: Annotated[
        Literal["identity", "sigmoid", "softmax"] | None,
        _key("Activation applied to the scores of a model on Triton; identity if they are final."),
    ] = None
    context_tokens: Annotated[
        Count | None, _key("Maximum tokens of prompt and answer together, if the model does not report it.")
    ] = None
    vision: Annotated[
        bool | None, _key("Whether chats of a remote model may hold images, if its server does not report it.")
    ] = None
    sampling: Annotated[
        dict[Name, bool | int | float | list[str]],
        _key("Default sampling fields: temperature, top_p, top_k, stop, ..."),
    ] = {}
    adapters: Annotated[
        dict[Name, str | int],
        _key("LoRA adapters, requested as MODEL:NAME: maps NAME to the backend's name or number."),
    ] = {}
    ray: Annotated[
        dict[Name, Any],
        _key("Options of its Ray Serve deployment: num_replicas, ray_actor_options, autoscaling_config, ..."),
    ] = {}
    overrides: dict[str, Any] = {}
    if_language_model: dict[str, Any] = {}
    """Keys that a preset sets for models that generate text, unless this table sets them."""

    def with_defaults(self, keys: Mapping[str, Any]) -> ModelTable:
        """Return the table with `keys` added where it does not set them."""
        return msgspec.structs.replace(self, **{key: value for key, value in keys.items() if not getattr(self, key)})

    @property
    def for_language_model(self) -> ModelTable:
        """Return the table to use if this model generates text."""
        return self.with_defaults(self.if_language_model)


def _to_settings(struct: type[msgspec.Struct]) -> tuple[Setting, ...]:
    return tuple(
        Setting(row.name, row.type, row.default, meta.description, **meta.extra)
        for row in msgspec.structs.fields(struct)
        for meta in getattr(row.type, "__metadata__", ())
        if meta.description is not None
    )


SETTINGS = _to_settings(Settings)
BY_NAME: Mapping[str, Setting] = {setting.name: setting for setting in SETTINGS}
MODEL_KEYS: Mapping[str, Setting] = {
    **{row.name: row for row in _to_settings(ModelTable)},
    **{setting.name: setting for setting in SETTINGS if setting.per_model},
}
