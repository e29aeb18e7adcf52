"""JSON types of Anthropic's Messages API, as far as a server that stores nothing and runs no tools can support them.

Source: Anthropic's API reference, version 2023-06-01. Null always means absent.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from shoal.surfaces.shared.wire_conversations import MAX_MESSAGES, MAX_TOOLS, Json, Object, Stop
from shoal.surfaces.shared.wire_sampling import Fraction

Unused: TypeAlias = Annotated[Json, Meta(description="Accepted and ignored.")]
Refused: TypeAlias = Annotated[Json, Meta(description="Rejected unless null or empty.")]


class Source(msgspec.Struct, kw_only=True):
    """Where an image or a document is: `base64`, `url`, or, for a document, `text` or `content`."""

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None
    content: str | list[Block] | None = None


class Block(msgspec.Struct, kw_only=True):
    """A content block: `text`, `image`, `document`, `search_result`, `tool_use`, `tool_result`, `thinking`, or one of
    Anthropic's own tools, which is left out."""

    type: str
    text: str | None = None
    source: Source | str | None = None
    title: str | None = None
    id: str | None = None
    name: str | None = None
    input: Object = msgspec.UNSET
    tool_use_id: str | None = None
    content: str | list[Block] | dict[str, Any] | None = None
    is_error: bool | None = None
    thinking: str | None = None


Content: TypeAlias = str | list[Block]


class InputMessage(msgspec.Struct, kw_only=True):
    """A turn of the `user`, of the `assistant` or, later than the others, of the `system`."""

    role: str
    content: Content


class ToolDefinition(msgspec.Struct, kw_only=True):
    """A tool that the client runs: `type` absent or `custom`. Anthropic's own tools are left out."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """Whether the model thinks, and whether the answer shows it. Models have no budgets: `budget_tokens` is ignored."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    type: Literal["json_schema"]
    schema: Object = msgspec.UNSET


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class MessagesRequest(msgspec.Struct, kw_only=True):
    """A conversation. The fields from `context_management` on concern Anthropic's own service."""

    model: Annotated[str, Meta(description="Name or alias of a served model.", examples=["org/model"])]
    messages: Annotated[list[InputMessage], Meta(max_length=MAX_MESSAGES)]
    system: Annotated[Content, Meta(description="A system message, placed before all others.")] | None = None
    max_tokens: (
        Annotated[int, Meta(ge=1, le=2**31 - 1, description="Maximum tokens to generate. Default: the model's.")] | None
    ) = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Fraction | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1, description="0 and -1: all tokens.")] | None = None
    stop_sequences: Annotated[list[Stop], Meta(max_length=64)] | None = None
    stream: bool | None = None
    tools: Annotated[list[ToolDefinition], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: Annotated[OutputFormat, Meta(description="Same as `output_config.format`.")] | None = None
    metadata: Annotated[
        Json, Meta(description="Requests with an equal value go to one replica, if the model has several.")
    ] = msgspec.UNSET
    context_management: Unused = msgspec.UNSET
    cache_control: Unused = msgspec.UNSET
    service_tier: Unused = msgspec.UNSET
    inference_geo: Unused = msgspec.UNSET
    speed: Unused = msgspec.UNSET
    betas: Unused = msgspec.UNSET
    diagnostics: Unused = msgspec.UNSET
    fallbacks: Unused = msgspec.UNSET
    fallback_credit_token: Unused = msgspec.UNSET
    billing_policy: Unused = msgspec.UNSET
    user_profile_id: Unused = msgspec.UNSET
    workspace_id: Unused = msgspec.UNSET
    thread: Refused = msgspec.UNSET
    compaction: Refused = msgspec.UNSET
    container: Refused = msgspec.UNSET
    mcp_servers: Refused = msgspec.UNSET


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    """What the model thought. Nothing verifies the `signature`: it is the id of the message."""

    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: Any


AnswerBlock: TypeAlias = TextBlock | ThinkingBlock | ToolUseBlock
StopReason: TypeAlias = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal"]


class OutputDetails(msgspec.Struct, kw_only=True):
    thinking_tokens: int = 0


class MessageUsage(msgspec.Struct, kw_only=True):
    """Token counts. `input_tokens` does not include those read from a cache."""

    input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int = 0
    output_tokens_details: OutputDetails = msgspec.field(default_factory=OutputDetails)


class Answer(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock] = []
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage = msgspec.field(default_factory=MessageUsage)


class TokenCount(msgspec.Struct, kw_only=True):
    input_tokens: Annotated[
        int, Meta(description="As the model's tokenizer counts; an estimate where that is not known.")
    ]


class ErrorDetail(msgspec.Struct, kw_only=True):
    type: str
    message: str


class AnthropicError(msgspec.Struct, kw_only=True, tag_field="type", tag="error"):
    error: ErrorDetail
    request_id: str | None = None
