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
        title="ASCII without spaces, or such a KEY with its class (`KEY bulk`, `KEY interactive`)",
    ),
]
Origin: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"^https?://[^/\s*?#@]+\Z",
        title="an exact origin as https://app.example.org (* would let every page on the web use this server)",
    ),
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
        title="as `name: value`, the name in lower case, the value in ASCII",
    ),
]
InputName: TypeAlias = Literal[
    "input_ids", "attention_mask", "token_type_ids", "position_ids", "pooling_mask", "text", "pair"
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
_life = _section("Life of models")
_triton = _section("Triton")
_files = _section("Model files")
_logs = _section("Logs")
_key = _section("")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings with type, bounds, help and default. `repr` masks secrets."""

    host: Annotated[Name, _server("Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535), _server("Port to listen on; 0 lets the system choose.")] = 8080
    insecure: Annotated[bool, _server("Allow an address that others can reach without any API key.")] = False
    api_key: Annotated[
        tuple[Key, ...], _server("Key that clients must send as `Authorization: Bearer`; repeatable.", secret=True)
    ] = ()
    api_key_file: Annotated[
        str | None,
        _server(
            "File of such keys, one a line, as KEY, `KEY bulk` or `KEY interactive`; lines that begin with # are "
            "comments.",
            path=True,
        ),
    ] = None
    admin_key: Annotated[
        tuple[Key, ...], _server("Key for routes that change the server; repeatable.", secret=True)
    ] = ()
    admin_key_file: Annotated[str | None, _server("File of such keys, as `api_key_file`.", path=True)] = None
    cors_origins: Annotated[
        tuple[Origin, ...], _server("Web origins whose pages may call this server; repeatable.")
    ] = ()
    client_header: Annotated[
        str,
        Meta(pattern=r"^[A-Za-z0-9-]*\Z", title="the name of a header"),
        _server("Header that names the user, set by a proxy that you trust; fairness then counts per user."),
    ] = ""
    metrics_default: Annotated[
        Literal["prometheus", "json"],
        _server(
            "What /metrics answers to a client that names no type: Prometheus text, or Triton's statistics of each "
            "model as JSON. With json both this and /health are inference-server's, names of models as well."
        ),
    ] = "prometheus"
    embed_dialect: Annotated[
        Literal["tei", "auto-batching-proxy"],
        _server(
            "Whose API POST /embed is: text-embeddings-inference, or auto-batching-proxy, which then has /health as "
            "well."
        ),
    ] = "tei"
    status_dialect: Annotated[
        Literal["shoal", "infinity"],
        _server(
            "Whose form /health and the lists of models have. With infinity, a list also has Infinity's `stats` and "
            "`capabilities`, and /models leaves out models that are not served."
        ),
    ] = "shoal"
    batch_info: Annotated[bool, _server("Tell of the batch in the answers of auto-batching-proxy's /embed.")] = False
    any_model: Annotated[
        bool,
        _server(
            "/v1/embeddings without `model`, or with the name of no model here, is answered by the default model for "
            "embedding, and not refused."
        ),
    ] = False
    token_ids: Annotated[
        Literal["refuse", "accept"],
        _server(
            "Token ids as the input of /v1/embeddings: refused, since most clients that send them made them with "
            "OpenAI's tokenizer, or accepted as the model's own."
        ),
    ] = "refuse"
    tei_metrics: Annotated[
        bool, _server("Also show the metrics of text-embeddings-inference, `te_*`, on /metrics.")
    ] = False
    proxy_metrics: Annotated[bool, _server("Also show the metrics of triton-grpc-proxy, `tgp_*`, on /metrics.")] = False

    max_body_bytes: Annotated[int, Meta(ge=1024), _limits("Largest request body.")] = 16777216
    max_inputs: Annotated[Count, _limits("Most inputs in one request.")] = 2048
    image_hosts: Annotated[
        str,
        _limits(
            "Hosts between commas that pictures may be fetched from, with a port where it is neither 80 nor 443; "
            "`public` among them allows every host on the public internet. Empty: URLs are refused."
        ),
    ] = ""
    image_max_mb: Annotated[
        Count,
        _limits(
            "Largest file of one picture, and of the pictures that one request's URLs bring in all, in MB of 2^20 "
            "bytes."
        ),
    ] = 20
    image_seconds: Annotated[Duration, _limits("Time to fetch one picture.")] = 10.0
    max_queue_items: Annotated[
        Count, _limits("Most items waiting or running for a model; one client may hold at most half.", per_model=True)
    ] = 16384
    max_queue_ms: Annotated[
        DurationOrZero,
        _limits("Longest standing queue for interactive requests; 0: only their deadlines count.", per_model=True),
    ] = 1000.0
    max_streams: Annotated[Count, _limits("Most generation requests of a model in flight.", per_model=True)] = 256
    max_queued_streams: Annotated[
        CountOrZero,
        _limits("Most requests that wait for such a place; one client may hold at most half of them.", per_model=True),
    ] = 1024

    max_batch_size: Annotated[Count, _batching("Most items in one batch.")] = 64
    max_batch_tokens: Annotated[Count, _batching("Most tokens in one batch, padding included.")] = 16384
    max_batch_ms: Annotated[
        Duration,
        _batching(
            "Longest time that a batch may be expected to run, or twice a call's own where that is more; of pictures "
            "ten times as long."
        ),
    ] = 40.0
    max_wait_time_ms: Annotated[
        DurationOrZero,
        _batching("Longest time that a free engine waits for more items; 0 sends what is there at once."),
    ] = 0.0
    max_age_ms: Annotated[Duration, _batching("Age at which an item goes next, whatever its class or client.")] = 250.0
    towers: Annotated[
        Literal["both", "text", "image"],
        _engine("Of a model of texts and pictures, what is loaded: one that only embeds texts needs no image tower."),
    ] = "both"
    truncate: Annotated[
        bool, _engine("Cut inputs that are too long for the model (the answer says so), or refuse.")
    ] = True

    cache_mb: Annotated[
        CountOrZero,
        _cache(
            "Memory for a model's answers, in MB of 2^20 bytes: an input that was answered before is not computed "
            "again. 0: none."
        ),
    ] = 0
    cache_disk_mb: Annotated[
        CountOrZero, _cache("Room for them on disk, in `rows` under `home`, where they outlive the server. 0: none.")
    ] = 0

    embed_timeout_s: Annotated[Duration, _times("Time for one embedding request, from its arrival.")] = 30.0
    generate_timeout_s: Annotated[Duration, _times("Time for one generation request, from its arrival.")] = 600.0
    first_token_timeout_s: Annotated[Duration, _times("Time until a model's first token.")] = 60.0
    token_timeout_s: Annotated[Duration, _times("Time between a model's tokens.")] = 60.0
    heartbeat_s: Annotated[
        Duration, _times("Silence in a stream after which a comment is sent, so that proxies do not cut it.")
    ] = 15.0
    load_timeout_s: Annotated[Duration, _times("Time for a model to load, download included.")] = 600.0
    connect_timeout_s: Annotated[Duration, _times("Time to reach another server.")] = 5.0
    body_timeout_s: Annotated[Duration, _times("Time for a client to send its request's body.")] = 30.0
    drain_timeout_s: Annotated[DurationOrZero, _times("Time for requests in flight to finish after SIGTERM.")] = 30.0
    drain_idle_s: Annotated[
        DurationOrZero,
        _times("Time that idle keep-alive connections stay open while draining, each for one more request."),
    ] = 5.0
    drain_delay_s: Annotated[
        DurationOrZero,
        _times(
            "Time to go on accepting after SIGTERM while readiness already says no; give load balancers their probe "
            "period here."
        ),
    ] = 0.0

    default_model: Annotated[bool, _life("Serve the default model when none is named; off starts with no model.")] = (
        True
    )
    backend: Annotated[
        Literal["auto", "local", "triton"],
        _life(
            "Where a model runs that comes from files (hf:, pypi:, file:): in this process, or in Triton; auto takes "
            "Triton where `triton` or `triton_url` is set.",
            per_model=True,
        ),
    ] = "auto"
    max_loaded_models: Annotated[
        CountOrZero,
        _life(
            "Most models loaded at once; past it the one unused for longest sleeps until it is asked for. 0 is any "
            "number."
        ),
    ] = 0
    max_loaded_bytes: Annotated[CountOrZero, _life("Most bytes of loaded models, kept in the same way; 0 is any.")] = 0
    keep_alive_s: Annotated[DurationOrZero, _life("Time without a request after which a model sleeps; 0 is never.")] = (
        0.0
    )

    triton: Annotated[bool, _triton("Start a Triton beside this server and use it.")] = False
    triton_url: Annotated[
        str,
        Meta(
            pattern=r"^((tritons?://)?[^\s/#@?%=]+|triton://(/[^\s/,#@?%]+)+)?\Z",
            title="host or host:port, after tritons:// with TLS, or triton:///PATH of a Unix socket",
        ),
        _triton("gRPC address of the Triton that loads models for `backend`."),
    ] = ""
    triton_repository: Annotated[
        str,
        _triton(
            "Folder of that Triton's model repository, as seen from here; without one, files are sent with the "
            "request to load.",
            path=True,
        ),
    ] = ""
    triton_metadata: Annotated[
        tuple[Metadatum, ...], _triton("Metadata sent with every call to Triton; repeatable.", secret=True)
    ] = ()
    triton_ca_file: Annotated[
        str | None, _triton("Certificates (PEM) that Triton's must descend from; else the usual ones.", path=True)
    ] = None
    triton_cert_file: Annotated[str | None, _triton("Certificate (PEM) to show to Triton.", path=True)] = None
    triton_key_file: Annotated[str | None, _triton("Private key (PEM) of that certificate.", path=True)] = None
    triton_platform: Annotated[
        Literal["auto", "onnxruntime", "openvino", "tensorrt", "python"],
        _triton(
            "Triton backend that models are written for; auto takes onnxruntime, or python where Triton lacks it.",
            per_model=True,
        ),
    ] = "auto"
    triton_instances: Annotated[Count, _triton("Instances of a model in Triton.", per_model=True)] = 1
    triton_kind: Annotated[
        Literal["auto", "cpu", "gpu"],
        _triton("Where Triton puts the instances; auto leaves it to Triton.", per_model=True),
    ] = "auto"
    triton_fp16: Annotated[bool, _triton("Let the accelerator compute in half precision.", per_model=True)] = False
    triton_accelerator: Annotated[
        Literal["none", "tensorrt", "openvino"],
        _triton("Accelerator inside Triton's onnxruntime backend.", per_model=True),
    ] = "none"
    triton_text_in: Annotated[
        bool,
        _triton("Also write a tokenizer and an ensemble, so that Triton's own clients can send text.", per_model=True),
    ] = False
    triton_dynamic_batching: Annotated[
        bool, _triton("Let Triton join batches of its several clients.", per_model=True)
    ] = True
    triton_queue_size: Annotated[
        CountOrZero, _triton("Most requests that wait in Triton's dynamic batcher; 0 is any number.", per_model=True)
    ] = 0

    engine: Annotated[
        Literal["auto", "openvino", "onnxruntime", "torch"],
        _engine("What runs local models; torch runs them from their own files, on a GPU where there is one."),
    ] = "auto"
    precision: Annotated[
        Literal["auto", "f32", "bf16", "fp16", "int8"],
        _engine(
            "Arithmetic of local models; auto takes 16 bits where the hardware has them and the check at load time "
            "agrees with f32. int8 is smaller and faster, and a vector space of its own."
        ),
    ] = "auto"
    streams: Annotated[
        CountOrZero,
        _engine("Batches that a local engine runs side by side, or that are sent to a TEI server at once; 0 chooses."),
    ] = 0
    threads: Annotated[CountOrZero, _engine("Processor threads for a local engine; 0 chooses.")] = 0
    convert: Annotated[
        Literal["auto", "never"],
        _engine(
            "What becomes of an architecture or of pickled weights that Shoal cannot read itself: auto has PyTorch "
            "convert them, in a process of its own, where the extra convert is installed."
        ),
    ] = "auto"
    convert_max_memory_mb: Annotated[
        CountOrZero, _engine("Memory of that process; 0 is three quarters of the machine's.")
    ] = 0
    convert_timeout_s: Annotated[Duration, _engine("Seconds that it may take.")] = 1800.0

    chat_template: Annotated[
        str | None, _generation("File with the chat template (Jinja) to use instead of the model's own.", path=True)
    ] = None
    tool_call_parser: Annotated[
        Literal["auto", "none", "hermes", "llama3", "mistral", "pythonic"],
        _generation(
            "How a model writes calls of tools; auto tells it from the chat template, none leaves them in the text."
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal["none", "think"],
        _generation("Split what a model thinks from its answer: think is what stands between <think> and </think>."),
    ] = "none"
    default_max_tokens: Annotated[
        CountOrZero,
        _generation(
            "Most tokens of an answer where the request does not say; 0 is whatever the context has room for (1024 "
            "where that is not known and the model has to be told)."
        ),
    ] = 0
    prompt_truncation: Annotated[
        Literal["none", "oldest"],
        _generation(
            "What happens to a conversation that is too long: it is refused, or its oldest turns are left out (never "
            "the system message; the answer says so)."
        ),
    ] = "none"
    ignore_parameters: Annotated[
        tuple[SamplingField, ...],
        _generation(
            "Request fields to ignore where a model cannot honor them, instead of refusing the request; repeatable. "
            "The header x-shoal-ignored names them."
        ),
    ] = ()
    strip_parameters: Annotated[
        tuple[Name, ...],
        _generation("Request fields that are not passed on to an OpenAI-compatible server; repeatable."),
    ] = ()
    kv_cache_mb: Annotated[
        CountOrZero, _generation("Memory of a local language model for contexts, in MB; 0 chooses.")
    ] = 0
    kv_cache_precision: Annotated[
        Literal["auto", "f32", "f16", "u8"],
        _generation(
            "Precision in which a local language model keeps contexts; auto is f32 under precision f32, else f16."
        ),
    ] = "auto"
    dynamic_quantization: Annotated[
        Literal["auto", "on", "off"],
        _generation(
            "Round activations of a local language model to 8 bits where its weights are quantized; auto is off under "
            "precision f32, else the engine's default."
        ),
    ] = "auto"
    prefix_caching: Annotated[bool, _generation("Let local language models keep what prompts have in common.")] = True
    upstream_api_key: Annotated[
        str | None, _generation("Key for OpenAI-compatible servers behind this one.", secret=True)
    ] = None

    home: Annotated[Name, _files("Folder of downloaded and converted models.", path=True)] = "~/.cache/shoal"
    offline: Annotated[bool, _files("Use only models that are in the folder already; never download.")] = False
    hf_token: Annotated[str | None, _files("Token for private models of the Hugging Face hub.", secret=True)] = None

    log_level: Annotated[Literal["debug", "info", "warning", "error"], _logs("Least severity that is logged.")] = "info"
    log_format: Annotated[
        Literal["auto", "text", "json"], _logs("Form of log lines; auto is text on a terminal, JSON elsewhere.")
    ] = "auto"
    access_log: Annotated[bool, _logs("Log one line per request.")] = True

    def __repr__(self) -> str:
        shown = ", ".join(f"{setting.name}={setting.mask(getattr(self, setting.name))!r}" for setting in SETTINGS)
        return f"Settings({shown})"


class ModelTable(msgspec.Struct, frozen=True, kw_only=True):
    """The table `[models."name"]` of the file. `overrides` holds settings whose values differ for this model."""

    backends: Annotated[tuple[Name, ...], _key("Addresses of the model's replicas, as on the command line.")] = ()
    aliases: Annotated[tuple[Name, ...], _key("Other names that requests may use.")] = ()
    default_for: Annotated[
        tuple[Literal["embed", "rerank", "classify", "generate"], ...],
        _key("Tasks for which it is the model when a request names none."),
    ] = ()
    tokenizer: Annotated[
        Name | None, _key("Where a remote model's tokenizer is: an address (hf:org/name) or a folder.")
    ] = None
    pooling: Annotated[
        Literal["cls", "mean", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"] | None,
        _key("How a remote model's token vectors become one."),
    ] = None
    max_tokens: Annotated[Count | None, _key("Most tokens of a text, special ones included.")] = None
    normalize: Annotated[
        bool | None, _key("Give a remote model's vectors the length 1 where a request does not say otherwise.")
    ] = None
    dimension: Annotated[
        Count | None, _key("Length that the vectors must have; a model that differs is not served.")
    ] = None
    input_names: Annotated[
        dict[InputName, Name], _key("What a remote model calls its inputs, by their usual names.")
    ] = {}
    output_names: Annotated[
        dict[OutputName, Name], _key("What a remote model calls its outputs, by their usual names.")
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
        _key("Options of requests that an OpenAI-compatible server honours itself, to be sent to it."),
    ] = ()
    prompts: Annotated[dict[Name, str], _key("Texts to put before an input, by name: query, document, ...")] = {}
    default_prompt_name: Annotated[Name | None, _key("The prompt of requests that name none.")] = None
    tasks: Annotated[
        tuple[Literal["embed", "rerank", "classify", "generate"], ...],
        _key("What a remote model can do, where asking its server does not tell."),
    ] = ()
    labels: Annotated[
        tuple[Name, ...], _key("Labels of a model on Triton that classifies, in the order of its scores.")
    ] = ()
    activation: Annotated[
        Literal["identity", "sigmoid", "softmax"] | None,
        _key("What turns the scores of a model on Triton into final ones; identity where they are final."),
    ] = None
    context_tokens: Annotated[
        Count | None, _key("Most tokens of prompt and answer together, where the model does not tell.")
    ] = None
    sampling: Annotated[
        dict[Name, bool | int | float | list[str]],
        _key("Sampling fields for requests that do not say: temperature, top_p, top_k, stop, ..."),
    ] = {}
    adapters: Annotated[
        dict[Name, str | int],
        _key("LoRAs, asked for as MODEL:NAME: the name to what the backend calls it (a name or number)."),
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
