"""JSON types of Ollama's API (github.com/ollama/ollama, docs/api.md and api/types.go).

Times are RFC 3339 with nanoseconds, durations whole nanoseconds, images base64 without a data: prefix. Optional fields
may also be null.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from shoal.surfaces.shared.wire_conversations import MAX_CALLS, MAX_MESSAGES, MAX_TOOLS, Object, Stop

KeepAlive: TypeAlias = Annotated[
    float | str,
    Meta(
        description='Seconds, or a duration ("5m", "1h30m"). 0 without a prompt unloads the model; other values are '
        "accepted, but the server's `keep_alive_s` applies.",
        examples=["5m"],
    ),
]
Think: TypeAlias = Annotated[
    bool | str,
    Meta(description='Whether a reasoning model thinks: true, false, or "low", "medium", "high", "max".'),
]
Format: TypeAlias = Annotated[
    str | dict[str, Any],
    Meta(description='Format of the answer: "json", or a JSON schema.'),
]
Images: TypeAlias = Annotated[
    list[str], Meta(max_length=256, description="Base64-encoded PNG, JPEG, WebP or GIF files.")
]
Whole: TypeAlias = int | float
"""An integer that may be sent as a float, as some clients write 42.0. Ollama drops the fraction."""

TopLogprobs: TypeAlias = Annotated[int, Meta(ge=0, le=20)]


class OllamaError(msgspec.Struct, kw_only=True):
    error: str


class OllamaOptions(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Sampling options. Options for loading a model (num_ctx, num_gpu, num_thread, ...) are accepted and ignored: the
    server loads models with its own settings."""

    temperature: float | None = None
    top_k: Whole | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: Annotated[Whole, Meta(description="Below 0: random.")] | None = None
    num_predict: Annotated[Whole, Meta(description="Maximum tokens to generate; 0 or less: as many as fit.")] | None = (
        None
    )
    stop: Stop | Annotated[list[Stop], Meta(max_length=64)] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class OllamaFunction(msgspec.Struct, kw_only=True, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: Annotated[dict[str, Any], Meta(description="The JSON schema of its arguments.")] | None = None


class OllamaTool(msgspec.Struct, kw_only=True):
    type: str | None = "function"
    function: OllamaFunction


class OllamaCalled(msgspec.Struct, kw_only=True, omit_defaults=True):
    name: str
    arguments: dict[str, Any] | None = None
    index: int | None = None


class OllamaToolCall(msgspec.Struct, kw_only=True, omit_defaults=True):
    id: str | None = None
    function: OllamaCalled


class OllamaMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    role: Annotated[str, Meta(description="system, user, assistant or tool.", examples=["user"])]
    content: str | None = None
    thinking: Annotated[str, Meta(description="The model's reasoning before its answer.")] | None = None
    images: Images | None = None
    tool_calls: Annotated[list[OllamaToolCall], Meta(max_length=MAX_CALLS)] | None = None
    tool_name: Annotated[str, Meta(description="With role `tool`: the function whose result this is.")] | None = None
    tool_call_id: str | None = None


class OllamaChatRequest(msgspec.Struct, kw_only=True):
    model: Annotated[str, Meta(description="A served model; `:latest` and `:adapter` may follow.")]
    messages: (
        Annotated[
            list[OllamaMessage],
            Meta(max_length=MAX_MESSAGES, description="If empty, the model is only loaded."),
        ]
        | None
    ) = None
    stream: Annotated[bool, Meta(description="Stream the answer as JSON lines. Default: true.")] | None = None
    format: Format | None = None
    options: OllamaOptions | None = None
    tools: Annotated[list[OllamaTool], Meta(max_length=MAX_TOOLS)] | None = None
    think: Think | None = None
    keep_alive: KeepAlive | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None


class OllamaGenerateRequest(msgspec.Struct, kw_only=True):
    model: Annotated[str, Meta(description="A served model; `:latest` and `:adapter` may follow.")]
    prompt: Annotated[str, Meta(description="If empty, the model is only loaded.")] | None = None
    system: str | None = None
    raw: Annotated[bool, Meta(description="Send the prompt to the model as it is, without a template.")] | None = None
    images: Images | None = None
    stream: Annotated[bool, Meta(description="Stream the answer as JSON lines. Default: true.")] | None = None
    format: Format | None = None
    options: OllamaOptions | None = None
    think: Think | None = None
    keep_alive: KeepAlive | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    suffix: Annotated[str, Meta(description="Refused.")] | None = None
    template: Annotated[str, Meta(description="Rejected: the server's `chat_template` setting applies.")] | None = None
    context: Annotated[list[int], Meta(description="Rejected: send earlier turns to /api/chat.")] | None = None


class OllamaLogprob(msgspec.Struct, kw_only=True, omit_defaults=True):
    token: str
    logprob: float
    bytes: list[int] | None = None
    top_logprobs: list[OllamaLogprob] | None = None


class OllamaCounts(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Counts and durations of the last line. `prompt_eval_duration` is the time to the first token, including waits; it
    and `eval_duration` are absent if the answer came in one piece."""

    done_reason: Annotated[str, Meta(description="stop, length, load or unload.")] | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class OllamaSaid(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The model's message. Every line has `content`; `thinking` and `tool_calls` appear only if there are any."""

    role: str
    content: str
    thinking: str | None = None
    tool_calls: list[OllamaToolCall] | None = None


class OllamaChatAnswer(OllamaCounts, kw_only=True, omit_defaults=True):
    """One line of a stream, or a whole answer."""

    model: str
    created_at: str
    message: OllamaSaid
    done: bool
    logprobs: list[OllamaLogprob] | None = None


class OllamaGenerateAnswer(OllamaCounts, kw_only=True, omit_defaults=True):
    """One line of a stream, or a whole answer."""

    model: str
    created_at: str
    response: str
    done: bool
    thinking: str | None = None
    logprobs: list[OllamaLogprob] | None = None


class OllamaEmbedRequest(msgspec.Struct, kw_only=True):
    model: str
    input: (
        Annotated[
            str | list[str],
            Meta(
                description="A text or a list of texts; without one, the model is only loaded.",
                examples=["Why is the sky blue?"],
            ),
        ]
        | None
    ) = None
    truncate: (
        Annotated[bool, Meta(description="Truncate texts that are too long instead of rejecting them.")] | None
    ) = None
    dimensions: (
        Annotated[
            int,
            Meta(
                description="Truncate vectors to this length, then normalize them. Ignored below 1 or above the "
                "model's dimension."
            ),
        ]
        | None
    ) = None
    options: Annotated[Object, Meta(description="Accepted and ignored.")] = msgspec.UNSET
    keep_alive: KeepAlive | None = None


class OllamaEmbedAnswer(msgspec.Struct, kw_only=True):
    model: str
    embeddings: Annotated[list[list[float]], Meta(description="One unit vector per input.")]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingsRequest(msgspec.Struct, kw_only=True):
    model: str
    prompt: str | None = None
    options: Annotated[Object, Meta(description="Accepted and ignored.")] = msgspec.UNSET
    keep_alive: KeepAlive | None = None


class OllamaEmbeddingsAnswer(msgspec.Struct, kw_only=True):
    embedding: Annotated[list[float], Meta(description="The model's vector: of unit length if the model normalizes.")]


# Models


class OllamaNamed(msgspec.Struct, kw_only=True):
    """A model, by name. Older clients send `name` instead of `model`."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


class OllamaPullRequest(msgspec.Struct, kw_only=True):
    model: (
        Annotated[
            str, Meta(description="A model's name, its source (org/name), or an embedding model of Ollama's library.")
        ]
        | None
    ) = None
    name: str | None = None
    stream: Annotated[bool, Meta(description="Stream the answer as JSON lines. Default: true.")] | None = None
    insecure: Annotated[bool, Meta(description="Accepted and ignored.")] | None = None


class OllamaProgress(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The progress of a pull. `digest` identifies a stage of it, not a file; `total` and `completed` are bytes."""

    status: str
    digest: str | None = None
    total: int | None = None
    completed: int | None = None


class OllamaDetails(msgspec.Struct, kw_only=True):
    parent_model: str = ""
    format: Annotated[str, Meta(description="The backend that runs the model.")]
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: Annotated[str, Meta(description="The precision that the model runs in.")]


class OllamaEntry(msgspec.Struct, kw_only=True):
    name: str
    model: str
    modified_at: str
    size: Annotated[int, Meta(description="Bytes on disk, weights included; 0 if unknown.")]
    digest: Annotated[str, Meta(description="Hash of the model's files, or of its source.")]
    details: OllamaDetails
    capabilities: list[str]


class OllamaTags(msgspec.Struct, kw_only=True):
    models: list[OllamaEntry]


class OllamaRunning(msgspec.Struct, kw_only=True):
    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: Annotated[str, Meta(description="When the model goes to sleep unless it is used before.")]
    size_vram: int
    context_length: Annotated[int, Meta(description="Tokens; 0 if unknown.")]


class OllamaPs(msgspec.Struct, kw_only=True):
    models: list[OllamaRunning]


class OllamaShown(msgspec.Struct, kw_only=True):
    """Details of a model. Unknown fields are "" or absent."""

    modelfile: str
    parameters: str
    template: str
    license: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(msgspec.Struct, kw_only=True):
    version: Annotated[
        str, Meta(description="The version of Ollama's API; for Ollama's own client, the client's version.")
    ]
    shoal: Annotated[str, Meta(description="The version of this server.")]
