"""JSON types shared by several rerank dialects."""

from __future__ import annotations

from typing import Annotated, Any, Protocol, TypeAlias

import msgspec
from msgspec import Meta

from shoal.http.json.refused import RefusedField

MaybeModel: TypeAlias = (
    Annotated[
        str,
        Meta(
            description="Name or alias of a served model. Default: the first reranker, else the first embedding model, "
            "whose vectors are compared."
        ),
    ]
    | None
)
MaybeTop: TypeAlias = (
    Annotated[int, Meta(ge=0, description="Maximum results, best first. Default, 0 or a number above the count: all.")]
    | None
)
MaybeDocumentTokens: TypeAlias = (
    Annotated[int, Meta(ge=0, description="Truncate each document to this many tokens; 0: no limit.")] | None
)


MaybeInstruction: TypeAlias = (
    Annotated[
        str,
        Meta(
            description="What makes a document relevant, in place of the model's default. Only of rerankers made from "
            "language models."
        ),
    ]
    | None
)
MaybeInstruct: TypeAlias = Annotated[str, Meta(description="Same as `instruction`. (SGLang)")] | None
MaybeTemplateFields: TypeAlias = (
    Annotated[dict[str, Any], Meta(description="Only `instruction` or `instruct`, with the same meaning. (vLLM)")]
    | None
)


class Instructed(Protocol):
    """A request with an instruction, under the names of several servers."""

    instruction: MaybeInstruction
    instruct: MaybeInstruct
    chat_template_kwargs: MaybeTemplateFields


class RankText(msgspec.Struct, kw_only=True):
    """A text in an object. `image` is always refused."""

    text: str
    image: RefusedField = msgspec.UNSET


class ApiVersion(msgspec.Struct, kw_only=True):
    version: str


class BilledUnits(msgspec.Struct, kw_only=True, omit_defaults=True):
    search_units: Annotated[int | msgspec.UnsetType, Meta(description="One per hundred documents.")] = msgspec.UNSET
    input_tokens: int | msgspec.UnsetType = msgspec.UNSET
    images: Annotated[int | msgspec.UnsetType, Meta(description="Number of embedded images.")] = msgspec.UNSET


class CohereTokens(msgspec.Struct, kw_only=True):
    input_tokens: int


class CohereMeta(msgspec.Struct, kw_only=True):
    """Metadata that Cohere's clients read; nothing is billed."""

    api_version: ApiVersion
    billed_units: BilledUnits
    tokens: CohereTokens
