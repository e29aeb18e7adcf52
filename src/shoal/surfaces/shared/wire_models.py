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
    note: Annotated[str, Meta(description="What it does or waits for.")] = ""
    progress: Annotated[
        dict[str, Any],
        Meta(
            description="Of `loading`: `stages`, `current` and `value` (0 to 1); of `downloading`: `done` and `total` "
            "bytes by file."
        ),
    ] = {}


class Architecture(msgspec.Struct, kw_only=True):
    input_modalities: list[str]
    output_modalities: list[str]


class ReplicaEntry(msgspec.Struct, kw_only=True):
    state: Literal["in_service", "ejected", "on_trial", "out_of_service"]
    ejections: Annotated[int, Meta(description="Times that it was ejected for failing.", ge=0)]


class ModelEntry(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A model. Fields that are known only after loading are absent before."""

    id: str
    object: Literal["model"]
    created: Annotated[int, Meta(description="Unix time at which it began to be served, or was made.")]
    owned_by: Literal["shoal"]
    status: ModelStatus
    architecture: Annotated[Architecture, Meta(description="On /models alone.")] | None = None
    managed: Annotated[bool, Meta(description="False: not made by Shoal, which does not delete it.")] = True
    size: Annotated[int | None, Meta(description="Bytes, where they are known; on /models alone.")] = None
    aliases: list[str] = []
    default_for: Annotated[list[str], Meta(description="Tasks that go to it when no model is named.")] = []
    tasks: list[str] = []
    backend: str | None = None
    source: str | None = None
    revision: str | None = None
    dimension: int | None = None
    vectors: Annotated[list[str], Meta(description="Kinds of vectors that it gives.", examples=[["dense"]])] = []
    labels: Annotated[list[str], Meta(description="Of a classifier, in the order of its scores.")] = []
    modalities: Annotated[
        list[str],
        Meta(description="What its inputs may be, where that is not text alone.", examples=[["text", "image"]]),
    ] = []
    max_input_tokens: int | None = None
    max_model_len: Annotated[int | None, Meta(description="Tokens of prompt and answer together.")] = None
    parent: Annotated[str | None, Meta(description="Of an adapter: the model that it belongs to.")] = None
    precision: str | None = None
    pooling: str | None = None
    prompts: Annotated[dict[str, str], Meta(description="Prompts by name.")] = {}
    default_prompt_name: str | None = None
    space: (
        Annotated[
            str,
            Meta(
                description="Hash of weights, pooling, prompts and normalisation: equal means vectors may be compared."
            ),
        ]
        | None
    ) = None
    verified: Annotated[str, Meta(description="How the load-time check against a second path went.")] | None = None
    details: Annotated[
        dict[str, Any],
        Meta(description="What else its backend says of it; on the model's own page alone."),
    ] = {}
    replicas: Annotated[
        list[ReplicaEntry],
        Meta(
            description="Its replicas, where there are several, in the order of their addresses; on its own page alone."
        ),
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


class ModelName(msgspec.Struct, kw_only=True):
    model: Annotated[str, Meta(description="A model's name, or where it comes from.", examples=["org/name"])]


class ModelRequest(msgspec.Struct, kw_only=True):
    model: Annotated[str, Meta(description="A model to download. Without one, the answer is the list.")] | None = None


Backend = Annotated[Literal["local", "triton"], Meta(description="Where it is to run. Default: the setting `backend`.")]
TextIn = Annotated[
    bool, Meta(description="On Triton: also make a model that takes text, for clients without a tokenizer.")
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

    job: Annotated[str, Meta(description="Its id, for GET /jobs/{id}.")]
    action: Literal["load", "download", "unload", "delete", "sleep", "wake"]
    model: str
    state: Literal["running", "done", "failed", "cancelled"]
    created: Annotated[int, Meta(description="Unix time.")]
    stage: Annotated[str, Meta(description="What it does now, in a word.")] = ""
    progress: Annotated[float, Meta(ge=0, le=1, description="How much of the stage is done.")] | None = None
    done: Annotated[float, Meta(description="Bytes done.")] | None = None
    total: Annotated[float, Meta(description="Bytes in all.")] | None = None
    finished: Annotated[int, Meta(description="Unix time.")] | None = None
    changed: Annotated[bool | None, Meta(description="False: there was nothing to do.")] = None
    error: Annotated[str, Meta(description="Why it failed.")] | None = None


class JobList(msgspec.Struct, kw_only=True):
    jobs: list[JobStatus]
