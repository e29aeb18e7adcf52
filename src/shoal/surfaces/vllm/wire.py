"""JSON types of vLLM's /score, /classify and /pooling."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from shoal.surfaces.shared.wire_inputs import TokenId

MaybeModel: TypeAlias = (
    Annotated[str, Meta(description="A served model, by name or alias. Default: the first one that can do it.")] | None
)
Texts: TypeAlias = str | list[str]
MaybeTexts: TypeAlias = Annotated[Texts, Meta(examples=["What is a shoal?", ["first", "second"]])] | None


class PoolingOptions(msgspec.Struct, kw_only=True):
    model: MaybeModel = None
    truncate_prompt_tokens: (
        Annotated[int, Meta(ge=-1, description="-1, or no less than the model reads: cut there.")] | None
    ) = None
    truncation_side: Annotated[Literal["left", "right"], Meta(description="Default: right.")] | None = None
    use_activation: (
        Annotated[bool, Meta(description="False: as the model gives it, without an activation or scaling.")] | None
    ) = None
    user: Annotated[str, Meta(description="Accepted, and not used.")] | None = None
    priority: Annotated[int, Meta(description="Accepted, and not used.")] | None = None


class ScoreRequest(PoolingOptions, kw_only=True):
    """Two sides, under any of these pairs of names: one text against many, or two lists of equal length."""

    text_1: MaybeTexts = None
    text_2: MaybeTexts = None
    data_1: MaybeTexts = None
    data_2: MaybeTexts = None
    queries: MaybeTexts = None
    documents: MaybeTexts = None
    items: MaybeTexts = None


class ScoreUsage(msgspec.Struct, kw_only=True):
    prompt_tokens: Annotated[int, Meta(description="Tokens that the model read, special ones included.")]
    total_tokens: int
    completion_tokens: Literal[0] = 0
    prompt_tokens_details: None = None


class Score(msgspec.Struct, kw_only=True):
    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: Annotated[list[Score], Meta(description="One entry a pair, in their order.")]
    usage: ScoreUsage


class ClassifyRequest(PoolingOptions, kw_only=True):
    input: Annotated[
        str | list[str | list[str]],
        Meta(
            description="A text, or a list of texts and of pairs of texts, which are read together.",
            examples=["I like you.", ["I like you.", ["A premise.", "A hypothesis."]]],
        ),
    ]
    raw_scores: (
        Annotated[
            bool,
            Meta(
                description="The opposite of `use_activation`. Whatever its value, the reply is Infinity's: each entry "
                "of `data` lists labels with scores. (Infinity)"
            ),
        ]
        | None
    ) = None


class Classified(msgspec.Struct, kw_only=True):
    index: int
    label: Annotated[str | None, Meta(description="The likeliest.")]
    probs: Annotated[list[float], Meta(description="In the order of the model's labels.")]
    num_classes: int


class ClassifyResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: Annotated[list[Classified], Meta(description="One entry an input, in their order.")]
    usage: ScoreUsage


class LabelScore(msgspec.Struct, kw_only=True):
    score: float
    label: str


class InfinityClassifyResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["classify"] = "classify"
    created: int
    model: str
    data: Annotated[list[list[LabelScore]], Meta(description="The labels of each input, the likeliest first.")]
    usage: ScoreUsage


class PoolingRequest(PoolingOptions, kw_only=True):
    input: Annotated[
        str | list[str | TokenId | list[TokenId]],
        Meta(description="As for /v1/embeddings.", examples=[["first text", "second text"]]),
    ]
    task: (
        Annotated[
            Literal["embed", "token_embed", "classify"],
            Meta(
                description="A vector an input; one for each token (of a model of late interaction those that it "
                "compares); the scores of its labels. Default: embed, of a classifier classify."
            ),
        ]
        | None
    ) = None
    encoding_format: (
        Annotated[Literal["float", "base64"], Meta(description="base64 is of little-endian float32.")] | None
    ) = None
    dimensions: Annotated[int, Meta(ge=1, description="Cut vectors to this length; with `embed`.")] | None = None


class Pooled(msgspec.Struct, kw_only=True):
    index: int
    object: Literal["pooling"] = "pooling"
    data: Annotated[Any, Meta(description="Numbers, a list of numbers a token, or base64.")]


class PoolingResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: Annotated[list[Pooled], Meta(description="One entry an input, in their order.")]
    usage: ScoreUsage
