"""The parts of OpenAI's answers that are read here; whatever else a server sends is left alone.

Sources: OpenAI's API description; vLLM and DeepSeek for `reasoning` and `reasoning_content`. Servers leave fields out
or send null for them, so everything has a default.
"""

from __future__ import annotations

from typing import Any

import msgspec

from shoal.types import TaskKind, Usage

MAX_COUNT = 2**53
"""Of tokens: the largest integer up to which every JSON reader is exact. What a server tells beyond it is no count."""


class TokenDetails(msgspec.Struct):
    cached_tokens: Any = None
    reasoning_tokens: Any = None


class UsageWire(msgspec.Struct):
    """Of chat and completions, and, with the other names, of the Responses API. Counts may be any JSON: an answer is
    not lost because its server counts badly."""

    prompt_tokens: Any = None
    completion_tokens: Any = None
    input_tokens: Any = None
    output_tokens: Any = None
    total_tokens: Any = None
    prompt_tokens_details: TokenDetails | None = None
    completion_tokens_details: TokenDetails | None = None
    input_tokens_details: TokenDetails | None = None
    output_tokens_details: TokenDetails | None = None

    def to_usage(self) -> Usage:
        """Every count lies in 0..MAX_COUNT, whatever the server says."""
        before = self.prompt_tokens_details or self.input_tokens_details or TokenDetails()
        after = self.completion_tokens_details or self.output_tokens_details or TokenDetails()
        return Usage(
            prompt_tokens=_tokens(self.prompt_tokens) or _tokens(self.input_tokens),
            completion_tokens=_tokens(self.completion_tokens) or _tokens(self.output_tokens),
            cached_tokens=_tokens(before.cached_tokens),
            reasoning_tokens=_tokens(after.reasoning_tokens),
        )

    @property
    def input_token_count(self) -> int:
        """Tokens that went in, where nothing is generated: some servers tell a total alone. 0: it does not tell."""
        return _tokens(self.prompt_tokens) or _tokens(self.input_tokens) or _tokens(self.total_tokens)


def _tokens(told: object) -> int:
    if isinstance(told, bool) or not isinstance(told, int | float):
        return 0
    return int(min(max(told, 0), MAX_COUNT))


class ChoicesWire(msgspec.Struct):
    """What of a body tells that it is an answer."""

    choices: list[msgspec.Raw] | None = None


class ResponseUsageWire(msgspec.Struct):
    usage: UsageWire | None = None


class UsageEventWire(msgspec.Struct):
    """What of an event, or of a body, tells the usage."""

    usage: UsageWire | None = None
    response: ResponseUsageWire | None = None


class EndingWire(msgspec.Struct):
    """What of an event tells that it is the last one: an `error` at the top, or a `type` of the Responses API, with
    its own `code` and `message`, or in a `response` that failed."""

    type: Any = None
    error: Any = None
    code: Any = None
    message: Any = None
    param: Any = None
    response: Any = None


class FunctionWire(msgspec.Struct):
    """`arguments` are a text, or, of some servers, the object itself."""

    name: str | None = None
    arguments: Any = None


class ToolWire(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: FunctionWire | None = None


class MessageWire(msgspec.Struct):
    """A `delta` or a `message`. Some servers send content in parts, of which only the text is an answer.
    `function_call` is the one call of the API before it had tools."""

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
    """`content` of chat; the other three of completions."""

    content: list[TokenWire] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


class ChoiceWire(msgspec.Struct):
    index: int | None = None
    text: str | None = None
    delta: MessageWire | None = None
    message: MessageWire | None = None
    logprobs: LogprobsWire | None = None
    finish_reason: str | None = None


class AnswerWire(msgspec.Struct):
    """An event of a stream, or a whole answer, of chat or completions."""

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
    """An entry of /models: `max_model_len` is vLLM's, `meta` llama.cpp's, `context_length` that of several others;
    `tasks`, `labels`, `context_tokens` and `max_input_tokens` are Shoal's own. Others may mean something else by these
    names, so that every type has to be looked at."""

    id: str
    tasks: Any = None
    labels: Any = None
    context_tokens: Any = None
    max_input_tokens: Any = None
    max_model_len: Any = None
    context_length: Any = None
    max_context_length: Any = None
    meta: Any = None

    @property
    def supported_tasks(self) -> tuple[TaskKind, ...]:
        """The tasks that it names; none where it names none that are known."""
        told = self.tasks if isinstance(self.tasks, list) else []
        known: tuple[TaskKind, ...] = ("embed", "rerank", "classify", "generate")
        return tuple(task for task in known if task in told)

    @property
    def classes(self) -> tuple[str, ...]:
        """The labels that it names, in the order of a classifier's scores."""
        told = self.labels if isinstance(self.labels, list) else []
        named = tuple(label for label in told if isinstance(label, str))
        return named if len(set(named)) == len(told) else ()

    @property
    def context_limit(self) -> int | None:
        """Tokens of a prompt and its answer together."""
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
        """Tokens of a text to embed."""
        return _count(self.max_input_tokens) or self.context_limit


def _count(*told: object) -> int | None:
    return next((one for one in told if type(one) is int and 0 < one <= MAX_COUNT), None)


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
    """Cohere's."""

    tokens: UnitsWire | None = None
    billed_units: UnitsWire | None = None


class ScoresWire(msgspec.Struct):
    """/score and Voyage have `data`, the others `results`."""

    data: list[ScoreWire] | None = None
    results: list[ScoreWire] | None = None
    usage: UsageWire | None = None
    meta: MetaWire | None = None

    @property
    def input_token_count(self) -> int:
        """Tokens that went in; 0 where it does not tell."""
        units = (self.meta.tokens, self.meta.billed_units) if self.meta is not None else ()
        told = [_tokens(each.input_tokens) for each in units if each is not None]
        return (self.usage.input_token_count if self.usage is not None else 0) or next(filter(None, told), 0)


class LabelWire(msgspec.Struct):
    label: str
    score: float | None = None


class ClassWire(msgspec.Struct):
    """vLLM's: `label` is that of the largest of `probs`."""

    probs: list[float | None]
    index: int | None = None
    label: str | None = None


class ClassesWire(msgspec.Struct):
    """/classify of vLLM, and of Infinity with every label by its name."""

    data: list[ClassWire | list[LabelWire]]
    usage: UsageWire | None = None
