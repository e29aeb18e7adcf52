"""The fields of OpenAI's answers that Shoal reads; other fields are ignored.

Sources: OpenAI's API description; vLLM and DeepSeek for `reasoning` and `reasoning_content`. Servers omit fields or
send null for them, so every field has a default.
"""

from __future__ import annotations

from typing import Any

import msgspec

from shoal.types import TaskKind, Usage

MAX_COUNT = 2**53
"""Maximum token count: integers up to here are exact in every JSON parser. Larger values are not taken as counts."""


class TokenDetails(msgspec.Struct):
    cached_tokens: Any = None
    reasoning_tokens: Any = None


_NO_DETAILS = TokenDetails()


class UsageWire(msgspec.Struct):
    """Usage of chat and completions and, under other names, of the Responses API and of Anthropic's Messages, which
    count cached input apart. Counts may be any JSON, so that a bad count does not fail an answer."""

    prompt_tokens: Any = None
    completion_tokens: Any = None
    input_tokens: Any = None
    output_tokens: Any = None
    total_tokens: Any = None
    cache_read_input_tokens: Any = None
    cache_creation_input_tokens: Any = None
    prompt_tokens_details: TokenDetails | None = None
    completion_tokens_details: TokenDetails | None = None
    input_tokens_details: TokenDetails | None = None
    output_tokens_details: TokenDetails | None = None

    def to_usage(self) -> Usage:
        """Return the usage with every count in 0..MAX_COUNT."""
        before = self.prompt_tokens_details or self.input_tokens_details or _NO_DETAILS
        after = self.completion_tokens_details or self.output_tokens_details or _NO_DETAILS
        read = _tokens(self.cache_read_input_tokens)
        apart = read + _tokens(self.cache_creation_input_tokens)
        return Usage(
            prompt_tokens=_tokens(self.prompt_tokens) or _tokens(self.input_tokens) + apart,
            completion_tokens=_tokens(self.completion_tokens) or _tokens(self.output_tokens),
            cached_tokens=_tokens(before.cached_tokens) or read,
            reasoning_tokens=_tokens(after.reasoning_tokens),
        )

    @property
    def input_token_count(self) -> int:
        """Input tokens when nothing is generated; some servers report only a total. 0 if not reported."""
        return _tokens(self.prompt_tokens) or _tokens(self.input_tokens) or _tokens(self.total_tokens)


def _tokens(value: object) -> int:
    if value is None or (type(value) is int and 0 <= value <= MAX_COUNT):
        return value or 0
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0
    return int(min(max(value, 0), MAX_COUNT))


class WholeWire(msgspec.Struct):
    """The fields of a whole answer that is passed on: the one that makes it an answer, and the usage. Bad usage does
    not fail it."""

    choices: list[msgspec.Raw] | None = None
    usage: msgspec.Raw = msgspec.Raw(b"null")


class TypedWholeWire(msgspec.Struct):
    """The lists that make a whole answer one: `output` of the Responses API, `content` of Anthropic's Messages. Servers
    may use the other API's field differently, so each may be any JSON."""

    output: msgspec.Raw = msgspec.Raw(b"null")
    content: msgspec.Raw = msgspec.Raw(b"null")


class ResponseUsageWire(msgspec.Struct):
    usage: UsageWire | None = None


class UsageEventWire(msgspec.Struct):
    """The fields of an event or a body that hold the usage: `message` in Anthropic's first event."""

    usage: UsageWire | None = None
    response: ResponseUsageWire | None = None
    message: ResponseUsageWire | None = None


class EndingWire(msgspec.Struct):
    """The fields that mark the last event of a stream: an `error` at the top level, or a `type` of the Responses API,
    with its own `code` and `message` or those of a failed `response`."""

    type: Any = None
    error: Any = None
    code: Any = None
    message: Any = None
    param: Any = None
    response: Any = None


class FunctionWire(msgspec.Struct):
    """A called function. `arguments` are a text, or the object itself from some servers."""

    name: str | None = None
    arguments: Any = None


class ToolWire(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: FunctionWire | None = None


class MessageWire(msgspec.Struct):
    """A `delta` or a `message`. Some servers send content in parts, of which only text parts are used. `function_call`
    is the API's older form of a tool call."""

    content: str | list[dict[str, Any]] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolWire] | None = None
    function_call: FunctionWire | None = None


class TokenWire(msgspec.Struct):
    token: str = ""
    logprob: float = 0.0
    bytes: list[int] | None = None
    top_logprobs: list[TokenWire] | None = None


class LogprobsWire(msgspec.Struct):
    """Log probabilities: `content` in chat, the other three in completions."""

    content: list[TokenWire] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


class ChoiceWire(msgspec.Struct):
    """A choice. `stop_reason` is vLLM's, `matched_stop` SGLang's."""

    index: int | None = None
    text: str | None = None
    delta: MessageWire | None = None
    message: MessageWire | None = None
    logprobs: LogprobsWire | None = None
    finish_reason: str | None = None
    stop_reason: Any = None
    matched_stop: Any = None

    @property
    def stop(self) -> str:
        """The stop text that ended the choice, if the server says so. A token that did is a number."""
        return next((each for each in (self.stop_reason, self.matched_stop) if isinstance(each, str)), "")


class AnswerWire(msgspec.Struct):
    """A stream event or a whole answer of chat or completions."""

    choices: list[ChoiceWire] | None = None
    usage: UsageWire | None = None
    error: Any = None


class VectorWire(msgspec.Struct):
    embedding: msgspec.Raw
    index: int | None = None


class VectorsWire(msgspec.Struct):
    data: list[VectorWire]
    usage: UsageWire | None = None


class ModelWire(msgspec.Struct):
    """An entry of /models: `max_model_len` is vLLM's, `meta` llama.cpp's, which is `owned_by` "llamacpp",
    `context_length` that of several others, `architecture` OpenRouter's and that of llama.cpp's router, `capabilities`
    Mistral's; `tasks`, `labels`, `context_tokens`, `max_input_tokens` and `vision` are Shoal's own. Other servers may
    use these names differently, so every type is checked."""

    id: str
    owned_by: Any = None
    tasks: Any = None
    labels: Any = None
    context_tokens: Any = None
    max_input_tokens: Any = None
    max_model_len: Any = None
    context_length: Any = None
    max_context_length: Any = None
    meta: Any = None
    vision: Any = None
    architecture: Any = None
    capabilities: Any = None

    @property
    def accepts_images(self) -> bool:
        """Whether the server lists the model as one whose chats may hold images; many servers do not say."""
        architecture, capabilities = (
            each if isinstance(each, dict) else {} for each in (self.architecture, self.capabilities)
        )
        inputs = architecture.get("input_modalities")
        listed = isinstance(inputs, list) and "image" in inputs
        return listed or self.vision is True or capabilities.get("vision") is True

    @property
    def supported_tasks(self) -> tuple[TaskKind, ...]:
        """The listed tasks that Shoal knows."""
        tasks = self.tasks if isinstance(self.tasks, list) else []
        known: tuple[TaskKind, ...] = ("embed", "rerank", "classify", "generate")
        return tuple(task for task in known if task in tasks)

    @property
    def classes(self) -> tuple[str, ...]:
        """The listed labels, in the order of a classifier's scores."""
        labels = self.labels if isinstance(self.labels, list) else []
        named = tuple(label for label in labels if isinstance(label, str))
        return named if len(set(named)) == len(labels) else ()

    @property
    def context_limit(self) -> int | None:
        """Maximum tokens of a prompt and its answer together, None if unknown."""
        meta = self.meta if isinstance(self.meta, dict) else {}
        return _count(
            self.context_tokens,
            self.max_model_len,
            meta.get("n_ctx"),
            meta.get("n_ctx_train"),
            self.context_length,
            self.max_context_length,
        )

    @property
    def input_limit(self) -> int | None:
        """Maximum tokens of a text to embed, None if unknown."""
        return _count(self.max_input_tokens) or self.context_limit


def _count(*values: object) -> int | None:
    return next((one for one in values if type(one) is int and 0 < one <= MAX_COUNT), None)


class ModelsWire(msgspec.Struct):
    data: list[ModelWire]


class ScoreWire(msgspec.Struct):
    """An entry of /score, or of /rerank, which has `relevance_score`."""

    index: int | None = None
    score: float | None = None
    relevance_score: float | None = None


class UnitsWire(msgspec.Struct):
    input_tokens: Any = None


class MetaWire(msgspec.Struct):
    """Cohere's `meta`."""

    tokens: UnitsWire | None = None
    billed_units: UnitsWire | None = None


class ScoresWire(msgspec.Struct):
    """An answer of a scoring route: `data` in /score and Voyage, `results` in the others."""

    data: list[ScoreWire] | None = None
    results: list[ScoreWire] | None = None
    usage: UsageWire | None = None
    meta: MetaWire | None = None

    @property
    def input_token_count(self) -> int:
        """Input tokens, 0 if not reported."""
        units = (self.meta.tokens, self.meta.billed_units) if self.meta is not None else ()
        counts = [_tokens(each.input_tokens) for each in units if each is not None]
        return (self.usage.input_token_count if self.usage is not None else 0) or next(filter(None, counts), 0)


class LabelWire(msgspec.Struct):
    label: str
    score: float | None = None


class ClassWire(msgspec.Struct):
    """An entry of vLLM's /classify: `label` belongs to the largest of `probs`."""

    probs: list[float | None]
    index: int | None = None
    label: str | None = None


class ClassesWire(msgspec.Struct):
    """An answer of /classify: vLLM's form, or Infinity's with a score for every label name."""

    data: list[ClassWire | list[LabelWire]]
    usage: UsageWire | None = None
