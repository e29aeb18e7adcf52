"""JSON types of responses of OpenAI's Responses API, and of what is stored of them."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]
Absent: TypeAlias = msgspec.UnsetType


class OutputText(msgspec.Struct, kw_only=True):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(msgspec.Struct, kw_only=True):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class SummaryText(msgspec.Struct, kw_only=True):
    type: Literal["summary_text"] = "summary_text"
    text: str


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    summary: list[SummaryText] = []
    content: list[ReasoningText] = []
    encrypted_content: str | Absent = msgspec.UNSET
    status: ItemStatus = "completed"


class MessageItem(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"] = "assistant"
    content: list[OutputText] = []
    status: ItemStatus = "completed"


class CallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    namespace: str | Absent = msgspec.UNSET
    name: str
    arguments: str
    status: ItemStatus = "completed"


class CustomCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="custom_tool_call"):
    id: str
    call_id: str
    namespace: str | Absent = msgspec.UNSET
    name: str
    input: str
    status: ItemStatus = "completed"


class SearchCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_search_call"):
    """A search for tools that the client runs. `arguments`: an object, or the text that the model wrote for one."""

    id: str
    call_id: str
    execution: Literal["client"] = "client"
    arguments: Any
    status: ItemStatus = "completed"


OutputItem: TypeAlias = ReasoningItem | MessageItem | CallItem | CustomCallItem | SearchCallItem


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
    max_tool_calls: int | Absent = msgspec.UNSET
    metadata: dict[str, Any]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | Absent = msgspec.UNSET
    reasoning: dict[str, Any]
    safety_identifier: str | Absent = msgspec.UNSET
    service_tier: str | Absent = msgspec.UNSET
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: Any
    tools: list[Any]
    top_logprobs: int | Absent = msgspec.UNSET
    top_p: float | None
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None = None
    user: str | None = None


class DeletedResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ItemList(msgspec.Struct, kw_only=True):
    """A page of the items that a response answers, the newest first unless asked otherwise."""

    object: Literal["list"] = "list"
    data: list[Any]
    first_id: str | None
    last_id: str | None
    has_more: bool
