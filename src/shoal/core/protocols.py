"""The seams. Each docstring is the contract that the shipped contract tests check; nothing else may be assumed.

Everything here runs on one asyncio event loop unless it says otherwise. `deadline` is always absolute, in seconds of
`time.monotonic()`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

import msgspec

from shoal.errors import ShoalError
from shoal.specs import ContrastSpec
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


@dataclass(frozen=True, slots=True)
class CostModel:
    """A batch takes about `fixed + per_token * padded tokens` seconds on one slot."""

    fixed: float = 0.001
    per_token: float = 0.00002

    def seconds(self, tokens: int) -> float:
        return self.fixed + self.per_token * tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What one replica states about itself; the planner believes it.

    `slots`: batches that it can hold in flight; `parallel`: how many of them it truly computes side by side (0: all),
    so that a burst is spread over free cores but not cut up for a serial engine. `max_batch_size`: items a batch;
    `max_batch_tokens`: padded tokens a batch (None: no limit of its own). `padded`: True when a batch costs its longest
    item times its items, False when it costs the sum of its items. `length_buckets`, `size_buckets`: ascending sizes
    that a batch is padded up to so that compiled kernels are met again; empty: any size is as good. A length above the
    last bucket is used as it is. `merges`: it computes batches in flight at once as one, so an error of one may be
    another's fault.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    slots: int = 1
    parallel: int = 0
    max_batch_size: int = 64
    max_batch_tokens: int | None = None
    padded: bool = True
    length_buckets: tuple[int, ...] = ()
    size_buckets: tuple[int, ...] = ()
    merges: bool = False
    precision: str = "f32"
    cost: CostModel = field(default_factory=CostModel)
    details: Mapping[str, Any] = field(default_factory=dict)


def round_up(value: int, buckets: Sequence[int]) -> int:
    """The size that `value` is padded up to: the smallest bucket that holds it, or `value` itself above the last."""
    index = bisect_left(buckets, value)
    return buckets[index] if index < len(buckets) else value


class Engine(Protocol):
    """Named arrays in, named arrays out: one replica.

    - `infer` is called for at most `facts.slots` batches at a time and returns exactly `outputs`, each with the batch
      as its first axis, rows in the order of the inputs. The returned arrays are the caller's: no later call changes
      them.
    - `params` are those of the batch's items, which are equal within it (`Prepared.params`).
    - It raises InputRejected (these inputs are at fault), OutOfMemory, EngineFailed (anything else that went wrong on
      this batch), TransportFailed (the replica is not there), Overloaded (the replica's own queue is full: the batch
      is put back and the replica left alone for `retry_after` seconds, 0.1 when it names none), DeadlineExceeded;
      never another exception.
    - Cancelling `infer` gives the slot back only when the engine is truly free of that batch.
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

    `tensors`: this item's own arrays by input name, without a batch axis. `cost`: its length in tokens. `group`: equal
    for items that may share an engine call. `outputs`: engine outputs that this item needs. `key`: equal for items
    whose answers are the same by construction (None: never shared). `tokens`: what usage counts. `truncated`: it was
    cut. `extra`: whatever the pipeline's `finish` wants back. `params`: what the engine is told beside the tensors;
    equal within a group, because a batch has one set of them.
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
    """The row of an input that was asked for more or other than its dense vector: float32 arrays [dimension] and
    [l, width], None for what its task did not ask for."""

    dense: Array | None = None
    tokens: Array | None = None
    sparse: SparseVector | None = None
    multi: Array | None = None


Row = Array | VectorSet
"""One item's answer: a 1-D float32 array (its dense vector; its scores, one a label), or all its vectors."""


class CountedRow(msgspec.Struct, frozen=True):
    """A result row whose tokens only the model's answer tells: they replace what `Prepared.tokens` said."""

    row: Row
    tokens: int


class Pipeline(Protocol):
    """Items to tensors and back: pure CPU work, no I/O, no asyncio; called from any thread, several at a time.

    - `check` raises at once what is wrong with a task as a whole (unknown prompt, bad dimensions): cheap, on the loop.
    - `estimate` guesses an item's tokens without tokenising, for admission.
    - `prepare` takes the items of many requests at once and answers one entry an item, in order: Prepared, or the
      ShoalError that this item alone deserves. It never raises for an item's sake.
    - `collate` joins items of one group into a batch, padded to the facts' buckets.
    - `finish` takes the engine's outputs (rows past `len(batch)` are padding) and answers one entry an item, in order:
      its result row (alone or as Counted), or the ShoalError for that item alone (NotFinite).

    Tasks are of the kinds that its model's facts name, and Embed asks for kinds of vectors that they name. `work`: what
    `prepare` costs an item. "light": microseconds, and it holds the interpreter all the while, so that a thread would
    gain nothing; "heavy": milliseconds and much memory, for which its thread may have to wait, so that each item is a
    job of its own; "usual": what lies between.
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
    """Optional: a pipeline of heavy work whose prepared items take up what the pipelines of other models need too. Only
    `max_held_items` of them are prepared and not answered at once: an engine that hangs keeps that much and no more."""

    @property
    def max_held_items(self) -> int: ...


class Cache(Protocol):
    """Rows that were computed before, by `Prepared.key`: of one model, in one precision. Bounded; called on the loop,
    so both are quick. `put` copies, since a row may be a view of its whole batch; what `get` answers is read-only."""

    def get(self, key: Hashable) -> CountedRow | None: ...

    def put(self, key: Hashable, found: CountedRow) -> None: ...


@dataclass(frozen=True, slots=True)
class CacheCounts:
    """What a cache did since it was made, in rows, and the bytes that it holds now."""

    hits: int = 0
    misses: int = 0
    evicted: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a text; `start` and `stop` are character offsets, None for what the tokenizer added."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


@runtime_checkable
class TextCodec(Protocol):
    """Optional: a runner that can show its tokenizer. Raises InvalidValue for an unknown prompt or a bad id."""

    async def tokenize(
        self, texts: Sequence[str], *, add_special_tokens: bool, prompt_name: str | None
    ) -> list[list[Token]]: ...

    async def decode(self, ids: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> list[str]: ...


@runtime_checkable
class Statistics(Protocol):
    """Optional: a runner whose backend counts what it does. One entry a replica or version, the name as the backend
    calls the model; raises BackendError or CapacityError when the backend cannot be asked."""

    async def statistics(self) -> list[ModelStats]: ...


ReplicaState = Literal["in_service", "ejected", "on_trial", "out_of_service"]
"""Ejected: it is there and failed too often. On trial: it was, and gets one request at a time until one succeeds."""


class ReplicaStatus(NamedTuple):
    name: str
    state: ReplicaState
    ejections: int


@runtime_checkable
class Replicated(Protocol):
    """Optional: a runner whose work goes to replicas, and how each of them is; from memory, at once."""

    def replicas(self) -> list[ReplicaStatus]: ...


@runtime_checkable
class SupportsCheck(Protocol):
    """Optional: a runner that can tell at once, and cheaply, what is wrong with a generation as a whole. `stream`
    raises it as well, but only once there is a place for it."""

    def check(self, task: Generate) -> None: ...


@runtime_checkable
class Breakable(Protocol):
    """Optional: a runner that can stop for good while it is loaded. `call` is called at most once, on the loop, with
    the reason; the model is then failed until it is loaded again. Requests in flight were answered with it before."""

    def when_broken(self, call: Callable[[ShoalError], None]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a served model says of itself on /v1/models/{id}, /info and the start-up banner.

    `source` is where its files came from, with scheme and revision; `id` is what the model is called there, without
    either, and the same whichever of its sources answered. `dimension`, `max_input_tokens`: None where the task has
    none. `space`: stable hash of weights, pooling, prompts and normalisation. `prompts`: name to text. `verified`: the
    outcome of the load-time comparison, in words. `context_tokens`: what prompt and answer may have together, where
    the model generates and that is known. `adapters`: its LoRAs, asked for as `model:adapter`. `vectors`: the
    kinds that an embedder gives, the first where a client names none. `labels`: of a classifier, in the order of its
    scores; a reranker has one. `normalized`: whether a Normalize of its own ends it, or that is not known. `answers`: a
    digest of what it answered when it was opened, where nothing else tells its weights for sure. `modalities`: what its
    inputs may be. `contrast`: how a model whose pictures and texts share a space compares them.
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
    contrast: ContrastSpec | None = None
    details: Mapping[str, Any] = field(default_factory=dict)


class Runner(Protocol):
    """A task in, a result or a stream of chunks out.

    - `run` answers once, Embedded to Embed and Scored to the others, or raises a ShoalError: RequestError,
      CapacityError, BackendError, nothing else. When it is cancelled, the work is dropped from the queue, upstream
      calls are cancelled and permits are given back.
    - `stream` is pulled by the reader: nothing is produced far ahead of it. Closing the iterator stops the work. A
      runner that speaks the dialect of `task.raw` itself answers in raw chunks; all others in typed ones, as Chunk
      says. It raises as `run` does, also in mid-stream.
    - `ready` is cheap and never blocks.
    - `aclose` fails what is pending, frees everything, and may be called twice.
    """

    @property
    def facts(self) -> ModelFacts: ...

    async def run(self, task: BatchTask, ctx: Context) -> Result: ...

    def stream(self, task: Generate, ctx: Context) -> AsyncGenerator[Chunk]: ...

    def ready(self) -> bool: ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What a model continues: a text, its token ids where there is a tokenizer (and then `tokens`, their number).

    `cut`: messages that an opt-in truncation policy left out. `ignored`: fields of the request that are not in it,
    since the model cannot take them. `opened`: the text ends inside of what the model thinks, so that its answer begins
    there.
    """

    text: str
    ids: tuple[int, ...] | None = None
    tokens: int | None = None
    cut: int = 0
    ignored: tuple[str, ...] = ()
    opened: bool = False


class Piece(msgspec.Struct):
    """What a model brought forth since its last piece: text or ids, as its facts say.

    `text` of a generator that gives "cumulative" text is all of it so far. `tokens`: how many tokens are new, where the
    backend counts. `prompt_tokens`, `cached_tokens`: where it tells. `finish_reason`: it ended, for that reason
    ("stop", "length"). A finish without a reason is the end of the iteration.
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
    """What a text generator states about itself.

    `parameters`: names of the Sampling fields that it honours; `stop` need not be one of them, since whatever follows
    a stop text is cut off anyway. `top_logprobs`: how many likely tokens it tells at most beside the chosen one,
    None for any number. `wants_ids`: it reads token ids, so there must be a tokenizer. `gives`: what its
    pieces hold. `context_tokens`: prompt and answer together, None where not known. `adapters` as in ModelFacts.
    """

    name: str
    parameters: frozenset[str]
    top_logprobs: int | None = None
    wants_ids: bool = False
    gives: Literal["delta", "cumulative", "ids"] = "delta"
    context_tokens: int | None = None
    adapters: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)


class TextGenerator(Protocol):
    """One prompt in, pieces of one answer out: one replica of a language model.

    - `generate` is called side by side, once for each choice. Its `sampling` holds only fields of `facts.parameters`
      and `stop`; `stream` False: nobody reads before the end, so it may answer in one piece. Closing the iterator, or
      cancelling its `anext`, stops the work on the backend, within a second.
    - It raises InputRejected, InvalidValue, TooLong, EngineFailed, TransportFailed, Overloaded, DeadlineExceeded,
      OutOfMemory, UpstreamRefused; never another exception. After a piece was given, too.
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
    """Pieces of one answer to chunks of one choice: detokenises, cuts at stop texts, splits reasoning, parses tool
    calls. Pure.

    - `push` answers what can be told now; what may be the beginning of a stop text, of a tool call or of half a
      character is kept back. After `stopped` is true the answer is over: nothing more is to be pushed.
    - `flush(reason)` answers the rest; the last chunk has the finish reason: "stop" where a stop text was met,
      "tool_calls" where calls were parsed and the model ended by itself, else `reason`.
    - `index` is that of its choice. `tokens`, `reasoning_tokens`: generated so far, as the backend counts, else
      counted here.
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
    """Conversations and prompts to what a model reads, and its pieces to answers: pure CPU work, no I/O; called from
    any thread.

    - `check` raises at once what is wrong with a task as a whole: no template for messages, images, tools that the
      template does not know. Cheap, on the loop.
    - `prompts` answers one Prompt for the messages, or one for each of the task's prompts. Raises TooLong, with both
      counts, where one leaves no room for an answer within `context_tokens`; InvalidValue for ids that are no tokens
      and for messages that the template refuses.
    - `decoder` answers a fresh Decoder for the choice `index` of a prompt; the task's sampling is the one in effect.
    - `to_backend_sampling` answers what the backend is told of a choice's sampling: stop texts only where they mean all
    of its text.
    - `tools_guide`: what a backend with guided decoding is told so that the tools asked for are called; None: nothing.
    - `details`: what it adds to the details of its model's facts.
    """

    @property
    def details(self) -> Mapping[str, Any]: ...

    def check(self, task: Generate) -> None: ...

    def prompts(self, task: Generate) -> list[Prompt]: ...

    def decoder(
        self, task: Generate, prompt: Prompt, index: int, gives: Literal["delta", "cumulative", "ids"]
    ) -> Decoder: ...

    def to_backend_sampling(self, task: Generate, sampling: Sampling) -> Sampling: ...

    def tools_guide(self, task: Generate) -> Guide | None: ...


Access = Literal["public", "user", "admin"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method on one path of a surface, and all that authentication and the OpenAPI document need to know of it.

    `path` may hold one trailing `{name:path}` parameter. `access` is "user" unless said otherwise, so that a forgotten
    one is closed. `endpoint` takes the request and answers the response, or raises a ShoalError that the surface's
    `render_error` turns into its dialect. `request` and `response` are the types of the JSON bodies (None: no
    body); `errors` maps the statuses that `endpoint` can answer to the type of their bodies (`str`: text). What the
    front answers before it calls the endpoint (keys, bounds of the body, bad JSON) follows from `access`, `method` and
    `request`, and is not listed. `limit` overrides the byte limit of the body; 0: `endpoint` refuses every request,
    before its body is read. `quiet`: machines ask it every few
    seconds, so the access log has it at debug only. `generates`: its time is generate_timeout_s, not
    embed_timeout_s. For the document only: `example` is a request body that works on
    any model, `headers` maps the headers of a success, beyond `x-request-id`, to what they say.
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
    generates: bool = False
    description: str = ""
    example: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)


class Surface(Protocol):
    """A wire API: bytes to tasks, results to bytes, errors to its own shape.

    `render_error` answers (status, headers, body) for any ShoalError and never raises. `error` is the type of its JSON
    bodies, for the document; None where it makes none.
    """

    name: str
    error: Any

    def routes(self, gateway: Gateway) -> Sequence[Operation]: ...

    def render_error(self, error: ShoalError) -> tuple[int, dict[str, str], bytes]: ...


class BatchReport(msgspec.Struct, frozen=True):
    """One engine call, for observers: sizes in items and tokens, times in seconds."""

    model: str
    replica: str
    items: int
    tokens: int
    padded_tokens: int
    flush: str
    seconds: float
    error: str | None = None


class GenerationReport(msgspec.Struct, frozen=True):
    """One generation request that ended, for observers: tokens as its usage says, seconds from its acceptance to the
    first chunk (None: there was none) and to the last."""

    model: str
    prompt_tokens: int
    completion_tokens: int
    first_seconds: float | None
    seconds: float


class Observer:
    """What happened, for metrics, logs and traces. Methods are no-ops to override; they are quick and never raise.

    Every request is either `refused` once, before a model took it, `reason` being the error's kind; or it is `accepted`
    once and `finished` once, `outcome` being "ok", "cancelled" or an error's kind.
    """

    def refused(self, reason: str) -> None: ...

    def accepted(self, model: str, task: TaskKind, items: int, traffic: TrafficClass) -> None: ...

    def queued(self, model: str, items: int, tokens: int) -> None: ...

    def batched(self, report: BatchReport) -> None: ...

    def inferred(self, model: str, stage: str, seconds: float) -> None: ...

    def generated(self, report: GenerationReport) -> None: ...

    def finished(self, model: str, task: TaskKind, outcome: str, seconds: float, result: Result | None) -> None: ...


__all__ = [
    "Access",
    "BatchReport",
    "Breakable",
    "Cache",
    "ChatPipeline",
    "CostModel",
    "CountedRow",
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
