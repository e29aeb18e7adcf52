"""JSON types of OpenAI's responses, as far as a server that stores nothing can support them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from shoal.surfaces.openai.wire_chat import ContentPart, FunctionDefinition, Unused
from shoal.surfaces.shared.wire_conversations import MAX_MESSAGES, MAX_TOOLS, Json, Object
from shoal.surfaces.shared.wire_sampling import Fraction, MaxTokens


class InputItem(msgspec.Struct, kw_only=True):
    """A `message` (the type may be omitted), a `function_call`, a `function_call_output`, or a `reasoning` item of an
    earlier answer."""

    type: str | None = None
    role: str | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ContentPart] | None = None


class TextFormat(msgspec.Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: Object = msgspec.UNSET
    strict: bool | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None


class ResponseTool(msgspec.Struct, kw_only=True):
    """A function. Other tools are not supported."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def to_definition(self) -> FunctionDefinition:
        return FunctionDefinition(
            name=self.name or "", description=self.description, parameters=self.parameters, strict=self.strict
        )


class ResponseToolName(msgspec.Struct, kw_only=True):
    type: str
    name: str | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
    effort: str | None = None
    summary: Json = msgspec.UNSET


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """Nothing is stored: `store` is accepted and ignored, and references to stored objects are refused."""

    input: Annotated[
        str | Annotated[list[InputItem], Meta(max_length=MAX_MESSAGES)],
        Meta(description="A text, or a conversation.", examples=["What is a shoal?"]),
    ]
    model: Annotated[str, Meta(description="Same as in chat completions.")] | None = None
    instructions: Annotated[str, Meta(description="A system message, placed before all others.")] | None = None
    max_output_tokens: MaxTokens | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Fraction | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    include: Annotated[list[str], Meta(max_length=64)] | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | ResponseToolName | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    stream: bool | None = None
    store: bool | None = None
    previous_response_id: Annotated[str, Meta(description="Rejected: this server stores nothing.")] | None = None
    background: Annotated[bool, Meta(description="Rejected if true.")] | None = None
    conversation: Annotated[Json, Meta(description="Rejected: this server stores nothing.")] = msgspec.UNSET
    prompt: Annotated[Json, Meta(description="Rejected: this server stores nothing.")] = msgspec.UNSET
    truncation: Literal["auto", "disabled"] | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    stream_options: Unused = msgspec.UNSET
    max_tool_calls: Unused = msgspec.UNSET
    service_tier: Unused = msgspec.UNSET
    safety_identifier: Unused = msgspec.UNSET
    prompt_cache_key: Unused = msgspec.UNSET
    prompt_cache_retention: Unused = msgspec.UNSET


class OutputText(msgspec.Struct, kw_only=True):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(msgspec.Struct, kw_only=True):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    summary: list[Any] = []
    content: list[ReasoningText] = []
    status: ItemStatus = "completed"


class MessageItem(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"] = "assistant"
    content: list[OutputText] = []
    status: ItemStatus = "completed"


class CallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus = "completed"


OutputItem: TypeAlias = ReasoningItem | MessageItem | CallItem


class InputDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseFailure(msgspec.Struct, kw_only=True):
    code: str
    message: str


class Incomplete(msgspec.Struct, kw_only=True):
    reason: Literal["max_output_tokens", "content_filter"]


class Response(msgspec.Struct, kw_only=True):
    """The response. It repeats the request's fields, as OpenAI's clients expect."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False] = False
    error: ResponseFailure | None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: dict[str, Any]
    store: Literal[False] = False
    temperature: float | None
    text: dict[str, Any]
    tool_choice: Any
    tools: list[Any]
    top_p: float | None
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None
