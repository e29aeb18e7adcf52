"""The interfaces between components. The shipped contract tests check each docstring; rely on nothing else.

Everything here runs on one asyncio event loop unless stated otherwise. `deadline` is always absolute, in seconds of
`time.monotonic()`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

import msgspec

from shoal.errors import ShoalError
from shoal.specs import ContrastSpec, TextSpec
from shoal.types import (
    Array,
    BatchTask,
    Chunk,
    Context,
    Generate,
    Guide,
    Item,
    Modality,
    ModelStats,
    Result,
    Sampling,
    SparseVector,
    Task,
    TaskKind,
    TokenLogprob,
    TrafficClass,
    VectorKind,
)

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway

Tensors = Mapping[str, Array]
WorkWeight = Literal["light", "usual", "heavy"]


EFFICIENCY = 0.98
"""Fraction of an engine's best known rate from which a larger batch counts as no gain. The aim is 95 % of the best rate
there is: measured rates scatter, and the best size may not have been tried."""


class CostModel(msgspec.Struct, frozen=True):
    """Estimates a batch at about `fixed + per_token * work` seconds on one slot, see `work`.

    `efficient_tokens`: work from which a batch reaches `EFFICIENCY` of the engine's best rate, as measured; 0: not
    measured, so that the straight line decides. `attention`: 1 over the length at which attention takes as long as the
    rest of the model; 0: unknown, or none.
    """

    fixed: float = 0.001
    per_token: float = 0.00002
    efficient_tokens: int = 0
    attention: float = 0.0

    def work(self, tokens: float, length: float) -> float:
        """Return the work of `tokens` padded tokens in texts of `length`, in tokens of a short text: attention compares
        each token with all others of its text."""
        return tokens * (1.0 + self.attention * length)

    def seconds(self, work: float) -> float:
        return self.fixed + self.per_token * work

    def tokens_within(self, seconds: float) -> float:
        """Return the work of a batch that takes `seconds`; negative if the call alone takes longer."""
        return (seconds - self.fixed) / max(self.per_token, 1e-12) + 1e-6  # rounding must not cost a token

    def efficient(self) -> float:
        """Return `efficient_tokens`, or what the straight line says."""
        return self.efficient_tokens or self.fixed / max(self.per_token, 1e-12) * EFFICIENCY / (1 - EFFICIENCY)


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of one replica. The planner relies on them.

    `slots`: batches it can hold in flight; `parallel`: how many of them it computes in parallel (0: all), so that a
    burst spreads over free cores but is not split for a serial engine. `max_batch_size`: items per batch;
    `max_batch_tokens`: padded tokens per batch (None: no limit). `pads_batches`: True if a batch costs its longest item
    times its items, False if it costs the sum of its items. `length_buckets`, `size_buckets`: ascending sizes to which
    a batch is padded so that compiled kernels are reused; empty: any size is equally good. A length above the last
    bucket is used as it is. `merges`: the engine computes concurrent batches as one, so an error of one batch may be
    caused by another.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    slots: int = 1
    parallel: int = 0
    max_batch_size: int = 64
    max_batch_tokens: int | None = None
    pads_batches: bool = True
    length_buckets: tuple[int, ...] = ()
    size_buckets: tuple[int, ...] = ()
    merges: bool = False
    precision: str = "f32"
    cost: CostModel = msgspec.field(default_factory=CostModel)
    details: Mapping[str, Any] = msgspec.field(default_factory=dict)

    @property
    def cores(self) -> int:
        """Batches that it computes in parallel."""
        return self.parallel or self.slots


def round_up(value: int, buckets: Sequence[int]) -> int:
    """Return the padded size of `value`: the smallest bucket that holds it, or `value` itself above the last."""
    index = bisect_left(buckets, value)
    return buckets[index] if index < len(buckets) else value


class Engine(Protocol):
    """One replica: named arrays in, named arrays out.

    - `infer` is called for at most `facts.slots` batches at a time and returns exactly `outputs`, each with the batch
      as its first axis and rows in input order. The caller owns the returned arrays: no later call changes them.
    - `params` are those of the batch's items, which are equal within a batch (`Prepared.params`).
    - It raises InputRejected (these inputs are at fault), OutOfMemory, EngineFailed (any other failure of this batch),
      TransportFailed (the replica is unreachable), Overloaded (the replica's own queue is full: the batch is requeued
      and the replica is skipped for `retry_after` seconds, 0.1 if unset), DeadlineExceeded; never another exception.
    - Cancelling `infer` frees the slot only when the engine has really finished with that batch.
    - `ready` is cheap and never blocks; False keeps work away from this replica.
    - `aclose` waits for batches in flight, frees everything, and may be called twice.
    """

    @property
    def facts(self) -> EngineFacts: ...

    async def infer(
        self, inputs: Tensors, outputs: Sequence[str], params: Mapping[str, Any], deadline: float
    ) -> dict[str, Array]: ...

    def ready(self) -> bool: ...

    async def aclose(self) -> None: ...


class Prepared(msgspec.Struct, frozen=True):
    """One item, ready for an engine.

    `tensors`: this item's arrays by input name, without a batch axis. `cost`: its length in tokens. `group`: equal for
    items that may share an engine call. `outputs`: engine outputs this item needs. `key`: equal for items whose answers
    are identical by construction (None: never shared). `tokens`: the count for usage. `truncated`: whether it was
    truncated. `extra`: data for the pipeline's `finish`. `params`: engine parameters beside the tensors; equal within a
    group, because a batch has only one set.
    """

    tensors: Tensors
    cost: int
    group: Hashable
    outputs: tuple[str, ...]
    tokens: int
    truncated: bool = False
    key: Hashable | None = None
    extra: Any = None
    params: Mapping[str, Any] = msgspec.field(default_factory=dict)


class VectorSet(msgspec.Struct, frozen=True):
    """The row of an input with more than a dense vector: float32 arrays [dimension] and [l, width], None for outputs
    that the task did not request."""

    dense: Array | None = None
    tokens: Array | None = None
    sparse: SparseVector | None = None
    multi: Array | None = None


Row = Array | VectorSet
"""One item's answer: a 1-D float32 array (its dense vector, or one score per label), or all its vectors."""


class CountedRow(msgspec.Struct, frozen=True):
    """A result row whose token count is known only from the model's answer; it replaces `Prepared.tokens`."""

    row: Row
    tokens: int


class Pipeline(Protocol):
    """Converts items to tensors and results back. Pure CPU work, no I/O, no asyncio; called from several threads at
    once.

    - `check` raises at once for a task that is invalid as a whole (unknown prompt, bad dimensions). Cheap; runs on the
      event loop.
    - `estimate` estimates an item's tokens without tokenizing, for admission.
    - `prepare` takes the items of many requests and returns one entry per item, in order: Prepared, or the ShoalError
      for that item alone. A bad item never makes it raise.
    - `collate` joins items of one group into a batch, padded to the facts' buckets.
    - `finish` takes the engine's outputs (rows past `len(batch)` are padding) and returns one entry per item, in order:
      its result row (alone or as CountedRow), or the ShoalError for that item alone (NotFinite).

    Tasks have the kinds, and Embed the vector kinds, that the model's facts list. `work` is the cost of `prepare` per
    item. "light": microseconds while holding the GIL, so a thread would not help. "heavy": milliseconds and much
    memory, which may block its thread, so each item is a job of its own. "usual": anything between.
    """

    @property
    def work(self) -> WorkWeight: ...

    def check(self, task: BatchTask) -> None: ...

    def estimate(self, item: Item) -> int: ...

    def prepare(self, items: Sequence[tuple[BatchTask, Item]]) -> list[Prepared | ShoalError]: ...

    def collate(self, batch: Sequence[Prepared], facts: EngineFacts) -> dict[str, Array]: ...

    def finish(self, outputs: Tensors, batch: Sequence[Prepared]) -> Sequence[Row | CountedRow | ShoalError]: ...


@runtime_checkable
class BoundedPipeline(Protocol):
    """Optional: a pipeline of heavy work whose prepared items use resources shared with other models. At most
    `max_held_items` are prepared and unanswered at once, which limits what a hanging engine can hold."""

    @property
    def max_held_items(self) -> int: ...


@runtime_checkable
class SharesTokenizer(Protocol):
    """Optional: a pipeline of which another process can open a copy, from `folder` and `spec`, to tokenize for it.

    - `tokenizer_id` is equal for two pipelines only if they make the same tokens of every task.
    - `tokenizer_bytes` is the size of the tokenizer's file.
    - `tokenize` packs the tokens of a task's texts. It blocks, and raises what `check` raises.
    - `unpack_tokens` returns what `estimate` and `prepare` take in the place of a task's items, of which it says only
      how much work is left.
    """

    @property
    def tokenizer_id(self) -> str: ...

    @property
    def tokenizer_bytes(self) -> int: ...

    @property
    def folder(self) -> Path: ...

    @property
    def spec(self) -> TextSpec: ...

    def tokenize(self, task: BatchTask) -> bytes: ...

    def unpack_tokens(self, packed: bytes, items: Sequence[Item]) -> Sequence[Any]: ...


@runtime_checkable
class HasTextPipeline(Protocol):
    """Optional: a runner whose texts go through one pipeline."""

    @property
    def text_pipeline(self) -> Pipeline | None: ...


class Cache(Protocol):
    """Caches computed rows by `Prepared.key`, for one model in one precision. Bounded and fast; called on the event
    loop. `put` copies, since a row may be a view of its whole batch; `get` returns read-only rows."""

    def get(self, key: Hashable) -> CountedRow | None: ...

    def put(self, key: Hashable, found: CountedRow) -> None: ...


@dataclass(frozen=True, slots=True)
class CacheCounts:
    """Row counts of a cache since its creation, and the bytes it holds now."""

    hits: int = 0
    misses: int = 0
    evicted: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a text; `start` and `stop` are character offsets, None for tokens that the tokenizer added."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


@runtime_checkable
class TextCodec(Protocol):
    """Optional: a runner that exposes its tokenizer. Raises InvalidValue for an unknown prompt or a bad id."""

    async def tokenize(
        self, texts: Sequence[str], *, add_special_tokens: bool, prompt_name: str | None
    ) -> list[list[Token]]: ...

    async def decode(self, ids: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> list[str]: ...


@runtime_checkable
class Statistics(Protocol):
    """Optional: a runner whose backend keeps statistics. Returns one entry per replica or version, under the backend's
    name of the model. Raises BackendError or CapacityError when the backend cannot be reached."""

    async def statistics(self) -> list[ModelStats]: ...


ReplicaState = Literal["in_service", "ejected", "on_trial", "out_of_service"]
"""ejected: reachable, but failed too often. on_trial: was ejected, and gets one request at a time until one
succeeds."""


class ReplicaStatus(NamedTuple):
    name: str
    state: ReplicaState
    ejections: int


@runtime_checkable
class Replicated(Protocol):
    """Optional: a runner with replicas. Returns the status of each from memory."""

    def replicas(self) -> list[ReplicaStatus]: ...


@runtime_checkable
class SupportsCheck(Protocol):
    """Optional: a runner that can check a generation as a whole, at once and cheaply. `stream` raises the same errors,
    but only after it has a slot."""

    def check(self, task: Generate) -> None: ...


@runtime_checkable
class CountsTokens(Protocol):
    """Optional: a runner that counts the tokens of a generation's prompts without generating: those that the model
    reads, or an estimate if its tokenizer is unknown. Raises as `stream` does before its first chunk."""

    async def count_tokens(self, task: Generate, ctx: Context) -> int: ...


@runtime_checkable
class Breakable(Protocol):
    """Optional: a runner that can stop for good while it is loaded. `call` is called at most once, on the event loop,
    with the reason, after requests in flight were answered with it. The model is then failed until it is loaded
    again."""

    def when_broken(self, call: Callable[[ShoalError], None]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts of a served model, shown on /v1/models/{id}, /info and the startup banner.

    `source` is where its files came from, with scheme and revision; `id` is the model's id there, without either, and
    the same for all of its sources. `dimension`, `max_input_tokens`: None if the task has none. `space`: stable hash of
    weights, pooling, prompts and normalization. `prompts`: name to text. `verified`: outcome of the load-time
    comparison, as text. `context_tokens`: maximum tokens of prompt and answer together, if the model generates and it
    is known. `adapters`: its LoRAs, requested as `model:adapter`. `vectors`: the vector kinds of an embedder; the first
    is the default. `labels`: of a classifier, in the order of its scores; a reranker has one. `normalized`: whether the
    model ends in a Normalize layer, or that is unknown. `answers`: digest of its answers when it was opened, if nothing
    else identifies its weights for sure. `modalities`: accepted inputs. `embedding_tasks`: purposes that the model has
    vectors for, requested by the names of their prompts. `contrast`: how a model with a shared image and text space
    compares the two. `knows_token_ids`: clients send token ids of its own tokenizer. `passes`: dialects whose requests
    may go to the model's server as they came. `takes_instruction`: Rerank may have one.
    """

    source: str
    backend: str
    tasks: tuple[TaskKind, ...]
    id: str = ""
    dimension: int | None = None
    max_input_tokens: int | None = None
    precision: str = ""
    pooling: str = ""
    space: str = ""
    revision: str = ""
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    verified: str = ""
    context_tokens: int | None = None
    adapters: tuple[str, ...] = ()
    vectors: tuple[VectorKind, ...] = ("dense",)
    labels: tuple[str, ...] = ()
    normalized: bool = True
    answers: str = ""
    modalities: tuple[Modality, ...] = ("text",)
    embedding_tasks: tuple[str, ...] = ()
    contrast: ContrastSpec | None = None
    knows_token_ids: bool = False
    passes: tuple[str, ...] = ()
    takes_instruction: bool = False
    details: Mapping[str, Any] = field(default_factory=dict)


class Runner(Protocol):
    """Runs tasks: returns a result or a stream of chunks.

    - `run` returns Embedded for Embed and Scored for the others, or raises a ShoalError: RequestError, CapacityError or
      BackendError, nothing else. On cancellation the work leaves the queue, upstream calls are cancelled and permits
      are released.
    - `stream` is pulled by the reader: nothing is produced far ahead of it. Closing the iterator stops the work. A
      runner that speaks the dialect of `task.raw` yields raw chunks; all others yield typed ones (see Chunk). It raises
      as `run` does, also in mid-stream.
    - `ready` is cheap and never blocks.
    - `aclose` fails pending work, frees everything, and may be called twice.
    """

    @property
    def facts(self) -> ModelFacts: ...

    async def run(self, task: BatchTask, ctx: Context) -> Result: ...

    def stream(self, task: Generate, ctx: Context) -> AsyncGenerator[Chunk]: ...

    def ready(self) -> bool: ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The text a model continues, and its token ids if there is a tokenizer (`tokens` is then their number).

    `cut`: messages dropped by an opt-in truncation policy. `ignored`: request fields left out because the model does
    not support them. `ends_in_reasoning`: the text ends inside a reasoning block, so the answer begins there.
    """

    text: str
    ids: tuple[int, ...] | None = None
    tokens: int | None = None
    cut: int = 0
    ignored: tuple[str, ...] = ()
    ends_in_reasoning: bool = False


class Piece(msgspec.Struct):
    """The model's output since its last piece: text or ids, depending on its facts.

    For "cumulative" generators `text` is the whole text so far. `tokens`: number of new tokens, if the backend counts
    them. `prompt_tokens`, `cached_tokens`: if the backend reports them. `finish_reason`: why the answer ended ("stop",
    "length"). An answer that ends without a reason just ends the iteration.
    """

    text: str = ""
    ids: Sequence[int] = ()
    tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    logprobs: Sequence[TokenLogprob] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorFacts:
    """Facts of a text generator.

    `parameters`: names of the Sampling fields it supports; `stop` is optional, since text after a stop sequence is cut
    off anyway. `top_logprobs`: maximum alternatives reported beside the chosen token, None: unlimited. `wants_ids`: it
    reads token ids, so a tokenizer is required. `output_mode`: the content of its pieces. `context_tokens`: prompt and
    answer together, None if unknown. `adapters`: see ModelFacts. `structural_tags`: guides may be xgrammar's, and
    optional.
    """

    name: str
    parameters: frozenset[str]
    structural_tags: bool = False
    top_logprobs: int | None = None
    wants_ids: bool = False
    output_mode: Literal["delta", "cumulative", "ids"] = "delta"
    context_tokens: int | None = None
    adapters: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)


class TextGenerator(Protocol):
    """One replica of a language model: one prompt in, pieces of one answer out.

    - `generate` is called concurrently, once per choice. `sampling` holds only fields of `facts.parameters` and `stop`.
      `stream` False: nothing is read before the end, so it may answer in one piece. Closing the iterator, or cancelling
      its `anext`, stops the work on the backend within a second.
    - It raises InputRejected, InvalidValue, TooLong, EngineFailed, TransportFailed, Overloaded, DeadlineExceeded,
      OutOfMemory, UpstreamRefused; never another exception. It may raise after a piece, too.
    - `ready` is cheap and never blocks. `aclose` frees everything and may be called twice.
    """

    @property
    def facts(self) -> GeneratorFacts: ...

    def generate(
        self, prompt: Prompt, sampling: Sampling, ctx: Context, *, adapter: str = "", stream: bool = True
    ) -> AsyncGenerator[Piece]: ...

    def ready(self) -> bool: ...

    async def aclose(self) -> None: ...


class Decoder(Protocol):
    """Converts the pieces of one answer to chunks of one choice: detokenizes, cuts at stop texts, splits reasoning,
    parses tool calls. Pure.

    - `push` returns the chunks that are certain so far. It holds back text that may begin a stop text or a tool call,
      and incomplete characters. Once `stopped` is true the answer is over; do not push more.
    - `flush(reason)` returns the rest. The last chunk has the finish reason: "stop" after a stop text, "tool_calls" if
      calls were parsed and the model ended its answer, else `reason`.
    - `index` is that of its choice. `tokens`, `reasoning_tokens`: generated so far, as counted by the backend, else by
      the decoder.
    """

    index: int
    stopped: bool

    @property
    def tokens(self) -> int: ...

    @property
    def reasoning_tokens(self) -> int: ...

    def push(self, piece: Piece) -> list[Chunk]: ...

    def flush(self, reason: str) -> list[Chunk]: ...


class ChatPipeline(Protocol):
    """Converts conversations and prompts to the model's input, and its pieces to answers. Pure CPU work, no I/O; called
    from any thread.

    - `check` raises at once for a task that is invalid as a whole: no chat template, images, tools that the template
      does not support. Cheap; runs on the event loop.
    - `prompts` returns one Prompt for the messages, or one for each of the task's prompts. Raises TooLong, with both
      counts, if one leaves no room for an answer within `context_tokens`; InvalidValue for invalid token ids and for
      messages that the template rejects. `whole`: for counting, prompts of any length, uncut, with all their tokens,
      estimated far beyond the context.
    - `decoder` returns a new Decoder for the choice `index` of a prompt. The task's sampling is the effective one.
    - `to_backend_sampling` returns a choice's sampling for the backend, with stop texts only if they apply to all of
      its text.
    - `tools_guide` returns the guide that makes a backend with guided decoding call the requested tools, None if no
      guide is needed. `tags`: the guide may be a structural tag; without a required call it is then optional. For a
      task with a guide of JSON it allows both, calls and answers; raises Unsupported if it cannot.
    - `details`: what it adds to the details of its model's facts.
    """

    @property
    def details(self) -> Mapping[str, Any]: ...

    def check(self, task: Generate) -> None: ...

    def prompts(self, task: Generate, *, whole: bool = False) -> list[Prompt]: ...

    def decoder(
        self, task: Generate, prompt: Prompt, index: int, gives: Literal["delta", "cumulative", "ids"]
    ) -> Decoder: ...

    def to_backend_sampling(self, task: Generate, sampling: Sampling) -> Sampling: ...

    def tools_guide(self, task: Generate, *, tags: bool = False) -> Guide | None: ...


Access = Literal["public", "user", "admin"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method on one path of a surface, with everything that authentication and the OpenAPI document need.

    `path` may end in one `{name:path}` parameter. `access` defaults to "user", so that forgetting it fails closed.
    `endpoint` takes the request and returns the response, or raises a ShoalError that the surface's `render_error`
    turns into its dialect. `request` and `response` are the types of the JSON bodies (None: no body). `errors` maps the
    statuses that `endpoint` can return to the types of their bodies (`str`: text). Errors raised before the endpoint
    (keys, body limits, bad JSON) follow from `access`, `method` and `request`, and are not listed. `limit` overrides
    the byte limit of the body; 0: `endpoint` rejects every request before its body is read. `quiet`: polled every few
    seconds, so the access log has it at debug level only. `single`: it changes state that only one of several processes
    may have, so that the one with the models answers it. `reads_body`: the endpoint reads the body itself, by
    `Request.pieces`. `generates`: the timeout is generate_timeout_s, not
    embed_timeout_s. For the document only: `example` is a request body that works on any model, `headers` maps the
    headers of a successful response, beyond `x-request-id`, to their descriptions.
    """

    method: Literal["GET", "POST", "DELETE"]
    path: str
    endpoint: Callable[[Any], Awaitable[Any]]
    summary: str
    access: Access = "user"
    request: Any = None
    response: Any = None
    media_type: str = "application/json"
    errors: Mapping[int, Any] = field(default_factory=dict)
    limit: int | None = None
    quiet: bool = False
    single: bool = False
    reads_body: bool = False
    generates: bool = False
    description: str = ""
    example: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)


class Surface(Protocol):
    """A wire API: parses requests into tasks, renders results, and renders errors in its own format.

    `render_error` returns (status, headers, body) for any ShoalError and never raises. `error` is the type of its JSON
    error bodies, for the OpenAPI document; None if it has none.
    """

    name: str
    error: Any

    def routes(self, gateway: Gateway) -> Sequence[Operation]: ...

    def render_error(self, error: ShoalError) -> tuple[int, dict[str, str], bytes]: ...


class BatchReport(msgspec.Struct, frozen=True):
    """One engine call, for observers: sizes in items and tokens, time in seconds. `finish_seconds`: how long the
    pipeline took for the rows of its outputs (None: the call failed)."""

    model: str
    replica: str
    items: int
    tokens: int
    padded_tokens: int
    flush: str
    seconds: float
    error: str | None = None
    finish_seconds: float | None = None


class GenerationReport(msgspec.Struct, frozen=True):
    """A finished generation request, for observers: token counts from its usage, seconds from its acceptance to the
    first chunk (None: there was none) and to the last."""

    model: str
    prompt_tokens: int
    completion_tokens: int
    first_seconds: float | None
    seconds: float


class Observer:
    """Receives events for metrics, logs and traces. Override the no-op methods; they must be fast and never raise.

    Every request is either `refused` once before it reaches a model, with the error's kind as `reason`; or it is
    `accepted` once and `finished` once, with "ok", "cancelled" or an error's kind as `outcome`. `surface`: the name of
    the API that it came by, "" for none.
    """

    def refused(self, reason: str, surface: str = "") -> None: ...

    def accepted(self, model: str, task: TaskKind, items: int, traffic: TrafficClass, surface: str = "") -> None: ...

    def batched(self, report: BatchReport) -> None: ...

    def generated(self, report: GenerationReport) -> None: ...

    def finished(
        self, model: str, task: TaskKind, outcome: str, seconds: float, result: Result | None, surface: str = ""
    ) -> None: ...


__all__ = [
    "EFFICIENCY",
    "Access",
    "BatchReport",
    "Breakable",
    "Cache",
    "ChatPipeline",
    "CostModel",
    "CountedRow",
    "CountsTokens",
    "Decoder",
    "Engine",
    "EngineFacts",
    "GenerationReport",
    "GeneratorFacts",
    "ModelFacts",
    "Observer",
    "Operation",
    "Piece",
    "Pipeline",
    "Prepared",
    "Prompt",
    "Row",
    "Runner",
    "Statistics",
    "SupportsCheck",
    "Surface",
    "Task",
    "Tensors",
    "TextCodec",
    "TextGenerator",
    "Token",
    "VectorSet",
    "WorkWeight",
    "round_up",
]
