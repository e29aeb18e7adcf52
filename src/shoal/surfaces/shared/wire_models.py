"""JSON types for models: lists, jobs, and the requests that load, unload and delete them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

StatusValue = Literal["loaded", "sleeping", "loading", "unloaded", "downloading"]


class ModelStatus(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A model's status, in the terms of llama.cpp's router. `sleeping` models were unloaded to free memory; the next
    request loads them again."""

    value: StatusValue
    failed: bool = False
    error: str | None = None
    note: Annotated[str, Meta(description="What the model is doing or waiting for.")] = ""
    progress: Annotated[
        dict[str, Any],
        Meta(
            description="While `loading`: `stages`, `current` and `value` (0 to 1); while `downloading`: `done` and "
            "`total` bytes by file."
        ),
    ] = {}


class Architecture(msgspec.Struct, kw_only=True):
    input_modalities: list[str]
    output_modalities: list[str]


class ReplicaEntry(msgspec.Struct, kw_only=True):
    state: Literal["in_service", "ejected", "on_trial", "out_of_service"]
    ejections: Annotated[int, Meta(description="Number of times it was ejected after failures.", ge=0)]


class ModelEntry(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A model. Fields that are known only after loading are absent before."""

    id: str
    object: Literal["model"]
    created: Annotated[int, Meta(description="Unix time at which it was first served, or created.")]
    owned_by: Literal["shoal"]
    status: ModelStatus
    architecture: Annotated[Architecture, Meta(description="Only on /models.")] | None = None
    managed: Annotated[bool, Meta(description="False: not created by Shoal, which cannot delete it.")] = True
    size: Annotated[int | None, Meta(description="Bytes, if known; only on /models.")] = None
    aliases: list[str] = []
    default_for: Annotated[list[str], Meta(description="Tasks for which it is the default model.")] = []
    tasks: list[str] = []
    backend: str | None = None
    source: str | None = None
    revision: str | None = None
    dimension: int | None = None
    vectors: Annotated[list[str], Meta(description="Kinds of vectors that it returns.", examples=[["dense"]])] = []
    labels: Annotated[list[str], Meta(description="Labels of a classifier, in the order of its scores.")] = []
    modalities: Annotated[
        list[str],
        Meta(description="Input types, if not only text.", examples=[["text", "image"]]),
    ] = []
    vision: Annotated[bool, Meta(description="Whether its chats may hold images.")] = False
    max_input_tokens: int | None = None
    max_model_len: Annotated[int | None, Meta(description="Maximum tokens of prompt and answer together.")] = None
    parent: Annotated[str | None, Meta(description="For an adapter: the model that it belongs to.")] = None
    precision: str | None = None
    pooling: str | None = None
    prompts: Annotated[dict[str, str], Meta(description="Prompts by name.")] = {}
    default_prompt_name: str | None = None
    space: (
        Annotated[
            str,
            Meta(
                description="Hash of weights, pooling, prompts and normalization: vectors with equal hashes can be "
                "compared."
            ),
        ]
        | None
    ) = None
    verified: (
        Annotated[str, Meta(description="Result of the load-time check against a second implementation.")] | None
    ) = None
    details: Annotated[
        dict[str, Any],
        Meta(description="Further details from its backend; only in the model's own entry."),
    ] = {}
    replicas: Annotated[
        list[ReplicaEntry],
        Meta(description="Its replicas, if there are several, in the order of their addresses; only in its own entry."),
    ] = []


class ModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelEntry]


class InfinityStats(msgspec.Struct, kw_only=True):
    """The load of a model, in requests. Infinity counts inputs."""

    queue_fraction: float
    queue_absolute: int
    results_pending: int
    batch_size: Annotated[int, Meta(description="`max_batch_size`.")]


class InfinityModelEntry(ModelEntry, kw_only=True, omit_defaults=True):
    """A model with the fields of Infinity, whose client accepts no other owner."""

    owned_by: Literal["infinity"]  # type: ignore[assignment]  # its client reads it as an enum of one
    stats: InfinityStats
    capabilities: list[Literal["embed", "image_embed", "rerank", "classify"]]


class InfinityModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[InfinityModelEntry]


class AnthropicModelEntry(msgspec.Struct, kw_only=True, tag_field="type", tag="model"):
    """A model in the form of Anthropic's API."""

    id: str
    display_name: str
    created_at: Annotated[str, Meta(description="RFC 3339 time at which it was first served, or created.")]


class AnthropicModelList(msgspec.Struct, kw_only=True):
    """All models, on one page."""

    data: list[AnthropicModelEntry]
    has_more: Literal[False] = False
    first_id: str | None
    last_id: str | None


class ModelName(msgspec.Struct, kw_only=True):
    model: Annotated[str, Meta(description="A model's name or source.", examples=["org/name"])]


class ModelRequest(msgspec.Struct, kw_only=True):
    model: Annotated[str, Meta(description="A model to download. Without one, the models are listed.")] | None = None


Backend = Annotated[
    Literal["local", "triton", "ray"], Meta(description="Backend to run it on. Default: the setting `backend`.")
]
TextIn = Annotated[
    bool, Meta(description="On Triton: also create a model that accepts text, for clients without a tokenizer.")
]


class LoadSettings(msgspec.Struct, kw_only=True):
    """Options of one load."""

    backend: Backend | None = None
    text_in: TextIn | None = None


class Done(msgspec.Struct, kw_only=True):
    success: Literal[True] = True


class Managed(msgspec.Struct, kw_only=True):
    status: Literal["success"] = "success"
    model: str


class Deleted(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    deleted: Literal[True] = True


class JobStatus(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A long-running job, started with `wait=false` and then polled."""

    job: Annotated[str, Meta(description="ID for GET /jobs/{id}.")]
    action: Literal["load", "download", "unload", "delete", "sleep", "wake"]
    model: str
    state: Literal["running", "done", "failed", "cancelled"]
    created: Annotated[int, Meta(description="Unix time.")]
    stage: Annotated[str, Meta(description="The current stage, in a word.")] = ""
    progress: Annotated[float, Meta(ge=0, le=1, description="Progress of the stage.")] | None = None
    done: Annotated[float, Meta(description="Bytes done.")] | None = None
    total: Annotated[float, Meta(description="Total bytes.")] | None = None
    finished: Annotated[int, Meta(description="Unix time.")] | None = None
    changed: Annotated[bool | None, Meta(description="False if there was nothing to do.")] = None
    error: Annotated[str, Meta(description="Why it failed.")] | None = None


class JobList(msgspec.Struct, kw_only=True):
    jobs: list[JobStatus]
