"""Tasks, items, results and the context of a request: plain frozen structs that round-trip through msgspec.

`pack` and `unpack` carry them across process borders as MessagePack; arrays travel as (dtype, shape, bytes)
and come back equal to the bit.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from shoal.decoding import msgpack_decoder

Array: TypeAlias = npt.NDArray[Any]
Vectors: TypeAlias = npt.NDArray[np.float32]
TrafficClass: TypeAlias = Literal["interactive", "bulk"]
Direction: TypeAlias = Literal["left", "right"]
TaskKind: TypeAlias = Literal["embed", "rerank", "classify", "generate"]
VectorKind: TypeAlias = Literal["dense", "tokens", "sparse", "multi"]
Modality: TypeAlias = Literal["text", "image"]

TextItem: TypeAlias = str | list[int]
"""One text, or its token ids in the model's own vocabulary, used exactly as given (no special tokens added)."""


TextPair: TypeAlias = tuple[str, str]
"""Two texts that a model reads together, as a query and a document."""


class Image(msgspec.Struct, frozen=True):
    """An image as it was sent: the bytes of a JPEG, PNG, WebP, GIF or BMP file."""

    data: bytes


Item: TypeAlias = TextItem | TextPair | Image


class TokenizedTexts(msgspec.Struct, frozen=True):
    """The texts of a task, tokenized in another process than the one that runs the model.

    `tokenizer` identifies what made the tokens (see protocols.SharesTokenizer); another one reads the texts instead.
    `items`: as that packed them. `seconds`: how long it took.
    """

    tokenizer: str
    items: bytes
    seconds: float = 0.0


class Embed(msgspec.Struct, frozen=True, kw_only=True, tag="embed"):
    """Turn each input into vectors, of every kind in `outputs`.

    "dense": one vector; "sparse": weights by token of the vocabulary (SPLADE, bge-m3); "multi": the vectors that late
    interaction compares (ColBERT, bge-m3); "tokens": one vector for each token read, special ones included, before
    pooling. `prompt_name` names a prompt of the model, put before every text; `input_type` ("query", "document") picks
    one by its role, and the side of a late interaction; both None means the model's own default. `truncate` None
    follows the model's setting. `normalize` and `dimensions` are of the dense vector, which is cut first. `tokenized`:
    the texts among `inputs` again.
    """

    kind: ClassVar[TaskKind] = "embed"

    model: str
    inputs: Sequence[TextItem | Image]
    prompt_name: str | None = None
    input_type: str | None = None
    truncate: bool | None = None
    truncation_direction: Direction = "right"
    normalize: bool = True
    dimensions: int | None = None
    outputs: tuple[VectorKind, ...] = ("dense",)
    tokenized: TokenizedTexts | None = None

    @property
    def items(self) -> Sequence[Item]:
        return self.inputs


class Rerank(msgspec.Struct, frozen=True, kw_only=True, tag="rerank"):
    """Score how well each document answers its query: one query for all documents, or one for each.

    `raw_scores`: as the model gives them, without its activation. `truncate` None follows the model's setting; of a
    pair that is too long the longer text is cut, token by token. `max_document_tokens` cuts a document by itself first.
    `instruction`: what makes a document relevant, in place of the model's default; only of models that take one.
    `tokenized`: the pairs again.
    """

    kind: ClassVar[TaskKind] = "rerank"

    model: str
    queries: list[str]
    documents: list[str]
    raw_scores: bool = False
    truncate: bool | None = None
    truncation_direction: Direction = "right"
    max_document_tokens: int | None = None
    instruction: str | None = None
    tokenized: TokenizedTexts | None = None

    @property
    def items(self) -> Sequence[Item]:
        """(query, document) pairs. Raises ValueError where there are neither one query nor as many as documents."""
        if len(self.queries) == 1:
            query = self.queries[0]
            return [(query, document) for document in self.documents]
        return list(zip(self.queries, self.documents, strict=True))


class Classify(msgspec.Struct, frozen=True, kw_only=True, tag="classify"):
    """Give each input, a text, two texts read together or an image, a score for every label of the model.

    `raw_scores`, `truncate` and `truncation_direction` as in Rerank. `tokenized`: the texts among `inputs` again.
    """

    kind: ClassVar[TaskKind] = "classify"

    model: str
    inputs: Sequence[str | TextPair | Image]
    raw_scores: bool = False
    truncate: bool | None = None
    truncation_direction: Direction = "right"
    tokenized: TokenizedTexts | None = None

    @property
    def items(self) -> Sequence[Item]:
        return self.inputs


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a message: a text, or an image by its URL. "other" is what the client calls `kind`, known only to
    a server that gets the body of the request as it came: whoever reads messages refuses it."""

    type: Literal["text", "image", "other"] = "text"
    text: str = ""
    url: str = ""
    kind: str = ""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that the model asked for; `arguments` is JSON text, as the model wrote it."""

    id: str
    name: str
    arguments: str = ""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a conversation. `content` None: the turn only calls tools. `reasoning`: what the model thought before
    it answered, where the client sent that back."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None
    reasoning: str | None = None


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: bool = False


class Guide(msgspec.Struct, frozen=True, kw_only=True):
    """What the answer must look like. `value`: the JSON text of a schema, a regular expression, a grammar; "" for
    json_object, a JSON list of texts for choice. `calls_or_answer`: Shoal's own structural tag for tool calls or an
    answer in JSON; a tool whose schema has no grammar gets any object. `field`: what the client called it. `name` and
    `strict`: what else the client says of a schema, for servers that want it. `optional`: answer without it where it
    cannot be used."""

    kind: Literal["json_object", "json_schema", "regex", "grammar", "choice", "structural_tag", "calls_or_answer"]
    value: str = ""
    field: str = "response_format"
    name: str = ""
    strict: bool | None = None
    optional: bool = False


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is chosen and when to end. None, [] and {}: the model's own default.

    `max_tokens` and `min_tokens` count what is generated. `stop`: texts that end it and are not returned, unless
    `include_stop`. `logit_bias`: by token id. `logprobs`: how many of the likeliest tokens to report beside the chosen
    one (0: the chosen one alone). `guide`: constraints on the answer's format.
    """

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    include_stop: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    length_penalty: float | None = None
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    bad_words: list[str] = []
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    guide: Guide | None = None


Fields: TypeAlias = dict[str, msgspec.Raw]
"""The fields of a JSON object, each value as received."""


class Untranslated(msgspec.Struct, frozen=True, kw_only=True):
    """Why the fields of a task do not say all of its `raw` body: the error for the client, as the `kind` of a class of
    `shoal.errors`, its message, and the field at fault."""

    message: str
    param: str | None = None
    kind: str = "unsupported"


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag="generate"):
    """Continue each of `prompts`, or answer the conversation `messages`: one of the two is not empty.

    `n` choices of each, the best of `best_of`. Choices are numbered prompt by prompt. `stream`: the client reads pieces
    as they come; otherwise a backend may be asked for the whole answer at once. `echo`: begin with the prompt.
    `tool_choice`: "auto", "none", "required", or "function", which means the one named `tool_name`.
    `continue_final`: the last message is the beginning of the answer. `template_kwargs` go to the chat template.
    `include_reasoning` False: leave out what the model thinks. `adapter`: a LoRA of the model, by the name that clients
    use. `raw`: the dialect ("openai.chat", "openai.completions", "openai.responses", "anthropic.messages") and the
    fields of the body as the client sent them, for backends that speak it themselves. Those that no version of Shoal
    knows are in `extras`, too.
    `untranslated`: only a backend that speaks the dialect of `raw` itself can answer this task.
    `drop_oldest`: the oldest turns of a conversation that is too long may be left out.
    `folds_instructions`: later instructions become part of users' turns where the model's template is unknown.
    `names`: what the client calls fields of `sampling`, where its API has other names than OpenAI's and vLLM's.
    """

    kind: ClassVar[TaskKind] = "generate"

    model: str
    prompts: list[TextItem] = []
    messages: list[Message] = []
    n: int = 1
    best_of: int | None = None
    sampling: Sampling = Sampling()
    stream: bool = False
    echo: bool = False
    tools: list[Tool] = []
    tool_choice: Literal["auto", "none", "required", "function"] = "auto"
    tool_name: str = ""
    parallel_tool_calls: bool = True
    continue_final: bool = False
    add_generation_prompt: bool = True
    template_kwargs: dict[str, Any] = {}
    include_reasoning: bool = True
    adapter: str = ""
    raw: tuple[str, Fields] | None = None
    extras: Fields = {}
    untranslated: Untranslated | None = None
    drop_oldest: bool = False
    folds_instructions: bool = False
    names: dict[str, str] = {}

    @property
    def choices(self) -> int:
        """How many answers come back."""
        return self.n * (len(self.prompts) or 1)


BatchTask: TypeAlias = Embed | Rerank | Classify
"""Tasks that consist of items, which lanes join with those of other requests."""

Task: TypeAlias = BatchTask | Generate


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks, and until when.

    `deadline` is absolute, in seconds of the monotonic clock, which all processes of a host share. `client` is the
    key, else the trusted user header, else the peer address. `traffic` None lets the request's size decide. `session`:
    what the client says this request belongs to; "" if nothing. `surface`: the name of the API that it came by, "" for
    none. `trace`: the span that this is a part of, as the W3C's
    `traceparent` and, after a space, `tracestate`; "" without traces. `arrived`: when the request did, by the monotonic
    clock of its machine, which tells it from others with the same id; 0 outside of requests.
    """

    id: str
    deadline: float
    client: str = ""
    traffic: TrafficClass | None = None
    session: str = ""
    surface: str = ""
    trace: str = ""
    arrived: float = 0.0

    def remaining(self, now: float | None = None) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.deadline - (time.monotonic() if now is None else now))


class BatchFacts(msgspec.Struct, frozen=True, kw_only=True):
    """How a request was run; `size` (items), `requests`, `id` and `flush` are those of its largest batch.
    Equal inputs of several requests are one item.

    `flush` says why that batch left: "full" (a limit was reached), "idle" (a slot was free), "age" (the linger or the
    starvation guard was over). Times are milliseconds: `queue_ms` and `infer_ms` of the slowest item, `prepare_ms`
    of the request's tokenising. `cached`: items that were answered from the cache, without a batch.
    """

    size: int = 0
    requests: int = 0
    id: int = 0
    batches: int = 0
    flush: str = "idle"
    replica: str = ""
    queue_ms: float = 0.0
    prepare_ms: float = 0.0
    infer_ms: float = 0.0
    cached: int = 0


class SparseVector(msgspec.Struct, frozen=True):
    """Weights that are not zero: `indices` int32 [k], token ids in ascending order; `values` float32 [k]."""

    indices: Array
    values: Array


class Embedded(msgspec.Struct, frozen=True, kw_only=True):
    """What each input became, in input order; a kind that was not asked for is empty.

    `vectors`: dense, float32 [inputs, dimension], C-contiguous ([inputs, 0] when not asked for). `token_vectors`,
    `multi_vectors`: one float32 [l, width] an input. `tokens` counts what the model read of each input, special tokens
    included; `truncated` counts inputs that were cut.
    """

    vectors: Array
    tokens: list[int]
    truncated: int = 0
    facts: BatchFacts = BatchFacts()
    space: str = ""
    sparse: list[SparseVector] = []
    token_vectors: list[Array] = []
    multi_vectors: list[Array] = []


class Scored(msgspec.Struct, frozen=True, kw_only=True):
    """`scores` is float32 [items, labels] in the order of the items and of the model's labels, a reranker's one.
    `tokens` and `truncated` as in Embedded."""

    scores: Array
    tokens: list[int]
    truncated: int = 0
    facts: BatchFacts = BatchFacts()


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a whole request: those of the rendered prompts, and those generated over all choices."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """A generated token's text, its natural logarithm of probability, and the likeliest tokens in its place. `data`:
    its bytes, where the text cannot hold them."""

    token: str
    logprob: float
    data: bytes | None = None
    top: list[TokenLogprob] = []


class ToolDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A fragment of the tool call at `index`: `id` and `name` come whole, with its first fragment and no other."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of the choice at `index`; its last one carries its `finish_reason` ("stop", "length", "tool_calls",
    "content_filter"), and nothing of that choice follows. `stop`: beside the reason, the stop text that ended the
    choice, if one did and the backend says so.

    `usage` is that of the whole request: it comes once, on the stream's last chunk, which holds nothing else. `raw`:
    (dialect, bytes) as an upstream sent them, whole events or the whole body, so that passing them on stays
    byte-exact; beside it only `usage` and `replica` may be set. `cut`: on the first chunk, how many messages of a
    conversation that was too long were left out by the model's prompt_truncation, and in `ignored` the fields of the
    request that the model cannot honor and that did not fail it. `replica`: on the first chunk, the number of the
    replica that answers, if there are several.
    """

    text: str = ""
    index: int = 0
    finish_reason: str | None = None
    stop: str = ""
    reasoning: str = ""
    tools: list[ToolDelta] = []
    logprobs: list[TokenLogprob] = []
    usage: Usage | None = None
    raw: tuple[str, bytes] | None = None
    cut: int = 0
    ignored: tuple[str, ...] = ()
    replica: int | None = None


class DurationStat(msgspec.Struct, frozen=True, kw_only=True):
    """How often something happened and how long it took in all, in nanoseconds."""

    count: int = 0
    ns: int = 0


class InferenceStats(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of a model's requests went; the names are those of Triton's InferStatistics."""

    success: DurationStat = DurationStat()
    fail: DurationStat = DurationStat()
    queue: DurationStat = DurationStat()
    compute_input: DurationStat = DurationStat()
    compute_infer: DurationStat = DurationStat()
    compute_output: DurationStat = DurationStat()
    cache_hit: DurationStat = DurationStat()
    cache_miss: DurationStat = DurationStat()


class BatchStats(msgspec.Struct, frozen=True, kw_only=True):
    """Executions of one batch size, in items; the names are those of Triton's InferBatchStatistics."""

    batch_size: int
    compute_input: DurationStat = DurationStat()
    compute_infer: DurationStat = DurationStat()
    compute_output: DurationStat = DurationStat()


class MemoryUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that a model holds in one memory: `type` "CPU" or "GPU", `id` of the device."""

    type: str
    id: int = 0
    byte_size: int = 0


class ModelStats(msgspec.Struct, frozen=True, kw_only=True):
    """What a model has done since it was loaded; the names are those of Triton's ModelStatistics.

    `last_inference` is in milliseconds of the Unix epoch (0: never). `inference_count` counts items, `execution_count`
    the batches that they ran in. Numbers of 64 bits are ints here; the JSON surface writes them as strings.
    """

    name: str
    version: str = ""
    last_inference: int = 0
    inference_count: int = 0
    execution_count: int = 0
    inference_stats: InferenceStats = InferenceStats()
    batch_stats: list[BatchStats] = []
    memory_usage: list[MemoryUsage] = []


Result: TypeAlias = Embedded | Scored
Wire: TypeAlias = Task | Result | SparseVector | Chunk | Context | ModelStats
W = TypeVar("W")
G = TypeVar("G", bound=Generate)


def compute_digest(batches: Sequence[Mapping[str, Array]]) -> str:
    """16 hex digits that tell one list of batches of named arrays from another, whatever the order of the names."""
    digest = hashlib.sha256()
    for batch in batches:
        for name, array in sorted(batch.items()):
            digest.update(f"{name} {array.dtype.str} {array.shape} ".encode() + array.tobytes())
    return digest.hexdigest()[:16]


def pack(value: msgspec.Struct) -> bytes:
    """Encode a task, a result, a chunk, a context, a spec as MessagePack."""
    if isinstance(value, Generate):
        # A Raw is written as it stands, and these are JSON: they travel as byte strings.
        value = _convert_fields(value, lambda json: _ENCODER.encode(bytes(json)))
    return _ENCODER.encode(value)


def unpack(data: bytes, kind: type[W]) -> W:
    """Decode what `pack` made. Raises msgspec.ValidationError when the bytes are not a `kind`."""
    value = msgpack_decoder(kind, dec_hook=decode_array).decode(data)
    return _convert_fields(value, _BYTES.decode) if isinstance(value, Generate) else value


def _convert_fields(task: G, convert: Callable[[msgspec.Raw], bytes]) -> G:
    """Return the task with each field of the body that it holds converted."""

    def convert_all(fields: Fields) -> Fields:
        return {name: msgspec.Raw(convert(value)) for name, value in fields.items()}

    raw = None if task.raw is None else (task.raw[0], convert_all(task.raw[1]))
    return msgspec.structs.replace(task, raw=raw, extras=convert_all(task.extras))


def encode_array(value: object) -> object:
    """Encode an array for msgspec, as its `enc_hook`."""
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    raise NotImplementedError(f"{type(value).__name__} has no wire form")


def decode_array(kind: type, value: Any) -> Any:
    """Decode an array, read-only, as the `dec_hook` of msgspec."""
    if getattr(kind, "__origin__", kind) is np.ndarray:
        dtype, shape, data = value
        return np.frombuffer(data, dtype=dtype).reshape(shape)
    raise NotImplementedError(f"{kind} has no wire form")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=encode_array)
_BYTES = msgpack_decoder(bytes)
