"""JSON types of requests to OpenAI's Responses API.

What depends on an item's type is decoded when it is translated: a server that speaks this API gets the body as it came.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from shoal.surfaces.openai.wire_chat import Unused
from shoal.surfaces.shared.wire_conversations import MAX_MESSAGES, MAX_TOOLS, Json, Object
from shoal.surfaces.shared.wire_sampling import Fraction, MaxTokens

Ignored = Annotated[Json, Meta(description="Accepted; only servers that speak this API get it.")]


class ContentPart(msgspec.Struct, kw_only=True):
    """An `input_text`, `output_text`, `refusal`, `input_image`, `input_file` with its data, or text of reasoning."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Json = msgspec.UNSET
    filename: str | None = None
    file_data: str | None = None


class InputItem(msgspec.Struct, kw_only=True):
    """A `message` (the type may be omitted), a `function_call`, `custom_tool_call` or `tool_search_call`, the output of
    one, a `reasoning` item of an earlier answer, or an `item_reference`."""

    type: str | None = None
    id: str | None = None
    role: str | None = None
    content: Json = msgspec.UNSET
    summary: Json = msgspec.UNSET
    encrypted_content: str | None = None
    call_id: str | None = None
    namespace: str | None = None
    name: str | None = None
    arguments: Json = msgspec.UNSET
    input: str | None = None
    output: Json = msgspec.UNSET
    tools: Json = msgspec.UNSET


class ResponseTool(msgspec.Struct, kw_only=True):
    """A `function`, a `custom` tool, a `namespace` of such tools, or a `tool_search` that the client runs. Other tools
    are those that a server runs itself: only servers that speak this API get them."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: Json = msgspec.UNSET
    execution: str | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)] | None = None


class CustomFormat(msgspec.Struct, kw_only=True):
    """The form of a custom tool's input: any `text`, or that of a `grammar`."""

    type: str = "text"
    syntax: str | None = None
    definition: str | None = None


class ResponseToolChoice(msgspec.Struct, kw_only=True):
    """One tool by its type and name, or `allowed_tools`."""

    type: str
    namespace: str | None = None
    name: str | None = None
    mode: str | None = None
    tools: Annotated[list[ResponseToolChoice], Meta(max_length=MAX_TOOLS)] | None = None


class TextFormat(msgspec.Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: Object = msgspec.UNSET
    strict: bool | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
    effort: str | None = None
    summary: Annotated[str, Meta(description="Any value: the reasoning is shown as its summary, too.")] | None = None
    generate_summary: Annotated[str, Meta(description="Former name of `summary`.")] | None = None

    def get_summary(self) -> str | None:
        return self.summary or self.generate_summary


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """A conversation to answer: all of it, or what is new since a stored response."""

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
    tool_choice: str | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[int, Meta(description="Echoed: it limits tools that a server runs itself.")] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    stream: bool | None = None
    store: (
        Annotated[bool, Meta(description="False: do not keep the response for later requests. Default: true.")] | None
    ) = None
    previous_response_id: (
        Annotated[str, Meta(description="Id of a stored response, whose conversation comes before `input`.")] | None
    ) = None
    background: Annotated[bool, Meta(description="Rejected if true.")] | None = None
    conversation: Annotated[Json, Meta(description="Only for servers that speak this API.")] = msgspec.UNSET
    prompt: Annotated[Json, Meta(description="Only for servers that speak this API.")] = msgspec.UNSET
    truncation: (
        Annotated[
            Literal["auto", "disabled"],
            Meta(description="`auto`: leave out the oldest turns of a conversation that is too long."),
        ]
        | None
    ) = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Unused = msgspec.UNSET
    stream_options: Ignored = msgspec.UNSET
    client_metadata: Annotated[
        Json, Meta(description="What clients tell their own server about themselves; other servers do not get it.")
    ] = msgspec.UNSET
