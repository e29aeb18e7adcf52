"""Defines every setting, and every key of a model in `shoal.toml`: names, types, bounds, defaults, help.

Flags, environment names, file keys, help texts and `docs/settings.md` are all generated from these tables. A setting is
`--kebab-case` on the command line, `SHOAL_UPPER_CASE` in the environment and its own name in the file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, inspect

from shoal.decoding import converter
from shoal.errors import ConfigError

ENV_PREFIX = "SHOAL_"

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
Metadatum: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"^[0-9a-z_.-]+: ?[\x20-\x7e]+\Z",
        title="as `name: value`, the name in lower case, the value in ASCII",
    ),
]
Ignorable: TypeAlias = Literal[
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop",
    "include_stop_str_in_output",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "repeat_penalty",
    "length_penalty",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "bad_words",
    "ignore_eos",
    "skip_special_tokens",
    "guide",
    "response_format",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
    "format",
    "text",
    "best_of",
    "tools",
    "tool_choice",
    # fields of other servers that no model here supports
    "use_beam_search",
    "allowed_token_ids",
    "logits_processors",
    "prompt_logprobs",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
    "repetition_detection",
    "typical_p",
    "typ_p",
    "tfs_z",
    "top_a",
    "top_n_sigma",
    "mirostat",
    "mirostat_mode",
    "dynatemp_range",
    "xtc_probability",
    "dry_multiplier",
    "repeat_penalty",
    "samplers",
    "grammar",
    "json_schema",
    "do_sample",
    "num_beams",
    "early_stopping",
    "no_repeat_ngram_size",
    "epsilon_cutoff",
    "eta_cutoff",
    "penalty_alpha",
    "smoothing_factor",
    "guidance_scale",
    "decoder_input_details",
    "watermark",
]
"""Request fields that a model may not support, under the names clients use. Listed fields are ignored."""

InputName: TypeAlias = Literal[
    "input_ids", "attention_mask", "token_type_ids", "position_ids", "pooling_mask", "text", "pair"
]
OutputName: TypeAlias = Literal[
    "sentence_embedding", "pooled", "token_embeddings", "embedding", "token_count", "logits", "sparse_embedding"
]

_SERVER = {"section": "Server"}
_SERVER_PATH = {**_SERVER, "path": True}
_SERVER_SECRET = {**_SERVER, "secret": True}
_LIMITS = {"section": "Limits"}
_BATCHING = {"section": "Batching", "per_model": True}
_TIMES = {"section": "Deadlines"}
_ENGINE = {"section": "Engine", "per_model": True}
_GENERATION = {"section": "Generation", "per_model": True}
_CACHE = {"section": "Cache", "per_model": True}
_LIFE = {"section": "Life of models"}
_TRITON = {"section": "Triton"}
_CONNECTION = {**_TRITON, "path": True}
_ENTRY = {**_TRITON, "per_model": True}
_FILES = {"section": "Model files"}
_LOGS = {"section": "Logs"}


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings with type, bounds, help and default. `repr` masks secrets."""

    host: Annotated[str, Meta(description="Address to listen on.", min_length=1, extra=_SERVER)] = "127.0.0.1"
    port: Annotated[
        int, Meta(description="Port to listen on; 0 lets the system choose.", ge=0, le=65535, extra=_SERVER)
    ] = 8080
    insecure: Annotated[
        bool, Meta(description="Allow an address that others can reach without any API key.", extra=_SERVER)
    ] = False
    api_key: Annotated[
        tuple[Key, ...],
        Meta(description="Key that clients must send as `Authorization: Bearer`; repeatable.", extra=_SERVER_SECRET),
    ] = ()
    api_key_file: Annotated[
        str | None,
        Meta(
            description="File of such keys, one a line, as KEY, `KEY bulk` or `KEY interactive`; lines that begin with"
            " # are comments.",
            extra=_SERVER_PATH,
        ),
    ] = None
    admin_key: Annotated[
        tuple[Key, ...],
        Meta(description="Key for routes that change the server; repeatable.", extra=_SERVER_SECRET),
    ] = ()
    admin_key_file: Annotated[
        str | None, Meta(description="File of such keys, as `api_key_file`.", extra=_SERVER_PATH)
    ] = None
    cors_origins: Annotated[
        tuple[Origin, ...],
        Meta(description="Web origins whose pages may call this server; repeatable.", extra=_SERVER),
    ] = ()
    client_header: Annotated[
        str,
        Meta(
            description="Header that names the user, set by a proxy that you trust; fairness then counts per user.",
            pattern=r"^[A-Za-z0-9-]*\Z",
            title="the name of a header",
            extra=_SERVER,
        ),
    ] = ""
    metrics_default: Annotated[
        Literal["prometheus", "json"],
        Meta(
            description="What /metrics answers to a client that names no type: Prometheus text, or Triton's statistics"
            " of each model as JSON. With json both this and /health are inference-server's, names of models as well.",
            extra=_SERVER,
        ),
    ] = "prometheus"
    embed_dialect: Annotated[
        Literal["tei", "auto-batching-proxy"],
        Meta(
            description="Whose API POST /embed is: text-embeddings-inference, or auto-batching-proxy, which then has"
            " /health as well.",
            extra=_SERVER,
        ),
    ] = "tei"
    status_dialect: Annotated[
        Literal["shoal", "infinity"],
        Meta(
            description="Whose form /health and the lists of models have. With infinity, a list also has Infinity's"
            " `stats` and `capabilities`, and /models leaves out models that are not served.",
            extra=_SERVER,
        ),
    ] = "shoal"
    batch_info: Annotated[
        bool, Meta(description="Tell of the batch in the answers of auto-batching-proxy's /embed.", extra=_SERVER)
    ] = False
    any_model: Annotated[
        bool,
        Meta(
            description="/v1/embeddings without `model`, or with the name of no model here, is answered by the default"
            " model for embedding, and not refused.",
            extra=_SERVER,
        ),
    ] = False
    token_ids: Annotated[
        Literal["refuse", "accept"],
        Meta(
            description="Token ids as the input of /v1/embeddings: refused, since most clients that send them made them"
            " with OpenAI's tokenizer, or accepted as the model's own.",
            extra=_SERVER,
        ),
    ] = "refuse"
    tei_metrics: Annotated[
        bool,
        Meta(description="Also show the metrics of text-embeddings-inference, `te_*`, on /metrics.", extra=_SERVER),
    ] = False
    proxy_metrics: Annotated[
        bool,
        Meta(description="Also show the metrics of triton-grpc-proxy, `tgp_*`, on /metrics.", extra=_SERVER),
    ] = False

    max_body_bytes: Annotated[int, Meta(description="Largest request body.", ge=1024, extra=_LIMITS)] = 33554432
    max_inputs: Annotated[int, Meta(description="Most inputs in one request.", ge=1, extra=_LIMITS)] = 2048
    image_hosts: Annotated[
        str,
        Meta(
            description="Hosts between commas that pictures may be fetched from, with a port where it is neither 80 nor"
            " 443; `public` among them allows every host on the public internet. Empty: URLs are refused.",
            extra=_LIMITS,
        ),
    ] = ""
    image_max_mb: Annotated[
        int,
        Meta(
            description="Largest file of one picture, and of the pictures that one request's URLs bring in all, in MB"
            " of 2^20 bytes.",
            ge=1,
            extra=_LIMITS,
        ),
    ] = 20
    image_seconds: Annotated[float, Meta(description="Time to fetch one picture.", gt=0, extra=_LIMITS)] = 10.0
    max_queue_items: Annotated[
        int,
        Meta(
            description="Most items waiting or running for a model; one client may hold at most half.",
            ge=1,
            extra={**_LIMITS, "per_model": True},
        ),
    ] = 16384
    max_queue_ms: Annotated[
        float,
        Meta(
            description="Longest standing queue for interactive requests; 0: only their deadlines count.",
            ge=0,
            extra={**_LIMITS, "per_model": True},
        ),
    ] = 1000.0
    max_streams: Annotated[
        int,
        Meta(description="Most generation requests of a model in flight.", ge=1, extra={**_LIMITS, "per_model": True}),
    ] = 256
    max_queued_streams: Annotated[
        int,
        Meta(
            description="Most requests that wait for such a place; one client may hold at most half of them.",
            ge=0,
            extra={**_LIMITS, "per_model": True},
        ),
    ] = 1024

    max_batch_size: Annotated[int, Meta(description="Most items in one batch.", ge=1, extra=_BATCHING)] = 64
    max_batch_tokens: Annotated[
        int, Meta(description="Most tokens in one batch, padding included.", ge=1, extra=_BATCHING)
    ] = 16384
    max_batch_ms: Annotated[
        float,
        Meta(
            description="Longest time that a batch may be expected to run, or twice a call's own where that is more; of"
            " pictures ten times as long.",
            gt=0,
            extra=_BATCHING,
        ),
    ] = 40.0
    max_wait_time_ms: Annotated[
        float,
        Meta(
            description="Longest time that a free engine waits for more items; 0 sends what is there at once.",
            ge=0,
            extra=_BATCHING,
        ),
    ] = 0.0
    max_age_ms: Annotated[
        float,
        Meta(description="Age at which an item goes next, whatever its class or client.", gt=0, extra=_BATCHING),
    ] = 250.0
    towers: Annotated[
        Literal["both", "text", "image"],
        Meta(
            description="Of a model of texts and pictures, what is loaded: one that only embeds texts needs no image"
            " tower.",
            extra=_ENGINE,
        ),
    ] = "both"
    truncate: Annotated[
        bool,
        Meta(description="Cut inputs that are too long for the model (the answer says so), or refuse.", extra=_ENGINE),
    ] = True

    cache_mb: Annotated[
        int,
        Meta(
            description="Memory for a model's answers, in MB of 2^20 bytes: an input that was answered before is not"
            " computed again. 0: none.",
            ge=0,
            extra=_CACHE,
        ),
    ] = 0
    cache_disk_mb: Annotated[
        int,
        Meta(
            description="Room for them on disk, in `rows` under `home`, where they outlive the server. 0: none.",
            ge=0,
            extra=_CACHE,
        ),
    ] = 0

    embed_timeout_s: Annotated[
        float, Meta(description="Time for one embedding request, from its arrival.", gt=0, extra=_TIMES)
    ] = 30.0
    generate_timeout_s: Annotated[
        float, Meta(description="Time for one generation request, from its arrival.", gt=0, extra=_TIMES)
    ] = 600.0
    first_token_timeout_s: Annotated[
        float, Meta(description="Time until a model's first token.", gt=0, extra=_TIMES)
    ] = 60.0
    token_timeout_s: Annotated[float, Meta(description="Time between a model's tokens.", gt=0, extra=_TIMES)] = 60.0
    heartbeat_s: Annotated[
        float,
        Meta(
            description="Silence in a stream after which a comment is sent, so that proxies do not cut it.",
            gt=0,
            extra=_TIMES,
        ),
    ] = 15.0
    load_timeout_s: Annotated[
        float, Meta(description="Time for a model to load, download included.", gt=0, extra=_TIMES)
    ] = 600.0
    connect_timeout_s: Annotated[float, Meta(description="Time to reach another server.", gt=0, extra=_TIMES)] = 5.0
    body_timeout_s: Annotated[
        float, Meta(description="Time for a client to send its request's body.", gt=0, extra=_TIMES)
    ] = 30.0
    drain_timeout_s: Annotated[
        float, Meta(description="Time for requests in flight to finish after SIGTERM.", ge=0, extra=_TIMES)
    ] = 30.0
    drain_idle_s: Annotated[
        float,
        Meta(
            description="Time that idle keep-alive connections stay open while draining, each for one more request.",
            ge=0,
            extra=_TIMES,
        ),
    ] = 5.0
    drain_delay_s: Annotated[
        float,
        Meta(
            description="Time to go on accepting after SIGTERM while readiness already says no; give load balancers"
            " their probe period here.",
            ge=0,
            extra=_TIMES,
        ),
    ] = 0.0

    default_model: Annotated[
        bool, Meta(description="Serve the default model when none is named; off starts with no model.", extra=_LIFE)
    ] = True
    backend: Annotated[
        Literal["auto", "local", "triton"],
        Meta(
            description="Where a model runs that comes from files (hf:, pypi:, file:): in this process, or in Triton;"
            " auto takes Triton where `triton` or `triton_url` is set.",
            extra={**_LIFE, "per_model": True},
        ),
    ] = "auto"
    max_loaded_models: Annotated[
        int,
        Meta(
            description="Most models loaded at once; past it the one unused for longest sleeps until it is asked for."
            " 0 is any number.",
            ge=0,
            extra=_LIFE,
        ),
    ] = 0
    max_loaded_bytes: Annotated[
        int, Meta(description="Most bytes of loaded models, kept in the same way; 0 is any.", ge=0, extra=_LIFE)
    ] = 0
    keep_alive_s: Annotated[
        float, Meta(description="Time without a request after which a model sleeps; 0 is never.", ge=0, extra=_LIFE)
    ] = 0.0

    triton: Annotated[bool, Meta(description="Start a Triton beside this server and use it.", extra=_TRITON)] = False
    triton_url: Annotated[
        str,
        Meta(
            description="gRPC address of the Triton that loads models for `backend`.",
            pattern=r"^((tritons?://)?[^\s/#@?%=]+|triton://(/[^\s/,#@?%]+)+)?\Z",
            title="host or host:port, after tritons:// with TLS, or triton:///PATH of a Unix socket",
            extra=_TRITON,
        ),
    ] = ""
    triton_repository: Annotated[
        str,
        Meta(
            description="Folder of that Triton's model repository, as seen from here; without one, files are sent"
            " with the request to load.",
            extra=_CONNECTION,
        ),
    ] = ""
    triton_metadata: Annotated[
        tuple[Metadatum, ...],
        Meta(description="Metadata sent with every call to Triton; repeatable.", extra={**_TRITON, "secret": True}),
    ] = ()
    triton_ca_file: Annotated[
        str | None,
        Meta(description="Certificates (PEM) that Triton's must descend from; else the usual ones.", extra=_CONNECTION),
    ] = None
    triton_cert_file: Annotated[
        str | None, Meta(description="Certificate (PEM) to show to Triton.", extra=_CONNECTION)
    ] = None
    triton_key_file: Annotated[
        str | None, Meta(description="Private key (PEM) of that certificate.", extra=_CONNECTION)
    ] = None
    triton_platform: Annotated[
        Literal["auto", "onnxruntime", "openvino", "tensorrt", "python"],
        Meta(
            description="Triton backend that models are written for; auto takes onnxruntime, or python where Triton"
            " lacks it.",
            extra=_ENTRY,
        ),
    ] = "auto"
    triton_instances: Annotated[int, Meta(description="Instances of a model in Triton.", ge=1, extra=_ENTRY)] = 1
    triton_kind: Annotated[
        Literal["auto", "cpu", "gpu"],
        Meta(description="Where Triton puts the instances; auto leaves it to Triton.", extra=_ENTRY),
    ] = "auto"
    triton_fp16: Annotated[bool, Meta(description="Let the accelerator compute in half precision.", extra=_ENTRY)] = (
        False
    )
    triton_accelerator: Annotated[
        Literal["none", "tensorrt", "openvino"],
        Meta(description="Accelerator inside Triton's onnxruntime backend.", extra=_ENTRY),
    ] = "none"
    triton_text_in: Annotated[
        bool,
        Meta(
            description="Also write a tokenizer and an ensemble, so that Triton's own clients can send text.",
            extra=_ENTRY,
        ),
    ] = False
    triton_dynamic_batching: Annotated[
        bool, Meta(description="Let Triton join batches of its several clients.", extra=_ENTRY)
    ] = True
    triton_queue_size: Annotated[
        int,
        Meta(description="Most requests that wait in Triton's dynamic batcher; 0 is any number.", ge=0, extra=_ENTRY),
    ] = 0

    engine: Annotated[
        Literal["auto", "openvino", "onnxruntime", "torch"],
        Meta(
            description="What runs local models; torch runs them from their own files, on a GPU where there is one.",
            extra=_ENGINE,
        ),
    ] = "auto"
    precision: Annotated[
        Literal["auto", "f32", "bf16", "fp16", "int8"],
        Meta(
            description="Arithmetic of local models; auto takes 16 bits where the hardware has them and the check at"
            " load time agrees with f32. int8 is smaller and faster, and a vector space of its own.",
            extra=_ENGINE,
        ),
    ] = "auto"
    streams: Annotated[
        int,
        Meta(
            description="Batches that a local engine runs side by side, or that are sent to a TEI server at once; 0"
            " chooses.",
            ge=0,
            extra=_ENGINE,
        ),
    ] = 0
    threads: Annotated[
        int, Meta(description="Processor threads for a local engine; 0 chooses.", ge=0, extra=_ENGINE)
    ] = 0
    convert: Annotated[
        Literal["auto", "never"],
        Meta(
            description="What becomes of an architecture or of pickled weights that Shoal cannot read itself: auto"
            " has PyTorch convert them, in a process of its own, where the extra convert is installed.",
            extra=_ENGINE,
        ),
    ] = "auto"
    convert_max_memory_mb: Annotated[
        int,
        Meta(description="Memory of that process; 0 is three quarters of the machine's.", ge=0, extra=_ENGINE),
    ] = 0
    convert_timeout_s: Annotated[float, Meta(description="Seconds that it may take.", gt=0, extra=_ENGINE)] = 1800.0

    chat_template: Annotated[
        str | None,
        Meta(
            description="File with the chat template (Jinja) to use instead of the model's own.",
            extra={**_GENERATION, "path": True},
        ),
    ] = None
    tool_call_parser: Annotated[
        Literal["auto", "none", "hermes", "llama3", "mistral", "pythonic"],
        Meta(
            description="How a model writes calls of tools; auto tells it from the chat template, none leaves them in"
            " the text.",
            extra=_GENERATION,
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal["none", "think"],
        Meta(
            description="Split what a model thinks from its answer: think is what stands between <think> and </think>.",
            extra=_GENERATION,
        ),
    ] = "none"
    default_max_tokens: Annotated[
        int,
        Meta(
            description="Most tokens of an answer where the request does not say; 0 is whatever the context has room"
            " for (1024 where that is not known and the model has to be told).",
            ge=0,
            extra=_GENERATION,
        ),
    ] = 0
    prompt_truncation: Annotated[
        Literal["none", "oldest"],
        Meta(
            description="What happens to a conversation that is too long: it is refused, or its oldest turns are left"
            " out (never the system message; the answer says so).",
            extra=_GENERATION,
        ),
    ] = "none"
    ignore_parameters: Annotated[
        tuple[Ignorable, ...],
        Meta(
            description="Request fields to ignore where a model cannot honor them, instead of refusing the request;"
            " repeatable. The header x-shoal-ignored names them.",
            extra=_GENERATION,
        ),
    ] = ()
    strip_parameters: Annotated[
        tuple[Name, ...],
        Meta(
            description="Request fields that are not passed on to an OpenAI-compatible server; repeatable.",
            extra=_GENERATION,
        ),
    ] = ()
    kv_cache_mb: Annotated[
        int,
        Meta(description="Memory of a local language model for contexts, in MB; 0 chooses.", ge=0, extra=_GENERATION),
    ] = 0
    kv_cache_precision: Annotated[
        Literal["auto", "f32", "f16", "u8"],
        Meta(
            description="Precision in which a local language model keeps contexts; auto is f32 under precision f32,"
            " else f16.",
            extra=_GENERATION,
        ),
    ] = "auto"
    dynamic_quantization: Annotated[
        Literal["auto", "on", "off"],
        Meta(
            description="Round activations of a local language model to 8 bits where its weights are quantized; auto is"
            " off under precision f32, else the engine's default.",
            extra=_GENERATION,
        ),
    ] = "auto"
    prefix_caching: Annotated[
        bool, Meta(description="Let local language models keep what prompts have in common.", extra=_GENERATION)
    ] = True
    upstream_api_key: Annotated[
        str | None,
        Meta(description="Key for OpenAI-compatible servers behind this one.", extra={**_GENERATION, "secret": True}),
    ] = None

    home: Annotated[
        str,
        Meta(description="Folder of downloaded and converted models.", min_length=1, extra={**_FILES, "path": True}),
    ] = "~/.cache/shoal"
    offline: Annotated[
        bool, Meta(description="Use only models that are in the folder already; never download.", extra=_FILES)
    ] = False
    hf_token: Annotated[
        str | None,
        Meta(description="Token for private models of the Hugging Face hub.", extra={**_FILES, "secret": True}),
    ] = None

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Least severity that is logged.", extra=_LOGS)
    ] = "info"
    log_format: Annotated[
        Literal["auto", "text", "json"],
        Meta(description="Form of log lines; auto is text on a terminal, JSON elsewhere.", extra=_LOGS),
    ] = "auto"
    access_log: Annotated[bool, Meta(description="Log one line per request.", extra=_LOGS)] = True

    def __repr__(self) -> str:
        shown = ", ".join(f"{setting.name}={setting.mask(getattr(self, setting.name))!r}" for setting in SETTINGS)
        return f"Settings({shown})"


class ModelTable(msgspec.Struct, frozen=True, kw_only=True):
    """The table `[models."name"]` of the file. `overrides` holds settings whose values differ for this model."""

    backends: Annotated[
        tuple[Name, ...], Meta(description="Addresses of the model's replicas, as on the command line.")
    ] = ()
    aliases: Annotated[tuple[Name, ...], Meta(description="Other names that requests may use.")] = ()
    default_for: Annotated[
        tuple[Literal["embed", "rerank", "classify", "generate"], ...],
        Meta(description="Tasks for which it is the model when a request names none."),
    ] = ()
    tokenizer: Annotated[
        Name | None,
        Meta(
            description="Where a remote model's tokenizer is: an address (hf:org/name) or a folder.",
        ),
    ] = None
    pooling: Annotated[
        Literal["cls", "mean", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"] | None,
        Meta(description="How a remote model's token vectors become one."),
    ] = None
    max_tokens: Annotated[Count | None, Meta(description="Most tokens of a text, special ones included.")] = None
    normalize: Annotated[
        bool | None,
        Meta(description="Give a remote model's vectors the length 1 where a request does not say otherwise."),
    ] = None
    dimension: Annotated[
        Count | None, Meta(description="Length that the vectors must have; a model that differs is not served.")
    ] = None
    input_names: Annotated[
        dict[InputName, Name], Meta(description="What a remote model calls its inputs, by their usual names.")
    ] = {}
    output_names: Annotated[
        dict[OutputName, Name], Meta(description="What a remote model calls its outputs, by their usual names.")
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
        Meta(description="Options of requests that an OpenAI-compatible server honours itself, to be sent to it."),
    ] = ()
    prompts: Annotated[
        dict[Name, str], Meta(description="Texts to put before an input, by name: query, document, ...")
    ] = {}
    default_prompt_name: Annotated[Name | None, Meta(description="The prompt of requests that name none.")] = None
    tasks: Annotated[
        tuple[Literal["embed", "rerank", "classify", "generate"], ...],
        Meta(description="What a remote model can do, where asking its server does not tell."),
    ] = ()
    labels: Annotated[
        tuple[Name, ...], Meta(description="Labels of a model on Triton that classifies, in the order of its scores.")
    ] = ()
    activation: Annotated[
        Literal["identity", "sigmoid", "softmax"] | None,
        Meta(description="What turns the scores of a model on Triton into final ones; identity where they are final."),
    ] = None
    context_tokens: Annotated[
        Count | None, Meta(description="Most tokens of prompt and answer together, where the model does not tell.")
    ] = None
    sampling: Annotated[
        dict[Name, bool | int | float | list[str]],
        Meta(description="Sampling fields for requests that do not say: temperature, top_p, top_k, stop, ..."),
    ] = {}
    adapters: Annotated[
        dict[Name, str | int],
        Meta(description="LoRAs, asked for as MODEL:NAME: the name to what the backend calls it (a name or number)."),
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


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table. `section` groups rows in the help; `per_model` rows may also appear in a model's table."""

    name: str
    type: Any
    default: Any
    help: str
    section: str = ""
    secret: bool = False
    path: bool = False
    per_model: bool = False

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.upper()

    @property
    def kind(self) -> inspect.Type:
        """The type without its description; for an optional setting, the type other than None."""
        return _strip_metadata(inspect.type_info(self.type))

    @property
    def wording(self) -> str:
        """A description of the accepted values, for error messages."""
        return _wording(inspect.type_info(self.type))

    @property
    def repeatable(self) -> bool:
        return isinstance(self.kind, inspect.VarTupleType)

    def mask(self, value: Any) -> Any:
        """Return `value` for display: a secret reveals neither its text nor its length."""
        if not self.secret or not value:
            return value
        return tuple("****" for _ in value) if self.repeatable else "****"


def _to_settings(struct: type[msgspec.Struct]) -> tuple[Setting, ...]:
    return tuple(
        Setting(row.name, row.type, row.default, meta.description or "", **(meta.extra or {}))
        for row in msgspec.structs.fields(struct)
        for meta in getattr(row.type, "__metadata__", ())
    )


SETTINGS = _to_settings(Settings)
BY_NAME: Mapping[str, Setting] = {setting.name: setting for setting in SETTINGS}
MODEL_KEYS: Mapping[str, Setting] = {
    **{row.name: row for row in _to_settings(ModelTable)},
    **{setting.name: setting for setting in SETTINGS if setting.per_model},
}


def convert(setting: Setting, value: Any, where: str) -> Any:
    """Validate one value. Text is parsed as the setting's type; enumerated words match in any case.

    Raises ConfigError with a message that starts with `where`, which is also its `param`.
    """
    if isinstance(setting.kind, inspect.LiteralType) and isinstance(value, str):
        value = {str(word).lower(): word for word in setting.kind.values}.get(value.lower(), value)
    try:
        found = converter(setting.type, strict=not isinstance(value, str))(value)
        if isinstance(found, float) and not math.isfinite(found):
            raise msgspec.ValidationError
    except msgspec.ValidationError:
        got = "" if setting.secret else f", got {value!r}"
        raise ConfigError(f"{where}: must be {setting.wording}{got}", param=where) from None
    return found


def _strip_metadata(kind: inspect.Type) -> inspect.Type:
    while isinstance(kind, inspect.Metadata):
        kind = kind.type
    if isinstance(kind, inspect.UnionType):
        kind = next(part for part in kind.types if not isinstance(part, inspect.NoneType))
    return kind


def _wording(kind: inspect.Type) -> str:
    if isinstance(kind, inspect.Metadata) and "title" in (kind.extra_json_schema or {}):
        return str((kind.extra_json_schema or {})["title"])
    match _strip_metadata(kind):
        case inspect.BoolType():
            return "true or false"
        case inspect.LiteralType(values):
            return "one of " + ", ".join(str(value) for value in values)
        case inspect.IntType(ge=ge, le=le):
            return f"a whole number from {ge} to {le}" if le is not None else f"a whole number of at least {ge}"
        case inspect.FloatType(ge=ge, gt=gt):
            return f"a number above {gt:g}" if gt is not None else f"a number of at least {ge:g}"
        case inspect.VarTupleType(item):
            return f"a list, each {_wording(item)}"
        case inspect.DictType(key, value):
            known = getattr(_strip_metadata(key), "values", None)
            return f"a table of {_wording(value)}" + (f" by {', '.join(sorted(known))}" if known else "")
        case _:
            return "text"
