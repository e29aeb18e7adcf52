"""JSON types of chat and legacy completions: OpenAI's fields, and vLLM's where they are supported.

Bounds are those of OpenAI's API reference. Null always means absent. Unknown fields are allowed.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from shoal.surfaces.shared.wire_conversations import MAX_CALLS, MAX_MESSAGES, MAX_TOOLS, Json
from shoal.surfaces.shared.wire_inputs import TokenId
from shoal.surfaces.shared.wire_sampling import SamplingFields

Unused: TypeAlias = Annotated[Json, Meta(description="Accepted; only upstream servers may use it.")]


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: Annotated[bool, Meta(description="Send the usage in a last event with empty `choices`.")] | None = (
        None
    )


class CompletionFields(SamplingFields, kw_only=True):
    """Fields of chat and legacy completions."""

    model: (
        Annotated[
            str,
            Meta(
                description="Name or alias of a served model, or MODEL:ADAPTER for one of its LoRAs. Default: the "
                "default model."
            ),
        ]
        | None
    ) = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, Meta(description="Accepted and ignored.")] | None = None


class ImageUrl(msgspec.Struct, kw_only=True):
    url: str
    detail: str | None = None


class ContentPart(msgspec.Struct, kw_only=True):
    """A `text`, a `refusal` or an `image_url`. Other parts are passed unchanged to OpenAI-compatible upstreams."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrl | str | None = None


class FunctionCall(msgspec.Struct, kw_only=True):
    name: str
    arguments: Annotated[str, Meta(description="JSON, as text.")] = ""


class SentToolCall(msgspec.Struct, kw_only=True):
    """A tool call of an earlier turn, sent back by the client."""

    id: str | None = None
    type: str | None = None
    function: FunctionCall


class ChatMessage(msgspec.Struct, kw_only=True):
    """A message. `reasoning_content` and `reasoning` are two names for the model's reasoning before its answer."""

    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: Annotated[list[SentToolCall], Meta(max_length=MAX_CALLS)] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class FunctionDefinition(msgspec.Struct, kw_only=True):
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(msgspec.Struct, kw_only=True):
    type: Annotated[str, Meta(description="`function`, the only type.")] = "function"
    function: FunctionDefinition | None = None


class FunctionName(msgspec.Struct, kw_only=True):
    name: str


class NamedTool(msgspec.Struct, kw_only=True):
    type: str = "function"
    function: FunctionName | None = None


class ChatRequest(CompletionFields, kw_only=True):
    """A conversation to answer. From `chat_template_kwargs` on the fields are vLLM's."""

    messages: Annotated[
        list[ChatMessage],
        Meta(min_length=1, max_length=MAX_MESSAGES, examples=[[{"role": "user", "content": "What is a shoal?"}]]),
    ]
    max_completion_tokens: (
        Annotated[
            int,
            Meta(ge=-1, le=2**31 - 1, description="Maximum tokens to generate; overrides `max_tokens`."),
        ]
        | None
    ) = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20, description="Requires `logprobs`.")] | None = None
    tools: Annotated[list[ToolDefinition], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[str | NamedTool, Meta(description="`none`, `auto`, `required`, or one tool.")] | None = None
    parallel_tool_calls: bool | None = None
    functions: (
        Annotated[list[FunctionDefinition], Meta(max_length=MAX_TOOLS, description="Former name of `tools`.")] | None
    ) = None
    function_call: Annotated[str | FunctionName, Meta(description="Former name of `tool_choice`.")] | None = None
    reasoning_effort: (
        Annotated[str, Meta(description="For chat templates that support it.", examples=["low"])] | None
    ) = None
    metadata: Unused = msgspec.UNSET
    store: Unused = msgspec.UNSET
    service_tier: Unused = msgspec.UNSET
    safety_identifier: Unused = msgspec.UNSET
    prompt_cache_key: Unused = msgspec.UNSET
    prompt_cache_retention: Unused = msgspec.UNSET
    verbosity: Unused = msgspec.UNSET
    prediction: Unused = msgspec.UNSET
    modalities: Unused = msgspec.UNSET
    audio: Unused = msgspec.UNSET
    web_search_options: Unused = msgspec.UNSET
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: (
        Annotated[bool, Meta(description="Continue the last message instead of starting a new one.")] | None
    ) = None
    add_generation_prompt: bool | None = None
    include_reasoning: Annotated[bool, Meta(description="False omits the model's reasoning.")] | None = None


class CompletionRequest(CompletionFields, kw_only=True):
    """Texts to continue."""

    prompt: Annotated[
        str | list[str | TokenId | list[TokenId]],
        Meta(
            description="A text, a list of texts, one list of token ids, or a list of such lists.",
            examples=["A shoal is"],
        ),
    ]
    echo: Annotated[bool, Meta(description="Return the prompt before the completion.")] | None = None
    best_of: (
        Annotated[
            int,
            Meta(
                ge=0, le=20, description="Generate this many answers and return the `n` likeliest; not with `stream`."
            ),
        ]
        | None
    ) = None
    logprobs: (
        Annotated[int, Meta(ge=0, le=5, description="Number of likeliest tokens to return besides the chosen one.")]
        | None
    ) = None
    suffix: Annotated[str, Meta(description="Rejected: no model here inserts text.")] | None = None


class PromptDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    audio_tokens: int = 0


class CompletionDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: int = 0
    audio_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class CompletionUsage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class Timings(msgspec.Struct, kw_only=True):
    """Timings in llama.cpp's form; the time to the first token counts as prompt time. Times and rates are absent if the
    answer came in one piece."""

    prompt_n: int
    prompt_ms: float | msgspec.UnsetType = msgspec.UNSET
    prompt_per_second: float | msgspec.UnsetType = msgspec.UNSET
    predicted_n: int
    predicted_ms: float | msgspec.UnsetType = msgspec.UNSET
    predicted_per_second: float | msgspec.UnsetType = msgspec.UNSET
    cache_n: int


class CalledFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: str


class CalledTool(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AnswerMessage(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[CalledTool] | msgspec.UnsetType = msgspec.UNSET
    function_call: CalledFunction | msgspec.UnsetType = msgspec.UNSET


class TopLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None


class ContentLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    content: list[ContentLogprob]
    refusal: None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: CompletionUsage
    timings: Timings | msgspec.UnsetType = msgspec.UNSET


class TextLogprobs(msgspec.Struct, kw_only=True):
    """Log probabilities by token; `text_offset` is the number of characters before each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(msgspec.Struct, kw_only=True):
    text: str
    index: int
    logprobs: TextLogprobs | None
    finish_reason: str


class TextCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: CompletionUsage
    timings: Timings | msgspec.UnsetType = msgspec.UNSET
