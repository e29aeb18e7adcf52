"""JSON types shared by several rerank dialects."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from shoal.http.json.refused import RefusedField

MaybeModel: TypeAlias = (
    Annotated[
        str,
        Meta(
            description="A served model, by name or alias. Default: the first one that ranks, else the first one that "
            "embeds, whose vectors are compared."
        ),
    ]
    | None
)
MaybeTop: TypeAlias = (
    Annotated[int, Meta(ge=0, description="How many results, the best ones. Default, 0 and more than there are: all.")]
    | None
)
MaybeDocumentTokens: TypeAlias = (
    Annotated[int, Meta(ge=0, description="Cut each document after so many tokens; 0: no such limit.")] | None
)


class RankText(msgspec.Struct, kw_only=True):
    """A text in an object. `image` is always refused."""

    text: str
    image: RefusedField = msgspec.UNSET


class ApiVersion(msgspec.Struct, kw_only=True):
    version: str


class BilledUnits(msgspec.Struct, kw_only=True, omit_defaults=True):
    search_units: Annotated[int | msgspec.UnsetType, Meta(description="One for each hundred documents.")] = (
        msgspec.UNSET
    )
    input_tokens: int | msgspec.UnsetType = msgspec.UNSET
    images: Annotated[int | msgspec.UnsetType, Meta(description="Pictures that were embedded.")] = msgspec.UNSET


class CohereTokens(msgspec.Struct, kw_only=True):
    input_tokens: int


class CohereMeta(msgspec.Struct, kw_only=True):
    """Metadata that Cohere's clients read; nothing is billed."""

    api_version: ApiVersion
    billed_units: BilledUnits
    tokens: CohereTokens
