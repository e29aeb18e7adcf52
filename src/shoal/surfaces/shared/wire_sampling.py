"""JSON types of the fields that choose tokens: OpenAI's, and vLLM's where they are supported.

Bounds are those of OpenAI's API reference. Null always means absent.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from shoal.surfaces.shared.wire_conversations import Json, Object, Stop
from shoal.surfaces.shared.wire_inputs import TokenId

INT64 = 2**63
MAX_CHOICES = 128

Schema: TypeAlias = Annotated[
    Json,
    Meta(
        description="A JSON schema, as an object or a string.",
        extra_json_schema={"type": ["object", "string", "null"]},
    ),
]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
Fraction: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
MaxTokens: TypeAlias = Annotated[
    int, Meta(ge=-1, le=2**31 - 1, description="Maximum tokens to generate; -1 sets no limit.")
]


class ResponseFormat(msgspec.Struct, kw_only=True):
    """The format of the answer. `json_schema` is `{"name", "schema", "strict", "description"}`; with `structural_tag`
    all fields go to the model."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: Object = msgspec.UNSET
    structures: Json = msgspec.UNSET
    triggers: Json = msgspec.UNSET
    format: Json = msgspec.UNSET


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """vLLM's constraints on an answer. Send one of the fields."""

    json: Schema = msgspec.UNSET
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1, max_length=4096)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """Fields that choose tokens. From `top_k` on they are vLLM's."""

    max_tokens: MaxTokens | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Fraction | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES, description="Number of answers per prompt.")] | None = None
    seed: Annotated[int, Meta(ge=-INT64, le=INT64 - 1)] | None = None
    stop: (
        Annotated[
            Stop | Annotated[list[Stop], Meta(max_length=4)],
            Meta(description="Texts that end the answer; they are not part of it."),
        ]
        | None
    ) = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[
        Json,
        Meta(
            description="Maps token ids, as strings, to a bias added to their logits, from -100 to 100.",
            extra_json_schema={"type": ["object", "null"], "additionalProperties": {"type": "number"}},
        ),
    ] = msgspec.UNSET
    response_format: ResponseFormat | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1, description="0 and -1: all tokens.")] | None = None
    min_p: Fraction | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    length_penalty: float | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=4096)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    skip_special_tokens: bool | None = None
    bad_words: Annotated[list[str], Meta(max_length=4096)] | None = None
    guided_json: Schema = msgspec.UNSET
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Meta(min_length=1, max_length=4096)] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
