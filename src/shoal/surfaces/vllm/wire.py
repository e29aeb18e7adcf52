"""JSON types of vLLM's /score, /classify and /pooling."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from shoal.surfaces.shared.wire_inputs import TokenId
from shoal.surfaces.shared.wire_ranking import MaybeInstruct, MaybeInstruction, MaybeTemplateFields

MaybeModel: TypeAlias = (
    Annotated[str, Meta(description="Name or alias of a served model. Default: the first one that supports the task.")]
    | None
)
Texts: TypeAlias = str | list[str]
MaybeTexts: TypeAlias = Annotated[Texts, Meta(examples=["What is a shoal?", ["first", "second"]])] | None


class PoolingOptions(msgspec.Struct, kw_only=True):
    model: MaybeModel = None
    truncate_prompt_tokens: (
        Annotated[int, Meta(ge=-1, description="Truncate to this many tokens: -1, or at least the model's maximum.")]
        | None
    ) = None
    truncation_side: (
        Annotated[Literal["left", "right"], Meta(description="End to truncate. Default: right.")] | None
    ) = None
    use_activation: (
        Annotated[bool, Meta(description="False returns raw model outputs, without activation or normalization.")]
        | None
    ) = None
    user: Annotated[str, Meta(description="Accepted and ignored.")] | None = None
    priority: Annotated[int, Meta(description="Accepted and ignored.")] | None = None


class ScoreRequest(PoolingOptions, kw_only=True):
    """Two sides, under any of these pairs of names: one text against many, or two lists of equal length."""

    text_1: MaybeTexts = None
    text_2: MaybeTexts = None
    data_1: MaybeTexts = None
    data_2: MaybeTexts = None
    queries: MaybeTexts = None
    documents: MaybeTexts = None
    items: MaybeTexts = None
    instruction: MaybeInstruction = None
    instruct: MaybeInstruct = None
    chat_template_kwargs: MaybeTemplateFields = None


class ScoreUsage(msgspec.Struct, kw_only=True):
    prompt_tokens: Annotated[int, Meta(description="Tokens that the model processed, special tokens included.")]
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
    data: Annotated[list[Score], Meta(description="One entry per pair, in the same order.")]
    usage: ScoreUsage


class ClassifyRequest(PoolingOptions, kw_only=True):
    input: Annotated[
        str | list[str | list[str]],
        Meta(
            description="A text, or a list of texts and pairs of texts; the two texts of a pair are read together.",
            examples=["I like you.", ["I like you.", ["A premise.", "A hypothesis."]]],
        ),
    ]
    raw_scores: (
        Annotated[
            bool,
            Meta(
                description="The opposite of `use_activation`. If present, the response is Infinity's: each entry of "
                "`data` lists labels with scores. (Infinity)"
            ),
        ]
        | None
    ) = None


class Classified(msgspec.Struct, kw_only=True):
    index: int
    label: Annotated[str | None, Meta(description="The likeliest label.")]
    probs: Annotated[list[float], Meta(description="In the order of the model's labels.")]
    num_classes: int


class ClassifyResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: Annotated[list[Classified], Meta(description="One entry per input, in the same order.")]
    usage: ScoreUsage


class LabelScore(msgspec.Struct, kw_only=True):
    score: float
    label: str


class InfinityClassifyResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["classify"] = "classify"
    created: int
    model: str
    data: Annotated[list[list[LabelScore]], Meta(description="The labels of each input, likeliest first.")]
    usage: ScoreUsage


class PoolingRequest(PoolingOptions, kw_only=True):
    input: Annotated[
        str | list[str | TokenId | list[TokenId]],
        Meta(description="Same as for /v1/embeddings.", examples=[["first text", "second text"]]),
    ]
    task: (
        Annotated[
            Literal["embed", "token_embed", "classify"],
            Meta(
                description="One vector per input; one vector per token (for a late-interaction model, those that "
                "it compares); label scores. Default: embed; for a classifier, classify."
            ),
        ]
        | None
    ) = None
    encoding_format: (
        Annotated[Literal["float", "base64"], Meta(description="base64 encodes little-endian float32.")] | None
    ) = None
    dimensions: Annotated[int, Meta(ge=1, description="Truncate vectors to this length; with `embed`.")] | None = None


class Pooled(msgspec.Struct, kw_only=True):
    index: int
    object: Literal["pooling"] = "pooling"
    data: Annotated[Any, Meta(description="Numbers, a list of numbers per token, or base64.")]


class PoolingResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: Annotated[list[Pooled], Meta(description="One entry per input, in the same order.")]
    usage: ScoreUsage
